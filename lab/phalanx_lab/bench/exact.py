"""What exact mode costs over fast mode: CPU time and time of a step of the same small model, step by step in turn, on the same ranks.

Both runs are there at once, and each round makes one step of either, in an order that changes from round to round: load of the machine
falls on both alike. A rank's CPU time is its own (`time.process_time`), so that waiting for others does not count; the step's is that of all ranks.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from phalanx.core.arguments import read_words
from phalanx.core.config import ModelConfig, OptimConfig, ResilienceConfig, RouterConfig, TrainConfig
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.samples import num_rounds, owned
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import resolve_model
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.processes.launch import StopRequest, run_local
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world
from phalanx.train.assembly import assemble
from phalanx.train.step.exact import exact_sums
from phalanx.train.step.transaction import StepParts, train_step

MODES = ("fast", "exact")


@dataclass(frozen=True, kw_only=True)
class ExactCase:
    """What is measured."""

    preset: str = "laptop"
    ranks: int = 2
    ep: int = 2
    micro_batch: int = 2
    samples: int = 4
    seq_len: int = 256
    dtype: str = "bfloat16"
    rounds: int = 10
    bar: float = 1.6
    """Exit status 1 where exact mode takes more processor time than this many times that of fast mode."""


@dataclass(frozen=True, kw_only=True)
class ExactArgs:
    """Cost of exact mode over fast mode."""

    case: Annotated[ExactCase, tyro.conf.arg(name="")] = field(default_factory=ExactCase)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench exact ARGS...`; 1 where the bar is missed."""
    options = read_words(ExactArgs, args, prog="phalanx bench exact", description=__doc__)
    raise_if(_problems(options.case), ConfigError, subject="the options")
    check_writable(options.json)
    report = measure(options.case)
    print(describe(report))
    if options.json is not None:
        write_json(options.json, report)
    return 0 if report["ratio_cpu"] <= options.case.bar else 1


def _problems(case: ExactCase) -> list[Problem]:
    problems = [
        Problem(where=f"--{name.replace('_', '-')}", value=value, rule="must be at least 1", hint="use 1")
        for name, value in vars(case).items()
        if isinstance(value, int) and value < 1
    ]
    if not problems and case.ranks % case.ep:
        rule = f"must divide --ranks = {case.ranks}"
        problems.append(Problem(where="--ep", value=case.ep, rule=rule, hint="use 1"))
    if case.dtype not in ("float32", "bfloat16"):
        rule = "must be float32 or bfloat16"
        problems.append(Problem(where="--dtype", value=case.dtype, rule=rule, hint="use bfloat16"))
    return problems


def measure(case: ExactCase) -> dict[str, Any]:
    """Medians over the rounds; the first round of each mode is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        code = run_local(lambda info, stop: _rank(case, info, stop, path), ranks=case.ranks, threads=1)
        if code:
            raise SystemExit(code)
        found = json.loads(path.read_text())
    medians = {f"{mode}_{kind}": statistics.median(found[mode][kind]) for mode in MODES for kind in ("cpu_s", "step_s")}
    ratios = {
        "ratio_cpu": medians["exact_cpu_s"] / medians["fast_cpu_s"],
        "ratio_step": medians["exact_step_s"] / medians["fast_step_s"],
    }
    return {**ratios, "bar": case.bar, **medians, "case": vars(case), "samples": found}


def describe(report: dict[str, Any]) -> str:
    """Two lines for a person."""
    case = report["case"]
    shape = f"{case['preset']}, {case['ranks']} ranks, ep {case['ep']}, {case['samples']} x {case['micro_batch']} sequences of {case['seq_len']}"
    return (
        f"exact over fast mode ({shape}, {case['rounds']} rounds in turn)\n"
        f"  CPU time of a step, all ranks   {report['fast_cpu_s']:.3f} s -> {report['exact_cpu_s']:.3f} s: {report['ratio_cpu']:.2f}x (bar {report['bar']:g}x)\n"
        f"  time of a step                  {report['fast_step_s']:.3f} s -> {report['exact_step_s']:.3f} s: {report['ratio_step']:.2f}x (means nothing on a busy machine)"
    )


def _rank(case: ExactCase, info: WorldInfo, stop: StopRequest, path: Path) -> int:
    init_world(info, device="cpu", timeout_s=600.0)
    cache = GroupCache(timeout_s=600.0)
    times: dict[str, dict[str, list[float]]] = {mode: {"cpu_s": [], "step_s": []} for mode in MODES}
    folding = make_folding(world=case.ranks, ep=case.ep)
    parts = {mode: _parts(case, mode, folding, info.rank, cache) for mode in MODES}
    for number in range(case.rounds + 1):
        for mode in MODES if number % 2 else MODES[::-1]:
            cpu_s, step_s = _step(case, parts[mode], number)
            if number:
                times[mode]["cpu_s"].append(cpu_s)
                times[mode]["step_s"].append(step_s)
    if info.rank == 0:
        path.write_text(json.dumps(times))
    close_world()
    return 0


def _step(case: ExactCase, parts: StepParts, number: int) -> tuple[float, float]:
    """CPU seconds of all ranks and seconds of a step."""
    batches, world = _batches(case, parts, number), parts.groups.axis("world")
    parts.comms.barrier(world)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    train_step(parts, batches, step=number, lr=1e-3)
    cpu_s, step_s = time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    told = parts.comms.gather_objects((cpu_s, step_s), world)
    return sum(cpu for cpu, _ in told), max(seconds for _, seconds in told)


def _parts(case: ExactCase, mode: str, folding: Folding, rank: int, cache: GroupCache) -> StepParts:
    spec = resolve_model(ModelConfig(preset=case.preset), RouterConfig(), tokenizer_vocab=8192)
    train = TrainConfig(
        micro_batch=case.micro_batch, global_batch=case.micro_batch * case.samples, seq_len=case.seq_len
    )
    ctx = ModelContext(
        spec=spec,
        dispatch=DispatchSpec(),
        placement=plain_placement(max(1, spec.num_experts), folding),
        groups=build_groups(folding, rank=rank, cache=cache),
        comms=Collectives(timeout_s=600.0),
        dtype=getattr(torch, case.dtype),
        device=torch.device("cpu"),
        lanes=Lanes(1, rows=compiled_rows()),
    )
    return assemble(
        ctx,
        optim=OptimConfig(),
        num_microbatches=num_rounds(case.samples, owners=folding.replicas),
        samples=case.samples,
        exact=exact_sums(
            ResilienceConfig(mode="exact" if mode == "exact" else "fast"), train, folding, spec=spec, rank=rank
        ),
    )


def _batches(case: ExactCase, parts: StepParts, number: int) -> list[TokenBatch]:
    """This rank's micro-batches of random tokens; `samples` is a multiple of the ranks."""
    folding = parts.groups.folding
    own = owned(case.samples, owners=folding.replicas, owner=folding.replica_of(parts.groups.rank))
    return [_batch(case, number, sample) for sample in own]


def _batch(case: ExactCase, number: int, sample: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(1000 * number + sample)
    shape = (case.micro_batch, case.seq_len + 1)
    tokens = torch.randint(0, 8192, shape, generator=generator)
    positions = torch.arange(case.seq_len).expand(case.micro_batch, -1)
    return TokenBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((case.seq_len,),) * case.micro_batch
    )

"""Training steps with and without overlap inside their mixture-of-experts layers: `phalanx bench step --json F`, on the testbed.

Two emulated hosts with one rank of one thread each train a small decoder, experts divided among both. The link gets the rate at which communication
is `--share` of a serial step: 47 % as COMET's authors found it on 8 H800 (arXiv 2502.19811, figure 1). Then the ranks take turns of one step
with models that began with the same weights and see the same batches:

    serial      the layer as it is without overlap (recipe: `dispatch.overlap = "serial"`)
    --overlap   the setting in question
    --same      a setting whose losses must be those of `--overlap` to the bit: the same tiles in serial order
    --pairs     also `--overlap` with the forward pass of one micro-batch beside the backward pass of another (recipe: `pipeline.pair_passes`);
                the same bits again. Needs `--micro-batches` of 2 or more, into which the sequences of a rank are divided

`speedup_vs_serial` is the quotient of the medians. The slowest rank's seconds count. Exit status 1 where losses differ that must not.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_rate
from phalanx.plan.mapping.folding import make_folding
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups, with_second_groups
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.runtime.processes.world import close_world
from phalanx_lab.bench.ours import OurRun
from phalanx_lab.bench.rank_jobs import join_ranks, request, run_ranks, tell
from phalanx_lab.bench.workload import WorkloadShape
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.links import COARSE

SHAPE = WorkloadShape(
    layers=4, hidden=256, heads=4, kv_heads=4, experts=8, top_k=2, ffn=512, vocab=1024, batch=8, seq_len=256
)
"""Gradients of everything that is not an expert are an eighth of what the layers send."""
SERIAL, PAIRED = "serial", "pairs"
LONGEST_S = 900.0
PATIENCE_S = 300.0
LOSS_TOLERANCE = 1e-3
"""Tolerance of the last loss, against the serial layer's: fp32 rounding that training has carried on."""


@dataclass(frozen=True, kw_only=True)
class StepArgs:
    """Steps with and without overlap inside their layers, on two emulated hosts."""

    overlap: str = "auto"
    """Overlap as `dispatch.overlap` of a recipe."""
    same: str = "tiles"
    """Setting whose losses must be the same bits."""
    share: float = 0.47
    """Communication in a serial step."""
    steps: int = 16
    """Steps of each setting."""
    layers: int = SHAPE.layers
    batch: int = SHAPE.batch
    """Sequences of 256 tokens of each rank."""
    micro_batches: int = 1
    """Micro-batches of a step, each of `batch / micro_batches` sequences."""
    pairs: bool = False
    """Also with passes beside one another."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench step ARGS...` (or, with `--rank-of FILE`, one rank of it)."""
    if args[:1] == ["--rank-of"]:
        return _rank(Path(args[1]))
    options = read_words(StepArgs, args, prog="phalanx bench step", description=__doc__)
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json)
    result = measure(options)
    alike = [options.overlap, options.same, *(["pairs of passes"] if options.pairs else [])]
    print(
        f"step {result['step_s'] * 1e3:.0f} ms by {options.overlap}, {result['serial_step_s'] * 1e3:.0f} ms serial: "
        f"{result['speedup_vs_serial']:.2f} times faster; link {format_rate(result['link_bit_per_s'], 'bit')}, communication "
        f"{result['communication_share']:.0%} of a serial step; losses of {' and '.join(alike)} "
        f"{'are the same bits' if result['losses_equal'] else 'DIFFER'}"
    )
    if options.pairs:
        print(
            f"with pairs of passes {result['paired_step_s'] * 1e3:.0f} ms: {result['paired_speedup']:.2f} times faster than serial"
        )
    write_json(options.json, result)
    return 0 if result["losses_equal"] and result["losses_close"] else 1


def _problems(options: StepArgs) -> list[Problem]:
    problems = too_small(options, steps=2, layers=1, batch=1, micro_batches=2 if options.pairs else 1)
    if options.micro_batches > 0 and options.batch % options.micro_batches:
        rule = f"must be a multiple of the {options.micro_batches} micro-batches"
        hint = f"use {options.batch - options.batch % options.micro_batches or options.micro_batches}"
        problems.append(Problem(where="--batch", value=options.batch, rule=rule, hint=hint))
    if not 0 < options.share < 1:
        rule = "must lie between 0 and 1"
        problems.append(Problem(where="--share", value=options.share, rule=rule, hint="use 0.47"))
    return problems


def measure(options: StepArgs) -> dict[str, Any]:
    """All of it in one bed. Raises `RunError` where a rank fails."""
    job, spec = {**asdict(options), "json": None}, ClusterSpec(hosts=2, ranks_per_host=1)
    return result_of(options, run_ranks("step", job, spec, timeout_s=LONGEST_S, grain=COARSE, own_cores=True))


def result_of(options: StepArgs, found: dict[str, Any]) -> dict[str, Any]:
    """Medians and quotients of what the ranks have measured: per setting seconds and losses of every step."""
    seconds, losses = found["seconds"], found["losses"]
    step_s = {name: statistics.median(each) for name, each in seconds.items()}
    last, serial = losses[options.overlap][-1], losses[SERIAL][-1]
    alike = [options.same, *([PAIRED] if options.pairs else [])]
    paired = (
        {"paired_step_s": step_s[PAIRED], "paired_speedup": step_s[SERIAL] / step_s[PAIRED]} if options.pairs else {}
    )
    return {
        "overlap": options.overlap,
        "same": options.same,
        "link_bit_per_s": found["link_bit_per_s"],
        "communication_share": 1 - found["alone_s"] / step_s[SERIAL],
        "alone_step_s": found["alone_s"],
        "serial_step_s": step_s[SERIAL],
        "step_s": step_s[options.overlap],
        "speedup_vs_serial": step_s[SERIAL] / step_s[options.overlap],
        **paired,
        "losses_equal": all(losses[options.overlap] == losses[name] for name in alike),
        "losses_close": abs(last - serial) <= LOSS_TOLERANCE * abs(serial),
        "sent_bytes": found["sent_bytes"],
        "seconds": seconds,
        "losses": losses,
        "paced": False,
    }


# ---- one rank ----------------------------------------------------------------------------------------------------------------


def _rank(job_file: Path) -> int:
    options = StepArgs(**json.loads(job_file.read_text()))
    keep_freed_memory(threads=1)  # as a run does
    info = join_ranks(PATIENCE_S)
    folding = make_folding(world=info.world, ep=info.world)
    cache = GroupCache(timeout_s=PATIENCE_S)
    groups = build_groups(folding, rank=info.rank, cache=cache)
    comms, axis = Collectives(timeout_s=PATIENCE_S), groups.axis("ep_etp")
    settings = tuple(dict.fromkeys((SERIAL, options.overlap, options.same)))
    shape = WorkloadShape(
        **{**asdict(SHAPE), "layers": options.layers, "batch": options.batch // options.micro_batches}
    )
    make = partial(OurRun, shape, threads=1, dtype=torch.float32, comms=comms, num_microbatches=options.micro_batches)
    models = {name: make(groups=groups, overlap=name) for name in settings}
    if options.pairs:
        second = with_second_groups(groups, cache=cache)
        models[PAIRED] = make(groups=second, overlap=options.overlap, pair_passes=True)
    names = tuple(models)
    alone_s = statistics.median(_turn(models[SERIAL], comms, axis)[0] for _ in range(5))
    comms.counters.clear()
    _turn(models[SERIAL], comms, axis)
    sent = comms.counters["all_to_all_rows", "ep"].sent_bytes
    rate = _fit_link(job_file, models[SERIAL], comms, axis, alone_s=alone_s, sent_bytes=sent, share=options.share)
    _begin_alike(models, comms, axis)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.steps):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            took, loss = _turn(models[name], comms, axis)
            seconds[name].append(took)
            losses[name].append(loss)
    if info.rank == 0:
        found = {"link_bit_per_s": rate, "alone_s": alone_s, "sent_bytes": sent, "seconds": seconds, "losses": losses}
        tell(job_file, found)
    comms.barrier(axis)
    close_world()
    return 0


def _turn(model: OurRun, comms: Collectives, axis: Axis) -> tuple[float, float]:
    """Seconds of a step, the slowest rank's, and its loss."""
    comms.barrier(axis)
    (took,), (loss,) = model.run(1)
    return max(comms.gather_objects(took, axis)), loss


def _begin_alike(models: dict[str, OurRun], comms: Collectives, axis: Axis) -> None:
    """All models take as many steps as the one that was measured with has taken: same batches, and code and memory are warm."""
    most = max(model.steps_done for model in models.values())
    for model in models.values():
        while model.steps_done < most:
            _turn(model, comms, axis)


def _fit_link(
    job_file: Path, model: OurRun, comms: Collectives, axis: Axis, *, alone_s: float, sent_bytes: int, share: float
) -> float:
    """Set the link so that a serial step communicates for `share` of its time; bits per second."""
    wanted_s = alone_s * share / (1 - share)
    rate = float(comms.gather_objects(sent_bytes * 8 / wanted_s, axis)[0])
    for _ in range(3):
        request(job_file, rate, comms=comms, axis=axis)
        found_s = statistics.median(_turn(model, comms, axis)[0] for _ in range(3)) - alone_s
        if abs(found_s / wanted_s - 1) < 0.05:
            return rate
        rate *= min(max(found_s / wanted_s, 0.5), 2.0)  # by twice at most, since what was measured may be noise
    request(job_file, rate, comms=comms, axis=axis)
    return rate

"""What sharing sequences does to memory: `phalanx bench context --json F`.

Trains a step on one long sequence with 1, 2, 4 and 8 local ranks that share it (`folding.cp`), in fresh processes each time, and measures on
every rank

    saved_bytes   what the forward pass keeps for the backward pass, parameters not counted: every storage once
    peak_bytes    the most memory of the process during the step, less what it held before: also what is needed for a moment

Both of the rank that needs most. `--long 131072` then runs one step on a sequence of that length with the largest degree. Ranks share the cores
of this machine, so the seconds say that it runs, not how fast. What is under way is told on standard error. Exit status 1 where a larger degree
keeps as much as a smaller one, or a loss or gradient is not finite.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from phalanx.core.arguments import read_words
from phalanx.core.config import OptimConfig
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_bytes
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import fit_problems, make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.processes.launch import StopRequest, run_local
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world
from phalanx.train.assembly import assemble
from phalanx.train.setup.machine import MemoryMeter
from phalanx.train.step.loss import num_valid, objective
from phalanx.train.step.transaction import StepParts, train_step
from phalanx_lab.plain_model import plain_context

Method = Literal["ring", "all_gather", "ulysses"]
PATIENCE_S = 3600.0
"""Ranks that share cores wait long for each other."""


@dataclass(frozen=True, kw_only=True)
class ContextArgs:
    """Memory of a step on one long sequence that several ranks share."""

    preset: Literal["tiny", "laptop"] = "tiny"
    """Model."""
    seq_len: int = 32_768
    """Tokens of the sequence."""
    degrees: tuple[int, ...] = (1, 2, 4, 8)
    """Ranks that share it."""
    methods: tuple[Method, ...] = ("ring",)
    """Ways to attend."""
    documents: int = 1
    """Packed in the sequence, of equal length."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again."""
    long: int = 0
    """Then one step on a sequence of so many tokens, with the largest degree; 0 for none."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement."""

    cp: int
    method: Method
    seq_len: int
    preset: str
    documents: int
    recompute: Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    cp: int
    method: str
    seq_len: int
    saved_bytes: int
    peak_bytes: int
    step_s: float
    loss: float
    finite: bool


@dataclass(kw_only=True)
class ContextResult:
    preset: str
    runs: list[Measured] = field(default_factory=list)
    long: Measured | None = None
    falls: bool = True
    """Each larger degree keeps less than the one before it, for every method."""
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench context ARGS...`; exit status 1 where memory does not fall or a number is not finite."""
    options = read_words(ContextArgs, args, prog="phalanx bench context", description=__doc__)
    check_writable(options.json)
    result = measure(options)
    write_json(options.json, asdict(result))
    for failure in result.failures:
        print(f"FAILED: {failure}")
    if not result.failures and len(options.degrees) > 1:
        print("what is kept falls with every degree")
    return 1 if result.failures else 0


def measure(options: ContextArgs, *, tell: Any = print) -> ContextResult:
    """The whole measurement. Raises `ConfigError` with all that is wrong, before any process starts."""
    raise_if(_option_problems(options), ConfigError, subject="the options")
    jobs = [_work(options, cp, method) for method in options.methods for cp in options.degrees]
    jobs += [_work(options, max(options.degrees), options.methods[0], seq_len=options.long)] if options.long else []
    result = ContextResult(preset=options.preset)
    for number, job in enumerate(jobs):
        print(f"[{number + 1}/{len(jobs)}] {_title(job)} ...", file=sys.stderr, flush=True)
        found = run(job)
        tell(
            f"{_title(job)}: keeps {format_bytes(found.saved_bytes)} a rank, "
            f"takes {format_bytes(found.peak_bytes)} at most; step {found.step_s:.1f} s, loss {found.loss:.4f}"
        )
        if options.long and number == len(jobs) - 1:
            result.long = found
        else:
            result.runs.append(found)
    result.falls = falls(result.runs)
    result.failures = [] if result.falls else ["a larger degree does not keep less"]
    every = [*result.runs, *([] if result.long is None else [result.long])]
    result.failures += [
        f"cp {m.cp}, {m.method}, {m.seq_len:,} tokens: loss {m.loss} or a gradient is not finite"
        for m in every
        if not m.finite
    ]
    return result


def falls(runs: Sequence[Measured]) -> bool:
    """Whether, method by method, every larger degree keeps less."""
    for method in dict.fromkeys(r.method for r in runs):
        kept = [r.saved_bytes for r in sorted(runs, key=lambda r: r.cp) if r.method == method]
        if any(b >= a for a, b in itertools.pairwise(kept)):
            return False
    return True


def _work(options: ContextArgs, cp: int, method: Method, *, seq_len: int | None = None) -> Work:
    return Work(
        cp=cp,
        method=method,
        seq_len=options.seq_len if seq_len is None else seq_len,
        preset=options.preset,
        documents=options.documents,
        recompute=options.recompute,
    )


def _title(job: Work) -> str:
    return f"cp {job.cp}, {job.method}, {job.seq_len:,} tokens"


def _option_problems(options: ContextArgs) -> list[Problem]:
    """All that is wrong with the options, every sequence under every degree and method included."""
    lengths = {"seq_len": options.seq_len} | ({"long": options.long} if options.long else {})
    shortest = min((n for n in lengths.values() if n >= 1), default=1)
    rules: list[tuple[str, object, bool, str]] = [
        (name, values, bool(values) and len(set(values)) == len(values), "must be one or more, each once")
        for name, values in (("degrees", options.degrees), ("methods", options.methods))
    ]
    rules += [("degrees", cp, cp >= 1, "must be positive numbers of ranks") for cp in options.degrees]
    rules += [(name, value, value >= 1, "must be a positive number of tokens") for name, value in lengths.items()]
    fits = f"must be between 1 and the {shortest:,} tokens of the shortest sequence"
    rules.append(("documents", options.documents, 1 <= options.documents <= shortest, fits))
    found = [Problem(where=where, value=value, rule=rule) for where, value, good, rule in rules if not good]
    for cp, method, length in itertools.product(options.degrees, options.methods, lengths.values()):
        if cp >= 1 and length >= 1:
            folding, spec = make_folding(world=cp, cp=cp), PRESETS[options.preset]
            found += fit_problems(folding, spec, seq_len=length, cp_method=method)
    return list(dict.fromkeys(found))


def run(job: Work) -> Measured:
    """One measurement in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="phalanx-context-") as name:
        if code := run_local(partial(_rank, job, Path(name)), ranks=job.cp, threads=1):
            raise SystemExit(code)
        told = [json.loads((Path(name) / str(rank)).read_text()) for rank in range(job.cp)]
    most = {key: max(t[key] for t in told) for key in ("saved_bytes", "peak_bytes", "step_s")}
    return Measured(
        cp=job.cp,
        method=job.method,
        seq_len=job.seq_len,
        saved_bytes=int(most["saved_bytes"]),
        peak_bytes=int(most["peak_bytes"]),
        step_s=most["step_s"],
        loss=told[0]["loss"],
        finite=bool(np.isfinite(told[0]["loss"]) and np.isfinite(told[0]["grad_norm"])),
    )


# ---- one rank ------------------------------------------------------------------------------------------------------------------


def _rank(job: Work, folder: Path, info: WorldInfo, stop: StopRequest) -> int:
    init_world(info, timeout_s=PATIENCE_S)
    parts, batch = build(job, info.rank, GroupCache(timeout_s=PATIENCE_S))
    begin_s = time.perf_counter()
    kept = saved_bytes(parts, batch)
    if info.rank == 0:
        took_s = time.perf_counter() - begin_s
        print(f"      one forward pass took {took_s:.1f} s; now the step", file=sys.stderr, flush=True)
    meter, begin_s = MemoryMeter(torch.device("cpu")), time.perf_counter()
    result = train_step(parts, [batch], step=0, lr=1e-3)
    told = {
        "saved_bytes": kept,
        "peak_bytes": meter.peak_bytes(),
        "step_s": time.perf_counter() - begin_s,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
    }
    (folder / str(info.rank)).write_text(json.dumps(told))
    close_world()
    return 0


def build(
    job: Work, rank: int, cache: GroupCache, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[StepParts, TokenBatch]:
    """A run of `job.cp` ranks and this rank's part of its one sequence. Collective."""
    folding, spec = make_folding(world=job.cp, cp=job.cp), PRESETS[job.preset]
    ctx = plain_context(
        spec, build_groups(folding, rank=rank, cache=cache), dtype=dtype, comms=Collectives(timeout_s=PATIENCE_S),
        recompute=job.recompute, cp_method=job.method, lanes=Lanes(1, rows=compiled_rows()),
    )  # fmt: skip
    return assemble(ctx, optim=OptimConfig(), num_microbatches=1), part_of(_sequence(job, spec.vocab), folding, rank)


def _sequence(job: Work, vocab: int) -> TokenBatch:
    """One whole sequence of random tokens, documents of equal length (the last one takes what is left)."""
    length = max(1, job.seq_len // job.documents)
    lengths = [length] * (job.documents - 1) + [job.seq_len - length * (job.documents - 1)]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, size=(1, job.seq_len + 1)))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, (tuple(lengths),))


def saved_bytes(parts: StepParts, batch: TokenBatch) -> int:
    """Bytes that one forward pass keeps for the backward pass, parameters not counted. Collective; changes nothing."""
    own = {p.untyped_storage().data_ptr() for p in parts.model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}  # the tensors are held, so that no address is used twice

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    info = ForwardInfo()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = parts.model(batch, info)
        objective(parts.model, output, batch, info, stage=parts.model.stages[0], valid_tokens=num_valid([batch]))
    return sum(size for size, _ in found.values())

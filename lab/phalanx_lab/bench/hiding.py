"""Is communication really hidden? `phalanx bench hiding --what gradients|ring|pair --json F`, on the testbed.

Two emulated hosts with one rank each. First a run without a limit on the link measures the step and counts what it sends; then the link
gets the rate at which all of that takes half as long as computing does, a third of a step in which nothing is hidden. On that link the
same ranks take turns of a few steps: as always, and with every exchange waited for where it starts (`Collectives.synchronous`), all else
equal. `speedup` is the median over rounds of the quotient of the two turns' medians.

    gradients   dp 2: buckets are reduced while the backward pass goes on
    ring        cp 2: key/value blocks travel while the block before them is computed
    pair        ep 2, 4 micro-batches: the forward pass of one runs beside the backward pass of the one before (`runtime/moe/co_schedule.py`); waiting, one pass
                runs after the other (reductions of gradients are hidden both times)
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import RunError
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_rate
from phalanx.plan.mapping.folding import make_folding
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups, with_second_groups
from phalanx.runtime.processes.world import close_world
from phalanx_lab.bench.ours import OPTIM, OurRun
from phalanx_lab.bench.rank_jobs import join_ranks, run_ranks, tell
from phalanx_lab.bench.workload import WorkloadShape
from phalanx_lab.testbed.cluster import ClusterSpec

What = Literal["gradients", "ring", "pair"]
SHAPES = {
    "gradients": WorkloadShape(layers=6, hidden=256, heads=8, kv_heads=8, experts=8, top_k=2, ffn=256, vocab=2048, batch=4, seq_len=256),
    "ring": WorkloadShape(layers=2, hidden=128, heads=4, kv_heads=4, experts=4, top_k=1, ffn=128, vocab=512, batch=1, seq_len=4096),
    "pair": WorkloadShape(layers=3, hidden=256, heads=8, kv_heads=8, experts=8, top_k=2, ffn=256, vocab=512, batch=1, seq_len=256),
}  # fmt: skip
DEGREES: dict[What, dict[str, int]] = {"gradients": {}, "ring": {"cp": 2}, "pair": {"ep": 2}}
MICROBATCHES: dict[What, int] = {"gradients": 1, "ring": 1, "pair": 4}
SHARE = 0.5
"""Communication over computing: a third of a step that hides nothing."""


@dataclass(frozen=True, kw_only=True)
class HidingArgs:
    """Steps with and without hidden communication, on two emulated hosts."""

    what: What = "gradients"
    rounds: int = 5
    """Turns of each kind."""
    steps: int = 4
    """Steps of a turn."""
    bucket_mb: float = 1.0
    """Megabytes of a bucket of gradients."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What rank 0 of a run reports: seconds of each step, turn by turn, and bytes that it sent in one step."""

    hidden: list[list[float]]
    waiting: list[list[float]]
    sent_bytes: int
    losses_equal: bool
    """The same step gives the same loss, hidden or not."""


@dataclass(frozen=True, kw_only=True)
class HidingResult:
    what: str
    link_bit_per_s: float
    step_s: float
    waiting_step_s: float
    speedup: float
    communication_share: float
    """Share of a step that hides nothing which communication takes: bytes over the rate of the link."""
    sent_bytes: int
    rounds: list[float] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench hiding ARGS...` (or, with `--rank-of FILE`, one rank of it)."""
    if args[:1] == ["--rank-of"]:
        return _rank(Path(args[1]))
    options = read_words(HidingArgs, args, prog="phalanx bench hiding", description=__doc__)
    check_writable(options.json)
    result = measure(options)
    print(
        f"{result.what}: step {result.step_s * 1e3:.0f} ms, waiting {result.waiting_step_s * 1e3:.0f} ms: "
        f"{result.speedup:.2f} times faster; link {format_rate(result.link_bit_per_s, 'bit')}, "
        f"communication {result.communication_share:.0%} of a step that hides nothing"
    )
    write_json(options.json, asdict(result))
    return 0


def measure(options: HidingArgs) -> HidingResult:
    """Find the rate of the link, then measure on it."""
    free = _run(dataclasses.replace(options, rounds=2), None)
    alone_s = statistics.median(free.waiting[-1])
    rate = free.sent_bytes * 8 / (SHARE * alone_s)
    turns = _run(options, rate)
    if not turns.losses_equal:
        raise RunError("hidden and waiting steps have different losses")
    rounds = [statistics.median(w) / statistics.median(h) for h, w in zip(turns.hidden, turns.waiting, strict=True)]
    waiting_s = statistics.median([t for turn in turns.waiting for t in turn])
    return HidingResult(
        what=options.what,
        link_bit_per_s=rate,
        step_s=statistics.median([t for turn in turns.hidden for t in turn]),
        waiting_step_s=waiting_s,
        speedup=statistics.median(rounds),
        communication_share=turns.sent_bytes * 8 / rate / waiting_s,
        sent_bytes=turns.sent_bytes,
        rounds=rounds,
    )


def _run(options: HidingArgs, rate_bit_per_s: float | None) -> Turns:
    job, spec = {**asdict(options), "json": None}, ClusterSpec(hosts=2, ranks_per_host=1, link_bit_per_s=rate_bit_per_s)
    return Turns(**run_ranks("hiding", job, spec, timeout_s=600))


# ---- one rank ------------------------------------------------------------------------------------------------------------------


def _rank(job_file: Path) -> int:
    options = HidingArgs(**json.loads(job_file.read_text()))
    info = join_ranks(120)
    folding, cache = make_folding(world=info.world, **DEGREES[options.what]), GroupCache(timeout_s=120)
    groups = build_groups(folding, rank=info.rank, cache=cache)
    paired = options.what == "pair"
    if paired:
        groups = with_second_groups(groups, cache=cache)
    comms = Collectives(timeout_s=120)
    optim = dataclasses.replace(OPTIM, bucket_mb=options.bucket_mb)
    ours = OurRun(
        SHAPES[options.what],
        threads=1,
        groups=groups,
        comms=comms,
        optim=optim,
        num_microbatches=MICROBATCHES[options.what],
        pair_passes=paired,
    )
    ours.run(3)
    hidden: list[list[float]] = []
    waiting: list[list[float]] = []
    counted = 0
    for _ in range(options.rounds):
        for synchronous, into in ((False, hidden), (True, waiting)):
            _hide(ours, comms, hide=not synchronous, paired=paired)
            comms.counters.clear()
            times, _ = ours.run(options.steps)
            counted = sum(c.sent_bytes for c in comms.counters.values()) // options.steps
            into.append(times)
    turns = Turns(
        hidden=hidden, waiting=waiting, sent_bytes=counted, losses_equal=_same_loss(ours, comms, paired=paired)
    )
    if info.rank == 0:
        tell(job_file, asdict(turns))
    close_world()
    return 0


def _hide(ours: OurRun, comms: Collectives, *, hide: bool, paired: bool) -> None:
    """What follows hides the communication that this run is about, or does not."""
    if paired:
        ours.pair(hide)
    else:
        comms.synchronous = not hide


def _same_loss(ours: OurRun, comms: Collectives, *, paired: bool) -> bool:
    """Evaluate one batch both ways; a step would change the weights. Of pairs, which are steps, the losses of one more step, both ways."""
    losses = []
    for synchronous in (False, True):
        _hide(ours, comms, hide=not synchronous, paired=paired)
        losses.append(ours.step_loss(0) if paired else ours.loss_of(0))
    return losses[0] == losses[1]

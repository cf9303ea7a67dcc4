"""Kill ranks inside overlapped MoE layers, and run such layers for long: `phalanx bench robust --json F`.

Trials: 2 to 4 ranks run layers forward and backward (tile by tile, in chunks, serial, in turn; `phalanx_lab/bench/robust/rank.py`) and at a random moment one of them is
killed with SIGKILL. Every other rank must raise an error of ours that names axis and ranks, within 10 s. A rank that has not is *hung*; one that
ends by a signal, or with another exit code than after an error, before or after it raised, is *aborted*. A rank that has raised ends a little
later, as in a real run, and those that wait for it learn of it then. A trial in which the watching process itself stood still for a second or more (a machine that
was paused, or far too busy) says nothing about the ranks: it is told, and done again.

Iterations: two ranks run layers with changing routing. Memory is sampled, and from time to time all methods must agree on a pass. What is resident also
moves with how the C library's heaps are filled, so three numbers are told: growth of what is resident (medians of windows behind
iteration 500 and before the end, the worst rank), of what is allocated in the heaps, and of the number of Python's objects. Only the first decides.

Exit status 1 where a rank hangs, aborts or raises something unclear, where memory grows by 1 % or more, or where methods differ.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_bytes
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx_lab.bench.robust.rank import (
    RAISED,
    Body,
    ForkedRanks,
    MemorySample,
    Raised,
    RobustShape,
    forked,
    run_for_long,
    run_until_lost,
)

IMPORTED_LATE = "torch.fx.experimental.symbolic_shapes"
"""What torch imports in a first backward pass: 2 s of every forked rank, if not before the fork."""
LIMIT_S = 10.0
"""Seconds within which every rank must have raised."""
START_S = 120.0
"""Seconds for ranks to start, on a busy machine."""
TICK_S = 0.1
"""How often the watching process looks up."""
MOST_STILL_S = 1.0
MOST_DISTURBED = 20
MOST_PASSES_S = 0.15
"""A rank is killed up to so long after all methods have had a turn: some passes."""
FOLDINGS: tuple[Folding, ...] = (
    make_folding(world=2, ep=2),
    make_folding(world=3, ep=3),
    make_folding(world=4, ep=4),
    make_folding(world=2, etp=2),
    make_folding(world=4, ep=2, etp=2),
    make_folding(world=4, ep=2),
)
"""Foldings of the trials, in turn. In the last one, half of the ranks exchange no rows with the lost one."""
SETTLED = 500
"""Iterations after which memory should have settled."""
MOST_GROWTH = 0.01
IN_TRIALS = RobustShape(tokens=256, hidden=256, ffn=128)
IN_ITERATIONS = RobustShape(tokens=128, hidden=64, ffn=64)
COMPARE_EVERY = 100

End = Literal["raised", "unclear", "hung", "aborted"]


@dataclass(frozen=True, kw_only=True)
class RobustArgs:
    """Kill ranks inside overlapped layers, and run such layers for long."""

    trials: int = 100
    """How often to kill a rank; 0 for never."""
    iterations: int = 5000
    """Passes of two ranks whose memory is watched; 0 for none."""
    seed: int = 0
    """Decides who is killed, and when."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """What became of a rank that was not killed."""

    rank: int
    end: End
    seconds: float
    """Seconds from the kill to its error; the limit where there was none."""
    method: str = ""
    text: str = ""


@dataclass(kw_only=True)
class RobustResult:
    trials: int
    raised_within_10s: int = 0
    """Trials in which every survivor raised a clear error in time."""
    hung: int = 0
    """Trials in which a survivor hung; so the others."""
    aborted: int = 0
    unclear: int = 0
    disturbed: int = 0
    """Trials that were done again."""
    slowest_s: float = 0.0
    """Seconds from a kill to the last survivor's error."""
    median_s: float = 0.0
    """The same of the median survivor."""
    interrupted: dict[str, int] = field(default_factory=dict)
    """Method -> survivors that were in it."""
    iterations: int = 0
    memory_growth: float | None = None
    """Growth of resident memory, of the rank where it is largest."""
    memory_growth_bytes: int = 0
    heap_growth_bytes: int = 0
    object_growth: int = 0
    compared: int = 0
    """Passes in which all methods were compared."""
    samples: list[list[MemorySample]] = field(default_factory=list)
    """Samples by rank."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench robust ARGS...`; exit status 0 if everything held."""
    options = read_words(RobustArgs, args, prog="phalanx bench robust", description=__doc__)
    check_writable(options.json)
    result = measure(options)
    print(report(result))
    write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def measure(options: RobustArgs, *, tell: Any = print) -> RobustResult:
    """Trials, then iterations. Raises `ConfigError` with all that is wrong with the options. Call it before any tensor operation (it forks)."""
    raise_if(_option_problems(options), ConfigError, subject="the options")
    importlib.import_module(IMPORTED_LATE)
    begin_s = time.monotonic()
    result = RobustResult(trials=options.trials, iterations=options.iterations)
    chance, everyone = random.Random(options.seed), list[Survivor]()
    for number in range(options.trials):
        survivors, still_s = run_trial(FOLDINGS[number % len(FOLDINGS)], chance)
        while still_s >= MOST_STILL_S:
            if result.disturbed >= MOST_DISTURBED:
                raise RunError(f"{result.disturbed} trials were disturbed: this machine stands still too often")
            result.disturbed += 1
            tell(f"trial {number} again: nothing ran for {still_s:.1f} s")
            survivors, still_s = run_trial(FOLDINGS[number % len(FOLDINGS)], chance)
        everyone += survivors
        count_trial(result, survivors, number)
        if (number + 1) % 10 == 0:
            tell(f"{number + 1} kills, slowest answer {result.slowest_s:.2f} s")
    if everyone:
        result.median_s = statistics.median(s.seconds for s in everyone)
        result.interrupted = dict(Counter(s.method for s in everyone))
    if options.iterations:
        judge_iterations(result, run_iterations(options.iterations))
    result.seconds = time.monotonic() - begin_s
    return result


def _option_problems(options: RobustArgs) -> list[Problem]:
    out = []
    if options.trials < 0:
        out.append(Problem(where="trials", value=options.trials, rule="must be 0 or more", hint="use 100"))
    if options.iterations and options.iterations < 3 * SETTLED:
        rule = f"must be 0, or at least {3 * SETTLED}: memory settles in the first {SETTLED}"
        out.append(Problem(where="iterations", value=options.iterations, rule=rule, hint="use 5000"))
    if options.trials == 0 and options.iterations == 0:
        out.append(Problem(where="trials", value=0, rule="leaves nothing to do beside iterations = 0", hint="use 100"))
    return out


def report(result: RobustResult) -> str:
    lines = []
    if result.trials:
        lines.append(
            f"{result.trials} kills: in {result.raised_within_10s} every other rank raised within {LIMIT_S:g} s "
            f"(median {result.median_s:.2f} s, slowest {result.slowest_s:.2f} s); hung in {result.hung}, "
            f"aborted in {result.aborted}, unclear in {result.unclear}"
        )
    if result.memory_growth is not None:
        lines.append(
            f"{result.iterations} iterations: resident memory {result.memory_growth:+.2%} ({_signed(result.memory_growth_bytes)}), "
            f"allocated {_signed(result.heap_growth_bytes)}, Python objects {result.object_growth:+d}; "
            f"all methods agree in {result.compared} passes"
        )
    return "\n".join([*lines, f"{result.seconds:.0f} s", *(f"FAILED: {f}" for f in result.failures)])


def _signed(num_bytes: int) -> str:
    return ("-" if num_bytes < 0 else "+") + format_bytes(abs(num_bytes))


# ---- kills -------------------------------------------------------------------------------------------------------------------


def run_trial(
    folding: Folding, chance: random.Random, *, limit_s: float = LIMIT_S, body: Body | None = None
) -> tuple[list[Survivor], float]:
    """Start ranks, kill one of them at a random moment, and see what becomes of the others; and for how long this process stood still meanwhile.

    Raises `RunError` where the ranks do not start.
    """
    body = body or partial(run_until_lost, folding=folding, shape=IN_TRIALS)
    victim = chance.randrange(folding.world)
    with forked(folding.world, body) as ranks:
        for number, end in enumerate(ranks.ends):
            said = end.recv() if end.poll(START_S) else "nothing"
            if said != "running":
                raise RunError(f"rank {number} of {folding.label()} did not begin: it said {said}")
        time.sleep(chance.random() * MOST_PASSES_S)
        killed_s = time.monotonic()
        ranks.cluster.kill_host(str(victim))
        return _watch(ranks, [n for n in range(folding.world) if n != victim], killed_s, limit_s)


def _watch(
    ranks: ForkedRanks, survivors: Sequence[int], killed_s: float, limit_s: float
) -> tuple[list[Survivor], float]:
    told: dict[int, Raised] = {}
    still_s, seen_s = 0.0, killed_s
    open_ends: dict[Any, int] = {ranks.ends[number]: number for number in survivors}
    while open_ends and (left_s := killed_s + limit_s - time.monotonic()) > 0:
        ready = wait(list(open_ends), min(left_s, TICK_S))
        now_s = time.monotonic()
        still_s, seen_s = max(still_s, now_s - seen_s - TICK_S), now_s
        for end in [each for each in open_ends if each in ready]:
            number = open_ends.pop(end)
            with contextlib.suppress(EOFError):  # it has ended without a word
                told[number] = end.recv()
    hung = set(open_ends.values())
    codes = ranks.cluster.codes
    ranks.cluster.until(lambda: codes.keys() >= {str(n) for n in survivors if n not in hung}, limit_s)
    return [_judge(n, told.get(n), codes.get(str(n)), killed_s, limit_s) for n in survivors], still_s


def _judge(rank: int, told: Raised | None, code: int | None, killed_s: float, limit_s: float) -> Survivor:
    """`code` as a cluster has it: None while it runs, negative for a signal."""
    if code is None:
        return Survivor(rank=rank, end="hung", seconds=limit_s, text="" if told is None else told.text)
    if told is None or code != RAISED:
        return Survivor(rank=rank, end="aborted", seconds=limit_s, text=f"exit code {code}")
    seconds, text = told.at_s - killed_s, f"{told.error}: {told.text}"
    end: End = "hung" if seconds > limit_s else "raised" if told.clear else "unclear"
    return Survivor(rank=rank, end=end, seconds=seconds, method=told.method, text=text)


def count_trial(result: RobustResult, survivors: Sequence[Survivor], number: int) -> None:
    """Add one trial to the result."""
    ends = {s.end for s in survivors}
    result.raised_within_10s += ends == {"raised"}
    result.hung += "hung" in ends
    result.aborted += "aborted" in ends
    result.unclear += "unclear" in ends
    result.slowest_s = max(result.slowest_s, *(s.seconds for s in survivors))
    result.failures += [
        f"trial {number}, {len(survivors) + 1} ranks: rank {s.rank} {s.end} {s.text}".rstrip()
        for s in survivors
        if s.end != "raised"
    ]


# ---- memory ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """What two ranks found."""

    samples: list[list[MemorySample]]
    wrong: list[str]
    compared: int


def run_iterations(iterations: int) -> LongRun:
    """Two ranks, `iterations` passes each. Raises `RunError` where one of them fails."""
    folding = make_folding(world=2, ep=2)
    body = partial(
        run_for_long,
        folding=folding,
        shape=IN_ITERATIONS,
        iterations=iterations,
        every=SETTLED // 10,
        compare_every=COMPARE_EVERY,
    )
    samples, wrong = [], []
    with forked(2, body) as ranks:
        for number, end in enumerate(ranks.ends):
            try:
                told = end.recv()
            except EOFError as err:
                raise RunError(f"rank {number} ended during the iterations without a word") from err
            if isinstance(told, Raised):
                raise RunError(f"rank {number} failed during the iterations: {told.error}: {told.text}")
            samples.append(told[0])
            wrong += told[1]
        for end in ranks.ends:
            end.send("end")
    return LongRun(samples=samples, wrong=wrong, compared=iterations // COMPARE_EVERY)


def judge_iterations(result: RobustResult, found: LongRun) -> None:
    """Growth of the worst rank from iteration `SETTLED` to the end, and what was wrong."""
    result.samples, result.compared = found.samples, found.compared - len({w.split(" of ")[0] for w in found.wrong})
    growths = [growth(samples, "resident_bytes") for samples in found.samples]
    worst = max(range(len(growths)), key=lambda rank: growths[rank][1] / growths[rank][0])
    before, more = growths[worst]
    result.memory_growth, result.memory_growth_bytes = more / before, int(more)
    result.heap_growth_bytes = int(max(growth(samples, "in_use_bytes")[1] for samples in found.samples))
    result.object_growth = int(max(growth(samples, "objects")[1] for samples in found.samples))
    result.failures += found.wrong
    if result.memory_growth >= MOST_GROWTH:
        result.failures.append(
            f"resident memory of rank {worst} grew by {result.memory_growth:.2%} after iteration {SETTLED}"
        )


def growth(samples: Sequence[MemorySample], name: str) -> tuple[float, float]:
    """The median of a number in the `SETTLED // 2` iterations behind `SETTLED`, and how much more the median of the last as many is."""
    window, last = SETTLED // 2, samples[-1].iteration
    before = [getattr(s, name) for s in samples if SETTLED <= s.iteration <= SETTLED + window]
    after = [getattr(s, name) for s in samples if s.iteration >= last - window]
    return statistics.median(before), statistics.median(after) - statistics.median(before)

"""The ledger of a storm: what every member says that it committed, put together and held against an undisturbed run.

    each step of the run is committed, in one generation only (unless training went back behind it)
    each sample of a step was taken once; a member that was killed between the decision and its line may lack that line, nobody else
    each loss and norm that anybody told is that of the undisturbed run, steps that were done again included

Decides what is void: training of generation g began after step s, so whatever an earlier generation committed beyond s counts for nothing. That is a *rollback* where a
member of g had committed such a step, or more than one was lost; a single step of a member that is gone is none (nobody who goes on has seen it).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one member told of one committed step."""

    uid: str
    generation: int
    step: int
    loss: float
    norm: float
    windows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StormRollback:
    """Training went back."""

    generation: int
    step: int
    """Where it went on."""
    steps: int
    """How many were done again."""
    lost_hosts: tuple[str, ...]
    """Hosts that are out since state was last where it should be: since the last generation that all its members had entered."""
    told: bool
    """Somebody said so."""


@dataclass(kw_only=True)
class StormLedger:
    """What all members say."""

    lines: list[Line] = field(default_factory=list)
    entered: dict[int, dict[str, int]] = field(default_factory=dict)
    """Generation -> member -> steps committed when it entered."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Generation -> how many members it has."""
    back: set[int] = field(default_factory=set)
    """Steps to which somebody said that training goes back."""


@dataclass(frozen=True, kw_only=True)
class CalmStep:
    """A step of the undisturbed run."""

    loss: float
    norm: float
    windows: frozenset[int]


@dataclass(kw_only=True)
class StormVerdict:
    """What does not hold, in words and numbers."""

    committed_steps: int = 0
    lost_samples: int = 0
    doubled_samples: int = 0
    equal: bool = True
    """Every loss and norm is that of the undisturbed run."""
    worst: float = 0.0
    """Largest relative difference of a loss."""
    rollbacks: list[StormRollback] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_ledger(logs: Iterable[Sequence[Record]]) -> StormLedger:
    """`logs`: for each worker process, its events in order. A step belongs to the generation that its member was in last."""
    ledger = StormLedger()
    for log in logs:
        _read_log(ledger, log)
    return ledger


def _read_log(ledger: StormLedger, log: Sequence[Record]) -> None:
    uid, generation, ended = "", 0, dict[int, Record]()
    for event in log:
        kind = event["kind"]
        if kind == "Reformed":
            uid, generation = event["uid"], event["generation"]
            ledger.entered.setdefault(generation, {})[uid] = event["step"]
            ledger.sizes[generation] = event["members"]
        elif kind == "WentBack":
            ledger.back.add(event["step"])
        elif kind == "StepEnded":
            ended[event["step"]] = event
        elif kind == "SamplesTaken" and event["step"] in ended:
            said = ended.pop(event["step"])
            ledger.lines.append(
                Line(
                    uid=uid,
                    generation=generation,
                    step=event["step"],
                    loss=said["loss"],
                    norm=said["grad_norm"],
                    windows=tuple(event["windows"]),
                )
            )


def calm_steps(logs: Iterable[Sequence[Record]]) -> dict[int, CalmStep]:
    """The undisturbed run, from the logs of all its ranks."""
    figures: dict[int, tuple[float, float]] = {}
    windows: defaultdict[int, set[int]] = defaultdict(set)
    for log in logs:
        for event in log:
            if event["kind"] == "StepEnded":
                figures[event["step"]] = event["loss"], event["grad_norm"]
            elif event["kind"] == "SamplesTaken":
                windows[event["step"]].update(event["windows"])
    return {
        step: CalmStep(loss=loss, norm=norm, windows=frozenset(windows[step])) for step, (loss, norm) in figures.items()
    }


def judge(ledger: StormLedger, calm: Mapping[int, CalmStep], *, steps: int, tolerance: float = 0.0) -> StormVerdict:
    """All that is wrong. `steps`: where the run ended; `tolerance`: largest relative difference of losses that is allowed (0: the same bits)."""
    verdict = StormVerdict()
    live = _without_void(ledger, verdict)
    by_step: defaultdict[int, list[Line]] = defaultdict(list)
    for line in live:
        by_step[line.step].append(line)
    verdict.committed_steps = len(by_step)
    for step in range(1, steps + 1):
        if step not in calm:
            verdict.problems.append(f"the undisturbed run has no step {step}")
        elif step not in by_step:
            verdict.lost_samples += len(calm[step].windows)
            verdict.problems.append(f"step {step} was never committed")
        else:
            _judge_step(step, by_step[step], calm[step], ledger, live, verdict)
    beyond = sorted(step for step in by_step if step > steps)
    if beyond:
        verdict.problems.append(f"steps {beyond} were committed after the end of the run")
    _judge_figures(ledger.lines, calm, verdict, tolerance=tolerance)
    return verdict


def _without_void(ledger: StormLedger, verdict: StormVerdict) -> list[Line]:
    """Lines that count."""
    live = sorted(ledger.lines, key=lambda line: (line.generation, line.step))
    for number in sorted(ledger.entered):
        inside = ledger.entered[number]
        step = min(inside.values())
        if len(set(inside.values())) > 1:
            verdict.problems.append(f"members enter generation {number} with different steps: {inside}")
        void = [line for line in live if line.generation < number and line.step > step]
        top = max((line.step for line in void), default=step)
        if top - step > 1 or any(line.uid in inside for line in void):
            lost = {_host(uid) for uid in _whole_before(ledger, number) if uid not in inside}
            told = step in ledger.back
            verdict.rollbacks.append(
                StormRollback(generation=number, step=step, steps=top - step, lost_hosts=tuple(sorted(lost)), told=told)
            )
            if not told:
                verdict.problems.append(f"generation {number} goes back from step {top} to {step}, and nobody said so")
        live = [line for line in live if line.generation >= number or line.step <= step]
    return live


def _whole_before(ledger: StormLedger, number: int) -> set[str]:
    """Members of the last generation before `number` that all of its members had entered."""
    whole = [g for g, inside in ledger.entered.items() if g < number and len(inside) == ledger.sizes[g]]
    return set(ledger.entered[max(whole)]) if whole else set()


def _host(uid: str) -> str:
    return uid.split(".")[0]


def _judge_step(
    step: int, lines: Sequence[Line], calm: CalmStep, ledger: StormLedger, live: Sequence[Line], verdict: StormVerdict
) -> None:
    numbers = sorted({line.generation for line in lines})
    if len(numbers) > 1:
        verdict.doubled_samples += len(calm.windows) * (len(numbers) - 1)
        verdict.problems.append(f"step {step} was committed in generations {numbers}")
        return
    taken = Counter(window for line in lines for window in line.windows)
    twice = sum(count - 1 for count in taken.values())
    strange = sorted(taken.keys() - calm.windows)
    missing = calm.windows - taken.keys()
    if twice or strange:
        verdict.doubled_samples += twice + len(strange)
        verdict.problems.append(f"step {step}: {twice} samples twice, {strange} of another step")
    silent = ledger.entered.get(numbers[0], {}).keys() - {line.uid for line in lines}
    alive = sorted(uid for uid in silent if any(line.uid == uid and line.step > step for line in live))
    if missing and (not silent or alive):
        verdict.lost_samples += len(missing)
        verdict.problems.append(
            f"step {step}: samples {sorted(missing)} were taken by nobody ({alive or 'all members'} told)"
        )


def _judge_figures(
    lines: Sequence[Line], calm: Mapping[int, CalmStep], verdict: StormVerdict, *, tolerance: float
) -> None:
    wrong: dict[int, str] = {}
    for line in lines:
        right = calm.get(line.step)
        if right is None:
            continue
        apart = abs(line.loss - right.loss) / max(abs(right.loss), 1e-30)
        verdict.worst = max(verdict.worst, apart)
        same = (line.loss, line.norm) == (right.loss, right.norm) if tolerance == 0 else apart <= tolerance
        if not same:
            wrong.setdefault(
                line.step,
                f"loss {line.loss!r}, norm {line.norm!r}, and the undisturbed run {right.loss!r}, {right.norm!r}",
            )
    if wrong:
        verdict.equal = False
        first = min(wrong)
        verdict.problems.append(f"{len(wrong)} steps differ, the first one is {first}: {wrong[first]}")

"""What must hold after a storm, read from the events of all processes, and how long each recovery took by phase."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_lab.bench.storm.chaos_cluster import PUT_OUT_KINDS, InjectedFault

Record = dict[str, Any]


def problems_of(events: Sequence[Record], *, steps: int) -> list[str]:
    """Every broken promise about commits, in words; empty where all held."""
    commits = [e for e in events if e["kind"] == "Committed"]
    entered: dict[int, set[str]] = defaultdict(set)
    for event in events:
        if event["kind"] == "Reformed":
            entered[event["generation"]].add(event["uid"])
    return [*_in_order(commits), *_all_steps(commits, steps), *_one_group(commits, entered)]


def _in_order(commits: Sequence[Record]) -> list[str]:
    """Each member commits step after step, none twice."""
    by_uid: dict[str, list[Record]] = defaultdict(list)
    for event in commits:
        by_uid[event["uid"]].append(event)
    found = []
    for uid, own in by_uid.items():
        numbers = [e["step"] for e in sorted(own, key=lambda e: e["at_s"])]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            found.append(f"{uid} committed {numbers}")
    return found


def _all_steps(commits: Sequence[Record], steps: int) -> list[str]:
    missing = sorted(set(range(1, steps + 1)) - {e["step"] for e in commits})
    return [f"steps {missing} were never committed"] if missing else []


def _one_group(commits: Sequence[Record], entered: dict[int, set[str]]) -> list[str]:
    """A step is committed in one generation. In two only where nobody who committed it in the first one took part in the second."""
    found = []
    by_step: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in commits:
        if not event["doubt"]:
            by_step[event["step"]][event["generation"]].add(event["uid"])
    for step, groups in by_step.items():
        numbers = sorted(groups)
        for i, first in enumerate(numbers):
            for second in numbers[i + 1 :]:
                both = groups[first] & entered[second]
                if both:
                    found.append(
                        f"step {step} was committed in generations {first} and {second} although {sorted(both)} saw both"
                    )
    return found


@dataclass(frozen=True, kw_only=True)
class FaultRecovery:
    """One fault and what followed, in seconds after it. None: it did not happen (a fault that stopped nobody)."""

    kind: str
    phase: str
    detected_s: float | None
    """The first supervisor knew."""
    broken_s: float | None
    """The last of the members that went on saw that its collective or vote had failed."""
    reformed_s: float | None
    """The last of them was in the next generation."""
    resumed_s: float | None
    """The first new step was committed."""


def recoveries(faults: Sequence[InjectedFault], events: Sequence[Record]) -> list[FaultRecovery]:
    """Recoveries by fault. Only what happened before the next fault is counted."""
    found = []
    for i, fault in enumerate(faults):
        end_s = faults[i + 1].at_s if i + 1 < len(faults) else float("inf")
        span = [e for e in events if e.get("at_s", 0.0) and fault.at_s <= e["at_s"] < end_s]
        found.append(_recovery(fault, span))
    return found


def _recovery(fault: InjectedFault, span: Sequence[Record]) -> FaultRecovery:
    def first(kind: str) -> float | None:
        times = [e["at_s"] for e in span if e["kind"] == kind]
        return min(times) - fault.at_s if times else None

    again = [e for e in span if e["kind"] == "Reformed" and e["broken_s"] >= fault.at_s]
    number = min((e["generation"] for e in again), default=None)
    same = [e for e in again if e["generation"] == number]
    commits = [e["at_s"] for e in span if e["kind"] == "Committed" and number is not None and e["generation"] >= number]
    return FaultRecovery(
        kind=fault.kind,
        phase=fault.phase,
        detected_s=first("MemberLost"),
        broken_s=max((e["broken_s"] for e in same), default=fault.at_s) - fault.at_s if same else None,
        reformed_s=max(e["at_s"] for e in same) - fault.at_s if same else None,
        resumed_s=min(commits) - fault.at_s if commits else None,
    )


def put_out_though_sound(faults: Sequence[InjectedFault], events: Sequence[Record]) -> list[str]:
    """Workers that were removed although their process existed, and that no fault explains: the last two before it, for one may be found late."""
    found = []
    for event in events:
        if event["kind"] != "MemberLost" or not any(words in event["why"] for words in ("silent for", "no progress")):
            continue
        before = [f for f in faults if f.at_s <= event["at_s"]][-2:]
        names = {event["uid"].rsplit(".", 1)[0], event["uid"].split(".")[0]}
        if not any(f.kind in PUT_OUT_KINDS and names & set(f.victims) for f in before):
            found.append(f"{event['uid']}: {event['why']}")
    return found


def median(values: Iterable[float | None]) -> float | None:
    """Median of those that are known."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None

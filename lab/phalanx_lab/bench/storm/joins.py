"""How long a host that was added to a running job takes until it works, and how long the others stand still for it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SHORTLY_S = 0.05
"""A fault that struck so long before the last step without the host is one of the standstill: the step was committed by others already."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """One start of a host's program while a run was under way."""

    host: str
    used_s: float
    """Seconds from the start of its program to the first step that it committed."""
    stopped_s: float
    """Seconds from the last step without it to the first one with it, the computing of that step included."""
    step_s: float
    """What a step took in the median of that generation, or of the one before where it made one alone: the part of the standstill that is none."""
    struck: bool
    """Another fault struck the run meanwhile: the standstill is that of both."""


def joins(
    begun: Sequence[tuple[str, float]], events: Sequence[dict[str, Any]], faults: Sequence[float] = ()
) -> list[Join]:
    """`begun`: every start of a host, and when; those before the first step of the run are none. `faults`: when each was."""
    commits = sorted((e for e in events if e["kind"] == "Committed"), key=lambda e: e["at_s"])
    if not commits:
        return []
    by_host: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in commits:
        by_host[event["uid"].split(".")[0]].append(event)
    found = []
    for i, (host, at_s) in enumerate(begun):
        until_s = min((t for h, t in begun[i + 1 :] if h == host), default=float("inf"))
        own = [e for e in by_host[host] if at_s <= e["at_s"] < until_s]
        if at_s < commits[0]["at_s"] or not own:
            continue
        first = own[0]
        before = [e["at_s"] for e in commits if e["generation"] < first["generation"] and e["at_s"] < first["at_s"]]
        with_it = min(e["at_s"] for e in commits if e["generation"] == first["generation"])
        stopped_s = with_it - max(before) if before else 0.0
        struck = bool(before) and any(max(before) - SHORTLY_S < t < with_it for t in faults)
        step_s = _step_s(commits, first["generation"])
        found.append(Join(host=host, used_s=first["at_s"] - at_s, stopped_s=stopped_s, step_s=step_s, struck=struck))
    return found


def _step_s(commits: Sequence[dict[str, Any]], generation: int) -> float:
    """Median time between steps of one member in this generation, or in the newest one before that made several; 0 where none did."""
    for number in range(generation, 0, -1):
        by_member: defaultdict[str, list[float]] = defaultdict(list)
        for event in commits:
            if event["generation"] == number:
                by_member[event["uid"]].append(event["at_s"])
        times = max(by_member.values(), key=len, default=[])
        if len(times) > 1:
            return statistics.median(b - a for a, b in pairwise(times))
    return 0.0

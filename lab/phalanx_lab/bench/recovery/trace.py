"""When slots are taken from a run and given back: a failure trace, from a rule, a seed, a file or the Bamboo spot trace.

Decides nothing about systems: every system that is compared replays the same `Trace`. A slot is a place for one rank, and stands for a node of the paper
(arXiv 2407.04656, section 6.1: each GPU is a node of its own). Pure Python.

The traces of nodes (`MILLISECONDS,add|remove,NODE`) have more nodes than a run has slots. `from_nodes` keeps to the first: a run takes a node while it has an empty
slot, a node that comes when all are taken is never used, and its removal is nobody's loss. (The paper says "capped at 10 nodes" and no more.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.simulate.failures.goodput import poisson, read_nodes

BAMBOO = Path(__file__).parent / "data" / "bamboo-p3.csv"
"""uclasystem/bamboo, traces/p3-trace.csv (MIT): 344 events in 682 minutes."""
NodeEvent = tuple[float, str, str]
"""(seconds, add or remove, node)."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Slots that are lost, and slots that are there again, at one moment."""

    at_s: float
    lost: tuple[int, ...] = ()
    back: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """`slots` slots, all there at 0, and what happens to them until `duration_s`."""

    name: str
    slots: int
    duration_s: float
    changes: tuple[Change, ...]

    def check(self) -> None:
        """Raises `ConfigError` where changes are out of order, take what is gone or give what is there, or leave nobody."""
        problems, there, last_s = [], set(range(self.slots)), 0.0
        for number, change in enumerate(self.changes):
            lost, back = set(change.lost), set(change.back)
            wrong = [
                rule
                for bad, rule in (
                    (not last_s <= change.at_s < self.duration_s, "must come in order, before the end"),
                    (not lost <= there, "takes slots that are not there"),
                    (back & (there - lost) or not back <= set(range(self.slots)), "gives back slots that are there"),
                    (not (there - lost | back), "leaves no slot"),
                )
                if bad
            ]
            problems += [Problem(where=f"{self.name}, change {number}", value=str(change), rule=r) for r in wrong]
            there, last_s = there - lost | back, change.at_s
        raise_if(problems, ConfigError, subject="the trace")

    def present(self) -> list[tuple[float, frozenset[int]]]:
        """(from when, slots that are there), beginning at 0."""
        out = [(0.0, frozenset(range(self.slots)))]
        for change in self.changes:
            out.append((change.at_s, out[-1][1] - set(change.lost) | set(change.back)))
        return out

    def scaled(self, factor: float) -> Trace:
        """All times multiplied."""
        changes = tuple(replace(c, at_s=c.at_s * factor) for c in self.changes)
        return replace(self, duration_s=self.duration_s * factor, changes=changes)

    @property
    def num_losses(self) -> int:
        """Moments at which slots are lost."""
        return sum(bool(c.lost) for c in self.changes)


def every(interval_s: float, *, slots: int, leave: int, seed: int = 0) -> Trace:
    """One slot lost for good after each interval until `leave` are there, and one more interval (the paper: every 5 minutes, 10 nodes to 5)."""
    order = random.Random(seed).sample(range(slots), slots - leave)
    changes = tuple(Change(at_s=(i + 1) * interval_s, lost=(slot,)) for i, slot in enumerate(order))
    return Trace(name="every", slots=slots, duration_s=(slots - leave + 1) * interval_s, changes=changes)


def random_failures(
    mean_s: float, *, slots: int, duration_s: float, back_s: float, least: int = 1, seed: int = 0
) -> Trace:
    """Poisson losses of one slot each at a mean distance of `mean_s`; each slot is back after `back_s`. One that would leave fewer than `least` does not happen."""
    draw = random.Random(f"slots {seed}")
    moments: list[Change] = []
    returns: list[tuple[float, int]] = []
    there = set(range(slots))

    def give_back(until_s: float) -> None:
        while returns and returns[0][0] < until_s:
            at_s, slot = returns.pop(0)
            there.add(slot)
            moments.append(Change(at_s=at_s, back=(slot,)))

    for at_s in poisson(mean_s, seed):
        if at_s >= duration_s:
            break
        give_back(at_s)
        if len(there) > least:
            slot = draw.choice(sorted(there))
            there.discard(slot)
            moments.append(Change(at_s=at_s, lost=(slot,)))
            returns.append((at_s + back_s, slot))
    give_back(duration_s)
    return Trace(name="poisson", slots=slots, duration_s=duration_s, changes=tuple(moments))


def from_nodes(
    events: Sequence[NodeEvent], *, slots: int, start_s: float, duration_s: float, name: str = "file"
) -> Trace:
    """What `slots` slots live through from `start_s` on, all of them taken by then. Raises `ConfigError` where they are not."""
    slot_of: dict[str, int] = {}
    empty = list(range(slots))
    moments: dict[float, tuple[set[int], set[int]]] = {}
    for at_s, kind, node in events:
        if at_s > start_s and empty and not moments:
            raise_if(_not_full(name, start_s, slots - len(empty), slots), ConfigError, subject="the trace")
        if at_s >= start_s + duration_s:
            break
        slot = -1
        if kind == "add" and empty:
            slot_of[node] = slot = empty.pop(0)
        elif kind == "remove" and node in slot_of:
            slot = slot_of.pop(node)
            empty.append(slot)
        if slot >= 0 and at_s > start_s:
            lost, back = moments.setdefault(at_s - start_s, (set(), set()))
            _note(slot, kind, lost, back)
    if empty and not moments:
        raise_if(_not_full(name, start_s, slots - len(empty), slots), ConfigError, subject="the trace")
    changes = [
        Change(at_s=at, lost=tuple(sorted(lost)), back=tuple(sorted(back))) for at, (lost, back) in moments.items()
    ]
    return Trace(name=name, slots=slots, duration_s=duration_s, changes=tuple(c for c in changes if c.lost or c.back))


def _note(slot: int, kind: str, lost: set[int], back: set[int]) -> None:
    """A slot that gets a new node at the moment at which it loses one is both lost and back: another process has its place."""
    if kind == "remove" and slot in back:
        back.discard(slot)
    elif kind == "remove":
        lost.add(slot)
    else:
        back.add(slot)


def _not_full(name: str, start_s: float, taken: int, slots: int) -> list[Problem]:
    rule = f"only {taken} of {slots} slots are taken at {start_s:g} s"
    return [Problem(where=name, value=start_s, rule=rule, hint="begin later, or use fewer slots")]


def bamboo(*, slots: int, start_s: float = 0.0, duration_s: float = 4800.0) -> Trace:
    """The Bamboo p3 spot trace; by default its first 80 minutes. (The paper replays 80 minutes of it and does not say which.)"""
    return from_nodes(read_nodes(BAMBOO), slots=slots, start_s=start_s, duration_s=duration_s, name="bamboo-p3")

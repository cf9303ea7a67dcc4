"""The program of a step on a clock: when each operation of each rank begins and ends.

Decides the clock of `plan/program/step.py`, the very operations that a run records. A rank does its operations in order; what is `beside` leaves it free, and
what needs it waits. A collective is under way once the last of its ranks has posted it, a message once both of its ends are there; each rank's
link carries one message out and one in at a time, and a collective takes both ways. Reductions of gradients that travel beside passes share their links with whatever
else is sent: bytes are kept, so what passes meanwhile takes twice its time (two flows, half of the rate each), and the reduction ends by as much later as it would have taken alone. Must never change: events are taken in order of time, so that links are given to whoever
is ready first; a deadlock is an error that names who waits for what.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.op_ids import read_op_id
from phalanx.plan.mapping import AnyFolding
from phalanx.plan.program import Op, StepProgram
from phalanx.simulate.hardware import Cost

CostOf = Callable[[Op, tuple[int, ...]], Cost]
Ranks = Callable[[int, str], tuple[int, ...]]
"""(rank, axis) -> the ranks of its group."""


@dataclass(frozen=True)
class OpSpan:
    """One operation of one rank. `ready_s`: when everyone who takes part had posted it (of its own work: its begin)."""

    op: Op
    rank: int
    begin_s: float
    ready_s: float
    end_s: float
    cost: Cost

    @property
    def seconds(self) -> float:
        """Seconds under way; of a rank's own work how long it lasted."""
        return self.end_s - self.ready_s


@dataclass(frozen=True, kw_only=True)
class ProgramTimeline:
    """Spans of each rank, in the order of its program. The step begins at 0 on all ranks."""

    spans: tuple[tuple[OpSpan, ...], ...]
    hash: str
    """Hash of the programs of all ranks."""

    @property
    def seconds(self) -> float:
        """When the last operation of any rank has ended."""
        return max((span.end_s for rank in self.spans for span in rank), default=0.0)

    @cached_property
    def by_id(self) -> dict[tuple[int, str], OpSpan]:
        return {(span.rank, span.op.id): span for rank in self.spans for span in rank}

    @property
    def sigma(self) -> float:
        """Spread of the logarithm of `seconds`: costs of one kind are wrong together, kinds on their own, by their share of the busiest rank."""
        busiest = max(self.spans, key=lambda spans: sum(s.cost.seconds for s in spans), default=())
        by_sigma: dict[float, float] = {}
        for span in busiest:
            by_sigma[span.cost.sigma] = by_sigma.get(span.cost.sigma, 0.0) + span.cost.seconds
        total = sum(by_sigma.values())
        return math.sqrt(sum((sigma * s / total) ** 2 for sigma, s in by_sigma.items())) if total else 0.0


def programs_hash(programs: Sequence[StepProgram]) -> str:
    """Hash of the programs of all ranks: a prediction and a run with the same one do the same operations."""
    return hashlib.sha256(" ".join(program.hash for program in programs).encode()).hexdigest()[:16]


def run_programs(programs: Sequence[StepProgram], folding: AnyFolding, cost: CostOf) -> ProgramTimeline:
    """Every operation on a clock. Raises `PlanError` where ranks wait for one another for ever."""
    clock = _Clock(programs, folding.group_of, cost)
    clock.to_the_end()
    return ProgramTimeline(spans=clock.result(), hash=programs_hash(programs))


def run_moves(programs: Sequence[StepProgram], cost: CostOf) -> ProgramTimeline:
    """The programs of a move between layouts (`plan/program/moves.py`), those of all ranks 0 .. n - 1, on the clock. Raises `PlanError` as `run_programs` does."""
    ranks = tuple(program.rank for program in programs)
    clock = _Clock(programs, lambda rank, axis: ranks, cost)
    clock.to_the_end()
    return ProgramTimeline(spans=clock.result(), hash=programs_hash(programs))


Key = tuple[Any, ...]


@dataclass
class _Meeting:
    """A collective or a message of several ranks: who has posted it, and when it ends."""

    parts: dict[Key, tuple[int, int, float]]
    """End -> (rank, index of the operation there, when it was posted)."""
    wanted: int


@dataclass
class _Bulk:
    """A reduction of gradients that all of its ranks have posted."""

    ranks: frozenset[int]
    cost: Cost
    ready_s: float
    place: int
    begin_s: float | None = None
    used: dict[int, float] = field(default_factory=dict)
    """How much its ranks' links had been used when it was looked at."""


class _Clock:
    """State of one run of the programs."""

    def __init__(self, programs: Sequence[StepProgram], group_of: Ranks, cost: CostOf) -> None:
        self.programs, self.group_of, self.cost_of = programs, group_of, cost
        self.n = len(programs)
        self.place = [0] * self.n
        self.now = [0.0] * self.n
        self.ended: list[dict[str, float]] = [{} for _ in programs]
        self.begun: list[dict[str, float]] = [{} for _ in programs]
        self.spans: list[dict[int, OpSpan]] = [{} for _ in programs]
        self.posts: list[dict[int, float]] = [{} for _ in programs]
        self.open: list[dict[int, int]] = [{} for _ in programs]
        """Operation -> its messages that are not there yet."""
        self.ready: list[dict[int, tuple[float, float]]] = [{} for _ in programs]
        self.meetings: dict[Key, _Meeting] = {}
        self.queue: list[tuple[float, int, int, Key]] = []
        self.out_free, self.in_free = [0.0] * self.n, [0.0] * self.n
        self.busy = [0.0] * self.n
        """Seconds that a rank's link has been used so far, apart from reductions of gradients."""
        self.bulk: dict[Key, _Bulk] = {}
        """Reductions of gradients under way, and those that wait for their ranks' links, by the order in which they are due."""
        self.number = 0
        self.counts: list[dict[Key, int]] = [{} for _ in programs]
        self.early = [self._posted_early(program) for program in programs]

    @staticmethod
    def _posted_early(program: StepProgram) -> dict[str, list[int]]:
        """Operation -> those that are posted at its end, long before their place."""
        found: dict[str, list[int]] = {}
        for i, op in enumerate(program.ops):
            if op.posted_after:
                found.setdefault(op.posted_after, []).append(i)
        return found

    def to_the_end(self) -> None:
        """Let every rank go on as far as it can, then end whatever is under way and ready first."""
        for rank in range(self.n):
            self._advance(rank)
        while self.queue:
            at, _, _, key = heapq.heappop(self.queue)
            for rank in self._flow(at, key) if self._is_bulk(key) else self._end(key):
                self._advance(rank)
        stuck = [
            Problem(
                where=f"rank {rank}",
                value=program.ops[self.place[rank]].id,
                rule="deadlocks: what it waits for never comes",
            )
            for rank, program in enumerate(self.programs)
            if self.place[rank] < len(program.ops)
        ]
        raise_if(stuck, PlanError, subject="the programs")

    def result(self) -> tuple[tuple[OpSpan, ...], ...]:
        return tuple(tuple(spans[i] for i in sorted(spans)) for spans in self.spans)

    # ---- one rank ----------------------------------------------------------------------------------------------------------

    def _advance(self, rank: int) -> None:
        ops = self.programs[rank].ops
        while self.place[rank] < len(ops) and self._step(rank, self.place[rank], ops[self.place[rank]]):
            self.place[rank] += 1

    def _step(self, rank: int, i: int, op: Op) -> bool:
        """Do the rank's next operation; whether it can go on behind it."""
        ended = self.ended[rank]
        if any(id not in ended for id in (*op.needs, *op.streams)):
            return False
        begin = max([self.now[rank], *(ended[id] for id in op.needs)])
        if op.kind != "collective":
            self._work(rank, i, op, begin)
            return True
        if i not in self.posts[rank]:
            self._post(rank, i, op, begin)
        if op.beside:
            return True
        if op.id not in ended:
            return False
        self.now[rank] = max(self.now[rank], ended[op.id])
        return True

    def _work(self, rank: int, i: int, op: Op, begin: float) -> None:
        cost = self.cost_of(op, (rank,))
        end = max([begin + cost.seconds, *(self.ended[rank][id] + cost.seconds / op.pieces for id in op.streams)])
        self.spans[rank][i] = OpSpan(op, rank, begin, begin, end, cost)
        self.now[rank] = end
        self._over(rank, op.id, begin, end)

    def _first_piece(self, rank: int, id: str, pieces: int) -> float:
        begin, end = self.begun[rank][id], self.ended[rank][id]
        return begin + (end - begin) / pieces

    def _over(self, rank: int, id: str, begin: float, end: float) -> None:
        self.begun[rank][id], self.ended[rank][id] = begin, end
        for j in self.early[rank].get(id, ()):
            self._post(rank, j, self.programs[rank].ops[j], end)

    # ---- several ranks -------------------------------------------------------------------------------------------------------

    def _post(self, rank: int, i: int, op: Op, when: float) -> None:
        if op.streams:
            when = min(self._first_piece(rank, id, op.pieces) for id in op.streams)
        self.posts[rank][i] = when
        keys = self._names(rank, op)
        self.open[rank][i] = len(keys)
        for key, end, wanted in keys:
            meeting = self.meetings.setdefault(key, _Meeting({}, wanted))
            meeting.parts[end] = (rank, i, when)
            if len(meeting.parts) == meeting.wanted:
                ready = max(posted for _, _, posted in meeting.parts.values())
                self._due(ready, max(place for _, place, _ in meeting.parts.values()), key)

    def _due(self, when: float, place: int, key: Key) -> None:
        """What is due at one time comes in the order of the programs."""
        self.number += 1
        heapq.heappush(self.queue, (when, place, self.number, key))

    def _names(self, rank: int, op: Op) -> list[tuple[Key, Key, int]]:
        """(what the others call it too, this rank's end of it, how many ends it has); what comes again under one name is counted."""
        group = self.group_of(rank, op.axis)
        place = read_op_id(op.id)
        name = op.id if place.layer is None else f"L{place.layer}.{place.phase}.{place.name}"
        if op.collective != "exchange":
            return [(self._counted(rank, ("all", name, op.collective, group)), (rank,), len(group))]
        several = op.peers or None
        sends = () if op.sends_to is None else several or (op.sends_to,)
        receives = () if op.receives_from is None else several or (op.receives_from,)
        out: list[tuple[Key, Key, int]] = []
        for peer in sends:
            out.append((self._counted(rank, ("message", name, rank, group[peer])), ("from",), 2))
        for peer in receives:
            out.append((self._counted(rank, ("message", name, group[peer], rank)), ("to",), 2))
        return out

    def _counted(self, rank: int, name: Key) -> Key:
        times = self.counts[rank].get(name, 0)
        self.counts[rank][name] = times + 1
        return (*name, times)

    def _end(self, key: Key) -> list[int]:
        """A meeting takes place; the ranks that may go on."""
        meeting = self.meetings.pop(key)
        parts = meeting.parts.values()
        ready = max(posted for _, _, posted in parts)
        if key[0] == "message":
            src, dst = key[2], key[3]
            begin = max(ready, self.out_free[src], self.in_free[dst])
            rank, i, _ = meeting.parts[("from",)]
            cost = self.cost_of(self.programs[rank].ops[i], (src, dst))
            end = begin + cost.seconds
            end += self._shared((src, dst), cost.seconds)
            self.out_free[src] = self.in_free[dst] = end
        else:
            cost = self._dearest(key, meeting)
            begin = max([ready, *(max(self.out_free[rank], self.in_free[rank]) for rank, _, _ in parts)])
            over = begin + cost.seconds + self._shared([rank for rank, _, _ in parts], cost.seconds)
            for rank, _, _ in parts:
                self.out_free[rank] = self.in_free[rank] = over
            end = max([over, *(self._after_streams(rank, i, cost.seconds) for rank, i, _ in parts)])
        return [rank for rank, i, _ in parts if self._arrived(rank, i, ready, end, cost)]

    def _dearest(self, key: Key, meeting: _Meeting) -> Cost:
        """What a collective takes: that of whoever says most."""
        costs = [self.cost_of(self.programs[rank].ops[i], key[3]) for rank, i, _ in meeting.parts.values()]
        return max(costs, key=lambda c: c.seconds)

    # ---- reductions beside passes ------------------------------------------------------------------------------------------

    def _is_bulk(self, key: Key) -> bool:
        return key[0] == "all" and str(key[1]).startswith("gradient/")

    def _shared(self, ranks: Sequence[int], seconds: float) -> float:
        """What a message takes longer beside a reduction; and it is counted."""
        beside = any(flow.begin_s is not None and not flow.ranks.isdisjoint(ranks) for flow in self.bulk.values())
        for rank in ranks:
            self.busy[rank] += seconds
        return seconds if beside else 0.0

    def _flow(self, now: float, key: Key) -> list[int]:
        """A reduction is due to begin or to end: it begins when its ranks have no other under way, and ends when nothing has used their links meanwhile."""
        flow = self.bulk.get(key)
        if flow is None:
            meeting = self.meetings[key]
            ranks, places, posted = zip(*meeting.parts.values(), strict=True)
            flow = self.bulk[key] = _Bulk(frozenset(ranks), self._dearest(key, meeting), max(posted), max(places))
        if flow.begin_s is None:
            self._begin_flow(now, key, flow)
            return []
        used = max(self.busy[rank] - flow.used[rank] for rank in flow.ranks)
        if used > 0:
            flow.used = {rank: self.busy[rank] for rank in flow.ranks}
            self._due(now + used, flow.place, key)
            return []
        del self.bulk[key]
        for other, waiting in self.bulk.items():
            if waiting.begin_s is None:
                self._begin_flow(now, other, waiting)
        parts = self.meetings.pop(key).parts.values()
        return [rank for rank, i, _ in parts if self._arrived(rank, i, flow.ready_s, now, flow.cost)]

    def _begin_flow(self, now: float, key: Key, flow: _Bulk) -> None:
        before = [other for other in self.bulk.values() if other is not flow and other.ranks & flow.ranks]
        if any(other.begin_s is not None for other in before):
            return
        flow.begin_s, flow.used = now, {rank: self.busy[rank] for rank in flow.ranks}
        under_way = max(max(self.out_free[rank], self.in_free[rank]) for rank in flow.ranks) - now
        self._due(now + flow.cost.seconds + max(0.0, under_way), flow.place, key)

    def _after_streams(self, rank: int, i: int, seconds: float) -> float:
        op = self.programs[rank].ops[i]
        return max((self.ended[rank][id] + seconds / op.pieces for id in op.streams), default=0.0)

    def _arrived(self, rank: int, i: int, ready: float, end: float, cost: Cost) -> bool:
        """One meeting of an operation is over; whether it was the last."""
        op = self.programs[rank].ops[i]
        before = self.ready[rank].get(i, (0.0, 0.0))
        self.ready[rank][i] = (max(ready, before[0]), max(end, before[1]))
        self.open[rank][i] -= 1
        if self.open[rank][i]:
            return False
        ready, end = self.ready[rank].pop(i)
        begin = self.posts[rank][i]
        self.spans[rank][i] = OpSpan(op, rank, begin, ready, end, cost)
        self._over(rank, op.id, begin, end)
        return True

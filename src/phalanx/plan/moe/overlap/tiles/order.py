"""Decides in which order one rank carries out the operations of one MoE layer.

Decides the order from a `TileSchedule` and from how many parts each rank has for each other, nothing else. Every order here keeps
three promises, which
`check.py` tests without this file:

- what an operation needs stands before it in the same list, or is sent by a rank that never waits for it first;
- all sends stand before the first wait and all returns before the first wait_return. So every message is on its way before anyone
waits for an answer
  to it, and no set of ranks can wait in a circle, whatever the orders of the others;
- `sum` is last.

Distance: parts of ranks on the own host are expected before those of other hosts; within either, rank r sends to r+1, r+2, ... (no
receiver is
everybody's first), so rows from r-1 are expected first, then r-2. The way back mirrors that.

With gateways (`hosts.py`) a rank also waits for what it passes on. No circle can close, because

- `relay` needs nothing but a send, and parts from other hosts are waited for in the order of their numbers: a wait of part k
stands behind all relays of parts up to
  k. So whoever waits for part k from a gateway waits for a rank that waits, at most, for parts below k;
- `merge` of part k stands behind all relays and all own returns of parts up to k to other hosts: a rank whose return of part k is
missing waits, at most, for
  merges of parts below k;
- all merges stand before the first wait_return.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np

from phalanx.core.errors import Problem
from phalanx.plan.moe.overlap.tiles.types import Order, TileOp, TileSchedule

NONE = -1
"""Stands in place of a part: no rows."""


@dataclass(frozen=True)
class JointSlot:
    """Parts in which the rows of a joint slot come, by source."""

    slot: int
    first: tuple[int, ...]
    """The first part that has any, NONE where a source has none."""
    last: tuple[int, ...]

    def needs(self) -> list[tuple[int, int]]:
        """(source, part): what must be there before its first product."""
        return [(p, part) for p, part in enumerate(self.last) if part != NONE]

    def has_rows_of(self, source: int, part: int) -> bool:
        """Whether rows of a source up to a part are among its own."""
        return self.first[source] != NONE and self.first[source] <= part


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How many parts there are on one rank and how far away their peers are. All by position in `ep_etp`."""

    rank: int
    come: tuple[int, ...]
    """Parts of each source's tiles here."""
    go: tuple[int, ...]
    """Parts that each rank has of this rank's tiles."""
    is_far: tuple[bool, ...]
    """Not on this rank's host."""
    blocks: int
    num_slots: int
    relay: tuple[int, ...] = ()
    """Parts of each source that this rank passes on inside its host; empty where messages go straight."""
    joint: tuple[JointSlot, ...] = ()
    """Slots whose rows of all sources are multiplied together; none where messages go through gateways."""

    @property
    def size(self) -> int:
        return len(self.come)

    def to_send(self) -> list[TileOp]:
        """Part by part, in ring order from the next rank on."""
        ring = [(self.rank + step) % self.size for step in range(1, self.size)]
        return [TileOp("send", p, part) for part in range(max(self.go)) for p in ring if part < self.go[p]]

    def arriving(self) -> list[tuple[int, int]]:
        """(source, part) of the others, in the order in which they are expected."""
        return self._by_distance(self.come, sign=-1)

    def returning(self) -> list[tuple[int, int]]:
        """(rank, part) of the results of the others, in the order in which they are expected."""
        return self._by_distance(self.go, sign=1)

    def relaying(self) -> list[tuple[int, int]]:
        """(source, part) to pass on, in the order in which they are expected."""
        found = [(p, part) for p, parts in enumerate(self.relay) for part in range(parts)]
        return sorted(found, key=lambda pp: (pp[1], (self.rank - pp[0]) % self.size))

    def own(self) -> list[tuple[int, int]]:
        return [(self.rank, part) for part in range(self.come[self.rank])]

    def _by_distance(self, parts: Sequence[int], *, sign: int) -> list[tuple[int, int]]:
        found = [(p, part) for p in range(self.size) if p != self.rank for part in range(parts[p])]
        return sorted(found, key=lambda pp: (self.is_far[pp[0]], pp[1], sign * (pp[0] - self.rank) % self.size))


def tile_schedule_problems(schedule: TileSchedule) -> list[Problem]:
    """What is wrong with a schedule by itself."""
    problems = []
    for name in ("parts", "blocks"):
        value = getattr(schedule, name)
        if value < 1:
            problems.append(Problem(where=f"schedule.{name}", value=value, rule="at least 1", hint="1 cuts nothing"))
    if schedule.order not in get_args(Order):
        rule = f"one of {', '.join(get_args(Order))}"
        problems.append(Problem(where="schedule.order", value=schedule.order, rule=rule))
    if not 0 <= schedule.own_before <= 1:
        rule = "a share between 0 and 1"
        problems.append(Problem(where="schedule.own_before", value=schedule.own_before, rule=rule))
    elif schedule.own_before != 1 and (schedule.order != "arrival" or schedule.seed is not None):
        rule = "has an effect with order = 'arrival' and no seed only"
        problems.append(Problem(where="schedule.own_before", value=schedule.own_before, rule=rule, hint="1.0 is legal"))
    if schedule.seed is not None and schedule.seed < 0:
        problems.append(Problem(where="schedule.seed", value=schedule.seed, rule="not negative"))
    return problems


@lru_cache(maxsize=64)
def forward_order(schedule: TileSchedule, parts: Parts, *, has_shared: bool) -> tuple[TileOp, ...]:
    """All operations of the forward pass; `shared` among them if there is something to compute in a gap.

    Remembered: from batch to batch rows change, and how many parts there are hardly ever does.
    """
    shared = [TileOp("shared")] if has_shared else []
    if schedule.seed is not None:
        return _drawn([*_serial(parts, shared)], parts, seed=(schedule.seed, parts.rank))
    if schedule.order == "serial":
        return tuple(_serial(parts, shared))
    before = schedule.own_before if schedule.order == "arrival" else 1.0
    return tuple(_overlapped(parts, shared, own_first=schedule.order == "own_first", before=before))


def with_weights(ops: Sequence[TileOp], parts: Parts, *, schedule: TileSchedule) -> tuple[TileOp, ...]:
    """The backward list: the forward one with the gradients of all local slots' weights.

    They need all rows of their slot. With overlap they run while the last results travel, in serial order before anything goes back.
    """
    weights = [TileOp("weights", part=slot) for slot in range(parts.num_slots)]
    if schedule.seed is not None:
        return _drawn([*ops[:-1], *weights, ops[-1]], parts, seed=(schedule.seed, parts.rank, 1))
    stop = ("return",) if schedule.order == "serial" else ("shared", "wait_return")
    at = next((i for i, op in enumerate(ops) if op.kind in (*stop, "sum")), len(ops))
    return (*ops[:at], *weights, *ops[at:])


def _serial(parts: Parts, shared: Iterable[TileOp]) -> list[TileOp]:
    """Each phase after the other, as a system without overlap does it; the shared expert hides nothing."""
    here = [*parts.own(), *parts.arriving()]
    cells = [(p, part, block) for p, part in here for block in range(parts.blocks)]
    return [
        *parts.to_send(),
        *(TileOp("relay", *part) for part in parts.relaying()),
        *(TileOp("wait", p, part) for p, part in here if p != parts.rank),
        *(TileOp("first", p, part) for p, part in here),
        *(TileOp("first_all", part=joint.slot) for joint in parts.joint),
        *(TileOp("second", *cell) for cell in cells),
        *(TileOp("second_all", part=joint.slot, block=block) for joint in parts.joint for block in range(parts.blocks)),
        *(TileOp("return", *cell) for cell in cells),
        *_merges(parts),
        *_wait_returns(parts),
        *shared,
        TileOp("sum"),
    ]


def _overlapped(parts: Parts, shared: Iterable[TileOp], *, own_first: bool, before: float) -> list[TileOp]:
    """Own rows while others travel; each part that came goes back at once; what is left of the own rows while results travel."""
    own, way = parts.own(), _Way(parts)
    early = int(before * len(own) + 0.5)
    ops = way.ops
    ops += [*parts.to_send(), *(TileOp("first", *part) for part in own[:early])]
    way.come()
    if own_first:
        way.back(own)
    relays, merges = [TileOp("relay", *part) for part in parts.relaying()], _merges(parts)
    for part in parts.arriving():
        if parts.is_far[part[0]]:  # what others wait for comes before own rows of the same number
            now, relays = _up_to(part[1], relays)
            ops += now
            if not relays:
                now, merges = _up_to(part[1] - 1, merges)
                ops += now
        ops += [TileOp("wait", *part), TileOp("first", *part)]
        way.back([part])
        way.come(part)
    ops += relays
    if not own_first:
        way.back(own[:early])
    ops += merges
    if not own_first:
        for part in own[early:]:
            ops.append(TileOp("first", *part))
            way.back([part])
    return [*ops, *shared, *_wait_returns(parts), TileOp("sum")]


class _Way:
    """A list that grows: products of joint slots as soon as their rows are there, and results that go back as soon as they are complete."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.ops = parts, list[TileOp]()
        self.missing = [(joint, set(joint.needs()) - {*parts.own()}) for joint in parts.joint]
        """Joint slots that have not been multiplied, and the (source, part) that have not come of them."""
        self.late: dict[tuple[int, int], int] = {}
        """Joint slots that the way back of (source, part) waits for."""

    def back(self, parts: Iterable[tuple[int, int]]) -> None:
        """Second product and way back of some parts, block by block."""
        for part in parts:
            waits = sum(joint.has_rows_of(*part) for joint, _ in self.missing)
            if waits:
                self.late[part] = waits
            for block in range(self.parts.blocks):
                self.ops.append(TileOp("second", *part, block))
                if not waits:
                    self.ops.append(TileOp("return", *part, block))

    def come(self, part: tuple[int, int] | None = None) -> None:
        """A part has come: both products of joint slots of which all rows are there, and what goes back with them."""
        for _, missing in self.missing:
            missing.discard(part or (NONE, NONE))
        for joint in [joint for joint, missing in self.missing if not missing]:
            complete = self._without(joint)
            self.ops.append(TileOp("first_all", part=joint.slot))
            for block in range(self.parts.blocks):
                self.ops.append(TileOp("second_all", part=joint.slot, block=block))
                self.ops += [TileOp("return", *back, block) for back in complete]
        self.missing = [(joint, missing) for joint, missing in self.missing if missing]

    def _without(self, joint: JointSlot) -> list[tuple[int, int]]:
        """Parts whose way back waits for nothing else."""
        for part in self.late:
            self.late[part] -= joint.has_rows_of(*part)
        complete = [part for part, waits in self.late.items() if not waits]
        for part in complete:
            del self.late[part]
        return complete


def _up_to(part: int, ops: Sequence[TileOp]) -> tuple[list[TileOp], list[TileOp]]:
    """Those of parts up to `part`, and the others."""
    return [op for op in ops if op.part <= part], [op for op in ops if op.part > part]


def _merges(parts: Parts) -> list[TileOp]:
    return [TileOp("merge", p, part, block) for p, part in parts.relaying() for block in range(parts.blocks)]


def _wait_returns(parts: Parts) -> list[TileOp]:
    return [TileOp("wait_return", p, part, block) for p, part in parts.returning() for block in range(parts.blocks)]


def _needs(ops: Sequence[TileOp], parts: Parts) -> list[list[int]]:
    """Places in `ops` of what must stand before each operation; `sum` is not among them."""
    place = {(op.kind, op.peer, op.part, op.block): at for at, op in enumerate(ops)}
    kinds = ("send", "return", "first", "first_all", "relay", "merge")
    all_of = {kind: [at for at, op in enumerate(ops) if op.kind == kind] for kind in kinds}

    def needs(op: TileOp) -> list[int]:
        p, earlier = op.peer, range(op.part + 1)
        if op.kind == "send":
            return [place["send", p, op.part - 1, -1]] if op.part else []
        if op.kind == "relay":
            return all_of["send"]
        if op.kind == "wait":
            relays = [at for at in all_of["relay"] if ops[at].part <= op.part and parts.is_far[p]]
            return all_of["send"] + relays
        if op.kind == "first":
            return [] if p == parts.rank else [place["wait", p, part, -1] for part in earlier]
        if op.kind == "second":
            return [place["first", p, op.part, -1]]
        if op.kind == "first_all":
            joint = next(joint for joint in parts.joint if joint.slot == op.part)
            return [
                place["wait", *there, -1]
                for p, k in joint.needs()
                if p != parts.rank
                for there in ((p, part) for part in range(k + 1))
            ]
        if op.kind == "second_all":
            return [place["first_all", -1, op.part, -1]]
        if op.kind == "return":
            joints = [joint.slot for joint in parts.joint if joint.has_rows_of(p, op.part)]
            together = [place["second_all", -1, slot, op.block] for slot in joints]
            return [place["second", p, part, op.block] for part in earlier] + together
        if op.kind == "merge":
            far = [at for at in all_of["return"] if ops[at].part <= op.part and parts.is_far[ops[at].peer]]
            return all_of["relay"] + far
        if op.kind == "wait_return":
            return all_of["send"] + all_of["return"] + all_of["merge"]
        return all_of["first"] + all_of["first_all"] if op.kind == "weights" else []

    return [needs(op) for op in ops]


def _drawn(ops: Sequence[TileOp], parts: Parts, *, seed: Sequence[int]) -> tuple[TileOp, ...]:
    """Any legal order, drawn: of what could come next, each is as likely as the other. `sum` comes last."""
    rng = np.random.default_rng(seed)
    *ops, last = ops  # the last is sum
    needs = _needs(ops, parts)
    missing = [len(before) for before in needs]
    then: list[list[int]] = [[] for _ in ops]
    for at, before in enumerate(needs):
        for other in before:
            then[other].append(at)
    ready = [at for at, number in enumerate(missing) if not number]
    order = []
    for draw in rng.random(len(ops)).tolist():
        chosen = int(draw * len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        done = ready.pop()
        order.append(ops[done])
        for at in then[done]:
            missing[at] -= 1
            if not missing[at]:
                ready.append(at)
    return (*order, last)

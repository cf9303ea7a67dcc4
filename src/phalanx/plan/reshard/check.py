"""Does a plan of a move do what its layouts ask for? An independent check: it shares no code with the planner and believes none of its intermediate results.

Decides nothing. It follows the messages one by one and the layouts box by box:

    coverage    every element that a rank needs reaches it exactly once: by a copy, a message or a sum; nothing else reaches it
    causality   a sender holds what it sends in its source, or it came by an earlier message, or all terms of it did
    once        a byte enters a host at most once, and never where a rank of the host holds it (plans of our own)
    order       every rank doing its messages one at a time, each waiting for the other side, all come to their end
    staging     no message is larger than the plan says, and the cap is kept

Times, lanes and the bound are checked by `check_time.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import Problem
from phalanx.plan.layout import Box, TensorLayout
from phalanx.plan.reshard.check_time import TimedPlan, bound_problems, time_problems
from phalanx.plan.reshard.types import Hop, MovePart, Reduction

SHOWN = 20
"""Problems of one kind that are listed."""
DUPLICATES = ("send_recv",)
"""Methods that bring a byte into a host more than once on purpose."""

Corners = NDArray[np.int64]


class CheckedPlan(TimedPlan, Protocol):
    """What the check reads of a plan."""

    @property
    def message_bytes(self) -> int: ...
    @property
    def open_hops(self) -> int: ...
    @property
    def staging_bytes(self) -> int | None: ...
    @property
    def reductions(self) -> tuple[Reduction, ...]: ...
    def program(self, rank: int) -> tuple[Hop, ...]: ...
    def copies(self, rank: int) -> tuple[MovePart, ...]: ...


def reshard_plan_problems(plan: CheckedPlan) -> list[Problem]:
    """Everything that is wrong with a plan."""
    delivery = _Delivery(plan)
    problems = delivery.run()
    problems += _staging_problems(plan)
    problems += message_order_problems(plan)
    problems += time_problems(plan)
    return problems + bound_problems(plan)


class Boxes:
    """A growing set of boxes of one tensor."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._boxes: list[Box] = []
        self._known: set[Box] = set()
        self._corners: tuple[int, Corners, Corners] | None = None

    def add(self, box: Box) -> None:
        self._boxes.append(box)
        self._known.add(box)

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def corners(self) -> tuple[Corners, Corners]:
        """(n, dims) first index and end of each."""
        if self._corners is None or self._corners[0] != len(self._boxes):
            low = np.array([b.offsets for b in self._boxes], dtype=np.int64).reshape(len(self._boxes), self.dims)
            size = np.array([b.sizes for b in self._boxes], dtype=np.int64).reshape(len(self._boxes), self.dims)
            self._corners = len(self._boxes), low, low + size
        return self._corners[1], self._corners[2]

    def shared(self, box: Box) -> int:
        """Elements of `box` in all boxes together, one that is in two counted twice."""
        if not self._boxes:
            return 0
        low, high = self.corners()
        start = np.array(box.offsets, dtype=np.int64)
        stop = start + np.array(box.sizes, dtype=np.int64)
        return int(np.clip(np.minimum(high, stop) - np.maximum(low, start), 0, None).prod(axis=1).sum())

    def covers(self, box: Box) -> bool:
        """Whether all of `box` is there, where the boxes are disjoint."""
        return box in self._known or self.shared(box) == math.prod(box.sizes)

    def overlap(self) -> Box | None:
        """A box that shares elements with another."""
        low, high = self.corners()
        if not self.dims:
            return self._boxes[0] if len(self._boxes) > 1 else None
        order = np.argsort(low[:, 0], kind="stable")
        low, high = low[order], high[order]
        for i in range(len(low) - 1):
            stop = int(np.searchsorted(low[:, 0], high[i, 0], side="left"))
            rest = slice(i + 1, stop)
            if ((low[rest] < high[i]) & (high[rest] > low[i])).all(axis=1).any():
                return self._boxes[int(order[i])]
        return None

    def volume(self) -> int:
        low, high = self.corners()
        return int((high - low).prod(axis=1).sum()) if len(self._boxes) else 0


class _Delivery:
    """Follows the messages in their order."""

    def __init__(self, plan: CheckedPlan) -> None:
        self.plan = plan
        self.dims = [len(move.src.shape) for move in plan.moves]
        self.problems: list[Problem] = []
        self.received: dict[tuple[int, int], Boxes] = {}
        self.terms: dict[tuple[int, int, int], Boxes] = {}
        self.entered: dict[tuple[int, int, int], Boxes] = {}
        self.sums: dict[tuple[int, int], list[Box]] = defaultdict(list)
        for reduction in plan.reductions:
            self.sums[reduction.rank, reduction.move].append(reduction.box)
        self._held: dict[tuple[int, int], Boxes] = {}
        self._place: dict[int, dict[int, int]] = {}

    def run(self) -> list[Problem]:
        hosts = self.plan.hosts.host_of_rank
        for number, hop in enumerate(self.plan.hops):
            if hop.src == hop.dst or not hop.parts:
                self._say(f"message {number}", "goes from a rank to another and carries something")
            for part in hop.parts:
                self._sender(number, hop, part)
                self._take(hop, part, crosses=hosts[hop.src] != hosts[hop.dst])
        self._sums()
        self._coverage()
        if self.plan.method not in DUPLICATES:
            self._once()
        return self.problems[:SHOWN]

    def _say(self, where: str, rule: str) -> None:
        self.problems.append(Problem(where=where, value=None, rule=rule))

    def _name(self, move: int, box: Box) -> str:
        spans = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
        return f"{self.plan.moves[move].name}[{spans}]"

    def _at(self, layout: TensorLayout, rank: int) -> int | None:
        if id(layout) not in self._place:
            self._place[id(layout)] = {r: i for i, r in enumerate(layout.ranks)}
        return self._place[id(layout)].get(rank)

    def _of_layout(self, layout: TensorLayout, rank: int) -> Boxes:
        key = id(layout), rank
        if key not in self._held:
            self._held[key] = Boxes(len(layout.shape))
            at = self._at(layout, rank)
            for held in layout.held[at] if at is not None else ():
                if held.box.num_elements:
                    self._held[key].add(held.box)
        return self._held[key]

    def _term(self, move: int, rank: int) -> int:
        src = self.plan.moves[move].src
        at = self._at(src, rank)
        return src.terms[at] if src.terms and at is not None else 0

    def _sender(self, number: int, hop: Hop, part: MovePart) -> None:
        src = self.plan.moves[part.move].src
        holds = self._of_layout(src, hop.src).covers(part.box)
        if part.term >= 0:
            right = holds and src.num_terms > 1 and self._term(part.move, hop.src) == part.term
        else:
            right = holds and src.num_terms == 1
            right = right or self.received.get((hop.src, part.move), Boxes(self.dims[part.move])).covers(part.box)
            right = right or self._added(hop.src, part)
        if not right:
            self._say(f"message {number}", f"rank {hop.src} sends {self._name(part.move, part.box)} before it has it")

    def _added(self, rank: int, part: MovePart) -> bool:
        """Whether a rank can have the sum of a box by now."""
        mine = self.sums.get((rank, part.move), [])
        made = Boxes(self.dims[part.move])
        for box in mine:
            made.add(box)
        return bool(mine) and made.covers(part.box) and self._all_terms(rank, part.move, part.box)

    def _all_terms(self, rank: int, move: int, box: Box) -> bool:
        src = self.plan.moves[move].src
        own = self._term(move, rank) if self._of_layout(src, rank).covers(box) else -1
        none = Boxes(self.dims[move])
        return all(term == own or self.terms.get((rank, move, term), none).covers(box) for term in range(src.num_terms))

    def _take(self, hop: Hop, part: MovePart, *, crosses: bool) -> None:
        dims = self.dims[part.move]
        if part.term >= 0:
            self.terms.setdefault((hop.dst, part.move, part.term), Boxes(dims)).add(part.box)
        else:
            self.received.setdefault((hop.dst, part.move), Boxes(dims)).add(part.box)
        if crosses:
            key = self.plan.hosts.host_of_rank[hop.dst], part.move, part.term
            self.entered.setdefault(key, Boxes(dims)).add(part.box)

    def _sums(self) -> None:
        for (rank, move, term), boxes in self.terms.items():
            added = Boxes(self.dims[move])
            for box in self.sums.get((rank, move), []):
                added.add(box)
            if boxes.overlap() is not None or any(not added.covers(box) for box in boxes):
                self._say(f"rank {rank}", f"gets term {term} of {self.plan.moves[move].name} twice, or adds it nowhere")
            if term == self._term(move, rank) and self._at(self.plan.moves[move].src, rank) is not None:
                source = self._of_layout(self.plan.moves[move].src, rank)
                if any(source.shared(box) for box in boxes):
                    self._say(f"rank {rank}", f"gets term {term} of {self.plan.moves[move].name}, which it holds")
        for (rank, move), added_boxes in self.sums.items():
            for box in added_boxes:
                if not self._all_terms(rank, move, box):
                    self._say(f"rank {rank}", f"adds {self._name(move, box)} without all of its terms")

    def _coverage(self) -> None:
        for rank in range(len(self.plan.hosts.host_of_rank)):
            copies: dict[int, list[Box]] = defaultdict(list)
            for part in self.plan.copies(rank):
                copies[part.move].append(part.box)
            for number, move in enumerate(self.plan.moves):
                got = Boxes(self.dims[number])
                arrived = self.received.get((rank, number))
                for box in [*copies.get(number, []), *(arrived or [])]:
                    got.add(box)
                for box in copies.get(number, []):
                    if move.src.num_terms > 1 or not self._of_layout(move.src, rank).covers(box):
                        self._say(f"rank {rank}", f"copies {self._name(number, box)}, which it does not hold")
                self._needs(rank, number, got)

    def _needs(self, rank: int, number: int, got: Boxes) -> None:
        """The boxes that a rank got, and the sums that it made, are what it needs."""
        needed = self._of_layout(self.plan.moves[number].dst, rank)
        for box in got:
            if not needed.covers(box):
                self._say(f"rank {rank}", f"gets {self._name(number, box)}, of which it does not need all")
        total = got.volume()
        for box in self.sums.get((rank, number), []):
            total += needed.shared(box)
            if got.shared(box):
                self._say(f"rank {rank}", f"gets {self._name(number, box)}, which it adds itself")
        double = got.overlap()
        if double is not None:
            self._say(f"rank {rank}", f"gets a part of {self._name(number, double)} twice")
        elif total != needed.volume():
            name = self.plan.moves[number].name
            self._say(f"rank {rank}", f"gets {total} of the {needed.volume()} elements of {name} that it needs")

    def _once(self) -> None:
        hosts = self.plan.hosts.host_of_rank
        for (host, number, term), boxes in self.entered.items():
            move = self.plan.moves[number]
            if boxes.overlap() is not None:
                self._say(f"host {host}", f"takes in a part of {move.name} twice")
            if term >= 0 or move.src.num_terms > 1:
                continue
            for rank in move.src.ranks:
                if hosts[rank] == host and any(self._of_layout(move.src, rank).shared(b) for b in boxes):
                    self._say(f"host {host}", f"takes in a part of {move.name} that its rank {rank} holds")


def _staging_problems(plan: CheckedPlan) -> list[Problem]:
    sizes = (sum(math.prod(p.box.sizes) * plan.moves[p.move].itemsize for p in hop.parts) for hop in plan.hops)
    largest = max(sizes, default=0)
    problems = []
    if largest > plan.message_bytes:
        rule = f"must be at most {plan.message_bytes}"
        problems.append(Problem(where="bytes of a message", value=largest, rule=rule))
    staging = 2 * plan.open_hops * plan.message_bytes
    if plan.staging_bytes is not None and staging > plan.staging_bytes:
        problems.append(Problem(where="staging", value=staging, rule=f"must be at most {plan.staging_bytes}"))
    return problems


def message_order_problems(plan: CheckedPlan) -> list[Problem]:
    """Let every rank do its messages one at a time, each waiting for its other side."""
    ranks = range(len(plan.hosts.host_of_rank))
    programs = [plan.program(rank) for rank in ranks]
    at = [0 for _ in ranks]
    ready = list(ranks)
    done = 0
    while ready:
        rank = ready.pop()
        if at[rank] == len(programs[rank]):
            continue
        hop = programs[rank][at[rank]]
        peer = hop.dst if hop.src == rank else hop.src
        if (
            peer != rank
            and rank in (hop.src, hop.dst)
            and at[peer] < len(programs[peer])
            and programs[peer][at[peer]] == hop
        ):
            at[rank] += 1
            at[peer] += 1
            done += 1
            ready += [rank, peer]
    stuck = [rank for rank in ranks if at[rank] < len(programs[rank])]
    problems = []
    if stuck:
        rule = "deadlocks: the other side of its next message waits for another one"
        problems.append(Problem(where=f"rank {stuck[0]}", value=None, rule=rule))
    if not stuck and done != len(plan.hops):
        rule = f"the ranks' programs have {done} messages, the plan {len(plan.hops)}"
        problems.append(Problem(where="programs", value=None, rule=rule))
    return problems

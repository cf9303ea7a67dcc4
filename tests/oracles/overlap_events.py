"""All ranks' plans of overlap carried out together by a clock: what happens when, whatever arrives when.

Decides nothing and trusts nothing: it keeps for each rank which entries are there, which tiles are done and which results are back, and reports an operation that
runs without its inputs, a tile that is done twice or never, a message that nobody expects, and ranks that wait for ever. How long operations and messages take is
handed in: from a generator (adversarial: some messages are 100,000 times slower than others, so they arrive in any order) or from a cost model.

Messages between the same two ranks may overtake each other. `at` and all times are seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.tiles.types import RankPlan, TileOp

__all__ = ["Adversary", "Event", "Timing", "Trace", "simulate"]


class Timing(Protocol):
    """How long things take. Called in the order of time."""

    def ends(self, plan: RankPlan, op: TileOp, at: float) -> float:
        """When an operation ends that its rank begins at `at` (waits: the time until the message is not counted)."""

    def arrives(self, plan: RankPlan, op: TileOp, at: float) -> float:
        """When the message of a send, return or merge arrives that is posted at `at`."""

    def forwards(self, plan: RankPlan, op: TileOp, at: float, to: int) -> float:
        """When what a relay passes on at `at` is at rank `to` of its host."""


class Adversary:
    """Times drawn to do harm: operations take up to a second, messages from a hundredth of a second to a thousand."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._drawn: list[float] = []

    def _next(self) -> float:
        if not self._drawn:
            self._drawn = self._rng.random(512).tolist()
        return self._drawn.pop()

    def ends(self, plan: RankPlan, op: TileOp, at: float) -> float:
        return at + self._next()

    def arrives(self, plan: RankPlan, op: TileOp, at: float) -> float:
        return at + float(10.0 ** (5 * self._next() - 2))

    def forwards(self, plan: RankPlan, op: TileOp, at: float, to: int) -> float:
        return self.arrives(plan, op, at)


class Event(NamedTuple):
    """One operation as it happened. A wait lasts as long as its rank was blocked."""

    rank: int
    op: TileOp
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """What happened, in the order of the beginnings."""

    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max((event.end_s for event in self.events), default=0.0)

    def blocked_s(self, rank: int) -> float:
        """Seconds in which a rank did nothing but wait."""
        waits = (e for e in self.events if e.rank == rank and e.op.kind in WAITS)
        return sum(event.end_s - event.start_s for event in waits)


def simulate(plans: Sequence[RankPlan], timing: Timing | np.random.Generator) -> Trace:
    """Carry out the plans of all ranks of a group (in the order of their ranks) and return what happened.

    Raises `PlanError` with everything that went wrong: this is the proof that plans fit each other, not only themselves.
    """
    run = _Run(plans, Adversary(timing) if isinstance(timing, np.random.Generator) else timing)
    raise_if([*run.problems_of_fit()], PlanError, subject="overlap plans of a group")
    run.go()
    raise_if([*run.problems, *run.problems_at_end()], PlanError, subject="overlap plans of a group")
    return Trace(tuple(run.events))


WAITS = ("wait", "wait_return", "relay", "merge")
"""Operations that last until messages are there."""


class Message(NamedTuple):
    """By whose rows it is about: from their source to a rank, or from the rank that computed with them back; whoever passes it on in between."""

    source: int
    target: int
    part: int
    block: int = -1
    """-1 on the way there."""
    leg: Literal["", "to a gateway", "from a gateway"] = ""


@dataclass(slots=True)
class _State:
    """What one rank has: counts by (peer, part[, block])."""

    plan: RankPlan
    next_op: int = 0
    here: set[tuple[int, int]] = field(default_factory=set)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    second: dict[tuple[int, int, int], int] = field(default_factory=dict)
    first_all: dict[int, int] = field(default_factory=dict)
    """By joint slot."""
    second_all: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (joint slot, block)."""
    placed: set[tuple[int, int, int]] = field(default_factory=set)
    """Blocks of parts of own rows whose results are back: (rank that computed them, part, block)."""
    is_summed: bool = False

    def joint_of(self, source: int, part: int) -> set[int]:
        """Joint slots with rows of a source in a part."""
        plan = self.plan
        return {tile.slot for tile in plan.tiles_of_part(source, part)} & set(plan.joint) if plan.joint else set()

    def has_all_of(self, slot: int) -> bool:
        """Whether the rows of a joint slot are here, those before them among what their source sends too."""
        return all(
            (p, earlier) in self.here
            for p, ends in enumerate(self.plan.part_ends)
            if p != self.plan.rank
            for part in range(len(ends))
            if slot in self.joint_of(p, part)
            for earlier in range(part + 1)
        )


def is_far(plan: RankPlan, peer: int) -> bool:
    """Whether messages to and from a rank go through a gateway."""
    return bool(plan.hosts) and plan.hosts[peer] != plan.hosts[plan.rank]


class _Run:
    def __init__(self, plans: Sequence[RankPlan], timing: Timing) -> None:
        self.states = [_State(plan) for plan in plans]
        self.timing = timing
        self.posted: dict[Message, float] = {}
        """Message -> arrival."""
        self.blocked: dict[Message, tuple[float, int]] = {}
        """Messages that are not posted yet -> since when a rank waits for them, and which."""
        self.taken: set[Message] = set()
        self.events: list[Event] = []
        self.problems: list[Problem] = []
        self.ready = [(0.0, rank) for rank in range(len(plans))]

    def problems_of_fit(self) -> Iterator[Problem]:
        for rank, state in enumerate(self.states):
            plan = state.plan
            if (plan.rank, plan.size) != (rank, len(self.states)):
                rule = f"rank {rank} of {len(self.states)}"
                yield Problem(where=f"plans[{rank}]", value=(plan.rank, plan.size), rule=rule)
                return
        for rank, state in enumerate(self.states):
            for peer, other in enumerate(self.states):
                if state.plan.peer_part_ends[peer] != other.plan.part_ends[rank]:
                    rule = f"what rank {peer} plans for the rows of rank {rank}: {other.plan.part_ends[rank]}"
                    value = state.plan.peer_part_ends[peer]
                    yield Problem(where=f"plans[{rank}].peer_part_ends[{peer}]", value=value, rule=rule)
            yield from self._hosts_that_do_not_fit(rank, state.plan)

    def _hosts_that_do_not_fit(self, rank: int, plan: RankPlan) -> Iterator[Problem]:
        if plan.hosts != self.states[0].plan.hosts:
            rule = f"those of rank 0: {self.states[0].plan.hosts}"
            yield Problem(where=f"plans[{rank}].hosts", value=plan.hosts, rule=rule)
            return
        for source, parts in enumerate(plan.relay_parts):
            most = max(len(self.states[peer].plan.part_ends[source]) for peer in self.on_host_of(plan))
            if parts not in (0, most):
                rule = f"the most parts that a rank of its host has of rank {source}: {most}"
                yield Problem(where=f"plans[{rank}].relay_parts[{source}]", value=parts, rule=rule)

    @staticmethod
    def on_host_of(plan: RankPlan) -> list[int]:
        return [peer for peer, host in enumerate(plan.hosts) if host == plan.hosts[plan.rank]]

    def awaited(self, plan: RankPlan, op: TileOp) -> list[Message]:
        """The messages that an operation waits for."""
        peer, rank = op.peer, plan.rank
        if op.kind == "relay":
            return [Message(peer, rank, part, leg="to a gateway") for part in range(op.part + 1)]
        if op.kind == "merge":
            return [
                Message(other, peer, part, op.block)
                for other in self.on_host_of(plan)
                for part in range(min(op.part + 1, len(self.states[other].plan.part_ends[peer])))
            ]
        if op.kind == "wait_return" and is_far(plan, peer):
            return [Message(peer, rank, op.part, op.block, "from a gateway")]
        return [Message(peer, rank, op.part, op.block)]

    def go(self) -> None:
        """One operation at a time, always of the rank whose clock is least."""
        while self.ready:
            at, rank = heapq.heappop(self.ready)
            state = self.states[rank]
            if state.next_op == len(state.plan.ops):
                continue
            op = state.plan.ops[state.next_op]
            end = at
            if op.kind in WAITS:
                messages = self.awaited(state.plan, op)
                missing = next((message for message in messages if message not in self.posted), None)
                if missing is not None:
                    self.blocked[missing] = (at, rank)
                    continue
                end = max([at, *(self.posted[message] for message in messages)])
                self.taken.update(messages)
            if op.kind not in ("wait", "wait_return"):
                end = self.timing.ends(state.plan, op, end)
            self.carry_out(state, op, at=end)
            state.next_op += 1
            self.events.append(Event(rank, op, at, end))
            heapq.heappush(self.ready, (end, rank))

    def carry_out(self, state: _State, op: TileOp, *, at: float) -> None:
        rank, key = state.plan.rank, (op.peer, op.part, op.block)
        needs = True
        if op.kind in ("send", "merge"):
            self.post(state, op, at=at)
        elif op.kind == "relay":
            self.pass_on(state, op, at=at)
        elif op.kind == "wait":
            state.here.add(key[:2])
        elif op.kind == "first":
            needs = op.peer == rank or all((op.peer, part) in state.here for part in range(op.part + 1))
            state.first[key[:2]] = state.first.get(key[:2], 0) + 1
        elif op.kind == "second":
            needs = key[:2] in state.first
            state.second[key] = state.second.get(key, 0) + 1
        elif op.kind == "first_all":
            needs = state.has_all_of(op.part)
            state.first_all[op.part] = state.first_all.get(op.part, 0) + 1
        elif op.kind == "second_all":
            needs = op.part in state.first_all
            state.second_all[op.part, op.block] = state.second_all.get((op.part, op.block), 0) + 1
        elif op.kind == "return":
            earlier = range(op.part + 1)
            needs = all((op.peer, part, op.block) in state.second for part in earlier) and all(
                (slot, op.block) in state.second_all for part in earlier for slot in state.joint_of(op.peer, part)
            )
            if op.peer == rank:
                self.place(state, key)
            else:
                self.post(state, op, at=at)
        elif op.kind == "wait_return":
            self.place(state, key)
        elif op.kind == "weights":
            needs = all((p, k) in state.first for p, ends in enumerate(state.plan.part_ends) for k in range(len(ends)))
            needs = needs and state.first_all.keys() >= set(state.plan.joint)
        elif op.kind == "sum":
            needs, state.is_summed = not self.not_back(state), True
        if not needs:
            self.problem(state, op, "runs only when everything that it needs is there")

    def post(self, state: _State, op: TileOp, *, at: float) -> None:
        legs: dict[str, Literal["", "to a gateway", "from a gateway"]] = {
            "send": "to a gateway",
            "merge": "from a gateway",
        }
        if not 0 <= op.peer < len(self.states):
            self.problem(state, op, "each message goes to a rank of the group, once")
            return
        leg = legs.get(op.kind, "") if is_far(state.plan, op.peer) else ""
        message = Message(state.plan.rank, op.peer, op.part, op.block, leg)
        self.put(state, op, message, self.timing.arrives(state.plan, op, at))

    def pass_on(self, state: _State, op: TileOp, *, at: float) -> None:
        """To the ranks of this host; what is for this rank itself is there."""
        rank = state.plan.rank
        for to in self.on_host_of(state.plan):
            if op.part < len(self.states[to].plan.part_ends[op.peer]):
                arrival = at if to == rank else self.timing.forwards(state.plan, op, at, to)
                self.put(state, op, Message(op.peer, to, op.part), arrival)

    def put(self, state: _State, op: TileOp, message: Message, arrival: float) -> None:
        if message in self.posted:
            self.problem(state, op, "each message goes to a rank of the group, once")
            return
        self.posted[message] = arrival
        waiting = self.blocked.pop(message, None)
        if waiting is not None:
            heapq.heappush(self.ready, waiting)

    def place(self, state: _State, key: tuple[int, int, int]) -> None:
        if key in state.placed:
            self.problem(state, TileOp("wait_return", *key), "each result is added up once")
        state.placed.add(key)

    def not_back(self, state: _State) -> set[tuple[int, int, int]]:
        """Results that are still missing. Those of another host come together, from the rank there that passes this rank's entries on."""
        plan = state.plan
        parts = [len(ends) for ends in plan.peer_part_ends]
        for peer, other in enumerate(self.states):
            if is_far(plan, peer):
                parts[peer] = other.plan.relay_parts[plan.rank]
        wanted = {(p, k, b) for p, n in enumerate(parts) for k in range(n) for b in range(plan.blocks)}
        return wanted ^ state.placed

    def problems_at_end(self) -> Iterator[Problem]:
        for state in self.states:
            plan, blocks = state.plan, range(state.plan.blocks)
            if state.next_op < len(plan.ops):
                rule = "the message never comes: these ranks wait for ever"
                yield self._problem(state, plan.ops[state.next_op], rule)
                continue
            wanted = {(p, k) for p, ends in enumerate(plan.part_ends) for k in range(len(ends))}
            if state.first != dict.fromkeys(wanted, 1):
                rule = "the first product of every tile, exactly once"
                yield Problem(where=f"rank {plan.rank}", value=sorted(state.first.items()), rule=rule)
            if state.second != {(*key, block): 1 for key in wanted for block in blocks}:
                rule = "the second product of every tile and block, exactly once"
                yield Problem(where=f"rank {plan.rank}", value=sorted(state.second.items()), rule=rule)
            together = {(slot, block): 1 for slot in plan.joint for block in blocks}
            if state.first_all != dict.fromkeys(plan.joint, 1) or state.second_all != together:
                rule = "both products of every joint slot, exactly once"
                yield Problem(where=f"rank {plan.rank}", value=sorted(state.second_all.items()), rule=rule)
            if not state.is_summed:
                yield Problem(where=f"rank {plan.rank}", value=None, rule="results are added up")
        for message in sorted(self.posted.keys() - self.taken):
            rule = f"rank {message.target} takes every message that it is sent"
            where = f"message {message.source} -> {message.target} {message.leg}".strip()
            yield Problem(where=where, value=(message.part, message.block), rule=rule)

    def problem(self, state: _State, op: TileOp, rule: str) -> None:
        self.problems.append(self._problem(state, op, rule))

    @staticmethod
    def _problem(state: _State, op: TileOp, rule: str) -> Problem:
        return Problem(where=f"rank {state.plan.rank}, operation {state.next_op}: {op}", value=None, rule=rule)

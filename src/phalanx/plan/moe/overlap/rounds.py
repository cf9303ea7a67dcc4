"""In which order the ranks of one layer post their messages where a communicator carries them out in the order of posting: NCCL's rules.

NCCL executes the point-to-point calls of a communicator one after the other, except those of one group (`ncclGroupStart`/`End`), which progress independently
and end together (NCCL user guide, "Point-to-point communication"). So a message can hold up every later one, and ranks that post in different orders wait for each
other for ever. Decides the order that all ranks share, from a rank's plan alone:

    round   messages of one rank that are posted as one group: those of one kind, part and block with the next ranks of the ring (all of them, or as many as a group may have)

Rounds are ordered by (going before coming before dots, part, ring, block). Both ends of a message see the same four numbers, so their rounds have the same place among
all rounds. No circle of waiting can close: going entries wait for nothing; a rank computes when going entries have come, none of which is behind a coming message; so every rank
gets to its returns, and of the rounds that are not over yet the first one is at the head everywhere. `round_problems` shows the same without this argument, by carrying the rounds out.

Only for plans whose messages go straight: with gateways (`hosts.py`) messages wait for others in orders that a rank's plan does not tell its peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.types import Op, RankPlan

__all__ = ["Leg", "Round", "round_problems", "rounds_of"]

LegKind = Literal["going", "coming", "dots"]
_KINDS: tuple[LegKind, ...] = ("going", "coming", "dots")
MOST_MESSAGES = 250
"""Of one group: with hundreds NCCL is said to hang (pytorch #174288). So up to 126 ranks there is one round for all peers."""


@dataclass(frozen=True, slots=True)
class Leg:
    """This rank's end of one message."""

    kind: LegKind
    """going: entries of `part`; coming: partial sums of (`part`, `block`); dots: gradients of the row weights (backward)."""
    is_send: bool
    peer: int
    part: int = 0
    block: int = 0

    def __str__(self) -> str:
        arrow = "to" if self.is_send else "from"
        return f"{self.kind} {self.part}.{self.block} {arrow} {self.peer}"


@dataclass(frozen=True, slots=True)
class Round:
    """Messages posted as one group."""

    key: tuple[int, int, int, int]
    """Place among all rounds of all ranks: kind, part, ring distance in units of the width, block."""
    legs: tuple[Leg, ...]


def rounds_of(plan: RankPlan, *, width: int | None = None) -> tuple[Round, ...]:
    """All messages of a rank's plan, in the order of posting. `width`: ring distances in one round, the same on all ranks; None: as many as `MOST_MESSAGES` allows.

    Raises `PlanError` for a plan with gateways or a width below 1.
    """
    problems = []
    if plan.hosts:
        rule = "messages that are posted in one order go straight, not through gateways"
        problems.append(
            Problem(where="plan.hosts", value=plan.hosts, rule=rule, hint="a transport other than dedup_host")
        )
    if width is not None and width < 1:
        problems.append(Problem(where="width", value=width, rule="at least 1", hint="None: as many as NCCL takes"))
    raise_if(problems, PlanError, subject="rounds of messages")
    apart = MOST_MESSAGES // 2 if width is None else width  # one message each way
    found: dict[tuple[int, int, int, int], list[Leg]] = {}
    for leg in _legs(plan):
        rows_are_here = leg.is_send != (leg.kind == "going")  # the peer is the source of the rows
        distance = (plan.rank - leg.peer if rows_are_here else leg.peer - plan.rank) % plan.size
        key = _KINDS.index(leg.kind), leg.part, (distance - 1) // apart, leg.block
        found.setdefault(key, []).append(leg)
    return tuple(Round(key, tuple(found[key])) for key in sorted(found))


def _legs(plan: RankPlan) -> Iterator[Leg]:
    """Both directions, of the rows of others that are here and of this rank's rows elsewhere."""
    for peer in range(plan.size):
        if peer == plan.rank:
            continue
        for here, ends in ((True, plan.part_ends[peer]), (False, plan.peer_part_ends[peer])):
            for part in range(len(ends)):
                yield Leg("going", not here, peer, part)
                for block in range(plan.blocks):
                    yield Leg("coming", here, peer, part, block)
            if ends and plan.direction == "backward":
                yield Leg("dots", here, peer)


# ---- carrying them out -----------------------------------------------------------------------------------------------------------


def round_problems(plans: Sequence[RankPlan], rounds_P: Sequence[Sequence[Round]]) -> list[Problem]:
    """What is wrong with the rounds of all ranks under NCCL's rules: ends that do not match, ranks that wait for ever, waits for what has not been posted.

    Each rank has a stream that computes its plan's operations and one that carries out its rounds, both in order. A round is at the head when the one before is over and what
    it sends is computed. It begins when the rounds of all its messages' other ends are at the head too, and is over when they have all begun. That is stricter than NCCL, where
    the messages of a group do not wait for each other.
    """
    problems = _unmatched(rounds_P)
    if problems:
        return problems
    ranks = [_Rank(plan, rounds) for plan, rounds in zip(plans, rounds_P, strict=True)]
    problems = [problem for rank in ranks for problem in rank.early_waits()]
    if problems:
        return problems
    partners = _partners(rounds_P)
    begun: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= rank.compute()
        heads = {(number, rank.head()) for number, rank in enumerate(ranks)}
        for number, rank in enumerate(ranks):
            at = rank.head()
            if at is not None and (number, at) not in begun and partners[number, at] <= heads:
                begun.add((number, at))
                moved = True
        for number, rank in enumerate(ranks):
            at = rank.head()
            if at is not None and (number, at) in begun and partners[number, at] <= begun:
                rank.finish()
                moved = True
    rule = "every round must come to its end"
    return [
        Problem(where=f"rank {rank.plan.rank}", value=rank.where(), rule=rule, hint="one order on all ranks")
        for rank in ranks
        if not rank.is_done
    ]


def _pairs(rounds_P: Sequence[Sequence[Round]]) -> dict[tuple[int, int, bool], list[tuple[int, Leg]]]:
    """By (sender, receiver, which end): the messages in the order of posting, as (round, leg)."""
    found: dict[tuple[int, int, bool], list[tuple[int, Leg]]] = {}
    for rank, rounds in enumerate(rounds_P):
        for at, one in enumerate(rounds):
            for leg in one.legs:
                ends = (rank, leg.peer) if leg.is_send else (leg.peer, rank)
                found.setdefault((*ends, leg.is_send), []).append((at, leg))
    return found


def _unmatched(rounds_P: Sequence[Sequence[Round]]) -> list[Problem]:
    """Between two ranks the n-th send meets the n-th receive, whatever they were meant for."""
    pairs, problems = _pairs(rounds_P), []
    for sender, receiver in sorted({key[:2] for key in pairs}):
        sent = [(leg.kind, leg.part, leg.block) for _, leg in pairs.get((sender, receiver, True), ())]
        taken = [(leg.kind, leg.part, leg.block) for _, leg in pairs.get((sender, receiver, False), ())]
        if sent != taken:
            nth = next(
                (i for i, (a, b) in enumerate(zip(sent, taken, strict=False)) if a != b), min(len(sent), len(taken))
            )
            rule = f"message {nth}: sent {sent[nth : nth + 1]}, expected {taken[nth : nth + 1]}"
            problems.append(Problem(where=f"rank {sender} to {receiver}", value=len(sent), rule=rule))
    return problems


def _partners(rounds_P: Sequence[Sequence[Round]]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Of each round, as (rank, round), those of its messages' other ends."""
    pairs = _pairs(rounds_P)
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for sender, receiver, is_send in pairs:
        if is_send:
            for sent, taken in zip(pairs[sender, receiver, True], pairs[sender, receiver, False], strict=True):
                a, b = (sender, sent[0]), (receiver, taken[0])
                found.setdefault(a, set()).add(b)
                found.setdefault(b, set()).add(a)
    return found


class _Rank:
    """Two streams of one rank: where they stand."""

    def __init__(self, plan: RankPlan, rounds: Sequence[Round]) -> None:
        self.plan, self.rounds = plan, rounds
        self._at_op = self._at_round = 0
        self._round_of = {leg: at for at, one in enumerate(rounds) for leg in one.legs}
        self._made = self._made_at()

    def _made_at(self) -> list[int]:
        """By round: how many operations must be over before all it sends is there."""
        place = {(op.kind, op.peer, op.part, op.block): at for at, op in enumerate(self.plan.ops)}
        found = []
        for one in self.rounds:
            needs = [0]
            for leg in one.legs:
                if leg.is_send and leg.kind == "coming":
                    needs.append(place["return", leg.peer, leg.part, leg.block] + 1)
                elif leg.is_send and leg.kind == "dots":
                    firsts = [
                        at
                        for (kind, peer, _, _), at in place.items()
                        if (kind == "first" and peer == leg.peer) or kind == "first_all"
                    ]
                    needs.append(max(firsts) + 1)
            found.append(max(needs))
        return found

    def _awaited(self, op: Op) -> int | None:
        """The round that an operation waits for."""
        if op.kind == "wait":
            return self._round_of[Leg("going", False, op.peer, op.part)]
        return self._round_of[Leg("coming", False, op.peer, op.part, op.block)] if op.kind == "wait_return" else None

    def early_waits(self) -> list[Problem]:
        """The host comes to a wait before it has posted the round: there is no event to wait for yet."""
        rule, found = "must be posted before it is waited for", []
        for at, op in enumerate(self.plan.ops):
            awaited = self._awaited(op)
            if awaited is not None and max(self._made[: awaited + 1]) > at:
                found.append(Problem(where=f"rank {self.plan.rank}", value=str(op), rule=rule))
        return found

    def compute(self) -> bool:
        """As far as possible; whether anything was done."""
        before = self._at_op
        while self._at_op < len(self.plan.ops):
            awaited = self._awaited(self.plan.ops[self._at_op])
            if awaited is not None and awaited >= self._at_round:
                break
            self._at_op += 1
        return self._at_op > before

    def head(self) -> int | None:
        """The round that has begun."""
        at = self._at_round
        return at if at < len(self.rounds) and self._made[at] <= self._at_op else None

    def finish(self) -> None:
        """The round that has begun is over."""
        self._at_round += 1

    @property
    def is_done(self) -> bool:
        return self._at_round == len(self.rounds) and self._at_op == len(self.plan.ops)

    def where(self) -> str:
        op = str(self.plan.ops[self._at_op]) if self._at_op < len(self.plan.ops) else "its end"
        legs = (
            ", ".join(map(str, self.rounds[self._at_round].legs)) if self._at_round < len(self.rounds) else "all done"
        )
        return f"computes up to {op}, messages up to {legs}"

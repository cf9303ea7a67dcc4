"""Carries out the rounds of all ranks (`plan/moe/overlap/tiles/rounds.py`) under rules stricter than NCCL's: what does not match, and who would wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.errors import Problem
from phalanx.plan.moe.overlap.tiles.rounds import MessageEnd, Round
from phalanx.plan.moe.overlap.tiles.types import RankPlan, TileOp


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


def _pairs(rounds_P: Sequence[Sequence[Round]]) -> dict[tuple[int, int, bool], list[tuple[int, MessageEnd]]]:
    """By (sender, receiver, which end): the messages in the order of posting, as (round, leg)."""
    found: dict[tuple[int, int, bool], list[tuple[int, MessageEnd]]] = {}
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
                if leg.is_send and leg.kind == "inbound":
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

    def _awaited(self, op: TileOp) -> int | None:
        """The round that an operation waits for."""
        if op.kind == "wait":
            return self._round_of[MessageEnd("outbound", False, op.peer, op.part)]
        return (
            self._round_of[MessageEnd("inbound", False, op.peer, op.part, op.block)]
            if op.kind == "wait_return"
            else None
        )

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

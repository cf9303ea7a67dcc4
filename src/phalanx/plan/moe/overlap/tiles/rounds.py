"""Decides in which order the ranks of one layer post their messages where a communicator carries them out in the order of posting:
NCCL's rules.

NCCL executes the point-to-point calls of a communicator one after the other, except those of one group (`ncclGroupStart`/`End`),
which progress independently
and end together (NCCL user guide, "Point-to-point communication"). So a message can hold up every later one, and ranks that post
in different orders wait for each
other for ever. Decides the order that all ranks share, from a rank's plan alone:

    round   messages of one rank that are posted as one group: those of one kind, part and block with the next ranks of the ring
    (all of them, or as many as a group may have)

Rounds are ordered by (outbound before inbound before dots, part, ring, block). Both ends of a message see the same four numbers, so
their rounds have the same place among
all rounds. No circle of waiting can close: outbound entries wait for nothing; a rank computes when outbound entries have come, none of
which is behind an inbound message; so every rank
gets to its returns, and of the rounds that are not over yet the first one is at the head everywhere. `round_problems`
(tests/oracles/overlap_rounds.py) shows the same without this argument, by carrying the rounds out.

Only for plans whose messages go straight: with gateways (`hosts.py`) messages wait for others in orders that a rank's plan does
not tell its peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.tiles.types import RankPlan

MessageKind = Literal["outbound", "inbound", "dots"]
_KINDS: tuple[MessageKind, ...] = ("outbound", "inbound", "dots")
MOST_MESSAGES = 250
"""Most messages of one group: with hundreds NCCL is said to hang (pytorch #174288). So up to 126 ranks there is one round for all
peers."""


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """This rank's end of one message."""

    kind: MessageKind
    """outbound: entries of `part`; inbound: partial sums of (`part`, `block`); dots: gradients of the row weights (backward)."""
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
    legs: tuple[MessageEnd, ...]


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
    found: dict[tuple[int, int, int, int], list[MessageEnd]] = {}
    for leg in _legs(plan):
        rows_are_here = leg.is_send != (leg.kind == "outbound")  # the peer is the source of the rows
        distance = (plan.rank - leg.peer if rows_are_here else leg.peer - plan.rank) % plan.size
        key = _KINDS.index(leg.kind), leg.part, (distance - 1) // apart, leg.block
        found.setdefault(key, []).append(leg)
    return tuple(Round(key, tuple(found[key])) for key in sorted(found))


def _legs(plan: RankPlan) -> Iterator[MessageEnd]:
    """Both directions, of the rows of others that are here and of this rank's rows elsewhere."""
    for peer in range(plan.size):
        if peer == plan.rank:
            continue
        for here, ends in ((True, plan.part_ends[peer]), (False, plan.peer_part_ends[peer])):
            for part in range(len(ends)):
                yield MessageEnd("outbound", not here, peer, part)
                for block in range(plan.blocks):
                    yield MessageEnd("inbound", here, peer, part, block)
            if ends and plan.direction == "backward":
                yield MessageEnd("dots", here, peer)

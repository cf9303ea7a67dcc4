"""The words of a move between layouts: what moves, over which hosts, and in which messages.

Decides nothing; `plan/reshard/plan.py` makes the plans and `runtime/reshard/executor.py` carries them out. Must never change: the messages of a plan stand in one total
order, in which every rank does its own; a message stands after all that bring its sender what it carries. So an executor that keeps to the order, even one
that waits for each message before the next, comes to its end: the first message that is not complete has both of its ranks waiting at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.messages import message
from phalanx.plan.layout import Box, TensorLayout

WHOLE = -1
"""`MovePart.term` of values that need no more adding up."""
MOST_RATIO = 1e8
"""Of the rates of hosts: the solver of linear programs leaves out what is smaller than a billionth of the rest."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A logical tensor that goes from one layout to another. `src` may be partial, `dst` never is; their ranks may overlap or not."""

    name: str
    itemsize: int
    src: TensorLayout
    dst: TensorLayout


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Which host each rank is on, and how fast each host sends to and receives from others (bytes per second). Inside a host nothing is counted."""

    host_of_rank: tuple[int, ...]
    send_bytes_per_s: tuple[float, ...]
    recv_bytes_per_s: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.send_bytes_per_s)

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(_host_problems(self), PlanError, subject="hosts")


@message
class MovePart(NamedTuple):
    """A box of the logical tensor of move number `move`: whole values, or (`term` >= 0) those of one term of a partial source."""

    move: int
    box: Box
    term: int = WHOLE

    def num_bytes(self, moves: Sequence[Move]) -> int:
        """What it takes in a message, `moves` being those of its plan."""
        return self.box.num_elements * moves[self.move].itemsize


class Hop(NamedTuple):
    """A message between two ranks: its parts end to end, each in row-major order."""

    src: int
    dst: int
    parts: tuple[MovePart, ...]


class Reduction(NamedTuple):
    """`rank` adds all terms of a box, in the order of the terms; each is in its own source tensor or came by a hop with that `term`.

    What it sends as whole values of the box afterwards is this sum; where it needs the box itself, the sum is its destination.
    """

    rank: int
    move: int
    box: Box


def equal_hosts(host_of_rank: Sequence[int], *, rate: float = 1.0) -> Hosts:
    """Hosts 0 .. the largest of `host_of_rank` with links of `rate` bytes per second both ways."""
    rates = (rate,) * (max(host_of_rank) + 1)
    return Hosts(host_of_rank=tuple(host_of_rank), send_bytes_per_s=rates, recv_bytes_per_s=rates)


def _host_problems(hosts: Hosts) -> list[Problem]:
    problems = []
    if len(hosts.send_bytes_per_s) != len(hosts.recv_bytes_per_s):
        rule = f"has a rate for each of the {len(hosts.send_bytes_per_s)} hosts"
        problems.append(Problem(where="hosts.recv_bytes_per_s", value=len(hosts.recv_bytes_per_s), rule=rule))
    for name in ("send_bytes_per_s", "recv_bytes_per_s"):
        bad = [rate for rate in getattr(hosts, name) if not 0 < rate < float("inf")]
        if bad:
            rule = "must be above 0 and finite"
            problems.append(Problem(where=f"hosts.{name}", value=bad[0], rule=rule, hint="use 1.0 for equal links"))
    rates = [rate for rate in (*hosts.send_bytes_per_s, *hosts.recv_bytes_per_s) if 0 < rate < float("inf")]
    if rates and max(rates) > MOST_RATIO * min(rates):
        rule = f"must be at most {MOST_RATIO:g} times slower than the fastest, {max(rates):g}"
        hint = f"use {max(rates) / MOST_RATIO:g}"
        problems.append(Problem(where="hosts.send_bytes_per_s", value=min(rates), rule=rule, hint=hint))
    strays = [host for host in hosts.host_of_rank if not 0 <= host < hosts.count]
    if strays:
        rule = f"must be one of {hosts.count} hosts"
        problems.append(Problem(where="hosts.host_of_rank", value=strays[0], rule=rule, hint="number hosts from 0"))
    return problems

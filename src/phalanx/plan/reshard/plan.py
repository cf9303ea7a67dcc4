"""The plan of a move between layouts: all tensors, all hosts, one schedule, one order of messages.

Decides the messages of `runtime/reshard/executor.py`. Must never change: a plan is a pure function of its arguments (no clock, no hash order), so every rank makes
the same one and only its hash is compared; the schedule is of hosts and bytes and is made at once, messages between ranks are made when asked for.

    moves -> templates -> flows -> bound, schedule -> hops
             reshard_units  reshard_flows  reshard_bound, reshard_best  reshard_hops

Partial sources are added by `sums.py` between two phases; the paper's own strategies are in `history.py`; `check.py` trusts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.errors import PlanError, Problem, nearest, raise_if
from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.reshard.best import best_schedule, find_bound
from phalanx.plan.reshard.bound import Bound, quick_bound, solve_shares
from phalanx.plan.reshard.flows import FlowSchedule, FlowSet, make_flows, unit_flows, whole_groups
from phalanx.plan.reshard.history import HISTORY, history_schedule
from phalanx.plan.reshard.messages import make_hops
from phalanx.plan.reshard.sums import WHERES, PartialSums, bound_flows, cut_partial, place_sums
from phalanx.plan.reshard.transpose import surviving, transposed
from phalanx.plan.reshard.types import Hop, Hosts, Move, MovePart, Reduction
from phalanx.plan.reshard.units import Template, templates_of

METHODS = ("best", *HISTORY)
OPEN_HOPS = 4
MESSAGES = 128
"""Messages into which the busiest link's bytes are cut, within these limits; where no link is used, a message is as large as they allow: there is no chain to keep busy."""
LEAST_MESSAGE, MOST_MESSAGE = 64 << 10, 4 << 20
LEAST_CHUNK = 16 << 10
"""Bytes of the largest stream's chunks where all streams run side by side: the schedule knows no latency, and a smaller message is mostly that."""


class Phase(NamedTuple):
    """Flows with their schedule, which begins at `start_s`."""

    flows: FlowSet
    schedule: FlowSchedule
    start_s: float


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Messages that take `moves` from their sources to their destinations. Make it with `plan_reshard`."""

    moves: tuple[Move, ...]
    hosts: Hosts
    method: str
    bound: Bound
    makespan_s: float
    message_bytes: int
    open_hops: int
    staging_bytes: int | None
    least_bytes: int
    phases: tuple[Phase, ...] = field(repr=False)
    reductions: tuple[Reduction, ...] = field(repr=False)

    @property
    def rho(self) -> float:
        """Makespan over the bound; 1 where nothing crosses between hosts."""
        return self.makespan_s / self.bound.seconds if self.bound.seconds else 1.0

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """All messages in their one order."""
        return self._made(None)

    @cached_property
    def programs(self) -> dict[int, tuple[Hop, ...]]:
        """What `program` says of each rank that has messages; for who wants to know it of all."""
        found: dict[int, list[Hop]] = {}
        for hop in self.hops:
            found.setdefault(hop.src, []).append(hop)
            found.setdefault(hop.dst, []).append(hop)
        return {rank: tuple(mine) for rank, mine in found.items()}

    def program(self, rank: int) -> tuple[Hop, ...]:
        """The messages that a rank sends or receives, in order, without making those of the others: of a large model's state between 128 ranks some 100 times as fast."""
        return self.programs.get(rank, ()) if "hops" in vars(self) else self._made(rank)

    def _made(self, rank: int | None) -> tuple[Hop, ...]:
        made: list[Hop] = []
        for flows, schedule, _ in self.phases:
            made += make_hops(flows, schedule, self.hosts, message_bytes=self.message_bytes, rank=rank)
        return tuple(made)

    def copies(self, rank: int) -> tuple[MovePart, ...]:
        """Boxes that a rank holds in the source and needs in the destination."""
        out: list[MovePart] = []
        for template in self.phases[0].flows.templates:
            if template.num_terms > 1:
                continue
            held = np.array([rank in owners[0] for owners in template.holders], dtype=bool)
            needed = np.array([rank in owners for owners in template.needers], dtype=bool)
            units = np.nonzero(held[template.src_of] & needed[template.dst_of])[0].tolist()
            boxes = [template.box(unit) for unit in units]
            out += [MovePart(move, box) for move in template.moves for box in boxes]
        return tuple(out)

    def check(self) -> None:
        """Raise `PlanError` with all that an independent check finds."""
        from phalanx.plan.reshard.check import reshard_plan_problems  # it reads this module's words

        raise_if(reshard_plan_problems(self), PlanError, subject="the reshard plan")

    def inverse(self, *, partial: bool = False) -> ReshardPlan:
        """The transposed plan, for gradients: layouts swapped. Replicas of the destination hold the same gradient, or (`partial`) terms of it."""
        moves = transposed(self.moves, partial=partial)
        return self._again(moves)

    def without(self, ranks: Iterable[int]) -> ReshardPlan:
        """The plan when these ranks are lost. Raises `PlanError` naming each tensor and box of which they were the last holders."""
        return self._again(surviving(self.moves, ranks))

    def _again(self, moves: Sequence[Move]) -> ReshardPlan:
        return plan_reshard(
            moves,
            self.hosts,
            method=self.method,
            open_hops=self.open_hops,
            staging_bytes=self.staging_bytes,
            least_bytes=self.least_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data. Layouts are numbered and given by their digests, messages follow from the rest."""
        digests: dict[str, int] = {}
        numbers: dict[int, int] = {}
        for move in self.moves:
            for layout in (move.src, move.dst):
                if (
                    id(layout) not in numbers
                ):  # one object often stands for thousands of moves; equal ones get one number
                    digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
                    numbers[id(layout)] = digests.setdefault(digest, len(digests))
        return {
            "method": self.method,
            "makespan_s": self.makespan_s,
            "rho": self.rho,
            "bound": {
                "kind": self.bound.kind,
                "hosts": list(self.bound.hosts),
                "num_bytes": self.bound.num_bytes,
                "bytes_per_s": self.bound.bytes_per_s,
                "seconds": self.bound.seconds,
            },
            "message_bytes": self.message_bytes,
            "open_hops": self.open_hops,
            "staging_bytes": self.staging_bytes,
            "host_of_rank": list(self.hosts.host_of_rank),
            "send_bytes_per_s": list(self.hosts.send_bytes_per_s),
            "recv_bytes_per_s": list(self.hosts.recv_bytes_per_s),
            "layouts": list(digests),
            "moves": [[m.name, m.itemsize, numbers[id(m.src)], numbers[id(m.dst)]] for m in self.moves],
            "phases": [_phase_dict(phase) for phase in self.phases],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @cached_property
    def hash(self) -> str:
        """Stable over ranks and runs: equal hashes mean equal messages."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The plan in a few lines that a person reads."""
        units = sum(t.num_units * len(t.moves) for t in self.phases[0].flows.templates)
        flows = sum(1 for phase in self.phases for flow in phase.flows.flows if flow.needers)
        local = sum(f.num_bytes for phase in self.phases for f in phase.flows.flows if not f.needers)
        names = " then ".join(dict.fromkeys(phase.schedule.name for phase in self.phases))
        lines = [
            f"{len(self.moves)} tensor{'s' if len(self.moves) != 1 else ''}, {units} unit tasks, {flows} flows between hosts"
            + (f", {format_bytes(local)} stay inside hosts" if local else ""),
            f"  {self.bound.explain()}",
            f"  schedule ({names}): {format_seconds(self.makespan_s)} = {self.rho:.4f} x the bound",
            f"  messages of at most {format_bytes(self.message_bytes)}, {self.open_hops} open each way: "
            f"{format_bytes(2 * self.open_hops * self.message_bytes)} of staging a rank at most",
        ]
        if self.reductions:
            lines.append(f"  {len(self.reductions)} boxes are added on {len({r.rank for r in self.reductions})} ranks")
        return "\n".join(lines)


def _phase_dict(phase: Phase) -> dict[str, Any]:
    schedule = phase.schedule
    return {
        "name": schedule.name,
        "entry": schedule.entry,
        "start_s": phase.start_s,
        "makespan_s": schedule.makespan_s,
        "num_chunks": schedule.num_chunks,
        "rounds_s": list(schedule.rounds_s),
        "flows": [[list(f.holders), list(f.needers), f.num_bytes] for f in phase.flows.flows],
        "streams": [
            [s.flow, s.start, s.stop, s.begin_s, s.end_s, [list(e) for e in s.edges]] for s in schedule.streams
        ],
    }


def plan_reshard(
    moves: Sequence[Move],
    hosts: Hosts,
    *,
    method: str = "best",
    message_bytes: int | None = None,
    open_hops: int = OPEN_HOPS,
    staging_bytes: int | None = None,
    least_bytes: int = LEAST_CHUNK,
) -> ReshardPlan:
    """Plan all `moves` together. Raises `PlanError` with all problems: lost boxes, ranks without a host, a cap that no message fits under.

    `least_bytes` bounds the chunks of relayed streams from below: about the latency of a message times the rate of a link.
    """
    hosts.check()
    raise_if(
        _argument_problems(method, message_bytes, open_hops, staging_bytes, least_bytes), PlanError, subject="arguments"
    )
    templates = templates_of(moves, hosts)
    groups = whole_groups(templates)
    if all(t.num_terms == 1 for t in templates):
        flows = make_flows(templates, groups, hosts) if method == "best" else unit_flows(templates, groups, hosts)
        schedule, bound = _scheduled(flows, hosts, method, least_bytes)
        phases: tuple[Phase, ...] = (Phase(flows, schedule, 0.0),)
        reductions: tuple[Reduction, ...] = ()
    else:
        phases, reductions, bound = _plan_partial(
            templates, hosts, method, piece_bytes=message_bytes or LEAST_MESSAGE, least_bytes=least_bytes
        )
    itemsize = max((move.itemsize for move in moves), default=1)
    busiest = bound.seconds * min((*hosts.send_bytes_per_s, *hosts.recv_bytes_per_s))
    size, open_hops = _message_size(busiest, itemsize, message_bytes, open_hops, staging_bytes)
    return ReshardPlan(
        moves=tuple(moves),
        hosts=hosts,
        method=method,
        bound=bound,
        makespan_s=phases[-1].start_s + phases[-1].schedule.makespan_s,
        message_bytes=size,
        open_hops=open_hops,
        staging_bytes=staging_bytes,
        least_bytes=least_bytes,
        phases=phases,
        reductions=reductions,
    )


def _scheduled(flows: FlowSet, hosts: Hosts, method: str, least_bytes: int) -> tuple[FlowSchedule, Bound]:
    if method == "best":
        return best_schedule(flows.flows, hosts, least_bytes=least_bytes)
    schedule = history_schedule(flows, hosts, method=method)
    bound = quick_bound(flows.flows, hosts)
    if schedule.makespan_s > bound.seconds * (1 + 1e-9):
        whole = make_flows(flows.templates, flows.groups, hosts)
        bound, _ = find_bound(whole.flows, hosts)
    return schedule, bound


def _plan_partial(
    templates: Sequence[Template], hosts: Hosts, method: str, *, piece_bytes: int, least_bytes: int
) -> tuple[tuple[Phase, ...], tuple[Reduction, ...], Bound]:
    """The shortest of the ways to place sums: terms travel, then sums do."""
    cut = [cut_partial(t, piece_bytes) for t in templates]
    entering, leaving = bound_flows(cut, hosts)
    whole = make_flows(cut, whole_groups(cut), hosts).flows
    both = [*whole, *leaving]
    bound = quick_bound(both, hosts, entering=[*whole, *entering])
    if any(flow.needers for flow in both):
        bound = max((bound, solve_shares(both, hosts)[1]), key=lambda b: b.seconds)
    tried = [_with_sums(cut, place_sums(cut, hosts, where=where), hosts, method, least_bytes) for where in WHERES]
    phases, reductions = min(tried, key=lambda made: made[0][-1].start_s + made[0][-1].schedule.makespan_s)
    return phases, reductions, bound


def _with_sums(
    templates: Sequence[Template], sums: PartialSums, hosts: Hosts, method: str, least_bytes: int
) -> tuple[tuple[Phase, ...], tuple[Reduction, ...]]:
    make = make_flows if method == "best" else unit_flows
    phases: list[Phase] = []
    start = 0.0
    for groups in ((*whole_groups(templates), *sums.before), sums.after):
        if groups or not phases:
            flows = make(templates, groups, hosts)
            schedule, _ = _scheduled(flows, hosts, method, least_bytes)
            phases.append(Phase(flows, schedule, start))
            start += schedule.makespan_s
    return tuple(phases), sums.reductions


def _message_size(
    busiest: float, itemsize: int, message_bytes: int | None, open_hops: int, staging_bytes: int | None
) -> tuple[int, int]:
    """Bytes of the largest message, and how many are open: fewer where the cap asks for it. Raises `PlanError` where no item fits."""
    cut = min(MOST_MESSAGE, max(LEAST_MESSAGE, int(busiest) // MESSAGES)) if busiest else MOST_MESSAGE
    size = message_bytes or cut
    size = max(size, itemsize)
    if staging_bytes is None:
        return size, open_hops
    while open_hops > 1 and staging_bytes // (2 * open_hops) < min(size, LEAST_MESSAGE):
        open_hops -= 1
    size = min(size, staging_bytes // (2 * open_hops))
    if size < itemsize:
        rule = f"holds no message: one of an item of {itemsize} bytes each way takes {2 * itemsize}"
        problem = Problem(where="staging_bytes", value=staging_bytes, rule=rule, hint=f"use {2 * itemsize} or more")
        raise PlanError([problem], subject="arguments")
    return size, open_hops


def _argument_problems(
    method: str, message_bytes: int | None, open_hops: int, staging_bytes: int | None, least_bytes: int
) -> list[Problem]:
    problems = []
    if method not in METHODS:
        problems.append(Problem(where="method", value=method, rule="is not known", hint=nearest(method, METHODS)))
    given = {"message_bytes": message_bytes, "open_hops": open_hops, "staging_bytes": staging_bytes}
    for where, value in {**given, "least_bytes": least_bytes}.items():
        if value is not None and value < 1:
            problems.append(Problem(where=where, value=value, rule="must be at least 1", hint="leave it out"))
    return problems

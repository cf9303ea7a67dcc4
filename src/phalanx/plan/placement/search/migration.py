"""Leads from one placement to the next: which host takes which place, and which expert states travel.

Decides the names of the hosts in a new plan (the plan is as good under any, but for racks), so that what they hold already serves:
the assignment with the
fewest copies over all layers together (Hungarian), because hosts are one order for all layers. With `rename`, experts with equally
many replicas also trade
rows, layer by layer, in turn with the hosts, until neither saves a copy: recovery stays as it is to the last digit, balance may
not. Must never change: an
expert comes from a host that holds it and lives; one without any is named in `lost`, never made up.

What travels is a whole expert: weights and moments. `plan/recovery/move_order.py` turns a change of placement into boxes for the
reshard core, which chooses sources, order and messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.messages import message
from phalanx.plan.placement.search.hosts import HostPlacement, from_copies
from phalanx.plan.placement.search.order import ordered_hosts

Ints = NDArray[np.int64]
MAX_TURNS = 6
"""Turns of naming hosts and rows; most plans settle in 2."""


@message
class Fetch(NamedTuple):
    """The state of one expert that a host gets from another, both by name."""

    layer: int
    expert: int
    src: int
    dst: int


@message
@dataclass(frozen=True, kw_only=True)
class Migration(Hashed):
    """`new` = the plan with hosts named and slots in place: an expert that stays keeps its slot where it can."""

    old: HostPlacement
    new: HostPlacement
    senders: tuple[int, ...]
    """Hosts that can send: those of `new`."""
    fetches: tuple[Fetch, ...]
    """Experts below the floor first, then by layer."""
    urgent: int
    """The first so many fetches are of experts that have fewer living holders than the floor asks."""
    lost: tuple[tuple[int, int], ...]
    """(layer, expert) that no living host holds."""

    @property
    def num_copies(self) -> int:
        """States that hosts need and do not hold."""
        return len(self.fetches) + sum(len(self.new.holders(layer, expert)) for layer, expert in self.lost)

    def sends(self) -> Counter[int]:
        """States that each host sends."""
        return Counter(fetch.src for fetch in self.fetches)

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        self.new.check()
        raise_if(_problems(self), PlanError, subject="migration")

    def to_dict(self) -> dict[str, Any]:
        return {
            "old": self.old.to_dict(),
            "new": self.new.to_dict(),
            "fetches": self.fetches,
            "urgent": self.urgent,
            "lost": self.lost,
        }

    def explain(self) -> str:
        """What travels, in a few lines."""
        total = int((self.new.copies > 0).sum())
        sends = self.sends()
        lines = [
            f"{len(self.fetches)} of {total} expert states travel; {self.urgent} of them first, to be on {self.new.floor} hosts again"
        ]
        if sends:
            busiest = max(sorted(sends), key=lambda host: sends[host])
            lines.append(f"  from {len(sends)} hosts, at most {sends[busiest]} from one (host {busiest})")
        if self.lost:
            named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self.lost[:8])
            more = f" and {len(self.lost) - 8} more" if len(self.lost) > 8 else ""
            lines.append(f"  LOST on every host: {named}{more}; go back to the checkpoint")
        return "\n".join(lines)


def plan_migration(old: HostPlacement, new: HostPlacement, *, rename: bool = False) -> Migration:
    """The cheapest way to `new`, on the hosts that `new.pool` names; hosts that `old` does not know hold nothing yet."""
    raise_if(_mismatch(old, new), PlanError, subject="migration")
    names = new.pool.host_names
    held = _held(old, names)
    copies = _named_hosts(new, new.copies, held)
    turn = 0
    while rename and turn < MAX_TURNS:
        named = _named_hosts(new, _named_rows(copies, held), held)
        if _missing(named, held) >= _missing(copies, held):
            break
        copies, turn = named, turn + 1
    placed = from_copies(copies, new.pool, floor=new.floor)
    placed = replace(placed, slots=_kept_slots(old, placed))
    fetches, urgent, lost = _fetches(placed, held)
    made = Migration(old=old, new=placed, senders=names, fetches=fetches, urgent=urgent, lost=lost)
    made.check()
    return made


def _mismatch(old: HostPlacement, new: HostPlacement) -> list[Problem]:
    pairs = (("num_layers", old.num_layers, new.num_layers), ("num_experts", old.num_experts, new.num_experts))
    return [
        Problem(where=f"placement.{name}", value=b, rule=f"must be that of the present placement, {a}")
        for name, a, b in pairs
        if a != b
    ]


def _held(old: HostPlacement, names: Sequence[int]) -> NDArray[np.bool_]:
    """(L, E, N) whether each of the hosts `names` holds an expert now."""
    out = np.zeros((*old.copies.shape[:2], len(names)), dtype=bool)
    at = {name: i for i, name in enumerate(old.pool.host_names)}
    for n, name in enumerate(names):
        if name in at:
            out[:, :, n] = old.copies[:, :, at[name]] > 0
    return out


def _missing(copies: Ints, held: NDArray[np.bool_]) -> int:
    return int(((copies > 0) & ~held).sum())


def _named_hosts(plan: HostPlacement, copies: Ints, held: NDArray[np.bool_]) -> Ints:
    """Places given to hosts so that the fewest copies travel; racks and risks go before that."""
    wanted = (copies > 0).reshape(-1, copies.shape[2]).T.astype(np.int64)
    costs = wanted @ (~held).reshape(-1, copies.shape[2]).astype(np.int64)
    return copies[:, :, ordered_hosts(plan.holder_sets, plan.pool, costs=costs)]


def _named_rows(copies: Ints, held: NDArray[np.bool_]) -> Ints:
    """Rows renamed so that in each layer experts with equally many replicas take the rows that they hold most of already."""
    from scipy.optimize import linear_sum_assignment

    out = copies.copy()
    for layer, table in enumerate(copies):
        counts = table.sum(1)
        for count in np.unique(counts):
            alike = np.flatnonzero(counts == count)
            kept = held[layer][alike].astype(np.int64) @ (table[alike] > 0).T.astype(np.int64)
            spread = (table[alike] > 0).sum(1)
            experts, rows = linear_sum_assignment(spread[None, :] - kept)
            out[layer, alike[experts]] = table[alike[rows]]
    return out


def _kept_slots(old: HostPlacement, new: HostPlacement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    at = {name: i for i, name in enumerate(old.pool.host_names)}
    return tuple(
        tuple(
            _in_place(old.slots[layer][at[name]], held) if name in at else held
            for name, held in zip(new.pool.host_names, hosts, strict=True)
        )
        for layer, hosts in enumerate(new.slots)
    )


def _in_place(before: Sequence[int], now: Sequence[int]) -> tuple[int, ...]:
    """`now` in an order that keeps as many slots as they were as can be."""
    left = list(now)
    out: list[int | None] = [None] * len(now)
    for slot, expert in enumerate(before[: len(now)]):
        if expert in left:
            left.remove(expert)
            out[slot] = expert
    rest = iter(left)
    return tuple(next(rest) if expert is None else expert for expert in out)


def _fetches(new: HostPlacement, held: NDArray[np.bool_]) -> tuple[tuple[Fetch, ...], int, tuple[tuple[int, int], ...]]:
    """Sources in turn, so that no holder sends much more than the others; states with few holders choose first."""
    names = new.pool.host_names
    holders = held.sum(2)
    needed = np.argwhere((new.copies > 0) & ~held)
    lost = sorted({(int(layer), int(expert)) for layer, expert, _ in needed if not holders[layer, expert]})
    sent = np.zeros(len(names), dtype=np.int64)
    out: dict[bool, list[Fetch]] = {True: [], False: []}
    for layer, expert, dst in sorted(needed.tolist(), key=lambda n: (holders[n[0], n[1]], n)):
        sources = np.flatnonzero(held[layer, expert])
        if not len(sources):
            continue
        src = int(sources[sent[sources].argmin()])
        sent[src] += 1
        out[bool(holders[layer, expert] < new.floor)].append(Fetch(layer, expert, names[src], names[dst]))
    return (*sorted(out[True]), *sorted(out[False])), len(out[True]), tuple(lost)


def _problems(made: Migration) -> list[Problem]:
    problems = []
    names, senders = made.new.pool.host_names, made.senders
    can_send = _held(made.old, senders)
    arrived = _held(made.old, names)
    for i, (layer, expert, src, dst) in enumerate(made.fetches):
        where = f"migration.fetches[{i}]"
        if src not in senders or not can_send[layer, expert, senders.index(src)]:
            rule = f"host {src} lives and holds layer {layer} expert {expert}"
            problems.append(Problem(where=where, value=src, rule=rule))
        if dst not in names or arrived[layer, expert, names.index(dst)]:
            rule = f"host {dst} lives and does not have layer {layer} expert {expert} yet"
            problems.append(Problem(where=where, value=dst, rule=rule))
        else:
            arrived[layer, expert, names.index(dst)] = True
    missing = {(int(layer), int(expert)) for layer, expert, _ in np.argwhere((made.new.copies > 0) & ~arrived)}
    unsaid = sorted(missing - set(made.lost))
    if unsaid:
        rule = "(layer, expert) that a host needs is fetched, or named as lost"
        problems.append(Problem(where="migration.fetches", value=unsaid, rule=rule))
    return problems

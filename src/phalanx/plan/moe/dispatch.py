"""How routed tokens travel inside one expert-parallel group: who sends how many rows to which slot.

Everything here is a pure function of gathered counts, so that every rank computes the same schedule without asking.
The per-batch indices are built on the device by the same rule (`runtime/moe/dispatch.py`); `rows_by_hand` (tests/oracles) is their NumPy twin, written
token by token.

A group of `EP * ETP` ranks holds `G = EP * slots_per_rank` slots. A *source* is a rank of the group, numbered `ep * ETP + etp` (the order
of the `ep_etp` group: etp is the fastest coordinate). A slot lies on all `ETP` ranks of its ep coordinate, each with a slice of the expert.

Rules that must never change, because all ranks rely on them without asking:
- a source keeps its rows in the order of their tokens within each expert, and sends them slot by slot, slots ascending;
- the rows of an expert, counted through the sources in order, are cut into consecutive parts, one per replica, slots ascending;
  parts differ by one row at most, the larger ones first (largest remainder of an even split);
- rows arrive at a slot ordered by (etp, ep) of their source.

Shapes: P sources, E experts, G slots of the group, e slots of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.core.config import DispatchConfig
from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DispatchSpec:
    """Policy of the one dispatcher (see `core.config.DispatchConfig` for the words), fully resolved."""

    policy: Literal["dropless", "drop"] = "dropless"
    capacity_factor: float = 1.0
    drop_by: Literal["probability", "position"] = "probability"
    drop_scope: Literal["sub_sequence", "full_sequence"] = "sub_sequence"
    pad_to_capacity: bool = False
    transport: Literal["all_to_all", "all_gather", "deepep"] = "all_to_all"
    overlap: str = "serial"
    """See `plan/moe/overlap/settings.py`."""

    @property
    def is_static(self) -> bool:
        """No size depends on the routing: nothing to exchange beforehand, no host synchronisation."""
        return self.policy == "drop" and self.pad_to_capacity

    @property
    def by_tile(self) -> bool:
        """Rows travel tile by tile, as messages to every rank."""
        return self.overlap.partition(":")[0] not in ("serial", "coarse", "fused")

    @property
    def rows_over(self) -> str:
        """Group over which rows are exchanged: "ep" or, tile by tile and as gathered tokens, "ep_etp"; empty: a library carries them."""
        if self.transport == "deepep":
            return ""
        return "ep_etp" if self.by_tile or self.transport == "all_gather" else "ep"


def dispatch_spec(config: DispatchConfig) -> DispatchSpec:
    """A recipe's dispatch with its defaults filled in. What says nothing of where rows go (`left_free`, how a device is divided) is no part of it."""
    given = {field.name: getattr(config, field.name) for field in fields(DispatchSpec)}
    return DispatchSpec(**{name: value for name, value in given.items() if value is not None})


def capacity(spec: DispatchSpec, *, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that one expert takes from `num_tokens` tokens: `ceil(factor * n * K / E)`, at most `n`."""
    factor = Fraction(str(spec.capacity_factor))  # as it is written: in binary 2.2 * 100 * 8 / 20 lies above 88
    return min(num_tokens, math.ceil(factor * num_tokens * top_k / num_experts))


def rows_of_source(spec: DispatchSpec, *, num_tokens: int, sharing: int, top_k: int, num_experts: int) -> int:
    """Rows that one expert takes from one rank of `num_tokens` tokens at most, and in padded mode exactly.

    With drop_scope full_sequence capacity is counted over the tokens of all `sharing` ranks of a micro-batch, and may all be one rank's.
    """
    whole = sharing if spec.drop_scope == "full_sequence" else 1
    return min(num_tokens, capacity(spec, num_tokens=num_tokens * whole, top_k=top_k, num_experts=num_experts))


@lru_cache(maxsize=256)
def replica_index(slots_G: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Replica of its expert that each slot holds (from 0, slots ascending), and how many the expert has. Nobody writes to the results: every layer asks for its own slots in every step."""
    slots = np.asarray(slots_G, dtype=np.int64)
    order = np.argsort(slots, kind="stable")
    totals = np.bincount(slots)
    first = np.cumsum(totals) - totals
    index = np.empty_like(slots)
    index[order] = np.arange(len(slots)) - first[slots[order]]
    return index, totals[slots]


def split_over_replicas(counts_PE: ArrayLike, slots_G: ArrayLike) -> Ints:
    """(P, G) rows from each source to each slot, by the rule on top. With one replica each it is `counts_PE[:, slots_G]`."""
    counts, slots = np.asarray(counts_PE, dtype=np.int64), np.asarray(slots_G, dtype=np.int64)
    replica, replicas = replica_index(tuple(slots.tolist()))
    if replicas.max(initial=1) == 1:
        alone: Ints = counts.take(slots, axis=1)
        return alone
    share, rest = np.divmod(counts.sum(0)[slots], replicas)
    lo = replica * share + np.minimum(replica, rest)
    hi = lo + share + (replica < rest)
    ends = np.cumsum(counts, axis=0)[:, slots]
    begins = ends - counts[:, slots]
    rows: Ints = np.maximum(np.minimum(ends, hi) - np.maximum(begins, lo), 0)
    return rows


@dataclass(frozen=True, eq=False)
class Chunks:
    """A reordering of rows by runs: run `i` of the result is `sizes[i]` rows from `starts[i]` on."""

    starts: Ints
    sizes: Ints

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())

    @property
    def shifts(self) -> Ints:
        """What is added to a row's place in the result to give its place in the source."""
        return self.starts - (np.cumsum(self.sizes) - self.sizes)

    def index(self) -> Ints:
        """(rows,) source row of each row of the result."""
        return np.arange(self.num_rows) + np.repeat(self.shifts, self.sizes)

    def inverse(self) -> Chunks:
        """The reordering back; each source row must occur exactly once."""
        order = np.argsort(self.starts, kind="stable")
        places = np.cumsum(self.sizes) - self.sizes
        return Chunks(places[order], self.sizes[order])


@dataclass(frozen=True, eq=False)
class DispatchPlan(Hashed):
    """Rows between all sources and slots of one expert-parallel group, for one batch."""

    slots_G: tuple[int, ...]
    """Expert in each slot, rank-major."""
    ep: int
    etp: int
    rows_PG: Ints
    unit_rows: int = 1
    """Rows of a source's list of an expert that go to one slot together (exact mode); 1: each by itself."""

    @property
    def units_PG(self) -> Ints:
        """(P, G) such units from each source to each slot, the short one at the end of a list counted like any other."""
        return -(-self.rows_PG // self.unit_rows)

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots_G) // self.ep

    def source(self, *, ep: int, etp: int) -> int:
        return ep * self.etp + etp

    def sends(self, *, ep: int, etp: int) -> tuple[int, ...]:
        """Rows from this rank to each ep coordinate (all-to-all with the ranks of equal etp)."""
        rows = self.rows_PG[self.source(ep=ep, etp=etp)]
        return tuple(rows.reshape(self.ep, -1).sum(1).tolist())

    def receives(self, *, ep: int, etp: int) -> tuple[int, ...]:
        """Rows that this rank gets from each ep coordinate."""
        return tuple(self._arrivals(ep)[:, etp].sum(1).tolist())

    def etp_sizes(self, *, ep: int) -> tuple[int, ...]:
        """Rows that each etp rank of this ep coordinate holds after the all-to-all."""
        return tuple(self._arrivals(ep).sum((0, 2)).tolist())

    def slot_counts(self, *, ep: int) -> tuple[int, ...]:
        """Rows of each slot of this ep coordinate, from all sources."""
        return tuple(self._arrivals(ep).sum((0, 1)).tolist())

    def source_counts(self, *, ep: int) -> tuple[tuple[int, ...], ...]:
        """Rows of each slot of this ep coordinate by source, in the order in which the experts see them (etp, ep)."""
        of_slots = self._arrivals(ep).transpose(2, 1, 0)
        return tuple(tuple(int(n) for n in of_slot.reshape(-1)) for of_slot in of_slots)

    def expert_source_counts(self, *, ep: int) -> tuple[tuple[int, ...], ...]:
        """Rows of each *different* expert of this ep coordinate, slot by slot and in each slot by source, in the order in which the experts see them.

        The slots of an expert on a rank stand beside each other and share one copy of its weights.
        """
        here = self.slots_G[ep * self.slots_per_rank : (ep + 1) * self.slots_per_rank]
        found: dict[int, tuple[int, ...]] = {}
        for expert, counts in zip(here, self.source_counts(ep=ep), strict=True):
            found[expert] = (*found.get(expert, ()), *counts)
        return tuple(found.values())

    def slot_order(self, *, ep: int) -> Chunks:
        """Permutation from order of arrival (etp, ep, slot) to (slot, etp, ep)."""
        arrived = self._arrivals(ep).transpose(1, 0, 2)  # (ETP, EP, e)
        sizes = arrived.reshape(-1)
        starts = (np.cumsum(sizes) - sizes).reshape(arrived.shape)
        return Chunks(starts.transpose(2, 0, 1).reshape(-1), arrived.transpose(2, 0, 1).reshape(-1))

    def send_order(self, *, ep: int, etp: int) -> Chunks:
        """Permutation from rows sorted by expert to rows sorted by slot, on one source."""
        rows = self.rows_PG[self.source(ep=ep, etp=etp)]
        by_expert = np.argsort(np.asarray(self.slots_G), kind="stable")
        starts = np.empty_like(rows)
        starts[by_expert] = np.cumsum(rows[by_expert]) - rows[by_expert]
        return Chunks(starts, rows)

    def gathered_order(self, *, ep: int) -> tuple[Chunks, Ints]:
        """Permutation for the all-gather transport: from all sources' send lists, end to end, to this coordinate's rows in (slot,
        etp, ep) order.

        The second part is the source of each chunk.
        """
        flat = self.rows_PG.reshape(-1)
        starts = (np.cumsum(flat) - flat).reshape(self.ep, self.etp, -1)
        mine = slice(ep * self.slots_per_rank, (ep + 1) * self.slots_per_rank)
        source = np.broadcast_to(np.arange(len(self.rows_PG)).reshape(self.ep, self.etp, 1), starts.shape)

        def of_my_slots(values: Ints) -> Ints:
            """(EP, ETP, G) -> (e * ETP * EP,)"""
            flat: Ints = values[:, :, mine].transpose(2, 1, 0).reshape(-1)
            return flat

        return Chunks(of_my_slots(starts), of_my_slots(self.rows_PG.reshape(starts.shape))), of_my_slots(source)

    def _arrivals(self, ep: int) -> Ints:
        """(EP, ETP, e) rows from each source to the slots of one ep coordinate."""
        rows: Ints = self.rows_PG.reshape(self.ep, self.etp, self.ep, -1)[:, :, ep]
        return rows

    def check(self, counts_PE: ArrayLike | None = None) -> None:
        """Raise `PlanError` unless rows are whole, replicas share evenly, and (given the counts) nothing is lost or made."""
        raise_if(_problems(self, counts_PE), PlanError, subject="dispatch plan")

    def explain(self) -> str:
        """The busiest and idlest slot and rank, in one line each."""
        per_slot = self.rows_PG.sum(0)
        per_rank = per_slot.reshape(self.ep, -1).sum(1)
        stay = sum(self.sends(ep=p, etp=x)[p] for p in range(self.ep) for x in range(self.etp))
        total = int(per_slot.sum())
        return (
            f"{total} rows from {len(self.rows_PG)} sources to {len(self.slots_G)} slots on {self.ep} ep ranks; {stay} stay where they are\n"
            f"  rows per slot {per_slot.min()} ... {per_slot.max()}, per ep rank {per_rank.min()} ... {per_rank.max()}"
        )

    def to_dict(self) -> dict[str, Any]:
        fields = {"slots": self.slots_G, "ep": self.ep, "etp": self.etp, "rows": self.rows_PG.tolist()}
        return {**fields, "unit_rows": self.unit_rows}


def _problems(plan: DispatchPlan, counts_PE: ArrayLike | None) -> list[Problem]:
    rows, slots = plan.rows_PG, np.asarray(plan.slots_G)
    problems = []
    if rows.shape != (plan.ep * plan.etp, len(slots)) or len(slots) % plan.ep:
        rule = f"{plan.ep} x {plan.etp} sources by {len(slots)} slots, the same number on each ep rank"
        return [Problem(where="dispatch.rows.shape", value=rows.shape, rule=rule)]
    if (rows < 0).any():
        problems.append(Problem(where="dispatch.rows", value=int(rows.min()), rule="a number of rows is not negative"))
    unit = "row" if plan.unit_rows == 1 else f"chunk of {plan.unit_rows} rows"
    for expert in np.unique(slots):
        loads = plan.units_PG[:, slots == expert].sum(0)
        slack = 1 if counts_PE is not None else len(rows)
        if loads.max() - loads.min() > slack:
            rule = f"replicas of one expert differ by {slack} {unit} at most"
            problems.append(Problem(where=f"dispatch.expert[{expert}]", value=loads.tolist(), rule=rule))
        problems += _cut_units(plan, int(expert))
    if counts_PE is not None:
        counts = np.asarray(counts_PE)
        sent = np.stack([rows[:, slots == e].sum(1) for e in range(counts.shape[1])], axis=1)
        for p, e in np.argwhere(sent != counts):
            rule = f"source {p} routed {counts[p, e]} rows to expert {e}"
            problems.append(Problem(where=f"dispatch.rows[{p}]", value=int(sent[p, e]), rule=rule))
    return problems


def _cut_units(plan: DispatchPlan, expert: int) -> list[Problem]:
    """Units of an expert that a source sends to two slots: only the last of the slots that it sends to may get a short one."""
    out = []
    mine = np.flatnonzero(np.asarray(plan.slots_G) == expert)
    for p, rows in enumerate(plan.rows_PG[:, mine]):
        used = mine[rows > 0]
        cut = used[:-1][plan.rows_PG[p, used[:-1]] % plan.unit_rows > 0]
        if len(cut):
            rule = f"source {p} sends whole chunks of {plan.unit_rows} rows of expert {expert}, but for the last one"
            out.append(Problem(where=f"dispatch.rows[{p}][{cut[0]}]", value=int(plan.rows_PG[p, cut[0]]), rule=rule))
    return out


def plan_dispatch(counts_PE: ArrayLike, slots_G: Sequence[int], *, ep: int, etp: int) -> DispatchPlan:
    """The plan for gathered counts (sources by experts)."""
    return DispatchPlan(tuple(int(s) for s in slots_G), ep, etp, split_over_replicas(counts_PE, slots_G))


def plan_static_dispatch(num_rows: int, slots_G: Sequence[int], *, ep: int, etp: int) -> DispatchPlan:
    """The plan where every source pads to `num_rows` rows for every expert: each splits its own over the replicas."""
    slots = tuple(int(s) for s in slots_G)
    replica, replicas = replica_index(slots)
    share, rest = np.divmod(num_rows, replicas)
    rows_PG = np.tile(share + (replica < rest), (ep * etp, 1)).astype(np.int64)
    return DispatchPlan(slots, ep, etp, rows_PG)


def kept_pairs(
    experts_TK: ArrayLike, weights_TK: ArrayLike, *, rows: int, by: Literal["probability", "position"]
) -> NDArray[np.bool_]:
    """(T, K) which (token, expert) pairs an expert keeps that takes `rows` rows: the largest weights, or the first tokens.

    Equal weights go by the lowest token. Token by token, as the rule reads; the device does the same with two sorts.
    """
    experts, weights = np.asarray(experts_TK), np.asarray(weights_TK)
    kept = np.zeros(experts.shape, dtype=bool)
    for expert in np.unique(experts):
        pairs = [(int(t), int(k)) for t, k in np.argwhere(experts == expert)]
        if by == "probability":
            pairs.sort(key=lambda tk: (-float(weights[tk]), tk[0]))
        for pair in pairs[:rows]:
            kept[pair] = True
    return kept

"""The one dispatcher: routed tokens to the slots of their experts and back, by the schedule of `plan/moe/dispatch.py`.

Decides nothing about who sends what. It drops what the policy drops, sorts, moves, and undoes all of it in `combine`:

    counts     all-gather over ep_etp (not where sizes are static, nor on one rank)         E integers
    permute    rows of this rank in slot order, each source's rows of an expert in token order;
               on a device the host waits for the counts behind it, where the order needs none of them, and on one rank not at all
    rows       all-to-all over ep, all-gather over etp; the same for the rows' weights
    slot sort  from order of arrival to slot order                                           (experts run here)
    back       undo the sort, reduce-scatter over etp, all-to-all over ep, sum the copies of each token

Experts with replicas are just another placement: the rows of an expert are split over its slots by the rule of `plan/moe/dispatch_local.py` (padded: evenly
by each source), and the slots of an expert on one rank are one run of rows for one copy of its weights.

With `transport = "all_gather"` whole tokens are gathered over ep_etp instead, each rank takes the rows of its slots, and the partial sums of tokens
are reduce-scattered: fewer, larger messages, for tiny ep or large K.

With `transport = "deepep"` each token goes once to every rank that has an expert of it (`runtime/comm/tokens.py`), which makes the rows and adds them up again; no counts are gathered, so `listen` hears
nothing. Rows come to an expert in the order of the all-to-all (between hosts DeepEP has its own), so results differ by the order of sums over a token's copies alone: here those of a rank first, rounded.

Must never change: the set of kept pairs depends on the micro-batch (full_sequence) or this rank's part of it (sub_sequence) and on
nothing else; sums over copies run in a fixed order. Dropless and dropping cost one host synchronisation a layer, padded none, nor dropless on a GPU alone whose products are grouped. Padded
mode needs the same number of tokens on all ranks of the expert-parallel group.

Legend: T tokens of this rank, K experts of a token, H hidden, E experts, M rows of this rank's slots, R rows that this rank sends, C capacity,
P sources (ranks of ep_etp), G slots of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.device import SortedKeys, ends_of_groups, runs_programs, sort_keys
from phalanx.kernels.ops.grouped_mm import ends_of
from phalanx.kernels.ops.permute import combine_rows, gather_rows, gather_weighted, pick_weights
from phalanx.plan.mapping import Placement
from phalanx.plan.moe import (
    Chunks,
    DispatchPlan,
    DispatchSpec,
    capacity,
    plan_local_dispatch,
    plan_static_dispatch,
    rows_of_source,
)
from phalanx.runtime.comm import Collectives, Groups, TokensCame, traced

FILL = -1
"""Marks an entry of an index that stands for nothing (a fill row, a dropped pair)."""


@dataclass(eq=False)
class KnownCounts:
    """Counts of a pass that runs again in the backward pass, from its first run on a device: sizes are the same, so that the host need not wait for them twice."""

    counts: torch.Tensor | None = None
    """On the device; of one rank alone, whose host asks for none, where experts' rows end."""
    table: np.ndarray | None = None
    tokens: TokensCame | None = None
    """DeepEP's, on any device."""


@dataclass(frozen=True, eq=False)
class CountsUnderWay:
    """Counts of all sources, on their way to the host while the device and the host go on."""

    gathered: torch.Tensor
    there: torch.Tensor
    """The same on the host, once `done`."""
    done: Any = None
    """Event of a device; None: they are there."""
    known: KnownCounts | None = None
    comms: Collectives | None = None
    """By which they have come, of a device."""


@dataclass(frozen=True, eq=False)
class SendList:
    """The rows that this rank sends, in slot order. Each of the first two maps is the inverse of the other."""

    pair_of_row_R: torch.Tensor
    """Pair `t * K + k` of each row, FILL for a fill row."""
    rows_of_token_TK: torch.Tensor
    """Row of each pair, FILL for a dropped one."""
    dropped: torch.Tensor
    token_of_row_R: torch.Tensor
    """FILL for a fill row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BegunList:
    """What to send, while the counts of all sources are under way."""

    counts: CountsUnderWay
    found: SortedKeys
    experts_TK: torch.Tensor
    send: SendList | None
    """Known already: all pairs travel, in the order of their experts."""


@dataclass(frozen=True, eq=False)
class SlotMaps:
    """A reordering of rows, on the device: source row of each row of the result, and back."""

    there_M: torch.Tensor
    back_M: torch.Tensor

    @property
    def inverse(self) -> SlotMaps:
        return SlotMaps(self.back_M, self.there_M)


@dataclass(frozen=True, eq=False)
class DispatchState:
    """What `combine` needs of `dispatch`."""

    plan: DispatchPlan | None
    """None: no rank knows all counts (DeepEP), or nobody needs them (`Dispatched.counts`)."""
    token_of_row: torch.Tensor
    """Rows of this rank to its own tokens (all-to-all), or rows of its slots to the tokens that came here."""
    rows_of_token: torch.Tensor
    op_prefix: str
    token_sizes: tuple[int, ...] = ()
    """Tokens of each source (all-gather only)."""
    maps: SlotMaps | None = None
    """From the order of arrival to that of slots, where they differ (all-to-all only)."""
    came: TokensCame | None = None
    """Where they came from (DeepEP only)."""


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows of this rank's slots, sorted by slot, and the weight of each."""

    rows_MH: torch.Tensor
    weights_M: torch.Tensor
    counts: tuple[int, ...] | None
    """Rows of each expert that this rank holds (host integers, sum M); None: the device alone knows, `ends_e`."""
    dropped: torch.Tensor
    """int64 0-d: pairs of this rank that were dropped."""
    state: DispatchState
    ends_e: torch.Tensor | None = None
    """int32 row behind the last one of each of those experts, on the device, where it is there already."""


class Dispatcher:
    """Moves the tokens of one rank; holds no state of a batch. `dispatch` and `combine` are collective over `ep_etp`."""

    def __init__(
        self,
        spec: DispatchSpec,
        *,
        placement: Placement,
        groups: Groups,
        comms: Collectives,
        top_k: int,
        kernels: Impl = "fast",
        lanes: Lanes = SERIAL,
        unit_rows: int = 1,
    ) -> None:
        """`unit_rows`: so many rows of a source's list of an expert stay together, whichever replica serves them (exact mode)."""
        self.unit_rows = unit_rows
        self.spec, self.comms, self.kernels, self.top_k = spec, comms, kernels, top_k
        self.lanes = lanes
        self.ep, self.etp, self.ep_etp = (groups.axis(name) for name in ("ep", "etp", "ep_etp"))
        self.micro = groups.axis("micro")
        self.num_experts = placement.num_experts
        edp = groups.folding.coord(groups.rank, "edp")
        self.slots_G = tuple(int(e) for e in placement.group_slots(edp))
        self.host_of_ep, self.rack_of_ep = placement.hosts, placement.racks
        self.is_plain = self.slots_G == tuple(range(self.num_experts))
        self.shares = self._shares()
        self.listen: Callable[[DispatchPlan, np.ndarray], None] | None = None
        """Hears every plan that is made of gathered counts, and those: for metrics and verification."""
        self._zero: torch.Tensor | None = None
        self._known_ends: dict[tuple[int, ...], torch.Tensor] = {}

    def _shares(self) -> tuple[int, ...]:
        """Slots of each expert that this rank holds, in the order of its weights."""
        width = len(self.slots_G) // self.ep.size
        return tuple(Counter(self.slots_G[self.ep.index * width : (self.ep.index + 1) * width]).values())

    def plan(self, counts_PE: np.ndarray) -> DispatchPlan:
        """Who sends how many rows to which slot, for the gathered counts."""
        here = {"ep": self.ep.size, "etp": self.etp.size}
        if self.is_plain:  # in nearly every layer of every step: nothing is to be split
            return DispatchPlan(self.slots_G, rows_PG=counts_PE, **here)
        return plan_local_dispatch(
            counts_PE, self.slots_G, host_of_ep=self.host_of_ep, unit_rows=self.unit_rows, **here
        )

    def expert_counts(self, plan: DispatchPlan) -> tuple[int, ...]:
        """Rows of each expert that this rank holds: those of its slots here, which stand beside each other."""
        of_slots = plan.slot_counts(ep=self.ep.index)
        if len(of_slots) == len(self.shares):
            return of_slots
        counts = iter(of_slots)
        return tuple(sum(next(counts) for _ in range(slots)) for slots in self.shares)

    # ---- there -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        *,
        token_index_T: torch.Tensor | None = None,
        is_text_T: torch.Tensor | None = None,
        part_T: torch.Tensor | None = None,
        op_prefix: str = "",
        known: KnownCounts | None = None,
        counts_E: torch.Tensor | None = None,
        needs_counts: bool = True,
    ) -> Dispatched:
        """Send each token to the slots of its experts.

        `token_index_T`: place of each token in its micro-batch, where ranks of `tp_cp` share one and it is not simply rank by rank
        (it decides ties and `position` under full_sequence). `is_text_T`: the others are padding, which stays here (`sends_padding`; None: all are text). `part_T`: this rank stands in for several, part by part (sub_sequence drops
        in each part by itself). `op_prefix` names the collectives (`mb0.L3.fwd.`). `known`: of a pass that runs again. `counts_E`: int64 pairs of each expert,
        where they are known. `needs_counts`: of `Dispatched`, also where nothing but a wait of the host could tell them.
        """
        if self.sends_padding:
            return self._dispatch_tokens(x_TH, weights_TK, experts_TK, op_prefix, known)
        kept_TK = self.kept(
            weights_TK,
            experts_TK,
            token_index_T=token_index_T,
            is_text_T=is_text_T,
            part_T=part_T,
            op_prefix=op_prefix,
        )
        gathers = self.spec.transport == "all_gather" and self.ep_etp.size > 1
        if kept_TK is None and not needs_counts and self._stays_alone(experts_TK):
            return self._keep(x_TH, weights_TK, experts_TK, op_prefix, known)
        if self.spec.is_static:
            places = range(self.static_rows(len(experts_TK)))
            plan, send = self.static_share(experts_TK, kept_TK, places=places)
            if gathers:
                return self._gather(x_TH, weights_TK, plan, send, (x_TH.shape[0],) * self.ep_etp.size, op_prefix)
            picked = self.pick(x_TH, weights_TK, send, op_id=op_prefix + "dispatch.permute")
            return self._exchange(*picked, plan, send, op_prefix, ends_e=self._static_ends(plan, x_TH.device))
        tokens = on_device(x_TH.shape[0], x_TH.device).view(1) if gathers else None
        begun = self.begin_list(experts_TK, kept_TK, op_prefix, told=tokens, known=known, counts_E=counts_E)
        if gathers:
            plan, send, told = self.finish_list(begun)
            return self._gather(x_TH, weights_TK, plan, send, tuple(int(n) for n in told.reshape(-1)), op_prefix)
        ends_e = self._ends(begun.counts.gathered)
        if begun.send is None:
            plan, send, _ = self.finish_list(begun)
            picked = self.pick(x_TH, weights_TK, send, op_id=op_prefix + "dispatch.permute")
        else:  # beside the way of the counts
            picked = self.pick(x_TH, weights_TK, begun.send, op_id=op_prefix + "dispatch.permute")
            plan, send, _ = self.finish_list(begun)
        return self._exchange(*picked, plan, send, op_prefix, ends_e=ends_e)

    def _stays_alone(self, experts_TK: torch.Tensor) -> bool:
        """All rows are this rank's own, in the order of experts, and the device can say where each expert's end: only who listens would need their numbers on the host."""
        return self.ep_etp.size == 1 and self.is_plain and self.listen is None and self._sorts(experts_TK)

    def _sorts(self, experts_TK: torch.Tensor) -> bool:
        return self.kernels == "fast" and runs_programs(experts_TK)

    def _keep(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        op_prefix: str,
        known: KnownCounts | None,
    ) -> Dispatched:
        """Where `_stays_alone`: there are as many rows as pairs, so that the host waits for nothing."""
        found = sort_keys(experts_TK.reshape(-1), self.num_experts, copies=experts_TK.shape[1])
        if known is not None and known.counts is not None:
            assert found.ends_E is not None
            self.comms.doubts.append((found.ends_E != known.counts).any())
        elif known is not None:
            known.counts = found.ends_E
        send = self._send(found, found.order_N, experts_TK, self._nothing(experts_TK.device))
        rows_MH, weights_M = self.pick(x_TH, weights_TK, send, op_id=op_prefix + "dispatch.permute")
        state = DispatchState(None, send.token_of_row_R, send.rows_of_token_TK, op_prefix)
        return Dispatched(rows_MH, weights_M, None, send.dropped, state, found.ends_E)

    def pick(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, send: SendList, *, op_id: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that travel, in the order in which they do, and their weights."""
        pick = partial(
            gather_weighted,
            token_of_row_M=send.token_of_row_R,
            pair_of_row_M=send.pair_of_row_R,
            rows_of_token_TK=send.rows_of_token_TK,
            has_fill=self.spec.is_static,
            impl=self.kernels,
            lanes=self.lanes,
        )
        picked: tuple[torch.Tensor, torch.Tensor] = traced(self.comms, op_id, pick, x_TH, weights_TK)
        return picked

    def _ends(self, gathered: torch.Tensor) -> torch.Tensor | None:
        """(e,) int32 row behind the last one of each expert here, on a GPU, where no plan is needed to say so."""
        if not self.is_plain or not runs_programs(gathered):
            return None
        width = self.num_experts // self.ep.size
        return ends_of_groups(gathered.view(self.ep_etp.size, -1), self.ep.index * width, width)

    def _static_ends(self, plan: DispatchPlan, device: torch.device) -> torch.Tensor | None:
        """The same of a plan that no routing changes: copied there once, so that a CUDA graph of a later pass has no copy from the host."""
        if device.type == "cpu":
            return None
        counts = self.expert_counts(plan)
        if counts not in self._known_ends:
            self._known_ends[counts] = ends_of(counts, device)
        return self._known_ends[counts]

    def _exchange(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        plan: DispatchPlan,
        send: SendList,
        op_prefix: str,
        *,
        ends_e: torch.Tensor | None = None,
    ) -> Dispatched:
        here = {"ep": self.ep.index, "etp": self.etp.index}
        splits = {"in_splits": plan.sends(**here), "out_splits": plan.receives(**here)}
        sizes = plan.etp_sizes(ep=self.ep.index)
        at = op_prefix + "dispatch."
        rows = self.comms.all_to_all_rows(rows, **splits, axis=self.ep, op_id=at + "rows")
        rows = self.comms.all_gather_rows(rows, sizes=sizes, axis=self.etp, op_id=at + "rows_etp")
        weights = self.comms.all_to_all_rows(weights, **splits, axis=self.ep, op_id=at + "weights")
        weights = self.comms.all_gather_rows(weights, sizes=sizes, axis=self.etp, op_id=at + "weights_etp")
        maps = self.slot_maps(plan, rows.device)
        if maps is not None:
            rows, weights = traced(self.comms, at + "sort", partial(reordered, maps), rows, weights)
        state = DispatchState(plan, send.token_of_row_R, send.rows_of_token_TK, op_prefix, maps=maps)
        return Dispatched(rows, weights, self.expert_counts(plan), send.dropped, state, ends_e)

    def _gather(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        plan: DispatchPlan,
        send: SendList,
        token_sizes: tuple[int, ...],
        op_prefix: str,
    ) -> Dispatched:
        """All tokens of the group come here, with every source's send list; the rows of the own slots are picked from them."""
        at, axis = op_prefix + "dispatch.", self.ep_etp
        row_sizes = tuple(int(n) for n in plan.rows_PG.sum(1))
        weights_R = pick_weights(weights_TK, send.pair_of_row_R, has_fill=self.spec.is_static)
        all_NH = self.comms.all_gather_rows(x_TH, sizes=token_sizes, axis=axis, op_id=at + "rows")
        weights = self.comms.all_gather_rows(weights_R, sizes=row_sizes, axis=axis, op_id=at + "weights")
        pairs = self.comms.all_gather_rows(
            send.pair_of_row_R.to(torch.int32), sizes=row_sizes, axis=axis, op_id=at + "pairs"
        )
        chunks, sources = plan.gathered_order(ep=self.ep.index)
        index_M = chunk_index(chunks, x_TH.device)
        first_token = np.cumsum(token_sizes) - np.asarray(token_sizes)
        (offset_M,) = repeated([(first_token[sources] * self.top_k, chunks.sizes)], x_TH.device)
        local_M = pairs.index_select(0, index_M)
        num_pairs = all_NH.shape[0] * self.top_k
        # An aborted message may hold any number, and after a wrong index a device does no more work.
        pair_M = torch.where(local_M < 0, FILL, local_M + offset_M).clamp(max=num_pairs - 1)
        rows_of_token_NK = inverse_of(pair_M, num_pairs).view(-1, self.top_k)
        token_of_row_M = tokens_of(pair_M, self.top_k)
        permute = partial(
            gather_rows,
            token_of_row_M=token_of_row_M,
            rows_of_token_TK=rows_of_token_NK,
            impl=self.kernels,
            lanes=self.lanes,
        )
        rows_MH = traced(self.comms, at + "permute", permute, all_NH)
        weights_M = weights.index_select(0, index_M)
        state = DispatchState(plan, token_of_row_M, rows_of_token_NK, op_prefix, token_sizes)
        return Dispatched(rows_MH, weights_M, self.expert_counts(plan), send.dropped, state)

    def _dispatch_tokens(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        op_prefix: str,
        known: KnownCounts | None,
    ) -> Dispatched:
        """Tokens with an expert here come here, once; their rows are made of them. Every expert has one slot, in their order."""
        at = op_prefix + "dispatch."
        came = self.comms.dispatch_tokens(
            x_TH,
            weights_TK,
            experts_TK,
            num_experts=self.num_experts,
            axis=self.ep,
            op_id=at + "rows",
            known=None if known is None else known.tokens,
        )
        if known is not None:
            known.tokens = came.kept
        held = len(came.counts)
        keys_NK = torch.where(came.experts_NK < 0, held, came.experts_NK)  # other ranks' behind the last expert
        found = sorted_keys(keys_NK.reshape(-1), held, copies=self.top_k, counted=True, impl=self.kernels)
        rows_here = found.order_N[: sum(came.counts)]
        send = self._send(found, rows_here, came.experts_NK, self._nothing(x_TH.device))
        rows_MH, weights_M = self.pick(came.x_NH, came.weights_NK, send, op_id=at + "permute")
        state = DispatchState(None, send.token_of_row_R, send.rows_of_token_TK, op_prefix, came=came.kept)
        return Dispatched(rows_MH, weights_M, came.counts, send.dropped, state)

    # ---- back ------------------------------------------------------------------------------------------------------------

    def combine(self, rows_MH: torch.Tensor, state: DispatchState) -> torch.Tensor:
        """(T, H) sum of each token's rows, which the experts have already weighted. The inverse of `dispatch`."""
        at = state.op_prefix + "combine."
        if state.token_sizes:
            all_NH = traced(self.comms, at + "sum", partial(self._sum, state), rows_MH)
            return self.comms.reduce_scatter_rows(all_NH, sizes=state.token_sizes, axis=self.ep_etp, op_id=at + "rows")
        if state.came is not None:
            sums_NH = traced(self.comms, at + "sum", partial(self._sum, state), rows_MH)
            return state.came.trip.combine(sums_NH, op_id=at + "rows")
        if state.plan is not None:
            rows_MH = self._send_back(rows_MH, state.plan, state.maps, at)
        return traced(self.comms, at + "sum", partial(self._sum, state), rows_MH)

    def _send_back(self, rows_MH: torch.Tensor, plan: DispatchPlan, maps: SlotMaps | None, at: str) -> torch.Tensor:
        """(R, H) the rows that this rank has sent, as the experts have left them."""
        if maps is not None:
            (rows_MH,) = traced(self.comms, at + "sort", partial(reordered, maps.inverse), rows_MH)
        here = {"ep": self.ep.index, "etp": self.etp.index}
        sizes = plan.etp_sizes(ep=self.ep.index)
        rows = self.comms.reduce_scatter_rows(rows_MH, sizes=sizes, axis=self.etp, op_id=at + "rows_etp")
        return self.comms.all_to_all_rows(
            rows, in_splits=plan.receives(**here), out_splits=plan.sends(**here), axis=self.ep, op_id=at + "rows"
        )

    def _sum(self, state: DispatchState, rows_MH: torch.Tensor) -> torch.Tensor:
        """Each token's copies, added up."""
        return combine_rows(
            rows_MH, state.rows_of_token, token_of_row_M=state.token_of_row, impl=self.kernels, lanes=self.lanes
        )

    def slot_order(self, plan: DispatchPlan) -> Chunks | None:
        """None where rows arrive in slot order already: from one source, or for one slot."""
        if self.ep_etp.size == 1 or plan.slots_per_rank == 1:
            return None
        return plan.slot_order(ep=self.ep.index)

    def slot_maps(self, plan: DispatchPlan, device: torch.device) -> SlotMaps | None:
        """That order on the device."""
        order = self.slot_order(plan)
        if order is None:
            return None
        there_M, back_M = chunk_indices((order, order.inverse()), device)
        return SlotMaps(there_M, back_M)

    # ---- what to send ----------------------------------------------------------------------------------------------------

    def begin_list(
        self,
        experts_TK: torch.Tensor,
        kept_TK: torch.Tensor | None,
        op_prefix: str,
        *,
        told: torch.Tensor | None = None,
        known: KnownCounts | None = None,
        counts_E: torch.Tensor | None = None,
    ) -> BegunList:
        """Exactly the kept pairs: counts are gathered and set out for the host, pairs are sorted.

        `told`: further integers of this rank that all are to know. `counts_E`: int64 pairs of each expert, where they are known and none is dropped.
        """
        keys_N, top_k = experts_TK.reshape(-1), experts_TK.shape[1]
        if kept_TK is not None:  # dropped pairs sort to the end, behind the last expert
            keys_N, counts_E = torch.where(kept_TK.reshape(-1), keys_N, self.num_experts), None
        under_way = None if counts_E is None else self._gather_counts(counts_E, told, op_prefix, known)
        found = sorted_keys(keys_N, self.num_experts, copies=top_k, counted=counts_E is not None, impl=self.kernels)
        if under_way is None:
            assert found.counts_E is not None
            under_way = self._gather_counts(found.counts_E, told, op_prefix, known)
        send = None
        if self.is_plain and kept_TK is None:
            send = self._send(found, found.order_N, experts_TK, self._nothing(experts_TK.device))
        return BegunList(counts=under_way, found=found, experts_TK=experts_TK, send=send)

    def finish_list(self, begun: BegunList) -> tuple[DispatchPlan, SendList, np.ndarray]:
        """The one host synchronisation of a layer is here: sizes of everything that follows. What all have told is the last of the three, by source."""
        table = counts_on_host(begun.counts).reshape(self.ep_etp.size, -1)
        counts_PE = table[:, : self.num_experts]
        plan = self.plan(counts_PE)
        if self.listen is not None:
            self.listen(plan, counts_PE)
        send = begun.send
        if send is None:
            num_rows, experts_TK = int(counts_PE[self.ep_etp.index].sum()), begun.experts_TK
            pair_of_row_R = self.by_slot(begun.found.order_N[:num_rows], plan)
            dropped = on_device(experts_TK.numel() - num_rows, experts_TK.device)
            send = self._send(begun.found, pair_of_row_R, experts_TK, dropped)
        return plan, send, table[:, self.num_experts :]

    def _send(
        self, found: SortedKeys, pair_of_row_R: torch.Tensor, experts_TK: torch.Tensor, dropped: torch.Tensor
    ) -> SendList:
        row_of_pair_N = found.places_N if self.is_plain else None
        if row_of_pair_N is None:
            row_of_pair_N = inverse_exact(pair_of_row_R, experts_TK.numel())
        token_of_row_R = None if found.tokens_N is None or not self.is_plain else found.tokens_N[: len(pair_of_row_R)]
        if token_of_row_R is None:
            token_of_row_R = tokens_of(pair_of_row_R, experts_TK.shape[1])
        return SendList(pair_of_row_R, row_of_pair_N.view(experts_TK.shape), dropped, token_of_row_R)

    def _nothing(self, device: torch.device) -> torch.Tensor:
        """int64 0-d zero."""
        if self._zero is None:
            self._zero = on_device(0, device)
        return self._zero

    def by_slot(self, pair_of_row_R: torch.Tensor, plan: DispatchPlan) -> torch.Tensor:
        """Pairs sorted by expert, sorted by slot."""
        if self.is_plain:
            return pair_of_row_R
        moves = plan.send_order(ep=self.ep.index, etp=self.etp.index)
        return pair_of_row_R.index_select(0, chunk_index(moves, pair_of_row_R.device))

    def _gather_counts(
        self, counts_E: torch.Tensor, told: torch.Tensor | None, op_prefix: str, known: KnownCounts | None
    ) -> CountsUnderWay:
        """Counts of all sources, and what else they tell, behind them."""
        if told is not None:
            counts_E = torch.cat([counts_E, told.to(counts_E)])
        gathered = self.comms.all_gather(counts_E, self.ep_etp, op_id=op_prefix + "dispatch.counts")
        return to_host(gathered, known, self.comms)

    def static_share(
        self, experts_TK: torch.Tensor, kept_TK: torch.Tensor | None, *, places: range
    ) -> tuple[DispatchPlan, SendList]:
        """Those numbered `places` of the rows that every expert gets from this rank in padded mode, fill rows among them: their number does not depend on the routing."""
        assert kept_TK is not None  # the static policies drop
        num_rows = len(places)
        plan = plan_static_dispatch(num_rows, self.slots_G, ep=self.ep.size, etp=self.etp.size)
        keys_N, kept_N = experts_TK.reshape(-1), kept_TK.reshape(-1)
        place_N = place_in_expert(torch.where(kept_N, keys_N, self.num_experts), self.num_experts) - places.start
        here_N = kept_N & (place_N >= 0) & (place_N < num_rows)
        row_N = torch.where(here_N, keys_N * num_rows + place_N, FILL)
        if not self.is_plain:
            back = chunk_index(plan.send_order(ep=self.ep.index, etp=self.etp.index).inverse(), keys_N.device)
            row_N = torch.where(here_N, back[row_N], FILL) if len(back) else row_N
        pair_of_row_R = inverse_of(row_N, self.num_experts * num_rows)
        dropped = kept_N.numel() - kept_N.sum()
        tokens_R = tokens_of(pair_of_row_R, experts_TK.shape[1])
        return plan, SendList(pair_of_row_R, row_N.view(experts_TK.shape), dropped, tokens_R)

    def static_rows(self, num_tokens: int) -> int:
        """Rows to each expert in padded mode: the capacity, of which one rank can fill no more than it has tokens."""
        sizes = {"sharing": self.micro.size, "top_k": self.top_k, "num_experts": self.num_experts}
        return rows_of_source(self.spec, num_tokens=num_tokens, **sizes)

    def _capacity(self, num_tokens: int) -> int:
        return capacity(self.spec, num_tokens=num_tokens, top_k=self.top_k, num_experts=self.num_experts)

    @property
    def sends_padding(self) -> bool:
        """Whether rows of padding travel and are computed: DeepEP sends whole tokens."""
        return self.spec.transport == "deepep" and self.ep_etp.size > 1

    # ---- dropping --------------------------------------------------------------------------------------------------------

    def kept(
        self,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        *,
        token_index_T: torch.Tensor | None = None,
        is_text_T: torch.Tensor | None = None,
        part_T: torch.Tensor | None = None,
        op_prefix: str = "",
    ) -> torch.Tensor | None:
        """(T, K) which pairs of this rank the experts keep; None where all are. Arguments as of `dispatch`."""
        if self.spec.policy == "dropless":
            return None if is_text_T is None else is_text_T.unsqueeze(1).expand_as(experts_TK)
        if is_text_T is not None:  # padding asks for an expert that nobody has
            experts_TK = torch.where(is_text_T.unsqueeze(1), experts_TK, self.num_experts)
        if part_T is not None and self.spec.drop_scope == "sub_sequence":
            kept_TK = self._kept_by_part(weights_TK.detach(), experts_TK, part_T)
        else:
            kept_TK = self._kept(weights_TK.detach(), experts_TK, token_index_T, op_prefix)
        return kept_TK if is_text_T is None else kept_TK & is_text_T.unsqueeze(1)

    def _kept(
        self,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        token_index_T: torch.Tensor | None,
        op_prefix: str,
    ) -> torch.Tensor:
        axis = self.micro
        if self.spec.drop_scope == "sub_sequence" or axis.size == 1:
            return kept_pairs(weights_TK, experts_TK, rows=self._capacity(len(experts_TK)), by=self.spec.drop_by)
        at, num_tokens = op_prefix + "dispatch.full_", len(experts_TK)
        experts_SK = self.comms.all_gather(experts_TK.to(torch.int32), axis, op_id=at + "experts").to(torch.int64)
        weights_SK = self.comms.all_gather(weights_TK, axis, op_id=at + "weights")
        if token_index_T is not None:
            index_S = self.comms.all_gather(token_index_T, axis, op_id=at + "index")
            order_S = torch.sort(index_S, stable=True).indices
            experts_SK, weights_SK = experts_SK[order_S], weights_SK[order_S]
        kept_SK = kept_pairs(weights_SK, experts_SK, rows=self._capacity(len(experts_SK)), by=self.spec.drop_by)
        if token_index_T is not None:
            kept_SK = kept_SK[torch.sort(order_S, stable=True).indices]
        return kept_SK[axis.index * num_tokens : (axis.index + 1) * num_tokens]

    def _kept_by_part(self, weights_TK: torch.Tensor, experts_TK: torch.Tensor, part_T: torch.Tensor) -> torch.Tensor:
        kept_TK = torch.zeros_like(experts_TK, dtype=torch.bool)
        for part in part_T.unique():  # SYNC: for verification only
            at = (part_T == part).nonzero().squeeze(1)  # SYNC: for verification only
            rows = self._capacity(len(at))
            kept_TK[at] = kept_pairs(weights_TK[at], experts_TK[at], rows=rows, by=self.spec.drop_by)
        return kept_TK


def kept_pairs(weights_TK: torch.Tensor, experts_TK: torch.Tensor, *, rows: int, by: str) -> torch.Tensor:
    """(T, K) pairs that the experts keep (device form of `plan.moe.dispatch.kept_pairs`): two stable sorts, no synchronisation."""
    experts_N = experts_TK.reshape(-1)
    if by == "position":
        return (place_in_expert(experts_N, None) < rows).view(experts_TK.shape)
    best_first_N = torch.sort(weights_TK.reshape(-1), descending=True, stable=True).indices
    place_N = torch.empty_like(experts_N)
    place_N[best_first_N] = place_in_expert(experts_N[best_first_N], None)
    return (place_N < rows).view(experts_TK.shape)


# ---- index arithmetic on the device ----------------------------------------------------------------------------------------


def sorted_keys(keys_N: torch.Tensor, values: int, *, copies: int = 1, counted: bool = False, impl: Impl) -> SortedKeys:
    """Numbers below `values`, and `values` itself for those that have no place, `copies` of each token. `counted`: how many there are of each is known."""
    if impl == "fast" and runs_programs(keys_N):
        return sort_keys(keys_N.contiguous(), values, copies=copies)
    counts_E = None if counted else count_keys(keys_N, values + 1)[:values]
    return SortedKeys(counts_E, stable_order(keys_N, values), None, None)


def tokens_of(pairs_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """The token of each pair, FILL of FILL."""
    return torch.div(pairs_R, top_k, rounding_mode="floor")


def stable_order(keys_N: torch.Tensor, largest: int) -> torch.Tensor:
    """int64 positions that sort small non-negative integers stably. NumPy's radix sort of 16-bit keys is 4 times torch's on a CPU."""
    if keys_N.device.type == "cpu" and largest < 2**15:
        return torch.from_numpy(np.argsort(keys_N.to(torch.int16).numpy(), kind="stable"))
    return torch.sort(keys_N, stable=True).indices


def to_host(gathered: torch.Tensor, known: KnownCounts | None, comms: Collectives) -> CountsUnderWay:
    """Let counts set out for the host, in pinned memory where they come from a device. Where the pass ran before they are known there, and so on the device: all ranks have gathered them
    in both runs, whose messages are alike, but what came the second time may be of an aborted message, and nothing is to be indexed by it."""
    if known is not None and known.counts is not None and known.table is not None:
        comms.doubts.append((gathered != known.counts).any())
        return CountsUnderWay(known.counts, known.counts, known=known)
    if not gathered.is_cuda:
        return CountsUnderWay(gathered, gathered, known=known)
    there = gathered.to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return CountsUnderWay(gathered, there, done, known, comms)


def counts_on_host(counts: CountsUnderWay) -> np.ndarray:
    """int64 counts of all sources: of a device read once, also where the pass runs twice."""
    known, gathered = counts.known, counts.gathered
    if known is not None and known.table is not None:
        return known.table
    if counts.done is not None:
        counts.done.synchronize()  # SYNC: sizes of the exchanges
    if counts.comms is not None:
        counts.comms.check_sound()  # places on the device are made of them
    table = counts.there.numpy().astype(np.int64)
    if known is not None and gathered.device.type != "cpu":
        known.counts, known.table = gathered, table
    return table


def chunk_index(chunks: Chunks, device: torch.device) -> torch.Tensor:
    """int64 source row of each row of the reordering, built on the device."""
    return chunk_indices((chunks,), device)[0]


def chunk_indices(orders: Sequence[Chunks], device: torch.device) -> list[torch.Tensor]:
    """Those of several reorderings of as many rows."""
    if device.type == "cpu":
        return [torch.from_numpy(chunks.index()) for chunks in orders]
    place_M = torch.arange(orders[0].num_rows, device=device)
    shifts = repeated([(chunks.shifts, chunks.sizes) for chunks in orders], device)
    return [place_M + shift_M for shift_M in shifts]


def repeated(runs: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """int64 `values[i]`, `times[i]` times each, on the device, of each `(values, times)`, all of one length. The host does not wait."""
    there = torch.from_numpy(np.stack([row for run in runs for row in run])).to(device, non_blocking=True)
    return [
        torch.repeat_interleave(there[2 * i], there[2 * i + 1], output_size=int(times.sum()))
        for i, (_, times) in enumerate(runs)
    ]


def on_device(number: int, device: torch.device) -> torch.Tensor:
    """int64 0-d, written by the device: `torch.tensor` would copy it there, and the host would wait."""
    return torch.full((), number, dtype=torch.int64, device=device)


def count_keys(keys_N: torch.Tensor, size: int) -> torch.Tensor:
    """(size,) int64: how often each of the numbers below `size` occurs. The host does not wait."""
    if keys_N.device.type != "cpu":  # a launch less, on a CPU twice the time
        return torch.zeros(size, dtype=torch.int64, device=keys_N.device).scatter_(0, keys_N, 1, reduce="add")
    return torch.zeros(size, dtype=torch.int64, device=keys_N.device).scatter_add_(0, keys_N, torch.ones_like(keys_N))


def place_in_expert(keys_N: torch.Tensor, largest: int | None) -> torch.Tensor:
    """How many earlier entries have the same key."""
    order_N = stable_order(keys_N, 2**14 if largest is None else largest)
    sorted_N = keys_N[order_N]
    first_N = torch.searchsorted(sorted_N, sorted_N)
    place_N = torch.empty_like(keys_N)
    place_N[order_N] = torch.arange(len(keys_N), device=keys_N.device) - first_N
    return place_N


def inverse_exact(index_R: torch.Tensor, size: int) -> torch.Tensor:
    """(size,) where each value occurs in `index_R` (all different, none FILL), FILL where it does not."""
    out = torch.empty(size, dtype=torch.int64, device=index_R.device)
    if len(index_R) < size:
        out.fill_(FILL)
    out[index_R] = torch.arange(len(index_R), device=index_R.device)
    return out


def inverse_of(index_R: torch.Tensor, size: int) -> torch.Tensor:
    """The same where `index_R` may hold FILL: those entries land in a spare last cell."""
    out = torch.full((size + 1,), FILL, dtype=torch.int64, device=index_R.device)
    cells_R = torch.where(index_R < 0, size, index_R)
    out[cells_R] = torch.arange(len(index_R), device=index_R.device)
    return out[:size]


def reordered(maps: SlotMaps, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of each tensor in another order."""
    return tuple(Reorder.apply(x, maps.there_M, maps.back_M) for x in xs)


class Reorder(torch.autograd.Function):
    """`x[index]`, whose gradient is `grad[inverse]`: a gather both ways."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)  # type: ignore[attr-defined]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, inverse), None, None

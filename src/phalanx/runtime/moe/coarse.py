"""One MoE layer in chunks of tokens, as FasterMoE (doi 10.1145/3503221.3508418) and Tutel (arXiv 2206.03382) overlap it: `coarse:N`.

The rank's tokens are cut into N chunks of equal numbers. While the experts compute chunk i, chunk i+1 is on its way to them and chunk i-1 on its
way back:

    start 0 | start 1, wait 0, experts 0, return 0 | start 2, wait 1, experts 1, return 1 | ... | wait for all that return, sum

Waits for what returns are recorded last, so autograd, which takes the youngest first, walks the same pipeline backwards: gradients of all chunks
leave, and while the experts compute those of chunk i, those of chunks i-1 and i+1 travel.

What the chunks cost: messages and products are N times as many and N times as small, and gradients of weights are summed N times.

One chunk would be the serial layer (`serial` is the recipe's word for it), and yet `run_experts` is not this with `chunks = 1`. It is the plain reference that chunks, tiles and fused kernels
are compared with; it also carries whole tokens (`transport = "all_gather"`) and the products of exact mode, which chunks cannot; its ids have no `chunk0`, in programs and in saved traces; and a
reader of the plain trainer needs its fifteen lines, not the travelling below. What the two have in common, the dispatcher's lists and the products of the experts, stands once.

Must never change: which pairs are kept is decided before tokens are cut, and counts of all chunks are gathered by one collective (one host
synchronisation a layer). Where rows are padded to the capacity, their places in the capacity are cut instead of the tokens, or every
chunk would be padded. The result is that of `run_experts` but for rounding: rows of an expert are multiplied chunk by chunk.

Legend: T tokens of this rank, t tokens of a chunk, K experts of a token, H hidden, E experts, M rows of this rank's slots, C chunks, P sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops.permute import combine_rows
from phalanx.plan.moe import DispatchPlan
from phalanx.runtime.comm import RowsUnderWay, traced
from phalanx.runtime.moe.dispatch import (
    Dispatcher,
    SendList,
    count_keys,
    counts_on_host,
    inverse_exact,
    on_device,
    reordered,
    repeated,
    stable_order,
    to_host,
    tokens_of,
)
from phalanx.runtime.moe.experts import MoeCall, rows_of_experts


def run_coarse(
    call: MoeCall, *, dispatcher: Dispatcher, chunks: int, kernels: Impl = "fast", lanes: Lanes = SERIAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run_experts` in `chunks` chunks, which must be the same number on all ranks of `ep_etp`. Collective over it.

    More chunks than tokens leave some of them empty. Raises `ConfigError` for `chunks < 1`, or where whole tokens travel (`transport` other than
    "all_to_all"), of which each rank needs all before it can begin.
    """
    raise_if(_problems(dispatcher, chunks), ConfigError, subject="overlap")
    y_TH, dropped = _in_chunks(call, dispatcher, chunks, kernels, lanes)
    return call.with_shared(y_TH), dropped  # rows that were sent are gone by now


def _in_chunks(
    call: MoeCall, dispatcher: Dispatcher, chunks: int, kernels: Impl, lanes: Lanes
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routed experts."""
    kept_TK = call.kept_TK(dispatcher)
    cut = _cut_capacity if dispatcher.spec.is_static else _cut_tokens
    parts = cut(call, dispatcher, kept_TK, chunks)
    exchange = _ChunkExchange(dispatcher, call.op_prefix)
    pending = [exchange.start(parts[0])]
    returning = []
    for part in parts:
        pending.extend(exchange.start(following) for following in parts[part.number + 1 : part.number + 2])
        rows_MH, weights_M = exchange.arrive(part, pending.pop(0))
        counts = dispatcher.expert_counts(part.plan)
        compute = partial(rows_of_experts, call=call, counts=counts, kernels=kernels, lanes=lanes)
        y_MH = traced(dispatcher.comms, f"{call.op_prefix}experts.chunk{part.number}", compute, rows_MH, weights_M)
        returning.append(exchange.start_back(part, y_MH))
    sums = [exchange.arrive_back(part, rows) for part, rows in zip(parts, returning, strict=True)]
    return _join(sums, whole=dispatcher.spec.is_static), parts[0].send.dropped


def _problems(dispatcher: Dispatcher, chunks: int) -> list[Problem]:
    problems = []
    if chunks < 1:
        problems.append(Problem(where="chunks", value=chunks, rule="must be at least 1", hint="use 2"))
    transport = dispatcher.spec.transport
    if transport != "all_to_all" and dispatcher.ep_etp.size > 1:
        rule = f"coarse chunks need rows that are sent to their experts, and {transport} sends whole tokens"
        problems.append(Problem(where="dispatch.transport", value=transport, rule=rule, hint="use all_to_all"))
    return problems


def _join(sums: list[torch.Tensor], *, whole: bool) -> torch.Tensor:
    """Chunks of tokens one after the other; of a cut capacity each chunk has a part of every token's sum."""
    if not whole:
        return torch.cat(sums)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total


# ---- cutting -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """One chunk: its tokens, who sends how much of it where, and which rows this rank sends."""

    number: int
    x_tH: torch.Tensor
    weights_tK: torch.Tensor
    plan: DispatchPlan
    send: SendList


def chunk_sizes(num_tokens: int, chunks: int) -> list[int]:
    """Tokens of each chunk: they differ by one at most, the larger ones first."""
    share, rest = divmod(num_tokens, chunks)
    return [share + (i < rest) for i in range(chunks)]


def _cut_tokens(call: MoeCall, dispatcher: Dispatcher, kept_TK: torch.Tensor | None, chunks: int) -> list[_Part]:
    """Chunks of consecutive tokens, with one sort and one collective for all of them."""
    x_TH, weights_TK, experts_TK = call.x_TH, call.weights_TK, call.experts_TK
    sizes, num_keys, device = chunk_sizes(len(x_TH), chunks), dispatcher.num_experts + 1, experts_TK.device
    keys_N = experts_TK.reshape(-1)
    if kept_TK is not None:  # dropped pairs sort to the end of their chunk, behind the last expert
        keys_N = torch.where(kept_TK.reshape(-1), keys_N, num_keys - 1)
    (first_key_N,) = repeated([(num_keys * np.arange(chunks), dispatcher.top_k * np.array(sizes))], device)
    keys_N = keys_N + first_key_N
    counts_CE = count_keys(keys_N, chunks * num_keys).view(chunks, num_keys)[:, :-1].contiguous()
    counts_PCE = _gather(dispatcher, counts_CE, call)
    order_N = stable_order(keys_N, chunks * num_keys)
    rows_C = counts_PCE[dispatcher.ep_etp.index].sum(1)
    dropped = on_device(keys_N.numel() - int(rows_C.sum()), device)
    parts = []
    first = 0
    tokens = zip(x_TH.split(sizes), weights_TK.split(sizes), strict=True)
    for number, (x_tH, weights_tK) in enumerate(tokens):
        plan = dispatcher.plan(counts_PCE[:, number])
        pair_of_row_R = dispatcher.by_slot(order_N[first : first + int(rows_C[number])] - first, plan)
        rows_of_token_tK = inverse_exact(pair_of_row_R, weights_tK.numel()).view(weights_tK.shape)
        tokens_R = tokens_of(pair_of_row_R, dispatcher.top_k)
        send = SendList(pair_of_row_R, rows_of_token_tK, dropped, tokens_R)
        parts.append(_Part(number, x_tH, weights_tK, plan, send))
        first += weights_tK.numel()
    return parts


def _gather(dispatcher: Dispatcher, counts_CE: torch.Tensor, call: MoeCall) -> np.ndarray:
    """(P, C, E) rows of all chunks, sources and experts, on the host."""
    gathered = dispatcher.comms.all_gather(counts_CE, dispatcher.ep_etp, op_id=call.op_prefix + "dispatch.counts")
    table = counts_on_host(to_host(gathered, call.known, dispatcher.comms))
    return table.reshape(dispatcher.ep_etp.size, *counts_CE.shape)


def _cut_capacity(call: MoeCall, dispatcher: Dispatcher, kept_TK: torch.Tensor | None, chunks: int) -> list[_Part]:
    """Cuts the rows that each expert gets from this rank, fill rows among them, a share in each chunk; tokens are not cut."""
    parts = []
    first = 0
    for number, rows in enumerate(chunk_sizes(dispatcher.static_rows(len(call.x_TH)), chunks)):
        plan, send = dispatcher.static_share(call.experts_TK, kept_TK, places=range(first, first + rows))
        parts.append(_Part(number, call.x_TH, call.weights_TK, plan, send))
        first += rows
    return parts


# ---- travelling --------------------------------------------------------------------------------------------------------------


class _ChunkExchange:
    """Chunks to their experts and back, each way in two halves. `etp` ranks share their rows once these are there, before they go back."""

    def __init__(self, dispatcher: Dispatcher, op_prefix: str) -> None:
        self.of, self.comms, self.op_prefix = dispatcher, dispatcher.comms, op_prefix
        self.here = {"ep": dispatcher.ep.index, "etp": dispatcher.etp.index}

    def start(self, part: _Part) -> _PendingChunk:
        """Post the chunk's rows, and the rows' weights."""
        of = self.of
        permute = self._id("dispatch", part) + "permute"
        rows_RH, weights_R = of.pick(part.x_tH, part.weights_tK, part.send, op_id=permute)
        splits = {"in_splits": part.plan.sends(**self.here), "out_splits": part.plan.receives(**self.here)}
        at = self._id("dispatch", part)
        weights = self.comms.start_all_to_all_rows(weights_R, **splits, axis=of.ep, op_id=at + "weights")
        rows = self.comms.start_all_to_all_rows(rows_RH, **splits, axis=of.ep, op_id=at + "rows")
        return _PendingChunk(rows, weights)

    def arrive(self, part: _Part, pending: _PendingChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """(M, H) rows of this rank's slots in slot order, and (M,) their weights."""
        of, at = self.of, self._id("dispatch", part)
        sizes = part.plan.etp_sizes(ep=of.ep.index)
        weights = of.comms.all_gather_rows(pending.weights.wait(), sizes=sizes, axis=of.etp, op_id=at + "weights_etp")
        rows = of.comms.all_gather_rows(pending.rows.wait(), sizes=sizes, axis=of.etp, op_id=at + "rows_etp")
        maps = of.slot_maps(part.plan, rows.device)
        if maps is None:
            return rows, weights
        rows, weights = traced(self.comms, at + "sort", partial(reordered, maps), rows, weights)
        return rows, weights

    def start_back(self, part: _Part, y_MH: torch.Tensor) -> RowsUnderWay:
        """Undo the order of slots, sum over etp, and post what belongs to others."""
        of, plan, at = self.of, part.plan, self._id("combine", part)
        maps = of.slot_maps(plan, y_MH.device)
        if maps is not None:
            (y_MH,) = traced(self.comms, at + "sort", partial(reordered, maps.inverse), y_MH)
        sizes = plan.etp_sizes(ep=of.ep.index)
        rows = of.comms.reduce_scatter_rows(y_MH, sizes=sizes, axis=of.etp, op_id=at + "rows_etp")
        splits = {"in_splits": plan.receives(**self.here), "out_splits": plan.sends(**self.here)}
        return of.comms.start_all_to_all_rows(rows, **splits, axis=of.ep, op_id=at + "rows")

    def arrive_back(self, part: _Part, returning: RowsUnderWay) -> torch.Tensor:
        """(t, H) sum of each token's rows."""
        add = partial(
            combine_rows,
            rows_of_token_TK=part.send.rows_of_token_TK,
            token_of_row_M=part.send.token_of_row_R,
            impl=self.of.kernels,
            lanes=self.of.lanes,
        )
        return traced(self.comms, self._id("combine", part) + "sum", add, returning.wait())

    def _id(self, way: str, part: _Part) -> str:
        return f"{self.op_prefix}{way}.chunk{part.number}."


@dataclass(frozen=True, eq=False)
class _PendingChunk:
    """A chunk on its way to the experts."""

    rows: RowsUnderWay
    weights: RowsUnderWay

"""One MoE layer's forward pass on the kernels that wait on flags, for a rank, in pieces that each read nothing on the host.

    route       routed slots -> what goes where                                     (send_index)
    told        the receivers learn the slots and weights of what comes             (exchange: small, fixed size)
    begin       order of the rows that come                                         (arrange)
    send        entries to their ranks, flags behind them                           beside `compute`
    compute     first product as flags come, activation, second product by blocks,
                each block sent back while the next is computed
    finish      add up the ranks

`reference_layer` is the same without an exchange. The lab runs all ranks of a layer in one process to compare the two.

Legend: T tokens of this rank, K choices, H hidden, f expert width, e local slots, P ranks, C capacity, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.swiglu import reference_swiglu
from phalanx.kernels.triton.first_product import Arrivals, fused_first
from phalanx.kernels.triton.index import Arranged, SendIndex, arrange, send_index
from phalanx.kernels.triton.second_product import Division, add_ranks, fused_second, send_entries
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory
from phalanx.kernels.triton.tiles import SendShape, TileShape


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How the kernels are launched."""

    slots_per_rank: int
    first: TileShape = field(default_factory=TileShape)
    second: TileShape = field(default_factory=TileShape)
    send: SendShape = field(default_factory=SendShape)
    division: Division = field(default_factory=lambda: Division(programs=132, senders=16))
    first_programs: int = 124
    send_programs: int = 8
    patience: int = 20_000_000
    impl: Impl = "fast"


@dataclass(frozen=True, eq=False)
class ArrivalCounts:
    """What this rank knows of the entries that come, by source."""

    slots_PCK: torch.Tensor
    weights_PCK: torch.Tensor
    counts_P: torch.Tensor


def route(slots_TK: torch.Tensor, *, shape: LaunchShape, spec: ArenaSpec) -> SendIndex:
    """What this rank sends, from the group's slot of each choice, (T, K), -1 where dropped."""
    return send_index(slots_TK, ranks=spec.ranks, slots_per_rank=shape.slots_per_rank, capacity=spec.capacity)


def pack_weights(weights_TK: torch.Tensor, to: SendIndex) -> torch.Tensor:
    """(P, C, K) fp32: weight of each copy that goes, 0 where there is none."""
    token_PCK = to.token_of_entry_PC.clamp(min=0).long().unsqueeze(2).expand_as(to.choice_PCK)
    if weights_TK.shape[0] == 0:
        return torch.zeros_like(to.choice_PCK, dtype=torch.float32)
    weights_PCK = weights_TK.float()[token_PCK, to.choice_PCK.clamp(min=0).long()]
    return torch.where(to.choice_PCK >= 0, weights_PCK, 0.0)


def begin(told: ArrivalCounts, arena: SymmetricMemory, *, shape: LaunchShape, max_rows: int | None = None) -> Arranged:
    """Order of the rows that come to this rank. Both products use it, so their problems must have the same rows. `max_rows`: how many there are, where the host knows."""
    if shape.first.problem_rows != shape.second.problem_rows:
        raise ValueError(
            f"problems of {shape.first.problem_rows} rows in the first product, {shape.second.problem_rows} in the second"
        )
    return arrange(
        told.slots_PCK,
        rank=arena.rank,
        slots=shape.slots_per_rank,
        parts=arena.spec.parts,
        problem_rows=shape.first.problem_rows,
        max_rows=max_rows,
    )


def send(x_TH: torch.Tensor, to: SendIndex, arena: SymmetricMemory, *, shape: LaunchShape) -> None:
    """Entries to their ranks, own rank first, then in the order in which the receivers expect them."""
    send_entries(x_TH, to, arena, programs=shape.send_programs, shape=shape.send, impl=shape.impl)


def row_weights(told: ArrivalCounts, order: Arranged) -> torch.Tensor:
    """(M,) fp32: weight of each row; 0 beyond the last."""
    rows_N, weights_N = order.row_of_copy_PCK.flatten(), told.weights_PCK.flatten()
    num_rows = order.entry_of_row_M.shape[0]
    out = weights_N.new_zeros(num_rows + 1)
    place_N = torch.where(rows_N >= 0, rows_N, num_rows).long()
    return out.scatter_(0, place_N, weights_N)[:num_rows]


def compute(
    arena: SymmetricMemory,
    told: ArrivalCounts,
    order: Arranged,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    *,
    shape: LaunchShape,
) -> None:
    """The experts on this rank, from `received` here to `returned` at the sources."""
    arrivals = Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2)
    gate_up = fused_first(
        arena.received_PCH.flatten(0, 1), w13_e2fH.flatten(1, 2), order, arrivals,
        programs=shape.first_programs, tile=shape.first, patience=shape.patience, impl=shape.impl,
    )  # fmt: skip
    h_Mf = reference_swiglu(gate_up.view(gate_up.shape[0], 2, -1), row_weights(told, order))
    fused_second(
        h_Mf, w2_eHf, order, told.counts_P, arena,
        division=shape.division, tile=shape.second, shape=shape.send, patience=shape.patience, impl=shape.impl,
    )  # fmt: skip


def finish(to: SendIndex, arena: SymmetricMemory, *, shape: LaunchShape) -> torch.Tensor:
    """(T, H): the layer's output for this rank's tokens."""
    return add_ranks(
        to, arena, programs=shape.send_programs, shape=shape.send, patience=shape.patience, impl=shape.impl
    )


def reference_layer(
    x_TH: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor, w13_E2fH: torch.Tensor, w2_EHf: torch.Tensor
) -> torch.Tensor:
    """The same layer on one rank, token by slot, with no exchange. Experts are the group's slots."""
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    out_TH = torch.zeros_like(x_TH, dtype=wide)
    for slot in range(w13_E2fH.shape[0]):
        token, choice = (slots_TK == slot).nonzero(as_tuple=True)
        gate_up = torch.einsum("mh,gfh->mgf", x_TH[token].to(wide), w13_E2fH[slot].to(wide))
        h = reference_swiglu(gate_up, weights_TK[token, choice])
        out_TH.index_add_(0, token, h @ w2_EHf[slot].to(wide).T)
    return out_TH.to(x_TH.dtype)

"""Second product of a MoE layer, sent back block by block while it is computed; sending of tokens; adding up at their owner.

Must never change: the order of sums (copies of a token on a rank by slot, then ranks by number, each in fp32, each partial sum rounded once to the type that
travels); data is never added by atomics. A flag of (rank, block) is raised when all of that rank's partial sums in that block are stored.

One kernel with two roles and not two kernels: the senders need no launch of their own that could come too late, all programs are resident by the size of the
grid alone, and the division is an argument of the launch (arXiv 2502.19811, section 3.2). The price: senders have the registers and shared memory of the
product, so a multiprocessor holds one of them.

Legend: P ranks, C entries of a source (capacity), T tokens of this rank, H columns, M rows in slot order, f depth, B blocks of columns, e local slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.errors import Problem
from phalanx.kernels.choice import Impl
from phalanx.kernels.triton.index import Arranged, SendIndex
from phalanx.kernels.triton.symmetric import SymmetricMemory
from phalanx.kernels.triton.tiles import (
    PATIENCE,
    SendShape,
    TileShape,
    is_interpreted,
    product_problems,
    raise_problems,
)
from phalanx.plan.moe.overlap.fused import part_places


@dataclass(frozen=True, kw_only=True)
class Division:
    """Who does what in one launch of the second product."""

    programs: int
    """Number of programs in all: at most the multiprocessors of the device."""
    senders: int
    """Number of these that send; 0: all compute, then all send. The others help when they have computed, unless `help` is off."""
    help: bool = True

    def problems(self) -> list[Problem]:
        found = []
        if not 0 <= self.senders < self.programs:
            rule = "some programs must compute"
            found.append(
                Problem(where="division.senders", value=self.senders, rule=rule, hint=f"0 to {self.programs - 1}")
            )
        if self.senders == 0 and not self.help:
            found.append(Problem(where="division.help", value=False, rule="without senders somebody must send"))
        return found


def send_entries(
    x_TH: torch.Tensor,
    to: SendIndex,
    arena: SymmetricMemory,
    *,
    programs: int,
    shape: SendShape | None = None,
    impl: Impl = "fast",
) -> None:
    """Store the tokens that each rank needs into its receive buffer, and raise its flags part by part."""
    shape = SendShape() if shape is None else shape
    spec = arena.spec
    places = part_places(spec.capacity, spec.parts)
    if impl == "reference":
        _reference_send(x_TH, to, arena)
        return
    from phalanx.kernels.triton.programs.second import send_kernel

    chunks = -(-places // shape.chunk)
    sent = x_TH.new_zeros(spec.ranks * spec.parts, dtype=torch.int32)
    send_kernel[(programs,)](
        x_TH, x_TH.stride(0), to.token_of_entry_PC, to.counts_P, arena.received_table_P, spec.columns,
        arena.arrived_table_P, arena.epoch_1, sent,
        arena.rank, spec.ranks, spec.capacity, spec.parts, places, chunks, spec.columns,
        BLOCK_E=shape.entries, BLOCK_C=shape.columns, CHUNK=shape.chunk,
    )  # fmt: skip


def fused_second(
    h_Mf: torch.Tensor,
    w_eHf: torch.Tensor,
    order: Arranged,
    counts_P: torch.Tensor,
    arena: SymmetricMemory,
    *,
    division: Division,
    tile: TileShape | None = None,
    shape: SendShape | None = None,
    out_MH: torch.Tensor | None = None,
    patience: int = PATIENCE,
    impl: Impl = "fast",
) -> torch.Tensor:
    """`y = h @ w[slot].T` by blocks of columns, and for each entry of each source the sum of its copies into the source's buffer `returned`.

    `counts_P`: int32, entries of each source that are here. Returns `y` (M, H). Raises `PlanError` with everything that is wrong with the operands.
    """
    tile, shape = TileShape() if tile is None else tile, SendShape() if shape is None else shape
    spec = arena.spec
    found = product_problems(h_Mf, w_eHf, order.problems_J4, tile, name="h") + division.problems()
    if w_eHf.dim() == 3 and w_eHf.shape[1] != spec.columns:
        found.append(Problem(where="weights.shape[1]", value=w_eHf.shape[1], rule=f"must be {spec.columns}"))
    raise_problems(found, subject="the second product")
    if out_MH is None:
        out_MH = h_Mf.new_empty(order.entry_of_row_M.shape[0], spec.columns)
    if impl == "reference":
        return _reference_second(h_Mf, w_eHf, order, counts_P, arena, out_MH)

    from phalanx.kernels.triton.programs.second import second_kernel

    copies = order.row_of_copy_PCK.shape[2]
    compute = division.programs - division.senders
    # Counters of this device only: lowered in the order of the stream, unlike flags, which peers look at.
    counters = torch.zeros(spec.blocks * (1 + spec.ranks) + 1, dtype=torch.int32, device=h_Mf.device)
    tiles_done, sent, next_task = counters.split([spec.blocks, spec.blocks * spec.ranks, 1])
    second_kernel[(division.programs,)](
        h_Mf, h_Mf.stride(0), w_eHf, *w_eHf.stride(), out_MH, out_MH.stride(0), order.problems_J4, order.num_problems,
        order.row_of_copy_PCK, copies, counts_P, arena.returned_table_P, spec.columns, arena.done_table_P,
        arena.epoch_1, tiles_done, sent, next_task, patience, arena.status_2,
        arena.rank, spec.ranks, spec.capacity, -(-spec.capacity // shape.chunk), h_Mf.shape[1], spec.columns,
        spec.block_columns, spec.blocks, compute, 0 if division.help else compute,
        ROW_TILES=tile.row_tiles, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
        EVEN_K=h_Mf.shape[1] % tile.depth == 0, BY_DEPTH=w_eHf.stride(2) == 1, WIDEN=is_interpreted(),
        COPIES=copies, BLOCK_E=shape.entries, BLOCK_C=shape.columns, CHUNK=shape.chunk,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_MH


def add_ranks(
    to: SendIndex,
    arena: SymmetricMemory,
    *,
    programs: int,
    shape: SendShape | None = None,
    patience: int = PATIENCE,
    impl: Impl = "fast",
) -> torch.Tensor:
    """(T, H): for each token of this rank the partial sums of all ranks, added in the order of the ranks; waits for each rank and block."""
    shape, spec = SendShape() if shape is None else shape, arena.spec
    num_tokens = to.entry_of_token_TP.shape[0]
    first_place_P = torch.arange(spec.ranks, dtype=torch.int32, device=arena.epoch_1.device) * spec.capacity
    place_TP = torch.where(to.entry_of_token_TP < 0, -1, to.entry_of_token_TP + first_place_P)
    buffer = arena.returned_PCH.flatten(0, 1)
    out_TH = buffer.new_empty(num_tokens, spec.columns)
    if impl == "reference":
        return _reference_add(place_TP, buffer, out_TH)
    from phalanx.kernels.triton.programs.second import add_ranks_kernel

    add_ranks_kernel[(programs,)](
        buffer, buffer.stride(0), place_TP, out_TH, out_TH.stride(0), arena.done_F, arena.epoch_1, patience,
        arena.status_2, spec.ranks, num_tokens, spec.columns, spec.block_columns, spec.blocks,
        RANKS=spec.ranks, BLOCK_E=shape.entries, BLOCK_C=shape.columns,
    )  # fmt: skip
    return out_TH


# ---- plain versions: the peers' memory as ordinary tensors, so for ranks of one process only ------------------------------


def _reference_send(x_TH: torch.Tensor, to: SendIndex, arena: SymmetricMemory) -> None:
    spec = arena.spec
    for peer in arena.peers():
        count = int(to.counts_P[peer.rank])
        peer.received_PCH[arena.rank, :count] = x_TH[to.token_of_entry_PC[peer.rank, :count].long()]
        stage = (arena.rank - peer.rank) % spec.ranks
        peer.arrived_F[stage * spec.parts : (stage + 1) * spec.parts] = arena.epoch_1


def _reference_second(
    h_Mf: torch.Tensor,
    w_eHf: torch.Tensor,
    order: Arranged,
    counts_P: torch.Tensor,
    arena: SymmetricMemory,
    out_MH: torch.Tensor,
) -> torch.Tensor:
    wide = torch.promote_types(h_Mf.dtype, torch.float32)
    for slot, first, rows, _ in order.problems_J4[: int(order.num_problems)].tolist():
        out_MH[first : first + rows] = (h_Mf[first : first + rows].to(wide) @ w_eHf[slot].T.to(wide)).to(out_MH.dtype)
    for peer in arena.peers():
        count = int(counts_P[peer.rank])
        total_cH = torch.zeros(count, arena.spec.columns, dtype=wide, device=h_Mf.device)
        for rows_c in order.row_of_copy_PCK[peer.rank, :count].long().unbind(1):
            here = rows_c >= 0
            total_cH += torch.where(here.unsqueeze(1), out_MH[rows_c.clamp(min=0)].to(wide), 0)
        peer.returned_PCH[arena.rank, :count] = total_cH.to(out_MH.dtype)
        blocks = arena.spec.blocks
        peer.done_F[arena.rank * blocks : (arena.rank + 1) * blocks] = arena.epoch_1
    return out_MH


def _reference_add(place_TP: torch.Tensor, buffer: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(buffer.dtype, torch.float32)
    total_TH = torch.zeros_like(out_TH, dtype=wide)
    for place_T in place_TP.long().unbind(1):
        total_TH += torch.where((place_T >= 0).unsqueeze(1), buffer[place_T.clamp(min=0)].to(wide), 0)
    return out_TH.copy_(total_TH)

"""Which part of a micro-batch a rank works on: the cp ranks share each sequence (zigzag, `plan/attention/zigzag.py`), the tp ranks share the rows
of a cp part between the layers (`models/parallel.py`), and where a pipeline stage has more dp than there are pipelines, its ranks share the
sequences (`plan/mapping/stage_foldings.py`). Pure indexing; every rank of a pipeline has the whole micro-batch.

Legend: B sequences, S positions of a whole sequence, s positions that this rank holds between the layers, T = B*s.
"""

from __future__ import annotations

import torch

from phalanx.models.context import TokenBatch
from phalanx.plan.attention import make_layout
from phalanx.plan.mapping import AnyFolding, Folding


def part_of(batch: TokenBatch, folding: AnyFolding, rank: int) -> TokenBatch:
    """The part of a whole micro-batch that `rank` works on."""
    stage, (share, shares) = folding.of_rank(rank), folding.share_of(rank)
    padding = batch.padding
    if stage.cp == 1 and stage.tp == 1 and shares == 1:
        return batch
    length, device = batch.tokens_BS.shape[1], batch.tokens_BS.device
    count = batch.num_sequences // shares
    first_B1 = length * torch.arange(share * count, (share + 1) * count, device=device).unsqueeze(1)
    if shares > 1:
        batch = _sequences(batch, share * count, count)
    layout = make_layout("zigzag", seq_len=length, cp=stage.cp)
    chunks, size = layout.chunks(folding.coord(rank, "cp")), layout.chunk_len
    positions = torch.cat([torch.arange(c * size, (c + 1) * size, device=device) for c in chunks])
    own_s = positions.chunk(stage.tp)[folding.coord(rank, "tp")]
    return TokenBatch(
        tokens_BS=batch.tokens_BS[:, positions],
        labels_BS=batch.labels_BS[:, positions],
        positions_BS=batch.positions_BS[:, positions],
        segments=batch.segments,
        token_index_T=(first_B1 + own_s).flatten(),
        whole=batch,
        columns_S=positions,
        is_empty=batch.is_empty,
        padding=padding,
    )


def _sequences(batch: TokenBatch, first: int, count: int) -> TokenBatch:
    """Some sequences of a whole micro-batch, as a micro-batch."""
    own = slice(first, first + count)
    return TokenBatch(
        tokens_BS=batch.tokens_BS[own],
        labels_BS=batch.labels_BS[own],
        positions_BS=batch.positions_BS[own],
        segments=batch.segments[own],
        is_empty=batch.is_empty,
        padding=batch.padding[own],
    )


def parts_of_all(batch: TokenBatch, folding: Folding) -> torch.Tensor:
    """(B * S) int64: which (cp, tp) part each token of a whole micro-batch belongs to, for a rank that stands in for all of them."""
    part_N = torch.empty(batch.tokens_BS.numel(), dtype=torch.int64)
    for rank in range(folding.cp * folding.tp):  # tp and cp are the fastest coordinates
        index_T = part_of(batch, folding, rank).token_index_T
        part_N[slice(None) if index_T is None else index_T] = rank
    return part_N

"""Which part of a micro-batch a rank works on: the cp ranks share each sequence (zigzag, `plan/zigzag.py`), the tp ranks share the rows
of a cp part between the layers (`models/parallel.py`). Pure indexing; every rank of a data-parallel index has the whole micro-batch.

Legend: B sequences, S positions of a whole sequence, s positions that this rank holds between the layers, T = B*s.
"""

from __future__ import annotations

import torch

from phalanx.models.context import TokenBatch
from phalanx.plan.folding import Folding
from phalanx.plan.zigzag import make_layout


def part_of(batch: TokenBatch, folding: Folding, rank: int) -> TokenBatch:
    """The part of a whole micro-batch that `rank` works on."""
    if folding.cp == 1 and folding.tp == 1:
        return batch
    length, device = batch.tokens_BS.shape[1], batch.tokens_BS.device
    layout = make_layout("zigzag", seq_len=length, cp=folding.cp)
    positions = torch.from_numpy(layout.positions(folding.coord(rank, "cp"))).to(device)
    own_s = positions.chunk(folding.tp)[folding.coord(rank, "tp")]
    first_B1 = length * torch.arange(batch.num_sequences, device=device).unsqueeze(1)
    return TokenBatch(
        tokens_BS=batch.tokens_BS[:, positions],
        labels_BS=batch.labels_BS[:, positions],
        positions_BS=batch.positions_BS[:, positions],
        segments=batch.segments,
        token_index_T=(first_B1 + own_s).flatten(),
        whole=batch,
        columns_S=positions,
    )


def parts_of_all(batch: TokenBatch, folding: Folding) -> torch.Tensor:
    """(B * S) int64: which (cp, tp) part each token of a whole micro-batch belongs to, for a rank that stands in for all of them."""
    part_N = torch.empty(batch.tokens_BS.numel(), dtype=torch.int64)
    for rank in range(folding.cp * folding.tp):  # tp and cp are the fastest coordinates
        index_T = part_of(batch, folding, rank).token_index_T
        part_N[slice(None) if index_T is None else index_T] = rank
    return part_N

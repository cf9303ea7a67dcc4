"""Which rows of a micro-batch's activations each rank of a pipeline stage holds between the layers.

Decides the layout of the tensor that crosses a stage's boundary: logical (B, S, H) of one micro-batch over the ranks of one stage of one pipeline. The
dp ranks that share a micro-batch have whole sequences, cp ranks two chunks of each (zigzag), tp ranks an equal part of a cp rank's rows. Must never
change: it says of each rank what `models/shard.py` gives it, row by row.

Legend: B sequences, S positions, H hidden; b and s those of one rank.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from phalanx.plan.attention import make_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout
from phalanx.plan.mapping import AnyFolding, StagedFolding


@lru_cache(maxsize=64)
def activation_layout(
    folding: StagedFolding, stage: int, *, replica: int, sequences: int, seq_len: int, hidden: int
) -> TensorLayout:
    """The layout of (sequences, seq_len, hidden) over the ranks of `stage` in pipeline `replica`; local tensors are (b, s, H)."""
    ranks = folding.pipelines[replica][stage]
    parts = [_runs(folding, rank, sequences=sequences, seq_len=seq_len) for rank in ranks]
    held = []
    for (first, count), runs in parts:
        boxes, at = [], 0
        for start, length in runs:
            boxes.append(Held(Box((first, start, 0), (count, length, hidden)), (0, at, 0)))
            at += length
        held.append(tuple(boxes))
    shapes = tuple((count, sum(length for _, length in runs), hidden) for (_, count), runs in parts)
    return TensorLayout(shape=(sequences, seq_len, hidden), ranks=ranks, held=tuple(held), local_shapes=shapes)


def _runs(
    folding: AnyFolding, rank: int, *, sequences: int, seq_len: int
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """((first, number of) sequences, [(first, number of) consecutive positions]) of a rank."""
    stage, (share, shares) = folding.of_rank(rank), folding.share_of(rank)
    count = sequences // shares
    positions = make_layout("zigzag", seq_len=seq_len, cp=stage.cp).positions(folding.coord(rank, "cp"))
    own = np.array_split(positions, stage.tp)[folding.coord(rank, "tp")]
    breaks = np.flatnonzero(np.diff(own) != 1) + 1
    return (share * count, count), [(int(run[0]), len(run)) for run in np.split(own, breaks)]

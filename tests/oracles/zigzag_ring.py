"""Which blocks of a sequence meet in which round of ring attention, by hand: what `plan/attention/zigzag.py` and its executor are held against."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.attention.zigzag import AttentionBlock, SequenceLayout, attention_blocks, ring_source


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Blocks of every rank, step and sequence of a micro-batch: `blocks[rank][step][sequence]`."""

    layout: SequenceLayout
    segments: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[tuple[AttentionBlock, ...], ...], ...], ...]

    @cached_property
    def work(self) -> NDArray[np.int64]:
        """(rank, step) pairs of query and key that attend."""
        rows = [[sum(b.num_pairs for seq in step for b in seq) for step in rank] for rank in self.blocks]
        return np.array(rows, dtype=np.int64)

    @property
    def balance(self) -> float:
        """How much longer the ring takes than with equal work: sum over steps of the slowest rank, over the mean of all ranks (1 is best)."""
        mean = self.work.sum() / self.layout.cp
        return float(self.work.max(axis=0).sum() / mean) if mean else 1.0

    def check(self) -> None:
        """Raise `PlanError` unless the blocks cover each pair that may attend once, by marking them all (S x S: for tests and debugging)."""
        raise_if(ring_problems(self), PlanError, subject="ring attention")

    def to_json(self) -> str:
        return json.dumps({**asdict(self.layout), "segments": self.segments, "blocks": self.blocks}, sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The layout and who computes how much in which step."""
        lines = [self.layout.explain(), f"  pairs by step; slowest rank of each step over the mean: {self.balance:.3f}"]
        lines += [f"  rank {rank}: {' '.join(map(str, row.tolist()))}" for rank, row in enumerate(self.work)]
        return "\n".join(lines)


def plan_ring(layout: SequenceLayout, segments: Sequence[Sequence[int]]) -> RingPlan:
    """The blocks of a micro-batch whose sequence i holds documents of the lengths `segments[i]`."""
    rows = tuple(tuple(row) for row in segments)
    blocks = tuple(
        tuple(
            tuple(
                attention_blocks(layout, row, q_rank=rank, kv_rank=ring_source(rank, step, cp=layout.cp))
                for row in rows
            )
            for step in range(layout.cp)
        )
        for rank in range(layout.cp)
    )
    return RingPlan(layout=layout, segments=rows, blocks=blocks)


def ring_problems(plan: RingPlan) -> list[Problem]:
    """Pairs that are computed twice, left out, or must not be computed; for each sequence."""
    problems = []
    layout = plan.layout
    for index, row in enumerate(plan.segments):
        ids = np.repeat(np.arange(len(row)), row)
        may = np.tril(ids[:, None] == ids[None, :]).astype(np.int64)
        found = np.zeros_like(may)
        for rank in range(layout.cp):
            for step in range(layout.cp):
                q, k = layout.positions(rank), layout.positions(ring_source(rank, step, cp=layout.cp))
                for block in plan.blocks[rank][step][index]:
                    mark = np.ones((block.q_stop - block.q_start, block.k_stop - block.k_start), dtype=np.int64)
                    at = np.ix_(q[block.q_start : block.q_stop], k[block.k_start : block.k_stop])
                    found[at] += np.tril(mark) if block.causal else mark
        for wrong, rule in ((found > may, "is computed too often or must not be"), (found < may, "is not computed")):
            if wrong.any():
                first = tuple(int(i) for i in np.argwhere(wrong)[0])
                problems.append(Problem(where=f"ring.sequence{index}", value=first, rule=f"(query, key) {rule}"))
    return problems

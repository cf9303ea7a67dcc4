"""Which layers each virtual stage and each pipeline rank of a mapping holds.

Decides nothing: a mapping that does not say its layers divides them as a run does (`plan/mapping/stages.py`, by cost, the head included). Places of stages come from the schedule's rule in
`plan/pipeline/schedule/make.py`. Must never change: every layer is on exactly one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from phalanx.plan.mapping import balanced_counts, layer_costs
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline.schedule import stage_ranks
from phalanx.simulate.mapping import Job, Mapping


@dataclass(frozen=True, kw_only=True)
class StageContent:
    """What one pipeline rank holds, over its virtual stages."""

    chunk_layers: tuple[int, ...]
    moe_layers: int
    dense_layers: int
    embeddings: int
    """Tables that it holds for looking up tokens."""
    heads: int
    embeds: int
    """Passes of the embedding in a micro-batch ..."""
    head_passes: int
    """... and of the head, which multi-token prediction asks for again."""

    @property
    def layers(self) -> int:
        return self.moe_layers + self.dense_layers

    def tables(self, *, tied: bool) -> int:
        """Tables of the vocabulary that it holds: looked up however often, one, which is the head's too where they are tied."""
        looked_up = min(1, self.embeddings)
        return max(looked_up, self.heads) if tied else looked_up + self.heads


def ranks_of_stages(mapping: Mapping) -> tuple[int, ...]:
    """Pipeline rank of every virtual stage."""
    if mapping.folding.pp == 1:
        return (0,)
    return stage_ranks(mapping.schedule, pp=mapping.folding.pp, virtual=mapping.virtual)


def layers_of_stages(job: Job, mapping: Mapping) -> tuple[int, ...]:
    """Layers of every virtual stage."""
    if mapping.stage_layers is not None:
        return mapping.stage_layers
    stages = mapping.folding.pp * mapping.virtual if mapping.folding.pp > 1 else 1
    return run_layers(job.spec, job.seq_len, stages)


@lru_cache(maxsize=4096)
def run_layers(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage of a run whose recipe does not say them (`plan.pipeline.make_pipeline`)."""
    if stages == 1:
        return (spec.num_layers,)
    # Layers without a gate weigh as though they had one: no run here divides such a model, and predictions of them have always been of these divisions.
    return balanced_counts(layer_costs(replace(spec, ffn_matrices=3), seq_len=seq_len), stages)


def kinds_of_stages(counts: Sequence[int], *, dense_first: int, mtp: int) -> list[tuple[int, int]]:
    """(dense layers, layers with experts) of every virtual stage that has so many layers; blocks of multi-token prediction are of the last layer's kind, on its stage."""
    kinds, first = [], 0
    for count in counts:
        dense = max(0, min(first + count, dense_first) - first)
        kinds.append((dense, count - dense))
        first += count
    dense, moe = kinds[-1]
    kinds[-1] = (dense, moe + mtp) if dense_first < first else (dense + mtp, moe)
    return kinds


def contents(job: Job, mapping: Mapping) -> tuple[StageContent, ...]:
    """What each pipeline rank holds."""
    counts, ranks = layers_of_stages(job, mapping), ranks_of_stages(mapping)
    return _contents(job.spec.dense_layers, job.spec.mtp_layers, counts, ranks, mapping.folding.pp)


@lru_cache(maxsize=4096)
def _contents(
    dense_first: int, mtp: int, counts: tuple[int, ...], ranks: tuple[int, ...], pp: int
) -> tuple[StageContent, ...]:
    last = len(counts) - 1
    held: list[list[tuple[int, int, int, int]]] = [[] for _ in range(pp)]
    kinds = kinds_of_stages(counts, dense_first=dense_first, mtp=mtp)
    for stage, (of_kind, rank) in enumerate(zip(kinds, ranks, strict=True)):
        held[rank].append((sum(of_kind), of_kind[1], int(stage == 0), int(stage == last)))
    return tuple(
        StageContent(
            chunk_layers=tuple(part[0] for part in parts),
            moe_layers=sum(part[1] for part in parts),
            dense_layers=sum(part[0] - part[1] for part in parts),
            embeddings=sum(part[2] for part in parts) + (mtp and sum(part[3] for part in parts)),
            heads=sum(part[3] for part in parts),
            embeds=sum(part[2] for part in parts),
            head_passes=sum(part[3] for part in parts) * (1 + mtp),
        )
        for parts in held
    )

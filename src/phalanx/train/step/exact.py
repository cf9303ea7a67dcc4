"""How exact mode adds up the gradients of a step (docs/explanation/exact-mode.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.config import ResilienceConfig, TrainConfig
from phalanx.plan.mapping import AnyFolding
from phalanx.plan.model import ModelSpec

CHUNK_ROWS = 2048
"""Rows of a chunk without replicas: more than an expert gets from one micro-batch in practice, so that nothing is cut."""
REPLICA_CHUNKS = 4
"""Chunks, with replicas, of an expert that gets the mean number of rows from a micro-batch, for its replicas share whole chunks."""
FEWEST_ROWS = 256
"""Below so many rows chunks cost too much, each being converted to fixed point by itself (measured in docs/explanation/exact-mode.md)."""
FIXED_BITS = 52
EVAL_BITS = 20
"""Binary places of the loss of a validation micro-batch (a sum over its tokens): fp64 adds 2^32 of them without rounding."""


@dataclass(frozen=True, kw_only=True)
class ExactSums:
    """Numbers that must not depend on how many ranks there are: they follow from the recipe and from tp and cp."""

    summands: int
    """Most gradients that are added up for one element of a weight in a step."""
    bits: int = FIXED_BITS
    chunk_rows: int = CHUNK_ROWS


def default_chunk_rows(config: ResilienceConfig, train: TrainConfig, spec: ModelSpec, *, parts: int) -> int:
    """Rows of a chunk where the recipe does not say. `parts`: ranks (tp, cp) that share a micro-batch.

    With replicas a power of two near a quarter of an expert's rows from one micro-batch, if all had equally many: a function of what must stay as it is
    for equal bits, never of the number of ranks or replicas.
    """
    if config.slots_per_rank is None or not spec.num_experts:
        return CHUNK_ROWS
    rows = train.micro_batch * train.seq_len * spec.top_k / (parts * spec.num_experts)
    near = 2 ** math.ceil(math.log2(max(1.0, rows / REPLICA_CHUNKS)))
    return min(CHUNK_ROWS, max(FEWEST_ROWS, near))


def exact_sums(
    config: ResilienceConfig, train: TrainConfig, folding: AnyFolding, *, spec: ModelSpec, rank: int
) -> ExactSums | None:
    """Those of a run; None where it is not exact.

    A weight gets one gradient of each part of a micro-batch (two where two stages hold it), an expert's weight one of each chunk.
    """
    if config.mode != "exact":
        return None
    stage = folding.of_rank(rank)
    parts = stage.tp * stage.cp
    chunk_rows = config.chunk_rows or default_chunk_rows(config, train, spec, parts=parts)
    chunks = -(-train.micro_batch * train.seq_len // (parts * chunk_rows))
    samples = train.global_batch // train.micro_batch
    return ExactSums(
        summands=samples * parts * max(2, chunks), bits=config.fixed_bits or FIXED_BITS, chunk_rows=chunk_rows
    )

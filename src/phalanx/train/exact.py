"""How exact mode adds up the gradients of a step (docs/survive.md)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.config import ResilienceConfig, TrainConfig
from phalanx.plan.stage_foldings import AnyFolding

CHUNK_ROWS = 2048
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


def exact_sums(config: ResilienceConfig, train: TrainConfig, folding: AnyFolding, *, rank: int) -> ExactSums | None:
    """Those of a run; None where it is not exact.

    A weight gets one gradient of each part of a micro-batch (two where two stages hold it), an expert's weight one of each chunk.
    """
    if config.mode != "exact":
        return None
    chunk_rows, stage = config.chunk_rows or CHUNK_ROWS, folding.of_rank(rank)
    parts = stage.tp * stage.cp
    chunks = -(-train.micro_batch * train.seq_len // (parts * chunk_rows))
    samples = train.global_batch // train.micro_batch
    return ExactSums(
        summands=samples * parts * max(2, chunks), bits=config.fixed_bits or FIXED_BITS, chunk_rows=chunk_rows
    )

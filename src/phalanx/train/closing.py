"""How a run ended, and its last words (drawn by `observe/summary.py`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.core.events import Sampled
from phalanx.observe import RunSummary, program_name


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    reason: Literal["finished", "interrupted"]
    step: int
    total_steps: int
    tokens: int
    """Trained by this process."""
    loss: float | None
    """Of the last step; None where this process did none."""
    validation_loss: float | None
    validation_step: int | None
    unigram_loss: float
    sample: Sampled | None


def summary_of(folder: Path, outcome: Outcome, *, seconds: float) -> RunSummary:
    """What a person is told at the end of a run in `folder` that took `seconds`."""
    return RunSummary(
        folder=folder,
        step=outcome.step,
        total_steps=outcome.total_steps,
        seconds=seconds,
        tokens=outcome.tokens,
        loss=outcome.loss,
        validation_loss=outcome.validation_loss,
        validation_step=outcome.validation_step,
        program=program_name(sys.argv[0]),
        unigram_loss=outcome.unigram_loss,
        prompt=outcome.sample.prompt if outcome.sample is not None else "",
        text=outcome.sample.text if outcome.sample is not None else None,
    )

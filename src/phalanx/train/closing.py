"""The last words of a run: how it went, what it can write, where it lies, and what to do next."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.core.events import Sampled


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    reason: Literal["finished", "interrupted"]
    step: int
    total_steps: int
    validation_loss: float | None
    unigram_loss: float
    sample: Sampled | None


def closing_words(folder: Path, outcome: Outcome) -> str:
    """Plain text, a few lines."""
    return "\n".join(_interrupted(folder, outcome) if outcome.reason == "interrupted" else _finished(folder, outcome))


def _interrupted(folder: Path, outcome: Outcome) -> list[str]:
    return [
        "",
        f"stopped after step {outcome.step} of {outcome.total_steps}; everything is saved in {folder}",
        "the same command goes on from here",
    ]


def _finished(folder: Path, outcome: Outcome) -> list[str]:
    lines = [""]
    if outcome.validation_loss is not None:
        better = outcome.unigram_loss - outcome.validation_loss
        verdict = f"{better:.3f} below" if better > 0 else f"{-better:.3f} ABOVE"
        lines.append(
            f"validation loss {outcome.validation_loss:.3f} nats per token, {verdict} a unigram model of the same text "
            f"({outcome.unigram_loss:.3f})"
        )
    if outcome.sample is not None:
        lines += ["", "it continues", _indented(outcome.sample.prompt), "with", _indented(outcome.sample.text)]
    run = shlex.quote(str(folder))
    return [
        *lines,
        "",
        f"the run lies in {folder}; next:",
        f'  phalanx generate {run} "def main("',
        f"  phalanx metrics {run}",
        f"  phalanx train {shlex.quote(str(folder / 'recipe.toml'))} --train.steps {outcome.total_steps * 2}",
        "  phalanx verify --ranks 4",
    ]


def _indented(text: str) -> str:
    return textwrap.indent(text, "  | ", lambda line: True)

"""What accompanies the steps of a run besides the model: experts that move between ranks (`train/placement/rebalancer.py`), as the loop knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.events import ExpertsMoved
from phalanx.plan.mapping import LayerPlacements
from phalanx.train.recording import Recorder
from phalanx.train.setup import Rank
from phalanx.train.step import ReducedStep, StepParts


@dataclass(frozen=True)
class Where:
    """Where the ranks of a mapping are, for copies of shards: `hosts` (None: each stands for one) and `racks` (empty: not known)."""

    hosts: Sequence[int] | None = None
    racks: Sequence[int] = ()


NOWHERE = Where()


@dataclass(frozen=True, kw_only=True, eq=False)
class NewPlacement:
    """A new placement of experts, filled with the state after some step and not in use yet."""

    parts: StepParts
    placements: tuple[LayerPlacements, ...]
    """Placements of each pipeline stage."""
    event: ExpertsMoved


class StepHook(Protocol):
    """One rank's part of it. It outlives the parts of a step."""

    def placements(self, parts: StepParts, rank: Rank) -> Sequence[LayerPlacements]:
        """Placements of each pipeline stage, where experts have replicas; else none. Collective."""

    def between(
        self, parts: StepParts, rank: Rank, *, step: int, where: Where, recorder: Recorder | None, others_idle: bool
    ) -> NewPlacement | None:
        """Do what is due after `step` steps. Collective.

        Returns a new placement with the state after them, or None: the present one stays, at least for the next step.
        """

    def reduced(self, parts: StepParts, step: ReducedStep) -> None:
        """A step is reduced, and nothing was changed. Collective."""

    def applied(self, parts: StepParts, step: ReducedStep) -> None:
        """The step was committed. Needs no other rank."""

    def committed(self, counts_LE: NDArray[np.int64]) -> None:
        """The step is over; `counts_LE` tokens chose each expert in it, before dropping."""

"""The smallest thing that can train: a vector, sums over logical samples, and a few collectives a step. For storms that ask about membership alone.

Step t adds to each of V integers the sum of a hash of (t, sample, place) over S logical samples; rank r of n takes the samples [r*S//n, (r+1)*S//n). Sums of
integers have no order, so the state after t steps is a function of t alone, and whoever differs from it in a bit has lost or doubled something.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from phalanx.core.errors import RunError
from phalanx.plan.recovery import StateReport
from phalanx.runtime.membership.rendezvous import GroupEpoch
from phalanx.runtime.membership.votes import Resolution
from phalanx_lab.bench.storm.board import PhaseBoard as AnyBoard

SAMPLES = 24
PLACES = 4096
PHASES = ("waits", "enter", "compute", "all-to-all", "reduce", "vote", "commit", "hand over")
"""What a worker may be doing when a fault comes."""


class ToyBoard(AnyBoard):
    """Where the workers of a toy say what they do."""

    def __init__(self, places: int) -> None:
        super().__init__(places, PHASES)


def gradient(step: int, first: int, last: int) -> np.ndarray:
    """(V,) int64: what the samples `first` to `last` add in `step`."""
    places = np.arange(PLACES, dtype=np.uint64)
    total = np.zeros(PLACES, dtype=np.uint64)
    for sample in range(first, last):
        seed = np.uint64((step * SAMPLES + sample) * 0x9E3779B97F4A7C15 % 2**64)
        mixed = (places * np.uint64(0xBF58476D1CE4E5B9)) ^ seed
        total += (mixed ^ (mixed >> np.uint64(29))) >> np.uint64(20)
    return total.astype(np.int64)


def state_after(steps: int) -> np.ndarray:
    """(V,) int64: the state of an undisturbed run."""
    state = np.zeros(PLACES, dtype=np.int64)
    for step in range(steps):
        state += gradient(step, 0, SAMPLES)
    return state


def checksum(state: np.ndarray) -> str:
    return hashlib.sha256(state.tobytes()).hexdigest()[:16]


class ToyBody:
    """A `Body` (runtime/membership/member.py)."""

    def __init__(self, *, steps: int, board: ToyBoard, place: int, pid: int, pause_s: float) -> None:
        self.steps, self.pause_s = steps, pause_s
        self.step, self.holds = 0, False
        self.state = torch.zeros(PLACES, dtype=torch.int64)
        self._board, self._place, self._pid = board, place, pid
        self._reduced: torch.Tensor | None = None
        self._team: GroupEpoch | None = None
        self._pair: dist.ProcessGroup | None = None

    def _now(self, phase: str, share: float = 0.0) -> None:
        self._board.write(self._place, self._pid, phase, self.step)
        if share:
            time.sleep(self.pause_s * share)

    def describe(self) -> tuple[str, StateReport]:
        self._now("waits")
        return (checksum(self.state.numpy()) if self.holds else ""), StateReport()

    def enter(self, team: GroupEpoch, resolution: Resolution) -> None:
        self._now("enter")
        self._team = team
        if team.size > 1:  # a group beside the default one, as a folding makes many
            pairs = [tuple(range(i, min(i + 2, team.size))) for i in range(0, team.size, 2)]
            found = [team.groups.get(p) for p in pairs]
            self._pair = found[team.rank // 2]
        if resolution.step is None:
            if team.begun:
                raise RunError("nobody holds the state of a run that has begun")
            self.step, self.holds = 0, True
            self.state.zero_()
        elif len(resolution.holders) < team.size:
            self._take_state(team, resolution)

    def _take_state(self, team: GroupEpoch, resolution: Resolution) -> None:
        root = team.generation.uids.index(resolution.holders[0])
        said = team.reports[root]
        state = self.state.clone()
        dist.broadcast(state, root)
        if not self.holds:
            if said.sum and resolution.step == said.step and checksum(state.numpy()) != said.sum:
                raise RunError(f"the state from {said.uid} has another checksum than it said")
            self.state, self.step, self.holds = state, resolution.step or 0, True

    def compute(self) -> None:
        team = self._team
        assert team is not None
        self._now("compute", 0.4)
        mine = gradient(self.step, team.rank * SAMPLES // team.size, (team.rank + 1) * SAMPLES // team.size)
        reduced = torch.from_numpy(mine)
        if team.size > 1:
            self._now("all-to-all", 0.2)
            out = torch.empty(team.size, dtype=torch.int64)
            dist.all_to_all_single(out, torch.full((team.size,), team.rank))
            if out.tolist() != list(range(team.size)):
                raise RunError(f"all-to-all brought {out.tolist()}")
            self._now("reduce", 0.2)
            if self._pair is not None:
                dist.all_reduce(torch.ones(8), group=self._pair)
            dist.all_reduce(reduced)
        self._reduced = reduced
        self._now("vote", 0.1)

    def commit(self) -> None:
        if self._reduced is None:
            raise RunError("cannot commit a step whose gradient was not reduced")
        self._now("commit", 0.1)
        self.state += self._reduced
        self._reduced = None
        self.step += 1

    def abort(self) -> None:
        self._reduced = None

    def too_slow(self) -> dict[str, str]:
        """Nobody is."""
        return {}

    def hand_over(self, stay: Sequence[str]) -> bool:
        """Everyone holds everything here, so a sum that all take part in is enough to see that the old groups still work."""
        self._now("hand over", 0.1)
        if self._team is not None and self._team.size > 1:
            dist.all_reduce(torch.ones(1))
        return True

    def close(self, *, stopped: bool) -> None:
        """Nothing is written down."""

    def leave_epoch(self) -> None:
        self._team = self._pair = None

    def finished(self) -> bool:
        return self.step >= self.steps

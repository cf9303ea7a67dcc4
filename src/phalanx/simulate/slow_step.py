"""A step with slow ranks: the slowest pipeline of islands (`slow_ranks.py`) on the schedule's clock.

    step = max over pipelines of (schedule with stage s slower by the slowest rank of its island)

A job of data parallelism alone is slower by the slowest rank's factor on computation; in a pipeline a slow rank costs its factor in the steady state, and less while others fill and drain. Must
never change: communication takes what it took (a slow rank is late, its links are not slow), and no slower rank makes a step faster (test).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.simulate.block_time import Ledger
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.slow_ranks import Floats, Stragglers, paces
from phalanx.simulate.step_time import Prediction, StepTime, step_time

CANDIDATES = 1
"""Pipelines of a draw that are put on the clock: the slowest by a closed form. Of 36 draws over three schedules the slowest of all was 0.6 % slower at most."""
NAMED_CANDIDATES = 8
"""The same where ranks are named."""
STEADY = 2
"""Micro-batches for each pipeline rank that the clock runs for a draw; more are the steady state's: 0.4 % off at most in the same draws."""


def with_stragglers(prediction: Prediction, stragglers: Stragglers) -> Prediction:
    """The same job with slow ranks. Its step is that of the slowest pipeline; where paces are drawn, of the median draw, with the others in `draws`."""
    run = _Slow(prediction.job, prediction.mapping, prediction.cluster)
    rng = np.random.default_rng(stragglers.seed)
    nominal = prediction.step
    if not stragglers.drawn:
        table = paces(prediction.mapping.folding, stragglers.factors(prediction.cluster, rng))
        step = run.slowest(table, NAMED_CANDIDATES, most=None)[1]
        return replace(prediction, step=_told(step, nominal, ()), stragglers=stragglers, nominal_s=nominal.seconds)
    draws = []
    for _ in range(stragglers.draws):
        table = paces(prediction.mapping.folding, stragglers.factors(prediction.cluster, rng))
        vector, step = run.slowest(table, CANDIDATES, most=STEADY)
        draws.append((step.seconds, vector))
    draws.sort()
    middle, vector = draws[len(draws) // 2]
    step = _told(run.step(vector, None), nominal, tuple(seconds / middle for seconds, _ in draws))
    return replace(prediction, step=step, stragglers=stragglers, nominal_s=nominal.seconds)


def _told(step: StepTime, nominal: StepTime, draws: tuple[float, ...]) -> StepTime:
    """The slow step with the parts of a usual one, and what it is longer for in one part of its own."""
    kept = {kind: seconds for kind, seconds in nominal.parts.items() if kind not in ("dp", "optimizer")}
    kept |= {kind: step.parts[kind] for kind in ("dp", "optimizer") if kind in step.parts}
    kept["stragglers"] = step.seconds - sum(kept.values())
    return replace(step, parts=kept, hidden_s=nominal.hidden_s, draws=draws)


class _Slow:
    """Steps of one job by the paces of a pipeline's stages; layers are computed once."""

    def __init__(self, job: Job, mapping: Mapping, cluster: GpuCluster) -> None:
        self.job, self.mapping, self.cluster = job, mapping, cluster
        self.ledgers: dict[str, Ledger] = {}
        self.known: dict[tuple[tuple[float, ...], int | None], StepTime] = {}
        usual = self.step((1.0,) * mapping.folding.pp, STEADY)
        self.busy = np.array(usual.busy_s) / usual.microbatches

    def step(self, vector: tuple[float, ...], most: int | None) -> StepTime:
        key = (vector, most)
        if key not in self.known:
            self.known[key] = step_time(
                self.job, self.mapping, self.cluster, most_microbatches=most, ledgers=self.ledgers, slow=vector
            )
        return self.known[key]

    def slowest(self, table: Floats, candidates: int, most: int | None) -> tuple[tuple[float, ...], StepTime]:
        """The pace and the step of the slowest of pipelines, (pipelines, pp), among those that 1F1B's closed form finds slowest: one way through all stages, and the rest of
        the micro-batches at the slowest."""
        different = np.unique(table, axis=0)
        each = different * self.busy
        m = self.mapping.num_microbatches(self.job)
        order = np.argsort(-(each.sum(axis=1) + (m - 1) * each.max(axis=1)), kind="stable")
        found = [tuple(map(float, different[i])) for i in order[:candidates]]
        return max(((vector, self.step(vector, most)) for vector in found), key=lambda one: one[1].seconds)

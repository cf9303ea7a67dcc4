"""A step with slow ranks: the slowest pipeline of islands (`slow_ranks.py`) on the schedule's clock.

    step = max over pipelines of (schedule with stage s slower by the slowest rank of its island)

A job of data parallelism alone is slower by the slowest rank's factor on computation; in a pipeline a slow rank costs its factor in the steady state, and less while others fill and drain. Must
never change: communication takes what it took (a slow rank is late, its links are not slow), and no slower rank makes a step faster (test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import AnyMapping, Job, Stragglers, paces
from phalanx.simulate.step import Ledgers, Prediction, StepTime, slow_steps, step_time

CANDIDATES = 1
"""Pipelines of a draw that are put on the clock: the slowest by a closed form. Of 36 draws over three schedules the slowest of all was 0.6 % slower at most."""
NAMED_CANDIDATES = 8
"""The same where ranks are named."""
STEADY = 2
"""Micro-batches for each pipeline rank that the clock runs for a draw; more are the steady state's: 0.4 % off at most in the same draws."""


def with_stragglers(prediction: Prediction, stragglers: Stragglers, *, most: int | None = None) -> Prediction:
    """The same job with slow ranks. Its step is that of the slowest pipeline; where paces are drawn, of the median draw, with the others in `draws`.

    `most` limits the clock as `predict` does.
    """
    run = _Slow(prediction.job, prediction.mapping, prediction.cluster)
    rng = np.random.default_rng(stragglers.seed)
    nominal = prediction.step
    if not stragglers.drawn:
        table = paces(prediction.mapping.folding, stragglers.factors(prediction.cluster, rng))
        steps = [run.step(vector, most) for vector in run.candidates(table, NAMED_CANDIDATES)]
        step = _with_own_part(max(steps, key=lambda one: one.seconds), nominal, ())
        return replace(prediction, step=step, stragglers=stragglers, nominal_s=nominal.seconds)
    tables = (
        paces(prediction.mapping.folding, stragglers.factors(prediction.cluster, rng)) for _ in range(stragglers.draws)
    )
    vectors = [run.candidates(table, CANDIDATES) for table in tables]
    run.learn([vector for among in vectors for vector in among], STEADY)
    draws = sorted(max((run.step(vector, STEADY).seconds, vector) for vector in among) for among in vectors)
    middle, vector = draws[len(draws) // 2]
    step = _with_own_part(run.step(vector, most), nominal, tuple(seconds / middle for seconds, _ in draws))
    return replace(prediction, step=step, stragglers=stragglers, nominal_s=nominal.seconds)


def _with_own_part(step: StepTime, nominal: StepTime, draws: tuple[float, ...]) -> StepTime:
    """The slow step with the parts of a usual one, and what it is longer for in one part of its own."""
    kept = {kind: seconds for kind, seconds in nominal.parts.items() if kind not in ("dp", "optimizer")}
    kept |= {kind: step.parts[kind] for kind in ("dp", "optimizer") if kind in step.parts}
    kept["stragglers"] = step.seconds - sum(kept.values())
    return replace(step, parts=kept, hidden_s=nominal.hidden_s, draws=draws)


class _Slow:
    """Steps of one job by the paces of a pipeline's stages; layers are computed once."""

    def __init__(self, job: Job, mapping: AnyMapping, cluster: GpuCluster) -> None:
        self.job, self.mapping, self.cluster = job, mapping, cluster
        self.ledgers: Ledgers = {}
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

    def learn(self, vectors: Sequence[tuple[float, ...]], most: int) -> None:
        """Steps of many paces at once."""
        new = [vector for vector in dict.fromkeys(vectors) if (vector, most) not in self.known]
        made = slow_steps(self.job, self.mapping, self.cluster, new, most_microbatches=most, ledgers=self.ledgers)
        self.known |= {(vector, most): step for vector, step in zip(new, made, strict=True)}

    def candidates(self, table: NDArray[np.float64], number: int) -> list[tuple[float, ...]]:
        """Paces of pipelines, (pipelines, pp), that 1F1B's closed form finds slowest: one way through all stages, and the rest of the micro-batches at the slowest."""
        different = np.unique(table, axis=0)
        each = different * self.busy
        m = self.mapping.num_microbatches(self.job)
        order = np.argsort(-(each.sum(axis=1) + (m - 1) * each.max(axis=1)), kind="stable")
        return [tuple(map(float, different[i])) for i in order[:number]]

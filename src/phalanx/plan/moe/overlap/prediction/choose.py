"""Which schedule for the batch at hand, and the cost model's numbers from measurements.

Decides the schedule of a layer: the candidate that the clock of `cost.py` finds fastest for the busiest rank, or none if that is not faster than "serial"
by more than a margin. It depends on gathered counts, the cost and the share of passes that run beside others alone, not on the batches before (`batches.py`), so that each rank of a group finds the same
by itself, in whatever order its passes ask. Nothing compares what they found: seconds are floating-point numbers, and ranks on processors that round sums differently could part over a tie.

Fitting: latency and rate of the link by least squares of the relative error, rates of products by the median for each number of rows, and what only shows in whole
layers (overhead of operations and blocks, interference, copies) by a search for the least mean relative error of predicted layers. Two schedules are often closer to
one another than the clock is to either: what remains between the clock and a layer that was timed corrects that schedule's seconds, and `worth_timing` says which ones to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from statistics import fmean, median
from typing import Literal

import numpy as np

from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.prediction.batches import About, about, typical
from phalanx.plan.moe.overlap.prediction.bytes import WireBytes
from phalanx.plan.moe.overlap.prediction.clock import seconds_of
from phalanx.plan.moe.overlap.prediction.cost import Joint, LayerShape, LayerWork, OverlapCost, TileTimes
from phalanx.plan.moe.overlap.prediction.pair import PassTime, pair_s, pass_time
from phalanx.plan.moe.overlap.tiles import TileOp, TileOutline, TileRows, TileSchedule, tile_schedule_problems

__all__ = [
    "MARGIN",
    "SERIAL",
    "ScheduleChoice",
    "Chooser",
    "Fit",
    "LayerSample",
    "MatmulSample",
    "MessageSample",
    "compare_schedules",
    "fit",
    "worth_timing",
]

SERIAL = TileSchedule()
MARGIN = 0.03
"""The share of the serial time that a schedule must save to be taken."""
HOT_MARGIN = 0.005
"""What another order of the slots must save to be taken: less is within the error of any prediction."""
ABOUT_TILES = 2
"""Batches whose counts differ by less than so many tiles share a choice."""
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class ScheduleChoice:
    """Predicted seconds of all candidates, serial among them, and the one to take."""

    schedule: TileSchedule
    seconds: tuple[tuple[TileSchedule, float], ...]
    """Seconds of one pass; where passes run beside one another, of a forward and a backward pass together."""
    alone_s: float
    """Seconds of one pass by the chosen schedule, with no other beside it."""


class _Layer:
    """One batch on its busiest rank; what all candidates share is worked out once."""

    def __init__(
        self,
        dispatch: DispatchPlan,
        shape: LayerShape,
        cost: OverlapCost,
        *,
        tile_rows: int,
        direction: Direction,
    ) -> None:
        if shape.slots != dispatch.slots_per_rank:
            raise PlanError.of(
                "shape.slots", shape.slots, f"{dispatch.slots_per_rank} slots on a rank", subject="choice of a schedule"
            )
        loads = dispatch.rows_PG.sum(0).reshape(dispatch.ep, -1)
        self.rank = int(loads.sum(1).argmax()) * dispatch.etp
        self.outline = TileOutline(dispatch, rank=self.rank, tile_rows=tile_rows)
        self.shape, self.loads = shape, loads[self.rank // dispatch.etp].tolist()
        self.direction, self.cost = direction, cost
        self.has_shared = shape.shared_ffn > 0
        self._tiles: dict[tuple[bool, bool], tuple[TileRows, TileTimes]] = {}

    def tiles(self, schedule: TileSchedule, *, through_hosts: bool) -> tuple[TileRows, TileTimes]:
        """Tiles in the order of the slots, or the most loaded first."""
        key = schedule.hot_first, through_hosts
        if key not in self._tiles:
            rows = self.outline.rows(schedule, through_hosts=through_hosts)
            joint = Joint(rows.slots, rows.joint)
            times = TileTimes(rows.come, self.loads, self.shape, self.cost, self.direction, joint=joint)
            self._tiles[key] = rows, times
        return self._tiles[key]

    def seconds(self, schedule: TileSchedule, wire: WireBytes) -> float:
        ops, work = self._operations(schedule, wire)
        return seconds_of(ops, work, self.cost, wire)

    def time(self, schedule: TileSchedule, wire: WireBytes) -> PassTime:
        """What a pass beside it must know of this one."""
        return pass_time(*self._operations(schedule, wire), self.cost, wire)

    def _operations(self, schedule: TileSchedule, wire: WireBytes) -> tuple[Sequence[TileOp], LayerWork]:
        rows, times = self.tiles(schedule, through_hosts=wire.legs is not None)
        parts = self.outline.parts(rows, schedule, gateways=None if wire.legs is None else wire.host_of_rank)
        work = times.work(self.rank, parts.ends, parts.go, schedule.blocks, relay=parts.relay)
        ops = self.outline.operations(rows, parts, schedule, has_shared=self.has_shared, direction=self.direction)
        return ops, work


class _Passes:
    """One batch's layer forward and backward, a share of its forward passes beside backward passes."""

    def __init__(self, forward: _Layer, backward: _Layer, *, paired: float) -> None:
        self.forward, self.backward, self.paired = forward, backward, paired

    def seconds(self, schedule: TileSchedule, wire: WireBytes) -> float:
        """Mean seconds of a forward and a backward pass."""
        times = self.forward.time(schedule, wire), self.backward.time(schedule, wire)
        apart_s = times[0].alone_s + times[1].alone_s
        return self.paired * pair_s(*times, self.forward.cost) + (1 - self.paired) * apart_s


def compare_schedules(
    dispatch: DispatchPlan,
    shape: LayerShape,
    cost: OverlapCost,
    candidates: Sequence[TileSchedule],
    *,
    wire: WireBytes,
    tile_rows: int,
    paired: float = 0.0,
) -> ScheduleChoice:
    """Predicted seconds of serial and of each candidate for one batch, and the choice.

    `paired`: the share of forward passes that run beside a backward pass (`pair.py`); above 0 schedules are compared by the mean of a forward and a backward pass together.

    The fastest candidate is taken if it saves more than the share `MARGIN` of serial; of equals the first. Where it cuts the rows of several slots into parts, the same
    with the most loaded slots first is tried too, and taken where it saves more than the share `HOT_MARGIN`. Raises `PlanError` with all that is wrong with the
    candidates.
    """
    problems = [problem for candidate in candidates for problem in tile_schedule_problems(candidate)]
    if not 0 <= paired <= 1:
        problems.append(Problem(where="paired", value=paired, rule="a share of the forward passes, from 0 to 1"))
    raise_if(problems, PlanError, subject="choice of a schedule")
    make = partial(_Layer, dispatch, shape, cost, tile_rows=tile_rows)
    layer = make(direction="forward")
    clock = _Passes(layer, make(direction="backward"), paired=paired) if paired else layer

    def predicted_s(schedule: TileSchedule, by: _Layer | _Passes = clock) -> float:
        return cost.correction(schedule) * by.seconds(schedule, wire)

    tried = tuple(dict.fromkeys((SERIAL, *candidates)))
    seconds = tuple((schedule, predicted_s(schedule)) for schedule in tried)
    best, least = min(seconds, key=lambda pair: pair[1])
    if best.order != "serial" and best.parts > 1 and not best.hot_first and dispatch.slots_per_rank > 1:
        hot = replace(best, hot_first=True)
        with_hot = hot, predicted_s(hot)
        seconds += (with_hot,)
        if with_hot[1] < (1 - HOT_MARGIN) * least:
            best, least = with_hot
    chosen = best if least < (1 - MARGIN) * seconds[0][1] else SERIAL
    return ScheduleChoice(chosen, seconds, predicted_s(chosen, layer) if paired else dict(seconds)[chosen])


class Chooser:
    """`compare_schedules` for batch after batch of one layer: batches of about equal counts share one choice, that for the batch which stands for them all (`batches.py`).

    Counts are about equal if the rows between all pairs of ranks, and the slots in use, are the same in steps of `ABOUT_TILES`, and totals to a few binary digits. Holds up to `most` choices and
    forgets the oldest. Where the cost has changed, make another chooser.
    """

    def __init__(
        self,
        shape: LayerShape,
        cost: OverlapCost,
        candidates: Sequence[TileSchedule],
        *,
        tile_rows: int,
        paired: float = 0.0,
        most: int = 256,
    ) -> None:
        self.shape, self.cost, self.candidates = shape, cost, tuple(candidates)
        self.tile_rows, self.paired, self.most = tile_rows, paired, most
        self._found: dict[About, ScheduleChoice] = {}
        self.num_computed = 0

    def __call__(self, dispatch: DispatchPlan, wire: WireBytes) -> TileSchedule:
        """The schedule for a batch."""
        return self.choice(dispatch, wire).schedule

    def choice(self, dispatch: DispatchPlan, wire: WireBytes) -> ScheduleChoice:
        """Choice for a batch. The same for all whose counts are about equal, whichever of them comes first."""
        key = about(dispatch, wire, step=ABOUT_TILES * self.tile_rows)
        if key not in self._found:
            self.num_computed += 1
            if len(self._found) >= self.most:
                del self._found[next(iter(self._found))]
            batch, its_wire = typical(key)
            self._found[key] = compare_schedules(
                batch,
                self.shape,
                self.cost,
                self.candidates,
                wire=its_wire,
                tile_rows=self.tile_rows,
                paired=self.paired,
            )
        return self._found[key]


# ---- fitting ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageSample:
    """One message between two ranks of the group, one way, nothing else going on."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class MatmulSample:
    """One product of `rows` rows."""

    rows: int
    flop: float
    seconds: float


@dataclass(frozen=True)
class LayerSample:
    """One pass of one layer under a schedule, until the slowest rank was done."""

    dispatch: DispatchPlan
    shape: LayerShape
    schedule: TileSchedule
    wire: WireBytes
    tile_rows: int
    seconds: float
    direction: Direction = "forward"

    def predicted_s(self, cost: OverlapCost) -> float:
        layer = _Layer(self.dispatch, self.shape, cost, tile_rows=self.tile_rows, direction=self.direction)
        return layer.seconds(self.schedule, self.wire)


Sample = MessageSample | MatmulSample | LayerSample


@dataclass(frozen=True)
class Fit:
    """A cost and how far its predictions are from the samples it was made of."""

    cost: OverlapCost
    errors: tuple[float, ...]
    """|predicted / measured - 1| of each sample, in the order of the samples."""
    median_error: float
    """Median error of the layers if there are any, else of all."""


def fit(samples: Sequence[Sample]) -> Fit:
    """The cost that explains samples best. Raises `ConfigError` where messages of two sizes, a product, or positive times are missing."""
    messages = [s for s in samples if isinstance(s, MessageSample)]
    matmuls = [s for s in samples if isinstance(s, MatmulSample)]
    layers = [s for s in samples if isinstance(s, LayerSample)]
    problems = [
        Problem(where=f"samples[{at}].seconds", value=sample.seconds, rule="above 0")
        for at, sample in enumerate(samples)
        if not sample.seconds > 0
    ]
    if len({s.num_bytes for s in messages}) < 2:
        problems.append(Problem(where="samples", value=len(messages), rule="messages of at least two sizes"))
    if not matmuls:
        problems.append(Problem(where="samples", value=0, rule="at least one product"))
    raise_if(problems, ConfigError, subject="samples of a cost")
    latency_s, rate = _link(messages)
    by_rows: dict[int, list[float]] = {}
    for sample in matmuls:
        by_rows.setdefault(sample.rows, []).append(sample.flop / sample.seconds)
    table = tuple((rows, median(rates)) for rows, rates in sorted(by_rows.items()))
    cost = OverlapCost(latency_s=latency_s, bytes_per_s=rate, flops_by_rows=table)
    if layers:  # else overheads and interference stay 0
        cost = _search(cost, layers)
    errors = errors_of(cost, samples)
    of_layers = [error for error, sample in zip(errors, samples, strict=True) if isinstance(sample, LayerSample)]
    return Fit(replace(cost, timed=_timed(cost, layers)), errors, median(of_layers or errors))


def _timed(cost: OverlapCost, layers: Sequence[LayerSample]) -> tuple[tuple[TileSchedule, float], ...]:
    """How far forward passes are from the clock, by schedule."""
    ratios: dict[TileSchedule, list[float]] = {}
    for sample in layers:
        if sample.direction == "forward":
            ratios.setdefault(sample.schedule, []).append(sample.seconds / sample.predicted_s(cost))
    return tuple((schedule, median(found)) for schedule, found in ratios.items())


def worth_timing(choice: ScheduleChoice, most: int) -> tuple[TileSchedule, ...]:
    """What to time before one of these schedules is taken for good: serial order, the `most` that the clock finds fastest, and the fastest for each number of parts and
    blocks, in which it errs most. Which slots come first depends on the batch's load, so it is left to the clock."""
    ranked = [schedule for schedule, _ in sorted(choice.seconds, key=lambda pair: pair[1]) if not schedule.hot_first]
    of_each: dict[tuple[int, int], TileSchedule] = {}
    for schedule in ranked:
        of_each.setdefault((schedule.parts, schedule.blocks), schedule)
    return tuple(dict.fromkeys((SERIAL, *ranked[:most], *of_each.values())))


def errors_of(cost: OverlapCost, samples: Sequence[Sample]) -> tuple[float, ...]:
    """|predicted / measured - 1| of each sample: of other samples than it was fitted to, how much a cost can be trusted."""
    return tuple(abs(_predicted(cost, sample) / sample.seconds - 1) for sample in samples)


def _predicted(cost: OverlapCost, sample: Sample) -> float:
    if isinstance(sample, MessageSample):
        return cost.latency_s + sample.num_bytes / cost.bytes_per_s
    if isinstance(sample, MatmulSample):
        return float(cost.row_seconds([sample.rows])[0]) * sample.flop / sample.rows
    return sample.predicted_s(cost)


def _link(samples: Sequence[MessageSample]) -> tuple[float, float]:
    """Latency and rate with the least squared relative error over the medians of each size. A negative latency is none."""
    by_size: dict[int, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.num_bytes, []).append(sample.seconds)
    sizes = np.array(sorted(by_size), dtype=np.float64)
    seconds = np.array([median(by_size[size]) for size in sorted(by_size)])
    terms = np.stack([1 / seconds, sizes / seconds], axis=1)
    (latency_s, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if latency_s < 0:
        latency_s, per_byte = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    if not per_byte > 0:
        rule = "larger messages take longer"
        raise_if([Problem(where="samples", value=None, rule=rule)], ConfigError, subject="samples of a cost")
    return float(latency_s), float(1 / per_byte)


def _search(cost: OverlapCost, layers: Sequence[LayerSample]) -> OverlapCost:
    """The cost with overheads, interference and rate of copies, searched one after the other in ever smaller steps."""

    def loss(trial: OverlapCost) -> float:
        return fmean(abs(log(sample.predicted_s(trial) / sample.seconds)) for sample in layers)

    found = replace(cost, op_s=2e-5, block_s=1e-4, interference=0.1, copy_bytes_per_s=5e9)
    least = loss(found)
    for step in (8.0, 3.0, 1.7, 1.3, 1.1):
        for _ in range(2):
            for name in ("op_s", "block_s", "interference", "copy_bytes_per_s"):
                for factor in (step, 1 / step):
                    trial = replace(found, **{name: getattr(found, name) * factor})
                    if (value := loss(trial)) < least:
                        found, least = trial, value
    return found

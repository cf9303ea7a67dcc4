"""What overlap costs on these very ranks and links: a short calibration, kept from run to run, and done again when it no longer fits.

Decides nothing: it measures, fits (`plan/moe/overlap/prediction/choose.py`) and hands a `Chooser` to the layers that ask. Everything here is collective over the group of the
asking layer: all of its ranks take the numbers of its first rank, so that all choose alike.

A calibration is some messages around the group, some products, and some thirty passes of the layer itself on random tokens. It is kept in `folder` by machine, device, threads, group, hosts, shape and type. Every `EVERY` passes the group compares what it measured with what was predicted;
where they are apart by more than `APART` on any rank, it calibrates again, and looks half as often from then on: what measuring again does not mend is not asked for ever.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.files import write_json
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.tiles import column_units
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap import CANDIDATES, FINE
from phalanx.plan.moe.overlap.prediction import (
    Chooser,
    LayerSample,
    LayerShape,
    MatmulSample,
    MessageSample,
    OverlapCost,
    Sample,
    WireBytes,
    fit,
)
from phalanx.plan.moe.overlap.tiles import TileSchedule
from phalanx.runtime.comm import Message
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from phalanx.runtime.moe.overlap import TILE_ROWS, run_overlapped
from phalanx.runtime.moe.streams import CudaStreams

EVERY = 64
"""Passes between two looks at the predictions."""
APART = 1.5
MESSAGES = (1 << 12, 1 << 18, 1 << 20, 1 << 22)
"""Bytes."""
ROWS = (16, 64, 128, 256, 512)
REPEATS = 3
TRIES = 3
_UNKNOWN = OverlapCost(latency_s=0.0, bytes_per_s=math.inf, flops_by_rows=((1, 1e9),))
"""Costs where messages take no time and nothing is worth overlapping: serial order."""
LAYERS = (
    TileSchedule(),
    TileSchedule(order="own_first"),
    *(replace(FINE, parts=parts) for parts in (1, 2, 4, 8)),
    TileSchedule(parts=4, blocks=2, order="arrival", own_before=0.5),
)
"""Schedules that are timed: every number of parts. The last, but for its blocks and its order, is `FINE`: what a further block costs shows in it."""


@dataclass(eq=False)
class Calibrated:
    """A calibration, and how it has fitted since."""

    cost: OverlapCost
    median_error: float
    """Median error of the layers that it was fitted to."""
    chooser: Chooser
    every: int
    """Passes between two looks."""
    ratios: list[float] = field(default_factory=list)
    """Measured over predicted seconds, newest last."""
    taken: TileSchedule | None = None
    """The schedule of the last pass."""


class Tuner:
    """Calibrations of one process, shared by its layers. `folder`: where they are kept; None: nowhere.

    `paired`: the share of forward passes that run beside a backward pass (`runtime/moe/co_schedule.py`), which the choice knows of. Only passes with none beside them are compared with what was
    predicted, and only they look: a pass beside another lasts as long as the turns of that one, and which of the two comes first differs from rank to rank. All ranks of a group have the
    same pairs, so they look in the same passes. `tell` hears of each calibration.
    """

    def __init__(
        self, folder: Path | None = None, *, paired: float = 0.0, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.folder, self.paired, self.tell = folder, paired, tell
        self.known: dict[str, Calibrated] = {}
        self.calibrations = 0

    def of(
        self,
        dispatcher: Dispatcher,
        x_TH: torch.Tensor,
        experts: ExpertWeights,
        lanes: Lanes,
        *,
        shared_ffn: int = 0,
        hosts: Sequence[int] | None = None,
    ) -> Calibrated:
        """The calibration for layers like this one. Collective over `ep_etp` where it is not known, or does not fit any more.

        `shared_ffn`: width of the shared expert, on all ranks of tp together, which computes in the gaps of the layer; 0: none. `hosts`: the host of
        each position in `ep_etp`, where rows may go through one rank of a host.
        """
        shape = _shape(x_TH, experts, shared_ffn)
        key = _key(dispatcher, shape, x_TH, lanes, hosts)
        measured = partial(measure_layer, dispatcher, x_TH, experts, lanes, shape, hosts=hosts)
        found = self.known.get(key)
        if found is None:
            cost, error = self._kept(dispatcher, key) or self._measured(dispatcher, measured, shape, key)
            found = self.known[key] = Calibrated(cost, error, self._chooser(shape, cost), EVERY)
        elif dispatcher.comms.beside is None and len(found.ratios) >= found.every:
            mine = statistics.median(found.ratios)
            found.ratios.clear()
            told = dispatcher.comms.gather_objects(mine, dispatcher.ep_etp)
            if max(abs(math.log(ratio)) for ratio in told) > math.log(APART):
                cost, error = self._measured(dispatcher, measured, shape, key)
                found = self.known[key] = Calibrated(cost, error, self._chooser(shape, cost), 2 * found.every)
        return found

    def _chooser(self, shape: LayerShape, cost: OverlapCost) -> Chooser:
        return Chooser(shape, cost, schedule_candidates(shape.hidden), tile_rows=TILE_ROWS, paired=self.paired)

    def _kept(self, dispatcher: Dispatcher, key: str) -> tuple[OverlapCost, float] | None:
        """What an earlier run has left, if all ranks find the same."""
        text = ""
        if self.folder is not None:
            with suppress(OSError):
                text = (self.folder / f"{key}.json").read_text()
        told = dispatcher.comms.gather_objects(hashlib.sha256(text.encode()).hexdigest(), dispatcher.ep_etp)
        if not text or len(set(told)) > 1:
            return None
        with suppress(ValueError, TypeError, KeyError, ConfigError):
            return _read(json.loads(text))
        return None

    def _measured(
        self, dispatcher: Dispatcher, measured: Callable[[], list[Sample]], shape: LayerShape, key: str
    ) -> tuple[OverlapCost, float]:
        begin_s = time.perf_counter()
        for _ in range(TRIES):
            self.calibrations += 1
            with torch.no_grad():
                samples = measured()
            found = None
            with suppress(
                ConfigError
            ):  # times that make no sense: on a very busy machine larger messages may seem faster
                found = fit(samples)
            mine = None if found is None else (found.cost, found.median_error)
            first = dispatcher.comms.gather_objects(mine, dispatcher.ep_etp)[0]
            if first is not None:
                break
        cost, error = first or (_UNKNOWN, math.inf)
        if self.folder is not None and first is not None:
            with suppress(OSError, RunError):  # a folder that cannot be written to costs the next run a calibration
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder / f"{key}.json", {"cost": asdict(cost), "median_error": error})
        took_s = time.perf_counter() - begin_s
        fitted = (
            "no times that make sense: serial order" if first is None else f"median error of its layers {error:.0%}"
        )
        self.tell(
            f"overlap of {shape.tokens} tokens on {dispatcher.ep_etp.size} ranks calibrated in {took_s:.1f} s: {fitted}"
        )
        return cost, error


class Tuned:
    """The schedules of one layer, pass after pass.

    `compares`: whether how long the pass takes says something of the prediction: nothing where another runs beside it, or on a device, where it is not over when the host comes to its end.
    """

    def __init__(self, known: Calibrated, *, compares: bool) -> None:
        self.known, self._compares = known, compares
        self._predicted_s = 0.0
        self._begin_s = 0.0

    def __call__(self, plan: DispatchPlan, wire: WireBytes) -> TileSchedule:
        """Choose, and start the clock."""
        chooser = self.known.chooser
        choice = chooser.choice(plan, wire)
        self.known.taken = choice.schedule
        # where a rank has no tokens, its passes are not those that were predicted
        whole = bool((plan.rows_PG.sum(1) > 0).all())
        self._predicted_s = choice.alone_s if whole and chooser.cost is not _UNKNOWN else 0.0
        self._begin_s = time.perf_counter()
        return choice.schedule

    def done(self) -> None:
        """The pass is over."""
        if self._predicted_s > 0 and self._compares:
            self.known.ratios.append((time.perf_counter() - self._begin_s) / self._predicted_s)


def schedule_candidates(hidden: int) -> tuple[TileSchedule, ...]:
    """What a layer of this width is chosen a schedule from: no more blocks than its columns can be cut into."""
    units = column_units(hidden)
    return tuple(dict.fromkeys(replace(one, blocks=min(one.blocks, units)) for one in CANDIDATES))


def _shape(x_TH: torch.Tensor, experts: ExpertWeights, shared_ffn: int) -> LayerShape:
    return LayerShape(
        tokens=x_TH.shape[0],
        hidden=x_TH.shape[1],
        ffn=experts.w2_eHf.shape[2],
        element_bytes=x_TH.element_size(),
        slots=experts.w2_eHf.shape[0],
        shared_ffn=shared_ffn,
    )


def _key(
    dispatcher: Dispatcher, shape: LayerShape, x_TH: torch.Tensor, lanes: Lanes, hosts: Sequence[int] | None
) -> str:
    """Key of machine, device, threads, group, hosts, shape and type. Tokens of a rank in powers of two: batches differ."""
    device = torch.cuda.get_device_name(x_TH.device) if x_TH.is_cuda else x_TH.device.type
    threads = (lanes.count, torch.get_num_threads() if lanes.count == 1 else 1, lanes.rows is not None)
    rounded = replace(shape, tokens=1 << max(shape.tokens - 1, 0).bit_length())
    group = (dispatcher.ep_etp.ranks, tuple(hosts or ()), dispatcher.top_k)
    facts = (platform.node(), device, threads, group, asdict(rounded), str(x_TH.dtype), TILE_ROWS, LAYERS)
    return "overlap-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(record: dict[str, Any]) -> tuple[OverlapCost, float]:
    table = tuple((int(rows), float(rate)) for rows, rate in record["cost"].pop("flops_by_rows"))
    timed = tuple((str(o), int(p), int(b), float(ratio)) for o, p, b, ratio in record["cost"].pop("timed"))
    return OverlapCost(flops_by_rows=table, timed=timed, **record["cost"]), float(record["median_error"])


# ---- calibration -----------------------------------------------------------------------------------------------------------------


def measure_layer(
    dispatcher: Dispatcher,
    x_TH: torch.Tensor,
    experts: ExpertWeights,
    lanes: Lanes,
    shape: LayerShape,
    *,
    hosts: Sequence[int] | None = None,
) -> list[Sample]:
    """Messages, products and whole passes; the slowest rank counts. Collective over `ep_etp`."""
    timed = [
        *_messages(dispatcher, x_TH.device),
        *_products(experts, x_TH),
        *_layers(dispatcher, x_TH, experts, lanes, shape, hosts),
    ]
    seconds = _slowest(dispatcher, [call for call, _ in timed])
    return [sample(took_s) for (_, sample), took_s in zip(timed, seconds, strict=True)]


Timed = tuple[Callable[[], object], Callable[[float], Sample]]
"""What is done, and the sample that its seconds make."""


def _messages(dispatcher: Dispatcher, device: torch.device) -> list[Timed]:
    return [(partial(_ring, dispatcher, size, device), partial(MessageSample, size)) for size in MESSAGES]


def _products(experts: ExpertWeights, x_TH: torch.Tensor) -> list[Timed]:
    w13_FH = experts.w13_e2fH[0].detach().flatten(0, 1)
    inputs = [x_TH.new_zeros(rows, x_TH.shape[1]) for rows in ROWS]
    return [
        (partial(torch.mm, x_rH, w13_FH.T), partial(MatmulSample, len(x_rH), 2.0 * len(x_rH) * w13_FH.numel()))
        for x_rH in inputs
    ]


def _layers(
    dispatcher: Dispatcher,
    x_TH: torch.Tensor,
    experts: ExpertWeights,
    lanes: Lanes,
    shape: LayerShape,
    hosts: Sequence[int] | None,
) -> list[Timed]:
    """Passes of the layer on tokens that are routed evenly, without its shared expert."""
    shape = replace(shape, shared_ffn=0)
    k, num = dispatcher.top_k, dispatcher.num_experts
    tokens = torch.arange(len(x_TH), device=x_TH.device).unsqueeze(1)
    step = torch.arange(k, device=x_TH.device) * max(1, num // k)
    experts_TK = (tokens + step) % num
    weights_TK = torch.full((len(x_TH), k), 1 / k, device=x_TH.device)
    call = MoeCall(
        x_TH=x_TH.detach(),
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        experts=ExpertWeights(experts.w13_e2fH.detach(), experts.w2_eHf.detach()),
        op_prefix="calibration.",
    )
    units = column_units(shape.hidden)
    schedules = dict.fromkeys(replace(one, blocks=min(one.blocks, units)) for one in LAYERS)
    passes = [_Pass(schedule, shape) for schedule in schedules]
    return [
        (
            partial(run_overlapped, call, dispatcher=dispatcher, schedule=one.chosen, lanes=lanes, host_of_rank=hosts),
            one.sample,
        )
        for one in passes
    ]


@dataclass(eq=False)
class _Pass:
    """A pass of a layer by a given schedule."""

    schedule: TileSchedule
    shape: LayerShape
    seen: tuple[DispatchPlan, WireBytes] | None = None

    def chosen(self, plan: DispatchPlan, wire: WireBytes) -> TileSchedule:
        self.seen = plan, wire
        return self.schedule

    def sample(self, seconds: float) -> LayerSample:
        assert self.seen is not None
        plan, wire = self.seen
        return LayerSample(plan, self.shape, self.schedule, wire, TILE_ROWS, seconds)


def _ring(dispatcher: Dispatcher, size: int, device: torch.device) -> None:
    """A message to the next rank and one from the last, at once on all ranks."""
    axis, comms = dispatcher.ep_etp, dispatcher.comms
    gone, come = torch.zeros(2, size, dtype=torch.uint8, device=device)
    following, previous = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    sends, receives = [Message(gone, following, _TAG)], [Message(come, previous, _TAG)]
    comms.start_exchange(sends, receives, axis, op_id="calibration.ring").wait()  # one group: or NCCL would deadlock


_TAG = 1 << 20
"""Tag of no message of a layer."""


def _finish(dispatcher: Dispatcher) -> None:
    """Wait until a device has done what it was given; a host has."""
    if isinstance(dispatcher.comms.message_streams, CudaStreams):
        torch.cuda.current_stream().synchronize()


def _slowest(dispatcher: Dispatcher, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of the slowest rank for each call, medians of some rounds after one that does not count. On a device until it is done.

    The calls take turns: a machine whose speed changes is as slow for one as for the others, and the choice rests on what they take beside one another.
    """
    mine: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + REPEATS):
        for call, seconds in zip(calls, mine, strict=True):
            dispatcher.comms.barrier(dispatcher.ep_etp, op_id="calibration.barrier")
            begin_s = time.perf_counter()
            call()
            _finish(dispatcher)
            seconds.append(time.perf_counter() - begin_s)
    told = dispatcher.comms.gather_objects(mine, dispatcher.ep_etp)
    return [statistics.median([*map(max, zip(*ranks, strict=True))][1:]) for ranks in zip(*told, strict=True)]

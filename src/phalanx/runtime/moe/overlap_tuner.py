"""What overlap costs on these very ranks and links: a short calibration, kept from run to run, and done again when it no longer fits.

Decides nothing: it measures, fits (`plan/moe/overlap/prediction/choose.py`) and hands a `Chooser` to the layers that ask. Everything here is collective over the group of the
asking layer: all of its ranks take the numbers of its first rank, so that all choose alike.

A calibration is some messages around the group, some products, and some passes of the layer itself on random tokens: a few schedules first, for the clock that says which others are
worth timing, then those in turns, the slower half of them leaving after some rounds (successive halving, arXiv 1502.07943). A run chooses among the schedules that were timed. It is kept in `folder` by machine, device, threads, group, hosts, shape and type. Every `EVERY` passes the group compares what it measured with what was predicted;
where they are apart by more than `APART` on any rank, it calibrates again, and looks half as often from then on: what measuring again does not mend is not asked for ever.
"""

from __future__ import annotations

import hashlib
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
from phalanx.core.reading import MalformedError, parse_json, read_text
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
    compare_schedules,
    fit,
    worth_timing,
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
ROUNDS = (3, 3, 6)
"""Passes of each schedule until the slower half of them leaves; fewer where they would take longer than `COMPARE_S`."""
COMPARE_S = 60.0
FASTEST = 6
"""Schedules that are timed because the clock finds them fast."""
LEFT = 3
"""Schedules that are timed to the end."""
TRIES = 3
_UNKNOWN = OverlapCost(latency_s=0.0, bytes_per_s=math.inf, flops_by_rows=((1, 1e9),))
"""Costs where messages take no time and nothing is worth overlapping: serial order."""
LAYERS = (
    TileSchedule(),
    TileSchedule(order="own_first"),
    FINE,
    TileSchedule(parts=4, blocks=2, order="arrival", own_before=0.5),
)
"""Schedules by which the clock is fitted. The last, but for its blocks and its order, is `FINE`: what a further block costs shows in it."""


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
        measured = partial(_Calibration, dispatcher, x_TH, experts, lanes, shape, hosts)
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
        timed = [schedule for schedule, _ in cost.timed]
        return Chooser(shape, cost, timed, tile_rows=TILE_ROWS, paired=self.paired)

    def _kept(self, dispatcher: Dispatcher, key: str) -> tuple[OverlapCost, float] | None:
        """What an earlier run has left, if all ranks find the same."""
        text = ""
        if self.folder is not None:
            with suppress(OSError, MalformedError):
                text = read_text(self.folder / f"{key}.json")
        told = dispatcher.comms.gather_objects(hashlib.sha256(text.encode()).hexdigest(), dispatcher.ep_etp)
        if not text or len(set(told)) > 1:
            return None
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError):
            return _read(parse_json(text, where=key))
        return None

    def _measured(
        self, dispatcher: Dispatcher, calibration: Callable[[], _Calibration], shape: LayerShape, key: str
    ) -> tuple[OverlapCost, float]:
        begin_s = time.perf_counter()
        first = None
        for _ in range(TRIES):
            self.calibrations += 1
            # hooks of its own: what is kept here is not counted by a checkpoint (recomputation) that the pass may be in
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept):
                first = calibration().found()
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
    facts = (platform.node(), device, threads, group, asdict(rounded), str(x_TH.dtype), TILE_ROWS, LAYERS, ROUNDS)
    return "overlap-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(record: dict[str, Any]) -> tuple[OverlapCost, float]:
    table = tuple((int(rows), float(rate)) for rows, rate in record["cost"].pop("flops_by_rows"))
    timed = tuple((TileSchedule(**schedule), float(ratio)) for schedule, ratio in record["cost"].pop("timed"))
    return OverlapCost(flops_by_rows=table, timed=timed, **record["cost"]), float(record["median_error"])


# ---- calibration -----------------------------------------------------------------------------------------------------------------


class _Calibration:
    """What is measured for layers of one shape; the slowest rank counts. Everything here is collective over `ep_etp`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        x_TH: torch.Tensor,
        experts: ExpertWeights,
        lanes: Lanes,
        shape: LayerShape,
        hosts: Sequence[int] | None,
    ) -> None:
        self.dispatcher, self.x_TH, self.experts, self.lanes = dispatcher, x_TH.detach(), experts, lanes
        self.shape, self.hosts = replace(shape, shared_ffn=0), hosts
        self.call = self._call()

    def found(self) -> tuple[OverlapCost, float] | None:
        """The cost and the median error of its layers; None where the times make no sense."""
        candidates = schedule_candidates(self.shape.hidden)
        units = column_units(self.shape.hidden)
        layers = [_Pass(replace(one, blocks=min(one.blocks, units)), self) for one in LAYERS]
        timed = [*self._messages(), *self._products()]
        rounds = self._in_turns([*(call for call, _ in timed), *layers], 1 + REPEATS)
        seconds = [statistics.median(each[1:]) for each in rounds]
        plain = [sample(took_s) for (_, sample), took_s in zip(timed, seconds, strict=False)]
        known = [one.sample(took_s) for one, took_s in zip(layers, seconds[len(timed) :], strict=True)]
        cost = self._agreed([*plain, *known])
        if cost is None:
            return None
        plan, wire = layers[0].batch
        choice = compare_schedules(plan, self.shape, cost[0], candidates, wire=wire, tile_rows=TILE_ROWS)
        worth = [*dict.fromkeys((*worth_timing(choice, FASTEST), *(one.schedule for one in layers)))]
        worth = self.dispatcher.comms.gather_objects(worth, self.dispatcher.ep_etp)[0]
        return self._agreed([*plain, *self._compared([_Pass(schedule, self) for schedule in worth])])

    def _agreed(self, samples: Sequence[Sample]) -> tuple[OverlapCost, float] | None:
        """What the first rank finds."""
        mine = None
        with suppress(ConfigError):  # times that make no sense: on a very busy machine larger messages may seem faster
            found = fit(samples)
            mine = found.cost, found.median_error
        told: tuple[OverlapCost, float] | None = self.dispatcher.comms.gather_objects(mine, self.dispatcher.ep_etp)[0]
        return told

    def _compared(self, passes: Sequence[_Pass]) -> list[LayerSample]:
        """Seconds of each pass as if all had been timed in the same rounds.

        In a round the machine is as fast for one as for the other, so what counts is how far each is from the mean of those that stay.
        """
        once_s = sum(statistics.fmean(seconds) for seconds in self._in_turns(passes, 1))
        share = min(1.0, COMPARE_S / (once_s * sum(count / 2**left for left, count in enumerate(ROUNDS))))
        logs: list[list[float]] = [[] for _ in passes]
        staying, relative = [*range(len(passes))], [0.0] * len(passes)
        level: list[float] = []
        for rounds in (max(1, round(share * count)) for count in ROUNDS):
            for at, seconds in zip(staying, self._in_turns([passes[at] for at in staying], rounds), strict=True):
                logs[at] += map(math.log, seconds)
            level = [statistics.fmean(of_round) for of_round in zip(*(logs[at] for at in staying), strict=True)]
            relative = [
                statistics.median(mine - all_s for mine, all_s in zip(each, level, strict=False)) for each in logs
            ]
            fastest = sorted(staying, key=relative.__getitem__)[: max(LEFT, (len(staying) + 1) // 2)]
            staying = self.dispatcher.comms.gather_objects(fastest, self.dispatcher.ep_etp)[0]
        usual = statistics.median(level)
        return [one.sample(math.exp(usual + far)) for one, far in zip(passes, relative, strict=True)]

    def _in_turns(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        """Seconds of the slowest rank for each call, by round. On a device until it is done.

        The calls take turns: a machine whose speed changes is as slow for one as for the others, and the choice rests on what they take beside one another.
        """
        comms, axis = self.dispatcher.comms, self.dispatcher.ep_etp
        mine: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, seconds in zip(calls, mine, strict=True):
                comms.barrier(axis, op_id="calibration.barrier")
                begin_s = time.perf_counter()
                call()
                if isinstance(comms.message_streams, CudaStreams):
                    torch.cuda.current_stream().synchronize()
                seconds.append(time.perf_counter() - begin_s)
        told = comms.gather_objects(mine, axis)
        return [[*map(max, zip(*ranks, strict=True))] for ranks in zip(*told, strict=True)]

    def _messages(self) -> list[Timed]:
        return [(partial(self._ring, size), partial(MessageSample, size)) for size in MESSAGES]

    def _ring(self, size: int) -> None:
        """A message to the next rank and one from the last, at once on all ranks."""
        axis, comms = self.dispatcher.ep_etp, self.dispatcher.comms
        gone, come = torch.zeros(2, size, dtype=torch.uint8, device=self.x_TH.device)
        following, previous = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        sends, receives = [Message(gone, following, _TAG)], [Message(come, previous, _TAG)]
        comms.start_exchange(
            sends, receives, axis, op_id="calibration.ring"
        ).wait()  # one group: or NCCL would deadlock

    def _products(self) -> list[Timed]:
        w13_FH = self.experts.w13_e2fH[0].detach().flatten(0, 1)
        inputs = [self.x_TH.new_zeros(rows, self.x_TH.shape[1]) for rows in ROWS]
        return [
            (partial(torch.mm, x_rH, w13_FH.T), partial(MatmulSample, len(x_rH), 2.0 * len(x_rH) * w13_FH.numel()))
            for x_rH in inputs
        ]

    def _call(self) -> MoeCall:
        """The layer on tokens whose experts are drawn, each as likely as the other, without its shared expert.

        As in a run some tokens have two experts on one rank and others on two, which decides how much travels, and what the backward pass needs is kept.
        """
        x_TH, k, num = self.x_TH.detach(), self.dispatcher.top_k, self.dispatcher.num_experts
        draw = torch.Generator().manual_seed(self.dispatcher.ep_etp.index)
        experts_TK = torch.rand(len(x_TH), num, generator=draw).topk(k).indices
        return MoeCall(
            x_TH=x_TH.requires_grad_(),
            weights_TK=torch.full((len(x_TH), k), 1 / k, device=x_TH.device),
            experts_TK=experts_TK.to(x_TH.device),
            experts=ExpertWeights(
                self.experts.w13_e2fH.detach().requires_grad_(), self.experts.w2_eHf.detach().requires_grad_()
            ),
            op_prefix="calibration.",
        )


Timed = tuple[Callable[[], object], Callable[[float], Sample]]
"""What is done, and the sample that its seconds make."""


@dataclass(eq=False)
class _Pass:
    """A pass of a layer by a given schedule. Calling it does it."""

    schedule: TileSchedule
    of: _Calibration
    seen: tuple[DispatchPlan, WireBytes] | None = None

    def __call__(self) -> object:
        of = self.of
        return run_overlapped(
            of.call, dispatcher=of.dispatcher, schedule=self._chosen, lanes=of.lanes, host_of_rank=of.hosts
        )

    def _chosen(self, plan: DispatchPlan, wire: WireBytes) -> TileSchedule:
        self.seen = plan, wire
        return self.schedule

    @property
    def batch(self) -> tuple[DispatchPlan, WireBytes]:
        """What the last pass was asked a schedule for."""
        assert self.seen is not None
        return self.seen

    def sample(self, seconds: float) -> LayerSample:
        plan, wire = self.batch
        return LayerSample(plan, self.of.shape, self.schedule, wire, TILE_ROWS, seconds)


_TAG = 1 << 20
"""Tag of no message of a layer."""

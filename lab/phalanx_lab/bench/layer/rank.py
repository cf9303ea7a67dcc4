"""One rank of `phalanx bench layer`: builds MoE layers, runs them by every method in turns, and measures compute and communication by themselves.

Decides when the clock runs: every rank's from a barrier to the end of its own pass, and of all ranks the slowest counts, iteration by iteration.
Methods take turns, each iteration beginning with another one. Forward and forward + backward come from the same passes.

    compute         the serial layer whose messages are replaced by copies of the same size inside this process
    communication   the messages of the serial layer, posted and waited for one after the other, nothing computed
    distinct        the same with a row for each token that a rank needs, not for each of its pairs there

Legend: T tokens of a rank, K experts of a token, H hidden, E experts, e local slots, f expert width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.moe.overlap.settings import OverlapSetting
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from phalanx.runtime.moe.overlap_tuner import Tuner
from phalanx.runtime.moe.routed import RoutedExperts, routed_experts
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx_lab.bench.layer.loads import exact_routing, load_vector, pair_counts
from phalanx_lab.bench.layer.methods import AUTO, OURS, Inside, overlap_of, sends_tokens
from phalanx_lab.bench.rank_jobs import join_ranks, request

PATIENCE_S = 300.0
MESSAGES = ("communication", "distinct")
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}
"""Largest difference from the serial layer over the largest value of a tensor."""


@dataclass(frozen=True, kw_only=True)
class BenchLayerShape:
    """One MoE layer and what each rank gives it."""

    tokens: int = 1024
    """Tokens per rank."""
    hidden: int = 1024
    ffn: int = 2048
    experts: int = 8
    top_k: int = 2
    load: str = "0"
    """Standard deviation of the experts' shares, or `dead`."""
    dtype: str = "float32"


@dataclass(frozen=True)
class Times:
    """Seconds of one pass on one rank."""

    forward: float
    both: float
    """Forward + backward."""


class RankPlace:
    """This rank among the others."""

    def __init__(self, job_file: Path) -> None:
        keep_freed_memory(threads=1)
        info = join_ranks(PATIENCE_S)
        self.job_file, self.rank = job_file, info.rank
        self.folding = make_folding(world=info.world, ep=info.world)
        self.groups = build_groups(self.folding, rank=info.rank, cache=GroupCache(timeout_s=PATIENCE_S))
        self.comms = Collectives(timeout_s=PATIENCE_S)
        self.axis = self.groups.axis("ep_etp")
        self.lanes = Lanes(1, rows=compiled_rows())

    def set_link(self, bit_per_s: float | None) -> None:
        request(self.job_file, bit_per_s, comms=self.comms, axis=self.axis)

    def slowest(self, times: Sequence[Times]) -> list[Times]:
        """Seconds of the slowest rank in each pass."""
        told = self.comms.gather_objects([(t.forward, t.both) for t in times], self.axis)
        return [Times(*map(max, zip(*each, strict=True))) for each in zip(*told, strict=True)]


@dataclass(frozen=True, eq=False)
class LayerMessages:
    """What a rank sends there and back, one row for each rank and token or pair."""

    sends: list[int]
    receives: list[int]
    rows_there: torch.Tensor
    rows_back: torch.Tensor
    weights_there: torch.Tensor
    weights_back: torch.Tensor


class BenchLayer:
    """One layer on one rank, with fixed tokens and routing."""

    def __init__(self, place: RankPlace, shape: BenchLayerShape, *, seed: int = 0) -> None:
        self.place, self.shape = place, shape
        dtype = getattr(torch, shape.dtype)
        rng = np.random.default_rng((seed, place.rank))
        shares = load_vector(shape.load, num_experts=shape.experts, top_k=shape.top_k, seed=seed)
        self.counts_E = pair_counts(shares, num_tokens=shape.tokens, top_k=shape.top_k)
        routed = exact_routing(self.counts_E, num_tokens=shape.tokens, top_k=shape.top_k, rng=rng)
        self.experts_TK = torch.from_numpy(routed)
        draw = torch.Generator().manual_seed(seed * 1000 + place.rank)

        def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, generator=draw) * scale).to(dtype)

        size, hidden, ffn = (shape.tokens, shape.top_k), shape.hidden, shape.ffn
        slots = shape.experts // place.axis.size
        self.x_TH = randn(shape.tokens, hidden).requires_grad_()
        self.weights_TK = torch.softmax(torch.randn(*size, generator=draw), -1).requires_grad_()
        self.dy_TH = randn(shape.tokens, hidden)
        self.held = ExpertWeights(
            randn(slots, 2, ffn, hidden, scale=hidden**-0.5).requires_grad_(),
            randn(slots, hidden, ffn, scale=ffn**-0.5).requires_grad_(),
        )
        self.inputs = (self.x_TH, self.weights_TK, self.held.w13_e2fH, self.held.w2_eHf)
        self.inside = Inside(place.comms)
        self.routed: dict[str, RoutedExperts] = {}
        """Layer as a run has it, by method."""
        self.tuner = Tuner()
        """Tuner of `auto`: calibrates on the link that there is when it is asked first, and keeps nothing for other runs."""
        self.messages = {name: self._messages(distinct=name == "distinct") for name in MESSAGES}

    def _made(self, method: str) -> RoutedExperts:
        """The layer by a method: `dispatch.overlap` decides, as in a run. On two hosts of one rank each there is no gateway."""
        name = method.removeprefix("compute ")
        dispatcher = Dispatcher(
            DispatchSpec(overlap=overlap_of(name)),
            placement=plain_placement(self.shape.experts, self.place.folding),
            groups=self.place.groups,
            comms=self.inside if method != name else self.place.comms,
            top_k=self.shape.top_k,
            lanes=self.place.lanes,
        )
        return routed_experts(dispatcher, lanes=self.place.lanes, tuner=self.tuner)

    def calibrate(self) -> None:
        """Calibrate `auto` on the link that there is, from nothing, as the first pass of a run does. Collective."""
        self.tuner = Tuner()
        self.routed.pop(AUTO, None)
        with torch.no_grad():
            self.run(AUTO)

    def choice(self) -> str:
        """The schedule that the last pass of `auto` took, as a recipe writes it."""
        (known,) = self.tuner.known.values()
        assert known.taken is not None  # there was a pass
        return str(OverlapSetting(kind="tiles", schedule=known.taken))

    def run(self, method: str) -> torch.Tensor:
        """(T, H) the layer by one of `METHODS`, or `compute` of one of these (`compute serial`)."""
        if method not in self.routed:
            self.routed[method] = self._made(method)
        call = MoeCall(x_TH=self.x_TH, weights_TK=self.weights_TK, experts_TK=self.experts_TK, experts=self.held)
        return self.routed[method](call)[0]

    def timed(self, method: str, *, backward: bool = True) -> Times:
        """One pass, from a barrier on."""
        for tensor in self.inputs:
            tensor.grad = None
        self.place.comms.barrier(self.place.axis)
        begin_s = time.perf_counter()
        if method in MESSAGES:
            self.exchange(method, backward=False)
            forward_s = time.perf_counter() - begin_s
            if backward:
                self.exchange(method, backward=True)
        else:
            y_TH = self.run(method)
            forward_s = time.perf_counter() - begin_s
            if backward:
                y_TH.backward(self.dy_TH)
        return Times(forward_s, time.perf_counter() - begin_s)

    def exchange(self, method: str, *, backward: bool) -> None:
        """The messages of one direction, one after the other: counts, rows and weights there, rows back; the gradients of these."""
        comms, axis, sent = self.place.comms, self.place.axis, self.messages[method]
        if not backward:
            comms.all_gather(torch.zeros(self.shape.experts, dtype=torch.int64), axis)
            comms.all_to_all_raw(sent.weights_there, axis, sent.sends, sent.receives, "")
        comms.all_to_all_raw(sent.rows_there, axis, sent.sends, sent.receives, "")
        comms.all_to_all_raw(sent.rows_back, axis, sent.receives, sent.sends, "")
        if backward:
            comms.all_to_all_raw(sent.weights_back, axis, sent.receives, sent.sends, "")

    def _messages(self, *, distinct: bool) -> LayerMessages:
        size = self.place.axis.size
        home_TK = self.experts_TK // (self.shape.experts // size)
        hits = [home_TK == rank for rank in range(size)]
        sends = [int((hit.any(1) if distinct else hit).sum()) for hit in hits]
        table = self.place.comms.gather_objects(sends, self.place.axis)
        receives = [row[self.place.rank] for row in table]
        rows = [self.x_TH.detach().new_zeros(sum(n), self.shape.hidden) for n in (sends, receives)]
        return LayerMessages(sends, receives, rows[0], rows[1], torch.zeros(sum(sends)), torch.zeros(sum(receives)))

    # ---- what it gives ---------------------------------------------------------------------------------------------------

    def sent_bytes(self, method: str) -> dict[str, int]:
        """Bytes that this rank sends in a forward pass, and in both directions; what the busiest rank sends."""
        counters = self.place.comms.counters
        counters.clear()
        y_TH = self.run(method)
        forward = sum(c.sent_bytes for c in counters.values())
        y_TH.backward(self.dy_TH)
        both = sum(c.sent_bytes for c in counters.values())
        told = self.place.comms.gather_objects((forward, both), self.place.axis)
        return {"forward": max(f for f, _ in told), "forward_backward": max(b for _, b in told)}

    def values(self, method: str) -> list[torch.Tensor]:
        """Output and gradients."""
        for tensor in self.inputs:
            tensor.grad = None
        y_TH = self.run(method)
        y_TH.backward(self.dy_TH)
        return [y_TH.detach(), *(tensor.grad for tensor in self.inputs if tensor.grad is not None)]

    def wrong(self, methods: Sequence[str]) -> list[str]:
        """Methods whose output or gradients differ from the serial layer's beyond rounding, on any rank; and ours that differ by a bit.

        Schedules by which a token travels alike: where it goes to a rank once, that rank adds up its experts, which is another sum.
        """
        wanted, limit = self.values("serial"), TOLERANCE[self.shape.dtype]
        found: list[str] = []
        alike: dict[bool, list[torch.Tensor]] = {}
        for method in methods:
            got = self.values(method)
            if len(got) != len(wanted) or not all(_difference(a, b) <= limit for a, b in zip(got, wanted, strict=True)):
                found.append(f"{method} differs from serial")
            if method in OURS:
                first = alike.setdefault(bool(sends_tokens(method)), got)
                if not _equal(got, first):
                    found.append(f"{method} has other bits than another schedule of ours")
            elif method == AUTO and len(alike) == 2 and not any(_equal(got, first) for first in alike.values()):
                found.append("auto has the bits of neither transport of ours")
        told = self.place.comms.gather_objects(found, self.place.axis)
        return sorted({line for lines in told for line in lines})


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether they are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    return float((a.float() - b.float()).abs().max()) / scale if b.numel() else 0.0


Clocked = dict[str, list[Times]]
"""Method -> seconds of each of its passes, the slowest rank's."""


def take_turns(layer: BenchLayer, methods: Sequence[str], *, iterations: int, warm_up: int = 2) -> Clocked:
    """Passes of all methods in turns, each iteration beginning with another one."""
    for method in [*methods] * warm_up:
        layer.timed(method)
    mine: Clocked = {method: [] for method in methods}
    for number in range(iterations):
        first = number % len(methods)
        for method in (*methods[first:], *methods[:first]):
            mine[method].append(layer.timed(method))
    return {method: layer.place.slowest(times) for method, times in mine.items()}


def as_lists(clocked: Mapping[str, Sequence[Times]]) -> dict[str, dict[str, list[float]]]:
    """Lists for a result file."""
    return {
        method: {"forward": [t.forward for t in times], "forward_backward": [t.both for t in times]}
        for method, times in clocked.items()
    }


def fit_link(layer: BenchLayer, *, share: float) -> float:
    """Set the rate of the link at which the communication of a forward pass takes `share` of its compute; bits per second.

    The first guess is bytes over time, then what was measured corrects it: a stream of messages carries less than the link does.
    """
    clocked = take_turns(layer, ["compute serial"], iterations=3)
    rate = layer.sent_bytes("serial")["forward"] * 8 / (share * _least(clocked["compute serial"]))
    for _ in range(3):
        layer.place.set_link(rate)
        clocked = take_turns(layer, ["compute serial", "communication"], iterations=3, warm_up=1)
        found = _least(clocked["communication"]) / _least(clocked["compute serial"])
        if abs(found / share - 1) < 0.03:
            break
        rate *= min(max(found / share, 0.5), 2.0)
    else:
        layer.place.set_link(rate)
    return float(layer.place.comms.gather_objects(rate, layer.place.axis)[0])


def _least(times: Sequence[Times]) -> float:
    """Seconds of the forward pass that was disturbed least."""
    return min(t.forward for t in times)

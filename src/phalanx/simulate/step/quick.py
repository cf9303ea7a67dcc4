"""The first pass of a search: time and memory of a mapping in tens of microseconds, the pipeline's bubble by its closed form.

Decides nothing of its own. A search asks for a million mappings, of which most share everything but the pipeline: layers are computed once for
what they depend on, what pipeline ranks hold once for each pipeline, and the rest is arithmetic on a handful of sums. Must never change: results equal those of tests/oracles/step_without_clock.py, which has none of this (test).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from phalanx.simulate.hardware import GpuCluster, Network, Oracle
from phalanx.simulate.mapping import Job, Mapping, Recompute
from phalanx.simulate.step.block_time import COMMUNICATION, Blocks, Ledger
from phalanx.simulate.step.bubble import bubble_share, idle_passes, tenths
from phalanx.simulate.step.device_memory import (
    LayerBytes,
    PipelinePlace,
    States,
    layer_bytes,
    memory_at,
    parameters_of_rank,
    states_of_ranks,
)
from phalanx.simulate.step.replicas import ReplicaTraffic
from phalanx.simulate.step.stage_layers import StageContent, contents
from phalanx.simulate.step.tile_time import TILE_WAYS
from phalanx.simulate.step.transfers import hop_seconds

KINDS = ("moe", "dense", "head", "embedding")


class LayerSums(NamedTuple):
    """Seconds of one layer or end of the model."""

    forward: float
    backward: float
    weight_grad: float


class Half(NamedTuple):
    """A ledger's sums: half a layer, or an end of the model."""

    forward: float
    backward: float
    weight_grad: float
    kernels: int
    alone: float
    """Part of `forward` that is no communication."""
    again: float
    """What selective recomputation repeats."""


class StepEnds(NamedTuple):
    """Seconds of gathering parameters, of reducing gradients and of the update: of one rank, beside nothing."""

    gather: float
    reduce: float
    update: float


def half_of(ledger: Ledger) -> Half:
    """What `Blocks.joined` asks of a ledger."""
    alone = sum(seconds for kind, seconds in ledger.forward.items() if kind not in COMMUNICATION)
    return Half(*ledger.seconds, ledger.weight_grad, ledger.kernels, alone, sum(ledger.again.values()))


def joined(halves: tuple[Half, ...], recompute: Recompute, launch_s: float) -> LayerSums:
    """`Blocks.joined` on sums."""
    forward, backward, weight_grad, kernels, alone, again = (sum(column) for column in zip(*halves, strict=True))
    if recompute in ("full", "half"):
        again = forward if recompute == "full" else 0.5 * alone
    return LayerSums(
        max(forward, kernels * launch_s),
        max(backward + again, 2 * kernels * launch_s),
        weight_grad,
    )


@dataclass(frozen=True)
class Places:
    """What the ranks of a pipeline hold."""

    different: tuple[StageContent, ...]
    """The first pipeline rank's, and those of the others that hold something else."""
    ranks: tuple[tuple[int, ...], ...]
    """Pipeline ranks that hold each."""
    fullest: tuple[PipelinePlace, ...]
    """Those of the ranks that hold the same that no other exceeds in what is in flight."""


def _places(job: Job, mapping: Mapping) -> Places:
    held, states = contents(job, mapping), states_of_ranks(mapping, mapping.num_microbatches(job))
    best: dict[StageContent, list[int]] = {}
    ranks: dict[StageContent, list[int]] = {}
    for rank, content in enumerate(held):
        ranks.setdefault(content, []).append(rank)
        rivals = best.setdefault(content, [])
        if not any(_covers(states[other], states[rank]) for other in rivals):
            rivals[:] = [other for other in rivals if not _covers(states[rank], states[other])] + [rank]
    fullest = tuple(PipelinePlace(rank, content, states[rank]) for content, ranks in best.items() for rank in ranks)
    return Places(tuple(best), tuple(map(tuple, ranks.values())), fullest)


def _covers(more: States, less: States) -> bool:
    return all(any(a >= c and b >= d for a, b in more) for c, d in less)


@dataclass
class QuickPredictor:
    """What was computed, by what it depends on."""

    job: Job
    cluster: GpuCluster
    precision: str = "bf16"
    halves: dict[Any, Half] = field(default_factory=dict)
    shared: dict[Any, Ledger] = field(default_factory=dict)
    layers: dict[Any, tuple[LayerSums, ...]] = field(default_factory=dict)
    bytes_of_layers: dict[Any, LayerBytes] = field(default_factory=dict)
    pipelines: dict[Any, Places] = field(default_factory=dict)
    ways: dict[Any, tuple[float, ...]] = field(default_factory=dict)
    idle: dict[Any, tuple[float, ...]] = field(default_factory=dict)
    ends: dict[Any, list[StepEnds]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = Network(self.cluster.hardware)
        self.oracle = Oracle(self.cluster.hardware, self.precision)

    # ---- layers

    def sums(self, mapping: Mapping, *, bound: bool = False) -> tuple[LayerSums, ...]:
        """Seconds of each of `KINDS`; zeros for a kind that the model lacks. `bound`: layers tile by tile by what no plan can beat."""
        f, o = mapping.folding, mapping.overlap
        dense = (f.tp, f.cp, mapping.micro_batch, mapping.splits_backward)
        bound = bound and o.ep in TILE_WAYS
        key = (*dense, f.ep, f.etp, o.ep, o.chunks, o.paired, o.left_free, mapping.slots, bound, mapping.recompute)
        if key not in self.layers:
            self.layers[key] = self._sums(mapping, dense, bound=bound)
        return self.layers[key]

    def _sums(self, mapping: Mapping, dense: tuple[Any, ...], *, bound: bool) -> tuple[LayerSums, ...]:
        blocks = Blocks(self.job, mapping, self.oracle, self.network, bound=bound)
        attention = self._dense_half("attention", dense, blocks)
        out = []
        for kind in KINDS:
            if kind in ("head", "embedding"):
                out.append(LayerSums(*self._dense_half(kind, dense, blocks)[:3]))
            elif (kind == "moe" and not self.job.spec.num_moe_layers) or (kind == "dense" and not _has_dense(self.job)):
                out.append(LayerSums(0.0, 0.0, 0.0))
            else:
                part = self._experts(dense, blocks) if kind == "moe" else (self._dense_half(kind, dense, blocks),)
                out.append(joined((attention, *part), mapping.recompute, self.oracle.hardware.launch_s))
        return tuple(out)

    def _dense_half(self, kind: str, dense: tuple[Any, ...], blocks: Blocks) -> Half:
        """What experts do not touch."""
        key = (kind, *dense)
        if key not in self.halves:
            if kind == "attention":
                made = blocks.attention()
            elif kind == "dense":
                made = blocks.dense(self.job.spec.dense_ffn)
            elif kind == "shared":
                made = self.shared[dense] = blocks.shared()
            else:
                made = blocks.head() if kind == "head" else blocks.embedding()
            self.halves[key] = half_of(made)
        return self.halves[key]

    def _experts(self, dense: tuple[Any, ...], blocks: Blocks) -> tuple[Half, Half]:
        """The routed part, which knows tokens and the expert grid alone, and the shared expert."""
        m = blocks.mapping
        shared = self._dense_half("shared", dense, blocks)
        key: tuple[Any, ...] = (blocks.tokens, m.folding.ep, m.folding.etp, m.overlap, m.slots, blocks.bound)
        key += (m.recompute == "selective",)
        if (
            m.drop is not None or m.overlap.ep in TILE_WAYS
        ):  # ranks that decide together; how long the shared expert takes
            key += dense
        if key not in self.halves:
            self.halves[key] = half_of(blocks.routed(self.shared[dense]))
        return self.halves[key], shared

    def can_pay(self, mapping: Mapping) -> bool:
        """Whether layers tile by tile can be faster than bare ones: not where tiles alone take longer, for then no plan of them is needed."""
        if mapping.overlap.ep not in TILE_WAYS:
            return True
        least, bare = self.sums(mapping, bound=True)[0], self.sums(_bare(mapping))[0]
        return least.forward + least.backward < bare.forward + bare.backward

    def layer_bytes(self, mapping: Mapping) -> LayerBytes:
        """`layer_bytes`, once for what it depends on."""
        f = mapping.folding
        fused = mapping.overlap.ep == "fused"
        key = (f.tp, f.cp, mapping.micro_batch, f.ep, f.etp, mapping.recompute, mapping.slots, fused)
        if key not in self.bytes_of_layers:
            self.bytes_of_layers[key] = layer_bytes(self.job, mapping)
        return self.bytes_of_layers[key]

    # ---- the step

    def _pipeline(self, mapping: Mapping) -> tuple[Any, ...]:
        m = mapping
        return m.schedule, m.folding.pp, m.virtual, m.num_microbatches(self.job), m.stage_layers, m.extra_warmup

    def places(self, mapping: Mapping) -> Places:
        """Places of a pipeline, whatever else the mapping is; once for each."""
        key = self._pipeline(mapping)
        if key not in self.pipelines:
            self.pipelines[key] = _places(self.job, mapping)
        return self.pipelines[key]

    def peak_bytes(self, mapping: Mapping) -> float:
        """Bytes on the fullest rank of the pipeline."""
        layer, hardware = self.layer_bytes(mapping), self.cluster.hardware
        places = self.places(mapping).fullest
        return max(memory_at(self.job, mapping, place, layer, hardware=hardware).total for place in places)

    def seconds(self, mapping: Mapping) -> float:
        """Time of a step, its bubble by closed form."""
        f, m = mapping.folding, mapping.num_microbatches(self.job)
        places, sums = self.places(mapping), self.sums(mapping)
        totals = [self._rank(content, sums) for content in places.different]
        busy = m * max(t[0] + t[1] for t in totals)
        if f.pp == 1:
            return busy + self._between_steps(mapping, places, totals, [(0.0, 0.0)])
        n = f.pp * mapping.virtual
        forward, backward, weight = (
            sum(len(ranks) * t[i] for ranks, t in zip(places.ranks, totals, strict=True)) / n for i in range(3)
        )
        later = weight / backward if backward else 0.5
        share = bubble_share(mapping.schedule, f.pp, mapping.virtual, m, later, mapping.extra_warmup)
        ways = self._ways(mapping)
        bubble = share * (forward + backward) * mapping.virtual + 2 * ways[-1]
        idle = []
        for ranks, passes in zip(places.ranks, self._idle(mapping, places, later), strict=True):
            way = ways[ranks[0]]
            back = 0.0 if mapping.splits_backward else way
            idle.append((ranks[0] * forward + way, passes * backward + back))
        return busy + bubble + self._between_steps(mapping, places, totals, idle)

    def _idle(self, mapping: Mapping, places: Places, weight: float) -> tuple[float, ...]:
        """`idle_passes` of those who hold the same, where it is least."""
        m, key = mapping, (*self._pipeline(mapping), tenths(weight))
        if key not in self.idle:
            each = m.num_microbatches(self.job)
            passes = idle_passes(m.schedule, m.folding.pp, m.virtual, each, weight, m.extra_warmup)
            self.idle[key] = tuple(min(passes[rank] for rank in ranks) for ranks in places.ranks)
        return self.idle[key]

    def _between_steps(
        self,
        mapping: Mapping,
        places: Places,
        totals: list[tuple[float, float, float]],
        idle: list[tuple[float, float]],
    ) -> float:
        """Exposed data-parallel traffic, and the optimizer, of whoever is latest. `idle`: seconds of each before its first pass and after its last."""
        replicas, split = ReplicaTraffic(self.job, mapping, self.network), mapping.splits_backward
        late, early = [], []
        for ends, content, (forward, backward, weight), (before, after) in zip(
            self._ends(mapping, places, replicas), places.different, totals, idle, strict=True
        ):
            back = weight if split else backward
            if mapping.sharding == "parameters":
                own, passes = parameters_of_rank(self.job, mapping, content), mapping.num_microbatches(self.job)
                exposed = replicas.exposed(own, forward=forward, backward=back, layers=content.layers, passes=passes)
                return exposed + ends.update
            gather, reduce = replicas.left(
                ends.gather, ends.reduce, forward=forward, backward=back, layers=content.layers
            )
            late.append(reduce - after)
            early.append(ends.update + gather - before)
        return max(late) + max(early) + replicas.vote_s

    def _ends(self, mapping: Mapping, places: Places, replicas: ReplicaTraffic) -> list[StepEnds]:
        """Ends of those who hold something else, once for what they depend on."""
        m = mapping
        key = m.folding, m.sharding, m.shard_over_cp, m.holders, m.slots, self._pipeline(m)
        if key not in self.ends:
            owned = [parameters_of_rank(self.job, mapping, content) for content in places.different]
            self.ends[key] = [StepEnds(*replicas.traffic(own), replicas.optimizer(own, self.oracle)) for own in owned]
        return self.ends[key]

    def work(self, mapping: Mapping) -> float:
        """Seconds of one micro-batch over all stages, or less: layers tile by tile by what no plan can beat."""
        s, sums = self.job.spec, self.sums(mapping, bound=True)
        counts = len(s.moe_layers), s.num_layers + s.mtp_layers - len(s.moe_layers), 1 + s.mtp_layers, 1
        return sum(count * (one.forward + one.backward) for count, one in zip(counts, sums, strict=True))

    @staticmethod
    def _rank(content: StageContent, sums: tuple[LayerSums, ...]) -> tuple[float, float, float]:
        counts = (content.moe_layers, content.dense_layers, content.head_passes, content.embeds)
        f = b = w = 0.0
        for count, one in zip(counts, sums, strict=True):
            if count:
                f, b, w = f + count * one.forward, b + count * one.backward, w + count * one.weight_grad
        return f, b, w

    def _ways(self, mapping: Mapping) -> tuple[float, ...]:
        """Sums of `hop_seconds` up to each pipeline rank, once for what they depend on."""
        f = mapping.folding
        key = f.tp, f.cp, f.pp, mapping.micro_batch
        if key not in self.ways:
            self.ways[key] = (0.0, *accumulate(hop_seconds(self.job, mapping, self.network)[:-1]))
        return self.ways[key]


def _bare(mapping: Mapping) -> Mapping:
    return replace(mapping, overlap=replace(mapping.overlap, ep="none"))


def _has_dense(job: Job) -> bool:
    return job.spec.num_moe_layers < job.spec.num_layers

"""The first pass of a search: the same time and memory as `step_time(exact=False)` and `fullest_bytes`, in tens of microseconds.

Decides nothing of its own. A search asks for a million mappings, of which most share everything but the pipeline: layers are computed once for
what they depend on, the rest is arithmetic on a handful of sums. Must never change: results equal the slow functions' (test).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from phalanx.simulate.block_time import Blocks, Ledger
from phalanx.simulate.collectives import Network
from phalanx.simulate.cost import Oracle
from phalanx.simulate.device_memory import LayerBytes, layer_bytes, parameters_of_rank
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.replicas import Replicas
from phalanx.simulate.stage_layers import StageContent, contents
from phalanx.simulate.step_time import bubble_share
from phalanx.simulate.tile_time import TILE_WAYS

KINDS = ("moe", "dense", "head", "embedding")


class Sums(NamedTuple):
    """Seconds of one layer or end of the model."""

    forward: float
    backward: float
    weight_grad: float


@dataclass
class Quick:
    """Layers that were computed, by what they depend on."""

    job: Job
    cluster: GpuCluster
    precision: str = "bf16"
    halves: dict[Any, Ledger] = field(default_factory=dict)
    layers: dict[Any, tuple[Sums, ...]] = field(default_factory=dict)
    bytes_of_layers: dict[Any, LayerBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = Network(self.cluster.hardware)
        self.oracle = Oracle(self.cluster.hardware, self.precision)

    # ---- layers

    def _half(self, key: Any, blocks: Blocks, kind: str) -> Ledger:
        if key not in self.halves:
            if kind == "attention":
                made = blocks.attention()
            elif kind == "experts":
                made = blocks.experts()
            elif kind == "dense":
                made = blocks.dense(self.job.shape.dense_ffn)
            else:
                made = blocks.head() if kind == "head" else blocks.embedding()
            self.halves[key] = made
        return self.halves[key]

    def sums(self, mapping: Mapping, *, bound: bool = False) -> tuple[Sums, ...]:
        """Seconds of each of `KINDS`; zeros for a kind that the model lacks. `bound`: layers tile by tile by what no plan can beat."""
        f = mapping.folding
        dense = (f.tp, f.cp, mapping.micro_batch, mapping.splits_backward)
        bound = bound and mapping.overlap.ep in TILE_WAYS
        key = (
            *dense,
            f.ep,
            f.etp,
            mapping.overlap.ep,
            mapping.overlap.chunks,
            mapping.overlap.paired,
            mapping.overlap.left_free,
            mapping.slots,
            bound,
            mapping.recompute,
        )
        if key not in self.layers:
            blocks, shape = Blocks(self.job, mapping, self.oracle, self.network, bound=bound), self.job.shape
            attention = self._half(("attention", *dense), blocks, "attention")
            out = []
            for kind in KINDS:
                if kind in ("head", "embedding"):
                    ledger = self._half((kind, *dense), blocks, kind)
                elif (kind == "moe" and not shape.moe_layers) or (kind == "dense" and not _has_dense(self.job)):
                    ledger = Ledger()
                else:
                    name = "experts" if kind == "moe" else "dense"
                    place = (name, *key[:-1], mapping.recompute == "selective") if kind == "moe" else (name, *dense)
                    ledger = blocks.joined(attention, self._half(place, blocks, name))
                out.append(Sums(*ledger.seconds, ledger.weight_grad))
            self.layers[key] = tuple(out)
        return self.layers[key]

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

    def seconds(self, mapping: Mapping) -> float:
        """Time of a step, its bubble by closed form."""
        f, m = mapping.folding, mapping.num_microbatches(self.job)
        held, sums = contents(self.job, mapping), self.sums(mapping)
        totals = [self._rank(content, sums) for content in held]
        out = m * max(t[0] + t[1] for t in totals)
        if f.pp > 1:
            n = f.pp * mapping.virtual
            forward, backward, weight = (sum(t[i] for t in totals) / n for i in range(3))
            later = weight / backward if backward else 0.5
            share = bubble_share(mapping.schedule, f.pp, mapping.virtual, m, later, mapping.extra_warmup)
            out += share * (forward + backward) * mapping.virtual + 2 * (f.pp - 1) * self._p2p(mapping)
        own = parameters_of_rank(self.job, mapping, held[0])
        replicas = Replicas(self.job, mapping, self.network)
        first = totals[0]
        back = first[2] if mapping.splits_backward else first[1]
        out += replicas.exposed(own, forward=first[0], backward=back, layers=held[0].layers, passes=m)
        return out + replicas.optimizer(own, self.oracle)

    def bound(self, mapping: Mapping) -> float:
        """Time that no pipeline of this mapping's folding can beat: all its work, evenly on all ranks, and no bubble."""
        s, sums = self.job.shape, self.sums(mapping, bound=True)
        dense = s.layers - s.moe_layers
        counts = (s.moe_layers + s.mtp * (s.moe_layers > 0), dense + s.mtp * (s.moe_layers == 0), 1 + s.mtp, 1)
        work = sum(count * (one.forward + one.backward) for count, one in zip(counts, sums, strict=True))
        return mapping.num_microbatches(self.job) * work / mapping.folding.pp

    @staticmethod
    def _rank(content: StageContent, sums: tuple[Sums, ...]) -> tuple[float, float, float]:
        counts = (content.moe_layers, content.dense_layers, content.head_passes, content.embeds)
        f = b = w = 0.0
        for count, one in zip(counts, sums, strict=True):
            if count:
                f, b, w = f + count * one.forward, b + count * one.backward, w + count * one.weight_grad
        return f, b, w

    def _p2p(self, mapping: Mapping) -> float:
        f = mapping.folding
        between = f.world // f.pp >= self.cluster.hardware.ranks_per_host
        tokens = mapping.micro_batch * self.job.seq_len / (f.tp * f.cp)
        return self.network.send(tokens * self.job.shape.hidden * mapping.item_bytes, between=between)


def _bare(mapping: Mapping) -> Mapping:
    return replace(mapping, overlap=replace(mapping.overlap, ep="none"))


def _has_dense(job: Job) -> bool:
    return job.shape.moe_layers < job.shape.layers

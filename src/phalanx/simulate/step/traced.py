"""What a step that was traced would take on H100s: counted launches, bytes and FLOPs, each at one rate. `phalanx bench trace` counts; nothing here is measured.

    a phase        what the device needs for it, or what the host needs to launch it where that is more; waits of the host come on top
    rows           less what the run's `dispatch.overlap` hides by the simulator's model of a layer (`block_time.py`), and never more of it than a device has hidden
    gradients      those that left within the backward pass lie beside it, as `replicas.py` counts; parameters are gathered bare
    a pipeline     the passes of each place on its schedule's clock, transfers beside them; the rest of the step is that of the place that is longest busy

Must never change: a rate is the same for every model. Links inside a host have the rate below, those between hosts the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.model import flops_per_token
from phalanx.plan.pipeline.schedule import ScheduleCosts, chain, ends_of_ranks
from phalanx.simulate.hardware import GpuCluster, GroupSpan, Network, Oracle
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step.block_time import Blocks
from phalanx.simulate.step.bubble import schedule_of
from phalanx.simulate.step.replicas import ReplicaTraffic
from phalanx.simulate.step.stage_layers import contents, ranks_of_stages
from phalanx.simulate.step.transfers import hop_of, hop_seconds

MOST_HIDDEN = 0.69
"""Share of rows that travel beside products, at most: of copies that took half as long as their products (benchmarks/gpu/results/h200-2026-11-26-overlap.json: hide.60)."""
FUSED_PRODUCTS = 0.85
"""Rate of products that begin as their rows arrive, over that of grouped ones (there: first.over_grouped_mm)."""
PARTS = ("products", "attention", "elementwise", "exchange", "launches", "waits", "dp", "bubble")
FORWARD, BACKWARD = ("forward", "loss"), ("backward",)


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """An H100 as estimated before one was there: round figures, the same for every model and version of the code. Attention and exchange are those of FlashAttention-2 (arXiv
    2307.08691, forward and backward together) and of NVLink 4; the others what public benchmarks of bf16 products, of elementwise kernels and of launches come near."""

    peak_flops_per_s: float = 989e12
    """Dense bf16, data sheet."""
    product_flops_per_s: float = 550e12
    flash_flops_per_s: float = 300e12
    """FlashAttention-2, of the causal half of the scores."""
    attention_flops_per_s: float = 1.7 * 300e12
    """cuDNN's kernel, which is 1.7 to 2.3 times as fast on this card (measured by others: transformers PR 48163)."""
    memory_bytes_per_s: float = 2.5e12
    """Read and written by elementwise operations."""
    exchange_bytes_per_s: float = 300e9
    """Inside a host."""
    launch_s: float = 4.5e-6
    """Of the host, for an operation."""
    wait_s: float = 0.2e-3
    """For which the device idles when the host waits for it."""


@dataclass(frozen=True, kw_only=True)
class TracedPhase:
    """What a phase of a rank's step asks for, counted."""

    launches: int = 0
    product_flops: int = 0
    fused_flops: int = 0
    """Of products that begin as their rows arrive."""
    attention_flops: int = 0
    """Of the kernel that the card likes best; all scores counted."""
    flash_flops: int = 0
    moved_bytes: int = 0
    waits: int = 0


@dataclass(frozen=True, kw_only=True)
class TracedExchange:
    """What a rank sends over one communicator in a phase."""

    phase: str
    content: str
    """`rows` of experts, `layers` (what else passes exchange), `gradients`, `parameters`, `stages`, or the `rest`."""
    op: str
    ranks: tuple[int, ...]
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """All that one rank's step asks for."""

    phases: Table[str, TracedPhase]
    exchanges: tuple[TracedExchange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TracedTime:
    """Seconds of a step, by what takes them on the place of the pipeline that is longest busy."""

    parts: Table[str, float]
    tokens: int
    """Of the whole replica, that is of `ranks` ranks."""
    ranks: int
    mfu: float
    """Over the peak, the causal half of the scores counted."""
    hidden: float = 0.0
    """Share of the rows' exchanges that computing hides."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Of a rank."""
        return self.tokens / self.ranks / self.seconds


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step of `job` under `mapping`; `places`: what a rank of each place of the pipeline was traced to ask for."""

    job: Job
    mapping: Mapping
    places: tuple[TracedRank, ...]
    cluster: GpuCluster
    rates: DeviceRates = DeviceRates()

    def time(self) -> TracedTime:
        """The step, of equal hosts and with all experts chosen alike."""
        costs, m = self._costs, self.mapping.num_microbatches(self.job)
        held = ranks_of_stages(self.mapping)
        busy = [0.0] * len(self.places)
        for place, forward, backward in zip(held, costs.forward, costs.backward, strict=True):
            busy[place] += m * (forward + backward)
        longest = max(range(len(busy)), key=busy.__getitem__)
        parts = dict.fromkeys(PARTS, 0.0)
        for phase in self.places[longest].phases:
            for part, seconds in self._seconds(longest, phase).items():
                parts[part] += seconds
        parts["dp"] = self._reductions(longest)
        if len(busy) > 1:
            parts["bubble"] = self._makespan(costs, m) - busy[longest]
        folding, tokens = self.mapping.folding, m * self.mapping.micro_batch * self.job.seq_len
        ranks = folding.tp * folding.cp * folding.pp
        flops = flops_per_token(self.job.spec, self.job.seq_len) * tokens / ranks
        mfu = flops / sum(parts.values()) / self.rates.peak_flops_per_s
        return TracedTime(parts=parts, tokens=tokens, ranks=ranks, mfu=mfu, hidden=self.hidden)

    # ---- one rank

    def _seconds(self, place: int, name: str) -> dict[str, float]:
        """Of a phase in the whole step, by part."""
        rank, rates = self.places[place], self.rates
        phase = rank.phases.get(name, TracedPhase())
        products = phase.product_flops + phase.fused_flops / FUSED_PRODUCTS
        device = {
            "products": products / rates.product_flops_per_s,
            "attention": phase.attention_flops / 2 / rates.attention_flops_per_s
            + phase.flash_flops / 2 / rates.flash_flops_per_s,
            "elementwise": phase.moved_bytes / rates.memory_bytes_per_s,
        }
        bare = {"rows": 1 - self.hidden, "layers": 1.0, "rest": 1.0}
        sent = [e for e in rank.exchanges if e.phase == name and e.content in bare]
        return {
            **device,
            "exchange": sum(bare[e.content] * self.exchange_s(e) for e in sent),
            "launches": max(0.0, phase.launches * rates.launch_s - sum(device.values())),
            "waits": phase.waits * rates.wait_s,
        }

    def _pass_s(self, place: int, phases: tuple[str, ...]) -> float:
        """Of one micro-batch on all layers of a place."""
        whole = sum(sum(self._seconds(place, phase).values()) for phase in phases)
        return whole / self.mapping.num_microbatches(self.job)

    def exchange_s(self, sent: TracedExchange) -> float:
        """Seconds of messages, bare."""
        per_host = self.cluster.hardware.ranks_per_host
        size, hosts = len(sent.ranks), len({rank // per_host for rank in sent.ranks})
        if hosts == 1:
            return sent.sent_bytes / self.rates.exchange_bytes_per_s
        network, span = self._network, GroupSpan(-(-size // hosts), hosts)
        whole = sent.sent_bytes * size / (size - 1)
        if sent.op == "send":
            return network.send(sent.sent_bytes, between=True)
        if sent.op == "alltoall_base":
            return network.all_to_all(whole, span)
        return network.all_reduce(whole / 2, span) if sent.op == "allreduce" else network.all_gather(whole, span)

    @cached_property
    def _network(self) -> Network:
        return Network(self.cluster.hardware)

    @cached_property
    def hidden(self) -> float:
        """Share of the rows' exchanges that `dispatch.overlap` hides, by the simulator's layer."""
        if not self.job.spec.num_moe_layers:
            return 0.0
        hardware = self.cluster.hardware
        blocks = Blocks(self.job, self.mapping, Oracle(hardware, self.mapping.precision), self._network)
        layer = blocks.routed(blocks.shared())
        tables = (layer.forward, layer.backward)
        bare = sum(table.get(kind, 0.0) for table in tables for kind in ("a2a_inside", "a2a_between"))
        return min(MOST_HIDDEN, layer.hidden / (layer.hidden + bare)) if layer.hidden else 0.0

    def _reductions(self, place: int) -> float:
        """Gradients and parameters, less what the backward pass that they leave in hides."""
        exchanges = [e for e in self.places[place].exchanges if e.content in ("gradients", "parameters")]
        inside = sum(self.exchange_s(e) for e in exchanges if e.phase in BACKWARD)
        bare = sum(self.exchange_s(e) for e in exchanges if e.phase not in BACKWARD)
        if not inside:
            return bare
        replicas = ReplicaTraffic(self.job, self.mapping, self._network)
        times = self.mapping.num_microbatches(self.job) if self.mapping.sharding == "gradients" else 1
        layers, room = contents(self.job, self.mapping)[place].layers, self._pass_s(place, BACKWARD)
        return bare + sum(replicas.left(0.0, inside / times, forward=0.0, backward=room, layers=layers))

    # ---- all places

    @cached_property
    def _costs(self) -> ScheduleCosts:
        """Passes of each virtual stage, of which a place has equal ones; gradients of weights are half of what its products take backward."""
        m, virtual, network = self.mapping.num_microbatches(self.job), self.mapping.virtual, self._network
        held = ranks_of_stages(self.mapping)
        forward = [self._pass_s(place, FORWARD) / virtual for place in held]
        backward = [self._pass_s(place, BACKWARD) / virtual for place in held]
        weights = [self._seconds(place, "backward")["products"] / 2 / m / virtual for place in held]
        hops = hop_seconds(self.job, self.mapping, network)
        edges = {(a, b): hops[hop_of((held[a], held[b]))] for a, b in chain(len(held)) if held[a] != held[b]}
        return ScheduleCosts(
            forward=tuple(forward),
            backward=tuple(backward),
            input_grad=tuple(b - w for b, w in zip(backward, weights, strict=True)),
            weight_grad=tuple(weights),
            p2p=hops[0],
            edge_p2p=edges,
        )

    def _makespan(self, costs: ScheduleCosts, microbatches: int) -> float:
        one = self.mapping
        schedule = schedule_of(one.schedule, one.folding.pp, one.virtual, microbatches, one.extra_warmup)
        return float(ends_of_ranks(schedule, [costs])[1].max())

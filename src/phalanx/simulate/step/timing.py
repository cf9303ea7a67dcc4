"""How long one optimizer step takes: layers on a pipeline schedule, then gradients and optimizer; with where the time goes and how sure that is.

Decides the clock of a step. Passes of stages come from `block_time.py`, their exact order from `plan/pipeline/schedule/make.py` on the clock of
`plan/pipeline/schedule/clock.py`; the first pass of a search, which has no time for a clock, is `quick.py`. Data-parallel traffic is hidden as far as the last backward and
the first forward have room. Must never change: the parts of the breakdown sum to the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

from phalanx.plan.model import Convention, flops_per_token
from phalanx.plan.pipeline.schedule import Edge, Schedule, ScheduleCosts, Timeline, chain, ends_of_ranks, simulate
from phalanx.simulate.hardware import SIGMA, GpuCluster, Network, Oracle
from phalanx.simulate.mapping import (
    AnyMapping,
    Job,
    Mapping,
    StagedMapping,
    Stragglers,
)
from phalanx.simulate.step.block_time import COMMUNICATION, Blocks, Ledger
from phalanx.simulate.step.bubble import schedule_of
from phalanx.simulate.step.device_memory import StageMemory, memory_of, parameters_of_rank, usable_bytes
from phalanx.simulate.step.replicas import ReplicaTraffic
from phalanx.simulate.step.stage_layers import contents, kinds_of_stages, layers_of_stages, ranks_of_stages
from phalanx.simulate.step.transfers import edge_seconds, hop_of, hop_seconds

Ledgers = dict[tuple[str, int], Ledger]
"""Layers by kind and, where stages have foldings of their own, by pipeline rank."""
Z90 = 1.2816
"""Normal deviate of the 90th percentile."""


@dataclass
class Pass:
    """Ledger of one virtual stage: sums over its layers."""

    forward: dict[str, float]
    backward: dict[str, float]
    weight_grad: float
    hidden: float

    @property
    def seconds(self) -> tuple[float, float]:
        return sum(self.forward.values()), sum(self.backward.values())


def slowed(stage: Pass, factor: float, ep: int) -> Pass:
    """The pass of ranks of which one computes `factor` times as long; communication takes what it took.

    The slow one is the one with the fullest experts in one layer of `ep`; in the others experts end when the later of the two does.
    """
    tables = []
    for table in (stage.forward, stage.backward):
        made = {kind: s * (1.0 if kind in COMMUNICATION else factor) for kind, s in table.items()}
        if table.get("imbalance"):
            even = table.get("experts", 0.0)
            hot = even + table["imbalance"]
            expected = factor * hot / ep + (1 - 1 / ep) * max(factor * even, hot)
            made["imbalance"] = expected - factor * even
        tables.append(made)
    return Pass(tables[0], tables[1], factor * stage.weight_grad, stage.hidden)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Prediction of one step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by kind on the busiest pipeline rank; they sum to `seconds`."""
    hidden_s: float
    """Communication of that rank that runs beside computation."""
    sigma: float
    """Standard deviation of the logarithm of `seconds`."""
    microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Seconds of each virtual stage, backward."""
    passes: tuple[Pass, ...] = field(default=(), repr=False)
    """What the passes of each virtual stage consist of."""
    busy_s: tuple[float, ...] = ()
    """Seconds that each pipeline rank is in its passes."""
    draws: tuple[float, ...] = field(default=(), repr=False)
    """Times of the same step with other draws of slow ranks (`simulate/mapping/slow_ranks.py`), over `seconds`."""
    timeline: Timeline | None = field(default=None, repr=False)
    """Only where all of its micro-batches were put on the schedule's clock."""

    def quantile(self, z: float) -> float:
        """Seconds at so many standard deviations; of draws, the quantile of the mixture of what each says."""
        plain = self.seconds * math.exp(z * self.sigma)
        return plain if not self.draws else self.seconds * _mixture(self.draws, self.sigma, NormalDist().cdf(z))

    @property
    def p10(self) -> float:
        return self.quantile(-Z90)

    @property
    def p90(self) -> float:
        return self.quantile(Z90)


def _mixture(medians: tuple[float, ...], sigma: float, share: float) -> float:
    """Quantile of equally likely lognormal distributions of one sigma, by bisection."""
    normal, logs = NormalDist(sigma=sigma), [math.log(median) for median in medians]
    low, high = min(logs) - 10 * sigma, max(logs) + 10 * sigma
    while high - low > 1e-9:
        middle = (low + high) / 2
        below = sum(normal.cdf(middle - one) for one in logs) / len(logs)
        low, high = (middle, high) if below < share else (low, middle)
    return math.exp(high)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Time, memory and rates of a job under a mapping on a cluster."""

    job: Job
    mapping: AnyMapping
    cluster: GpuCluster
    step: StepTime
    memory: tuple[StageMemory, ...]
    stragglers: Stragglers | None = None
    nominal_s: float | None = None
    """The step where nobody is slow; None where no slow ranks were asked for."""

    @property
    def uniform(self) -> Mapping:
        """The mapping, of a prediction whose stages all have one folding: those of a search."""
        assert isinstance(self.mapping, Mapping)
        return self.mapping

    @property
    def tokens_per_s(self) -> float:
        return self.job.seq_len * self.job.global_batch / self.step.seconds

    @property
    def peak_bytes(self) -> float:
        return max(stage.total for stage in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= usable_bytes(self.cluster.hardware)

    def flops_per_s(self, convention: Convention) -> float:
        """Model FLOPs per second of one rank, by a convention (`causal` or `full`)."""
        per_token = flops_per_token(self.job.spec, self.job.seq_len, attention=convention)
        return per_token * self.tokens_per_s / self.cluster.world

    def mfu(self, convention: Convention) -> float:
        """Share of the bf16 peak, whatever the precision: as publications count."""
        return self.flops_per_s(convention) / self.cluster.hardware.bf16_flops_per_s

    def to_dict(self) -> dict[str, Any]:
        """What `phalanx simulate --json` writes."""
        s = self.step
        slow = (
            {}
            if self.stragglers is None
            else {"stragglers": {**self.stragglers.to_dict(), "nominal_s": self.nominal_s}}
        )
        return {
            "cluster": self.cluster.name,
            "model": self.job.spec.name,
            "mapping": self.mapping.label(),
            "hash": self.mapping.hash,
            "seconds": {"p10": s.p10, "p50": s.seconds, "p90": s.p90, "sigma": s.sigma},
            "mfu": {"causal": self.mfu("causal"), "full": self.mfu("full")},
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_rank": self.tokens_per_s / self.cluster.world,
            "parts": s.parts,
            "hidden_s": s.hidden_s,
            "microbatches": s.microbatches,
            "memory": [stage.to_dict() for stage in self.memory],
            "peak_bytes": self.peak_bytes,
            "usable_bytes": usable_bytes(self.cluster.hardware),
            "fits": self.fits,
            **({} if self.mapping.slots is None else {"replicas": asdict(self.mapping.slots)}),
            **slow,
        }


def predict(job: Job, mapping: AnyMapping, cluster: GpuCluster, *, most_microbatches: int | None = None) -> Prediction:
    """Time and memory of one step, its schedule on a clock. `most_microbatches` limits that to so many for each pipeline rank, the rest is the steady state's.

    Raises `PlanError` where the job cannot run so.
    """
    mapping.check(job)
    return Prediction(
        job=job,
        mapping=mapping,
        cluster=cluster,
        step=step_time(job, mapping, cluster, most_microbatches=most_microbatches),
        memory=memory_of(job, mapping, cluster.hardware),
    )


def predict_many(
    job: Job, mappings: Sequence[Mapping], cluster: GpuCluster, *, most_microbatches: int
) -> list[Prediction]:
    """`predict` of many mappings that were checked, on the clocks of their schedules, without timelines: those of one schedule together."""
    steps = [_Step(job, mapping, cluster) for mapping in mappings]
    times = _together(steps, most_microbatches)
    return [
        Prediction(
            job=job, mapping=mapping, cluster=cluster, step=step, memory=memory_of(job, mapping, cluster.hardware)
        )
        for mapping, step in zip(mappings, times, strict=True)
    ]


def step_time(
    job: Job,
    mapping: AnyMapping,
    cluster: GpuCluster,
    *,
    most_microbatches: int | None = None,
    ledgers: Ledgers | None = None,
    slow: tuple[float, ...] | None = None,
) -> StepTime:
    """The step of a mapping that was checked. `ledgers` are layers that were computed before; `slow` is how much longer each pipeline rank computes."""
    return _Step(job, mapping, cluster, ledgers, slow).result(most_microbatches=most_microbatches)


def slow_steps(
    job: Job,
    mapping: AnyMapping,
    cluster: GpuCluster,
    vectors: Sequence[tuple[float, ...]],
    *,
    most_microbatches: int,
    ledgers: Ledgers,
) -> list[StepTime]:
    """`step_time` of each of many ways in which pipeline ranks compute slower, without timelines."""
    steps = [_Step(job, mapping, cluster, ledgers, slow) for slow in vectors]
    return _together(steps, most_microbatches)


def _together(steps: Sequence[_Step], most: int) -> list[StepTime]:
    """Results of the clock, where those of one schedule are put on it together."""
    groups: dict[Any, list[_Step]] = {}
    for step in steps:
        if step.mapping.folding.pp > 1 and step.staged is None:
            groups.setdefault(step.schedule_key(most), []).append(step)
    ends: dict[int, Ends] = {}
    for group in groups.values():
        first, last = ends_of_ranks(group[0].shortened(most)[0], [step.costs() for step in group])
        ends |= {id(step): Ends(a.tolist(), b.tolist()) for step, a, b in zip(group, first, last, strict=True)}
    return [step.result(most_microbatches=most, ends=ends.get(id(step))) for step in steps]


def pass_costs(job: Job, mapping: AnyMapping, cluster: GpuCluster) -> ScheduleCosts:
    """Passes and transfers of a mapping's stages, as its schedule's clock takes them."""
    return _Step(job, mapping, cluster).costs()


class Ends(NamedTuple):
    """When the first pass of each pipeline rank begins, and its last one ends."""

    first: list[float]
    last: list[float]


class _Step:
    """One evaluation: ledgers by kind of layer, stages, and what follows."""

    def __init__(
        self,
        job: Job,
        mapping: AnyMapping,
        cluster: GpuCluster,
        ledgers: Ledgers | None = None,
        slow: tuple[float, ...] | None = None,
    ) -> None:
        self.job, self.hardware = job, cluster.hardware
        self.staged = mapping if isinstance(mapping, StagedMapping) else None
        self.places = mapping.places
        self.mapping = self.places[0]
        self.network = Network(cluster.hardware)
        self.oracle = Oracle(cluster.hardware, self.mapping.precision)
        self.m = mapping.num_microbatches(job)
        self.ledgers: Ledgers = {} if ledgers is None else ledgers
        self.slow = slow
        self.rank_of_stage = ranks_of_stages(self.mapping)
        self.stages = self._stages()
        if slow is not None:
            self.stages = [
                slowed(s, slow[rank], self.places[rank].folding.ep)
                for s, rank in zip(self.stages, self.rank_of_stage, strict=True)
            ]

    def _ledger(self, kind: str, rank: int) -> Ledger:
        key = kind, 0 if self.staged is None else rank
        if key not in self.ledgers:
            blocks = Blocks(self.job, self.places[rank], self.oracle, self.network)
            if kind in ("head", "embedding"):
                made = blocks.head() if kind == "head" else blocks.embedding()
            else:
                made = blocks.layer(moe=kind == "moe")
            self.ledgers[key] = made
        return self.ledgers[key]

    def _stages(self) -> list[Pass]:
        """One pass of each virtual stage."""
        spec, out = self.job.spec, []
        counts = layers_of_stages(self.job, self.mapping)
        kinds = kinds_of_stages(counts, dense_first=spec.dense_layers, mtp=spec.mtp_layers)
        for index, (dense, moe) in enumerate(kinds):
            heads = 1 + spec.mtp_layers if index == len(kinds) - 1 else 0
            parts = {"dense": dense, "moe": moe, "embedding": int(index == 0), "head": heads}
            out.append(self._sum(parts, self.rank_of_stage[index]))
        return out

    def _sum(self, parts: dict[str, int], rank: int) -> Pass:
        total = Pass({}, {}, 0.0, 0.0)
        for kind, number in parts.items():
            if not number:
                continue
            ledger = self._ledger(kind, rank)
            for table, source in ((total.forward, ledger.forward), (total.backward, ledger.backward)):
                for name, seconds in source.items():
                    table[name] = table.get(name, 0.0) + number * seconds
            total.weight_grad += number * ledger.weight_grad
            total.hidden += number * ledger.hidden
        return total

    # ---- the pipeline

    @cached_property
    def _hops(self) -> tuple[float, ...]:
        """What transfers take from place to place, where all stages are alike."""
        return (0.0,) if self.staged is not None else hop_seconds(self.job, self.mapping, self.network)

    @cached_property
    def _edges(self) -> dict[Edge, float]:
        """What transfers take that are not all alike."""
        if self.staged is not None:
            return edge_seconds(self.job, self.staged, self.network, self.rank_of_stage)
        if len(set(self._hops)) == 1:
            return {}
        places = {edge: (self.rank_of_stage[edge[0]], self.rank_of_stage[edge[1]]) for edge in chain(len(self.stages))}
        return {edge: self._hops[hop_of(both)] for edge, both in places.items() if both[0] != both[1]}

    def costs(self) -> ScheduleCosts:
        seconds = [stage.seconds for stage in self.stages]
        tiny = self.hardware.kernel_s  # a stage that holds nothing still has a pass
        seconds = [(max(f, tiny), max(b, 2 * tiny)) for f, b in seconds]
        weights = [max(tiny, min(s.weight_grad, 0.9 * b)) for s, (_, b) in zip(self.stages, seconds, strict=True)]
        return ScheduleCosts(
            forward=tuple(f for f, _ in seconds),
            backward=tuple(b for _, b in seconds),
            input_grad=tuple(b - w for (_, b), w in zip(seconds, weights, strict=True)),
            weight_grad=tuple(weights),
            p2p=self._hops[0],
            edge_p2p=self._edges,
        )

    def by_rank(self) -> list[list[Pass]]:
        held: list[list[Pass]] = [[] for _ in range(self.mapping.folding.pp)]
        for stage, rank in zip(self.stages, self.rank_of_stage, strict=True):
            held[rank].append(stage)
        return held

    def schedule_key(self, most: int | None) -> tuple[str, int, int, int, tuple[int, ...] | None]:
        """What a schedule of at most `most` micro-batches for each rank is made of."""
        p = self.mapping.folding.pp
        few = self.m if most is None or self.m <= (most + 1) * p else most * p + self.m % p
        return self.mapping.schedule, p, self.mapping.virtual, few, self.mapping.extra_warmup

    def shortened(self, most: int | None) -> tuple[Schedule, int]:
        """That schedule, and of how many micro-batches it is."""
        key = self.schedule_key(most)
        return schedule_of(*key), key[3]

    def _clock(self, costs: ScheduleCosts, most: int | None) -> tuple[Timeline, Ends]:
        """The schedule's timeline, maybe of fewer micro-batches."""
        timeline = simulate(self.shortened(most)[0], costs)
        spans = timeline.spans
        return timeline, Ends([own[0].start for own in spans], [own[-1].end for own in spans])

    def result(self, *, most_microbatches: int | None = None, ends: Ends | None = None) -> StepTime:
        """Past `most_microbatches` a rank, one more costs what the busiest rank has to do. `ends`: of the clock, where it was run before."""
        f, held, costs = self.mapping.folding, self.by_rank(), self.costs()
        busy = [self.m * sum(sum(stage.seconds) for stage in stages) for stages in held]
        rank = max(range(f.pp), key=lambda r: busy[r])
        timeline = None
        if f.pp == 1:
            makespan = busy[0]
            if most_microbatches is None:
                timeline, _ = self._clock(costs, None)
        else:
            if ends is None:
                timeline, ends = self._clock(costs, most_microbatches)
            steady = (self.m - self.schedule_key(most_microbatches)[3]) * busy[rank] / self.m
            makespan = max(ends.last) + steady
        parts: dict[str, float] = {}
        for stage in held[rank]:
            for table in (stage.forward, stage.backward):
                for kind, seconds in table.items():
                    parts[kind] = parts.get(kind, 0.0) + self.m * seconds
        parts["bubble"] = makespan - busy[rank]
        parts["dp"], parts["optimizer"] = self._between_steps(held, ends)
        total = sum(parts.values())
        sigma = math.sqrt(sum((s / total * SIGMA.get(kind, 0.1)) ** 2 for kind, s in parts.items()))
        return StepTime(
            seconds=total,
            parts={k: v for k, v in parts.items() if v},
            hidden_s=self.m * sum(stage.hidden for stage in held[rank]),
            sigma=math.hypot(sigma, 0.03),
            microbatches=self.m,
            forward_s=costs.forward,
            backward_s=costs.backward,
            passes=tuple(self.stages),
            busy_s=tuple(busy),
            timeline=timeline if timeline is not None and timeline.schedule.num_microbatches == self.m else None,
        )

    def _between_steps(self, held: list[list[Pass]], ends: Ends | None) -> tuple[float, float]:
        """Exposed data-parallel traffic, and the optimizer: of whoever is latest by its schedule's clock; of the first rank where there is no pipeline, or parameters are sharded, whose traffic is among the passes."""
        if ends is None or self.mapping.sharding == "parameters":
            own, room, layers = self._own(held, 0)
            replicas = ReplicaTraffic(self.job, self.mapping, self.network)
            exposed = replicas.exposed(own, forward=room[0], backward=room[1], layers=layers, passes=self.m)
            return exposed, replicas.optimizer(own, self.oracle) * max(self.slow or (1.0,))
        late, early = [], []
        for rank, mapping in enumerate(self.places):
            own, room, layers = self._own(held, rank)
            replicas = ReplicaTraffic(self.job, mapping, self.network)
            gather, reduce = replicas.ends(own, forward=room[0], backward=room[1], layers=layers)
            update = replicas.optimizer(own, self.oracle) * max(self.slow or (1.0,))
            late.append(reduce - (max(ends.last) - ends.last[rank]))  # then all ranks know the gradients' norm
            early.append((update + gather - ends.first[rank], max(0.0, gather - ends.first[rank])))
        until_passes, gathering = max(early)
        vote_s = ReplicaTraffic(self.job, self.mapping, self.network).vote_s
        return max(late) + gathering + vote_s, until_passes - gathering

    def _own(self, held: list[list[Pass]], rank: int) -> tuple[tuple[float, float], list[float], int]:
        """(dense, expert) parameters of a pipeline rank, seconds of its passes of one micro-batch, and its layers."""
        mapping = self.places[rank]
        content = contents(self.job, mapping)[rank]
        room = [sum(stage.seconds[way] for stage in held[rank]) for way in (0, 1)]
        if mapping.splits_backward:  # gradients are whole when the weights' own passes end
            room[1] = sum(stage.weight_grad for stage in held[rank])
        return parameters_of_rank(self.job, mapping, content), room, content.layers

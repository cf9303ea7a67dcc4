"""The best mapping of a job on a cluster: every legal choice, pruned by memory, ranked by time, the best run on a clock.

Decides in two passes. The first evaluates every choice with the closed form of its bubble: `quick.py` computes layers once
for all choices that share them. The second puts the best of the first on the exact order of their schedule, for as many
micro-batches as show the steady state. Must never change: the first pass gives what closed forms written for reading give (test).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.units import format_bytes
from phalanx.plan.mapping import Folding
from phalanx.simulate.failures import with_stragglers
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping, Overlap, Precision, Recompute, RouterModel, Stragglers
from phalanx.simulate.search.space import Space, foldings, micro_batches, overlaps, pairs_pass, pipelines
from phalanx.simulate.step import Prediction, QuickPredictor, least_bytes, predict_many, usable_bytes

RERANKED = 60
"""Choices that the second pass looks at."""
CLOCKED = 4
"""Micro-batches for each pipeline rank that its clock runs; more are the steady state's."""


@dataclass(frozen=True)
class Candidate:
    """A choice with its time and the bytes of its fullest rank."""

    seconds: float
    peak_bytes: float
    mapping: Mapping


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found, best first. `best` has the best choice of each folding; `variants` the best choices of any."""

    job: Job
    cluster: GpuCluster
    best: tuple[Prediction, ...]
    variants: tuple[Prediction, ...]
    pareto: tuple[Candidate, ...]
    """What nothing is both faster and smaller than."""
    pareto_until_s: float
    """Up to here the front is that of the whole space; slower choices were skipped unless their folding could have been among the best."""
    sampled: tuple[Candidate, ...]
    """Some of what fits, for pictures."""
    tried: int
    """Choices in the space, those included that a bound ruled out."""
    evaluated: int
    fitting: int
    num_foldings: int

    @property
    def indistinguishable(self) -> int:
        """How many of `best` lie within the model's error of the first: less than one standard deviation of a ratio apart.

        Errors of two mappings of one job on one machine are mostly shared; `RATIO_SIGMA` is what was found between methods.
        """
        first = self.best[0].step.seconds
        return sum(p.step.seconds <= first * (1 + RATIO_SIGMA) for p in self.best)


RATIO_SIGMA = 0.05
"""Spread (root mean square, of the logarithm) of predicted over measured ratios of two mappings of one job: 0.052 over the 18 pairs of published
rows without sharded parameters."""


def search(
    job: Job,
    cluster: GpuCluster,
    *,
    space: Space | None = None,
    precision: Precision = "bf16",
    keep: int = RERANKED,
    base: Mapping | None = None,
    room: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Rank every choice of `space`. `base` holds what all choices share, `room` is the share of the usable memory that they may fill. Raises `PlanError` where nothing is legal, or nothing fits."""
    space = space if space is not None else Space()
    every = list(foldings(job, cluster.world))
    if not every:
        rule = f"has no legal folding over {cluster.world} ranks for a batch of {job.global_batch} x {job.seq_len}"
        hint = "try a batch that is a multiple of the ranks"
        raise_if([Problem(where="search", value=job.spec.name, rule=rule, hint=hint)], PlanError, subject="the search")
    common = base if base is not None else Mapping(folding=every[0])
    run = _Search(job, cluster, space, replace(common, precision=precision), keep)
    run.usable *= room
    bounds = []
    for number, folding in enumerate(every):
        bounds.append((run.bound(folding), number))
        if progress is not None and number % 64 == 0:
            progress(number, 2 * len(every))
    for number, (bound, index) in enumerate(sorted(bounds)):
        run.folding(every[index], bound)
        if progress is not None and number % 64 == 0:
            progress(len(every) + number, 2 * len(every))
    if progress is not None:
        progress(2 * len(every), 2 * len(every))
    return run.result(len(every))


def may_fit(job: Job, cluster: GpuCluster, *, precision: Precision = "bf16", base: Mapping) -> bool:
    """Whether the state alone of some folding leaves room on its ranks. Where none does a search finds nothing, which takes it long to say."""
    hardware, common = cluster.hardware, replace(base, precision=precision)
    every = (replace(common, folding=each) for each in foldings(job, cluster.world))
    return any(least_bytes(job, each, hardware) <= usable_bytes(hardware) for each in every)


class _Search:
    """State of the first pass."""

    def __init__(self, job: Job, cluster: GpuCluster, space: Space, common: Mapping, keep: int) -> None:
        self.job, self.cluster, self.space, self.common, self.keep = job, cluster, space, common, keep
        self.quick = QuickPredictor(job, cluster, common.precision)
        self.usable = usable_bytes(cluster.hardware)
        self.overlaps: dict[tuple[int, int], list[Overlap]] = {}
        self.works: dict[tuple[int, int, int, int, int, Recompute], list[float]] = {}
        self.tried = self.evaluated = self.fitting = 0
        self.top: list[tuple[float, int, Candidate]] = []
        self.of_folding: dict[Folding, Candidate] = {}
        self.times: list[float] = []
        """Best times of the `keep` best foldings so far, negative: a heap whose first is the slowest of them."""
        self.sampled: list[Candidate] = []
        self.pareto: list[Candidate] = []
        self.least: Candidate | None = None

    def _overlaps(self, folding: Folding) -> list[Overlap]:
        key = folding.ep, folding.etp
        if key not in self.overlaps:
            common, hardware = self.common, self.cluster.hardware
            self.overlaps[key] = overlaps(common.overlap, folding, self.space, hardware, precision=common.precision)
        return self.overlaps[key]

    def _works(self, folding: Folding, micro: int, recompute: Recompute) -> list[float]:
        """Seconds of a micro-batch that no pipeline can beat, for each overlap; the same whatever the pipeline."""
        key = folding.tp, folding.cp, folding.ep, folding.etp, micro, recompute
        if key not in self.works:
            one = replace(self.common, folding=folding, micro_batch=micro, recompute=recompute, schedule="1f1b")
            self.works[key] = [self.quick.work(replace(one, overlap=overlap)) for overlap in self._overlaps(folding)]
        return self.works[key]

    def _bounds(self, folding: Folding, micro: int, recompute: Recompute) -> list[float]:
        """Time that no pipeline beats with each overlap: all work evenly on all ranks, and no bubble."""
        each = self.job.global_batch // folding.dp // micro / folding.pp
        return [each * work for work in self._works(folding, micro, recompute)]

    def bound(self, folding: Folding) -> float:
        """Time that no choice of a folding can beat. Recomputation only adds to it."""
        least = self.space.recomputes[0]
        micros = micro_batches(self.job, folding, self.space)
        return min((bound for micro in micros for bound in self._bounds(folding, micro, least)), default=math.inf)

    @property
    def threshold(self) -> float:
        """Slower than this is not among the best."""
        return -self.times[0] if len(self.times) >= self.keep else math.inf

    def folding(self, folding: Folding, bound: float) -> None:
        """Try every choice of one folding that can be among the best."""
        ways = pipelines(self.job.spec.num_layers, folding.pp, self.space)
        sizes = (micro_batches(self.job, folding, self.space), self.space.recomputes, self._overlaps(folding), ways)
        self.tried += math.prod(map(len, sizes))
        if bound > self.threshold:
            return
        for micro in sizes[0]:
            for recompute in self.space.recomputes:
                bounds = self._bounds(folding, micro, recompute)
                which = [o for o, least in zip(sizes[2], bounds, strict=True) if least <= self.threshold]
                self._try(replace(self.common, folding=folding, micro_batch=micro, recompute=recompute), which, ways)
        best = self.of_folding.get(folding)
        if best is not None:
            heapq.heappush(self.times, -best.seconds)
            if len(self.times) > self.keep:
                heapq.heappop(self.times)

    def _try(self, choice: Mapping, which: list[Overlap], ways: Sequence[tuple[str, int]]) -> None:
        """Every pipeline of a choice with each of these overlaps."""
        among = [one for one in (replace(choice, overlap=overlap) for overlap in which) if self.quick.can_pay(one)]
        peaks: dict[tuple[str, int, bool], float] = {}
        for one in among:
            fused = one.overlap.ep == "fused"  # alone of overlaps has buffers of its own
            for way in ways:
                if not pairs_pass(one, way, self.job, self.cluster.hardware):
                    continue
                self.evaluated += 1
                if (*way, fused) not in peaks:
                    peaks[*way, fused] = self._peak(one, way)
                if peaks[*way, fused] <= self.usable:
                    mapping = replace(one, schedule=way[0], virtual=way[1])
                    self._take(Candidate(self.quick.seconds(mapping), peaks[*way, fused], mapping))

    def _peak(self, choice: Mapping, way: tuple[str, int]) -> float:
        """Bytes on the fullest rank of a pipeline."""
        mapping = replace(choice, schedule=way[0], virtual=way[1])
        peak = self.quick.peak_bytes(mapping)
        if self.least is None or peak < self.least.peak_bytes:
            self.least = Candidate(math.inf, peak, mapping)
        return peak

    def _take(self, found: Candidate) -> None:
        self.fitting += 1
        item = (-found.seconds, self.fitting, found)
        if len(self.top) < self.keep:
            heapq.heappush(self.top, item)
        elif item > self.top[0]:
            heapq.heapreplace(self.top, item)
        best = self.of_folding.get(found.mapping.folding)
        if best is None or found.seconds < best.seconds:
            self.of_folding[found.mapping.folding] = found
        if self.fitting % 31 == 1 and len(self.sampled) < 4000:
            self.sampled.append(found)
        self._offer(found)

    def _offer(self, found: Candidate) -> None:
        """Keep what nothing is both faster and smaller than."""
        if any(c.seconds <= found.seconds and c.peak_bytes <= found.peak_bytes for c in self.pareto):
            return
        self.pareto = [c for c in self.pareto if c.seconds < found.seconds or c.peak_bytes < found.peak_bytes]
        self.pareto.append(found)

    def result(self, num_foldings: int) -> SearchResult:
        if not self.of_folding:
            assert self.least is not None
            rule = (
                f"nothing fits on {self.cluster.name}: the smallest of {self.tried} choices needs "
                f"{format_bytes(self.least.peak_bytes)} of {format_bytes(self.usable)} ({self.least.mapping.label()})"
            )
            problem = Problem(where="search", value=self.job.spec.name, rule=rule, hint="take more ranks")
            raise PlanError([problem], subject="the search")
        by_folding = sorted(self.of_folding.values(), key=lambda c: c.seconds)[: self.keep]
        variants = sorted((item[2] for item in self.top), key=lambda c: c.seconds)[: self.keep]
        mappings = list(dict.fromkeys(c.mapping for c in (*by_folding, *variants)))
        exact = predict_many(self.job, mappings, self.cluster, most_microbatches=CLOCKED)
        among = {c.mapping for c in variants}
        ranked = sorted(exact, key=lambda p: p.step.seconds)
        fastest: dict[Folding, Prediction] = {}
        for prediction in ranked:
            fastest.setdefault(prediction.uniform.folding, prediction)
        return SearchResult(
            job=self.job,
            cluster=self.cluster,
            best=tuple(fastest.values()),
            variants=tuple(p for p in ranked if p.mapping in among),
            pareto=tuple(sorted(self.pareto, key=lambda c: c.seconds)),
            pareto_until_s=self.threshold,
            sampled=tuple(self.sampled),
            tried=self.tried,
            evaluated=self.evaluated,
            fitting=self.fitting,
            num_foldings=num_foldings,
        )


def with_slow_ranks(result: SearchResult, stragglers: Stragglers) -> SearchResult:
    """Its best choices ranked anew, with slow ranks on their clocks. The front and what was sampled stay those of a cluster where nobody is slow."""
    slow = {
        p.mapping: with_stragglers(p, stragglers, most=CLOCKED)
        for p in {p.mapping: p for p in (*result.best, *result.variants)}.values()
    }

    def ranked(found: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
        return tuple(sorted((slow[p.mapping] for p in found), key=lambda p: p.step.seconds))

    return replace(result, best=ranked(result.best), variants=ranked(result.variants))


def reasons(result: SearchResult, prediction: Prediction) -> str:
    """Why a mapping stands where it stands, in words: what it spends more or less on than the best."""
    best, mine = result.best[0].step.parts, prediction.step.parts
    if prediction is result.best[0]:
        largest = sorted(mine.items(), key=lambda kv: -kv[1])[:3]
        return "most time: " + ", ".join(f"{kind} {s / prediction.step.seconds:.0%}" for kind, s in largest)
    total = result.best[0].step.seconds
    changes = {kind: (mine.get(kind, 0.0) - best.get(kind, 0.0)) / total for kind in {*mine, *best}}
    largest = sorted(changes.items(), key=lambda kv: -abs(kv[1]))[:3]
    return ", ".join(f"{kind} {change:+.1%}" for kind, change in largest if abs(change) >= 0.002) or "the same"


def base_mapping(routing: RouterModel) -> Mapping:
    """What all choices share, where only the routing is said."""
    return Mapping(folding=Folding(world=1), routing=routing)

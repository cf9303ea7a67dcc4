"""Which layers each virtual pipeline stage holds, and which ranks hold the embedding table.

Decides the division of a model (embedding, blocks, head) into consecutive stages: by cost, or as a person gives it. Must never change:
stages follow one another without gap or overlap, the embedding is on the first stage and the head on the last, and a division depends
on the model, the sequence length and the number of stages alone (every rank makes the same one).

A division by cost has the smallest possible cost of the dearest stage, and among those the smallest sum of squares; what is still
equal is decided for fewer layers on earlier stages, which hold more microbatches at once. Costs are FLOPs per token of
`model.flops_per_token`. They are summed and compared exactly, as whole numbers of a unit that measures all of them, so
that stages which are equally dear are equal on every machine.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.plan.model import ModelSpec, flops_per_token


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Cost of each part of a model in any one unit."""

    embedding: float
    blocks: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        return self.embedding + math.fsum(self.blocks) + self.head


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive layers `first_layer .. first_layer + num_layers`, with the embedding before or the head (and final norm) after."""

    index: int
    rank: int
    first_layer: int
    num_layers: int
    moe_layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    cost: float

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, kw_only=True)
class StagePlan(Hashed):
    """The stages of a model in order. `tied`: the stage of the head uses the embedding's table too."""

    model: str
    num_layers: int
    tied: bool
    stages: tuple[Stage, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """Cost of the dearest stage over the mean."""
        costs = [stage.cost for stage in self.stages]
        total = math.fsum(costs)
        return max(costs) * len(costs) / total if total else 1.0

    @property
    def table_ranks(self) -> tuple[int, ...]:
        """Pipeline ranks that hold the embedding's table: one, or first and last stage's where it is tied.

        With two, its gradient is summed over both. A V-shaped schedule has both stages on rank 0, and nothing to sum.
        """
        holders = [s.rank for s in self.stages if s.has_embedding or (self.tied and s.has_head)]
        return tuple(dict.fromkeys(holders))

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Stages that a pipeline rank holds, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def check(self) -> None:
        """Raise `PlanError` where the stages do not cover the model once and in order."""
        raise_if(stage_problems(self), PlanError, subject=f"stages of {self.model}")

    def explain(self) -> str:
        """A line for each stage: what it holds and its share of the work."""
        total = math.fsum(stage.cost for stage in self.stages) or 1.0
        lines = [
            f"{self.model}: {self.num_layers} layers over {len(self.stages)} stages; the one with most work has {self.imbalance:.3f} x the mean (FLOPs of a token forward and backward)"
        ]
        for stage in self.stages:
            cost = f"{stage.cost / total:.1%} of the work"
            lines.append(f"  stage {stage.index:>2} on rank {stage.rank}  {cost:>17}  {_contents(stage)}")
        if len(self.table_ranks) > 1:
            lines.append(
                "  tied table on ranks " + " and ".join(map(str, self.table_ranks)) + ": its gradient is summed"
            )
        elif self.tied:
            lines.append(f"  tied table on rank {self.table_ranks[0]} alone: nothing to sum")
        return "\n".join(lines)


def _contents(stage: Stage) -> str:
    parts = ["embedding"] if stage.has_embedding else []
    if stage.num_layers:
        layers = (
            f"layers {stage.first_layer}-{stage.layers[-1]}" if stage.num_layers > 1 else f"layer {stage.first_layer}"
        )
        experts = len(stage.moe_layers)
        kind = "" if experts == stage.num_layers else f" ({experts} with experts)" if experts else " (no experts)"
        parts.append(layers + kind)
    return ", ".join([*parts, "head"] if stage.has_head else parts)


# ---- costs ----------------------------------------------------------------------------------------------------------------------


def layer_costs(spec: ModelSpec, *, seq_len: int) -> LayerCosts:
    """FLOPs per token, forward and backward, of each block and the head; looking up an embedding costs none.

    A block costs what the model with it has more than the model without, so that the parts sum to `flops_per_token`.
    """

    def prefix(layers: int) -> float:
        dense = min(spec.dense_layers, layers)
        return flops_per_token(dataclasses.replace(spec, num_layers=layers, dense_layers=dense, mtp_layers=0), seq_len)

    sums = [prefix(layers) for layers in range(spec.num_layers + 1)]
    blocks = tuple(after - before for before, after in pairwise(sums))
    further = flops_per_token(spec, seq_len) - sums[-1]  # multi-token prediction
    return LayerCosts(embedding=0.0, blocks=blocks, head=sums[0] + further)


# ---- division -------------------------------------------------------------------------------------------------------------------


def assign_stages(
    spec: ModelSpec,
    rank_of_stage: Sequence[int],
    *,
    seq_len: int,
    layers: Sequence[int] | None = None,
) -> StagePlan:
    """The stages of `spec`, one for each entry of `rank_of_stage` (from `Schedule.rank_of_stage`).

    `layers` gives the blocks of each stage, else FLOPs decide. Raises `PlanError` naming every problem.
    """
    costs, num_stages = layer_costs(spec, seq_len=seq_len), len(rank_of_stage)
    problems = division_problems(spec.num_layers, num_stages, layers=layers)
    raise_if(problems, PlanError, subject=f"stages of {spec.name}")
    counts = tuple(layers) if layers is not None else balanced_counts(costs, num_stages)
    stages, first = [], 0
    for index, (rank, count) in enumerate(zip(rank_of_stage, counts, strict=True)):
        ends = (index == 0, index == num_stages - 1)
        cost = math.fsum(costs.blocks[first : first + count]) + ends[0] * costs.embedding + ends[1] * costs.head
        moe = tuple(layer for layer in spec.moe_layers if first <= layer < first + count)
        stages.append(
            Stage(
                index=index,
                rank=rank,
                first_layer=first,
                num_layers=count,
                moe_layers=moe,
                has_embedding=ends[0],
                has_head=ends[1],
                cost=cost,
            )
        )
        first += count
    return StagePlan(model=spec.name, num_layers=spec.num_layers, tied=spec.table_at_both_ends, stages=tuple(stages))


def division_problems(num_layers: int, num_stages: int, *, layers: Sequence[int] | None = None) -> list[Problem]:
    """Why a model cannot be divided so: a stage in the middle needs a block; first and last have the embedding or the head."""
    if num_stages < 1:
        return [Problem(where="stages", value=num_stages, rule="must be at least 1", hint="nearest legal: 1")]
    most = num_layers + 2
    if layers is None:
        if num_stages <= most:
            return []
        rule = f"must be at most {most}: each of the {num_layers} layers, the embedding and the head on a stage of their own"
        return [Problem(where="stages", value=num_stages, rule=rule, hint=f"nearest legal: {most}")]
    problems, given = [], list(layers)
    example = _even(num_layers, num_stages)
    hint = f"for example {' '.join(map(str, example))}" if example else ""
    if len(given) != num_stages:
        rule = f"must give the layers of each of the {num_stages} stages"
        problems.append(Problem(where="stages.layers", value=given, rule=rule, hint=hint))
    for index, count in enumerate(given):
        least = 0 if index in (0, len(given) - 1) else 1
        if count < least:
            rule = (
                "must not be negative" if least == 0 else "must be at least 1: a stage in the middle would hold nothing"
            )
            problems.append(
                Problem(where=f"stages.layers[{index}]", value=count, rule=rule, hint=f"nearest legal: {least}")
            )
    if sum(given) != num_layers:
        rule = f"must sum to num_layers = {num_layers}, not to {sum(given)}"
        problems.append(Problem(where="stages.layers", value=given, rule=rule, hint=hint))
    return problems


def _even(num_layers: int, num_stages: int) -> list[int]:
    """Some legal division: as even as possible, the first and last stage smallest. Empty if there is none."""
    if num_stages > num_layers + 2:
        return []
    size, more = divmod(num_layers, num_stages)
    middle_first = [*range(1, num_stages - 1), num_stages - 1, 0][:num_stages] if num_stages > 1 else [0]
    counts = [size] * num_stages
    for index in middle_first[:more]:
        counts[index] += 1
    return counts


@lru_cache(maxsize=256)  # a dry run asks again for every stage
def balanced_counts(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: smallest maximum, then smallest sum of squares, then fewest on early stages. By dynamic programming."""
    parts = _whole_numbers((costs.embedding, *costs.blocks, costs.head))
    ends = list(accumulate(parts[1:-1], initial=0))
    table = _Division(ends, num_stages, first=parts[0], last=parts[-1])
    limits = table.stage_costs()
    found = table.solve(limits[bisect_left(limits, True, key=lambda limit: table.solve(limit) is not None)])
    assert found is not None  # the dearest possible stage holds everything
    return found[1]


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """`costs` in the largest unit that measures all of them: every finite float is a fraction."""
    fractions = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(f.denominator for f in fractions))
    numbers = [int(f * unit) for f in fractions]
    common = math.gcd(*numbers) or 1
    return [n // common for n in numbers]


_Best = dict[int, tuple[int, tuple[int, ...]]]
"""First block -> (sum of squares, blocks of each stage) of the best division of the blocks from there on."""


@dataclass(frozen=True)
class _Division:
    """Cuts blocks with cumulative costs `ends` into stages; `first` and `last` are the costs of embedding and head."""

    ends: Sequence[int]
    num_stages: int
    first: int
    last: int

    def cost(self, stage: int, start: int, stop: int) -> int:
        """Cost of a stage with the blocks start .. stop."""
        out = self.ends[stop] - self.ends[start]
        return out + (stage == 0) * self.first + (stage == self.num_stages - 1) * self.last

    def stage_costs(self) -> list[int]:
        """Every cost that the dearest stage can have, ascending."""
        size = len(self.ends)
        kinds = {0, 1, self.num_stages - 1} if self.num_stages > 2 else {0, self.num_stages - 1}
        return sorted({self.cost(kind, i, j) for kind in kinds for i in range(size) for j in range(i, size)})

    def solve(self, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """The division with the smallest sum of squares of stages that cost at most `limit`; from the last stage to the first."""
        num_layers = len(self.ends) - 1
        best: _Best = {num_layers: (0, ())}
        for stage in reversed(range(self.num_stages)):
            starts = range(num_layers + 1) if stage else range(1)
            options = {start: self._longer(stage, start, best, limit) for start in starts}
            best = {start: option for start, option in options.items() if option is not None}
        return best.get(0)

    def _longer(self, stage: int, start: int, best: _Best, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """The best division from `start` on with one more stage before those of `best`."""
        may_be_empty = stage in (0, self.num_stages - 1)
        found = None
        for stop in range(start + (not may_be_empty), len(self.ends)):
            cost = self.cost(stage, start, stop)
            if cost > limit:
                break
            if stop in best:
                rest = best[stop]
                option = (rest[0] + cost * cost, (stop - start, *rest[1]))
                found = option if found is None else min(found, option)
        return found


# ---- check ----------------------------------------------------------------------------------------------------------------------


def stage_problems(plan: StagePlan) -> list[Problem]:
    """What is wrong with a division that stands: gaps, overlaps, embedding or head in the wrong place."""
    problems = []
    covered = [layer for stage in plan.stages for layer in stage.layers]
    if covered != list(range(plan.num_layers)):
        rule = f"hold the {plan.num_layers} layers once each, in order"
        problems.append(Problem(where="stages", value=covered, rule=rule))
    for stage in plan.stages:
        place = (stage.index == 0, stage.index == len(plan.stages) - 1)
        if (stage.has_embedding, stage.has_head) != place:
            rule = "the embedding is on the first stage, the head on the last"
            problems.append(
                Problem(where=f"stages[{stage.index}]", value=(stage.has_embedding, stage.has_head), rule=rule)
            )
        if not set(stage.moe_layers) <= set(stage.layers):
            rule = "has experts only in layers that it holds"
            problems.append(Problem(where=f"stages[{stage.index}]", value=stage.moe_layers, rule=rule))
    return problems

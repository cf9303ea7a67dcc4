"""Pipeline stages with foldings of their own (`folding.stages`) on a cluster: a mapping for each stage.

Decides what a stage is to the rest of the simulator: the `Mapping` of a pipeline whose stages are all like it, on ranks that begin where the stage's do. So layers, memory and sums of gradients of a
stage are those of a plain pipeline at that place; what crosses between stages is `simulate/step/transfers.py`'s. Must never change: stages that are all alike give the prediction of the plain mapping (test).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.plan.mapping import StagedFolding
from phalanx.simulate.mapping.mapping import Job, Mapping, mapping_problems


@dataclass(frozen=True, kw_only=True)
class StagedMapping(Hashed):
    """`stages[s]` is the mapping of stage s as though all stages were like it; schedule, precision and the like are the same in all."""

    folding: StagedFolding
    stages: tuple[Mapping, ...]
    micro_batch: int
    """Sequences of a pipeline's micro-batch; a stage's mapping has those of one share."""

    @property
    def places(self) -> tuple[Mapping, ...]:
        """The mapping at each place of the pipeline."""
        return self.stages

    def with_extra_warmup(self, extra_warmup: tuple[int, ...]) -> StagedMapping:
        """The same with these forwards ahead of 1F1B."""
        return replace(self, stages=tuple(stage.with_extra_warmup(extra_warmup) for stage in self.stages))

    @property
    def slots(self) -> None:
        """Such stages have no replicas of experts (`plan.mapping.stage_foldings.resolve_mapping`)."""
        return None

    @property
    def extra_warmup(self) -> tuple[int, ...] | None:
        return self.stages[0].extra_warmup

    @property
    def schedule(self) -> str:
        return self.stages[0].schedule

    def num_microbatches(self, job: Job) -> int:
        """Number of micro-batches of each pipeline."""
        return self.stages[0].num_microbatches(job)

    def check(self, job: Job) -> None:
        """Raise `PlanError` with all problems of all stages, each once."""
        found: dict[tuple[Any, ...], Problem] = {}
        for stage in self.stages:
            for problem in mapping_problems(stage, job):
                found.setdefault((problem.where, str(problem.value), problem.rule), problem)
        raise_if(list(found.values()), PlanError, subject="mapping")

    def to_dict(self) -> dict[str, Any]:
        """All choices of all stages."""
        return {"stages": [stage.to_dict() for stage in self.stages]}

    def label(self) -> str:
        """One line for tables."""
        rest = self.stages[0].label().split(" | ")[-1].split(" ", 1)[1]
        return f"{self.folding.label()} | mb{self.micro_batch} {rest}"

    def explain(self) -> str:
        """The mapping in a few lines that a person reads."""
        beside = self.stages[0].explain().split("\n")[1:]
        return "\n".join([self.label(), *(f"  {line}" for line in self.folding.explain().split("\n")), *beside])


AnyMapping = Mapping | StagedMapping
"""The same for all stages, or one for each."""

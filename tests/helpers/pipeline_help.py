"""Pipelines against one rank in fp64: gradients, clipped step, counts and losses of small models with every option in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.core.config import PipelineConfig
from phalanx.models.context import TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.stage_foldings import AnyFolding
from phalanx.plan.model.model import parameters
from phalanx.plan.pipeline.run import Pipeline, make_pipeline
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups, with_second_groups
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import StepParts
from phalanx.verify.compare import RankReport, compare
from phalanx.verify.numbers import microbatch
from phalanx.verify.reference import Reference, context, model_boxes, partition, reference_run, run_step
from phalanx.verify.setups import Setup
from ranks import run_ranks

LIMIT = 1e-12
PIPELINES = (
    PipelineConfig(schedule="gpipe"),
    PipelineConfig(schedule="1f1b"),
    PipelineConfig(schedule="interleaved_1f1b", virtual=1),
    PipelineConfig(schedule="zero_bubble"),
    PipelineConfig(schedule="gpipe", virtual=2),
    PipelineConfig(schedule="interleaved_1f1b", virtual=2),
    PipelineConfig(schedule="zero_bubble", virtual=2),
    PipelineConfig(schedule="zbv"),
    PipelineConfig(schedule="dualpipev"),
    PipelineConfig(schedule="eager_1f1b"),
    PipelineConfig(schedule="eager_1f1b_split", extra_warmup=(1,)),
)
"""Every schedule with every number of virtual stages in {1, 2} that it has."""


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    setup: Setup
    folding: AnyFolding
    config: PipelineConfig
    num_microbatches: int
    """Over all data-parallel ranks."""

    @property
    def pipeline(self) -> Pipeline:
        return make_pipeline(self.config, self.setup.spec, pp=self.folding.pp, seq_len=32)

    @property
    def label(self) -> str:
        return f"{self.config} {self.folding.label()} x{self.num_microbatches} {self.setup.label}"


def build(
    case: PipelineCase,
    rank: int,
    cache: GroupCache,
    *,
    timeout_s: float = 30.0,
    comms: Collectives | None = None,
    host_of_rank: tuple[int, ...] = (),
) -> StepParts:
    """A rank's part of a case. Collective."""
    pipeline = case.pipeline
    groups = build_groups(case.folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    if pipeline.pair_passes:
        groups = with_second_groups(groups, cache=cache)
    comms = comms if comms is not None else Collectives(timeout_s=timeout_s)
    return assemble(
        dataclasses.replace(context(case.setup, groups, comms, dtype=torch.float64), host_of_rank=host_of_rank),
        optim=case.setup.optim,
        num_microbatches=case.num_microbatches // case.folding.replicas,
        pipeline=pipeline,
    )


def batches_of(case: PipelineCase, rank: int) -> list[TokenBatch]:
    each = case.num_microbatches // case.folding.replicas
    first = case.folding.replica_of(rank) * each
    return [part_of(microbatch(case.setup, j), case.folding, rank) for j in range(first, first + each)]


def reference(case: PipelineCase) -> Reference:
    want = reference_run(
        case.setup,
        num_microbatches=case.num_microbatches,
        dtype=torch.float64,
        folding=partition(case.setup, case.folding),
    )
    assert not any(want.patches)
    return want


Alter = Callable[[StepParts], StepParts]


def healthy(parts: StepParts) -> StepParts:
    return parts


def report(rank: int, cache: GroupCache, case: PipelineCase, want: Reference, alter: Alter = healthy) -> RankReport:
    """What this rank finds in one step of the case. Collective."""
    parts = build(case, rank, cache)
    initial = [dataclasses.replace(b, tensor=b.tensor.clone()) for b in model_boxes(parts)]
    result, gradients = run_step(parts, batches_of(case, rank), alter=alter)
    return compare(parts, result, gradients, initial=initial, want=want, case=0)


def _all(rank: int, cache: GroupCache, chosen: Sequence[PipelineCase], wants: Sequence[Reference]) -> list[RankReport]:
    return [report(rank, cache, case, want) for case, want in zip(chosen, wants, strict=True)]


def findings(reports: Sequence[RankReport]) -> list[str]:
    """Whatever is not as on one rank."""
    out = []
    for found in reports:
        out += [f"rank {found.rank}: {text}" for text in found.unequal]
        for kind in ("gradients", "step", "scalars"):
            errors: dict[str, float] = getattr(found, kind)
            out += [f"rank {found.rank}: {name} off by {e:.1e}" for name, e in errors.items() if not e <= LIMIT]
    return out


def verify(world: int, chosen: Sequence[PipelineCase]) -> None:
    """Run the cases on `world` ranks and hold everything against one rank."""
    by_rank = run_ranks(world, _all, chosen, [reference(case) for case in chosen], timeout_s=400)
    for i, case in enumerate(chosen):
        reports = [found[i] for found in by_rank]
        assert findings(reports) == [], case.label
        held = {name for found in reports for name in found.gradients}
        assert held == {f"gradient/{name}" for name in _parameters(case)}, case.label


def _parameters(case: PipelineCase) -> set[str]:
    return {p.name for p in parameters(case.setup.spec)}

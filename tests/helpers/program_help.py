"""Steps of small models on ranks, everything that they send recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from phalanx.core.config import OptimConfig, PipelineConfig
from phalanx.core.events import Collective, Event
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.mapping.stage_foldings import AnyFolding
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.boundary.edges import EdgePlan
from phalanx.plan.pipeline.boundary.stage_edges import Activation, edges_for
from phalanx.plan.pipeline.run import Pipeline, make_pipeline
from phalanx.plan.pipeline.schedule.clock import Edge
from phalanx.plan.program.step import StepOptions, StepProgram, step_program
from phalanx.plan.program.work import Sizes
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Counter, Exchange
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.train.assembly import assemble, bucket_elements
from phalanx.train.step.transaction import StepParts, StepResult, train_step

TINY = dataclasses.replace(PRESETS["tiny"], shared_ffn=16)
SEQUENCES, SEQ_LEN = 2, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A step to take: mapping, model and policy."""

    folding: AnyFolding
    spec: ModelSpec = TINY
    dispatch: DispatchSpec = dataclasses.field(default_factory=DispatchSpec)
    num_microbatches: int = 1
    recompute: Any = "none"
    zero: Any = 1
    cp_method: Any = "ring"
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    bucket_mb: float = 0.0
    dtype: torch.dtype = torch.float32
    hosts: tuple[int, ...] = ()

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(zero=self.zero, bucket_mb=self.bucket_mb)

    @property
    def planned_pipeline(self) -> Pipeline:
        return make_pipeline(self.pipeline, self.spec, pp=self.folding.pp, seq_len=SEQ_LEN)

    def program(self, rank: int, *, sizes: Sizes | None = None) -> StepProgram:
        options = StepOptions(
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            cp_method=self.cp_method,
            zero=self.zero,
            bucket_elements=bucket_elements(self.optim, torch.float32),
            pipeline=self.planned_pipeline,
            edges=self._edges(rank),
            sizes=sizes,
        )
        return step_program(self.folding, self.spec, self.dispatch, rank=rank, options=options)

    def _edges(self, rank: int) -> dict[Edge, EdgePlan] | None:
        what = Activation(SEQUENCES, SEQ_LEN, self.spec.hidden, self.dtype.itemsize)
        plan = self.planned_pipeline.plan(self.num_microbatches)
        return edges_for(self.folding, plan, rank=rank, what=what)


def with_router(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return dataclasses.replace(spec, router=dataclasses.replace(spec.router, **changes))


@dataclasses.dataclass(frozen=True)
class Record:
    """What one rank did: its collectives, where they ended; transfers over pp, where they started."""

    events: tuple[Collective, ...]
    counters: dict[tuple[str, str], Counter]

    @property
    def ops(self) -> list[tuple[str, str, str]]:
        return [(e.op_id, e.op, e.axis) for e in self.events]


class _Recording(Collectives):
    """Remembers also where an exchange over pp starts: it is waited for much later."""

    def __init__(self) -> None:
        self.told: list[Collective | str] = []
        super().__init__(emit=self._hear, trace=True, timeout_s=30)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Collective):
            self.told.append(event)

    def start_exchange(self, *args: Any, op_id: str = "") -> Exchange:
        self.told.append(op_id)
        return super().start_exchange(*args, op_id=op_id)

    def record(self) -> Record:
        boundaries = {e.op_id: e for e in self.told if isinstance(e, Collective) and e.axis == "pp"}
        events = []
        for told in self.told:
            if isinstance(told, str):
                events += [boundaries[told]] if told in boundaries else []
            elif told.axis != "pp":
                events.append(told)
        return Record(tuple(events), self.counters)


def random_batch(seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TINY.vocab, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    positions = torch.arange(SEQ_LEN).expand(SEQUENCES, SEQ_LEN)
    return TokenBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((SEQ_LEN,), (11, SEQ_LEN - 11))
    )


def recorded(rank: int, cache: GroupCache, runs: list[Run]) -> list[Record]:
    """What this rank sent in one step of each run."""
    return [_one(rank, cache, run) for run in runs]


def _one(rank: int, cache: GroupCache, run: Run) -> Record:
    comms = _Recording()
    one_step(rank, cache, run, comms)
    return comms.record()


def one_step(rank: int, cache: GroupCache, run: Run, comms: Collectives, **more: Any) -> tuple[StepResult, StepParts]:
    """The first step of `run`, and what this rank has after it. `more`: of the model's context."""
    pipeline = run.planned_pipeline
    groups = build_groups(run.folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    ctx = ModelContext(
        spec=run.spec,
        dispatch=run.dispatch,
        placement=plain_placement(run.spec.num_experts, run.folding.of_rank(rank)),
        groups=groups,
        comms=comms,
        dtype=run.dtype,
        device=torch.device("cpu"),
        recompute=run.recompute,
        cp_method=run.cp_method,
        host_of_rank=run.hosts,
        **more,
    )
    parts = assemble(ctx, optim=run.optim, num_microbatches=run.num_microbatches, pipeline=pipeline)
    first = run.folding.replica_of(rank) * run.num_microbatches
    batches = [part_of(random_batch(first + j), run.folding, rank) for j in range(run.num_microbatches)]
    return train_step(parts, batches, step=0, lr=1e-3), parts

"""The program of a step: ids, order, and that a real step does exactly this, id by id."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from phalanx.core.config import OptimConfig
from phalanx.core.errors import PlanError
from phalanx.core.events import Collective, Event
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import Folding, legal_foldings
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.plan.placement import plain_placement
from phalanx.plan.program import Op, StepProgram, op_id, step_program
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.groups import GroupCache, build_groups
from phalanx.train.assemble import assemble
from phalanx.train.step import train_step
from ranks import run_ranks

TINY = dataclasses.replace(PRESETS["tiny"], shared_ffn=16)


# ---- by itself ------------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_ids_name_microbatch_layer_phase_and_operation() -> None:
    assert op_id("dispatch.rows", microbatch=3, layer=2, phase="fwd") == "mb3.L2.fwd.dispatch.rows"
    assert op_id("loss", microbatch=0, phase="bwd") == "mb0.bwd.loss"
    assert op_id("vote") == "vote"


@pytest.mark.unit
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_every_program_is_consistent(transport: Any, recompute: Any) -> None:
    for scope in ("micro_batch", "global_batch"):
        spec = with_router(TINY, aux_loss=0.01, aux_scope=scope)
        for folding in legal_foldings(8, TINY, seq_len=32, axes=("ep", "etp")):
            for m in (1, 3):
                for rank in (0, 7):
                    program = step_program(
                        folding,
                        spec,
                        DispatchSpec(transport=transport),
                        rank=rank,
                        num_microbatches=m,
                        recompute=recompute,
                    )
                    program.check()
                    forward = [op for op in program.ops if op.phase == "fwd" and op.kind == "collective"]
                    backward = [op for op in program.ops if op.phase == "bwd" and op.kind == "collective"]
                    mirrored = [op for op in forward if not op.id.endswith(("counts", "pairs", "balance"))]
                    assert len(backward) == len(mirrored)


@pytest.mark.unit
def test_collectives_of_a_moe_layer_are_those_of_the_reference() -> None:
    """Reference, section 6 bar 5: 1 count exchange, rows over ep twice and probs once, over etp only where etp > 1."""
    program = step_program(Folding(world=8, ep=2, etp=2), TINY, DispatchSpec(), rank=0, num_microbatches=1)
    layer = [op for op in program.collectives if op.layer == 0 and op.phase == "fwd"]
    assert [(op.id.split(".fwd.")[1], op.collective, op.axis) for op in layer] == [
        ("dispatch.counts", "all_gather", "ep_etp"),
        ("dispatch.rows", "all_to_all_rows", "ep"),
        ("dispatch.rows_etp", "all_gather_rows", "etp"),
        ("dispatch.weights", "all_to_all_rows", "ep"),
        ("dispatch.weights_etp", "all_gather_rows", "etp"),
        ("combine.rows_etp", "reduce_scatter_rows", "etp"),
        ("combine.rows", "all_to_all_rows", "ep"),
    ]
    assert not [op for op in program.collectives if "attention" in op.id]
    alone = step_program(Folding(world=1), TINY, DispatchSpec(), rank=0, num_microbatches=2)
    assert alone.collectives == ()


@pytest.mark.unit
def test_program_refuses_what_it_cannot_lower_and_finds_its_own_faults() -> None:
    with pytest.raises(PlanError, match=r"folding.cp = 2: is not lowered") as caught:
        step_program(Folding(world=8, tp=2, cp=2, pp=2), TINY, DispatchSpec(), rank=0, num_microbatches=1)
    assert len(caught.value.problems) == 2
    op = Op(id="a", kind="compute", lane="compute", axis="ep")
    with pytest.raises(PlanError) as caught:
        StepProgram(rank=0, ops=(op, op)).check()
    assert len(caught.value.problems) == 3


@pytest.mark.unit
def test_explain_and_hash() -> None:
    folding = Folding(world=4, ep=4)
    a, b = (step_program(folding, TINY, DispatchSpec(), rank=r, num_microbatches=1) for r in (0, 1))
    assert "mb0.L0.fwd.dispatch.rows" in a.explain() and "all_to_all_rows over ep" in a.explain()
    assert a.hash != b.hash
    assert a.hash == step_program(folding, TINY, DispatchSpec(), rank=0, num_microbatches=1).hash
    assert a.by_id["vote"].collective == "all_reduce"


# ---- against a real step --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A step to take: mapping, model and policy."""

    folding: Folding
    spec: ModelSpec = TINY
    dispatch: DispatchSpec = dataclasses.field(default_factory=DispatchSpec)
    num_microbatches: int = 1
    recompute: Any = "none"
    zero: Any = 1


def with_router(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return dataclasses.replace(spec, router=dataclasses.replace(spec.router, **changes))


def random_batch(seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TINY.vocab, (2, 9), generator=generator)
    positions = torch.arange(8).expand(2, 8)
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((8,), (3, 5)))


def recorded(rank: int, cache: GroupCache, runs: list[Run]) -> list[list[tuple[str, str, str]]]:
    """(id, collective, axis) of every collective of one step, for each run."""
    out = []
    for run in runs:
        events: list[Event] = []
        groups = build_groups(run.folding, rank=rank, cache=cache)
        ctx = ModelContext(
            spec=run.spec,
            dispatch=run.dispatch,
            placement=plain_placement(run.spec.num_experts, run.folding),
            groups=groups,
            comms=Collectives(emit=events.append, trace=True),
            dtype=torch.float32,
            device=torch.device("cpu"),
            recompute=run.recompute,
        )
        parts = assemble(ctx, optim=OptimConfig(zero=run.zero), num_microbatches=run.num_microbatches)
        batches = [
            part_of(random_batch(groups.axis("dp").index * 10 + j), run.folding, rank)
            for j in range(run.num_microbatches)
        ]
        train_step(parts, batches, step=0, lr=1e-3)
        out.append([(e.op_id, e.op, e.axis) for e in events if isinstance(e, Collective)])
    return out


RUNS = [
    Run(folding=Folding(world=4, ep=4), num_microbatches=2),
    Run(folding=Folding(world=4, ep=2, etp=2)),
    Run(folding=Folding(world=4, ep=2), recompute="full"),
    Run(folding=Folding(world=4, etp=4), recompute="selective", zero=0),
    Run(folding=Folding(world=4, ep=2, etp=2), dispatch=DispatchSpec(transport="all_gather"), recompute="full"),
    Run(folding=Folding(world=4, ep=4), dispatch=DispatchSpec(policy="drop", pad_to_capacity=True)),
    Run(folding=Folding(world=4, ep=2), dispatch=DispatchSpec(policy="drop", drop_scope="full_sequence")),
    Run(folding=Folding(world=4, ep=2), spec=with_router(TINY, aux_loss=0.01, aux_scope="global_batch")),
    Run(
        folding=Folding(world=4, ep=2),
        spec=with_router(TINY, aux_loss=0.01, aux_scope="global_batch"),
        num_microbatches=2,
        recompute="full",
    ),
    Run(folding=Folding(world=4, tp=2, ep=2), num_microbatches=2, recompute="selective"),
    Run(
        folding=Folding(world=4, tp=4, etp=2),
        spec=dataclasses.replace(TINY, qk_norm="hidden", dense_layers=1, dense_ffn=32),
    ),
    Run(folding=Folding(world=4, tp=2, ep=4), spec=dataclasses.replace(TINY, shared_ffn=32), recompute="full"),
    Run(
        folding=Folding(world=4, tp=2, ep=4),
        spec=dataclasses.replace(TINY, shared_ffn=32, shared_gate=True, dense_layers=1, dense_ffn=32),
        recompute="full",
    ),
    Run(folding=Folding(world=4), spec=dataclasses.replace(TINY, dense_layers=1, dense_ffn=32)),
]


@pytest.mark.ranks
def test_a_real_step_does_what_the_program_says_id_by_id() -> None:
    results = run_ranks(4, recorded, RUNS)
    for i, run in enumerate(RUNS):
        for rank in range(4):
            program = step_program(
                run.folding,
                run.spec,
                run.dispatch,
                rank=rank,
                num_microbatches=run.num_microbatches,
                recompute=run.recompute,
                zero=run.zero,
            )
            program.check()
            planned = [(op.id, op.collective, op.axis) for op in program.collectives]
            assert results[rank][i] == planned, (run, rank)

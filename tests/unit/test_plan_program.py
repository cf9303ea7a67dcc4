"""The program of a step by itself: ids, order, what it refuses. That a run does exactly this: `test_program_runs.py`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from tiers import some

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PlanError
from phalanx.plan.mapping.folding import Folding, legal_foldings, make_folding
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.program.ops import Op, op_id
from phalanx.plan.program.step import StepOptions, StepProgram, step_program

TINY = dataclasses.replace(PRESETS["tiny"], shared_ffn=16)


def with_router(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return dataclasses.replace(spec, router=dataclasses.replace(spec.router, **changes))


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
        for folding in some(list(legal_foldings(8, TINY, seq_len=32, axes=("ep", "etp"))), 4):
            for m in (1, 3):
                for rank in (0, 7):
                    program = step_program(
                        folding,
                        spec,
                        DispatchSpec(transport=transport),
                        rank=rank,
                        options=StepOptions(num_microbatches=m, recompute=recompute),
                    )
                    program.check()
                    forward = [op for op in program.ops if op.phase == "fwd" and op.kind == "collective"]
                    backward = [op for op in program.ops if op.phase == "bwd" and op.kind == "collective"]
                    mirrored = [op for op in forward if not op.id.endswith(("counts", "pairs", "balance"))]
                    assert len(backward) == len(mirrored)


@pytest.mark.unit
def test_collectives_of_a_moe_layer_are_those_of_the_reference() -> None:
    """Reference, section 6 bar 5: 1 count exchange, rows over ep twice and probs once, over etp only where etp > 1."""
    program = step_program(Folding(world=8, ep=2, etp=2), TINY, DispatchSpec(), rank=0)
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
    alone = step_program(Folding(world=1), TINY, DispatchSpec(), rank=0, options=StepOptions(num_microbatches=2))
    assert alone.collectives == ()


@pytest.mark.unit
def test_program_refuses_what_there_is_not_and_finds_its_own_faults() -> None:
    pipeline = make_pipeline(PipelineConfig(), TINY, pp=2, seq_len=32)
    with pytest.raises(PlanError, match="rank = 8: is one of 8; nearest legal: 7") as caught:
        step_program(Folding(world=8), TINY, DispatchSpec(), rank=8, options=StepOptions(pipeline=pipeline))
    assert len(caught.value.problems) == 2 and "folding.pp = 1: is not the 2 ranks" in str(caught.value)
    op = Op(id="a", kind="compute", lane="compute", axis="ep", sends_to=1)
    with pytest.raises(PlanError) as caught:
        StepProgram(rank=0, ops=(op, op)).check()
    assert len(caught.value.problems) == 5


@pytest.mark.unit
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_programs_of_all_ranks_fit_together(method: Any) -> None:
    """Whoever is sent something receives it under the same id; whoever is in a group lists the same collectives over it, in one order."""
    spec = dataclasses.replace(TINY, num_layers=4, tied_embeddings=True, mtp_layers=1)
    for folding, config in itertools.product(
        (make_folding(world=8, cp=2, tp=2, pp=2, ep=4), make_folding(world=8, cp=2, pp=4, etp=2)),
        (PipelineConfig(), PipelineConfig(schedule="zbv"), PipelineConfig(schedule="zero_bubble")),
    ):
        if config.schedule == "zbv" and folding.pp == 4:
            continue  # more stages than layers
        pipeline = make_pipeline(config, spec, pp=folding.pp, seq_len=32)
        options = StepOptions(num_microbatches=3, cp_method=method, recompute="full", pipeline=pipeline)
        programs = [step_program(folding, spec, DispatchSpec(), rank=r, options=options) for r in range(8)]
        for rank, program in enumerate(programs):
            program.check()
            for op in program.collectives:
                group = folding.group_of(rank, op.axis)
                if op.axis == "embedding":
                    group = next(g for g in folding.embedding_groups(pipeline.stages.table_ranks) if rank in g)
                assert len(group) > 1
                if op.sends_to is not None:
                    other = programs[group[op.sends_to]].by_id[op.id]
                    assert other.receives_from == group.index(rank)
                elif op.collective != "exchange":
                    for other_rank in group:
                        assert programs[other_rank].by_id[op.id].collective == op.collective
        for axis in ("tp", "dp_cp", "ep", "etp", "ep_etp", "world", "tp_cp"):
            for ranks in folding.groups(axis):
                orders = [[op.id for op in programs[r].collectives if op.axis == axis] for r in ranks]
                assert all(order == orders[0] for order in orders)


@pytest.mark.unit
def test_hops_of_the_ring_and_boundaries() -> None:
    folding = make_folding(world=6, cp=3, pp=2)
    program = step_program(folding, TINY, DispatchSpec(), rank=1)
    ring = [op.id.replace("mb0.L0.", "") for op in program.collectives if op.layer == 0 and op.axis == "cp"]
    assert ring == [
        *(f"fwd.attention.ring.{i}" for i in (1, 2)),
        *(f"bwd.attention.ring.{i}" for i in (1, 2, 3, "home")),
    ]
    hop = program.by_id["mb0.L0.fwd.attention.ring.1"]
    assert (hop.sends_to, hop.receives_from) == (2, 0)
    out, back = program.by_id["mb0.fwd.boundary0"], program.by_id["mb0.bwd.boundary0"]
    assert (out.sends_to, out.receives_from, back.sends_to, back.receives_from) == (1, None, None, 1)
    assert "exchange over cp, to 2, from 0" in program.explain() and "exchange over pp, to 1" in program.explain()


@pytest.mark.unit
def test_explain_and_hash() -> None:
    folding = Folding(world=4, ep=4)
    a, b = (step_program(folding, TINY, DispatchSpec(), rank=r) for r in (0, 1))
    assert "mb0.L0.fwd.dispatch.rows" in a.explain() and "all_to_all_rows over ep" in a.explain()
    assert a.hash != b.hash
    assert a.hash == step_program(folding, TINY, DispatchSpec(), rank=0).hash
    assert a.by_id["vote"].collective == "all_reduce"

"""The clock of a step's program: reductions of gradients beside passes, and where they start."""

from __future__ import annotations

from typing import Any

import pytest
from program_help import Run

from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.program.ops import Op
from phalanx.plan.program.step import StepProgram
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import ProgramTimeline, run_programs

pytestmark = pytest.mark.unit

SECONDS = {"work": 1.0, "rows": 2.0, "gradient/dense/dp_cp": 10.0, "gradient/expert/edp": 4.0}


def work(number: int) -> Op:
    return Op(id=f"mb{number}.fwd.work", kind="compute", lane="compute")


def collective(id: str, kind: str, axis: str, **how: Any) -> Op:
    return Op(id=id, kind="collective", lane="comm", axis=axis, collective=kind, **how)


def clock(folding: Folding, *ops: Op) -> ProgramTimeline:
    """All ranks do the same."""

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        return Cost(SECONDS[op.id.rsplit(".", 1)[-1]], 0.0, "given")

    return run_programs([StepProgram(rank=r, ops=ops) for r in range(folding.world)], folding, cost)


def ends(timeline: ProgramTimeline, rank: int = 0) -> dict[str, float]:
    return {span.op.id: span.end_s for span in timeline.spans[rank]}


def test_a_reduction_travels_beside_work() -> None:
    reduction = collective("gradient/dense/dp_cp", "reduce_scatter", "dp_cp", posted_after="mb0.fwd.work")
    found = ends(clock(Folding(world=2), work(0), work(1), work(2), reduction))
    assert found["mb2.fwd.work"] == 3.0 and found["gradient/dense/dp_cp"] == 11.0


def test_links_that_a_reduction_and_messages_share_carry_all_bytes() -> None:
    reduction = collective("gradient/dense/dp_cp", "reduce_scatter", "dp_cp", posted_after="mb0.fwd.work")
    rows = collective("mb0.L0.bwd.rows", "all_to_all_rows", "ep")
    found = ends(clock(Folding(world=2, ep=2), work(0), work(1), rows, work(2), reduction))
    assert found["mb0.L0.bwd.rows"] == 6.0  # half of the rate
    assert found["mb2.fwd.work"] == 7.0 and found["gradient/dense/dp_cp"] == 13.0  # 10 s of its own and 2 s of rows
    before = ends(clock(Folding(world=2, ep=2), work(0), rows, work(1), reduction))
    assert (
        before["mb0.L0.bwd.rows"] == 3.0 and before["gradient/dense/dp_cp"] == 13.0
    )  # what is under way first goes first


def test_reductions_of_other_ranks_run_at_once_and_those_of_the_same_after_one_another() -> None:
    expert = collective("gradient/expert/edp", "reduce_scatter", "edp", posted_after="mb0.fwd.work")
    dense = collective("gradient/dense/dp_cp", "reduce_scatter", "dp_cp", posted_after="mb0.fwd.work")
    folding = make_folding(world=4, ep=2)
    timeline = clock(folding, work(0), expert, dense)
    for rank in range(4):
        assert ends(timeline, rank) == {"mb0.fwd.work": 1.0, "gradient/expert/edp": 5.0, "gradient/dense/dp_cp": 15.0}


def test_a_reduction_starts_with_the_last_gradient_of_its_buffer() -> None:
    program = Run(folding=make_folding(world=4, ep=2), num_microbatches=2).program(0)
    first = {op.id.split("/")[1]: op.posted_after for op in program.ops if op.id.startswith("gradient/")}
    assert first["expert"] == "mb1.L0.bwd.experts"
    assert first["dense_replicated"] == "mb1.bwd.embedding"  # the table's gradient comes last
    program.check()

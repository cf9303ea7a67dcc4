"""What a program says that its operations send is what a real step sends, byte for byte; FLOPs are those of the model; its order has no circle."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import replace

import pytest
from pipeline_help import PIPELINES
from program_help import SEQ_LEN, SEQUENCES, TINY, Run, recorded, with_router
from test_program_runs import CONTEXT, FULL, GATED, LATENT, PADDED

from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import flops_per_token
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.program.ops import Op
from phalanx.plan.program.step import StepOptions, StepProgram, step_program
from phalanx.plan.program.work import Sizes
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import OpSpan, ProgramTimeline, run_programs
from ranks import run_ranks

SIZES = Sizes(sequences=SEQUENCES, seq_len=SEQ_LEN, itemsize=4)
BALANCED = with_router(TINY, force="balanced")


def balanced(run: Run) -> Run:
    return dataclasses.replace(run, spec=with_router(run.spec, force="balanced"))


RUNS = [
    Run(folding=Folding(world=4, ep=4), num_microbatches=2),
    Run(folding=Folding(world=4, ep=2, etp=2), recompute="full"),
    Run(folding=Folding(world=4, ep=2, etp=2), dispatch=DispatchSpec(transport="all_gather")),
    Run(folding=Folding(world=4, tp=2, ep=4), spec=GATED, zero=0),
    Run(folding=Folding(world=4, tp=2, ep=2), spec=LATENT),
    Run(folding=Folding(world=4, ep=4), dispatch=DispatchSpec(overlap="coarse:2")),
    Run(
        folding=Folding(world=4, ep=2, etp=2),
        dispatch=DispatchSpec(policy="drop", pad_to_capacity=True, capacity_factor=1.3),
    ),
    Run(folding=make_folding(world=4, tp=2, ep=2), dispatch=FULL),
    Run(folding=make_folding(world=4, cp=2, ep=4), dispatch=PADDED),
    Run(folding=make_folding(world=4, tp=2, cp=2, ep=2), dispatch=PADDED, recompute="full"),
    Run(folding=make_folding(world=4, pp=2, ep=2), num_microbatches=3, pipeline=PIPELINES[1]),
    Run(folding=make_folding(world=4, pp=2, tp=2), num_microbatches=3, pipeline=PIPELINES[3], bucket_mb=0.01),
    *CONTEXT[::7],
]


def programs(run: Run) -> list[StepProgram]:
    return [run.program(rank, sizes=SIZES) for rank in range(run.folding.world)]


@pytest.mark.ranks
def test_bytes_are_those_of_a_real_step() -> None:
    runs = [balanced(run) for run in RUNS]
    results = run_ranks(4, recorded, runs)
    for i, run in enumerate(runs):
        for rank, program in enumerate(programs(run)):
            told: Counter[str] = Counter()
            for event in results[rank][i].events:
                told[event.op_id] += event.sent_bytes
            planned = {op.id: op.sent_bytes for op in program.collectives}
            assert planned == pytest.approx(dict(told)), (run, rank)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("holders", "dense", "expert"),
    [(1, ("all_gather", 3), ("all_gather", 1)), (2, ("all_to_all_rows", 2), None), (4, None, None)],
)
def test_who_keeps_a_shard_is_sent_no_parameters_of_it(
    holders: int, dense: tuple[str, int] | None, expert: tuple[str, int] | None
) -> None:
    """Four shards of what is dense, two of each expert, each kept by so many: what is left is sent to those that lack it, as a run does, and nothing where nobody does."""
    options = StepOptions(sizes=SIZES, shard_holders=holders)
    for rank in range(4):
        ops = {
            op.id: op
            for op in step_program(Folding(world=4, ep=2), TINY, DispatchSpec(), rank=rank, options=options).ops
        }
        whole = {
            op.id: op
            for op in step_program(
                Folding(world=4, ep=2), TINY, DispatchSpec(), rank=rank, options=replace(options, shard_holders=1)
            ).ops
        }
        for key, wanted in (("dense_sharded", dense), ("dense_replicated", dense), ("expert", expert)):
            found = ops.get(f"publish/{key}")
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                shard = whole[found.id].sent_bytes / (1 if key == "expert" else 3)
                assert (found.collective, found.sent_bytes) == (wanted[0], wanted[1] * shard)


@pytest.mark.unit
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_are_those_of_the_model(recompute: str) -> None:
    """Over all ranks, forward and backward; the router and the second half of the scores are counted apart."""
    for folding in (Folding(world=1), Folding(world=4, tp=2, ep=4), make_folding(world=4, pp=2, cp=2, ep=2, etp=1)):
        run = Run(folding=folding, num_microbatches=2, recompute=recompute)
        ops = [op for program in programs(run) for op in program.ops]
        assert all(op.flops == 0 for op in ops if op.kind != "compute")
        found = sum(op.flops for op in ops if op.phase != "re" and not op.id.endswith("router"))
        scores = sum(op.flops for op in ops if "attention.core" in op.id and op.phase == "bwd")
        found -= scores / 2.5 * 0.5  # the backward pass of attention computes scores again
        tokens = 2 * SEQUENCES * SEQ_LEN * folding.dp
        assert found == pytest.approx(tokens * flops_per_token(TINY, SEQ_LEN, attention="causal"), rel=1e-9)


@pytest.mark.unit
@pytest.mark.parametrize(
    "run", [RUNS[i] for i in (0, 3, 4, 5, 6, 11)], ids=["plain", "gated", "latent", "chunks", "capacity", "split"]
)
def test_products_of_an_operation_make_its_flops(run: Run) -> None:
    """Forward once, backward twice, or once in each of two passes where the schedule defers weight gradients."""
    for program in programs(run):
        for op in program.ops:
            work = sum(2.0 * m * n * k for m, n, k, _ in op.products)
            if "attention.core" in op.id:
                assert not work and op.flops
            elif not work:
                assert op.flops == 0
            else:
                times = round(op.flops / work)
                assert op.flops == pytest.approx(times * work) and times in ((1, 2) if op.phase == "bwd" else (1,))


@pytest.mark.unit
def test_without_sizes_a_program_has_no_amounts() -> None:
    assert all(op.flops == op.sent_bytes == op.moved_bytes == 0 for op in RUNS[0].program(0).ops)


# ---- on a clock ------------------------------------------------------------------------------------------------------------------


def clocked(run: Run, compute_s: float, message_s: float) -> ProgramTimeline:
    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        seconds = {"compute": compute_s, "collective": message_s, "host": 0.0}[op.kind]
        return Cost(seconds, 0.1, "given")

    return run_programs(programs(run), run.folding, cost)


def spans(timeline: ProgramTimeline, rank: int = 0) -> dict[str, OpSpan]:
    return {span.op.id: span for span in timeline.spans[rank]}


@pytest.mark.unit
def test_one_rank_does_one_thing_after_another() -> None:
    timeline = clocked(Run(folding=Folding(world=1)), 2.0, 100.0)
    ops = [span for span in timeline.spans[0] if span.op.kind == "compute"]
    assert timeline.seconds == 2.0 * len(ops)
    assert timeline.sigma == pytest.approx(0.1)


@pytest.mark.unit
def test_every_operation_of_every_rank_ends_after_what_it_needs() -> None:
    for run in (*RUNS, Run(folding=Folding(world=4, ep=4), dispatch=DispatchSpec(overlap="fine"), recompute="full")):
        timeline = clocked(run, 3.0, 1.0)
        for rank, program in enumerate(programs(run)):
            found = spans(timeline, rank)
            assert len(found) == len(program.ops)
            for span in found.values():
                assert span.begin_s <= span.ready_s <= span.end_s
                assert all(found[id].end_s <= span.begin_s for id in span.op.needs)
                assert all(found[id].end_s <= span.end_s for id in span.op.streams)
            holding = [span for span in timeline.spans[rank] if not span.op.beside and not span.op.posted_after]
            assert all(a.end_s <= b.end_s for a, b in itertools.pairwise(holding))
        assert timeline.hash == clocked(run, 1.0, 1.0).hash


@pytest.mark.unit
def test_chunks_hide_what_serial_dispatch_waits_for() -> None:
    serial, coarse = (
        Run(folding=Folding(world=4, ep=4), spec=BALANCED, dispatch=DispatchSpec(overlap=way))
        for way in ("serial", "coarse:4")
    )
    found = spans(clocked(coarse, 4.0, 3.0))
    second = found["mb0.L0.fwd.dispatch.chunk1.rows"]
    assert second.begin_s == found["mb0.L0.fwd.dispatch.chunk1.permute"].end_s
    assert second.end_s < found["mb0.L0.fwd.experts.chunk0"].end_s
    backward = found["mb0.L0.bwd.combine.chunk3.rows"]
    assert backward.op.beside and backward.end_s < found["mb0.L0.bwd.combine.chunk0.rows"].begin_s
    plain = spans(clocked(serial, 4.0, 3.0))
    arrives, sorts = (plain[f"mb0.L0.fwd.dispatch.{name}"] for name in ("weights", "sort"))
    assert sorts.begin_s == arrives.end_s == plain["mb0.L0.fwd.dispatch.permute"].end_s + 6.0


@pytest.mark.unit
def test_a_ring_hides_hops_shorter_than_their_steps() -> None:
    run = next(run for run in CONTEXT if run.folding.cp == 4 and run.cp_method == "ring" and run.recompute == "none")
    found = spans(clocked(run, 5.0, 1.0))
    cores = [found[f"mb0.L0.fwd.attention.core.{step}"] for step in (1, 2, 3, 4)]
    assert all(b.begin_s == a.end_s for a, b in itertools.pairwise(cores))
    slow = spans(clocked(run, 1.0, 5.0))
    cores = [slow[f"mb0.L0.fwd.attention.core.{step}"] for step in (1, 2, 3, 4)]
    assert all(b.begin_s == a.begin_s + 5.0 for a, b in itertools.pairwise(cores))


@pytest.mark.unit
def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    """Passes of equal length, free transfers: (m + p - 1) of them on each rank."""
    spec = dataclasses.replace(TINY, num_layers=4)
    run = Run(folding=make_folding(world=4, pp=4), spec=spec, num_microbatches=8, pipeline=PIPELINES[1])
    program = run.program(1, sizes=SIZES)
    forward = [op for op in program.ops if op.microbatch == 0 and op.phase == "fwd" and op.kind == "compute"]
    backward = [op for op in program.ops if op.microbatch == 0 and op.phase == "bwd" and op.kind == "compute"]

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        inside = op.kind == "compute" and op.layer is not None
        count = {"fwd": len(forward), "bwd": len(backward)}.get(op.phase or "", 1)
        return Cost((1.0 if op.phase == "fwd" else 2.0) / count if inside else 0.0, 0.0, "given")

    timeline = run_programs(programs(run), run.folding, cost)
    assert timeline.seconds == pytest.approx((8 + 4 - 1) * 3.0, rel=1e-9)

"""A real step does exactly what its program says, id by id and in that order: every axis, schedule, cp method and kind of recomputation."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from pipeline_help import PIPELINES
from program_help import TINY, Run, recorded, with_router
from tiers import some

from phalanx.core.config import PipelineConfig
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.stage_foldings import parse_stages
from phalanx.plan.model.model import MlaSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from ranks import run_ranks

pytestmark = pytest.mark.ranks
MLA = MlaSpec(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6)
LATENT = dataclasses.replace(TINY, mla=MLA, num_kv_heads=4, head_dim=12)
DENSE_FIRST = dataclasses.replace(TINY, dense_layers=1, dense_ffn=32)
HIDDEN_NORM = dataclasses.replace(DENSE_FIRST, qk_norm="hidden")
GATED = dataclasses.replace(DENSE_FIRST, shared_ffn=32, shared_gate=True)
FURTHER = dataclasses.replace(TINY, mtp_layers=2)
GLOBAL = with_router(TINY, aux_loss=0.01, aux_scope="global_batch")
GATHER = DispatchSpec(transport="all_gather")
FULL = DispatchSpec(policy="drop", drop_scope="full_sequence")
PADDED = dataclasses.replace(FULL, pad_to_capacity=True)
"""Capacity of the whole micro-batch, to each rank that shares it."""

FLAT = [
    Run(folding=Folding(world=4, ep=4), num_microbatches=2),
    Run(folding=Folding(world=4, ep=2, etp=2)),
    Run(folding=Folding(world=4, ep=2), recompute="full"),
    Run(folding=Folding(world=4, etp=4), recompute="selective", zero=0),
    Run(folding=Folding(world=4, ep=2, etp=2), dispatch=GATHER, recompute="full"),
    Run(folding=Folding(world=4, ep=4), dispatch=DispatchSpec(policy="drop", pad_to_capacity=True)),
    Run(folding=Folding(world=4, ep=2), dispatch=DispatchSpec(policy="drop", drop_scope="full_sequence")),
    Run(folding=Folding(world=4, tp=2, ep=2), dispatch=FULL),
    Run(folding=make_folding(world=4, cp=2, ep=2), dispatch=FULL, recompute="full"),
    Run(folding=make_folding(world=4, tp=2, cp=2, ep=2), dispatch=PADDED),
    Run(folding=Folding(world=4, ep=2), spec=GLOBAL),
    Run(folding=Folding(world=4, ep=2), spec=GLOBAL, num_microbatches=2, recompute="full"),
    Run(folding=Folding(world=4, tp=2, ep=2), num_microbatches=2, recompute="selective"),
    Run(folding=Folding(world=4, tp=4, etp=2), spec=HIDDEN_NORM),
    Run(folding=Folding(world=4, tp=2, ep=4), spec=dataclasses.replace(TINY, shared_ffn=32), recompute="full"),
    Run(folding=Folding(world=4, tp=2, ep=4), spec=GATED, recompute="full"),
    Run(folding=Folding(world=4), spec=DENSE_FIRST),
    Run(folding=Folding(world=4, tp=2, ep=2), spec=FURTHER, recompute="full"),
    Run(folding=Folding(world=4, tp=2), spec=FURTHER, num_microbatches=2, bucket_mb=0.01),
    Run(folding=Folding(world=4, tp=2, ep=2), spec=LATENT, recompute="selective"),
]
"""Without cp and pp."""

CONTEXT = [
    Run(folding=make_folding(world=4, **degrees), spec=spec, cp_method=method, recompute=recompute, num_microbatches=m)
    for method, recompute, (degrees, spec, m) in itertools.product(
        ("ring", "all_gather", "ulysses"),
        ("none", "selective", "full"),
        (
            ({"cp": 2, "tp": 2, "ep": 4}, GATED, 1),
            ({"cp": 4, "ep": 2, "etp": 2}, HIDDEN_NORM, 2),
            ({"cp": 2, "ep": 2}, LATENT, 1),
            ({"cp": 2, "tp": 2, "etp": 2}, FURTHER, 1),
        ),
    )
]
"""Every cp method with every kind of recomputation."""


def pipelines(world: int, degrees: tuple[dict[str, int], ...], *, layers: int) -> list[Run]:
    """Each schedule on each mapping; methods, recomputation, models and micro-batches in turn."""
    methods, recompute = (
        itertools.cycle(("ring", "all_gather", "ulysses")),
        itertools.cycle(("none", "full", "selective")),
    )
    specs = itertools.cycle((dataclasses.replace(TINY, tied_embeddings=True), FURTHER, GLOBAL, LATENT, GATED))
    each = itertools.cycle((3, 1, 2, 5))
    return [
        Run(
            folding=make_folding(world=world, **mapping),
            spec=dataclasses.replace(next(specs), num_layers=layers),
            cp_method=next(methods),
            recompute=next(recompute),
            pipeline=config,
            num_microbatches=next(each),
            bucket_mb=0.01,
        )
        for mapping in degrees
        for config in PIPELINES
    ]


FOUR = pipelines(4, ({"pp": 2, "cp": 2, "ep": 2}, {"pp": 2, "tp": 2, "etp": 2}, {"pp": 4}), layers=6)
EIGHT = pipelines(8, ({"pp": 2, "tp": 2, "cp": 2, "ep": 4}, {"pp": 2, "tp": 2, "cp": 2, "ep": 2, "etp": 2}), layers=3)
EIGHT += [
    Run(folding=make_folding(world=8, tp=2, cp=2, ep=2, etp=2), cp_method="ring", spec=HIDDEN_NORM),
    Run(folding=make_folding(world=8, tp=2, cp=4, ep=8), recompute="full", dispatch=GATHER),
    Run(folding=make_folding(world=8, cp=8, ep=4), recompute="selective", spec=GLOBAL, num_microbatches=2),
    Run(folding=make_folding(world=8, pp=2, cp=2, ep=2), spec=GLOBAL, num_microbatches=3, recompute="full"),
    Run(
        folding=make_folding(world=8, pp=4, tp=2, etp=2),
        spec=dataclasses.replace(FURTHER, num_layers=3),
        pipeline=PipelineConfig(schedule="1f1b", layers=(0, 1, 2, 0)),
        num_microbatches=4,
    ),
]


def staged(*texts: str) -> list[Run]:
    """Stages with foldings of their own; schedules, methods and recomputation in turn."""
    recompute, specs = itertools.cycle(("none", "full")), itertools.cycle((GLOBAL, LATENT, GATED))
    return [
        Run(
            folding=parse_stages(text.split("/")),
            spec=dataclasses.replace(next(specs), num_layers=6),
            recompute=next(recompute),
            pipeline=config,
            num_microbatches=3,
            bucket_mb=0.01,
        )
        for text in texts
        for config in PIPELINES[len(text) % 3 :: 3]
    ]


STAGED = staged("tp1/tp2/tp4.ep4/tp1", "dp2.ep2/tp2.dp2.ep4/cp2", "dp2.tp2.ep2.etp2/dp4.ep4")
STAGED += [
    Run(folding=parse_stages(("dp2.tp2.ep2.etp2", "dp4.ep4")), dispatch=FULL),
    Run(folding=parse_stages(("dp2.tp2.ep4", "dp4.ep2")), dispatch=PADDED, recompute="full"),
]


def check(world: int, runs: list[Run]) -> None:
    results = run_ranks(world, recorded, runs)
    for i, run in enumerate(runs):
        for rank in range(world):
            program = run.program(rank)
            program.check()
            planned = [(op.id, op.collective, op.axis) for op in program.collectives]
            assert results[rank][i].ops == planned, (run, rank)


@pytest.mark.core
def test_experts_and_tensor_parallelism() -> None:
    check(4, some(FLAT, 7))


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_context_parallelism(method: str) -> None:
    check(4, some([run for run in CONTEXT if run.cp_method == method], 3))


def test_pipelines_of_four_ranks() -> None:
    check(4, some(FOUR, 6))


@pytest.mark.parametrize("part", range(2))
def test_eight_ranks(part: int) -> None:
    check(8, some(EIGHT[part::2], 2))


def test_stages_with_foldings_of_their_own() -> None:
    check(8, some(STAGED, 4))

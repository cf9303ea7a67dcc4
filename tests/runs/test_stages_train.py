"""Stages with tp 1 / 2 / 4 / 2 on nine ranks: the same bits from every schedule, memory as planned, planted faults, whole runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_help import PipelineCase, batches_of, build, findings, reference, report
from test_pipeline import watch_activations
from tiers import some
from train_help import phalanx, train_args, write_text

from phalanx.core.config import PipelineConfig
from phalanx.observe.page.view import RunView
from phalanx.plan.mapping.stage_foldings import parse_stages
from phalanx.plan.pipeline.boundary.edges import BoundaryMessage, EdgePlan, Route
from phalanx.plan.pipeline.schedule.clock import Edge
from phalanx.plan.reshard.types import Hosts
from phalanx.runtime.comm.groups import GroupCache
from phalanx.train.step import passes
from phalanx.train.step.transaction import StepParts
from phalanx.verify.reference import run_step
from phalanx.verify.setups import Case, staged_cases
from ranks import run_ranks

pytestmark = pytest.mark.ranks

STAGES = parse_stages(["tp1", "tp2", "tp4", "tp2"])
FLAT = ("gpipe", "1f1b", "eager_1f1b", "eager_1f1b_split", "zero_bubble")
"""One stage a place: the same division, so the same sums."""


def as_case(case: Case) -> PipelineCase:
    return PipelineCase(
        setup=case.setup,
        folding=case.folding,
        config=case.pipe,
        num_microbatches=case.setup.accumulation * case.folding.replicas,
    )


ALL = [as_case(case) for case in staged_cases(9)]


def one(schedule: str, *, num_microbatches: int = 6) -> PipelineCase:
    """The same model and data for every schedule."""
    return dataclasses.replace(
        next(case for case in ALL if case.folding == STAGES and case.config.schedule == "eager_1f1b"),
        config=PipelineConfig(schedule=schedule),  # type: ignore[arg-type]
        num_microbatches=num_microbatches,
    )


def _gradients(rank: int, cache: GroupCache, cases: list[PipelineCase]) -> list[dict[str, torch.Tensor]]:
    out = []
    for case in cases:
        _, gradients = run_step(build(case, rank, cache), batches_of(case, rank))
        out.append({f"{b.name} {b.box}": b.tensor.clone() for b in gradients.boxes()})
    return out


def test_every_schedule_gives_the_same_bits() -> None:
    names = some(FLAT, 3)
    for rank, found in enumerate(run_ranks(9, _gradients, [one(name) for name in names])):
        for name, other in zip(names, found, strict=True):
            assert [key for key in found[0] if not torch.equal(found[0][key], other[key])] == [], (rank, name)


HOSTS = (0, 0, 0, 1, 1, 1, 2, 2, 2)
"""Boundaries take other ways between these than on one host."""


def _on_hosts(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[set[tuple[int, ...]], bool]:
    """Hosts that boundaries were planned for in a step of a run which knows them, and whether its gradients have the bits of one that knows nothing."""
    found, planned = set(), passes.staged_edges

    def watched(*args: Any, hosts: Hosts, **more: Any) -> dict[Edge, EdgePlan]:
        found.add(hosts.host_of_rank)
        return planned(*args, hosts=hosts, **more)

    gradients = []
    for host_of_rank in ((), HOSTS):
        found.clear()
        passes.staged_edges = watched  # type: ignore[assignment]
        try:
            # the first step of nine fresh processes took 60 s on two busy cores, without hosts as well
            parts = build(case, rank, cache, timeout_s=240.0, host_of_rank=host_of_rank)
            _, got = run_step(parts, batches_of(case, rank))
        finally:
            passes.staged_edges = planned
        gradients.append([box.tensor.clone() for box in got.boxes()])
    return found, all(map(torch.equal, *gradients))


@pytest.mark.core
def test_training_tells_boundaries_which_ranks_share_a_host() -> None:
    assert run_ranks(9, _on_hosts, one("1f1b", num_microbatches=3), timeout_s=400) == [({HOSTS}, True)] * 9


def _most_alive(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[int, int]:
    parts = build(case, rank, cache)
    watched: Any = watch_activations(parts.model)
    run_step(dataclasses.replace(parts, model=watched), batches_of(case, rank))
    return watched.most, len(set(watched.alive.values()))


@pytest.mark.parametrize("num_microbatches", [3, 10])
def test_eager_stages_hold_as_many_micro_batches_as_the_formula_says(num_microbatches: int) -> None:
    found = run_ranks(9, _most_alive, one("eager_1f1b", num_microbatches=num_microbatches))
    for rank, (most, left) in enumerate(found):
        stage = STAGES.stage_of(rank)
        assert (most, left) == (min(num_microbatches, 2 * (4 - stage) - 1), 0)


# ---- faults ---------------------------------------------------------------------------------------------------------------------


def _swapped(route: Route) -> Route:
    """Two messages of a rank change places; where there is one, its parts do."""
    legs = list(route.receives)
    if len(legs) > 1 and [b.sizes for b in legs[0].parts] == [b.sizes for b in legs[1].parts]:
        legs[0], legs[1] = BoundaryMessage(legs[0].peer, legs[1].parts), BoundaryMessage(legs[1].peer, legs[0].parts)
    return dataclasses.replace(route, receives=tuple(legs))


def _mix_up(direction: str) -> Any:
    """What comes from two ranks of the stage before lands in each other's place."""
    healthy = passes.staged_edges

    def wrong(*args: Any, **more: Any) -> dict[Edge, EdgePlan]:
        out = {}
        for edge, plan in healthy(*args, **more).items():
            routes = {rank: _swapped(route) for rank, route in getattr(plan, direction).items()}
            out[edge] = dataclasses.replace(plan, **{direction: routes})
        return out

    return wrong


def _faulty(rank: int, cache: GroupCache, case: PipelineCase, want: Any, direction: str) -> Any:
    healthy = passes.staged_edges
    passes.staged_edges = _mix_up(direction)  # type: ignore[assignment]
    try:
        return report(rank, cache, case, want, lambda parts: parts)
    finally:
        passes.staged_edges = healthy


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_in_each_others_places_are_found(direction: str) -> None:
    case = one("1f1b", num_microbatches=3)
    reports = run_ranks(9, _faulty, case, reference(case), direction)
    assert any("gradient/" in text for text in findings(reports))


def _plan_differs(rank: int, cache: GroupCache) -> str:
    case = one("eager_1f1b" if rank else "1f1b")
    parts: StepParts = build(case, rank, cache)
    with pytest.raises(Exception, match="different plans") as caught:
        parts.runner.agree(6)
    return str(caught.value)


def test_ranks_of_a_pipeline_with_different_plans_are_told() -> None:
    for told in run_ranks(9, _plan_differs):
        assert all(f"on rank {rank}" in told for rank in range(9))


# ---- whole runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_under_other_stages(tmp_path: Path) -> None:
    """Trains, saves, validates and writes text on stages of their own; the same run on one folding goes on from there and back."""
    write_text(tmp_path / "text", files=4)
    base = {"train__eval_interval": 4, "train__micro_batch": 4, "observe__console": "plain"}
    first = phalanx(
        "train", *train_args(tmp_path, **base, train__steps=4, folding__stages="tp1,dp2.ep2,tp2", launch__ranks=5)
    )
    assert first.returncode == 0, first.stderr
    assert "(tp1/dp2.ep2/tp2)" in first.stdout and "It writes" in first.stdout
    view = RunView(tmp_path / "runs" / "run", id="r1")
    view.index.update()
    held = view.holders()
    assert [(s["first"], s["ranks"], s["degrees"]["tp"]) for s in held["stages"]] == [(0, 1, 1), (1, 2, 1), (3, 2, 2)]
    assert ",".join(s["layers"] for s in held["stages"]).strip(",") == "0,1" and held["size"] == 0
    assert [name for name, _, _ in held["layers"]] == ["layer 0", "layer 1"] and held["experts"] == 8
    then = phalanx("train", *train_args(tmp_path, **base, train__steps=6, folding__ep=2, launch__ranks=2))
    assert then.returncode == 0, then.stderr
    again = phalanx(
        "train", *train_args(tmp_path, **base, train__steps=8, folding__stages="cp2.ep2,tp2", launch__ranks=4)
    )
    assert again.returncode == 0, again.stderr
    status = json.loads((tmp_path / "runs" / "run" / "run_state.json").read_text())
    assert (status["status"], status["step"], status["samples"]) == ("finished", 8, 128)

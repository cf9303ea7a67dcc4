"""What losing a host of a cluster is estimated to cost, beside the run's own plan: at least what that says, and not much more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.stage_foldings import step_groups
from phalanx.plan.model.model import PRESETS
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.state_descriptor import Fact
from phalanx.simulate.failures.recovery_cluster import cluster_constants, work_without_host
from phalanx.simulate.failures.recovery_time import RecoveryWork, num_groups, recovery_time, recovery_work
from phalanx.simulate.hardware.clusters import parse_cluster

pytestmark = pytest.mark.unit
TINY = PRESETS["tiny"]
SPEC = replace(TINY, num_layers=3, router=replace(TINY.router, bias_rate=1e-3))
"""Of two stages the first one has more layers; experts have a bias, which is state too."""
SHAPES: dict[str, tuple[int, int, dict[str, int]]] = {
    "4 hosts of 1": (4, 1, {}),
    "4 hosts of 2": (8, 2, {}),
    "4 hosts of 8": (32, 8, {}),
    "pp 2": (16, 4, {"pp": 2}),
    "pp 2, small hosts": (8, 2, {"pp": 2}),
    "tp 2": (16, 4, {"tp": 2}),
    "tp 4": (32, 4, {"tp": 4}),
    "ep 2": (16, 4, {"ep": 2}),
    "ep 4 becomes 2": (12, 2, {"ep": 4}),
    "all of them": (32, 4, {"tp": 2, "ep": 2, "pp": 2}),
}
"""(ranks, ranks of a host, degrees)."""
BOUNDS = {
    "state_bytes": (0.95, 1.01),
    "held_bytes": (0.95, 1.01),
    "sent_bytes": (0.95, math.inf),
    "received_bytes": (0.95, math.inf),
}
"""Estimated over planned, of the rank that has most; shards are rounded up in a plan."""
MOST = 2.2
"""The same of what a link carries, at most. Of three data-parallel ranks or fewer, whose shards stay mostly where they are, twice as much."""


def planner_of(world: int, per_host: int, degrees: dict[str, int], zero: int) -> RecoveryPlanner:
    """As a run with `resilience.f` = 2 has it."""
    base = make_folding(world=world, **degrees)
    return RecoveryPlanner(
        spec=SPEC, base=base, seq_len=32, floor=2, per_host=per_host, zero=zero, bucket_elements=20_000
    )  # fmt: skip


def both(shape: str, zero: int, *, lost: int) -> tuple[RecoveryWork, RecoveryWork]:
    """(estimated, planned) where host number `lost` dies."""
    world, per_host, degrees = SHAPES[shape]
    planner = planner_of(world, per_host, degrees, zero)
    facts = [Fact(uid=f"h{i // per_host}.{i}.a", machine=f"h{i // per_host}", descriptor=None) for i in range(world)]
    begun = planner.plan(facts)
    there = [
        replace(fact, descriptor=begun.state_descriptor(rank))
        for rank, fact in enumerate(begun.members)
        if fact.machine != f"h{lost}"
    ]
    plan = planner.plan(there)
    assert begun.folding == planner.base and not plan.missing
    going_on = planner.folding(len(there))
    estimated = work_without_host(planner, going_on, members=len(there), per_host=per_host)
    return estimated, recovery_work(planner, plan, lost=per_host, itemsize=4)


def most(work: RecoveryWork, name: str) -> int:
    return max(getattr(rank, name) for rank in work.ranks)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_is_at_least_the_plan_and_little_more(shape: str, zero: int) -> None:
    world, per_host, _ = SHAPES[shape]
    for lost in (0, world // per_host - 1):
        estimated, planned = both(shape, zero, lost=lost)
        for name in ("folding", "members", "lost"):
            assert getattr(estimated, name) == getattr(planned, name), name
        assert estimated.groups == num_groups(planned.folding, members=planned.members, in_order=True)
        assert planned.planned <= estimated.planned <= 1.2 * planned.planned
        for name in ("tensors", "parameter_bytes"):
            assert most(estimated, name) == most(planned, name), name
        more = 2 if planned.folding.dp <= 3 else 1
        for name, (low, high) in BOUNDS.items():
            assert low * most(planned, name) <= most(estimated, name) <= high * (most(planned, name) or 1e-9), name
        link, real = (max(most(work, "sent_bytes"), most(work, "received_bytes")) for work in (estimated, planned))
        assert link <= MOST * more * real
        assert 0.95 * planned.moved_bytes <= estimated.moved_bytes <= 3 * more * planned.moved_bytes
        constants = cluster_constants(parse_cluster("h100x16").hardware)
        same = replace(planned, groups=estimated.groups)
        found, plan = (recovery_time(work, constants, step_s=0.0) for work in (estimated, same))
        for phase, seconds in plan.phases.items():
            assert 0.99 * seconds <= found.phases[phase] <= 1.2 * seconds, phase


def test_nothing_moves_where_the_others_have_what_they_need() -> None:
    estimated, planned = both("ep 2", 0, lost=3)
    assert estimated.moved_bytes == planned.moved_bytes == most(estimated, "sent_bytes") == 0
    moves, plan = both(
        "pp 2", 0, lost=3
    )  # a stage lost four of its eight ranks, and two of the others' take their place
    assert plan.moved_bytes > 0 and moves.moved_bytes == 2 * most(moves, "state_bytes")
    assert sum(rank.received_bytes > 0 for rank in moves.ranks) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp": 2}, {}),
        ({"etp": 2}, {}),
        ({"ep": 2}, {}),
        ({"pp": 2}, {}),
        ({}, {"tp": 2}),
        ({}, {"pp": 2}),
    ],
)
def test_with_other_degrees_every_rank_gets_its_state(before: dict[str, int], after: dict[str, int]) -> None:
    planner = planner_of(16, 4, before, 0)
    work = work_without_host(planner, make_folding(world=12, **after), members=12, per_host=4)
    assert all(rank.received_bytes == rank.state_bytes > 0 for rank in work.ranks) and len(work.ranks) == 12
    alone = work_without_host(planner_of(16, 4, {}, 0), make_folding(world=12), members=12, per_host=4)
    if "pp" in before | after:  # each tensor is on all twelve before or afterwards
        assert work.planned >= alone.planned


def test_experts_with_replicas_move_with_their_state() -> None:
    planner = replace(planner_of(16, 4, {"ep": 2}, 0), slots_per_rank=4)
    work = work_without_host(planner, Folding(world=12, ep=2), members=12, per_host=4)
    assert work.moved_bytes == sum(rank.state_bytes for rank in work.ranks) > 0


def test_groups_of_a_generation_on_gpus_are_connected_side_by_side() -> None:
    """Of both grids, of control, and of a step outside of its passes where these have the same ranks (`runtime.comm.build_groups`); as many for each rank, however many ranks there are."""
    for world in (4, 64):
        folding = make_folding(world=world, ep=2)
        mine = {g for name in folding.group_names for g in folding.groups(name) if 0 in g and 1 < len(g) < world}
        apart = [g for of_name in step_groups(folding).values() for g in of_name if 0 in g]
        assert len(mine) == 2 and apart
        assert num_groups(folding, members=world, in_order=True) == len(mine) + len(apart) + 1
    assert num_groups(make_folding(world=1), members=1, in_order=True) == 0

"""Racks in a run: announced by hosts, carried to the placement of experts and to the holders of shards, so that a rack may die as a whole."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from recovery_plan_help import after, planner
from tiers import some

from phalanx.core.config import LaunchConfig, Recipe, ResilienceConfig
from phalanx.core.rules import recipe_problems
from phalanx.plan.layout.shard_copies import shard_holders
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import LayerPlacements, Placement
from phalanx.plan.placement.rebalancing import Costs, StageNow, hosts_of_placement, placement_of_hosts, plan_replacement
from phalanx.plan.placement.search.front import parted_placement, patched_placement
from phalanx.plan.placement.search.host_pool import HostPool
from phalanx.plan.placement.search.plan import plan_placement
from phalanx.plan.placement.search.replicas import replica_counts
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.state_descriptor import Fact, domains_of, racks_of, read_state_descriptor

pytestmark = pytest.mark.unit


def fact(host: str, slot: int = 0, *, rack: str = "") -> Fact:
    return Fact(uid=f"{host}.{slot}.x", machine=host, descriptor=None, rack=rack)


def test_hosts_without_a_rack_stand_alone() -> None:
    facts = [
        fact("c", rack="r1"),
        fact("a", rack="r2"),
        fact("b"),
        fact("d", rack="r1"),
        fact("d", 1, rack="r1"),
        fact("e"),
    ]
    number, rack_of = domains_of(facts), racks_of(facts)
    by_machine = {f.machine: rack_of[number[f.uid]] for f in facts}
    assert by_machine["c"] == by_machine["d"] and len(set(by_machine.values())) == 4
    assert [f.machine for f in sorted(facts, key=lambda f: f.order)] == ["b", "e", "c", "d", "d", "a"]
    assert racks_of([replace(f, rack="") for f in facts]) == {}
    assert racks_of([fact("a", i, rack="r1") for i in range(3)]) == {}  # one machine: nothing to choose


@pytest.mark.parametrize("seed", range(40))
def test_shards_have_holders_in_as_many_racks_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    racks_of_hosts = [draw.randrange(3) for _ in range(draw.randrange(2, 7))]
    hosts = tuple(h for h in range(len(racks_of_hosts)) for _ in range(draw.choice((1, 2))))
    racks, floor = tuple(racks_of_hosts[h] for h in hosts), draw.randrange(1, 5)
    for owner, members in enumerate(shard_holders(hosts, floor=floor, racks=racks)):
        assert members[0] == owner and len({hosts[m] for m in members}) == len(members) == min(floor, len(set(hosts)))
        assert len({racks[m] for m in members}) == min(floor, len(set(racks)))
    alone = tuple(h + 10 for h in hosts)
    assert shard_holders(hosts, floor=floor, racks=alone) == shard_holders(hosts, floor=floor)


def test_equal_racks_keep_equally_many_copies() -> None:
    hosts, racks = tuple(range(12)), tuple(h // 3 for h in range(12))
    for floor in (2, 3, 4):
        kept = [m for members in shard_holders(hosts, floor=floor, racks=racks) for m in members]
        assert {kept.count(m) for m in hosts} == {floor}


def racked(rack_of_host: Sequence[str], ranks: int = 1) -> list[Fact]:
    return [fact(f"h{i}", slot, rack=rack) for i, rack in enumerate(rack_of_host) for slot in range(ranks)]


def in_racks(plan: GenerationPlan) -> list[set[int]]:
    """Racks of each (layer, expert)."""
    ep = [plan.racks[rank] for rank in range(plan.folding.world)]
    return [
        {rack for rack, held in zip(ep, of.slots[0], strict=True) if expert in held}
        for stage in plan.placement
        for of in stage.layers.values()
        for expert in range(of.num_experts)
    ]


def test_experts_and_shards_survive_a_rack() -> None:
    run = planner(Folding(world=4, ep=4), floor=2, zero=1, slots=6)
    facts = racked(["r0", "r0", "r1", "r1"])
    plan = run.plan(random.Random(1).sample(facts, len(facts)))
    assert plan.racks == (0, 0, 1, 1) and all(len(racks) == 2 for racks in in_racks(plan))
    descriptors = [plan.state_descriptor(rank) for rank in range(4)]
    assert read_state_descriptor(json.loads(json.dumps(descriptors[1].to_dict()))) == descriptors[1]
    for lost in (0, 1):
        assert run.missing([s for s in descriptors if plan.racks[s.rank] != lost]) == ()
    blind = run.plan([replace(f, rack="") for f in facts])
    assert blind.racks == () and blind.hash != plan.hash
    left = [s for s in (blind.state_descriptor(rank) for rank in range(4)) if s.rank >= 2]
    assert run.missing(left)  # what racks are for: without their names one of them takes something along


def test_a_new_host_lets_experts_leave_their_only_rack() -> None:
    run = planner(Folding(world=4, ep=4), floor=2, zero=1, slots=6)
    first = run.plan(racked(["r0", "r0", "r1"]))
    alone = run.plan([replace(f, rack="r0") for f in after(first, lost=["h2.0.x"])])
    assert {len(racks) for racks in in_racks(alone)} == {1}
    members = [replace(f, rack="r0") for f in after(alone)]
    one = run.plan([*members, fact("h3", rack="r1")])
    assert sum(len(racks) == 1 for racks in in_racks(one)) == 2 * (8 - 6)  # of 8 experts in 2 layers it has room for 6
    both = run.plan([*members, fact("h3", rack="r1"), fact("h4", rack="r1")])
    assert {len(racks) for racks in in_racks(both)} == {2} and not both.missing


def test_what_is_mended_goes_to_another_rack() -> None:
    pool = HostPool(slots=(3, 3, 3, 3), racks=(0, 0, 1, 1))
    loads = np.ones((1, 4))
    counts = replica_counts(loads, pool, floor=2)
    placed = plan_placement(counts, pool, loads)
    assert placed.num_in_one_rack(2) == 0 and placed.num_in_one_rack(1) == 0
    slots = (((0, 1, 2), (0, 1, 3), (3, 2, 2), (3, 3, 2)),)
    thin = replace(placed, slots=slots)
    assert thin.num_in_one_rack(2) == 2
    torn = replace(placed, slots=(((0, 1, 2), (1, 1, 3), (3, 2, 2), (3, 3, 2)),), floor=1)  # expert 0 is on one host
    mended = patched_placement(torn, pool, floor=2)
    assert mended is not None and {pool.racks[h] for h in mended.holders(0, 0)} == {0, 1}


def test_a_rack_that_is_too_small_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for many hosts, and every member would make it at each loss, join and renewal: some experts stay in one rack whatever it finds."""
    run = planner(Folding(world=6, ep=6), floor=2, zero=1, slots=3)
    plan = run.plan(racked(["r0"] * 5 + ["r1"]))
    searched: list[object] = []
    monkeypatch.setattr("phalanx.plan.recovery.experts.plan_placement", lambda *args: searched.append(args))
    for facts in (
        after_in_racks(plan, lost=()),
        after_in_racks(plan, lost=["h1.0.x"]),
        [*after_in_racks(plan, lost=()), fact("h6", rack="r1")],
    ):
        found = run.plan(facts)
        assert not found.missing and not searched
        assert sum(len(racks) == 1 for racks in in_racks(found)) >= 2 * (8 - 6)  # r1 has 6 slots at most
    same = run.plan(after_in_racks(plan, lost=()))
    held = [[sorted(of.slots[0]) for s in p.placement for of in s.layers.values()] for p in (plan, same)]
    assert held[0] == held[1]  # nothing travels for a rack whose loss is fatal all the same


def after_in_racks(plan: GenerationPlan, *, lost: Sequence[str]) -> list[Fact]:
    """As `after`, of hosts that say their rack: the last of six stands alone."""
    return [replace(f, rack="r1" if f.machine >= "h5" else "r0") for f in after(plan, lost=lost)]


@pytest.mark.parametrize("seed", some(range(20), 7))
def test_parting_leaves_fewer_in_one_rack_and_nothing_else_worse(seed: int) -> None:
    draw = np.random.default_rng(seed)
    num_hosts, num_experts, floor = int(draw.integers(3, 8)), int(draw.integers(4, 12)), 2
    width = -(-num_experts * floor // num_hosts) + int(draw.integers(0, 3))
    pool = HostPool(slots=(width,) * num_hosts, racks=tuple(draw.integers(0, 3, num_hosts).tolist()))
    loads = draw.random((2, num_experts))
    blind = replace(pool, racks=())
    made = replace(plan_placement(replica_counts(loads, blind, floor=floor), blind, loads), pool=pool)
    parted = parted_placement(made, floor=floor)
    parted.check()
    assert parted.pool == pool and parted.floor == made.floor
    before, then = made.num_in_one_rack(floor), parted.num_in_one_rack(floor)
    assert then <= before
    moved = int(np.maximum(parted.copies - made.copies, 0).sum())
    assert moved <= 2 * (before - then)


def test_replacement_mends_what_one_rack_holds() -> None:
    of_ep = Placement(
        num_experts=4, slots=(((0, 1, 2), (0, 1, 3), (3, 2, 2), (3, 3, 2)),), hosts=(0, 1, 2, 3), racks=(0, 0, 1, 1)
    )
    placed = LayerPlacements(layers={0: of_ep})
    layers, on_hosts = hosts_of_placement(placed)
    assert on_hosts.pool.racks == (0, 0, 1, 1)
    costs = Costs(row_s=1e-6, expert_bytes=1000, bytes_per_s=1e9, rebuild_s=1.0)
    now = StageNow(layers=layers, placement=on_hosts, loads=np.ones((1, 4)), slots_per_rank=3)
    made = plan_replacement([now], costs, floor=2, interval=10)
    assert made.action == "mend" and made.migrations[0].new.num_in_one_rack(2) == 0
    after_it = placement_of_hosts(layers, made.migrations[0].new, placed)
    assert after_it.layers[0].racks == (0, 0, 1, 1)
    again = StageNow(layers=layers, placement=made.migrations[0].new, loads=np.ones((1, 4)), slots_per_rank=3)
    assert plan_replacement([again], costs, floor=2, interval=10).action == "keep"
    blind = replace(on_hosts, pool=replace(on_hosts.pool, racks=()))
    assert plan_replacement([replace(now, placement=blind)], costs, floor=2, interval=10).action == "keep"


def problems(rack: str, **resilience: object) -> set[str]:
    recipe = Recipe(
        resilience=ResilienceConfig(heal=True, mode="exact", **resilience),  # type: ignore[arg-type]
        launch=LaunchConfig(threads=1, ranks=2, rack=rack),
    )
    return {p.where for p in recipe_problems(recipe) if "launch" in p.where}


def test_names_of_racks_are_checked() -> None:
    several = {"service": "n:1", "wanted": 4}
    assert problems("s0.leaf-3_b", **several) == set()
    assert problems("rack 7", **several) == {"launch.rack"} == problems("", **several)
    assert problems("r7") == {"launch.rack"}  # no other host takes part

"""Shards with several holders: who keeps what, on any folding and any hosts, and boxes cut along one another's edges."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from recovery_plan_help import after, fresh, new_member
from reshard_plan_help import shard_layouts
from tiers import times

from phalanx.core.config import ModelConfig, PipelineConfig, RouterConfig
from phalanx.plan.layout.box_cells import cells, is_covered
from phalanx.plan.layout.parameters import Box, flat_layouts, stage_params
from phalanx.plan.layout.shard_copies import GATHER_SHARE, copies_of, keepers_of, publication, shard_holders, sums_whole
from phalanx.plan.layout.state import StateLayouts
from phalanx.plan.mapping.folding import GRADIENT_RULES, Folding, legal_foldings
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import PRESETS, parameters, resolve_model
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import equal_hosts

pytestmark = pytest.mark.unit
SPEC = PRESETS["tiny"]
FOLDINGS = [f for n in (3, 4, 6, 8) for f in legal_foldings(n, SPEC, seq_len=64)]


# ---- who keeps a shard -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 4))
@settings(max_examples=times(300, 100), deadline=None)
def test_as_many_hosts_as_there_are_keep_a_shard_the_owner_first(hosts: list[int], floor: int) -> None:
    for owner, members in enumerate(shard_holders(tuple(hosts), floor=floor)):
        assert members[0] == owner
        assert len({hosts[m] for m in members}) == len(members) == min(floor, len(set(hosts)))


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0))
@settings(max_examples=60, deadline=None)
def test_hosts_of_one_size_share_the_copies_evenly(num_hosts: int, per_host: int, floor: int, seed: int) -> None:
    """The next rank on another host would be the same one for a whole host. Losses and joins leave ranks of hosts in any order."""
    hosts = [r // per_host for r in range(num_hosts * per_host)]
    for order in (hosts, random.Random(seed).sample(hosts, len(hosts))):
        kept = Counter(m for members in shard_holders(tuple(order), floor=floor) for m in members)
        assert set(kept.values()) == {min(floor, num_hosts)}
    assert {len(members) for members in copies_of(shard_holders((0, 1, 1, 0), floor=2))} == {1}


def test_the_copies_of_each_member_are_worked_out_once_for_its_group() -> None:
    """Each of thousands of ranks looked through all shards of its group."""
    hosts = [member // 4 for member in range(24)]
    copies_of.cache_clear()
    for _ in hosts:
        keepers = keepers_of(range(24), holders=3, hosts=hosts)
        found = copies_of(keepers)
    assert copies_of.cache_info().misses == 1
    for me, shards in enumerate(found):
        assert shards == tuple(i for i, members in enumerate(keepers) if i != me and me in members)
    assert copies_of(()) == ()


def test_ranks_that_are_hosts_make_a_ring() -> None:
    assert shard_holders((0, 1, 2, 3), floor=3) == ((0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1))


# ---- how keepers come by gradients, and others by parameters ----------------------------------------------------------


@given(st.integers(2, 9), st.integers(1, 9), st.booleans())
@settings(max_examples=times(200, 66), deadline=None)
def test_sums_take_the_way_of_fewer_bytes(ranks: int, holders: int, scatters: bool) -> None:
    keepers = keepers_of(range(ranks), holders=holders, hosts=None)
    copies = min(holders, ranks) - 1
    reduce_scatter = ranks - 1 if scatters else 2 * (ranks - 1)
    whole = sums_whole(keepers, scatters=scatters)
    assert whole == (bool(keepers) and 2 * (ranks - 1) <= reduce_scatter + copies)
    if not scatters:
        assert whole == (holders > 1)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=10), st.integers(2, 5))
@settings(max_examples=times(200, 66), deadline=None)
def test_every_member_gets_each_shard_that_it_does_not_keep_once(hosts: list[int], floor: int) -> None:
    members = range(len(hosts))
    keepers = keepers_of(members, holders=floor, hosts=hosts)
    parcels = [publication(keepers, member) for member in members]
    assert len({p is None for p in parcels}) == 1
    sent = {(i, to) for i, p in enumerate(parcels) if p is not None for to in p.sends}
    come = {(i, me) for me, p in enumerate(parcels) if p is not None for i in p.receives}
    lacking = {(i, m) for i, kept in enumerate(keepers) for m in members if m not in kept}
    assert sent == come == (set() if parcels[0] is None else lacking)
    most = max(sum(i == owner for i, _ in lacking) for owner in members)
    assert (parcels[0] is None) == (most > GATHER_SHARE * (len(hosts) - 1))


def test_where_all_keep_all_nothing_is_published() -> None:
    keepers = keepers_of((0, 2), holders=2, hosts=None)
    assert publication(keepers, 0) == publication(keepers, 1) is not None and not publication(keepers, 0).sends  # type: ignore[union-attr]
    assert publication((), 0) is None


# ---- which boxes ranks keep ------------------------------------------------------------------------------------------


def stages_of(folding: Folding):  # type: ignore[no-untyped-def]
    return make_pipeline(PipelineConfig(), SPEC, pp=folding.pp, seq_len=64).stages


@given(st.sampled_from(FOLDINGS), st.integers(1, 4), st.integers(0, 5000), st.data())
@settings(max_examples=40, deadline=None)
def test_every_element_has_its_holders_on_distinct_hosts(
    folding: Folding, floor: int, bucket: int, data: st.DataObject
) -> None:
    """In each of the groups that hold an element: min(f, hosts of the group) ranks, no two on one host; the owner counts it alone."""
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=folding.world, max_size=folding.world) | st.none())
    state = StateLayouts(spec=SPEC, folding=folding, stages=stages_of(folding))
    one = shard_layouts(state, zero=1, bucket_elements=bucket)
    many = shard_layouts(state, zero=1, bucket_elements=bucket, holders=floor, hosts=hosts)
    for param in parameters(SPEC):
        shard_over = GRADIENT_RULES[param.family].shard_over
        for group in folding.groups(shard_over):
            places = [r if hosts is None else hosts[r] for r in group]
            wanted, whose = min(floor, len(set(places))), dict(zip(group, places, strict=True))
            owners, held = np.zeros(param.shape, dtype=int), np.zeros(param.shape, dtype=int)
            by_host = {host: np.zeros(param.shape, dtype=int) for host in places}
            for rank in group:
                for box in (h.box for h in one[param.name].of_rank(rank)):
                    owners[box.slices()] += 1
                for box in (h.box for h in many[param.name].of_rank(rank)):
                    held[box.slices()] += 1
                    by_host[whose[rank]][box.slices()] += 1
            assert owners.max(initial=0) <= 1
            assert (held == wanted * owners).all(), param.name
            assert max(count.max(initial=0) for count in by_host.values()) <= 1, param.name


@pytest.mark.parametrize("folding", FOLDINGS[::4], ids=lambda f: f"{f.world}:{f.label()}")
def test_one_holder_is_what_was_there_before_and_copies_come_after_it(folding: Folding) -> None:
    stages = stages_of(folding)
    for rank in range(folding.world):
        given_params = stage_params(SPEC, stages.of_rank(folding.coord(rank, "pp")))
        placement = plain_placement(SPEC.num_experts, folding)
        one = flat_layouts(given_params, folding, placement, rank)
        assert flat_layouts(given_params, folding, placement, rank, holders=1) == one
        for name, two in flat_layouts(given_params, folding, placement, rank, holders=2).items():
            alone = one[name]
            assert (two.length, two.shard_range()) == (alone.length, alone.shard_range())
            assert (alone.copies, alone.kept_length) == ((), alone.shard_length)
            assert two.kept_runs[0] == alone.kept_runs[0]
            assert two.kept_length == min(2, two.num_shards) * alone.shard_length
            mine = two.kept_pieces(0, two.shard_length)
            assert mine == alone.kept_pieces(0, alone.shard_length)


# ---- an elastic run ------------------------------------------------------------------------------------------


def planner(*, floor: int, bucket_elements: int = 0) -> RecoveryPlanner:
    spec = resolve_model(ModelConfig(preset="tiny"), RouterConfig(bias_rate=1e-2))
    return RecoveryPlanner(
        spec=spec, base=Folding(world=4, ep=2), seq_len=32, floor=floor, zero=1, bucket_elements=bucket_elements,
    )  # fmt: skip


@pytest.mark.parametrize("floor", [1, 2, 3])
def test_fewer_losses_than_holders_leave_every_shard_somewhere(floor: int) -> None:
    for size in (3, 4, 5, 6):
        run = planner(floor=floor, bucket_elements=3000)
        begun = run.plan(fresh(size))
        for first in range(size):
            gone = [begun.uids[(first + i) % size] for i in range(floor)]
            joined = [new_member(size + i) for i in range(len(gone))]
            plan = run.plan([*after(begun, lost=gone[1:]), *joined[1:]])
            assert plan.missing == ()
            if floor == 1:
                assert run.plan([*after(begun, lost=gone), *joined]).missing, "the only holder is gone"
        plan_reshard(plan.params, equal_hosts([0] * size)).check()


@pytest.mark.parametrize("machines", [2, 3])
def test_plans_of_several_hosts_know_which_shards_a_rank_really_keeps(machines: int) -> None:
    """Of which a host has several; shards have a holder on each of two hosts."""
    run = planner(floor=2)
    plan = run.plan(fresh(2 * machines, machines=machines))
    layouts = StateLayouts(spec=run.spec, folding=plan.folding, stages=run.stages(plan.folding))
    for rank in range(plan.folding.world):
        kept = layouts.shards_of(rank, zero=1, holders=2, hosts=plan.hosts)
        assert run.holds(plan.state_descriptor(rank)) == kept


# ---- cells -------------------------------------------------------------------------------------------------------------


@st.composite
def boxes_of(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
        found.append(Box(offsets, sizes))
    return shape, found


@given(boxes_of())
@settings(max_examples=times(400, 133), deadline=None)
def test_cells_are_disjoint_and_make_up_each_box(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    count, covered = np.zeros(shape, dtype=int), np.zeros(shape, dtype=bool)
    found = cells(boxes)
    for cell in found:
        count[cell.slices()] += 1
    for box in boxes:
        covered[box.slices()] = True
        assert sum(c.num_elements for c in found if box.contains(c)) == box.num_elements
    assert (count == covered).all()
    assert found == cells(reversed(boxes))
    assert is_covered(shape, boxes) == bool(covered.all()) and (math.prod(shape) or True)

"""Slots whose rows of all sources are multiplied together: which ones, in which order, and what a wrong one of them is told."""

import dataclasses

import numpy as np
import pytest
from overlap_check import check
from overlap_plan_help import plans_of_group, random_dispatch, random_schedule

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost, work_of
from phalanx.plan.moe.overlap.tiles.plan import joint_slots, plan_overlap, tile_sizes
from phalanx.plan.moe.overlap.tiles.types import ALL, Tile, TileOp, TileSchedule

pytestmark = pytest.mark.unit

EVEN = plan_dispatch(np.full((2, 8), 256), range(8), ep=2, etp=1)
FINE = TileSchedule(parts=4, blocks=2, order="arrival", own_before=0.5)


def even(schedule=FINE, **rest):
    return plan_overlap(EVEN, schedule, rank=0, tile_rows=512, **rest)


def test_half_of_the_rows_stay_apart_and_joint_slots_have_fewer_tiles():
    assert joint_slots(EVEN, tile_rows=512) == [(2, 3), (2, 3)]
    assert joint_slots(EVEN, tile_rows=256) == [(), ()], "two tiles either way"
    assert joint_slots(EVEN, tile_rows=300) == [(), ()]
    alone = plan_dispatch(np.full((1, 8), 256), range(8), ep=1, etp=1)
    assert joint_slots(alone, tile_rows=512) == [()]
    hot = plan_dispatch([[300, 10, 10, 10]] * 2, range(4), ep=1, etp=2)
    assert joint_slots(hot, tile_rows=512) == [(1, 2, 3)]
    thin = plan_dispatch(np.full((2, 8), 32), range(8), ep=2, etp=1)
    assert joint_slots(thin, tile_rows=512) == [(0, 1, 2, 3)] * 2, "nothing is worth hiding"
    assert joint_slots(thin, tile_rows=511) == [(2, 3)] * 2


def test_the_rule_holds_for_random_counts():
    rng = np.random.default_rng(0)
    for _ in range(300):
        dispatch = random_dispatch(rng)
        rows = dispatch.rows_PG.reshape(dispatch.ep * dispatch.etp, dispatch.ep, -1)
        for ep, joint in enumerate(joint_slots(dispatch, tile_rows=16)):
            loads = rows[:, ep].sum(0)
            apart = [slot for slot in range(len(loads)) if slot not in joint]
            is_thin = loads.sum() * 8 <= 16 * len(loads)
            assert not joint or is_thin or 2 * loads[apart].sum() >= loads.sum()
            for slot in joint:
                alone = sum(len(tile_sizes(int(n), 16)) for n in rows[:, ep, slot] if n)
                assert len(tile_sizes(int(loads[slot]), 16)) < alone


def test_joint_tiles_do_not_depend_on_the_schedule():
    rng = np.random.default_rng(1)
    for _ in range(100):
        dispatch = random_dispatch(rng)
        schedules = [random_schedule(rng) for _ in range(4)]
        schedules.append(dataclasses.replace(schedules[0], hot_first=True))
        tiles = {frozenset(plan_overlap(dispatch, s, rank=0, tile_rows=16).joint_tiles) for s in schedules}
        assert len(tiles) == 1


def test_rows_of_a_joint_slot_are_multiplied_once_all_have_come_and_go_back_at_once():
    ops = [str(op) for op in even().ops]
    at = ops.index("first_all 2")
    assert ops[at - 5 : at + 5] == [
        "return 1.1.1", "wait 1.2", "first 1.2", "second 1.2.0", "second 1.2.1",
        "first_all 2", "second_all 2.0", "return 1.2.0", "second_all 2.1", "return 1.2.1",
    ]  # fmt: skip
    assert "multiplied together, of all sources, in 2 tiles: slots 2 (512 rows), 3 (512 rows)" in even().explain()


def test_there_are_none_where_tokens_go_through_gateways():
    dispatch = plan_dispatch(np.full((4, 8), 100), range(8), ep=4, etp=1)
    hosts = (0, 0, 1, 1)
    assert plan_overlap(dispatch, FINE, rank=0, tile_rows=512, host_of_rank=hosts).joint
    assert not plan_overlap(dispatch, FINE, rank=0, tile_rows=512, host_of_rank=hosts, through_hosts=True).joint


def test_hot_first_orders_slots_that_are_apart_and_joint_ones_each_by_load():
    dispatch = plan_dispatch([[50, 60, 20, 40]] * 2, range(4), ep=1, etp=2)
    plain, hot = (
        plan_overlap(dispatch, TileSchedule(parts=2, hot_first=h), rank=1, tile_rows=128) for h in (False, True)
    )
    assert plain.joint == (2, 3) and hot.joint == (3, 2)
    assert [tile.slot for tile in hot.tiles[0]] == [1, 0, 3, 2]
    for plan in (plain, hot):
        check(plan)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda tiles: tiles[1:], "no such peer, part, block or slot"),
        (lambda tiles: (tiles[0], dataclasses.replace(tiles[1], rows=500)), "all 512 rows that come"),
        (lambda tiles: (tiles[0], dataclasses.replace(tiles[1], first_row=3)), "next is row 0 of slot 3"),
        (lambda tiles: (*tiles, tiles[0]), "each slot's tiles beside each other"),
        (lambda tiles: (*tiles, Tile(0, ALL, 512, 0)), "joint slots .* come last"),
        (lambda tiles: (tiles[0], dataclasses.replace(tiles[1], source=0)), "rows of all sources end to end"),
    ],
)
def test_wrong_joint_tiles_are_found(change, rule):
    plan = even()
    check(plan)
    with pytest.raises(PlanError, match=rule):
        check(dataclasses.replace(plan, joint_tiles=change(plan.joint_tiles)))


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        (TileOp("first_all", part=3), TileOp("wait", 1, 3), "comes after wait 1.3, which it needs"),
        (TileOp("first_all", part=2), TileOp("wait", 1, 2), "comes after wait 1.2, which it needs"),
        (TileOp("second_all", part=2, block=1), TileOp("first_all", part=2), "comes after first_all 2, which it needs"),
        (
            TileOp("return", 1, 2, 1),
            TileOp("second_all", part=2, block=1),
            "comes after second_all 2.1, which it needs",
        ),
        (
            TileOp("return", 1, 3, 0),
            TileOp("second_all", part=2, block=0),
            "comes after second_all 2.0, which it needs",
        ),
    ],
)
def test_an_operation_before_what_it_needs_is_found(first, second, rule):
    ops = [op for op in even().ops if op != first]
    ops.insert(ops.index(second), first)
    with pytest.raises(PlanError, match=rule):
        check(dataclasses.replace(even(), ops=tuple(ops)))


def test_seconds_of_a_joint_slot_are_those_of_its_larger_products():
    shape = LayerShape(tokens=1024, hidden=64, ffn=128, element_bytes=4, slots=4)
    cost = OverlapCost(latency_s=0, bytes_per_s=1e9, flops_by_rows=((256, 1e9), (512, 2e9)), copy_bytes_per_s=1e9)
    work = work_of(even(), shape, cost)
    up, down, _ = shape.row_flop("forward")
    rows_s = 512 * shape.row_bytes / 1e9
    assert work.seconds(TileOp("first_all", part=2), cost) == pytest.approx(512 * up / 2e9 + rows_s)
    assert work.seconds(TileOp("second_all", part=2, block=1), cost) == pytest.approx(512 * down / 2e9 / 2)
    assert work.seconds(TileOp("first", 1, 0), cost) == pytest.approx(256 * up / 1e9 + rows_s / 2)
    assert work.seconds(TileOp("first", 1, 2), cost) == 0 == work.seconds(TileOp("second", 0, 3, 1), cost)
    assert work.seconds(TileOp("return", 1, 2, 0), cost) == pytest.approx(rows_s / 4)


def test_every_plan_of_a_group_passes_its_check():
    rng = np.random.default_rng(2)
    seen = 0
    for _ in range(100):
        plans = plans_of_group(random_dispatch(rng), random_schedule(rng), tile_rows=16, direction="backward")
        for plan in plans:
            check(plan)
            seen += bool(plan.joint)
    assert seen > 20

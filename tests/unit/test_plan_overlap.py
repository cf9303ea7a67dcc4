"""The planner of overlap: tiles and parts, orders, both ends of a message, backward from forward, bad input, price."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from overlap_check import check
from overlap_plan_help import plans_of_group, random_dispatch, random_schedule, routed, traffic_by_routing
from speed_help import full_speed_s
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import choose_transport
from phalanx.plan.moe.overlap.tiles.plan import backward_of, part_ends, plan_overlap, tile_sizes, tiles_of
from phalanx.plan.moe.overlap.tiles.types import Tile, TileOp, TileSchedule

pytestmark = pytest.mark.unit


@given(st.lists(st.integers(0, 700), max_size=6), st.integers(1, 200))
@settings(max_examples=times(300, 100), deadline=None)
def test_tiles_hold_every_row_once_and_none_is_small(rows, tile_rows):
    tiles = tiles_of(rows, source=3, tile_rows=tile_rows)
    for slot, count in enumerate(rows):
        mine = [t for t in tiles if t.slot == slot]
        assert [r for t in mine for r in range(t.first_row, t.first_row + t.rows)] == list(range(count))
        assert all(0 < t.rows <= tile_rows and t.source == 3 for t in mine)
        assert len(mine) == -(-count // tile_rows)
        assert len(mine) < 2 or min(t.rows for t in mine) >= tile_rows // 2
    assert [t.slot for t in tiles] == sorted(t.slot for t in tiles)


def test_a_rest_below_half_a_tile_is_spread():
    assert tile_sizes(128 * 2 + 64, 128) == (128, 128, 64)
    assert tile_sizes(128 * 2 + 63, 128) == (107, 106, 106)
    assert tile_sizes(5, 128) == (5,)
    assert tile_sizes(0, 128) == ()


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 9))
@settings(max_examples=times(300, 100), deadline=None)
def test_parts_are_not_empty_and_about_equal(sizes, parts):
    tiles = tuple(Tile(0, 0, size, 0) for size in sizes)
    ends = part_ends(tiles, parts)
    assert len(ends) <= parts and (ends[-1] if ends else 0) == len(tiles)
    assert list(ends) == sorted(set(ends)) and 0 not in ends
    if ends:
        rows = [sum(sizes[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
        assert max(rows) <= sum(sizes) / parts + 2 * max(sizes)


def test_no_tiles_have_no_parts():
    assert part_ends((), 4) == ()
    assert part_ends(tiles_of([128] * 8, source=0, tile_rows=128), 4) == (2, 4, 6, 8)


# ---- orders ----------------------------------------------------------------------------------------------------------------


def small(schedule, *, rank=0, **rest):
    dispatch = plan_dispatch([[128, 128], [128, 128]], range(2), ep=2, etp=1)
    return plan_overlap(dispatch, schedule, rank=rank, tile_rows=64, **rest)


def text(plan):
    return [str(op) for op in plan.ops]


def test_serial_does_each_phase_after_the_other():
    plan = small(TileSchedule(), has_shared=True, direction="backward")
    assert text(plan) == [
        "send 1.0", "wait 1.0", "first 0.0", "first 1.0", "second 0.0.0", "second 1.0.0", "weights 0",
        "return 0.0.0", "return 1.0.0", "wait_return 1.0.0", "shared", "sum",
    ]  # fmt: skip


def test_own_rows_come_while_others_travel():
    assert text(small(TileSchedule(parts=2, blocks=2, order="own_first"))) == [
        "send 1.0", "send 1.1", "first 0.0", "first 0.1",
        "second 0.0.0", "return 0.0.0", "second 0.0.1", "return 0.0.1",
        "second 0.1.0", "return 0.1.0", "second 0.1.1", "return 0.1.1",
        "wait 1.0", "first 1.0", "second 1.0.0", "return 1.0.0", "second 1.0.1", "return 1.0.1",
        "wait 1.1", "first 1.1", "second 1.1.0", "return 1.1.0", "second 1.1.1", "return 1.1.1",
        "wait_return 1.0.0", "wait_return 1.0.1", "wait_return 1.1.0", "wait_return 1.1.1", "sum",
    ]  # fmt: skip


def test_what_is_left_of_own_rows_runs_while_results_travel():
    plan = small(TileSchedule(parts=2, order="arrival", own_before=0.5), has_shared=True, direction="backward")
    assert text(plan) == [
        "send 1.0", "send 1.1", "first 0.0",
        "wait 1.0", "first 1.0", "second 1.0.0", "return 1.0.0", "wait 1.1", "first 1.1", "second 1.1.0", "return 1.1.0",
        "second 0.0.0", "return 0.0.0", "first 0.1", "second 0.1.0", "return 0.1.0", "weights 0", "shared",
        "wait_return 1.0.0", "wait_return 1.1.0", "sum",
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "before"), [(0.0, 0), (0.15, 0), (0.4, 1), (0.5, 2), (0.8, 2), (0.9, 3)])
def test_the_share_of_own_parts_before_the_first_wait_is_the_nearest(share, before):
    dispatch = plan_dispatch([[192, 192], [192, 192]], range(2), ep=2, etp=1)
    plan = plan_overlap(dispatch, TileSchedule(parts=3, order="arrival", own_before=share), rank=0, tile_rows=64)
    assert text(plan)[3:].index("wait 1.0") == before


def even(ep, **rest):
    return plan_dispatch(np.full((ep, ep), 64), range(ep), ep=ep, etp=1), rest


def test_no_receiver_is_everybodys_first_and_arrivals_mirror_the_sends():
    dispatch, _ = even(4)
    plans = plans_of_group(dispatch, TileSchedule(order="own_first"), tile_rows=64)
    firsts = [next(op.peer for op in plan.ops if op.kind == "send") for plan in plans]
    assert sorted(firsts) == [0, 1, 2, 3]
    place = {(p.rank, op.peer): i for p in plans for i, op in enumerate(o for o in p.ops if o.kind == "send")}
    for plan in plans:
        waits = [op.peer for op in plan.ops if op.kind == "wait"]
        assert waits == sorted(waits, key=lambda p: place[p, plan.rank])


def test_ranks_of_the_own_host_are_waited_for_first():
    dispatch, _ = even(6)
    plan = plan_overlap(dispatch, TileSchedule(order="arrival"), rank=1, tile_rows=64, host_of_rank=[0, 0, 0, 1, 1, 1])
    assert [op.peer for op in plan.ops if op.kind == "wait"] == [0, 2, 5, 4, 3]
    assert [op.peer for op in plan.ops if op.kind == "wait_return"] == [2, 0, 3, 4, 5]
    alone = plan_overlap(dispatch, TileSchedule(order="arrival"), rank=1, tile_rows=64)
    assert [op.peer for op in alone.ops if op.kind == "wait"] == [0, 5, 4, 3, 2]


def test_etp_ranks_of_an_ep_coordinate_get_the_same_rows():
    dispatch, _ = routed(np.random.default_rng(0), ep=2, etp=2, per_rank=3, top_k=2, tokens=50)
    plans = plans_of_group(dispatch, TileSchedule(parts=2), tile_rows=16)
    assert plans[0].tiles == plans[1].tiles and plans[2].tiles == plans[3].tiles
    assert [sum(t.rows for t in tiles) for tiles in plans[2].tiles] == dispatch.rows_PG[:, 3:].sum(1).tolist()


def test_both_ends_of_a_message_agree_and_every_plan_passes_its_check():
    rng = np.random.default_rng(1)
    for _ in range(100):
        dispatch, schedule = random_dispatch(rng), random_schedule(rng)
        plans = plans_of_group(dispatch, schedule, tile_rows=16, has_shared=bool(rng.integers(2)))
        for a in plans:
            check(a)
            check(backward_of(a))
            for b in plans:
                assert a.peer_part_ends[b.rank] == b.part_ends[a.rank]


def test_tiles_do_not_depend_on_the_schedule():
    rng = np.random.default_rng(2)
    dispatch = random_dispatch(rng)
    plans = [plan_overlap(dispatch, random_schedule(rng), rank=0, tile_rows=16) for _ in range(20)]
    assert len({plan.tiles for plan in plans}) == 1


def test_backward_is_the_forward_plan_with_gradients_of_weights():
    rng = np.random.default_rng(3)
    for _ in range(60):
        dispatch, schedule = random_dispatch(rng), random_schedule(rng)
        rest = {"rank": 0, "tile_rows": 16, "has_shared": bool(rng.integers(2))}
        forward = plan_overlap(dispatch, schedule, **rest)
        backward = backward_of(forward)
        assert backward == plan_overlap(dispatch, schedule, direction="backward", **rest)
        for field in ("tiles", "part_ends", "peer_part_ends", "blocks"):
            assert getattr(backward, field) == getattr(forward, field)
        added = [op for op in backward.ops if op.kind == "weights"]
        assert sorted(op.part for op in added) == list(range(dispatch.slots_per_rank))
        if schedule.seed is None:
            assert [op for op in backward.ops if op.kind != "weights"] == list(forward.ops)
    with pytest.raises(PlanError, match="made of a forward one"):
        backward_of(backward)


def test_weights_run_while_results_travel_except_in_serial_order():
    for order in ("own_first", "arrival"):
        ops = [op.kind for op in small(TileSchedule(order=order), direction="backward").ops]
        assert max(i for i, k in enumerate(ops) if k == "return") < ops.index("weights") < ops.index("wait_return")
    ops = [op.kind for op in small(TileSchedule(), direction="backward").ops]
    assert ops.index("weights") < ops.index("return")


def test_seeds_draw_many_orders_and_each_seed_the_same():
    dispatch, _ = routed(np.random.default_rng(4), ep=2, per_rank=2, top_k=2, tokens=100)
    plans = [plan_overlap(dispatch, TileSchedule(parts=2, seed=s), rank=0, tile_rows=16) for s in range(30)]
    assert len({plan.ops for plan in plans}) == 30
    assert plan_overlap(dispatch, TileSchedule(parts=2, seed=7), rank=0, tile_rows=16).hash == plans[7].hash


def test_one_rank_waits_for_nobody():
    plan = plan_overlap(
        plan_dispatch([[40, 0]], range(2), ep=1, etp=1), TileSchedule(order="arrival"), rank=0, tile_rows=32
    )
    assert plan.ops == (TileOp("first", 0, 0), TileOp("second", 0, 0, 0), TileOp("return", 0, 0, 0), TileOp("sum"))


def test_a_batch_without_tokens_has_a_plan():
    dispatch = plan_dispatch(np.zeros((2, 2)), range(2), ep=2, etp=1)
    plan = plan_overlap(dispatch, TileSchedule(parts=4, order="arrival"), rank=1, tile_rows=32, direction="backward")
    assert plan.ops == (TileOp("weights", part=0), TileOp("sum"))


# ---- bad input, text, price ------------------------------------------------------------------------------------------------


def test_all_problems_are_named_at_once():
    dispatch, _ = even(2)
    bad = TileSchedule(parts=0, blocks=-1, order="random", own_before=2.0, seed=-3)
    with pytest.raises(PlanError) as caught:
        plan_overlap(dispatch, bad, rank=5, tile_rows=0, host_of_rank=[0])
    places = {problem.where for problem in caught.value.problems}
    assert places == {
        "schedule.parts", "schedule.blocks", "schedule.order", "schedule.own_before", "schedule.seed", "rank", "tile_rows",
        "host_of_rank",
    }  # fmt: skip
    with pytest.raises(PlanError, match="has an effect with order = 'arrival'"):
        small(TileSchedule(order="own_first", own_before=0.5))


def test_a_person_can_read_it():
    lines = small(TileSchedule(parts=2, order="own_first"), has_shared=True).explain()
    assert "rank 0 of 2, forward" in lines and "own rows: 2 tiles, rows by part 64 + 64" in lines and "shared" in lines
    assert "from 1: none" in plan_overlap(
        plan_dispatch([[9, 0], [0, 0]], range(2), ep=2, etp=1), TileSchedule(), rank=0, tile_rows=8
    ).explain()  # fmt: skip


def test_hashes_do_not_depend_on_hash_seeds():
    code = (
        "from phalanx.plan.moe.dispatch import plan_dispatch; from phalanx.plan.moe.overlap.tiles.plan import plan_overlap\n"
        "from phalanx.plan.moe.overlap.tiles.types import TileSchedule\n"
        "d = plan_dispatch([[90, 20, 0, 7], [5, 100, 3, 60]], range(4), ep=2, etp=1)\n"
        "print([plan_overlap(d, TileSchedule(parts=2, seed=s), rank=1, tile_rows=16, direction='backward').hash for s in (None, 5)])"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outs) == 1


def test_the_hash_tells_plans_apart():
    plan = small(TileSchedule(parts=2, order="own_first"))
    other = dataclasses.replace(plan, ops=plan.ops[:-1])
    assert plan.hash != other.hash
    assert json.loads(plan.to_json())["part_ends"] == [[1, 2], [1, 2]]


def test_planning_16384_tokens_is_cheap():
    """16,384 tokens in all, 8 of 256 experts, 8 ranks: about a millisecond."""
    dispatch, experts = routed(np.random.default_rng(5), ep=8, per_rank=32, top_k=8, tokens=2048)
    traffic = traffic_by_routing(dispatch, experts)

    def planning():
        choose_transport(traffic, row_bytes=8192)
        plan_overlap(dispatch, TileSchedule(parts=4, blocks=2, order="arrival"), rank=3, tile_rows=128)

    assert full_speed_s(planning, rounds=20) <= 4e-3

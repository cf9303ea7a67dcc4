"""Multiprocessors left to messages: what the clock says of a plan, and what is no choice."""

from __future__ import annotations

import numpy as np
import pytest
from overlap_clock import predict
from overlap_plan_help import plans_of_group

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import traffic_of, wire_bytes
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost
from phalanx.plan.moe.overlap.tiles.plan import backward_of
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx_lab.bench.layer.device_division import DeviceShare, choose_left_free, shared_cost

pytestmark = pytest.mark.unit

SHAPE = LayerShape(tokens=2048, hidden=4096, ffn=14336, element_bytes=2, slots=1)


def case(*, bytes_per_s=4e11, interference=1.0, flops=6e14, schedule=None):
    dispatch = plan_dispatch(np.full((8, 8), 512), range(8), ep=8, etp=1)
    wire = wire_bytes(traffic_of(dispatch), "all_to_all", row_bytes=SHAPE.row_bytes)
    plan = plans_of_group(dispatch, schedule or TileSchedule(parts=4, order="arrival"), tile_rows=512)[0]
    cost = OverlapCost(
        latency_s=1e-5,
        bytes_per_s=bytes_per_s,
        flops_by_rows=((128, flops / 2), (512, flops)),
        interference=interference,
    )
    return [plan, backward_of(plan)], cost, wire


DEVICE = DeviceShare(multiprocessors=132, block_bytes_per_s=2e10)


def test_it_is_the_best_by_the_clock():
    plans, cost, wire = case(bytes_per_s=5e10)
    best, seconds = choose_left_free(plans, SHAPE, cost, wire, DEVICE)
    assert set(seconds) == {0, *DEVICE.candidates}
    for n, s in seconds.items():
        assert s == pytest.approx(sum(predict(p, SHAPE, shared_cost(cost, DEVICE, n), wire).seconds for p in plans))
    assert seconds[best] == min(seconds.values()) < seconds[0] and best > 0


def test_nothing_is_left_free_where_messages_cost_products_nothing():
    plans, cost, wire = case(interference=0.0)
    assert choose_left_free(plans, SHAPE, cost, wire, DEVICE)[0] == 0


def test_slow_messages_get_more_than_fast_ones():
    """The same link: where each thread block moves less, more are left free; beyond what fills the link none."""
    found = []
    for block_bytes_per_s in (1e11, 2.5e10, 1.25e10):
        plans, cost, wire = case(bytes_per_s=2e11)
        device = DeviceShare(multiprocessors=132, block_bytes_per_s=block_bytes_per_s, candidates=tuple(range(1, 33)))
        found.append(choose_left_free(plans, SHAPE, cost, wire, device)[0])
    assert found == sorted(found) and found[0] < found[-1] <= 16


def test_products_pay_for_what_is_left_free():
    _, cost, _ = case()
    shared = shared_cost(cost, DEVICE, 33)
    assert shared.flops_by_rows[1][1] == pytest.approx(cost.flops_by_rows[1][1] * 0.75)
    assert shared.bytes_per_s == cost.bytes_per_s and shared.interference == 0
    assert shared_cost(cost, DEVICE, 4).bytes_per_s == 8e10
    assert shared_cost(cost, DEVICE, 0) is cost


def test_what_is_no_choice_is_refused():
    plans, cost, wire = case()
    device = DeviceShare(multiprocessors=16, block_bytes_per_s=0.0, candidates=(0, 8, 16))
    with pytest.raises(PlanError) as err:
        choose_left_free(plans, SHAPE, cost, wire, device)
    assert str(err.value).count("from 1 to 15") == 2 and "block_bytes_per_s" in str(err.value)

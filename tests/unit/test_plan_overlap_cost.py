"""The clock over overlapped operations, the choice of a schedule, and the fit: against arithmetic by hand and against each other."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from overlap_clock import predict
from overlap_plan_help import plans_of_group, random_schedule, routed, traffic_by_routing
from speed_help import full_speed_s

from phalanx.core.errors import ConfigError, PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction import choose as choose_module
from phalanx.plan.moe.overlap.prediction.batches import about, typical
from phalanx.plan.moe.overlap.prediction.bytes import choose_transport, traffic_of, wire_bytes
from phalanx.plan.moe.overlap.prediction.choose import (
    SERIAL,
    Chooser,
    LayerSample,
    MatmulSample,
    MessageSample,
    ScheduleChoice,
    compare_schedules,
    errors_of,
    fit,
    worth_timing,
)
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost
from phalanx.plan.moe.overlap.prediction.pair import PassTime, link_s, pair_s, paired_share
from phalanx.plan.moe.overlap.tiles.plan import plan_overlap
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.plan.pipeline.schedule.pairs import choose_pairs

pytestmark = pytest.mark.unit

SHAPE = LayerShape(tokens=128, hidden=1024, ffn=2048, element_bytes=4, slots=1, gated=False)
FLAT = OverlapCost(latency_s=1e-3, bytes_per_s=1e8, flops_by_rows=((1, 1e11),))
CANDIDATES = [
    TileSchedule(parts=p, blocks=b, order=o)
    for o in ("own_first", "arrival")
    for p, b in ((1, 1), (2, 1), (1, 2), (2, 2))
]  # fmt: skip


def even(ranks=2, rows=128):
    """Every source has `rows` rows for the one slot of every rank."""
    dispatch = plan_dispatch(np.full((ranks, ranks), rows), range(ranks), ep=ranks, etp=1)
    wire = wire_bytes(traffic_of(dispatch), "all_to_all", row_bytes=SHAPE.row_bytes)
    return dispatch, wire


def test_serial_is_the_sum_of_its_phases():
    dispatch, wire = even()
    product = 128 * 2 * 1024 * 2048 / 1e11
    outbound, inbound = 1e-3 + 128 * (4096 + 4) / 1e8, 1e-3 + 128 * 4096 / 1e8
    plans = plans_of_group(dispatch, TileSchedule(), tile_rows=128)
    for found in (predict(plans, SHAPE, FLAT, wire), predict(plans[0], SHAPE, FLAT, wire)):
        assert found.seconds == pytest.approx(outbound + 4 * product + inbound)
        assert found.communication_s == pytest.approx(outbound + inbound) == pytest.approx(found.exposed_s)
        assert found.hidden_s == pytest.approx(0, abs=1e-9)


def test_own_rows_hide_what_travels_beside_them():
    dispatch, wire = even()
    product = 128 * 2 * 1024 * 2048 / 1e11
    outbound, inbound = 1e-3 + 128 * (4096 + 4) / 1e8, 1e-3 + 128 * 4096 / 1e8
    plans = plans_of_group(dispatch, TileSchedule(order="arrival"), tile_rows=128)
    found = predict(plans, SHAPE, FLAT, wire)
    assert found.seconds == pytest.approx(max(product, outbound) + 2 * product + max(product, inbound))
    waits = {str(op.op): op for op in found.ops if op.rank == 0 and op.op.kind.startswith("wait")}
    assert waits["wait 1.0"].exposed_s == pytest.approx(outbound - product)
    assert waits["wait 1.0"].hidden_s == pytest.approx(product)
    assert found.hidden_s == pytest.approx(2 * product) and "ms" in found.explain()


def test_compute_is_slower_while_bytes_move():
    cost = dataclasses.replace(FLAT, interference=0.5)
    assert cost.slowed(1.0, at=0.0, busy_until=0.0) == 1.0
    assert cost.slowed(1.0, at=0.0, busy_until=9.0) == 1.5
    assert cost.slowed(1.0, at=0.0, busy_until=0.75) == pytest.approx(0.75 + 0.5)
    assert cost.slowed(1.0, at=2.0, busy_until=1.0) == 3.0


def test_small_products_are_slow_and_the_table_is_followed():
    cost = dataclasses.replace(FLAT, flops_by_rows=((8, 1e9), (128, 5e9)))
    assert cost.row_seconds([8, 32, 128, 1024, 1]).tolist() == pytest.approx(
        [8 / 1e9, 32 / 3e9, 128 / 5e9, 1024 / 5e9, 1 / 1e9]
    )


def test_one_symmetrical_plan_stands_for_all_where_all_are_equally_busy():
    rng = np.random.default_rng(0)
    cost = dataclasses.replace(FLAT, op_s=1e-6, interference=0.1, copy_bytes_per_s=1e10)
    for ranks in (2, 3, 5):
        dispatch, wire = even(ranks, rows=256)
        for schedule in [SERIAL, *CANDIDATES]:
            for direction in ("forward", "backward"):
                plans = plans_of_group(dispatch, schedule, tile_rows=64, direction=direction)
                both = predict(plans, SHAPE, cost, wire), predict(plans[0], SHAPE, cost, wire)
                assert both[1].seconds == pytest.approx(both[0].seconds, rel=0.04), (ranks, schedule)
        dispatch, experts = routed(rng, ep=ranks, per_rank=1, top_k=1, tokens=400)
        wire = wire_bytes(traffic_by_routing(dispatch, experts), "dedup", row_bytes=4096)
        for schedule in CANDIDATES:
            plans = plans_of_group(dispatch, schedule, tile_rows=64)
            busiest = int(dispatch.rows_PG.sum(0).argmax())
            together, alone = predict(plans, SHAPE, cost, wire), predict(plans[busiest], SHAPE, cost, wire)
            assert alone.seconds == pytest.approx(together.seconds, rel=0.15)


def test_every_operation_is_on_the_clock():
    dispatch, wire = even()
    plans = plans_of_group(dispatch, TileSchedule(parts=2, blocks=2, order="arrival"), tile_rows=64, has_shared=True)
    shape = dataclasses.replace(SHAPE, shared_ffn=1024)
    for found in (predict(plans, shape, FLAT, wire), predict(plans[0], shape, FLAT, wire)):
        assert [op.op for op in found.ops if op.rank == 0] == list(plans[0].ops)
        shared = next(op for op in found.ops if op.op.kind == "shared")
        assert shared.end_s - shared.start_s == pytest.approx(128 * 2 * 1024 * 1024 * 2 / 1e11)


def test_gradients_of_weights_hide_the_way_back():
    dispatch, wire = even()
    cost = dataclasses.replace(FLAT, latency_s=0.0)
    rest = {"rank": 0, "tile_rows": 128, "direction": "backward"}
    found = predict(plan_overlap(dispatch, TileSchedule(order="own_first"), **rest), SHAPE, cost, wire)
    weights = sum(op.end_s - op.start_s for op in found.ops if op.op.kind == "weights")
    assert weights == pytest.approx(2 * 256 * 2 * 1024 * 2048 / 1e11)
    back = next(op for op in found.ops if op.op.kind == "wait_return")
    assert back.exposed_s == 0 and back.hidden_s == pytest.approx(128 * 4096 / 1e8)


def test_plans_and_bytes_must_belong_together():
    dispatch, wire = even(3)
    plans = plans_of_group(dispatch, SERIAL, tile_rows=64)
    for wrong in (plans[:2], []):
        with pytest.raises(PlanError, match="one plan, or those of all"):
            predict(wrong, SHAPE, FLAT, wire)
    with pytest.raises(PlanError, match="bytes between as many"):
        predict(plans, SHAPE, FLAT, even(2)[1])


def test_all_that_is_wrong_with_a_cost_is_named():
    with pytest.raises(ConfigError) as caught:
        OverlapCost(latency_s=-1, bytes_per_s=0, flops_by_rows=((8, 1e9), (4, 1e9)), interference=float("nan"))
    assert {p.where for p in caught.value.problems} == {
        "cost.latency_s",
        "cost.bytes_per_s",
        "cost.flops_by_rows",
        "cost.interference",
    }


# ---- choice ----------------------------------------------------------------------------------------------------------------


def choose(*args, **more):
    return compare_schedules(*args, **more).schedule


def test_a_link_that_costs_nothing_leaves_serial_and_a_slow_one_does_not():
    dispatch, wire = even()
    cost = dataclasses.replace(FLAT, latency_s=0.0, op_s=2e-5, block_s=1e-4)
    fast = dataclasses.replace(cost, bytes_per_s=1e12)
    assert choose(dispatch, SHAPE, fast, CANDIDATES, wire=wire, tile_rows=128) == SERIAL
    found = compare_schedules(dispatch, SHAPE, cost, CANDIDATES, wire=wire, tile_rows=128)
    seconds = dict(found.seconds)
    assert seconds[found.schedule] == min(seconds.values()) < 0.97 * seconds[SERIAL]
    assert [schedule for schedule, _ in found.seconds[:9]] == [SERIAL, *CANDIDATES]


def test_the_second_cut_is_taken_where_it_hides_more_than_its_blocks_cost():
    """On a link as slow as computing the last result need not wait for all columns; the gain is half a product, in each of two directions at most."""
    dispatch, wire = even()
    cost = dataclasses.replace(FLAT, latency_s=1e-4, op_s=2e-5)
    whole, cut = (TileSchedule(parts=2, blocks=blocks, order="own_first") for blocks in (1, 2))
    seconds = dict(compare_schedules(dispatch, SHAPE, cost, [whole, cut], wire=wire, tile_rows=128).seconds)
    gain = seconds[whole] - seconds[cut]
    product = 128 * 2 * 1024 * 2048 / 1e11
    assert 0 < gain < product
    for block_s, taken in ((gain / 8, cut), (2 * gain, whole)):
        dear = dataclasses.replace(cost, block_s=block_s)
        assert choose(dispatch, SHAPE, dear, [whole, cut], wire=wire, tile_rows=128) == taken


def test_a_gain_within_the_margin_is_not_taken(monkeypatch):
    dispatch, wire = even()
    monkeypatch.setattr(choose_module, "MARGIN", 0.0)
    found = compare_schedules(dispatch, SHAPE, FLAT, CANDIDATES, wire=wire, tile_rows=128)
    seconds = dict(found.seconds)
    gain = 1 - min(seconds.values()) / seconds[SERIAL]
    assert gain > 0.1
    for margin, taken in ((gain - 0.01, True), (gain + 0.01, False)):
        monkeypatch.setattr(choose_module, "MARGIN", margin)
        chosen = choose(dispatch, SHAPE, FLAT, CANDIDATES, wire=wire, tile_rows=128)
        assert (chosen != SERIAL) == taken


def test_the_choice_is_what_predict_says_of_the_plans():
    rng = np.random.default_rng(1)
    dispatch, experts = routed(rng, ep=3, per_rank=2, top_k=2, tokens=200, skew=0.3)
    shape = dataclasses.replace(SHAPE, slots=2)
    wire = wire_bytes(traffic_by_routing(dispatch, experts), "dedup", row_bytes=4096)
    busiest = int(dispatch.rows_PG.sum(0).reshape(3, 2).sum(1).argmax())
    forward = dict(compare_schedules(dispatch, shape, FLAT, CANDIDATES, wire=wire, tile_rows=32).seconds)
    for schedule in (SERIAL, *CANDIDATES):
        backward_s = LayerSample(dispatch, shape, schedule, wire, 32, 1.0, "backward").predicted_s(FLAT)
        for direction, seconds in (("forward", forward[schedule]), ("backward", backward_s)):
            plan = plan_overlap(dispatch, schedule, rank=busiest, tile_rows=32, direction=direction)
            assert predict(plan, shape, FLAT, wire).seconds == pytest.approx(seconds, rel=1e-12)


def test_wrong_candidates_and_shapes_are_named():
    dispatch, wire = even()
    with pytest.raises(PlanError, match=r"schedule.parts = 0(.|\n)*paired = 2"):
        choose(dispatch, SHAPE, FLAT, [TileSchedule(parts=0)], wire=wire, tile_rows=128, paired=2)
    with pytest.raises(PlanError, match=r"shape\.slots = 3: 1 slots on a rank"):
        choose(dispatch, dataclasses.replace(SHAPE, slots=3), FLAT, [], wire=wire, tile_rows=128)


def test_batches_of_about_equal_counts_share_a_choice():
    chooser = Chooser(SHAPE, FLAT, CANDIDATES, tile_rows=128, most=2)
    batches = [even(rows=rows) for rows in (600, 610, 2000, 2010, 5000, 600)]
    found = [chooser(*batch) for batch in batches]
    assert chooser.num_computed == 4, (
        "the first, a larger, a still larger one, and the first again, which was forgotten"
    )
    for (dispatch, wire), schedule in zip(batches, found, strict=True):
        seconds = dict(compare_schedules(dispatch, SHAPE, FLAT, CANDIDATES, wire=wire, tile_rows=128).seconds)
        assert seconds[schedule] < 1.05 * min(seconds.values())


def random_batches(rng, number, *, tile_rows):
    """(shape, batches): of one layer, routed anew each time, their bytes by a transport that was drawn."""
    ep, per_rank, etp = ((2, 1, 1), (2, 4, 1), (3, 2, 1), (2, 2, 2), (4, 2, 1))[int(rng.integers(5))]
    route = ("all_to_all", "dedup", "all_gather", "dedup_host")[int(rng.integers(4))]
    some = {"tokens": int(rng.integers(1, 8)) * tile_rows // 2, "skew": float(rng.choice([0.0, 0.0, 0.3]))}
    hosts = tuple(2 * rank // (ep * etp) for rank in range(ep * etp)) if route == "dedup_host" else None
    batches = []
    for _ in range(number):
        dispatch, experts = routed(rng, ep=ep, per_rank=per_rank, top_k=min(2, ep * per_rank), etp=etp, **some)
        traffic = traffic_by_routing(dispatch, experts, host_of_rank=hosts)
        batches.append((dispatch, wire_bytes(traffic, route, row_bytes=SHAPE.row_bytes)))
    return dataclasses.replace(SHAPE, slots=per_rank), batches


def test_who_asks_first_changes_no_choice():
    """Passes beside one another ask in an order that differs from rank to rank, and all ranks must find the same."""
    rng = np.random.default_rng(7)
    cost, shared, differ = dataclasses.replace(FLAT, latency_s=1e-4, block_s=2e-4), 0, 0
    for _ in range(30):
        shape, (one, other) = random_batches(rng, 2, tile_rows=128)
        here, there = (Chooser(shape, cost, CANDIDATES, tile_rows=128) for _ in range(2))
        found = here.choice(*one), here.choice(*other)
        assert (there.choice(*other), there.choice(*one)) == found[::-1]
        if here.num_computed == 1:
            own = [
                compare_schedules(batch[0], shape, cost, CANDIDATES, wire=batch[1], tile_rows=128)
                for batch in (one, other)
            ]
            shared, differ = shared + 1, differ + (own[0].schedule != own[1].schedule)
    assert shared > 10 and differ > 0  # the choice of whoever came first would have failed


def test_a_batch_that_stands_for_others_is_like_them():
    rng = np.random.default_rng(8)
    for _ in range(60):
        _, ((dispatch, wire),) = random_batches(rng, 1, tile_rows=128)
        found = about(dispatch, wire, step=256)
        like, its_wire = typical(found)
        like.check()
        rows = [plan.rows_PG.reshape(len(plan.rows_PG), plan.ep, -1) for plan in (dispatch, like)]
        assert ((rows[0] > 0).sum(2) == (rows[1] > 0).sum(2)).all()
        assert abs(rows[1].sum(2) - rows[0].sum(2)).max() < found.step
        assert rows[1].sum() == pytest.approx(rows[0].sum(), rel=0.08)
        assert (its_wire.route, its_wire.host_of_rank) == (wire.route, wire.host_of_rank)
        assert (np.diagonal(its_wire.total_PP) == 0).all()
        assert its_wire.total == pytest.approx(wire.total, rel=0.1)
        assert its_wire.leaving_PP.sum() == pytest.approx(wire.leaving_PP.sum(), rel=0.1)
        assert (its_wire.legs is None) == (wire.legs is None)


def test_a_choice_that_is_known_is_found_at_once():
    """16,384 tokens, 8 of 256 experts, 8 ranks: each pass asks, also where nothing is to be worked out."""
    dispatch, experts = routed(np.random.default_rng(5), ep=8, per_rank=32, top_k=8, tokens=2048)
    wire = wire_bytes(traffic_by_routing(dispatch, experts), "dedup", row_bytes=4096)
    chooser = Chooser(dataclasses.replace(SHAPE, slots=32), FLAT, CANDIDATES, tile_rows=128)
    first_s = full_speed_s(lambda: chooser._found.clear() or chooser(dispatch, wire), rounds=8)
    assert full_speed_s(partial(chooser, dispatch, wire), rounds=8) < first_s / 10


def test_choosing_is_cheap():
    """Eight candidates for 16,384 tokens, 8 of 256 experts, 8 ranks: once for each kind of batch, so it may take longer than a plan."""
    dispatch, experts = routed(np.random.default_rng(5), ep=8, per_rank=32, top_k=8, tokens=2048)
    traffic = traffic_by_routing(dispatch, experts)
    wire = wire_bytes(traffic, choose_transport(traffic, row_bytes=4096).route, row_bytes=4096)
    shape = dataclasses.replace(SHAPE, slots=32)
    work = partial(choose, dispatch, shape, FLAT, CANDIDATES, wire=wire, tile_rows=128)
    assert full_speed_s(work, rounds=8) < 2e-2


# ---- fit -------------------------------------------------------------------------------------------------------------------

TRUE = OverlapCost(
    latency_s=2e-4,
    bytes_per_s=8e7,
    flops_by_rows=((16, 4e10), (64, 7e10), (256, 1e11)),
    op_s=5e-5,
    block_s=2e-3,
    interference=0.15,
    copy_bytes_per_s=3e9,
)


def samples_of(cost, rng, *, noise, layers=10):
    def noisy(seconds):
        return seconds * float(np.exp(noise * rng.normal()))

    found = [MessageSample(n, noisy(cost.latency_s + n / cost.bytes_per_s)) for n in (1 << 10, 1 << 16, 1 << 22) * 5]
    found += [MatmulSample(rows, 1e9, noisy(1e9 / rate)) for rows, rate in cost.flops_by_rows * 5]
    shape = dataclasses.replace(SHAPE, slots=2)
    for number in range(layers):
        dispatch, experts = routed(rng, ep=2, per_rank=2, top_k=2, tokens=int(rng.integers(64, 600)))
        wire = wire_bytes(traffic_by_routing(dispatch, experts), "dedup", row_bytes=4096)
        schedule = dataclasses.replace(random_schedule(rng), seed=None) if number else SERIAL
        sample = LayerSample(dispatch, shape, schedule, wire, 64, 1.0, ("forward", "backward")[number % 2])
        found.append(dataclasses.replace(sample, seconds=noisy(sample.predicted_s(cost))))
    return found


def test_the_fit_finds_the_cost_that_made_the_samples():
    rng = np.random.default_rng(2)
    found = fit(samples_of(TRUE, rng, noise=0.0))
    assert found.cost.latency_s == pytest.approx(TRUE.latency_s) and found.cost.bytes_per_s == pytest.approx(8e7)
    np.testing.assert_allclose(found.cost.flops_by_rows, TRUE.flops_by_rows)
    assert found.median_error < 0.01 and len(found.errors) == 15 + 15 + 10
    assert np.median(errors_of(found.cost, samples_of(TRUE, rng, noise=0.0))) < 0.02


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth_on_other_samples():
    rng = np.random.default_rng(3)
    found = fit(samples_of(TRUE, rng, noise=0.1))
    others = samples_of(TRUE, rng, noise=0.0)
    assert np.median(errors_of(found.cost, others)) < 0.1


def test_what_the_clock_misses_of_a_timed_schedule_corrects_it_and_no_other():
    rng = np.random.default_rng(5)
    four, two = (TileSchedule(parts=parts, order="arrival", own_before=0.75) for parts in (4, 2))
    dispatch, experts = routed(rng, ep=2, per_rank=2, top_k=2, tokens=600)
    wire = wire_bytes(traffic_by_routing(dispatch, experts), "dedup", row_bytes=4096)
    shape = dataclasses.replace(SHAPE, slots=2)

    def layer(schedule, factor):
        sample = LayerSample(dispatch, shape, schedule, wire, 64, 1.0)
        return dataclasses.replace(sample, seconds=factor * sample.predicted_s(TRUE))

    others = [s for s in samples_of(TRUE, rng, noise=0.0) if getattr(s, "direction", "forward") == "forward"]
    plain = [s for s in others if not isinstance(s, LayerSample)]
    for slow, quick in ((two, four), (four, two)):
        cost = fit([*plain, layer(SERIAL, 1.0), layer(slow, 1.3), layer(quick, 0.9)]).cost
        assert choose(dispatch, shape, cost, (four, two), wire=wire, tile_rows=64).parts == quick.parts
        assert cost.correction(slow) > 1.2 * cost.correction(quick)
        assert [schedule for schedule, _ in cost.timed] == [SERIAL, slow, quick]
        assert cost.correction(dataclasses.replace(slow, hot_first=True)) == cost.correction(slow)
        assert cost.correction(dataclasses.replace(slow, own_before=0.25)) == 1.0
    assert TRUE.correction(four) == 1.0


def test_ratios_of_timed_schedules_are_above_0():
    with pytest.raises(ConfigError, match=r"cost\.timed\[1\]"):
        dataclasses.replace(TRUE, timed=((SERIAL, 2.0), (TileSchedule(order="arrival"), 0.0)))


def test_what_is_worth_timing_has_the_fastest_and_every_way_to_cut_a_layer():
    ways = [TileSchedule(parts=parts, order="arrival", own_before=own) for parts in (1, 2, 4) for own in (0.5, 1.0)]
    hot = dataclasses.replace(ways[2], hot_first=True)
    seconds = [(SERIAL, 9.0), (hot, 0.5), *zip(ways, (8.0, 7.0, 1.0, 2.0, 6.0, 5.0), strict=True)]
    worth = worth_timing(ScheduleChoice(ways[2], tuple(seconds), 1.0), 2)
    assert worth == (SERIAL, ways[2], ways[3], ways[5], ways[1])


def test_without_layers_only_links_and_products_are_fitted():
    rng = np.random.default_rng(4)
    found = fit(samples_of(TRUE, rng, noise=0.0, layers=0))
    assert found.cost.op_s == found.cost.interference == 0 and found.median_error < 1e-9


def test_samples_that_say_too_little_are_refused():
    with pytest.raises(ConfigError) as caught:
        fit([MessageSample(8, 0.0), MessageSample(8, 1.0)])
    assert [p.where for p in caught.value.problems] == ["samples[0].seconds", "samples", "samples"]
    with pytest.raises(ConfigError, match="larger messages take longer"):
        fit([MessageSample(8, 1.0), MessageSample(1 << 20, 0.1), MatmulSample(8, 1.0, 1.0)])


# ---- beside the pass of another micro-batch ----------------------------------------------------------------------------------


def test_a_pair_takes_the_longest_of_what_its_passes_share_and_what_each_takes_alone():
    cost = dataclasses.replace(FLAT, interference=0.5)
    forward, backward = PassTime(alone_s=3.0, computing_s=1.0, link_s=2.0), PassTime(4.0, 2.0, 2.0)
    assert pair_s(forward, backward, FLAT) == 4.0  # the bytes, and the backward pass by itself
    assert pair_s(forward, dataclasses.replace(backward, computing_s=5.0, alone_s=7.0), FLAT) == 7.0
    assert pair_s(forward, dataclasses.replace(backward, computing_s=6.5), FLAT) == 7.5  # all computing
    slow = pair_s(forward, dataclasses.replace(backward, computing_s=6.5), cost)
    assert slow == pytest.approx(4.0 + 7.5 - 4.0 / 1.5)  # bytes move for four seconds of it


@pytest.mark.parametrize(
    ("share", "alone", "beside"),
    [(0.8, True, False), (1.5, True, True), (3.0, True, False)],
    ids=["the partner hides all", "some is left", "the link is busy all the time"],
)
def test_tiles_are_chosen_beside_another_pass_only_for_what_it_leaves(share, alone, beside):
    """c computing and m messages of a forward pass, 2 c and m of a backward pass: serial order takes max(3 c, 2 c + m, 2 m) beside another, any at least max(3 c, 2 m)."""
    dispatch, wire = even(rows=512)
    product = 2 * 512 * 2 * 1024 * 2048 * 2 / 1e11
    per_s = (int(wire.outbound_PP[0, 1]) + int(wire.inbound_PP[0, 1])) / (share * product)
    cost = dataclasses.replace(FLAT, latency_s=0.0, bytes_per_s=per_s, op_s=2e-4)
    assert link_s(0, cost, wire) == pytest.approx(share * product)
    candidates = [TileSchedule(parts=parts, order="arrival", own_before=0.5) for parts in (1, 2, 4)]
    choose = {"wire": wire, "tile_rows": 64}
    found = compare_schedules(dispatch, SHAPE, cost, candidates, **choose)
    assert (found.schedule != SERIAL) is alone
    paired = compare_schedules(dispatch, SHAPE, cost, candidates, paired=1.0, **choose)
    assert (paired.schedule != SERIAL) is beside
    seconds = dict(paired.seconds)
    least = max(3, 2 * share) * product
    assert seconds[SERIAL] == pytest.approx(max(least, (2 + share) * product), rel=0.02)
    assert all(least <= s <= 1.15 * least for schedule, s in paired.seconds if schedule != SERIAL)
    assert paired.alone_s == pytest.approx(dict(found.seconds)[paired.schedule])


def test_passes_that_run_alone_count_by_their_share():
    dispatch, wire = even()
    call = {"wire": wire, "tile_rows": 64}
    both, some = (
        dict(compare_schedules(dispatch, SHAPE, FLAT, CANDIDATES, paired=p, **call).seconds) for p in (1.0, 0.25)
    )
    for schedule in (SERIAL, *CANDIDATES):
        passes = [LayerSample(dispatch, SHAPE, schedule, wire, 64, 1.0, way) for way in ("forward", "backward")]
        alone = sum(one.predicted_s(FLAT) for one in passes)
        assert some[schedule] == pytest.approx(0.25 * both[schedule] + 0.75 * alone)
    with pytest.raises(PlanError, match=r"paired = 1\.5"):
        compare_schedules(dispatch, SHAPE, FLAT, CANDIDATES, wire=wire, tile_rows=64, paired=1.5)


def test_the_share_of_passes_in_pairs_is_that_of_the_schedule():
    alone = make_schedule("1f1b", pp=1, virtual=1, num_microbatches=4)
    assert paired_share(alone, choose_pairs(alone), rank=0) == 3 / 4
    eager = make_schedule("eager_1f1b", pp=2, virtual=1, num_microbatches=6)
    shares = [paired_share(eager, choose_pairs(eager), rank=rank) for rank in range(2)]
    assert all(0 < share < 1 for share in shares) and paired_share(eager, (), rank=0) == 0

"""Messages posted in one order on all ranks: no set of ranks waits for ever under NCCL's rules, and a wrong order is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from overlap_plan_help import plans_of_group, random_schedule
from overlap_rounds import round_problems
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.tiles.plan import backward_of, plan_overlap
from phalanx.plan.moe.overlap.tiles.rounds import MOST_MESSAGES, MessageEnd, Round, rounds_of
from phalanx.plan.moe.overlap.tiles.types import TileSchedule


def random_group(rng):
    """2 to 8 ranks, ranks without rows, one rank with most of them, any schedule."""
    ep, etp = ((2, 1), (3, 1), (4, 1), (2, 2), (5, 1), (6, 1), (3, 2), (8, 1), (4, 2))[int(rng.integers(9))]
    slots = ep * int(rng.integers(1, 3))
    counts = rng.integers(0, 12, (ep * etp, slots))
    counts[rng.random(ep * etp) < 0.2] = 0
    counts[:, rng.random(slots) < 0.3] = 0
    if rng.random() < 0.2:
        counts[0] *= 5
    schedule = random_schedule(rng)
    if rng.random() < 0.5:
        schedule = TileSchedule(parts=schedule.parts + 1, blocks=schedule.blocks, seed=int(rng.integers(1 << 20)))
    plans = plans_of_group(plan_dispatch(counts, range(slots), ep=ep, etp=etp), schedule, tile_rows=3)
    width = [None, 1, 2][int(rng.integers(3))]
    return [backward_of(plan) for plan in plans] if rng.random() < 0.5 else plans, width


def test_no_ranks_wait_for_ever():
    rng = np.random.default_rng(0)
    messages = 0
    count = times(1500, 400)
    for _ in range(count):
        plans, width = random_group(rng)
        rounds = [rounds_of(plan, width=width) for plan in plans]
        assert round_problems(plans, rounds) == []
        messages += sum(len(one.legs) for of_rank in rounds for one in of_rank)
    assert messages > 33 * count


def test_a_group_has_no_more_messages_than_nccl_takes():
    size = 160
    dispatch = plan_dispatch(np.ones((size, size), dtype=np.int64), range(size), ep=size, etp=1)
    rounds = [rounds_of(plan_overlap(dispatch, TileSchedule(), rank=rank, tile_rows=4)) for rank in (0, 140)]
    assert max(len(one.legs) for one in rounds[0]) == MOST_MESSAGES
    assert sum(len(one.legs) for one in rounds[0]) == 4 * (size - 1)
    ends = [
        {(leg.kind, leg.is_send): one.key for one in of for leg in one.legs if leg.peer == peer}
        for of, peer in zip(rounds, (140, 0), strict=True)
    ]
    assert all(ends[1][kind, not is_send] == key for (kind, is_send), key in ends[0].items()) and len(ends[0]) == 4
    assert all(len(rounds_of(plan)) == 2 for plan in even_plans(4, TileSchedule()))


def test_both_ends_of_a_message_have_the_same_place():
    rng = np.random.default_rng(1)
    for _ in range(200):
        plans, width = random_group(rng)
        ends = {}
        for plan in plans:
            for one in rounds_of(plan, width=width):
                for leg in one.legs:
                    pair = (plan.rank, leg.peer) if leg.is_send else (leg.peer, plan.rank)
                    ends.setdefault((*pair, leg.kind, leg.part, leg.block), []).append(one.key)
        assert all(len(keys) == 2 and keys[0] == keys[1] for keys in ends.values())


def even_plans(ranks, schedule, *, backward=False):
    counts = np.full((ranks, ranks), 12)
    plans = plans_of_group(plan_dispatch(counts, range(ranks), ep=ranks, etp=1), schedule, tile_rows=3)
    return [backward_of(plan) for plan in plans] if backward else plans


def test_a_rank_that_posts_in_another_order_is_found():
    """Two neighbouring rounds of one rank change places: every such fault is found, as messages that meet the wrong end or as ranks that wait for ever."""
    words = set()
    for width in (None, 1):
        plans = even_plans(4, TileSchedule(parts=3, blocks=2, order="arrival"), backward=True)
        rounds = [rounds_of(plan, width=width) for plan in plans]
        for at in range(len(rounds[2]) - 1):
            swapped = list(rounds[2])
            swapped[at : at + 2] = swapped[at + 1], swapped[at]
            found = round_problems(plans, [*rounds[:2], swapped, rounds[3]])
            assert found, (width, at)
            words |= {problem.rule.split(":")[0].rstrip(" 0123456789") for problem in found}
    assert {"message", "every round must come to its end"} <= words


def test_rounds_in_the_order_of_each_ranks_own_list_would_wait_for_ever():
    """The order in which a rank's plan sends and expects, every message by itself: what gloo may do, NCCL may not."""
    plans = even_plans(3, TileSchedule(parts=2, order="own_first"))
    alone = []
    for plan in plans:
        legs = []
        for op in plan.ops:
            kinds = {
                "send": ("outbound", True),
                "wait": ("outbound", False),
                "return": ("inbound", True),
                "wait_return": ("inbound", False),
            }
            if op.kind in kinds and op.peer != plan.rank:
                legs.append(MessageEnd(*kinds[op.kind], op.peer, op.part, max(op.block, 0)))
        alone.append([Round((0, 0, 0, at), (leg,)) for at, leg in enumerate(legs)])
    assert [problem.rule for problem in round_problems(plans, alone)] == ["every round must come to its end"] * 3


def test_inbound_before_outbound_is_found():
    plans = even_plans(2, TileSchedule(order="own_first"))
    rounds = [rounds_of(plan) for plan in plans]
    found = round_problems(plans, [of_rank[::-1] for of_rank in rounds])
    assert {problem.rule for problem in found} == {"must be posted before it is waited for"}


def test_a_message_with_one_end_is_found():
    plans = even_plans(2, TileSchedule(parts=2))
    rounds = [rounds_of(plan) for plan in plans]
    short = replace(rounds[1][-1], legs=rounds[1][-1].legs[:-1])
    (found,) = round_problems(plans, [rounds[0], (*rounds[1][:-1], short)])
    assert "expected" in found.rule or "sent" in found.rule


def test_what_cannot_have_one_order_is_refused():
    counts = np.full((4, 4), 12)
    dispatch = plan_dispatch(counts, range(4), ep=4, etp=1)
    plan = plan_overlap(dispatch, TileSchedule(), rank=0, tile_rows=3, host_of_rank=(0, 0, 1, 1), through_hosts=True)
    with pytest.raises(PlanError, match=r"plan\.hosts.*\n?.*") as err:
        rounds_of(plan, width=0)
    assert "width" in str(err.value)

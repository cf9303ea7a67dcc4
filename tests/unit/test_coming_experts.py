"""What comes to each rank when experts are placed anew: all that it lacks and nothing else, and every expert of the new place has one source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from recovery_plan_help import planner
from test_recorded_moves import written

from phalanx.plan.layout.state import STATE_KINDS
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import LayerPlacements, Placement
from phalanx.plan.placement.arrivals import coming_moves, of_all_kinds, takings
from phalanx.plan.recovery.move_order import GRADIENT_ID, STATE_ID, expert_moves, expert_order, moves_again
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import equal_hosts

pytestmark = pytest.mark.unit
WORLD, SLOTS = 4, 5


def drawn(rng: np.random.Generator, layers: tuple[int, ...], experts: int) -> LayerPlacements:
    """Any placement in which each expert is somewhere."""
    out = {}
    for layer in layers:
        held = [*range(experts), *rng.integers(0, experts, WORLD * SLOTS - experts).tolist()]
        rng.shuffle(held)
        slots = tuple(tuple(held[r * SLOTS : (r + 1) * SLOTS]) for r in range(WORLD))
        out[layer] = Placement(num_experts=experts, slots=(slots,))
    return LayerPlacements(layers=out)


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_what_a_rank_lacks_comes_once_and_nothing_else(seed: int) -> None:
    rng, folding = np.random.default_rng(seed), Folding(world=WORLD, ep=WORLD)
    run = planner(folding, slots=SLOTS)
    layers, experts = tuple(run.spec.moe_layers), run.spec.num_experts
    before, after = ({0: drawn(rng, layers, experts)} for _ in range(2))
    whole = expert_moves(run.spec, folding, run.stages(folding), before=before, after=after, itemsize=4)
    coming = {move.name: move for move in coming_moves(whole)}
    plan_reshard(list(coming.values()), equal_hosts([0] * WORLD)).check()
    for move in whole:
        layer = int(move.name.split(".")[1])
        for rank in range(WORLD):
            had, has = (side[0].layers[layer].local_experts(edp=0, ep=rank) for side in (before, after))
            lacks = sorted(set(has) - set(had))
            staged = coming[move.name].dst.of_rank(rank) if move.name in coming else ()
            assert [held.box.offsets[0] for held in staged] == lacks
            assert [held.local[0] for held in staged] == list(range(len(lacks)))
            found = takings(move, coming.get(move.name), rank)
            assert [has[t.dest.offsets[0]] for t in found] == list(has)
            for taking in found:
                expert, at = has[taking.dest.offsets[0]], taking.source.offsets[0]
                assert (lacks if taking.came else list(had))[at] == expert and taking.came == (expert in lacks)


def test_the_order_of_a_move_makes_both_journeys_again() -> None:
    rng, folding = np.random.default_rng(1), Folding(world=WORLD, ep=WORLD)
    run = planner(folding, slots=SLOTS)
    sides = [{0: drawn(rng, tuple(run.spec.moe_layers), run.spec.num_experts)} for _ in range(2)]
    whole = expert_moves(
        run.spec, folding, run.stages(folding), before=sides[0], after=sides[1], itemsize=run.state_bytes
    )
    order = written(expert_order(folding, sides[0], sides[1]))
    gradients, state = (moves_again(id, order, run) for id in (GRADIENT_ID, STATE_ID))
    assert gradients == coming_moves(whole) and state == of_all_kinds(gradients)
    assert {m.name for m in state} == {f"{kind}/{m.name}" for kind in STATE_KINDS for m in gradients}


def test_where_nothing_comes_nothing_travels() -> None:
    """Slots in another order."""
    rng, folding = np.random.default_rng(2), Folding(world=WORLD, ep=WORLD)
    run = planner(folding, slots=SLOTS)
    placed = drawn(rng, tuple(run.spec.moe_layers), run.spec.num_experts)
    turned = {
        layer: Placement(num_experts=p.num_experts, slots=(tuple(held[::-1] for held in p.slots[0]),))
        for layer, p in placed.layers.items()
    }
    whole = expert_moves(
        run.spec,
        folding,
        run.stages(folding),
        before={0: placed},
        after={0: LayerPlacements(layers=turned)},
        itemsize=4,
    )
    assert coming_moves(whole) == []
    assert all(not taking.came for move in whole for rank in range(WORLD) for taking in takings(move, None, rank))

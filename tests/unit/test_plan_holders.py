"""Sums over the holders of experts, as plans: every element in one place, the same order on both ends; and placements of a run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.config import DispatchConfig, FoldingConfig, Recipe, ResilienceConfig
from phalanx.core.errors import ConfigError, PlanError, Problem
from phalanx.core.recipe import load_recipe
from phalanx.plan.layout.holders import HolderBlock, HolderPlan, plan_holders
from phalanx.plan.layout.parameters import flat_layouts
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import LayerPlacements, Placement
from phalanx.plan.mapping.stages import assign_stages
from phalanx.plan.model.model import PRESETS, parameters
from phalanx.plan.placement.run import ReplicaSettings, run_placement, stage_replicas
from phalanx.plan.recipe import run_problems

TINY = PRESETS["tiny"]


@st.composite
def placements(draw: st.DrawFn) -> list[Placement]:
    """Of one to three layers over one group: every expert somewhere, some on one rank twice."""
    ep, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, ep * slots))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        rest = draw(st.lists(st.integers(0, experts - 1), min_size=ep * slots - experts, max_size=ep * slots - experts))
        flat = draw(st.permutations([*range(experts), *rest]))
        groups = (tuple(tuple(flat[r * slots : (r + 1) * slots]) for r in range(ep)),)
        made.append(Placement(num_experts=experts, slots=groups))
    return made


def plans_of(layers: list[Placement], rows: list[int]) -> tuple[list[HolderPlan], list[list[HolderBlock]]]:
    plans, all_blocks = [], []
    ep = len(layers[0].slots[0])
    for rank in range(ep):
        blocks, at = [], 0
        for placement, row in zip(layers, rows, strict=True):
            blocks.append(HolderBlock(placement, at, row))
            at += row * len(placement.local_experts(edp=0, ep=rank))
        plans.append(plan_holders(blocks, ep=rank, size=ep))
        all_blocks.append(blocks)
    return plans, all_blocks


@settings(max_examples=times(150, 50), deadline=None)
@given(placements(), st.data())
def test_exchanged_parts_add_up_to_the_sum_over_holders(layers: list[Placement], data: st.DataObject) -> None:
    """In integers, so that equal means equal: what runs through `gives` and `takes` in order, without any header."""
    rows = [data.draw(st.integers(1, 300)) for _ in layers]
    plans, blocks = plans_of(layers, rows)
    rng = np.random.default_rng(0)
    sizes = [sum(len(b.placement.local_experts(edp=0, ep=r)) * b.row for b in mine) for r, mine in enumerate(blocks)]
    flats = [rng.integers(0, 1000, n) for n in sizes]
    want = [summed(flats, blocks, layer) for layer in range(len(layers))]
    sums = [flat.copy() for flat in flats]
    for rank, plan in enumerate(plans):
        for peer, runs in enumerate(plan.takes):
            sent = plans[peer].gives[rank]
            assert [b - a for a, b in sent] == [b - a for a, b in runs]
            for (a, b), (c, d) in zip(sent, runs, strict=True):
                sums[rank][c:d] += flats[peer][a:b]
    back = [s.copy() for s in sums]
    for rank, plan in enumerate(plans):
        for peer, runs in enumerate(plan.gives):
            for (a, b), (c, d) in zip(plans[peer].takes[rank], runs, strict=True):
                back[rank][c:d] = sums[peer][a:b]
    for rank, mine in enumerate(blocks):
        for layer, block in enumerate(mine):
            for i, expert in enumerate(block.placement.local_experts(edp=0, ep=rank)):
                at = block.start + i * block.row
                assert (back[rank][at : at + block.row] == want[layer][expert]).all()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_layer_with_replicas_lets_the_buffer_travel(order: tuple[int, int]) -> None:
    """Another layer of the same buffer may have its second copies on the same ranks."""
    layers = [
        Placement(num_experts=2, slots=(((0, 1), (0, 1)),)),
        Placement(num_experts=2, slots=(((0, 0), (1, 1)),)),
    ]
    plans, _ = plans_of([layers[i] for i in order], [3, 3])
    assert all(plan.travels for plan in plans)


def summed(flats: list[np.ndarray], blocks: list[list[HolderBlock]], layer: int) -> dict[int, np.ndarray]:
    out: dict[int, np.ndarray] = {}
    for rank, mine in enumerate(blocks):
        block = mine[layer]
        for i, expert in enumerate(block.placement.local_experts(edp=0, ep=rank)):
            own = flats[rank][block.start + i * block.row : block.start + (i + 1) * block.row]
            out[expert] = out.get(expert, 0) + own
    return out


@settings(max_examples=times(100, 40), deadline=None)
@given(placements())
def test_each_element_is_completed_once_and_written_once(layers: list[Placement]) -> None:
    row = 64 * 60
    plans, _ = plans_of(layers, [row] * len(layers))
    experts = layers[0].num_experts
    assert sum(plan.owned_elements for plan in plans) == row * experts * len(layers)
    assert sum(held.is_writer for plan in plans for held in plan.experts) == experts * len(layers)
    assert len({plan.travels for plan in plans}) == 1
    assert plans[0].travels == any(len(p.holders(e)) > 1 for p in layers for e in range(experts))
    for plan in plans:  # a ring over the holders would send as much, each way
        held = sum(row * (len(h.holders) - 1) / len(h.holders) for h in plan.experts)
        assert abs(plan.sent_elements - held) <= 64 * len(plan.experts)


def test_copies_on_one_rank_are_one_weight_whose_slots_stand_together() -> None:
    placement = Placement(num_experts=3, slots=(((2, 0, 2), (1, 1, 0)),))
    placement.check()
    assert placement.local_experts(edp=0, ep=0) == (2, 0)
    assert placement.group_slots(0).tolist() == [2, 2, 0, 1, 1, 0]


def test_groups_have_equally_many_ranks() -> None:
    ragged = Placement(num_experts=2, slots=(((0,), (1,)), ((0,), (1,), (0,))))
    with pytest.raises(PlanError, match=r"placement\.slots = \[2, 3\]: every group has the same number of ranks"):
        ragged.check()


def test_buckets_are_alike_on_ranks_that_hold_different_numbers_of_experts() -> None:
    folding, specs = make_folding(world=2, ep=2), parameters(TINY)
    uneven = Placement(num_experts=8, slots=((tuple(range(8)), (0,) * 8),))
    placement = LayerPlacements(layers=dict.fromkeys(TINY.moe_layers, uneven))
    names = []
    for rank in range(2):
        layouts = flat_layouts(specs, folding, placement, rank, bucket_elements=3000)
        names.append({key: [p.param.name for p in layout.params] for key, layout in layouts.items()})
    assert names[0] == names[1] and len([key for key in names[0] if key.startswith("expert")]) > 1


def test_replicas_need_one_expert_parallel_group() -> None:
    placement = Placement(num_experts=8, slots=(((0, 1, 2, 3, 4), (5, 6, 7, 0, 0)),) * 2)
    with pytest.raises(PlanError, match=r"folding.ep = 2: experts with replicas have one expert-parallel group"):
        flat_layouts(parameters(TINY), make_folding(world=4, ep=2), placement, 0)


# ---- the placement of a run ------------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_its_slots_and_f_counts_hosts() -> None:
    stages = assign_stages(TINY, (0,), seq_len=8).stages
    folding = make_folding(world=8, ep=4, etp=2)
    asked = ReplicaSettings(slots_per_rank=4, f=2, ranks_per_host=4)
    made = stage_replicas(TINY, folding, stages, rank=5, asked=asked)
    for placement in made.placement.layers.values():
        assert placement.hosts == (0, 0, 1, 1) and placement.slots_per_rank == 4
        hosts = [{placement.hosts[ep] for _, ep in placement.holders(e)} for e in range(8)]
        assert all(len(held) == 2 for held in hosts)
    assert made.placement.to_json() == stage_replicas(TINY, folding, stages, rank=0, asked=asked).placement.to_json()
    lowered = stage_replicas(TINY, folding, stages, rank=0, asked=dataclasses.replace(asked, f=3))
    assert any("f lowered from 3 to 2" in note for note in lowered.notes) and "f lowered" in lowered.explain()


def test_loads_decide_how_many_replicas_an_expert_gets() -> None:
    stages = assign_stages(TINY, (0,), seq_len=8).stages
    loads = np.array([[100.0, 1, 1, 1, 1, 1, 1, 1]])
    asked = ReplicaSettings(slots_per_rank=6, f=1, loads=loads)
    made = run_placement(TINY, make_folding(world=4, ep=4), stages, rank=0, asked=asked)
    slots = made.of_layer(TINY.moe_layers[0]).slots[0]
    assert sum(rank.count(0) for rank in slots) == 4 and len({e for rank in slots for e in rank}) == 8
    wrong = dataclasses.replace(asked, loads=np.ones((3, 8)))
    with pytest.raises(ConfigError, match=r"resilience.loads = \(3, 8\)"):
        run_placement(TINY, make_folding(world=4, ep=4), stages, rank=0, asked=wrong)


def problems(world: int = 4, **sections: object) -> list[Problem]:
    sections = {"resilience": ResilienceConfig(slots_per_rank=4), **sections}
    recipe = dataclasses.replace(load_recipe(None, ["--model.preset", "tiny"]), **sections)
    return run_problems(recipe, world=world, tokenizer_vocab=256)


def test_a_recipe_with_replicas() -> None:
    assert problems() == []
    assert (
        problems(world=3, train=dataclasses.replace(Recipe().train, global_batch=24)) == []
    )  # 3 ranks need not divide 8 experts
    (one,) = problems(folding=FoldingConfig(ep=2))
    assert one.where == "folding.ep" and one.value == 2 and one.hint == "leave it out, or set 4"
    (few,) = problems(resilience=ResilienceConfig(slots_per_rank=1))
    assert few.where == "resilience.slots_per_rank" and few.hint == "at least 2"
    (tiles,) = problems(dispatch=DispatchConfig(overlap="fine"))
    assert tiles.where == "dispatch.overlap" and "resilience.slots_per_rank" in tiles.rule
    assert problems(dispatch=DispatchConfig(overlap="coarse:2")) == []
    staged = problems(folding=FoldingConfig(stages=("dp2.ep2", "dp2.ep2")))
    assert any(p.where == "resilience.slots_per_rank" and "one folding for all stages" in p.rule for p in staged)


def test_settings_of_replicas_need_replicas() -> None:
    with pytest.raises(ConfigError, match=r"resilience.f = 3.*no effect.*nothing has replicas"):
        load_recipe(None, ["--resilience.f", "3", "--resilience.heal", "false"])
    for ranks in ("1", "4"):  # also on one: the recipe of a run on four goes on there
        load_recipe(None, ["--resilience.f", "3", "--launch.ranks", ranks])
    with pytest.raises(ConfigError, match=r"resilience.slots_per_rank = 0"):
        load_recipe(None, ["--resilience.slots_per_rank", "0"])

"""Plans of an elastic run under every folding and with replicas, without any process: whatever is lost, every part of the state has a source that
lives, or is named; nothing moves that is there already; all members make the same plan."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from recovery_plan_help import after, fresh, new_member, planner, shuffled, tiny
from reshard_plan_help import shard_layouts
from tiers import some

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PlanError
from phalanx.plan.layout.box_cells import cells_without
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.state import StateLayouts
from phalanx.plan.layout.tensors import Held
from phalanx.plan.mapping.folding import Folding, folding_problems
from phalanx.plan.model import PRESETS
from phalanx.plan.recovery import ranks as recovery_ranks
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.memory import bytes_on_hosts
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.ranks import assigned
from phalanx.plan.recovery.recipe import recovery_problems
from phalanx.plan.recovery.state_descriptor import StateDescriptor, read_state_descriptor
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move, equal_hosts
from phalanx.train.placement.suspects import StatePiece, all_agree, find_suspects, row_of, sums_of

FOLDINGS = [
    Folding(world=8, ep=2),
    Folding(world=8, ep=4, tp=2),
    Folding(world=8, pp=2, ep=2),
    Folding(world=8, tp=2, pp=2, ep=2),
    Folding(world=8, cp=2, ep=4),
    Folding(world=8, tp=2, etp=2, ep=2),
    Folding(world=8, etp=2, ep=2),
    Folding(world=16, tp=2, cp=2, pp=2, ep=2),
    Folding(world=16, tp=2, pp=2, ep=2, etp=2),
]
REPLICAS = [
    (Folding(world=8), 3),
    (Folding(world=8, tp=2), 2),
    (Folding(world=8, pp=2), 4),
    (Folding(world=8, etp=2), 4),
    (Folding(world=16, tp=2, pp=2), 2),
]


def held_masks(
    move: Move, sides: Iterable[tuple[Sequence[int], Sequence[Sequence[Held]]]]
) -> list[dict[int, np.ndarray]]:
    """Of each side: rank -> which elements it holds."""
    out = []
    for ranks, held in sides:
        masks = {}
        for rank, boxes in zip(ranks, held, strict=True):
            masks[rank] = np.zeros(move.dst.shape, dtype=bool)
            for h in boxes:
                masks[rank][h.box.slices()] = True
        out.append(masks)
    return out


def check_plan(run: RecoveryPlanner, plan: GenerationPlan) -> int:
    """Element by element: what is needed is there or named. Returns the bytes that must travel."""
    bytes_needed, missing = 0, set()
    for move in (*plan.params, *plan.buffers):
        src, dst = held_masks(move, ((move.src.ranks, move.src.held), (move.dst.ranks, move.dst.held)))
        there = np.any(list(src.values()), axis=0) if src else np.zeros(move.dst.shape, dtype=bool)
        assert np.all(np.any(list(dst.values()), axis=0)), f"nobody is to hold all of {move.name}"
        if not np.all(there):
            missing.add(move.name)
        for rank, need in dst.items():
            bytes_needed += int((need & ~src[rank]).sum() if rank in src else need.sum()) * move.itemsize
    assert set(plan.missing) == missing
    return bytes_needed


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("base", some(FOLDINGS, 4), ids=lambda f: f"{f.world}-{f.label()}")
def test_losses_under_every_folding(base: Folding, zero: int) -> None:
    rng, run = random.Random(base.hash), planner(base, floor=min(2, base.dp * base.cp, base.edp), zero=zero)
    for _ in range(3):
        plan = run.plan(fresh(base.world))
        assert plan.folding == base and plan.hosts == tuple(range(base.world)) and plan.idle == ()
        uids = iter(range(100, 200))
        for _ in range(3):
            lost = rng.sample(plan.uids, rng.randint(1, min(2, len(plan.uids) - 1)))
            facts = after(plan, lost=lost) + [new_member(next(uids)) for _ in range(rng.randint(0, 2))]
            plan = run.plan(shuffled(facts, rng))
            assert plan.hash == run.plan(shuffled(facts, rng)).hash
            check_plan(run, plan)
            assert not plan.idle or plan.remarks
            assert plan.folding == run.folding(len(facts))
            if plan.missing:
                break  # all go back to the checkpoint


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("base", FOLDINGS, ids=lambda f: f"{f.world}-{f.label()}")
def test_any_one_may_be_lost_where_all_has_two_holders(base: Folding, zero: int) -> None:
    floor = min(base.dp * base.cp, base.edp)
    assert bool(recovery_problems(base, f=2)) == (floor < 2)
    if floor < 2:
        return
    run = planner(base, zero=zero)
    plan = run.plan(fresh(base.world))
    for lost in plan.uids[:: base.world // 8]:
        found = run.plan(after(plan, lost=[lost]))
        assert found.missing == () and (found.folding.tp, found.folding.cp) == (base.tp, base.cp)
        assert found.exact == (found.folding.pp == base.pp)
        for moves in (found.params, found.buffers):
            plan_reshard(moves, equal_hosts([0] * len(found.members))).check()


@pytest.mark.parametrize(("base", "slots"), REPLICAS, ids=lambda x: x.label() if isinstance(x, Folding) else str(x))
def test_experts_have_new_holders_after_a_loss(base: Folding, slots: int) -> None:
    rng, run = random.Random(f"{base.hash}{slots}"), planner(base, slots=slots)
    plan = run.plan(fresh(base.world))
    assert plan.folding == run.base and len(plan.placement) == base.pp
    for turn in range(4):
        facts = after(plan, lost=[rng.choice(plan.uids)]) + ([new_member(100 + turn)] if turn % 2 else [])
        found = run.plan(shuffled(facts, rng))
        assert {run.plan(shuffled(facts, rng)).hash for _ in range(4)} == {found.hash}
        check_plan(run, found)
        if check_floor(run, plan) >= 2:  # before the loss
            assert found.missing == ()
        if found.missing:
            break
        plan = found


def test_a_join_costs_what_the_joiner_needs() -> None:
    run = planner(Folding(world=4), slots=6)
    three = run.plan(after(run.plan(fresh(4)), lost=["host0.1.x"]))
    four = run.plan([*after(three), new_member(9)])
    assert check_floor(run, three) == check_floor(run, four) == 2 and four.missing == ()
    new = four.uids.index("host0.9.x")
    needed = sum(h.box.num_elements for held, _ in run.holds(four.state_descriptor(new)).values() for h in held)
    buffers = sum(math.prod(m.dst.shape) for m in four.buffers)
    assert check_plan(run, four) == 4 * (needed + buffers)


def check_floor(run: RecoveryPlanner, plan: GenerationPlan) -> int:
    """Every expert of every layer is on as many ranks as slots allow, up to the floor; how many that is."""
    assert run.slots_per_rank is not None
    hosts = plan.folding.ep
    floor = min(run.floor, hosts, hosts * run.slots_per_rank // run.spec.num_experts)
    seen = []
    for stage in plan.placement:
        for layer, placed in stage.layers.items():
            seen.append(layer)
            for expert in range(run.spec.num_experts):
                assert len(placed.holders(expert)) >= floor, f"layer {layer} expert {expert}"
    assert sorted(seen) == list(run.spec.moe_layers)
    return floor


@pytest.mark.parametrize(("dense", "layers"), [(1, (1, 1)), (0, (2, 0))])
@pytest.mark.parametrize(("world", "slots"), [(16, 4), (6, 8)])
def test_ep_need_not_divide_the_experts_for_a_stage_that_has_none(
    world: int, slots: int, dense: int, layers: tuple[int, int]
) -> None:
    """Replicas on 8, then 7 ep ranks, or on 3 of them; a stage of a dense layer, or of the head alone."""
    run = planner(Folding(world=world, pp=2), slots=slots, spec=replace(tiny(), dense_layers=dense, dense_ffn=48))
    run = replace(run, pipeline=PipelineConfig(layers=layers))
    plan = run.plan(fresh(world))
    assert plan.folding.world == world and sorted(len(of.layers) for of in plan.placement) == [0, 2 - dense]
    found = run.plan(after(plan, lost=[plan.uids[3]]))
    assert found.missing == () and found.folding.pp == 2
    check_plan(run, found)


@pytest.mark.parametrize(
    ("world", "slots", "experts", "lost", "fetched"),
    [(8, 1, 2, (0, 2), 1), (8, 2, 4, (0, 2), 2), (16, 2, 8, (0, 4), 2)],
)
def test_who_changes_stage_fetches_experts_and_nobody_else_does(
    world: int, slots: int, experts: int, lost: tuple[int, ...], fetched: int
) -> None:
    spec = replace(tiny(), num_experts=experts, top_k=1)
    run = planner(Folding(world=world, pp=2), slots=slots, spec=spec)
    plan = run.plan(fresh(world, machines=world))
    found = run.plan(after(plan, lost=[plan.uids[i] for i in lost]))
    assert found.missing == () and found.folding.pp == 2
    had = {fact.uid: experts_of(plan, rank) for rank, fact in enumerate(plan.members)}
    new = [experts_of(found, rank) - had[found.uids[rank]] for rank in range(found.folding.world)]
    assert sum(map(len, new)) == fetched and sum(map(bool, new)) == 1


def test_stages_whose_bounds_change_keep_the_layers_that_stay() -> None:
    """Of four members in two stages one is lost, and three make three: the middle one has a layer of each stage before."""
    spec = replace(tiny(), num_experts=4, top_k=1, num_layers=4)
    run = planner(Folding(world=4, pp=2, cp=2), slots=4, floor=1, spec=spec)
    plan = run.plan(fresh(4, machines=4))
    found = run.plan(after(plan, lost=[plan.uids[0]]))
    assert found.folding.pp == 3 and found.missing == ()
    run.plan([*after(found), new_member(90, machine=90)])
    check_plan(run, found)


def experts_of(plan: GenerationPlan, rank: int) -> set[tuple[int, int]]:
    """(layer, expert) that a rank has a slot for."""
    return {(layer, expert) for layer, held in plan.state_descriptor(rank).slots for expert in held}


def test_what_stays_does_not_move() -> None:
    """One of eight is replaced at once: its successor gets what it held, and nothing else travels."""
    for base in FOLDINGS:
        run = planner(base, floor=min(2, base.dp * base.cp, base.edp))
        plan = run.plan(fresh(base.world))
        state = [run.holds(plan.state_descriptor(rank)) for rank in range(base.world)]
        for rank in (1, base.world - 2):
            found = run.plan([*after(plan, lost=[plan.uids[rank]]), new_member(99)])
            if found.missing:
                continue
            assert check_plan(run, found) == sum(
                sum(h.box.num_elements for h in held) * 4 for held, _ in state[rank].values()
            ) + sum(4 * math.prod(m.dst.shape) for m in found.buffers if rank in m.dst.ranks)


def test_bytes_that_travel_are_those_that_are_lacking() -> None:
    base = Folding(world=8, tp=2, ep=2)
    run = planner(base)
    found = run.plan(after(run.plan(fresh(8)), lost=["host0.3.x"]))
    assert found.folding.world == 6 and len(found.idle) == 1 and "6" not in found.idle[0]
    made = plan_reshard(found.params, equal_hosts(range(len(found.members))))
    sent = sum(part.box.num_elements * 4 for hop in made.hops for part in hop.parts)
    lacking = check_plan(run, found) - sum(
        4 * math.prod(m.dst.shape) for m in found.buffers for r in m.dst.ranks if r not in m.src.ranks
    )
    assert lacking <= sent <= 1.05 * lacking


def test_members_that_came_from_different_generations() -> None:
    """A generation that only some had entered: the others still stand where they stood."""
    rng, run = random.Random(5), planner(Folding(world=8, tp=2, ep=2))
    first = run.plan(fresh(8))
    second = run.plan(after(first, lost=[first.uids[0]]))
    for _ in range(6):
        old, new = ({f.uid: f for f in after(plan)} for plan in (first, second))
        facts = [(new if rng.random() < 0.5 and new[uid].descriptor else old)[uid] for uid in second.uids]
        plan = run.plan(shuffled(facts, rng))
        assert plan.missing == ()
        check_plan(run, plan)


@pytest.mark.parametrize(
    ("base", "slots", "zero"), [(FOLDINGS[1], None, 1), (FOLDINGS[2], None, 0), (Folding(world=8), 3, 0)]
)
def test_members_that_were_cut_off_in_a_move_hold_some_waves_there_and_the_others_here(
    base: Folding, slots: int | None, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wave has all its holders, so with one more loss nothing is missing that was not before; twice in a row."""
    monkeypatch.setattr("phalanx.plan.recovery.planner.LEAST_WAVE", 1)
    rng, run = random.Random(7), planner(base, slots=slots, zero=zero)
    plan = run.plan(after(run.plan(fresh(base.world)), lost=["host0.3.x"]))
    assert len(plan.waves) >= 8 and sorted(sum(plan.waves, ())) == sorted(run.order)
    assert sorted(m.name for i in range(len(plan.waves)) for m in plan.moves_of(i)) == sorted(
        m.name for m in plan.moves
    )
    for waves in (rng.randrange(1, len(plan.waves)), len(plan.waves) - 1, 1):
        facts = [
            fact
            if rank >= plan.folding.world
            else replace(fact, descriptor=plan.descriptor_after(rank, waves, fact.descriptor))
            for rank, fact in enumerate(plan.members)
        ]
        for fact in facts:
            assert fact.descriptor is not None and read_state_descriptor(fact.descriptor.to_dict()) == fact.descriptor
        plan = run.plan(shuffled(facts, rng))
        assert plan.missing == ()
        check_plan(run, plan)
    rests, rest = 0, plan.members[0].descriptor
    while rest is not None:
        rests, rest = rests + 1, rest.rest
    assert rests <= 3, "what a later move took as well is not told of again"
    simple = after(plan, lost=[plan.uids[0]])
    assert run.plan(simple).missing == ()


@pytest.mark.parametrize("zero", [0, 1])
def test_who_was_cut_off_holds_each_piece_where_it_stood_then(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.plan.recovery.planner.LEAST_WAVE", 1)
    run = planner(Folding(world=8, tp=2, ep=4), zero=zero)
    plan = run.plan(after(run.plan(fresh(8)), lost=["host0.3.x"]))
    older = plan.members[0].descriptor
    assert older is not None
    for waves in range(1, len(plan.waves)):
        cut, moved = plan.descriptor_after(0, waves, older), {n for wave in plan.waves[:waves] for n in wave}
        assert cut is not None and cut.newest != older
        held, newer, before = run.holds(cut), run.holds(cut.newest), run.holds(older)
        assert all(held.get(n) == (newer if n in moved else before).get(n) for n in run.order)


def test_plans_that_decide_something_else_have_another_hash() -> None:
    """By which members find out that they have made different plans: whatever the difference is in."""
    run = planner(Folding(world=8), slots=4)
    plan = run.plan(after(run.plan(fresh(8)), lost=["host0.3.x"]))
    others = [
        replace(plan, hosts=tuple(h + 1 for h in plan.hosts)),
        replace(plan, placement=run.plan(fresh(8)).placement),
        replace(plan, missing=("norm",)),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 4


def test_idle_members_hold_what_they_held() -> None:
    """Three of tp 2: one is idle, and its half is a source if another member is lost before a step was committed."""
    run = planner(Folding(world=4, tp=2))
    first = run.plan(fresh(4))
    facts = after(first, lost=[first.uids[1]])
    three = run.plan(facts)
    assert three.folding == Folding(world=2, tp=2) and three.exact
    (idle,) = three.idle
    assert idle == first.uids[0] and "is idle: tp 2 needs a multiple of 2 devices, 3 are left" in three.remarks[0]
    again = run.plan([f for f in facts if f.uid != first.uids[2]])  # the holder of the same half is lost as well
    assert again.missing == () and again.uids == (first.uids[0], first.uids[3])
    stale = run.plan(after(three, lost=[three.uids[0]]))
    assert stale.missing


def test_the_nearest_mapping_is_taken_and_said() -> None:
    run = planner(Folding(world=4, tp=2))
    plan = run.plan(after(run.plan(fresh(4)), lost=["host0.0.x", "host0.1.x", "host0.2.x"]))
    assert plan.folding == Folding(world=1) and not plan.exact and plan.missing
    assert "tp 2 -> 1" in plan.remarks[0]
    assert run.least() == 1
    few = planner(Folding(world=4), slots=4)
    assert few.least() == 2
    with pytest.raises(PlanError, match="at least 2"):
        few.plan(fresh(1))


def test_hosts_and_blocks() -> None:
    """Slices of an expert stay on one machine, and so do tp groups where one has enough members."""
    run = planner(Folding(world=8, tp=2, etp=2, ep=2), floor=2)
    plan = run.plan(fresh(8, machines=4))
    assert plan.hosts == (0, 0, 1, 1, 2, 2, 3, 3)
    lost = [plan.uids[0], plan.uids[3]]
    facts = [*after(plan, lost=lost), new_member(50, machine=0), new_member(51, machine=1)]
    found = run.plan(facts)
    assert all(found.hosts[i] == found.hosts[i + 1] for i in range(0, 8, 2)) and found.missing == ()
    odd = run.plan(after(plan, lost=lost))
    assert odd.folding.world == 4 and len(odd.idle) == 2, "two of the six have no partner on their machine"


@pytest.mark.parametrize("stands", [((2, 3), (0, 5), (1, 4), (0, 2)), ((2, 3), (1, 0), (1, 2), (2, 5))])
def test_slices_of_an_expert_stay_on_one_machine_where_members_stand_in_different_generations(
    stands: tuple[tuple[int, int], ...],
) -> None:
    """(machine, rank) of four that stood in one mapping at different times: ranks 2 and 3 of two machines were never together, but looked like a whole block."""
    folding = Folding(world=6, etp=2)
    facts = [
        replace(new_member(i, machine=machine), descriptor=StateDescriptor(folding=folding, rank=rank))
        for i, (machine, rank) in enumerate(stands)
    ]
    plan = planner(folding).plan(facts)
    assert plan.folding.etp == 2
    assert all(len({plan.members[rank].machine for rank in group}) == 1 for group in plan.folding.groups("etp"))


def test_of_two_that_had_one_rank_the_one_in_the_middle_of_a_move_keeps_it() -> None:
    folding = Folding(world=4, tp=2)
    run = planner(folding)
    old, *others = (replace(new_member(i), descriptor=StateDescriptor(folding=folding, rank=i)) for i in range(4))
    moving = [
        replace(f, descriptor=StateDescriptor(folding=folding, rank=f.descriptor.rank, moved=9, rest=f.descriptor))
        for f in (replace(new_member(9), descriptor=old.descriptor), *others)
        if f.descriptor is not None
    ]
    assert run.plan([old, *moving]).idle == (old.uid,)


def test_state_descriptors_say_what_layouts_say() -> None:
    run = planner(Folding(world=8, pp=2), slots=4)
    plan = run.plan(fresh(8))
    layouts = shard_layouts(
        StateLayouts(spec=tiny(), folding=plan.folding, stages=run.stages(plan.folding), placement=plan.placement_of),
        zero=0,
    )
    for rank in range(8):
        state = run.holds(read_state_descriptor(plan.state_descriptor(rank).to_dict()))
        assert {n: held for n, (held, _) in state.items()} == {
            n: layout.of_rank(rank) for n, layout in layouts.items() if rank in layout.ranks
        }


def test_reports_that_make_no_sense_are_refused() -> None:
    good = StateDescriptor(folding=Folding(world=4, tp=2), rank=1).to_dict()
    assert read_state_descriptor(good).rank == 1
    for bad in ({**good, "rank": 4}, {**good, "slots": [[1]]}, {k: v for k, v in good.items() if k != "hosts"}):
        with pytest.raises(PlanError, match="state_descriptor"):
            read_state_descriptor(bad)
    with pytest.raises(PlanError):
        read_state_descriptor({**good, "folding": {**good["folding"], "tp": 3}})
    for bad in ({"hosts": [[0, 1, 3]]}, {"racks": [[0, 1, 5]]}, {"hosts": [0, 1]}):
        with pytest.raises(PlanError, match=r"\d numbers for 4 ranks"):
            read_state_descriptor({**good, **bad})


def test_state_that_no_rank_of_the_run_can_hold_is_refused() -> None:
    """Every member read such a report, and ended in a ValueError or an IndexError of whatever met it first."""
    run = planner(Folding(world=4), slots=4)
    facts = after(run.plan(fresh(4)))
    good = facts[0].descriptor
    assert good is not None
    seven = StateDescriptor(folding=Folding(world=7, tp=7), rank=0)
    slots = ((99, (0, 1, 2, 3)), (1, (0, 1, 2, 3)))
    for bad, said in (
        (seven, r"folding\.tp = 7"),
        (replace(good, moved=1, rest=seven), r"folding\.tp = 7"),
        (replace(seven, folding=Folding(world=6, pp=6)), "stages"),
        (replace(good, slots=slots), r"are of layers \[0, 1\], of experts 0 to 7"),
        (replace(good, slots=((0, (0, 1, 2, 77)), (1, (0, 1, 2, 3)))), "are of layers"),
    ):
        with pytest.raises(PlanError, match=rf"what {facts[0].uid} reports of its state[\s\S]*{said}"):
            run.plan([replace(facts[0], descriptor=bad), *facts[1:]])


# ---- copies that differ ----------------------------------------------------------------------------------------------


def piece(name: str, first: int = 0) -> StatePiece:
    return StatePiece(name, Box((first, 0), (1, 4)))


def test_the_majority_is_believed_and_without_one_nobody() -> None:
    a, b = piece("master/a"), piece("exp_avg/b", 2)
    found = find_suspects([{a: 1, b: 1}, {a: 1, b: 2}, {a: 7}])
    assert found.outvoted == ((2, a),) and found.doubted == ((0, b), (1, b))
    assert found.all == [(2, "a", a.box), (0, "b", b.box), (1, "b", b.box)]
    outvoted, doubted = found.explain(["x", "y", "z"])
    assert outvoted.startswith("z had other bits than most holders of master/a[0:1, 0:4]")
    assert doubted.startswith("x, y differ in exp_avg/b[2:3, 0:4], and it cannot be decided")
    assert find_suspects([{a: 1}, {}, {a: 1}]).all == [] and find_suspects([{a: 1}, {a: 2}]).outvoted == ()


def test_what_is_doubted_is_no_source() -> None:
    run = planner(Folding(world=4, ep=2))
    plan = run.plan(after(run.plan(fresh(4)), lost=["host0.3.x"]))
    assert plan.missing == () and plan.folding.ep == 1
    name = next(m.name for m in plan.params if ".experts." in m.name)
    move = next(m for m in plan.params if m.name == name)
    expert = Box((1, *(0 for _ in move.dst.shape[1:])), (1, *move.dst.shape[1:]))
    holders = [
        r for r, held in zip(move.src.ranks, move.src.held, strict=True) if any(h.box.contains(expert) for h in held)
    ]
    assert len(holders) == 2
    fewer = plan.without([(holders[0], name, expert)])
    assert fewer.missing == () and fewer.hash != plan.hash
    left = next(m for m in fewer.params if m.name == name).src
    assert not any(h.box.intersection(expert) for h in left.of_rank(holders[0]))
    plan_reshard(fewer.params, equal_hosts([0] * 3)).check()
    assert check_plan(run, fewer) - check_plan(run, plan) == expert.num_elements * 4
    none = plan.without([(rank, name, expert) for rank in holders])
    assert none.missing == (name,)


def test_boxes_without_boxes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
        box, hole = (random_box(shape, rng) for _ in range(2))
        there = np.zeros(shape, dtype=int)
        there[hole.slices()] = 1
        for part in cells_without(box, hole):
            there[part.slices()] += 1
        assert np.all(there[box.slices()] == 1) and there.max() == 1
    assert cells_without(Box((0, 0), (2, 2)), Box((2, 0), (1, 2))) == [Box((0, 0), (2, 2))]


def random_box(shape: Sequence[int], rng: random.Random) -> Box:
    offsets = tuple(rng.randrange(n) for n in shape)
    return Box(offsets, tuple(rng.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)))


def test_assignment_is_the_cheapest() -> None:
    from itertools import permutations

    rng = random.Random(2)
    for size in range(1, 6):
        for _ in range(20):
            table = [[rng.choice([0, 0, 3, 10**9, rng.randrange(50)]) for _ in range(size)] for _ in range(size)]
            best = min(sum(table[i][p[i]] for i in range(size)) for p in permutations(range(size)))
            found = assigned(table)
            assert sorted(found) == list(range(size)) and sum(table[i][found[i]] for i in range(size)) == best
    assert assigned([[1] * 5] * 5) == list(range(5))


def test_members_that_are_cheapest_where_they_are_cost_an_assignment_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lack the same, or each has a place of its own and three do not; of 1,024 members the method took 8 s."""
    found, real = list[int](), recovery_ranks._augment
    monkeypatch.setattr(
        recovery_ranks, "_augment", lambda table, row, *rest: (found.append(int(row)), real(table, row, *rest))
    )
    size = 200
    own = np.full((size, size), 7) + np.arange(size)
    assert assigned(own) == list(range(size)) and found == []
    own[np.arange(size), np.arange(size)] = 0
    own[[3, 50, 90]] = own[[50, 90, 3]]
    wanted = [*range(size)]
    wanted[3], wanted[50], wanted[90] = 50, 90, 3
    assert assigned(own) == wanted and found == [3, 50, 90]


def test_what_members_say_of_all_ranks_grows_with_none_of_them() -> None:
    """Each reads what all say, and hashes it: of 4,096 they were 22 MB."""
    sizes = []
    for world in (64, 1024):
        hosts = tuple(rank // 8 for rank in range(world))
        racks = tuple(rank // 32 for rank in range(world))
        at = StateDescriptor(folding=Folding(world=world), rank=1, hosts=hosts, racks=racks)
        sizes.append(len(json.dumps(at.to_dict())))
        assert read_state_descriptor(json.loads(json.dumps(at.to_dict()))) == at
        for said in (hosts, [[host, 8] for host in range(world // 8)]):  # as earlier versions wrote it
            assert read_state_descriptor({**at.to_dict(), "hosts": said, "racks": racks}) == at
    assert sizes[1] < 1.1 * sizes[0]
    odd = (3, 3, 4, 4, 5, 2, 2, 2, 3, 7)
    at = StateDescriptor(folding=Folding(world=10), rank=1, hosts=odd)
    assert read_state_descriptor(at.to_dict()) == at
    for bad in ([[0, 1, 1 << 60]], [[0, 1 << 60, 1]], [[0, 1, 1, 1]]):
        with pytest.raises(PlanError, match="no state descriptor"):
            read_state_descriptor({**at.to_dict(), "hosts": bad})


def test_rows_of_checksums_say_what_tables_with_names_say() -> None:
    rng = random.Random(5)
    pieces = [StatePiece(f"master/w{i}", Box((i,), (1,))) for i in range(4)]
    seen = set[bool]()
    for _ in range(300):
        told = [{p: int(rng.random() < 0.1) for p in pieces if rng.random() < 0.6} for _ in range(3)]
        rows = np.stack([row_of(sums, pieces) for sums in told])
        assert [sums_of(row, pieces) for row in rows] == told
        assert all_agree(rows) == (not find_suspects(told).all)
        seen.add(all_agree(rows))
    assert seen == {False, True}
    with pytest.raises(ValueError, match=r"other/w\[0:1\] is not a piece"):
        row_of({StatePiece("other/w", Box((0,), (1,))): 1}, pieces)


# ---- many members -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 2])
def test_a_plan_of_hundreds_of_members_takes_seconds(slots: int | None) -> None:
    """Work for each pair of members and each parameter would be minutes: it was 40 s of a processor for half as many members with replicas, and 12 s without."""
    spec, base = PRESETS["qwen3-30b-a3b"], Folding(world=256, ep=8)
    first = planner(base, slots=slots, zero=1, spec=spec).plan(fresh(256, machines=32))
    facts = after(first, lost=[fact.uid for fact in first.members if fact.machine == "host1"])
    begin_s = time.process_time()
    plan = planner(base, slots=slots, zero=1, spec=spec).plan(facts)
    program = plan_reshard(plan.moves_of(0), equal_hosts(plan.hosts)).program(3)
    assert time.process_time() - begin_s < 60
    assert plan.folding.world == 248 and not plan.missing and program


# ---- room for state -----------------------------------------------------------------------------------------------------------


def limited(run: RecoveryPlanner, times: float) -> RecoveryPlanner:
    """With room for so many times what its own mapping holds."""
    return replace(run, room=replace(run.room, limit=times * run.bytes_of(run.base)))


def test_ranks_are_rather_idle_than_without_room() -> None:
    """7 of 8 ranks would hold every expert each."""
    run = planner(Folding(world=8, ep=4), floor=2)
    assert (run.folding(7).world, run.folding(7).ep) == (7, 1)
    choice = limited(run, 2).choose(7)
    assert (choice.folding.world, choice.folding.ep, choice.idle) == (6, 2, 1)
    assert "with more than 6 of the 7 devices a rank has no room for its state" in choice.reason
    assert limited(run, 2).bytes_of(choice.folding) <= 2 * run.bytes_of(run.base)


def test_what_a_rank_holds_is_what_the_layouts_say() -> None:
    for base in FOLDINGS:
        for zero in (0, 1):
            run = planner(base, floor=min(2, base.dp * base.cp, base.edp), zero=zero)
            wide, most = run.room, 0
            for rank in range(base.world):
                held, _ = zip(*run.holds(StateDescriptor(folding=base, rank=rank)).values(), strict=True)
                most = max(most, sum(h.box.num_elements for of in held for h in of))
            kept = run.bytes_of(base) - run_parameters(run) * (wide.parameter + wide.gradient)
            assert kept / wide.optimizer == pytest.approx(most, rel=0.02)


def run_parameters(run: RecoveryPlanner) -> float:
    """Of the fullest rank, from its layouts without shards."""
    whole = replace(run, zero=0)
    return whole.bytes_of(whole.base) / sum((whole.room.parameter, whole.room.gradient, whole.room.optimizer))


@pytest.mark.parametrize("machines", [(0, 1, 1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 3, 3, 3, 3, 3)])
@pytest.mark.parametrize("base", [Folding(world=8), Folding(world=8, tp=2, ep=2), Folding(world=8, pp=2, ep=2)])
def test_what_a_rank_holds_of_others_is_counted_where_hosts_have_different_sizes(
    base: Folding, machines: tuple[int, ...]
) -> None:
    run = planner(base, floor=2, zero=1)
    plan = run.plan([new_member(i, machine=machine) for i, machine in enumerate(machines)])
    counted = bytes_on_hosts(
        run.spec, plan.folding, run.stages(plan.folding), run.room, slots=None, holders=2, hosts=plan.hosts
    )
    for rank, found in enumerate(counted):
        state = run.holds(plan.state_descriptor(rank))
        boxes = sum(h.box.num_elements for held, _ in state.values() for h in held) * run.room.optimizer
        whole = sum(math.prod(shape) for _, shape in state.values()) * (run.room.parameter + run.room.gradient)
        assert found == pytest.approx(boxes + whole, rel=0.03)  # shards begin at multiples of 64 elements


def test_who_has_no_room_for_the_copies_of_all_others_is_idle() -> None:
    """One member of a machine is left beside four of another, so it would keep copies of the whole optimizer state."""
    run = planner(Folding(world=8), floor=2, zero=1)
    plan = run.plan(fresh(8, machines=2))
    left = after(plan, lost=plan.uids[1:4])
    assert run.plan(left).folding.world == 5
    run = limited(run, 1.25)
    found = run.plan(left)
    assert found.idle == (plan.uids[0],) and found.missing == ()
    assert "copies of state that other hosts leave host0.0.x need more room than resilience.state_gb" in found.reason
    assert found.hash == run.plan(left[::-1]).hash
    back = run.plan([*after(found), *(new_member(90 + i) for i in range(3))])
    assert back.folding.world == 8 and back.missing == ()


def test_who_is_needed_has_a_rank_though_there_is_no_room() -> None:
    """Eight experts in slots of three each need three ranks."""
    run = limited(planner(Folding(world=3), slots=3, floor=2, zero=1), 1.0)
    plan = run.plan([new_member(i, machine=machine) for i, machine in enumerate((0, 1, 1))])
    assert plan.folding.world == 3 and plan.idle == ()
    said = "the state of host0.0.x needs more room than resilience.state_gb, and the others alone make no mapping"
    assert plan.reason == said


def test_a_limit_that_the_runs_own_mapping_breaks_is_refused() -> None:
    run = planner(Folding(world=8, ep=4))
    assert run.room_problems() == [] and limited(run, 1.0).room_problems() == []
    (problem,) = limited(run, 0.9).room_problems()
    assert problem.where == "resilience.state_gb" and "GB of parameters, gradients and optimizer state" in problem.rule
    words = problem.hint.split()
    assert float(words[1].rstrip(",")) * 1e9 >= run.bytes_of(run.base)


def test_too_few_holders_are_told_in_ranks_and_in_hosts() -> None:
    (problem,) = recovery_problems(Folding(world=4, ep=4), f=2, per_host=2)
    assert (
        problem.rule
        == "leaves every expert on 1 of the hosts of 2 ranks, and with resilience.heal = true it needs 2 (resilience.f)"
    )
    (problem,) = recovery_problems(Folding(world=4, ep=4), f=2)
    assert (
        problem.rule
        == "leaves every expert on 1 of the ranks, and with resilience.heal = true it needs 2 (resilience.f)"
    )
    (problem,) = recovery_problems(Folding(world=8, tp=2, pp=2), f=2, per_host=4)
    assert (problem.where, problem.hint) == ("resilience.wanted", "use 12 ranks, or smaller folding.tp and folding.pp")
    assert problem.rule.startswith("leaves every part of the dense tensors on 1 of the hosts of 4 ranks")


def test_what_is_named_in_the_place_of_too_few_holders_is_legal() -> None:
    """Slices of experts (etp) need holders as whole experts do, and every number of ranks is one that the degrees tile."""
    seen = set()
    degrees = itertools.product((4, 6, 8, 12), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4))
    for world, tp, pp, ep, etp in degrees:
        base = Folding(world=world, tp=tp, pp=pp, ep=ep, etp=etp)
        if folding_problems(base):
            continue
        for floor in (2, 3, 5):
            found = {problem.where: problem for problem in recovery_problems(base, f=floor)}
            assert bool(found.keys() - {"launch.ranks"}) == (ep * etp > 1 and base.edp < floor)
            for where, problem in found.items():
                said = re.match(r"use (?:folding\.(\w+) = )?(\d+)", problem.hint)
                assert said is not None
                other = replace(base, **{said[1] or "world": int(said[2])})
                assert not folding_problems(other)
                assert where not in {p.where for p in recovery_problems(other, f=floor)}
                seen.add((where, said[1]))
    assert seen == {
        ("launch.ranks", None),
        *itertools.product(("folding.ep",), ("ep", "etp", None)),
        *itertools.product(("folding.etp",), ("etp", None)),
    }


def test_machines_with_fewer_members_than_slices_have_fewer_slices() -> None:
    """One member on each of four cannot share experts with another; the run ended, and said that it had 0 members and needed 1."""
    run = planner(Folding(world=8, etp=2, ep=2))
    first = run.plan(fresh(8, machines=4))
    left = after(first, lost=[first.uids[i] for i in (1, 3, 4, 6)])
    found = run.plan(left)
    check_plan(run, found)
    assert found.folding.world == 4 and found.folding.etp == 1 and not found.exact and found.missing == ()
    assert "too few machines have 2 members to share experts: etp 2 -> 1 at most" in found.reason
    few = planner(Folding(world=8, etp=2), slots=8, spec=replace(tiny(), num_experts=16))
    assert few.least() == 2
    with pytest.raises(PlanError, match=r"members = 1: .* at least 2, 2 of them on a machine"):
        few.plan(fresh(1))

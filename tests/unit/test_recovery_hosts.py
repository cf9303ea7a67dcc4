"""Plans of an elastic run on several hosts of several members each: on how many hosts every part of the state is, counted element by element, and that a host may be lost wherever it is on two."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from recovery_plan_help import after, new_member, planner, shuffled, tiny
from tiers import times

from phalanx.plan.mapping import LayerPlacements
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import Placement
from phalanx.plan.recovery.devices import num_holding
from phalanx.plan.recovery.experts import num_with_replicas
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.recipe import recovery_problems
from phalanx.plan.recovery.state_descriptor import Fact

pytestmark = pytest.mark.unit
CASES: list[tuple[int, Folding]] = [
    (2, Folding(world=4, ep=2)),
    (2, Folding(world=8, ep=4)),
    (4, Folding(world=8, ep=4)),
    (4, Folding(world=12, ep=2)),
    (2, Folding(world=8, tp=2, ep=2)),
    (4, Folding(world=16, tp=2, ep=4)),
    (2, Folding(world=8, pp=2, ep=2)),
    (4, Folding(world=16, pp=2, ep=4)),
    (4, Folding(world=16, etp=2, ep=2)),
    (4, Folding(world=8, cp=2, ep=4)),
    (4, Folding(world=16, tp=2, pp=2, ep=2, etp=2)),
]
"""(members of a host, mapping)"""


def members(folding: Folding, per_host: int) -> list[Fact]:
    return [new_member(rank, machine=rank // per_host) for rank in range(folding.world)]


def hosts_with(run: RecoveryPlanner, plan: GenerationPlan) -> int:
    """Hosts that hold an element of some parameter, of that which the fewest hold."""
    fewest = len(set(plan.hosts))
    held = [run.holds(plan.state_descriptor(rank)) for rank in range(plan.folding.world)]
    for name, param in run._layout(plan.folding).params.items():
        on = {host: np.zeros(param.shape, bool) for host in plan.hosts}
        for rank, host in enumerate(plan.hosts):
            for box in held[rank].get(name, ((), ()))[0]:
                on[host][box.box.slices()] = True
        fewest = min(fewest, int(np.sum(list(on.values()), axis=0).min()))
    return fewest


@pytest.mark.parametrize(("per_host", "base"), CASES, ids=lambda x: x.label() if isinstance(x, Folding) else str(x))
@pytest.mark.parametrize("zero", [0, 1])
def test_holders_are_counted_on_hosts_and_any_host_of_two_may_be_lost(per_host: int, base: Folding, zero: int) -> None:
    rng = random.Random(f"{base.hash}{zero}")
    run = planner(base, floor=2, zero=zero)
    for _ in range(times(6, 2)):
        plan, uid = run.plan(members(base, per_host)), 100
        assert plan.folding == base and plan.holders == 2 == min(2, hosts_with(run, plan))
        for _ in range(4):
            facts = after(plan, lost=rng.sample(plan.uids, rng.randint(1, per_host)))
            for _ in range(rng.randint(0, per_host)):
                uid += 1
                facts.append(new_member(uid, machine=rng.randint(0, base.world // per_host)))
            if not facts or (plan := run.plan(shuffled(facts, rng))).missing:
                break
            assert plan.hash == run.plan(shuffled(facts, rng)).hash
            assert min(2, hosts_with(run, plan)) == plan.holders
            machines = {fact.machine for fact in plan.members}
            assert (plan.holders == 2 or len(machines) == 1) or plan.notes, "that a host may not be lost is told"
            for machine in machines if plan.holders == 2 and len(machines) > 1 else ():
                lost = [fact.uid for fact in plan.members if fact.machine == machine]
                assert run.plan(after(plan, lost=lost)).missing == ()


def test_hosts_that_hold_the_same_part_are_those_of_its_group() -> None:
    rng = random.Random(5)
    for _, folding in CASES:
        for _ in range(10):
            hosts = [rng.randint(0, 3) for _ in range(folding.world)]
            for state in ("edp", "dp_cp"):
                fewest = min(len({hosts[rank] for rank in group}) for group in folding.groups(state))
                assert num_holding(state, folding, hosts) == fewest


@pytest.mark.parametrize(
    ("base", "lost", "changed"),
    [(Folding(world=12, ep=2), (0, 2, 4, 7, 9, 11), 4), (Folding(world=16, ep=4), (3, 5, 6, 7, 8, 12, 13, 14), 2)],
)
def test_no_host_takes_all_copies_of_an_expert_though_that_moves_least(
    base: Folding, lost: tuple[int, ...], changed: int
) -> None:
    """Every member could keep its experts, but then one host has all copies of some. Of the members of a host those change that have to."""
    run = planner(base, floor=2)
    plan = run.plan(members(base, base.world // 2))
    found = run.plan(after(plan, lost=[plan.uids[rank] for rank in lost]))
    assert (found.folding.world, found.folding.ep) == (base.world // 2, base.ep)
    assert found.holders == hosts_with(run, found) == 2 and found.missing == () and found.notes == ()
    had = {uid: base.coord(rank, "ep") for rank, uid in enumerate(plan.uids)}
    assert sum(had[uid] != found.folding.coord(rank, "ep") for rank, uid in enumerate(found.uids)) == changed


def test_experts_are_divided_so_that_a_small_host_can_hold_its_part() -> None:
    """The two members of the second host hold half of the experts each, or all of them; a quarter each would leave a half on the first host alone."""
    run = planner(Folding(world=12, ep=4), floor=2)
    assert (run.folding(8).ep, replace(run, per_host=6).folding(8).ep) == (4, 2)
    for of_second, ep in ((4, 4), (2, 2), (1, 1)):
        plan = run.plan([new_member(i, machine=int(i >= 8 - of_second)) for i in range(8)])
        assert (plan.folding.world, plan.folding.ep, plan.holders, hosts_with(run, plan)) == (8, ep, 2, 2)


def test_hosts_of_eight_keep_their_experts_divided_by_eight() -> None:
    """With eight holders of each on eight hosts; to count ranks alone asked for nine, and left experts divided by two after a loss."""
    run = RecoveryPlanner(spec=tiny(), base=Folding(world=64, ep=8), seq_len=32, floor=2, per_host=8)
    assert recovery_problems(run.base, f=2, per_host=8) == []
    assert [(run.folding(8 * n).ep, run.folding(8 * n).world) for n in (8, 7, 6, 2)] == [
        (8, 64),
        (8, 56),
        (8, 48),
        (8, 16),
    ]
    assert run.folding(8).ep == 4, "of a single host each member counts"
    plan = run.plan(members(run.base, 8))
    for _ in range(5):
        plan = run.plan(
            after(plan, lost=[fact.uid for fact in plan.members if fact.machine == plan.members[0].machine])
        )
        assert plan.missing == () and plan.folding.ep == 8 and plan.holders == 2
        assert not any(move.src.held != move.dst.held for move in plan.params), "and no expert moves"


def test_where_hosts_are_too_few_members_of_one_are_holders() -> None:
    """Each stage is on one host: either of its members may be lost, if not the host."""
    base = Folding(world=4, pp=2, ep=2)
    run = planner(base, floor=2)
    plan = run.plan(members(base, 2))
    assert (plan.folding.pp, plan.folding.ep, plan.holders) == (2, 1, 1)
    assert [note.split(",")[0] for note in plan.notes] == [
        f"parts of the {name} have 1 of the 2 holders that resilience.f asks for"
        for name in ("dense tensors", "experts")
    ]


@pytest.mark.parametrize(
    ("base", "per_host", "lost", "hosts"),
    [
        (Folding(world=6, tp=2, ep=2), 3, (4,), [0, 0, 1, 1]),
        (Folding(world=12, tp=4), 6, (3,), [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_a_block_of_two_hosts_is_not_kept_where_state_would_be_on_one(
    base: Folding, per_host: int, lost: tuple[int, ...], hosts: list[int]
) -> None:
    run = planner(base, floor=2)
    plan = run.plan(members(base, per_host))
    found = run.plan(after(plan, lost=[plan.uids[rank] for rank in lost]))
    assert (list(found.hosts), found.holders, hosts_with(run, found)) == (hosts, 2, 2) and found.missing == ()
    assert len(found.idle) == len(found.members) - len(hosts) and len(set(found.uids)) == len(found.uids)


def test_an_idle_member_of_another_machine_takes_no_copies_from_those_of_one() -> None:
    run = planner(Folding(world=4, tp=2), floor=2, zero=1)
    plan = run.plan([new_member(i) for i in range(4)])
    found = run.plan([*after(plan), new_member(9, machine=1)])
    assert found.idle == ("host1.9.x",) and found.hosts == plan.hosts == (0, 1, 2, 3) and found.holders == 2
    for lost in found.uids[:4]:
        assert run.plan(after(found, lost=[lost])).missing == ()


def test_an_idle_member_of_another_rack_takes_no_copies_from_those_of_one_machine() -> None:
    def in_racks(facts: list[Fact]) -> list[Fact]:
        return [replace(fact, rack=f"r{fact.machine}") for fact in facts]

    run = planner(Folding(world=4, tp=2), floor=2, zero=1)
    plan = run.plan(in_racks([new_member(i) for i in range(4)]))
    found = run.plan(in_racks([*after(plan), new_member(9, machine=1)]))
    assert found.idle == ("host1.9.x",) and found.hosts == plan.hosts == (0, 1, 2, 3) and found.racks == ()


def test_the_layer_whose_experts_the_fewest_hosts_hold_counts() -> None:
    two, one = (Placement(num_experts=2, slots=(stage,)) for stage in (((0, 1), (0, 1)), ((0, 0), (1, 1))))
    for layers in ({0: two, 1: one}, {0: one, 1: two}):
        assert num_with_replicas(LayerPlacements(layers=layers), (0, 1)) == 1
    assert num_with_replicas(LayerPlacements(layers={0: two}), (0, 1)) == 2


def test_holders_of_replicas_are_counted() -> None:
    """Though a note says something else of them."""
    run = planner(Folding(world=4), slots=5, floor=2)
    plan = run.plan([new_member(i, machine=i // 2) for i in range(4)])
    assert plan.notes and plan.holders == 2 == hosts_with(run, plan)
    three = planner(Folding(world=6), slots=6, floor=4)
    plan = three.plan([new_member(i, machine=i // 2) for i in range(6)])
    assert plan.notes and plan.holders == 3 == hosts_with(three, plan)


def test_what_hosts_cannot_have_is_told_of_their_settings() -> None:
    (problem,) = recovery_problems(Folding(world=12, tp=4, etp=2), f=3, per_host=3)
    assert (problem.where, problem.hint) == ("launch.ranks", "use 4") and "multiple of folding.etp = 2" in problem.rule
    (problem,) = recovery_problems(Folding(world=2, tp=2), f=2, per_host=1)
    assert (problem.where, problem.value) == ("resilience.wanted", 2) and "use 4 ranks" in problem.hint
    (problem,) = recovery_problems(Folding(world=2, tp=2), f=2)
    assert problem.where == "launch.ranks"

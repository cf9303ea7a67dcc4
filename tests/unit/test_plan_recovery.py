"""Recovery: every loss of a small job planned and checked by hand; nothing lost is made up, nobody idles without a reason."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

import phalanx.plan.recovery.recovery as recovery
from phalanx.core.errors import PlanError
from phalanx.plan.layout.shard_copies import shard_holders
from phalanx.plan.mapping.folding import Folding, fit_problems, make_folding
from phalanx.plan.mapping.model import PRESETS
from phalanx.plan.placement.fleet import equal_fleet
from phalanx.plan.placement.replicas import replica_counts, zipf_loads
from phalanx.plan.placement.search import Effort, plan_placement
from phalanx.plan.recovery.devices import Limits, choose_folding, place_devices
from phalanx.plan.recovery.recovery import RecoveryPlan, Terms
from phalanx.plan.recovery.state import (
    Device,
    JobState,
    Span,
    StageExperts,
    dense_copies,
    stage_fleet,
    thin_state,
)

pytestmark = pytest.mark.unit
QUICK = Effort(swaps=20, balance_swaps=10)
SPEC = dataclasses.replace(PRESETS["tiny"], num_layers=4, dense_layers=0, num_experts=8)
LIMITS = Limits(spec=SPEC, seq_len=64, num_samples=64)


def plan_recovery(state, living, limits, **terms) -> RecoveryPlan:
    return recovery.plan_recovery(state, living, limits, Terms(**terms))


def job(folding: Folding, *, ranks_per_host=1, slots=4, floor=2, zero=1) -> JobState:
    """A running job, placed by the planner, its expert layers divided evenly over the stages."""
    devices = tuple(Device(r, r // ranks_per_host) for r in range(folding.world))
    layers = list(SPEC.moe_layers)
    stages = []
    for pp in range(folding.pp):
        part = tuple(layers[pp * len(layers) // folding.pp : (pp + 1) * len(layers) // folding.pp])
        fleet = stage_fleet(folding, devices, pp, slots_per_rank=slots)
        loads = zipf_loads(len(part), SPEC.num_experts, skew=1.0)
        plan = plan_placement(replica_counts(loads, fleet, floor=floor), fleet, loads, effort=QUICK)
        stages.append(StageExperts(layers=part, placement=plan))
    return JobState(
        folding=folding, devices=devices, stages=tuple(stages), slots_per_rank=slots, floor=floor, zero=zero
    )


def replicated(world, **degrees):
    """All ranks of a stage as one expert-parallel group."""
    pp, etp = degrees.get("pp", 1), degrees.get("etp", 1)
    return Folding(world=world, ep=world // (pp * etp), **degrees)


def alive(state: JobState, lost, joined=()):
    return [d for d in state.devices if d.host not in lost] + [Device(100 + i, h) for i, h in enumerate(joined)]


def held_after(state: JobState, plan: RecoveryPlan):
    """(layer, expert) -> hosts, and dense name -> spans by device, once everything has arrived: carried out by hand."""
    living = {d.host for d in (*plan.devices, *plan.idle)}
    experts = {
        (layer, e, host)
        for stage in state.stages
        for i, layer in enumerate(stage.layers)
        for host, held in zip(stage.placement.fleet.host_names, stage.placement.slots[i], strict=True)
        for e in held
        if host in living
    }
    for stage in plan.stages:
        for i, e, src, dst in stage.migration.fetches:
            assert (stage.layers[i], e, src) in experts, "a source that has it"
            experts.add((stage.layers[i], e, dst))
    return experts


def check_by_hand(state: JobState, plan: RecoveryPlan) -> None:
    plan.check()
    ids = [d.id for d in (*plan.devices, *plan.idle)]
    assert len(set(ids)) == len(ids)
    if plan.action != "go_on":
        return
    experts = held_after(state, plan)
    for stage in plan.stages:
        new = stage.migration.new
        for i, layer in enumerate(stage.layers):
            for host, held in zip(new.fleet.host_names, new.slots[i], strict=True):
                assert all((layer, e, host) in experts for e in held)
        new.check()
    if plan.reshard:
        return
    have = {
        (c.name, c.device): [] for c in dense_copies(state.folding, state.devices, floor=state.floor, zero=state.zero)
    }
    for c in dense_copies(state.folding, state.devices, floor=state.floor, zero=state.zero):
        have[c.name, c.device].append(c.part)
    known = {key: list(spans) for key, spans in have.items()}
    for f in plan.dense:
        assert any(s.start <= f.part.start and f.part.stop <= s.stop for s in known[f.name, f.src])
        assert f.src in ids
        have.setdefault((f.name, f.dst), []).append(f.part)
    for c in dense_copies(plan.new, plan.devices, floor=state.floor, zero=state.zero):
        points = sorted({c.part.start, c.part.stop, *(x for s in have[c.name, c.device] for x in s)})
        for a, b in itertools.pairwise(p for p in points if c.part.start <= p <= c.part.stop):
            assert any(s.start <= a and b <= s.stop for s in have[c.name, c.device]), (c, have[c.name, c.device])


JOBS = {
    "dp8": (replicated(8), 1),
    "dp8 on 4 hosts": (replicated(8), 2),
    "tp2": (replicated(8, tp=2), 2),
    "pp2": (replicated(8, pp=2), 1),
    "tp2 pp2": (replicated(12, tp=2, pp=2), 2),
    "cp2 etp2": (replicated(8, cp=2, etp=2), 2),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_loss_of_one_host_is_survived(name):
    """f = 2: whatever the mapping, no checkpoint, every state has a living source, as many devices as whole groups allow."""
    folding, per_host = JOBS[name]
    state = job(folding, ranks_per_host=per_host)
    assert not thin_state(state)
    for lost in state.hosts:
        plan = plan_recovery(state, alive(state, {lost}), LIMITS, effort=QUICK)
        assert plan.action == "go_on" and plan.exact and not plan.missing
        check_by_hand(state, plan)
        left = folding.world - per_host
        unit = folding.tp * folding.cp * folding.pp
        assert plan.new.world == left - left % unit and len(plan.idle) == left % unit
        assert bool(plan.idle) == ("needs a multiple" in plan.reason)
        assert plan.job(state).hosts  # what runs now can be planned for again
        plan.job(state).check()


@given(st.sampled_from(sorted(JOBS)), st.data())
@settings(max_examples=40, deadline=None)
def test_any_loss_is_survived_or_named(name, data):
    """Some holder of everything lives, or the plan goes back to the checkpoint and names exactly what is gone."""
    folding, per_host = JOBS[name]
    state = job(folding, ranks_per_host=per_host, zero=data.draw(st.integers(0, 1)))
    lost = data.draw(st.sets(st.sampled_from(state.hosts), max_size=len(state.hosts) - 1))
    joined = data.draw(st.lists(st.sampled_from([50, 51]), unique=True, max_size=2))
    plan = plan_recovery(state, alive(state, lost, joined), LIMITS, effort=QUICK)
    gone = [
        f"layer {layer} expert {e}"
        for stage in state.stages
        for i, layer in enumerate(stage.layers)
        for e in range(SPEC.num_experts)
        if set(stage.placement.holders(i, e))
        and {stage.placement.fleet.host_names[n] for n in stage.placement.holders(i, e)} <= lost
    ]
    assert sorted(m for m in plan.missing if m.startswith("layer")) == (sorted(gone) if plan.action != "wait" else [])
    dense = {}
    for c in dense_copies(state.folding, state.devices, floor=2, zero=state.zero):
        dense.setdefault((c.name, c.part), set()).add(state.devices[c.device].host)
    dead = {name for (name, _), hosts in dense.items() if hosts <= lost}
    if plan.action != "wait":
        assert {m.split(" [")[0] for m in plan.missing if not m.startswith("layer")} == dead
        assert plan.action == ("checkpoint" if gone or dead else "go_on")
    check_by_hand(state, plan)


def test_seven_devices_and_what_they_can_do():
    """tp 2 x pp 2 of 12 ranks; 3 hosts of 2 die: 6 devices make one group of 4, 2 idle, and it is said why."""
    state = job(replicated(12, tp=2, pp=2), ranks_per_host=2, floor=3, slots=4)
    plan = plan_recovery(state, alive(state, {1, 3, 5}), LIMITS, effort=QUICK)
    assert plan.new.world == 4 and [d.host for d in plan.idle] in ([0, 0], [2, 2], [4, 4])
    assert "tp 2 x pp 2 needs a multiple of 4 devices, 6 are left" in plan.explain()


def test_devices_keep_their_coordinates():
    """Losing host 0 of pp 2 moves as few devices between stages as can be: those that stay need no weights."""
    state = job(replicated(12, pp=2), ranks_per_host=1)
    plan = plan_recovery(state, alive(state, {0, 1}), LIMITS, effort=QUICK)
    assert {d.id for d in plan.devices[:5]} >= {2, 3, 4, 5}
    weights = [f for f in plan.dense if f.name.startswith("weights")]
    assert len(weights) == 1 and weights[0].dst >= 6  # one device of stage 1 goes to stage 0
    old, devices = state.folding, state.devices
    order, idle = place_devices(old, devices, devices, old)
    assert order == devices and idle == ()


def test_mappings_after_a_loss():
    old = replicated(16, tp=2, pp=2, etp=2)
    same = choose_folding(old, 13, LIMITS)
    assert (same.folding.world, same.folding.tp, same.folding.pp, same.folding.ep, same.idle) == (12, 2, 2, 3, 1)
    assert not fit_problems(dataclasses.replace(same.folding, ep=1), SPEC, seq_len=64)
    fewer = choose_folding(replicated(8, tp=2, cp=2, pp=2), 7, LIMITS)
    assert fewer.folding.world < 8 and "no mapping with the degrees before fits 7 devices" in fewer.reason
    freed = choose_folding(replicated(8, pp=4), 7, dataclasses.replace(LIMITS, fits=lambda f: f.pp >= 2))
    assert (freed.folding.world, freed.folding.pp) == (6, 3)
    assert freed.idle == 1
    plain = choose_folding(make_folding(world=8, ep=4), 6, dataclasses.replace(LIMITS, replicated=False))
    assert plain.folding.ep in (2,) and plain.folding.edp == 3
    few = choose_folding(replicated(8), 8, dataclasses.replace(LIMITS, num_samples=5))
    assert few.folding.world == 5 and "a step has 5 samples" in few.reason
    assert choose_folding(replicated(2), 1, dataclasses.replace(LIMITS, fits=lambda f: f.world > 1)) is None


def test_too_few_hosts_wait_and_say_for_whom():
    state = job(replicated(4))
    plan = plan_recovery(state, alive(state, {1, 2}), LIMITS, min_hosts=3, effort=QUICK)
    assert plan.action == "wait" and plan.new is None
    assert "waiting for 1 of 1, 2" in plan.explain()
    with pytest.raises(PlanError, match="no mapping to run"):
        plan.job(state)
    few = plan_recovery(state, alive(state, {1, 2, 3}), LIMITS, effort=QUICK)
    assert few.action == "wait" and "8 experts need a slot each, 1 devices have 4 for a stage" in few.explain()
    nothing = plan_recovery(state, alive(state, {1}), dataclasses.replace(LIMITS, fits=lambda f: False), effort=QUICK)
    assert nothing.action == "wait" and "no legal mapping" in nothing.explain()


def test_all_holders_of_an_expert_lost():
    """Both hosts of the rarest expert: back to the checkpoint, by name, with everything planned for the restart."""
    state = job(replicated(6), slots=3)
    placement = state.stages[0].placement
    rare = min(range(8), key=lambda e: len(placement.holders(0, e)))
    lost = set(placement.holders(0, rare))
    plan = plan_recovery(state, alive(state, lost), LIMITS, effort=QUICK)
    assert plan.action == "checkpoint" and f"layer 0 expert {rare}" in plan.missing
    assert "go back to the checkpoint" in plan.explain() and "lost for good" in plan.explain()
    plan.stages[0].migration.new.check()


def test_hosts_come_back():
    """A joined host gets ranks, experts and dense state; the rest keeps what it has."""
    state = job(replicated(6))
    small = plan_recovery(state, alive(state, {2}), LIMITS, effort=QUICK).job(state)
    back = plan_recovery(small, [*small.devices, Device(77, 9)], LIMITS, effort=QUICK)
    assert back.action == "go_on" and back.new.world == 6 and back.lost == ()
    assert {f.dst for f in back.dense if f.name.startswith("weights")} == {77}
    assert all(f.dst == 9 for s in back.stages for f in s.migration.fetches[: s.migration.urgent])
    check_by_hand(small, back)


def test_loads_and_racks_are_used():
    state = job(replicated(8), slots=4)
    loads = zipf_loads(4, 8, skew=2.0, seed=3)
    racks = dataclasses.replace(equal_fleet(8, 4, num_racks=4), names=tuple(range(8)))
    plan = plan_recovery(state, alive(state, {7}), LIMITS, loads=loads, fleet=racks, effort=QUICK)
    new = plan.stages[0].migration.new
    hot = int(loads[0].argmax())
    assert new.copies[0].sum(1)[hot] == new.copies[0].sum(1).max()
    assert new.fleet.racks == (0, 0, 1, 1, 2, 2, 3) and new.rack_certificate is not None
    with pytest.raises(PlanError, match="a row for each of the 4 expert layers"):
        plan_recovery(state, alive(state, {7}), LIMITS, loads=loads[:2], effort=QUICK)


def test_mending_is_the_least_that_can_move():
    """Only experts below the floor travel, once each; what that leaves open, a later plan does."""
    state = job(replicated(8), slots=4)
    quick = plan_recovery(state, alive(state, {3}), LIMITS, place="mend", effort=QUICK)
    best = plan_recovery(state, alive(state, {3}), LIMITS, effort=QUICK)
    placement = state.stages[0].placement
    below = sum(len(set(placement.holders(i, e)) - {3}) < 2 for i in range(4) for e in range(8))
    assert quick.num_expert_copies == below < best.num_expert_copies
    assert quick.stages[0].migration.new.certificate.guaranteed >= 2
    check_by_hand(state, quick)
    later = plan_recovery(quick.job(state), quick.devices, LIMITS, effort=QUICK)
    assert later.action == "go_on" and later.dense == ()
    wide = job(replicated(8, pp=2))  # a device changes its stage: nothing to mend there, so it is placed anew
    check_by_hand(wide, plan_recovery(wide, alive(wide, {0, 1}), LIMITS, place="mend", effort=QUICK))


def test_every_survivor_makes_the_same_plan():
    state = job(replicated(8, pp=2), ranks_per_host=2)
    plans = [plan_recovery(state, alive(state, {1}), LIMITS, effort=QUICK) for _ in range(2)]
    assert plans[0].hash == plans[1].hash and plans[0].to_json() == plans[1].to_json()


# ---- holders of dense state -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_shards_have_holders_on_as_many_hosts_as_there_are(hosts, floor):
    holders = shard_holders(tuple(hosts), floor=floor)
    for owner, members in enumerate(holders):
        assert members[0] == owner
        assert len({hosts[m] for m in members}) == len(members) == min(floor, len(set(hosts)))


def test_state_on_too_few_hosts_is_known_beforehand():
    """tp 2 x dp 2 on 2 hosts of 2: with tp inside a host both hosts have all; dp inside a host keeps both copies on one."""
    assert not thin_state(job(replicated(4, tp=2), ranks_per_host=2))
    state = job(replicated(4, pp=2), ranks_per_host=2, floor=1)
    thin = thin_state(dataclasses.replace(state, floor=2))
    assert thin and all("pp" in name for name in thin)


def test_zero_1_is_cut_anew_with_exact_parts():
    state = job(replicated(4))
    plan = plan_recovery(state, alive(state, {3}), LIMITS, effort=QUICK)
    parts = {(f.dst, f.part) for f in plan.dense}
    assert (0, Span(Fraction(1, 4), Fraction(1, 3))) in parts
    moved = sum(f.part.stop - f.part.start for f in plan.dense)
    needed = 3 * 2 * Fraction(1, 3)  # three shards, two holders each
    assert 0 < moved < needed


# ---- errors -----------------------------------------------------------------------------------------------------------------------


def test_wrong_jobs_are_named():
    state = job(replicated(4))
    cases = [
        (dataclasses.replace(state, devices=state.devices[:3]), "one for each of the 4 ranks"),
        (dataclasses.replace(state, devices=(state.devices[0],) * 4), "numbers of devices differ"),
        (dataclasses.replace(state, floor=0, zero=2), "is 0 or 1"),
        (dataclasses.replace(state, stages=state.stages * 2), "one for each of pp 1"),
        (dataclasses.replace(state, devices=tuple(Device(i, 9) for i in range(4))), "the hosts of that stage are"),
    ]
    for wrong, words in cases:
        with pytest.raises(PlanError, match=words):
            plan_recovery(wrong, state.devices, LIMITS)
    with pytest.raises(PlanError, match="give a new device a new number"):
        plan_recovery(state, [Device(0, 3)], LIMITS)
    with pytest.raises(PlanError, match="each device is there once"):
        plan_recovery(state, [Device(0, 0)] * 2, LIMITS)
    wide = dataclasses.replace(state, folding=replicated(4, etp=2), devices=state.devices)
    with pytest.raises(PlanError, match="are on one host"):
        plan_recovery(wide, state.devices, LIMITS)


def test_pp_changes_need_the_layers_of_the_new_stages():
    state = job(replicated(8, pp=4), ranks_per_host=1, floor=1)
    free = dataclasses.replace(LIMITS, fits=lambda f: f.pp == 2)
    with pytest.raises(PlanError, match="some expert layers for each of pp 2"):
        plan_recovery(state, alive(state, ()), free, layers=((0, 1, 2),), effort=QUICK)
    assert [s.layers for s in plan_recovery(state, alive(state, ()), free, effort=QUICK).stages] == [(0, 1), (2, 3)]
    plan = plan_recovery(state, alive(state, ()), free, layers=((0, 1), (2, 3)), effort=QUICK)
    assert plan.reshard and plan.new.pp == 2 and plan.exact and "cut anew" in plan.explain()
    check_by_hand(state, plan)


@pytest.mark.parametrize("fault", ["dead_sources", "forgets_dense", "keeps_silent", "idle_without_reason"])
def test_planted_faults_are_caught(monkeypatch, fault):
    state = job(replicated(8, pp=2), ranks_per_host=1)
    if fault == "dead_sources":
        whole = recovery._dense_fetches
        monkeypatch.setattr(recovery, "_dense_fetches", lambda j, b, here, n, d: whole(j, b, here | {1}, n, d))
    elif fault == "forgets_dense":
        monkeypatch.setattr(recovery, "_without", lambda part, held: [])
    elif fault == "keeps_silent":
        monkeypatch.setattr(recovery, "_gone", lambda copies, here: ())
    else:
        choose = recovery.choose_folding
        monkeypatch.setattr(recovery, "choose_folding", lambda *a: dataclasses.replace(choose(*a), reason=""))
    lost = {1} if fault != "keeps_silent" else {0, 1, 2, 3}
    with pytest.raises((PlanError, AssertionError, KeyError, StopIteration)):
        plan = plan_recovery(state, alive(state, lost), LIMITS, effort=QUICK)
        check_by_hand(state, plan)
        assert not any(name.startswith("weights") for name in plan.missing) or fault != "keeps_silent"
        assert {n for n in plan.missing if n.startswith("weights")} == (
            {"weights tp0 pp0"} if fault == "keeps_silent" else set()
        )

"""After a loss: the mapping that is left, who takes which rank, and who holds copies of shards, checked by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.plan.layout.shard_copies import shard_holders
from phalanx.plan.mapping.folding import Folding, fit_problems, make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.recovery.devices import Device, Limits, choose_folding, place_devices

pytestmark = pytest.mark.unit
SPEC = dataclasses.replace(PRESETS["tiny"], num_layers=4, dense_layers=0, num_experts=8)
LIMITS = Limits(spec=SPEC, seq_len=64, num_samples=64)


def replicated(world, **degrees):
    """All ranks of a stage as one expert-parallel group."""
    pp, etp = degrees.get("pp", 1), degrees.get("etp", 1)
    return Folding(world=world, ep=world // (pp * etp), **degrees)


def test_six_devices_and_what_they_can_do():
    """tp 2 x pp 2 of 12 ranks; 3 hosts of 2 die: 6 devices make one group of 4, 2 idle, and it is said why."""
    choice = choose_folding(replicated(12, tp=2, pp=2), 6, LIMITS)
    assert (choice.folding.world, choice.idle) == (4, 2)
    assert "tp 2 x pp 2 needs a multiple of 4 devices, 6 are left" in choice.reason


def test_devices_keep_their_coordinates():
    """Losing hosts 0 and 1 of pp 2 moves as few devices between stages as can be: those that stay need no weights."""
    old = replicated(12, pp=2)
    devices = tuple(Device(r, r) for r in range(12))
    choice = choose_folding(old, 10, LIMITS)
    order, idle = place_devices(old, devices, devices[2:], choice.folding)
    assert {d.id for d in order[:5]} >= {2, 3, 4, 5} and idle == ()
    assert sum(d.id >= 6 for d in order[:5]) == 1  # one device of stage 1 goes to stage 0
    assert place_devices(old, devices, devices, old) == (devices, ())


def test_mappings_after_a_loss():
    old = replicated(16, tp=2, pp=2, etp=2)
    same = choose_folding(old, 13, LIMITS)
    assert (same.folding.world, same.folding.tp, same.folding.pp, same.folding.ep, same.idle) == (12, 2, 2, 3, 1)
    assert not fit_problems(dataclasses.replace(same.folding, ep=1), SPEC, seq_len=64)
    fewer = choose_folding(replicated(8, tp=2, cp=2, pp=2), 7, LIMITS)
    assert fewer.folding.world < 8 and "no mapping with the degrees before fits 7 devices" in fewer.reason
    plain = choose_folding(make_folding(world=8, ep=4), 6, dataclasses.replace(LIMITS, replicated=False))
    assert plain.folding.ep in (2,) and plain.folding.edp == 3
    few = choose_folding(replicated(8), 8, dataclasses.replace(LIMITS, num_samples=5))
    assert few.folding.world == 5 and "a step has 5 samples" in few.reason
    assert choose_folding(replicated(2), 1, dataclasses.replace(LIMITS, room=lambda f: f.world > 1)) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=times(200, 66), deadline=None)
def test_shards_have_holders_on_as_many_hosts_as_there_are(hosts, floor):
    holders = shard_holders(tuple(hosts), floor=floor)
    for owner, members in enumerate(holders):
        assert members[0] == owner
        assert len({hosts[m] for m in members}) == len(members) == min(floor, len(set(hosts)))

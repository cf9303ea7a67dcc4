"""Gradients in buckets: the same sums as one buffer a family, started while the backward pass goes on, in one order on all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_optim import NUM_EXPERTS, TABLE, local, logical

from phalanx.core.config import OptimConfig
from phalanx.core.events import Collective
from phalanx.plan.layout.parameters import flat_layouts
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import PRESETS, parameters
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.state.gradients import GradientBuffers
from phalanx.runtime.state.optimizer import ShardedState
from phalanx.train.step.optim import AdamW
from ranks import run_ranks

SPEC = PRESETS["tiny"]


@pytest.mark.unit
@pytest.mark.parametrize("least", [0, 1, 3000, 10**9])
def test_buckets_hold_every_parameter_once_and_the_last_ones_come_first(least: int) -> None:
    folding = make_folding(world=4, ep=2)
    placement = plain_placement(SPEC.num_experts, folding)
    order = [p.name for p in parameters(SPEC)]
    for rank in range(4):
        layouts = flat_layouts(parameters(SPEC), folding, placement, rank, bucket_elements=least)
        assert sorted(p.param.name for x in layouts.values() for p in x.params) == sorted(order)
        for family in ("dense_sharded", "dense_replicated", "expert"):
            mine = [layout for layout in layouts.values() if layout.rule.family == family]
            places = [[order.index(p.param.name) for p in layout.params] for layout in mine]
            assert all(p == sorted(p) for p in places)
            assert all(min(a) > max(b) for a, b in itertools.pairwise(places))
            sizes = [sum(p.num_elements for p in layout.params) for layout in mine]
            assert len(mine) == 1 or (least not in (0, 10**9) and all(size >= least / 2 for size in sizes))


def _two_steps(rank: int, cache: GroupCache, least: int, degrees: dict[str, int], missing: bool, synchronous: bool):
    """State after two steps of two micro-batches; ids of collectives; reductions that were on their way before `reduce`."""
    groups = build_groups(make_folding(world=4, **degrees), rank=rank, cache=cache)
    params = {s.name: torch.nn.Parameter(local(s, groups, logical(s.name, s.shape, "value"))) for s in TABLE}
    layouts = flat_layouts(
        TABLE, groups.folding, plain_placement(NUM_EXPERTS, groups.folding), rank, bucket_elements=least
    )
    state = ShardedState(params, layouts, groups=groups, buffers={}, dtype=torch.float64)
    buffers = GradientBuffers(params, layouts, dtype=torch.float64)
    seen: list[Collective] = []
    comms = Collectives(emit=seen.append, trace=True, timeout_s=20)
    comms.synchronous = synchronous
    early = 0
    for step in range(2):
        buffers.begin()
        for micro in range(2):
            if micro == 1:
                buffers.final(list(params), groups, comms)
            terms = [
                (params[s.name] * local(s, groups, logical(s.name, s.shape, f"{step}/{micro}/{rank}"))).sum()
                for s in TABLE
                if not (missing and rank == 1 and s.name == "w2")  # an expert without tokens has no gradient
            ]
            torch.stack(terms).sum().backward()
        early += sum(part.started is not None for part in buffers._in_order)
        gradients = buffers.reduce(groups, comms)
        AdamW(OptimConfig(lr=0.05, eps=1e-6)).commit(state, gradients, step=step, lr=0.05, scale=0.5)
        state.publish(comms)
    return {name: p.detach().clone() for name, p in params.items()}, [e.op_id for e in seen], early


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("missing", [False, True])
def test_buckets_make_the_same_step(degrees: dict[str, int], missing: bool) -> None:
    whole = run_ranks(4, _two_steps, 0, degrees, missing, False)
    parts = run_ranks(4, _two_steps, 30, degrees, missing, False)
    at_once = run_ranks(4, _two_steps, 30, degrees, missing, True)
    for rank, ((want, _, _), (got, ids, early), (other, _, _)) in enumerate(zip(whole, parts, at_once, strict=True)):
        for name in want:  # gloo adds up in an order that depends on where a shard lies
            assert torch.allclose(got[name], want[name], rtol=1e-12, atol=1e-14)
            assert torch.equal(got[name], other[name])
        assert len(set(ids)) * 2 == len(ids), "each id once a step"
        assert early > 0 or (missing and rank == 1)


@pytest.mark.ranks
def test_a_rank_whose_buffer_is_late_starts_nothing_out_of_order() -> None:
    """The rank without a gradient starts fewer reductions early, and none that lies behind the one that waits."""
    results = run_ranks(4, _two_steps, 30, {}, True, False)
    assert results[1][2] < results[0][2]
    reductions = [[i for i in ids if i.startswith("gradient/")] for _, ids, _ in results]
    assert all(sorted(r) == sorted(reductions[0]) for r in reductions)


@pytest.mark.unit
def test_a_gradient_that_does_not_come_is_zero_and_owed_to_no_later_step() -> None:
    """Whatever the step before has left in the buffer, and whatever it was told is final: an expert without tokens."""
    groups, comms = build_groups(make_folding(world=1), rank=0, cache=GroupCache()), Collectives()
    params = {s.name: torch.nn.Parameter(logical(s.name, s.shape, "value")) for s in TABLE}
    layouts = flat_layouts(TABLE, groups.folding, plain_placement(NUM_EXPERTS, groups.folding), 0, bucket_elements=30)
    buffers = GradientBuffers(params, layouts, dtype=torch.float64)
    for used in (("norm", "matrix", "w2"), ("matrix",), ("norm", "w2")):
        buffers.begin()
        for micro in range(2):
            if micro == 1:
                buffers.final(list(params), groups, comms)
            torch.stack([params[name].sum() for name in used]).sum().backward()
        found = {b.name.removeprefix("gradient/"): b.tensor for b in buffers.reduce(groups, comms).boxes()}
        assert {name for name, x in found.items() if x.any()} == set(used)
        assert all((found[name] == 2).all() for name in used)


@pytest.mark.unit
def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    groups = build_groups(make_folding(world=1), rank=0, cache=GroupCache())
    params = {s.name: torch.nn.Parameter(logical(s.name, s.shape, "value")) for s in TABLE}
    layouts = flat_layouts(TABLE, groups.folding, plain_placement(NUM_EXPERTS, groups.folding), 0, bucket_elements=30)
    buffers = GradientBuffers(params, layouts, dtype=torch.float64)
    buffers.begin()
    buffers.final(["norm"], groups, Collectives())
    params["norm"].sum().backward()
    buffers.begin()
    (params["norm"].sum() * 3).backward()
    found = {b.name: b.tensor for b in buffers.reduce(groups, Collectives()).boxes()}
    assert torch.equal(found["gradient/norm"], torch.full((7,), 3.0, dtype=torch.float64))
    assert not found["gradient/matrix"].any()

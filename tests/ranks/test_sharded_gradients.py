"""Gradients that add up in shards: the same sums as in whole buffers, whatever a rank lacks, with a buffer or two alive at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_optim import NUM_EXPERTS, TABLE, local, logical

from phalanx.core.events import Collective
from phalanx.plan.layout.parameters import flat_layouts
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.state.gradients import GradientBuffers
from phalanx.runtime.state.sharded_gradients import Rooms, ShardedSums
from ranks import run_ranks

NAMES = [s.name for s in TABLE]
STEPS, ROUNDS = 2, 3
Found = tuple[list[dict[str, torch.Tensor]], list[str], int, tuple[str, ...]]


def _steps(
    rank: int,
    cache: GroupCache,
    zero: int,
    degrees: dict[str, int],
    holders: int,
    missing: bool,
    forgetful: bool = False,
    in_place: bool = False,
) -> Found:
    """Reduced gradients of each step; ids of collectives; buffers at most; parameters that are not finite in a last step, of which one rank has spoiled one.
    `in_place`: by a reduce-scatter of the transport's own, as NCCL has one."""
    groups = build_groups(make_folding(world=4, **degrees), rank=rank, cache=cache)
    params = {s.name: torch.nn.Parameter(local(s, groups, logical(s.name, s.shape, "value"))) for s in TABLE}
    placed = plain_placement(NUM_EXPERTS, groups.folding)
    layouts = flat_layouts(TABLE, groups.folding, placed, rank, zero=zero, bucket_elements=30, holders=holders)
    buffers = GradientBuffers(params, layouts, dtype=torch.float64, zero=zero)
    alive = _watched(next(iter(buffers._sharded.values())).rooms) if buffers._sharded else []
    if forgetful:
        for part in buffers._sharded.values():
            part.settle = partial(_forgetful, part)  # type: ignore[method-assign]
    seen: list[Collective] = []
    comms = Collectives(emit=seen.append, trace=True, timeout_s=20)
    comms.synchronous = holders == 1  # messages are there at once, so that it is known how many buffers there are
    if in_place:
        comms.scatters = lambda x: True  # type: ignore[method-assign]

    def step(number: int, spoiled: bool = False) -> dict[str, torch.Tensor]:
        buffers.begin()
        for micro in range(ROUNDS):
            if micro == ROUNDS - 1:
                buffers.final(NAMES, groups, comms)
            buffers.pass_begins(NAMES, NAMES, groups, comms)
            terms = [
                (params[s.name] * local(s, groups, logical(s.name, s.shape, f"{number}/{micro}/{rank}"))).sum()
                for s in TABLE
                if not (missing and rank == 1 and s.name == "w2" and micro != 1)  # an expert without tokens
            ]
            factor = float("nan") if spoiled and rank == 2 and micro == 0 else 1.0
            (torch.stack(terms).sum() + (params["norm"] * factor).sum()).backward()
            buffers.pass_ends()
        reduced = buffers.reduce(groups, comms).boxes()
        if in_place:
            flat = {part.flat.untyped_storage().data_ptr() for part in buffers._parts.values()}
            assert {b.tensor.untyped_storage().data_ptr() for b in reduced} <= flat, "a shard takes memory of its own"
        return {b.name: b.tensor.clone() for b in reduced}

    made = [step(number) for number in range(STEPS)]
    ids = [e.op_id for e in seen]
    rooms = max(alive, default=0)
    step(STEPS, spoiled=True)
    return made, ids, rooms, buffers.non_finite()


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2}, {"cp": 2}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize(("holders", "missing"), [(1, False), (1, True), (2, True), (2, False)])
def test_shards_add_up_to_the_same_gradients(degrees: dict[str, int], holders: int, missing: bool) -> None:
    whole = run_ranks(4, _steps, 1, degrees, holders, missing)
    parts = run_ranks(4, _steps, 2, degrees, holders, missing)
    for (want, _, _, spoiled), (got, ids, rooms, found) in zip(whole, parts, strict=True):
        for a, b in zip(want, got, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[name], b[name], rtol=1e-12, atol=1e-14) for name in a)
        assert missing or holders > 1 or rooms <= 2, "more buffers than two were alive"
        assert found == spoiled
        shards = [i for i in ids if i.startswith("gradient/")]
        assert len(shards) > len(set(shards)), "nothing was reduced but at the end of a step"


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
def test_a_reduce_scatter_in_place_leaves_the_same_sums_and_names_the_rank_that_spoiled_one(
    degrees: dict[str, int],
) -> None:
    whole = run_ranks(4, _steps, 1, degrees, 1, True)
    parts = run_ranks(4, _steps, 1, degrees, 1, True, False, True)
    for rank, ((want, _, _, spoiled), (got, _, _, found)) in enumerate(zip(whole, parts, strict=True)):
        for a, b in zip(want, got, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[name], b[name], rtol=1e-12, atol=1e-14) for name in a)
        assert found == spoiled == (("norm",) if rank == 2 else ())


@pytest.mark.ranks
def test_all_ranks_reduce_in_one_order_whatever_one_of_them_lacks() -> None:
    results = run_ranks(4, _steps, 2, {}, 1, True)
    orders = [[i for i in ids if i.startswith("gradient/")] for _, ids, _, _ in results]
    assert orders[0] == orders[1] == orders[2] == orders[3]


def _watched(rooms: Rooms) -> list[int]:
    """How many are alive, each time that one is taken."""
    alive, take, give, now = list[int](), rooms.take, rooms.give, [0]

    def taken(length: int, device: torch.device) -> torch.Tensor:
        now[0] += 1
        alive.append(now[0])
        return take(length, device)

    def given(room: torch.Tensor) -> None:
        now[0] -= 1
        give(room)

    rooms.take, rooms.give = taken, given  # type: ignore[method-assign]
    return alive


def _forgetful(part: ShardedSums) -> None:
    """A planted fault: a shard that arrives replaces what earlier micro-batches have left."""
    part._cycles = 0
    ShardedSums.settle(part)


@pytest.mark.ranks
def test_micro_batches_that_are_forgotten_are_noticed() -> None:
    whole = run_ranks(4, _steps, 1, {}, 1, False)
    parts = run_ranks(4, _steps, 2, {}, 1, False, True)
    (want, *_), (got, *_) = whole[0], parts[0]
    assert not any(torch.allclose(want[0][name], got[0][name]) for name in want[0])


def _at_its_end(rank: int, cache: GroupCache, early: bool) -> tuple[int, int]:
    """How many buffers a pass has begun to reduce when it has made all gradients, and when it has ended."""
    groups = build_groups(make_folding(world=2), rank=rank, cache=cache)
    params = {s.name: torch.nn.Parameter(logical(s.name, s.shape, "value")) for s in TABLE}
    layouts = flat_layouts(
        TABLE, groups.folding, plain_placement(NUM_EXPERTS, groups.folding), rank, zero=2, bucket_elements=30
    )
    buffers, comms = GradientBuffers(params, layouts, dtype=torch.float64, zero=2), Collectives(timeout_s=20)
    buffers.begin()
    buffers.pass_begins(NAMES, NAMES, groups, comms, early=early)
    torch.stack([param.sum() for param in params.values()]).sum().backward()
    made = sum(part.is_reduced for part in buffers._sharded.values())
    buffers.pass_ends()
    ended = sum(part.is_reduced for part in buffers._sharded.values())
    assert ended == len(buffers._sharded)
    buffers.reduce(groups, comms)
    return made, ended


@pytest.mark.ranks
@pytest.mark.parametrize("early", [True, False])
def test_where_ranks_are_not_alike_nothing_is_reduced_before_a_pass_has_ended(early: bool) -> None:
    """Each would start its reductions in another order."""
    for made, ended in run_ranks(2, _at_its_end, early):
        assert made == (ended if early else 0)

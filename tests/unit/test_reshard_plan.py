"""Plans of moves between layouts: every element arrives, bounds hold, methods, caps, sums, the way back, lost ranks, determinism."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from reshard_plan_help import equal_hosts, follow, random_moves
from speed_help import full_speed_s
from tiers import some, times

from phalanx.core.errors import PlanError
from phalanx.plan.layout.mesh.placements import Partial, Replicate, Shard, mesh_layout, read_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout, whole_layout
from phalanx.plan.reshard.plan import METHODS, plan_reshard
from phalanx.plan.reshard.types import Hosts, Move

pytestmark = pytest.mark.unit


def simple(src: str, dst: str, shape: tuple[int, ...] = (64, 64), *, overlap: bool = False) -> tuple[list[Move], Hosts]:
    a = read_layout(src, shape)
    b = read_layout(dst, shape, first_rank=0 if overlap else len(a.ranks))
    world = max((*a.ranks, *b.ranks)) + 1
    return [Move(name="w", itemsize=4, src=a, dst=b)], equal_hosts(-(-world // 4), 4, rate=1e9)


# ---- every element ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=times(1000, 200), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_plans_pass_the_check(seed: int) -> None:
    draw = random.Random(seed)
    moves, hosts = random_moves(draw)
    if seed % 4:  # plans of sums take ten times as long
        moves = [move for move in moves if move.src.num_terms == 1] or moves[:1]
    sizes = {"message_bytes": draw.choice((None, 64, 256)), "least_bytes": draw.choice((256, 16384))}
    plan = plan_reshard(moves, hosts, open_hops=draw.choice((1, 4)), **sizes)
    plan.check()
    assert plan.rho >= 1 - 1e-9


@settings(max_examples=times(150, 30), deadline=None)
@given(seed=st.integers(0, 2**32), method=st.sampled_from(("best", *METHODS)))
def test_random_plans_bring_everything(seed: int, method: str) -> None:
    """An oracle that knows nothing of boxes: whole tensors, every element of its own value."""
    draw = random.Random(seed)
    moves, hosts = random_moves(draw)
    if method in ("greedy", "depth_first"):  # quadratic in the unit tasks
        moves = moves[:1]
        if moves[0].src.num_terms > 1:
            return
    sizes = {"message_bytes": draw.choice((None, 128)), "least_bytes": draw.choice((256, 16384))}
    plan = plan_reshard(moves, hosts, method=method, **sizes)
    follow(plan)
    plan.check()
    alone = plan_reshard(moves, hosts, method=method, **sizes)
    for rank in range(len(hosts.host_of_rank)):  # as each asks for its own
        assert alone.program(rank) == plan.programs.get(rank, ())


@pytest.mark.parametrize("method", ["depth_first", "greedy"])
def test_hosts_that_send_and_pass_on_do_not_do_both_at_once(method: str) -> None:
    """A plan was said to end below its bound: a host on both sides sent a slice of its own while it passed another one on."""
    moves, hosts = random_moves(random.Random(23016))
    plan_reshard(moves[:1], hosts, method=method).check()


def test_source_boxes_that_overlap_without_being_equal() -> None:
    """Two hosts hold the rows 0:6 and 4:10 between them: what both have has both for holders."""

    def held(start: int, stop: int) -> tuple[Held, ...]:
        return (Held(Box((start, 0), (stop - start, 8)), (0, 0)),)

    src = TensorLayout(shape=(10, 8), ranks=(0, 1), held=(held(0, 6), held(4, 10)), local_shapes=((6, 8), (6, 8)))
    dst = whole_layout((10, 8), (2, 3))
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(4, 1))
    plan.check()
    follow(plan)
    holders = {flow.holders: flow.num_bytes for flow in plan.phases[0].flows.flows}
    assert holders == {(0,): 4 * 32, (0, 1): 2 * 32, (1,): 4 * 32}


def test_scalars_and_empty_tensors() -> None:
    scalar = Move(name="s", itemsize=4, src=whole_layout((), (0,)), dst=whole_layout((), (4, 5)))
    empty = Move(name="e", itemsize=4, src=whole_layout((0, 3), (0,)), dst=whole_layout((0, 3), (4,)))
    plan = plan_reshard([scalar, empty], equal_hosts(2, 4))
    plan.check()
    follow(plan)
    assert [hop.parts[0].move for hop in plan.hops] == [0, 0]
    nothing = plan_reshard([], equal_hosts(2, 4))
    nothing.check()
    assert (nothing.hops, nothing.rho) == ((), 1.0)


# ---- overlap, sums, the way back ---------------------------------------------------------------------------------------------------


def test_a_host_that_holds_a_box_needs_none_of_it() -> None:
    """The same mesh on both sides: half of each host's rows are there, the other half come from the other host."""
    moves, hosts = simple("2x4 S1R", "2x4 S0R", overlap=True)
    plan = plan_reshard(moves, hosts)
    plan.check()
    follow(plan)
    assert plan.bound.num_bytes == 0 and plan.makespan_s == 0.0
    assert all(hosts.host_of_rank[hop.src] == hosts.host_of_rank[hop.dst] for hop in plan.hops)
    assert any(plan.copies(rank) for rank in range(8))


def test_forwarding_through_a_destination_that_is_a_source_too_takes_its_sending_lane() -> None:
    """Each of three hosts has a third and needs all: 2/3 of the bytes leave and enter every host."""
    moves, hosts = simple("3x4 S0R", "3x4 RR", (960, 64), overlap=True)
    plan = plan_reshard(moves, hosts, least_bytes=256)
    plan.check()
    assert plan.bound.num_bytes == 2 * 960 * 64 * 4 // 3
    assert plan.rho < 1.01


def test_sums_are_placed_where_bytes_are_few() -> None:
    """Two hosts hold a term each and one needs the sum: it is added there, and each term goes once."""
    src = mesh_layout((64, 64), (2, 4), (Partial(), Replicate()))
    dst = mesh_layout((64, 64), (4,), (Replicate(),), ranks=range(8, 12))
    plan = plan_reshard([Move(name="g", itemsize=4, src=src, dst=dst)], equal_hosts(3, 4))
    plan.check()
    follow(plan)
    size = 64 * 64 * 4
    assert sum(_crossing(plan)) == 2 * size
    assert plan.makespan_s == pytest.approx(3 * size / 2 if plan.reductions[0].rank < 8 else 2 * size)


def _crossing(plan) -> list[int]:
    hosts = plan.hosts.host_of_rank
    return [
        sum(p.box.num_elements * plan.moves[p.move].itemsize for p in hop.parts)
        for hop in plan.hops
        if hosts[hop.src] != hosts[hop.dst]
    ]


def test_many_terms_for_many_hosts_are_added_at_the_source() -> None:
    """Four terms on one host, three hosts need the sum: one copy of the sum leaves instead of four terms."""
    src = mesh_layout((64, 64), (4,), (Partial(),))
    dst = mesh_layout((64, 64), (12,), (Replicate(),), ranks=range(4, 16))
    plan = plan_reshard([Move(name="g", itemsize=4, src=src, dst=dst)], equal_hosts(4, 4))
    plan.check()
    follow(plan)
    assert {reduction.rank for reduction in plan.reductions} <= {0, 1, 2, 3}
    assert plan.rho == pytest.approx(1.0, abs=0.01)


def test_the_way_back() -> None:
    """A destination that was replicated is a source with several holders, or one of terms."""
    moves, hosts = simple("2x4 S01R", "2x4 RS0")
    plan = plan_reshard(moves, hosts)
    back = plan.inverse()
    assert (back.moves[0].src, back.moves[0].dst) == (moves[0].dst, moves[0].src)
    assert back.hash != plan.hash and not back.reductions
    terms = plan.inverse(partial=True)
    assert terms.moves[0].src.num_terms == 4 and terms.reductions
    for one in (back, terms):
        one.check()
        follow(one)
    assert back.inverse().hash == plan.hash


def test_elements_are_counted_to_the_last() -> None:
    """Sums of fractions are exact up to 2^53."""
    count = (1 << 53) + 3
    move = Move(name="t", itemsize=1, src=whole_layout((count,), (0,)), dst=whole_layout((count,), (1,)))
    plan = plan_reshard([move], equal_hosts(2, 1), message_bytes=1 << 60)
    plan.check()
    assert plan.phases[0].flows.flows[0].num_bytes == count


def test_the_way_back_of_a_sum_is_whole() -> None:
    src = mesh_layout((8, 8), (2, 2), (Partial(), Shard(0)))
    move = Move(name="g", itemsize=4, src=src, dst=whole_layout((8, 8), (4,)))
    back = plan_reshard([move], equal_hosts(3, 2)).inverse()
    assert back.moves[0].dst.terms == () and back.moves[0].dst.held == src.held
    back.check()
    follow(back)


def _run(begin: int, size: int, at: int = 0) -> tuple[Held, ...]:
    return (Held(Box((begin,), (size,)), (at,)),)


@pytest.mark.parametrize(
    "held",
    [(_run(0, 4), _run(0, 4), _run(0, 2)), (_run(0, 4), _run(0, 2), _run(2, 2)), (_run(0, 3), _run(1, 3), ())],
    ids=["not equally many", "cut differently", "overlapping"],
)
def test_replicas_that_cannot_be_numbered_as_terms(held: tuple[tuple[Held, ...], ...]) -> None:
    shapes = tuple((sum(one.box.sizes[0] for one in boxes),) for boxes in held)
    dst = TensorLayout(shape=(4,), ranks=(1, 2, 3), held=held, local_shapes=shapes)
    plan = plan_reshard([Move(name="w", itemsize=4, src=whole_layout((4,), (0,)), dst=dst)], equal_hosts(4, 1))
    with pytest.raises(PlanError, match=r"w.dst: cannot be partial on its way back.*inverse\(partial=False\)"):
        plan.inverse(partial=True)


def test_replicas_that_lie_elsewhere_in_memory_are_terms_all_the_same() -> None:
    dst = TensorLayout(shape=(4,), ranks=(1, 2), held=(_run(0, 4), _run(0, 4, at=2)), local_shapes=((4,), (6,)))
    plan = plan_reshard([Move(name="w", itemsize=4, src=whole_layout((4,), (0,)), dst=dst)], equal_hosts(3, 1))
    back = plan.inverse(partial=True)
    back.check()
    assert back.moves[0].src.num_terms == 2 and {hop.src for hop in back.hops} == {1, 2} and back.reductions


# ---- lost ranks --------------------------------------------------------------------------------------------------------------------


def test_another_replica_takes_over_within_50_ms() -> None:
    moves, hosts = simple("2x4 S1RR", "2x4 S0RR", (1024, 1024, 512))
    plan = plan_reshard(moves, hosts)
    plan.without([0])  # imports are no part of it
    for lost in range(8):
        left = plan.without([lost])
        left.check()
        assert all(hop.src != lost for hop in left.hops)
    assert full_speed_s(lambda: plan.without([3]), rounds=5) <= 0.05


def test_lost_boxes_are_named_with_their_tensors() -> None:
    moves, hosts = simple("2x4 S01R", "2x4 S0R")
    plan = plan_reshard([moves[0], dataclasses.replace(moves[0], name="v")], hosts)
    with pytest.raises(PlanError) as error:
        plan.without([3, 5])
    assert [problem.where for problem in error.value.problems] == ["w", "v"]
    assert "no source rank holds [24:32, 0:64], [40:48, 0:64]" in str(error.value)


def test_a_lost_term_is_lost() -> None:
    src = mesh_layout((8,), (3,), (Partial(),))
    plan = plan_reshard([Move(name="g", itemsize=4, src=src, dst=whole_layout((8,), (3,)))], equal_hosts(4, 1))
    for rank in range(3):
        with pytest.raises(PlanError, match=r"g: lost: no source rank holds \[0:8\]"):
            plan.without([rank])


# ---- errors, caps ------------------------------------------------------------------------------------------------------------------


def test_all_problems_at_once() -> None:
    moves, _ = simple("2x4 S0R", "2x4 S0R")
    half = dataclasses.replace(
        moves[0].src, ranks=(0, 1, 2, 3), held=moves[0].src.held[:4], local_shapes=((32, 64),) * 4
    )
    bad = [
        dataclasses.replace(moves[0], name="a", src=half),
        dataclasses.replace(moves[0], name="b", itemsize=0),
        dataclasses.replace(moves[0], name="c", dst=whole_layout((3,), (0,))),
        dataclasses.replace(moves[0], name="d", dst=mesh_layout((64, 64), (2,), (Partial(),))),
        dataclasses.replace(moves[0], name="e", dst=whole_layout((64, 64), (99,))),
    ]
    with pytest.raises(PlanError) as error:
        plan_reshard(bad, equal_hosts(4, 4))
    wheres = {problem.where for problem in error.value.problems}
    assert wheres >= {"a", "b.itemsize", "c.dst.shape", "d.dst.terms", "e.dst.ranks"}


def test_arguments() -> None:
    moves, hosts = simple("2x4 S0R", "2x4 S0R")
    with pytest.raises(PlanError, match="did you mean 'greedy'") as error:
        plan_reshard(moves, hosts, method="gredy", message_bytes=0, open_hops=0)
    assert len(error.value.problems) == 3
    with pytest.raises(PlanError, match="recv_bytes_per_s = 1: has a rate for each of the 4 hosts"):
        plan_reshard(moves, dataclasses.replace(hosts, recv_bytes_per_s=(1.0,)))


@pytest.mark.parametrize("cap", [8, 64, 1000, 10_000, 1 << 20])
def test_staging_stays_under_its_cap(cap: int) -> None:
    moves, hosts = simple("2x4 S0R", "3x4 RS01", (96, 60))
    plan = plan_reshard(moves, hosts, staging_bytes=cap)
    assert 2 * plan.open_hops * plan.message_bytes <= cap
    plan.check()
    follow(plan)


def test_a_cap_under_which_no_item_fits() -> None:
    moves, hosts = simple("2x4 S0R", "2x4 S0R")
    with pytest.raises(PlanError, match=r"staging_bytes = 7: holds no message.*use 8 or more"):
        plan_reshard(moves, hosts, staging_bytes=7)


# ---- order, determinism ------------------------------------------------------------------------------------------------------------


def test_chunks_are_passed_on_while_the_next_arrive() -> None:
    """One host sends a megabyte to three in a chain: the third has its first message long before the first has its last."""
    src, dst = whole_layout((1 << 18,), (0,)), whole_layout((1 << 18,), (1, 2, 3))
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(4, 1), message_bytes=1 << 14)
    at = {(rank, kind): i for i, hop in reversed(list(enumerate(plan.hops))) for rank, kind in ((hop.dst, "first"),)}
    last = {hop.dst: i for i, hop in enumerate(plan.hops)}
    end_of_chain = plan.phases[0].schedule.streams[0].edges[-1].dst
    start_of_chain = plan.phases[0].schedule.streams[0].edges[0].dst
    assert at[end_of_chain, "first"] < 10 < last[start_of_chain]
    assert len(plan.hops) == 3 * 64


def test_work_of_a_host_is_shared_among_its_ranks() -> None:
    moves, hosts = simple("2x4 S0R", "2x4 S0R", (1024, 1024))
    plan = plan_reshard(moves, hosts, message_bytes=1 << 16)
    entered = [0] * 16
    for hop in plan.hops:
        if hosts.host_of_rank[hop.src] != hosts.host_of_rank[hop.dst]:
            entered[hop.dst] += sum(part.box.num_elements for part in hop.parts)
    assert min(entered[8:]) > 0.9 * max(entered[8:])


SCRIPT = """
import random, sys
sys.path.insert(0, {tests!r})
from reshard_plan_help import random_moves
from phalanx.plan.reshard.plan import plan_reshard
import hashlib
for seed in range(12):
    moves, hosts = random_moves(random.Random(seed))
    plan = plan_reshard(moves, hosts)
    print(plan.hash, hashlib.sha256(repr(plan.hops).encode()).hexdigest())
"""


def test_equal_under_every_hash_seed() -> None:
    tests = str(Path(__file__).parents[1] / "helpers")
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(tests=tests)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in some(("0", "1", "4242"), 2)
    }
    assert len(outputs) == 1 and len(outputs.pop().splitlines()) == 12


def test_the_hash_tells_plans_apart() -> None:
    moves, hosts = simple("2x4 S0R", "2x4 RS0")
    plan = plan_reshard(moves, hosts)
    again = plan_reshard(*simple("2x4 S0R", "2x4 RS0"))
    assert plan.hash == again.hash and plan.hops == again.hops
    twins = [moves[0], dataclasses.replace(moves[0], name="v", src=dataclasses.replace(moves[0].src))]
    shared = [moves[0], dataclasses.replace(moves[0], name="v")]
    assert plan_reshard(twins, hosts).hash == plan_reshard(shared, hosts).hash, "objects do not count, values do"
    others = [
        plan_reshard(moves, hosts, message_bytes=100),
        plan_reshard(moves, hosts, open_hops=1),
        plan_reshard(moves, hosts, method="naive"),
        plan_reshard(*simple("2x4 S1R", "2x4 RS0")),
        plan_reshard([dataclasses.replace(moves[0], itemsize=2)], hosts),
        plan_reshard(moves, dataclasses.replace(hosts, send_bytes_per_s=(2e9, 1e9, 1e9, 1e9))),
    ]
    assert len({plan.hash, *(p.hash for p in others)}) == 7


def test_layouts_that_are_no_layouts_are_refused() -> None:
    """Boxes of a rank that overlap, places that overlap, a rank twice, a box outside, more elements than bytes can be counted."""
    whole = whole_layout((4,), (0,))

    def one(boxes: list[tuple[int, int, int]], size: int) -> TensorLayout:
        held = tuple(Held(Box((offset,), (length,)), (local,)) for offset, length, local in boxes)
        return TensorLayout(shape=(4,), ranks=(1,), held=(held,), local_shapes=((size,),))

    cases = (
        (one([(0, 3, 0), (2, 2, 3)], 5), "w.dst: layout of rank 1: boxes [0:3] and [2:4] overlap"),
        (one([(0, 2, 0), (2, 2, 1)], 3), "local boxes [0:2] and [1:3] overlap"),
        (one([(2, 4, 0)], 4), "box [2:6] is not inside (4,)"),
        (whole_layout((4,), (1, 1)), "each rank once"),
        (whole_layout((4,), (-1,)), "none negative"),
    )
    for dst, text in cases:
        with pytest.raises(PlanError) as error:
            plan_reshard([Move(name="w", itemsize=4, src=whole, dst=dst)], equal_hosts(1, 4))
        assert text in str(error.value)
    huge = [whole_layout((10**20, 4), (rank,)) for rank in (0, 1)]
    with pytest.raises(PlanError, match="must have at most"):
        plan_reshard([Move(name="w", itemsize=4, src=huge[0], dst=huge[1])], equal_hosts(1, 4))

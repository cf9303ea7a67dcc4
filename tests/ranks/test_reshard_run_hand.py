"""The executor of reshard plans on plans made by hand: relay, sums, copies, counters, staging, faults and planted bugs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from threading import Thread

import pytest
import torch
from reshard_help import HandPlan, box, equal_hosts

from phalanx.core.errors import PeerError, PlanError, RunError
from phalanx.core.events import Collective
from phalanx.plan.layout.mesh.placements import Partial, Shard, mesh_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.reshard.types import Hop, Move, MovePart, Reduction
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.reshard.executor import Transport, batches, run_program
from phalanx.runtime.reshard.program import rank_program
from phalanx.runtime.reshard.staging import Staging
from phalanx_lab.bench.reshard.counts import distinct_bytes, host_counts, union_elements
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
SHAPE = (8, 6)


def lane(cache, rank, world, posting="tags", comms=None, **more):
    ranks = tuple(range(world))
    axis = Axis("reshard", ranks, rank, cache.get(ranks))
    return Transport(comms=comms or Collectives(timeout_s=20), axis=axis, wire=CPU, posting=posting, **more)


def carry_out(cache, rank, world, plan, source, dest, posting="tags", **more):
    return run_program(
        plan, rank_program(plan, rank), lane(cache, rank, world, posting, **more), source=source, dest=dest
    )


def rows(a, b):
    return box((a, b), (0, SHAPE[1]))


def relay_plan(parts=4, **more):
    """Rank 0 has all; ranks 1 and 2 (on a host of their own) get it, 2 through 1."""
    move = Move(name="x", itemsize=8, src=whole_layout(SHAPE, [0]), dst=whole_layout(SHAPE, [1, 2]))
    step = SHAPE[0] // parts
    hops = []
    for i in range(parts):
        part = MovePart(0, rows(i * step, (i + 1) * step))
        hops += [Hop(0, 1, (part,)), Hop(1, 2, (part,))]
    return HandPlan((move,), equal_hosts([0, 1, 1]), tuple(hops), **more)


def relayed(rank, cache, posting, parts):
    plan = relay_plan(parts, open_hops=1 + parts % 3)
    x = torch.arange(48).view(SHAPE)
    source = x.clone() if rank == 0 else None
    dest = torch.full(SHAPE, -1) if rank else None
    report = carry_out(cache, rank, 3, plan, [source], [dest], posting)
    assert rank or torch.equal(source, x)
    assert rank == 0 or torch.equal(dest, x)
    return report


@pytest.mark.core
@pytest.mark.parametrize("posting", ["tags", "batches"])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_receiver_sends_on_what_it_received(posting, parts):
    reports = run_ranks(3, relayed, posting, parts)
    assert [r.sent_bytes for r in reports] == [384, 384, 0]
    assert [r.received_bytes for r in reports] == [0, 384, 384]
    assert [r.entered_bytes for r in reports] == [0, 384, 0]  # from rank 1 to rank 2 is inside a host
    assert [r.direct for r in reports] == [parts, 2 * parts, parts]  # rows lie together: nothing is packed
    assert all(r.staging_peak_bytes == 0 for r in reports)
    plan = relay_plan(parts)
    counts = host_counts(
        {r: (x.entered_bytes, x.entered) for r, x in enumerate(reports)}, moves=plan.moves, hosts=plan.hosts
    )
    assert [(c.host, c.entered_bytes, c.distinct_bytes, c.once) for c in counts] == [(1, 384, 384, True)]


def columns(rank, cache, posting, dtype, window):
    """Rank 0 has the columns 0:3, rank 1 the others; both halves go to rank 2 in messages of two parts each, which must be packed."""
    src = mesh_layout(SHAPE, [2], [Shard(1)], ranks=[0, 1])
    move = Move(name="x", itemsize=dtype.itemsize, src=src, dst=whole_layout(SHAPE, [2]))
    hops = []
    for r, (low, high) in enumerate([(0, 3), (3, 6)]):
        for i in range(0, 8, 4):
            hops.append(Hop(r, 2, tuple(MovePart(0, box((i + k, i + k + 2), (low, high))) for k in (0, 2))))
    plan = HandPlan((move,), equal_hosts([0, 0, 1]), tuple(hops), open_hops=window, message_bytes=12 * dtype.itemsize)
    x = (torch.arange(48) % 2 if dtype == torch.bool else torch.arange(48)).view(SHAPE).to(dtype)
    source = x[:, 3 * rank : 3 * rank + 3] if rank < 2 else None  # not contiguous
    dest = torch.zeros(SHAPE, dtype=dtype) if rank == 2 else None
    report = carry_out(cache, rank, 3, plan, [source], [dest], posting)
    assert rank < 2 or torch.equal(dest, x)
    return report


@pytest.mark.parametrize("posting", ["tags", "batches"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.complex64])
def test_parts_are_packed_and_staging_is_bounded(posting, dtype):
    for window in (1, 2):
        reports = run_ranks(3, columns, posting, dtype, window)
        for report in reports:
            assert 0 < report.staging_peak_bytes <= report.staging_limit_bytes == 2 * window * 12 * dtype.itemsize


def sums(rank, cache, posting, dtype):
    """Three terms on ranks 0 to 2. Rank 0 adds the upper half for rank 3; rank 3 adds the lower half itself, in two boxes."""
    src = mesh_layout(SHAPE, [3], [Partial()], ranks=[0, 1, 2])
    move = Move(name="x", itemsize=dtype.itemsize, src=src, dst=whole_layout(SHAPE, [3]))
    top, low, last = rows(0, 4), rows(4, 6), rows(6, 8)
    hops = [
        Hop(2, 0, (MovePart(0, top, 2),)),  # out of turn: it must wait for term 1
        Hop(1, 0, (MovePart(0, rows(0, 2), 1),)),
        Hop(1, 0, (MovePart(0, rows(2, 4), 1),)),
        *(Hop(r, 3, (MovePart(0, low, r), MovePart(0, last, r))) for r in (1, 0, 2)),
        Hop(0, 3, (MovePart(0, top),)),
    ]
    reductions = (Reduction(0, 0, top), Reduction(3, 0, low), Reduction(3, 0, last))
    plan = HandPlan((move,), equal_hosts([0, 0, 0, 1]), tuple(hops), reductions)
    terms = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(t)).to(dtype) for t in range(3)]
    source = terms[rank] if rank < 3 else None
    dest = torch.zeros(SHAPE, dtype=dtype) if rank == 3 else None
    report = carry_out(cache, rank, 4, plan, [source], [dest], posting)
    if rank == 3:
        want = (terms[0].float() + terms[1].float() + terms[2].float()).to(dtype)
        assert torch.equal(dest, want)
    return report.sums_peak_bytes


@pytest.mark.core
@pytest.mark.parametrize("posting", ["tags", "batches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_are_added_in_their_order(posting, dtype):
    peaks = run_ranks(4, sums, posting, dtype)
    assert peaks[0] > 0 and peaks[1] == peaks[2] == 0


def test_the_order_of_terms_matters_here():
    """Else the test above could not see a wrong order."""
    a, b, c = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(t)) for t in range(3))
    assert not torch.equal(a + b + c, c + b + a)


def own_and_moved(rank, cache):
    """Ranks 0 and 1 swap roles over overlapping meshes: half of each destination is there already."""
    src = mesh_layout(SHAPE, [2], [Shard(0)], ranks=[0, 1])
    move = Move(name="x", itemsize=4, src=src, dst=mesh_layout(SHAPE, [2], [Shard(1)], ranks=[0, 1]))
    quarter = {(i, j): box((4 * i, 4 * i + 4), (3 * j, 3 * j + 3)) for i in (0, 1) for j in (0, 1)}
    hops = (Hop(0, 1, (MovePart(0, quarter[0, 1]),)), Hop(1, 0, (MovePart(0, quarter[1, 0]),)))
    kept = {r: (MovePart(0, quarter[r, r]),) for r in (0, 1)}
    plan = HandPlan((move,), equal_hosts([0, 1]), hops, kept=kept)
    x = torch.arange(48, dtype=torch.int32).view(SHAPE)
    dest = torch.full((8, 3), -1, dtype=torch.int32)
    events = []
    comms = Collectives(timeout_s=20, trace=True, emit=events.append)
    carry_out(cache, rank, 2, plan, [x[4 * rank : 4 * rank + 4].clone()], [dest], comms=comms, op_id="swap")
    assert torch.equal(dest, x[:, 3 * rank : 3 * rank + 3])
    assert {op: (c.calls, c.sent_bytes) for (op, _), c in comms.counters.items()} == {
        "send": (1, 48),
        "receive": (1, 0),
    }
    return [(e.op, e.op_id, e.sent_bytes) for e in events if isinstance(e, Collective)]


def test_what_stays_is_copied_and_messages_are_counted():
    got = run_ranks(2, own_and_moved)
    assert sorted(got[0]) == [("receive", "swap.1to0.0", 0), ("send", "swap.0to1.0", 48)]
    assert sorted(got[1]) == [("receive", "swap.0to1.0", 0), ("send", "swap.1to0.0", 48)]


# ---- faults and planted bugs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posting", ["tags", "batches"])
def test_a_rank_that_dies_in_the_middle(tmp_path, posting):
    class Dying(Collectives):
        sent = 0

        def fatal(self):
            self.sent += 1
            if self.sent == 3:
                os._exit(9)

        def start_send(self, *args, **more):
            self.fatal()
            return super().start_send(*args, **more)

        def start_exchange(self, *args, **more):
            self.fatal()
            return super().start_exchange(*args, **more)

    def job(rank, cache):
        plan = relay_plan(8)
        x = torch.arange(48).view(SHAPE)
        source = x.clone() if rank == 0 else None
        dest = torch.full(SHAPE, -1) if rank else None
        comms = (Dying if rank == 1 else Collectives)(timeout_s=1.0)
        begin = time.monotonic()
        try:
            carry_out(cache, rank, 3, plan, [source], [dest], posting, comms=comms, op_id="stage0")
            said = "done"
        except PeerError as err:
            said = str(err)
        untouched = source is None or torch.equal(source, x)
        (tmp_path / str(rank)).write_text(json.dumps([said, time.monotonic() - begin, untouched]))

    with pytest.raises(RankError, match="the process died"):
        run_ranks(3, job)
    for rank in (0, 2):
        said, seconds, untouched = json.loads((tmp_path / str(rank)).read_text())
        assert said.startswith("stage0 did not come to its end: ") and f"failed on rank {rank}" in said
        assert "The destination tensors are incomplete; the source tensors are as they were" in said
        assert seconds < 20 and untouched


def wait_until(holds):
    begin = time.monotonic()
    while not holds() and time.monotonic() < begin + 20:
        time.sleep(0.001)


def planted(rank, cache, bug, told):
    """The relay, with the executor changed as `bug` says; whether rank 2 has the right values at the end."""
    plan = relay_plan(4)
    program = rank_program(plan, rank)
    steps = list(program.steps)
    if bug == "order" and rank == 2:  # the first two messages go to each other's place
        steps[0], steps[1] = (steps[i]._replace(placed=steps[1 - i].placed) for i in (0, 1))
    if bug == "chunk" and rank == 2:  # a message is received and forgotten
        steps[2] = steps[2]._replace(placed=())
    if bug == "early" and rank == 1:  # sent on before it is there
        steps = [s._replace(needs=()) for s in steps]
    program = dataclasses.replace(program, steps=tuple(steps))
    x = torch.arange(48).view(SHAPE)
    dest = torch.full(SHAPE, -rank) if rank else None
    if bug == "early" and rank == 2:
        Thread(target=lambda: (wait_until(lambda: bool((dest != -2).any())), told.touch()), daemon=True).start()
    if bug == "early" and rank == 0:
        wait_until(told.exists)
    run_program(plan, program, lane(cache, rank, 3), source=[x.clone() if rank == 0 else None], dest=[dest])
    return rank == 0 or torch.equal(dest, x)


@pytest.mark.parametrize("bug", ["", "order", "chunk", "early"])
def test_planted_bugs_are_seen(bug, tmp_path):
    assert run_ranks(3, planted, bug, tmp_path / "told") == [True, True, bug == ""]


def test_a_plan_that_does_not_fit_its_layouts():
    plan = relay_plan(2)
    stray = dataclasses.replace(
        plan,
        hops=(Hop(2, 1, (MovePart(0, rows(0, 8)),)),),
        moves=(dataclasses.replace(plan.moves[0], dst=whole_layout(SHAPE, [1])),),
    )
    with pytest.raises(
        PlanError, match=r"rank 2, x = .*sends it, but its tensors have a place for 0 of its 48 elements"
    ):
        rank_program(stray, 2)


def test_a_message_of_a_term_comes_from_who_holds_it():
    src = mesh_layout(SHAPE, [2], [Partial()], ranks=[0, 1])
    move = Move(name="x", itemsize=4, src=src, dst=whole_layout(SHAPE, [2]))
    plan = HandPlan(
        (move,), equal_hosts([0, 0, 0]), (Hop(0, 2, (MovePart(0, rows(0, 8), 1),)),), (Reduction(2, 0, rows(0, 8)),)
    )
    with pytest.raises(PlanError, match="rank 0, x"):
        rank_program(plan, 0)


def test_staging_is_never_more_than_promised():
    staging = Staging(buffer_bytes=8, limit_bytes=16, device=CPU)
    first = staging.take()
    staging.take()
    with pytest.raises(RunError, match="more than the 16 bytes of staging"):
        staging.take()
    staging.give(first)
    assert staging.take() is first and staging.usage.peak_bytes == 16


def test_batches_end_where_a_message_needs_one_of_the_same():
    program = rank_program(relay_plan(4), 1)  # receive, send, receive, send, ...
    assert batches(program, 2) == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]
    assert batches(rank_program(relay_plan(4), 0), 3) == [(0, 1), (1, 2), (2, 3), (3, 4)]  # all to one rank


def test_batches_have_few_messages_each_way():
    """Rank 0 sends a row to each of 6 ranks: as many at once as the window has, and NCCL carries."""
    move = Move(
        name="x",
        itemsize=8,
        src=whole_layout(SHAPE, [0]),
        dst=mesh_layout(SHAPE, [6], [Shard(1)], ranks=list(range(1, 7))),
    )
    hops = tuple(Hop(0, 1 + i, (MovePart(0, box((0, 8), (i, i + 1))),)) for i in range(6))
    program = rank_program(HandPlan((move,), equal_hosts([0] * 7), hops), 0)
    assert batches(program, 3) == [(0, 3), (3, 6)]
    assert batches(program, 100) == [(0, 4), (4, 6)]


def test_distinct_bytes_are_those_of_the_union():
    boxes = [box((0, 4), (0, 4)), box((2, 6), (2, 6)), box((0, 4), (0, 4)), box((3, 5), (0, 8))]
    want = len({(i, j) for b in boxes for i in range(b.offsets[0], b.offsets[0] + b.sizes[0])
                for j in range(b.offsets[1], b.offsets[1] + b.sizes[1])})  # fmt: skip
    assert union_elements(boxes) == want
    move = relay_plan().moves[0]
    parts = [MovePart(0, b) for b in boxes] + [MovePart(0, boxes[0], 1)]  # a term is a value of its own
    assert distinct_bytes(parts, [move]) == 8 * (want + 16)
    assert union_elements([Box((), ())]) == 1

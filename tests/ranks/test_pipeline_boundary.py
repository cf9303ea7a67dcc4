"""Stages of several ranks: tensors cross by plans, are passed on while ranks compute, and arrive bit for bit; failures end everybody."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from boundary_help import ByHand, edge_by_hand, rows_layout, stage_layouts, zigzag_layout
from boundary_lanes import lane_problems
from tiers import some

from phalanx.core.errors import PeerError, PlanError, RunError
from phalanx.plan.layout.tensors import TensorLayout, whole_layout
from phalanx.plan.pipeline.boundary.edges import EdgePlan, Relay, direct_edge, planned_edge
from phalanx.plan.pipeline.comm import PipelinePlan, Transfer, plan_pipeline
from phalanx.plan.pipeline.schedule.clock import Edge, chain
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.plan.reshard.types import Hop
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.pipeline import boundary as boundaries, runner
from phalanx.runtime.pipeline.boundary import Boundary, EdgeLane
from phalanx.runtime.pipeline.runner import Tensors, run_pipeline
from ranks import RankError, run_ranks

SHAPE = (12, 3)
SKIPS = ((0, 2), (0, 3))


def edges_of(layouts: Sequence[TensorLayout], edges: Sequence[Edge]) -> dict[Edge, EdgePlan]:
    return {(a, b): edge_by_hand((a, b), layouts[a], layouts[b]) for a, b in edges}


def positions_of(layouts: Sequence[TensorLayout]) -> dict[int, int]:
    return {rank: stage for stage, layout in enumerate(layouts) for rank in layout.ranks}


# ---- plans ----------------------------------------------------------------------------------------------------------------------


WORDS = (
    ["rows1", "rows2", "rows4", "rows2"],
    ["rows3", "zigzag2", "rows1", "zigzag3"],
    ["whole2", "whole2", "whole2", "whole2"],
    ["rows2", "whole3", "zigzag2", "whole2"],
)


@pytest.mark.unit
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble", "eager_1f1b", "eager_1f1b_split"])
def test_ranks_that_do_their_messages_in_order_come_to_the_end(name: str, words: list[str]) -> None:
    layouts = stage_layouts(SHAPE, words)
    for m in (1, 3, 6):
        plan = plan_pipeline(
            make_schedule(name, pp=4, virtual=1, num_microbatches=m), edges=[*chain(4), *SKIPS]
        )  # fmt: skip
        assert lane_problems(plan, edges_of(layouts, plan.edges), positions_of(layouts)) == []


@pytest.mark.unit
def test_the_plain_case_is_one_message_with_the_whole_tensor() -> None:
    plan = direct_edge((0, 1), SHAPE, src=5, dst=7)
    plan.check()
    assert plan.forward[5].sends[0].peer == 7 and plan.forward[7].receives[0].peer == 5
    assert [len(r.sends) + len(r.receives) for r in (*plan.forward.values(), *plan.backward.values())] == [1] * 4
    assert plan.forward[5].sends[0].parts[0].sizes == SHAPE and not plan.relays("forward")
    same = direct_edge((0, 1), SHAPE, src=5, dst=5)
    assert same.forward[5].sends == () and same.forward[5].shape == SHAPE
    assert "1 messages from stage to stage, 0 passed on" in plan.explain()


@pytest.mark.unit
def test_what_replicas_need_enters_once_and_is_passed_on() -> None:
    below, above = stage_layouts(SHAPE, ["rows2", "whole3"])
    plan = edge_by_hand((0, 1), below, above)
    sent = [leg for rank in below.ranks for leg in plan.forward[rank].sends]
    assert sum(box.num_elements for leg in sent for box in leg.parts) == 36 and {leg.peer for leg in sent} == {2}
    assert len(plan.forward[2].relays) == len(plan.forward[3].relays) == 4 and plan.forward[4].relays == ()
    assert plan.relays("forward") and not plan.relays("backward")
    assert [relay.after for relay in plan.forward[2].relays] == [1, 2, 3, 4]
    senders = {rank for rank in above.ranks if plan.backward[rank].sends}
    assert len(senders) > 1  # any replica may send the gradient


def _damaged(fault: str) -> ByHand:
    below, above = stage_layouts(SHAPE, ["rows2", "whole2"])
    plan = ByHand(below, above)
    hops = list(plan.hops)
    if fault == "lost":
        hops.pop()
    elif fault == "twice":
        hops.append(hops[0])
    elif fault == "relayed too early":
        hops[0], hops[1] = hops[1], hops[0]
    elif fault == "not held":
        hops[0] = Hop(1, hops[0].dst, hops[0].parts)
    elif fault == "shared ranks":
        plan = ByHand(below, whole_layout(SHAPE, [1, 2]))
        return plan
    elif fault == "partial":
        return ByHand(dataclasses.replace(whole_layout(SHAPE, [0, 1]), terms=(0, 1)), above)
    plan.__dict__["hops"] = tuple(hops)
    return plan


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("lost", "receives all 36 elements"),
        ("twice", "receives no element twice"),
        ("relayed too early", "has come before it is passed on"),
        ("not held", "sends and receives boxes that it holds"),
        ("shared ranks", "share no rank"),
        ("partial", "a stage adds up the terms of a gradient"),
    ],
)
def test_the_check_sees(fault: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        damaged = _damaged(fault)
        planned_edge((0, 1), damaged, ByHand(damaged.dst, damaged.src))


@pytest.mark.unit
def test_the_check_sees_a_gradient_of_another_shape_and_ranks_that_wait_for_ever() -> None:
    below, above = stage_layouts(SHAPE, ["rows2", "rows2"])
    with pytest.raises(PlanError, match="gets a gradient of the shape of its activation"):
        planned_edge((0, 1), ByHand(below, above), ByHand(above, whole_layout(SHAPE, [0, 1])))
    plan = plan_pipeline(make_schedule("1f1b", pp=2, virtual=1, num_microbatches=3))
    edges = edges_of(stage_layouts(SHAPE, ["rows2", "whole2"]), plan.edges)
    route = edges[0, 1].forward[3]
    short = dataclasses.replace(route, receives=route.receives[:-1])
    broken = dataclasses.replace(edges[0, 1], forward={**edges[0, 1].forward, 3: short})
    found = lane_problems(plan, {(0, 1): broken}, {0: 0, 1: 0, 2: 1, 3: 1})
    assert found and "deadlocks" in str(found[0])
    with pytest.raises(PlanError, match="the messages of ranks 2 and 3 have the same sizes on both sides"):
        broken.check()


@pytest.mark.unit
def test_routes_in_the_order_of_the_plan() -> None:
    plan = edge_by_hand((0, 1), *stage_layouts(SHAPE, ["rows1", "whole2"]))
    kinds = ["on" if isinstance(item, Relay) else "in" for item in plan.forward[1].incoming()]
    assert kinds == ["in", "on"] * 4
    zigzag = edge_by_hand((0, 1), rows_layout(SHAPE, [0]), zigzag_layout(SHAPE, [1, 2]))
    assert [box.offsets[0] for leg in zigzag.forward[2].receives for box in leg.parts] == [0, 3]
    assert [box.offsets[0] for leg in zigzag.forward[0].sends for box in leg.parts] == [0, 9, 3, 6]


# ---- ranks ----------------------------------------------------------------------------------------------------------------------


def held_part(layout: TensorLayout, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a logical tensor."""
    index = layout.ranks.index(rank)
    out = torch.empty(layout.local_shapes[index], dtype=whole.dtype)
    for held in layout.held[index]:
        out[held.local_box().slices()] = whole[held.box.slices()]
    return out


class Elements:
    """Every element of every tensor is one of a kind: (who made it for whom, micro-batch, place); inputs are compared bit for bit."""

    def __init__(self, plan: PipelinePlan, layouts: Sequence[TensorLayout], rank: int) -> None:
        self.plan, self.layouts, self.rank = plan, layouts, rank
        self.stage = positions_of(layouts)[rank]
        self.seen = 0

    def _whole(self, source: int, target: int, microbatch: int) -> torch.Tensor:
        number = (source * 10 + target) * 1000 + microbatch
        return torch.arange(number * 1000, number * 1000 + SHAPE[0] * SHAPE[1], dtype=torch.float64).view(SHAPE)

    def _pass(self, microbatch: int, inputs: Tensors, *, up: bool) -> Tensors:
        above = [b for a, b in self.plan.edges if a == self.stage]
        below = [a for a, b in self.plan.edges if b == self.stage]
        sources, targets = (below, above) if up else (above, below)
        layout = self.layouts[self.stage]
        for source, found in zip(sources, inputs, strict=True):
            want = held_part(layout, self.rank, self._whole(source, self.stage, microbatch))
            assert torch.equal(found, want), (self.rank, source, microbatch)
            self.seen += 1
        return tuple(held_part(layout, self.rank, self._whole(self.stage, t, microbatch)) for t in targets)

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        return self._pass(microbatch, inputs, up=True)

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        return self._pass(microbatch, d_outputs, up=False)

    input_gradient = backward

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        pass


def boundary_of(
    rank: int, cache: GroupCache, layouts: Sequence[TensorLayout], edges: Sequence[Edge], *, timeout_s: float = 20.0, **given
) -> Boundary:  # fmt: skip
    ranks = tuple(rank for layout in layouts for rank in layout.ranks)
    return Boundary(
        position=positions_of(layouts)[rank],
        edges=edges_of(layouts, edges),
        dtype=torch.float64,
        device=torch.device("cpu"),
        axis=Axis("pp", ranks, rank, cache.get(ranks)),
        comms=Collectives(timeout_s=timeout_s, **given),
        lane=Axis("lane", ranks, rank, own_group(len(ranks), timeout_s=timeout_s)),
    )


def _elements(rank: int, cache: GroupCache, words: list[str], waiting: str) -> tuple[int, int, int]:
    layouts = stage_layouts(SHAPE, words)
    edges = (*chain(len(words)), *(skip for skip in SKIPS if skip[1] < len(words)))
    boundary = boundary_of(rank, cache, layouts, edges, synchronous=waiting == "everything")
    in_turn = waiting == "each message"  # as in the first step on a device
    boundary = dataclasses.replace(boundary, wait_for_sends=waiting == "sends", in_turn=in_turn)
    run = runner._Executor._run_in_batches if in_turn else runner._Executor._run_posted
    seen = wanted = 0
    for name in ("1f1b", "eager_1f1b", "eager_1f1b_split", "zero_bubble", "gpipe"):
        made = make_schedule(name, pp=len(words), virtual=1, num_microbatches=5)
        plan = plan_pipeline(made, edges=edges)
        passes = Elements(plan, layouts, rank)
        with mock.patch.object(runner._Executor, "_run_posted", run):
            run_pipeline(plan, passes, boundary)
        seen += passes.seen
        stage = positions_of(layouts)[rank]
        wanted += 5 * sum(stage in edge for edge in edges)
    assert seen == wanted
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane")]
    counters = boundary.comms.counters
    return seen, *(sum(c.sent_bytes for key, c in counters.items() if key[1] == axis) for axis in ("pp", "lane"))


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("waiting", ["nothing", "sends", "everything", "each message"])
@pytest.mark.parametrize(
    "words", some([["rows1", "whole3", "zigzag2"], ["whole2", "whole2", "rows3"]], 1), ids=" ".join
)
def test_every_element_arrives_where_it_belongs(words: list[str], waiting: str) -> None:
    layouts = stage_layouts(SHAPE, words)
    world = sum(len(layout.ranks) for layout in layouts)
    told = run_ranks(world, _elements, words, waiting, timeout_s=400)
    edges = edges_of(layouts, [(0, 1), (1, 2), (0, 2)])
    if waiting == "each message":  # all over one axis
        return
    if waiting == "sends":  # and a byte for each message says that it is there
        assert sum(counts[1] for counts in told) == 0
        return
    for axis, relayed in ((1, False), (2, True)):  # of what ranks pass on nothing goes over the axis of the others
        each = sum(
            box.num_elements
            for plan in edges.values()
            for way in ("forward", "backward")
            if plan.relays(way) == relayed  # type: ignore[arg-type]
            for route in plan.routes(way).values()  # type: ignore[arg-type]
            for leg in route.receives
            for box in leg.parts
        )
        assert sum(counts[axis] for counts in told) == 5 * 5 * each * 8


class _Slow(Elements):
    """The rank that passes on is busy with its first micro-batch for a second, or until the file `until` is there; another stands ready."""

    def __init__(
        self, plan: PipelinePlan, layouts: Sequence[TensorLayout], rank: int, *, busy: int, until: Path | None = None
    ) -> None:
        super().__init__(plan, layouts, rank)
        self.busy, self.until, self.began, self.ended = busy, until, dict[int, float](), dict[int, float]()

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        self.began[microbatch] = time.monotonic()
        if self.rank == self.busy and microbatch == 0:
            end_s = time.monotonic() + (1.0 if self.until is None else 60.0)
            while time.monotonic() < end_s and not (self.until is not None and self.until.exists()):
                time.sleep(0.01)
        out = super().forward(stage, microbatch, inputs)
        self.ended[microbatch] = time.monotonic()
        return out


def _sender(rank: int, cache: GroupCache, wait_for_sends: bool, done: Path) -> dict[int, float]:
    """When each pass ended, of a sender and a receiver that is late: by a second, or until the sender is done, where it need not wait."""
    layouts = stage_layouts(SHAPE, ["rows1", "rows1"])
    boundary = dataclasses.replace(boundary_of(rank, cache, layouts, [(0, 1)]), wait_for_sends=wait_for_sends)
    plan = plan_pipeline(make_schedule("gpipe", pp=2, virtual=1, num_microbatches=6))
    boundary.comms.barrier(boundary.axis)
    passes = _Slow(plan, layouts, rank, busy=1, until=None if wait_for_sends else done)
    ended, forward = passes.ended, passes.forward

    def told(stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        out = forward(stage, microbatch, inputs)
        if rank == 0 and microbatch == 5:
            done.touch()
        return out

    passes.forward = told  # type: ignore[method-assign]
    run_pipeline(plan, passes, boundary)
    return ended


@pytest.mark.core
@pytest.mark.ranks
def test_a_sender_that_waits_waits_until_its_message_is_there(tmp_path: Path) -> None:
    """The receiver posts two passes ahead and is busy with its first micro-batch."""
    sender, receiver = run_ranks(2, _sender, False, tmp_path / "done")
    assert sender[5] < receiver[0]
    sender, receiver = run_ranks(2, _sender, True, tmp_path / "none")
    assert sender[5] > receiver[0]


def _busy(rank: int, cache: GroupCache) -> tuple[dict[int, float], dict[int, float]]:
    layouts = stage_layouts(SHAPE, ["rows1", "whole2"])
    boundary = boundary_of(rank, cache, layouts, [(0, 1)])
    plan = plan_pipeline(make_schedule("gpipe", pp=2, virtual=1, num_microbatches=3))
    boundary.comms.barrier(boundary.axis)
    passes = _Slow(plan, layouts, rank, busy=1)
    run_pipeline(plan, passes, boundary)
    return passes.began, passes.ended


@pytest.mark.ranks
def test_a_rank_passes_on_while_it_computes() -> None:
    _, busy, other = run_ranks(3, _busy)
    assert other[0][1] < busy[1][0], "the second micro-batch came through a rank that still had its first one"


def test_a_lane_in_the_middle_of_a_message_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends its wait (`runtime/comm/abortable.py`)."""
    monkeypatch.setattr(boundaries, "GRACE_S", 0.02)
    timeout, broken_off, axis = threading.Event(), list[Axis](), Axis("edge", (0, 1), 0, None)
    comms: Any = SimpleNamespace(apart=lambda: None, break_off=broken_off.append)
    lane = EdgeLane(SimpleNamespace(comms=comms), axis, "lane of a test")  # type: ignore[arg-type]
    arrival: Any = SimpleNamespace(take_part=lambda _: timeout.wait(30))
    route: Any = SimpleNamespace(incoming=lambda: [SimpleNamespace(peer=1)], receives=[None])
    lane.add(arrival, route, tag=0, op_id="", answered=frozenset())
    other = EdgeLane(SimpleNamespace(comms=comms), axis, "one that is idle")  # type: ignore[arg-type]
    EdgeLane.abandon([lane, other], comms)
    assert broken_off == [axis] and lane._thread.is_alive(), "once, whatever number of lanes"
    timeout.set()
    for each in (lane, other):
        each._thread.join(10)
        assert not each._thread.is_alive()


# ---- failures -------------------------------------------------------------------------------------------------------------------


class _Breaks(Elements):
    def __init__(self, plan: PipelinePlan, layouts: Sequence[TensorLayout], rank: int, how: str) -> None:
        super().__init__(plan, layouts, rank)
        self.how = how

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        if microbatch == 2 and self.how == "dies":
            os._exit(3)
        if microbatch == 2:
            raise ArithmeticError("this pass is broken")
        return super().forward(stage, microbatch, inputs)


def _one_breaks(rank: int, cache: GroupCache, how: str, culprit: int, folder: Path) -> None:
    layouts = stage_layouts(SHAPE, ["rows1", "whole2", "whole2"])
    boundary = boundary_of(rank, cache, layouts, chain(3))
    plan = plan_pipeline(make_schedule("eager_1f1b", pp=3, virtual=1, num_microbatches=6))
    boundary.comms.barrier(boundary.axis)
    passes = _Breaks(plan, layouts, rank, how) if rank == culprit else Elements(plan, layouts, rank)
    begin = time.monotonic()
    try:
        run_pipeline(plan, passes, boundary, name=lambda t: f"mb{t.microbatch}.{t.direction}.boundary{t.edge[0]}")
    except (PeerError, ArithmeticError) as error:
        lanes = [thread.name for thread in threading.enumerate() if thread.name.startswith("lane")]
        text = f"{type(error).__name__} {time.monotonic() - begin:.1f} {lanes} {error}"
        (folder / f"{rank}").write_text(text)
        os._exit(4)


@pytest.mark.ranks
@pytest.mark.parametrize("culprit", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_failure_ends_everybody_at_once_and_no_thread_stays(how: str, culprit: int, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(5, _one_breaks, how, culprit, tmp_path, timeout_s=30.0)
    told = {int(path.name): path.read_text().split(" ", 3) for path in tmp_path.iterdir()}
    assert set(told) == set(range(5)) - ({culprit} if how == "dies" else set())
    for rank, (kind, seconds, lanes, text) in told.items():
        assert lanes == "[]" and float(seconds) < 10
        if rank == culprit:
            assert kind == "ArithmeticError"
        else:
            assert kind == "PeerError" and ".boundary" in text and "mb" in text, text


@pytest.mark.ranks
def test_what_does_not_fit_together_is_an_error_before_anything_moves() -> None:
    layouts = stage_layouts(SHAPE, ["rows1", "whole2"])
    plan = plan_pipeline(make_schedule("1f1b", pp=2, virtual=1, num_microbatches=2))
    axis = Axis("pp", (0, 1, 2), 0, None)
    boundary = Boundary(
        position=0, edges={}, dtype=torch.float64, device=torch.device("cpu"), axis=axis, comms=Collectives()
    )
    with pytest.raises(RunError, match=r"rank 0 at place 0 has no part in edge \(0, 1\)"):
        run_pipeline(plan, Elements(plan, layouts, 0), boundary)
    boundary = dataclasses.replace(boundary, edges=edges_of(layouts, [(0, 1)]))
    with pytest.raises(ValueError, match=r"needs a lane"):
        boundary.axis_of(Transfer(0, 1, 0, 0, "forward"))
    assert boundary.axis_of(Transfer(1, 0, 1, 0, "backward")) is axis

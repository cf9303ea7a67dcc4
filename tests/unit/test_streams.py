"""Streams of a device and the rounds posted to them, where there is no device: what is called, in which order, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from boundary_help import stage_layouts
from overlap_plan_help import plans_of_group

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import ConfigError, PeerError, PlanError, RunError
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.tiles.plan import backward_of
from phalanx.plan.moe.overlap.tiles.rounds import MessageEnd, rounds_of
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.plan.pipeline.boundary.edges import planned_edge
from phalanx.plan.pipeline.boundary.stage_edges import on_one_host
from phalanx.plan.pipeline.comm import plan_pipeline
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move
from phalanx.runtime.comm import devices, groups
from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.moe.overlap_streams import RoundMessages
from phalanx.runtime.moe.streams import CudaStreams, Posted, leave_free, leaving_free, message_streams_of
from phalanx.runtime.pipeline import boundary, runner
from phalanx.runtime.reshard import executor

pytestmark = pytest.mark.unit
AXIS = Axis("ep_etp", (0, 1, 2), 0, None)


class Recorder:
    """`CudaStreams` that only takes notes."""

    left_free = 0

    def __init__(self):
        self.posts, self.ordered = [], []

    def post(self, comms, sends, receives, axis, *, op_id=""):
        self.posts.append((op_id, [m.peer for m in sends], [m.peer for m in receives]))
        return Posted(len(self.posts) - 1, [m.tensor for m in (*sends, *receives)])

    def order(self, posted):
        self.ordered.append(posted.done)
        posted.kept.clear()


def rounds():
    counts = np.full((3, 3), 12)
    plans = plans_of_group(plan_dispatch(counts, range(3), ep=3, etp=1), TileSchedule(parts=2, blocks=2), tile_rows=3)
    return rounds_of(backward_of(plans[0]))


def messages(recorder, comms=None):
    return RoundMessages(rounds(), recorder, comms or Collectives(), AXIS, op_id=str)


def test_rounds_leave_in_their_order_whenever_their_messages_are_given():
    legs = [leg for one in rounds() for leg in one.legs]
    want = None
    for seed in range(50):
        recorder = Recorder()
        given = messages(recorder)
        for leg in random.Random(seed).sample(legs, len(legs)):
            given.give(leg, torch.zeros(1))
        want = want or recorder.posts
        assert recorder.posts == want and len(want) == len(rounds())
    assert [post[0] for post in want] == ["outbound"] * 2 + ["inbound"] * 4 + ["dots"]


def test_no_round_leaves_before_one_that_stands_before_it():
    recorder, all_rounds = Recorder(), rounds()
    given = messages(recorder)
    for one in all_rounds[1:]:
        for leg in one.legs:
            given.give(leg, torch.zeros(1))
    assert not recorder.posts
    for leg in all_rounds[0].legs:
        given.give(leg, torch.zeros(1))
    assert len(recorder.posts) == len(all_rounds)


def test_a_round_is_waited_for_once_and_keeps_its_tensors_until_then():
    recorder = Recorder()
    given = messages(recorder)
    exchanges = [given.give(leg, torch.zeros(1)) for leg in rounds()[0].legs]
    kept = given._posted[0].kept
    assert len(kept) == 4
    for exchange in exchanges:
        exchange.wait()
    assert recorder.ordered == [0] and not kept


def test_empty_messages_are_not_sent_and_a_round_of_them_is_none():
    recorder = Recorder()
    given = messages(recorder)
    first, second = rounds()[:2]
    exchanges = [given.give(leg, torch.zeros(0)) for leg in first.legs]
    for leg in second.legs:
        given.give(leg, torch.zeros(0 if leg.peer == 1 else 1))
    exchanges[0].wait()
    assert recorder.posts == [("outbound", [2], [2])] and not recorder.ordered


def test_what_a_plan_does_not_have_is_refused():
    given = messages(Recorder())
    with pytest.raises(PlanError, match=r"outbound 7\.0 to 1"):
        given.give(MessageEnd("outbound", True, 1, 7), torch.zeros(1))
    exchange = given.give(rounds()[1].legs[0], torch.zeros(1))
    with pytest.raises(PlanError, match="once"):
        given.give(rounds()[1].legs[0], torch.zeros(1))
    with pytest.raises(PlanError, match="before its round was posted"):
        exchange.wait()


def test_synchronous_collectives_hide_nothing_here_either():
    recorder = Recorder()
    given = messages(recorder, Collectives(synchronous=True))
    for leg in rounds()[0].legs:
        given.give(leg, torch.zeros(1))
    assert recorder.ordered == [0]


class FakeCuda:
    """Streams and events that write down what is asked of them."""

    def __init__(self, patch):
        self.said, self.inside = [], "computing"
        patch.setattr(torch.cuda, "Stream", lambda device, *, priority=0: self.stream("messages"))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream(self.inside))
        patch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name):
        said = self.said

        class Stream:
            def record_event(self):
                said.append(f"record on {name}")
                return f"event {len(said)}"

            def wait_event(self, event):
                said.append(f"{name} waits for {event}")

            def wait_stream(self, stream):
                said.append(f"{name} waits for {stream.name}")

        Stream.name = name  # type: ignore[attr-defined]
        return Stream()

    @contextlib.contextmanager
    def entered(self, stream):
        before, self.inside = self.inside, stream.name
        yield
        self.inside = before


def test_calls_on_a_cuda_device(monkeypatch):
    """Against stand-ins for torch.cuda: the order of events and messages, and who waits for what."""
    cuda = FakeCuda(monkeypatch)
    comms = Collectives()

    def start(sends, receives, axis, *, op_id=""):
        cuda.said.append(f"exchange on {cuda.inside}")
        return Exchange(lambda: cuda.said.append(f"wait on {cuda.inside}"))

    comms.start_exchange = start
    streams = CudaStreams(torch.device("cuda", 0))
    posted = streams.post(comms, [Message(torch.zeros(1), 1)], [Message(torch.zeros(2), 2)], AXIS)
    assert len(posted.kept) == 2
    streams.order(posted)
    assert not posted.kept and cuda.said == [
        "record on computing",
        "messages waits for event 1",
        "exchange on messages",
        "wait on messages",
        "record on messages",
        "computing waits for event 5",
    ]


def test_a_cuda_device_gets_its_stream_and_a_host_none(monkeypatch):
    FakeCuda(monkeypatch)
    comms = Collectives()
    assert message_streams_of(comms, torch.device("cpu")) is None
    streams = message_streams_of(comms, torch.device("cuda", 0))
    assert isinstance(streams, CudaStreams) and message_streams_of(comms, torch.device("cuda", 0)) is streams


class Memory:
    """A device whose allocator gives freed memory back to the stream that it came from at once, and notes what another stream still reads or writes then."""

    def __init__(self, patch):
        self.faults, self.births, self.deaths, self.calls = [], 0, 0, 0
        self.streams = {
            name: SimpleNamespace(name=name, waited=set(), wait_stream=None) for name in ("passes", "transfers")
        }
        for stream in self.streams.values():
            stream.wait_stream = lambda other, own=stream: own.waited.update(other.waited)
        self.now = self.streams["passes"]
        self.uses = {}
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        patch.setattr(torch.cuda, "stream", self.entered)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.of(x).recorded.append(stream))
        patch.setattr(boundary.Landing, "unpack", lambda place: [self.read(x) for x in (place.buffer, *place.views)])
        patch.setattr(runner, "landing", lambda x, leg: self.moved(boundary.landing(x, leg)))
        patch.setattr(runner, "packed", self.packed)

    @contextlib.contextmanager
    def entered(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def of(self, x):
        return self.uses[x.untyped_storage().data_ptr()]

    def empty(self, shape, dtype=torch.float64):
        self.births += 1
        held = np.zeros(shape)
        x = torch.from_numpy(held)
        use = SimpleNamespace(owner=self.now, recorded=[], works=set())
        self.uses[x.untyped_storage().data_ptr()] = use
        weakref.finalize(held, self.freed, use)
        return x

    def freed(self, use):
        self.deaths += 1
        waited = use.owner.waited.union(*(stream.waited for stream in use.recorded))
        self.faults += [f"{work} still runs" for work in use.works - waited]

    def read(self, x):
        use = self.of(x)
        if self.now not in (use.owner, *use.recorded):
            self.faults.append(f"{self.now.name} reads memory of {use.owner.name}")

    def packed(self, x, leg):
        """Where it copies, its stream does, and nobody else waits for it."""
        out = boundary.packed(x, leg)
        if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return out
        self.now.waited.add(self.work([x], "copy"))
        return self.empty(out.shape)

    def moved(self, place):
        return boundary.Landing(self.empty(place.buffer.shape), place.views) if place.views else place

    def work(self, tensors, name):
        self.calls += 1
        for x in tensors:
            self.of(x).works.add((self.calls, name))
        return self.calls, name

    def start_exchange(self, sends, receives, axis, *, op_id=""):
        work = self.work([message.tensor for message in (*sends, *receives)], op_id)
        over = {work, *self.now.waited}  # NCCL's stream waits for the one on which it is posted
        return Exchange(lambda: self.now.waited.update(over), again=lambda: self.now.waited.update(over))


class Halves:
    """Passes that give and take memory of that device."""

    def __init__(self, memory, layouts, plan, rank):
        self.memory, self.plan, self.stage = memory, plan, next(i for i, l in enumerate(layouts) if rank in l.ranks)
        self.shape = layouts[self.stage].local_shapes[layouts[self.stage].ranks.index(rank)]
        self.alive = weakref.WeakSet()
        self.most = 0

    def _pass(self, inputs, others):
        for x in inputs:
            self.memory.read(x)
        made = tuple(self.memory.empty(self.shape) for _ in others)
        self.alive.update(made)
        self.most = max(self.most, len(self.alive))
        return made

    def forward(self, stage, microbatch, inputs):
        return self._pass(inputs, [b for a, b in self.plan.edges if a == self.stage])

    def backward(self, stage, microbatch, d_outputs):
        return self._pass(d_outputs, [a for a, b in self.plan.edges if b == self.stage])


def edge_of(edge, src, dst):
    """One message from rank to rank, of as many parts as there are."""
    moves = [Move(name="x", itemsize=8, src=a, dst=b) for a, b in ((src, dst), (dst, src))]
    hosts = on_one_host((*src.ranks, *dst.ranks))
    return planned_edge(edge, *(plan_reshard([move], hosts, message_bytes=10**6) for move in moves))


def received(memory, place, transfer):
    return memory.empty(place.route(transfer).shape)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    "words", [["whole1"] * 3, ["rows1", "zigzag2", "rows1"], ["zigzag2", "rows1", "zigzag2"]], ids=" ".join
)
def test_a_pipeline_gives_memory_back_behind_its_messages(words, forward_only, monkeypatch):
    """NCCL reads what is sent, and writes what is received, when its stream comes to it: the allocator does not know, and hands out at once what Python drops."""
    layouts = stage_layouts((12, 3), words)
    pipeline = make_pipeline(PipelineConfig(), dataclasses.replace(PRESETS["tiny"], num_layers=3), pp=3, seq_len=32)
    plan = pipeline.forward_plan(12) if forward_only else pipeline.plan(12)
    ranks = tuple(rank for layout in layouts for rank in layout.ranks)
    for rank in ranks:
        with monkeypatch.context() as patch:
            memory = Memory(patch)
            patch.setattr(runner._Executor, "_run_posted", runner._Executor._run_in_batches)
            comms = Collectives()
            comms.start_exchange, comms.transfers = memory.start_exchange, memory.streams["transfers"]
            passes = Halves(memory, layouts, plan, rank)
            place = boundary.Boundary(
                position=passes.stage,
                edges={(a, b): edge_of((a, b), layouts[a], layouts[b]) for a, b in plan.edges},
                dtype=torch.float64,
                device=torch.device("cpu"),
                axis=Axis("pp", ranks, ranks.index(rank), None),
                comms=comms,
            )
            patch.setattr(boundary.Boundary, "empty", staticmethod(partial(received, memory, place)))
            runner.run_pipeline(plan, passes, place)
            assert memory.deaths == memory.births >= 12 and memory.faults == []
            assert passes.most <= 2 * boundary.LEAST_OPEN + 1


def test_transfers_and_moves_have_one_stream(monkeypatch):
    """One for each wave of state would keep memory for each, and leave NCCL streams that others have: torch has 32."""
    cuda = FakeCuda(monkeypatch)
    made = []
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, *, priority: made.append(priority) or cuda.stream("transfers")
    )
    comms = Collectives()
    plan = plan_pipeline(make_schedule("1f1b", pp=2, virtual=1, num_microbatches=1))
    axis = Axis("pp", (0, 1), 0, None)
    places = [
        boundary.Boundary(
            position=0,
            edges=boundary.direct_edges(plan, (2, 3), (0, 1)),
            dtype=torch.float32,
            device=torch.device(device),
            axis=axis,
            comms=comms,
        )
        for device in ("cpu", "cuda", "cuda")
    ]
    host, first, second = (place.stream() for place in places)
    assert host is None and first is second is not None
    for _ in range(2):
        with executor._own_stream(comms, torch.device("cuda", 0)):
            cuda.said.append(f"copies on {cuda.inside}")
    wave = ["transfers waits for computing", "copies on transfers", "computing waits for transfers"]
    assert cuda.said == 2 * wave and made == [-1]


def test_a_move_that_fails_is_waited_for_too(monkeypatch):
    """Its copies may be pending, into memory that is given back."""
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(PeerError), executor._own_stream(Collectives(), torch.device("cuda", 0)):
        cuda.said.append(f"copies on {cuda.inside}")
        raise PeerError("collective refused")
    assert cuda.said == ["messages waits for computing", "copies on messages", "computing waits for messages"]


def test_a_communicator_is_connected_on_the_device_of_its_rank(monkeypatch):
    """The thread that an abort leaves behind begins on the first device, and would leave a context there."""
    said, begun = [], threading.current_thread()
    monkeypatch.setattr(devices, "nccl_backends", lambda groups: [object()])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.current_thread() is begun else 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(f"set {device.index}"))
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: said.append(f"call on {device.index}"))
    FakeCuda(monkeypatch)
    devices.connect(object(), ("sum",), escape=AbortableCall(lambda: False))
    assert said == ["set 3", "call on 3"]


@pytest.mark.parametrize(("rank", "is_told"), [(0, True), (1, False)])
def test_a_communicator_that_is_long_in_creation_says_so_once(monkeypatch, capfd, rank, is_told):
    """As where ranks of several machines are given interfaces that do not reach each other: NCCL waits without limit, and says nothing."""
    monkeypatch.setattr(devices, "nccl_backends", lambda groups: [object()])
    monkeypatch.setattr(devices, "CONNECT_S", 0.05)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: time.sleep(0.3 if use == "sum" else 0))
    monkeypatch.setattr(devices.dist, "get_process_group_ranks", lambda group: [4, 12])
    FakeCuda(monkeypatch)
    group = SimpleNamespace(rank=lambda: rank)
    devices.connect(group, ("gather",))
    assert not capfd.readouterr().err
    devices.connect(group, ("sum",))
    assert ("NCCL has been connecting ranks 4, 12 for 0.05 s" in capfd.readouterr().err) is is_told


def test_multiprocessors_are_left_free_inside():
    get = torch._C._get_sm_carveout_experimental
    before = get()
    with pytest.raises(ZeroDivisionError), leaving_free(7):
        assert get() == 7
        with leaving_free(0):
            assert get() == 7
        raise ZeroDivisionError
    assert get() == before


def test_a_torch_that_cannot_leave_any_free_says_so(monkeypatch):
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(RunError, match="left_free = 3"), leaving_free(3):
        pass


def test_a_recipe_says_how_many_are_left_free(monkeypatch):
    FakeCuda(monkeypatch)
    device = type("Properties", (), {"multi_processor_count": 132})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: device)
    comms = Collectives()
    leave_free(comms, torch.device("cuda", 0), multiprocessors=16)
    assert comms.message_streams.left_free == 16
    with pytest.raises(ConfigError, match=r"dispatch\.left_free = 132: .*; at most 131"):
        leave_free(comms, torch.device("cuda", 0), multiprocessors=132)
    with pytest.raises(ConfigError, match=r"dispatch\.left_free = 4: a GPU, and this is cpu"):
        leave_free(Collectives(), torch.device("cpu"), multiprocessors=4)


def test_few_thread_blocks_are_asked_for_where_messages_travel_beside_products():
    asked = []

    class Cache(groups.GroupCache):
        def get(self, ranks, *, message_ctas=0, uses=()):
            asked.append((tuple(ranks), message_ctas))

    groups.build_groups(make_folding(world=4, ep=2), rank=0, cache=Cache(), message_ctas=8)
    assert {ranks for ranks, ctas in asked if ctas == 8} == {(0, 1), (2, 3)}
    assert {ctas for _, ctas in asked} == {0, 8}


def test_a_group_of_few_thread_blocks_needs_nccl(monkeypatch):
    if not dist.is_nccl_available():
        with pytest.raises(RunError, match="message_ctas = 8"):
            devices.nccl_options(8)

    class Options:
        def __init__(self, *, is_high_priority_stream):
            self.first, self.config = is_high_priority_stream, type("Config", (), {})()

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Nccl", (), {"Options": Options}), raising=False)
    assert devices.nccl_options(0) is None
    options = devices.nccl_options(8)
    assert options.first and options.config.max_ctas == 8

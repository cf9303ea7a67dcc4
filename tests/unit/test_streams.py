"""Streams of a device and the rounds posted to them, where there is no device: what is called, in which order, and what is refused."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from overlap_plan_help import plans_of_group

from phalanx.core.errors import ConfigError, PlanError, RunError
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.tiles.plan import backward_of
from phalanx.plan.moe.overlap.tiles.rounds import MessageEnd, rounds_of
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.runtime.comm import groups
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.moe.overlap_streams import RoundMessages
from phalanx.runtime.moe.streams import CudaStreams, Posted, leave_free, leaving_free, message_streams_of

pytestmark = pytest.mark.unit
AXIS = Axis("ep_etp", (0, 1, 2), 0, None)


class Recorder:
    """`Streams` that only takes notes."""

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
        patch.setattr(torch.cuda, "Stream", lambda device: self.stream("messages"))
        patch.setattr(torch.cuda, "current_stream", lambda: self.stream(self.inside))
        patch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name):
        said = self.said

        class Stream:
            def record_event(self):
                said.append(f"record on {name}")
                return f"event {len(said)}"

            def wait_event(self, event):
                said.append(f"{name} waits for {event}")

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

    class Cache:
        def get(self, ranks, *, message_ctas=0, uses=()):
            asked.append((tuple(ranks), message_ctas))

    groups.build_groups(make_folding(world=4, ep=2), rank=0, cache=Cache(), message_ctas=8)
    assert {ranks for ranks, ctas in asked if ctas == 8} == {(0, 1), (2, 3)}
    assert {ctas for _, ctas in asked} == {0, 8}


def test_a_group_of_few_thread_blocks_needs_nccl(monkeypatch):
    if not dist.is_nccl_available():
        with pytest.raises(RunError, match="message_ctas = 8"):
            groups.nccl_options(8)

    class Options:
        def __init__(self, *, is_high_priority_stream):
            self.first, self.config = is_high_priority_stream, type("Config", (), {})()

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Nccl", (), {"Options": Options}), raising=False)
    assert groups.nccl_options(0) is None
    options = groups.nccl_options(8)
    assert options.first and options.config.max_ctas == 8

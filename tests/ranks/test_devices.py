"""Recovery where messages are NCCL's, with stand-ins for what a GPU does: what ends without a word is noticed, and a call that nothing ends is ended with its process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from membership_help import MemoryService
from program_help import Run
from train_help import phalanx, train_args, write_text

from phalanx.core.config import LaunchConfig, Recipe, ResilienceConfig
from phalanx.core.errors import FinalError, PeerError, RunError
from phalanx.core.rules import recipe_problems
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.recovery_choice import choose_recovery
from phalanx.runtime.comm import devices
from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.devices import DeviceAbort, DeviceThread, complete
from phalanx.runtime.comm.exchange import Call
from phalanx.runtime.comm.groups import SILENT, Axis, GroupCache, build_groups
from phalanx.runtime.comm.peers import Peers
from phalanx.runtime.comm.progress import RankProgress
from phalanx.runtime.membership import rendezvous, watcher as lookout, worker_agent as agent
from phalanx.runtime.membership.member import _Loop, run_member
from phalanx.runtime.membership.membership import Generation, Member, Membership
from phalanx.runtime.membership.rendezvous import EpochGroups, Sockets, as_listed
from phalanx.runtime.membership.votes import ABORT, Decision, MemberReport
from phalanx.runtime.membership.watcher import AgentSettings, Left
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes import world
from phalanx.runtime.processes.launch import StopRequest
from phalanx.runtime.processes.world import leave_errors_to_run
from phalanx.train import loop
from phalanx.train.loop import Trainer
from phalanx.train.placement import state_transfer
from phalanx.train.placement.state_transfer import Everyone, Examined, HeldState, take_state
from phalanx.train.placement.suspects import Suspects
from phalanx.train.reporting import RunProgress

ELSEWHERE = torch.device("meta")
"""A device that is no CPU, and needs no waiting for."""


def on_device_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, *, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


class Nccl:
    """A communicator whose abort may wait for others, as NCCL's does."""

    calls: list[str]

    def __init__(self, name: str, calls: list[str], gate: threading.Event | threading.Barrier | None = None) -> None:
        self.name, self.calls, self.gate = name, calls, gate

    def abort(self) -> None:
        if self.gate is not None:
            self.gate.wait(20)
        self.calls.append(self.name)


class Group:
    """A process group that has that backend for devices, or none."""

    def __init__(self, backend: object | None) -> None:
        self.backend = backend

    def size(self) -> int:
        return 8

    def _get_backend(self, device: torch.device) -> object:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("no backend for device type cuda")
        return self.backend


def groups_of(*backends: object | None) -> Any:
    return [Group(backend) for backend in backends]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_communicators_whose_aborts_wait_for_each_other_are_aborted_once() -> None:
    """One after the other they would stand still (seen on an H200), and so in a group call, which torch's threads are not part of."""
    calls: list[str] = []
    both = threading.Barrier(2)
    abort, groups = DeviceAbort(), groups_of(Nccl("world", calls, both), None, Nccl("ep", calls, both), object())
    for _ in range(2):  # the watching thread aborts, and whoever drops the team aborts again
        abort.start(groups)
    assert abort.wait(20) and sorted(calls) == ["ep", "world"]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_an_abort_that_blocks_keeps_nobody_from_watching() -> None:
    calls: list[str] = []
    gate, abort = threading.Event(), DeviceAbort()
    begin_s = time.monotonic()
    abort.start(groups_of(Nccl("world", calls, gate)))
    assert time.monotonic() - begin_s < 10 and not abort.wait(0.05) and "world" not in calls
    gate.set()
    assert abort.wait(20) and calls == ["world"]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_a_communicator_that_came_after_the_first_abort_is_aborted_too() -> None:
    calls: list[str] = []
    abort, first = DeviceAbort(), Nccl("world", calls)
    abort.start(groups_of(first))
    assert abort.wait(20)
    abort.start(groups_of(first, Nccl("ep", calls)))
    assert abort.wait(20) and calls == ["world", "ep"]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_groups_without_nccl_are_left_alone() -> None:
    abort = DeviceAbort()
    abort.start(groups_of(None, object()))
    assert abort.wait(0) and not abort._threads


@pytest.mark.unit
def test_groups_whose_abort_does_not_end_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying one would wait for its abort. The process makes new groups."""
    monkeypatch.setattr(devices, "ABORT_S", 0.05)
    monkeypatch.setattr(devices, "nccl_backends", lambda groups: [object() for _ in groups])
    monkeypatch.setattr(devices, "_left", [])
    monkeypatch.setattr(devices, "_abort", lambda backend: gate.wait(60))
    gate, destroyed = threading.Event(), list[object]()
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", destroyed.append)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        world = dist.group.WORLD
        abort = DeviceAbort()
        epoch = SimpleNamespace(_abort=abort, groups=SimpleNamespace(forget=lambda: None), store=None)
        epoch.abort = lambda abort=abort, world=world: abort.start([world])
        rendezvous.GroupEpoch.drop(epoch)
        assert not dist.is_initialized() and world in devices._left
    gate.set()
    assert len(devices._left) == 2 and not destroyed


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_groups_of_a_device_are_connected_when_they_are_made_but_those_of_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first messages, of some ranks only, would wait for a communicator that the others do not create."""
    connected: list[object] = []
    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: connected.append((group, device.index)))
    device, host = groups_of(Nccl("ep", []), None)
    cache, made = GroupCache(), iter([device, host, Group(Nccl("control", [])), None])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cache, "_create", lambda *_: next(made))
    for purpose in ("passes", "step", "control", "second"):
        for _ in range(2):
            cache.get((0, 1), purpose=purpose)
    assert connected == [(device, 3)] and len(cache) == 4


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_a_communicator_that_a_member_never_comes_to_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 two members stood in its creation for ever, while a third had seen that a newer generation was due."""
    gate, aborted, left = threading.Event(), list[bool](), list[bool]()
    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: gate.wait(60))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "leave_behind", lambda: left.append(True))
    cache = EpochGroups(Sockets(), timeout_s=5.0, generation=6, aborted=lambda: bool(aborted))
    monkeypatch.setattr(cache, "_create", lambda *_: Group(Nccl("ep", [])))
    threading.Timer(0.05, aborted.append, [True]).start()
    begin_s = time.monotonic()
    with pytest.raises(PeerError, match="after the process group was aborted"):
        cache.get((0, 1))
    assert time.monotonic() - begin_s < 20
    cache.forget()
    gate.set()
    assert left == [True] and not len(cache)


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_who_connects_waits_for_others_and_what_comes_too_late_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a member that does not come is never told from those that wait for it; and the kernel of a creation that was left would have nobody who ends it."""
    gate, aborted, calls = threading.Event(), list[bool](), list[str]()
    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: gate.wait(60))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    mine, looks = RankProgress(), list[str]()
    cache = EpochGroups(Sockets(), timeout_s=5.0, aborted=lambda: bool(aborted), progress=mine)
    monkeypatch.setattr(cache, "_create", lambda *_: Group(Nccl("ep", calls)))

    def watch() -> None:
        while mine.look() != "waits" and len(looks) < 500:
            looks.append("moves")
            time.sleep(0.01)
        aborted.append(True)

    threading.Thread(target=watch).start()
    with pytest.raises(PeerError, match="after the process group was aborted"):
        cache.get((0, 1))
    assert len(looks) < 500 and calls == []
    gate.set()
    end_s = time.monotonic() + 20
    while not calls and time.monotonic() < end_s:
        time.sleep(0.01)
    assert calls == ["ep"]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_axes_without_messages_get_no_communicator_until_another_asks_for_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[object] = []
    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lambda group, device, use: connected.append((group, use)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    cache = GroupCache()
    made = {ranks: Group(Nccl(str(ranks), [])) for ranks in ((0, 1), (0, 2))}
    monkeypatch.setattr(cache, "_create", lambda ranks, *_: made[ranks])
    assert cache.get((0, 1), uses=()) is made[0, 1] and cache.get((0, 2)) is made[0, 2]
    assert connected == [(made[0, 2], "sum")]
    assert [cache.get((0, 1), uses=uses) for uses in (("sum",), (), ("sum", "exchange"))] == 3 * [made[0, 1]]
    assert connected == [(made[0, 2], "sum"), (made[0, 1], "sum"), (made[0, 1], "exchange")]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("epoch", [False, True])
def test_groups_of_a_folding_are_all_made_before_one_is_connected(monkeypatch: pytest.MonkeyPatch, epoch: bool) -> None:
    """Making one waits for all ranks, connecting it for its members alone: in turn, each rank would wait for all groups of all others, some 6,000 of 16,384 ranks."""
    done: list[str] = []
    on_device_3(monkeypatch)
    monkeypatch.setattr(
        devices, "_first_call", lambda group, device, use: done.append(f"connect {group.backend.name} {use}")
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "nccl_backends", lambda groups: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(Nccl("world", []))))
    monkeypatch.setattr(dist, "all_reduce", lambda x: done.append("meet"))
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 8)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)

    def new_group(ranks: list[int], **_: object) -> Group:
        done.append(f"make {ranks}")
        return Group(Nccl(str(ranks), []))

    monkeypatch.setattr(dist, "new_group", new_group)
    cache = EpochGroups(Sockets(), timeout_s=5.0) if epoch else GroupCache()
    with cache.made_together():
        cache.get((0, 1), uses=("sum",))
        cache.get((2, 3), uses=("sum",))
        cache.get((0, 1), uses=("sum", "exchange"))
        cache.get((0, 2), uses=())
    made = ["make [0, 1]", "make [2, 3]", "make [0, 2]"]
    assert done == ["meet"] * epoch + made + ["connect [0, 1] sum", "connect [0, 1] exchange"]
    done.clear()
    with cache.made_together():
        cache.get((0, 1), uses=("exchange",))
    assert done == [], "nobody waits for groups that are there"
    cache.get((0, 4))
    assert done == ["meet"] * epoch + ["make [0, 4]", "connect [0, 4] sum"], "outside of it as ever"
    with pytest.raises(KeyError), cache.made_together():
        raise KeyError
    cache.get((0, 2))
    assert done[-1] == "connect [0, 2] sum", "and after an error inside"


class Asked(GroupCache):
    """Notes what a rank's groups are asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.asked = rank, dict[tuple[int, ...], list[tuple[str, ...]]]()

    def get(self, ranks: Any, *, purpose: Any = "passes", uses: Any = ("sum",), **_: Any) -> None:
        if self.rank in ranks and len(ranks) > 1:
            self.asked.setdefault(tuple(ranks), []).append((purpose, *uses))


@pytest.mark.unit
def test_every_member_connects_a_group_for_the_same_uses_in_the_same_order() -> None:
    """And rows' groups for their exchange, whose buffers are the largest: else they are allocated in the first step."""
    folding = make_folding(world=16, tp=2, pp=2, ep=4)
    asked: dict[tuple[int, ...], set[tuple[tuple[str, ...], ...]]] = {}
    for rank in range(16):
        cache = Asked(rank)
        build_groups(folding, rank=rank, cache=cache, table_ranks=(0,), in_order=True)
        for ranks, uses in cache.asked.items():
            asked.setdefault(ranks, set()).add(tuple(uses))
    assert all(len(orders) == 1 for orders in asked.values())
    assert all(any("exchange" in use for use in asked[ranks].copy().pop()) for ranks in folding.groups("ep_etp"))
    assert not any("exchange" in use for use in asked[folding.groups("dp_cp")[0]].copy().pop())


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_buffers_that_find_no_memory_are_an_error_that_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that an elastic run takes for a lost peer, and tries again for ever."""

    def full(group: object, device: torch.device, use: str) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")

    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", full)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for cache in (GroupCache(), EpochGroups(Sockets(), timeout_s=5.0, generation=6)):
        monkeypatch.setattr(cache, "_create", lambda *_: Group(Nccl("ep", [])))
        with pytest.raises(
            RunError, match=r"no memory for the buffers of a group of 8 ranks \(exchange\).*P2P"
        ) as told:
            cache.get((0, 1), uses=("exchange",))
        assert not isinstance(told.value, PeerError)


@pytest.mark.unit
@pytest.mark.parametrize(
    "degrees",
    [{"ep": 4}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "ep": 2, "etp": 2}, {"tp": 4, "etp": 4, "ep": 2}],
    ids=str,
)  # fmt: skip
def test_groups_are_connected_for_the_exchanges_that_a_step_has_and_for_no_others(degrees: dict[str, int]) -> None:
    """Buffers of an exchange take 384 MiB for each peer on the host. With etp rows travel over ep, not over ep x etp; and a sum of rows is an exchange, so that tp and etp have them."""
    folding = make_folding(world=8, **degrees)
    program = Run(folding=folding, num_microbatches=2).program(0)
    kinds = ("all_to_all_rows", "reduce_scatter_rows")
    sent = {tuple(folding.group_of(0, op.axis)) for op in program.collectives if op.collective in kinds}

    def connected(rows: str) -> set[tuple[int, ...]]:
        cache = Asked(0)
        build_groups(folding, rank=0, cache=cache, table_ranks=(0,), in_order=True, rows=rows)
        uses = {ranks: {use for purpose, *of in asked for use in of if purpose == "passes"} for ranks, asked in cache.asked.items()}  # fmt: skip
        return {ranks for ranks, of in uses.items() if "exchange" in of}

    assert connected("ep") == {ranks for ranks in sent if len(ranks) > 1}
    both = {tuple(folding.group_of(0, name)) for name in ("tp", "ep_etp")}
    assert connected("ep_etp") == {ranks for ranks in both if len(ranks) > 1}


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_the_first_calls_send_what_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one stream, of the priority that NCCL does not take its own from: each call's own would leave a group of a large mapping the stream of another, for torch has 32."""
    calls: list[tuple[str, int]] = []
    on_device_3(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, *, priority: calls.append(("stream", priority)))
    monkeypatch.setattr(torch, "zeros", lambda count, *, device: torch.full((count,), 0.0))
    for name in ("all_reduce", "broadcast", "all_to_all_single"):
        monkeypatch.setattr(dist, name, lambda x, *_, name=name, **__: calls.append((name, x.numel())))
    group: Any = Group(Nccl("ep", []))
    devices.connect(group, ("sum", "gather", "exchange"))
    assert calls == [("stream", -1), ("all_reduce", 1), ("broadcast", 1), ("all_to_all_single", 8)]


@pytest.mark.unit
@pytest.mark.parametrize(
    "degrees", [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "ep": 2}], ids=str
)
def test_no_step_sends_over_an_axis_without_messages(degrees: dict[str, int]) -> None:
    program = Run(folding=make_folding(world=8, **degrees), num_microbatches=2).program(0)
    assert not {op.axis for op in program.collectives} & set(SILENT)


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_a_member_that_is_lost_while_a_communicator_is_created_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(group: object, device: torch.device, use: str) -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lost)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "leave_behind", lambda: pytest.fail("nothing is stuck"))
    cache = EpochGroups(Sockets(), timeout_s=5.0, generation=6)
    monkeypatch.setattr(cache, "_create", lambda *_: Group(Nccl("ep", [])))
    with pytest.raises(PeerError, match="generation 6 could not connect a process group: NCCL error: remote process"):
        cache.get((0, 1))
    cache.forget()


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_a_communicator_whose_second_use_fails_is_aborted_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of its first use may wait for the peer that was lost: to destroy it unaborted would wait for that."""

    def lost(group: object, device: torch.device, use: str) -> None:
        if use == "gather":
            raise RuntimeError("NCCL error: remote process exited or there was a network error")

    calls: list[str] = []
    on_device_3(monkeypatch)
    monkeypatch.setattr(devices, "_first_call", lost)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    cache = EpochGroups(Sockets(), timeout_s=5.0)
    monkeypatch.setattr(cache, "_create", lambda *_: Group(Nccl("ep", calls)))
    with pytest.raises(PeerError, match="could not connect"):
        cache.get((0, 1), uses=("sum", "gather"))
    abort = DeviceAbort()
    abort.start(cache.all())
    assert abort.wait(20) and calls == ["ep"]


@pytest.mark.unit
def test_an_aborted_team_makes_no_group_and_posts_nothing_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = EpochGroups(Sockets(), timeout_s=5.0, aborted=lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(PeerError, match="generation 0 was aborted"):
        cache._create((0, 1), True, 0)
    comms = Collectives(escape=AbortableCall(lambda: True))
    comms._posted(Call("x", 0, True))  # on the host it fails by itself
    with pytest.raises(PeerError, match="collective refused: connections are closed"):
        comms._posted(Call("x", 0, False))


@pytest.mark.unit
def test_results_of_an_aborted_team_are_not_used_on_a_device_and_calls_of_a_cpu_fail_themselves() -> None:
    aborted = [False]
    comms = Collectives(escape=AbortableCall(lambda: aborted[0]))
    comms.complete(ELSEWHERE)
    aborted[0] = True
    comms.complete(torch.device("cpu"))
    with pytest.raises(PeerError, match="process group was aborted while the device computed"):
        comms.complete(ELSEWHERE)
    Collectives().complete(ELSEWHERE)  # a run that is not elastic


@pytest.mark.unit
def test_it_asks_after_the_device_has_ended_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort may come while this thread waits for the device."""
    aborted: list[bool] = []
    monkeypatch.setattr(devices, "synchronize", lambda device: aborted.append(True))
    with pytest.raises(PeerError):
        complete(ELSEWHERE, lambda: bool(aborted))


def trainer_on(device: torch.device, aborted: list[bool]) -> Trainer:
    """One that is about to make a step in which the team is aborted, after the last call that could have failed."""
    trainer: Any = object.__new__(Trainer)
    comms = Collectives(escape=AbortableCall(lambda: aborted[0]))
    trainer.recorder = SimpleNamespace(prepare=lambda step: None, begin=lambda step: None, publishing=nullcontext)
    trainer.parts, trainer.hook = SimpleNamespace(comms=comms), SimpleNamespace(reduced=lambda *_: None)
    optim = SimpleNamespace(warmup_steps=0, lr=1.0)
    trainer.rank = SimpleNamespace(device=device, recipe=SimpleNamespace(optim=optim))
    trainer.progress, trainer.total_steps, trainer.stop = RunProgress(), 4, StopRequest()
    trainer.elastic, trainer._at = SimpleNamespace(), lambda name: None
    trainer.due = False
    trainer.moving, trainer._measured, trainer._reduced = None, None, None
    trainer._batches = iter([[]])
    return trainer


@pytest.mark.unit
@pytest.mark.parametrize("error", [None, RunError("the loss of step 1 is not finite")])
def test_a_step_that_a_device_computed_with_an_aborted_team_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Also where its numbers make no sense: those came from nowhere, and would not come again."""
    aborted, numbers = [False], SimpleNamespace(findings=())

    def reduce_step(*args: object, **options: object) -> object:
        aborted[0] = True
        if error is not None:
            raise error
        return numbers

    monkeypatch.setattr(loop, "reduce_step", reduce_step)
    monkeypatch.setattr(loop, "publish", lambda parts: None)
    monkeypatch.setattr(loop, "learning_rate", lambda *args, **options: 1.0)
    trainer = trainer_on(ELSEWHERE, aborted)
    with pytest.raises(PeerError):
        trainer.compute()
    assert trainer._reduced is None
    aborted[0], host = False, trainer_on(torch.device("cpu"), aborted)
    if error is None:
        host.compute()
        assert host._reduced is not None and host._reduced.step is numbers
    else:
        with pytest.raises(FinalError, match="not finite"):
            host.compute()


@pytest.mark.unit
def test_state_that_came_from_an_aborted_team_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared, it would be state on which members differ, and the end of the run."""
    aborted = [False]
    comms = Collectives(escape=AbortableCall(lambda: aborted[0]))
    everyone = Everyone(comms=comms, axis=Axis("everyone", (0,), 0, None), peers=Peers(), device=ELSEWHERE)
    plan: Any = SimpleNamespace(params=(), buffers=(), waves=((),), moves_of=lambda wave: ())
    told = np.zeros((1, 0), dtype=np.int64)
    found = Examined(plan=plan, suspects=Suspects(), cut={}, pieces=(), told=told)
    monkeypatch.setattr(state_transfer, "move_state", lambda *args, **options: 7)
    assert take_state(found, None, held=HeldState(None, None), everyone=everyone).received_bytes == 7
    aborted[0] = True
    with pytest.raises(PeerError):
        take_state(found, None, held=HeldState(None, None), everyone=everyone)


@pytest.mark.unit
def test_a_member_whose_results_are_not_used_does_not_vote() -> None:
    voted: list[int] = []
    team: Any = SimpleNamespace(reports=(), uid="h.0", uids=("h.0",), size=1, formed_s=0.0)
    team.generation = Generation(number=1, epoch="t", members=(Member("h.0", "h"),))

    class At(SimpleNamespace):
        def next_epoch(self, report: object, *, order: object) -> object:
            if self.begun:
                raise Left("over")
            self.begun = True
            return team

        def vote(self, step: int) -> Decision:
            voted.append(step)
            raise AssertionError("it voted")

    place: Any = At(uid="h.0", team=None, begun=False, told_s=lambda g: 0.0, settle=lambda step: None)

    def compute() -> None:
        complete(ELSEWHERE, lambda: True)

    body: Any = SimpleNamespace(
        step=0, holds=False, describe=lambda: ("", {}), enter=lambda team, found: None, compute=compute,
        abort=lambda: None, leave_epoch=lambda: None, finished=lambda: False,
    )  # fmt: skip
    assert run_member(place, body) == "left" and not voted


class GroupCalls(threading.local):
    """Of each thread, the group calls of NCCL that are open in it. torch makes one around a batch of messages and one around each message, and ends neither where NCCL refuses a message."""

    open = 0

    def post(self, *, refused: bool) -> bool:
        """A batch of one message; whether it was launched."""
        self.open += 2
        if refused:
            raise RuntimeError("NCCL communicator was aborted")
        self.open -= 2
        return self.open == 0


@pytest.mark.unit
@pytest.mark.parametrize("thread", [DeviceThread(), None], ids=["of a device", "none"])
def test_a_message_that_was_refused_keeps_no_later_generation_from_posting(thread: DeviceThread | None) -> None:
    calls, mine = GroupCalls(), RankProgress()
    tried: list[int] = []
    launched: list[bool] = []
    team: Any = SimpleNamespace(reports=(), uid="h.0", uids=("h.0",), size=1, formed_s=0.0)
    team.generation = Generation(number=1, epoch="t", members=(Member("h.0", "h"),))
    teams = iter([team, team])

    def next_epoch(report: object, *, order: object) -> object:
        with mine.waiting():
            assert mine.look() == "moves" and mine.look() == "waits"  # the worker's own thread is the one it tells of
        team = next(teams, None)
        if team is None:
            raise Left("over")
        return team

    def compute() -> None:
        with mine.waiting():
            assert mine.look() == "moves" and mine.look() == "waits"
        tried.append(0)
        launched.append(calls.post(refused=len(tried) == 1))

    place: Any = SimpleNamespace(
        uid="h.0", team=None, told_s=lambda g: 0.0, settle=lambda step: None, progress=mine, next_epoch=next_epoch, vote=lambda step: ABORT,
        leave_broken=lambda: None,
    )  # fmt: skip
    refused: list[int] = []
    body: Any = SimpleNamespace(
        step=0, holds=False, describe=lambda: ("", {}), enter=lambda team, found: None, compute=compute,
        abort=lambda: refused.append(0), leave_epoch=lambda: None, finished=lambda: False,
    )  # fmt: skip
    assert run_member(place, body, thread=thread) == "left"
    assert len(refused) == 2 and launched == [thread is not None]


@pytest.mark.unit
def test_work_on_a_device_has_one_thread_until_that_is_spoiled() -> None:
    threads: list[threading.Thread] = []

    def work() -> int:
        threads.append(threading.current_thread())
        return 7

    def fails() -> None:
        work()
        thread.is_spoiled = True
        raise SystemExit(3)

    with DeviceThread() as thread:
        assert thread.run(work) == thread.run(work) == 7
        with pytest.raises(SystemExit, match="3"):
            thread.run(fails)
        assert not threads[2].is_alive() and thread.run(work) == 7
    assert threads[0] is threads[1] is threads[2] is not threads[3]
    assert threading.current_thread() not in threads and not threads[3].is_alive()


@pytest.mark.unit
@pytest.mark.parametrize("said", ["", "CUDA error: device-side assert triggered\nCompile with ..."])
def test_a_process_whose_device_does_no_more_work_ends(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error that its supervisor hears of. One that is sound goes on with the others. A stand-in for the device."""

    def launch() -> None:
        if said:
            raise RuntimeError(said)

    def refused(*_: object) -> None:
        raise RuntimeError("NCCL communicator was aborted")

    def next_epoch(*_: object, **__: object) -> Any:
        if entered:
            raise Left
        entered.append(1)
        return SimpleNamespace(generation=SimpleNamespace(uids=("h.0",), number=1), reports=(), uid="h.0")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_device_3(monkeypatch)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices_set.append((device, threading.current_thread()))
    )
    monkeypatch.setattr(devices, "_small_launch", lambda device: launch)
    devices_set: list[tuple[int, threading.Thread]] = []
    entered: list[int] = []
    place: Any = SimpleNamespace(
        uid="h.0", team=None, progress=RankProgress(), next_epoch=next_epoch, leave_broken=lambda: None
    )
    body: Any = SimpleNamespace(step=0, holds=False, describe=lambda: ("", {}), enter=refused, leave_epoch=lambda: None)
    with DeviceThread() as thread:
        if said:
            with pytest.raises(
                RunError, match=r"no more work .*\(CUDA error: device-side assert triggered\): RuntimeError: NCCL comm"
            ):
                run_member(place, body, thread=thread)
        else:
            assert run_member(place, body, thread=thread) == "left"
    assert [device for device, _ in devices_set] == [3] and devices_set[0][1] is not threading.current_thread()


@pytest.mark.unit
@pytest.mark.parametrize(("device", "aborted"), [("cuda", True), ("cpu", False)])
def test_who_fails_alone_ends_the_waits_of_the_others_on_their_devices(device: str, aborted: bool) -> None:
    """As where one GPU has no memory left. Nobody is lost, so the newer generation ends no step; on processors sockets that are shut do."""
    service = MemoryService()
    generation = Membership(service.connect()).start(
        [Member("h.0", "h"), Member("h.1", "h")], above=0, minimum=1, why=""
    )

    def member(uid: str) -> WorkerAgent:
        found = WorkerAgent(Member(uid, "h"), cast(Any, service), pipe=-1, settings=AgentSettings(device=device))
        found.team = cast(
            Any, SimpleNamespace(generation=generation, aborted=False, aborted_s=0.0, abort=lambda: aborts.append(uid))
        )
        found._glance(service.connect(), 0.0)
        return found

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    aborts: list[str] = []
    fails, waits = member("h.0"), member("h.1")
    loop = _Loop(fails, cast(Any, SimpleNamespace(step=3)), lambda event: None, as_listed)
    loop.thread = cast(Any, SimpleNamespace(is_spoiled=False, why_useless=lambda: "")) if device == "cuda" else None
    assert loop._failed(full) and not aborts
    Membership(service.connect()).renew(generation, "h.0 could not reach all others")
    for _ in range(2):
        waits._glance(service.connect(), 0.0)
    assert ("h.1" in aborts) is aborted


@pytest.mark.unit
@pytest.mark.parametrize(("device", "aborted"), [("cuda", ["h.0", "h.1"]), ("cpu", [])])
def test_members_that_all_live_leave_a_message_that_failed(
    device: str, aborted: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """As behind a link between hosts that fails: nobody is silent or still, and all wait for each other. The member whose message torch's own thread gives up tells the others."""
    service = MemoryService()
    generation = Membership(service.connect()).start(
        [Member("h.0", "h"), Member("h.1", "h")], above=0, minimum=1, why=""
    )
    aborts: list[str] = []

    def member(uid: str) -> tuple[WorkerAgent, Any]:
        found = WorkerAgent(Member(uid, "h"), cast(Any, service), pipe=-1, settings=AgentSettings(device=device))
        found.team = cast(Any, SimpleNamespace(generation=generation, aborted=False, aborted_s=0.0, abort=lambda: aborts.append(uid)))  # fmt: skip
        result: Any = torch.futures.Future()
        found.progress.handed_over(SimpleNamespace(get_future_result=lambda: result))
        return found, result

    (first, gives_up), (other, _) = member("h.0"), member("h.1")
    for one in (first, other):
        one._glance(service.connect(), 0.0)
    assert not aborts, "a message that is under way is waited for"
    gives_up.set_result(1)  # WorkResult.TIMEOUT
    for one in (first, other):
        one._glance(service.connect(), 0.0)
    assert aborts == aborted
    assert ("h.0 leaves generation 1: a message failed" in capfd.readouterr().err) is bool(aborted)
    gone, _ = member("h.2")
    slow: Any = SimpleNamespace(get=lambda key: setattr(gone, "team", None) or "h.0")
    gone._abort_if_left(slow)  # which it has left meanwhile
    assert "h.2" not in aborts


class Clock:
    """Of the worker agent: time passes only here."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Late:
    """A team that is dropped by somebody's hand."""

    def __init__(self, clock: Clock, on_drop: Callable[[], None] = lambda: None) -> None:
        self.aborted, self.aborted_s, self.clock, self.on_drop = False, 0.0, clock, on_drop
        self.generation, self.check = SimpleNamespace(number=7), None

    def abort(self) -> None:
        self.aborted, self.aborted_s = True, self.aborted_s or self.clock.now_s

    def drop(self) -> None:
        self.abort()
        self.on_drop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(lookout, "time", SimpleNamespace(monotonic=found.monotonic, sleep=time.sleep))
    return found


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(lookout, "os", SimpleNamespace(_exit=found.append, write=os.write))
    return found


def agent_on(device: str) -> WorkerAgent:
    service: Any = None
    return WorkerAgent(Member("h.0", "h"), service, pipe=-1, settings=AgentSettings(device=device))


@pytest.mark.unit
@pytest.mark.parametrize(("device", "ends"), [("cuda", True), ("cpu", False)])
def test_a_call_that_nothing_ends_is_ended_with_its_process(
    clock: Clock, codes: list[int], capfd: pytest.CaptureFixture[str], device: str, ends: bool
) -> None:
    place, team = agent_on(device), Late(clock)
    place._connect_watched(team)  # type: ignore[arg-type]
    clock.now_s += 10 * lookout.STUCK_S
    place._end_if_stuck()  # nobody has aborted it: a step may take as long as it likes
    team.abort()
    clock.now_s += lookout.STUCK_S - 1
    place._end_if_stuck()
    assert not codes
    clock.now_s += 2
    place._end_if_stuck()
    assert codes == ([1] if ends else [])
    assert ("is stuck in generation 7" in capfd.readouterr().err) == ends


@pytest.mark.unit
def test_who_hangs_while_the_team_is_dropped_is_ended_too(clock: Clock, codes: list[int]) -> None:
    """An abort that does not end, or a communicator that cannot be destroyed."""
    place = agent_on("cuda")

    def hang() -> None:
        clock.now_s += lookout.STUCK_S + 1
        place._end_if_stuck()  # what the watching thread does meanwhile

    place._connect_watched(Late(clock, hang))  # type: ignore[arg-type]
    place.drop()
    assert codes == [1]
    place._end_if_stuck()
    assert codes == [1]


@pytest.mark.unit
def test_who_waits_for_a_generation_after_one_that_did_not_form_may_wait(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, codes: list[int]
) -> None:
    place, made = agent_on("cuda"), list[Late]()
    generation = Generation(number=7, epoch="t", members=(Member("h.0", "h"),))

    def form(*args: object, watch: Callable[[object], None], **options: object) -> None:
        made.append(Late(clock))
        watch(made[0])
        made[0].drop()
        raise PeerError("generation 7 failed to form")

    monkeypatch.setattr(agent, "form", form)
    monkeypatch.setattr(place, "_keys_of", lambda generation: SimpleNamespace(put=lambda key, value: None))
    report = MemberReport(uid="h.0", step=0, holds=False, doubt=False, sum="")
    with pytest.raises(PeerError):
        place._form(generation, report, as_listed)
    assert made[0].aborted_s
    clock.now_s += 10 * lookout.STUCK_S
    place._end_if_stuck()
    assert not codes


@pytest.mark.unit
@pytest.mark.parametrize(
    ("nowhere", "error"), [(True, ValueError("3 rows")), (True, FinalError("nan")), (False, ValueError("3 rows"))]
)
def test_an_error_of_numbers_that_nobody_sent_is_a_lost_peer(nowhere: bool, error: Exception) -> None:
    place: Any = SimpleNamespace(may_be_invalid=lambda: nowhere, broken=lambda: True, uid="h.0")
    body: Any = SimpleNamespace(step=3)
    loop = _Loop(place, body, lambda event: None, as_listed)

    def fails() -> None:
        raise error

    if nowhere:
        assert loop._failed(fails) and loop.failures[0][0] == 3
    else:
        with pytest.raises(ValueError, match="3 rows"):
            loop._failed(fails)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("device", "aborted", "nowhere"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_numbers_may_come_from_nowhere_on_a_device_of_an_aborted_team(
    clock: Clock, device: str, aborted: bool, nowhere: bool
) -> None:
    place, team = agent_on(device), Late(clock)
    place._connect_watched(team)  # type: ignore[arg-type]
    if aborted:
        team.abort()
    assert place.may_be_invalid() == nowhere


@pytest.mark.unit
def test_threads_of_nccl_end_nothing_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "os", SimpleNamespace(environ={"TORCH_NCCL_ENABLE_MONITORING": "1"}))
    leave_errors_to_run()
    want = {**world.LEFT_TO_RUN, "TORCH_NCCL_ENABLE_MONITORING": "1"}
    del want["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]  # torch would end the process after so few seconds
    assert world.os.environ == want
    monkeypatch.setattr(world, "os", SimpleNamespace(environ={}))
    leave_errors_to_run()
    assert world.os.environ == world.LEFT_TO_RUN


@pytest.mark.unit
def test_a_run_on_devices_is_elastic_where_asked_for_and_not_in_exact_mode() -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=4, device="cuda", threads=1))
    assert "not yet shown to work on one" in choose_recovery(recipe).explain()
    asked = replace(recipe, resilience=ResilienceConfig(heal=True, mode="fast"))
    assert not recipe_problems(asked) and choose_recovery(asked).is_elastic
    exact = replace(recipe, resilience=ResilienceConfig(heal=True, mode="exact"))
    assert [p.where for p in recipe_problems(exact)] == ["launch.device"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_elastic_run_without_gpus_says_so_once_and_ends(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    args = train_args(
        tmp_path,
        launch__device="cuda",
        launch__ranks=2,
        resilience__heal="true",
        resilience__mode="fast",
        folding__ep=1,
    )
    done = phalanx("train", *args)
    assert done.returncode != 0
    assert (
        done.stderr.count("launch.device = 'cuda': needs a GPU that torch can use, and finds none on this machine") == 1
    )

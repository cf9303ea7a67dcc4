"""Healing where messages are NCCL's, with stand-ins for what a GPU does: what ends without a word is noticed, and a call that nothing ends is ended with its process."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from phalanx.core.config import LaunchConfig, Recipe, ResilienceConfig
from phalanx.core.errors import FinalError, PeerError, RunError
from phalanx.core.recipe import recipe_problems
from phalanx.plan.heal_choice import choose_healing
from phalanx.plan.suspects import Suspects
from phalanx.runtime import devices, seat
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.devices import DeviceAbort, complete
from phalanx.runtime.escape import Escape
from phalanx.runtime.groups import Axis, leave_errors_to_run
from phalanx.runtime.member import run_member
from phalanx.runtime.membership import Generation, Member
from phalanx.runtime.peers import Peers
from phalanx.runtime.seat import Seat, SeatSettings
from phalanx.runtime.votes import Decision
from phalanx.train import heal_state, healing
from phalanx.train.heal_state import Everyone, Examined, take_state
from phalanx.train.healing import HealingBody
from train_help import phalanx, train_args, write_text

ELSEWHERE = torch.device("meta")
"""A device that is no CPU, and needs no waiting for."""


class Nccl:
    """A communicator whose abort may wait for others, as NCCL's does outside of a group call."""

    calls: list[str]

    def __init__(self, name: str, calls: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.calls, self.gate = name, calls, gate

    def _group_start(self) -> None:
        self.calls.append("begin")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        if self.gate is not None:
            self.gate.wait(20)
        self.calls.append(self.name)


class Group:
    """A process group that has that backend for devices, or none."""

    def __init__(self, backend: object | None) -> None:
        self.backend = backend

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
def test_all_communicators_are_aborted_in_one_group_call_once() -> None:
    calls: list[str] = []
    abort = DeviceAbort()
    for _ in range(2):  # the watching thread kicks, and whoever drops the team kicks again
        abort.start(groups_of(Nccl("world", calls), None, Nccl("ep", calls), object()))
    assert abort.wait(20) and calls == ["begin", "ep", "world", "end"]


@pytest.mark.unit
@pytest.mark.usefixtures("nccl")
def test_an_abort_that_blocks_keeps_nobody_from_watching() -> None:
    calls: list[str] = []
    gate, abort = threading.Event(), DeviceAbort()
    begin_s = time.monotonic()
    abort.start(groups_of(Nccl("world", calls, gate)))
    assert time.monotonic() - begin_s < 10 and not abort.wait(0.05) and "world" not in calls
    gate.set()
    assert abort.wait(20) and calls[-1] == "end"


@pytest.mark.unit
def test_there_is_nothing_to_abort_without_nccl() -> None:
    abort = DeviceAbort()
    abort.start(groups_of(None))
    assert abort.wait(0)


@pytest.mark.unit
def test_results_of_a_kicked_team_are_not_used_on_a_device_and_calls_of_a_cpu_fail_themselves() -> None:
    kicked = [False]
    comms = Collectives(escape=Escape(lambda: kicked[0]))
    comms.complete(ELSEWHERE)
    kicked[0] = True
    comms.complete(torch.device("cpu"))
    with pytest.raises(PeerError, match="connections were closed while the device computed"):
        comms.complete(ELSEWHERE)
    Collectives().complete(ELSEWHERE)  # a run that does not heal


@pytest.mark.unit
def test_it_asks_after_the_device_has_ended_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kick may come while this thread waits for the device."""
    kicked: list[bool] = []
    monkeypatch.setattr(devices, "synchronize", lambda device: kicked.append(True))
    with pytest.raises(PeerError):
        complete(ELSEWHERE, lambda: bool(kicked))


def body_on(device: torch.device, kicked: list[bool], error: Exception | None) -> HealingBody:
    """One that is about to make a step in which the team is kicked, after the last call that could have failed."""
    body = object.__new__(HealingBody)
    comms = Collectives(escape=Escape(lambda: kicked[0]))
    recorder = SimpleNamespace(prepare=lambda step: None, begin=lambda step: None, voted=lambda: None)
    trainer: Any = SimpleNamespace(
        parts=SimpleNamespace(comms=comms), recorder=recorder, load=lambda step: [], token_batch=lambda m: m
    )
    optim = SimpleNamespace(warmup_steps=0, lr=1.0)
    body.recipe = SimpleNamespace(train=SimpleNamespace(steps=4), optim=optim)  # type: ignore[assignment]
    body.device, body.trainer, body.watch = device, trainer, None
    body._idle = body._others_idle = body._due = False
    body._step, body._moving, body._reduced, body._batches = 0, None, None, None
    return body


@pytest.mark.unit
@pytest.mark.parametrize("error", [None, RunError("the loss of step 1 is not finite")])
def test_a_step_that_a_device_computed_with_a_kicked_team_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Also where its numbers make no sense: those came from nowhere, and would not come again."""
    kicked = [False]

    def reduce_step(*args: object, **options: object) -> object:
        kicked[0] = True
        if error is not None:
            raise error
        return "numbers"

    monkeypatch.setattr(healing, "reduce_step", reduce_step)
    monkeypatch.setattr(healing, "publish", lambda parts: None)
    monkeypatch.setattr(healing, "learning_rate", lambda *args, **options: 1.0)
    body = body_on(ELSEWHERE, kicked, error)
    with pytest.raises(PeerError):
        body.compute()
    assert body._reduced is None
    kicked[0], host = False, body_on(torch.device("cpu"), kicked, error)
    if error is None:
        host.compute()
        assert host._reduced is not None and host._reduced[0] == "numbers"
    else:
        with pytest.raises(FinalError, match="not finite"):
            host.compute()


@pytest.mark.unit
def test_state_that_came_from_a_kicked_team_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared, it would be state on which members differ, and the end of the run."""
    kicked = [False]
    comms = Collectives(escape=Escape(lambda: kicked[0]))
    everyone = Everyone(comms=comms, axis=Axis("everyone", (0,), 0, None), peers=Peers(), device=ELSEWHERE)
    plan: Any = SimpleNamespace(params=(), buffers=(), moves=())
    told = np.zeros((1, 0), dtype=np.int64)
    found = Examined(plan=plan, suspects=Suspects(), cut={}, pieces=(), told=told)
    monkeypatch.setattr(heal_state, "move_state", lambda *args, **options: 7)
    assert take_state(found, None, old=None, everyone=everyone).received_bytes == 7
    kicked[0] = True
    with pytest.raises(PeerError):
        take_state(found, None, old=None, everyone=everyone)


@pytest.mark.unit
def test_a_member_whose_results_are_not_used_does_not_vote() -> None:
    voted: list[int] = []
    team: Any = SimpleNamespace(reports=(), uid="h.0", uids=("h.0",), size=1, formed_s=0.0)
    team.generation = Generation(number=1, epoch="t", members=(Member("h.0", "h"),))

    class At(SimpleNamespace):
        def next_team(self, report: object, *, order: object) -> object:
            if self.begun:
                raise seat.Left("over")
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
        abort=lambda: None, leave_team=lambda: None, finished=lambda: False,
    )  # fmt: skip
    assert run_member(place, body) == "left" and not voted


@pytest.mark.unit
@pytest.mark.parametrize(
    ("device", "kicked_s", "ends"),
    [("cuda", 1.0, True), ("cuda", 0.0, False), ("cuda", -1.0, False), ("cpu", 1.0, False)],
)
def test_a_call_that_nothing_ends_is_ended_with_its_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], device: str, kicked_s: float, ends: bool
) -> None:
    """`kicked_s`: longer than the limit ago (1), just now (-1), never (0)."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    service: Any = None
    place = Seat(Member("h.0", "h"), service, pipe=-1, settings=SeatSettings(device=device))
    now = time.monotonic() + 2 * seat.STUCK_S
    monkeypatch.setattr(seat.time, "monotonic", lambda: now)
    since = {1.0: now - seat.STUCK_S - 1, -1.0: now - 1, 0.0: 0.0}[kicked_s]
    place.team = SimpleNamespace(kicked_s=since, generation=SimpleNamespace(number=7))  # type: ignore[assignment]
    place._end_if_stuck()
    assert codes == ([1] if ends else [])
    assert ("has not come back from generation 7" in capfd.readouterr().err) == ends


@pytest.mark.unit
def test_threads_of_nccl_end_nothing_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    leave_errors_to_run()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.mark.unit
def test_a_run_on_devices_heals_where_it_is_asked_for_and_not_in_exact_mode() -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=4, device="cuda", threads=1))
    assert "never run on a GPU" in choose_healing(recipe).explain()
    asked = replace(recipe, resilience=ResilienceConfig(heal=True, mode="fast"))
    assert not recipe_problems(asked) and choose_healing(asked).heals
    exact = replace(recipe, resilience=ResilienceConfig(heal=True, mode="exact"))
    assert [p.where for p in recipe_problems(exact)] == ["launch.device"]


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_healing_run_without_gpus_says_so_once_and_ends(tmp_path: Path) -> None:
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

"""Copies of state on a device from which checkpoints are written, with a stand-in whose streams do their work late and in any order that events allow: a wait that is missing shows."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_help import run_state
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.plan.layout.parameters import Box
from phalanx.runtime.checkpoint import host_copies
from phalanx.runtime.checkpoint.host_copies import HostCopies, HostCopy, pack
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train import loop
from phalanx.train.loop import Trainer
from phalanx.train.reporting import RunProgress

pytestmark = pytest.mark.unit
CUDA = torch.device("cuda", 0)
SHAPES = {"master/w": ((40, 30), torch.float32), "exp_avg/w": ((40, 30), torch.bfloat16), "buffer/b": ((), torch.float32), "buffer/none": ((0, 3), torch.float32)}  # fmt: skip
STEPS, INTERVAL, SEEDS = 6, 2, 12
Call = Callable[[], object]


class Event:
    """Recorded at one place of a stream."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.is_over = device, False

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread(), "training waits"
        self.device.run_until(lambda: self.is_over)


class Stream(TorchDispatchMode):
    """A queue of work; under it (`torch.cuda.stream`) operations are put there."""

    def __init__(self, owner: LateDevice) -> None:
        super().__init__()
        self.owner, self.device, self.queue = owner, CUDA, deque[Any]()
        owner.streams.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default and args[2], "a copy that does not block"
        self.put(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def put(self, call: Any) -> None:
        with self.owner.lock:
            self.queue.append(call)

    def record_event(self, event: Event) -> Event:
        self.put(lambda: setattr(event, "is_over", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event(Event(self.owner)))


class LateDevice:
    """Does what it was given when it is looked at, one operation of any stream that need not wait for another."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock, self.streams = random.Random(seed), threading.RLock(), list[Stream]()
        self.allocated = 0
        self.compute = Stream(self)
        self.copies_first = self.random.choice((0.02, 0.5, 0.98))

    def step(self) -> bool:
        with self.lock:
            for stream in self.streams:  # waits that are over
                while stream.queue and isinstance(stream.queue[0], Event) and stream.queue[0].is_over:
                    stream.queue.popleft()
            able = [s for s in self.streams if s.queue and not isinstance(s.queue[0], Event)]
            if not able:
                return False
            late = self.random.random() < self.copies_first
            able[-1 if late else 0].queue.popleft()()
            return True

    def run_until(self, is_over: Call) -> None:
        while not is_over():
            self.step()

    def drain(self) -> None:
        while self.step():
            pass


@contextlib.contextmanager
def late(seed: int) -> Iterator[LateDevice]:
    """A device in the place of torch's, on which all boxes count as lying."""
    device, empty = LateDevice(seed), torch.empty

    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        device.allocated += pin_memory
        return empty(*args, **kwargs).fill_(255) if pin_memory else empty(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "_device_of", lambda boxes: CUDA)
        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch.cuda, "Stream", lambda _: Stream(device))
        patch.setattr(torch.cuda, "Event", lambda **_: Event(device))
        patch.setattr(torch.cuda, "current_stream", lambda _: device.compute)
        patch.setattr(torch.cuda, "stream", lambda stream: stream)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        yield device


def boxes_of(tensors: dict[str, torch.Tensor]) -> list[BoxTensor]:
    return [
        BoxTensor(name, tuple(t.shape), Box((0,) * t.dim(), tuple(t.shape)), t, primary=True)
        for name, t in tensors.items()
    ]


def state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def train(folder: Path, seed: int, *, moves: bool = False) -> list[str]:
    """Steps with saves between them; returns what the checkpoints have that is not of their step. `moves`: state is taken over elsewhere, and its memory is given to others."""
    manager, held = CheckpointManager(folder, keep_last=9), state(0)
    with late(seed) as device:
        for step in range(1, STEPS + 1):
            for _ in range(device.random.choice((0, 1, 9))):
                device.step()
            manager.order()
            if moves:
                old, held = held, state(0)
                for tensor in old.values():
                    device.compute.put(lambda tensor=tensor: tensor.fill_(-1))
            for tensor in held.values():
                device.compute.put(lambda tensor=tensor, step=step: tensor.fill_(step))
            if step % INTERVAL == 0:
                manager.save(boxes_of(held), run_state(step))
        manager.finish()
        device.drain()
    return [text for step in manager.folder.steps() for text in wrong(folder, step)]


def wrong(folder: Path, step: int) -> list[str]:
    found = state(-2)
    CheckpointManager(folder).load(boxes_of(found), step=step)
    return [f"{name} of step {step}" for name, tensor in found.items() if not (tensor == step).all()]


@pytest.mark.parametrize("moves", [False, True])
def test_checkpoints_are_of_one_step_whatever_the_order_of_the_streams(tmp_path: Path, moves: bool) -> None:
    for seed in range(SEEDS):
        assert train(tmp_path / str(seed), seed, moves=moves) == []
        assert len(list((tmp_path / str(seed)).glob("step-*"))) == STEPS // INTERVAL


@pytest.mark.parametrize(
    ("where", "what"),
    [(CheckpointManager, "order"), (HostCopy, "wait"), (Stream, "wait_stream")],
    ids=["state changes before the copy has ended", "files are written before", "the copy begins before the step has ended"],
)  # fmt: skip
def test_a_missing_wait_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: type, what: str) -> None:
    monkeypatch.setattr(where, what, lambda *_: None)
    assert any(train(tmp_path / str(seed), seed) for seed in range(SEEDS))


def test_an_abandoned_save_harms_no_later_one(tmp_path: Path) -> None:
    """Its thread may still read what it copied."""
    with late(3) as device:
        manager, held = CheckpointManager(tmp_path, by_steps=True), state(1)
        manager.save(boxes_of(held), run_state(1))
        manager.close()
        for tensor in held.values():
            device.compute.put(lambda tensor=tensor: tensor.fill_(2))
        manager.save(boxes_of(held), run_state(2))
        saved = manager.finish()
    assert saved is not None and saved.step == 2 and wrong(tmp_path, 2) == []


@pytest.mark.parametrize("moves", [False, True])
def test_a_commit_and_experts_that_move_come_behind_the_copy(monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    done: list[str] = []

    def noting(name: str) -> Any:
        return lambda *_, **__: done.append(name)

    def commit_step(*_: object) -> Any:
        done.append("commit")
        return SimpleNamespace(loss=1.0, counts_LE=None)

    parts = SimpleNamespace(buffers=SimpleNamespace(close=noting("drop")), pipeline=SimpleNamespace(stages=1))
    moved = SimpleNamespace(parts=parts, event=SimpleNamespace(why="balance"), placements=())
    trainer: Any = object.__new__(Trainer)
    vars(trainer).update(
        manager=SimpleNamespace(order=noting("order")), parts=parts, _at=noting("at"), progress=RunProgress(),
        moving=moved if moves else None, rank=SimpleNamespace(sinks=noting("told")),
        elastic=None, _reduced=SimpleNamespace(step=None, begin_s=0.0, data_s=0.0, micros=[]),
        recorder=SimpleNamespace(decided=noting("decided"), end=noting("end"), tell=noting("tell")),
        hook=SimpleNamespace(applied=noting("applied"), committed=noting("committed")), reporter=SimpleNamespace(step_ended=noting("ended"), placed=noting("placed")),
    )  # fmt: skip
    monkeypatch.setattr(loop, "commit_step", commit_step)
    monkeypatch.setattr(loop, "publish", noting("publish"))
    trainer.commit()
    assert done.index("order") < done.index("drop" if moves else "commit") and trainer.step == 1
    if moves:
        done.clear()
        trainer._move_in(moved)
        assert done == ["order", "drop", "told", "placed"]


def test_memory_is_pinned_once() -> None:
    with late(0) as device:
        kept, boxes = HostCopies(), boxes_of(state(5))
        first, again = (kept.copy(boxes) for _ in range(2))
        assert device.allocated == len(pack([b.tensor.nbytes for b in boxes])[0]) > 0
        assert [b.tensor.data_ptr() for b in first.boxes] == [b.tensor.data_ptr() for b in again.boxes]
        kept.copy(boxes[1:])  # other state
        assert device.allocated > len(pack([b.tensor.nbytes for b in boxes])[0])
        device.drain()


def test_what_cannot_be_pinned_is_copied_all_the_same_and_said_once(tmp_path: Path) -> None:
    pinned = torch.empty
    with late(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: refuse() if pin_memory else pinned(*a, **k))
        manager = CheckpointManager(tmp_path)
        saved = []
        for step in (1, 2):
            manager.save(boxes_of(state(step)), run_state(step))
            saved.append(manager.finish())
    assert [s.not_pinned for s in saved if s] == ["CUDA error: out of memory", ""]
    assert wrong(tmp_path, 1) == wrong(tmp_path, 2) == []


def refuse() -> torch.Tensor:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


def test_on_a_cpu_the_copy_is_there_at_once_and_nothing_is_waited_for() -> None:
    held = state(1)
    kept = HostCopies()
    copied = kept.copy(boxes_of(held))
    for tensor in held.values():
        tensor.fill_(2)
    kept.order()
    copied.wait()
    assert copied.device is None and all((b.tensor == 1).all() for b in copied.boxes)


def test_boxes_lie_apart_in_their_blocks_which_are_hardly_larger() -> None:
    for seed in range(20):
        drawn = random.Random(seed)
        sizes = [drawn.randrange(1 << drawn.randrange(1, 29)) for _ in range(200)]
        blocks, places = pack(sizes)
        for block, room in enumerate(blocks):
            lying = sorted((at, at + size) for size, (b, at) in zip(sizes, places, strict=True) if b == block and size)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(lying))
            assert room & (room - 1) == 0 and lying[-1][1] <= room and all(at % 64 == 0 for at, _ in lying)
        assert sum(blocks) <= 1.1 * sum(sizes)

"""A7: a save beside training: the bytes that are copied and written, how long host and device stand still, and the rate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from phalanx.plan.layout import Box
from phalanx.runtime.checkpoint import CheckpointManager, RunState
from phalanx.runtime.checkpoint.host_copies import HostCopies
from phalanx.runtime.state import BoxTensor
from phalanx_lab.gpu_check.here import Here

LEAST_GB_PER_S = 20.0
"""An H200 copies 55 GB/s to pinned memory (B3), about 6 to memory that is not."""


def check_save(here: Here) -> None:
    """A7: state is copied to the host beside work that goes on and then changes it."""
    rows, count = here.pick((50_000_000, 30), (999, 3))
    before = [torch.randn(rows, device=here.device) for _ in range(count)]
    before += [torch.randn(rows // 3, device=here.device).to(torch.bfloat16), torch.randn((), device=here.device)]
    held = [x.clone() for x in before]
    copies, boxes = HostCopies(), [_box(f"x{i}", x) for i, x in enumerate(held)]
    for name in ("first save", "second save"):
        _save_beside(here, name, copies, boxes, before)
    seconds = _seconds(here, lambda: copies.copy(boxes).wait())
    size = sum(x.nbytes for x in held)
    here.tell("GB", size / 1e9)
    here.tell_rate("to the host GB/s", size / seconds / 1e9, least=LEAST_GB_PER_S)
    with tempfile.TemporaryDirectory() as folder:
        manager, some = CheckpointManager(Path(folder)), boxes[-3:]
        manager.save(some, _state_of(1))
        manager.order()
        for box in some:
            box.tensor.zero_()
        manager.finish()
        manager.load(some, step=1)
    here.tell("tensors of a checkpoint with other bytes", _differing(held, before), most=0)


def _save_beside(
    here: Here, name: str, copies: HostCopies, boxes: Sequence[BoxTensor], before: Sequence[torch.Tensor]
) -> None:
    """One save, while the device multiplies; then state changes, and is put back."""
    x = torch.randn(here.pick(8192, 8), here.pick(8192, 8), device=here.device)
    products = here.pick(50, 1)
    _seconds(here, lambda: x @ x)
    alone_s = _seconds(here, lambda: [x @ x for _ in range(products)])
    begin_s = time.perf_counter()
    copied = copies.copy(boxes)
    here.tell(f"{name}: the host stands still ms", 1e3 * (time.perf_counter() - begin_s))
    here.tell(f"{name}: memory that is not pinned", int(bool(copied.note)), most=0)
    writing = Thread(target=copied.wait)
    writing.start()
    beside_s = _seconds(here, lambda: [x @ x for _ in range(products)])
    here.tell(f"{name}: products beside it, of their time alone", beside_s / alone_s)
    copies.order()
    for box in boxes:
        box.tensor.add_(1)
    writing.join()
    found = [box.tensor.to(here.device) for box in copied.boxes]
    here.tell(f"{name}: tensors with other bytes", _differing(found, before), most=0)
    for box, y in zip(boxes, before, strict=True):
        box.tensor.copy_(y)


def _box(name: str, x: torch.Tensor) -> BoxTensor:
    shape = tuple(x.shape)
    return BoxTensor(name, shape, Box((0,) * len(shape), shape), x, primary=True)


def _differing(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> int:
    return sum(not torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def _seconds(here: Here, work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    if here.on_gpu:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begin_s


def _state_of(step: int) -> RunState:
    nothing: dict[str, Any] = {}
    return RunState(
        step=step, samples=0, tokens=0, seed=0, loader=nothing, model=nothing, model_hash="", recipe_hash="",
        folding=nothing, world=1, versions=nothing,
    )  # fmt: skip

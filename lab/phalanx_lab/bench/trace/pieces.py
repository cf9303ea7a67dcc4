"""Pieces of a step that `phalanx gpu-check` times (B1 and B3), on a GPU that computes nothing: what each asks for, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.cross_entropy import linear_cross_entropy
from phalanx_lab.bench.trace.device import World
from phalanx_lab.bench.trace.steps import CUDA, clear
from phalanx_lab.bench.trace.watch import Witness
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.layer import PARTS, make_layer, passes

LOSS = (4096, 2048, 151_936)
"""Tokens, width and words of the loss of B3."""
PARAMETERS = 200_000_000
"""Of B3's update."""


def trace_piece(case: dict[str, Any], current: Any) -> dict[str, int]:
    """Counts of `case["piece"]`: a preset of `gpu_check.layer.PARTS`, `loss` or `adamw`. For `child.py`: from JSON, to JSON."""
    watch, name = Witness(), case["piece"]
    tokens = PARTS[name].tokens if name in PARTS else LOSS[0]
    current(watch.seen, World(samples=1, replicas=1, replica_of=lambda _: 0, tokens=tokens))
    with FakeTensorMode(allow_non_fake_inputs=True), watch, torch.autograd.set_multithreading_enabled(False):
        work = _work_of(name)
        clear(watch.seen)
        work()
    seen = watch.seen
    return {
        "launches": seen.launches.total(),
        "product_flops": seen.flops.total(),
        "moved_bytes": seen.moved.total(),
        "waits": seen.syncs.total(),
    }


def _work_of(name: str) -> Callable[[], object]:
    if name in PARTS:
        return partial(passes, make_layer(PARTS[name], Here(device=CUDA, told=Path())))
    if name == "loss":
        tokens, hidden, vocab = LOSS
        hidden_TH = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        weight_VH = torch.randn(vocab, hidden, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        labels_T = torch.zeros(tokens, device=CUDA, dtype=torch.int64)
        return lambda: linear_cross_entropy(hidden_TH, weight_VH, labels_T).sum().backward()
    master, grad, avg, square = (torch.zeros(PARAMETERS, device=CUDA) for _ in range(4))
    out = torch.empty(PARAMETERS, device=CUDA, dtype=torch.bfloat16)
    rule: dict[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return lambda: adamw_(master, grad, avg, square, out, step=3, **rule)  # type: ignore[arg-type]

"""What a rank knows of its experts: where its stage has them, and what a row of one takes."""

from __future__ import annotations

import math
import time

import torch

from phalanx.kernels.cpu.grouped import expert_ffn
from phalanx.models import MoE
from phalanx.plan.mapping import LayerPlacements, Placement
from phalanx.runtime.comm import synchronize
from phalanx.train.step import StepParts

TIMED_ROWS = 128
TRIES = 3


def placement_in_use(parts: StepParts) -> LayerPlacements:
    """The placement of the rank's stage, as its dispatchers have it."""
    found = {}
    for module in parts.model.modules():
        if isinstance(module, MoE):
            d = module.routed.dispatcher
            width = len(d.slots_G) // d.ep.size
            slots = tuple(d.slots_G[i * width : (i + 1) * width] for i in range(d.ep.size))
            found[module.layer] = Placement(
                num_experts=d.num_experts, slots=(slots,), hosts=tuple(d.host_of_ep), racks=tuple(d.rack_of_ep)
            )
    return LayerPlacements(layers=dict(sorted(found.items())))


def seconds_of_a_row(parts: StepParts) -> float:
    """Forward and backward pass of one row of an expert on this rank, the quickest of a few tries; 0 where it holds no expert."""
    module = next((m for m in parts.model.modules() if isinstance(m, MoE)), None)
    if module is None:
        return 0.0
    w13, w2 = (w[:1].detach().clone().requires_grad_() for w in (module.experts.w13, module.experts.w2))
    x = torch.full((TIMED_ROWS, w13.shape[-1]), 0.01, dtype=w13.dtype, device=w13.device, requires_grad=True)
    best = math.inf
    for _ in range(TRIES):
        begin_s = _now(x.device)
        with torch.enable_grad():
            y = expert_ffn(x, w13, w2, (TIMED_ROWS,), impl=parts.kernels, lanes=parts.lanes)
            torch.autograd.grad(y, (x, w13, w2), torch.ones_like(y))
        best = min(best, _now(x.device) - begin_s)
    return best / TIMED_ROWS


def _now(device: torch.device) -> float:
    synchronize(device)  # SYNC: between steps, once for each try
    return time.perf_counter()

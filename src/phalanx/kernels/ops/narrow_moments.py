"""AdamW whose moments are kept in bf16: widened, updated by the same kernel as ever, and rounded back.

The second moment changes by `1 - beta2` of itself a step, which bf16 (8 bits) would round away where beta2 is above 0.996, so rounding is stochastic: up with the probability of
the part that is cut off (as arXiv 1502.02551). The numbers that are drawn are a hash of the step, of the new master's and of the moment's own bits (without the step, where neither
moves, they would be the same for ever). So an update is elementwise as ever: its bits depend neither on how the state is sharded, nor on where the run was interrupted.

Must never change: the new master comes from the moments as they are before they are rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.words import phase_of, reference_word_sum
from phalanx.kernels.device import AdamRule, fused_adamw, has_adamw, rounding_seed
from phalanx.kernels.ops.adamw import CHUNK, adamw_

NARROW = torch.bfloat16
ROOM = 1 << 24
"""Elements of which a device widens both moments at once; a lane of a CPU does `CHUNK`."""


def adamw_of_narrow_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    sums: torch.Tensor | None = None,
    lanes: Lanes = SERIAL,
    **rule: Any,
) -> None:
    """What `adamw_` does, with `exp_avg` and `exp_avg_sq` in bf16 and fp32 `master`. `rule`: its other arguments."""
    kept = (master, exp_avg, exp_avg_sq)
    if rule.get("impl", "fast") == "fast" and sums is None and has_adamw(master):
        numbers = {name: value for name, value in rule.items() if name not in ("impl", "scale")}
        return fused_adamw(kept, grad, out, AdamRule(**numbers), scale=rule.get("scale", 1.0))
    if sums is not None:
        sums[:3] += torch.stack([reference_word_sum(x) for x in kept])
    size = CHUNK if master.device.type == "cpu" else ROOM
    alone, seed = SERIAL.with_rows(lanes.rows), rounding_seed(rule["step"])

    def run(start: int, lane: int) -> None:
        part = slice(start, start + size)
        wide = exp_avg[part].float(), exp_avg_sq[part].float()
        adamw_(master[part], grad[part], *wide, None if out is None else out[part], lanes=alone, **rule)
        for narrow, moment in zip((exp_avg, exp_avg_sq), wide, strict=True):
            narrow[part] = rounded(moment, master[part], seed)

    lanes.run(run, range(0, master.numel(), size))
    if sums is not None:
        sums[3:6] += torch.stack([reference_word_sum(x) for x in kept])
        if out is not None:
            sums[6] += reference_word_sum(out, phase_of(out))


def rounded(x: torch.Tensor, salt: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 `x`, finite, in bf16: one of its two neighbours, the nearer the likelier; itself where it is a number of bf16. `salt`, fp32 of the same shape, and `seed`: what else decides."""
    bits = x.contiguous().view(torch.int32)
    drawn = _hash(bits ^ _hash(salt.contiguous().view(torch.int32) ^ seed))
    found = ((bits + (drawn & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(x == x, found, x).to(NARROW)  # what is no number stays none


def _hash(bits: torch.Tensor) -> torch.Tensor:
    """int32: every bit depends on all of them (the finaliser of MurmurHash3)."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -0x7A143595
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -0x3D4D51CB
    return bits ^ ((bits >> 16) & 0xFFFF)

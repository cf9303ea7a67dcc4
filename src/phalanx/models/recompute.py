"""Activations computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from phalanx.models.context import ForwardInfo
from phalanx.models.parallel import SequenceParallel


def again(run: Callable[..., torch.Tensor], info: ForwardInfo, *inputs: torch.Tensor) -> torch.Tensor:
    """`run(*inputs, info)`, of which nothing but the inputs is kept; the second run's collectives have ids of the phase `re`."""
    infos = chain((info,), repeat(replace(info, phase="re")))

    def once(*inputs: torch.Tensor) -> torch.Tensor:
        return run(*inputs, next(infos))

    out: torch.Tensor = checkpoint(once, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def attend(
    core: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    info: ForwardInfo,
    *,
    sequence: SequenceParallel,
    in_steps: bool,
    recompute: bool,
) -> torch.Tensor:
    """Attention itself, `core(*inputs, info=info)`: reported as one operation unless it reports its steps, computed again if `recompute`."""

    def told(*given: Any) -> torch.Tensor:
        *tensors, info = given
        run = partial(core, info=info)
        return run(*tensors) if in_steps else sequence.told("core", info, run, *tensors)

    return again(told, info, *inputs) if recompute and torch.is_grad_enabled() else told(*inputs, info)

"""Activations computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch.utils.checkpoint import checkpoint

from phalanx.models.context import ForwardInfo


def again(run: Callable[..., torch.Tensor], info: ForwardInfo, *inputs: torch.Tensor) -> torch.Tensor:
    """`run(*inputs, info)`, of which nothing but the inputs is kept; the second run's collectives have ids of the phase `re`."""
    infos = chain((info,), repeat(replace(info, phase="re")))

    def once(*inputs: torch.Tensor) -> torch.Tensor:
        return run(*inputs, next(infos))

    out: torch.Tensor = checkpoint(once, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out

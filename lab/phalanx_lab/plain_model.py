"""What a model of a benchmark or a check is built from: each expert once in its group, no pipeline, on the CPU where nothing else is said."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.models import ModelContext
from phalanx.plan.mapping import plain_placement
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec
from phalanx.runtime.comm import Collectives, Groups


def plain_context(spec: ModelSpec, groups: Groups, *, dtype: torch.dtype, **more: Any) -> ModelContext:
    """`more`: other fields of `ModelContext`."""
    placement = plain_placement(max(1, spec.num_experts), groups.folding.of_rank(groups.rank))
    given = {"dispatch": DispatchSpec(), "comms": Collectives(), "device": torch.device("cpu"), **more}
    return ModelContext(spec=spec, groups=groups, placement=placement, dtype=dtype, **given)

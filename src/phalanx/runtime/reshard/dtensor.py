"""Layouts of tensors that torch describes by a `DeviceMesh` and DTensor placements, and DTensors made of what a rank holds.

Decides nothing: `plan/layout/mesh/placements.py` cuts. Must never change: the boxes are those that `distribute_tensor` gives each rank (`torch.chunk` sizes, mesh axes from
left to right), so a local tensor needs no copy on its way in or out. `Partial` must be a sum; any other placement is an error with its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from phalanx.core.errors import PlanError, Problem, of_kind, raise_if
from phalanx.plan.layout import TensorLayout, mesh as words

MeshPlacements = tuple[DeviceMesh, Sequence[Placement]]


def layout_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], *, where: str = "layout"
) -> TensorLayout:
    """The layout of a tensor of global `shape`. Raises `PlanError` naming every placement that cannot be expressed."""
    rule, one = "must be a list, with a placement for each axis of the mesh", f"use [{placements}]"
    raise_if(of_kind(f"{where}.placements", placements, Sequence, rule, one), PlanError, subject="a layout of torch")
    problems, plain = [], []
    for axis, placement in enumerate(placements):
        word = _word(placement, len(shape))
        if isinstance(word, str):
            hint = "use Shard, Replicate, _StridedShard or Partial('sum')"
            problems.append(Problem(where=f"{where}.placements[{axis}]", value=str(placement), rule=word, hint=hint))
        else:
            plain.append(word)
    raise_if(problems, PlanError, subject="a layout of torch")
    return words.mesh_layout(
        tuple(shape), tuple(mesh.mesh.shape), plain, ranks=tuple(int(r) for r in mesh.mesh.flatten().tolist())
    )


def _word(placement: Any, dims: int) -> words.Placement | str:
    """The placement in the planner's words, or why there is none."""
    if isinstance(placement, _StridedShard):
        return words.Strided(_dim(placement.dim, dims), int(placement.split_factor))
    if isinstance(placement, Shard):
        return words.Shard(_dim(placement.dim, dims))
    if isinstance(placement, Replicate):
        return words.Replicate()
    if isinstance(placement, Partial):
        if type(placement) is not Partial or placement.reduce_op != "sum":
            return f"only sums can be completed on the way, not {placement.reduce_op!r}"
        return words.Partial()
    return "cannot be expressed as boxes of the tensor"


def _dim(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def layout_of_dtensor(x: DTensor, *, where: str = "tensor") -> TensorLayout:
    """The layout of a DTensor, on any rank."""
    return layout_of(tuple(x.shape), x.device_mesh, x.placements, where=where)


def dtensor_of(
    local: torch.Tensor | None, shape: Sequence[int], target: MeshPlacements, *, dtype: torch.dtype
) -> DTensor:
    """The DTensor of which this rank holds `local` (None: it is not in the mesh)."""
    mesh, placements = target
    if local is None:
        none = 0 if len(shape) else ()  # torch takes no empty `shape=`, and would take that of the local tensor
        local = torch.empty(none, dtype=dtype, device=mesh.device_type)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=stride)

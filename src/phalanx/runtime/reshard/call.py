"""`phalanx.reshard`: a tensor, or a state of named tensors, from one layout to another, as one call that all ranks make.

Decides nothing but how arguments are read. A layout is a `TensorLayout`, or (as in the proposal of an M-to-N cast in torch, pytorch#181061) a `DeviceMesh`
with placements; the two meshes may be disjoint, overlap or be the same. All tensors of a state move by one joint plan. A DTensor brings its own source layout,
and comes out as a DTensor. Must never change: a rank whose arguments are wrong tells the others, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phalanx.core.errors import ConfigError, PlanError, Problem, of_kind, raise_if
from phalanx.plan.layout import TensorLayout
from phalanx.plan.reshard import Hosts, Move
from phalanx.runtime.comm import DEFAULT_TIMEOUT_S, Axis, Collectives
from phalanx.runtime.reshard.dtensor import MeshPlacements, dtensor_of, layout_of, layout_of_dtensor
from phalanx.runtime.reshard.resharder import PlanOptions, Resharder

Layout = TensorLayout | MeshPlacements
Layouts = Layout | Mapping[str, Layout] | None
State = Mapping[str, torch.Tensor | None]
ONE = "tensor"
"""Name of a tensor that is given alone."""


def open_resharder(
    group: dist.ProcessGroup | None = None,
    *,
    hosts: Hosts | None = None,
    options: PlanOptions | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Resharder:
    """What remembers plans from call to call: keep it, and a move that was made before costs one integer beside its bytes.

    `group`: all ranks of both meshes, by default all there are. Raises `ConfigError`.
    """
    problems = of_kind("group", group, dist.ProcessGroup | None, "must be a process group or None", "leave it out")
    rule = "must be phalanx.plan.reshard.Hosts or None"
    problems += of_kind("hosts", hosts, Hosts | None, rule, "leave it out: ranks tell the names of their hosts")
    rule = "must be phalanx.runtime.reshard.PlanOptions or None"
    problems += of_kind("options", options, PlanOptions | None, rule, "use PlanOptions()")
    if not (isinstance(timeout_s, Real) and timeout_s > 0):
        problems.append(Problem(where="timeout_s", value=timeout_s, rule="must be a number above 0", hint="use 20"))
    raise_if(problems, ConfigError, subject="the arguments")
    if not dist.is_initialized():
        return Resharder(Collectives(timeout_s=timeout_s), Axis("reshard", (0,), 0, None), hosts=hosts, options=options)
    ranks = tuple(dist.get_process_group_ranks(group))
    alone = len(ranks) == 1
    axis = Axis("reshard", ranks, ranks.index(dist.get_rank()), None if alone else group or dist.group.WORLD)
    return Resharder(Collectives(timeout_s=timeout_s), axis, hosts=hosts, options=options)


def reshard(
    tensor_or_state: torch.Tensor | State | None,
    src_layout: Layouts,
    dst_layout: Layouts,
    *,
    shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    device: torch.device | None = None,
    out: torch.Tensor | State | None = None,
    resharder: Resharder | None = None,
    op_id: str = "reshard",
) -> Any:
    """Move what this rank holds under `src_layout`, and return what it holds under `dst_layout`. Collective over the resharder's group (default: all ranks).

    A rank that holds nothing before passes None and says the `dtype`; one that holds nothing afterwards gets None (for DTensors: a DTensor without
    elements). A state is a dict; its layouts are dicts with the same names, or one layout for all. `shape` is the global shape, needed where neither side
    is a `TensorLayout` or a DTensor. `out`: where to put it. The source is only read; the result has no gradient graph.

    Raises `PlanError` with all that does not fit (on every rank), `PeerError` where a rank has gone: the destination is then incomplete.
    """
    used = resharder if resharder is not None else open_resharder()
    try:
        state, single = _as_state(tensor_or_state, src_layout, dst_layout)
        sides = _Sides(state, src_layout, dst_layout, _by_name(shape), _by_name(dtype), _by_name(out))
        items = [sides.item(name, used.rank) for name in state]
    except Exception:  # whatever it is: the others must hear of it
        used.refuse(op_id)
        raise
    dest = used.move(
        [item.move for item in items],
        [item.local for item in items],
        dtypes=[item.dtype for item in items],
        device=device if device is not None else _device(items),
        out=None if out is None else [item.out for item in items],
        op_id=op_id,
    )
    whole = {
        item.move.name: x if item.target is None else dtensor_of(x, item.move.dst.shape, item.target, dtype=item.dtype)
        for item, x in zip(items, dest, strict=True)
    }
    return whole[ONE] if single else whole


@dataclass(frozen=True, kw_only=True, eq=False)
class _Item:
    """One tensor of a call, as this rank has it."""

    move: Move
    local: torch.Tensor | None
    dtype: torch.dtype
    out: torch.Tensor | None
    target: MeshPlacements | None
    """Where the result is a DTensor: of this mesh."""


@dataclass(frozen=True)
class _Sides:
    """The arguments of a call, by name."""

    state: State
    src: Layouts
    dst: Layouts
    shape: Mapping[str, Any]
    dtype: Mapping[str, Any]
    out: Mapping[str, Any]

    def item(self, name: str, rank: int) -> _Item:
        x, out = self.state[name], self.out.get(name, self.out.get(""))
        hint = "give a tensor, or None where this rank holds nothing"
        problems = [
            Problem(where=where, value=type(given).__name__, rule="is not a tensor", hint=hint)
            for where, given in ((name, x), (f"{name} of out", out))
            if given is not None and not isinstance(given, torch.Tensor)
        ]
        raise_if(problems, PlanError, subject="what is moved")
        shape = self._shape(name, x)
        raise_if(self._contradictions(name, (x, out), shape), PlanError, subject="what is moved")
        given = _of(self.src, name)
        src = (
            layout_of_dtensor(x, where=name)
            if given is None and isinstance(x, DTensor)
            else _layout(given, shape, name, "src_layout")
        )
        target = _of(self.dst, name)
        dst = _layout(target, shape, name, "dst_layout")
        dtype = self.dtype.get(name, self.dtype.get(""))
        found = next((t.dtype for t in (x, out) if t is not None), dtype)
        if found is None:
            rule, hint = f"rank {rank} has no tensor that shows the type of the elements", "give dtype="
            raise PlanError.of(f"{name}.dtype", None, rule, hint, subject="what is moved")
        wrap = isinstance(x, DTensor) and not isinstance(target, TensorLayout)
        return _Item(
            move=Move(name=name, itemsize=found.itemsize, src=src, dst=dst),
            local=_local(x) if rank in src.ranks else None,
            dtype=found,
            out=_local(out) if rank in dst.ranks else None,
            target=target if wrap and not isinstance(target, TensorLayout) else None,
        )

    def _contradictions(
        self, name: str, tensors: tuple[torch.Tensor | None, torch.Tensor | None], shape: tuple[int, ...] | None
    ) -> list[Problem]:
        """Where `dtype` or `shape` says something else than the tensor, `out` or the layouts."""
        dtype = self.dtype.get(name, self.dtype.get(""))
        problems = [
            Problem(
                where=f"{where}.dtype", value=dtype, rule=f"must be that of the tensor, {t.dtype}: a move converts nothing",
                hint="leave dtype= out, and convert before or after",
            )
            for where, t in zip((name, f"{name} of out"), tensors, strict=True)
            if t is not None and dtype is not None and t.dtype != dtype
        ]  # fmt: skip
        said = self.shape.get(name, self.shape.get(""))
        if said is not None and shape is not None and tuple(said) != shape:
            rule = f"must be that of the layout, {shape}"
            problems.append(Problem(where=f"{name}.shape", value=tuple(said), rule=rule, hint="leave shape= out"))
        return problems

    def _shape(self, name: str, x: torch.Tensor | None) -> tuple[int, ...] | None:
        if isinstance(x, DTensor):
            return tuple(x.shape)
        for side in (_of(self.src, name), _of(self.dst, name)):
            if isinstance(side, TensorLayout):
                return side.shape
        found = self.shape.get(name, self.shape.get(""))
        return None if found is None else tuple(found)


def _as_state(given: torch.Tensor | State | None, src: Layouts, dst: Layouts) -> tuple[State, bool]:
    """The tensors by name, and whether it was one without a name. A rank that holds nothing takes the names from the layouts."""
    if isinstance(given, torch.Tensor):
        return {ONE: given}, True
    if given is not None and not isinstance(given, Mapping):
        rule, hint = "is neither a tensor nor a dict of tensors", "give a tensor, a dict or None"
        raise PlanError.of(ONE, type(given).__name__, rule, hint, subject="what is moved")
    named = [side for side in (src, dst) if isinstance(side, Mapping)]
    if given is None and not named:
        return {ONE: None}, True
    names = list(dict.fromkeys([*(n for side in named for n in side), *(given or {})]))
    problems = [
        Problem(where=f"{what}[{name!r}]", value=None, rule="is missing", hint="give each name a layout on both sides")
        for what, side in (("src_layout", src), ("dst_layout", dst))
        if isinstance(side, Mapping)
        for name in names
        if name not in side
    ]
    raise_if(problems, PlanError, subject="what is moved")
    return {name: (given or {}).get(name) for name in sorted(names)}, False


def _by_name(given: Any) -> Mapping[str, Any]:
    """`given` by name; one value for all stands under the empty name."""
    if isinstance(given, Mapping):
        return given
    return {} if given is None else {"": given}


def _of(side: Layouts, name: str) -> Layout | None:
    return side[name] if isinstance(side, Mapping) else side


def _layout(given: Layout | None, shape: tuple[int, ...] | None, name: str, which: str) -> TensorLayout:
    if isinstance(given, TensorLayout):
        return given
    if given is None:
        rule, hint = "only a DTensor brings a layout of its own", "give a TensorLayout, or a DeviceMesh and placements"
        raise PlanError.of(f"{name}.{which}", None, rule, hint, subject="what is moved")
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh)):
        rule, hint = "is no layout", "give a TensorLayout, or a DeviceMesh and placements"
        value = type(given).__name__
        raise PlanError.of(f"{name}.{which}", value, rule, hint, subject="what is moved")
    if shape is None:
        rule, hint = "a mesh and placements do not say how large the whole tensor is", "give shape="
        raise PlanError.of(f"{name}.{which}", None, rule, hint, subject="what is moved")
    mesh, placements = given
    return layout_of(shape, mesh, placements, where=f"{name}.{which}")


def _local(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return None
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _device(items: Sequence[_Item]) -> torch.device | None:
    """Device of the destination: where the source is, or where its mesh says."""
    for item in items:
        if item.local is not None:
            return item.local.device
    mesh = next((item.target[0] for item in items if item.target is not None), None)
    if mesh is None or mesh.device_type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device())

"""Layouts of a run's state over its ranks: parameters, buffers, and optimizer state under ZeRO-1, for any folding and placement.

Decides nothing of its own: `plan/layout/parameters.py` says what each rank holds, here it becomes one `TensorLayout` for each logical tensor, which
`plan/reshard/plan.py` can move. Must never change: the layouts say exactly what the modules and the sharded state hold (`runtime/state/optimizer.py: boxes`).

Local tensors are a rank's parameters as its modules have them. Of optimizer state a rank holds some boxes of a tensor of that shape, those that its shard of the
flat buffer covers. Layouts are made once for each set of ranks that hold the same kind of tensor alike, so a model of a thousand layers costs no more
than the layers that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.plan.layout.parameters import (
    Box,
    FlatBuffer,
    LocalParam,
    cut_buffers,
    flat_buffers,
    local_param,
    stage_params,
)
from phalanx.plan.layout.tensors import Held, TensorLayout, whole_layout
from phalanx.plan.mapping import AnyFolding, AnyPlacement, LayerPlacements, StagePlan, plain_placement
from phalanx.plan.model import ModelSpec, ParamSpec, buffers, parameters

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of each parameter (`runtime/state/optimizer.py`)."""

_Held = tuple[tuple[Held, ...], tuple[int, ...]]
"""Boxes of one rank, and the shape of its local tensor."""


@dataclass(frozen=True, kw_only=True)
class StateLayouts:
    """A model over the ranks of a folding, numbered from `first_rank` on."""

    spec: ModelSpec
    folding: AnyFolding
    stages: StagePlan
    placement: Callable[[int], AnyPlacement] | None = None
    """Placement of a rank's stage; None: each expert once in every expert-parallel group."""
    first_rank: int = 0
    _alike: dict[tuple[object, ...], TensorLayout] = field(default_factory=dict, init=False, compare=False, repr=False)
    _buffers: dict[tuple[int, ...], tuple[dict[str, FlatBuffer], dict[str, _Held]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def params(self) -> dict[str, ParamSpec]:
        return {param.name: param for param in parameters(self.spec)}

    @cached_property
    def _ranks_of(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> ranks of the folding that hold some of it."""
        out: dict[str, list[int]] = {name: [] for name in self.params}
        needed = [[p.name for p in stage_params(self.spec, self.stages.of_rank(i))] for i in range(self.folding.pp)]
        for rank in range(self.folding.world):
            for name in needed[self.folding.coord(rank, "pp")]:
                out[name].append(rank)
        return {name: tuple(ranks) for name, ranks in out.items()}

    @cached_property
    def _stages_with_experts(self) -> frozenset[int]:
        """Pipeline ranks that have experts: not those of dense layers alone, or of the head alone."""
        of_stage = [stage_params(self.spec, self.stages.of_rank(pp)) for pp in range(self.folding.pp)]
        return frozenset(pp for pp, params in enumerate(of_stage) if any(p.ep_dim is not None for p in params))

    def _placement(self, rank: int) -> AnyPlacement:
        if self.placement is not None:
            return self.placement(rank)
        if self.folding.coord(rank, "pp") not in self._stages_with_experts:
            return LayerPlacements()  # where other stages have replicas, ep need not divide the experts
        return plain_placement(max(1, self.spec.num_experts), self.folding.of_rank(rank))

    def _global(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.first_rank + rank for rank in ranks)

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def parameter(self, name: str) -> TensorLayout:
        """What the modules of each rank hold of a parameter. Raises `KeyError` for one that the model has not."""
        param, ranks = self.params[name], self._ranks_of[name]
        placed = None if self.placement is None or param.ep_dim is None else self._placement(ranks[0])
        slots = None if placed is None else placed.of_layer(param.layer).slots
        key = (param.shape, param.tp_dim, param.etp_dim, param.ep_dim, ranks, slots)
        if key not in self._alike:
            found = [self._of_modules(param, rank) for rank in ranks]
            self._alike[key] = self._layout(param.shape, ranks, found)
        return self._alike[key]

    def parameters(self) -> dict[str, TensorLayout]:
        """All of them, in forward order."""
        return {name: self.parameter(name) for name in self.params}

    def buffers(self) -> dict[str, TensorLayout]:
        """Untrained tensors of the state (the expert bias): whole on every rank that has the layer."""
        out = {}
        for name, shape in buffers(self.spec):
            router = name.removesuffix(".expert_bias") + ".weight"
            out[name] = whole_layout(shape, self._global(self._ranks_of[router]))
        return out

    def _of_modules(self, param: ParamSpec, rank: int) -> _Held:
        local = local_param(param, self.folding, self._placement(rank), rank)
        return tuple(Held(p.box, p.local.offsets) for p in local.pieces), local.shape

    def _layout(self, shape: Sequence[int], ranks: Sequence[int], found: Sequence[_Held]) -> TensorLayout:
        return TensorLayout(
            shape=tuple(shape),
            ranks=self._global(ranks),
            held=tuple(held for held, _ in found),
            local_shapes=tuple(local for _, local in found),
        )

    # ---- optimizer state -----------------------------------------------------------------------------------------------

    def shards_of(
        self,
        rank: int,
        *,
        zero: int = 1,
        bucket_elements: int = 0,
        holders: int = 1,
        hosts: Sequence[int] | None = None,
        racks: Sequence[int] = (),
    ) -> dict[str, tuple[tuple[Held, ...], tuple[int, ...]]]:
        """(boxes, shape of the local tensor) of each parameter of which one rank of the folding keeps masters and moments (the same for all of `STATE_KINDS`).

        With `holders` > 1 copies of others' shards are among them; `hosts` are those of the folding's ranks, from 0 on (None: a
        host each), `racks` likewise.
        """
        placement = self._placement(rank)
        buffers, empty = self._alike_on(rank, placement, bucket_elements)
        layouts = cut_buffers(
            buffers, self.folding, placement, rank,
            zero=zero, expert_state="whole", holders=holders, hosts=hosts, racks=racks,
        )  # fmt: skip
        boxes: dict[str, list[Held]] = {}
        for layout in layouts.values():
            by_name = {local.param.name: local for local in layout.params}
            for piece, _ in layout.kept_pieces(0, layout.kept_length):
                name = piece.param.name
                boxes.setdefault(name, []).append(Held(piece.box, _place(by_name[name], piece.box)))
        return empty | {name: (tuple(held), empty[name][1]) for name, held in boxes.items()}

    def _alike_on(
        self, rank: int, placement: AnyPlacement, bucket_elements: int
    ) -> tuple[dict[str, FlatBuffer], dict[str, _Held]]:
        """What a rank's buffers consist of, made once for all ranks that hold the same; and its parameters, nothing held of each."""
        at = self.folding.coord
        axes = ("pp", "tp", "etp", "ep") if placement.is_plain else ("pp", "tp", "etp", "ep", "edp")
        key = (*(at(rank, axis) for axis in axes), bucket_elements)
        if key not in self._buffers:
            params = stage_params(self.spec, self.stages.of_rank(at(rank, "pp")))
            found = flat_buffers(params, self.folding, placement, rank, bucket_elements=bucket_elements)
            empty: dict[str, _Held] = {
                local.param.name: ((), local.shape) for flat in found.values() for local in flat.params
            }
            self._buffers[key] = found, empty
        return self._buffers[key]


def _place(local: LocalParam, box: Box) -> tuple[int, ...]:
    """Where a box of the logical tensor begins in the rank's local tensor."""
    for piece in local.pieces:
        if piece.box.contains(box):
            return Held(piece.box, piece.local.offsets).place(box).offsets
    raise ValueError(f"{local.param.name}: {box} is not held here")

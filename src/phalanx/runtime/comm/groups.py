"""Process groups of the two rank grids.

Decides nothing: `plan/mapping/folding.py` says which ranks form a group; here they become `torch.distributed` groups. Groups are cached by
their tuple of ranks (many coincide across the grids, and a gloo group costs about 23 ms, 3 threads and 11 file descriptors).
Must never change: every rank creates every group, also those it is no member of, in the same order, or creation hangs. On a GPU they are connected then (`devices.connect`), disjoint ones side by side.
A group of one rank is `None` and needs no communication, so that a single rank runs without any process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist

from phalanx.core.errors import RunError
from phalanx.plan.mapping import PASS_GROUPS, SUMMED_GROUPS, AnyFolding, exchanged_groups, step_groups
from phalanx.runtime.comm.devices import Use, connect, nccl_options

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, eq=False)
class Axis:
    """This rank's group along one named axis."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks of the group, ascending."""
    index: int
    """Position of this rank in `ranks`."""
    group: dist.ProcessGroup | None
    """None when the axis has size 1."""

    @property
    def size(self) -> int:
        return len(self.ranks)


SILENT = ("dp",)
"""Axes that say where a rank is; no message goes over them."""
Purpose = Literal["passes", "step", "second", "beside", "control"]
"""What a group of ranks is for: the passes of a step; the rest of a step, where messages match by their order; passes that run beside others; a thread that has it alone while steps are
computed; values of hosts."""


Key = tuple[tuple[int, ...], Purpose, int]
"""Ranks, purpose and thread blocks of a group."""


class GroupCache:
    """Process groups by rank tuple and purpose. Make one per process and pass it around; call `get` in the same order on all ranks."""

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._groups: dict[Key, dist.ProcessGroup | None] = {}
        self._connected: set[tuple[tuple[int, ...], Purpose, int, Use]] = set()
        self._unconnected: list[tuple[Key, dist.ProcessGroup, Sequence[Use]]] | None = None
        self._met = False
        """All ranks have come to this block of groups made together."""

    @contextlib.contextmanager
    def made_together(self) -> Iterator[None]:
        """Groups that are asked for inside are connected at the end of the block, in that order. All ranks of the world make each of them, and only its members connect it, for about a second with NCCL: in
        turn with the making of others, each would be waited for by all. Collective, as `get` is."""
        self._unconnected, self._met = [], False
        try:
            yield
            made, self._unconnected = self._unconnected, None
            for key, group, uses in made:
                self._connect_for(key, group, uses)
        finally:
            self._unconnected = None

    def get(
        self,
        ranks: Sequence[int],
        *,
        purpose: Purpose = "passes",
        message_ctas: int = 0,
        uses: Sequence[Use] = ("sum",),
    ) -> dist.ProcessGroup | None:
        """The group of `ranks`: None if it has one member or this rank is not in it. Creation is collective over the world.

        `message_ctas`: a group whose NCCL kernels have at most so many thread blocks, each on a multiprocessor of its own; 0: as many as NCCL likes. `uses`: what who asks sends
        over it; for nothing a GPU needs no communicator.
        """
        key = tuple(ranks), purpose, message_ctas
        if len(key[0]) == 1:
            return None
        if key in self._groups:
            group = self._groups[key]
        elif dist.is_initialized():
            if self._unconnected is None or not self._met:
                self._meet()
                self._met = True
            group = self._create(key[0], purpose != "passes", message_ctas)
        else:
            raise RunError(
                f"group {_short(key[0])} needs {len(key[0])} ranks, but this process runs alone (no init_world)"
            )
        # before it is connected: where its second use fails, a kernel of the first one may wait, and who aborts must know the group
        self._groups[key] = group
        if group is not None and purpose != "control":
            if self._unconnected is None:
                self._connect_for(key, group, uses)
            else:
                self._unconnected.append((key, group, uses))
        return group

    def _connect_for(self, key: Key, group: dist.ProcessGroup, uses: Sequence[Use]) -> None:
        new = [use for use in uses if (*key, use) not in self._connected]
        if new:
            self._connect(group, new)
            self._connected |= {(*key, use) for use in new}

    def _meet(self) -> None:
        """Before a group is made, or the first one of a block."""

    def _connect(self, group: dist.ProcessGroup, uses: Sequence[Use]) -> None:
        connect(group, uses)

    def _create(self, ranks: tuple[int, ...], second: bool, message_ctas: int) -> dist.ProcessGroup | None:
        if ranks == tuple(range(dist.get_world_size())) and not second and not message_ctas:
            return dist.group.WORLD
        timeout = timedelta(seconds=self.timeout_s)
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=nccl_options(message_ctas))
        return group if dist.get_rank() in ranks else None

    def __len__(self) -> int:
        return len(self._groups)


@dataclass(frozen=True, eq=False)
class SecondGroups:
    """Further groups of the same ranks, for a pass that runs beside another (`runtime/moe/co_schedule.py`)."""

    by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup]

    def of(self, axis: Axis) -> dist.ProcessGroup:
        """Raises `RunError` where there is none: a forward pass has communicated over an axis that `PASS_GROUPS` does not name."""
        if axis.ranks not in self.by_ranks:
            raise RunError(f"axis {axis.name}, ranks {axis.ranks}, has no second group for an overlapped pass")
        return self.by_ranks[axis.ranks]


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """All groups of one rank in one folding; `axes` has the folding's `group_names`."""

    folding: AnyFolding
    rank: int
    axes: Mapping[str, Axis]
    second: SecondGroups | None = None
    """Where passes run beside one another."""
    step: Mapping[str, Axis] | None = None
    """Where messages match by their order: axes with groups of their own, those of which passes use the ranks too. None: by tag, as in gloo."""
    exchanged: tuple[str, ...] = ()
    """Axes of passes of which every rank sends to every other one."""

    def axis(self, name: str) -> Axis:
        """`micro` are the ranks that share a micro-batch: those of `tp_cp`, and more where a stage divides its sequences among dp."""
        return self.axes["tp_cp" if name == "micro" and name not in self.axes else name]

    def step_axis(self, name: str) -> Axis:
        """The axis, for what a step does outside of passes: sums of gradients, parameters, the vote (`plan.mapping.step_groups`)."""
        return self.axes[name] if self.step is None else self.step.get(name, self.axes[name])


def uses_of(name: str, *, exchanged: Collection[str] = ()) -> tuple[Use, ...]:
    """What is sent over an axis; over those that are `exchanged` an all-to-all, too. Left to the first step: stages' messages, with peers that the schedule says, and those of context parallelism, which the first layer sends."""
    if name in SILENT:
        return ()
    uses: tuple[Use, ...] = ("sum",) if name in SUMMED_GROUPS else ("sum", "gather")
    return (*uses, "exchange") if name in exchanged else uses


def build_groups(
    folding: AnyFolding,
    *,
    rank: int,
    cache: GroupCache,
    table_ranks: Sequence[int] | None = None,
    message_ctas: int = 0,
    in_order: bool = False,
    rows: str = "ep",
) -> Groups:
    """Create (or find) every group of `folding`. Collective: all ranks call it with the same folding in the same order.

    `table_ranks` are the pipeline ranks that hold a tied embedding (`StagePlan.table_ranks`; None: the first and the last one).
    `message_ctas`: most thread blocks of NCCL's kernels over `ep_etp`, whose messages travel beside products (`GroupCache.get`).
    `in_order`: messages match by their order, as NCCL's do, so what a step does outside of passes gets groups of its own (`plan.mapping.step_groups`).
    `rows`: group over which rows of MoE layers are exchanged, as in `DispatchSpec.rows_over`.
    """
    axes: dict[str, Axis] = {}
    step: dict[str, Axis] = {}
    of_step, exchanged = step_groups(folding, table_ranks) if in_order else {}, exchanged_groups(rows)
    with cache.made_together():
        for name in folding.group_names:
            given = name == "embedding" and table_ranks is not None
            for ranks in folding.embedding_groups(table_ranks or ()) if given else folding.groups(name):
                # outside of passes it may have another group, for all it sends
                apart = name not in PASS_GROUPS and ranks in of_step.get(name, ())
                uses = () if apart else uses_of(name, exchanged=exchanged)
                group = cache.get(ranks, message_ctas=message_ctas if name == "ep_etp" else 0, uses=uses)
                if rank in ranks:
                    axes[name] = Axis(name, ranks, ranks.index(rank), group)
        for name, of_name in of_step.items():
            for ranks in of_name:
                group = cache.get(ranks, purpose="step", uses=uses_of(name))
                if rank in ranks:
                    step[name] = replace(axes[name], group=group)
    groups = Groups(folding=folding, rank=rank, axes=MappingProxyType(axes), exchanged=exchanged)
    return replace(groups, step=MappingProxyType(step)) if in_order else groups


def with_second_groups(groups: Groups, *, cache: GroupCache) -> Groups:
    """The same with further groups of the axes of a pass, for passes that run beside others. Collective, as `build_groups` is."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    names = [name for name in groups.folding.group_names if name in PASS_GROUPS and name != "pp"]
    with cache.made_together():
        for name in names:
            for ranks in groups.folding.groups(name):
                group = cache.get(ranks, purpose="second", uses=uses_of(name, exchanged=groups.exchanged))
                if group is not None and groups.rank in ranks:
                    found[ranks] = group
    return replace(groups, second=SecondGroups(MappingProxyType(found)))


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return "(" + " ".join(map(str, ranks)) + ")"
    return f"({ranks[0]} {ranks[1]} ... {ranks[-1]})"

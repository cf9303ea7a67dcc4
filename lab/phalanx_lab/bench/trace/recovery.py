"""What a member of an elastic run does on a GPU when others are lost or join: its state moves in waves from what is held to what is to be held (`train/placement/state_transfer.py`).

Decides nothing: plans are those of `RecoveryPlanner`, the member's part is `examine` and `take_state`. A trace runs one member; the others say what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.config import Recipe
from phalanx.core.errors import RunError
from phalanx.plan.mapping import AnyFolding, Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.recovery import Fact, GenerationPlan, recovery_planner
from phalanx.runtime.comm import Axis, Collectives, Peers
from phalanx.runtime.reshard import hosts_by_name
from phalanx.train import Where
from phalanx.train.build import make_parts
from phalanx.train.placement import Everyone, HeldState, examine, take_state
from phalanx.train.setup import resolve_pipeline
from phalanx.train.step import StepParts
from phalanx_lab.bench.trace.steps import CUDA, TracedCase, clear, make_rank, recipe_of, shape_of, told_of, world_of
from phalanx_lab.bench.trace.watch import Witness

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecoveredCase:
    """A recovery that is traced; every rank is a host of its own."""

    settings: tuple[str, ...]
    """Of the recipe, which must be elastic (`--resilience.mode`, ...)."""
    world: int
    """Ranks of the run before."""
    lost: tuple[int, ...] = ()
    joining: int = 0
    rank: int = 0
    """Member of the generation after."""


class _Alike(Peers):
    """Members that all say the same."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def gather(self, value: T) -> list[T]:
        return [value] * self.size


def plans_of(case: RecoveredCase) -> tuple[Recipe, ModelSpec, GenerationPlan, GenerationPlan]:
    """The generation before, and the one after. Raises `ConfigError` with everything that is wrong with the recipe."""
    recipe = recipe_of(TracedCase(settings=(*case.settings, "--launch.ranks", str(case.world)), world=case.world))
    spec, folding = shape_of(recipe, world=case.world)
    assert isinstance(folding, Folding)  # an elastic run has no stages with foldings of their own
    planner = recovery_planner(recipe, spec, folding)
    before = planner.plan([_member(number) for number in range(case.world)])
    left = [rank for rank in range(case.world) if rank not in case.lost]
    facts = [
        Fact(uid=before.uids[r], machine=before.members[r].machine, descriptor=before.state_descriptor(r)) for r in left
    ]
    return recipe, spec, before, planner.plan([*facts, *(_member(case.world + i) for i in range(case.joining))])


def _member(number: int) -> Fact:
    return Fact(uid=f"host{number}.0.x", machine=f"host{number}", descriptor=None)


def trace_recovery(case: dict[str, Any], current: Any) -> dict[str, Any]:
    """For `child.py`: from JSON, to JSON. `static_bytes` is the member's memory between steps, before or after, whichever is more; the peak is that of the moves."""
    asked = RecoveredCase(**case | {"settings": tuple(case["settings"]), "lost": tuple(case.get("lost", ()))})
    recipe, spec, before, after = plans_of(asked)
    watch, uid = Witness(), after.uids[asked.rank]
    old = before.uids.index(uid) if uid in before.uids else None
    with FakeTensorMode(allow_non_fake_inputs=True), watch, torch.autograd.set_multithreading_enabled(False):
        held, static_bytes = HeldState(None, None), 0
        if old is not None:
            with _members(rank=old, size=case["world"]):
                parts = _parts(recipe, spec, before, old, asked)
                current(watch.seen, world_of(recipe, before.folding, old))
                parts.state.make_room()
                parts.buffers.begin()
                static_bytes = watch.seen.now_bytes
                parts.buffers.close()
                held = HeldState(parts.state, before.state_descriptor(old))
                del parts
        with _members(rank=asked.rank, size=len(after.members)):
            is_idle = asked.rank >= after.folding.world
            parts_after = None if is_idle else _parts(recipe, spec, after, asked.rank, asked)
            current(watch.seen, world_of(recipe, after.folding, 0 if is_idle else asked.rank))
            clear(watch.seen)
            _move(after, held, parts_after, rank=asked.rank)
            found = told_of(watch.seen, static_bytes)
            del held
            if parts_after is not None:
                parts_after.buffers.begin()
            found.static_bytes = max(static_bytes, watch.seen.now_bytes)
            del parts_after
    return asdict(found)


def _parts(recipe: Recipe, spec: ModelSpec, plan: GenerationPlan, number: int, case: RecoveredCase) -> StepParts:
    folding: AnyFolding = plan.folding
    rank = make_rank(recipe, TracedCase(settings=case.settings, world=folding.world, rank=number), CUDA)
    return make_parts(
        rank, spec, folding, resolve_pipeline(recipe, spec, folding), warm=False, drawn=False,
        placement=plan.placement_of(number), where=Where(plan.hosts, plan.racks),
    )  # fmt: skip


def _move(plan: GenerationPlan, held: HeldState, parts: StepParts | None, *, rank: int) -> None:
    """All waves."""
    ranks = tuple(range(len(plan.members)))
    everyone = Everyone(
        comms=Collectives(),
        axis=Axis("everyone", ranks, rank, dist.group.WORLD),
        peers=_Alike(rank, len(ranks)),
        hosts=hosts_by_name([fact.machine for fact in plan.members], ranks),
        device=CUDA,
    )
    held.begin("trace/1")
    found = examine(plan, held=held, everyone=everyone)
    if found.plan.missing:
        raise RunError(f"no member holds {', '.join(found.plan.missing[:4])}: it would be read from a checkpoint")
    take_state(found, parts, held=held, everyone=everyone)


@contextmanager
def _members(*, rank: int, size: int) -> Iterator[None]:
    """A process group of so many, whose messages between devices are NCCL's."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()

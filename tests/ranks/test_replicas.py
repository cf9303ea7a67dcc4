"""Experts with replicas on ranks: holders stay alike, checkpoints travel, a step does what its program lists, bad ways are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_help import model_fields, run_state

from phalanx.core.config import OptimConfig
from phalanx.core.errors import ConfigError
from phalanx.core.events import Collective, Event
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.plan.layout.holders import ExpertState
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import AnyPlacement, plain_placement
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.program.step import StepOptions, step_program
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.assembly import assemble, bucket_elements
from phalanx.train.step.transaction import StepParts, train_step
from phalanx.verify.replicas import not_alike, random_placements
from ranks import run_ranks

pytestmark = pytest.mark.ranks
WORLD, SEQ_LEN, SLOTS = 4, 16, 4
FOLDING = make_folding(world=WORLD, ep=WORLD)
TINY = PRESETS["tiny"]
ODD = dataclasses.replace(TINY, hidden=44, head_dim=11 - 1, expert_ffn=19)
"""No width is a multiple of a vector: equal updates at different places of a buffer must have equal bits all the same."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One run: `state` None has no replicas."""

    state: ExpertState | None = "whole"
    seed: int = 0
    spec: ModelSpec = TINY
    dtype: torch.dtype = torch.float64
    bucket_mb: float = 0.02

    @property
    def placement(self) -> AnyPlacement:
        if self.state is None:
            return plain_placement(self.spec.num_experts, FOLDING)
        return random_placements(self.spec.moe_layers, self.spec.num_experts, WORLD, SLOTS, self.seed)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(bucket_mb=self.bucket_mb)


def build(rank: int, cache: GroupCache, way: Way, comms: Collectives | None = None) -> StepParts:
    ctx = ModelContext(
        spec=way.spec,
        dispatch=DispatchSpec(),
        placement=way.placement,
        expert_state=way.state or "whole",
        groups=build_groups(FOLDING, rank=rank, cache=cache),
        comms=comms or Collectives(timeout_s=240),
        dtype=way.dtype,
        device=torch.device("cpu"),
    )
    return assemble(ctx, optim=way.optim, num_microbatches=1)


def advance(parts: StepParts, step: int) -> float:
    return train_step(parts, [microbatch(step, parts.groups.rank)], step=step, lr=3e-3).loss


def microbatch(step: int, number: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens_BS = torch.randint(0, 256, (2, SEQ_LEN + 1), generator=generator)
    positions_BS = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    return TokenBatch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous(), positions_BS, ((SEQ_LEN,),) * 2)


def train_and_compare(rank: int, cache: GroupCache, way: Way) -> tuple[list[float], list[str], int]:
    parts = build(rank, cache, way)
    losses = [advance(parts, step) for step in range(5)]
    held = sum(f.master.numel() for f in parts.state.families.values() if f.layout.holders is not None)
    return losses, not_alike(parts), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_holders_stay_alike_where_widths_fit_no_vector(dtype: torch.dtype) -> None:
    """Whole state: each holder makes the update itself, of an expert that lies elsewhere in its buffer."""
    held = {}
    for state in ("whole", "sharded"):
        results = run_ranks(WORLD, train_and_compare, Way(state=state, spec=ODD, dtype=dtype))
        assert all(not wrong for _, wrong, _ in results), results[0][1][:3]
        assert len({tuple(losses) for losses, _, _ in results}) == 1
        held[state] = [n for _, _, n in results], results[0][0]
    assert held["whole"][1] == held["sharded"][1]  # whoever keeps the state, the weights are the same
    once = sum(held["sharded"][0])
    assert sum(held["whole"][0]) > 1.3 * once  # sharded: of every element one rank has the state


def break_one(rank: int, cache: GroupCache, way: Way) -> list[str]:
    parts = build(rank, cache, way)
    for family in parts.state.families.values():
        if rank == 1 and family.layout.holders is not None:
            shared = next(h for h in family.layout.holders.experts if len(h.holders) > 1)
            family.flat[shared.run[0]] += 1
    return not_alike(parts)


@pytest.mark.core
def test_one_bit_of_one_holder_is_found() -> None:
    results = run_ranks(WORLD, break_one, Way())
    assert all(any("flat/layers" in text for text in found) for found in results)


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------


def depart(rank: int, cache: GroupCache, way: Way, path: Path) -> None:
    parts = build(rank, cache, way)
    for step in (0, 1):
        advance(parts, step)
    manager = CheckpointManager(path, group=own_group(WORLD, timeout_s=240))
    manager.open()
    manager.save(parts.state.boxes(), run_state(2, way.spec))
    manager.finish()


def arrive(
    rank: int, cache: GroupCache, way: Way, path: Path, onward: Path
) -> tuple[list[BoxTensor], float, list[str]]:
    """Load, save as this placement does, take a step: boxes as they came."""
    parts = build(rank, cache, way)
    group = own_group(WORLD, timeout_s=240)
    manager = CheckpointManager(path, group=group)
    manager.read_state(2, model=model_fields(way.spec))
    manager.load(parts.state.boxes(), step=2)
    parts.state.restore(parts.comms)
    boxes = [dataclasses.replace(b, tensor=b.tensor.clone()) for b in parts.state.boxes()]
    again = CheckpointManager(onward, group=group)
    again.open()
    again.save(parts.state.boxes(), run_state(2, way.spec))
    again.finish()
    alike = not_alike(parts) if way.state is not None else []
    return boxes, advance(parts, 2), alike


def whole_tensors(results: list[Any]) -> dict[str, torch.Tensor]:
    """The logical tensors that the ranks hold, every element equal wherever it is, and written by one rank."""
    whole: dict[str, torch.Tensor] = {}
    writers: dict[str, torch.Tensor] = {}
    for boxes, _, _ in results:
        for box in boxes:
            target = whole.setdefault(box.name, torch.full(box.shape, torch.nan, dtype=box.tensor.dtype))
            part = target[box.box.slices()]
            assert torch.equal(torch.where(part.isnan(), box.tensor, part), box.tensor), box.name
            part.copy_(box.tensor)
            writers.setdefault(box.name, torch.zeros(box.shape))[box.box.slices()] += box.primary
    assert all((count == 1).all() for count in writers.values())
    return whole


def test_checkpoints_travel_between_plain_and_replicated_placements(tmp_path: Path) -> None:
    """Whole state to plain to sharded state to other places: the same bits at each stop, and the same next loss."""
    run_ranks(WORLD, depart, Way(), tmp_path / "0")
    stops = [Way(), Way(state=None), Way(state="sharded", seed=1), Way(seed=2)]
    seen = []
    for i, way in enumerate(stops):
        results = run_ranks(WORLD, arrive, way, tmp_path / str(i), tmp_path / str(i + 1))
        assert all(not alike for _, _, alike in results)
        seen.append((whole_tensors(results), results[0][1]))
    first, loss = seen[0]
    for tensors, other in seen[1:]:
        assert tensors.keys() == first.keys() and all(torch.equal(tensors[k], first[k]) for k in first)
        assert abs(other - loss) <= 1e-12 * abs(loss)


# ---- the program, and what is refused ----------------------------------------------------------------------------------------------


def sent(rank: int, cache: GroupCache, way: Way) -> list[tuple[str, str, str]]:
    events: list[Event] = []
    parts = build(rank, cache, way, Collectives(emit=events.append, trace=True, timeout_s=60))
    advance(parts, 0)
    return [(e.op_id, e.op, e.axis) for e in events if isinstance(e, Collective)]


@pytest.mark.core
@pytest.mark.parametrize("state", ["whole", "sharded"])
def test_a_step_sends_what_its_program_lists(state: ExpertState) -> None:
    way = Way(state=state)
    buckets = bucket_elements(way.optim, torch.float64)
    options = StepOptions(placement=way.placement, expert_state=state, bucket_elements=buckets)
    for rank, ops in enumerate(run_ranks(WORLD, sent, way)):
        program = step_program(FOLDING, way.spec, DispatchSpec(), rank=rank, options=options)
        assert sorted(ops) == sorted((op.id, op.collective, op.axis) for op in program.collectives)
    assert sum("/holders" in op[0] for op in ops) > 1  # several buckets
    assert any("/back" in op[0] for op in ops) == (state == "whole")


def tiles(rank: int, cache: GroupCache) -> str:
    way = Way()
    groups = build_groups(FOLDING, rank=rank, cache=cache)
    ctx = ModelContext(
        spec=way.spec, dispatch=DispatchSpec(overlap="fine"), placement=way.placement, groups=groups,
        comms=Collectives(timeout_s=240), dtype=way.dtype, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        assemble(ctx, optim=way.optim, num_microbatches=1)
    return str(caught.value)


def test_tiles_and_replicas_are_refused_by_name() -> None:
    assert all("experts with replicas (resilience.slots_per_rank)" in text for text in run_ranks(WORLD, tiles))

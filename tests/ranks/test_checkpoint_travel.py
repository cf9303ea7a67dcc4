"""Checkpoints travel between mappings that differ in every axis: 6 ordered pairs (42 with all tests), weights and moments bit for bit, the next loss to 1e-12,
each logical element on the disk once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_help import model_fields, run_state
from tiers import times

from phalanx.core.config import ModelConfig, OptimConfig, PipelineConfig, RouterConfig
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ModelSpec, parameters, resolve_model
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import StepParts, train_step
from ranks import run_ranks

pytestmark = pytest.mark.ranks
MICROBATCHES, SEQ_LEN = 4, 16


@dataclass(frozen=True)
class Place:
    """A mapping and what else decides where state lies."""

    folding: Folding
    pipe: PipelineConfig = field(default_factory=PipelineConfig)
    zero: int = 1
    bucket_mb: float = 64.0

    @property
    def name(self) -> str:
        return f"{self.folding.label()}-{self.pipe.schedule}-{self.pipe.virtual}-{self.zero}".replace("|", "-")


PLACES = [
    Place(Folding(world=1)),
    Place(Folding(world=4, tp=2, ep=4), bucket_mb=0.005),
    Place(Folding(world=4, tp=4, etp=2), zero=0),
    Place(Folding(world=4, cp=2, pp=2, ep=2)),
    Place(Folding(world=2, pp=2), PipelineConfig(schedule="interleaved_1f1b", virtual=2)),
    Place(Folding(world=8, tp=2, cp=2, ep=2, etp=2), bucket_mb=0.005),
    Place(Folding(world=8, tp=2, pp=2, ep=4), PipelineConfig(schedule="zbv")),
][: times(7, 3)]


def spec() -> ModelSpec:
    config = ModelConfig(preset="tiny", num_layers=4, dense_layers=1, dense_ffn=32, shared_ffn=32, tied_embeddings=True)
    return resolve_model(config, RouterConfig(bias_rate=1e-2))


def build(rank: int, cache: GroupCache, place: Place) -> StepParts:
    folding = place.folding
    pipeline = make_pipeline(place.pipe, spec(), pp=folding.pp, seq_len=SEQ_LEN)
    ctx = ModelContext(
        spec=spec(),
        dispatch=DispatchSpec(),
        placement=plain_placement(8, folding),
        groups=build_groups(folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks),
        comms=Collectives(timeout_s=240),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    optim = OptimConfig(zero=1 if place.zero else 0, bucket_mb=place.bucket_mb)
    return assemble(ctx, optim=optim, num_microbatches=MICROBATCHES // folding.dp, pipeline=pipeline)


def advance(parts: StepParts, step: int) -> float:
    groups = parts.groups
    dp = groups.axis("dp")
    share = MICROBATCHES // dp.size
    batches = [microbatch(step, dp.index * share + j) for j in range(share)]
    return train_step(parts, [part_of(b, groups.folding, groups.rank) for b in batches], step=step, lr=3e-3).loss


def microbatch(step: int, number: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens_BS = torch.randint(0, 256, (2, SEQ_LEN + 1), generator=generator)
    positions_BS = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    segments = ((SEQ_LEN,),) * 2
    return TokenBatch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous(), positions_BS, segments)


def depart(rank: int, cache: GroupCache, place: Place, path: Path) -> None:
    """Two steps on this mapping, saved."""
    parts = build(rank, cache, place)
    for step in (0, 1):
        advance(parts, step)
    manager = CheckpointManager(path, group=own_group(place.folding.world, timeout_s=240))
    manager.open()
    manager.save(parts.state.boxes(), run_state(2, spec()))
    manager.finish()


def arrive(rank: int, cache: GroupCache, place: Place, sources: list[Path]) -> list[tuple[float, list[str]]]:
    """For each checkpoint: the next loss on this mapping, and the boxes whose bits are not those that were saved."""
    out = []
    group = own_group(place.folding.world, timeout_s=240)
    parts = build(rank, cache, place)
    for path in sources:
        manager = CheckpointManager(path, group=group)
        manager.read_state(2, model=model_fields(spec()))
        manager.load(parts.state.boxes(), step=2)
        whole = torch.load(path / "whole.pt")
        wrong = [b.name for b in parts.state.boxes() if not torch.equal(b.tensor, whole[b.name][b.box.slices()])]
        parts.state.restore(parts.comms)
        out.append((advance(parts, 2), wrong))
    return out


def read_whole(path: Path) -> dict[str, torch.Tensor]:
    """All logical tensors of a checkpoint, read by one process."""
    boxes: list[BoxTensor] = build(0, GroupCache(), PLACES[0]).state.boxes()
    CheckpointManager(path).load(boxes, step=2)
    whole: dict[str, torch.Tensor] = {}
    for box in boxes:
        whole.setdefault(box.name, torch.full(box.shape, torch.nan, dtype=torch.float64))[box.box.slices()] = box.tensor
    assert all(torch.isfinite(t).all() for t in whole.values())
    return whole


def elements_on_disk(path: Path) -> int:
    metadata = torch.distributed.checkpoint.FileSystemReader(path / "step-00000002").read_metadata()
    chunks = [chunk for entry in metadata.state_dict_metadata.values() for chunk in entry.chunks]
    return sum(torch.Size(chunk.sizes).numel() for chunk in chunks)


def test_every_mapping_to_every_other(tmp_path: Path) -> None:
    paths = [tmp_path / place.name for place in PLACES]
    for place, path in zip(PLACES, paths, strict=True):
        run_ranks(place.folding.world, depart, place, path, timeout_s=400)
        torch.save(read_whole(path), path / "whole.pt")
        logical = 3 * sum(p.num_elements for p in parameters(spec())) + 3 * 8  # three MoE layers have an expert bias
        assert elements_on_disk(path) == logical, place.name
    losses: dict[str, list[float]] = {place.name: [] for place in PLACES}
    for place in PLACES:
        for rank in run_ranks(place.folding.world, arrive, place, paths, timeout_s=400):
            for source, (loss, wrong) in zip(PLACES, rank, strict=True):
                assert not wrong, f"{source.name} to {place.name}: {wrong[:3]}"
                losses[source.name].append(loss)
    for name, found in losses.items():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-12), name

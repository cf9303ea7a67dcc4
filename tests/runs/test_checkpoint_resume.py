"""Bar 7: a run goes from 4 ranks (ep 4) to 2 (ep 2) to 8 (ep 4, edp 2); parameters and moments are the same bits, the next loss equal to 1e-12."""

from pathlib import Path

import pytest
import torch
from checkpoint_help import Mapping, model_fields, run_state

from phalanx.core.config import ModelConfig, OptimConfig, RouterConfig
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ModelSpec, resolve_model
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import StepParts, train_step
from ranks import run_ranks

pytestmark = pytest.mark.ranks
MICROBATCHES = 8
MAPPINGS = (Mapping(4, ep=4), Mapping(2, ep=2), Mapping(8, ep=4), Mapping(4, ep=2, etp=2), Mapping(1))


def spec() -> ModelSpec:
    return resolve_model(ModelConfig(preset="tiny"), RouterConfig(bias_rate=1e-2))


def build(rank: int, cache: GroupCache, mapping: Mapping, dtype: torch.dtype) -> StepParts:
    folding = make_folding(world=mapping.world, ep=mapping.ep, etp=mapping.etp)
    ctx = ModelContext(
        spec=spec(),
        dispatch=DispatchSpec(),
        placement=plain_placement(8, folding),
        groups=build_groups(folding, rank=rank, cache=cache),
        comms=Collectives(),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return assemble(ctx, optim=OptimConfig(), num_microbatches=MICROBATCHES // mapping.world)


def microbatch(step: int, number: int) -> TokenBatch:
    """Two sequences of 12 tokens that depend on (step, number) alone."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens_BS = torch.randint(0, 256, (2, 13), generator=generator)
    positions_BS = torch.arange(12).expand(2, 12)
    return TokenBatch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous(), positions_BS, ((12,), (12,)))


def advance(parts: StepParts, step: int) -> float:
    dp = parts.groups.axis("dp")
    share = MICROBATCHES // dp.size
    batches = [microbatch(step, dp.index * share + j) for j in range(share)]
    return train_step(parts, batches, step=step, lr=3e-3).loss


def leg(rank: int, cache: GroupCache, mapping: Mapping, path: Path, dtype: torch.dtype, peek: bool) -> list[float]:
    """Go on from the newest checkpoint for two steps and save; with `peek`, only say the next loss."""
    manager = CheckpointManager(path, group=own_group(mapping.world, timeout_s=240))
    manager.open()
    parts, begin = build(rank, cache, mapping, dtype), 0
    newest = manager.choose()
    if newest is not None:
        begin = manager.read_state(newest, model=model_fields(spec())).step
        manager.load(parts.state.boxes(), step=begin)
        parts.state.restore(parts.comms)
    if peek:
        return [advance(parts, begin)]
    losses = [advance(parts, step) for step in (begin, begin + 1)]
    manager.save(parts.state.boxes(), run_state(begin + 2, spec()))
    manager.finish()
    return losses


def copy_through(
    rank: int, cache: GroupCache, mapping: Mapping, source: Path, target: Path, dtype: torch.dtype
) -> None:
    """Load on this mapping, save again, change nothing."""
    group = own_group(mapping.world, timeout_s=240)
    parts = build(rank, cache, mapping, dtype)
    step = CheckpointManager(source).choose()
    assert step is not None
    CheckpointManager(source, group=group).load(parts.state.boxes(), step=step)
    parts.state.restore(parts.comms)
    writer = CheckpointManager(target, group=group)
    writer.open()
    writer.save(parts.state.boxes(), run_state(step, spec()))
    writer.finish()


def everything(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All logical tensors of the newest checkpoint, read whole by one process."""
    parts = build(0, GroupCache(), Mapping(1), dtype)
    boxes: list[BoxTensor] = parts.state.boxes()
    manager = CheckpointManager(path)
    step = manager.choose()
    assert step is not None
    manager.load(boxes, step=step)
    whole = {}
    for box in boxes:
        whole.setdefault(box.name, torch.full(box.shape, torch.nan, dtype=box.tensor.dtype))[box.box.slices()] = (
            box.tensor
        )
    return whole


def test_a_run_travels_over_mappings(tmp_path: Path) -> None:
    """Three legs on three mappings give the losses of a run that stayed on one rank."""
    path, home = tmp_path / "travelling", tmp_path / "home"
    losses = [run_ranks(m.world, leg, m, path, torch.float64, False)[0] for m in MAPPINGS[:3]]
    at_home = [run_ranks(1, leg, Mapping(1), home, torch.float64, False)[0] for _ in range(3)]
    assert [x for each in losses for x in each] == pytest.approx([x for each in at_home for x in each], rel=1e-12)
    there, here = everything(path, torch.float64), everything(home, torch.float64)
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert (tensor - here[name]).abs().max() <= 1e-10 * max(1.0, here[name].abs().max().item()), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_state_passes_through_mappings_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    first = tmp_path / "0"
    run_ranks(4, leg, MAPPINGS[0], first, dtype, False)
    original = everything(first, dtype)
    assert all(torch.isfinite(t).all() for t in original.values())
    assert len([n for n in original if n.startswith("exp_avg_sq/")]) == len(
        [n for n in original if n.startswith("master/")]
    )
    losses = {run_ranks(4, leg, MAPPINGS[0], first, dtype, True)[0][0]}
    source = first
    for i, mapping in enumerate(MAPPINGS[1:], start=1):
        target = tmp_path / str(i)
        run_ranks(mapping.world, copy_through, mapping, source, target, dtype)
        copied = everything(target, dtype)
        assert copied.keys() == original.keys()
        assert all(torch.equal(copied[n], original[n]) for n in original)
        losses |= set(run_ranks(mapping.world, leg, mapping, target, dtype, True)[0])
        source = target
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    assert max(losses) - min(losses) <= tolerance * max(losses)

"""A model of a run, read from its folder alone into one process, whatever mapping wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.core.config import Recipe
from phalanx.data import Tokenizer
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models import Decoder, ModelContext
from phalanx.plan.layout import Box
from phalanx.plan.mapping import buffers, make_folding, plain_placement, resolve_model
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.pipeline import plain_pipeline
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.comm import Collectives, GroupCache, build_groups
from phalanx.runtime.state import BoxTensor
from phalanx.train.assembly import state_dtype
from phalanx.train.passes import StageRunner
from phalanx.train.run_folder import RunFolder, choose_checkpoint
from phalanx.train.setup import DTYPES


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    model: Decoder
    tokenizer: Tokenizer
    recipe: Recipe
    step: int
    runner: StageRunner


def load_model(path: Path, *, step: int | None = None) -> LoadedModel:
    """The model after `step` steps (None: the newest checkpoint) on the CPU. Tokens are never dropped, whatever training did.

    Raises `ConfigError` where `path` is no run folder, `CheckpointError` where there is no sound checkpoint.
    """
    folder = RunFolder(path)
    recipe, tokenizer = folder.read_recipe(), folder.read_tokenizer()
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer.vocab_size)
    manager, chosen = choose_checkpoint(folder, spec, step, hint="let phalanx train come to its first checkpoint")
    folding = make_folding(world=1)
    ctx = ModelContext(
        spec=spec,
        dispatch=DispatchSpec(),
        placement=plain_placement(max(1, spec.num_experts), folding),
        groups=build_groups(folding, rank=0, cache=GroupCache()),
        comms=Collectives(),
        dtype=DTYPES[recipe.train.dtype],
        device=torch.device("cpu"),
        kernels=recipe.kernels.implementation,
        lanes=Lanes(torch.get_num_threads(), rows=compiled_rows() if recipe.kernels.compiled else None),
    )
    model = Decoder(ctx)
    _fill(model, manager, chosen, wanted={name for name, _ in buffers(spec)}, dtype=state_dtype(ctx.dtype))
    runner = StageRunner(model=model, pipeline=plain_pipeline(spec), groups=ctx.groups, comms=ctx.comms)
    return LoadedModel(model=model, tokenizer=tokenizer, recipe=recipe, step=chosen, runner=runner)


def _fill(model: Decoder, manager: CheckpointManager, step: int, *, wanted: set[str], dtype: torch.dtype) -> None:
    """Read the master weights, which each parameter is the rounded value of, and the buffers."""
    masters = {name: torch.empty(p.shape, dtype=dtype) for name, p in model.named_parameters()}
    boxes = [_whole(f"master/{name}", tensor) for name, tensor in masters.items()]
    boxes += [_whole(f"buffer/{name}", tensor) for name, tensor in model.named_buffers() if name in wanted]
    manager.load(boxes, step=step, partial=True)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(masters.pop(name))


def _whole(name: str, tensor: torch.Tensor) -> BoxTensor:
    shape = tuple(tensor.shape)
    return BoxTensor(name, shape, Box((0,) * len(shape), shape), tensor, primary=True)

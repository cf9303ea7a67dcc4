"""What the tests of the memory estimate share: a run's recipe, its parts on one rank, and real bytes of tensors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.core.config import CheckpointConfig, DispatchConfig, OptimConfig, Recipe, ResilienceConfig, TrainConfig
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ModelSpec, RouterSpec
from phalanx.plan.moe.dispatch import dispatch_spec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.simulate.memory import activations as act
from phalanx.train.assembly import assemble
from phalanx.train.setup.rank import DTYPES
from phalanx.train.step.exact import exact_sums
from phalanx.train.step.transaction import StepParts

ROUTER = RouterSpec(renormalize=True, aux_loss=0.01)


def small_spec(**changes: Any) -> ModelSpec:
    """Wide enough that its tensors outweigh scalars, small enough for a test."""
    base: dict[str, Any] = {
        "name": "memory", "num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab": 512,
        "num_experts": 8, "top_k": 2, "expert_ffn": 96, "router": ROUTER,
    }  # fmt: skip
    return ModelSpec(**{**base, **changes})


def small_recipe(
    *,
    dispatch: dict[str, Any] | None = None,
    zero: int = 1,
    mode: Literal["off", "fast", "exact"] = "off",
    **train: Any,
) -> Recipe:
    return Recipe(
        resilience=ResilienceConfig(mode=mode),
        train=TrainConfig(**{"seq_len": 64, "micro_batch": 4, "global_batch": 4, "dtype": "bfloat16", **train}),
        dispatch=DispatchConfig(**(dispatch or {})),
        optim=OptimConfig(zero=zero),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(),
    )


def assembled(
    recipe: Recipe, spec: ModelSpec, folding: Folding | None = None, *, rank: int = 0, cache: GroupCache | None = None
) -> StepParts:
    """The parts of a step of `recipe` on `rank`."""
    folding = folding or make_folding(world=1)
    ctx = ModelContext(
        spec=spec,
        dispatch=dispatch_spec(recipe.dispatch),
        placement=plain_placement(max(1, spec.num_experts), folding),
        groups=build_groups(folding, rank=rank, cache=GroupCache() if cache is None else cache),
        comms=Collectives(timeout_s=240),
        dtype=DTYPES[recipe.train.dtype],
        device=torch.device("cpu"),
        recompute=recipe.train.recompute,
        lanes=Lanes(1, rows=compiled_rows() if recipe.resilience.mode == "exact" else None),
    )
    t = recipe.train
    exact = exact_sums(recipe.resilience, t, folding, spec=spec, rank=rank)
    micro = t.global_batch // t.micro_batch
    return assemble(ctx, optim=recipe.optim, num_microbatches=micro // folding.dp, samples=micro, exact=exact)


def batches(recipe: Recipe, spec: ModelSpec, *, count: int = 1) -> list[TokenBatch]:
    """Random tokens, two documents in each sequence."""
    t, rng = recipe.train, np.random.default_rng(0)
    half = t.seq_len // 2
    positions = torch.arange(half).repeat(2).expand(t.micro_batch, -1).contiguous()
    out = []
    for _ in range(count):
        tokens = torch.from_numpy(rng.integers(0, spec.vocab, (t.micro_batch, t.seq_len + 1)))
        out.append(
            TokenBatch(
                tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((half, half),) * t.micro_batch
            )
        )
    return out


def local_of(recipe: Recipe, spec: ModelSpec) -> act.Local:
    """The estimator's view of one rank."""
    t = recipe.train
    return act.Local(
        spec=spec,
        folding=make_folding(world=1),
        dispatch=dispatch_spec(recipe.dispatch),
        sequences=t.micro_batch,
        seq_len=t.seq_len,
        item=DTYPES[t.dtype].itemsize,
        recompute=t.recompute,
        lanes=1,
        rows_share=1.0,
    )


class Watch:
    """Bytes that tensors take while a block runs, over those at its beginning: `peak` and what is `left`."""

    def __enter__(self) -> Watch:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._profile.__exit__(*args)
        assert self._profile.profiler is not None
        found = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.left = self.peak = 0
        for event in sorted(found, key=lambda e: e.start_ns()):
            self.left += event.nbytes()
            self.peak = max(self.peak, self.left)


def changed(spec: ModelSpec, **router: Any) -> ModelSpec:
    return dataclasses.replace(spec, router=dataclasses.replace(spec.router, **router))


def bench(tmp_path: Path, *args: str, timeout_s: float = 600.0) -> dict[str, Any]:
    """`phalanx bench memory`, as a program: its ranks start from a process that holds nothing else."""
    path = tmp_path / "memory.json"
    words = [
        sys.executable,
        "-m",
        "phalanx",
        "bench",
        "memory",
        *args,
        "--data.cache",
        str(tmp_path / "cache"),
        "--json",
        str(path),
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result

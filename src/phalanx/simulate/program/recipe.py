"""The programs of a recipe: what every rank of a run of it does in one step, with amounts, ready for a clock.

Decides what a run would decide (`train/setup/rank.py`) from the same settings. Must never change: a recipe that has no program here is an error that says
why, never a program of something else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan import equal_shares, microbatches_per_rank
from phalanx.plan.mapping import AnyFolding, resolve_mapping
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import dispatch_spec
from phalanx.plan.pipeline import make_pipeline
from phalanx.plan.pipeline.boundary import Activation, edges_for
from phalanx.plan.program import Sizes, StepOptions, StepProgram, step_program
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.program.cost import ProgramOracle

PRECISIONS = {"bfloat16": ("bf16", 2, 4), "float32": ("fp32", 4, 4)}
"""Type of a run -> its name among clusters, bytes of an element, bytes of an element of state."""


@dataclass(frozen=True, kw_only=True)
class RecipePrograms:
    """The programs of all ranks, and what they run on."""

    programs: tuple[StepProgram, ...]
    folding: AnyFolding


def programs_of_recipe(recipe: Recipe, spec: ModelSpec, *, world: int) -> RecipePrograms:
    """One program a rank. Raises `ConfigError` for mappings that cannot run, and for what has no program yet."""
    raise_if(_no_program(recipe), ConfigError, subject="the programs of the recipe")
    t = recipe.train
    folding = resolve_mapping(recipe.folding, spec, world=world, seq_len=t.seq_len, **equal_shares(recipe))
    each = microbatches_per_rank(recipe, folding)
    _, itemsize, state = PRECISIONS[t.dtype]
    pipeline = make_pipeline(recipe.pipeline, spec, pp=folding.pp, seq_len=t.seq_len)
    options = StepOptions(
        num_microbatches=each,
        recompute=t.recompute,
        cp_method=recipe.folding.cp_method,
        zero=recipe.optim.zero,
        shard_holders=recipe.resilience.shard_holders,
        bucket_elements=math.ceil(recipe.optim.bucket_mb * 1e6 / state),
        pipeline=pipeline,
        sizes=Sizes(sequences=t.micro_batch, seq_len=t.seq_len, itemsize=itemsize, state_itemsize=state),
    )
    what, programs = Activation(t.micro_batch, t.seq_len, spec.hidden, itemsize), []
    for rank in range(world):
        own = replace(options, edges=edges_for(folding, pipeline.plan(each), rank=rank, what=what))
        programs.append(step_program(folding, spec, dispatch_spec(recipe.dispatch), rank=rank, options=own))
    return RecipePrograms(programs=tuple(programs), folding=folding)


def oracle_of(recipe: Recipe, cluster: GpuCluster) -> ProgramOracle:
    """Costs of the recipe's operations on a cluster. Raises `ConfigError` where it has no rate for their type."""
    precision = PRECISIONS[recipe.train.dtype][0]
    if precision == "fp32" and cluster.hardware.fp32_flops_per_s is None:
        rule, hint = "has no rate in the cluster file", "measure one with phalanx calibrate, or use bfloat16"
        raise ConfigError.of("train.dtype", "float32", rule, hint, subject="the cluster")
    return ProgramOracle(hardware=cluster.hardware, precision=precision, seq_len=recipe.train.seq_len)


def _no_program(recipe: Recipe) -> list[Problem]:
    r = recipe.resilience
    rules = [
        (r.slots_per_rank is None, "resilience.slots_per_rank", r.slots_per_rank, "leave it out"),
        (not recipe.pipeline.pair_passes, "pipeline.pair_passes", True, "leave it out"),
        (r.mode != "exact", "resilience.mode", r.mode, 'use "fast"'),
        (recipe.train.dtype in PRECISIONS, "train.dtype", recipe.train.dtype, "use bfloat16 or float32"),
        (
            recipe.dispatch.overlap != "fused",
            "dispatch.overlap",
            "fused",
            "simulate it without --against: rows travel inside its kernels, which programs do not distinguish",
        ),
        (recipe.optim.zero != 2, "optim.zero", 2, "use 1"),
        (recipe.pipeline.extra_warmup != "auto", "pipeline.extra_warmup", "auto", "give the numbers that were chosen"),
    ]
    rule = "is not put on a clock operation by operation yet"
    return [Problem(where=where, value=value, rule=rule, hint=hint) for ok, where, value, hint in rules if not ok]

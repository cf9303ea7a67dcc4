"""A recipe as a job and a mapping on a cluster, and the recipe of a mapping that a search found.

Decides which settings of a recipe time and memory depend on. Must never change: the recipe of a mapping resolves to that mapping again.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.core.config import (
    DispatchConfig,
    FoldingConfig,
    LaunchConfig,
    ModelConfig,
    PipelineConfig,
    Recipe,
    RunConfig,
    TrainConfig,
)
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan.folding import resolve_folding
from phalanx.plan.model import PRESETS, ModelSpec, resolve_model
from phalanx.plan.overlap_setting import FINE
from phalanx.plan.pipeline import choose_schedule
from phalanx.plan.recipe import equal_shares
from phalanx.simulate.mapping import Job, Mapping, Overlap
from phalanx.simulate.routing import Routing
from phalanx.simulate.shape import Shape, flops_per_token, shape_of


def job_of_recipe(recipe: Recipe, spec: ModelSpec) -> Job:
    """What the recipe trains."""
    return Job(shape=shape_of(spec), seq_len=recipe.train.seq_len, global_batch=recipe.train.global_batch)


def mapping_of_recipe(recipe: Recipe, spec: ModelSpec, *, world: int) -> Mapping:
    """How the recipe spreads it. Raises `ConfigError` for what cannot run, or is not modelled on a cluster."""
    t, p = recipe.train, recipe.pipeline
    raise_if(_not_modelled(recipe), ConfigError, subject="the recipe on a cluster")
    folding = resolve_folding(recipe.folding, spec, world=world, seq_len=t.seq_len, **equal_shares(recipe))
    schedule, virtual = choose_schedule(p) if folding.pp > 1 else ("1f1b", 1)
    even = recipe.router.force == "balanced" or bool(recipe.dispatch.pad_to_capacity)
    return Mapping(
        folding=folding,
        micro_batch=t.micro_batch,
        schedule=schedule,
        virtual=virtual,
        recompute=t.recompute,
        overlap=_overlap(recipe),
        cp_method=recipe.folding.cp_method,
        routing=Routing(kind="balanced" if even else "learned", most=_capacity(recipe)),
        stage_layers=p.layers if folding.pp > 1 else None,
        shares="equal" if recipe.resilience.mode == "off" else "any",
    )


def _overlap(recipe: Recipe) -> Overlap:
    """What runs beside computation. `fine` and `auto` are modelled as chunks, as many as the parts of `plan/overlap_setting.py: FINE`."""
    how, dp = recipe.dispatch.overlap, recipe.optim.bucket_mb > 0
    if recipe.pipeline.pair_passes:
        return Overlap(dp=dp, ep="pair")
    if how in ("serial", "tiles"):
        return Overlap(dp=dp)
    return Overlap(
        dp=dp, ep="chunks", chunks=int(how.removeprefix("coarse:")) if how.startswith("coarse:") else FINE.parts
    )


def _capacity(recipe: Recipe) -> float | None:
    """Rows of an expert at most, over its even share; None where nothing is dropped."""
    d = recipe.dispatch
    return max(1.0, d.capacity_factor or 1.0) if d.policy == "drop" else None


def _not_modelled(recipe: Recipe) -> list[Problem]:
    rules = [
        (
            recipe.train.dtype == "bfloat16",
            "train.dtype",
            recipe.train.dtype,
            "clusters are modelled in bf16",
            "bfloat16",
        ),
        (
            recipe.folding.stages is None,
            "folding.stages",
            recipe.folding.stages,
            "stages with foldings of their own are not modelled",
            "one folding for all",
        ),
        (
            recipe.dispatch.transport == "all_to_all",
            "dispatch.transport",
            recipe.dispatch.transport,
            "is modelled as all_to_all",
            "all_to_all",
        ),
        (recipe.optim.zero == 1, "optim.zero", recipe.optim.zero, "is modelled with a sharded optimizer", "1"),
    ]
    return [Problem(where=w, value=v, rule=rule, hint=f"use {hint}") for ok, w, v, rule, hint in rules if not ok]


def resolve_recipe(recipe: Recipe, *, tokenizer_vocab: int | None = None) -> ModelSpec:
    """The recipe's model."""
    return resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer_vocab)


def recipe_of_mapping(job: Job, mapping: Mapping) -> Recipe:
    """A recipe that runs a mapping on its ranks. Paired passes have no setting on accelerators: such a mapping runs without them."""
    f = mapping.folding
    chunks = f"coarse:{mapping.overlap.chunks}" if mapping.overlap.ep == "chunks" and f.ep > 1 else "serial"
    return Recipe(
        run=RunConfig(name=f"{job.shape.name.lower().replace(' ', '-')}-{f.world}"),
        model=_model_config(job.shape),
        folding=FoldingConfig(tp=f.tp, cp=f.cp, pp=f.pp, ep=f.ep if job.shape.experts else None, etp=f.etp),
        dispatch=DispatchConfig(overlap=chunks),
        pipeline=PipelineConfig(schedule=_schedule(mapping), virtual=mapping.virtual if f.pp > 1 else None),
        train=TrainConfig(
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            micro_batch=mapping.micro_batch,
            recompute=mapping.recompute if mapping.recompute in ("selective", "full") else "none",
        ),
        launch=LaunchConfig(ranks=f.world, device="cuda"),
    )


def _schedule(mapping: Mapping) -> Any:
    return mapping.schedule if mapping.folding.pp > 1 else None


def _model_config(shape: Shape) -> ModelConfig:
    """The preset of that name, or the nearest family with every number given. A dense model has as many dense layers as layers."""
    if shape.name in PRESETS and shape_of(PRESETS[shape.name]) == shape:
        return ModelConfig(preset=shape.name, vocab=shape.vocab)
    moe = shape.experts > 0
    heads = {} if shape.latent else {"num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return ModelConfig(
        preset="deepseek-v3" if shape.latent else "mixtral-8x22b",
        num_layers=shape.layers,
        hidden=shape.hidden,
        num_heads=shape.heads,
        vocab=shape.vocab,
        num_experts=shape.experts if moe else None,
        top_k=shape.top_k if moe else None,
        expert_ffn=shape.expert_ffn if moe else None,
        shared_ffn=shape.shared_ffn if moe and (shape.shared_ffn or shape.latent) else None,
        dense_layers=shape.dense_layers or None,
        dense_ffn=shape.dense_ffn or None,
        **heads,
    )


def says_the_model(recipe: Recipe, shape: Shape) -> bool:
    """Whether the recipe's model costs what this shape costs: same parameters, same FLOPs, same experts."""
    found = shape_of(resolve_recipe(recipe))
    same = (found.layers, found.experts, found.top_k if found.experts else 0, found.heads, found.moe_layers)
    wanted = (shape.layers, shape.experts, shape.top_k if shape.experts else 0, shape.heads, shape.moe_layers)
    rates = [(flops_per_token(s, 4096), s.num_params) for s in (found, shape)]
    return same == wanted and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*rates, strict=True))

"""The recipe of a mapping that a search found, or why there is none.

Decides which preset a shape is written from. Must never change: a recipe that is given out resolves to the very shape and mapping that were
asked for, and is one that `phalanx train` takes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from phalanx.core.config import (
    DispatchConfig,
    FoldingConfig,
    LaunchConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    Recipe,
    ResilienceConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.rules import recipe_problems
from phalanx.plan import run_problems
from phalanx.plan.model import PRESETS
from phalanx.simulate import difference, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping, Shape, shape_of

_NAMES = {
    "layers": "num_layers", "hidden": "hidden", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim", "vocab": "vocab",
    "experts": "num_experts", "top_k": "top_k", "expert_ffn": "expert_ffn", "shared_ffn": "shared_ffn", "dense_layers": "dense_layers",
    "dense_ffn": "dense_ffn", "mtp": "mtp_layers", "tied": "tied_embeddings",
}  # fmt: skip
"""Of a shape -> of [model]."""


def recipe_of_mapping(
    job: Job, mapping: Mapping, *, on_device: bool = True, cluster: GpuCluster | None = None
) -> tuple[Recipe | None, list[str]]:
    """A recipe that runs a mapping on its ranks, or None and the reasons why none does. `cluster`: where, for what depends on its hosts."""
    found = _with_model(job.shape)
    if found is None:
        return None, [f"no preset with other numbers is {job.shape.name}"]
    model, router = found
    f = mapping.folding
    routed = bool(job.shape.experts)
    recipe = Recipe(
        run=RunConfig(name=f"{job.shape.name.lower().replace(' ', '-').replace('/', '-')}-{f.world}"),
        model=model,
        router=router,
        dispatch=_dispatch(mapping) if routed else DispatchConfig(),
        folding=FoldingConfig(
            tp=f.tp, cp=f.cp, pp=f.pp, ep=f.ep if routed else None, etp=f.etp, cp_method=mapping.cp_method
        ),
        pipeline=_pipeline(mapping),
        optim=OptimConfig() if mapping.overlap.dp else OptimConfig(bucket_mb=0.0),
        train=TrainConfig(
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            micro_batch=mapping.micro_batch,
            dtype="float32" if mapping.precision == "fp32" else "bfloat16",
            recompute=mapping.recompute if mapping.recompute in ("selective", "full") else "none",
        ),
        resilience=ResilienceConfig(
            heal=None if on_device else False
        ),  # a run on processors is elastic unless told otherwise
        launch=LaunchConfig(ranks=f.world, device="cuda" if on_device else "cpu"),
    )
    reasons = _reasons(recipe, mapping, cluster)
    return (None if reasons else recipe), reasons


def _reasons(recipe: Recipe, mapping: Mapping, cluster: GpuCluster | None) -> list[str]:
    """What such a recipe would do otherwise, or why it would not run."""
    world = mapping.folding.world
    problems = recipe_problems(recipe, world=world)
    problems += run_problems(recipe, world=world, tokenizer_vocab=recipe.model.vocab)
    if problems:
        return [f"{p.where} = {p.value} {p.rule}" for p in problems]
    try:
        again = mapping_of_recipe(recipe, resolve_recipe(recipe), world=world, cluster=cluster)
    except PhalanxError as error:
        return [str(error)]
    assert isinstance(again, Mapping)  # `recipe` has one folding
    routed = replace(again, routing=mapping.routing)  # a search assumes it, a recipe trains its router
    return [f"no recipe says {name} = {_value(mapping, name)}" for name in difference(mapping, routed)]


def _value(mapping: Mapping, name: str) -> Any:
    value: Any = asdict(mapping)
    for part in name.split("."):
        value = value[part]
    return value


def _dispatch(mapping: Mapping) -> DispatchConfig:
    o, drop = mapping.overlap, mapping.drop
    overlap = {"none": "serial", "pair": "serial", "chunks": f"coarse:{o.chunks}"}.get(o.ep, o.ep)
    overlap += f":{o.tiles}" if o.tiles else ""
    if drop is None:
        return DispatchConfig(overlap=overlap, left_free=o.left_free)
    padded = drop.pad_to_capacity or None
    return DispatchConfig(
        policy="drop",
        capacity_factor=drop.capacity_factor,
        drop_scope=drop.drop_scope,
        pad_to_capacity=padded,
        overlap=overlap,
        left_free=o.left_free,
    )


def _pipeline(mapping: Mapping) -> PipelineConfig:
    pair = mapping.overlap.ep == "pair" or mapping.overlap.paired
    if mapping.folding.pp == 1:
        return PipelineConfig(pair_passes=pair)
    return PipelineConfig(
        schedule=mapping.schedule,  # type: ignore[arg-type]
        virtual=mapping.virtual,
        layers=mapping.stage_layers,
        extra_warmup=mapping.extra_warmup,
        pair_passes=pair,
    )


# ---- the model ------------------------------------------------------------------------------------------------------------------


def _plain(shape: Shape) -> Shape:
    """Without its name, and without what a model that has no experts does not read."""
    if shape.experts:
        return replace(shape, name="", dense_ffn=shape.dense_ffn if shape.dense_layers else 0)
    return replace(shape, name="", top_k=0, expert_ffn=0, shared_ffn=0, dense_layers=0, groups=1, group_top_k=1)


def _with_model(shape: Shape) -> tuple[ModelConfig, RouterConfig] | None:
    """[model] and [router] of the preset that is this shape, else of the nearest one with other numbers; None where none can be."""
    own = _plain(shape)
    presets = sorted(PRESETS, key=lambda name: _distance(own, _plain(shape_of(PRESETS[name])), name == shape.name))
    for name in presets:
        made = _from_preset(name, shape)
        try:
            spec = resolve_recipe(Recipe(model=made[0], router=made[1]))
        except ConfigError:
            continue
        if _plain(shape_of(spec)) == own:
            return made
    return None


def _distance(one: Shape, other: Shape, same_name: bool) -> tuple[int, bool]:
    a, b = asdict(one), asdict(other)
    return sum(a[key] != b[key] for key in a), not same_name


def _from_preset(name: str, shape: Shape) -> tuple[ModelConfig, RouterConfig]:
    base = shape_of(PRESETS[name])
    wanted = {_NAMES[key]: getattr(shape, key) for key in _NAMES if getattr(shape, key) != getattr(base, key)}
    if shape.experts:
        if not shape.dense_layers:
            wanted.pop("dense_ffn", None)
    else:
        wanted = {
            key: value
            for key, value in wanted.items()
            if key not in ("num_experts", "top_k", "expert_ffn", "shared_ffn")
        }
        wanted |= {"dense_layers": shape.layers, "dense_ffn": shape.dense_ffn}
    if shape.latent is not None:
        for key in ("head_dim", "num_kv_heads"):  # they follow from it
            wanted.pop(key, None)
        if base.latent is not None:
            ours, theirs = asdict(shape.latent), asdict(base.latent)
            wanted |= {key: ours[key] for key in ours if ours[key] != theirs[key]}
    wanted["vocab"] = shape.vocab
    router: dict[str, Any] = {}
    if shape.experts and (shape.groups, shape.group_top_k) != (base.groups, base.group_top_k):
        router = {"num_groups": shape.groups}
        if shape.groups > 1:
            router["group_topk"] = shape.group_top_k
    return ModelConfig(preset=name, **wanted), RouterConfig(**router)

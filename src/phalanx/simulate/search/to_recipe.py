"""The recipe of a mapping that a search found, or why there is none.

Decides which preset a model is written from. Must never change: a recipe that is given out resolves to the very model and mapping that were
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
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.simulate import difference, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping

_SIZES = (
    "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab", "num_experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers",
    "dense_ffn", "mtp_layers", "tied_embeddings",
)  # fmt: skip
"""Settings of [model] that time and memory depend on."""
_LATENT = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
"""The same of latent attention."""


def recipe_of_mapping(
    job: Job, mapping: Mapping, *, on_device: bool = True, cluster: GpuCluster | None = None
) -> tuple[Recipe | None, list[str]]:
    """A recipe that runs a mapping on its ranks, or None and the reasons why none does. `cluster`: where, for what depends on its hosts;
    then launch.ranks is that of one host, and the launcher's number counts."""
    found = _with_model(job.spec)
    if found is None:
        return None, [f"no preset with other numbers is {job.spec.name}"]
    model, router = found
    f = mapping.folding
    routed = job.spec.num_moe_layers > 0
    recipe = Recipe(
        run=RunConfig(name=f"{job.spec.name.lower().replace(' ', '-').replace('/', '-')}-{f.world}"),
        model=model,
        router=router,
        dispatch=_dispatch(mapping) if routed else DispatchConfig(),
        folding=FoldingConfig(
            tp=f.tp, cp=f.cp, pp=f.pp, ep=f.ep if routed else None, etp=f.etp, cp_method=mapping.cp_method
        ),
        pipeline=_pipeline(mapping),
        optim=_optim(mapping),
        train=TrainConfig(
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            micro_batch=mapping.micro_batch,
            dtype="float32" if mapping.precision == "fp32" else "bfloat16",
            recompute=mapping.recompute if mapping.recompute in ("selective", "full") else "none",
        ),
        # a run on processors is elastic unless its recipe says otherwise
        resilience=ResilienceConfig(heal=None if on_device else False),
        launch=LaunchConfig(
            ranks=f.world if cluster is None else min(f.world, cluster.hardware.ranks_per_host),
            device="cuda" if on_device else "cpu",
        ),
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


def _optim(mapping: Mapping) -> OptimConfig:
    """Sharded gradients and narrow moments where the mapping has them, and no reduction beside the backward pass where it has none."""
    found = OptimConfig(zero=2) if mapping.sharding == "gradients" else OptimConfig()
    found = replace(found, state_dtype="bfloat16") if mapping.moment_bytes == 2 else found
    return found if mapping.overlap.dp else replace(found, bucket_mb=0.0)


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
        schedule=mapping.schedule,
        virtual=mapping.virtual,
        layers=mapping.stage_layers,
        extra_warmup=mapping.extra_warmup,
        pair_passes=pair,
    )


# ---- the model ------------------------------------------------------------------------------------------------------------------


def _compared(spec: ModelSpec) -> dict[str, object]:
    """What time and memory depend on, but for what a model that has no experts does not read."""
    found: dict[str, object] = {name: getattr(spec, name) for name in (*_SIZES, "ffn_matrices")}
    found["mla"] = None if spec.mla is None else tuple(getattr(spec.mla, name) for name in _LATENT)
    if spec.num_moe_layers:
        groups = {"num_groups": spec.router.num_groups, "group_topk": spec.router.group_topk}
        return found | groups | ({} if spec.dense_layers else {"dense_ffn": 0})
    unread = dict.fromkeys(("num_experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers"), 0)
    return found | unread | {"num_groups": 1, "group_topk": 1}


def _with_model(spec: ModelSpec) -> tuple[ModelConfig, RouterConfig] | None:
    """[model] and [router] of the preset that is this model, else of the nearest one with other numbers; None where none can be."""
    own = _compared(spec)

    def distance(name: str) -> tuple[int, bool]:
        other = _compared(PRESETS[name])
        return sum(own[key] != other[key] for key in own), name != spec.name

    for name in sorted(PRESETS, key=distance):
        made = _from_preset(name, spec)
        try:
            found = resolve_recipe(Recipe(model=made[0], router=made[1]))
        except ConfigError:
            continue
        if _compared(found) == own:
            return made
    return None


def _from_preset(name: str, spec: ModelSpec) -> tuple[ModelConfig, RouterConfig]:
    base = PRESETS[name]
    wanted = {key: getattr(spec, key) for key in _SIZES if getattr(spec, key) != getattr(base, key)}
    if spec.num_moe_layers:
        if not spec.dense_layers:
            wanted.pop("dense_ffn", None)
    else:
        for key in ("num_experts", "top_k", "expert_ffn", "shared_ffn"):
            wanted.pop(key, None)
        wanted |= {"dense_layers": spec.num_layers, "dense_ffn": spec.dense_ffn}
    if spec.mla is not None:
        for key in ("head_dim", "num_kv_heads"):  # they follow from it
            wanted.pop(key, None)
        if base.mla is not None:
            ours, theirs = spec.mla, base.mla
            wanted |= {key: getattr(ours, key) for key in _LATENT if getattr(ours, key) != getattr(theirs, key)}
    wanted["vocab"] = spec.vocab
    router: dict[str, Any] = {}
    own, others = spec.router, base.router
    if spec.num_moe_layers and (own.num_groups, own.group_topk) != (others.num_groups, others.group_topk):
        router = {"num_groups": own.num_groups}
        if own.num_groups > 1:
            router["group_topk"] = own.group_topk
    return ModelConfig(preset=name, **wanted), RouterConfig(**router)

"""A recipe as a job and a mapping on a cluster: what `phalanx simulate RECIPE` predicts.

Decides which settings of a recipe time and memory depend on, and which it cannot follow. Must never change: what is predicted is the recipe's
own run; a setting that would make it another one is modelled, or refused by its name.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan import equal_shares
from phalanx.plan.layout import expert_layers
from phalanx.plan.mapping import Folding, StagedFolding, parse_stages, resolve_mapping
from phalanx.plan.model import ModelSpec, resolve_model
from phalanx.plan.moe import DispatchSpec, rows_of_source
from phalanx.plan.moe.overlap import parse_overlap
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.placement import replicas_of
from phalanx.plan.recovery import moment_bytes
from phalanx.simulate.hardware import GpuCluster, span_of
from phalanx.simulate.mapping import (
    AnyMapping,
    ExpertSlots,
    Job,
    Mapping,
    Overlap,
    Precision,
    RoutedRows,
    RouterModel,
    Sharding,
    StagedMapping,
    expert_slots,
    forced_loads,
)
from phalanx.simulate.step import TILE_WAYS, fused_run_problems, run_layers, with_warmup

SHARDING: dict[int, Sharding] = {0: "none", 1: "optimizer", 2: "gradients"}
"""`optim.zero` -> what of a mapping is sharded."""
PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float32": "fp32"}
"""Type of a run -> its name among clusters."""


def job_of_recipe(recipe: Recipe, spec: ModelSpec) -> Job:
    """What the recipe trains."""
    return Job(spec=spec, seq_len=recipe.train.seq_len, global_batch=recipe.train.global_batch)


def mapping_of_recipe(recipe: Recipe, spec: ModelSpec, *, world: int, cluster: GpuCluster | None = None) -> AnyMapping:
    """How the recipe spreads it. Raises `ConfigError` for what cannot run, or is not modelled on a cluster.

    `cluster`: where it runs; without it nothing that a run finds out by measuring can be followed (`extra_warmup = "auto"`).
    """
    mapping = _mapping(recipe, spec, world=world, cluster=cluster)
    if cluster is None or recipe.pipeline.extra_warmup != "auto" or mapping.folding.pp == 1:
        return mapping
    return with_warmup(job_of_recipe(recipe, spec), mapping, cluster, memory_gb=recipe.pipeline.memory_gb)


def _mapping(recipe: Recipe, spec: ModelSpec, *, world: int, cluster: GpuCluster | None) -> AnyMapping:
    t = recipe.train
    problems = _not_modelled(recipe, cluster) + _tiles_across(recipe, cluster)
    raise_if(problems, ConfigError, subject="the recipe on a cluster")
    slots_per_rank = recipe.resilience.slots_per_rank
    folding = resolve_mapping(
        recipe.folding, spec, world=world, seq_len=t.seq_len, slots_per_rank=slots_per_rank, **equal_shares(recipe)
    )
    if recipe.dispatch.overlap == "fused" and cluster is not None:
        if isinstance(folding, Folding):
            found = fused_run_problems(folding, cluster.hardware, left_free=recipe.dispatch.left_free)
        else:
            rule = "is not modelled in stages with foldings of their own"
            found = [Problem(where="dispatch.overlap", value="fused", rule=rule, hint="use tiles, or folding.pp")]
        raise_if(found, ConfigError, subject="the recipe on a cluster")
    pipeline = make_pipeline(recipe.pipeline, spec, pp=folding.pp, seq_len=t.seq_len)
    if isinstance(folding, Folding):
        slots = _slots(recipe, spec, folding, pipeline, cluster)
        return _of_folding(recipe, spec, folding, pipeline, micro_batch=t.micro_batch, slots=slots)
    stages = [
        _of_folding(
            recipe, spec, _like_stage(folding, place), pipeline, micro_batch=t.micro_batch // _shares_of(folding, place)
        )
        for place in range(folding.pp)
    ]
    placed = tuple(replace(stage, first_rank=first) for stage, first in zip(stages, folding.first_ranks, strict=True))
    return StagedMapping(folding=folding, stages=placed, micro_batch=t.micro_batch)


def _of_folding(
    recipe: Recipe,
    spec: ModelSpec,
    folding: Folding,
    pipeline: Pipeline,
    *,
    micro_batch: int,
    slots: ExpertSlots | None = None,
) -> Mapping:
    """The recipe under one folding."""
    t, has_stages = recipe.train, folding.pp > 1
    replicated = recipe.resilience.slots_per_rank is not None
    return Mapping(
        folding=folding,
        micro_batch=micro_batch,
        schedule=pipeline.schedule if has_stages else "1f1b",
        virtual=pipeline.virtual if has_stages else 1,
        recompute=t.recompute,
        overlap=_overlap(recipe),
        precision=PRECISIONS[t.dtype],
        cp_method=recipe.folding.cp_method,
        sharding=SHARDING[recipe.optim.zero],
        moment_bytes=moment_bytes(recipe),
        dispatch="dedup" if recipe.dispatch.transport == "deepep" else recipe.dispatch.transport,
        routing=_plain_routing(recipe) if replicated else _routing(recipe, spec, folding.ep, micro_batch),
        drop=_drop(recipe) if spec.moe_layers else None,
        stage_layers=_given_layers(recipe, spec, pipeline) if has_stages else None,
        extra_warmup=pipeline.extra_warmup if has_stages else None,
        shares="equal" if recipe.resilience.mode == "off" else "any",
        holders=recipe.resilience.shard_holders if recipe.optim.zero else 1,
        votes=bool(recipe.resilience.heal),
        slots=slots,
    )


def _like_stage(folding: StagedFolding, place: int) -> Folding:
    """A uniform pipeline of as many stages, all like that of `place`."""
    stage, pp = folding.stages[place], folding.pp
    return Folding(world=stage.world * pp, tp=stage.tp, cp=stage.cp, pp=pp, ep=stage.ep, etp=stage.etp)


def _shares_of(folding: StagedFolding, place: int) -> int:
    """Ranks of dp that divide the sequences of a micro-batch."""
    return folding.stages[place].dp // folding.replicas


def _tiles_across(recipe: Recipe, cluster: GpuCluster | None) -> list[Problem]:
    """Stages that exchange rows tile by tile among ranks that begin in the middle of a host and end on another: the plan's clock counts ranks from the first of a host."""
    kind = parse_overlap(recipe.dispatch.overlap).kind
    if cluster is None or recipe.folding.stages is None or kind not in TILE_WAYS:
        return []
    folding = parse_stages(recipe.folding.stages)
    per_host, problems = cluster.hardware.ranks_per_host, []
    for index, (first, stage) in enumerate(zip(folding.first_ranks, folding.stages, strict=True)):
        size = stage.ep * stage.etp
        plain = span_of(size, 1, ranks_per_host=per_host)
        if span_of(size, 1, ranks_per_host=per_host, first=first, world=stage.world) != plain:
            rule = f"is not modelled where {size} ranks that exchange rows begin in the middle of a host (folding.stages[{index}], rank {first})"
            problems.append(Problem(where="dispatch.overlap", value=kind, rule=rule, hint="serial or coarse:2"))
    return problems


def _slots(
    recipe: Recipe, spec: ModelSpec, folding: Folding, pipeline: Pipeline, cluster: GpuCluster | None
) -> ExpertSlots | None:
    """Replicas of the stage that has most layers with experts: the others have fewer."""
    r, t = recipe.resilience, recipe.train
    if r.slots_per_rank is None or not spec.moe_layers or cluster is None:
        return None
    asked = replicas_of(recipe, world=folding.world, local_ranks=cluster.hardware.ranks_per_host)
    held = [pipeline.stages.of_rank(place) for place in range(folding.pp)]
    fullest = max(range(folding.pp), key=lambda place: len(expert_layers(spec, held[place])))
    tokens = t.micro_batch * t.seq_len // (folding.tp * folding.cp)
    drop = _drop(recipe)
    sizes = {
        "num_tokens": tokens,
        "sharing": folding.tp * folding.cp,
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
    }
    rows = RoutedRows(
        routing=_plain_routing(recipe),
        tokens=tokens,
        seed=t.seed,
        forced_skew=spec.router.force_skew if recipe.router.force == "imbalanced" else None,
        capacity=None if drop is None else rows_of_source(drop, **sizes),
        padded=drop is not None and drop.is_static,
    )
    rank = fullest * (folding.world // folding.pp)
    return expert_slots(spec, folding, held[fullest], rank=rank, asked=asked, rows=rows, state=r.expert_state,
                        follows=recipe.steps_between_placements() > 0)  # fmt: skip


def _routing(recipe: Recipe, spec: ModelSpec, ep: int, micro_batch: int) -> RouterModel:
    if recipe.router.force != "imbalanced" or not spec.moe_layers:
        return _plain_routing(recipe)
    t = recipe.train
    loads = forced_loads(
        ep=ep,
        experts=spec.num_experts,
        top_k=spec.top_k,
        tokens=micro_batch * t.seq_len,
        seed=t.seed,
        skew=spec.router.force_skew,
    )
    return RouterModel(kind="learned", forced=loads)


def _plain_routing(recipe: Recipe) -> RouterModel:
    return RouterModel(kind="balanced" if recipe.router.force == "balanced" else "learned")


def _overlap(recipe: Recipe) -> Overlap:
    way = parse_overlap(recipe.dispatch.overlap)
    both = recipe.pipeline.pair_passes and way.kind != "serial"
    plain = Overlap(dp=recipe.optim.bucket_mb > 0, paired=both)
    if way.kind == "coarse":
        return replace(plain, ep="chunks", chunks=way.chunks)
    if way.kind == "fused":
        return replace(plain, ep="fused", left_free=recipe.dispatch.left_free)
    if way.kind in TILE_WAYS:
        options = str(way).partition(":")[2]
        return replace(plain, ep=way.kind, tiles=options, left_free=recipe.dispatch.left_free)
    return replace(plain, ep="pair") if recipe.pipeline.pair_passes else plain


def _drop(recipe: Recipe) -> DispatchSpec | None:
    """Fields of [dispatch] that time depends on."""
    d = recipe.dispatch
    if d.policy == "dropless":
        return None
    given = {name: getattr(d, name) for name in ("capacity_factor", "drop_scope", "pad_to_capacity")}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return DispatchSpec(policy="drop", **settings)


def _given_layers(recipe: Recipe, spec: ModelSpec, pipeline: Pipeline) -> tuple[int, ...] | None:
    """Layers of the stages where they are others than those that a run chooses by itself."""
    counts = pipeline.stages.counts
    return None if counts == run_layers(spec, recipe.train.seq_len, len(counts)) else counts


def _not_modelled(recipe: Recipe, cluster: GpuCluster | None) -> list[Problem]:
    d, p, r, t = recipe.dispatch, recipe.pipeline, recipe.resilience, recipe.train
    rules = [
        (t.dtype in PRECISIONS, "train.dtype", t.dtype, "clusters compute in bf16 or fp32", "use bfloat16"),
        (cluster is None or t.dtype != "float32" or cluster.hardware.fp32_flops_per_s is not None, "train.dtype", t.dtype,
         "has no rate in the cluster's file", "give it fp32_flops_per_s, or use bfloat16"),
        (recipe.kernels.implementation == "fast", "kernels.implementation", recipe.kernels.implementation, "plain kernels are not modelled", "use fast"),
        (parse_overlap(d.overlap).rows is None or cluster is None, "dispatch.overlap", d.overlap, "sends on a cluster whichever rows are fewer bytes, as a run that is told nothing",
         "leave rows out"),
        (d.overlap != "fused" or cluster is not None, "dispatch.overlap", d.overlap, "stores rows in the memory of other devices of a host, and no cluster says how many ranks a host has",
         "use auto"),
        (d.overlap != "fused" or not p.pair_passes, "pipeline.pair_passes", p.pair_passes, "is for ranks on processors, and fused kernels are for devices", "leave it out"),
        (r.slots_per_rank is None or cluster is not None, "resilience.slots_per_rank", r.slots_per_rank, "lie on hosts, and no cluster says how many ranks a host has",
         "leave it out"),
        (d.left_free is None or d.overlap == "fused" or cluster is None or cluster.hardware.sms is None or d.left_free < cluster.hardware.sms, "dispatch.left_free", d.left_free,
         "leaves nothing to products on the cluster's devices", "16"),
        (cluster is not None or p.extra_warmup != "auto", "pipeline.extra_warmup", p.extra_warmup, "is found out by a run", "give the numbers that were chosen"),
    ]  # fmt: skip
    return [Problem(where=w, value=v, rule=rule, hint=hint) for ok, w, v, rule, hint in rules if not ok]


def resolve_recipe(recipe: Recipe, *, tokenizer_vocab: int | None = None) -> ModelSpec:
    """The recipe's model."""
    return resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer_vocab)


def difference(one: Mapping, other: Mapping) -> list[str]:
    """Names of the fields in which two mappings differ, those of their parts with a dot."""
    a, b = asdict(one), asdict(other)
    out = []
    for name in a:
        if a[name] != b[name]:
            inner = isinstance(a[name], dict) and isinstance(b[name], dict)
            out += [f"{name}.{key}" for key in a[name] if a[name][key] != b[name][key]] if inner else [name]
    return out

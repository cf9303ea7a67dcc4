"""What a recipe may say once its model and its ranks are known: the second half of validation (the first is `core/rules.py`).

Decides nothing new: it asks the model, the folding and the batch for their problems, and adds the settings that this very model never
reads. Must never change: what `run_problems` accepts, `resolve_model` and `resolve_mapping` accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem
from phalanx.core.rules import RANKS, value_of
from phalanx.core.samples import num_rounds
from phalanx.core.settings import describe_settings
from phalanx.plan.mapping import AnyFolding, Folding, StagedFolding, folding_problems, parse_stages, resolve_mapping
from phalanx.plan.model import PRESETS, ModelSpec, resolve_model
from phalanx.plan.moe import transport_problems
from phalanx.plan.moe.overlap import (
    block_problems,
    fused_setting_problems,
    overlap_problems,
    replica_problems,
    setting_problems,
)
from phalanx.plan.pipeline import choose_schedule, pairing_problems, pipeline_problems, schedule_setting_problems
from phalanx.plan.pipeline.schedule import schedules, splits_backward
from phalanx.plan.recovery import per_host, recovery_problems, room_problems

OF_EXPERTS = tuple(f"resilience.{key}" for key in ("slots_per_rank", "f", "loads", "expert_state"))
"""Settings about replicas."""


def run_problems(recipe: Recipe, *, world: int, tokenizer_vocab: int | None = None) -> list[Problem]:
    """Everything that keeps `recipe` from running on `world` ranks, as far as model and mapping decide it.

    Meant as the `check` of `core.recipe.load_recipe`: ``load_recipe(path, overrides, check=lambda r: run_problems(r, world=4))``.
    """
    if not RANKS.allows(world):
        return []  # launch.ranks has its own problem
    try:
        spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer_vocab)
    except ConfigError as error:
        return [*error.problems, *_group_problems(recipe), *_modelless_problems(recipe, world)]
    problems = [*_group_problems(recipe), *_dense_problems(recipe, spec)]
    t = recipe.train
    batch = equal_shares(recipe) if min(t.global_batch, t.micro_batch) > 0 else {}
    try:
        slots = recipe.resilience.slots_per_rank if spec.moe_layers else None
        folding = resolve_mapping(recipe.folding, spec, world=world, seq_len=t.seq_len, slots_per_rank=slots, **batch)
        problems += _pair_problems(recipe, folding) if batch else []
        problems += _scope_problems(recipe, spec, folding)
        if recipe.resilience.heal:
            problems += recovery_problems(
                folding, f=recipe.resilience.f, per_host=per_host(recipe), replicated=slots is not None
            )
            problems += room_problems(recipe, spec, folding)
    except ConfigError as error:
        seen = {p.where for p in problems}
        problems += [p for p in error.problems if p.where not in seen]
        folding = None
    problems += _overlap_problems(recipe, spec, folding)
    if spec.moe_layers:
        stages = [] if folding is None else _stages_of(folding)
        groups = [(stage.ep, stage.etp, stage.ep * stage.etp * stage.edp) for stage in stages]
        problems += transport_problems(recipe, spec, groups=groups) or _idle_transport(recipe, stages)
    if recipe.folding.num_stages > 1:
        seen = {p.where for p in problems}
        found = pipeline_problems(recipe.pipeline, spec, pp=recipe.folding.num_stages)
        if recipe.folding.stages is not None:
            found = [_of_stages(problem, recipe) for problem in found]
        problems += [p for p in [*found, *_deferred_problems(recipe)] if p.where not in seen]
    return problems


def _deferred_problems(recipe: Recipe) -> list[Problem]:
    """A schedule that defers weight gradients, in mode exact."""
    name, _ = choose_schedule(recipe.pipeline)
    if recipe.resilience.mode != "exact" or name not in schedules() or not splits_backward(name):
        return []
    rule = 'defers weight gradients, which with resilience.mode = "exact" are summed where they are made'
    return [Problem(where="pipeline.schedule", value=name, rule=rule, hint='use "1f1b"')]


def resolve_shape(recipe: Recipe, *, world: int, tokenizer_vocab: int) -> tuple[ModelSpec, AnyFolding]:
    """Model and mapping of a run on `world` ranks. Raises `ConfigError` with everything that is wrong with them."""
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer_vocab)
    t = recipe.train
    folding = resolve_mapping(
        recipe.folding,
        spec,
        world=world,
        seq_len=t.seq_len,
        slots_per_rank=recipe.resilience.slots_per_rank,
        **equal_shares(recipe),
    )
    return spec, folding


def equal_shares(recipe: Recipe) -> dict[str, int]:
    """The batch, for `resolve_mapping` to ask that all data-parallel ranks have equal shares of it; empty where any number of ranks may share it."""
    t = recipe.train
    if recipe.resilience.mode != "off":
        return {}
    return {"global_batch": t.global_batch, "micro_batch": t.micro_batch}


def _stages_of(folding: AnyFolding) -> Sequence[Folding]:
    return folding.stages if isinstance(folding, StagedFolding) else (folding,)


def microbatches_per_rank(recipe: Recipe, mapping: AnyFolding) -> int:
    """Those of one step, empty ones included."""
    return num_rounds(recipe.train.global_batch // recipe.train.micro_batch, owners=mapping.replicas)


def _pair_problems(recipe: Recipe, mapping: AnyFolding) -> list[Problem]:
    """Passes that should run beside one another, and do not communicate, or are no pairs."""
    if not recipe.pipeline.pair_passes:
        return []
    axes = ("tp", "cp", "ep", "etp")
    stages = _stages_of(mapping)
    if all(stage.degree(axis) == 1 for stage in stages for axis in axes):
        rule = "has nothing to hide: with tp, cp, ep and etp of 1 no pass communicates"
        return [Problem(where="pipeline.pair_passes", value=True, rule=rule, hint="folding.ep = 2, or leave it out")]
    each = microbatches_per_rank(recipe, mapping)
    return pairing_problems(recipe.pipeline, pp=mapping.pp, num_microbatches=each)


def _scope_problems(recipe: Recipe, spec: ModelSpec, mapping: AnyFolding) -> list[Problem]:
    """A capacity of whole micro-batches where each rank has whole ones. (Other policies than `drop` are refused by the rules of the recipe alone.)"""
    d = recipe.dispatch
    stages = _stages_of(mapping)
    shared = any(stage.degree(axis) > 1 for stage in stages for axis in ("tp", "cp"))
    if shared or not spec.moe_layers or d.policy != "drop" or d.drop_scope != "full_sequence":
        return []
    rule, hint = "has no effect: folding.tp = folding.cp = 1", "leave it out, or set folding.tp = 2"
    return [Problem(where="dispatch.drop_scope", value=d.drop_scope, rule=rule, hint=hint)]


def _overlap_problems(recipe: Recipe, spec: ModelSpec, folding: AnyFolding | None) -> list[Problem]:
    """Problems of `dispatch.overlap`: its words, and where it cannot apply (as far as the mapping stands)."""
    d = recipe.dispatch
    if not spec.moe_layers:
        return []  # every setting of the section is without effect, which the rules of the recipe report
    found = setting_problems(d.overlap) or block_problems(d.overlap, hidden=spec.hidden)
    if found or folding is None:
        return found
    stages = _stages_of(folding)
    group = max(stage.ep * stage.etp for stage in stages)
    replicas = [] if recipe.resilience.slots_per_rank is None else replica_problems(d.overlap)
    fused = fused_setting_problems(
        d.overlap,
        device=recipe.launch.device_type,
        dtype=recipe.train.dtype,
        etp=max(stage.etp for stage in stages),
        kernels=recipe.kernels.implementation,
        bucket_mb=recipe.optim.bucket_mb,
        heals=bool(recipe.resilience.heal),
    )
    return replicas or fused + overlap_problems(
        d.overlap,
        num_experts=spec.num_experts,
        group=group,
        transport=d.transport,
        pad_to_capacity=bool(d.pad_to_capacity),
    )


def _idle_transport(recipe: Recipe, stages: Sequence[Folding]) -> list[Problem]:
    """A way for rows where none travels. (Degrees that are written down are refused by the rules of the recipe alone.)"""
    transport = recipe.dispatch.transport
    if transport == "all_to_all" or not stages or any(stage.ep * stage.etp > 1 for stage in stages):
        return []
    rule, hint = "has no effect: with ep x etp = 1 every row stays where it is", "leave it out, or set folding.ep = 2"
    return [Problem(where="dispatch.transport", value=transport, rule=rule, hint=hint)]


def _of_stages(problem: Problem, recipe: Recipe) -> Problem:
    """A problem of the number of stages, named after the setting that says it."""
    if problem.where != "folding.pp":
        return problem
    hint = problem.hint.replace("folding.pp ", "") + " stages"
    return replace(problem, where="folding.stages", value=list(recipe.folding.stages or ()), hint=hint)


def _modelless_problems(recipe: Recipe, world: int) -> list[Problem]:
    """What is wrong with degrees and schedule alone, where there is no model to hold them against."""
    f = recipe.folding
    if f.stages is not None:
        try:
            parse_stages(f.stages)
        except ConfigError as error:
            return list(error.problems)
        return schedule_setting_problems(recipe.pipeline, pp=len(f.stages))
    found = folding_problems(Folding(world=world, tp=f.tp, cp=f.cp, pp=f.pp, ep=f.ep or 1, etp=f.etp))
    return found + (schedule_setting_problems(recipe.pipeline, pp=f.pp) if f.pp > 1 else [])


def _group_problems(recipe: Recipe) -> list[Problem]:
    """Group-limited routing that is half set, or limits nothing."""
    r, base = recipe.router, PRESETS.get(recipe.model.preset)
    if base is None or r.num_groups is None or r.num_groups <= 1:
        return []
    if r.group_topk is None and base.router.num_groups == 1:
        rule, hint = (
            "goes with router.group_topk, which is not set",
            f"add router.group_topk = {max(1, r.num_groups // 2)}",
        )
        return [Problem(where="router.num_groups", value=r.num_groups, rule=rule, hint=hint)]
    if r.group_topk == r.num_groups:
        rule, hint = "has no effect: router.group_topk is as large, so every group is chosen", "leave both out"
        return [Problem(where="router.num_groups", value=r.num_groups, rule=rule, hint=hint)]
    return []


def _dense_problems(recipe: Recipe, spec: ModelSpec) -> list[Problem]:
    """Settings about routing, changed in a model without experts (the model names those of [model], the mapping its degrees)."""
    if spec.moe_layers:
        return []
    return [
        Problem(
            where=s.name,
            value=value_of(recipe, s.name),
            rule="has no effect: every layer is dense",
            hint="leave it out",
        )
        for s in describe_settings()
        if (s.section in ("router", "dispatch") or s.name in OF_EXPERTS) and value_of(recipe, s.name) != s.default
    ]

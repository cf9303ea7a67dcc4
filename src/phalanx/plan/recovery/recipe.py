"""What stays the same over all generations of an elastic run, from its recipe: for the run and for predictions of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from phalanx.core.config import Recipe
from phalanx.core.errors import PlanError, Problem
from phalanx.plan.mapping import AnyFolding, Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline import pipeline_problems
from phalanx.plan.placement import ReplicaSettings, asked_of, replicas_of
from phalanx.plan.recovery.devices import StateKind, is_exact, num_holding
from phalanx.plan.recovery.memory import FIXED_POINT_ITEM, ITEM, StateRoom, moment_bytes, optimizer_bytes
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.stragglers import StragglerRule


def recovery_planner(recipe: Recipe, spec: ModelSpec, folding: Folding) -> RecoveryPlanner:
    """`folding`: of the run when it begins. Raises `DataError` as `replicas_of` does."""
    asked = replicas_of(recipe, world=folding.world, local_ranks=_ranks_of_host(recipe, folding))
    return _recovery_planner(recipe, spec, folding, asked)


def room_problems(recipe: Recipe, spec: ModelSpec, folding: AnyFolding) -> list[Problem]:
    """Whether the run's own mapping has room for its state, where the recipe limits it."""
    if recipe.resilience.state_gb is None or not isinstance(folding, Folding):
        return []
    if pipeline_problems(recipe.pipeline, spec, pp=folding.pp):
        return []  # which are reported elsewhere
    local_ranks = _ranks_of_host(recipe, folding)
    asked = asked_of(recipe.resilience, loads=None, world=folding.world, local_ranks=local_ranks)
    return _recovery_planner(recipe, spec, folding, asked).room_problems()


def _ranks_of_host(recipe: Recipe, folding: Folding) -> int:
    return folding.world if recipe.resilience.service is None else recipe.launch.ranks


def _recovery_planner(recipe: Recipe, spec: ModelSpec, folding: Folding, asked: ReplicaSettings) -> RecoveryPlanner:
    item = ITEM.get(recipe.train.dtype, 2)
    wide, limit_gb = max(4, item), recipe.resilience.state_gb
    return RecoveryPlanner(
        spec=spec,
        base=folding,
        seq_len=recipe.train.seq_len,
        floor=recipe.resilience.f,
        per_host=per_host(recipe) or 1,
        pipeline=recipe.pipeline,
        cp_method=recipe.folding.cp_method,
        state_bytes=wide,
        moment_bytes=moment_bytes(recipe),
        zero=recipe.optim.zero,
        bucket_elements=math.ceil(recipe.optim.bucket_mb * 1e6 / wide),
        slots_per_rank=asked.slots_per_rank,
        loads=asked.loads,
        room=StateRoom(
            limit=math.inf if limit_gb is None else limit_gb * 1e9,
            parameter=item,
            gradient=FIXED_POINT_ITEM if recipe.resilience.mode == "exact" else wide,
            optimizer=optimizer_bytes(recipe),
        ),
    )


def straggler_rule(recipe: Recipe, planner: RecoveryPlanner) -> StragglerRule:
    """Whom the run removes for being slow: `resilience.straggler` and `straggler_steps`, as far as the others make the mapping and keep the state."""
    r = recipe.resilience

    @cache
    def fits(ranks: int) -> bool:
        try:
            choice = planner.choose(ranks)
        except PlanError:
            return False
        base = planner.base
        return not choice.idle and is_exact(choice.folding, base) and choice.folding.pp == base.pp

    least = max(r.minimum, planner.least(), planner.floor)
    return StragglerRule(factor=r.straggler, steps=r.straggler_steps, least_ranks=least, least_hosts=r.f, fits=fits)


def wanted_ranks(recipe: Recipe) -> int:
    """Ranks of all hosts together when the run begins."""
    wanted = recipe.resilience.wanted
    return recipe.launch.ranks if wanted is None else wanted


def per_host(recipe: Recipe) -> int | None:
    """Ranks of each of several hosts; None on one machine, where every rank counts as a host."""
    return None if recipe.resilience.service is None else recipe.launch.ranks


def recovery_problems(
    folding: AnyFolding, *, f: int, per_host: int | None = None, replicated: bool = False
) -> list[Problem]:
    """Whether all state of a run that is to be elastic is on `f` hosts to begin with, each with `per_host` ranks in turn (None: all ranks are on one machine). `replicated`: experts have replicas, and a placement that sees to them."""
    if not isinstance(folding, Folding):
        return []
    ep, each = 1 if replicated else folding.ep, per_host or 1
    if each > 1 and each % folding.etp:
        rule = f"must be a multiple of folding.etp = {folding.etp}: with resilience.heal = true the slices of an expert stay on one host"
        hint = f"use {-(-each // folding.etp) * folding.etp}"
        return [Problem(where="launch.ranks", value=each, rule=rule, hint=hint)]
    problems, unit = list[Problem](), math.lcm(each, folding.pp * math.lcm(folding.tp * folding.cp, ep * folding.etp))
    where = "launch.ranks" if per_host is None else "resilience.wanted"
    of = "ranks" if each == 1 else f"hosts of {each} ranks"
    beside = f"and with resilience.heal = true it needs {f} (resilience.f)"

    def holding(state: StateKind, other: Folding) -> int:
        return num_holding(state, other, [rank // each for rank in range(other.world)])

    def enough(state: StateKind) -> int:
        """The fewest ranks of whole hosts that the degrees tile."""
        world = folding.world + unit - folding.world % unit
        while holding(state, replace(folding, world=world, ep=ep)) < f:
            world += unit
        return world

    holders = holding("dp_cp", folding)
    if holders < f:
        rule = f"leaves every part of the dense tensors on {holders} of the {of}, {beside}"
        hint = f"use {enough('dp_cp')} ranks, or smaller folding.tp and folding.pp"
        problems.append(Problem(where=where, value=folding.world, rule=rule, hint=hint))
    holders = holding("edp", folding)
    if not replicated and folding.ep * folding.etp > 1 and holders < f:
        rule = f"leaves every expert on {holders} of the {of}, {beside}"
        ways = [
            f"folding.{axis} = {less}"
            for axis in ("ep", "etp")
            for less in range(folding.degree(axis) - 1, 0, -1)
            if folding.degree(axis) % less == 0 and holding("edp", replace(folding, **{axis: less})) >= f
        ]
        hint = f"use {ways[0]}" if ways else f"use {enough('edp')} ranks"
        axis = "ep" if folding.ep > 1 else "etp"
        problems.append(Problem(where=f"folding.{axis}", value=folding.degree(axis), rule=rule, hint=hint))
    return problems

"""How fast each member of an elastic run is, step by step: what `plan/recovery/stragglers.py` decides from is put together here, the same on all members."""

from __future__ import annotations

import numpy as np

from phalanx.core.config import Recipe
from phalanx.core.events import Straggling
from phalanx.core.samples import owned
from phalanx.plan.recovery import (
    GenerationPlan,
    RankPace,
    RecoveryPlanner,
    Streaks,
    Verdict,
    judge,
    slowness,
    straggler_rule,
    work_of_ranks,
)
from phalanx.train import StepResult


class PaceWatch:
    """One member's side of it."""

    def __init__(self, recipe: Recipe, planner: RecoveryPlanner) -> None:
        self.recipe, self.planner = recipe, planner
        self.rule = straggler_rule(recipe, planner)
        self.streaks = Streaks()

    def formed(self) -> None:
        """A generation begins: others work on other shares, and whoever comes has seen nothing."""
        self.streaks = Streaks()

    def committed(self, result: StepResult, plan: GenerationPlan) -> tuple[float | None, Verdict | None]:
        """(how slow the slowest is, what is to be done about somebody)."""
        if not result.seconds:
            return None, None
        paces = self._paces(result, plan)
        self.streaks, verdict = judge(paces, self.streaks, self.rule)
        return max(slowness(paces).values()), verdict

    def to_tell(self, verdict: Verdict, step: int) -> Straggling | None:
        """Once for each streak."""
        if verdict.steps != self.rule.steps:
            return None
        return Straggling(
            step=step,
            host=verdict.host,
            members=verdict.uids,
            slowness=verdict.slowness,
            steps=verdict.steps,
            put_out=verdict.put_out,
            why=verdict.why,
        )

    def _paces(self, result: StepResult, plan: GenerationPlan) -> list[RankPace]:
        t, folding = self.recipe.train, plan.folding
        samples = t.global_batch // t.micro_batch
        shares = [len(owned(samples, owners=folding.replicas, owner=i)) for i in range(folding.replicas)]
        work = work_of_ranks(
            self.planner.spec, folding, self.planner.stages(folding), result.counts_LE.astype(np.float64),
            microbatches=shares, tokens_of_one=t.micro_batch * t.seq_len, seq_len=t.seq_len, placement=plan.placement,
        )  # fmt: skip
        members = plan.members[: folding.world]
        several = len({fact.machine for fact in plan.members}) > 1
        return [
            RankPace(uid=fact.uid, host=fact.machine if several else fact.uid, seconds=seconds, work=flops)
            for fact, seconds, flops in zip(members, result.seconds, work, strict=True)
        ]

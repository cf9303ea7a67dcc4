"""What an elastic run makes of the hosts of a cluster, for the clock of failures (`goodput.py`): whether it may begin, the mapping of those that are left, and whom it removes.

Decides nothing: what refuses a run is asked (`plan/recovery_choice.py: with_recovery`), mappings are the run's own (`plan/recovery/planner.py: RecoveryPlanner.choose`), and so is its rule about slow hosts (`plan/recovery/recipe.py`). On a cluster of several hosts the recipe
says how many ranks a host has, and that hosts meet at a service. A run asks whether the mapping of those that are left has room only where its recipe says how much (`resilience.state_gb`), and ends
where it has none: the time until hosts return is then counted as down, and reported. Must never change: with all hosts the job has its full speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from phalanx.core.config import Recipe
from phalanx.core.errors import PlanError, Problem
from phalanx.plan import with_recovery
from phalanx.plan.mapping import Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.recovery import RecoveryPlanner, StragglerRule, recovery_planner, straggler_rule
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Mapping
from phalanx.simulate.step import Prediction, fits

MEETS = "node0:29400"
"""Stands for the service of a run on several hosts, where the recipe names none."""


@dataclass(frozen=True, kw_only=True)
class HostsLeft:
    """A recipe on a cluster of which hosts are lost."""

    recipe: Recipe
    cluster: GpuCluster
    planner: RecoveryPlanner
    fits: Callable[[Folding], bool] = lambda folding: True
    """Whether a mapping fits in the memory of the cluster's ranks."""
    too_large: dict[int, Folding] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Numbers of hosts that were asked for whose mapping does not fit."""
    _known: dict[int, Folding | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Mappings that were asked for: the clock of failures asks at every change of hosts."""

    @cached_property
    def rule(self) -> StragglerRule:
        """Who is removed for being slow."""
        return straggler_rule(self.recipe, self.planner)

    def ranks(self, hosts: int) -> int:
        """Number of ranks of so many hosts."""
        return max(0, self.cluster.world - (self.cluster.hosts - hosts) * self.cluster.hardware.ranks_per_host)

    def folding(self, hosts: int) -> Folding | None:
        """Folding with which so many hosts go on; None: they wait, for the run needs more (`resilience.minimum`), no mapping is so
        small, or it would not fit."""
        if hosts not in self._known:
            self._known[hosts] = self._folding(hosts)
        return self._known[hosts]

    def _folding(self, hosts: int) -> Folding | None:
        ranks = self.ranks(hosts)
        if ranks == self.cluster.world:
            return self.planner.base
        if ranks < max(1, self.recipe.resilience.minimum):
            return None
        try:
            found = self.planner.folding(ranks)
        except PlanError:
            return None
        if self.fits(found):
            return found
        self.too_large[hosts] = found
        return None

    def why_not(self, hosts: int) -> str:
        """Why so many hosts do not go on, in a line; empty where they do."""
        ranks, least = self.ranks(hosts), self.recipe.resilience.minimum
        if self.folding(hosts) is not None:
            return ""
        if hosts in self.too_large:
            return f"{self._does_not_fit(hosts)}: {self._way_out()}"
        if ranks < least:
            return (
                f"resilience.minimum = {least}: the {ranks} ranks of {hosts} hosts wait for more; use {ranks} or less"
            )
        try:
            self.planner.folding(ranks)
        except PlanError as error:
            return "; ".join(map(str, error.problems))
        return ""

    def explain(self) -> str:
        """What does not fit, in a line; empty where all that was asked for does."""
        if not self.too_large:
            return ""
        most = max(self.too_large)
        fewer = "" if len(self.too_large) == 1 else f" (nor with {', '.join(map(str, sorted(self.too_large)[:-1]))})"
        return (
            f"{self._does_not_fit(most)}{fewer}: the run would end there with an error of memory; "
            f"the time until hosts return is counted as down. {self._way_out()}"
        )

    def _does_not_fit(self, hosts: int) -> str:
        return f"with {hosts} hosts left the mapping ({self.too_large[hosts].label()}) does not fit in memory"

    def _way_out(self) -> str:
        held = self.planner.bytes_of(self.planner.base) / 1e9
        return (
            f"resilience.state_gb ({held:.3g} GB of state are held with all hosts) has the run take another mapping, "
            "or leave ranks idle, in place of that"
        )

    def share(self, hosts: int) -> float:
        """Share of full speed: that of the ranks that compute, the others being idle."""
        folding = self.folding(hosts)
        return 0.0 if folding is None else folding.world / self.cluster.world


def elastic_recipe(recipe: Recipe, cluster: GpuCluster) -> tuple[Recipe, list[Problem]]:
    """The recipe as an elastic run on the hosts of `cluster`, and why it cannot go on without one of them: by the rules with which the run itself is refused."""
    if recipe.resilience.heal is False:
        rule = "has the run end with the loss of a rank"
        return recipe, [Problem(where="resilience.heal", value=False, rule=rule, hint="use true")]
    if cluster.hosts == 1:
        rule, hint = "is one host, with which everything is lost", "name a cluster of two hosts or more"
        return recipe, [Problem(where="--cluster", value=cluster.name, rule=rule, hint=hint)]
    return with_recovery(_on_hosts(recipe, cluster))


def _on_hosts(recipe: Recipe, cluster: GpuCluster) -> Recipe:
    """The recipe as one of several hosts reads it."""
    if cluster.hosts == 1:
        return recipe
    service = recipe.resilience.service or MEETS
    resilience = replace(recipe.resilience, service=service, wanted=cluster.world)
    return replace(recipe, resilience=resilience, launch=replace(recipe.launch, ranks=cluster.hardware.ranks_per_host))


def hosts_left(
    recipe: Recipe,
    spec: ModelSpec,
    folding: Folding,
    cluster: GpuCluster,
    *,
    fits: Callable[[Folding], bool] = lambda folding: True,
) -> HostsLeft:
    """`folding`: of the run on all ranks; `fits` as in `HostsLeft`. Raises `DataError` where the recipe names loads that cannot be read."""
    recipe = _on_hosts(recipe, cluster)
    return HostsLeft(recipe=recipe, cluster=cluster, planner=recovery_planner(recipe, spec, folding), fits=fits)


def memory_left(prediction: Prediction) -> Callable[[Folding], bool]:
    """Whether another mapping of the predicted job fits in the memory of its cluster. Where that of all ranks does not, which is reported elsewhere, every other one is said to fit."""
    mapping = prediction.mapping
    if not isinstance(mapping, Mapping) or not prediction.fits:
        return lambda folding: True

    def fits_left(folding: Folding) -> bool:
        own = replace(mapping, folding=folding, shares="any")
        if folding.pp != mapping.folding.pp:
            own = replace(own, stage_layers=None, extra_warmup=None)
        return fits(prediction.job, own, prediction.cluster.hardware)

    return fits_left

"""What a run that heals itself makes of the hosts of a cluster, for the clock of failures (`goodput.py`): the mapping of those that are left, and whom it puts out.

Decides nothing: mappings are the run's own (`plan/heal.py: Healing.choose`), and so is its rule about slow hosts (`plan/heal_recipe.py`). On a cluster of several hosts the run is
told how many ranks a host has, and that hosts meet at a service. Must never change: with all hosts the job has its full speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from phalanx.core.config import Recipe
from phalanx.core.errors import PlanError
from phalanx.plan.folding import Folding
from phalanx.plan.heal import Healing
from phalanx.plan.heal_recipe import healing_of, straggler_rule
from phalanx.plan.model import ModelSpec
from phalanx.plan.stragglers import Rule
from phalanx.simulate.hardware import GpuCluster

MEETS = "node0:29400"
"""Stands for the service of a run on several hosts, where the recipe names none."""


@dataclass(frozen=True, kw_only=True)
class HostsLeft:
    """A recipe on a cluster of which hosts are lost."""

    recipe: Recipe
    cluster: GpuCluster
    healing: Healing
    _known: dict[int, Folding | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Mappings that were asked for: the clock of failures asks at every change of hosts."""

    @cached_property
    def rule(self) -> Rule:
        """Who is put out for being slow."""
        return straggler_rule(self.recipe, self.healing)

    def ranks(self, hosts: int) -> int:
        """Of so many hosts."""
        return max(0, self.cluster.world - (self.cluster.hosts - hosts) * self.cluster.hardware.ranks_per_host)

    def folding(self, hosts: int) -> Folding | None:
        """With which so many hosts go on; None: they wait, for the run needs more (`resilience.minimum`) or no mapping is so small."""
        if hosts not in self._known:
            self._known[hosts] = self._folding(hosts)
        return self._known[hosts]

    def _folding(self, hosts: int) -> Folding | None:
        ranks = self.ranks(hosts)
        if ranks == self.cluster.world:
            return self.healing.base
        if ranks < max(1, self.recipe.resilience.minimum):
            return None
        try:
            return self.healing.folding(ranks)
        except PlanError:
            return None

    def share(self, hosts: int) -> float:
        """Of full speed: that of the ranks that compute, the others being idle."""
        folding = self.folding(hosts)
        return 0.0 if folding is None else folding.world / self.cluster.world


def hosts_left(recipe: Recipe, spec: ModelSpec, folding: Folding, cluster: GpuCluster) -> HostsLeft:
    """`folding`: of the run on all ranks. Raises `DataError` where the recipe names loads that cannot be read."""
    if cluster.hosts > 1:
        resilience = replace(recipe.resilience, service=recipe.resilience.service or MEETS)
        launch = replace(recipe.launch, ranks=cluster.hardware.ranks_per_host)
        recipe = replace(recipe, resilience=resilience, launch=launch)
    return HostsLeft(recipe=recipe, cluster=cluster, healing=healing_of(recipe, spec, folding))

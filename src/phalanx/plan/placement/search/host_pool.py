"""The hosts that hold experts: how many slots each has, which rack it stands in, how likely it is to fail.

Decides nothing. A host is the failure domain; hosts of a rack may fail together. Hosts are counted 0 .. N-1 here; `names` says which hosts of the cluster
they are (survivors keep their names).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.messages import message


@message
@dataclass(frozen=True, kw_only=True)
class HostPool:
    """N hosts. `racks` and `failure` are empty where nothing is known: every host its own rack, all equally likely to fail."""

    slots: tuple[int, ...]
    """Replica slots of each host, in every layer."""
    racks: tuple[int, ...] = ()
    failure: tuple[float, ...] = ()
    """Probability that a host fails before what was lost is replaced."""
    names: tuple[int, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Slots of one layer on all hosts."""
        return sum(self.slots)

    @property
    def host_names(self) -> tuple[int, ...]:
        return self.names or tuple(range(self.num_hosts))

    def max_floor(self, num_experts: int) -> int:
        """The most distinct hosts that each of `num_experts` can have at the same time.

        A host serves an expert once, so it counts min(slots, experts) places; a bipartite graph with equal rows exists exactly where
        these places suffice (Gale and Ryser).
        """
        places = sum(min(slots, num_experts) for slots in self.slots)
        return min(self.num_hosts, places // num_experts)

    def without(self, lost: tuple[int, ...]) -> HostPool:
        """The hosts whose names are not in `lost`."""
        kept = [i for i, name in enumerate(self.host_names) if name not in lost]

        def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[i] for i in kept) if values else ()

        return replace(
            self,
            slots=pick(self.slots),
            racks=pick(self.racks),
            failure=pick(self.failure),
            names=pick(self.host_names),
        )

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(pool_problems(self), PlanError, subject="hosts")


def equal_pool(num_hosts: int, slots: int, *, num_racks: int = 0) -> HostPool:
    """`num_hosts` hosts of `slots` slots; with racks, consecutive hosts share one and sizes differ by one host at most."""
    racks = tuple(i * num_racks // num_hosts for i in range(num_hosts)) if num_racks else ()
    pool = HostPool(slots=(slots,) * num_hosts, racks=racks)
    pool.check()
    return pool


def pool_problems(pool: HostPool) -> list[Problem]:
    """What is wrong with the numbers alone."""
    n = pool.num_hosts
    if not n:
        return [Problem(where="hosts", value=0, rule="must be at least 1", hint="use 1 or more")]
    problems = []
    few = [s for s in pool.slots if s < 1]
    if few:
        problems.append(
            Problem(where="slots", value=few[0], rule="must be at least 1 on each host", hint="use 1 or more")
        )
    for name in ("racks", "failure", "names"):
        values = getattr(pool, name)
        if values and len(values) != n:
            problems.append(Problem(where=name, value=len(values), rule=f"needs one for each of the {n} hosts"))
    wrong = [p for p in pool.failure if not 0 <= p < 1]
    if wrong:
        rule = "is a probability of failing, from 0 to below 1"
        problems.append(Problem(where="failure", value=wrong[0], rule=rule, hint="use 0.01"))
    if len(set(pool.names)) != len(pool.names):
        problems.append(Problem(where="names", value=list(pool.names), rule="hosts have different names"))
    return problems

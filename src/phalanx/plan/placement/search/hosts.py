"""Which host holds replicas of which expert, in every layer: the placement that survives losses, as a plan.

Decides nothing by itself (`plan/placement/search/plan.py` makes it). `slots[layer][host]` lists the experts in the slots of a host; `layer_placement` turns a layer
into the `Placement` that dispatcher and layouts know, one expert-parallel group over all hosts. Must never change: hosts and layers keep their order, so
ranks that make the same plan have the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.messages import message
from phalanx.plan.mapping import Placement
from phalanx.plan.placement.search.host_pool import HostPool, pool_problems
from phalanx.plan.placement.search.local_search import holder_sets
from phalanx.plan.placement.search.probability import Certificate, certify, independent_recovery, rack_sets
from phalanx.plan.placement.search.rules import host_loads

Copies = NDArray[np.int64]


@message
@dataclass(frozen=True, kw_only=True)
class HostPlacement(Hashed):
    """`slots[layer][host]` = experts there, in slot order."""

    num_experts: int
    pool: HostPool
    slots: tuple[tuple[tuple[int, ...], ...], ...]
    floor: int = 1
    """Every expert is on at least so many hosts, so that any loss of fewer is survived."""

    @property
    def num_layers(self) -> int:
        return len(self.slots)

    @cached_property
    def copies(self) -> Copies:
        """(L, E, N) replicas of each expert on each host."""
        out = np.zeros((self.num_layers, self.num_experts, self.pool.num_hosts), dtype=np.int64)
        for layer, hosts in enumerate(self.slots):
            columns = np.repeat(np.arange(len(hosts)), [len(held) for held in hosts])
            np.add.at(out[layer], (np.array([e for held in hosts for e in held], dtype=np.int64), columns), 1)
        return out

    @cached_property
    def holder_sets(self) -> tuple[int, ...]:
        """Different sets of holders (bits) of all experts of all layers."""
        return tuple(sorted({mask for copies in self.copies for mask in holder_sets(copies)}))

    @cached_property
    def certificate(self) -> Certificate:
        """P(recover | k hosts lost), all layers together."""
        return certify(self.holder_sets, self.pool.num_hosts)

    @cached_property
    def rack_certificate(self) -> Certificate | None:
        """P(recover | k racks lost), where racks are known."""
        if not self.pool.racks:
            return None
        return certify(*rack_sets(self.holder_sets, self.pool.racks))

    def num_in_one_rack(self, floor: int) -> int:
        """(layer, expert) that die with one rack, where there are several and `floor` asks for more than one holder."""
        if floor < 2 or len(set(self.pool.racks)) < 2:
            return 0
        racks = sorted(set(self.pool.racks))
        inside = [np.flatnonzero(np.array(self.pool.racks) == rack) for rack in racks]
        touched = np.stack([(self.copies[:, :, hosts] > 0).any(2) for hosts in inside], axis=2)
        return int((touched.sum(2) < 2).sum())

    @cached_property
    def independent(self) -> tuple[float, float] | None:
        """P(recover) under the hosts' own failure probabilities (low, high), where they are known."""
        return independent_recovery(self.holder_sets, self.pool.failure) if self.pool.failure else None

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Hosts that hold an expert, ascending."""
        return tuple(int(n) for n in np.flatnonzero(self.copies[layer, expert]))

    def loads(self, loads: ArrayLike) -> NDArray[np.float64]:
        """(L, N) load of every host when each expert's is split evenly over its replicas."""
        table = np.asarray(loads, dtype=np.float64).reshape(self.num_layers, self.num_experts)
        return host_loads(table / self.copies.sum(2), self.copies)

    def max_over_mean(self, loads: ArrayLike) -> float:
        """How much longer the busiest hosts work than the mean host, summed over the layers: they wait for one another in each."""
        return max_over_mean(self.loads(loads), self.pool.slots)

    def layer_placement(self, layer: int, *, host_of_ep: Sequence[int] = ()) -> Placement:
        """One layer over the ep ranks of all hosts, as one expert-parallel group. `host_of_ep` = name of each one's host; empty: a rank a host.

        Replicas beside replicas go to different ranks where they can. Raises `PlanError` where hosts and ranks do not match.
        """
        names = self.pool.host_names
        hosts = list(host_of_ep) or list(names)
        if sorted(set(hosts)) != sorted(names):
            rule = f"the ep ranks lie on the hosts {list(names)}, each of which has one"
            raise PlanError.of("host_of_ep", hosts, rule, subject="placement")
        parts = {
            name: iter(_over_ranks(held, hosts.count(name)))
            for name, held in zip(names, self.slots[layer], strict=True)
        }
        slots = (tuple(next(parts[host]) for host in hosts),)
        rack_of = dict(zip(names, self.pool.racks, strict=True)) if self.pool.racks else {}
        racks = tuple(rack_of[host] for host in hosts) if rack_of else ()
        known = tuple(hosts) if racks else tuple(host_of_ep)
        made = Placement(num_experts=self.num_experts, slots=slots, hosts=known, racks=racks)
        made.check()
        return made

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(_problems(self), PlanError, subject="placement on hosts")

    def to_dict(self) -> dict[str, Any]:
        pool = self.pool
        return {
            "num_experts": self.num_experts,
            "floor": self.floor,
            "hosts": {
                "slots": pool.slots, "racks": pool.racks, "failure": pool.failure, "names": pool.host_names,
            },
            "slots": self.slots,
        }  # fmt: skip

    def explain(self) -> str:
        """Replicas and the certificate, in a few lines."""
        replicas, hosts = self.copies.sum(2), (self.copies > 0).sum(2)
        lines = [
            f"{self.num_layers} layers x {self.num_experts} experts on {self.pool.num_hosts} hosts x {_range(self.pool.slots)} slots: "
            f"{replicas.min()} ... {replicas.max()} replicas of an expert, on {hosts.min()} ... {hosts.max()} hosts",
            "  " + self.certificate.explain(),
        ]
        if self.rack_certificate is not None:
            lines.append(f"  racks ({self.rack_certificate.num_hosts}): {self.rack_certificate.explain(what='racks')}")
        if self.independent is not None:
            low, high = self.independent
            chance = f"{low:.6f}" if low == high else f"{low:.6f}..{high:.6f}"
            lines.append(f"  P(recover) under the hosts' own failure probabilities: {chance}")
        return "\n".join(lines)


def max_over_mean(loads_LN: NDArray[np.float64], slots: Sequence[int]) -> float:
    """Largest load over the mean of (L, N) loads; a host with fewer slots is meant to have less load. 1.0 where there is no load
    at all."""
    per_slot = loads_LN / np.asarray(slots)
    mean = loads_LN.sum(1) / sum(slots)
    total = float(mean.sum())
    return float(per_slot.max(1).sum()) / total if total else 1.0


def _over_ranks(experts: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """The slots of a host cut over its ranks; where an expert has several, they are dealt in runs, so that its copies part."""
    if len(set(experts)) < len(experts):
        runs = sorted(experts)
        return [tuple(runs[r::num_ranks]) for r in range(num_ranks)]
    bounds = [r * len(experts) // num_ranks for r in range(num_ranks + 1)]
    return [tuple(experts[a:b]) for a, b in itertools.pairwise(bounds)]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"


MOST_CELLS = 100_000_000
"""Layers x experts x hosts: 8 bytes each, and a thousand times what DeepSeek-V3 has on 8 hosts."""


def _problems(plan: HostPlacement) -> list[Problem]:
    problems = pool_problems(plan.pool)
    if problems:
        return problems
    if (size := plan.num_layers * plan.num_experts * plan.pool.num_hosts) > MOST_CELLS:
        rule = f"has {size} places for experts, and at most {MOST_CELLS} are looked at"
        return [Problem(where="placement", value=None, rule=rule)]
    if not size:
        return [Problem(where="placement", value=None, rule="has no layer, or no expert")]
    experts = set(range(plan.num_experts))
    if not all(0 <= e < plan.num_experts for hosts in plan.slots for held in hosts for e in held):
        return [Problem(where="placement.slots", value=None, rule=f"experts are 0 ... {plan.num_experts - 1}")]
    for layer, hosts in enumerate(plan.slots):
        where = f"placement.slots[{layer}]"
        widths = tuple(len(held) for held in hosts)
        if widths != plan.pool.slots:
            problems.append(Problem(where=where, value=widths, rule=f"hosts have {plan.pool.slots} slots"))
            continue
        found = {e for held in hosts for e in held}
        if found != experts:
            wrong = sorted(found ^ experts)
            rule = f"each of the experts 0 ... {plan.num_experts - 1} needs a slot, and nothing else has one"
            problems.append(Problem(where=where, value=wrong, rule=rule))
    return problems or _sparse(plan)


def _sparse(plan: HostPlacement) -> list[Problem]:
    """Experts on fewer hosts than the floor."""
    problems = []
    for layer in range(plan.num_layers):
        where = f"placement.slots[{layer}]"
        few = np.flatnonzero((plan.copies[layer] > 0).sum(1) < plan.floor).tolist()
        if few:
            rule = f"each expert is on at least {plan.floor} hosts, so that any {plan.floor - 1} may be lost"
            problems.append(Problem(where=where, value=few, rule=rule, hint="swap adjacent copies"))
    return problems


def read_host_placement(data: Mapping[str, Any]) -> HostPlacement:
    """Reads what `to_json` writes. Raises `PlanError` with all problems."""
    try:
        hosts = data["hosts"]
        plan = HostPlacement(
            num_experts=int(data["num_experts"]),
            floor=int(data["floor"]),
            pool=HostPool(
                slots=tuple(int(s) for s in hosts["slots"]),
                racks=tuple(int(r) for r in hosts["racks"]),
                failure=tuple(float(p) for p in hosts["failure"]),
                names=tuple(int(n) for n in hosts["names"]),
            ),
            slots=tuple(tuple(tuple(int(e) for e in held) for held in layer) for layer in data["slots"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        rule = f"is not a placement on hosts: {type(error).__name__} {error}"
        raise PlanError.of("placement", None, rule, subject="placement") from error
    plan.check()
    return plan


def from_copies(copies_LEN: Copies, pool: HostPool, *, floor: int) -> HostPlacement:
    """Slots in order of experts."""
    num_experts = copies_LEN.shape[1]
    experts = np.arange(num_experts)
    slots = tuple(
        tuple(tuple(np.repeat(experts, copies[:, n]).tolist()) for n in range(pool.num_hosts)) for copies in copies_LEN
    )
    return HostPlacement(num_experts=num_experts, pool=pool, slots=slots, floor=floor)

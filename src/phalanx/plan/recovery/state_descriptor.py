"""Descriptor of the part of a run's state that a member holds, reported by the member, so that members of different generations can be put together.

Decides nothing. A descriptor names the mapping, the rank in it and, where experts have replicas, the experts in the slots of that rank; what the rank holds
follows from it (`plan/recovery/planner.py`). Must never change: a descriptor says all that is needed, whatever generation it is of, and nothing of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from phalanx.core.errors import PhalanxError, PlanError
from phalanx.core.reading import is_count, typed
from phalanx.plan.mapping import AnyPlacement, Folding, LayerPlacements, Placement


@dataclass(frozen=True, kw_only=True)
class StateDescriptor:
    """A member holds what rank `rank` of `folding` holds."""

    folding: Folding
    rank: int
    slots: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, experts in this rank's slots) of each layer with experts in its stage; empty: experts have no replicas."""
    hosts: tuple[int, ...] = ()
    """Host of each rank of the folding; empty: a host each. Counts where state is cut over ranks, and each part has holders on
    several hosts."""
    racks: tuple[int, ...] = ()
    """Rack of each rank, as `hosts`; empty: nothing is known of racks."""
    moved: int | None = None
    """Pieces of state, in the order of `RecoveryPlanner.order`, of which this is true, where a move of state was broken off; None: of all."""
    rest: StateDescriptor | None = None
    """Where the other pieces stand; None: they are not held."""

    def of(self, number: int) -> StateDescriptor | None:
        """Where piece `number` stands; None: it is not held."""
        if self.moved is None or number < self.moved:
            return self
        return None if self.rest is None else self.rest.of(number)

    @property
    def parts(self) -> Iterator[StateDescriptor]:
        """Itself, and where the pieces stand that it is not true of."""
        at: StateDescriptor | None = self
        while at is not None:
            yield at
            at = at.rest

    @property
    def newest(self) -> StateDescriptor:
        """The same as if all pieces stood where the first do."""
        return self if self.moved is None else replace(self, moved=None, rest=None)

    def kind(self, *, sharded: bool) -> Kind:
        """Standings of one kind hold the same. `sharded`: optimizer state is cut over ranks."""
        where = (self.rank,) if sharded else tuple(self.folding.coord(self.rank, a) for a in ("tp", "etp", "ep", "pp"))
        return self.folding, where, self.slots, (self.hosts, self.racks) if sharded else ((), ())

    def placement(self, num_experts: int) -> AnyPlacement | None:
        """One in which this rank has its slots; what it says of others means nothing. None: experts have no replicas."""
        if not self.slots:
            return None
        ep = self.folding.ep
        return LayerPlacements(
            layers={layer: Placement(num_experts=num_experts, slots=((held,) * ep,)) for layer, held in self.slots}
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for reports and orders: thousands of members say it of thousands of ranks, and each reads all."""
        return {
            "folding": asdict(self.folding),
            "rank": self.rank,
            "slots": [[layer, list(held)] for layer, held in self.slots],
            "hosts": _runs(self.hosts),
            "racks": _runs(self.racks),
            **({} if self.moved is None else {"moved": self.moved, "rest": self.rest and self.rest.to_dict()}),
        }


Kind = tuple[Folding, tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, ...], tuple[int, ...]]]


def read_state_descriptor(data: Mapping[str, Any]) -> StateDescriptor:
    """Reads what `to_dict` writes. Raises `PlanError` for anything else."""
    try:
        folding = Folding(**data["folding"])
        found = StateDescriptor(
            folding=folding,
            rank=int(data["rank"]),
            slots=tuple((int(layer), tuple(int(e) for e in held)) for layer, held in data["slots"]),
            hosts=_numbers(data["hosts"], ranks=folding.world),
            racks=_numbers(data["racks"], ranks=folding.world),
            moved=None if data.get("moved") is None else int(data["moved"]),
            rest=None if data.get("rest") is None else read_state_descriptor(data["rest"]),
        )
        found.folding.check()
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, PhalanxError) as error:
        rule = f"is no state descriptor of a member: {type(error).__name__} {error}"
        raise PlanError.of("state_descriptor", None, rule, subject="a member's report") from error
    if not 0 <= found.rank < found.folding.world:
        rule = f"is one of the {found.folding.world} ranks of its mapping"
        raise PlanError.of("state_descriptor.rank", found.rank, rule, subject="a member's report")
    return found


@lru_cache(maxsize=64)
def _runs(numbers: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(number, how often, in how many next numbers too) of equal ones next to each other, as ranks of a host are, and hosts of a cluster."""
    runs: list[list[int]] = []
    for number, same in groupby(numbers):
        count = len(list(same))
        if runs and runs[-1][1] == count and number == runs[-1][0] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([number, count, 1])
    return tuple((number, count, more) for number, count, more in runs)


def _numbers(said: Sequence[int | Sequence[int]], *, ranks: int) -> tuple[int, ...]:
    """Reads what `_runs` writes, and what earlier versions did: runs of one number, and numbers themselves. Raises `ValueError` where there are some, but not one for each of `ranks`."""
    runs = ((each, 1, 1) if isinstance(each, int) else each if len(each) == 3 else (*each, 1) for each in said)
    return _spread(tuple((int(number), int(count), int(more)) for number, count, more in runs), ranks)


@lru_cache(maxsize=64)
def _spread(runs: tuple[tuple[int, int, int], ...], ranks: int) -> tuple[int, ...]:
    """One object for the reports of all members, which say the same: of 4,096 they would take 130 MB."""
    total = sum(max(0, count) * max(0, more) for _, count, more in runs)
    if total not in (0, ranks):
        raise ValueError(f"{total} numbers for {ranks} ranks")
    return tuple(number + i for number, count, more in runs if count > 0 for i in range(more) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class StateReport:
    """What a member says to all members of a new generation of the state that it holds and of the process that it is."""

    descriptor: StateDescriptor | None = None
    """Where its state stands; None: it has none, or is idle."""
    then: StateDescriptor | None = None
    """Where its state stands once the step that it voted for is committed, where experts move with that step; or once the wave that it is in doubt about counts."""
    doubt: str = ""
    """The wave of a move of state that has come, of which it does not know whether all members have theirs; empty: there is none."""
    passed: str = ""
    """The last wave of which it knows that all members of its generation have it."""
    idle: bool = False
    """The mapping had no rank for it: it holds the state before the step that it voted for."""
    history: int = 0
    """Generation in which the run last went back to a checkpoint, as far as its state knows; 0: it never did."""
    host: str = ""
    """Its machine and network: the same for members whose messages need no link."""
    node: str = ""
    """Name of its machine in the network."""
    rack: str = ""
    """Rack of its machine; empty: not known."""
    kernels: str = ""
    """Kernels that it computes with."""
    flops_per_s: float = 0.0
    """Measured rate of its processor; 0: not measured."""
    watched: bool = False
    """Whether what a person watches of the run is in it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a report."""
        rest = asdict(replace(self, descriptor=None, then=None))
        descriptor, then = (None if at is None else at.to_dict() for at in (self.descriptor, self.then))
        return {**rest, "descriptor": descriptor, "then": then}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StateReport:
        """Reads what `to_dict` makes of one. Raises `PlanError` where a state descriptor is none, `MalformedError` where there are other fields."""
        table = dict(typed(data, dict[str, Any], where="about"))
        now, then = (
            None if at is None else read_state_descriptor(at)
            for at in (table.pop("descriptor", None), table.pop("then", None))
        )
        found: StateReport = typed(table, cls, where="about")
        return replace(found, descriptor=now, then=then)


def slots_of(placement: AnyPlacement, folding: Folding, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """`StateDescriptor.slots` of a rank whose stage has `placement`: nothing where that is no placement of its own for each layer."""
    if not isinstance(placement, LayerPlacements):
        return ()
    edp, ep = folding.coord(rank, "edp"), folding.coord(rank, "ep")
    return tuple((layer, of.slots[edp][ep]) for layer, of in sorted(placement.layers.items()))


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A member of a new generation, as all others know it."""

    uid: str
    machine: str
    descriptor: StateDescriptor | None
    """None: it holds nothing of use."""
    rack: str = ""
    """That its machine stands in; empty: not known."""

    @property
    def order(self) -> tuple[str, str, list[tuple[int, str]]]:
        """Sorting key by rack, by machine, then by place on it; numbers as numbers."""
        parts = self.uid.split(".")
        return self.rack, self.machine, [(int(p), "") if is_count(p) else (0, p) for p in parts]


def machines_of(facts: Sequence[Fact]) -> list[str]:
    """Machines in order: those of a rack together."""
    return [machine for _, machine in sorted({(fact.rack, fact.machine) for fact in facts})]


def domains_of(facts: Sequence[Fact]) -> dict[str, int]:
    """Failure domain of each member by its uid: its machine; where all are on one, each stands for a host, as in `plan/placement/run.py`."""
    machines = machines_of(facts)
    if len(machines) > 1:
        return {fact.uid: machines.index(fact.machine) for fact in facts}
    return {fact.uid: i for i, fact in enumerate(sorted(facts, key=lambda f: f.order))}


def racks_of(facts: Sequence[Fact]) -> dict[int, int]:
    """Failure domain (`domains_of`) -> number of its rack; a machine that names none stands in one of its own. Empty where none names any, or all are on one machine."""
    machines = machines_of(facts)
    if len(machines) < 2 or not any(fact.rack for fact in facts):
        return {}
    named = {fact.machine: (fact.rack, "" if fact.rack else fact.machine) for fact in facts}
    racks = sorted(set(named.values()))
    return {i: racks.index(named[machine]) for i, machine in enumerate(machines)}

"""Which tests a command runs, and how many cases each draws.

Three tiers. *core* is what `make test` takes: every cheap test (`CORE_S`), those marked `core`, so that each executor has one or more, and
those marked `alone`. Of the marked those that cost more (`TURN_S`) take turns: as many as fit into given minutes, by the seed of the day. *drawn* is a part of the
others that fits into given minutes, by the same seed: `.ci/run` takes some of it at each landing. *all* is everything, with every case (`PHALANX_TESTS=all`,
`make test-all`).

Costs are processor seconds of a test's process and all that it starts, over the slowness of the machine (`speed_help.py`), summed over a test's cases. What several
tests share (a fixture of a module or of the whole run) has a cost of its own, and each test that uses it counts with it: whichever is taken pays. `tests/durations.json`
keeps them, but those of tests without ranks that cost next to nothing (`NOTHING_S`), as one that was never measured does; `make durations` measures them again. The
seed is today's date unless `PHALANX_SEED` says otherwise; every run prints it.
"""

from __future__ import annotations

import datetime
import json
import os
import random
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("PHALANX_TESTS") == "all"
SEED = int(os.environ.get("PHALANX_SEED") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
UNIT_S, RANK_S = 1.0, 5.0
"""Costs from which on a test without ranks, or with ranks, is named as expensive."""
CORE_S = 1.0
"""Cost up to which a test is in the core tier by itself."""
NOTHING_S = 0.5
"""Cost up to which that of a test without ranks is not stored."""
TURN_S = 8.0
"""Cost up to which a test marked `core` is there every day."""
TURNS_UNIT_S, TURNS_RANK_S = 70.0, 45.0
"""What those of a day may cost together whose turn it is, without ranks and with ranks."""
UNKNOWN_S = 15.0
"""What a test counts whose cost is not stored: most of these are whole runs."""
DURATIONS = Path(__file__).parents[1] / "durations.json"


def times(every: int, few: int) -> int:
    """How many cases a test draws: `every` with all tests, else `few`."""
    return every if ALL else few


def some(cases: Sequence[T], few: int) -> list[T]:
    """All of them with all tests, else `few` (at most) drawn by the seed, in their order."""
    if ALL or few >= len(cases):
        return list(cases)
    kept = random.Random(SEED * 1_000_003 + len(cases)).sample(range(len(cases)), few)
    return [cases[i] for i in sorted(kept)]


def stored_costs() -> dict[str, float]:
    """Test (`FILE::FUNCTION`, below tests/) -> its cost; empty where none are stored."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def store_costs(measured: Mapping[str, float], *, known: Iterable[str]) -> None:
    """Put measured costs in place of stored ones, and drop those of tests that are not `known`."""
    costs, names = {**stored_costs(), **measured}, set(known)
    kept = {name: round(costs[name], 3) for name in sorted(costs) if name in names}
    DURATIONS.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {c}" for n, c in kept.items()) + "\n}\n")


def still_there(stored: Iterable[str], collected: Iterable[str], *, tests: Path = DURATIONS.parent) -> set[str]:
    """Names that tests have: those that were collected, and of files that were not collected those that are stored."""
    names = set(collected)
    files = {name.partition("::")[0] for name in names}
    others = (name for name in stored if name.partition("::")[0] not in files)
    return names | {name for name in others if (tests / name.partition("::")[0]).exists()}


def expensive(costs: Mapping[str, float], *, ranks: Mapping[str, bool]) -> list[str]:
    """Lines that name every test above the limit of its kind, dearest first."""
    over = [n for n, c in costs.items() if n in ranks and c > (RANK_S if ranks[n] else UNIT_S)]
    return [f"{costs[n]:8.2f}  {n}" for n in sorted(over, key=lambda n: -costs[n])]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What tests cost, by `FILE::FUNCTION`, and what each of them shares with others."""

    of: Mapping[str, float]
    shared: Mapping[str, frozenset[str]]

    def total(self, name: str, *, paid: Container[str] = ()) -> float | None:
        """Of a test and of what it shares that is not yet paid; None if it was never measured."""
        own = self.of.get(name)
        return (
            None if own is None else own + sum(self.of.get(s, 0.0) for s in self.shared.get(name, ()) if s not in paid)
        )

    def together(self, names: Collection[str]) -> float:
        """Of several tests, with what they share once."""
        each = set(names).union(*(self.shared.get(name, ()) for name in names))
        return sum(self.of.get(name, 0.0) for name in each)

    def is_nothing(self, name: str, *, ranks: bool) -> bool:
        """Whether it need not be stored: without it a test is as cheap."""
        cost = self.total(name)
        return not ranks and cost is not None and cost <= NOTHING_S

    def is_cheap(self, name: str, *, ranks: bool) -> bool:
        """Whether a test is in the core tier by its cost. One that was never measured is if it launches no ranks."""
        cost = self.total(name)
        return not ranks if cost is None else cost <= CORE_S

    def takes_turns(self, name: str) -> bool:
        """Whether a test marked `core` costs too much for every day."""
        cost = self.total(name)
        return (UNKNOWN_S if cost is None else cost) > TURN_S

    def draw(self, names: Iterable[str], *, budget_s: float, seed: int) -> set[str]:
        """Tests in an order of the seed's, as far as their costs fit into the budget. One of unknown cost counts `UNKNOWN_S`."""
        order = sorted(names)
        random.Random(seed).shuffle(order)
        drawn, paid, spent = set[str](), set[str](), 0.0
        for name in order:
            cost = self.total(name, paid=paid)
            cost = UNKNOWN_S if cost is None else cost
            if spent + cost <= budget_s:
                drawn.add(name)
                paid |= self.shared.get(name, frozenset())
                spent += cost
        return drawn


def tree_cpu_s() -> float:
    """Processor seconds of this process, of its living descendants, and of those that they have waited for."""
    ticks, parents = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(fields[1])
            ticks[int(entry)] = sum(map(int, fields[11:15]))
    mine, total = os.getpid(), 0
    for pid in ticks:
        at = pid
        while at != mine and at in parents:
            at = parents[at]
        total += ticks[pid] if at == mine else 0
    return total / os.sysconf("SC_CLK_TCK")

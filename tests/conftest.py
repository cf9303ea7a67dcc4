"""What holds for every test: one compute thread, so that tests, forked ranks and lanes share two cores without waiting for each other; tiers by cost; the day's seed."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import tiers
from hypothesis import HealthCheck, settings
from speed_help import slowness

# A machine that is busy beside the tests draws examples slowly; that says nothing about them.
settings.register_profile("phalanx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("phalanx")

# Before anything imports Triton: its kernels run in its interpreter here. TRITON_INTERPRET=0 with a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
if (
    os.environ["TRITON_INTERPRET"] == "1"
):  # ranks are processes on processors, also on a machine with GPUs (launch.device = "auto")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("PHALANX_SEED", str(tiers.SEED))


# A shell starts what it runs beside itself (scripts/tests.sh) with Ctrl-C ignored, and programs that tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and `nohup` a closed terminal

COSTS = pytest.StashKey[dict[str, float]]()
RANKS = pytest.StashKey[dict[str, bool]]()
SHARED = pytest.StashKey[dict[str, frozenset[str]]]()
LEFT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phalanx")
    group.addoption(
        "--tier", choices=("core", "drawn", "all"), default="all", help="which tests (tests/helpers/tiers.py)"
    )
    group.addoption("--minutes", type=float, default=12.0, help="with --tier drawn: processor minutes of tests")
    group.addoption("--store-durations", action="store_true", help="write what each test costs to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(tiers.SEED)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed {tiers.SEED} (PHALANX_SEED={tiers.SEED} draws the same cases), tier {config.option.tier}"


def name_of(item: pytest.Item) -> str:
    """`FILE::FUNCTION` below tests/: one name for all cases of a test."""
    return item.nodeid.removeprefix("tests/").partition("[")[0]


def name_of_shared(fixture: pytest.FixtureDef[Any]) -> str:
    """`FILE::NAME (shared)` of a fixture that is made once for several tests."""
    return f"{fixture.baseid.removeprefix('tests/')}::{fixture.argname} (shared)"


def shared_by(item: pytest.Item) -> frozenset[str]:
    """What a test shares with others of our tests; pytest's own costs nothing."""
    known = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    return frozenset(name_of_shared(f) for defs in known for f in defs if f.scope != "function" and f.baseid)


def launches_ranks(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in ("ranks", "testbed"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranks = config.stash[RANKS] = {name_of(item): launches_ranks(item) for item in items}
    shared = config.stash[SHARED] = {name_of(item): shared_by(item) for item in items}
    config.stash[COSTS], config.stash[LEFT] = defaultdict(float), []
    for item in items:
        alone = item.get_closest_marker("alone")
        if alone is not None and not alone.args:
            raise pytest.UsageError(f"{item.nodeid}: `alone` needs its reason: @pytest.mark.alone('measures ...')")
    costs = tiers.Costs(of=tiers.stored_costs(), shared=shared)
    if config.option.tier == "all":
        dearest_file_first(items, costs)
        return

    def is_marked(item: pytest.Item) -> bool:
        """To be in the core tier whatever its cost, or if its turn comes."""
        return item.get_closest_marker("core") is not None and item.get_closest_marker("slow") is None

    dear = {name for name in ranks if not costs.is_cheap(name, ranks=ranks[name])}
    turns = {n for item in items if is_marked(item) and (n := name_of(item)) in dear and costs.takes_turns(n)}
    today = set[str]()
    for kind, budget_s in ((False, tiers.TURNS_UNIT_S), (True, tiers.TURNS_RANK_S)):
        today |= costs.draw((n for n in turns if ranks[n] is kind), budget_s=budget_s, seed=tiers.SEED)

    def is_core(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow"):
            return False
        name = name_of(item)
        if item.get_closest_marker("alone") or name not in dear:
            return True
        return is_marked(item) and (name in today or name not in turns)

    if config.option.tier == "core":
        kept = [item for item in items if is_core(item)]
    else:
        others = [item for item in items if not is_core(item)]
        names = {name_of(item) for item in others}
        drawn = costs.draw(names, budget_s=60 * config.option.minutes, seed=tiers.SEED)
        kept = [item for item in others if name_of(item) in drawn]
        config.stash[LEFT] = sorted(names - drawn)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
    dearest_file_first(items, costs)


def dearest_file_first(items: list[pytest.Item], costs: tiers.Costs) -> None:
    """Let processes that take file by file end together: what comes last is cheap."""
    of_file = defaultdict[str, set[str]](set)
    for item in items:
        of_file[item.nodeid.partition("::")[0]].add(name_of(item))
    cost = {file: costs.together(names) for file, names in of_file.items()}
    items.sort(key=lambda item: -cost[item.nodeid.partition("::")[0]])


class Spent:
    """Processor seconds since it was made, over the slowness of the machine."""

    def __init__(self) -> None:
        self._before, self._slow = tiers.tree_cpu_s(), slowness()

    def seconds(self) -> float:
        spent = max(0.0, tiers.tree_cpu_s() - self._before)  # a process left to another parent takes its seconds along
        return spent / max(self._slow, slowness())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.config.option.store_durations:
        return (yield)
    costs, spent = item.config.stash[COSTS], Spent()
    before_s = sum(costs[name] for name in item.config.stash[SHARED][name_of(item)])
    result = yield
    shared_s = sum(costs[name] for name in item.config.stash[SHARED][name_of(item)]) - before_s
    costs[name_of(item)] += max(0.0, spent.seconds() - shared_s)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    if not request.config.option.store_durations or fixturedef.scope == "function" or not fixturedef.baseid:
        return (yield)
    spent = Spent()
    result = yield
    request.config.stash[COSTS][name_of_shared(fixturedef)] += spent.seconds()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section(f"{len(left)} tests of other tiers were not drawn today (seed {tiers.SEED})")
        for name in left:
            terminalreporter.line(f"  {name}")
    if config.option.store_durations:
        costs = config.stash[COSTS]
        whole = not any("::" in word for word in config.args)  # else the other tests of a file were not looked at
        ranks, shared, stored = config.stash[RANKS], config.stash[SHARED], tiers.stored_costs()
        collected = {*ranks, *chain(*shared.values())} if whole else ()
        every = tiers.Costs(of={**stored, **costs}, shared=shared)
        nothing = {name for name in ranks if every.is_nothing(name, ranks=ranks[name])}
        tiers.store_costs(costs, known={*costs, *tiers.still_there(stored, collected)} - nothing)
        terminalreporter.section("expensive tests: without ranks above 1, with ranks above 5 processor seconds")
        for line in tiers.expensive(costs, ranks=config.stash[RANKS]):
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before each test: one that runs a command in this process may have left more, and with them a process that is forked from here hangs in its first product."""
    import torch

    torch.set_num_threads(1)

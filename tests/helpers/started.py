"""A run as `phalanx train` starts it, with every process but those of a pool of ranks left out, and what can be seen of it.

`cli.train.start` decides and builds as always. In the place of new processes the ranks of the pool go on themselves: as ranks of a fixed world, or as members of an elastic
run whose one generation always commits. What is seen: what anybody could observe (events, what is traced, printed and written, state of torch), and what is only handed on: arguments of the start,
and everything that the trainer is made of, but for the recipe itself. What ranks decide by measured seconds they decide by fixed ones here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import io
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from phalanx.cli.launching import Request, read_recipe
from phalanx.cli.train import start
from phalanx.core import config
from phalanx.core.errors import PhalanxError
from phalanx.core.events import Collective, Event, Operation
from phalanx.observe.sinks import Sinks, open_sinks
from phalanx.plan.placement import Costs
from phalanx.runtime import processes
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.progress import RankProgress
from phalanx.runtime.membership.member import resolve_now, run_steps
from phalanx.runtime.membership.membership import Generation, Member
from phalanx.runtime.membership.rendezvous import GroupEpoch
from phalanx.runtime.membership.steps import GO_ON
from phalanx.runtime.membership.votes import MemberReport
from phalanx.runtime.processes import launch
from phalanx.runtime.processes.world import WorldInfo
from phalanx.train import loop, run
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.recovery import elastic, run as recovery_run
from phalanx.train.setup import rank as setup
from phalanx.train.setup.run_folder import RunFolder
from phalanx.train.step import warmup

Seen = dict[str, str]

MEASURED = re.compile(
    r"(?<!wait)_s$|mfu|memory|seconds|bytes$|waited|clock|slowness|streaks|recipe_hash|^reused$|_outcomes|_owner$|_at$|_checkpoint$|^kept$"
)
"""Fields of events and attributes that differ from run to run: they hold what a machine took, or (`kept`, of an `ElasticRun`) whether another rank of the pool had written the recipe by then."""
TAKEN = re.compile("_s$")
FIGURES = re.compile(r" *[0-9][0-9.,]*( ?[a-zA-Z/%]+)?")
"""In what is printed: with their units, which follow the size, and with what fills up their column."""
OBSERVED = ("event ", "file ", "traced ", "printed", "served", "torch")
"""How the keys begin of what anybody could observe."""
PASS_S = 1e-3
"""What each pass of a pipeline and each transfer takes, for those who decide by it."""
MEASURED_COSTS = Rebalancer._costs
COSTS = {"row_s": 1.0, "bytes_per_s": 1e9, "rebuild_s": 1e-3}
"""What moving experts costs: little beside what it gains."""
UNSEEN = {
    *(t.__name__ for t in vars(config).values() if dataclasses.is_dataclass(t)),
    "MemoryMeter", "Prefetch", "PassTimes", "ExchangeTimes", "LayerTimes", "AbortableCall", "JsonlSink", "HelperProcess",
    "_Reduced", "Thread", "GroupCache", "ProcessGroup", "Tuner", "PeerQuestions", "_Wait",
}  # fmt: skip
"""Types that are not looked into: the recipe, which would always differ, and what is of one process or one moment."""


def seen_of(words: list[str], *, rank: int, cache: GroupCache, folder: Path) -> Seen:
    """Start a run with these overrides on the ranks of a pool; everything that is seen of it. Collective. Raises what the start raises.

    `folder` is this run's own, and named nowhere in the result.
    """
    seen, events, printed = dict[str, str](), list[Event](), io.StringIO()
    request = Request(recipe_path=None, overrides=tuple(words), dry_run=False)
    with contextlib.redirect_stdout(printed), _processes_left_out(rank, cache, seen, events):
        start(read_recipe(request, world=None), {})
    assert any(key.startswith(("ranks", "supervisor")) for key in seen), "processes were not left out"
    seen["printed"] = "\n".join(sorted(FIGURES.sub("#", printed.getvalue()).splitlines()))
    # lines in no order, and events by kind: a checkpoint that is written beside the steps is told between any two of them
    traced = collections.Counter(_traced(e) for e in events if isinstance(e, Collective | Operation))
    seen.update({f"traced {text}": str(times) for text, times in traced.items()})
    counted = collections.Counter[str]()
    for event in (e for e in events if not isinstance(e, Collective | Operation)):
        kind = type(event).__name__
        counted[kind] += 1
        fields = {k: v for k, v in vars(event).items() if not MEASURED.search(k)}
        _walk(fields, f"event {kind} {counted[kind]}", seen, {})
    files = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    names = collections.Counter(re.sub(r"[0-9a-f]{6,}|[0-9]{3,}.*", "#", name) for name in files)
    seen.update({f"file {name}": str(count) for name, count in names.items()})
    seen.update({f"file mode {p.name}": oct(p.stat().st_mode) for p in folder.glob("*/*") if p.is_dir()})
    return {key: text.replace(str(folder), "~") for key, text in seen.items()}


def _traced(event: Collective | Operation) -> str:
    return f"{type(event).__name__} " + " ".join(f"{k}={v}" for k, v in vars(event).items() if not TAKEN.search(k))


@contextlib.contextmanager
def _processes_left_out(rank: int, cache: GroupCache, seen: Seen, events: list[Event]) -> Iterator[None]:
    made: list[dist.ProcessGroup] = []
    told, close = Sinks.__call__, loop.Trainer.close

    def own_group(world: int, **words: Any) -> Any:
        made.append(dist.new_group(list(range(world))))
        return made[-1]

    def init_world(info: WorldInfo, *given: Any, **words: Any) -> torch.device:
        _walk((given, words), "world", seen, {})
        return torch.device("cpu")

    def run_local(main: Any, **words: Any) -> int:
        _walk((main, words), "ranks", seen, {})
        info = WorldInfo(rank=rank, world=dist.get_world_size(), local_rank=rank, local_world=dist.get_world_size())
        return int(main(info, launch.StopRequest()))

    def supervise(main: Any, *given: Any, tell: Any, **words: Any) -> Any:
        _walk((given, words), "supervisor", seen, {})
        return types.SimpleNamespace(run=lambda: main(_Agent(f"local.{rank}")))

    def telling(self: Sinks, event: Event, /) -> None:
        events.append(event)
        told(self, event)

    def closing(self: loop.Trainer, **words: Any) -> Any:
        _walk(self, "trainer", seen, {})
        seen["served"] = _listeners(self.rank.recipe.observe.prometheus_port or 0)
        seen["torch"] = f"{torch.get_num_threads()} threads, deterministic {torch.get_deterministic_debug_mode()}"
        return close(self, **words)

    patches: dict[Any, dict[str, Any]] = {
        processes: {"run_local": run_local},
        setup: {"init_world": init_world, "own_group": own_group},
        run: {"own_group": own_group, "close_world": lambda: None},
        recovery_run: {
            "Supervisor": supervise,
            "run_member": functools.partial(_one_generation, cache),
            "RunHosts": type("Hosts", (_Hosts,), {"seen": seen}),
            "own_device": init_world,
            "open_sinks": _open_sinks,
            "start_network_store": lambda host, port: types.SimpleNamespace(address=f"a store kept at {host}:{port}"),
            "run_at": lambda service, *, wanted: (wanted, False),
            "expect_service": lambda *_, **__: None,
        },
        RunFolder: {"lock": lambda self: io.StringIO()},
        loop: {"matmul_flops_per_s": lambda *_, **__: 1e9},
        elastic: {"matmul_flops_per_s": lambda *_, **__: 1e9},
        Sinks: {"__call__": telling},
        loop.Trainer: {"close": closing},
        warmup: {"transfer_seconds": lambda *_, **__: PASS_S},
        warmup.PassTimes: {"median_s": lambda self, kind: PASS_S},
        Rebalancer: {"_costs": _fixed_costs},
    }
    with contextlib.ExitStack() as stack:
        for owner, names in patches.items():
            for name, new in names.items():
                stack.enter_context(mock.patch.object(owner, name, new))
        try:
            yield
        finally:
            torch.set_num_threads(1)
            setup.be_deterministic(False)
            for group in made:
                dist.destroy_process_group(group)


def _listeners(port: int) -> str:
    """Addresses of this machine at which somebody listens on that port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return " ".join(row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}"))


def _fixed_costs(self: Rebalancer, parts: Any, told: Any) -> Costs:
    return dataclasses.replace(MEASURED_COSTS(self, parts, told), **COSTS)


def _open_sinks(*given: Any, **words: Any) -> Sinks:
    """Where one rank cannot open its own none goes on: nobody would wait for it."""
    opened, wrong = None, None
    try:
        opened = open_sinks(*given, **words)
    except PhalanxError as err:
        wrong = err
    told: list[PhalanxError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    for found in told:
        if found is not None:
            raise found
    assert opened is not None
    return opened


class _Agent:
    """What a worker asks of its place in a run that nobody joins."""

    def __init__(self, uid: str) -> None:
        self.uid, self.progress = uid, RankProgress()

    def under_way(self) -> bool:
        return False

    def announce(self, **words: str) -> None:
        """Nobody else is told."""


class _Hosts:
    """In the place of `RunHosts`: nobody else has a claim on the folder."""

    seen: Seen

    def __init__(self, folder: RunFolder, **words: Any) -> None:
        _walk(words, "hosts", self.seen, {})

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def first_place(self, ranks: int) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""


class _Groups(GroupCache):
    """Of a team: those that the pool has already."""

    def __init__(self, cache: GroupCache) -> None:
        super().__init__()
        vars(self).update(vars(cache))

    def all(self) -> tuple[Any, ...]:
        return ()


def _one_generation(
    cache: GroupCache, agent: _Agent, body: elastic.ElasticMember, *, tell: Any, order: Any, thread: Any
) -> str:
    """In the place of `run_member`: all ranks are there, none is ever lost, every step is committed."""
    names = [f"local.{i}" for i in range(dist.get_world_size())]
    generation = Generation(number=1, epoch="life", members=tuple(Member(name, "local") for name in names))
    told: list[Any] = [None] * len(names)
    dist.all_gather_object(told, body.describe()[1])
    reports = [
        MemberReport(uid=name, step=0, holds=False, about=about) for name, about in zip(names, told, strict=True)
    ]
    uids = order(generation, reports)
    team = GroupEpoch(generation, agent.uid, timeout_s=60, uids=uids, reports=reports)
    team.groups = _Groups(cache)  # type: ignore[assignment]
    body.enter(team, resolve_now(team, 0))

    def step() -> Any:
        body.compute()
        body.commit()
        return GO_ON

    run_steps(body, step)
    body.close(stopped=False)
    body.leave_epoch()
    return "finished"


# ---- what is seen ----------------------------------------------------------------------------------------------------


def _walk(value: Any, path: str, seen: Seen, been: dict[int, object]) -> None:
    """Write down every plain value that can be reached from `value`, by the way that leads to it. `been` keeps what was looked at, so that nothing new gets its id."""
    name = type(value).__name__
    if value is None or isinstance(value, bool | int | float | str | bytes | PurePath | enum.Enum):
        seen[path] = repr(value)
    elif isinstance(value, torch.dtype | torch.device | range):
        seen[path] = str(value)
    elif isinstance(value, torch.Tensor | np.ndarray):
        seen[path] = f"{value.dtype} {tuple(value.shape)}"
    elif id(value) in been or name in UNSEEN:
        return
    else:
        been[id(value)] = value
        for key, part in _parts_of(value):
            if not (path.startswith(("event", "trainer")) and MEASURED.search(key.rsplit(".", 1)[-1])):
                _walk(part, f"{path}.{key}", seen, been)
        seen[path] = name


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, set | frozenset):
        yield from (("", repr(part)) for part in sorted(value, key=repr))
    elif isinstance(value, list | tuple):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("name", value.__name__))
    elif isinstance(value, types.FunctionType):
        yield "function", value.__qualname__
    elif type(value).__module__.startswith("phalanx"):
        # a cached property follows from the rest, and is there once anybody, also a thread beside this one, has asked for it
        cached = functools.cached_property
        fields = dict(getattr(value, "__dict__", {}))
        yield from ((k, v) for k, v in fields.items() if not isinstance(getattr(type(value), k, None), cached))
        yield from ((slot, getattr(value, slot, None)) for slot in getattr(type(value), "__slots__", ()))

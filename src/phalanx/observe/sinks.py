"""Where events go: the sinks of a run, opened from its recipe and called as one `Emit`.

Decides which rank has which sink: every rank its event log, one of them everything that a person watches: rank 0, and where its host is lost another one that takes
its place (`Sinks.take_place`). Must never change: a sink that fails warns once and never stops training, and the others still get every event; but a sink that cannot be
opened (a missing extra, a port in use) is a problem of the recipe and is reported before training starts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console

from phalanx.core.config import ObserveConfig
from phalanx.core.errors import (
    ConfigError,
    PhalanxError,
    Problem,
    RunError,
    first_line,
    nearest,
    not_installed,
    raise_if,
)
from phalanx.core.events import Event, Note, RunStarted
from phalanx.core.extensions import extensions
from phalanx.core.process import is_installed, say
from phalanx.observe.console import ConsoleSink, wants_live
from phalanx.observe.event_log import JsonlSink, encode, log_path
from phalanx.observe.index import IndexSink

GIVE_UP_AFTER = 20
"""Failures in a row after which a sink is no longer called: a dead network must not cost a timeout every step."""
OPENING_EVENTS = 1000
"""Events that are kept for sinks that open while training continues; later ones are in the event log alone."""
PLACE_S = 10.0
"""How long the place of a rank that is lost stays free: its host may start it anew, and then goes on with its own."""

OWN = {"mlflow": ("project", "uri"), "trackio": ("project", "space")}
"""Names in `observe.sinks` that are ours, with their options; also the names of packages and extras, which are imported when a sink is opened."""


class Sink(Protocol):
    """Takes events one at a time; calls never overlap."""

    name: str

    def write(self, event: Event, /) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Each event as a line of JSON on standard output, for the program that started this one."""

    name = "standard output"

    def write(self, event: Event) -> None:
        sys.stdout.buffer.write(encode(event, time_s=time.time()))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Standard output stays open: it is the process's."""


class Sinks:
    """All sinks of one rank behind one `Emit`. Threads may share it."""

    def __init__(self, sinks: Sequence[Sink], *, watched: bool = False) -> None:
        """`watched`: what a person watches is among them."""
        self._sinks = list(sinks)
        self._failures = dict.fromkeys((s.name for s in sinks), 0)
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._started: RunStarted | None = None
        self._watched, self._taken = watched, False
        self._not_needed = threading.Event()
        self._waiting: list[Event] | None = None
        """Events for the sinks that open; None: none does."""
        self._added: Sequence[Sink] = ()

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            if isinstance(event, RunStarted):
                self._started = event
            if self._waiting is not None and len(self._waiting) < OPENING_EVENTS:
                self._waiting.append(event)
            for sink in tuple(self._sinks):
                self._guarded(sink, partial(sink.write, event))

    @property
    def has_screen(self) -> bool:
        """Whether a person sees what is emitted here."""
        return any(isinstance(sink, ConsoleSink | JsonLines) for sink in self._sinks)

    @property
    def is_watched(self) -> bool:
        """Whether what a person watches is here, or being opened."""
        return self._watched or self._taken

    @property
    def has_taken_place(self) -> bool:
        """Whether it is here in the place of another rank's."""
        return self._taken

    def take_place(self, open_watched: Callable[[], Sequence[Sink]]) -> None:
        """Opens what a person watches in the place of a rank that is lost, in a thread, after `PLACE_S`. It is told how the run started, and all events from now on."""
        with self._lock:
            if self.is_watched:
                return
            self._taken, self._not_needed = True, threading.Event()
            self._waiting = [] if self._started is None else [self._started]
            args = (open_watched, self._not_needed)
            threading.Thread(target=self._open, args=args, name="sinks", daemon=True).start()

    def _open(self, open_watched: Callable[[], Sequence[Sink]], not_needed: threading.Event) -> None:
        added: Sequence[Sink] = ()
        try:
            if not not_needed.wait(PLACE_S):
                added = open_watched()
        except PhalanxError as error:
            warn_without_screen(str(error))
        with self._lock:
            if not_needed.is_set():
                _close_aside(added)
                return
            self._failures |= dict.fromkeys((s.name for s in added), 0)
            self._sinks += added
            self._added = added
            for event in self._waiting or ():
                for sink in added:
                    self._guarded(sink, partial(sink.write, event))
            self._waiting = None

    def give_place_back(self) -> None:
        """Closes what `take_place` opened: the other rank is back."""
        with self._lock:
            self._not_needed.set()
            self._taken, self._waiting = False, None
            self._sinks = [sink for sink in self._sinks if sink not in self._added]
            _close_aside(self._added)
            self._added = ()

    def close(self) -> None:
        """Close every sink; the second call does nothing."""
        with self._lock:
            self._not_needed.set()
            while self._sinks:
                sink = self._sinks.pop()
                self._guarded(sink, sink.close)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _guarded(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
            self._failures[sink.name] = 0
        except (Exception, SystemExit) as caught:
            error: BaseException | None = caught
            if isinstance(caught, SystemExit):
                error = caught.__context__
                if not isinstance(error, BrokenPipeError):  # rich ends so where nobody reads the output any more
                    raise
            self._failures[sink.name] += 1
            if self._failures[sink.name] >= GIVE_UP_AFTER and sink in self._sinks:
                self._sinks.remove(sink)
            if sink.name not in self._warned:
                self._warned.add(sink.name)
                self._warn(
                    sink, f"{sink.name} does not work ({type(error).__name__}: {error}); training continues without it"
                )

    def _warn(self, broken: Sink, text: str) -> None:
        """Tell a person once: through the sinks that work, and on standard error where none of them is a screen."""
        others = [s for s in self._sinks if s is not broken and s.name not in self._warned]
        for sink in others:
            self._guarded(sink, partial(sink.write, Note(level="warning", text=text)))
        if not any(isinstance(s, ConsoleSink | JsonLines) for s in others):
            warn_without_screen(text)


def _close_aside(sinks: Sequence[Sink]) -> None:
    """Nobody waits for a network that some of them speak to."""

    def close() -> None:
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                warn_without_screen(f"{sink.name} could not be closed ({type(error).__name__}: {error})")

    threading.Thread(target=close, name="sinks", daemon=True).start()


def warn_without_screen(text: str) -> None:
    """Warns a person, from a process whose sinks show nothing."""
    say(f"phalanx: warning: {text}")


def sink_problems(config: ObserveConfig) -> list[Problem]:
    """What is wrong with the sinks that the recipe asks for, as far as that is known before one is opened."""
    problems = _package_problems(config)
    for where, text in _named(config).items():
        try:
            _opener(text, where)
        except ConfigError as error:
            problems += error.problems
    return problems


def _package_problems(config: ObserveConfig) -> list[Problem]:
    """Sinks with settings of their own whose package this installation does not have."""
    wanted = {
        "observe.wandb_project": (config.wandb_project, "wandb", "wandb"),
        "observe.prometheus_port": (config.prometheus_port, "prometheus_client", "prometheus"),
    }
    return [
        not_installed(where, value, package, extra=extra, instead=f"leave {where} out")
        for where, (value, package, extra) in wanted.items()
        if value is not None and not is_installed(package)
    ]


def _named(config: ObserveConfig) -> dict[str, str]:
    return {f"observe.sinks[{number}]": text for number, text in enumerate(config.sinks or ())}


def open_added(config: ObserveConfig, folder: Path) -> tuple[list[Sink], list[Problem]]:
    """Sinks that `observe.sinks` names: those of `OWN`, and those of installed packages (entry points of `phalanx.sinks`: functions of the run folder and options that return a `Sink`); and what is wrong with them."""
    opened: list[Sink] = []
    problems: list[Problem] = []
    for where, text in _named(config).items():
        try:
            opened.append(_added(text, where, folder))
        except ConfigError as error:
            problems += error.problems
    return opened, problems


def parse_sink(text: str, where: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:key=value,key=value`. Raises `ConfigError`."""
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals or not key or key in options:
            rule = "must be a name, and after a colon options key=value, each key once"
            raise ConfigError.of(where, text, rule, f"use {name}, or {name}:key=value")
        options[key] = value
    return name, options


def _added(text: str, where: str, folder: Path) -> Sink:
    name, package, make = _opener(text, where)
    try:
        sink = make(folder)
        for method in ("write", "close"):
            getattr(sink, method)
        sink.name = str(getattr(sink, "name", name))
    except ConfigError:
        raise
    except Exception as error:  # of a stranger's sink, or package
        rule = f"cannot be opened by {package} ({type(error).__name__}: {first_line(error)})"
        raise ConfigError.of(where, name, rule, "leave it out, or repair the package") from error
    return sink


def _opener(text: str, where: str) -> tuple[str, str, Callable[[Path], Sink]]:
    """Name, package, and how to open the sink in a run folder. Raises `ConfigError` where it is not known, not installed, or one of `OWN` that does not know an option."""
    name, options = parse_sink(text, where)
    known = extensions("sinks", taken=OWN)
    if name in known:
        make = known[name].load()
        return name, known[name].package, lambda folder: make(folder, options)
    if name not in OWN:
        rule = "is no sink of Phalanx, and none that an installed package gives"
        raise ConfigError.of(where, name, rule, nearest(name, [*OWN, *known]))
    if not is_installed(name):
        raise ConfigError([not_installed(where, name, name, extra=name, instead="leave it out")])
    if wrong := sorted(options.keys() - set(OWN[name])):
        rule = f"is no option of {name}"
        raise ConfigError([Problem(where=where, value=key, rule=rule, hint=nearest(key, OWN[name])) for key in wrong])
    return name, name, lambda folder: _own_class(name)(folder, options)


def _own_class(name: str) -> Callable[[Path, Mapping[str, str]], Sink]:
    """A class of `OWN`. Imports its package."""
    if name == "trackio":
        from phalanx.observe.trackio import TrackioSink

        return TrackioSink
    from phalanx.observe.mlflow import MlflowSink

    return MlflowSink


def open_sinks(
    config: ObserveConfig, *, folder: Path, rank: int, console: Console | None = None, patient: bool = False
) -> Sinks:
    """The sinks of `rank` for the run in `folder`. `patient`: this process takes the place of another one of a running job, which may still have the port of
    Prometheus; that is told, and tried again.

    Raises `ConfigError` with all sinks that cannot be opened, `RunError` where the run folder cannot be written.
    """
    try:
        log = JsonlSink(folder, rank=rank)
    except OSError as error:
        path = log_path(folder, rank)
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another run.folder") from error
    if rank != 0:
        return Sinks([log])
    try:
        opened = open_watched(config, folder=folder, console=console, patient=patient)
    except ConfigError:
        log.close()
        raise
    sinks = Sinks([log, *opened], watched=True)
    for missing in filter(None, (getattr(sink, "missing", "") for sink in opened)):
        text = f"metrics are not served at {missing}: the process that had the port before may still have it; it will be tried again while training continues"
        sinks(Note(level="warning", text=text))
    return sinks


def open_watched(
    config: ObserveConfig, *, folder: Path, console: Console | None = None, patient: bool = False
) -> list[Sink]:
    """What a person watches of the run in `folder`, and its index: all that the recipe asks for. Raises `ConfigError` with all of it that cannot be opened."""
    opened, problems = open_added(config, folder)
    problems += _package_problems(config)
    lacking = {p.where for p in problems}
    for setting, make in _rank_zero(config, folder, console, patient=patient).items():
        try:
            if setting not in lacking:
                opened.append(make())
        except ConfigError as error:
            problems += error.problems
    if problems:
        Sinks(opened).close()
    raise_if(problems, ConfigError, subject="the recipe")
    return [IndexSink(folder), *opened]


def _rank_zero(
    config: ObserveConfig, folder: Path, console: Console | None, *, patient: bool
) -> dict[str, Callable[[], Sink]]:
    """Setting -> how to open its sink, for those that the recipe wants. Their packages are imported when they are opened."""

    def tensorboard() -> Sink:
        from phalanx.observe.tensorboard import TensorBoardSink

        return TensorBoardSink(folder / "tensorboard")

    def wandb() -> Sink:
        from phalanx.observe.wandb import WandbSink

        return WandbSink(folder, project=config.wandb_project or "", mode=config.wandb_mode or "online")

    def prometheus() -> Sink:
        from phalanx.observe.prometheus import PrometheusSink

        address = config.prometheus_address or "127.0.0.1"
        return PrometheusSink(run=folder.name, port=config.prometheus_port or 0, address=address, patient=patient)

    def screen() -> Sink:
        if config.console == "json":
            return JsonLines()
        terminal = console if console is not None else Console()
        return ConsoleSink(terminal, live=wants_live(config, terminal), log_interval=config.log_interval, folder=folder)

    # the console last: while sinks open, messages of their packages must not tear its display
    wanted = {
        "observe.tensorboard": (config.tensorboard, tensorboard),
        "observe.wandb_project": (config.wandb_project is not None, wandb),
        "observe.prometheus_port": (config.prometheus_port is not None, prometheus),
        "observe.console": (config.console != "none", screen),
    }
    return {setting: make for setting, (on, make) in wanted.items() if on}

"""Where events go: the sinks of a run, opened from its recipe and called as one `Emit`.

Decides which rank has which sink: every rank its event log, rank 0 everything that a person watches. Must never change: a sink that
fails warns once and never stops training, and the others still get every event; but a sink that cannot be opened (a missing extra, a
port in use) is a problem of the recipe and is reported before training starts.
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
from phalanx.core.errors import ConfigError, Problem, RunError, first_line, install_extra, nearest, raise_if
from phalanx.core.events import Event, Note
from phalanx.core.extensions import extensions
from phalanx.core.process import is_installed, say
from phalanx.observe.console import ConsoleSink, wants_live
from phalanx.observe.event_log import JsonlSink, encode, log_path
from phalanx.observe.index import IndexSink

GIVE_UP_AFTER = 20
"""Failures in a row after which a sink is no longer called: a dead network must not cost a timeout every step."""

OWN = ("mlflow", "trackio")
"""Names in `observe.sinks` that are ours; also the names of packages and extras, which are imported when a sink is opened."""


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

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failures = dict.fromkeys((s.name for s in sinks), 0)
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            for sink in tuple(self._sinks):
                self._guarded(sink, partial(sink.write, event))

    @property
    def has_screen(self) -> bool:
        """Whether a person sees what is emitted here."""
        return any(isinstance(sink, ConsoleSink | JsonLines) for sink in self._sinks)

    def close(self) -> None:
        """Close every sink; the second call does nothing."""
        with self._lock:
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
        except Exception as error:
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


def warn_without_screen(text: str) -> None:
    """Warns a person, from a process whose sinks show nothing."""
    say(f"phalanx: warning: {text}")


def sink_problems(config: ObserveConfig) -> list[Problem]:
    """Sinks that the recipe asks for and this installation does not have."""
    wanted = {
        "observe.wandb_project": (config.wandb_project, "wandb", "wandb"),
        "observe.prometheus_port": (config.prometheus_port, "prometheus_client", "prometheus"),
    }
    return [
        Problem(
            where=where,
            value=value,
            rule=f"needs the package {package}, which is not installed",
            hint=f"{install_extra(extra)}; or leave {where} out",
        )
        for where, (value, package, extra) in wanted.items()
        if value is not None and not is_installed(package)
    ]


def open_added(config: ObserveConfig, folder: Path) -> tuple[list[Sink], list[Problem]]:
    """Sinks that `observe.sinks` names: those of `OWN`, and those of installed packages (entry points of `phalanx.sinks`: functions of the run folder and options that return a `Sink`); and what is wrong with them."""
    opened: list[Sink] = []
    problems: list[Problem] = []
    for number, text in enumerate(config.sinks or ()):
        where = f"observe.sinks[{number}]"
        try:
            name, options = parse_sink(text, where)
            opened.append(_added(name, options, where=where, folder=folder))
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
            raise ConfigError([Problem(where=where, value=text, rule=rule, hint=f"use {name}, or {name}:key=value")])
        options[key] = value
    return name, options


def _added(name: str, options: dict[str, str], *, where: str, folder: Path) -> Sink:
    known = extensions("sinks", taken=OWN)
    if name not in known and name not in OWN:
        rule = "is no sink of Phalanx, and none that an installed package gives"
        raise ConfigError([Problem(where=where, value=name, rule=rule, hint=nearest(name, [*OWN, *known]))])
    package = known[name].package if name in known else name
    try:
        sink = known[name].load()(folder, options) if name in known else _own(name, options, where, folder)
        for method in ("write", "close"):
            getattr(sink, method)
        sink.name = str(getattr(sink, "name", name))
    except ConfigError:
        raise
    except Exception as error:  # of a stranger's sink, or package
        rule = f"cannot be opened by {package} ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(
            [Problem(where=where, value=name, rule=rule, hint="leave it out, or repair the package")]
        ) from error
    return sink


def _own(name: str, options: dict[str, str], where: str, folder: Path) -> Sink:
    """A sink of `OWN`. Raises `ConfigError` where its package is not there, or does not know an option."""
    if not is_installed(name):
        rule, hint = f"needs the package {name}, which is not installed", f"{install_extra(name)}; or leave it out"
        raise ConfigError([Problem(where=where, value=name, rule=rule, hint=hint)])
    make, known = _own_class(name)
    if wrong := sorted(options.keys() - set(known)):
        rule = f"is no option of {name}"
        raise ConfigError([Problem(where=where, value=key, rule=rule, hint=nearest(key, known)) for key in wrong])  # fmt: skip
    return make(folder, options)


def _own_class(name: str) -> tuple[Callable[[Path, Mapping[str, str]], Sink], Sequence[str]]:
    """A class of `OWN`, and its options. Imports its package."""
    if name == "trackio":
        from phalanx.observe.trackio import OPTIONS as FOR_TRACKIO, TrackioSink

        return TrackioSink, FOR_TRACKIO
    from phalanx.observe.mlflow import OPTIONS as FOR_MLFLOW, MlflowSink

    return MlflowSink, FOR_MLFLOW


def open_sinks(
    config: ObserveConfig, *, folder: Path, rank: int, console: Console | None = None, patient: bool = False
) -> Sinks:
    """The sinks of `rank` for the run in `folder`. `patient`: this process takes the place of another one of a running job, which may still have the port of
    Prometheus; that is told, and tried again.

    Raises `ConfigError` with all sinks that cannot be opened, `RunError` where the run folder cannot be written.
    """
    try:
        opened: list[Sink] = [JsonlSink(folder, rank=rank)]
    except OSError as error:
        path = log_path(folder, rank)
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another run.folder") from error
    if rank != 0:
        return Sinks(opened)
    added, problems = open_added(config, folder)
    opened += added
    problems += sink_problems(config)
    missing = {p.where for p in problems}
    for setting, make in _rank_zero(config, folder, console, patient=patient).items():
        try:
            if setting not in missing:
                opened.append(make())
        except ConfigError as error:
            problems += error.problems
    if problems:
        Sinks(opened).close()
    raise_if(problems, ConfigError, subject="the recipe")
    sinks = Sinks([*opened[:1], IndexSink(folder), *opened[1:]])
    for missing in filter(None, (getattr(sink, "missing", "") for sink in opened)):
        text = f"metrics are not served at {missing}: the process that had the port before may still have it; it will be tried again while training continues"
        sinks(Note(level="warning", text=text))
    return sinks


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

"""`train_model`: a training run from Python, watched event by event."""

from __future__ import annotations

import json
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.api.programs import LAST_LINES, Program, ProgramError, complaint, start
from phalanx.api.recipe_words import RecipeLike, Settings, recipe_words
from phalanx.api.runs import RunHandle, open_run
from phalanx.cli.launching import Request, read_recipe
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.events import Event
from phalanx.core.reading import MalformedError, parse_json
from phalanx.observe import event_of

Callback = Callable[[Event], object]
"""Gets each event of the run (`phalanx.core.events`), in the calling process. True stops the run after the present step: it saves, and can go on later."""


def train_model(
    recipe: RecipeLike = None,
    settings: Settings | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
    show: bool = True,
) -> RunHandle:
    """Train the model of a recipe, or go on with its run, and return the run when it is finished or was stopped.

    `recipe` is a `Recipe`, the path of a file or the name of one that comes with Phalanx; `settings` change it, such as `{"train.steps": 30}`. The ranks are processes of their own, on this
    machine, or under torchrun this one's rank is. `show` prints a line for a step every few seconds. `trust` is that of the command line.

    What a callback raises stops the run, which saves, and is raised again; so is KeyboardInterrupt. Raises `ConfigError` before anything starts, `ProgramError` where the run ends with an error.
    """
    with recipe_words(recipe, settings) as given:
        rule, hint = "has no effect: a program gets the events of its run", "use callbacks, or show"
        taken = [n for n in ("observe.console", "observe.log_interval") if n in (settings or {})]
        problems = [Problem(where=n, value=(settings or {})[n], rule=rule, hint=hint) for n in taken]
        if not (isinstance(callbacks, Collection) and all(map(callable, callbacks))):
            rule, hint = "must be a list of functions, each of which takes an event", "use callbacks=[print]"
            problems.append(Problem(where="callbacks", value=callbacks, rule=rule, hint=hint))
        raise_if(problems, ConfigError, subject="the arguments")
        told: Sequence[Callback] = (*callbacks, *([_Shown()] if show else []))
        trusted = trust or given.is_own
        quiet = ("--observe.console=json", "--observe.log_interval=none")
        checked = _checked(given.path, (*given.overrides, *quiet), trust=trusted)
        flags = ["--trust"] if trusted else []
        program = start(["train", *given.words, *quiet, *flags])
        try:
            _Watch(callbacks=told, program=program).follow()
        except BaseException:
            program.terminate()  # it has ended, but where nobody could follow it
            raise
    return open_run(Path(checked.run.folder) / checked.run.name)


def _checked(path: str | None, overrides: tuple[str, ...], *, trust: bool) -> Recipe:
    """The recipe, before a process is started for it."""
    from phalanx.runtime.processes import read_world

    launched = read_world()
    several = launched is not None and launched.local_world < launched.world
    request = Request(recipe_path=path, overrides=overrides, dry_run=False, trust=trust)
    return read_recipe(request, world=launched.world if launched else None, several_machines=several)


@dataclass
class _Watch:
    """A program that trains, and what it says."""

    callbacks: Sequence[Callback]
    program: Program
    is_stopping: bool = False
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def follow(self) -> None:
        """Give every event to the callbacks until the program ends. Whatever is raised meanwhile is raised when it has saved and ended."""
        assert self.program.stdout is not None and self.program.stderr is not None
        reader = threading.Thread(target=self._collect, args=(self.program.stderr,), daemon=True)
        reader.start()
        raised: BaseException | None = None
        lines = iter(self.program.stdout)
        while True:
            try:
                line = next(lines, None)
                if line is None:
                    self.program.wait()
                    break
                if raised is None:
                    self._tell(line)
            except BaseException as error:  # Ctrl-C too: the run saves first
                raised = raised or error
                self._stop()
        reader.join()
        if raised is not None:
            raise raised
        if self.program.returncode:
            text = complaint("\n".join(self.errors)) or f"phalanx train ended with {self.program.returncode}"
            raise ProgramError(text, exit_code=self.program.returncode)

    def _collect(self, stream: Iterable[str]) -> None:
        self.errors.extend(line.rstrip("\n") for line in stream)

    def _tell(self, line: str) -> None:
        event = _event_in(line)
        if event is None:
            return
        answers = [
            callback(event) for callback in self.callbacks
        ]  # each sees the event, whatever the ones before it say
        if any(answer is True for answer in answers):
            self._stop()

    def _stop(self) -> None:
        """As by Ctrl-C, once: a second one would end the run without a save."""
        if not self.is_stopping and self.program.poll() is None:
            self.is_stopping = True
            self.program.send_signal(signal.SIGTERM)


def _event_in(line: str) -> Event | None:
    """The event of a line; None for other text, which a library may have printed."""
    if not line.startswith("{"):
        return None
    try:
        return event_of(parse_json(line.encode(), where="standard output"))
    except (MalformedError, json.JSONDecodeError, TypeError):
        return None


class _Shown:
    """A line for a step every few seconds, with `print`: in a notebook too."""

    def __init__(self) -> None:
        import io

        from rich.console import Console

        from phalanx.observe import ConsoleSink

        self._text = io.StringIO()
        self._sink = ConsoleSink(Console(file=self._text, force_terminal=False, width=120), live=False)

    def __call__(self, event: Event) -> None:
        self._sink.write(event)
        text = self._text.getvalue()
        if text:
            print(text, end="", flush=True)
            self._text.seek(0)
            self._text.truncate()

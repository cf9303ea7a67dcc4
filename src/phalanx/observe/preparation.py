"""Progress of data preparation: a bar on a terminal, a line for each finished phase elsewhere.

`PreparationProgress` is what `data.prepare` calls with (phase, bytes done, bytes in all); a total of 0 is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from phalanx.core.units import format_bytes, format_seconds

PHASES = {
    "scan": "reading the sources",
    "tokenizer": "training the tokenizer",
    "tokenise": "tokenising",
    "join": "joining what was tokenised",
    "index": "reading the token files",
    "wait": "waiting for another process that prepares the same data",
}
"""What a person reads for each phase that `data` names; others are shown as they are."""

REFRESH_S = 0.1
LINE_S = 30.0
"""Interval in which a long phase says how far it is, where there is no terminal."""
WORTH_A_LINE_S = 1.0
"""Phases that were over sooner leave no trace."""


class PreparationProgress:
    """Call it with (phase, done, total); use it as a context manager so that the terminal is left in order."""

    def __init__(self, console: Console | None, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`console` None is silent; `live` draws a bar (`observe.console.wants_live`)."""
        self._console = console if console is not None else Console(quiet=True)
        self._clock = clock
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(compact=True),
        )
        live = live and console is not None
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True) if live else None
        self._task: TaskID | None = None
        self._phase = ""
        self._done = 0
        self._began = 0.0
        self._drawn_at = 0.0

    def __call__(self, phase: str, done: int, total: int, /) -> None:
        if phase != self._phase:
            self._finish_phase()
            self._begin_phase(phase)
        self._done = done
        now = self._clock()
        if self._bar is None or self._task is None:
            if now - self._drawn_at >= LINE_S and total:
                self._drawn_at = now
                self._say(f"{PHASES.get(phase, phase)}, {format_bytes(done)} of {format_bytes(total)}")
            return
        if now - self._drawn_at >= REFRESH_S or done >= total:
            self._drawn_at = now
            self._bar.update(self._task, completed=done, total=total or None, refresh=True)

    def __enter__(self) -> PreparationProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=error is None)

    def close(self, *, finished: bool = True) -> None:
        """Take the bar away; of a phase that did not finish nothing is claimed."""
        if finished:
            self._finish_phase()
        self._phase = ""
        if self._bar is not None:
            self._bar.stop()

    def _begin_phase(self, phase: str) -> None:
        self._phase, self._began, self._done = phase, self._clock(), 0
        self._drawn_at = self._began - REFRESH_S if self._bar is not None else self._began
        words = PHASES.get(phase, phase)
        if self._bar is None:
            if phase == "wait":
                self._say(words)
            return
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(words, total=None)
        self._bar.start()

    def _finish_phase(self) -> None:
        took = self._clock() - self._began
        if self._phase in ("", "wait") or took < WORTH_A_LINE_S:
            return
        words = PHASES.get(self._phase, self._phase)
        self._say(f"{words}, {format_bytes(self._done)} in {format_seconds(took)}")

    def _say(self, words: str) -> None:
        self._console.print(f"data: {words}", highlight=False, soft_wrap=True)

"""What a person sees while text becomes tokens: a bar on a terminal, else a line for each phase. Derived from nothing but progress calls."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from phalanx.core.units import format_bytes

PHASES = {
    "scan": "looking at the text",
    "tokenizer": "training the tokenizer",
    "tokenise": "tokenising",
    "index": "indexing",
    "wait": "waiting for another process that prepares the same text",
}


class PreparationBar:
    """A `data.cache.Progress`, and a context manager that removes the bar at its end."""

    def __init__(self, console: Console | None, *, live: bool) -> None:
        """`console` None: silent."""
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True) if console and live else None
        self._tasks: dict[str, TaskID] = {}
        self._seen: set[str] = set()

    def __enter__(self) -> PreparationBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, phase: str, done_bytes: int, total_bytes: int, /) -> None:
        label = PHASES.get(phase, phase)
        if self._progress is not None:
            if phase not in self._tasks:
                self._tasks[phase] = self._progress.add_task(label, total=total_bytes or None)
            self._progress.update(self._tasks[phase], completed=done_bytes, total=total_bytes or None)
        elif self._console is not None and phase not in self._seen:
            self._seen.add(phase)
            size = f" ({format_bytes(total_bytes)})" if total_bytes else ""
            self._console.print(f"{label}{size}", highlight=False, soft_wrap=True)

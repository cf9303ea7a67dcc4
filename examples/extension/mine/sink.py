"""A sink: loss and speed of each step in a CSV file. `--observe.sinks '["csv:file=loss.csv"]'` selects it."""

import csv
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.events import Event, StepEnded


class CsvSink:
    """Gets every event of rank 0, one at a time. What it raises is told once, and training goes on."""

    name = "CSV"

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", newline="", buffering=1)
        self._rows = csv.writer(self._file)

    def write(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self._rows.writerow([event.step, event.loss, event.tokens_per_s])

    def close(self) -> None:
        self._file.close()


def open_sink(folder: Path, options: Mapping[str, str]) -> CsvSink:
    """The sink of the run in `folder`."""
    return CsvSink(folder / options.get("file", "steps.csv"))

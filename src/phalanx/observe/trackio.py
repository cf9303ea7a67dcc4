"""Trackio (extra `trackio`): `observe.sinks = ["trackio:project=NAME"]`; with `space=OWNER/NAME` in a Space of Hugging Face, else on this machine. It sends from a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from phalanx.core.events import Event, RunStarted
from phalanx.observe.metrics import samples
from phalanx.observe.recipes import recipe_values


class TrackioSink:
    """Begins with the run, whose recipe is its config; a run that goes on continues its curves."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self.name = "trackio"
        self._folder, self._options = folder, options
        self._run: Any = None

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted) and self._run is None:
            self._run = trackio.init(
                project=self._options.get("project", "phalanx"),
                name=self._folder.name,
                space_id=self._options.get("space"),
                config=recipe_values(self._folder),
                resume="allow",
            )
        values = list(samples(event))
        if values and self._run is not None:
            self._run.log({s.tag: s.value for s in values}, step=values[0].step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

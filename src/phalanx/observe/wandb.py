"""Weights & Biases (extra `wandb`), with the recipe as config. A run keeps its id in its folder, so that resuming continues the same curves."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal

import wandb

from phalanx.core.errors import ConfigError
from phalanx.core.events import Event, RunEnded, RunStarted
from phalanx.observe.metrics import samples
from phalanx.observe.recipes import recipe_values

STEP = "step"
"""What curves are drawn over."""


class WandbSink:
    """Reports to `project`; with mode offline everything stays below the run folder until `wandb sync`."""

    def __init__(self, folder: Path, *, project: str, mode: Literal["online", "offline"]) -> None:
        self.name, self._folder = "W&B", folder
        identity = folder / "wandb-id.txt"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(folder),
                mode=mode,
            )
        except Exception as error:  # wandb's own errors share no base class that means "cannot start"
            hint = 'log in with `wandb login`, or set observe.wandb_mode = "offline"'
            rule = f"cannot be reached by wandb ({type(error).__name__}: {error})"
            raise ConfigError.of("observe.wandb_project", project, rule, hint, subject="the recipe") from error
        # its own steps only go up: a checkpoint is told behind a later step, and a run that went back logs its steps anew
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._exit_code = 0

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run.config.update({**recipe_values(self._folder), **event.to_record()}, allow_val_change=True)
        if isinstance(event, RunEnded):
            self._exit_code = 0 if event.reason in ("finished", "interrupted") else 1
        values = list(samples(event))
        if values:
            self._run.log({STEP: values[0].step, **{s.tag: s.value for s in values}})

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)

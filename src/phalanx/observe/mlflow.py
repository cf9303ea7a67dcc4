"""MLflow (extra `mlflow`): `observe.sinks = ["mlflow:project=EXPERIMENT,uri=http://HOST:5000"]`; without `uri` where MLflow's own variables say. Metrics leave from a thread of MLflow's. A run keeps its id in its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from phalanx.core.events import Event, RunEnded, RunStarted
from phalanx.observe.metrics import samples
from phalanx.observe.recipes import recipe_values

MOST_PARAMS = 100
"""In one request of MLflow's. Texts of `recipe_values` are shorter than it allows in a parameter."""


class MlflowSink:
    """The recipe is its parameters. MLflow changes none: of a run that goes on by another recipe they are the first one's, and what is new."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self.name = "MLflow"
        self._folder, self._sent, self._status = folder, None, "FAILED"
        self._client: Any = MlflowClient(tracking_uri=options.get("uri"))
        identity = folder / "mlflow-id.txt"
        if identity.exists():
            self._run_id = identity.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            project = options.get("project", "phalanx")
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
            self._run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
            identity.write_text(self._run_id)

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            known = self._client.get_run(self._run_id).data.params
            params = [Param(name, value) for name, value in recipe_values(self._folder).items() if name not in known]
            for first in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])
        if isinstance(event, RunEnded):
            self._status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(event.reason, "FAILED")
        now_ms = int(time.time() * 1000)
        metrics = [Metric(s.tag, s.value, now_ms, s.step) for s in samples(event)]
        if metrics:
            self._sent = self._client.log_batch(self._run_id, metrics=metrics, synchronous=False)

    def close(self) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self._run_id, status=self._status)

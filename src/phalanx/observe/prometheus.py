"""The newest metrics over HTTP, for Prometheus to scrape (extra `prometheus`).

A daemon thread serves; the training step only sets numbers. Gauges are named `phalanx_` and the metric's name with `_` for `/`, labelled
with the run, and with the layer where there is one value for each.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from phalanx.core.errors import ConfigError, Problem
from phalanx.core.events import Event, RunStarted, StepEnded
from phalanx.observe.metrics import METRICS, samples


class PrometheusSink:
    """Serves `http://address:port/metrics` until closed."""

    def __init__(self, *, run: str, port: int, address: str) -> None:
        self.name = "Prometheus"
        self._run = run
        registry = CollectorRegistry()
        self._gauges = {
            m.name: Gauge(
                m.prometheus_name,
                f"{m.meaning} [{m.unit}]" if m.unit else m.meaning,
                ["run", "layer"] if m.per_layer else ["run"],
                registry=registry,
            )
            for m in METRICS
        }
        self._step = Gauge("phalanx_step", "optimizer steps committed", ["run"], registry=registry)
        self._total_steps = Gauge("phalanx_total_steps", "optimizer steps of the whole run", ["run"], registry=registry)
        self._tokens = Counter("phalanx_train_tokens", "tokens trained by this process", ["run"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            problem = Problem(
                where="observe.prometheus_port",
                value=port,
                rule=f"cannot be served at {address} ({error.strerror or error})",
                hint="choose another port, or stop the program that has it",
            )
            raise ConfigError([problem], subject="the recipe") from error
        self.port = int(self._server.server_port)

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._step.labels(self._run).set(event.step)
            self._total_steps.labels(self._run).set(event.total_steps)
        elif isinstance(event, StepEnded):
            self._step.labels(self._run).set(event.step)
            self._tokens.labels(self._run).inc(event.tokens)
        for s in samples(event):
            labels = (self._run,) if s.layer is None else (self._run, str(s.layer))
            self._gauges[s.metric.name].labels(*labels).set(s.value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

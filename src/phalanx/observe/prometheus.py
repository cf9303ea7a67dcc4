"""The newest metrics over HTTP, for Prometheus to scrape (extra `prometheus`).

A daemon thread serves; the training step only sets numbers. Gauges are named `phalanx_` and the metric's name with `_` for `/`, labelled
with the run, and with the layer where there is one value for each.

A process that takes the place of another in a running job (`patient`) may find the port taken, as long as the other is only frozen: it goes on without and takes the
port when it is free.
"""

from __future__ import annotations

import time
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from phalanx.core.errors import ConfigError, Problem
from phalanx.core.events import Event, RunStarted, StepEnded
from phalanx.observe.metrics import METRICS, samples

AGAIN_S = 1.0
"""Pause between two tries to open a port that somebody else has; tried when a step ends."""


class PrometheusSink:
    """Serves `http://address:port/metrics` until closed. `patient`: not as long as somebody else has the port; else that raises `ConfigError`."""

    def __init__(self, *, run: str, port: int, address: str, patient: bool = False) -> None:
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
        self._registry, self._port, self._address = registry, port, address
        self._served: tuple[WSGIServer, Thread] | None = None
        self._tried_s = time.monotonic()
        error = self._serve()
        if error is not None and not patient:
            problem = Problem(
                where="observe.prometheus_port",
                value=port,
                rule=f"cannot be served at {address} ({error.strerror or error})",
                hint="choose another port, or stop the program that has it",
            )
            raise ConfigError([problem], subject="the recipe") from error
        self.missing = "" if error is None else f"{address}:{port} ({error.strerror or error})"
        """What could not be opened at first."""

    @property
    def port(self) -> int | None:
        """Where it serves now."""
        return None if self._served is None else int(self._served[0].server_port)

    def _serve(self) -> OSError | None:
        try:
            self._served = start_http_server(self._port, addr=self._address, registry=self._registry)
        except OSError as error:
            return error
        return None

    def _try_again(self) -> None:
        now = time.monotonic()
        if self._served is None and now - self._tried_s >= AGAIN_S:
            self._tried_s = now
            self._serve()

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._step.labels(self._run).set(event.step)
            self._total_steps.labels(self._run).set(event.total_steps)
        elif isinstance(event, StepEnded):
            self._try_again()
            self._step.labels(self._run).set(event.step)
            self._tokens.labels(self._run).inc(event.tokens)
        for s in samples(event):
            labels = (self._run,) if s.layer is None else (self._run, str(s.layer))
            self._gauges[s.metric.name].labels(*labels).set(s.value)

    def close(self) -> None:
        if self._served is not None:
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join()
            self._served = None

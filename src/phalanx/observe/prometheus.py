"""The newest metrics over HTTP, for Prometheus to scrape (extra `prometheus`).

A daemon thread serves; the training step only sets numbers. Gauges are named as `Metric.prometheus_name` says, labelled with the run, and with the layer where
there is one value for each.

When a run has ended well, whoever scrapes it must be able to tell that from a process that died: `phalanx_run_ended` is 1 then, and the sink closes only after that
was scraped, or is not scraped when it should have been. Who never scrapes costs no time.

A process that takes the place of another in a running job (`patient`) may find the port taken, as long as the other is only frozen: it goes on without and takes the
port when it is free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric as Family, start_http_server

from phalanx.core.errors import ConfigError
from phalanx.core.events import Event, RunEnded, RunStarted, StepEnded
from phalanx.observe.metrics import METRICS, samples

AGAIN_S = 1.0
"""Pause between two tries to open a port that somebody else has; tried when a step ends."""
INTERVAL_S = 15.0
"""Usual time between two scrapes, until it is known."""
LINGER_S = 60.0
"""How long the end of a run waits for the last scrape, at most."""
SENT_S = 0.2
"""For the answer to the last scrape to leave."""


class _Scraped(CollectorRegistry):
    """Knows when it was read of late, oldest first (`time.monotonic`)."""

    def __init__(self) -> None:
        super().__init__()
        self.read_s: deque[float] = deque(maxlen=8)

    def collect(self) -> Iterator[Family]:
        begin_s = time.monotonic()
        yield from super().collect()
        self.read_s.append(begin_s)


class PrometheusSink:
    """Serves `http://address:port/metrics` until closed. `patient`: not as long as somebody else has the port; else that raises `ConfigError`."""

    def __init__(self, *, run: str, port: int, address: str, patient: bool = False) -> None:
        self.name = "Prometheus"
        self._run = run
        registry = _Scraped()
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
        self._last_step = Gauge(
            "phalanx_last_step_timestamp_seconds",
            "when the last step was committed, or training began",
            ["run"],
            registry=registry,
        )
        self._ended = Gauge("phalanx_run_ended", "1: finished or stopped in good order", ["run"], registry=registry)
        self._ended_s: float | None = None
        self._total_steps = Gauge("phalanx_total_steps", "optimizer steps of the whole run", ["run"], registry=registry)
        self._tokens = Counter("phalanx_train_tokens", "tokens trained by this process", ["run"], registry=registry)
        self._registry, self._port, self._address = registry, port, address
        self._served: tuple[WSGIServer, Thread] | None = None
        self._tried_s = time.monotonic()
        error = self._serve()
        if error is not None and not patient:
            rule = f"cannot be served at {address} ({error.strerror or error})"
            hint = "choose another port, or stop the program that has it"
            raise ConfigError.of("observe.prometheus_port", port, rule, hint, subject="the recipe") from error
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
            self._ended.labels(self._run).set(0)
            self._last_step.labels(self._run).set_to_current_time()
            self._step.labels(self._run).set(event.step)
            self._total_steps.labels(self._run).set(event.total_steps)
        elif isinstance(event, StepEnded):
            self._try_again()
            self._step.labels(self._run).set(event.step)
            self._last_step.labels(self._run).set_to_current_time()
            self._tokens.labels(self._run).inc(event.tokens)
        elif isinstance(event, RunEnded) and event.reason in ("finished", "interrupted"):
            self._ended.labels(self._run).set(1)
            self._ended_s = time.monotonic()
        for s in samples(event):
            labels = (self._run,) if s.layer is None else (self._run, str(s.layer))
            self._gauges[s.metric.name].labels(*labels).set(s.value)

    def _await_scrape(self, ended_s: float) -> None:
        """Until somebody has read that the run ended, as long as scrapes come as they did."""
        seen = list(self._registry.read_s)
        if not seen:
            return
        interval_s = max((b - a for a, b in pairwise(seen)), default=INTERVAL_S)
        until_s = min(seen[-1] + 1.5 * interval_s + SENT_S, ended_s + LINGER_S)
        while self._registry.read_s[-1] < ended_s and time.monotonic() < until_s:
            time.sleep(0.05)
        if self._registry.read_s[-1] >= ended_s:
            time.sleep(SENT_S)

    def close(self) -> None:
        if self._served is not None:
            if self._ended_s is not None:
                self._await_scrape(self._ended_s)
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join()
            self._served = None

"""What `src/phalanx/launch/monitoring/` gives Prometheus, Alertmanager and Grafana, read by those programs: rules that fire when a run dies or stands still, and keep quiet when it ends well."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_events import a_run
from prometheus_client import generate_latest
from train_help import start, train_args, write_text

import phalanx
from phalanx.observe.metrics import METRICS
from phalanx.observe.prometheus import PrometheusSink

MONITORING = Path(phalanx.__file__).parent / "launch" / "monitoring"
PROGRAMS = ("promtool", "prometheus", "prometheus-alertmanager")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}; apt-get install --no-install-recommends prometheus prometheus-alertmanager")  # fmt: skip


def served() -> str:
    """Every metric that a run can serve, as text."""
    sink = PrometheusSink(run="a", port=0, address="127.0.0.1")
    try:
        for event in a_run(50):
            sink.write(event)
        for metric in METRICS:
            labels = ("a", "0") if metric.per_layer else ("a",)
            sink._gauges[metric.name].labels(*labels).set(1)
        return generate_latest(sink._registry).decode()
    finally:
        sink.close()


def promtool(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(["promtool", *words], input=stdin, capture_output=True, text=True, cwd=MONITORING, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.unit
def test_names_follow_the_conventions_of_prometheus() -> None:
    assert promtool("check", "metrics", stdin=served()) == ""
    wrong = subprocess.run(["promtool", "check", "metrics"], input="# TYPE a counter\na 1\n", capture_output=True, text=True)  # fmt: skip
    assert wrong.returncode != 0  # it can say so


@pytest.mark.unit
def test_promtool_takes_the_files_and_the_rules_do_what_their_test_says() -> None:
    promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@pytest.mark.unit
def test_rules_and_the_dashboard_name_metrics_that_exist(tmp_path: Path) -> None:
    exist = {line.partition("{")[0] for line in served().splitlines() if not line.startswith("#")}
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    told = re.findall(r"expr: (?:>-)?(.*?)\n {8}(?:for|labels):", (MONITORING / "alerts.yml").read_text(), re.S)
    assert len(shown) >= 15 and len(told) == 5
    named = {name for text in (*shown, *told) for name in re.findall(r"phalanx_\w+", text)}
    assert sorted(named - exist) == [] and len(named) > 15
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    expressions = "\n".join(f"  - {{record: r{n}, expr: {json.dumps(e)}}}" for n, e in enumerate(shown))
    (tmp_path / "shown.yml").write_text("groups:\n- name: shown\n  rules:\n" + expressions + "\n")
    promtool("check", "rules", str(tmp_path / "shown.yml"))


# --- the programs themselves


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def until(found: Callable[[], Any], *, seconds: float, what: str) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end_s, what
        time.sleep(0.2)
    return value


class Alerts:
    """Prometheus, Alertmanager and whom that tells: with the rules as they are, but for their times, which are cut to seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scraped = folder, free_port()
        self.told: list[str] = []
        """Name and run of alerts, as they came."""

    def __enter__(self) -> Alerts:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            hook = self._webhook(stack)
            manager, web = free_port(), free_port()
            quick = re.sub(r"for: \d+m", "for: 2s", (MONITORING / "alerts.yml").read_text()).replace("> 300", "> 6")
            config = (MONITORING / "prometheus.yml").read_text().replace("15s", "1s")
            config = config.replace(":9100", f":{self.scraped}").replace(":9093", f":{manager}")
            (self.folder / "alerts.yml").write_text(quick)
            (self.folder / "prometheus.yml").write_text(config)
            (self.folder / "manager.yml").write_text(
                "route: {receiver: hook, group_wait: 1s, group_by: [alertname, run]}\n"
                f"receivers: [{{name: hook, webhook_configs: [{{url: 'http://127.0.0.1:{hook}/'}}]}}]\n"
            )
            self._start(stack, "prometheus-alertmanager", "--config.file=manager.yml", f"--web.listen-address=127.0.0.1:{manager}", "--cluster.listen-address=", "--storage.path=alerts")  # fmt: skip
            self._start(stack, "prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{web}", "--storage.tsdb.path=series")  # fmt: skip
            self._stack = stack.pop_all()
        self.web = web
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack, *words: str) -> None:
        log = stack.enter_context((self.folder / f"{words[0]}.log").open("wb"))
        process = subprocess.Popen(words, cwd=self.folder, stdout=log, stderr=log)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)

    def _webhook(self, stack: contextlib.ExitStack) -> int:
        told = self.told

        class Hook(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.extend(f"{a['labels']['alertname']} {a['labels'].get('run')}" for a in message["alerts"] if a["status"] == "firing")  # fmt: skip
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
        stack.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port

    def value(self, expression: str) -> float | None:
        """What Prometheus knows now; None: nothing."""
        done = subprocess.run(["promtool", "query", "instant", "-o", "json", f"http://127.0.0.1:{self.web}", expression], capture_output=True, text=True)  # fmt: skip
        found = json.loads(done.stdout) if done.returncode == 0 and done.stdout.strip() else []
        return float(found[0]["value"][1]) if found else None


@pytest.fixture
def alerts(tmp_path: Path) -> Iterator[Alerts]:
    with Alerts(tmp_path) as found:
        until(lambda: found.value("vector(1)"), seconds=60, what="Prometheus does not answer")
        yield found


def writer_of(log: Path) -> int:
    """The process that has `log` open to write: the rank."""
    return next(int(fd.parts[2]) for fd in Path("/proc").glob("[0-9]*/fd/*") if points_to(fd, log))


def points_to(link: Path, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(link) == str(path)
    return False


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_stands_still_and_is_killed_is_told_and_one_that_ends_well_is_not(
    alerts: Alerts, tmp_path: Path
) -> None:
    """A rank of a run that is not elastic is stopped: no step; then killed: the run is gone. An elastic one ends well, Prometheus reads so, and is silent after it."""
    write_text(tmp_path / "text")
    common = {"launch__ranks": "2", "observe__prometheus_port": str(alerts.scraped), "checkpoint__interval": "1000000"}
    dies = start(["train", *train_args(tmp_path, run__name="dies", train__steps="1000000", resilience__heal="false", **common)])  # fmt: skip
    try:
        until(lambda: (alerts.value('phalanx_step{run="dies"}') or 0) >= 3, seconds=120, what="no step was scraped")
        assert alerts.told == []
        victim = writer_of(tmp_path / "runs/dies/events/rank-1.jsonl")
        os.kill(victim, signal.SIGSTOP)
        until(lambda: "PhalanxStepStalled dies" in alerts.told, seconds=60, what=str(alerts.told))
        os.kill(victim, signal.SIGKILL)
        until(lambda: "PhalanxRunDied dies" in alerts.told, seconds=90, what=str(alerts.told))
    finally:
        dies.kill()
    ends = start(["train", *train_args(tmp_path, run__name="ends", train__steps="1000000", resilience__heal="true", resilience__mode="fast", folding__ep="1", **common)])  # fmt: skip
    try:
        until(lambda: (alerts.value('phalanx_step{run="ends"}') or 0) >= 3, seconds=120, what="no step was scraped")
        assert alerts.value('phalanx_team_holders{run="ends"}') == 2
        ends.send_signal(signal.SIGINT)
        ends.communicate(timeout=60)
    finally:
        ends.kill()
    assert alerts.value('last_over_time(phalanx_run_ended{run="ends"}[5m])') == 1
    until(lambda: alerts.value('absent(phalanx_run_ended{run="ends"})'), seconds=30, what="still scraped")
    time.sleep(8.0)  # more than twice what the rules wait
    assert [text for text in alerts.told if text.endswith(" ends")] == []

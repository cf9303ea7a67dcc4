"""Sinks: what each one writes is read back by the program that people read it with; a broken one stops nothing."""

import errno
import io
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_events import a_run, ended, started, went_back
from rich.console import Console
from speed_help import slowness

import phalanx.observe.sinks as sinks_module
from phalanx.core.config import ObserveConfig
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.events import CheckpointSaved, Event, Note, RunEnded, RunStarted, StepEnded, TeamFormed, Validated
from phalanx.observe.console import ConsoleSink
from phalanx.observe.event_log import log_path, read_events
from phalanx.observe.metrics import METRICS, samples
from phalanx.observe.sinks import GIVE_UP_AFTER, Sinks, open_sinks
from phalanx.observe.tensorboard import TensorBoardSink

pytestmark = pytest.mark.unit
QUIET = ObserveConfig(console="none", tensorboard=False)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Recording:
    """A sink that remembers, and fails on demand."""

    def __init__(self, name: str, *, fail: bool = False) -> None:
        self.name = name
        self.fail = fail
        self.events: list[Event] = []
        self.calls = 0
        self.closed = 0

    def write(self, event: Event) -> None:
        self.calls += 1
        if self.fail:
            raise OSError("no route to host")
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1
        if self.fail:
            raise OSError("still no route")


def test_a_broken_sink_warns_once_and_the_others_hear_everything(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, late = Recording("log"), Recording("W&B", fail=True), Recording("late")
    sinks = Sinks([good, bad, late])
    events = list(a_run(5))
    for event in events:
        sinks(event)
    text = "W&B does not work (OSError: no route to host); training continues without it"
    for sink in (good, late):
        assert [e for e in sink.events if not isinstance(e, Note)] == events
        assert [e for e in sink.events if isinstance(e, Note)] == [Note(level="warning", text=text)]
    assert capsys.readouterr().err == f"phalanx: warning: {text}\n"
    sinks.close()
    sinks.close()
    assert (good.closed, bad.closed, late.closed) == (1, 1, 1)


def test_a_reader_of_the_output_that_goes_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`phalanx train ... | head`: rich ends the program then. Whatever else asks for an end gets it."""

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    events, good = list(a_run(5)), Recording("log")
    monkeypatch.setattr(Console, "on_broken_pipe", lambda self: sys.exit(1))  # its own makes standard output null
    sinks = Sinks([ConsoleSink(Console(file=Pipe(), force_terminal=True), live=False, log_interval=1), good])
    for event in events:
        sinks(event)
    assert [e for e in good.events if not isinstance(e, Note)] == events
    assert "console does not work (BrokenPipeError" in capsys.readouterr().err

    class Ends(Recording):
        def write(self, event: Event) -> None:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        Sinks([Ends("end")])(events[0])


def test_a_sink_that_keeps_failing_is_no_longer_called_and_one_that_recovers_is() -> None:
    bad, flaky = Recording("bad", fail=True), Recording("flaky", fail=True)
    sinks = Sinks([bad, flaky])
    for step in range(1, 3 * GIVE_UP_AFTER):
        flaky.fail = step % (GIVE_UP_AFTER - 1) != 0
        sinks(ended(step))
    assert bad.calls == GIVE_UP_AFTER
    assert flaky.calls >= 3 * GIVE_UP_AFTER - 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.observe.sinks.PLACE_S", 0.0)


def wait_for(there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.mark.usefixtures("at_once")
def test_the_place_of_a_lost_rank_is_taken_and_given_back() -> None:
    log, screen, opens = Recording("log"), Recording("screen"), threading.Event()
    sinks, events = Sinks([log]), list(a_run(5))

    def open_late() -> list[Recording]:
        opens.wait(20)
        return [screen]

    for event in events[:3]:
        sinks(event)
    assert not sinks.is_watched
    sinks.take_place(open_late)
    assert sinks.is_watched and sinks.has_taken_place
    sinks(events[3])
    opens.set()
    wait_for(lambda: len(screen.events) == 2)
    for event in events[4:]:
        sinks(event)
    assert isinstance(events[0], RunStarted) and screen.events == [events[0], *events[3:]]
    sinks.give_place_back()
    wait_for(lambda: screen.closed == 1)
    sinks(events[3])
    assert not sinks.is_watched and len(screen.events) == 1 + len(events[3:])
    assert log.events == [*events, events[3]] and log.closed == 0
    sinks.take_place(lambda: [screen])
    wait_for(lambda: len(screen.events) > 1 + len(events[3:]))
    sinks.close()
    assert (log.closed, screen.closed) == (1, 2)


def test_nothing_is_opened_where_the_lost_rank_is_back_soon() -> None:
    sinks, screen = Sinks([Recording("log")]), Recording("screen")
    sinks.take_place(lambda: [screen])
    sinks.give_place_back()
    for thread in threading.enumerate():
        if thread.name == "sinks":
            thread.join(20)
    assert screen.calls == 0 and not sinks.is_watched


@pytest.mark.usefixtures("at_once")
def test_what_cannot_be_opened_in_the_place_of_another_costs_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> list[Recording]:
        raise ConfigError.of("observe.sinks[0]", "x", "is broken", "leave it out")

    log = Recording("log")
    sinks = Sinks([log])
    sinks.take_place(refuse)
    said = ""
    while "is broken" not in said:
        said += capsys.readouterr().err
        time.sleep(0.005)
    sinks(ended(1))
    assert log.events == [ended(1)]


def test_interrupts_are_not_swallowed() -> None:
    class Interrupting(Recording):
        def write(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sinks([Interrupting("x")])(ended(1))


def test_only_rank_zero_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with open_sinks(ObserveConfig(prometheus_port=port), folder=tmp_path, rank=1) as emit:
        for event in a_run(3):
            emit(event)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert [p.name for p in tmp_path.iterdir()] == ["events"]
    assert len(list(read_events(log_path(tmp_path, 1)))) == 5
    assert capsys.readouterr() == ("", "")


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    with pytest.raises(RunError, match=r"rank-0.jsonl: cannot be written \(File exists\); choose another run.folder"):
        open_sinks(QUIET, folder=tmp_path, rank=0)


# --- Prometheus


def scrape(port: int) -> dict[str, float]:
    """Every sample of a real scrape: 'name{labels}' -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}


def test_prometheus_scrapes_the_newest_numbers(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "laptop"
    config = ObserveConfig(console="none", tensorboard=False, prometheus_port=port)
    with open_sinks(config, folder=folder, rank=0) as emit:
        waits = dict.fromkeys(
            (f"{a}_{b}_s" for a in ("exposed", "hidden") for b in ("forward", "backward")), (0.01,) * 4
        )
        for event in a_run(100, slowness=1.2, **waits):
            emit(event)
        found = scrape(port)
        last = ended(100)
        assert found['phalanx_train_loss{run="laptop"}'] == pytest.approx(last.loss)
        assert found['phalanx_speed_tokens_per_second{run="laptop"}'] == last.tokens_per_s
        assert found['phalanx_experts_layer_load_ratio{layer="3",run="laptop"}'] == pytest.approx(
            last.load_max_over_mean[3]
        )
        assert found['phalanx_step{run="laptop"}'] == 100 and found['phalanx_total_steps{run="laptop"}'] == 100
        assert found['phalanx_train_tokens_total{run="laptop"}'] == 100 * last.tokens
        assert found['phalanx_checkpoint_bytes{run="laptop"}'] == 110_000_000
        always = [m for m in METRICS if m.kind in (StepEnded, Validated, CheckpointSaved)]
        assert {m.prometheus_name for m in always} <= {name.split("{")[0] for name in found}
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_the_end_of_a_run_waits_for_the_scrape_that_tells_of_it(tmp_path: Path) -> None:
    """Who scraped before reads that the run ended well; a run that fails waits for nobody, nor one that nobody scrapes."""
    config = ObserveConfig(console="none", tensorboard=False, prometheus_port=free_port())
    name = f'phalanx_run_ended{{run="{tmp_path.name}"}}'

    def end(reason: str, *, scraped: bool, within_s: float) -> list[float]:
        emit = open_sinks(config, folder=tmp_path, rank=0)
        emit(started())
        found = [scrape(config.prometheus_port or 0)[name]] if scraped else []
        emit(RunEnded(step=1, reason=reason, seconds=1.0))
        closing = threading.Thread(target=emit.close)
        closing.start()
        closing.join(within_s)
        if closing.is_alive():
            found.append(scrape(config.prometheus_port or 0)[name])
        closing.join()
        return found

    assert end("finished", scraped=True, within_s=1.0) == [0.0, 1.0]
    at_once_s = 10.0  # who waits does so for 22 s from the scrape on (`prometheus.INTERVAL_S`); a busy machine may take seconds to close
    assert end("RunError: a rank died", scraped=True, within_s=at_once_s) == [0.0]
    assert end("finished", scraped=False, within_s=at_once_s) == []


def test_when_steps_were_committed_and_how_many_members_there_are(tmp_path: Path) -> None:
    port = free_port()
    config = ObserveConfig(console="none", tensorboard=False, prometheus_port=port)
    team = {
        "folding": "dp2",
        "why": "lost",
        "noticed_s": 0.0,
        "formed_s": 0.0,
        "built_s": 0.0,
        "moved_s": 0.0,
        "moved_bytes": 0,
        "checked": 0,
    }
    with open_sinks(config, folder=tmp_path, rank=0) as emit:
        before_s = time.time()
        emit(ended(3))
        emit(TeamFormed(generation=2, step=3, members=2, wanted=3, holders=1, holders_wanted=2, **team))
        found = {name.split("{")[0]: value for name, value in scrape(port).items()}
        assert before_s <= found["phalanx_last_step_timestamp_seconds"] <= time.time()
        names = ("members", "wanted", "holders", "holders_wanted")
        assert [found[f"phalanx_team_{name}"] for name in names] == [2, 3, 1, 2]


def test_a_port_in_use_is_told_before_training(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = ObserveConfig(console="none", tensorboard=False, prometheus_port=port)
        with pytest.raises(ConfigError) as caught:
            open_sinks(config, folder=tmp_path, rank=0)
    (problem,) = caught.value.problems
    assert (problem.where, problem.value) == ("observe.prometheus_port", port)
    assert problem.rule == "cannot be served at 127.0.0.1 (Address already in use)"
    assert problem.hint == "choose another port, or stop the program that has it"


def test_a_successor_takes_the_port_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before may be frozen with the port: training goes on, and says so."""
    monkeypatch.setattr("phalanx.observe.prometheus.AGAIN_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = ObserveConfig(console="none", tensorboard=False, prometheus_port=port)
        emit = open_sinks(config, folder=tmp_path, rank=0, patient=True)
        emit(ended(3))
    with emit:
        emit(ended(4))
        assert scrape(port)[f'phalanx_step{{run="{tmp_path.name}"}}'] == 4
    (note,) = [e for e in read_events(log_path(tmp_path, 0)) if e["kind"] == "Note"]
    assert (
        note["level"] == "warning"
        and f"metrics are not served at 127.0.0.1:{port} (Address already in use)" in note["text"]
    )


def test_missing_extras_are_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "is_installed", lambda name: False)
    config = ObserveConfig(console="none", tensorboard=False, prometheus_port=9100, wandb_project="p")
    with pytest.raises(ConfigError) as caught:
        open_sinks(config, folder=tmp_path, rank=0)
    assert [(p.where, p.rule, p.hint) for p in caught.value.problems] == [
        ("observe.wandb_project", "needs the package wandb, which is not installed",
         "in a checkout of Phalanx: pip install -e '.[wandb]'; from a wheel: pip install 'FILE.whl[wandb]'; or leave observe.wandb_project out"),
        ("observe.prometheus_port", "needs the package prometheus_client, which is not installed",
         "in a checkout of Phalanx: pip install -e '.[prometheus]'; from a wheel: pip install 'FILE.whl[prometheus]'; or leave observe.prometheus_port out"),
    ]  # fmt: skip


# --- TensorBoard


def wait_until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> (step, value) points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written_and_a_resume_replaces_what_it_redoes(tmp_path: Path) -> None:
    config = ObserveConfig(console="none")
    with open_sinks(config, folder=tmp_path, rank=0) as emit:
        for event in a_run(60):
            emit(event)
    time.sleep(1.1)  # event files are ordered by the second in their name
    with open_sinks(config, folder=tmp_path, rank=0) as emit:
        emit(started(step=50))
        for step in range(51, 55):
            emit(ended(step, loss=1.0))
    shown = read_tensorboard(tmp_path / "tensorboard")
    loss = dict(shown["train/loss"])
    assert sorted(loss) == list(range(1, 55)) and len(shown["train/loss"]) == 54
    assert loss[50] == pytest.approx(ended(50).loss) and loss[54] == 1.0
    assert [s for s, _ in shown["validation/loss"]] == [50]
    time.sleep(1.1)
    with open_sinks(config, folder=tmp_path, rank=0) as emit:  # before a checkpoint was saved
        for event in (started(step=0), *map(ended, range(1, 9)), went_back(8, to=3), ended(4, loss=2.0)):
            emit(event)
    again = read_tensorboard(tmp_path / "tensorboard")["train/loss"]
    assert [s for s, _ in again] == [1, 2, 3, 4] and again[-1][1] == 2.0
    assert {f"experts/load_of/layer-{layer}" for layer in range(4)} <= set(shown)
    assert {s.tag for e in a_run(50) for s in samples(e)} == set(shown)


def test_a_full_disk_costs_points_of_tensorboard_and_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No thread of a writer prints a traceback, and what was written before stays readable."""
    sink = TensorBoardSink(tmp_path, flush_s=0.005)
    sinks = Sinks([sink])
    (path,) = tmp_path.iterdir()
    sinks(ended(1))
    wait_until(lambda: path.stat().st_size > 200)
    before, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
    try:
        for step in range(2, 5):
            sinks(ended(step))
            wait_until(lambda: sink._file._error is not None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sinks.close()
    err = capfd.readouterr().err
    assert err.count("warning: TensorBoard does not work (OSError") == 1 and "Traceback" not in err, err
    shown = {step for points in read_tensorboard(tmp_path).values() for step, _ in points}
    assert 1 in shown and 2 not in shown, "there is room again for those that waited when the sink was closed"


# --- W&B


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed (phalanx[wandb])")
    config = ObserveConfig(console="none", tensorboard=False, wandb_project="phalanx", wandb_mode="offline")
    folder = tmp_path / "laptop"
    for begin in (0, 10):
        with open_sinks(config, folder=folder, rank=0) as emit:
            emit(started(step=begin))
            for step in range(begin + 1, begin + 11):
                emit(ended(step))
            emit(RunEnded(step=begin + 10, reason="finished", seconds=1.0))
    runs = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = (folder / "wandb-id.txt").read_text()
    assert len(runs) == 2 and all(r.name == f"run-{identity}.wandb" and r.stat().st_size > 1000 for r in runs)


# --- all together


def test_observing_costs_a_step_less_than_a_millisecond(tmp_path: Path) -> None:
    """Every sink but the live display, on a model of 48 layers. Processor time at full speed, the least median of thirty steps in a row: who else uses the core is not to decide."""
    config = ObserveConfig(console="plain", prometheus_port=free_port())
    with (tmp_path / "screen.txt").open("w") as screen:
        emit = open_sinks(config, folder=tmp_path, rank=0, console=Console(file=screen))
        emit(started())
        medians = []
        for first in range(1, 301, 30):
            costs = []
            for step in range(first, first + 30):
                event = ended(step, layers=48)
                begin = time.thread_time()
                emit(event)
                costs.append(time.thread_time() - begin)
            medians.append(statistics.median(costs) / slowness())
        emit.close()
    cost_s = min(medians)
    assert cost_s < 1e-3, f"{cost_s * 1e6:.0f} us"


def test_no_sink_imports_torch() -> None:
    code = (
        "import sys, pathlib, tempfile\n"
        "from phalanx.core.config import ObserveConfig\n"
        "from phalanx.observe.sinks import open_sinks\n"
        "import phalanx.observe.prometheus, phalanx.observe.summary, phalanx.observe.preparation\n"
        "open_sinks(ObserveConfig(console='plain'), folder=pathlib.Path(tempfile.mkdtemp()), rank=0).close()\n"
        "assert 'phalanx.observe.tensorboard' in sys.modules\n"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=360).returncode == 0


def test_metric_names_are_unique_and_explained() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS) == len({m.prometheus_name for m in METRICS})
    assert all(m.meaning for m in METRICS)
    assert isinstance(ConsoleSink(Console(), live=False).name, str)

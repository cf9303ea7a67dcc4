"""Key watchers: a key is noticed at once, polled for seldom, and polled for again where a watcher is silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx.runtime.membership.keys import OPENING, KeyWatcher, ServiceLost, TcpKeys
from phalanx.runtime.membership.service import StoreProcess, start_store

pytestmark = pytest.mark.unit
SLICE_S = 0.3


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    process = start_store()
    yield process
    process.stop()


def asked(keys: TcpKeys, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When it asks whether a key is there."""
    times: list[float] = []
    check = keys.all_there

    def counted(names: list[str]) -> bool:
        times.append(time.monotonic())
        return check(names)

    monkeypatch.setattr(keys, "all_there", counted)
    return times


def later(work: Callable[[], object]) -> threading.Thread:
    """Do it while the caller waits."""

    def act() -> None:
        time.sleep(SLICE_S)
        work()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_key_is_watched_and_not_polled_for(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, other = store.address.connect(), store.address.connect()
    times = asked(keys, monkeypatch)
    assert not keys.watch("gen/2", SLICE_S) and not keys.watch("gen/2", SLICE_S) and len(times) == 2
    for number, write in ((2, other.create), (3, other.put)):
        writing = later(lambda: write(f"gen/{number}", "x"))  # noqa: B023
        begin_s = time.monotonic()
        assert keys.watch(f"gen/{number}", 20.0) and time.monotonic() - begin_s < 19.0 and len(times) == number + 1
        writing.join()
    assert keys.watch("gen/3", 0.0)


def test_a_client_whose_watcher_is_silent_polls(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection has ended, or groups form (then nobody else connects), or it waits for another key."""
    keys = store.address.connect()
    times = asked(keys, monkeypatch)
    with OPENING:
        assert not keys.watch("gen/2", SLICE_S) and len(times) > 5 and keys._watcher is None
    times.clear()
    assert not keys.watch("gen/2", 0.0) and keys._watcher is not None and len(times) == 1
    assert not keys.watch("gen/9", SLICE_S) and len(times) > 5
    keys._watcher.close()
    writing = later(lambda: store.address.connect().create("gen/2", "x"))
    assert keys.watch("gen/2", 20.0) or keys.watch("gen/2", 20.0)
    writing.join()
    assert not keys.watch("gen/9", 0.0) and keys._watcher is None and keys._watch_failed


def test_a_service_that_ends_is_missed_at_once(store: StoreProcess) -> None:
    keys = store.address.connect()
    assert not keys.watch("gen/2", 0.0)
    stopping = later(store.stop)
    begin_s = time.monotonic()
    with pytest.raises(ServiceLost):
        keys.watch("gen/2", 20.0)
    assert time.monotonic() - begin_s < 19.0
    stopping.join()


def test_a_watcher_watches_one_key_after_another() -> None:
    there, shut = {"a": threading.Event(), "b": threading.Event()}, threading.Event()

    def listen(key: str) -> None:
        there[key].wait(20.0)
        if shut.is_set():
            raise OSError("shut")

    watcher = KeyWatcher(listen, shut.set)
    assert watcher.wait_for("a", 0.0) is False and watcher.wait_for("b", 0.0) is None
    there["a"].set()
    assert watcher.wait_for("a", 20.0) is True and watcher.wait_for("b", 0.0) is False
    watcher.close()
    there["b"].set()
    assert watcher.wait_for("b", 20.0) is None and watcher.failed and watcher.wait_for("b", 0.0) is None


def test_who_goes_leaves_no_stack_trace(store: StoreProcess, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch writes one to standard error where a connection ends in a wait: asked first, the service ends the wait."""
    watchers = []
    for leave in (TcpKeys.close, TcpKeys._close_watcher):
        keys = store.address.connect()
        assert not keys.watch("gen/2", SLICE_S) and keys._watcher is not None
        watchers.append(keys._watcher)
        leave(keys)
    assert all(watcher.failed and not watcher._thread.is_alive() for watcher in watchers)
    assert capfd.readouterr().err == ""


def test_a_service_that_does_not_answer_holds_nobody_up(store: StoreProcess) -> None:
    keys = store.address.connect()
    assert not keys.watch("gen/2", SLICE_S) and keys._watcher is not None
    watcher = keys._watcher
    os.kill(store.pid, signal.SIGSTOP)
    keys.close()
    assert not watcher._thread.is_alive()
    os.kill(store.pid, signal.SIGCONT)

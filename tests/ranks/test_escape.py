"""Nobody waits for a message whose sender died in the middle of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError
from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.processes.world import use_loopback


def test_values_and_errors_come_back() -> None:
    escape = AbortableCall(lambda: False)
    assert escape.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        escape.run(lambda: 1 // 0)
    escape.close()


def test_a_call_that_hangs_is_left_behind_and_the_next_has_a_thread_of_its_own() -> None:
    aborted, held = threading.Event(), threading.Event()
    escape = AbortableCall(aborted.is_set)
    threading.Timer(0.1, aborted.set).start()
    begin_s = time.monotonic()
    with pytest.raises(PeerError, match="did not end"):
        escape.run(held.wait)
    assert time.monotonic() - begin_s < 15.0
    assert escape.run(lambda: "next") == "next"
    held.set()
    escape.close()


def test_a_thread_that_leaves_takes_the_one_beside_it_along() -> None:
    escape, threads = AbortableCall(lambda: False), []

    def call_and_leave() -> None:
        threads.append(escape.run(threading.current_thread))
        escape.leave()
        escape.leave()

    for _ in range(3):
        thread = threading.Thread(target=call_and_leave)
        thread.start()
        thread.join()
    for thread in threads:
        thread.join(10)
    assert len(set(threads)) == 3 and not any(t.is_alive() for t in threads) and not escape._open
    assert escape.run(lambda: 2) == 2  # other threads go on
    escape.close()


def test_a_thread_that_learns_late_of_an_abort_waits_for_nothing() -> None:
    escape, done = AbortableCall(lambda: False), threading.Event()
    escape.close()
    with pytest.raises(PeerError, match="the process group was aborted"):
        escape.run(lambda: 1)
    escape.begun("posted late", done.set)
    assert done.wait(10)


def test_what_nobody_waited_for_keeps_its_groups_until_it_has_ended() -> None:
    """The destructor of a group waits for what is under way in it, in the thread that lets it go last."""

    class Group:
        def __del__(self) -> None:
            gone.append(threading.current_thread().name)

    gone: list[str] = []
    groups, stuck = [Group()], threading.Event()
    escape = AbortableCall(lambda: False, keep=lambda: tuple(groups))
    escape.begun("waited for", lambda: None)
    escape.ended("waited for")
    escape.begun("stuck", lambda: stuck.wait(20))
    escape.close()
    groups.clear()
    assert gone == []
    stuck.set()
    end_s = time.monotonic() + 10
    while not gone and time.monotonic() < end_s:
        time.sleep(0.01)
    assert gone == ["escape"]
    escape.close()


def _sender(port: int, num_bytes: int) -> None:
    store = _join(1, port)
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    store.get("posted")  # waits for the receiver
    work = dist.isend(message, 0)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
    del work


def _join(rank: int, port: int) -> dist.TCPStore:
    use_loopback()
    store = dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    return store


def _receiver(port: int, num_bytes: int, answers: Any) -> None:
    store = _join(0, port)
    aborted = threading.Event()
    work = dist.irecv(torch.zeros(num_bytes, dtype=torch.uint8), 1)
    store.set("posted", "")
    threading.Timer(1.0, aborted.set).start()
    begin_s = time.monotonic()
    try:
        AbortableCall(aborted.is_set).run(lambda: work.wait(timedelta(seconds=20)))
        answers.put("it came")
    except (PeerError, RuntimeError) as err:
        answers.put((type(err).__name__, time.monotonic() - begin_s))
    answers.close()
    answers.join_thread()
    os._exit(0)


@pytest.mark.ranks
def test_a_message_that_ends_in_the_middle() -> None:
    """Without the escape gloo waits for the 20 s (measured: 6 s of 6)."""
    import multiprocessing

    spawn = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    answers = spawn.Queue()
    work = [
        spawn.Process(target=_receiver, args=(store.port, 600_000_000, answers)),
        spawn.Process(target=_sender, args=(store.port, 600_000_000)),
    ]
    for process in work:
        process.start()
    kind, seconds = answers.get(timeout=120)
    for process in work:
        process.join(10)
    assert kind in ("PeerError", "RuntimeError", "DistBackendError") and seconds < 10.0

"""Plans made in a process beside: the answer is the function's, whatever becomes of that process."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time

import pytest

from phalanx.core.units import format_bytes
from phalanx.runtime.checkpoint.helper_process import HelperProcess

pytestmark = pytest.mark.unit


def test_the_answer_comes_from_there() -> None:
    aside = HelperProcess(["math"])
    aside.begin(os.getpid)
    assert aside.answer(os.getpid) != os.getpid()
    aside.begin(format_bytes, 2048)
    assert aside.answer(format_bytes, 2048) == format_bytes(2048)
    aside.close()
    assert aside.answer(os.getpid) == os.getpid()  # nothing was begun


def test_what_was_begun_for_another_question_is_dropped() -> None:
    aside = HelperProcess()
    aside.begin(os.getpid)
    assert aside.answer(math.sqrt, 9.0) == 3.0
    aside.begin(time.sleep, 60.0)
    aside.begin(math.sqrt, 4.0)  # does not wait for the one before
    assert aside.answer(math.sqrt, 4.0) == 2.0
    aside.close()


def test_errors_are_those_of_the_function() -> None:
    aside = HelperProcess()
    aside.begin(math.exp, 1e9)
    with pytest.raises(OverflowError, match="math range error"):
        aside.answer(math.exp, 1e9)
    aside.begin(math.sqrt, 16.0)
    assert aside.answer(math.sqrt, 16.0) == 4.0
    aside.close()


def test_a_process_that_died_costs_time_only() -> None:
    aside = HelperProcess()
    aside.begin(os._exit, 3)
    process = aside._process
    assert process is not None
    process.wait(30)
    aside.begin(math.sqrt, 25.0)
    assert aside.answer(math.sqrt, 25.0) == 5.0 and aside._process is not process
    aside.close()


def test_processes_that_die_leave_no_descriptors() -> None:
    aside = HelperProcess(["no_such_module_anywhere"])
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        aside.start()
        assert aside._process is not None
        aside._process.wait(30)
    aside.close()
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_it_is_asked_beside_more_than_a_thousand_descriptors_too() -> None:
    """A rank has some for each peer."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip(f"this system allows {limits[1]} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        aside = HelperProcess()
        aside.begin(os.getpid)
        assert aside.answer(os.getpid) != os.getpid()
        aside.close()


def test_one_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.runtime.checkpoint.helper_process.LIMIT_S", 0.5)
    aside = HelperProcess()
    aside.start()
    assert aside._process is not None
    os.kill(aside._process.pid, signal.SIGSTOP)
    aside.begin(bytes, 1 << 20)  # the answer and a question longer than a pipe holds
    assert aside.answer(bytes, 1 << 20) == bytes(1 << 20)
    aside.begin(bytes.upper, b"x" * (1 << 20))
    assert aside.answer(bytes.upper, b"x" * (1 << 20)) == b"X" * (1 << 20)
    aside.close()

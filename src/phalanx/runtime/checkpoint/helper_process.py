"""A process alongside a rank that makes plans while the rank computes: pure functions of `plan/`, called with what they are given.

Not a thread: plans are Python, which would take turns with the rank's own (each of its operations would wait up to 5 ms for its turn), and all other ranks would wait for it.
Not a fork: the rank has threads. So it is a program of its own, which imports no torch, is started before the first question and ends with the rank, however that ends
(its questions come through a pipe).

Must never change: `answer` is what the function returns for this question, wherever it was computed. What was begun for another question is dropped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.pipes import answer_of, ask, end_program, read_message, start_program, write_message

LIMIT_S = 60.0
"""An answer that takes longer is not waited for: the rank computes it itself."""


class HelperProcess:
    """One question at a time."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """`modules`: what the functions need, imported before the first question."""
        self.modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: bytes | None = None

    def start(self) -> None:
        """Start the process, where it does not run."""
        with contextlib.suppress(OSError):
            self._started()

    def begin(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Have `function` (of a module) called there. Whatever fails, `answer` makes good."""
        self.drop()
        asked = pickle.dumps((function, args, options))
        try:
            process = self._started()
        except OSError:
            return
        self._asked = asked
        ask(process, asked)

    def answer(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What `function` returns: that of the other process where just this was begun there, else computed here and now. Raises what it raises."""
        begun, self._asked = self._asked, None
        if begun is not None:
            found = self._read()
            if found is not None and begun == pickle.dumps((function, args, options)):
                return pickle.loads(found)
        return function(*args, **options)

    def drop(self) -> None:
        """What was begun is of no use any more. A process that may be busy with it is ended."""
        if self._asked is not None:
            self.close()

    def close(self) -> None:
        """End the process; what was begun there is dropped."""
        if self._process is not None:
            self._end()
        self._process = self._asked = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = start_program("phalanx.runtime.checkpoint.helper_process:serve", self.modules)
            self._end = weakref.finalize(self, end_program, self._process)
        return self._process

    def _read(self) -> bytes | None:
        """None where it could not say, and is gone or as good as that."""
        assert self._process is not None
        found = None
        with contextlib.suppress(OSError):
            found = answer_of(self._process, seconds=LIMIT_S)
        if found is None:
            self.close()
        return found


def serve(modules: Sequence[str]) -> None:
    """The other process: answer until the pipe is closed. An error is not answered: the caller makes the call itself and meets it there."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a plan prints is no answer
    for name in modules:
        importlib.import_module(name)
    while (asked := read_message(questions)) is not None:
        try:
            function, args, options = pickle.loads(asked)
            found = pickle.dumps(function(*args, **options))
        except Exception:
            return
        with contextlib.suppress(BrokenPipeError):
            write_message(answers, found)

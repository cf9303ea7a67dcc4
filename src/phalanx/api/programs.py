"""`phalanx` as a program of its own, started by a Python program: ranks are forked, and threads of the caller (a notebook's, OpenMP's) would not survive that.

The program ends with its caller: SIGTERM, on which a run saves, where the caller is gone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from phalanx.core.errors import PhalanxError, RunError

Program = subprocess.Popen[str]

LAST_LINES = 20
"""Lines of a program's complaint that an error shows."""


class ProgramError(RunError):
    """A program of Phalanx ended with an error; `exit_code` is its own (docs/reference/commands.md)."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[PhalanxError], tuple[str]]:
        return RunError, (str(self),)


def start(words: Sequence[str]) -> Program:
    """`phalanx WORDS...`, in a session of its own: a Ctrl-C of the terminal goes to the caller alone. Standard output and errors are piped."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.api.child", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def complaint(text: str) -> str:
    """The last lines of what a program wrote to standard error."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])

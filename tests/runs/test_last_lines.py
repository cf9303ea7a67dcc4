"""What stands at the end of a terminal: the last line that a person needs, and nothing below it. Whole runs in a pseudo-terminal, as `make train` is one."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from train_help import train_args, write_text

from phalanx_lab.bench.cluster import workers_of

pytestmark = pytest.mark.ranks
TIMEOUT_S = 240.0
RANKS = 2


def on_a_terminal(args: list[str], act: Callable[[int, int], bool]) -> tuple[int, list[str]]:
    """Exit status of `phalanx ARGS...`, and the lines that it left. `act` hears the process and the terminal until it says that it has acted."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.execv(sys.executable, [sys.executable, "-m", "phalanx", *args])
    said, end_s, acted = b"", time.monotonic() + TIMEOUT_S, False
    status: int | None = None
    try:
        while status is None and time.monotonic() < end_s:
            acted = acted or act(pid, terminal)
            if not select.select([terminal], [], [], 0.05)[0]:
                continue
            try:
                said += os.read(terminal, 1 << 16)
            except OSError:  # nobody has the terminal open any more
                status = os.waitpid(pid, 0)[1]
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
    assert status is not None, f"still running after {TIMEOUT_S:g} s: {said[-4000:].decode(errors='replace')}"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode(errors="replace"))
    return os.waitstatus_to_exitcode(status), [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def names_of(pid: int) -> set[str]:
    """What the system calls the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {Path(f"/proc/{child}/comm").read_text().strip() for child in children}


def steps(folder: Path) -> int:
    """Steps that any rank has written about."""
    told = [path.read_text().splitlines() for path in folder.glob("events/rank-*.jsonl")]
    return max((json.loads(t)["step"] for lines in told for t in lines if '"kind":"StepEnded"' in t), default=0)


@pytest.mark.core
@pytest.mark.parametrize("how", ["kill -9 of a rank", "Ctrl-C"])
def test_nothing_stands_below_the_last_line_that_a_person_needs(how: str, tmp_path: Path) -> None:
    """Torch writes a stack trace of twelve lines for each connection that ends in a wait, and every member of an elastic run has such a wait."""
    write_text(tmp_path / "text")
    ranks = {
        "launch__ranks": RANKS,
        "folding__ep": 1,
        "train__steps": 12,
        "checkpoint__interval": 6,
        "observe__console": "auto",
    }
    folder = tmp_path / "runs" / "run"

    def act(pid: int, terminal: int) -> bool:
        if steps(folder) < 3:
            return False
        assert {f"phalanx-rank-{rank}" for rank in range(RANKS)} <= names_of(pid), "ps and pkill can tell ranks apart"
        if how == "Ctrl-C":
            os.write(terminal, b"\x03")
        else:
            os.kill(workers_of(folder, pid, ranks=RANKS)[RANKS - 1], signal.SIGKILL)
        return True

    status, lines = on_a_terminal(["train", *train_args(tmp_path, **ranks)], act)
    text = "\n".join(lines)
    assert status == 0, text[-4000:]
    assert (
        ("killed by SIGKILL" in text and "run: finished" in text) if how != "Ctrl-C" else "run: stopped after" in text
    )
    assert lines[-1].strip().endswith("prove its mapping"), text[-4000:]
    for trace in ("Exception raised from", "frame #", "Traceback", "TCPStore"):
        assert trace not in text, text[-8000:]

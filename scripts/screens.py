"""Pictures of the terminal while a small run trains, survives a kill -9, is stopped and ends: docs/pictures/screen-80x24.svg and so on.

    python scripts/screens.py [80x24 120x40 180x50]

Needs tmux. Writes what a person would see, line by line, at five moments of two runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "phalanx train recipes/tiny.toml --data.builtin_bytes 300000 --folding.ep 2"
PATIENCE_S = 120.0


class Terminal:
    """A terminal of so many columns and rows, with a shell in a folder of its own."""

    def __init__(self, size: str, folder: Path) -> None:
        self.columns, self.rows = map(int, size.split("x"))
        self.folder, self.name = folder, f"phalanx-screens-{os.getpid()}"
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH",) if name in os.environ]
        shell = ["env", f"PATH={programs}", "PS1=$ ", *more, "bash", "--norc", "--noprofile"]
        self.tmux("new-session", "-d", "-s", self.name, "-x", str(self.columns), "-y", str(self.rows), "-c", str(folder), *shell)  # fmt: skip
        time.sleep(1)

    def tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", self.name, *keys)

    def picture(self) -> Text:
        """The screen as it is, with its colours."""
        return Text.from_ansi(self.tmux("capture-pane", "-e", "-p", "-t", self.name).rstrip("\n"))

    def wait(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not until():
            if time.monotonic() > end_s:
                raise SystemExit(f"nothing came in {PATIENCE_S:g} s:\n{self.picture().plain}")
            time.sleep(0.2)

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.picture().plain

    def rank(self, number: int) -> int:
        """Process of a rank of the run that was started here."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                here = process.joinpath("cwd").resolve() == self.folder.resolve()
                if here and process.joinpath("comm").read_text().strip() == f"phalanx-rank-{number}":
                    return int(process.name)
        raise SystemExit(f"rank {number} is not there")

    def reached(self, step: int) -> Callable[[], bool]:
        """Whether rank 0 has logged a step."""
        log = self.folder / "runs/tiny/events/rank-0.jsonl"
        return lambda: log.exists() and f'"step":{step},' in log.read_text()


def pictures(terminal: Terminal) -> list[tuple[str, Text]]:
    """(moment, screen) of a run that is killed into and stopped, and of its end."""
    found = []
    terminal.type(f"clear; {TRAIN} --train.steps 160", "Enter")
    terminal.wait(terminal.reached(3))
    found.append(("the start", terminal.picture()))
    terminal.wait(terminal.reached(30))
    os.kill(terminal.rank(3), signal.SIGKILL)
    terminal.wait(terminal.says("ready to join"))
    terminal.wait(terminal.reached(60))
    found.append(("after kill -9 of rank 3", terminal.picture()))
    terminal.type("C-c")
    terminal.wait(terminal.says("prove its mapping"))
    found.append(("after Ctrl-C", terminal.picture()))
    terminal.type(f"clear; {TRAIN} --train.steps 160", "Enter")
    terminal.wait(terminal.reached(100))
    found.append(("going on", terminal.picture()))
    terminal.wait(terminal.says("prove its mapping"))
    time.sleep(2)
    return [*found, ("the end", terminal.picture())]


def main(sizes: list[str]) -> None:
    for size in sizes or ["80x24", "120x40", "180x50"]:
        with tempfile.TemporaryDirectory() as folder:
            terminal = Terminal(size, Path(folder))
            try:
                found = pictures(terminal)
            finally:
                terminal.tmux("kill-session", "-t", terminal.name)
        paper = Console(record=True, width=terminal.columns, file=io.StringIO(), legacy_windows=False)
        for moment, screen in found:
            paper.rule(moment)
            paper.print(screen, soft_wrap=True)
        target = ROOT / "docs" / "pictures" / f"screen-{size}.svg"
        svg = paper.export_svg(title=f"phalanx train, {size}")
        target.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # which would ask a foreign server
        print(target)


if __name__ == "__main__":
    main(sys.argv[1:])

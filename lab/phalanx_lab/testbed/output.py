"""Prints what the ranks of a job print, as it comes, each line behind its host and rank. Reads the logs, so it can lose nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from phalanx_lab.testbed.job import TestbedJob

_INTERVAL_S = 0.05


@dataclass
class Echo:
    """`tick` prints the whole lines that were written since the last time (it may be called often), `finish` also what has no line end yet."""

    job: TestbedJob
    stream: TextIO
    _next: float = 0.0
    _offsets: dict[int, int] = field(default_factory=dict)

    def tick(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL_S
        for state in self.job.ranks:
            self._print(state.rank, state.host, rest=False)

    def finish(self) -> None:
        for state in self.job.ranks:
            self._print(state.rank, state.host, rest=True)
        self.stream.flush()

    def _print(self, rank: int, host: int, *, rest: bool) -> None:
        path, start = self.job.log(rank), self._offsets.get(rank, 0)
        if not path.exists() or path.stat().st_size <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            text = file.read()
        whole = len(text) if rest else text.rfind(b"\n") + 1
        self._offsets[rank] = start + whole
        for line in text[:whole].decode(errors="replace").splitlines():
            self.stream.write(f"[host{host} rank{rank}] {line}\n")

"""The event logs of a run folder, read on from where one stopped.

Decides what of a folder may be read: files in `events/` of the folder itself, never through a link; and what is a line: whole ones, of at most `MOST_LINE` bytes. A
log that became shorter or is another file than before raises `ChangedLogError`: whoever remembers what it said forgets it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.reading import parse_json

MOST_LINE = 1 << 20
MOST_LOGS = 4096
CHUNK = 1 << 18
NAME = re.compile(r"rank-(\d{1,9})\.jsonl|host-[^/]{1,200}\.jsonl")
HEAD_BYTES = 512
TAIL_BYTES = 64
IN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class ChangedLogError(Exception):
    """A log is not the one that was read before."""


@dataclass
class LogPlace:
    """How far a log was read."""

    offset: int = 0
    inside: bool = False
    """Whether that is inside a line that is too long to be read."""
    mark: str = ""
    """Hash of its first bytes and of those before `offset`; empty: nothing was read."""


class LogFiles:
    """Logs of one run folder by name. Raises `OSError` where it has no folder `events`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Names of all logs, those of ranks by number first."""
        with self._events() as events, os.scandir(events) as entries:
            found = [e.name for e in entries if NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
        return sorted(found, key=lambda n: (n[0] != "r", int(n[5:-6]) if n[0] == "r" else 0, n))[:MOST_LOGS]

    def times(self) -> dict[str, float]:
        """When each log was written last (seconds since the epoch), by name."""
        with self._events() as events, os.scandir(events) as entries:
            logs = itertools.islice((e for e in entries if NAME.fullmatch(e.name)), MOST_LOGS)
            return {e.name: e.stat(follow_symlinks=False).st_mtime for e in logs}

    @contextlib.contextmanager
    def _events(self) -> Iterator[int]:
        handle = os.open(self.folder / "events", IN_FOLDER | os.O_DIRECTORY)
        try:
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        """The descriptor of a regular file in `events`. Raises `OSError`."""
        with self._events() as events:
            handle = os.open(name, IN_FOLDER, dir_fd=events)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{name} is not a regular file")
            yield handle
        finally:
            os.close(handle)

    def size(self, name: str) -> int:
        """Bytes of a log; 0 where it is not there."""
        try:
            with self.open(name) as handle:
                return os.fstat(handle).st_size
        except OSError:
            return 0

    def next_lines(self, name: str, place: LogPlace) -> bytes:
        """The next whole lines, about `CHUNK` bytes of them at most; `place` moves behind them. Empty at the end, and inside a line that is too long."""
        with self.open(name) as handle:
            if os.fstat(handle).st_size < place.offset or (place.mark and _mark(handle, place.offset) != place.mark):
                raise ChangedLogError(name)
            data = os.pread(handle, CHUNK, place.offset)
            cut = data.rfind(b"\n") + 1
            if not cut and len(data) == CHUNK and not place.inside:
                data = os.pread(handle, MOST_LINE, place.offset)
                cut = data.rfind(b"\n") + 1
            if place.inside or (not cut and len(data) >= MOST_LINE):  # of a line that is longer than any event
                end = data.find(b"\n") + 1
                place.inside, cut, data = not end, end or len(data), b""
            place.offset += cut
            place.mark = _mark(handle, place.offset)  # of the file that was read, whatever has this name by now
        return data[:cut]

    def lines_from(self, name: str, offset: int, *, most: int) -> Iterator[bytes]:
        """Whole lines from there on, of about `most` bytes together."""
        place = LogPlace(offset=offset)
        while place.offset < offset + most:
            before = place.offset
            yield from self.next_lines(name, place).split(b"\n")[:-1]
            if place.offset == before:
                return

    def mark(self, name: str, offset: int) -> str:
        """What tells a log that was read up to `offset` from another one."""
        with self.open(name) as handle:
            return _mark(handle, offset)

    def offset_at(self, name: str, time_s: float) -> int:
        """Where the lines begin that were written at `time_s` or later, by bisection; lines stand in the order of time."""
        with self.open(name) as handle:
            low, high = 0, os.fstat(handle).st_size
            while high - low > 65536:
                middle = (low + high) // 2
                found = _time_after(handle, middle)
                if found is None or found >= time_s:
                    high = middle
                else:
                    low = middle
            begin = os.pread(handle, 65536, low).find(b"\n") + 1 if low else 0
            return low + begin


def _mark(handle: int, offset: int) -> str:
    if not offset:
        return ""
    head = os.pread(handle, min(HEAD_BYTES, offset), 0)
    tail = os.pread(handle, min(TAIL_BYTES, offset), max(0, offset - TAIL_BYTES))
    return hashlib.sha256(head + b"|" + tail).hexdigest()[:32]


_TIME = re.compile(rb'\n\{"kind":"\w{1,40}","time_s":(\d{1,12}(?:\.\d{1,9})?)')


def _time_after(handle: int, offset: int) -> float | None:
    """When the first line that begins behind `offset` was written; None where there is none near."""
    found = _TIME.search(os.pread(handle, 1 << 18, offset))
    return float(found[1]) if found else None


def kind_of(line: bytes) -> bytes:
    """Kind of an event as our own writer puts it; empty: it must be parsed to know."""
    return line[9 : line.find(b'"', 9, 60)] if line.startswith(b'{"kind":"') else b""


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is none (then it counts as a broken one). Its fields may have any type."""
    if len(line) > MOST_LINE:
        return None
    try:
        record = parse_json(line, where="an event")
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("time_s")) in (int, float):
        return record
    return None

"""`events/rank-N.jsonl`: one JSON object a line, written as events happen, read back by anyone.

Must never change: a line is handed to the kernel in one write as soon as its event happens, so a process that is killed loses at most the
line it was writing; what stands before stays readable. Resuming appends. An event that an earlier process logged and that training then
went back behind (it happened after the checkpoint it resumed from) is void: `read_history` leaves it out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import time
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, printable
from phalanx.core.events import Event, was_refused
from phalanx.core.reading import MalformedError, lines_of, open_regular, parse_json, typed

Record = dict[str, Any]


def log_path(folder: Path, rank: int) -> Path:
    return folder / "events" / f"rank-{rank}.jsonl"


def host_log_path(folder: Path, host: str) -> Path:
    return folder / "events" / f"host-{host}.jsonl"


class JsonlSink:
    """Appends each event of one rank to its log. A torn last line of a killed process is cut off first."""

    def __init__(self, folder: Path, *, rank: int | None = None, host: str = "") -> None:
        """`host`: the log of a supervisor, which only people read."""
        self.name = "event log"
        path = host_log_path(folder, host) if rank is None else log_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size = _whole_lines(self._file)
        os.ftruncate(self._file, self._size)

    def write(self, event: Event) -> None:
        line = encode(event, time_s=time.time())
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # a full disk takes part of a line: take it back, so that the log stays readable and can grow again
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        os.close(self._file)


def encode(event: Event, *, time_s: float) -> bytes:
    """One line. NaN and infinities, which JSON does not have, become null."""
    record = event.to_record()
    record = {"kind": record.pop("kind"), "time_s": round(time_s, 6), **record}
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), separators=(",", ":"))
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _whole_lines(file: int) -> int:
    """Size of the file without a torn last line."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_events(path: Path) -> Iterator[Record]:
    """All records of one log. A torn last line is left out; any other broken line raises `DataError` naming file and line."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines_of(file), start=1):
                if line.endswith(b"\n"):
                    yield read_line(path, number, line)
    except OSError as error:
        hint = "give the folder of a run, such as runs/laptop"
        rule = f"cannot be read: {error.strerror}"
        raise DataError.of(str(path), None, rule, hint, subject="the event log") from error


def event_of(record: Record) -> Event | None:
    """The event that a record was written from; None for a kind that this program does not know. Numbers that were not finite are NaN. Raises `MalformedError` for one that does not fit."""
    cls = next((each for each in Event.__subclasses__() if each.__name__ == record.get("kind")), None)
    if cls is None:
        return None
    types = _fields_of(cls.__name__)[1]
    given = {f.name: record[f.name] for f in fields(cls) if f.name in record}
    nan = {name: math.nan for name in _NULLABLE if given.get(name, 0.0) is None}
    known = {name: typed(value, types[name], where=name) for name, value in given.items() if name not in nan}
    event: Event = cls(**known, **nan)
    return event


def read_line(path: Path, number: int, line: bytes) -> Record:
    """The record of a line of a log, checked. Raises `DataError` naming file and line."""
    try:
        record = parse_json(line, where=f"{path}:{number}")
        if isinstance(record, dict) and isinstance(loads := record.get("load_max_over_mean"), list):
            record["load_max_over_mean"] = [math.nan if x is None else x for x in loads]  # as it was before `_finite`
        if _is_event(record):
            return _cleaned(record) if _CONTROLS.search(line) else record
    except ValueError:
        pass
    rule, hint = "is not an event", "delete the line; each line is a JSON object with a kind"
    raise DataError.of(f"{path}:{number}", line[:80], rule, hint, subject="the event log")


_CONTROLS = re.compile(rb"\\u00[0189]|\x7f|\xc2[\x80-\x9f]|\\u20|\xe2\x80|\xe2\x81")
"""What may steer a terminal, in a line of JSON."""
_NULLABLE = frozenset({"loss", "aux_loss", "z_loss", "grad_norm", "router_entropy", "mtp_loss"})
"""Numbers that may be NaN, for which null is written."""
_PLAIN: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,), bool: (bool,)}
_LARGEST = 1 << 63


def _is_event(record: Any) -> bool:
    """Whether it has a kind and a time, and the fields of its kind with their types; kinds that we do not know (a newer program's) may have any."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    needed, types = _fields_of(record["kind"])
    return record.keys() >= needed and all(
        name not in record or _fits(name, record[name], of) for name, of in types.items()
    )


@functools.cache
def _fields_of(kind: str) -> tuple[frozenset[str], dict[str, Any]]:
    """Fields that every event of a kind was written with, and the types of all."""
    known = next((event for event in Event.__subclasses__() if event.__name__ == kind), Event)
    needed = frozenset({"time_s", *(f.name for f in fields(known) if f.default is MISSING)})
    return needed, {"time_s": float, **typing.get_type_hints(known)}


def _fits(name: str, value: Any, declared: Any) -> bool:
    if (kinds := _PLAIN.get(declared)) is not None:
        plain = type(value) in kinds and (isinstance(value, str) or -_LARGEST < value < _LARGEST)
        return plain or (value is None and name in _NULLABLE)
    try:
        typed(value, declared, where=name)
    except MalformedError:
        return False
    return True


def _cleaned(value: Any) -> Any:
    """The same without what steers a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_cleaned(k): _cleaned(v) for k, v in value.items()}
    return [_cleaned(v) for v in value] if isinstance(value, list) else value


@dataclass
class History:
    """What counts of a run: events that training later went back behind are gone."""

    started: Record = field(default_factory=dict)
    """The newest start."""
    starts: int = 0
    steps: dict[int, Record] = field(default_factory=dict)
    validations: dict[int, Record] = field(default_factory=dict)
    checkpoints: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)
    ended: Record | None = None
    """How the newest process ended; None while it runs, or where it was killed."""


def read_history(folder: Path, *, rank: int = 0) -> History:
    """The course of a run as one rank logged it. Raises `DataError` where there is none."""
    history = History()
    for record in read_events(log_path(folder, rank)):
        apply(history, record)
    return history


def apply(history: History, record: Record) -> None:
    """What one record, the next in time, changes."""
    match record["kind"]:
        case "RunStarted":
            history.started, history.ended = record, None
            history.starts += 1
            _go_back(history, record["step"])
        case "WentBack":
            _go_back(history, record["step"])
        case "StepEnded":
            history.steps[record["step"]] = record
            history.ended = None  # an end before it was of a process that the others went on without
        case "Validated":
            history.validations[record["step"]] = record
        case "CheckpointSaved":
            history.checkpoints.append(record)
        case "Sampled":
            history.samples.append(record)
        case "Note":
            history.notes.append(record)
        case "RunEnded" if history.ended is None or not was_refused(record["reason"]):
            history.ended = record


def _go_back(history: History, step: int) -> None:
    """What came after so many steps is void."""
    for kept in (history.steps, history.validations):
        for void in [s for s in kept if s > step]:
            del kept[void]

"""The index of a run: read from its file, brought up to date from the logs, written back.

Decides when the file `events/index` is believed: its checksum is right, it is of this version, and each log that it has read still begins and goes on as it did. Everything else is read
anew from the logs. It is replaced as a whole, so a reader sees the old one or the new one; nothing is lost with it. Of a run that is not elastic one log says all that is
remembered, for its ranks tell the same; of an elastic one all logs are read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.core.events import Event
from phalanx.core.reading import parse_table
from phalanx.observe.index.course import LISTS, RunCourse
from phalanx.observe.index.curves import COLUMNS, MOST_STEPS, Curves, number
from phalanx.observe.index.heat import MOST_CELLS, HeatMap
from phalanx.observe.index.logs import ChangedLogError, LogFiles, LogPlace, kind_of, parse_event

FILE = "index"
VERSION = "phalanx-index-1"
MOST_BYTES = 64 << 20
MOST_MISSING = 100_000
NOT_READ = frozenset(
    {b"SamplesTaken", b"Operation", b"Collective", b"ClockCompared", b"StepPublished", b"MoveRecorded"}
)
STEP, SAMPLES = b'{"kind":"StepEnded"', b'{"kind":"SamplesTaken"'
PLACED = b"StatePlaced"
LOOK_BYTES = 65536
TOKENS, LOAD, EXPOSED, HIDDEN = map(COLUMNS.index, ("tokens", "load", "exposed_s", "hidden_s"))


class RunIndex:
    """What the logs of one run folder said so far. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.files = LogFiles(folder)
        self.version = self.revised = -1
        self.forget()

    def forget(self) -> None:
        """Begin anew, as if no log had been read."""
        self.places: dict[str, LogPlace] = {}
        self.curves, self.course = Curves(), RunCourse()
        self.layers: HeatMap | None = None
        """Tokens of the fullest expert over the mean, by MoE layer."""
        self.experts: HeatMap | None = None
        """Tokens of every expert over the mean of its layer, layer-major."""
        self.shape = (0, 0)
        """MoE layers and experts of `experts`."""
        self.last_step = 0
        self.missing: set[int] = set()
        """Steps below `last_step` that no log has told of."""
        self.voids: list[tuple[float, int]] = []
        """(when, steps committed): steps above that were told until then are void."""
        self.version += 1
        """Grows with whatever is read."""
        self.revised = self.version
        """The version in which something was changed that older ones had: forgotten, void, or a step told late."""
        self.touched: dict[str, int] = {}
        """List of `course` -> version in which it was changed last."""
        self.elastic = False
        self._newest: tuple[dict[str, Any], list[float]] | None = None

    @property
    def tokens(self) -> float:
        """Tokens of the steps that count; of a row that a void lies across, of those before it too."""
        self.curves.settle()
        return float(self.curves.total[: self.curves.rows, TOKENS].sum())

    # ---- reading on --------------------------------------------------------------------------------------------------

    def read_on(self) -> Iterator[tuple[int, int]]:
        """Reads what the logs have gained; yields (bytes read, bytes to read) after each piece, of some milliseconds' work. Raises `OSError` where there are no logs."""
        names = self._names()
        sizes = {name: self.files.size(name) for name in names}
        done, todo = 0, sum(size - self.places.get(name, LogPlace()).offset for name, size in sizes.items())
        try:
            for name in names:
                place = self.places.setdefault(name, LogPlace())
                if sizes[name] < place.offset:
                    raise ChangedLogError(name)
                while place.offset < sizes[name]:
                    before = place.offset
                    data = self.files.next_lines(name, place)
                    if place.offset == before:
                        break
                    if not self._is_known(data):
                        self.take_lines(data.split(b"\n")[:-1], log=name, offset=before)
                    done += place.offset - before
                    yield done, todo
        except ChangedLogError:
            self.forget()
            yield 0, 1

    def update(self) -> bool:
        """Reads all that the logs have gained; whether that was anything. Raises `OSError`."""
        before = self.version
        for _ in self.read_on():
            pass
        return self.version != before

    def _names(self) -> list[str]:
        names = self.files.names()
        ranks = [name for name in names if name.startswith("rank-")]
        self.elastic = self.elastic or any(self._begins_elastic(name) for name in ranks[:8] if name not in self.places)
        return names if self.elastic else ranks[:1]

    def _begins_elastic(self, name: str) -> bool:
        """Whether a log tells of a team before its first step."""
        with self.files.open(name) as handle:
            return b'"kind":"TeamFormed"' in os.pread(handle, LOOK_BYTES, 0)

    def take_lines(self, lines: list[bytes], *, log: str = "", offset: int = 0) -> None:
        """What whole lines of a log say, in their order. `offset`: where they begin in `log`."""
        for line in lines:
            kind, begin = kind_of(line), offset
            offset += len(line) + 1
            if kind in NOT_READ or (kind == b"StepEnded" and self._knows(_step_of(line))):
                continue
            record = parse_event(line)
            if record is None:
                self.course.broken += 1
            else:
                self.take(record | {"log": log, "offset": begin} if kind == PLACED else record)
        if self._newest is not None:
            (when, values), self._newest = self._newest, None
            self.course.last = when | {n: v for n, v in zip(COLUMNS, values, strict=True) if math.isfinite(v)}

    def _is_known(self, data: bytes) -> bool:
        """Whether these lines say nothing but what another member told already: most of the logs of an elastic run."""
        last = data.rfind(STEP)
        if self.missing or last < 0 or not self._knows(_step_of(data[last : last + 100])):
            return False
        return data.count(STEP) + data.count(SAMPLES) == data.count(b"\n")

    def _knows(self, step: int) -> bool:
        return 0 < step <= self.last_step and step not in self.missing

    def take(self, record: dict[str, Any]) -> None:
        """What one event says."""
        at = number(record["time_s"])
        if not at > 0:
            self.course.broken += 1
            return
        if not self.elastic:  # of one log its order decides: the clock may have been set back between two processes
            at = max(at, self.course.heard_s)
        self.version += 1
        self.course.heard_s = max(self.course.heard_s, at)
        if record["kind"] in LISTS:
            self.touched[LISTS[record["kind"]]] = self.version
        match record["kind"]:
            case "StepEnded":
                self._step(record, at)
            case "ExpertLoads":
                self._loads(record)
            case "TeamFormed":
                self.elastic = True
                self.course.take(record, at=at)
            case "RunStarted" | "WentBack":
                self._void(record, at)
                self.course.take(record, at=at)
            case "Validated" if self._is_void(record.get("step"), at):
                pass  # a member that was lost tells it, and its log is read after
            case _:
                self.course.take(record, at=at)

    def _step(self, record: dict[str, Any], at: float) -> None:
        step = record.get("step")
        if type(step) is not int or not 0 < step <= MOST_STEPS or self._knows(step) or self._is_void(step, at):
            return
        if step > self.last_step:
            if step - self.last_step <= MOST_MISSING and len(self.missing) <= MOST_MISSING:
                self.missing.update(range(self.last_step + 1, step))
            self.last_step = step
            if self.course.ended is not None and at > self.course.ended["at"]:
                self.course.ended = None
        else:
            self.revised = self.version
        self.missing.discard(step)
        loads, values = _figures(record)
        self.curves.add(step, at, values)
        if loads and not math.isnan(sum(loads)):
            if self.layers is None or self.layers.cells != len(loads):
                self.layers = HeatMap(len(loads))
            self.layers.add(step, np.array(loads))
        if step == self.last_step:
            self._newest = {"at": at, "step": step}, values

    def _is_void(self, step: Any, at: float) -> bool:
        """Whether training went back behind this step after it was told. One log tells that in its order."""
        return (
            self.elastic and type(step) is int and any(step > after and at <= until_s for until_s, after in self.voids)
        )

    def _void(self, record: dict[str, Any], at: float) -> None:
        step = record.get("step")
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            return
        self.voids = [*self.voids[-200:], (at, step)]
        if step >= self.last_step:
            return
        self.revised = self.version
        gone = self.curves.void(step, until_s=at)
        self.course.void(step, until_s=at)
        self.touched["validations"] = self.version
        if self.curves.last <= -(-step // self.curves.width) * self.curves.width:  # nothing later was told since
            self.last_step, self.missing = step, {m for m in self.missing if m <= step}
            for heat in (self.layers, self.experts):
                if heat is not None:
                    heat.void(step)
        else:
            self.missing.update(itertools.islice(itertools.chain(*gone), MOST_MISSING))

    def _loads(self, record: dict[str, Any]) -> None:
        step, counts = record.get("step"), record.get("counts")
        if type(step) is not int or not 0 < step <= MOST_STEPS or not isinstance(counts, list) or not counts:
            return
        try:
            counts_LE = np.array(counts, np.float64)
        except (ValueError, TypeError, OverflowError):
            return
        if counts_LE.ndim != 2 or not 0 < counts_LE.size <= MOST_CELLS or not (abs(counts_LE) < 1e15).all():
            return
        if self.experts is None or self.shape != counts_LE.shape:
            self.experts, self.shape = HeatMap(counts_LE.size), counts_LE.shape
        mean_L1 = np.maximum(counts_LE.mean(1, keepdims=True), 1e-9)
        self.experts.add(step, (np.maximum(counts_LE, 0) / mean_L1).ravel())

    # ---- the file ----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return self.files.folder / "events" / FILE

    def load(self) -> bool:
        """Take up what the file knows; whether there is one that is believed."""
        try:
            with self.files.open(FILE) as handle:
                data = os.pread(handle, MOST_BYTES + 1, 0) if os.fstat(handle).st_size <= MOST_BYTES else b""
            self._from_bytes(data)
            return True
        except (OSError, PhalanxError, ValueError, KeyError, TypeError, AttributeError, OverflowError, ChangedLogError):
            self.forget()
            return False

    def save(self) -> int:
        """Replaces the file; returns its size. Raises `OSError`."""
        data = self._to_bytes()
        path, aside = self.path, self.path.with_name(f".{FILE}-{os.getpid()}-{threading.get_ident()}")
        handle = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        return len(data)

    def _to_bytes(self) -> bytes:
        parts = {"curves": self.curves.to_bytes(), "layers": _bytes_of(self.layers), "experts": _bytes_of(self.experts)}
        head = {
            "logs": {n: [p.offset, p.inside, p.mark] for n, p in self.places.items()},
            "course": self.course.to_json_dict(), "shape": self.shape, "last_step": self.last_step, "elastic": self.elastic,
            "missing": sorted(self.missing), "voids": self.voids, "parts": {n: [h, len(d)] for n, (h, d) in parts.items()},
        }  # fmt: skip
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        body = text + b"".join(data for _, data in parts.values())
        return f"{VERSION} {zlib.crc32(body):08x} {len(text)}\n".encode() + body

    def _from_bytes(self, data: bytes) -> None:
        """Raises `ValueError` and its like where that is no index of these logs."""
        line, _, body = data.partition(b"\n")
        version, checksum, length = line.decode("ascii").split(" ")
        if version != VERSION or int(checksum, 16) != zlib.crc32(body):
            raise ValueError("another version, or damaged")
        head = parse_table(body[: int(length)], where=FILE)
        place, found = int(length), {}
        for name, (part, size) in head["parts"].items():
            found[name] = part, body[place : place + int(size)]
            place += int(size)
        for name, (offset, inside, mark) in head["logs"].items():
            if (
                name not in self.files.names()
                or self.files.size(name) < offset
                or self.files.mark(name, offset) != mark
            ):
                raise ChangedLogError(name)
            self.places[name] = LogPlace(offset=int(offset), inside=bool(inside), mark=str(mark))
        self.curves = Curves.from_bytes(*found["curves"])
        self.layers, self.experts = _heat_of(*found["layers"]), _heat_of(*found["experts"])
        self.course = RunCourse.from_json_dict(head["course"])
        layers, experts = head["shape"]
        if (self.experts.cells if self.experts else 0) != int(layers) * int(experts):
            raise ValueError("loads of another shape")
        self.shape, self.elastic = (int(layers), int(experts)), bool(head["elastic"])
        self.last_step, self.missing = int(head["last_step"]), {int(m) for m in head["missing"]}
        self.voids = [(float(at), int(step)) for at, step in head["voids"]]
        told = self.course.validations  # earlier versions kept void ones
        self.course.validations = [v for v in told if not self._is_void(v["step"], v["at"])]
        self.version += 1


def _bytes_of(heat: HeatMap | None) -> tuple[dict[str, Any], bytes]:
    return ({}, b"") if heat is None else heat.to_bytes()


def _heat_of(head: dict[str, Any], data: bytes) -> HeatMap | None:
    return HeatMap.from_bytes(head, data) if head else None


def _step_of(line: bytes) -> int:
    """Number of the step of a line of `StepEnded`, without parsing it; 0 where it does not stand where we write it."""
    begin = line.find(b'"step":', 20, 80) + 7
    digits = line[begin : line.find(b",", begin, begin + 20)]
    return int(digits) if begin > 6 and digits.isdigit() else 0


def _figures(record: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Loads by layer, and a value for each of `COLUMNS`."""
    get = record.get
    told = get("load_max_over_mean")
    loads = [number(x) for x in told[:512]] if isinstance(told, list) else []
    values = [number(get(name)) for name in COLUMNS]
    values[LOAD] = max(loads) if loads else math.nan
    values[EXPOSED] = _sum(get("exposed_forward_s"), get("exposed_backward_s"))
    values[HIDDEN] = _sum(get("hidden_forward_s"), get("hidden_backward_s"))
    return loads, values


def _sum(*told: Any) -> float:
    known = [x for values in told if isinstance(values, list) for x in values[:512]]
    return sum(map(number, known)) if known else math.nan


# ---- beside training -------------------------------------------------------------------------------------------------


class IndexSink:
    """Keeps the index of a run while it trains: a thread reads the logs on, a little at a time. It can be missing or late without harm."""

    PAUSE_S = 1.0
    WORK_S = 0.02
    """Longest work at a time: at most this share of a second is taken from the process."""
    BYTES_PER_S = 200_000.0
    """At most so much is written for it, and at most every 5 s."""
    LEAST_S = 5.0

    def __init__(self, folder: Path) -> None:
        self.name = "index of the event log"
        self.folder = folder
        self._begun = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="index", daemon=True)

    def write(self, event: Event) -> None:
        """Nothing: the log has it."""
        if not self._begun.is_set():
            self._begun.set()
            self._thread.start()

    def close(self) -> None:
        """Bring it up to date, where that takes no more than a second."""
        self._over.set()
        if self._begun.is_set():
            self._thread.join(timeout=10.0)

    def _keep(self) -> None:
        index, saved_s, size, saved = RunIndex(self.folder), time.monotonic(), 0, 0
        with contextlib.suppress(OSError):
            index.load()
            pause_s = self.PAUSE_S
            while not self._over.wait(pause_s):
                begin_s = time.monotonic()
                _work(index, self.WORK_S)
                # only to list the logs of thousands of ranks takes longer
                pause_s = self.PAUSE_S * min(60.0, max(1.0, (time.monotonic() - begin_s) / self.WORK_S))
                wait_s = max(self.LEAST_S, size / self.BYTES_PER_S)
                if index.version != saved and time.monotonic() - saved_s >= wait_s:
                    saved, size, saved_s = index.version, index.save(), time.monotonic()
            _work(index, 1.0)
            index.save()


def _work(index: RunIndex, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Read on for at most so long."""
    begin_s = clock()
    for _ in index.read_on():
        if clock() - begin_s >= most_s:
            break

"""TensorBoard event files, without torch (whose `SummaryWriter` wraps tensorboard's own).

A thread of ours does the writing; the training step pays for building one protocol buffer. (That of tensorboard's `EventFileWriter` prints a traceback where the disk
is full.) Where a run starts or goes back a session mark tells TensorBoard to forget the points that training went back behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as EventProto, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from phalanx.core.events import Event, RunStarted, WentBack
from phalanx.observe.metrics import samples

FLUSH_S = 5.0
"""A killed run loses at most this much of its curves here; the event log loses nothing."""
VERSION = "brain.Event:2"
"""What the first record of an event file says."""


class TensorBoardSink:
    """Scalars named as in `observe/metrics.py`, below `folder`. `write` raises what the disk refused last."""

    def __init__(self, folder: Path, *, flush_s: float = FLUSH_S) -> None:
        self.name = "TensorBoard"
        self._file = _EventFile(folder, flush_s=flush_s)
        self._file.add(EventProto(wall_time=time.time(), file_version=VERSION))

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted | WentBack):
            mark = SessionLog(status=SessionLog.START)
            # TensorBoard drops what it has from this step on: `step` itself was committed, the next one comes anew
            self._file.add(EventProto(wall_time=time.time(), step=event.step + 1, session_log=mark))
        values = list(samples(event))
        if values:
            summary = Summary(value=[Summary.Value(tag=s.tag, simple_value=s.value) for s in values])
            self._file.add(EventProto(wall_time=time.time(), step=values[0].step, summary=summary))

    def close(self) -> None:
        self._file.close()


class _EventFile:
    """Whole records only: what the disk takes a part of is taken back, and lost."""

    def __init__(self, folder: Path, *, flush_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now_s, now_ns = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns:09d}"
        self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size, self._flush_s = 0, flush_s
        self._waiting: list[bytes] = []
        self._error: OSError | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, proto: EventProto) -> None:
        with self._lock:
            self._waiting.append(proto.SerializeToString())
            error = self._error
        if error is not None:
            raise error

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._fd)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(self._flush_s)
            with self._lock:
                records, self._waiting = self._waiting, []
            if records:
                error = self._append(records)
                with self._lock:
                    self._error = error

    def _append(self, records: list[bytes]) -> OSError | None:
        framed = io.BytesIO()
        for record in records:
            RecordWriter(framed).write(record)
        rest = framed.getbuffer()
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as err:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            return err.with_traceback(None)
        self._size += framed.tell()
        return None

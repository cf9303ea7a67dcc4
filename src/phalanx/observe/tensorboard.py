"""TensorBoard event files, written with tensorboard's own writer and without torch (whose `SummaryWriter` wraps the same class).

A queue and a thread of tensorboard's do the writing; the training step pays for building one protocol buffer. After a resume a
session mark tells TensorBoard to forget the points that training went back behind.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as EventProto
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from phalanx.core.events import Event, RunStarted
from phalanx.observe.metrics import samples

FLUSH_S = 5
"""A killed run loses at most this much of its curves here; the event log loses nothing."""


class TensorBoardSink:
    """Scalars named as in `observe/metrics.py`, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.name = "TensorBoard"
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted) and event.step > 0:
            mark = SessionLog(status=SessionLog.START)
            # TensorBoard drops what it has from this step on: `step` itself was committed, the next one comes anew
            self._writer.add_event(EventProto(wall_time=time.time(), step=event.step + 1, session_log=mark))
        values = list(samples(event))
        if values:
            summary = Summary(value=[Summary.Value(tag=s.tag, simple_value=s.value) for s in values])
            self._writer.add_event(EventProto(wall_time=time.time(), step=values[0].step, summary=summary))

    def close(self) -> None:
        self._writer.close()

"""A summary of a run's event logs that is kept while the run writes, so that a page about 100,000 steps on 64 ranks is there at once.

The room decides what of the logs is remembered, how much of it at most, and when the summary on disk is believed: `RunIndex` reads the logs on from where it
stopped, `IndexSink` lets rank 0 do so beside training, and whoever finds no sound file reads the logs from their beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.index.course import KEPT as KEPT, START_S as START_S
    from phalanx.observe.index.curves import COLUMNS as COLUMNS
    from phalanx.observe.index.kept import IndexSink as IndexSink, RunIndex as RunIndex
    from phalanx.observe.index.logs import ChangedLogError as ChangedLogError, LogFiles as LogFiles
else:
    __getattr__ = lazy(__name__)

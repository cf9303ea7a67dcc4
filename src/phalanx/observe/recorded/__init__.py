"""What a recorded run did, read from its folder: spans of each rank, communication that no work hid, recoveries, and the Perfetto trace of all.

The room decides how events of many ranks become one course: which clock they share, which spans overlap, and what belongs to a recovery. It reads logs of every version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.recorded.exposure import Exposure as Exposure, by_axis as by_axis, by_layer as by_layer
    from phalanx.observe.recorded.intervals import innermost as innermost, subtract as subtract, union as union
    from phalanx.observe.recorded.lanes import (
        RankMove as RankMove,
        RankStep as RankStep,
        Recording as Recording,
        find_recording as find_recording,
        read_recording as read_recording,
        recording_of as recording_of,
    )
    from phalanx.observe.recorded.recovery import (
        Course as Course,
        read_run as read_run,
        recovery_figures as recovery_figures,
        recovery_spans as recovery_spans,
        recovery_trace as recovery_trace,
    )
    from phalanx.observe.recorded.trace import perfetto_trace as perfetto_trace
else:
    __getattr__ = lazy(__name__)

"""Where events go: console, files, TensorBoard. Imports core only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.charts import chart as chart
    from phalanx.observe.console import wants_live as wants_live
    from phalanx.observe.event_log import (
        History as History,
        JsonlSink as JsonlSink,
        Record as Record,
        read_history as read_history,
    )
    from phalanx.observe.exposure import Exposure as Exposure, by_axis as by_axis, by_layer as by_layer
    from phalanx.observe.lanes import (
        RankMove as RankMove,
        RankStep as RankStep,
        Recording as Recording,
        find_recording as find_recording,
        read_recording as read_recording,
    )
    from phalanx.observe.metrics import METRICS as METRICS
    from phalanx.observe.preparation import PreparationProgress as PreparationProgress
    from phalanx.observe.recovery import (
        Course as Course,
        read_run as read_run,
        recovery_figures as recovery_figures,
        recovery_spans as recovery_spans,
        recovery_trace as recovery_trace,
    )
    from phalanx.observe.sinks import (
        Sinks as Sinks,
        open_sinks as open_sinks,
        warn_without_screen as warn_without_screen,
    )
    from phalanx.observe.summary import (
        RunSummary as RunSummary,
        print_summary as print_summary,
        program_name as program_name,
    )
    from phalanx.observe.table import (
        TableRow as TableRow,
        exchange_words as exchange_words,
        header as header,
        row_line as row_line,
        short as short,
    )
    from phalanx.observe.trace import perfetto_trace as perfetto_trace
else:
    __getattr__ = lazy(__name__)

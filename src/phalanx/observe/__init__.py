"""Where events go while a run trains: console, files, TensorBoard, Prometheus; and the history of a run as a table. What a recorded run did is read in `recorded/`.

The room decides which sink hears an event (`open_sinks`), and that a sink that fails costs its lines and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.charts import chart as chart
    from phalanx.observe.console import ConsoleSink as ConsoleSink, wants_live as wants_live
    from phalanx.observe.event_log import (
        History as History,
        JsonlSink as JsonlSink,
        Record as Record,
        apply as apply,
        event_of as event_of,
        log_path as log_path,
        read_events as read_events,
        read_history as read_history,
        read_line as read_line,
    )
    from phalanx.observe.metrics import METRICS as METRICS, samples as samples
    from phalanx.observe.preparation import PreparationProgress as PreparationProgress
    from phalanx.observe.recipes import differences as differences, recipe_values as recipe_values
    from phalanx.observe.sinks import (
        Sink as Sink,
        Sinks as Sinks,
        open_sinks as open_sinks,
        open_watched as open_watched,
        sink_problems as sink_problems,
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
        loss_text as loss_text,
        row_line as row_line,
        short as short,
    )
else:
    __getattr__ = lazy(__name__)

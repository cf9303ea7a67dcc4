"""A predicted step as a trace that Perfetto and chrome://tracing open: one process for each pipeline rank.

Decides names only: `F2.5` is the forward pass of stage 2 on micro-batch 5. `phalanx trace` draws real runs with the same writer.
"""

from __future__ import annotations

from typing import Any

from phalanx.core.trace_file import TraceFile
from phalanx.plan.schedule_time import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(timeline: Timeline, *, title: str) -> dict[str, Any]:
    """The timeline as Chrome's JSON object."""
    trace = TraceFile(title=title)
    for rank, spans in enumerate(timeline.spans):
        trace.process(rank, f"pipeline rank {rank}")
        for span in spans:
            kind, stage, mb = span.action
            args = {"pass": NAMES[kind], "stage": stage, "microbatch": mb}
            trace.span(
                rank, 0, str(span.action), begin_s=span.start, end_s=span.end, category="kernel", args=args
            )  # fmt: skip
    return trace.to_json_dict()

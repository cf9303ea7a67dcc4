"""A predicted step as a trace that Perfetto and chrome://tracing open: one process for each pipeline rank.

Decides names and units only: microseconds, `F2.5` is the forward pass of stage 2 on micro-batch 5.
"""

from __future__ import annotations

from typing import Any

from phalanx.plan.schedule_time import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(timeline: Timeline, *, title: str) -> dict[str, Any]:
    """The timeline as Chrome's JSON object."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"pipeline rank {rank}"}}
        )
        for span in spans:
            kind, stage, mb = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(span.action),
                    "cat": "kernel",
                    "pid": rank,
                    "tid": 0,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"pass": NAMES[kind], "stage": stage, "microbatch": mb},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}

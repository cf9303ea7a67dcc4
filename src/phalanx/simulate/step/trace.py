"""A predicted step as a trace that Perfetto and chrome://tracing open: one process for each pipeline rank.

Decides names only: `F2.5` is the forward pass of stage 2 on micro-batch 5. A second lane shows what a pass consists of: computation and the communication
that nothing hides, each kind in one piece (their order inside a pass is that of the layers, not of the lane). `phalanx trace` draws real runs with the same writer.
"""

from __future__ import annotations

from typing import Any

from phalanx.core.trace_file import TraceFile
from phalanx.simulate.step.timing import StepTime

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
PASSES, PARTS = 0, 1
AFTER = ("dp", "optimizer")
"""What follows the last pass of every rank."""


def chrome_trace(step: StepTime, *, title: str) -> dict[str, Any]:
    """The step as Chrome's JSON object. Its timeline must be there."""
    timeline = step.timeline
    if timeline is None:
        raise ValueError("the step was not put on the clock of its schedule")
    trace = TraceFile(title=title)
    for rank, spans in enumerate(timeline.spans):
        trace.process(rank, f"pipeline rank {rank}")
        trace.lane(rank, PASSES, "passes")
        trace.lane(rank, PARTS, "what they consist of")
        free_s = 0.0  # passes that run as a pair have no parts of their own
        for span in spans:
            kind, stage, mb = span.action
            args = {"pass": NAMES[kind], "stage": stage, "microbatch": mb}
            trace.span(
                rank, PASSES, str(span.action), begin_s=span.start, end_s=span.end, category="kernel", args=args
            )  # fmt: skip
            parts = {"F": step.passes[stage].forward, "B": step.passes[stage].backward}.get(kind, {})
            if span.start >= free_s:
                _parts(trace, rank, {k: v for k, v in parts.items() if v}, span.start, span.end)
            free_s = max(free_s, span.end)
        at_s = timeline.makespan
        for part in AFTER:
            seconds = step.parts.get(part, 0.0)
            if seconds:
                trace.span(rank, PASSES, part, begin_s=at_s, end_s=at_s + seconds, category="part", args={})
            at_s += seconds
    return trace.to_json_dict()


def _parts(trace: TraceFile, rank: int, parts: dict[str, float], begin_s: float, end_s: float) -> None:
    """One after the other from the beginning of a pass; scaled where a pass of the schedule lasts longer or shorter than its parts."""
    total = sum(parts.values())
    for kind, seconds in parts.items():
        next_s = begin_s + seconds * (end_s - begin_s) / total
        trace.span(rank, PARTS, kind, begin_s=begin_s, end_s=next_s, category="part", args={"seconds": seconds})
        begin_s, total = next_s, total - seconds

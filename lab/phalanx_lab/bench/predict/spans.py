"""A paced step beside its prediction, id by id: what ranks told of one step, as `simulate/program/compare_run.py` wants it.

Must never change: times are of one clock, and a collective's time runs from when the last of those that it needs had posted it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.clock import ANCHOR_S
from phalanx.core.events import Collective, Event, Operation
from phalanx.observe.recorded.lanes import LaneMessage, LaneWork, RankStep, matched
from phalanx.simulate.program.compare_run import MeasuredOp, RecordedStep

Told = dict[str, Any]
"""One rank's step in plain values."""


def told_step(events: Sequence[Event], begin_s: float, end_s: float) -> Told:
    """A step from `begin_s` to `end_s` of `time.monotonic`; times are those of that clock."""
    work = [
        (e.op_id, e.begin_s - ANCHOR_S, e.end_s - ANCHOR_S)
        for e in events
        if isinstance(e, Operation) and e.lane == "compute"
    ]
    messages = [
        {
            "op_id": e.op_id,
            "op": e.op,
            "axis": e.axis,
            "sent_bytes": e.sent_bytes,
            "begin_s": e.begin_s - ANCHOR_S,
            "end_s": e.end_s - ANCHOR_S,
            "waited_s": e.waited_s,
            "aside": e.aside,
            "ranks": e.ranks,
            "sends_to": e.sends_to,
            "receives_from": e.receives_from,
        }
        for e in events
        if isinstance(e, Collective)
    ]
    return {"begin_s": begin_s, "end_s": end_s, "work": work, "messages": messages}


def recorded_step(told: Sequence[Told]) -> RecordedStep:
    """Step of all ranks, by rank; begins count from when the last rank began. What an id did in several pieces is added up."""
    ranks = {rank: _rank_step(rank, each) for rank, each in enumerate(told)}
    begin_s = max(step.begin_s for step in ranks.values())
    found: dict[tuple[int, str], MeasuredOp] = {}
    for rank, step in matched({rank: {0: step} for rank, step in ranks.items()}, {}, {})[0].items():
        spans = [(w.op_id, w.begin_s, w.end_s - w.begin_s) for w in step[0].work]
        spans += [(m.op_id, m.begin_s, m.end_s - m.ready_s) for m in step[0].messages]
        for id, at, seconds in spans:
            before = found.get((rank, id), MeasuredOp(at - begin_s, 0.0))
            found[rank, id] = MeasuredOp(min(at - begin_s, before.begin_s), before.seconds + seconds)
    return found


def _rank_step(rank: int, told: Mapping[str, Any]) -> RankStep:
    work = tuple(
        LaneWork(op_id=id, lane="compute", begin_s=begin_s, end_s=end_s) for id, begin_s, end_s in told["work"]
    )
    lists = ("ranks", "sends_to", "receives_from")
    given: list[dict[str, Any]] = [{**m, **{k: tuple(m[k]) for k in lists}} for m in told["messages"]]
    messages = [LaneMessage(**m) for m in given]
    return RankStep(
        step=0,
        rank=rank,
        begin_s=told["begin_s"],
        end_s=told["end_s"],
        work=work,
        messages=tuple(sorted(messages, key=lambda m: m.begin_s)),
    )

"""What communication cost the recorded steps: how long it was under way, how much of that the ranks stood waiting, and for whom.

    under way    from when the last rank that it needs has posted it, to the end of the wait for it
    exposed      the rank stood waiting, `late` of it for a rank that had not posted its part yet
    hidden       under way while the rank did something else

Gloo cannot be asked whether a message has arrived, so hidden time is the most that it can have been. Must never change: time of overlapping messages
counts once; exposed + hidden = late + under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.op_ids import expert_exchange
from phalanx.observe.recorded.intervals import subtract, total_s, union
from phalanx.observe.recorded.lanes import LaneMessage, Recording

Place = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Seconds and bytes of a rank in a step."""

    sent_bytes: float
    exposed_s: float
    late_s: float
    hidden_s: float

    @property
    def hidden_share(self) -> float | None:
        """Hidden share of the time that messages were under way; None where they took none."""
        under_way_s = self.exposed_s - self.late_s + self.hidden_s
        return self.hidden_s / under_way_s if under_way_s > 0 else None

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "sent_bytes": self.sent_bytes, "exposed_s": self.exposed_s, "late_s": self.late_s,
            "hidden_s": self.hidden_s, "hidden_share": self.hidden_share,
        }  # fmt: skip


def exposure(messages: Iterable[LaneMessage], *, blocked: Iterable[tuple[float, float]] = ()) -> Exposure:
    """Exposure of messages of one rank. `blocked`: further intervals in which the rank stood waiting for them."""
    messages = list(messages)
    waits = union([*((m.wait_s, m.end_s) for m in messages), *blocked])
    way = union((m.ready_s, m.end_s) for m in messages)
    exposed_s = total_s(waits)
    hidden_s = total_s(subtract(way, waits))
    return Exposure(
        sent_bytes=sum(m.sent_bytes for m in messages),
        exposed_s=exposed_s,
        late_s=total_s(subtract(waits, way)),
        hidden_s=hidden_s,
    )


def by_layer(recording: Recording) -> dict[Place, Exposure]:
    """Dispatch and combine of each MoE layer (its number in the model) in each direction: means over steps and the ranks that have it."""
    return _grouped(recording, lambda m: expert_exchange(m.op_id))


def by_axis(recording: Recording) -> dict[str, Exposure]:
    """Everything else by axis: means over steps and the ranks that sent along it."""
    return _grouped(recording, lambda m: m.axis if expert_exchange(m.op_id) is None else None)


def _grouped(recording: Recording, name: Any) -> dict[Any, Exposure]:
    found: dict[Any, list[Exposure]] = {}
    for steps in recording.ranks.values():
        for step in steps.values():
            blocked = [(w.op_id, (w.begin_s, w.end_s)) for w in step.work if w.lane == "wait"]
            groups: dict[Any, list[LaneMessage]] = {}
            for message in step.messages:
                key = name(message)
                if key is not None:
                    groups.setdefault(key, []).append(message)
            for key, messages in groups.items():
                ids = {m.op_id for m in messages}
                found.setdefault(key, []).append(
                    exposure(messages, blocked=[span for op_id, span in blocked if op_id in ids])
                )
    return {key: _mean(found[key]) for key in sorted(found)}


def _mean(values: Sequence[Exposure]) -> Exposure:
    count = len(values)
    return Exposure(
        sent_bytes=sum(v.sent_bytes for v in values) / count,
        exposed_s=sum(v.exposed_s for v in values) / count,
        late_s=sum(v.late_s for v in values) / count,
        hidden_s=sum(v.hidden_s for v in values) / count,
    )

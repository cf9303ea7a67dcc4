"""Along which axis the tensor between two operations may be cut, derived from what they read and write.

Decides, for a producer and the consumer of its result, which axes can be cut so that the consumer works on one piece while the producer makes (or brings) the next:
those along which the consumer reduces nothing (arXiv 2502.19811, section 3.1). The planner reads the answer here and refuses a schedule that cuts another axis.

An operation is a loop nest, written like an einsum: the loop that indexes each axis of the shared tensor, and the loops that index the result. An axis is

    free       its loop also indexes the result: each position is used for itself
    grouped    positions with the same key are used together. A cut must not part a group, or the group waits for its last piece
    whole      its loop does not index the result: every result needs all positions

Between dispatch and the first product rows are free and columns whole; between the second product and the sum over a token's copies columns are free and
rows grouped by token. Rows may still be cut by source on their way back, because a token *determines* its source: no group has rows of two sources. Within one
source groups are parted (a token's experts are in different tiles), so parts go back in order, each token with the last part that adds to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.moe.overlap.tiles.types import TileSchedule


@dataclass(frozen=True)
class Access:
    """How one operation reads the shared tensor and writes its result."""

    reads: tuple[str, ...]
    """Loop that indexes each axis of the shared tensor."""
    result: tuple[str, ...]
    """Loops that index the result."""
    together: tuple[tuple[str, str], ...] = ()
    """(loop, key): positions of the loop whose key is the same are used for one result, which the key indexes in place of the loop."""
    at_once: tuple[str, ...] = ()
    """Loops of a producer's result whose positions are all finished together (a normalisation along them)."""
    name: str = "consumer"


@dataclass(frozen=True)
class AxisRule:
    """What may be done with one axis of the tensor between a producer and a consumer."""

    axis: str
    kind: Literal["free", "grouped", "whole"]
    key: str = ""
    """Key of a grouped axis."""
    reason: str = ""

    def may_cut_by(self, label: str, determines: Mapping[str, Sequence[str]]) -> bool:
        """Whether pieces of equal `label` are independent of each other; `determines[key]` are the labels that all positions of a key share."""
        if self.kind == "grouped":
            return label == self.key or label in determines.get(self.key, ())
        return self.kind == "free"

    @property
    def may_stream(self) -> bool:
        """Whether pieces in a fixed order let the consumer begin before the last: yes, unless every result needs all of them."""
        return self.kind != "whole"


def axis_rules(producer: Access, consumer: Access) -> dict[str, AxisRule]:
    """The rule of each axis of the tensor that `producer` writes and `consumer` reads, by the producer's name of the axis.

    Raises `PlanError` where the two do not speak of the same tensor.
    """
    if len(producer.result) != len(consumer.reads):
        rule = f"{consumer.name} reads {len(consumer.reads)} axes {consumer.reads}"
        raise PlanError.of(f"result of {producer.name}", producer.result, rule, subject="pair of operations")
    return {
        axis: _rule(producer, consumer, axis, loop) for axis, loop in zip(producer.result, consumer.reads, strict=True)
    }


def _rule(producer: Access, consumer: Access, axis: str, loop: str) -> AxisRule:
    key = dict(consumer.together).get(loop)
    if axis in producer.at_once:
        return AxisRule(axis, "whole", reason=f"{producer.name} finishes all of {axis} at once")
    if loop in consumer.result:
        return AxisRule(axis, "free", reason=f"{consumer.name} reduces nothing along {axis}")
    if key is not None:
        return AxisRule(axis, "grouped", key, reason=f"{consumer.name} adds up {axis} of the same {key}")
    return AxisRule(axis, "whole", reason=f"{consumer.name} reduces along {axis}")


@dataclass(frozen=True)
class Layer:
    """The operations of one pass through an MoE layer, as far as the planner is concerned with them."""

    bring: Access
    """Rows to the ranks of their slots."""
    first: Access
    second: Access
    merge: Access
    """Sum of a token's copies on one rank, sent back."""
    total: Access
    """Sum of the ranks' partial sums."""
    weights: Access | None = None
    """Gradients of weights, of what `bring` brought (backward)."""
    determines: tuple[tuple[str, tuple[str, ...]], ...] = (("token", ("source",)),)
    """A token belongs to one source; a slot does not: it has rows of all."""


_BRING = Access(("row", "column"), ("row", "column"), name="dispatch")
_FIRST = Access(("row", "column"), ("row", "inner"), name="the first product")
_SECOND = Access(("row", "inner"), ("row", "column"), name="the second product")
_MERGE = Access(("row", "column"), ("token", "column"), together=(("row", "token"),), name="the sum of copies")
_TOTAL = Access(("rank", "token", "column"), ("token", "column"), name="the sum over ranks")
_WEIGHTS = Access(
    ("row", "column"), ("slot", "inner", "column"), together=(("row", "slot"),), name="the gradient of weights"
)

FORWARD = Layer(_BRING, _FIRST, _SECOND, _MERGE, _TOTAL)
BACKWARD = Layer(_BRING, _FIRST, _SECOND, _MERGE, _TOTAL, weights=_WEIGHTS)
"""Backward, gradients of the output come, go through the second weights (now `first`) and the first ones (now `second`)."""


@dataclass(frozen=True)
class LayerCuts:
    """What a schedule may cut, each with the reason if not (empty: it may)."""

    not_sources: str
    """Rows of one source before those of another, there and back: needed by every order but "serial"."""
    not_parts: str
    """Rows of one source in parts, in order."""
    not_blocks: str
    """Columns of the second product's result."""
    not_weights_by_source: str
    """Gradients of weights of one source's rows before all are there."""

    def problems(self, schedule: TileSchedule) -> list[Problem]:
        """Why a schedule cannot be: each cut that it makes and the layer does not allow."""
        wishes = (
            ("order", schedule.order, schedule.order != "serial" or schedule.seed is not None, self.not_sources),
            ("parts", schedule.parts, schedule.parts > 1, self.not_parts),
            ("blocks", schedule.blocks, schedule.blocks > 1, self.not_blocks),
        )
        hints = {"order": "'serial' is legal", "parts": "1 is legal", "blocks": "1 is legal"}
        return [
            Problem(
                where=f"schedule.{name}", value=value, rule=f"cuts what must stay whole: {reason}", hint=hints[name]
            )
            for name, value, cuts, reason in wishes
            if cuts and reason
        ]


@cache
def cuts_of(layer: Layer) -> LayerCuts:
    """What may be cut in a layer, from the tensors between its operations."""
    labels = dict(layer.determines)
    pairs = [(layer.bring, layer.first), (layer.first, layer.second), (layer.second, layer.merge)]
    rows = [axis_rules(*pair)[pair[0].result[0]] for pair in pairs]
    copies = Access((), ("rank", *layer.merge.result), name=layer.merge.name)
    columns = [
        axis_rules(layer.second, layer.merge)[layer.second.result[1]],
        axis_rules(copies, layer.total)[layer.merge.result[-1]],
    ]
    weights = [] if layer.weights is None else [axis_rules(layer.bring, layer.weights)[layer.bring.result[0]]]
    return LayerCuts(
        not_sources=_reason(rule for rule in rows if not rule.may_cut_by("source", labels)),
        not_parts=_reason(rule for rule in rows if not rule.may_stream),
        not_blocks=_reason(rule for rule in columns if rule.kind != "free"),
        not_weights_by_source=_reason(rule for rule in weights if not rule.may_cut_by("source", labels)),
    )


def _reason(rules: Iterable[AxisRule]) -> str:
    """That of the first rule that forbids the cut."""
    return next((rule.reason for rule in rules), "")

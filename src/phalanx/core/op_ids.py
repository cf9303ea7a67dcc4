"""Ids of operations, read back: which micro-batch, layer and pass an event is about.

Must never change without `plan/program/ops.py`, which makes the ids: `mb{microbatch}.L{layer}.{phase}.{name}`, parts that do not apply left out.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]

_ID = re.compile(r"(?:mb(\d{1,18})\.)?(?:L(\d{1,18})\.)?(?:(fwd|bwd|re|count|eval)\.)?(.*)")
_DIRECTIONS: dict[str, Direction] = {"fwd": "forward", "count": "forward", "bwd": "backward", "re": "backward"}


class OpPlace(NamedTuple):
    """Where in a step an operation stands; None for what its id does not say."""

    microbatch: int | None
    layer: int | None
    phase: str | None
    name: str

    @property
    def direction(self) -> Direction | None:
        """Direction of the pass: a layer that is run again belongs to the backward pass, a pass that only counts goes forward;
        None in validation."""
        return _DIRECTIONS.get(self.phase or "")


def read_op_id(op_id: str) -> OpPlace:
    """The parts of an id; whatever is not an id of a step is all name."""
    found = _ID.fullmatch(op_id)
    if found is None:  # a line break
        return OpPlace(None, None, None, op_id)
    microbatch, layer, phase, name = found.groups()
    return OpPlace(None if microbatch is None else int(microbatch), None if layer is None else int(layer), phase, name)


def expert_exchange(op_id: str) -> tuple[int, Direction] | None:
    """Layer and direction of a step's dispatch or combine of an MoE layer; None for everything else."""
    place = read_op_id(op_id)
    if place.layer is None or place.direction is None or not place.name.startswith(("dispatch.", "combine.")):
        return None
    return place.layer, place.direction

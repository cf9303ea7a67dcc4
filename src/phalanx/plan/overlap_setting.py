"""What a recipe may say about overlap inside a MoE layer, and where it can apply.

serial      dispatch, experts and combine one after the other
coarse:N    the tokens of a rank in N chunks, each dispatched while the one before is computed (as FasterMoE and Tutel do)
fine        tile by tile, by a fixed schedule
auto        tile by tile, by the schedule that the cost model finds fastest for the layer, the links and the loads at hand
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan.overlap_types import Schedule

Kind = Literal["serial", "coarse", "tiles", "fine", "auto"]
MOST_CHUNKS = 64
WHERE = "dispatch.overlap"
FINE = Schedule(parts=4, order="arrival", own_before=0.75)
"""Good where communication takes about as long as computing; `auto` finds the best one."""
CANDIDATES = (
    Schedule(order="own_first"),
    *(
        Schedule(parts=parts, order="arrival", own_before=share)
        for parts in (1, 2, 4, 8)
        for share in (0.25, 0.5, 0.75, 1.0)
    ),
    FINE,
)
"""What `auto` chooses from, beside serial order."""


@dataclass(frozen=True)
class OverlapSetting:
    kind: Kind
    chunks: int = 1
    """Of `coarse`."""

    def __str__(self) -> str:
        return f"coarse:{self.chunks}" if self.kind == "coarse" else self.kind


def setting_problems(text: str) -> list[Problem]:
    """What is wrong with the words."""
    kind, colon, number = text.partition(":")
    if kind == "coarse":
        if number.isdecimal() and 2 <= int(number) <= MOST_CHUNKS:
            return []
        rule = f"coarse takes a number of chunks from 2 to {MOST_CHUNKS}"
        return [Problem(where=WHERE, value=text, rule=rule, hint="coarse:2")]
    if kind in ("serial", "tiles", "fine", "auto") and not colon:
        return []
    rule = "must be serial, coarse:N, tiles, fine or auto"
    return [Problem(where=WHERE, value=text, rule=rule, hint="auto")]


def parse_overlap(text: str) -> OverlapSetting:
    """Raises `ConfigError`."""
    raise_if(setting_problems(text), ConfigError, subject="the overlap of a MoE layer")
    kind, _, number = text.partition(":")
    return OverlapSetting(kind, int(number) if number else 1)  # type: ignore[arg-type]


def replica_problems(text: str) -> list[Problem]:
    """Why a legal setting cannot apply where experts have replicas."""
    if text == "serial" or text.startswith("coarse"):
        return []
    rule = "goes tile by tile through experts that each have one slot; experts with replicas (resilience.slots_per_rank) run serial or in chunks"
    return [Problem(where=WHERE, value=text, rule=rule, hint='"coarse:2", or "serial"')]


def overlap_problems(
    text: str, *, num_experts: int, group: int, transport: str, pad_to_capacity: bool
) -> list[Problem]:
    """Why a legal setting cannot apply. `group`: ranks of the largest expert-parallel group, ep x etp."""
    if setting_problems(text) or text == "serial":
        return []
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    if not num_experts:
        wrong("needs routed experts, and the model has none", 'use "serial"')
    elif group == 1:
        wrong("needs ranks that send rows to each other, and ep x etp = 1", 'set folding.ep = 2, or "serial"')
    if transport != "all_to_all":
        wrong(
            f'sends rows from rank to rank; dispatch.transport = "{transport}" gathers them everywhere',
            'transport "all_to_all"',
        )
    if pad_to_capacity and not text.startswith("coarse"):
        wrong("sends the rows that there are; dispatch.pad_to_capacity sends a fixed number", "pad_to_capacity = false")
    return problems

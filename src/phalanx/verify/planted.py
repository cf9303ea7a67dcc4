"""What a verified step takes as arguments so that a fault can be planted in it: rule tables, groups, collectives, parts, the cut of a batch.

Sound everywhere by default (`HEALTHY`); the faults themselves are in the lab (`phalanx_lab.faults`). The product code is not touched by any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.models import TokenBatch, part_of
from phalanx.plan.mapping import GRADIENT_RULES, AnyFolding, GradientRule
from phalanx.runtime.comm import Collectives, GroupCache, Groups, build_groups
from phalanx.train.step import StepParts
from phalanx.verify.setups import Case

Rules = Mapping[str, GradientRule]
Alter = Callable[[StepParts], StepParts]
"""A step with a part of it done wrong."""

PLANT_TIMEOUT_S = 15.0
"""Longest wait of a collective beside a fault."""


def _groups(folding: AnyFolding, rank: int, cache: GroupCache, table_ranks: Sequence[int]) -> Groups:
    return build_groups(folding, rank=rank, cache=cache, table_ranks=table_ranks)


def _same(parts: StepParts) -> StepParts:
    return parts


def _anywhere(case: Case) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """One thing done wrong. Whatever is not set is done right."""

    name: str
    summary: str
    needs: Callable[[Case], bool] = _anywhere
    rules: Rules = field(default_factory=lambda: GRADIENT_RULES)
    groups: Callable[[AnyFolding, int, GroupCache, Sequence[int]], Groups] = _groups
    comms: type[Collectives] = Collectives
    alter: Alter = _same
    cut: Callable[[TokenBatch, AnyFolding, int], TokenBatch] = part_of


HEALTHY = Fault(name="", summary="nothing is wrong")

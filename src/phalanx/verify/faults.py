"""Planted faults, as arguments: altered rule tables, collectives, groups, parts of a step. The product code is not touched.

A fault is what a framework did, or could do, wrong; `phalanx verify --plant NAME` must find it. Most do not move the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.plan.folding import GRADIENT_RULES, Folding, GradientRule
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.groups import GroupCache, Groups, build_groups
from phalanx.train.step import StepParts


def _groups(folding: Folding, rank: int, cache: GroupCache) -> Groups:
    return build_groups(folding, rank=rank, cache=cache)


def _comms(timeout_s: float) -> Collectives:
    return Collectives(timeout_s=timeout_s)


def _same(parts: StepParts) -> StepParts:
    return parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """One thing done wrong. Whatever is not set is done right."""

    name: str
    summary: str
    rules: Mapping[str, GradientRule] = field(default_factory=lambda: GRADIENT_RULES)
    groups: Callable[[Folding, int, GroupCache], Groups] = _groups
    comms: Callable[[float], Collectives] = _comms
    alter: Callable[[StepParts], StepParts] = _same


HEALTHY = Fault(name="", summary="nothing")

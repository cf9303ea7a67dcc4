"""One value of `dispatch.overlap` forced on the cases of the table: `phalanx verify --overlap VALUE`.

Decides where it can apply, by the same rule as for a recipe (`plan/moe/overlap/settings.py`). A case where it cannot stays what it is, and is counted with the reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.mapping import Folding
from phalanx.plan.moe.overlap import overlap_problems, replica_problems
from phalanx.verify.setups import Case


@dataclass(frozen=True, eq=False)
class Forced:
    """The cases, in their order."""

    value: str
    cases: list[Case]
    kept: dict[str, int]
    """Why cases were left as they are, and how many."""

    @property
    def num_forced(self) -> int:
        return len(self.cases) - sum(self.kept.values())


def force_overlap(cases: Sequence[Case], value: str) -> Forced:
    """All cases, those with `dispatch.overlap = value` in which it can apply. Says so in their labels."""
    kept: Counter[str] = Counter()
    out = []
    for case in cases:
        why = _why_not(case, value)
        if why:
            kept[why] += 1
        else:
            case = _with_overlap(case, value)
        out.append(case)
    return Forced(value, out, dict(kept))


def _why_not(case: Case, value: str) -> str:
    spec, dispatch = case.setup.spec, case.setup.dispatch
    stages = (case.folding,) if isinstance(case.folding, Folding) else case.folding.stages
    problems = overlap_problems(
        value,
        num_experts=spec.num_experts,
        group=max(stage.ep * stage.etp for stage in stages),
        transport=dispatch.transport,
        pad_to_capacity=dispatch.pad_to_capacity,
    )
    if case.setup.replicas:
        problems += replica_problems(value)
    return problems[0].rule if problems else ""


def _with_overlap(case: Case, value: str) -> Case:
    setup = case.setup
    dispatch = dataclasses.replace(setup.dispatch, overlap=value)
    return dataclasses.replace(
        case, setup=dataclasses.replace(setup, dispatch=dispatch, label=f"{setup.label} overlap={value}")
    )

"""What the reports of a generation say of its members, for the plan that they make of it (`plan/recovery/generation.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.recovery import Fact, Standing, read_standing
from phalanx.runtime.membership import Generation, Report, resolve


def facts_of(generation: Generation, reports: Sequence[Report]) -> list[Fact]:
    """What the reports say of the members; who holds a history that was given up has nothing. An idle one that learns only now that a step was committed holds the state before it."""
    machine, found = {member.uid: member.host for member in generation.members}, resolve(reports)
    return [
        Fact(
            uid=report.uid,
            machine=machine[report.uid],
            rack=report.data.get("rack", ""),
            standing=_standing_of(report, finish=report.uid in found.finish) if report.uid in found.holders else None,
        )
        for report in reports
    ]


def _standing_of(report: Report, *, finish: bool) -> Standing | None:
    """`finish`: the member commits the step that it was in doubt about, before the plan is carried out."""
    if not report.holds or (report.data["idle"] and finish):
        return None
    then = report.data["then"]
    return read_standing(then if finish and then is not None else report.data["standing"])

"""Where a search puts the mapping that a publication found best.

Decides which rows are asked about: of all rows that do one job on the same machines, with experts, the fastest. A place counts foldings (the best choice of
each): what a publication does not say (schedule, recomputation) is left to the search. Must never change: the search is told the job and the
machines, and nothing of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PlanError
from phalanx.simulate.mapping.mapping import Precision
from phalanx.simulate.search.best import search
from phalanx.simulate.search.space import Space
from phalanx_lab.publications.published_mapping import cluster_of, job_of
from phalanx_lab.publications.validate import RowOutcome, role


@dataclass(frozen=True, kw_only=True)
class SearchPlace:
    """Place of a published mapping among the foldings of a search, from 1; None where the search kept more than `kept` before it."""

    outcome: RowOutcome
    place: int | None
    kept: int
    foldings: int
    behind: float | None
    """Predicted time over that of the first, less 1."""

    def to_dict(self) -> dict[str, Any]:
        row = self.outcome.row
        return {
            "line": row.line, "model": row.spec.name, "gpus": row.gpus, "precision": row.precision, "place": self.place,
            "foldings": self.foldings, "behind": self.behind,
        }  # fmt: skip


def fastest(outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """The fastest of the validation rows that do one job, where several mappings of it were measured."""
    jobs: dict[tuple[object, ...], list[RowOutcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None and role(outcome.row) == "validation":
            jobs.setdefault(outcome.row.comparable, []).append(outcome)
    return [min(group, key=lambda o: o.measured) for group in jobs.values() if len({_folding(o) for o in group}) > 1]


def _folding(outcome: RowOutcome) -> object:
    assert outcome.prediction is not None
    return outcome.prediction.mapping.folding


def places(
    outcomes: Sequence[RowOutcome], *, kept: int = 60, progress: Callable[[int, int], None] | None = None
) -> list[SearchPlace]:
    """Search each job of `fastest`, with what `phalanx search` tries by default under even routing, but for overlap of dispatch, which no published run here had."""
    asked, out = fastest(outcomes), []
    for number, outcome in enumerate(asked, start=1):
        row = outcome.row
        try:
            precision: Precision = "fp8" if row.precision == "fp8" else "bf16"
            found = search(
                job_of(row), cluster_of(row), space=Space(ep_overlaps=("none",)), precision=precision, keep=kept
            )
        except PlanError:
            out.append(SearchPlace(outcome=outcome, place=None, kept=0, foldings=0, behind=None))
            continue
        place = next((n for n, p in enumerate(found.best, 1) if p.mapping.folding == _folding(outcome)), None)
        behind = found.best[place - 1].step.seconds / found.best[0].step.seconds - 1 if place else None
        out.append(SearchPlace(outcome=outcome, place=place, kept=kept, foldings=found.num_foldings, behind=behind))
        if progress is not None:
            progress(number, len(asked))
    return out

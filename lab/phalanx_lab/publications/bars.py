"""The part of docs/reference/validation.md that says where the bars of the subject stand, from the rows and from searches.

Table 3 of the Parallel Folding paper (arXiv 2504.14960): 18 figures and 2 cells out of memory. Nothing is written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.cli.tables import markdown_table
from phalanx_lab.publications.validate import RowOutcome, statistics_of
from phalanx_lab.publications.validate_search import SearchPlace

PAPER = "MPF-2504.14960"
PLAIN, FOLDED = "MCore", "MCore w/ Folding"


def table3(outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """Rows of the paper's table 3."""
    return [o for o in outcomes if o.row.source.startswith(PAPER) and o.row.metric in ("MFU_pct", "OOM")]


def gains(outcomes: Sequence[RowOutcome]) -> dict[str, tuple[float, float]]:
    """(printed, predicted) points of MFU that folding gains, by model."""
    by_model: dict[str, dict[str, RowOutcome]] = {}
    for o in table3(outcomes):
        by_model.setdefault(o.row.spec.name, {})[o.row.method] = o
    return {
        model: (
            rows[FOLDED].row.value - rows[PLAIN].row.value,
            (rows[FOLDED].mfu_pct or 0) - (rows[PLAIN].mfu_pct or 0),
        )
        for model, rows in by_model.items()
        if PLAIN in rows and FOLDED in rows
    }


def bars_markdown(outcomes: Sequence[RowOutcome], found: Sequence[SearchPlace]) -> str:
    """One line a bar: what is asked, what is found."""
    rows = table3(outcomes)
    best = statistics_of([o for o in rows if o.row.method.startswith(PLAIN)])
    other = statistics_of([o for o in rows if not o.row.method.startswith(PLAIN)])
    every, gained = statistics_of(rows), gains(outcomes)
    within = sum(0.5 * a <= b <= 1.5 * a for a, b in gained.values())
    lines = [
        (f"{best['rows']} rows of MCore and MCore with folding, MAPE", "at most 8 %", f"{best['mape']:.1f} %, worst {best['worst']:.1f} %"),
        ("rows of the other methods, MAPE", "at most 25 %", f"{other['mape']:.1f} %, worst {other['worst']:.1f} %"),
        ("order of methods, Kendall's tau", "at least 0.9", f"{every['kendall_tau']:.2f}{_swapped(rows)}"),
        (
            "gain of folding in points of MFU", "each within half of what is printed",
            f"{within} of {len(gained)}: " + ", ".join(f"{m} {b:+.1f} ({a:+.1f} printed)" for m, (a, b) in gained.items()),
        ),
        ("cells out of memory", "both, and no false one", f"{every['oom_right']} of {every['oom_rows']}, {every['false_oom']} false"),
    ]  # fmt: skip
    asked = [p for p in found if p.outcome in rows]
    if asked:
        top = sum(p.place is not None and p.place <= 5 for p in asked)
        text = f"{top} of {len(asked)}: " + ", ".join(_place(p) for p in asked)
        lines.append(
            ("the printed best mapping in the top 5 of `phalanx search --routing balanced`", "all models", text)
        )
    return markdown_table(("bar", "asked", "found"), lines)


def _place(p: SearchPlace) -> str:
    name = p.outcome.row.spec.name
    if p.place is None:
        return f"{name} beyond {p.kept}"
    return f"{name} {p.place} of {p.foldings:,}" + (f" ({p.behind:.1%} behind the first)" if p.behind else "")


def _swapped(rows: Sequence[RowOutcome]) -> str:
    """Pairs of methods that stand the other way round."""
    pairs: list[Any] = [
        (a, b)
        for i, a in enumerate(rows)
        for b in rows[i + 1 :]
        if a.error is not None and b.error is not None and a.row.comparable == b.row.comparable
        and a.prediction and b.prediction
        and (a.measured - b.measured) * (a.prediction.step.seconds - b.prediction.step.seconds) < 0
    ]  # fmt: skip
    named = [
        f"{a.row.spec.name}: {a.row.method} and {b.row.method}, {a.row.value:g} and {b.row.value:g} %" for a, b in pairs
    ]
    return f"; the other way round: {'; '.join(named)}" if named else "; no pair is the other way round"

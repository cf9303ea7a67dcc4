"""`phalanx simulate validate`: predictions beside published measurements, by family; and the page docs/reference/validation.md.

Reads any CSV of the shared columns (default: the one that comes with Phalanx).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from phalanx.cli.tables import markdown_table, replace_part
from phalanx.core.arguments import WordParser
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.observe.pictures.plots import Series, plot
from phalanx_lab.publications.bars import bars_markdown, table3
from phalanx_lab.publications.published import data_file
from phalanx_lab.publications.validate import RowOutcome, report, role, statistics_of, validate
from phalanx_lab.publications.validate_search import SearchPlace, places


def validation(argv: Sequence[str]) -> int:
    """Predict every row and say how far off."""
    parser = WordParser(prog="phalanx simulate validate", description="Predictions beside measurements.")
    parser.add_argument("--data", type=Path, metavar="CSV", help="measurements (default: those that come with Phalanx)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write errors by family and in all, and every row")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw predicted against measured")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables between the marks of a Markdown file")  # fmt: skip
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--search", action="store_true", help="also search each job of the validation rows, and say where the fastest published mapping stands (--write always does)")  # fmt: skip
    args = parser.parse_args(list(argv))
    check_writable(args.json, args.svg)
    with Progress(transient=True) as bar:
        task = bar.add_task("rows")
        outcomes = validate(
            args.data or data_file("training_steps.csv"),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        searched = bar.add_task("searches", visible=args.search or args.write is not None)
        found = (
            places(outcomes, progress=lambda done, total: bar.update(searched, completed=done, total=total))
            if args.search or args.write is not None
            else []
        )
    result = {**report(outcomes), **({"search": [place.to_dict() for place in found]} if found else {})}
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, picture(outcomes))
    if args.write is not None:
        replace_part(args.write, "families", families_markdown(result))
        replace_part(args.write, "rows", rows_markdown([o for o in outcomes if role(o.row) == "validation"]))
        replace_part(args.write, "worst", rows_markdown(worst(outcomes)))
        if table3(outcomes):
            replace_part(args.write, "bars", bars_markdown(outcomes, found))
        return 0
    print(families_text(result))
    for line in impossible(outcomes):
        print(line, file=sys.stderr)
    for place in found:
        print(place_text(place))
    if args.rows:
        print(rows_markdown(outcomes), end="")
    return 0


def families_text(result: Mapping[str, Any]) -> str:
    """The families as a table for a terminal."""
    lines = [
        f"{'family':<32}{'role':<13}{'rows':>5}{'MAPE':>8}{'median':>8}{'worst':>8}{'tau':>7}{'OOM':>7}{'false':>7}"
    ]
    for name, s, what in _lines(result):
        oom = f"{s['oom_right']}/{s['oom_rows']}"
        lines.append(
            f"{name:<32}{what:<13}{s['rows']:>5}{_pct(s['mape']):>8}{_pct(s['median']):>8}{_pct(s['worst']):>8}"
            f"{_tau(s['kendall_tau']):>7}{oom:>7}{s['false_oom']:>7}"
        )
    flagged = result["flagged"]
    lines.append(
        f"errors of step time in per cent; rows that leave something open, which had to be assumed (--json lists it): {flagged}"
    )
    return "\n".join(lines)


def impossible(outcomes: Sequence[RowOutcome]) -> list[str]:
    """Rows whose mapping cannot be, and why: they are counted, and nothing is predicted of them."""
    out = []
    for o in outcomes:
        reasons = [flag.removeprefix("impossible: ") for flag in o.flags if flag.startswith("impossible: ")]
        if o.prediction is None:
            out.append(
                f"line {o.row.line}, {o.row.spec.name} on {o.row.gpus} ranks, cannot run so: {'; '.join(reasons)}"
            )
    return out


def place_text(p: SearchPlace) -> str:
    """One search in words."""
    row, where = p.outcome.row, f"place {p.place}" if p.place else f"not among the first {p.kept}"
    behind = f", {p.behind:.1%} behind the first" if p.behind else ""
    return f"line {row.line}, {row.spec.name} on {row.gpus} ranks in {row.precision}: the fastest published mapping is {where} of {p.foldings:,} foldings{behind}"


def families_markdown(result: Mapping[str, Any]) -> str:
    titles = ("family", "role", "rows", "MAPE %", "median %", "worst %", "Kendall tau", "out of memory, right", "false")
    rows = [
        (
            name, what, str(s["rows"]), _pct(s["mape"]), _pct(s["median"]), _pct(s["worst"]), _tau(s["kendall_tau"]),
            f"{s['oom_right']} of {s['oom_rows']}" if s["oom_rows"] else "", str(s["false_oom"]),
        )
        for name, s, what in _lines(result)
    ]  # fmt: skip
    return markdown_table(titles, rows)


def _lines(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str]]:
    families = [(name, s, s["role"]) for name, s in result["families"].items()]
    roles = [(f"all {name} rows", s, name) for name, s in result["roles"].items()]
    return [*families, *roles, ("all rows", result, "")]


def _pct(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _tau(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def rows_markdown(outcomes: Sequence[RowOutcome]) -> str:
    """One line a row."""
    titles = (
        "row",
        "model",
        "ranks",
        "method",
        "mapping",
        "published",
        "measured s",
        "predicted s",
        "error %",
        "memory",
    )
    return markdown_table(titles, [_row(o) for o in outcomes])


def _row(o: RowOutcome) -> tuple[str, ...]:
    row, p = o.row, o.prediction
    head = (str(row.line), row.spec.name, str(row.gpus), row.method or row.precision)
    if p is None:
        return (*head, "impossible", f"{row.value:g} {row.metric}", "", "", "", "")
    memory = f"{p.peak_bytes / 1e9:.0f} GB" + ("" if p.fits else ", does not fit")
    measured = "" if o.oom else f"{o.measured:.2f}"
    error = "" if o.error is None else f"{100 * o.error:+.1f}"
    place = p.mapping.label().split(" mb")[0]
    return (*head, place, f"{row.value:g} {row.metric}", measured, f"{p.step.seconds:.2f}", error, memory)


def worst(outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """The worst row of every family."""
    found: dict[str, RowOutcome] = {}
    for o in outcomes:
        before = found.get(o.row.family)
        if o.error is not None and (before is None or before.error is None or abs(o.error) > abs(before.error)):
            found[o.row.family] = o
    return list(found.values())


def picture(outcomes: Sequence[RowOutcome]) -> str:
    """Predicted against measured step time, both logarithmic."""
    colours = {"calibration": "#bbbbbb", "validation": "#c0392b"}
    series = [
        Series(
            name=f"{what} rows",
            colour=colour,
            points=tuple(
                (o.measured, o.prediction.step.seconds, f"{o.row.spec.name}, {o.row.gpus} ranks, {o.row.method}")
                for o in outcomes
                if o.error is not None and o.prediction is not None and role(o.row) == what
            ),
        )
        for what, colour in colours.items()
    ]
    mape = statistics_of(outcomes)["mape"]
    error = "nothing to compare" if mape is None else f"MAPE {mape:.1f} %"
    title = f"Step time, predicted against measured ({len(outcomes)} rows, {error})"
    return plot(series, title=title, x_name="measured, s", y_name="predicted, s", log=True, diagonal=True)

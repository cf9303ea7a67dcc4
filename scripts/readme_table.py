"""The table of figures in README.md, made from the files of benchmarks/results/, so that a figure cannot outlive its file.

    python scripts/readme_table.py           write the table between its marks
    python scripts/readme_table.py --check   say what differs, or what is wrong with a file, and exit with 1

A result is one JSON object: id (the name of its file), claim, command, machine, date, figures (words to numbers), note.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin figures -->", "<!-- end figures -->"
FIELDS = {"id": str, "claim": str, "command": str, "machine": str, "date": str, "figures": dict, "note": str}
SHOWN = (
    "verify-4",
    "verify-plant",
    "bench-train",
    "bench-layer",
    "bench-storm",
    "bench-heal-cost",
    "bench-recovery-spot-large",
    "bench-memory",
    "bench-predict-testbed",
    "search-deepseek-v3",
)
"""Rows of the README, in their order."""


def problems_of(path: Path) -> list[str]:
    """What is wrong with a result."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        return [f"{path.name}: is not JSON ({error})"]
    if not isinstance(found, dict) or set(found) != set(FIELDS):
        return [f"{path.name}: must have exactly the fields {', '.join(FIELDS)}"]
    wrong = [f"{path.name}: {k} must be a {t.__name__}" for k, t in FIELDS.items() if not isinstance(found[k], t)]
    if wrong:
        return wrong
    if found["id"] != path.stem:
        wrong.append(f"{path.name}: id is {found['id']!r} and must be the name of the file")
    wrong += [f"{path.name}: {k} is empty" for k in ("claim", "command", "machine", "figures") if not found[k]]
    try:
        datetime.date.fromisoformat(found["date"])
    except ValueError:
        wrong.append(f"{path.name}: date {found['date']!r} must be written like 2026-11-23")
    bad = [k for k, v in found["figures"].items() if isinstance(v, bool) or not isinstance(v, int | float)]
    return wrong + [f"{path.name}: figure {k!r} must be a number" for k in bad]


def figure(name: str, value: float) -> str:
    """`worst %: 11`, with thousands set apart."""
    return f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:g}"


def row(result: dict[str, Any]) -> str:
    figures = "; ".join(figure(k, v) for k, v in result["figures"].items())
    return f"| {result['claim']} | {figures} | `{result['command']}` |"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Raises `KeyError` where a row has no file."""
    return "\n".join(["| claim | figures | command |", "|---|---|---|", *(row(results[name]) for name in SHOWN)])


def main(root: Path = ROOT, argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where the table is another")
    check = parser.parse_args(argv).check
    files = sorted((root / "benchmarks" / "results").glob("*.json"))
    problems = [problem for path in files for problem in problems_of(path)]
    missing = [name for name in SHOWN if name not in {path.stem for path in files}]
    problems += [
        f"benchmarks/results/{name}.json: is missing; measure it, or take {name!r} out of SHOWN" for name in missing
    ]
    readme = root / "README.md"
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        problems.append(f"README.md: needs one {BEGIN} and one {END}")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    before, rest = text.split(BEGIN)
    wanted = f"{before}{BEGIN}\n{table({p.stem: json.loads(p.read_text()) for p in files})}\n{END}{rest.split(END)[1]}"
    if not check:
        readme.write_text(wanted)
    elif wanted != text:
        print(
            "README.md: the table is not that of benchmarks/results/; run python scripts/readme_table.py",
            file=sys.stderr,
        )
    return int(check and wanted != text)


if __name__ == "__main__":
    sys.exit(main())

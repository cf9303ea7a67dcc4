"""`phalanx runs [FOLDER]`: the runs of a folder as a table, from their event logs alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_count
from phalanx.observe.page import find_runs, peek

STYLES = {"training": "green", "failed": "red", "silent": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = WordParser(
        prog="phalanx runs", description="List the runs of a folder: what they do, how far they are, how good."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="folder whose runs are listed (default: runs)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list to this file")
    args = parser.parse_args(argv)
    check_writable(args.json)
    rows = list_runs(args.folder)
    write_json(args.json, {"runs": rows})
    console = Console()
    if not rows:
        console.print(Text(f"{args.folder} has no runs; phalanx train makes one"), soft_wrap=True)
        return 0
    console.print(_table(rows))
    return 0


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """A summary of each run, the last heard first. Raises `ConfigError` where there is no such folder."""
    try:
        found = find_runs(folder)
    except OSError as error:
        hint = "give the folder that run folders are in; phalanx train makes runs/NAME"
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError.of("folder", str(folder), rule, hint, subject="the arguments") from error
    rows = [peek(path, id=path.name).summary() for path in found]
    return sorted(rows, key=lambda row: -float(row["heard_s"]))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("step", "loss", "val", "tokens", "written"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("folding", overflow="fold")
    for row in rows:
        step = f"{row['step']}" + (f"/{row['total_steps']}" if row["total_steps"] else "")
        ago = f"{_short(row['now_s'] - row['heard_s'])} ago" if row["heard_s"] else ""
        table.add_row(
            Text(row["folder"]), Text(row["status"], style=STYLES.get(row["status"], "")), step, _number(row["loss"]),
            _number(row["validation"]), format_count(row["tokens"]), ago, Text(str(row["folding_now"] or "")),
        )  # fmt: skip
    return table


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""  # what a log says may be anything


def _short(seconds: float) -> str:
    """In one unit: `13 min`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"

"""Tables in the documents that are generated from the code: Markdown between two marks, replaced in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import ConfigError


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; `|` in cells is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


def replace_part(path: Path, name: str, content: str) -> None:
    """Replace what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. Raises `ConfigError` where the marks are missing."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError.of("--write", str(path), rule, "", subject="the arguments") from error
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        rule = "has no place for this table"
        raise ConfigError.of("--write", str(path), rule, f"add the lines {begin} and {end}", subject="the arguments")
    path.write_text(f"{before}{begin}\n{content}{end}{after}", encoding="utf-8")

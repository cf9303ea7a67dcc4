"""The table of CONTRIBUTING.md that says what `phalanx verify` proves and what tests add is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.verify import setups

ROOT = Path(__file__).resolve().parents[2]
LISTS = {"SCHEDULES", "STAGED", "COPIED"}
"""What is tried that is no factor of a pairwise table."""
ORACLE = re.compile(
    r"from (phalanx\.verify\.(compare|reference|replicas)|pipeline_help) import (?!PIPELINES$)", re.MULTILINE
)


def rows() -> list[tuple[set[str], set[str]]]:
    """(settings, files) of each subject."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("| subject | settings that `phalanx verify` tries |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in table]
    return [(set(re.findall("`([^`]+)`", cell[1])), set(re.findall("`([^`]+)`", cell[3]))) for cell in cells]


def test_every_setting_that_verify_tries_has_one_subject() -> None:
    named = [name for settings, _ in rows() for name in settings]
    factors = {*setups.FACTORS, *setups.PIPELINE_FACTORS, *setups.REPLICA_FACTORS, "pipe"}
    assert sorted(named) == sorted(factors | LISTS) and all(hasattr(setups, name) for name in LISTS)


def test_tests_that_compare_with_one_rank_say_what_they_add() -> None:
    """A file that uses the oracle of `phalanx verify` stands in the table; `test_verify.py` is about the oracle itself."""
    named = {name for _, files in rows() for name in files}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if ORACLE.search(path.read_text())]
    users = {str(path.relative_to(ROOT / "tests")) for path in paths}
    assert users - named <= {"runs/test_verify.py", "unit/test_coverage_table.py"}

"""Result files (`--json F` and the like): their folder is made, and what cannot be written is one clear message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, RunError


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, its folder included. Raises `RunError` naming the file."""
    write_text(path, json.dumps(result, indent=2, sort_keys=True) + "\n")


def read_json(path: Path, *, where: str) -> Any:
    """What a JSON file says. Raises `DataError` naming `where` (a setting or an argument) and why it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = Problem(
            where=where, value=str(path), rule=f"cannot be read: {error.strerror}", hint="name another file"
        )
        raise DataError([problem], subject="a file") from error
    except ValueError as error:
        raise DataError(
            [Problem(where=where, value=str(path), rule=f"is not JSON: {error}")], subject="a file"
        ) from error


def check_writable(path: Path | None) -> None:
    """Raise `RunError` now rather than after minutes of work, where a result file (None: none is wanted) could not be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()  # work that fails must not leave an empty result
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file, its folder included. Raises `RunError` naming the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror}; name another file")

"""Recipes of runs beside one another: every setting as text, and those that differ.

A recipe in a run folder is a stranger's file: it is read through no link, up to `MOST_BYTES`, and its values go out as texts of bounded length.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.config import RECIPE_FILE
from phalanx.core.errors import DataError, printable
from phalanx.core.reading import parse_toml

MOST_BYTES = 256 << 10
MOST_VALUE = 200
MOST_SETTINGS = 1000
PLACES = frozenset({"run.name", "run.folder"})
"""Settings that say where a run lies, and differ always."""


def recipe_values(folder: Path) -> dict[str, str]:
    """Setting -> value as text, from the recipe of a run folder; empty where none can be read."""
    try:
        handle = os.open(folder / RECIPE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            data = file.read(MOST_BYTES + 1)
        table = parse_toml(data.decode("utf-8"), where=RECIPE_FILE) if len(data) <= MOST_BYTES else {}
    except (OSError, UnicodeDecodeError, DataError):
        return {}
    found = {
        f"{section}.{key}": value
        for section, keys in table.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    return {_text(name): _text(value) for name, value in sorted(found.items())[:MOST_SETTINGS]}


def _text(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return printable(text if len(text) <= MOST_VALUE else text[:MOST_VALUE] + "...")


def differences(recipes: Mapping[str, Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """(setting, value in each run; None: not set) of the settings in which runs differ, without where they lie."""
    names = sorted({name for values in recipes.values() for name in values} - PLACES)
    rows = [(name, [values.get(name) for values in recipes.values()]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]

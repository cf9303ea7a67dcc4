"""Folders that Hugging Face `datasets` wrote with `save_to_disk`: which of their files are read, in which order.

A `Dataset` is a folder with state.json, which lists its Arrow files; a `DatasetDict` one with dataset_dict.json and a folder for each split.
Both come from others: only plain names of files that lie in the folder itself are followed.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from phalanx.core.errors import Problem
from phalanx.core.reading import MalformedError, load_json, malformed, typed

SPLIT = "train"
"""What is read of a `DatasetDict`."""
_STATE, _SPLITS, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
MARKS = (_STATE, _SPLITS)
"""Files of which a saved dataset has one."""
_SUFFIX = ".arrow"
_MOST_BYTES = 16 << 20
_SHOWN, _SHOWN_CHARS = 8, 60


def is_saved(folder: Path) -> bool:
    """Was a `Dataset` or `DatasetDict` saved here? A state.json alone may be anything."""
    if (folder / _SPLITS).is_file():
        return True
    return (folder / _STATE).is_file() and ((folder / _INFO).is_file() or any(folder.glob(f"*{_SUFFIX}")))


def saved_files(folder: Path, where: str) -> list[Path] | Problem:
    """The Arrow files of a folder that `is_saved`, as its state.json orders them; of a `DatasetDict` those of `SPLIT`."""
    try:
        if (folder / _SPLITS).is_file():
            folder = _split(folder, where)
        return _listed(folder, where)
    except MalformedError as error:
        return error.problems[0]
    except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        return Problem(where=where, value=str(folder / _STATE), rule=rule, hint="save the dataset again")


def _split(folder: Path, where: str) -> Path:
    names: list[str] = typed(_table(folder / _SPLITS).get("splits"), list[str], where=f"{folder / _SPLITS}: splits")
    if SPLIT not in names:
        there = ", ".join(names[:_SHOWN]) or "none"
        rule = f"is a DatasetDict without a split {SPLIT!r} (it has: {there})"
        hint = f"name a split's folder: {folder / names[0]}" if names else "save the dataset again"
        raise malformed(where, str(folder), rule, hint)
    return _inside(folder, SPLIT, where)


def _listed(folder: Path, where: str) -> list[Path]:
    state = _table(folder / _STATE)
    if any(value for name, value in state.items() if name.startswith("_indices")):
        rule = "has a mapping of indices: the order of its rows is not that of its files"
        raise malformed(where, str(folder), rule, "save it again: dataset.flatten_indices().save_to_disk(...)")
    listed = state.get("_data_files")
    tables = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    names = [name for each in tables if isinstance(name := each.get("filename"), str)]
    if not isinstance(listed, list) or len(names) < len(listed):
        rule = 'must be a list of {"filename": NAME}'
        raise malformed(f"{folder / _STATE}: _data_files", str(listed)[:_SHOWN_CHARS], rule, "save the dataset again")
    if not names:
        raise malformed(where, str(folder), f"lists no data files in its {_STATE}", "save the dataset again")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise malformed(str(folder / _STATE), twice[0], "is listed twice", "save the dataset again")
    return [_inside(folder, name, str(folder / _STATE), suffix=_SUFFIX) for name in names]


def _inside(folder: Path, name: str, where: str, *, suffix: str = "") -> Path:
    """What has this name in the folder itself: nothing elsewhere, and no link to elsewhere."""
    plain = name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
    if not plain or not name.endswith(suffix):
        rule = f"must be the name of {'a file ' + suffix if suffix else 'a folder'} in the folder of the dataset itself"
        raise malformed(where, name, rule, "save the dataset again")
    path = folder / name
    if not path.exists():
        raise malformed(where, name, "does not exist", "copy the whole folder, or save the dataset again")
    if Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / name:
        raise malformed(where, name, "is a link to another place", "copy the folder with its files (cp -rL)")
    return path


def _table(path: Path) -> dict[str, Any]:
    found = load_json(path, most=_MOST_BYTES)
    if not isinstance(found, dict):
        raise malformed(str(path), type(found).__name__, "must be a JSON table", "save the dataset again")
    return found

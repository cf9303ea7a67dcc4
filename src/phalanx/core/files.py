"""Result files (`--json F` and the like): their folder is made, and what cannot be written is one clear message. And the folder that nobody but this user can reach."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, RunError
from phalanx.core.reading import MalformedError, load_json


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, its folder included. Raises `RunError` naming the file."""
    write_text(path, json.dumps(result, indent=2, sort_keys=True) + "\n")


def read_json(path: Path, *, where: str) -> Any:
    """What a JSON file says. Raises `DataError` naming `where` (a setting or an argument) and why it cannot be read."""
    try:
        return load_json(path)
    except OSError as error:
        problem = Problem(
            where=where, value=str(path), rule=f"cannot be read: {error.strerror}", hint="name another file"
        )
        raise DataError([problem], subject="a file") from error
    except MalformedError as error:
        problems = [Problem(where=where, value=str(path), rule=p.rule, hint=p.hint) for p in error.problems]
        raise DataError(problems, subject="a file") from error


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


def draft_of(path: Path) -> Path:
    """A name beside `path` for what is to replace it, which nobody else takes: processes of two hosts or containers that share a folder may have one number."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def private_folder() -> Path:
    """A folder of this user alone, of mode 0700: `$XDG_RUNTIME_DIR/phalanx`, else one below the folder for temporary files. Raises `RunError` where another user could reach into it."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(given) if given and os.path.isdir(given) and os.access(given, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / ("phalanx" if base == Path(given) else f"phalanx-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if not os.fstat(handle).st_mode & 0o022:  # nobody could have put anything there
                os.fchmod(handle, 0o700)
        finally:
            os.close(handle)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        mine = found.st_uid == os.geteuid()
        way_out = "remove it, or" if mine else "it is another user's, who alone can remove it:"
        raise RunError(
            f"{folder}: must be a folder of your own that nobody else can reach (mode 0700); {way_out} set XDG_RUNTIME_DIR to a folder of your own (mktemp -d makes one), the same for all commands"
        )
    return folder

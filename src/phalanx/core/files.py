"""Result files (`--json F` and the like): their folder is made, and what cannot be written is one clear message. Folders that have their name once they are complete, and the one that nobody but this user can reach."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, RunError
from phalanx.core.reading import MalformedError, load_json


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result file (None: none is wanted), its folder included. Raises `RunError` naming the file."""
    if path is not None:
        write_text(path, json.dumps(result, indent=2, sort_keys=True) + "\n")


def read_json(path: Path, *, where: str) -> Any:
    """What a JSON file says. Raises `DataError` naming `where` (a setting or an argument) and why it cannot be read."""
    try:
        return load_json(path)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise DataError.of(where, str(path), rule, "name another file", subject="a file") from error
    except MalformedError as error:
        problems = [Problem(where=where, value=str(path), rule=p.rule, hint=p.hint) for p in error.problems]
        raise DataError(problems, subject="a file") from error


def check_writable(*paths: Path | None) -> None:
    """Raise `RunError` now rather than after minutes of work, where a result file (None: none is wanted) could not be written."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            path.open("a").close()
            if not was_there:
                path.unlink()  # work that fails must not leave an empty result
        except OSError as error:
            raise _cannot_write(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file, its folder included: whole or not at all, but for devices, pipes and files of closed folders. Raises `RunError` naming the file."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")
            return
        draft = draft_of(target)
        try:
            draft.write_text(text, encoding="utf-8")
            if target.exists():
                target.open("a").close()  # one that must not be written is not replaced either
                shutil.copymode(target, draft)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror}; name another file")


def draft_of(path: Path) -> Path:
    """A name beside `path` for what is to replace it, which nobody else takes: processes of two hosts or containers that share a folder may have one number."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def writing_folder(target: Path) -> Path:
    """Where the files of `target` gather until all are there (`new_folder`)."""
    return target.with_name(f".writing-{target.name}")


@contextlib.contextmanager
def new_folder(target: Path, *, writer: str) -> Iterator[Path]:
    """An empty `writing_folder` of this process alone, which becomes `target`, a folder that is empty or not there, where no error comes; else what was written goes.

    Of a process that was killed the kernel drops the lock, and the next one removes the files. A file system without locks grants it to all. Raises `RunError` where another process
    (`writer` says what it does, such as "sync") has it, and for every `OSError`.
    """
    folder = writing_folder(target)
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as file:
            if not _is_locked(lock, file.fileno()):
                raise RunError(
                    f"{target}: another {writer} writes there; wait until it has ended, or name another folder"
                )
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                yield folder
                if target.exists():
                    target.rmdir()  # it is empty
                os.rename(folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}; what was written of it has been removed") from error


def _is_locked(path: Path, handle: int) -> bool:
    """Lock the file unless another process has it, or had it and has just removed it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


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

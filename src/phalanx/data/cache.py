"""The cache folder: finished things appear in it whole, are made by one process at a time, and outlive whoever made them.

Locks are `flock`s: the kernel drops them with their holder, so a `kill -9` blocks no other process. What an interrupted process left behind is
removed by the next holder of the same lock. Nothing is ever changed in place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import DataError
from phalanx.core.files import draft_of

_POLL_S = 0.05
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
_UNWRITABLE = (*_FULL, *_NO_PATH, errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class CacheProgress(Protocol):
    """Hears how far preparation is: a phase (`scan`, `tokenizer`, `tokenise`, `join`, `index`, `wait`) and bytes of input.

    `total_bytes` is 0 where it is not known (`wait`: another process is preparing the same data).
    """

    def __call__(self, phase: str, done_bytes: int, total_bytes: int, /) -> None: ...


def silent(phase: str, done_bytes: int, total_bytes: int, /) -> None:
    """A `CacheProgress` that shows nothing."""


def digest(value: Any) -> str:
    """32 hexadecimal digits of any JSON value; the same value gives the same digits on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def writing(cache: Path) -> Iterator[None]:
    """Turns a full, read-only or unwritable disk into a DataError that names the cache folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        reason = error.strerror or type(error).__name__
        rule = f"must be a folder that can be written ({reason}: {error.filename or cache})"
        hint = f"{'free some space, or ' if error.errno in _FULL else ''}name another folder with --data.cache"
        raise DataError.of("data.cache", str(cache), rule, hint, subject="the cache folder") from error


@contextlib.contextmanager
def locked(path: Path, progress: CacheProgress) -> Iterator[None]:
    """Holds the lock file `path`; waits for another holder, telling `progress` about it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        while not _try_lock(file.fileno(), path):
            progress("wait", 0, 0)
            time.sleep(_POLL_S)
        yield  # closing the file gives the lock back


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        rule, hint = "is on a file system without file locks", "name a folder on a local disk with --data.cache"
        raise DataError.of("data.cache", str(path.parent), rule, hint, subject="the cache folder") from error
    return True


def ensure_folder(
    final: Path,
    *,
    complete: Callable[[Path], bool],
    build: Callable[[Path], None],
    progress: CacheProgress,
) -> bool:
    """Makes `final` by `build(temporary folder)` unless it is there and `complete`; True if this call built it.

    Several processes may call this at once: one builds, the others wait and find it done. A folder that is there but not complete
    (a damaged disk) is built anew.
    """
    if complete(final):
        return False
    with writing(final.parent), locked(final.parent / ".locks" / final.name, progress):
        if complete(final):
            return False
        for stale in final.parent.glob(f".{final.name}.*.tmp"):  # the lock is ours, so whoever made it is gone
            shutil.rmtree(stale, ignore_errors=True)
        temporary = final.parent / f".{final.name}.{os.getpid()}.tmp"
        temporary.mkdir()
        try:
            build(temporary)
            _sync(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return True


def write_atomically(path: Path, content: bytes) -> None:
    """A small file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = draft_of(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

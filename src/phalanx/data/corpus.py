"""`builtin:python`: the Python sources that every machine already has, in the standard library and the installed packages.

Decides which files count and in which order. What must never change: files are chosen and ordered by the hash of their content alone, so
two machines with the same packages get the same data set wherever they keep them, a copy of a file counts once, and the first N bytes
are an even sample of all packages. Left out: tests (large, repetitive, mostly literals), vendored copies of other packages, generated
tables (big files), files too short to teach anything, files that are not UTF-8, and Phalanx itself (so that editing it changes no data).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.core.errors import DataError
from phalanx.data.cache import CacheProgress

RULES_VERSION = 1
"""Raise it whenever the choice of files changes: it is part of the data set's identity."""

DEFAULT_BYTES = 40_000_000
"""About 11 M tokens of bpe:8192: four times what the default run sees, and prepared in some 10 s on 2 idle cores."""

SKIPPED_FOLDERS = frozenset((
    "test", "tests", "testing", "idle_test", "_vendor", "vendor", "vendored", "site-packages", "dist-packages", "__pycache__", "phalanx",
))  # fmt: skip
SKIPPED_PREFIXES = ("test_", "__editable__", "_sysconfigdata")
SMALLEST_BYTES = 256
LARGEST_BYTES = 256 * 1024


Seen = tuple[int, int]
"""Size and time of the last change (ns). The cache knows files by both and their path: a number of the file itself would be another one each time on some network file systems."""


def python_folders() -> tuple[Path, ...]:
    """Where the running interpreter keeps the standard library and its packages."""
    names = ("stdlib", "purelib", "platlib")
    return tuple(dict.fromkeys(Path(sysconfig.get_path(name)).resolve() for name in names))


def candidates(folders: tuple[Path, ...]) -> dict[str, Seen]:
    """Files that may count, in the order of their paths, without reading them."""
    return dict(sorted(found for folder in folders for found in _walk(str(folder))))


def _walk(folder: str) -> Iterator[tuple[str, Seen]]:
    for here, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS]
        for name in names:
            if not name.endswith(".py") or name.startswith(SKIPPED_PREFIXES):
                continue
            path = os.path.join(here, name)
            try:
                status = os.stat(path)
            except OSError:  # a dangling link, or a package being removed now
                continue
            if SMALLEST_BYTES <= status.st_size <= LARGEST_BYTES:
                yield path, (status.st_size, status.st_mtime_ns)


def select(files: Mapping[str, Seen], max_bytes: int, progress: CacheProgress) -> tuple[tuple[Path, ...], str]:
    """The files of the corpus in their order, and its identity.

    Raises DataError where no file counts (an interpreter without its library).
    """
    paths = _by_content(files, progress)
    chosen: list[Path] = []
    identity = hashlib.blake2b(f"python/{RULES_VERSION}".encode(), digest_size=16)
    taken = 0
    for content_hash in sorted(paths):
        if taken >= max_bytes:
            break
        try:
            content = paths[content_hash].read_bytes()
        except OSError:  # a package is being removed now
            continue
        if _is_text(content):
            chosen.append(paths[content_hash])
            identity.update(content_hash)
            taken += len(content)
    if not chosen:
        rule = "found no Python sources next to the running interpreter"
        raise DataError.of("data.sources", "builtin:python", rule, "name text files instead", subject="the data")
    return tuple(chosen), identity.hexdigest()


def _by_content(files: Mapping[str, Seen], progress: CacheProgress) -> dict[bytes, Path]:
    """One path for each distinct content, by hash."""
    total, done = sum(size for size, _ in files.values()), 0
    paths: dict[bytes, Path] = {}
    for number, (path, (size, _)) in enumerate(files.items()):
        try:
            content = Path(path).read_bytes()
        except OSError:  # unreadable to us: not part of what we can train on
            continue
        paths.setdefault(hashlib.blake2b(content, digest_size=16).digest(), Path(path))
        done += size
        if number % 100 == 0:
            progress("scan", done, total)
    progress("scan", total, total)
    return paths


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False

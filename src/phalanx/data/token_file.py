"""Tokens on disk that are checked when they are read: nobody trains on what a disk, or somebody, has altered since they were prepared.

A file has a checksum (CRC-32) of each block of 64 KiB. A process checks a block when it first reads a token of it, so that opening costs nothing however large the file is, and a sample some 50 microseconds
once. Every token that is read must be one of the vocabulary. What differs is read from the disk once more (`forget`) before it counts as altered:
no error of a single read costs anybody a cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError

BLOCK_BYTES = 1 << 16


class AlteredDataError(DataError):
    """Prepared data are not what they were."""


def block_sums(path: Path) -> NDArray[np.uint32]:
    """(n,) CRC-32 of the blocks of a file."""
    with path.open("rb") as file:
        return np.array([zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")], np.uint32)


def file_sum(path: Path) -> int:
    """CRC-32 of a file."""
    with path.open("rb") as file:
        return sum_of(file, path.stat().st_size)


def sum_of(file: BinaryIO, size: int) -> int:
    """CRC-32 of the next `size` bytes, or of those that there are."""
    found = 0
    while size and (block := file.read(min(size, 1 << 20))):
        size, found = size - len(block), zlib.crc32(block, found)
    return found


def forget(path: Path, tokens: NDArray[Any] | None = None) -> None:
    """The system drops its copy of a file, mapped by `tokens` or not at all, so that the next read is one of the disk; where it cannot, that read is one of the copy."""
    mapped: Any = tokens
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    with contextlib.suppress(OSError), path.open("rb") as file:
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)  # pages that are mapped are not dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class TokenFile:
    """The tokens of a file, read by index like an array. Safe in several threads."""

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        path: Path,
        sums: NDArray[np.uint32] | None,
        vocab_size: int,
        made_in: Path | None,
    ) -> None:
        """`sums`: of its blocks, None where it was prepared without any. `made_in`: the cache folder that the file was made in, which is then made anew; None for a file of the user's."""
        self.tokens, self.path, self.vocab_size, self.made_in = tokens, path, vocab_size, made_in
        self._sums = sums
        self._per_block = BLOCK_BYTES // tokens.dtype.itemsize
        num_blocks = -(-len(tokens) // self._per_block)
        self._seen = np.full(num_blocks, sums is None)
        if sums is not None and len(sums) < num_blocks:
            raise self._altered(len(sums))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: NDArray[np.int64]) -> NDArray[Any]:
        """Tokens at the places `at` (any shape). Raises `AlteredDataError`."""
        blocks = at // self._per_block
        for block in np.unique(blocks[~self._seen[blocks]]).tolist():
            self._check(block)
        found: NDArray[Any] = self.tokens[at]
        if found.size and (found.max() >= self.vocab_size or found.min() < 0):
            self._refuse(at, found)
        return found

    def _check(self, block: int) -> None:
        if not self._is_as_written(block):
            forget(self.path, self.tokens)
            if not self._is_as_written(block):
                raise self._altered(block)
        self._seen[block] = True

    def _is_as_written(self, block: int) -> bool:
        assert self._sums is not None  # or all blocks would count as seen
        data = self.tokens.view(np.uint8)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        return zlib.crc32(data.tobytes()) == int(self._sums[block])

    def _altered(self, block: int) -> AlteredDataError:
        rule = f"was altered since it was prepared: the block of {BLOCK_BYTES} bytes at {block * BLOCK_BYTES} has another checksum"
        return self._error(None, rule)

    def _refuse(self, at: NDArray[np.int64], found: NDArray[Any]) -> None:
        first = np.flatnonzero((found >= self.vocab_size) | (found < 0))[0]
        place, token = int(at.reshape(-1)[first]), int(found.reshape(-1)[first])
        raise self._error(
            token, f"token {place} of the file is none of the vocabulary, whose ids are below {self.vocab_size}"
        )

    def _error(self, value: object, rule: str) -> AlteredDataError:
        hint = "copy the file again, or change its time (touch) if it is meant to be as it is"
        if self.made_in is not None:
            with contextlib.suppress(OSError):
                (self.made_in / "meta.json").unlink(missing_ok=True)
            hint = f"start again: it is made anew (or delete {self.made_in})"
        return AlteredDataError.of(str(self.path), value, rule, hint, subject="the data")

"""Megatron-LM's token files: NAME.bin (tokens, one after another) and NAME.idx (where sequences and documents begin).

Index, little endian: magic `MMIDIDX`, version u64, dtype code u8, sequences u64, [documents u64,] lengths i32, byte offsets i64,
[document starts i64,] [modes i8]. The bracketed parts are missing in the older form (fairseq's), where every sequence is a document.
Which form a file has follows from its size alone. Tokens stay where they are: nothing is copied.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.problems import ProblemLog

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16, 9: np.uint32, 10: np.uint64}
"""Integer dtypes by code; 6 and 7 are floating point, which no token is."""

_SHORT = struct.Struct("<9sQBQ")


@dataclass(frozen=True, kw_only=True, eq=False)
class MegatronFile:
    """Tokens of a .bin file, memory-mapped, and its documents as (begin, length) in tokens."""

    path: Path
    tokens: NDArray[Any]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]


def open_megatron(path: Path, log: ProblemLog) -> MegatronFile | None:
    """The pair that `path` (the .bin) belongs to; None after reporting what is wrong with it."""
    index = path.with_suffix(".idx")
    try:
        data = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
        size = path.stat().st_size
    except OSError as error:
        log.report(str(index), index.name, f"cannot be read ({error.strerror})", "keep .bin and .idx together")
        return None
    dtype = _header(index, data, log)
    if dtype is None:
        return None
    tokens = (
        np.memmap(path, dtype, "r", shape=(size // dtype.itemsize,)) if size >= dtype.itemsize else np.empty(0, dtype)
    )
    layout = _layout(index, data, log)
    if layout is None:
        return None
    lengths, pointers, starts = layout
    if not _fits(path, lengths, pointers, starts, itemsize=dtype.itemsize, size=size, log=log):
        return None
    begin = pointers // dtype.itemsize
    ends = np.append(begin, begin[-1] + lengths[-1] if len(begin) else 0)
    return MegatronFile(path=path, tokens=tokens, begin=ends[starts[:-1]], length=ends[starts[1:]] - ends[starts[:-1]])


def _header(index: Path, data: NDArray[np.uint8], log: ProblemLog) -> np.dtype[Any] | None:
    head = bytes(data[: _SHORT.size])
    if len(head) < _SHORT.size or head[: len(MAGIC)] != MAGIC:
        rule = "is not a Megatron index (no MMIDIDX magic)"
        log.report(str(index), head[:9], rule, "name the .bin and .idx of one data set")
        return None
    _, version, code, _ = _SHORT.unpack(head)
    if version != 1:
        log.report(str(index), version, "must be index version 1", "convert it with Megatron's tools")
    if code not in DTYPES:
        legal = ", ".join(f"{c} ({np.dtype(t).name})" for c, t in DTYPES.items())
        log.report(str(index), code, "is not the dtype code of an integer type", f"legal: {legal}")
    return np.dtype(DTYPES[code]).newbyteorder("<") if version == 1 and code in DTYPES else None


def _layout(
    index: Path, data: NDArray[np.uint8], log: ProblemLog
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
    """Lengths and byte offsets of sequences, and the first sequence of each document (one entry past the end included)."""
    n = int(data[18:26].view("<u8")[0])
    documents = int(data[26:34].view("<u8")[0]) if len(data) >= 34 else -1
    with_documents = 34 + 12 * n + 8 * documents
    if documents >= 1 and len(data) in (with_documents, with_documents + n):
        at = 34
    elif len(data) == 26 + 12 * n:
        at, documents = 26, 0
    else:
        rule = f"is {len(data)} bytes long, which does not fit its {n} sequences: truncated, or not an index"
        log.report(str(index), len(data), rule, "copy the file again")
        return None
    lengths = _array(data, at, n, "<i4")
    pointers = _array(data, at + 4 * n, n, "<i8")
    starts = _array(data, at + 12 * n, documents, "<i8") if documents else np.arange(n + 1, dtype=np.int64)
    return lengths, pointers, starts


def _array(data: NDArray[np.uint8], at: int, count: int, dtype: str) -> NDArray[np.int64]:
    return np.frombuffer(data[at : at + count * np.dtype(dtype).itemsize].tobytes(), dtype).astype(np.int64)


def _fits(
    path: Path,
    lengths: NDArray[np.int64],
    pointers: NDArray[np.int64],
    starts: NDArray[np.int64],
    *,
    itemsize: int,
    size: int,
    log: ProblemLog,
) -> bool:
    """Does the index describe this .bin: sequences inside it and end to end, documents in order?"""
    n = len(lengths)
    rules = {
        "has negative sequence lengths": bool((lengths < 0).any()),
        "places sequences between tokens": bool((pointers % itemsize).any()),
        f"places sequences outside of the {size} bytes of the .bin": bool(((pointers < 0) | (pointers > size)).any()),
        "has sequences that do not follow each other": bool(
            (pointers[1:] != pointers[:-1] + lengths[:-1] * itemsize).any()
        ),
        "has documents out of order": bool(starts[0] != 0 or starts[-1] != n or (starts[1:] < starts[:-1]).any()),
    }
    broken = [rule for rule, bad in rules.items() if bad]
    for rule in broken:
        log.report(str(path.with_suffix(".idx")), n, rule, "write the data set again")
    if broken or n == 0:
        return not broken
    needed = int(pointers[-1] + lengths[-1] * itemsize)
    if pointers[0] < 0 or needed > size:
        rule = f"holds {size} bytes, and its index names tokens up to byte {needed}"
        log.report(str(path), size, rule, "copy both files again; they must belong together")
        return False
    return True

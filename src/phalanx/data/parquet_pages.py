"""How large the pages of a Parquet file become: each page's header says it, and the library believes it and allocates.

A page of a few hundred bytes may say two gigabytes and even have them: so the headers of all pages of a column are read, and compared with a bound, before any page is. Footer and headers are Thrift's compact
protocol (its definition in the repository apache/parquet-format numbers the fields). They are read here and not by the library, whose Python part ends the process where a footer's histograms have the wrong length (26.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"PAR1"
MOST_FOOTER = 8 << 20
"""Bytes of a footer; a row group takes some hundred a column."""
HEADER_BYTES = 1 << 16
"""Headers are mostly shorter. One has the least and the largest value, which some writers do not cut."""
MOST_HEADER = 64 << 20
_DEEPEST = 16


class PageError(ValueError):
    """What is no Parquet file."""


@dataclass(frozen=True)
class ColumnChunk:
    """Where the pages of a column of a row group lie, in bytes."""

    start: int
    length: int


def column_chunks(file: BinaryIO, size: int, name: str) -> list[ColumnChunk]:
    """Where a column of a file of `size` bytes lies, with all that is nested in it, for each row group. Raises `PageError`."""
    file.seek(max(0, size - 8))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] != MAGIC or not 0 < length <= min(size - 8, MOST_FOOTER):
        raise PageError(f"it ends with no footer of up to {MOST_FOOTER} bytes")
    file.seek(size - 8 - length)
    footer = _read(file.read(length), "the footer")[0]
    found = []
    for number, group in enumerate(_list(footer.get(4))):
        for column in _list(_dict(group).get(1)):
            about = _dict(_dict(column).get(3))
            if _list(about.get(3))[:1] != [name.encode()]:
                continue
            starts = [at for at in (about.get(9), about.get(11)) if isinstance(at, int) and at > 0]
            told = about.get(7)
            chunk = ColumnChunk(min(starts, default=-1), told if isinstance(told, int) else -1)
            if not 0 <= chunk.start <= chunk.start + chunk.length <= size or chunk.length < 0:
                raise PageError(f"row group {number} names {chunk.length} bytes from byte {chunk.start} of {size}")
            found.append(chunk)
    return found


def page_sizes(file: BinaryIO, chunk: ColumnChunk) -> Iterator[int]:
    """Bytes of each page once it is decompressed. Raises `PageError`."""
    at, end = chunk.start, chunk.start + chunk.length
    while at < end:
        file.seek(at)
        header, used = _header(file, at)
        packed, size = header.get(3), header.get(2)
        if not isinstance(packed, int) or not isinstance(size, int) or packed < 0 or size < 0:
            raise PageError(f"the header of the page at byte {at} says no size")
        yield size
        at += used + packed
    if at != end:
        raise PageError(f"pages end at byte {at}, and the column at byte {end}")


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    what = f"the header of the page at byte {at}"
    data = file.read(HEADER_BYTES)
    try:
        return _read(data, what)
    except PageError:
        if len(data) < HEADER_BYTES:
            raise
    return _read(data + file.read(MOST_HEADER - HEADER_BYTES), what)


def _dict(value: Any) -> dict[int, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- Thrift -------------------------------------------------------------------------------------------------------------


def _read(data: bytes, what: str) -> tuple[dict[int, Any], int]:
    """The struct at the begin: fields by number, and how many bytes it takes."""
    try:
        return _struct(data, 0, 0)
    except IndexError:
        raise PageError(f"{what} has no end") from None


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    found, name = dict[int, Any](), 0
    while (head := data[at]) != 0:
        at, step, kind = at + 1, head >> 4, head & 15
        if step:
            name += step
        else:
            name, at = _signed(data, at)
        found[name], at = (kind == 1, at) if kind in (1, 2) else _value(data, at, kind, depth + 1)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value and where it ends; None for kinds that no size is of."""
    if depth > _DEEPEST:
        raise PageError("structs in structs without end")
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _signed(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind in (9, 10):
        return _several(data, at, depth)
    if kind == 11:
        return _map(data, at, depth)
    if kind == 12:
        return _struct(data, at, depth)
    raise PageError(f"a value of the unknown kind {kind}")


def _several(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    count, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if count == 15:
        count, at = _varint(data, at)
    found = []
    for _ in range(count):
        value, at = _value(data, at, kind, depth + 1)
        found.append(value)
    return found, at


def _map(data: bytes, at: int, depth: int) -> tuple[None, int]:
    count, at = _varint(data, at)
    if count:
        kinds, at = (data[at] >> 4, data[at] & 15), at + 1
        for _ in range(count):
            for kind in kinds:
                at = _value(data, at, kind, depth + 1)[1]
    return None, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise PageError("a number of more than 64 bits")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    raw, at = _varint(data, at)
    return (raw >> 1) ^ -(raw & 1), at

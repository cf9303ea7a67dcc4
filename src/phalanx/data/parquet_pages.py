"""How large the pages of a Parquet file become: each page's header says it (Thrift's compact protocol; parquet-format, PageHeader), and the library believes it and allocates.

A page of a few hundred bytes may say two gigabytes and even have them: so all headers of a column are read, and compared with a bound, before any page is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

HEADER_BYTES = 1 << 16
"""Longest header of a page that is read. It may have statistics, of up to 4 kB each."""
_DEEPEST = 8
_VARINTS, _STRUCT, _BINARY = (4, 5, 6), 12, 8
_LISTS, _MAP = (9, 10), 11


class PageError(ValueError):
    """No page begins where one should."""


def page_sizes(file: BinaryIO, start: int, length: int) -> Iterator[tuple[int, int]]:
    """(bytes in the file, bytes once decompressed) of each page of a column that takes `length` bytes from `start`. Raises `PageError`."""
    at, end = start, start + length
    while at < end:
        file.seek(at)
        header = file.read(HEADER_BYTES)
        try:
            fields, used = _struct(header, 0, 0)
        except IndexError:
            raise PageError(f"the header of the page at byte {at} has no end") from None
        packed, size = fields.get(3, -1), fields.get(2, -1)
        if packed < 0 or size < 0:
            raise PageError(f"the header of the page at byte {at} says no size")
        yield packed, size
        at += used + packed
    if at != end:
        raise PageError(f"pages end at byte {at}, and the column at byte {end}")


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, int], int]:
    """Whole numbers of a struct by their field, and where it ends."""
    found, name = dict[int, int](), 0
    while (head := data[at]) != 0:
        at, step = at + 1, head >> 4
        if step:
            name += step
        else:
            raw, at = _varint(data, at)
            name = _signed(raw)
        kind = head & 15
        if kind in _VARINTS:
            raw, at = _varint(data, at)
            found[name] = _signed(raw)
        elif kind not in (1, 2):  # booleans are in the head
            at = _skip(data, at, kind, depth + 1)
    return found, at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Where a value ends."""
    if depth > _DEEPEST:
        raise PageError("a header of structs in structs without end")
    if kind in _VARINTS:
        return _varint(data, at)[1]
    if kind in (1, 2, 3):
        return at + 1
    if kind == 7:
        return at + 8
    if kind == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if kind == _STRUCT:
        return _struct(data, at, depth)[1]
    if kind not in _LISTS and kind != _MAP:
        raise PageError(f"a value of the unknown kind {kind}")
    return _skip_all(data, at, kind, depth)


def _skip_all(data: bytes, at: int, kind: int, depth: int) -> int:
    """Where a list, set or map ends."""
    if kind == _MAP:
        count, at = _varint(data, at)
        kinds = [data[at] >> 4, data[at] & 15] if count else []
        at += bool(count)
    else:
        count, kinds, at = data[at] >> 4, [data[at] & 15], at + 1
        if count == 15:
            count, at = _varint(data, at)
    for _ in range(count):
        for each in kinds:
            at = _skip(data, at, each, depth + 1)
    return at


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


def _signed(raw: int) -> int:
    return (raw >> 1) ^ -(raw & 1)

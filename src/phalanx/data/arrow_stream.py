"""Where the record batches of an Arrow IPC stream lie: the frame of each message is looked at before the library reads it.

A message says how long it and its body are, and a compressed buffer how large it becomes; the library believes the latter and allocates. Here each message must lie
within the file, none may be compressed (`datasets` compresses none), and the file must end as a stream ends: cut after a batch it would look
whole. The layout is that of Message.fbs in the repository apache/arrow: flatbuffers, whose tables say where each field lies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_CONTINUES = 0xFFFFFFFF
_FRAME = 8
_SCHEMA, _BATCH = 1, 3
_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_COMPRESSION = 3


class StreamError(ValueError):
    """What is no Arrow stream that we read."""


def batch_ends(data: memoryview) -> Iterator[int]:
    """Byte at which each message ends: first the schema, then every record batch. Raises `StreamError`."""
    if bytes(data[:6]) == b"ARROW1":
        raise StreamError("it is an Arrow file, and must be an Arrow stream, as save_to_disk writes it")
    at, expected = 0, _SCHEMA
    while True:
        if at + _FRAME > len(data):
            raise StreamError(f"it breaks off at byte {len(data)}")
        marker, length = struct.unpack_from("<Ii", data, at)
        if marker != _CONTINUES or length < 0:
            raise StreamError(f"no message begins at byte {at}")
        if length == 0 and expected == _BATCH:
            break
        end = at + _FRAME + length
        if end > len(data):
            raise StreamError(f"it breaks off at byte {len(data)}, within a message from byte {at}")
        end += _body_length(data[at + _FRAME : end], expected, at)
        if end > len(data):
            raise StreamError(f"it breaks off at byte {len(data)}, within a message from byte {at}")
        yield end
        at, expected = end, _BATCH
    if at + _FRAME != len(data):
        raise StreamError(f"it ends at byte {at + _FRAME} of {len(data)}")


def _body_length(message: memoryview, expected: int, at: int) -> int:
    """Bytes that follow a message of the expected type."""
    try:
        (table,) = struct.unpack_from("<I", message, 0)
        kind = _field(message, table, _TYPE, "<B")
        header = _field(message, table, _HEADER, "<I")
        body = _field(message, table, _BODY_LENGTH, "<q") or 0
        if kind == expected == _BATCH and header is not None:
            place = _place(message, table, _HEADER)
            if place is not None and _place(message, place + header, _COMPRESSION) is not None:
                raise StreamError(f"the record batch at byte {at} is compressed")
    except struct.error:
        raise StreamError(f"the message at byte {at} is damaged") from None
    if kind != expected or header is None or body < 0:
        what = "schema" if expected == _SCHEMA else "record batch"
        raise StreamError(f"the message at byte {at} is no {what}")
    return body


def _field(message: memoryview, table: int, number: int, form: str) -> int | None:
    place = _place(message, table, number)
    return None if place is None else int(struct.unpack_from(form, message, place)[0])


def _place(message: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffers table lies; None where it has its default."""
    names = table - struct.unpack_from("<i", message, table)[0]
    if names < 0:
        raise struct.error
    (size,) = struct.unpack_from("<H", message, names)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", message, names + 4 + 2 * number)
    return table + offset if offset else None

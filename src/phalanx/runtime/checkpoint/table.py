"""The table of contents of a checkpoint as columns, and as bytes that `torch.distributed.checkpoint` reads.

torch pickles an object or six for each box; of 4,096 ranks there are 500,000 boxes, each of which takes 100 us to read and 3 KB of memory. Here a box is a row of numbers. `encode` writes the same
pickle in records of one length, alike but for their numbers, so that `decode` finds these at known places; it compares every other byte with what `encode` would write. Whoever reads the pickle
step by step, as torch does, reads the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from phalanx.core.errors import CheckpointError, Problem, few, raise_if
from phalanx.core.reading import MalformedError, parse_json, typed

Rows = np.ndarray[Any, np.dtype[np.int64]]
MOST_DIMS = 64
"""Of a tensor: torch's own limit."""
BOX_BYTES, TENSOR_BYTES = 50, 30
"""A box, and what is said of a tensor, take more of a table."""
TENSOR, FILE, AT, LENGTH, DIMS = range(5)
"""Columns of a row; from `DIMS` on offsets, then sizes."""


@dataclass(frozen=True)
class SavedTensor:
    """A logical tensor."""

    name: str
    dtype: str
    """As torch calls it, without `torch.`."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises `ValueError`."""
        if not isinstance(
            dtype := vars(torch).get(self.dtype), torch.dtype
        ):  # what is no attribute yet torch would import
            raise ValueError(f"{self.name[:200]} is of the unknown type {self.dtype[:60]!r}")
        return dtype


class SavedBox(NamedTuple):
    """Where a box of a tensor is in a file: `length` bytes, as torch writes a tensor, from byte `at` on."""

    tensor: SavedTensor
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    at: int
    length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxTable:
    """Where boxes are, a row for each: (B, 4 + 2D) int64 of the numbers of its tensor and its file, the first byte, bytes, offsets (D) and sizes (D). D is the most dims of a tensor, at least 1;
    one of fewer has more of size 1 at the end."""

    tensors: tuple[SavedTensor, ...]
    files: tuple[str, ...]
    rows: np.ndarray[Any, Any]

    @classmethod
    def of(cls, boxes: Iterable[SavedBox]) -> BoxTable:
        """Raises `OverflowError` where a number has more than 64 bits."""
        listed = list(boxes)
        tensors, files = (_numbered(getattr(box, name) for box in listed) for name in ("tensor", "file"))
        dims = _dims(tensors)
        flat = chain.from_iterable(
            (tensors[b.tensor], files[b.file], b.at, b.length, *filled(b.offsets, dims, 0), *filled(b.sizes, dims, 1))
            for b in listed
        )
        rows = np.fromiter(flat, np.int64).reshape(len(listed), DIMS + 2 * dims)
        return cls(tensors=tuple(tensors), files=tuple(files), rows=rows)

    @cached_property
    def dims(self) -> int:
        return _dims(self.tensors)

    @property
    def offsets(self) -> Rows:
        return self.rows[:, DIMS : DIMS + self.dims]

    @property
    def sizes(self) -> Rows:
        return self.rows[:, DIMS + self.dims :]

    @cached_property
    def shapes(self) -> Rows:
        """(tensors, D)."""
        shapes = [filled(t.shape, self.dims, 1) for t in self.tensors]
        return np.array(shapes, np.int64).reshape(len(shapes), self.dims)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor by its name."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def _ends(self) -> Rows:
        return np.searchsorted(self.rows[:, TENSOR], np.arange(len(self.tensors) + 1))

    def rows_of(self, number: int) -> Rows:
        """Of a table that is `sorted`."""
        return self.rows[self._ends[number] : self._ends[number + 1]]

    def sorted(self) -> BoxTable:
        """The same with rows in the order of their tensors."""
        rows = self.rows[np.argsort(self.rows[:, TENSOR], kind="stable")]
        return BoxTable(tensors=self.tensors, files=self.files, rows=rows)

    def check(self) -> None:
        """Raises `ValueError` where a number points outside of the table, or a box out of its tensor."""
        for tensor in self.tensors:
            whole = tensor.torch_dtype.itemsize * math.prod(tensor.shape)
            if len(tensor.shape) > MOST_DIMS or min(tensor.shape, default=0) < 0 or whole >> 62:
                raise ValueError(f"{tensor.name[:200]} cannot have the shape {str(tensor.shape)[:200]}")
        if len(self.numbers) < len(self.tensors) or len(set(self.files)) < len(self.files):
            raise ValueError("it has a tensor or a file twice")
        self.check_numbers()
        rows = self.rows
        room = self.shapes[rows[:, TENSOR]]  # no sum of two numbers of a row, which could be too large
        outside = (rows[:, AT:] < 0).any(axis=1) | (self.offsets > room).any(axis=1)
        outside |= (self.sizes > room - self.offsets).any(axis=1)
        if outside.any():
            raise ValueError(f"it has a box outside of {self.tensors[rows[outside.argmax(), TENSOR]].name[:200]}")

    def check_numbers(self) -> None:
        """Raises `ValueError` where there are other rows than tensors and files need."""
        rows = self.rows
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != DIMS + 2 * self.dims:
            raise ValueError("it has rows of another kind")
        for column, count in ((TENSOR, len(self.tensors)), (FILE, len(self.files))):
            if ((rows[:, column] < 0) | (rows[:, column] >= count)).any():
                raise ValueError("it has a box of no tensor, or in no file")


def joined(tables: Sequence[BoxTable]) -> BoxTable:
    """All rows of tables in one that is `sorted`. Raises `CheckpointError` where they disagree about a tensor, and `ValueError`."""
    tensors, files = (_numbered(each for t in tables for each in getattr(t, name)) for name in ("tensors", "files"))
    first = dict[str, SavedTensor]()
    for tensor in tensors:
        first.setdefault(tensor.name, tensor)
    problems = [
        Problem(where=t.name, value=t.shape, rule=f"other ranks have {first[t.name].shape} of {first[t.name].dtype}, this one has {t.dtype}")
        for t in tensors if first[t.name] != t
    ]  # fmt: skip
    raise_if(few(problems), CheckpointError, subject="the boxes to be saved")
    dims, parts = _dims(tensors), []
    for table in tables:
        table.check_numbers()
        if len(rows := table.rows):
            numbers = ([tensors[t] for t in table.tensors], [files[f] for f in table.files])
            mine = [
                np.array(new)[rows[:, column]][:, None] for column, new in zip((TENSOR, FILE), numbers, strict=True)
            ]
            more = ((0, 0), (0, dims - table.dims))
            boxes = [np.pad(table.offsets, more), np.pad(table.sizes, more, constant_values=1)]
            parts.append(np.hstack([*mine, rows[:, AT:DIMS], *boxes]))
    together = np.concatenate(parts) if parts else np.empty((0, DIMS + 2 * dims), np.int64)
    return BoxTable(tensors=tuple(tensors), files=tuple(files), rows=together).sorted()


def _numbered(values: Iterable[Any]) -> dict[Any, int]:
    return {value: i for i, value in enumerate(dict.fromkeys(values))}


def _dims(tensors: Iterable[SavedTensor]) -> int:
    return max((len(t.shape) for t in tensors), default=1) or 1


def filled(numbers: Sequence[int], dims: int, value: int) -> tuple[int, ...]:
    """Offsets (0), sizes or a shape (1) with as many dims."""
    return (*numbers, *[value] * (dims - len(numbers)))


# ---- as a pickle of torch's classes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Summary:
    """What the records are of; stands in front of them, and readers of torch's classes drop it. Of each tensor name, type, shape and number of boxes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[int, ...]
    files: tuple[str, ...]

    def tensors(self) -> tuple[SavedTensor, ...]:
        """Raises `ValueError`."""
        each = zip(self.names, self.dtypes, self.shapes, self.boxes, strict=True)
        return tuple(SavedTensor(name, dtype, shape) for name, dtype, shape, _ in each)


class _Number(NamedTuple):
    """A step of a pickle and a number of so many bytes: that of a column, and `more`."""

    step: bytes
    width: int
    column: int
    more: int = 0


@dataclass(frozen=True)
class _Record:
    """Bytes for each box, alike but for the `numbers` at some places."""

    alike: bytes
    numbers: tuple[tuple[int, _Number], ...]
    columns: range
    """That are read here; others stand here again."""

    def written(self, rows: Rows) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """(count, bytes of a record)."""
        out = np.tile(np.frombuffer(self.alike, np.uint8), (len(rows), 1))
        for at, of in self.numbers:
            out[:, at : at + of.width] = (rows[:, [of.column]] + of.more).astype(f"<i{of.width}").view(np.uint8)
        return out

    def read(self, found: np.ndarray[Any, np.dtype[np.uint8]], rows: Rows) -> None:
        """Into `columns` of `rows`."""
        for at, of in self.numbers:
            if of.column in self.columns:
                part = np.ascontiguousarray(found[:, at : at + of.width]).view(f"<i{of.width}")
                rows[:, of.column] = part[:, 0].astype(np.int64) - of.more


_TORCH = b"ctorch.distributed.checkpoint."
_HEAD = b"\x80\x04" + _TORCH + b"metadata\nMetadata\n)\x81}(X\x0c\x00\x00\x00planner_data("
"""Up to a tuple that nobody reads: a later value of the same name takes its place. In it is all that the records name."""
_NAMED = {
    "tensor": _TORCH + b"metadata\nTensorStorageMetadata\n", "chunk": _TORCH + b"metadata\nChunkStorageMetadata\n",
    "index": _TORCH + b"metadata\nMetadataIndex\n", "place": _TORCH + b"filesystem\n_StorageInfo\n", "Size": b"ctorch\nSize\n",
}  # fmt: skip
"""Classes, by words of ours."""
_FIELDS = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "relative_path", "length")


def encode(table: BoxTable) -> bytes:
    """A table that is `sorted`, as bytes of which a `pickle` makes torch's `Metadata`."""
    boxes = tuple(len(table.rows_of(i)) for i in range(len(table.tensors)))
    names, dtypes, shapes = (tuple(getattr(t, of) for t in table.tensors) for of in ("name", "dtype", "shape"))
    pieces = _pieces(_Summary(names, dtypes, shapes, boxes, table.files), table.tensors)
    return b"".join(p if isinstance(p, bytes) else p[1].written(table.rows_of(p[0])).tobytes() for p in pieces)


def decode(data: bytes) -> BoxTable | None:
    """The table of which these are the bytes; None where `encode` would have written others. Nothing is checked but that."""
    size = int.from_bytes(data[len(_HEAD) + 1 : len(_HEAD) + 5], "little")
    try:
        said = parse_json(data[len(_HEAD) + 5 : len(_HEAD) + 5 + size], where="a table of contents")
        summary: _Summary = typed(said, _Summary, where="a table of contents")
        tensors = summary.tensors()
        count, dims = sum(summary.boxes), _dims(tensors)
        least = count * BOX_BYTES + len(tensors) * TENSOR_BYTES
        if min(summary.boxes, default=0) < 0 or least > len(data) - size or dims > MOST_DIMS:
            return None  # before there is room for so many
        rows = np.zeros((count, DIMS + 2 * dims), np.int64)
        rows[:, DIMS + dims :] = 1
        rows[:, TENSOR] = np.repeat(np.arange(len(tensors)), summary.boxes)
        table = BoxTable(tensors=tensors, files=summary.files, rows=rows)
        at = 0
        for piece in _pieces(summary, tensors):
            at = _taken(piece, data, at, table)
    except (MalformedError, ValueError, OverflowError):
        return None
    return table if at == len(data) else None


def _taken(piece: bytes | tuple[int, _Record], data: bytes, at: int, table: BoxTable) -> int:
    """Reads a piece at byte `at`; where the next one begins. Raises `ValueError` where it is another."""
    if isinstance(piece, bytes):
        if not data.startswith(piece, at):
            raise ValueError
        return at + len(piece)
    number, record = piece
    rows, size = table.rows_of(number), len(record.alike)
    found = np.frombuffer(data, np.uint8, size * len(rows), at).reshape(len(rows), size)
    record.read(found, rows)
    if not np.array_equal(record.written(rows), found):
        raise ValueError
    return at + found.size


class _Memo:
    """What the pickle keeps, by words of ours, and the steps that bring it back."""

    def __init__(self, kept: Mapping[Any, bytes]) -> None:
        self.kept = b"".join(value + b"\x94" for value in kept.values())
        self.places = {key: i for i, key in enumerate(kept)}

    def get(self, key: Any) -> bytes:
        place = self.places[key]
        return b"h" + bytes([place]) if place < 256 else b"j" + place.to_bytes(4, "little")

    def begun(self, kind: str) -> bytes:
        """An object, whose fields follow."""
        return self.get(kind) + b")\x81}("

    def size(self, numbers: Sequence[bytes | _Number]) -> list[bytes | _Number]:
        return [self.get("Size") + b"(", *numbers, b"t\x85R"]


def _pieces(of: _Summary, tensors: Sequence[SavedTensor]) -> Iterator[bytes | tuple[int, _Record]]:
    """The pickle: bytes, and where records of the boxes of a tensor stand."""
    memo = _Memo({
        **_NAMED, **{field: _text(field) for field in _FIELDS}, **{("type", dtype): _properties(dtype) for dtype in of.dtypes},
        **{("tensor", i): _text(name) for i, name in enumerate(of.names)}, **{("file", i): _text(f) for i, f in enumerate(of.files)},
    })  # fmt: skip
    yield _HEAD + _text(json.dumps(asdict(of), separators=(",", ":"))) + memo.kept + b"t" + _text("planner_data") + b"N"
    records, dims = dict[tuple[int, bool], tuple[_Record, _Record]](), _dims(tensors)
    for tensor in tensors:
        if (kind := _kind(tensor)) not in records:
            records[kind] = _chunk_and_place(*kind, memo, dims=dims)
    yield _text("state_dict_metadata") + b"}("
    for i, tensor in enumerate(tensors):
        shape = memo.size([_LONG + n.to_bytes(8, "little", signed=True) for n in tensor.shape])
        head = [memo.get(("tensor", i)), memo.begun("tensor"), memo.get("properties"), memo.get(("type", tensor.dtype)), memo.get("size"), *shape, memo.get("chunks"), b"]("]  # fmt: skip
        yield _record(head).alike
        yield i, records[_kind(tensor)][0]
        yield b"eub"
    yield b"u" + _text("storage_data") + b"}("
    for i, tensor in enumerate(tensors):
        yield i, records[_kind(tensor)][1]
    yield b"u" + _text("version") + _text("1.0.0") + b"ub."


def _kind(tensor: SavedTensor) -> tuple[int, bool]:
    """What the records of its boxes follow from: dims, and whether a number may take more than 32 bits."""
    return len(tensor.shape), max(tensor.shape, default=0) >= 1 << 31


def _chunk_and_place(rank: int, is_long: bool, memo: _Memo, *, dims: int) -> tuple[_Record, _Record]:
    """What a box of a tensor of `rank` dims is, and where."""
    step, width = (_LONG, 8) if is_long else (b"J", 4)
    offsets, sizes = (memo.size([_Number(step, width, at + d) for d in range(rank)]) for at in (DIMS, DIMS + dims))
    tensor, file = (memo.places.get((name, 0), 0) for name in ("tensor", "file"))  # others follow the first one
    chunk = [memo.begun("chunk"), memo.get("offsets"), *offsets, memo.get("sizes"), *sizes, b"ub"]
    place = [
        memo.begun("index"), memo.get("fqn"), _Number(b"j", 4, TENSOR, tensor), memo.get("offset"), *offsets, b"ub",
        memo.begun("place"), memo.get("relative_path"), _Number(b"j", 4, FILE, file),
        memo.get("offset"), _Number(_LONG, 8, AT), memo.get("length"), _Number(_LONG, 8, LENGTH), b"ub",
    ]  # fmt: skip
    return _record(chunk, columns=range(DIMS, DIMS + 2 * dims)), _record(place, columns=range(FILE, DIMS))


def _record(parts: Sequence[bytes | _Number], *, columns: range = range(0)) -> _Record:
    alike, numbers = b"", list[tuple[int, _Number]]()
    for part in parts:
        if isinstance(part, _Number):
            numbers.append((len(alike) + len(part.step), part))
            part = part.step + bytes(part.width)
        alike += part
    return _Record(alike, tuple(numbers), columns)


_LONG = b"\x8a\x08"
"""A number of eight bytes follows."""


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def _properties(dtype: str) -> bytes:
    """As torch pickles `TensorProperties`."""
    layout = b"ctorch.serialization\n_get_layout\n" + _text("torch.strided") + b"\x85R"
    memory = _TORCH + b"metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R"
    fields = b"(ctorch\n" + dtype.encode() + b"\n" + layout + b"\x89" + memory + b"\x89t"
    return _TORCH + b"metadata\nTensorProperties\n)\x81" + fields + b"b"

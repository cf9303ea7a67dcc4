"""Reads the table of contents of a checkpoint of a stranger. torch writes it as a pickle, a program that may name and call anything, and by which a few hundred bytes may become more than memory holds.

What `table.encode` wrote is read as columns (`table.decode`), without a step of that program. Of any other program only what torch's tables consist of is run (`_DISPATCH`), over values that stay as small as the bytes they came in: no call returns more than a few words, no object takes a state of
more than its fields, and keys, which Python hashes and compares, are flat.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from phalanx.core.errors import CheckpointError, first_line
from phalanx.core.reading import read_file
from phalanx.runtime.checkpoint.table import MOST_DIMS, BoxTable, SavedBox, SavedTensor, decode

TABLE_FILE = ".metadata"
"""`torch.distributed.checkpoint` calls it so."""
TABLE_BYTES = 512 << 20
"""About 2.6 million pieces of tensors, of 200 bytes each (DeepSeek-V3 on 16,384 ranks has 1.5 million). It bounds the steps too: each has a byte at least, takes 0.4 us and makes 100 bytes of memory at most."""
MOST_PARTS, MOST_PART = 256, 4096
"""Of the path of the folder that a table was written to, and characters of each part."""


def _size(*given: Any) -> torch.Size:
    (dims,) = given
    if not isinstance(dims, tuple) or len(dims) > MOST_DIMS or any(type(n) is not int for n in dims):
        raise pickle.UnpicklingError(f"a size is not of at most {MOST_DIMS} whole numbers")
    return torch.Size(dims)


def _path(*parts: Any) -> PurePosixPath:
    """Of texts alone: paths of paths would double their length at each step."""
    if len(parts) > MOST_PARTS or any(type(part) is not str or len(part) > MOST_PART for part in parts):
        raise pickle.UnpicklingError(f"a path is not of at most {MOST_PARTS} texts of {MOST_PART} characters")
    return PurePosixPath(*parts)


def _layout(*given: Any) -> Any:
    (name,) = given
    if type(name) is not str:
        raise pickle.UnpicklingError("a layout has no name")
    return _get_layout(name)


def _encoding(*given: Any) -> Any:
    (number,) = given
    if type(number) is not int:
        raise pickle.UnpicklingError("a memory format has no number")
    return dcp_metadata._MEM_FORMAT_ENCODING(number)


def _named_encoding(*given: Any) -> Any:
    """The same by its name: Python 3.11.0 to 3.11.3, Debian 12's too, write an enumeration so."""
    of, name = given
    found = dcp_metadata._MEM_FORMAT_ENCODING.__members__.get(name) if of is _encoding and type(name) is str else None
    if found is None:
        raise pickle.UnpicklingError("a memory format has no name")
    return found


_CLASSES: tuple[type, ...] = (
    Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties, _StorageInfo,
)  # fmt: skip
"""Made empty, then given their fields."""
_FIELDS = {of: frozenset(field.name for field in dataclasses.fields(of)) for of in _CLASSES}
_CALLS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _encoding,
    "builtins.getattr": _named_encoding,
    **{f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")},
}  # fmt: skip
_NAMES: Mapping[str, Any] = {
    **{f"{of.__module__}.{of.__qualname__}": of for of in _CLASSES},
    **_CALLS,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
"""All that a table of contents names."""


class _TableReader(pickle._Unpickler):
    """Python's own unpickler (the one in Python: that in C runs every step), with few of its steps."""

    def find_class(self, module: str, name: str) -> Any:
        if (found := _NAMES.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module[:60]}.{name[:60]}, which no table of contents consists of")
        return found


def _new(reader: Any) -> None:
    """An object without its fields."""
    words = reader.stack.pop()
    if words != () or reader.stack[-1] not in _CLASSES:
        raise pickle.UnpicklingError("it makes what no table of contents consists of")
    reader.stack[-1] = object.__new__(reader.stack[-1])


def _reduce(reader: Any) -> None:
    """A call of a stand-in."""
    words, call = reader.stack.pop(), reader.stack[-1]
    if type(words) is not tuple or not any(call is known for known in _CALLS.values()):
        raise pickle.UnpicklingError("it calls what no table of contents calls")
    reader.stack[-1] = call(*words)


def _build(reader: Any) -> None:
    """Gives the newest object its fields."""
    state, made = reader.stack.pop(), reader.stack[-1]
    if type(made) is TensorProperties:
        if type(state) is not tuple:
            raise pickle.UnpicklingError("the properties of a tensor are no tuple")
        made.__setstate__(state)
        return
    if type(made) not in _CLASSES or type(state) is not dict:
        raise pickle.UnpicklingError("it fills what no table of contents consists of")
    if strange := state.keys() - _FIELDS[type(made)]:
        raise pickle.UnpicklingError(f"a {type(made).__name__} has no field {sorted(map(str, strange))[0][:60]}")
    vars(made).update(state)


def _set_items(reader: Any) -> None:
    items = reader.pop_mark()
    _put(reader.stack[-1], items)


def _set_item(reader: Any) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _put(reader.stack[-1], [key, value])


def _put(table: Any, items: list[Any]) -> None:
    if type(table) is not dict or len(items) % 2 or not all(map(_is_key, items[::2])):
        raise pickle.UnpicklingError("it has a table by other than names and places")
    table.update(zip(items[::2], items[1::2], strict=True))


def _append_all(reader: Any) -> None:
    items = reader.pop_mark()
    _extend(reader.stack[-1], items)


def _append(reader: Any) -> None:
    item = reader.stack.pop()
    _extend(reader.stack[-1], [item])


def _extend(found: Any, items: list[Any]) -> None:
    if type(found) is not list:
        raise pickle.UnpicklingError("it appends to what is no list")
    found.extend(items)


def _is_key(key: Any) -> bool:
    return type(key) is str or (
        type(key) is MetadataIndex
        and type(key.fqn) is str
        and type(key.offset) in (type(None), torch.Size)
        and type(key.index) in (type(None), int)
    )


_DISPATCH: dict[int, Callable[[Any], None]] = {
    **{
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in (
            "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST",
            "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL", "STACK_GLOBAL", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
        )
    },
    pickle.NEWOBJ[0]: _new,
    pickle.REDUCE[0]: _reduce,
    pickle.BUILD[0]: _build,
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: _set_items,
    pickle.APPEND[0]: _append,
    pickle.APPENDS[0]: _append_all,
}  # fmt: skip
_TableReader.dispatch = cast("Any", _DISPATCH)


def read_table(path: Path) -> BoxTable:
    """The table of contents in the folder `path`, from wherever it came, `sorted`. Raises `CheckpointError` where it is none, or names a file outside of the folder."""
    file, rule = path / TABLE_FILE, ""
    try:
        data = read_file(file, most=TABLE_BYTES)
        found = decode(data) or _step_by_step(data)
        found.check()
        strange = [
            n for n in sorted(found.files) if n in ("", ".", "..") or Path(n).name != n or (path / n).is_symlink()
        ]
        if not strange:
            return found
        rule = f"names the file {strange[0][:200]!r}, which is not one of its folder"
    except OSError as err:
        rule = f"cannot be read: {err.strerror}"
    except KeyError as err:  # a step that is not among ours, or a value that was never kept
        rule = f"is no table of contents of a checkpoint: it has the step {err}, which none has"
    except Exception as err:  # whatever a strange pickle leads to
        rule = f"is no table of contents of a checkpoint: {first_line(err)}"
    raise CheckpointError.of(str(file), None, rule, "use another checkpoint", subject="the checkpoint")


def _step_by_step(data: bytes) -> BoxTable:
    """Of a pickle that torch wrote, as checkpoints of earlier versions have."""
    found = _TableReader(io.BytesIO(data)).load()
    if not _is_table(found):
        raise ValueError("it has other parts")
    places = {(key.fqn, key.offset): info for key, info in found.storage_data.items()}
    boxes = []
    for name, entry in found.state_dict_metadata.items():
        tensor = SavedTensor(name, str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
        for chunk in entry.chunks:
            if (info := places.get((name, chunk.offsets))) is None or not len(chunk.offsets) == len(chunk.sizes) == len(
                entry.size
            ):
                raise ValueError(f"it has no place for a box of {name[:200]}")
            boxes.append(SavedBox(tensor, chunk.offsets, chunk.sizes, _file_of(info), info.offset, info.length))
    return BoxTable.of(boxes).sorted()


def _is_table(found: Any) -> bool:
    """Whether all that is read later has its type: a message about a nested tuple could be longer than memory."""
    if type(found) is not Metadata or type(found.state_dict_metadata) is not dict:
        return False
    tensors, places = found.state_dict_metadata, found.storage_data
    return (
        all(type(name) is str and _is_tensor(entry) for name, entry in tensors.items())
        and type(places) is dict
        and all(type(key) is MetadataIndex and _is_key(key) for key in places)
        and all(type(p) is _StorageInfo and type(p.offset) is int and type(p.length) is int for p in places.values())
    )


def _is_tensor(entry: Any) -> bool:
    return (
        type(entry) is TensorStorageMetadata
        and type(entry.properties) is TensorProperties
        and isinstance(entry.properties.dtype, torch.dtype)
        and type(entry.size) is torch.Size
        and type(entry.chunks) is list
        and all(
            type(c) is ChunkStorageMetadata and type(c.offsets) is type(c.sizes) is torch.Size for c in entry.chunks
        )
    )


def _file_of(info: _StorageInfo) -> str:
    """The file of one entry; "/" for one that asks for more than to be read."""
    plain = type(info.relative_path) is str and not info.transform_descriptors
    return info.relative_path if plain else "/"

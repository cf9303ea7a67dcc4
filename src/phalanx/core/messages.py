"""What processes of a run say to each other, as bytes: JSON of known types. Reading it builds values and executes nothing, whoever wrote it (a pickle executes what its writer wants).

Known are None, bool, int, float, str, bytes, path, list, tuple, dict, set, frozenset, arrays of numbers, errors of ours, and the dataclasses, named tuples and enums that are marked `@message`, of which each
field must have the type that it declares. All but None, numbers and words are lists that begin with their kind:

    ["tuple", 1, "a"]   ["dict", ["key", 1]]   ["bytes", "AP8="]   ["array", "float32", [2], "AAAAAAAAAAA="]   ["Migration", field, field, ...]   ["error", "ConfigError", {...}]
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phalanx.core.errors import PhalanxError, Problem, ProblemsError, RunError
from phalanx.core.reading import parse_json

MOST_BYTES = 1 << 30
"""Longest message that is read."""
DEEPEST = 60
"""Lists in lists in a message."""
C = TypeVar("C", bound=type)
_CLASSES: dict[str, type] = {}


class MessageError(RunError):
    """Bytes that are no message of a peer."""


def message(cls: C) -> C:
    """Mark a dataclass, a named tuple or an enum: its values may be sent. Its name is the one that it has in messages."""
    known = _CLASSES.setdefault(cls.__name__, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two messages are called {cls.__name__}: {known.__module__} and {cls.__module__}")
    _CLASSES[cls.__name__] = cls
    return cls


def encode(value: object) -> bytes:
    """Raises `TypeError` naming a type that is no message."""
    return json.dumps(_written(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(data: bytes, *, most: int = MOST_BYTES) -> Any:
    """What `encode` was given. Raises `MessageError`."""
    if len(data) > most:
        raise MessageError(f"a message of {len(data)} bytes; at most {most}")
    try:
        text = data.decode("utf-8", "surrogatepass")
        return _read(parse_json(text, where="a message", plain=False), 0)
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as err:
        raise MessageError(f"a message that cannot be read: {type(err).__name__}: {str(err)[:200]}") from None


# ---- writing ---------------------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value)
    if _CLASSES.get(kind.__name__) is kind:
        if issubclass(kind, enum.Enum):
            return [kind.__name__, _written(value.value)]
        return [kind.__name__, *(_written(getattr(value, name)) for name in _fields(typing.cast(type, kind)))]
    if isinstance(value, np.generic):
        return _written(value.item())
    if isinstance(value, PhalanxError):
        return ["error", kind.__name__, _written(_facts(value))]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, Mapping):  # of other types than dict, as those that cannot be changed
        return _written(dict(value))
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no message; mark it @message, or send plain values")


def _array(value: np.ndarray[Any, Any]) -> list[Any]:
    if value.dtype.kind not in "biufc":
        raise TypeError(f"an array of {value.dtype} is no message")
    return ["array", value.dtype.str, list(value.shape), _coded(np.ascontiguousarray(value).tobytes())]


def _coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


_WRITERS: dict[type, Callable[[Any], list[Any]]] = {
    list: lambda x: ["list", *map(_written, x)],
    tuple: lambda x: ["tuple", *map(_written, x)],
    set: lambda x: ["set", *map(_written, x)],
    frozenset: lambda x: ["frozenset", *map(_written, x)],
    dict: lambda x: ["dict", *([_written(k), _written(v)] for k, v in x.items())],
    types.MappingProxyType: lambda x: ["dict", *([_written(k), _written(v)] for k, v in x.items())],
    bytes: lambda x: ["bytes", _coded(x)],
    bytearray: lambda x: ["bytes", _coded(bytes(x))],
    np.ndarray: _array,
}


def _facts(err: PhalanxError) -> dict[str, Any]:
    """What rebuilds an error: its problems, or its words."""
    if isinstance(err, ProblemsError):
        return {"subject": err.subject, "problems": [[p.where, _shown(p.value), p.rule, p.hint] for p in err.problems]}
    return {"text": str(err)}


def _shown(value: object) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(found: Any, depth: int) -> Any:
    if not isinstance(found, list):
        if isinstance(found, dict):
            raise MessageError("a message with a JSON object in it")
        return found
    if depth > DEEPEST:
        raise MessageError(f"a message of more than {DEEPEST} lists in each other")
    kind, *parts = found
    if kind in _READERS:
        return _READERS[kind](parts, depth + 1)
    cls = _CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"a message of the unknown kind {str(kind)[:60]!r}")
    if issubclass(cls, enum.Enum):
        return cls(_read(parts[0], depth + 1))
    return _built(cls, [_read(part, depth + 1) for part in parts])


def _built(cls: type, values: Sequence[Any]) -> Any:
    """A dataclass or named tuple with these fields; neither its constructor nor any other code of it runs."""
    fields, hints = _fields(cls), _hints(cls)
    if len(fields) != len(values):
        raise MessageError(f"{cls.__name__} has {len(fields)} fields, and the message {len(values)}")
    for name, value in zip(fields, values, strict=True):
        if not fits(value, hints[name]):
            raise MessageError(f"{cls.__name__}.{name} is no {hints[name]}: {str(value)[:60]!r}")
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values)
    built: Any = object.__new__(cls)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(built, name, value)
    return built


@functools.cache
def _fields(cls: type) -> tuple[str, ...]:
    kind: Any = cls
    return tuple(kind._fields) if issubclass(cls, tuple) else tuple(f.name for f in dataclasses.fields(kind))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _parts_of(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(declared), typing.get_args(declared)


def fits(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type, parts included."""
    if type(value) is declared:  # mostly; of a checkpoint of 4,096 ranks there are millions
        return True
    origin, given = _parts_of(declared)
    if declared is Any or isinstance(declared, TypeVar):
        return True
    if origin is typing.Annotated:
        return fits(value, given[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in given)
    if origin is typing.Literal:
        return any(value == each and type(value) is type(each) for each in given)
    if declared is None or declared is type(None):
        return value is None
    if origin is tuple:
        if len(given) == 2 and given[1] is Ellipsis:
            return isinstance(value, tuple) and all(fits(x, given[0]) for x in value)
        return isinstance(value, tuple) and len(value) == len(given) and all(map(fits, value, given))
    if declared is float:
        return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
    if declared is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, given[0]) and fits(v, given[1]) for k, v in value.items())
    if isinstance(origin, type) and origin is not np.ndarray and given:  # list, Sequence, set, ...
        return (
            isinstance(value, origin)
            and not isinstance(value, str)
            and all(fits(x, given[0]) for x in typing.cast(Any, value))
        )
    return isinstance(value, origin if isinstance(origin, type) else declared)


def _read_dict(parts: list[Any], depth: int) -> dict[Any, Any]:
    return {_read(key, depth + 1): _read(value, depth + 1) for key, value in parts}


def _read_array(parts: list[Any], depth: int) -> np.ndarray[Any, Any]:
    name, shape, data = parts
    dtype = np.dtype(name)
    if dtype.kind not in "biufc" or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise MessageError(f"a message with an array of {str(name)[:30]}")
    raw = base64.b64decode(data, validate=True)
    if len(raw) != dtype.itemsize * math.prod(shape):
        raise MessageError(f"an array of shape {shape} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _read_error(parts: list[Any], depth: int) -> PhalanxError:
    name, facts = parts
    cls, found = _errors().get(name, RunError), _read(facts, depth)
    if issubclass(cls, ProblemsError) and "problems" in found:
        problems = [Problem(where=str(a), value=b, rule=str(c), hint=str(d)) for a, b, c, d in found["problems"]]
        err: PhalanxError = cls.__new__(cls)
        ProblemsError.__init__(typing.cast(ProblemsError, err), problems, subject=str(found["subject"]))
        return err
    cls = RunError if issubclass(cls, ProblemsError) else cls
    err = cls.__new__(cls)
    err.args = (str(found["text"]),)
    return err


def _errors() -> dict[str, type[PhalanxError]]:
    """Every error of ours that is imported."""
    found, left = dict[str, type[PhalanxError]](), [PhalanxError]
    while left:
        cls = left.pop()
        found[cls.__name__] = cls
        left += cls.__subclasses__()
    return found


_READERS: dict[str, Callable[[list[Any], int], Any]] = {
    "list": lambda parts, depth: [_read(x, depth) for x in parts],
    "tuple": lambda parts, depth: tuple(_read(x, depth) for x in parts),
    "set": lambda parts, depth: {_read(x, depth) for x in parts},
    "frozenset": lambda parts, depth: frozenset(_read(x, depth) for x in parts),
    "dict": _read_dict,
    "bytes": lambda parts, depth: base64.b64decode(parts[0], validate=True),
    "path": lambda parts, depth: Path(parts[0]),
    "array": _read_array,
    "error": _read_error,
}

"""The one reader of JSON, TOML and CSV, and of files and texts of others in general: what cannot be read is a sentence, never a traceback, and takes bounded time and memory.

Whoever reads something calls these functions; a test lists the files that parse otherwise, and why. Refused are files that are not regular (a pipe would wait for ever), what is longer, deeper or has more
values than anything of use, numbers of more than `MOST_DIGITS` digits, NaN and infinities (JSON has none), a key that a table has twice, and text that is not UTF-8.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import math
import os
import re
import stat
import string
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.errors import DataError, first_line

MOST_BYTES = 256 << 20
"""Longest file or text that is read whole. The largest published index of weights has 9 MB."""
MOST_TOML = 4 << 20
"""The same of TOML, which is read at 1 MB/s. A calibrated cluster has 50 kB."""
MOST_LINE = 32 << 20
"""Longest line: an event, a document."""
MOST_VALUES = 10_000_000
"""Values of a JSON text; each takes up to 100 bytes of memory."""
DEEPEST = 100
"""Lists and tables in each other."""
MOST_DIGITS = 64
"""Of a whole number. Python refuses 4,300, and nothing that we read has 40."""
MOST_DOTS = 40
"""Of one key of TOML: time to read it grows with the square of its parts. No setting of ours has five."""


class MalformedError(DataError, ValueError):
    """A text that is not what it should be."""


def malformed(where: str, value: object, rule: str, hint: str = "") -> MalformedError:
    """The error of one problem."""
    return MalformedError.of(where, value, rule, hint, subject="what was read")


# ---- files -----------------------------------------------------------------------------------------------------------


def open_regular(path: Path | str) -> io.BufferedReader:
    """A file open for reading. Raises `OSError` where there is none, or a folder, pipe or device in its place, for which nothing waits."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a NUL character
        raise OSError(errno.EINVAL, "not the name of a file", repr(str(path))) from None
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path | str, *, most: int = MOST_BYTES) -> bytes:
    """All of a file. Raises `OSError`, also where it has more than `most` bytes."""
    with open_regular(path) as file:
        data = b"" if (too_long := os.fstat(file.fileno()).st_size > most) else file.read(most + 1)
    if too_long or len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return data


def read_text(path: Path | str, *, most: int = MOST_BYTES) -> str:
    """A file as text. Raises `OSError`, and `MalformedError` where it is not UTF-8."""
    return as_text(read_file(path, most=most), where=str(path))


def lines_of(file: BinaryIO, *, most: int = MOST_LINE, before: int = 0) -> Iterator[bytes]:
    """Its lines, `before` of which were read already. Raises `OSError` where one is longer than `most`."""
    number = before
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise OSError(errno.EFBIG, f"line {number} has more than {most} bytes")
        yield line


def as_text(data: bytes, *, where: str) -> str:
    """UTF-8 as text. Raises `MalformedError`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        value = data[error.start : error.start + 4]
        raise malformed(where, value, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from None


def is_count(text: str) -> bool:
    """Whether a text is a whole number of ASCII digits that fits 64 bits ("²" is a digit for `isdigit`, "٣" a decimal for `isdecimal`, and neither is one to us)."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


# ---- JSON, TOML, CSV -------------------------------------------------------------------------------------------------


def load_json(path: Path | str, *, most: int = MOST_BYTES) -> Any:
    """What a JSON file says. Raises `OSError` and `MalformedError`."""
    return parse_json(read_file(path, most=most), where=str(path))


def parse_json(text: str | bytes, *, where: str, plain: bool = True) -> Any:
    """What a JSON text says. Raises `MalformedError`. With `plain=False` numbers may be NaN and infinite, and text hold halves of surrogate pairs, as Python's own values may."""
    if len(text) > MOST_BYTES:
        raise malformed(where, f"{len(text)} characters", f"must be at most {MOST_BYTES} long")
    text = as_text(text, where=where) if isinstance(text, bytes) else text
    nested = text.count("[") + text.count("{")
    if nested + text.count(",") > MOST_VALUES:
        raise malformed(where, None, f"has more than {MOST_VALUES} values")
    try:
        found = (_PLAIN if plain else _PYTHONS).decode(text)
    except RecursionError:
        raise malformed(where, text[:40], _TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise malformed(where, text[:40], f"is not JSON: {error.msg}, {_place(error, text.rstrip())}") from None
    except ValueError as error:
        raise malformed(where, text[:40], f"is not JSON: {first_line(error)}") from None
    if nested > DEEPEST:
        _check_depth(found, where)
    if plain and "\\u" in text:
        _check_text(found, where)
    return found


def _place(error: json.JSONDecodeError, text: str) -> str:
    """Where in the text; of a text of one line, whose number the problem may have, without a line."""
    if error.pos >= len(text):
        return "at its end"
    return f"at {f'line {error.lineno}, ' if chr(10) in text else ''}character {error.colno}"


def parse_table(text: str | bytes, *, where: str) -> dict[str, Any]:
    """The JSON table that a text is. Raises `MalformedError`."""
    found = parse_json(text, where=where)
    if not isinstance(found, dict):
        raise malformed(where, type(found).__name__, "must be a JSON table")
    return found


def json_text(value: Any, *, where: str) -> str:
    """The JSON text of a value, as `parse_json` reads it. Raises `MalformedError` where it would not: whoever writes for others learns that, not they."""
    text = json.dumps(value, sort_keys=True)
    parse_json(text, where=where)
    return text


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """What a TOML text says. Raises `MalformedError`."""
    if len(text) > MOST_TOML:
        raise malformed(where, f"{len(text)} characters", f"must be at most {MOST_TOML} long")
    _check_keys(text, where)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise malformed(where, text[:40], _TOO_DEEP) from None
    except ValueError as error:
        raise malformed(where, None, f"is not TOML: {first_line(error)}", "write one KEY = VALUE a line") from None
    _check_depth(found, where)
    return found


def toml_value(value: object, *, default: Callable[[object], object] | None = None) -> str:
    """A text, number, truth value, or list of these, as `parse_toml` reads it: JSON, but with every character as it is (TOML has no surrogate pairs), and U+007F
    escaped. `default`: what `json.dumps` takes in the place of other things."""
    return json.dumps(value, ensure_ascii=False, default=default).replace("\x7f", "\\u007F")


def parse_csv(text: str, *, where: str) -> list[list[str]]:
    """The rows of a CSV text, empty ones left out. Raises `MalformedError`."""
    try:
        return [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise malformed(where, None, f"is not CSV: {first_line(error)}") from None


def parse_csv_table(text: str, *, where: str) -> list[dict[str, str]]:
    """The rows of a CSV text by the names in its first one, each as long as that. Raises `MalformedError`."""
    names, *rows = parse_csv(text, where=where) or [[]]
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise malformed(f"{where}:{line}", ",".join(row)[:80], f"must have {len(names)} columns")
    return [dict(zip(names, row, strict=True)) for row in rows]


_TOO_DEEP = f"has more than {DEEPEST} lists and tables in each other"
_IN_STRING = re.compile(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5})?|"(?:[^"\\\n]++|\\[^\n])*+"?|#[^\n]*+|'''
    r"""'''(?:[^']++|'(?!''))*+(?:'{3,5})?|'[^'\n]*+'?""",
    re.DOTALL,
)
"""Strings and comments of TOML. Nothing is tried twice (`*+`), and one that does not end is taken too: each character is seen once."""
_IN_KEY = str.maketrans("", "", string.ascii_letters + string.digits + "_- \t")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:10]}... is a number of more than {MOST_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:60]!r} is there twice")
    return found


_PLAIN = json.JSONDecoder(
    object_pairs_hook=_table, parse_int=_whole, parse_float=_finite, parse_constant=_no_number, strict=True
)
_PYTHONS = json.JSONDecoder(object_pairs_hook=_table, parse_int=_whole)


def _check_keys(text: str, where: str) -> None:
    """Without strings and all that names consist of, the dots of one key stand side by side, and those of numbers do not."""
    bare = _IN_STRING.sub(lambda found: "\n" * found[0].count("\n"), text).translate(_IN_KEY)
    if (at := bare.find("." * (MOST_DOTS + 1))) >= 0:
        number = bare.count("\n", 0, at)
        line = text.split("\n")[number][:40]
        raise malformed(f"{where}:{number + 1}", line, f"has more than {MOST_DOTS} dots in a key")


def _check_depth(found: Any, where: str) -> None:
    """Depth, and digits, which TOML's reader does not bound."""
    level = [found]
    for _ in range(DEEPEST + 1):
        if any(type(x) is int and abs(x) >= 10**MOST_DIGITS for x in level):
            raise malformed(where, None, f"has a number of more than {MOST_DIGITS} digits")
        level = [y for x in level if isinstance(x, dict | list) for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise malformed(where, None, _TOO_DEEP)


def _check_text(found: Any, where: str) -> None:
    """Half of a surrogate pair, which no file and no terminal takes."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        rule = "must be Unicode text, and holds half a surrogate pair"
        raise malformed(where, error.object[max(0, error.start - 20) : error.start], rule) from None


# ---- types -----------------------------------------------------------------------------------------------------------


def typed(value: Any, declared: Any, *, where: str) -> Any:
    """What JSON says as the type that is declared: a dataclass from a table of its fields, tuples from lists. Raises `MalformedError` with the place of what does not fit."""
    origin, given = typing.get_origin(declared), typing.get_args(declared)
    if declared is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, given, declared, where)
    if origin is typing.Literal:
        fits = any(value == each and type(value) is type(each) for each in given)
    elif dataclasses.is_dataclass(declared) and isinstance(declared, type):
        return _of_class(value, declared, where)
    elif origin is tuple and not (len(given) == 2 and given[1] is Ellipsis):
        if isinstance(value, list | tuple) and len(value) == len(given):
            return tuple(
                typed(x, of, where=f"{where}[{i}]") for i, (x, of) in enumerate(zip(value, given, strict=True))
            )
        fits = False
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, dict):
            return {
                typed(k, given[0], where=f"{where} (key)"): typed(x, given[1], where=f"{where}.{k}")
                for k, x in value.items()
            }
        fits = False
    elif given:  # tuples of any length, lists
        if isinstance(value, list | tuple):
            found = [typed(x, given[0], where=f"{where}[{i}]") for i, x in enumerate(value)]
            return found if origin is list else tuple(found)
        fits = False
    elif declared is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    elif declared is None or declared is type(None):
        fits = value is None
    else:
        fits = isinstance(value, declared) and (declared is bool or not isinstance(value, bool))
    if not fits:
        raise malformed(where, _short(value), f"must be {_name_of(declared)}")
    return value


def _any_of(value: Any, given: tuple[Any, ...], declared: Any, where: str) -> Any:
    errors = []
    for each in given:
        try:
            return typed(value, each, where=where)
        except MalformedError as error:
            errors.append(error)
    inside = [e for e, of in zip(errors, given, strict=True) if of is not type(None)]
    raise (
        inside[0] if len(inside) == 1 and value is not None else malformed(where, _short(value), f"must be {declared}")
    )


def _of_class(value: Any, declared: Any, where: str) -> Any:
    fields = [f for f in dataclasses.fields(declared) if f.init]
    if not isinstance(value, dict):
        raise malformed(where, _short(value), f"must be a table of {declared.__name__}")
    strange = sorted(value.keys() - {f.name for f in fields})
    missing = [
        f.name
        for f in fields
        if f.name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if strange or missing:
        rule = f"must have the fields of {declared.__name__}"
        raise malformed(where, None, rule, f"missing: {missing}; not among them: {strange}"[:400])
    hints = typing.get_type_hints(declared)
    return declared(**{name: typed(x, hints[name], where=f"{where}.{name}") for name, x in value.items()})


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else str(value)[:60]


def _name_of(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) and not typing.get_args(declared) else str(declared)

"""Changes of what is read: of bytes, of numbers in a text, of lines, and of the tree that a JSON or TOML text is.

A change of structure keeps the rest whole, so that it reaches what a parser would have stopped a change of bytes at. The same generator gives the same change.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

WHOLE = (
    0, -1, 1, 2, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 10**9, 10**18, 10**30, 10**63,
)  # fmt: skip
NUMBERS = (*WHOLE, 0.5, -0.0, 1e-300, 1e300, 1e18)
WORDS = (
    "", "a", "²", "٣", "0", "-1", "1e9", "nan", "inf", "null", "None", "true", "/", "..", "../../etc/passwd", "/dev/zero", "\x00", "\x1b]0;x\x07", "\u202e", "é" * 40, "a" * 70000, "9" * 4301, "%s%n",
    "{}", "byte", "bpe:²", "x:0", "0" * 30,
)  # fmt: skip
RAW = (
    b"", b"\x00", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"[", b"{", b"}", b"\\ud800", b"\\u0000", b"\x1b[2J", b"NaN",
    b"1e999", b"\xed\xa0\x80", b"#", b"=", b".",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes anywhere."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_BYTE_CHANGES)(data, rng)
    return data


def change_json(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the tree."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _change_tree(tree, rng)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _twice(text, rng) if rng.random() < 0.05 else text


def change_lines(data: bytes, rng: random.Random) -> bytes:
    """One line, as JSON or as bytes; or their order."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        what = rng.random()
        if what < 0.6:
            lines[at] = change_json(lines[at], rng)
        elif what < 0.75:
            lines[at] = change_bytes(lines[at], rng)
        elif what < 0.85:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif what < 0.95 and len(lines) > 1:
            del lines[at]
        else:
            rng.shuffle(lines)
    return b"\n".join(lines)


def change_toml(data: bytes, rng: random.Random) -> bytes:
    """Values, keys and lines of a TOML text."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        what = rng.random()
        if equals and what < 0.7:
            lines[at] = f"{key}= {_toml_value(rng)}"
        elif equals and what < 0.8:
            lines[at] = f"{rng.choice((key.strip() + 'x', 'a.' * rng.choice((2, 30, 3000)) + 'b', '[' + key))} = 1"
        elif what < 0.9:
            lines.insert(rng.randrange(len(lines)), lines[at])
        else:
            del lines[at]
            lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def change_number(data: bytes, rng: random.Random) -> bytes:
    """A number in a text becomes another."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return change_bytes(data, rng)
    at = rng.choice(found)
    new = rng.choice((*map(str, NUMBERS), *WORDS[1:10], "9" * 4301, "9" * 400)).encode()
    return data[: at.start()] + new + data[at.end() :]


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    begin, end = _range(data, rng)
    return data[:begin] + data[end:]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _again(data: bytes, rng: random.Random) -> bytes:
    begin, end = _range(data, rng)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 50)) + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    raw, some = rng.choice(RAW), rng.randbytes(rng.randrange(1, 20))
    deep = rng.choice((b"[", b'{"a":')) * rng.choice((50, 2000, 100_000))
    return data[:at] + rng.choice((raw, some, deep)) + data[at:]


def _word(data: bytes, rng: random.Random) -> bytes:
    """A number in binary."""
    form = rng.choice(("<b", "<h", "<i", "<q", "<Q", "<d"))
    number: Any = rng.choice((0, 1, -1, 2**62, -(2**62), 2**31, rng.randrange(2**16)))
    size = struct.calcsize(form)
    if form == "<d":
        raw = struct.pack(form, float(number))
    else:
        raw = (int(number) % (1 << (8 * size))).to_bytes(size, "little")
    at = rng.randrange(len(data) + 1)
    return data[:at] + raw + data[at + size :]


def _range(data: bytes, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.choice((1, 2, 8, 100, 5000)))


_BYTE_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _cut, _truncate, _again, _insert, _word, change_number,
)  # fmt: skip


# ---- trees -----------------------------------------------------------------------------------------------------------


def _change_tree(tree: Any, rng: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return _strange(rng)
    parent, key = rng.choice(places)
    what = rng.random()
    if what < 0.5:
        parent[key] = _strange(rng, parent[key])
    elif what < 0.65:
        del parent[key]
    elif what < 0.75:
        other, name = rng.choice(places)
        if key in (parent if isinstance(parent, dict) else range(len(parent))):
            parent[key] = json.loads(json.dumps(other[name])) if other is not parent else None
    elif isinstance(parent, dict):
        parent[rng.choice(WORDS[:24])] = parent.pop(key) if what < 0.9 else parent[key]
    else:
        parent += [parent[key]] * rng.choice((1, 3, 300))
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found, level = list[tuple[Any, Any]](), [tree]
    while level:
        node = level.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        found += [(node, key) for key in keys]
        level += [node[key] for key in keys]
    return found


def _strange(rng: random.Random, old: Any = None) -> Any:
    if isinstance(old, int | float) and rng.random() < 0.3:
        return rng.choice((old + 1, -old, old * 1000, str(old), [old]))
    deep: Any = 1
    for _ in range(rng.choice((1, 40, 300))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    number, word, zeros = rng.choice(NUMBERS), rng.choice(WORDS), [0] * rng.choice((1, 1000))
    return rng.choice((number, word, None, True, [], {}, zeros, deep, float("nan"), float("inf"), "\ud800"))


def _twice(text: bytes, rng: random.Random) -> bytes:
    """A key twice."""
    return text.replace(b"{", b'{"step": 1, "kind": "x", "step": 2, ', 1) if rng.random() < 0.5 else text + text


def _toml_value(rng: random.Random) -> str:
    number = str(rng.choice(NUMBERS))
    word = json.dumps(rng.choice(WORDS))
    return rng.choice((
        number, number, word, "nan", "-inf", "1979-05-27T07:32:00", "[]", f"[{number}, {word}]", "{}", '{ value = 1, source = "x" }',
        f"{{ value = {number}, source = {word} }}", "[" * rng.choice((3, 3000)), "true", '"""', "9" * 400, "9" * 4301,
    ))  # fmt: skip

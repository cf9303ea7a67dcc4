"""The one reader: what is read, and what is refused in a sentence with place, value and rule."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from phalanx.core import reading
from phalanx.core.errors import DataError, Problem, printable
from phalanx.core.files import read_json
from phalanx.core.reading import (
    MalformedError,
    is_count,
    load_json,
    open_regular,
    parse_csv_table,
    parse_json,
    parse_toml,
    read_file,
    typed,
)
from phalanx.core.service_address import is_loopback
from phalanx.data import token_file
from phalanx.data.token_file import BLOCK_BYTES, AlteredDataError, TokenFile, block_sums, forget

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "is not JSON"), ("{", "is not JSON"), ("1" * 5000, "more than 64 digits"), ("1" * 65, "more than 64 digits"), ("NaN", "is no number"), ("[1e999]", "is no finite number"),
        ("-Infinity", "is no number"), ('{"a": 1, "a": 2}', "'a' is there twice"), ("[" * 5000 + "]" * 5000, "more than 100 lists"), ("[" * 100_000, "more than 100 lists"), ("[" * 150 + "]" * 150, "more than 100 lists"),
        ('["\\ud800"]', "half a surrogate pair"), (b"\xff", "is not UTF-8"), ("[" + "0," * 10_000_001, "more than 10000000 values"),
    ],
)  # fmt: skip
def test_json_that_is_none(text: str | bytes, rule: str) -> None:
    with pytest.raises(MalformedError, match=rule) as caught:
        parse_json(text, where="a.json")
    assert caught.value.problems[0].where == "a.json" and isinstance(caught.value, DataError)


def test_json_is_read() -> None:
    deep: Any = 1
    for _ in range(90):
        deep = [deep]
    assert parse_json(str(deep), where="x") == deep
    assert parse_json('{"a": [1, 2.5, "é\\n", null]}', where="x") == {"a": [1, 2.5, "é\n", None]}
    assert parse_json("1" * 40, where="x") == int("1" * 40)
    assert parse_json('[NaN, "\\ud800"]', where="x", plain=False)[1] == "\ud800"


@pytest.mark.parametrize(
    ("text", "rule"),
    [("a = ", "is not TOML"), ("a = " + "[" * 5000, "lists and tables"), ("a = " + "9" * 4000, "64 digits"), ("a = -1" + "0" * 70, "64 digits"), ("a = " + "9" * 5000, "is not TOML"), ("a." * 50 + "b = 1", "more than 40 dots in a key"), ("[" + "a." * 50 + "b]", "dots"),
     ("1.1" * 50 + " = 1", "a.toml:1 .* dots"), ("'.'." * 50 + "b = 1", "dots"), ("a . " * 50 + "b = 1", "dots"), ('k = ["""\nx""", {' + "a." * 50 + 'b = 1}, ""]', "a.toml:2 .* dots"),
     ("k = ['''\n'x''''', {" + "a." * 50 + "b = 1}]", "dots"), ('k = ["\\"", {' + "a." * 50 + "b = 1}]", "dots")],
)  # fmt: skip
def test_toml_that_is_none(text: str, rule: str) -> None:
    with pytest.raises(MalformedError, match=rule):
        parse_toml(text, where="a.toml")


def test_toml_is_read() -> None:
    long = "a." * 50
    for text in (
        f'"{long}"',
        f"'{long}'",
        f'"""\n{long}\n"x"\n\\"""{long}"""""',
        f"'''\n{long}'\n{long}'''''",
        f'"\\"{long}" # {long}',
    ):
        assert long in parse_toml(f"k = {text}\nl = 1", where="x")["k"]
    assert parse_toml("a = [" + "1.5, " * 100 + ']\nb = "' + "a." * 100 + '"', where="x")["a"][0] == 1.5


def test_time_grows_with_length_alone() -> None:
    """Each of these took minutes: the square of its length."""
    began = time.process_time()
    with pytest.raises(MalformedError, match="'z' is there twice"):
        parse_json("{" + ",".join(f'"k{i}":0' for i in range(200_000)) + ',"z":1,"z":2}', where="x")
    dots = "." * 50
    for text in ("a = 1 #" + dots + '"' + '\\"' * 500_000, "a = " + dots + '\\"' * 500_000, "a = " + "'''x" * 100_000):
        with contextlib.suppress(MalformedError):
            parse_toml(text, where="x")
    assert time.process_time() - began < 20


def test_rows_of_other_lengths_are_named() -> None:
    assert parse_csv_table("a,b\n1,2\n\n3,4\n", where="x") == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    with pytest.raises(MalformedError, match=r"x:3.*must have 2 columns"):
        parse_csv_table("a,b\n1,2\n3\n", where="x")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("12", True), ("²", False), ("٣", False), ("", False), ("-1", False), ("1" * 18, True), ("1" * 19, False)],
)
def test_counts(text: str, is_one: bool) -> None:
    assert is_count(text) == is_one


@pytest.mark.parametrize(
    ("host", "is_one"),
    [("localhost", True), ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("127.evil.example.com", False), ("127.0.0.1.example.com", False), ("localhost.example.com", False), ("", False), ("10.0.0.1", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host: str, is_one: bool) -> None:
    assert is_loopback(host) == is_one


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("pipe", "not a regular file"),
        (".", "Is a directory"),
        ("gone", "No such file"),
        ("a\0b", "not the name of a file"),
    ):
        with pytest.raises(OSError, match=words):
            open_regular(tmp_path / name)
        with pytest.raises(DataError, match="cannot be read"):
            read_json(tmp_path / name, where="--loads")
    with pytest.raises(OSError, match="not a regular file"):
        read_file("/dev/zero")
    (tmp_path / "long").write_bytes(b"0" * 11)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_file(tmp_path / "long", most=10)
    with (tmp_path / "long").open("rb") as file, pytest.raises(OSError, match="line 1 has more than 5 bytes"):
        list(reading.lines_of(file, most=5))
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert load_json(tmp_path / "a.json") == {"a": 1}


@dataclass(frozen=True)
class Inside:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outside:
    kind: Literal["a", "b"]
    pairs: tuple[tuple[str, float], ...]
    inside: Inside | None = None
    by_name: dict[str, int] | None = None


def test_types_are_made() -> None:
    found = typed(
        {"kind": "a", "pairs": [["x", 1]], "inside": {"name": "y", "sizes": [1]}, "by_name": {"z": 1}},
        Outside,
        where="o",
    )
    assert found == Outside("a", (("x", 1),), Inside("y", (1,)), {"z": 1})


@pytest.mark.parametrize(
    ("change", "where"),
    [({"kind": "c"}, "o.kind"), ({"pairs": [["x"]]}, r"o.pairs\[0\]"), ({"pairs": [["x", True]]}, r"o.pairs\[0\]\[1\]"), ({"inside": {"name": 1}}, "o.inside.name"), ({"inside": {}}, "o.inside"), ({"other": 1}, "o:"),
     ({"by_name": {"a": "1"}}, "o.by_name.a"), ({"pairs": None}, "o.pairs")],
)  # fmt: skip
def test_types_that_do_not_fit_are_named_by_place(change: dict[str, Any], where: str) -> None:
    with pytest.raises(MalformedError, match=where):
        typed({"kind": "a", "pairs": [], **change}, Outside, where="o")


def test_a_truth_value_is_no_number_that_it_equals() -> None:
    assert typed(1, Literal[0, 1], where="o") == 1
    with pytest.raises(MalformedError):
        typed(True, Literal[0, 1], where="o")


def test_nothing_steers_a_terminal() -> None:
    assert printable("a\x1b]0;owned\x07b\x9b\u202e\ud800\tc\n") == "a\\x1b]0;owned\\x07b\\x9b\\x202e\\xd800\tc\n"
    assert "\x1b" not in str(Problem(where="a\x1b[2J", value="\x1b[2J", rule="r\x1b", hint="h\r"))


def tokens_of(folder: Path, count: int, **more: Any) -> TokenFile:
    path = folder / "tokens.bin"
    (np.arange(count) % 200).astype("<u2").tofile(path)
    sums = block_sums(path)
    for at, value in more.get("alter", {}).items():
        data = np.memmap(path, "<u2", "r+")
        data[at] = value
        data.flush()
    (folder / "meta.json").write_text("{}")
    return TokenFile(
        np.memmap(path, "<u2", "r"),
        path=path,
        sums=more.get("sums", sums),
        vocab_size=257,
        made_in=more.get("made_in", folder),
    )


def test_tokens_that_were_altered_are_never_read(tmp_path: Path) -> None:
    per_block = BLOCK_BYTES // 2
    tokens = tokens_of(tmp_path, 3 * per_block + 5, alter={per_block + 7: 3})
    first = np.arange(10)
    assert tokens[first].tolist() == list(range(10)) and tokens[np.array([3 * per_block + 4])].tolist() == [
        (3 * per_block + 4) % 200
    ]
    with pytest.raises(
        AlteredDataError,
        match=rf"tokens.bin: was altered since it was prepared: the block of 65536 bytes at {BLOCK_BYTES} .*made anew",
    ) as caught:
        tokens[np.array([0, 2 * per_block - 1])]
    assert isinstance(caught.value, DataError) and not (tmp_path / "meta.json").exists()
    assert tokens[first].tolist() == list(range(10))


def test_an_error_of_one_read_costs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(tmp_path, 100, alter={7: 3})

    def drop(path: Path, mapped: Any) -> None:  # the disk never had the wrong bits
        forget(path, mapped)
        data = np.memmap(path, "<u2", "r+")
        data[7] = 7
        data.flush()

    monkeypatch.setattr(token_file, "forget", drop)
    assert tokens[np.arange(100)].tolist() == list(range(100)) and (tmp_path / "meta.json").exists()


def test_tokens_outside_of_the_vocabulary_are_named(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, 100, alter={42: 300}, sums=None, made_in=None)
    with pytest.raises(
        AlteredDataError,
        match=r"tokens.bin = 300: token 42 of the file is none of the vocabulary, whose ids are below 257; copy the file again",
    ):
        tokens[np.arange(40, 45).reshape(1, 5)]
    assert tokens[np.arange(40)].max() == 39 and (tmp_path / "meta.json").exists()
    with pytest.raises(AlteredDataError, match="was altered"):
        tokens_of(tmp_path, 2 * BLOCK_BYTES, sums=np.array([zlib.crc32(b"")], np.uint32))

"""What processes say to each other: it comes back as it was, and nothing of it is executed."""

from __future__ import annotations

import enum
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx.core import messages
from phalanx.core.errors import ConfigError, PeerError, Problem, RunError
from phalanx.core.messages import MessageError, decode, encode, message
from phalanx.runtime.processes.reports import MAX_REPORT_BYTES, _report, distance

pytestmark = pytest.mark.unit


@message
class Colour(enum.Enum):
    RED = "red"


@message
@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"
    derived: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.name == "executed":
            raise AssertionError("a message ran code")


@message
@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    by_rank: Mapping[int, tuple[Inner, ...]]
    seconds: float
    colour: Colour = Colour.RED


class Unknown:
    pass


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers(), st.text()), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_what_is_marked_comes_back() -> None:
    inner = Inner("x", (1, 2), "b")
    value = Outer(inner, {3: (inner, Inner("y"))}, 2)
    assert decode(encode([value, {1, 2}, Path("a/b")])) == [value, {1, 2}, Path("a/b")]
    found = decode(encode(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert found.dtype == np.float32 and found.shape == (2, 3) and found.flags.writeable
    assert decode(encode(np.int64(4))) == 4


def test_errors_come_back_with_their_type_and_words() -> None:
    errors = [
        ConfigError.of("a.b", 3, "must be 4", "use 4", subject="the recipe"),
        PeerError("gone"),
        RunError("x"),
    ]
    for err, found in zip(errors, decode(encode(errors)), strict=True):
        assert type(found) is type(err) and str(found) == str(err)
    assert decode(encode(errors))[0].problems == errors[0].problems  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [Unknown(), object(), lambda: 0, np.array([object()]), Exception("x")])
def test_what_is_no_message_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="is no message"):
        encode([value])


def test_no_code_of_a_message_runs() -> None:
    assert decode(json.dumps(["Inner", "executed", ["tuple"], "a", 3]).encode()).name == "executed"


class Evil:
    def __reduce__(self) -> Any:
        return Path("executed").touch, ()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()), b"", b"{", b"{}", b'["Unknown"]', b'["Inner"]', b'["Inner", 1, ["tuple"], "a", 3]', b'["Inner", "x", ["list"], "a", 3]',
        b'["Inner", "x", ["tuple", "1"], "a", 3]', b'["Inner", "x", ["tuple"], "c", 3]', b'["Inner", "x", ["tuple"], "a", true]', b'["Colour", "blue"]', b'["array", "O", [1], "AAAA"]',
        b'["array", "<f4", [2], "AAAA"]', b'["array", "<f4", [-1], "AAAA"]', b'["dict", [["list"], 1]]', b'["dict", 1]', b'["bytes", "!"]', b"[" * 5000,
        b'["list", ' * 200 + b'1' + b"]" * 200, b'["error", "ConfigError", 3]', b"[[]]", b'["set", ["list"]]', b'[["tuple"]]', b"1" * 5000,
    ],
)  # fmt: skip
def test_bytes_of_a_stranger_are_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MessageError):
        decode(data)
    assert not list(tmp_path.iterdir())


def test_a_long_message_is_refused() -> None:
    with pytest.raises(MessageError, match="at most 3"):
        decode(b"1234", most=3)


def test_two_types_of_one_name_are_refused() -> None:
    @dataclass
    class Inner:
        x: int

    with pytest.raises(TypeError, match="two messages are called Inner"):
        message(Inner)
    assert messages._CLASSES["Inner"] is not Inner


def test_reports_are_ordered_by_how_near_they_are_to_the_cause() -> None:
    reports = [ConfigError.of("a", 1, "must be 2"), RunError("x"), "Traceback", None, PeerError("gone")]
    assert [distance(report) for report in reports] == [0, 1, 2, 3, 4]


def test_an_error_of_many_problems_still_fits_a_report() -> None:
    problems = [Problem(where=f"a{i}", value=None, rule="x" * 1000) for i in range(50)]
    report = _report(ConfigError(problems))
    assert len(report) <= MAX_REPORT_BYTES and isinstance(decode(report), RunError)


def test_of_a_traceback_that_is_too_long_for_a_report_the_end_is_told() -> None:
    report = _report(ValueError("x" * MAX_REPORT_BYTES + " the end"))
    assert len(report) <= MAX_REPORT_BYTES and "the end" in decode(report)

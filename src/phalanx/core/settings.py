"""Every setting of a recipe as data: its name, type, default and meaning, and how a value is read from TOML or from the command line.

Read from the dataclasses of `core/config.py` (types from the annotations, meanings from the string below each field), so that nothing
is written twice. A value of the wrong type is refused, never converted silently: only a whole number where a float is wanted is.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from phalanx.core import config
from phalanx.core.errors import nearest
from phalanx.core.reading import MalformedError, parse_toml

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...] | None

_TYPE_WORDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_EXAMPLES: Mapping[type, str] = {bool: "true", int: "8", float: "3e-4", str: '"name"'}


class IllegalValueError(Exception):
    """A value that a setting cannot have. Never leaves `core`: whoever reads the value makes a `Problem` of it."""

    def __init__(self, rule: str, hint: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of one section."""

    section: str
    key: str
    base: type
    """bool, int, float or str: of the value, or of each element where `many`."""
    choices: tuple[Scalar, ...] = ()
    many: bool = False
    words: tuple[str, ...] = ()
    """Words that may stand in place of a list."""
    optional: bool = False
    default: Value = None
    doc: str = ""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def type_text(self) -> str:
        """The type as a person reads it in a table."""
        if self.choices:
            return " | ".join(str(c) for c in self.choices)
        return " | ".join([f"{self.base.__name__}, ...", *self.words]) if self.many else self.base.__name__

    @property
    def default_text(self) -> str:
        if isinstance(self.default, tuple):
            return ", ".join(show(v) for v in self.default)
        return "not set" if self.default is None else show(self.default)

    @property
    def rule(self) -> str:
        """What a value must be."""
        if self.choices:
            return "must be one of " + ", ".join(show(c) for c in self.choices)
        word = _TYPE_WORDS[self.base]
        words = "".join(f", or {show(w)}" for w in self.words)
        return f"must be a list, each {word}{words}" if self.many else f"must be {word}"

    def from_text(self, text: str) -> Value:
        """The value that `--section.key text` means. Raises `IllegalValueError`."""
        if self.optional and text == "none" and "none" not in self.choices:
            return None
        if not self.many:
            return self._scalar_from_text(text)
        if text in self.words:
            return text
        if text.startswith("["):
            try:
                value = parse_toml(f"v = {text}", where=self.name)["v"]
            except MalformedError as error:
                raise IllegalValueError(
                    self.rule, f"as a TOML list it is broken: {error.problems[0].rule.removeprefix('is not TOML: ')}"
                ) from error
            return self.from_toml(value)
        return tuple(self._scalar_from_text(part.strip()) for part in text.split(","))

    def _scalar_from_text(self, text: str) -> Scalar:
        if self.choices:
            return self._choice({str(c): c for c in self.choices}.get(text), text)
        if self.base is bool:
            if text not in ("true", "false"):
                raise IllegalValueError(self.rule, "write true or false")
            return text == "true"
        if self.base is int:
            return self._int_from_text(text)
        if self.base is float:
            try:
                return self._finite(float(text))
            except ValueError:
                raise IllegalValueError(self.rule, self._example) from None
        return self._text(text)

    @property
    def _example(self) -> str:
        """A value that would be read, as a hint."""
        if self.default is not None and not self.many:
            return f"the default is {show(self.default)}"
        return f"write it like {_EXAMPLES[self.base]}"

    def _int_from_text(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            pass
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        raise IllegalValueError(self.rule, f"write {number:.0f}" if abs(number) < 2**53 and number.is_integer() else self._example)  # fmt: skip

    def from_toml(self, value: object) -> Value:
        """The value that a TOML value means. Raises `IllegalValueError`."""
        if not self.many:
            return self._scalar_from_toml(value)
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, list):
            raise IllegalValueError(self.rule, f"write [{_toml_like(value)}]")
        return tuple(self._scalar_from_toml(v) for v in value)

    def _scalar_from_toml(self, value: object) -> Scalar:
        if self.choices:
            same = [c for c in self.choices if type(c) is type(value) and c == value]
            return self._choice(same[0] if same else None, str(value))
        if self.base is float and type(value) is int and abs(value) <= 2**53:
            return float(value)
        if type(value) is self.base:
            return self._finite(value) if isinstance(value, float) else self._text(value)  # type: ignore[arg-type]
        raise IllegalValueError(self.rule, self._retype(value))

    def _retype(self, value: object) -> str:
        """How to write a value that has the wrong TOML type."""
        if self.base is str and isinstance(value, bool | int | float):
            return f'write "{_toml_like(value)}"'
        if self.base is int and isinstance(value, float) and value.is_integer():
            return f"write {value:.0f}"
        if isinstance(value, str) and self.base is not str:
            try:
                return f"write {show(self._scalar_from_text(value))} without quotes"
            except IllegalValueError:
                return self._example
        return self._example

    def _choice(self, found: Scalar | None, text: str) -> Scalar:
        if found is None:
            raise IllegalValueError(self.rule, nearest(text, (str(c) for c in self.choices)))
        return found

    def _finite(self, value: float) -> float:
        if not math.isfinite(value):
            raise IllegalValueError("must be a finite number", self._example)
        return value

    def _text(self, value: Scalar) -> Scalar:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise IllegalValueError("must be valid UTF-8 text") from None
            if "\0" in value:
                raise IllegalValueError("must be text without NUL characters")
        return value


def show(value: object) -> str:
    """A value as it is written in TOML, for messages and tables."""
    if isinstance(value, str):
        return f'"{value}"'
    return _toml_like(value)


def _toml_like(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order of a recipe."""
    hints = typing.get_type_hints(config.Recipe)
    return {f.name: hints[f.name] for f in dataclasses.fields(config.Recipe)}


def section_docs() -> dict[str, str]:
    """Section name -> the first paragraph of its docstring."""
    return {name: (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ") for name, cls in sections().items()}


@cache
def describe_settings() -> tuple[Setting, ...]:
    """Every setting of a recipe, in order."""
    docs = _field_docs()
    found = []
    for section, cls in sections().items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            base, choices, many, words, optional = _type_parts(hints[field.name])
            doc = docs.get((cls.__name__, field.name), "")
            found.append(
                Setting(
                    section=section, key=field.name, base=base, choices=choices, many=many, words=words,
                    optional=optional,
                    default=getattr(cls, field.name), doc=doc,
                )
            )  # fmt: skip
    return tuple(found)


def _type_parts(hint: object) -> tuple[type, tuple[Scalar, ...], bool, tuple[str, ...], bool]:
    """(base, choices, many, words, optional) of an annotation such as ``Literal["a", "b"] | None`` or ``tuple[int, ...] | Literal["auto"]``."""
    optional, words = False, ()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [a for a in typing.get_args(hint) if a is not type(None)]
        optional = len(parts) < len(typing.get_args(hint))
        if len(parts) == 2:
            words = typing.get_args(parts.pop(1))
        (hint,) = parts
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), choices, False, words, optional
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], (), True, words, optional
    assert isinstance(hint, type)
    return hint, (), False, words, optional


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands below the field in `core/config.py`, on one line."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return docs

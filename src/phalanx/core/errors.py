"""Errors a person can act on: each names the place, the value, the rule it broke and a way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Self

MOST_SHOWN = 1000
"""Characters of a value in a message."""
MOST_ALIKE = 50
"""Problems of one kind in a message: a model has thousands of tensors."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with what the user gave.

    ``where`` names the setting, file or field (``folding.ep``, ``data/a.jsonl:17``); ``value`` is what was found there,
    ``rule`` what must hold, ``hint`` a legal value nearby or another way out (may be empty). A value of None is not shown.
    """

    where: str
    value: object
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        found = "" if self.value is None else f" = {_shown(self.value)}"
        text = f"{self.where}{found}: {self.rule}"
        return printable(f"{text}; {self.hint}" if self.hint else text)


def printable(text: str) -> str:
    """Text of a file, a log or a peer as a terminal may get it: what would steer the terminal is written out. Line feeds and tabs stay."""
    return _STEERS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of writing, and halves of surrogate pairs, which no stream takes."""


def _shown(value: object) -> str:
    """The value as a person writes it in a recipe, where that differs from Python."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def install_extra(extra: str) -> str:
    """How to install an extra. Never by a name of a package index: nobody can say whose package has it there."""
    return f"in a checkout of Phalanx: pip install -e '.[{extra}]'; from a wheel: pip install 'FILE.whl[{extra}]'"


def first_line(err: BaseException) -> str:
    """What an error of somebody else's says, as one line; its type where it says nothing."""
    return (str(err).strip() or type(err).__name__).splitlines()[0]


def not_installed(where: str, value: object, *packages: str, extra: str, instead: str = "") -> Problem:
    """What needs packages of an extra that are not here; `instead` is another way out."""
    needs = (
        f"the package {packages[0]}, which is"
        if len(packages) == 1
        else f"the packages {', '.join(packages)}, which are"
    )
    hint = f"{install_extra(extra)}; or {instead}" if instead else install_extra(extra)
    return Problem(where=where, value=value, rule=f"needs {needs} not installed", hint=hint)


class PhalanxError(Exception):
    """Base of every error that Phalanx raises on purpose. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


class ProblemsError(PhalanxError):
    """All problems found with one input, reported together."""

    def __init__(self, problems: Sequence[Problem], *, subject: str = "input") -> None:
        self.problems = tuple(problems)
        self.subject = subject
        lines = "\n".join(f"  - {p}" for p in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} with {subject}:\n{lines}")

    @classmethod
    def of(cls, where: str, value: object, rule: str, hint: str = "", *, subject: str = "input") -> Self:
        """The error of one problem."""
        return cls([Problem(where=where, value=value, rule=rule, hint=hint)], subject=subject)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Errors travel between ranks and from forked processes whole."""
        return partial(type(self), subject=self.subject), (self.problems,)


class ConfigError(ProblemsError):
    """The recipe or its overrides cannot be run."""


class PlanError(ProblemsError):
    """A plan failed its own check."""


class DataError(ProblemsError):
    """A data file or data set cannot be used."""


class CheckpointError(ProblemsError):
    """A checkpoint cannot be written or read."""


class TestbedError(ProblemsError):
    """The emulated cluster cannot be built or driven here."""

    __test__ = False  # not a test class, whatever pytest thinks of its name


class RunError(PhalanxError):
    """Training cannot go on (a non-finite gradient, a lost rank, a port in use)."""


class FinalError(PhalanxError):
    """Training cannot go on, and a new process in the place of this one would find the same."""


class UnsoundError(RunError):
    """A process computed or kept other numbers than it should have. A new one in its place begins with those of the others."""


class PeerError(RunError):
    """A collective of this rank failed, most often because another rank did: that rank knows the cause."""


def raise_if(problems: Sequence[Problem], error: type[ProblemsError], *, subject: str) -> None:
    """Raise ``error`` with all ``problems``, if there are any."""
    if problems:
        raise error(problems, subject=subject)


def of_kind(where: str, value: object, kind: type | UnionType, rule: str, hint: str) -> list[Problem]:
    """A problem where an argument of a Python program is of no such kind."""
    return [] if isinstance(value, kind) else [Problem(where=where, value=value, rule=rule, hint=hint)]


def few(problems: Sequence[Problem]) -> list[Problem]:
    """The first of problems of one kind, and how many more there are."""
    first, more = [*problems[:MOST_ALIKE]], len(problems) - MOST_ALIKE
    return first if more <= 0 else [*first, Problem(where=f"{more} more", value=None, rule="are not shown")]


def nearest(value: str, legal: Iterable[str]) -> str:
    """A hint that names the closest legal words to ``value``."""
    names = sorted(legal)
    close = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "legal: " + ", ".join(names)

"""Words behind a command: one look of `--help` for all commands, and one way to say what is wrong.

Commands describe their words as a dataclass that tyro reads (`read_words`, `run_subcommand`), or with `WordParser`, argparse's own, where reading tyro would take longer than the
command. `--help` is argparse's plain text in both, in lines of at most `WIDTH` characters. Must never change: what is wrong with words is a `ConfigError` that names the
word, the rule and what would be right, as in recipes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NoReturn, TypeVar, cast, get_type_hints, overload

from phalanx.core.errors import ConfigError, Problem, nearest

T = TypeVar("T")
WIDTH = 100
"""Longest line of a help text, on a terminal that has it."""
MISSING = "is missing"
_TYPES = {"int": "a whole number", "float": "a number", "Path": "a path"}


class WordParser(argparse.ArgumentParser):
    """argparse's parser. `parse_args` raises `ConfigError`; `--help` prints, and exits."""

    def __init__(self, *, prog: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=HelpText, allow_abbrev=False
        )
        self._words: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_args(args, namespace)

    def parse_with_settings(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Its own words, and those that may be settings of a recipe (`--section.key VALUE`). Raises `ConfigError`."""
        found, others = self.parse_known_args(list(words))
        unknown = [word for word in others if word.startswith("--") and "." not in word.partition("=")[0]]
        if unknown:
            raise ConfigError(_not_options(unknown, self), subject="the arguments")
        return found, others

    def error(self, message: str) -> NoReturn:
        problems, unknown = _problems(message, self), _not_options(self._words, self)
        raise ConfigError(unknown + [p for p in problems if not unknown or p.rule == MISSING], subject="the arguments")


class HelpText(argparse.HelpFormatter):
    """Paragraphs of a description stay paragraphs, and lines that are set in stay lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrapped(text, width)


def print_usage(text: str | None) -> None:
    """The help of a command that reads its words itself: how it is written, and a blank line before all else."""
    how, _, rest = (text or "").strip().partition("\n\n")
    width = help_width()
    print(textwrap.fill(f"usage: {how}", width, subsequent_indent=" " * 8, break_on_hyphens=False), wrapped(rest, width), sep="\n\n")  # fmt: skip


def wrapped(text: str, width: int | None = None) -> str:
    """A text in lines of at most `width` characters (None: what a help text has here). Lines that are set in stay lines, and go on below their second column where they have one."""
    return "\n\n".join(_paragraph(part, width or help_width()) for part in re.split(r"\n\s*\n", text.strip("\n")))


def _paragraph(text: str, width: int) -> str:
    lines = text.splitlines()
    if not any(line.startswith("  ") for line in lines):
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)
    found: list[str] = []
    for line in lines:
        if found and re.match(r"\s{12,}\S", line):  # goes on below the second column of the line before
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return "\n".join(_hanging(line, width) for line in found)


def _hanging(line: str, width: int) -> str:
    inset = len(line) - len(line.lstrip())
    first = re.match(r"\s*\S.*?\s{2,}", line)
    if first is None or first.end() > width // 2:
        return textwrap.fill(line.strip(), width, initial_indent=line[:inset], subsequent_indent=" " * (inset + 4), break_on_hyphens=False)  # fmt: skip
    column = " " * first.end()
    return textwrap.fill(line[first.end() :], width, initial_indent=first[0], subsequent_indent=column, break_on_hyphens=False)  # fmt: skip


def help_width() -> int:
    """Characters of a line of help here."""
    return max(40, min(WIDTH, shutil.get_terminal_size().columns - 1))


@overload
def read_words(kind: type[T], words: Sequence[str], *, prog: str, description: str | None) -> T: ...


@overload
def read_words(
    kind: type[T], words: Sequence[str], *, prog: str, description: str | None, others: Literal[True]
) -> tuple[T, list[str]]: ...


def read_words(
    kind: type[Any], words: Sequence[str], *, prog: str, description: str | None, others: bool = False
) -> Any:
    """The words as a `kind`, a dataclass that tyro reads. `others`: words that it does not know are returned too. Raises `ConfigError`; `--help` prints, and exits.

    tyro says what is wrong in a drawn box: its words are taken, the box is not.
    """
    import tyro

    if "--help" in words or "-h" in words:
        _print_help(_as_argparse(kind, prog, description))
        raise SystemExit(0)
    told, parse = io.StringIO(), cast(Callable[..., Any], tyro.cli)  # its overloads know no bool
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            return parse(kind, args=words, prog=prog, description=description, return_unknown_args=others)
    except SystemExit as stop:
        lines = [re.sub(r"[─│╭╮╰╯|+]|-{3,}", " ", line).strip() for line in told.getvalue().splitlines()]
        parser, text = _as_argparse(kind, prog, description), "\n".join(filter(None, lines))
        unknown = [] if others else _not_options(words, parser)
        raise ConfigError(unknown or _problems(text, parser), subject="the arguments") from stop


def too_small(options: Any, hint: str = "", /, **least: int) -> list[Problem]:
    """Numbers among what `read_words` has read that are below the least one that makes sense, which is the `hint` too where none is given; None is no number. `shape__tokens` is the option --shape.tokens."""
    values = {name.replace("__", "."): n for name, n in least.items()}
    return [
        Problem(where=f"--{name.replace('_', '-')}", value=value, rule=f"must be at least {n}", hint=hint or f"use {n}")
        for name, n in values.items()
        if (value := attrgetter(name)(options)) is not None and not value >= n
    ]


def run_subcommand(
    commands: Mapping[str, Callable[..., int]], words: Sequence[str], *, prog: str, description: str | None
) -> int:
    """Runs the function that the first word names with the dataclass that it takes, made of the others; returns what it returns. Raises `ConfigError`; `--help` prints, and exits."""
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {name:<{width}}  {(function.__doc__ or '').splitlines()[0]}" for name, function in commands.items()]  # fmt: skip
        if words:
            _print_help(WordParser(prog=f"{prog} COMMAND", description=description))
            print("\ncommands:", wrapped("\n".join(lines)), "", f"{prog} COMMAND --help says more.", sep="\n")
            raise SystemExit(0)
        rule = f"is missing: one of {', '.join(commands)}"
        raise ConfigError.of("COMMAND", None, rule, f"{prog} --help says more", subject="the arguments")
    name = words[0]
    if name not in commands:
        raise ConfigError.of("COMMAND", name, f"is none of {prog}", nearest(name, commands), subject="the arguments")
    function = commands[name]
    (kind,) = (hint for key, hint in get_type_hints(function).items() if key != "return")
    description = " ".join((function.__doc__ or "").split())
    return function(read_words(kind, words[1:], prog=f"{prog} {name}", description=description))


def _as_argparse(kind: type[Any], prog: str, description: str | None) -> argparse.ArgumentParser:
    """The parser that tyro makes of a dataclass, for its words alone."""
    import tyro

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast(argparse.ArgumentParser, tyro.extras.get_parser(kind, prog=prog, description=description))


def _print_help(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = HelpText
    text = argparse.ArgumentParser.format_help(parser)
    print(re.sub(r"\s*\((required|default:\s+None|default:\s+'')\)|\{None\}\|", "", text).rstrip())


# ---- what is wrong -----------------------------------------------------------------------------------------------------


def _not_options(words: Sequence[str], parser: argparse.ArgumentParser) -> list[Problem]:
    known = [word for action in parser._actions for word in action.option_strings]
    names = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    long = [word for word in known if word.startswith("--")]
    return [
        Problem(where=name, value=None, rule="is not an option", hint=nearest(name, long))
        for name in names
        if name.replace("_", "-") not in known
    ]


def _problems(message: str, parser: argparse.ArgumentParser) -> list[Problem]:
    """What argparse or tyro says, as problems of the words that it speaks of."""
    also = f"{parser.prog} --help says more"
    if found := re.search(r"(?:unrecognized arguments|Unrecognized options):\s*(\S+)", message):
        word = found[1].rstrip(",")
        return _not_options([word], parser) or [
            Problem(where="arguments", value=word, rule="is a word too many", hint=also)
        ]
    if found := re.search(r"the following arguments are required:\s*(.+)", message, re.S):
        return [_missing(name, parser, also) for name in found[1].split(", ")]
    if re.search(r"^Missing from", message, re.M):
        return [_missing(name, parser, also) for name in re.findall(r"^(--[\w-]+|[A-Z][A-Z_-]+)\b", message, re.M)]
    if found := re.search(r"argument (\S+?):\s*invalid (\w+) value:\s*'(.*)'", message, re.S):
        return [_of_type(found[1].split("/")[-1], found[3], found[2], parser)]
    if found := re.search(
        r"Error parsing (\S+):.*?\b(?:for|to)\s+(int|float)\b[^'\"]*(['\"])(.*?)\3$", message, re.S | re.M
    ):
        return [_of_type(found[1], found[4], found[2], parser)]
    if found := re.search(r"argument (\S+?):\s*invalid choice:\s*'(.*)'\s*\(choose from (.+)\)", message, re.S):
        return [_not_of(found[1], found[2], re.findall(r"[^\s',]+", found[3]))]
    if found := re.search(r"invalid choice '(.*)' for argument\s+'(\S+)'.*?\((.+?)\)", message, re.S):
        return [_not_of(found[2], found[1], re.findall(r"[^\s',]+", found[3]))]
    if found := re.search(r"argument (\S+?):\s*expected|Missing value for argument\s+'(\S+?)'", message, re.S):
        name = (found[1] or found[2]).split("/")[-1]
        return [Problem(where=name, value=None, rule="needs a value", hint=_as_in(name, parser) or also)]
    rule = " ".join(line for line in message.splitlines() if "--help" not in line and "full helptext" not in line)
    return [Problem(where="arguments", value=None, rule=" ".join(rule.split()) or "cannot be read", hint=also)]


def _not_of(name: str, value: str, legal: Sequence[str]) -> Problem:
    return Problem(where=name, value=value, rule=f"must be one of {', '.join(legal)}", hint=nearest(value, legal))


def _missing(name: str, parser: argparse.ArgumentParser, also: str) -> Problem:
    return Problem(where=name, value=None, rule=MISSING, hint=_as_in(name, parser) or also)


def _action(name: str, parser: argparse.ArgumentParser) -> argparse.Action | None:
    return next((a for a in parser._actions if name in (*a.option_strings, a.metavar, a.dest)), None)


def _as_in(name: str, parser: argparse.ArgumentParser) -> str:
    """What the word is for."""
    action = _action(name, parser)
    if action is None or not isinstance(action.help, str):
        return ""
    shape = action.metavar.removeprefix("{None}|") if isinstance(action.metavar, str) and name.startswith("-") else ""
    text = re.sub(r"\s*\((?:required|default[^)]*)\)", "", " ".join(action.help.split())).partition(". ")[0].rstrip(".")
    return f"write {name}{f' {shape}' if shape else ''}: {text[:1].lower()}{text[1:]}"


def _of_type(name: str, value: str, kind: str, parser: argparse.ArgumentParser) -> Problem:
    action = _action(name, parser)
    told = re.search(r"\(default:? ([^)\s]+)\)", (action.help or "") if action is not None else "")
    hint = f"the default is {told[1]}" if told and told[1] != "None" else _as_in(name, parser)
    return Problem(where=name, value=value, rule=f"must be {_TYPES.get(kind, kind)}", hint=hint)


def take_word(rest: list[str], name: str) -> str | None:
    """What follows an argument, "" where nothing does, None where it is not there; both are taken out. Of several the last one counts, as it does of settings."""
    found = None
    while (
        at := next((i for i, word in enumerate(rest) if word == name or word.startswith(f"{name}=")), None)
    ) is not None:
        word = rest.pop(at)
        found = word.split("=", 1)[1] if "=" in word else rest.pop(at) if at < len(rest) else ""
    return found

"""`phalanx settings`: every setting of a recipe with its type, default, range and meaning; also as the table in docs/reference/settings.md.

The list is read from the config dataclasses and the rule tables of `core`, so it cannot be out of date.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.schema import recipe_schema
from phalanx.cli.tables import markdown_table, replace_part
from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, nearest, raise_if
from phalanx.core.files import write_text
from phalanx.core.rules import EFFECTS, LIMITS
from phalanx.core.settings import Setting, describe_settings, section_docs


def main(argv: Sequence[str]) -> int:
    """Print the settings asked for."""
    parser = WordParser(prog="phalanx settings", description="List the settings of a recipe.")
    parser.add_argument("name", nargs="*", help="a section (train), or a setting (train.steps, or steps); default: all")
    parser.add_argument("--markdown", action="store_true", help="as Markdown tables")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables between the marks of a Markdown file")  # fmt: skip
    parser.add_argument("--schema", type=Path, metavar="FILE", help="write the JSON schema of recipes, for editors")
    args = parser.parse_args(argv)
    if args.schema is not None:
        write_text(args.schema, json.dumps(recipe_schema(), indent=1) + "\n")
        print(f"{args.schema}: name it in the first line of a recipe, #:schema ./{args.schema.name}")
        return 0
    chosen = choose(args.name)
    if args.write is not None:
        replace_part(args.write, "settings", settings_markdown(chosen))
    elif args.markdown:
        print(settings_markdown(chosen), end="")
    else:
        print(settings_text(chosen, width=shutil.get_terminal_size((100, 24)).columns))
    return 0


def choose(names: Sequence[str]) -> list[Setting]:
    """The settings that `names` (sections or settings) mean; all for none. Raises `ConfigError` naming every unknown one."""
    everything = describe_settings()
    names = [full for n in names for full in ([s.name for s in everything if s.key == n] or [n])]
    known = {s.section for s in everything} | {s.name for s in everything}
    problems = [
        Problem(where="name", value=n, rule="is neither a section nor a setting", hint=nearest(n, known))
        for n in names
        if n not in known
    ]
    raise_if(problems, ConfigError, subject="the arguments")
    return [s for s in everything if not names or s.name in names or s.section in names]


def settings_text(settings: Sequence[Setting], *, width: int) -> str:
    """Text for a terminal: a line with name, type and default, and the meaning below it."""
    docs, lines, section = section_docs(), [], None
    for s in settings:
        if s.section != section:
            section = s.section
            lines += [
                "",
                *textwrap.wrap(f"[{section}]  {docs[section]}", width=max(40, width - 1), subsequent_indent="    "),
            ]
        default = "" if s.default is None else f" = {s.default_text}"
        lines.append(f"  --{s.name}  {s.type_text}{default}{_range_text(s)}")
        meaning = " ".join(filter(None, [s.doc, _effect_text(s), _presets(s)]))
        lines += textwrap.wrap(meaning, width=max(40, width - 1), initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).lstrip("\n")


def settings_markdown(settings: Sequence[Setting]) -> str:
    """A heading and a table for each section."""
    docs = section_docs()
    parts = []
    for section in dict.fromkeys(s.section for s in settings):
        rows = [
            [
                f"`{s.key}`",
                s.type_text,
                "" if s.default is None else f"`{s.default_text}`",
                " ".join(filter(None, [s.doc, _sentence(_range_text(s)), _effect_text(s), _presets(s)])),
            ]
            for s in settings
            if s.section == section
        ]
        parts.append(
            f"\n### [{section}]\n\n{docs[section]}\n\n{markdown_table(['setting', 'type', 'default', 'meaning'], rows)}"
        )
    return "".join(parts) + "\n"


def _range_text(setting: Setting) -> str:
    limit = LIMITS.get(setting.name)
    return f", {limit.rule.removeprefix('must be ')}" if limit is not None else ""


def _sentence(text: str) -> str:
    text = text.removeprefix(", ")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _effect_text(setting: Setting) -> str:
    reasons = [e.reason for e in EFFECTS if setting.name in e.settings]
    return f"An error where {' or '.join(reasons)}." if reasons else ""


def _presets(setting: Setting) -> str:
    """The presets are the model plan's; core knows only that the setting is a word."""
    if setting.name != "model.preset":
        return ""
    from phalanx.plan.model import PRESETS

    return f"Presets: {', '.join(PRESETS)}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""phalanx completion bash|zsh|fish

Prints a script that completes commands, settings and recipes.

    source <(phalanx completion bash)        in ~/.bashrc
    source <(phalanx completion zsh)         in ~/.zshrc, after compinit
    phalanx completion fish > ~/.config/fish/completions/phalanx.fish

The script holds all words, so that completing starts no program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from phalanx.cli.launching import WHERE
from phalanx.core.arguments import print_usage
from phalanx.core.errors import ConfigError, nearest
from phalanx.core.recipe import PACKAGED
from phalanx.core.settings import Setting, describe_settings

SHELLS = ("bash", "zsh", "fish")
WITH_SETTINGS = ("train", "prepare", "launch", "verify", "simulate", "import-hf")
"""Commands that take settings of a recipe; `launch` after a place and a recipe, the others after a recipe."""


def main(args: Sequence[str]) -> int:
    """Run `phalanx completion SHELL`."""
    if args and args[0] in ("-h", "--help"):
        print_usage(__doc__)
        return 0
    if len(args) != 1 or args[0] not in SHELLS:
        given = " ".join(args) or None
        hint = "phalanx completion bash" if given is None or len(args) > 1 else nearest(given, SHELLS)
        raise ConfigError.of("SHELL", given, f"must be one of {', '.join(SHELLS)}", hint, subject="the arguments")
    sys.stdout.write(fish() if args[0] == "fish" else bash(is_zsh=args[0] == "zsh"))
    return 0


def _words() -> tuple[list[tuple[str, str]], list[str], Sequence[Setting]]:
    """Commands with what they do, recipes, settings."""
    from phalanx.cli.main import COMMANDS

    recipes = sorted(path.stem for path in PACKAGED.glob("*.toml"))
    return [(c.name, c.summary) for c in COMMANDS], recipes, describe_settings()


def _options() -> dict[str, list[tuple[str, bool, str]]]:
    """Command -> its own options by its help text, each with whether it takes a value, and what it does."""
    from phalanx.cli import launch, prepare, train

    found = {
        name: re.findall(r"^  --([a-z-]+)( [A-Z]\S*)?  +(.*)", module.__doc__ or "", re.MULTILINE)
        for name, module in (("train", train), ("prepare", prepare), ("launch", launch))
    }
    return {name: [(word, bool(value), does) for word, value, does in of] for name, of in found.items()}


def bash(*, is_zsh: bool) -> str:
    """For bash, and for zsh by its own layer for such scripts."""
    commands, recipes, settings = _words()
    own = [
        f'            [ ${{COMP_WORDS[1]}} = {name} ] && words="$words {" ".join(f"--{word}" for word, _, _ in options)}"'
        for name, options in _options().items()
    ]
    values = [f"        --{s.name}) words='{' '.join(map(str, _values(s)))}' ;;" for s in settings if _values(s)]
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if is_zsh else []),
        "_phalanx() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= recipe=2",
        '    [ "${COMP_WORDS[1]}" = launch ] && recipe=3',
        "    if [ $COMP_CWORD -eq 1 ]; then",
        f"        words='{' '.join(name for name, _ in commands)}'",
        "    elif [ $COMP_CWORD -lt $recipe ]; then",
        f"        words='{' '.join(WHERE)}'",
        "    else",
        "        case $before in",
        *values,
        f"        *) case ${{COMP_WORDS[1]}} in {'|'.join(WITH_SETTINGS)})",
        f"            words='{' '.join(f'--{s.name}' for s in settings)}'",
        *own,
        f'            [ $COMP_CWORD -eq $recipe ] && words="$words {" ".join(recipes)}" ;;',
        "        esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -o nosort -F _phalanx phalanx",
    ]
    return "\n".join(lines) + "\n"


def _values(setting: Setting) -> tuple[object, ...]:
    return setting.choices or (("true", "false") if setting.base is bool else ())


def fish() -> str:
    """For fish, which shows what each word means."""
    commands, recipes, settings = _words()
    seen, places = "__fish_seen_subcommand_from", " ".join(WHERE)
    takes = f"{seen} {' '.join(WITH_SETTINGS)}"
    placed = f"{takes}; and begin; not {seen} launch; or {seen} {places}; end"
    lines = [f"complete -c phalanx -n __fish_use_subcommand -a {n} -d {_quoted(s)}" for n, s in commands]
    lines.append(f"complete -c phalanx -f -n '{seen} launch; and not {seen} {places}' -a '{places}'")
    lines += [f"complete -c phalanx -n '{placed}' -a {name} -d recipe" for name in recipes]
    for command, options in _options().items():
        for word, has_value, does in options:
            needs = " -r" if has_value else ""
            lines.append(f"complete -c phalanx -n '{seen} {command}' -l {word}{needs} -d {_quoted(does)}")
    for s in settings:
        values = " ".join(map(str, _values(s)))
        given = f" -a {_quoted(values)}" if values else ""
        lines.append(f"complete -c phalanx -n '{takes}' -l {s.name} -r{given} -d {_quoted(s.doc.split('. ')[0])}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""phalanx prepare [RECIPE.toml] [--section.key VALUE ...] [--workers N] [--json FILE] [--trust]

Reads, checks and tokenises the text of a recipe before its run, on any machine that has the same files and cache, without a GPU. It does what
the ranks of `phalanx train` would do first, and they find it done. The same command goes on where it was interrupted.

  --section.key VALUE   changes a setting, as in `phalanx train`
  --workers N           processes that tokenise large sources (default: one for each core)
  --json FILE           write the result to this file
  --trust               let the recipe file name a cache outside of the present folder
  --help                this text
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.launching import Request, trust_problems
from phalanx.core.arguments import print_usage, take_word
from phalanx.core.errors import ConfigError, Problem, printable, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.reading import is_count
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from phalanx.data import PreparedData


def main(args: list[str]) -> int:
    """Run `phalanx prepare ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print_usage(__doc__)
        return 0
    from rich.console import Console

    from phalanx.data import prepare
    from phalanx.observe import PreparationProgress, wants_live

    request, workers, out = read_args(args)
    check_writable(out)
    recipe = load_recipe(request.recipe_path, request.overrides)
    raise_if([p for p in trust_problems(request, recipe) if p.where == "data.cache"], ConfigError, subject="the recipe")
    console = Console()
    with PreparationProgress(console, live=wants_live(recipe.observe, console)) as bar:
        prepared = prepare(recipe.data, progress=bar, workers=workers)
    write_json(out, result_of(prepared))
    print(printable("\n".join([told(prepared, recipe.data.cache), *prepared.all_notes(recipe.train.seq_len)])))
    return 0


def read_args(args: list[str]) -> tuple[Request, int | None, Path | None]:
    """The recipe with its settings, the number of processes, the file for the result. Raises `ConfigError`."""
    rest, problems = [word for word in args if word != "--trust"], list[Problem]()
    workers, out = take_word(rest, "--workers"), take_word(rest, "--json")
    if workers is not None and not (is_count(workers) and int(workers)):
        rule = "must be a whole number, at least 1"
        problems.append(Problem(where="--workers", value=workers, rule=rule, hint="leave it out: one for each core"))
    if out == "":
        problems.append(Problem(where="--json", value=None, rule="needs a value", hint="as in --json FILE"))
    raise_if(problems, ConfigError, subject="the arguments")
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    request = Request(recipe_path=path, overrides=tuple(rest), dry_run=False, trust="--trust" in args)
    return request, None if workers is None else int(workers), None if out is None else Path(out)


def result_of(prepared: PreparedData) -> dict[str, Any]:
    """What `--json` writes: {"train", "validation": {"documents", "tokens"}, "text_bytes", "vocab", "seconds", "reused", "folders", "fingerprint"}."""
    return {
        "train": {"documents": prepared.train.num_documents, "tokens": prepared.train.num_tokens},
        "validation": {"documents": prepared.validation.num_documents, "tokens": prepared.validation.num_tokens},
        "text_bytes": prepared.text_bytes,
        "vocab": prepared.tokenizer.vocab_size,
        "seconds": prepared.seconds,
        "reused": prepared.reused,
        "folders": [str(folder) for folder in prepared.folders],
        "fingerprint": prepared.fingerprint,
    }


def told(prepared: PreparedData, cache: str) -> str:
    """The same for a person."""
    lines = [
        f"{side.name}: {format_count(side.num_documents)} documents, {format_count(side.num_tokens)} tokens"
        for side in (prepared.train, prepared.validation)
    ]
    took = "all of it prepared before" if prepared.reused else f"prepared in {format_seconds(prepared.seconds)}"
    kept = f"{format_bytes(prepared.text_bytes)} of text, {took}; kept in {cache}"
    return "\n".join([*lines, kept, f"fingerprint {prepared.fingerprint}"])

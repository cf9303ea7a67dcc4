"""`phalanx recipes`: the recipes that come with Phalanx, and a copy of one to change. No process, no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.predicting.packaged import next_commands, packaged_recipes, read_predicted
from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, nearest
from phalanx.core.files import check_writable, write_text
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes, format_count, format_seconds
from phalanx.simulate import resolve_recipe
from phalanx.simulate.hardware import parse_cluster

HEADS = ("name", "model", "parameters", "active", "GPUs", "cluster", "step", "MFU", "tensors")
EPILOG = "phalanx train NAME trains one here, phalanx launch slurm NAME --nodes N one of N hosts with 8 GPUs each. Step, MFU (causal) and tensors of a GPU (NCCL takes more) are predicted, not measured: phalanx train NAME --dry-run --cluster CLUSTER says more."


def main(argv: Sequence[str]) -> int:
    """Run `phalanx recipes ARGV...`."""
    parser = WordParser(
        prog="phalanx recipes",
        description="List the recipes that come with Phalanx, show one, or copy it.",
        epilog=EPILOG,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them: show it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there instead, to change it")
    args = parser.parse_args(list(argv))
    if args.name is None:
        if args.out is not None:
            raise _wrong("--out", str(args.out), "needs the name of a recipe", "phalanx recipes laptop --out my.toml")
        print(table())
        return 0
    text = _file_of(args.name).read_text(encoding="utf-8")
    if args.out is None:
        print(text, end="")
        return 0
    if args.out.exists():
        raise _wrong("--out", str(args.out), "is there already", "name another file, or remove it")
    check_writable(args.out)
    write_text(args.out, text)
    print("\n  ".join([f"{args.out}: next", *next_commands(shlex.quote(str(args.out)), read_predicted(text))]))
    return 0


def _file_of(name: str) -> Path:
    found = packaged_recipes()
    if name not in found:
        raise _wrong("NAME", name, "is not a recipe that comes with Phalanx", nearest(name, found))
    return found[name]


def _wrong(where: str, value: str, rule: str, hint: str) -> ConfigError:
    return ConfigError.of(where, value, rule, hint, subject="the arguments")


def table() -> str:
    """A line for each recipe, the smallest model first."""
    rows = sorted((_row(name, path) for name, path in packaged_recipes().items()), key=lambda row: row[0])
    cells = [HEADS, *(row for _, row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADS))]
    left = {0, 1, 5}
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", EPILOG])


def _row(name: str, path: Path) -> tuple[tuple[int, int], tuple[str, ...]]:
    """What it is sorted by, and its cells."""
    recipe = load_recipe(path)
    spec = resolve_recipe(recipe)
    sizes = format_count(spec.num_params), format_count(spec.active_params)
    found = read_predicted(path.read_text(encoding="utf-8"))
    if found is None:
        return (spec.num_params, 0), (name, spec.name, *sizes, "-", "this machine", "-", "-", "-")
    world = parse_cluster(found.cluster).world
    step, memory = format_seconds(found.step_s), format_bytes(found.memory_bytes)
    return (spec.num_params, world), (
        name,
        spec.name,
        *sizes,
        str(world),
        found.cluster,
        step,
        f"{found.mfu:.1%}",
        memory,
    )

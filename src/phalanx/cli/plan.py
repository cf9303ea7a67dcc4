"""Print what would happen, with no process and no torch: a mapping of both rank grids, a model's parameters and FLOPs, a pipeline, a move between layouts, replicas on hosts.

What is illegal exits 2, prints every problem, and still writes the JSON file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phalanx.cli.planning.placement import placement
from phalanx.cli.planning.reshard import reshard
from phalanx.cli.planning.schedule import schedule
from phalanx.core.arguments import run_subcommand
from phalanx.core.errors import ConfigError, Problem, nearest, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.units import format_count, format_rate
from phalanx.observe.pictures import folding_svg
from phalanx.plan.mapping import (
    Folding,
    fit_problems,
    folding_problems,
    nearest_folding,
    parse_stages,
    staged_problems,
)
from phalanx.plan.model import PRESETS, ModelSpec, flops_per_token, parameters

DEFAULT_SEQ = 4096
PRESET_NAMES = ", ".join(PRESETS)

JsonFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class FoldingArgs:
    """Check and explain one mapping: attention tp x cp x dp x pp, experts etp x ep x edp x pp, over the same ranks."""

    world: int | None = None
    """Number of ranks (with --stages: what the stages have)."""
    stages: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TP1 TP2.DP2 ...")] = ()
    """Degrees of each pipeline stage in place of those of the whole mapping, for example tp1 tp2.dp2.ep4."""
    tp: int = 1
    """Tensor parallel degree of attention, embedding, dense and shared layers."""
    cp: int = 1
    """Context parallel degree."""
    pp: int = 1
    """Pipeline degree of both grids."""
    ep: int = 1
    """Expert parallel degree."""
    etp: int = 1
    """Tensor parallel degree of the routed experts."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help=f"Model that must fit: {PRESET_NAMES}.")] = None
    seq: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sequence length that must fit it, with --preset only (default 4096)."""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How the ranks of cp attend, with --preset only: ulysses needs heads to share."""
    json: JsonFile = None
    """File for the result: legal, problems, pp_groups_equal, num_groups, seconds, ..."""
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for a picture of both grids (up to 64 ranks)."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Print the parameters and FLOPs of a preset."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help=f"One of {PRESET_NAMES}.")]
    seq: int = DEFAULT_SEQ
    """Sequence length for the FLOPs of attention."""
    json: JsonFile = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx plan ARGS...`; returns the exit status."""
    commands: tuple[Callable[..., int], ...] = (folding, model, schedule, reshard, placement)
    if args[:2] == ["model", "--preset"]:  # what `plan folding` calls it
        args = ["model", *args[2:]]
    return run_subcommand({c.__name__: c for c in commands}, args, prog="phalanx plan", description=__doc__)


def folding(args: FoldingArgs) -> int:
    """Check and explain one mapping of both rank grids over the same ranks."""
    check_writable(args.json, args.svg)
    spec = None if args.preset is None else _preset(args.preset)
    raise_if(_idle(args), ConfigError, subject="arguments")
    if args.stages:
        return _staged(args, spec)
    assert args.world is not None  # `_idle` asks for it
    mapping = Folding(world=args.world, tp=args.tp, cp=args.cp, pp=args.pp, ep=args.ep, etp=args.etp)
    seq_len = args.seq if args.seq is not None else DEFAULT_SEQ
    result = folding_result(mapping, spec, seq_len=seq_len, cp_method=args.cp_method)
    write_json(args.json, result)
    if args.svg is not None and result["tiles"]:
        write_text(args.svg, folding_svg(mapping))
    if result["tiles"]:
        print(mapping.explain())
        print(f"{result['num_groups']} process groups, planned in {result['seconds'] * 1e3:.1f} ms")
    _print_problems(result)
    return 0 if result["legal"] else 2


def _idle(args: FoldingArgs) -> list[Problem]:
    """Arguments that only a model gives a meaning."""
    given = {"--seq": args.seq, "--cp-method": None if args.cp_method == "ring" else args.cp_method}
    rule, hint = "has no effect without --preset", "add --preset NAME"
    idle = {where: value for where, value in given.items() if value is not None and args.preset is None}
    problems = [Problem(where=where, value=value, rule=rule, hint=hint) for where, value in idle.items()]
    if args.stages:
        beside = {f"--{a}": getattr(args, a) for a in ("tp", "cp", "pp", "ep", "etp") if getattr(args, a) != 1}
        beside |= {"--svg": args.svg} if args.svg else {}
        rule, hint = "has no effect with --stages", "leave it out"
        problems += [Problem(where=where, value=value, rule=rule, hint=hint) for where, value in beside.items()]
    elif args.world is None:
        problems.append(Problem(where="--world", value=None, rule="must say how many ranks", hint="--world 8"))
    return problems


def _staged(args: FoldingArgs, spec: ModelSpec | None) -> int:
    """The same for stages with foldings of their own."""
    begin = time.perf_counter()
    mapping = parse_stages(args.stages, where="--stages")
    problems: list[Problem] = []
    if spec is not None:
        seq_len = args.seq if args.seq is not None else DEFAULT_SEQ
        world = mapping.world if args.world is None else args.world
        problems = staged_problems(mapping, spec, world=world, seq_len=seq_len, cp_method=args.cp_method)
    groups = {group for name in mapping.group_names for group in mapping.groups(name) if len(group) > 1}
    seconds = time.perf_counter() - begin
    result = {
        "legal": not problems,
        "problems": [str(p) for p in problems],
        "num_groups": len(groups),
        "seconds": seconds,
        "folding": mapping.to_dict(),
        "hash": mapping.hash,
        "groups": {name: len(mapping.groups(name)) for name in mapping.group_names},
        "nearest": None,
    }
    write_json(args.json, result)
    print(mapping.explain())
    print(f"{len(groups)} process groups, planned in {seconds * 1e3:.1f} ms")
    _print_problems(result)
    return 0 if result["legal"] else 2


def folding_result(mapping: Folding, spec: ModelSpec | None, *, seq_len: int, cp_method: str) -> dict[str, Any]:
    """What `plan folding --json` writes. Builds every group of every rank, as a run would."""
    begin = time.perf_counter()
    tiles = not folding_problems(mapping)
    fits = folding_problems if spec is None else partial(fit_problems, spec=spec, seq_len=seq_len, cp_method=cp_method)
    problems = fits(mapping)
    groups = mapping.process_groups() if tiles else ()
    equal = tiles and mapping.pp_groups_equal
    seconds = time.perf_counter() - begin
    near = None
    if spec is not None and problems:
        near = nearest_folding(mapping, spec, seq_len=seq_len, cp_method=cp_method)
    return {
        "legal": not problems,
        "problems": [str(p) for p in problems],
        "pp_groups_equal": equal,
        "num_groups": len(groups),
        "seconds": seconds,
        "tiles": tiles,
        "folding": mapping.to_dict() if min(mapping.tp, mapping.cp, mapping.pp, mapping.ep, mapping.etp) >= 1 else None,
        "hash": mapping.hash if tiles else None,
        "groups": {name: len(mapping.groups(name)) for name in mapping.group_names} if tiles else {},
        "nearest": None if near is None else near.to_dict(),
    }


def _print_problems(result: dict[str, Any]) -> None:
    if result["legal"]:
        return
    count = len(result["problems"])
    print(f"phalanx plan folding: {count} problem{'s' if count != 1 else ''} with the folding:", file=sys.stderr)
    for problem in result["problems"]:
        print(f"  - {problem}", file=sys.stderr)
    if result["nearest"] is not None:
        degrees = " ".join(f"--{k} {v}" for k, v in result["nearest"].items() if k not in ("dp", "edp"))
        print(f"nearest legal mapping: {degrees}", file=sys.stderr)


def model(args: ModelArgs) -> int:
    """Print the parameters and FLOPs of a preset."""
    check_writable(args.json)
    spec = _preset(args.preset)
    result = model_result(spec, seq_len=args.seq)
    write_json(args.json, result)
    print(spec.explain())
    print(f"  {'part':<12}{'parameters':>14}{'share':>9}")
    for part, count in result["parts"].items():
        print(f"  {part:<12}{format_count(count):>14}{count / spec.num_params:>9.1%}")
    print(f"  {'in all':<12}{format_count(spec.num_params):>14}")
    causal, full = result["flops_per_token"]["causal"], result["flops_per_token"]["full"]
    print(f"  FLOPs per token, forward and backward, sequence {args.seq}: ", end="")
    print(f"{format_rate(causal, 'FLOP')[:-2]} (causal half), {format_rate(full, 'FLOP')[:-2]} (full scores)")
    return 0


def model_result(spec: ModelSpec, *, seq_len: int) -> dict[str, Any]:
    """What `plan model --json` writes."""
    parts: dict[str, int] = {}
    for param in parameters(spec):
        part = _part(param.name)
        parts[part] = parts.get(part, 0) + param.num_elements
    return {
        "name": spec.name,
        "num_params": spec.num_params,
        "active_params": spec.active_params,
        "parts": parts,
        "seq": seq_len,
        "flops_per_token": {
            "causal": flops_per_token(spec, seq_len),
            "full": flops_per_token(spec, seq_len, attention="full"),
        },
        "hash": spec.hash,
    }


def _part(name: str) -> str:
    """The part of the model that a parameter belongs to."""
    for key in ("experts", "shared", "router", "mlp"):
        if f".{key}." in name:
            return key
    if "norm" in name:
        return "norms"
    return "attention" if ".attention." in name else name.split(".")[0]


def _preset(name: str) -> ModelSpec:
    if name not in PRESETS:
        raise ConfigError.of("preset", name, "is not a preset", nearest(name, PRESETS), subject="arguments")
    return PRESETS[name]

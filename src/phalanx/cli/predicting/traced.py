"""`phalanx simulate traced FILE...`: what steps that `phalanx bench trace` has counted would take on an H100. Predicted, not measured. No process, no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, read_json, write_json
from phalanx.core.units import format_count, format_seconds
from phalanx.plan.model import PRESETS
from phalanx.simulate.step import TracedPhase, TracedTime, traced_time

FIELDS = tuple(field.name for field in dataclasses.fields(TracedPhase))


def traced(argv: Sequence[str]) -> int:
    """Print a table with a line for each file."""
    parser = argparse.ArgumentParser(prog="phalanx simulate traced", description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="written by phalanx bench trace --json FILE"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions")
    args = parser.parse_args(list(argv))
    check_writable(args.json)
    found = {str(path): read_step(path) for path in args.files}
    if args.json is not None:
        write_json(args.json, {name: to_dict(time) for name, time in found.items()})
    print(describe(found))
    return 0


def read_step(path: Path) -> TracedTime:
    """Raises `ConfigError` with everything that is wrong with the file."""
    found = read_json(path, where=str(path))
    step = found.get("step") if isinstance(found, dict) else None
    if not isinstance(step, dict):
        rule = "is not in the file: it is no trace"
        problem = Problem(where=str(path), value="step", rule=rule, hint="use one of phalanx bench trace --json FILE")
        raise ConfigError([problem], subject="the trace")
    raise_if(_problems(step, str(path)), ConfigError, subject="the trace")
    phases = {name: TracedPhase(**{field: phase[field] for field in FIELDS}) for name, phase in step["phases"].items()}
    spec = PRESETS[step["model"]]
    return traced_time(phases, spec, seq_len=step["seq_len"], tokens=step["tokens"], ranks=step["ranks"])


def _problems(step: Mapping[str, Any], where: str) -> list[Problem]:
    found = []
    if not isinstance(step.get("model"), str) or step["model"] not in PRESETS:
        found.append(
            Problem(where=f"{where}: model", value=step.get("model"), rule="is no known model", hint="qwen3-30b-a3b")
        )
    numbers = {name: step.get(name) for name in ("seq_len", "tokens", "ranks")}
    least = dict.fromkeys(numbers, 1)
    phases = step.get("phases")
    if not isinstance(phases, dict) or not all(isinstance(phase, dict) for phase in phases.values()):
        return [*found, Problem(where=f"{where}: phases", value=phases, rule="must be a table of phases")]
    for name, phase in phases.items():
        numbers |= {f"phases.{name}.{field}": phase.get(field) for field in FIELDS}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not least.get(name, 0) <= value < 2**63:
            found.append(Problem(where=f"{where}: {name}", value=value, rule="must be a count", hint="1"))
    if not found and not any(phase["launches"] for phase in phases.values()):
        found.append(Problem(where=f"{where}: phases", value=sorted(phases), rule="launch nothing"))
    return found


def to_dict(time: TracedTime) -> dict[str, Any]:
    """As JSON."""
    return {"seconds": time.seconds, "tokens_per_s": time.tokens_per_s, "mfu": time.mfu, "parts": dict(time.parts)}


def describe(found: Mapping[str, TracedTime]) -> str:
    """Lines of a table: microseconds a token, by what takes them."""
    kinds = list(next(iter(found.values())).parts)
    width = max(len("us a token"), *(len(Path(name).name) for name in found))
    lines = [f"{'us a token':<{width}}" + "".join(f"{kind:>12}" for kind in (*kinds, "step", "tokens/s", "MFU"))]
    for name, time in found.items():
        each = "".join(f"{seconds * time.ranks / time.tokens * 1e6:>12.1f}" for seconds in time.parts.values())
        lines.append(
            f"{Path(name).name:<{width}}{each}{format_seconds(time.seconds):>12}{format_count(time.tokens_per_s):>12}{time.mfu:>12.1%}"
        )
    return "\n".join(
        [
            *lines,
            "Counted on a device that computes nothing, at the rates of simulate/step/traced.py: predicted, not measured.",
        ]
    )

"""phalanx gpu-check: is Phalanx right and fast on this GPU? One GPU is enough; half an hour is enough for all of it.

    phalanx gpu-check --stage A --json a.json      stages: A right, B fast, C several ranks on the one card, D kernels
    phalanx gpu-check --only A3 B1 --json b.json   checks by the beginning of their names
    phalanx gpu-check --list                       the order in which to use a lent half hour
    phalanx gpu-check --self-test                  the same checks on a CPU, tiny: proves the checks, not a GPU

Each check runs in a process of its own, with a limit of time, and leaves one line of JSON as soon as it ends: {"check", "status", "value", "bar", "seconds", "why"}. The exit status is
0 where nothing failed. It needs neither tyro nor an installation: `PYTHONPATH=src:lab python -m phalanx gpu-check`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable
from phalanx_lab.gpu_check.checks import GpuCheck
from phalanx_lab.gpu_check.plan import CHECKS, STAGES, plan_text

LIMIT_S = 570.0
"""A little less than a command may take on a lent machine."""
IMPORTED_ONCE = ("phalanx.verify.session", "phalanx.train.build", "phalanx.simulate.memory.memory", "torch.profiler")
"""By this process, so that its forks need not."""


def main(args: list[str]) -> int:
    """Run `phalanx gpu-check ARGS...`; exit status 1 where a check failed."""
    options = _parser().parse_args(args)
    if options.list:
        print(plan_text())
        return 0
    checks = chosen(options.stage, options.only)
    check_writable(options.json)
    import torch

    from phalanx_lab.gpu_check.here import Here
    from phalanx_lab.gpu_check.runner import run_all, table

    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    device = torch.device("cpu" if options.self_test else "cuda")
    here = Here(device=device, told=Path(os.devnull), keep=options.keep)
    lines = run_all(checks, here, out=options.json, limit_s=options.limit_s)
    print(table(lines, checks), flush=True)
    return 0 if all(line.is_good for line in lines) else 1


def _parser() -> argparse.ArgumentParser:
    parser = WordParser(prog="phalanx gpu-check", description=__doc__)
    parser.add_argument("--stage", nargs="+", choices=list(STAGES), metavar="STAGE", help="A, B, C, D; default: A")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names begin so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="lines are appended to it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="C3 leaves there what its members recorded")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help="no check runs longer than that after the first began")  # fmt: skip
    parser.add_argument("--self-test", action="store_true", help="on a CPU, tiny")
    parser.add_argument("--list", action="store_true", help="print the plan and run nothing")
    return parser


def chosen(stages: Sequence[str] | None, only: Sequence[str] | None) -> list[GpuCheck]:
    """The checks asked for, in their order. Raises `ConfigError` for a name that begins no check, or for both kinds at once."""
    problems = []
    if stages and only:
        problems.append(
            Problem(where="--only", value=" ".join(only), rule="goes without --stage", hint="leave one out")
        )
    for name in only or ():
        if not any(c.name.startswith(name) for c in CHECKS):
            hint = ", ".join(c.name for c in CHECKS)
            problems.append(Problem(where="--only", value=name, rule="begins no name of a check", hint=hint))
    raise_if(problems, ConfigError, subject="the options")
    if only:
        return [c for c in CHECKS if c.name.startswith(tuple(only))]
    return [c for c in CHECKS if c.stage in (stages or ["A"])]

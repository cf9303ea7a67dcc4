"""`phalanx calibrate`: measure this machine, or under torchrun all machines of the job, and write it as a cluster file, for `phalanx simulate --cluster FILE` and `phalanx search`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.cli.calibration import JobMeasured, measure, measure_job
from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.process import usable_cores
from phalanx.core.units import format_bytes, format_rate, format_seconds
from phalanx.runtime.processes import StopRequest, WorldInfo, read_world, run_one, threads_per_rank
from phalanx.simulate.calibration import Calibration, calibrate


def main(argv: Sequence[str]) -> int:
    """Run `phalanx calibrate ARGV...`."""
    parser = WordParser(prog="phalanx calibrate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cluster file: .json or .toml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write constants, errors and all measured rows")
    parser.add_argument("--ranks", type=int, help="local ranks that work at once (default: one for each core)")
    parser.add_argument("--host", metavar="NAME", help="under torchrun: this rank's host (default: its machine)")
    args = parser.parse_args(list(argv))
    launched = read_world()
    raise_if(_problems(args, launched), ConfigError, subject="the arguments")
    if launched is None or launched.rank == 0:
        check_writable(args.out, args.json)
    begin = time.perf_counter()
    if launched is None:
        found = measure(ranks=args.ranks if args.ranks is not None else usable_cores())
    else:
        of_job = _as_rank(launched, args.host)
        if of_job is None:
            return 0
        found = of_job
    _write(found, args, seconds=time.perf_counter() - begin)
    return 0


def _as_rank(info: WorldInfo, host: str | None) -> JobMeasured | None:
    """What the first rank of the job found; None on the others."""
    found: list[JobMeasured | None] = []

    def main(info: WorldInfo, stop: StopRequest) -> int:
        found.append(measure_job(info, host=host))
        return 0

    run_one(main, info, threads=threads_per_rank(info.local_world))
    return found[0]


def _write(found: JobMeasured, args: argparse.Namespace, *, seconds: float) -> None:
    measured = found.measured
    made = calibrate(measured, name=args.out.stem, when=date.today().isoformat())
    write_text(args.out, made.to_toml() if args.out.suffix == ".toml" else made.to_json())
    if args.json is not None:
        rows = {name: [vars(row) for row in getattr(measured, name)] for name in _TABLES}
        about = {"hosts": measured.hosts, "apart": list(found.apart), "rows": rows}
        write_json(args.json, to_dict(made, seconds=seconds) | about)
    print(describe(made, seconds=seconds))
    for line in found.apart:
        print(f"hosts differ, and the file has the value between them: {line}")
    print(f"written: {args.out}; use it as --cluster {args.out}")


_TABLES = ("products", "experts", "attention", "streams", "links")


def _problems(args: argparse.Namespace, launched: WorldInfo | None) -> list[Problem]:
    out, ranks, problems = args.out, args.ranks, []
    if out.suffix not in (".json", ".toml"):
        rule, hint = "ends in .json or .toml", f"use {out.stem or 'cluster'}.json"
        problems.append(Problem(where="--out", value=str(out), rule=rule, hint=hint))
    if ranks is not None and ranks < 1:
        problems.append(Problem(where="--ranks", value=ranks, rule="must be at least 1", hint="use 2"))
    elif ranks is not None and launched is not None:
        rule = f"has no effect: the launcher started {launched.world} ranks"
        problems.append(Problem(where="--ranks", value=ranks, rule=rule, hint="leave it out"))
    if args.host is not None and launched is None:
        rule = "has no effect: all ranks are on this machine, for no launcher started this one"
        problems.append(
            Problem(where="--host", value=args.host, rule=rule, hint="leave it out, or start with torchrun")
        )
    return problems


def to_dict(made: Calibration, *, seconds: float) -> dict[str, Any]:
    """What `--json` writes beside the rows."""
    errors = {kind: error.to_dict() for kind, error in made.errors.items()}
    return {"cluster": made.table, "errors": errors, "measuring_s": seconds}


def describe(made: Calibration, *, seconds: float) -> str:
    """The machine and the errors of the fit, as a person reads them."""
    h = made.hardware
    fp32 = h.fp32_flops_per_s or 0.0
    between = (
        f"; between hosts {format_seconds(h.between_latency_s)} and {format_rate(h.between_bytes_per_s, 'B')} a rank"
    )
    lines = [
        f"{h.title}, measured in {format_seconds(seconds)}",
        f"  products {format_rate(h.bf16_flops_per_s * h.gemm_efficiency, 'FLOP')} in bf16, "
        f"{format_rate(fp32 * (h.fp32_efficiency or 0.0), 'FLOP')} in float32; memory {format_rate(h.memory_bytes_per_s, 'B')}, "
        f"{format_bytes(h.memory_bytes)} a rank",
        f"  links: {format_seconds(h.inside_latency_s)} and "
        + ", ".join(f"{format_rate(rate, 'B')} over {int(n)} ranks" for n, rate in h.inside_bytes_per_s)
        + (between if h.measured_between else ""),
        f"{'what the formulas with these constants miss':<46}{'rows':>5}{'median':>9}{'worst':>9}",
    ]
    for kind, e in made.errors.items():
        lines.append(f"  {kind:<44}{e.rows:>5}{e.median:>9.1%}{e.worst:>9.1%}  {e.worst_row}")
    lines.append("products, experts and links are in the file as tables too, which come before the formulas")
    return "\n".join(lines)

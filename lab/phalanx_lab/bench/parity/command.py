"""What a config.json means, to us and to the installed transformers: `phalanx bench transformers --drawn 300 --json F`

Configurations of all families are drawn with all their options, each key of a file is taken away or made null in turn, and edges of what is legal are
tried. Tiny models with random weights, on one rank. Exit status 1 where one is a mismatch: numbers that differ (1e-4 in float32, 1e-12 in
float64, relative to the largest), an export that is not what came in, a raw error, or a refusal that names no key of the file.
"""

from __future__ import annotations

import datetime
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx_lab.bench.parity.compare import Compared, compare
from phalanx_lab.bench.parity.draw import Configuration, drawn, edges


@dataclass(frozen=True, kw_only=True)
class TransformersArgs:
    """Compare configurations with the installed transformers."""

    drawn: int = 300
    """Drawn configurations."""
    edges: bool = True
    """Also each key of a file of each family taken away, and null, and the edges of what is legal."""
    seed: int | None = None
    """Seed of the draws. Default: today's date."""
    only: str = ""
    """Cases whose name has this in it."""
    show: bool = False
    """Print every case with its verdict."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench transformers ARGS...`; 1 where a case is a mismatch."""
    options = read_words(TransformersArgs, args, prog="phalanx bench transformers", description=__doc__)
    problems = too_small(options, drawn=0 if options.edges else 1)
    seed = options.seed if options.seed is not None else int(datetime.date.today().strftime("%Y%m%d"))
    if not problems and next(_cases(options, seed), None) is None:
        problems.append(Problem(where="--only", value=options.only, rule="names no case", hint="leave it out"))
    raise_if(problems, ConfigError, subject="the options")
    check_writable(options.json)
    report = measure(options, seed)
    print(describe(report))
    write_json(options.json, report)
    return 1 if report["mismatches"] else 0


def measure(options: TransformersArgs, seed: int) -> dict[str, Any]:
    """Compare all cases."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    begin_s, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(_cases(options, seed)):
            outcomes.append(compare(case, Path(folder) / str(number), number=number))
            if options.show or outcomes[-1].verdict == "mismatch":
                print(_line(outcomes[-1]), flush=True)
            elif sys.stderr.isatty():
                print(f"\r{number + 1} configurations", end="", file=sys.stderr, flush=True)
    return _report(outcomes, seed, transformers.__version__, time.perf_counter() - begin_s)


def _cases(options: TransformersArgs, seed: int) -> Iterator[Configuration]:
    for case in (*(edges(seed) if options.edges else ()), *(drawn(seed, n) for n in range(options.drawn))):
        if options.only in case.name:
            yield case


def _report(outcomes: list[Compared], seed: int, version: str, seconds: float) -> dict[str, Any]:
    verdicts = Counter(o.verdict for o in outcomes)
    kinds = sorted({kind for o in outcomes for kind in o.errors})
    return {
        "seed": seed,
        "transformers": version,
        "torch": torch.__version__,
        "configurations": len(outcomes),
        **{word: verdicts[word] for word in ("agree", "both refuse", "we refuse", "they refuse")},
        "mismatches": [asdict(o) for o in outcomes if o.verdict == "mismatch"],
        "worst": {kind: max(o.errors.get(kind, 0.0) for o in outcomes) for kind in kinds},
        "redrawn": sum(o.redrawn for o in outcomes),
        "refused": dict(Counter(where for o in outcomes if o.verdict == "we refuse" for where in set(o.refused))),
        "seconds": seconds,
    }


def _line(outcome: Compared) -> str:
    reasons = outcome.wrong or [w for w in (", ".join(outcome.refused), outcome.theirs) if w]
    config = f"\n    {outcome.config}" if outcome.wrong else ""
    return f"{outcome.verdict}: {outcome.case}" + "".join(f"\n    {reason}" for reason in reasons) + config


def describe(report: dict[str, Any]) -> str:
    """A few lines for a person."""
    parts = [f"{report[word]} {word}" for word in ("agree", "both refuse", "we refuse", "they refuse")]
    worst = [f"{kind} {error:.1e}" for kind, error in report["worst"].items()]
    return (
        f"{report['configurations']} configurations beside transformers {report['transformers']}, seed {report['seed']}, "
        f"{report['seconds']:.0f} s: {', '.join(parts)}, {len(report['mismatches'])} mismatches\n"
        f"  worst: {', '.join(worst)}\n"
        f"  weights drawn again, as rounding decided who was chosen: {report['redrawn']}"
    )

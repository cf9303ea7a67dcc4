"""Training speed on one rank beside Hugging Face transformers: `phalanx bench train --json F`.

Same shape, same batches, same AdamW with clipping, whole steps. Each contender lives in a process of its own with the same number of
threads; they take turns of a few steps, several rounds of them, and between rounds a third process measures the machine: the best bf16
square product of 1024 to 4096. What a neighbour on the machine does to one round it does to all of that round, so the ratio is the
median over rounds of the quotient of the two contenders' best steps in the round.

    ratio   Phalanx's tokens per second over the baseline's
    mfu     model FLOPs (matmuls, causal half of attention, nothing recomputed) per second over the measured matmul rate
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import RunError
from phalanx.core.files import check_writable, write_json
from phalanx.core.processor import this_processor
from phalanx.plan.model.model import flops_per_token
from phalanx.train.setup.machine import matmul_flops_per_s
from phalanx_lab.bench.baseline_transformers import Baseline, fastest, transformers_version
from phalanx_lab.bench.ours import OurRun
from phalanx_lab.bench.workload import WorkloadShape


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Measure training speed beside transformers, in the same run."""

    shape: WorkloadShape = field(default_factory=WorkloadShape)
    threads: int = 2
    """Compute threads of each contender."""
    rounds: int = 5
    """Turns of each contender."""
    steps: int = 4
    """Steps of a turn of either contender: the best of more would be the better one."""
    warmup: int = 8
    """Steps of each before the first round. Row counts of experts that were never seen cost oneDNN a moment each."""
    baseline: bool = True
    """Run the baseline too."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class TrainResult:
    tokens_per_s: float = 0.0
    baseline_tokens_per_s: float | None = None
    ratio: float | None = None
    matmul_gflops: float = 0.0
    mfu: float = 0.0
    amx: bool = False
    cpu: str = ""
    threads: int = 0
    step_s: float = 0.0
    """Best step of Phalanx in the median round."""
    baseline_step_s: float | None = None
    baseline: str = ""
    """Fastest variant, found by trial."""
    baseline_trials_s: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    num_params: int = 0
    gflop_per_token: float = 0.0


def main(args: list[str]) -> int:
    """Run `phalanx bench train ARGS...`."""
    options = read_words(TrainArgs, args, prog="phalanx bench train", description=__doc__)
    check_writable(options.json)
    result = measure(options, tell=print)
    print(report(result))
    write_json(options.json, asdict(result))
    return 0


def measure(options: TrainArgs, *, tell: Callable[[str], None]) -> TrainResult:
    """The whole measurement."""
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if options.baseline:
        versions["transformers"] = transformers_version()
    flops = flops_per_token(options.shape.spec(), options.shape.seq_len)
    result = TrainResult(
        amx=this_processor().has_amx,
        cpu=this_processor().name,
        threads=options.threads,
        versions=versions,
        shape=asdict(options.shape),
        gflop_per_token=flops / 1e9,
    )
    with _worker(_matmul, options) as matmul, _worker(_ours, options) as ours:
        result.num_params = ours.ask("num_params")
        if not options.baseline:
            _rounds(result, options, matmul, ours, None, tell)
        else:
            with _worker(_baseline, options) as baseline:
                result.baseline, result.baseline_trials_s = baseline.ask("choose")
                tell(f"baseline: fastest of {len(result.baseline_trials_s)} variants is {result.baseline}")
                _rounds(result, options, matmul, ours, baseline, tell)
    _conclude(result, options.shape.tokens, flops)
    return result


def _rounds(
    result: TrainResult,
    options: TrainArgs,
    matmul: _Worker,
    ours: _Worker,
    baseline: _Worker | None,
    tell: Callable[[str], None],
) -> None:
    tokens = options.shape.tokens
    for contender in (ours, baseline):
        if contender is not None:
            contender.ask("run", options.warmup)
    for number in range(options.rounds):
        entry = {"matmul_gflops": matmul.ask("rate") / 1e9, "step_s": min(ours.ask("run", options.steps))}
        if baseline is not None:
            entry["baseline_step_s"] = min(baseline.ask("run", options.steps))
            entry["ratio"] = entry["baseline_step_s"] / entry["step_s"]
        result.rounds.append(entry)
        shown = f"round {number + 1}: {tokens / entry['step_s']:,.0f} tokens/s"
        if baseline is not None:
            shown += f", baseline {tokens / entry['baseline_step_s']:,.0f}, ratio {entry['ratio']:.2f}"
        tell(f"{shown}; matmul {entry['matmul_gflops']:,.0f} GFLOP/s")


def _conclude(result: TrainResult, tokens: int, flops: float) -> None:
    def middle(key: str) -> float:
        return statistics.median(r[key] for r in result.rounds)

    result.step_s = middle("step_s")
    result.tokens_per_s = tokens / result.step_s
    result.matmul_gflops = max(r["matmul_gflops"] for r in result.rounds)
    result.mfu = flops * result.tokens_per_s / (result.matmul_gflops * 1e9)
    if result.baseline:
        result.baseline_step_s = middle("baseline_step_s")
        result.baseline_tokens_per_s = tokens / result.baseline_step_s
        result.ratio = middle("ratio")


def report(result: TrainResult) -> str:
    lines = [
        f"{result.tokens_per_s:,.0f} tokens/s ({1e3 * result.step_s:.0f} ms a step, {result.num_params / 1e6:.0f} M parameters, "
        f"{result.threads} threads{', AMX' if result.amx else ', no AMX'})",
        f"model FLOP utilisation {result.mfu:.3f} of {result.matmul_gflops:,.0f} GFLOP/s, the best bf16 square product",
    ]
    if result.baseline_tokens_per_s is not None and result.ratio is not None:
        lines.insert(
            1,
            f"{result.ratio:.2f} times transformers {result.versions['transformers']} ({result.baseline}): "
            f"{result.baseline_tokens_per_s:,.0f} tokens/s",
        )
    return "\n".join(lines)


# ---- contenders in processes of their own --------------------------------------------------------------------------------------


class _Worker:
    """The parent's end: asks one question at a time."""

    def __init__(self, link: Connection, name: str) -> None:
        self._link, self._name = link, name

    def ask(self, question: str, *args: Any) -> Any:
        try:
            self._link.send((question, args))
            answer, error = self._link.recv()
        except (EOFError, OSError) as lost:
            raise RunError(f"the process of {self._name} ended before it answered (out of memory?)") from lost
        if error:
            raise RunError(f"{self._name}: {error}")
        return answer


@contextmanager
def _worker(make: Callable[[TrainArgs], dict[str, Callable[..., Any]]], options: TrainArgs) -> Iterator[_Worker]:
    """A fresh process that answers what `make(options)` can answer."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(make, options, there), daemon=True)
    process.start()
    there.close()
    try:
        yield _Worker(here, make.__name__.lstrip("_"))
    finally:
        here.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def _serve(make: Callable[[TrainArgs], dict[str, Callable[..., Any]]], options: TrainArgs, link: Connection) -> None:
    torch.set_num_threads(options.threads)
    answers = make(options)
    while True:
        try:
            question, args = link.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            link.send((answers[question](*args), ""))
        except Exception as error:
            link.send((None, f"{type(error).__name__}: {error}"))


def _ours(options: TrainArgs) -> dict[str, Callable[..., Any]]:
    contender = OurRun(options.shape, threads=options.threads)
    return {"run": lambda steps: contender.run(steps)[0], "num_params": lambda: contender.num_params}


def _baseline(options: TrainArgs) -> dict[str, Callable[..., Any]]:
    chosen: list[Baseline] = []

    def choose() -> tuple[str, dict[str, float]]:
        variant, trials = fastest(options.shape)
        chosen.append(Baseline(options.shape, variant))
        chosen[0].run(1)
        return variant.label, trials

    return {"choose": choose, "run": lambda steps: chosen[0].run(steps)[0]}


def _matmul(options: TrainArgs) -> dict[str, Callable[..., Any]]:
    return {"rate": lambda: matmul_flops_per_s(torch.bfloat16, torch.device("cpu"))}

"""Does the fast path learn what the plain one learns? `phalanx bench curve --json F`.

Trains a small model twice on the same batches from the same initial weights: plain kernels in fp32, and the fast bf16 path. The curves are
averaged over a window of steps (a step's own loss differs by rounding alone, and rounding routes a few tokens differently), and the
largest difference of the averages must stay below the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx_lab.bench.ours import OurRun
from phalanx_lab.bench.workload import WorkloadShape

SMALL = WorkloadShape(
    layers=2, hidden=128, heads=4, kv_heads=2, experts=8, top_k=2, ffn=128, vocab=512, batch=8, seq_len=64
)
RATE = 1e-3
WARMUP = 20


@dataclass(frozen=True, kw_only=True)
class CurveArgs:
    """Compare the loss curve of the fast bf16 path with that of the plain fp32 one."""

    steps: int = 200
    window: int = 10
    """Steps that are averaged."""
    tolerance: float = 0.02
    """Largest difference of the averages, nats; plain bf16 kernels differ from fp32 by half of that."""
    threads: int = 1
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class CurveResult:
    steps: int
    window: int
    tolerance: float
    max_difference: float = 0.0
    mean_difference: float = 0.0
    first: float = 0.0
    """Loss of the first step in fp32."""
    last_reference: float = 0.0
    last_fast: float = 0.0
    """Averages over the last window."""
    failures: list[str] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    fast: list[float] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench curve ARGS...`; exit status 1 where the curves part."""
    options = read_words(CurveArgs, args, prog="phalanx bench curve", description=__doc__)
    raise_if(too_small(options, window=1, steps=options.window, threads=1), ConfigError, subject="the options")
    check_writable(options.json)
    torch.set_num_threads(options.threads)
    result = compare(options)
    print(
        f"{result.steps} steps: fp32 {result.first:.3f} -> {result.last_reference:.4f}, fast bf16 -> {result.last_fast:.4f}; "
        f"largest difference {result.max_difference:.4f}, mean {result.mean_difference:.4f} (tolerance {result.tolerance})"
    )
    for failure in result.failures:
        print(f"FAILED: {failure}")
    write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def compare(options: CurveArgs, *, shape: WorkloadShape = SMALL) -> CurveResult:
    """Both runs and their difference."""

    def rate(step: int) -> float:
        return RATE * min(1.0, (step + 1) / WARMUP)

    plain = OurRun(shape, threads=1, dtype=torch.float32, kernels="reference", rate=rate)
    fast = OurRun(shape, threads=options.threads, rate=rate)
    result = CurveResult(steps=options.steps, window=options.window, tolerance=options.tolerance)
    _, result.reference = plain.run(options.steps)
    with fast.lanes:
        _, result.fast = fast.run(options.steps)
    a, b = (averages(x, options.window) for x in (result.reference, result.fast))
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    at = max(range(len(differences)), key=lambda i: differences[i] if differences[i] >= 0 else math.inf)  # NaN first
    result.max_difference, result.mean_difference = differences[at], sum(differences) / len(differences)
    result.first, result.last_reference, result.last_fast = result.reference[0], a[-1], b[-1]
    if not result.max_difference <= options.tolerance:
        result.failures.append(f"steps {at} to {at + options.window - 1}: the averages are {a[at]:.4f} and {b[at]:.4f}")
    if not result.last_reference < 0.9 * result.first:
        result.failures.append("the fp32 run did not learn, so agreement proves nothing")
    return result


def averages(values: Sequence[float], window: int) -> list[float]:
    """Means over every `window` neighbours."""
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]

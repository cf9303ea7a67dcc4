"""The benchmarks themselves: data, conclusions, errors, and the loss curve of the fast path in short."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx_lab.bench import baseline_transformers, curve
from phalanx_lab.bench.commands import BENCHMARKS, main as bench
from phalanx_lab.bench.curve import CurveArgs, averages, compare
from phalanx_lab.bench.train import TrainArgs, TrainResult, _conclude, _rounds, _worker, main as bench_train, report
from phalanx_lab.bench.workload import WorkloadShape, batch_of

TINY = WorkloadShape(
    layers=1, hidden=32, heads=2, kv_heads=1, experts=4, top_k=2, ffn=32, vocab=64, batch=2, seq_len=16
)
TINY_WORDS = [
    w
    for f in dataclasses.fields(WorkloadShape)
    for w in (f"--shape.{f.name.replace('_', '-')}", str(getattr(TINY, f.name)))
]


def test_list_and_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([]) == 0
    shown = capsys.readouterr().out
    for name, (module, _) in BENCHMARKS.items():
        assert name in shown and util.find_spec(f"phalanx_lab.bench.{module}") is not None
    assert bench(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def test_batches_depend_on_seed_and_step_alone() -> None:
    a, b = batch_of(TINY, step=3), batch_of(TINY, step=3)
    assert a.shape == (2, 17) and a.dtype == np.int64 and a.min() >= 0 and a.max() < 64
    assert np.array_equal(a, b) and not np.array_equal(a, batch_of(TINY, step=4))
    assert not np.array_equal(a, batch_of(TINY, step=3, seed=1))


def test_conclusion() -> None:
    rounds = [
        {"matmul_gflops": g, "step_s": s, "baseline_step_s": b, "ratio": b / s}
        for g, s, b in ((1, 2, 6), (4, 1, 5), (2, 4, 8))
    ]
    result = TrainResult(rounds=rounds, baseline="x", versions={"transformers": "5"})
    _conclude(result, tokens=100, flops=2e7)
    assert (result.tokens_per_s, result.baseline_tokens_per_s, result.ratio) == (50, 100 / 6, 3)
    assert result.matmul_gflops == 4 and result.mfu == pytest.approx(2e7 * 50 / 4e9)
    assert "3.00 times transformers 5" in report(result)


class _Contender:
    """Its n-th step takes 1/n s: the best of more steps is the better one."""

    def __init__(self) -> None:
        self.turns: list[int] = []

    def ask(self, question: str, *args: int) -> object:
        if question == "rate":
            return 1e12
        self.turns += args
        return [1 / n for n in range(sum(self.turns) - args[0] + 1, sum(self.turns) + 1)]


def test_equal_contenders_are_equally_fast() -> None:
    ours, baseline, result = _Contender(), _Contender(), TrainResult(baseline="x")
    _rounds(result, TrainArgs(rounds=3, steps=4, warmup=2), _Contender(), ours, baseline, lambda text: None)  # type: ignore[arg-type]
    assert ours.turns == baseline.turns == [2, 4, 4, 4]
    assert [entry["ratio"] for entry in result.rounds] == [1, 1, 1]


def test_train_in_small(tmp_path: Path) -> None:
    """Both contenders, in processes of their own; the baseline's variants are tried."""
    pytest.importorskip("transformers", reason="the baseline is the extra `bench`")
    file = tmp_path / "bench.json"
    assert (
        bench_train(
            [*TINY_WORDS, "--threads", "1", "--rounds", "1", "--steps", "2", "--warmup", "1", "--json", str(file)]
        )
        == 0
    )
    result = json.loads(file.read_text())
    for key in ("tokens_per_s", "baseline_tokens_per_s", "ratio", "matmul_gflops", "mfu"):
        assert result[key] > 0, key
    assert isinstance(result["amx"], bool) and result["baseline"] in result["baseline_trials_s"]
    assert len(result["baseline_trials_s"]) == len(baseline_transformers.VARIANTS)


def test_both_contenders_have_the_same_model() -> None:
    pytest.importorskip("transformers", reason="the baseline is the extra `bench`")
    from phalanx_lab.bench.ours import OurRun

    baseline = baseline_transformers.Baseline(TINY, baseline_transformers.VARIANTS[0])
    ours = OurRun(TINY, threads=1)
    assert baseline.num_params == ours.num_params
    assert baseline.run(1)[1] == pytest.approx(ours.run(1)[1][0], rel=0.05), (
        "both start at the entropy of the vocabulary"
    )


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_transformers, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install -e '\.\[bench\]'"):
        baseline_transformers.transformers_version()


def _dies(options: TrainArgs) -> dict[str, object]:
    import os

    return {"die": lambda: os._exit(3), "fail": lambda: 1 / 0}


def test_a_lost_or_failing_contender_is_named() -> None:
    with _worker(_dies, TrainArgs(threads=1)) as worker:
        with pytest.raises(RunError, match="dies: ZeroDivisionError"):
            worker.ask("fail")
        with pytest.raises(RunError, match="the process of dies ended"):
            worker.ask("die")


def test_averages() -> None:
    assert averages([1.0, 3.0, 5.0], 2) == [2.0, 4.0] and averages([1.0], 2) == []


def test_the_fast_path_learns_like_the_plain_one() -> None:
    """A short form of `phalanx bench curve` (200 steps, 0.02)."""
    result = compare(CurveArgs(steps=40, window=10))
    assert not result.failures
    assert result.max_difference < 0.02 and result.last_fast < 0.8 * result.first


def test_a_curve_that_parts_is_a_failure() -> None:
    result = compare(CurveArgs(steps=6, window=2, tolerance=1e-9), shape=TINY)
    assert any("the averages are" in f for f in result.failures)
    assert any("did not learn" in f for f in result.failures)


def test_a_curve_that_breaks_off_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is not above any tolerance, and `max` passes over one that does not come first."""

    class Run:
        lanes = contextlib.nullcontext()

        def __init__(self, *args: object, kernels: str = "fast", **more: object) -> None:
            self.broken = kernels == "fast"

        def run(self, steps: int) -> tuple[None, list[float]]:
            return None, [math.nan if self.broken and i > steps // 2 else 3.0 / (i + 1) for i in range(steps)]

    monkeypatch.setattr(curve, "OurRun", Run)
    result = compare(CurveArgs(steps=20, window=5))
    assert math.isnan(result.max_difference) and [
        "steps 7 to 11: the averages are 0.3" in f for f in result.failures
    ] == [True]


@pytest.mark.parametrize("words", [["curve", "--steps", "5"], ["kill", "--kills", "0"], ["flips", "--flips", "1"], ["transformers", "--only", "nobody"],
                                   ["transformers", "--drawn", "0", "--no-edges"]])  # fmt: skip
def test_a_benchmark_that_would_check_nothing_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{words[1]} = .*(must be at least|names no case)"):
        bench(words)

"""Forwards ahead chosen by a run: what is measured, that all ranks choose alike, that bits stay, and what is said of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline_train import losses
from train_help import phalanx, train_args, write_text

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import ConfigError
from phalanx.observe.event_log import log_path, read_events
from phalanx.plan.model.model import PRESETS
from phalanx.plan.pipeline.comm import plan_pipeline
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.pipeline.boundary import Boundary, direct_edges
from phalanx.runtime.pipeline.runner import Tensors
from phalanx.train.step.warmup import PassTimes, TimedPasses, choose, transfer_seconds
from ranks import run_ranks

CPU = torch.device("cpu")


class _Layer:
    """One product and a sleep; nothing else of the protocol."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(64, 32))

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        time.sleep(0.02)
        hidden = (inputs[0] @ self.weight.T).exp()  # keeps the input, and its own output
        return (hidden,)

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        time.sleep(0.03)
        return ()

    input_gradient = backward

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        time.sleep(0.01)


@pytest.mark.unit
def test_times_and_bytes_of_passes() -> None:
    layer, times = _Layer(), PassTimes()
    timed = TimedPasses(layer, times, CPU, [layer.weight])
    x, begin_s = torch.ones(10, 32, requires_grad=True), time.perf_counter()
    kept = [timed.forward(0, mb, (x,)) for mb in range(3)]
    timed.input_gradient(0, 0, ())
    timed.weight_gradient(0, 0)
    assert times.median_s("F") >= 0.02 and times.median_s("I") >= 0.03 and times.median_s("W") >= 0.01
    assert sum(map(times.median_s, "FIW")) <= time.perf_counter() - begin_s
    assert times.median_s("B") == 0.0
    assert times.live_bytes == (10 * 32 + 10 * 64) * 4  # the weight is there anyway
    kept[0][0].sum().backward()
    assert x.grad is not None and layer.weight.grad is not None


class _SlowLink(Collectives):
    """Messages arrive 10 ms after they were posted; one link carries one at a time."""

    def start_exchange(self, sends, receives, axis, *, op_id=""):  # type: ignore[no-untyped-def]
        inner = super().start_exchange(sends, receives, axis, op_id=op_id)
        if not receives:
            return inner

        def finish() -> None:
            inner.wait()
            time.sleep(0.01)

        return Exchange(finish)


def _boundary(rank: int, cache: GroupCache, comms: Collectives) -> Boundary:
    plan = plan_pipeline(make_schedule("gpipe", pp=3, virtual=1, num_microbatches=2))
    axis = Axis("pp", (0, 1, 2), rank, cache.get((0, 1, 2)))
    return Boundary(
        position=rank, edges=direct_edges(plan, (4, 8), (0, 1, 2)), dtype=torch.float32, device=CPU, axis=axis, comms=comms
    )  # fmt: skip


def _transfer(rank: int, cache: GroupCache) -> tuple[float, float]:
    slow = transfer_seconds(_boundary(rank, cache, _SlowLink(timeout_s=20.0)), pp=3)
    return slow, transfer_seconds(_boundary(rank, cache, Collectives(timeout_s=20.0)), pp=3)


@pytest.mark.ranks
def test_a_transfer_takes_what_it_takes() -> None:
    """The last stage has done its part before the last messages arrive, so the longest on any rank is what counts, as in `choose`."""
    found = run_ranks(3, _transfer)
    assert 0.008 < max(slow for slow, _ in found) < 0.05
    assert all(0 < fast < slow / 2 for slow, fast in found), found


def _choice(rank: int, cache: GroupCache, slow: bool, memory_gb: float | None) -> Any:
    config = PipelineConfig(schedule="eager_1f1b", extra_warmup="auto")
    pipeline = make_pipeline(config, PRESETS["tiny"], pp=3, seq_len=32)
    times = PassTimes()
    times.live_bytes = 1_000_000 * (rank + 1)
    for kind, seconds in (("F", 0.012), ("B", 0.02)):
        with times.timed(kind, CPU):
            time.sleep(seconds)
    comms = _SlowLink(timeout_s=20.0) if slow else Collectives(timeout_s=20.0)
    boundary = _boundary(rank, cache, comms)
    world = Axis("world", (0, 1, 2), rank, cache.get((0, 1, 2)))
    try:
        return choose(pipeline, times, boundary, num_microbatches=12, memory_gb=memory_gb, world=world)
    except ConfigError as error:
        return str(error)


@pytest.mark.ranks
def test_all_ranks_choose_alike_from_what_all_have_measured() -> None:
    far = run_ranks(3, _choice, True, None)
    assert far[0] == far[1] == far[2] and far[0].extra_warmup[0] == 2
    assert far[0].live_bytes == (1_000_000, 2_000_000, 3_000_000)
    near = run_ranks(3, _choice, False, None)[0]
    # A busy machine takes 2 ms where a quiet one takes 0.5, and then as many passes pay as on the slow link.
    assert sum(near.extra_warmup) <= sum(far[0].extra_warmup) and near.ratio < far[0].ratio / 2
    tight = run_ranks(3, _choice, True, 0.004)[0]
    assert tight.live[0] <= 4 and tight.live[1] == 2 and tight.live[2] == 1
    for text in run_ranks(3, _choice, True, 0.0025):
        assert "pipeline.memory_gb = 0.0025" in text and "the 3 micro-batches of 1F1B on rank 0" in text


# ---- whole runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warmup")
    write_text(folder / "text")
    return folder


COMMON: dict[str, Any] = {
    "model__num_layers": 4, "optim__schedule": "constant", "optim__warmup_steps": 1, "folding__pp": 2, "launch__ranks": 2,
}  # fmt: skip


@pytest.mark.ranks
def test_a_run_that_measures_has_the_bits_of_one_that_does_not_also_when_it_goes_on(base: Path) -> None:
    plain = {**COMMON, "pipeline__schedule": "1f1b"}
    auto = {
        **COMMON,
        "pipeline__schedule": "eager_1f1b_split",
        "pipeline__extra_warmup": "auto",
        "pipeline__memory_gb": 4,
    }
    for name, given, steps in (("plain", plain, 4), ("auto", auto, 2), ("auto", auto, 4)):
        done = phalanx("train", *train_args(base, **given, run__name=name, train__steps=steps))
        assert done.returncode == 0, done.stderr
    steps = range(1, 5)
    assert losses(base / "runs" / "auto", steps) == losses(base / "runs" / "plain", steps)
    told = [
        [r for r in read_events(log_path(base / "runs" / "auto", rank)) if r["kind"] == "WarmupChosen"]
        for rank in range(2)
    ]
    assert [[r["step"] for r in records] for records in told] == [[1, 3]] * 2  # chosen anew where it went on
    same = [[{k: v for k, v in r.items() if k not in ("time_s", "rank")} for r in records] for records in told]
    assert same[0] == same[1]
    for record in told[0]:
        assert record["transfer_s"] > 0 and min(record["forward_s"]) > 0 and min(record["live_bytes"]) > 1000
        assert record["extra_warmup"] in ([0, 0], [1, 0]) and "of a forward pass" in record["reason"]


ELASTIC: dict[str, Any] = {
    "resilience__heal": "true",
    "resilience__mode": "fast",
    "resilience__f": 1,
    "folding__ep": 1,
    "resilience__limit_s": 60,
}
"""Nobody is put out where this machine has more to do."""


@pytest.mark.ranks
def test_an_elastic_run_measures_and_keeps_the_bound_too(base: Path) -> None:
    given = {**COMMON, **ELASTIC, "pipeline__schedule": "eager_1f1b", "pipeline__extra_warmup": "auto"}
    done = phalanx("train", *train_args(base, **given, run__name="elastic", train__steps=3))
    assert done.returncode == 0, done.stderr
    told = [
        [r for r in read_events(log_path(base / "runs" / "elastic", rank)) if r["kind"] == "WarmupChosen"]
        for rank in range(2)
    ]
    assert [[r["step"] for r in records] for records in told] == [[1]] * 2
    small = {**given, "pipeline__memory_gb": 1e-6}
    done = phalanx("train", *train_args(base, **small, run__name="elastic-small", train__steps=3))
    assert (
        done.returncode == 2
        and "pipeline.memory_gb = 1e-06: holds the 2 micro-batches of 1F1B on rank 0" in done.stderr
    )


@pytest.mark.ranks
def test_a_memory_that_is_too_small_ends_the_run_with_what_it_needs(base: Path) -> None:
    given = {
        **COMMON,
        "pipeline__schedule": "eager_1f1b",
        "pipeline__extra_warmup": "auto",
        "pipeline__memory_gb": 1e-6,
    }
    done = phalanx("train", *train_args(base, **given, run__name="small", train__steps=2))
    assert done.returncode != 0
    assert "pipeline.memory_gb = 1e-06: holds the 2 micro-batches of 1F1B on rank 0" in done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pipeline__extra_warmup": "auto"}, "pipeline.extra_warmup = 'auto': has no effect: 1f1b runs no extra warm-up forwards"),
        ({"pipeline__schedule": "eager_1f1b", "pipeline__memory_gb": 1}, 'set pipeline.extra_warmup = "auto"'),
        ({"pipeline__schedule": "eager_1f1b", "pipeline__extra_warmup": "3"}, "pipeline.extra_warmup = [3]: must be 0 to 1"),
        ({"pipeline__schedule": "eager_1f1b", "pipeline__extra_warmup": "soon"}, 'or "auto"'),
        ({"pipeline__schedule": "eager_1f1b", "pipeline__extra_warmup": "[1, 1]"}, "pipeline.extra_warmup[1] = 1: must be 0 to 0"),
    ],
)  # fmt: skip
def test_settings_without_effect_or_sense_are_refused(base: Path, given: dict[str, Any], says: str) -> None:
    done = phalanx("train", *train_args(base, **{**COMMON, **given}, run__name="no"), "--dry-run")
    assert done.returncode == 2 and says in done.stderr, done.stderr


@pytest.mark.unit
def test_the_dry_run_says_how_many(base: Path) -> None:
    given = {**COMMON, "pipeline__schedule": "eager_1f1b", "pipeline__extra_warmup": "0"}
    done = phalanx("train", *train_args(base, **given, run__name="dry"), "--dry-run")
    assert done.returncode == 0 and "forwards ahead of 1F1B, by rank: 0 0" in done.stdout

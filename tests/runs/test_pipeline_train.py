"""Whole runs in a pipeline: the same losses as one rank, checkpoints that go on with other stages, text written on any mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_help import model_fields, run_state
from pipeline_help import PipelineCase, batches_of, build
from tiers import some
from train_help import phalanx, train_args, write_text

from phalanx.core.config import PipelineConfig
from phalanx.observe.event_log import log_path, read_events, read_history
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import RouterSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.generation import Sampling, generate, next_logits
from phalanx.train.step.transaction import StepParts
from phalanx.verify.reference import run_step
from phalanx.verify.setups import Setup, small_model
from ranks import run_ranks

pytestmark = pytest.mark.ranks

ROUTER = RouterSpec(score="sigmoid", renormalize=True, bias_rate=1e-3, aux_loss=0.05)
SPEC = small_model("travel", num_layers=6, dense_layers=1, dense_ffn=48, tied_embeddings=True, router=ROUTER)
HOMES: tuple[tuple[dict[str, int], PipelineConfig], ...] = (
    ({"world": 4, "pp": 2, "ep": 2}, PipelineConfig(virtual=2)),
    ({"world": 1}, PipelineConfig()),
    ({"world": 4, "pp": 4}, PipelineConfig(schedule="zbv")),
    ({"world": 2, "pp": 2}, PipelineConfig(schedule="zero_bubble", layers=(2, 4))),
    ({"world": 4, "pp": 2, "tp": 2, "etp": 2}, PipelineConfig(schedule="gpipe", virtual=3)),
    ({"world": 4, "tp": 2, "ep": 4}, PipelineConfig()),
    ({"world": 4, "pp": 2, "cp": 2}, PipelineConfig(schedule="dualpipev")),
)
"""Mappings that differ in tp, cp, ep, etp, dp, pp and virtual stages."""


def case_of(home: int) -> PipelineCase:
    degrees, config = HOMES[home]
    setup = Setup(label="travel", spec=SPEC, dispatch=DispatchSpec())
    return PipelineCase(setup=setup, folding=make_folding(**degrees), config=config, num_microbatches=4)


# ---- checkpoints ----------------------------------------------------------------------------------------------------------------


def _step_and_save(rank: int, cache: GroupCache, home: int, target: Path) -> None:
    case = case_of(home)
    parts = build(case, rank, cache)
    run_step(parts, batches_of(case, rank))
    _save(parts, target, case)


def _save(parts: StepParts, target: Path, case: PipelineCase) -> None:
    writer = CheckpointManager(target, group=own_group(case.folding.world, timeout_s=240))
    writer.open()
    writer.save(parts.state.boxes(), run_state(1, SPEC))
    writer.finish()


def _pass_on(rank: int, cache: GroupCache, home: int, source: Path, target: Path) -> None:
    """Load on this mapping and save again."""
    case = case_of(home)
    parts = build(case, rank, cache)
    reader = CheckpointManager(source, group=own_group(case.folding.world, timeout_s=240))
    reader.read_state(1, model=model_fields(SPEC))
    reader.load(parts.state.boxes(), step=1)
    parts.state.restore(parts.comms)
    _save(parts, target, case)


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All logical tensors of a checkpoint, whole."""
    boxes: list[BoxTensor] = build(case_of(1), 0, GroupCache()).state.boxes()
    CheckpointManager(path).load(boxes, step=1)
    whole: dict[str, torch.Tensor] = {}
    for box in boxes:
        full = whole.setdefault(box.name, torch.full(box.shape, torch.nan, dtype=box.tensor.dtype))
        full[box.box.slices()] = box.tensor
    return whole


def test_state_passes_through_stages_bitwise(tmp_path: Path) -> None:
    run_ranks(4, _step_and_save, 0, tmp_path / "0")
    original = everything(tmp_path / "0")
    assert all(torch.isfinite(t).all() for t in original.values())
    order = [1, 2, 3, 4, 5, 6, 0]
    for i, home in enumerate(order):
        run_ranks(HOMES[home][0]["world"], _pass_on, home, tmp_path / str(i), tmp_path / str(i + 1))
        passed = everything(tmp_path / str(i + 1))
        assert passed.keys() == original.keys()
        assert [name for name, t in passed.items() if not torch.equal(t, original[name])] == [], HOMES[home]


# ---- text -----------------------------------------------------------------------------------------------------------------------


def _logits(rank: int, cache: GroupCache, home: int, tokens: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    parts = build(case_of(home), rank, cache)
    logits_V = next_logits(parts.runner, tokens)
    sampling = Sampling(seed=3)
    new = generate(parts.runner, tokens, num_tokens=4, window=16, vocab=60, sampling=sampling)
    return logits_V, list(new)


@pytest.mark.parametrize("tokens", some([[5], [7, 3, 9, 1, 4], list(range(20, 34))], 1))
def test_the_next_token_is_the_same_on_any_mapping_and_rank(tokens: list[int]) -> None:
    want, text = _logits(0, GroupCache(), 1, tokens)
    assert want.shape == (SPEC.vocab,) and len(text) == 4
    for home in (0, 2, 4, 5, 6):
        for logits_V, written in run_ranks(HOMES[home][0]["world"], _logits, home, tokens):
            torch.testing.assert_close(logits_V, want, rtol=1e-5, atol=1e-6)
            assert written == text


# ---- the command ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    write_text(folder / "text")
    return folder


COMMON: dict[str, Any] = {
    "train__dtype": "float64",
    "model__num_layers": 6,
    "model__tied_embeddings": "true",
    "optim__schedule": "constant",  # a rate that does not depend on the length of the leg
    "optim__warmup_steps": 1,
}


def losses(folder: Path, steps: Sequence[int], *, rank: int = 0) -> list[float]:
    history = read_history(folder, rank=rank)
    return [history.steps[step]["loss"] for step in steps]


def test_a_run_goes_on_without_its_pipeline_and_with_another(base: Path) -> None:
    """2 ranks x 1F1B, then no pipeline, then a V over 2 ranks x 2: the losses of a run that had none."""
    legs = (
        {"train__steps": 2, "folding__pp": 2, "launch__ranks": 4},
        {"train__steps": 4, "launch__ranks": 2},
        {"train__steps": 6, "folding__pp": 2, "pipeline__schedule": "zbv", "launch__ranks": 4},
    )
    for leg in legs:
        done = phalanx("train", *train_args(base, **COMMON, run__name="travels", **leg))
        assert done.returncode == 0, done.stderr
    home = phalanx("train", *train_args(base, **COMMON, run__name="home", train__steps=6, launch__ranks=1))
    assert home.returncode == 0, home.stderr
    steps = range(1, 7)
    assert losses(base / "runs" / "travels", steps) == pytest.approx(losses(base / "runs" / "home", steps), rel=1e-11)
    assert losses(base / "runs" / "travels", [5, 6]) == losses(base / "runs" / "travels", [5, 6], rank=3)
    starts = [r for r in read_events(log_path(base / "runs" / "travels", 0)) if r["kind"] == "RunStarted"]
    assert [r["folding"].split("|")[0] for r in starts] == ["dp2.pp2", "dp2", "dp2.pp2"]
    check_samples_are_told_of_once(base)


def check_samples_are_told_of_once(base: Path) -> None:
    """Ranks of one pipeline read the same micro-batches; the first keeps the ledger."""
    places = sorted(
        (record["step"], number)
        for rank in range(4)
        for record in read_events(log_path(base / "runs" / "travels", rank))
        if record["kind"] == "SamplesTaken"
        for number in record["microbatches"]
    )
    assert places == [(step, number) for step in range(1, 7) for number in range(8)]


def test_validation_sample_and_shares_of_a_pipeline(base: Path) -> None:
    args = {**COMMON, "train__steps": 3, "train__eval_interval": 2, "observe__console": "plain"}
    done = phalanx("train", *train_args(base, **args, run__name="shown", folding__pp=2, launch__ranks=2))
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    histories = [read_history(base / "runs" / "shown", rank=rank) for rank in range(2)]
    for history in histories:
        assert list(history.validations) == [2, 3]
        assert history.steps[3]["mfu"] > 0 and len(history.steps[3]["load_max_over_mean"]) == 6
    assert histories[0].validations[3]["loss"] == histories[1].validations[3]["loss"]


def test_what_is_wrong_with_a_pipeline_is_said_before_anything_starts(base: Path) -> None:
    args = train_args(base, folding__pp=2, pipeline__virtual=3, pipeline__schedule="1f1b", train__global_batch=15)
    done = phalanx("train", *args)
    assert done.returncode == 2
    assert "pipeline.virtual = 3: must be 1: 1f1b has 1 virtual stage a rank" in done.stderr
    assert "train.global_batch = 15" in done.stderr


def test_dry_run_shows_the_stages(base: Path) -> None:
    done = phalanx("train", *train_args(base, folding__pp=2, model__num_layers=4), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "pipeline of 2 ranks x 1 virtual stages, 1f1b" in done.stdout and "stage  1 on rank 1" in done.stdout
    assert "at most" in done.stdout


def test_homes_are_legal() -> None:
    for home in range(len(HOMES)):
        case = case_of(home)
        assert dataclasses.replace(case, num_microbatches=4).pipeline.stages.num_layers == 6

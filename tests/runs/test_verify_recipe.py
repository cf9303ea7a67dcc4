"""A recipe's own step is what `phalanx verify RECIPE` runs, small: a fault in any option of it is found, and what is left out is said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cli.main import main as program
from phalanx.cli.verify import VerifyArgs, _cases_of, _recipe
from phalanx.core.settings import describe_settings
from phalanx.kernels.cpu.fixed_point import FixedSum
from phalanx.models.parallel import KvHeads
from phalanx.plan.mapping.folding import fit_problems, legal_foldings
from phalanx.plan.model.model import PRESETS
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.sums import MessageSums
from phalanx.train.step.transaction import StepParts
from phalanx.verify.carried import CARRIED, ITS_OWN, NO_PART, SHRUNK, UNVERIFIED, not_verified
from phalanx.verify.many_steps import follow
from phalanx.verify.planted import HEALTHY, Fault
from phalanx.verify.session import CaseTask, VerifyJob, run_job
from phalanx.verify.setups import SEQ_LEN, Case, shrink
from phalanx_lab.faults.faults import fault_named
from phalanx_lab.faults.flips import FlippedMessages


def cases_of(settings: str, *, ranks: int = 4) -> list[Case]:
    """Those that the command makes of a recipe with these settings."""
    cases: list[Case] = _cases_of(_recipe(VerifyArgs(ranks=ranks), settings.split()), ranks)
    return cases


def left_out(settings: str, *, ranks: int = 4) -> list[str]:
    recipe = _recipe(VerifyArgs(ranks=ranks), settings.split())
    return not_verified(recipe, _cases_of(recipe, ranks)[-1])


# ---- what is carried -----------------------------------------------------------------------------------------------------------


def test_every_setting_has_one_place() -> None:
    """A setting that is new must be put into the step that is verified, or into the list of what is not."""
    kinds = (CARRIED, SHRUNK, ITS_OWN, NO_PART)
    known = {s.name for s in describe_settings()}
    assert frozenset().union(*kinds, UNVERIFIED) == known
    assert sum(map(len, kinds)) + len(UNVERIFIED) == len(known)


def test_what_a_default_recipe_leaves_out_is_nothing() -> None:
    assert left_out("") == left_out("--resilience.mode exact --launch.threads 1 --resilience.check sums") == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("--optim.state_dtype bfloat16", "optim.state_dtype = bfloat16"),
        ("--optim.clip_norm 0", "optim.clip_norm = 0.0"),
        ("--router.force imbalanced --router.force_skew 1.2", "router.force = imbalanced|router.force_skew = 1.2"),
        ("--dispatch.overlap auto", "dispatch.overlap = auto"),
        ("--folding.pp 2 --pipeline.schedule eager_1f1b --pipeline.extra_warmup auto", "pipeline.extra_warmup = auto"),
        ("--launch.device cuda", "launch.device = cuda"),
        ("--train.deterministic true", "train.deterministic = true"),
        (
            "--resilience.slots_per_rank 3 --resilience.mode exact --launch.threads 1",
            "resilience.replace_interval = 200|resilience.move_beside = true",
        ),
    ],
)
def test_what_is_left_out_is_said(settings: str, says: str) -> None:
    assert left_out(settings) == says.split("|")


def test_options_of_the_step_are_those_of_the_recipe() -> None:
    assert {c.setup.holders for c in cases_of("")} == {2}  # as the run recovers by itself
    assert {c.setup.holders for c in cases_of("--resilience.f 3 --folding.ep 1")} == {3}
    assert {c.setup.holders for c in cases_of("--resilience.heal false")} == {1}
    assert {c.setup.buckets for c in cases_of("--optim.bucket_mb 0")} == {False}
    assert {c.setup.check for c in cases_of("--resilience.check sums")} == {True}
    assert {c.setup.exact for c in cases_of("--resilience.mode exact --launch.threads 1")} == {True}
    assert [c.num_microbatches for c in cases_of("--resilience.mode fast --folding.ep 1", ranks=3)] == [3, 4]
    assert [c.setup.accumulation for c in cases_of("")] == [1, 2]
    assert [c.setup.accumulation for c in cases_of("--folding.pp 4")] == [1, 5]


@pytest.mark.parametrize(("layers", "has"), [((12, 10, 11, 0), [3, 1, 2, 0]), ((1, 1, 1, 30), [1, 1, 1, 3])])
def test_layers_lie_as_unevenly_as_in_the_recipe(layers: tuple[int, ...], has: list[int]) -> None:
    text = ",".join(map(str, layers))
    case = cases_of(f"--folding.pp 4 --model.num_layers {sum(layers)} --pipeline.layers {text}")[0]
    assert [len(stage.layers) for stage in case.pipeline.stages.stages] == has
    few = cases_of(
        "--folding.pp 2 --model.num_layers 2 --model.dense_layers 1 --model.dense_ffn 64 --pipeline.layers 1,1"
    )
    assert len(few[0].setup.spec.moe_layers) >= 2


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("preset", [name for name, spec in PRESETS.items() if spec.mla is None])
def test_key_value_heads_have_as_many_copies_as_in_the_model(preset: str, method: str) -> None:
    """Over tp, and with ulysses over the cp of each of its ranks."""
    spec, copied = PRESETS[preset], 0
    for folding in legal_foldings(16, spec, seq_len=4096, axes=("tp", "cp", "pp"), cp_method=method):
        if SEQ_LEN % (2 * folding.cp * folding.tp):
            continue
        small = shrink(spec, folding)
        assert not fit_problems(folding, small, seq_len=SEQ_LEN, cp_method=method)
        copies = [max(1, folding.tp // s.num_kv_heads) for s in (spec, small)]
        assert copies[0] == copies[1]
        copied += copies[0] > 1
        if method == "ulysses":
            own = [max(1, folding.cp // max(1, s.num_kv_heads // folding.tp)) for s in (spec, small)]
            assert own[0] == own[1]
    assert copied or (preset, method) != ("qwen3-30b-a3b", "ring")


# ---- planted faults ------------------------------------------------------------------------------------------------------------


def _wrong_copies(parts: StepParts) -> StepParts:
    for module in parts.model.modules():
        heads = getattr(module, "kv_heads", None)
        if isinstance(heads, KvHeads) and heads.copies > 1:
            heads.whole = _grown(heads.whole)  # type: ignore[method-assign]
    return parts


def _grown(whole: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(k: torch.Tensor, v: torch.Tensor, *, op_id: str) -> Any:
        found = whole(k, v, op_id=op_id)
        for x in found:
            x.register_hook(lambda g: 1.5 * g)
        return found

    return wrong


class _Flipped(Collectives):
    """A word of every message to rank 1 is another one on its way."""

    def __init__(self, *, sums: MessageSums | None = None, **more: Any) -> None:
        if sums is not None and sums.rank == 1:
            sums = FlippedMessages(1)
            sums.way.passes = _low  # type: ignore[method-assign]
        super().__init__(sums=sums, **more)


def _low(place: str, x: torch.Tensor) -> None:
    if x.numel() and x.is_floating_point():
        x.view(-1).view(torch.uint8)[0] ^= 1


FAULTS = {
    "--folding.tp 4 --model.num_kv_heads 2 --model.num_heads 8": Fault(
        name="copies", summary="gradients of copied heads are wrong", alter=_wrong_copies
    ),
    "--resilience.f 2 --folding.ep 2": fault_named("copy-without-gradient"),
    "--resilience.check sums --folding.ep 2": Fault(
        name="flipped", summary="messages change on their way, as checks see", comms=_Flipped
    ),
    "--resilience.mode fast --folding.ep 2 --train.global_batch 48": Fault(
        name="equal shares", summary="divided as if all had as many",
        alter=lambda parts: dataclasses.replace(parts, samples=None),
    ),
}  # fmt: skip
"""Settings -> what goes wrong in nothing but their option."""


def failures(settings: str, fault: Fault) -> list[list[str]]:
    tasks = [CaseTask(case, fault) for case in cases_of(settings)]
    return [r.failures for r in run_job(VerifyJob(tasks=tasks, world=4, dtype=torch.float64, timeout_s=15.0))]


@pytest.mark.ranks
@pytest.mark.parametrize("settings", FAULTS)
def test_a_fault_in_an_option_of_the_recipe_is_found(settings: str) -> None:
    assert failures(settings, HEALTHY) == [[], []]
    assert failures(settings, FAULTS[settings])[-1]


@pytest.mark.ranks
def test_a_fault_in_fixed_point_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "--resilience.mode exact --launch.threads 1 --folding.ep 2"
    assert failures(settings, HEALTHY) == [[], []]
    right = FixedSum.add_slot

    def wrong(self: FixedSum, slot: int, x: torch.Tensor, **more: Any) -> None:
        right(self, slot, x * (1 + 1e-10), **more)

    monkeypatch.setattr(FixedSum, "add_slot", wrong)
    for found in failures(settings, HEALTHY):
        assert any("moe.experts" in text for text in found)


@pytest.mark.ranks
def test_many_steps_have_the_options_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches on two ranks, added up in fixed point."""
    case = cases_of("--resilience.mode exact --launch.threads 1 --folding.ep 2 --train.global_batch 24", ranks=2)[-1]
    assert case.setup.exact and case.num_microbatches == 3
    assert follow(case, steps=2).failures == []
    right = FixedSum.add

    def wrong(self: FixedSum, x: torch.Tensor, **more: Any) -> None:
        right(self, x * (1 + 1e-4), **more)

    monkeypatch.setattr(FixedSum, "add", wrong)
    assert follow(case, steps=3).failures


# ---- the command ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("more", [[], ["--steps", "2"]])
def test_the_command_says_what_is_not_verified(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--optim.state_dtype",
        "bfloat16",
        "--optim.clip_norm",
        "0",
        "--model.preset",
        "tiny",
        "--data.tokenizer",
        "byte",
    ]
    out = tmp_path / "v.json"
    assert program(["verify", "--ranks", "2", *words, *more, "--json", str(out)]) == 0
    left = ["optim.state_dtype = bfloat16", "optim.clip_norm = 0.0"]
    assert json.loads(out.read_text())["not_verified"] == left
    assert f"not verified: {', '.join(left)}\n" in capsys.readouterr().out

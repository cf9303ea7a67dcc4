"""Whether a run fits a GPU: the room of a card, the nearest run that fits, and a refusal that names it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.launching import read_args
from phalanx.cli.predicting.cards import card_sold_as, check_card, nearest_fit, room_of, smallest_card, with_settings
from phalanx.cli.predicting.room import has_room, memory_problems
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.plan.mapping import plain_placement, resolve_mapping
from phalanx.plan.model import PRESETS
from phalanx.simulate.memory import estimate_memory
from phalanx.simulate.memory.memory import Moment, with_idle_heap

SPEC = PRESETS["qwen3-30b-a3b"]
WORLD = 8


def recipe_of(*words: str) -> Recipe:
    base = "--model.preset qwen3-30b-a3b --train.seq_len 4096 --train.micro_batch 2 --train.global_batch 16 --folding.ep 8 --launch.ranks 8"
    return load_recipe(None, [*base.split(), "--launch.device", "cuda", "--train.dtype", "bfloat16", *words])


def peak(recipe: Recipe) -> int:
    folding = resolve_mapping(recipe.folding, SPEC, world=WORLD, seq_len=recipe.train.seq_len)
    placement = plain_placement(SPEC.num_experts, folding.of_rank(0))
    return estimate_memory(recipe, SPEC, folding, placement=placement).peak_bytes


def test_a_card_keeps_some_for_itself() -> None:
    """Of what nvidia-smi shows of an H100 (81,559 MiB), and torch of an A100 of 40 GB (39.5 GiB)."""
    assert 0.91 < room_of(80) / (81_559 * 2**20) < 0.95 and 0.88 < room_of(40) / (39.5 * 2**30) < 0.95


def test_what_fits_is_told_and_a_card_that_is_not_known_asked_for() -> None:
    how = {"world": WORLD, "peak_bytes": 10**10, "peak": peak}
    assert "fits: 9.31 GiB of the 74.5 GiB that a card of 80 GB leaves" in check_card(
        recipe_of(), SPEC, card=card_sold_as(80.0), **how
    )
    assert "--card-gb 80" in check_card(recipe_of(), SPEC, card=None, **how)


def test_the_nearest_run_changes_as_little_as_it_can() -> None:
    recipe = recipe_of()
    found = nearest_fit(recipe, SPEC, world=WORLD, room=room_of(80), peak=peak)
    assert found is not None and found.peak_bytes == peak(with_settings(recipe, found.settings)) <= room_of(80)
    for name in found.settings:
        kept = {n: value for n, value in found.settings.items() if n != name}
        assert peak(with_settings(recipe, kept)) > room_of(80), f"{name} need not change"
    assert not any(name.startswith("folding") for name in found.settings)


def test_another_mapping_is_the_last_way() -> None:
    """Experts of one rank do not fit whatever else it saves, until they are spread further."""
    recipe = recipe_of("--folding.ep", "2")
    saved = {"optim.state_dtype": "bfloat16", "optim.zero": 2, "train.recompute": "full", "train.micro_batch": 1}
    room = peak(with_settings(recipe, saved)) - 1
    found = nearest_fit(recipe, SPEC, world=WORLD, room=room, peak=peak)
    assert found is not None and found.peak_bytes <= room
    assert any(name.startswith("folding.") for name in found.settings)


def test_what_cannot_fit_is_said() -> None:
    assert nearest_fit(recipe_of(), SPEC, world=WORLD, room=10**9, peak=peak) is None
    with pytest.raises(ConfigError, match="use more GPUs"):
        check_card(recipe_of(), SPEC, world=WORLD, peak_bytes=10**12, card=card_sold_as(4.0), peak=peak)


def test_a_refusal_names_the_run_that_fits() -> None:
    recipe = recipe_of()
    with pytest.raises(
        ConfigError,
        match=r"of 80 GB leaves 74.5 GiB for tensors and NCCL; --optim.state_dtype bfloat16 .*--train.recompute selective takes",
    ):
        check_card(recipe, SPEC, world=WORLD, peak_bytes=peak(recipe), card=card_sold_as(80.0), peak=peak)


def test_a_run_that_would_be_refused_is_not_named() -> None:
    """Exact mode has no sharded gradients."""
    recipe = recipe_of("--resilience.mode", "exact", "--launch.device", "cpu", "--launch.threads", "1")
    tried: list[Recipe] = []

    def remember(other: Recipe) -> int:
        tried.append(other)
        return 10**10

    nearest_fit(recipe, SPEC, world=WORLD, room=10**9, peak=remember)
    assert tried and not any(other.optim.zero == 2 for other in tried)
    assert with_settings(recipe, {"optim.zero": 2}) == replace(recipe, optim=replace(recipe.optim, zero=2))


@pytest.mark.parametrize("words", [["--card-gb", "80"], ["--card-gb=80"], ["--card-gb", "24", "--card-gb=80"]])
def test_the_size_of_a_card_is_an_argument_of_a_dry_run_and_the_last_one_counts(words: list[str]) -> None:
    request = read_args(["tiny.toml", "--dry-run", *words, "--train.steps", "3"])
    assert request.card_gb == 80 and request.recipe_path == "tiny.toml" and request.overrides == ("--train.steps", "3")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--card-gb", "80"], "goes with --dry-run alone"),
        (["--dry-run", "--card-gb", "big"], "memory of a GPU"),
        (["--dry-run", "--card-gb"], "memory of a GPU"),
        (["--dry-run", "--card-gb", "nan"], "memory of a GPU"),
        (["--dry-run", "--card-gb", "0"], "memory of a GPU"),
    ],
)
def test_a_size_that_is_none_is_refused(words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_args(words)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for `nvidia-smi`: cards of 80, 24 and 80 GB."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, 81559\\n1, 24564\\n2, 81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


@pytest.mark.usefixtures("smi")
def test_the_smallest_card_that_may_be_used() -> None:
    def room(named: str | None) -> int:
        card = smallest_card({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
        assert card is not None
        return card.room_bytes

    assert room(None) == room("0,1") == room("GPU-8f") < room("2, 0") == room("0")
    assert 0.9 < room("0") / (81_559 * 2**20) < 0.95


def test_no_card_is_known_without_the_program(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert smallest_card({}) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert smallest_card({}) is None


@pytest.mark.usefixtures("smi")
def test_a_start_refuses_what_no_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    large = load_recipe(None, ["--model.preset", "mixtral-8x7b", "--launch.ranks", "2", "--launch.device", "cuda", "--data.tokenizer", "byte", "--folding.ep", "2"])  # fmt: skip
    (problem,) = memory_problems(large)
    assert problem.where == "memory of a rank" and "a card of 24 GB leaves for tensors and NCCL" in problem.rule
    assert problem.hint.endswith("--force starts it all the same")
    assert has_room(large), "of processors"
    small = load_recipe(None, ["--model.preset", "tiny", "--launch.ranks", "2", "--launch.device", "cuda"])
    assert memory_problems(small) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert memory_problems(large) == [], "nothing is known"


def test_all_of_the_heap_that_was_ever_needed_lies_idle_beside_blocks_that_are_mapped() -> None:
    moments = [
        Moment(name=str(total), terms={"a": total, "heap holes": 0}, mapped=mapped)
        for total, mapped in ((10, 0), (4, 0), (6, 3))
    ]
    assert [moment.total for moment in with_idle_heap(moments)] == [10, 4, 10 + 3]

"""`launch.device = "auto"`: decided when a recipe is read, by the GPUs that there are; a plan without a machine counts it as cpu."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.api.recipe_words import recipe_words
from phalanx.cli.launching import Request, read_recipe
from phalanx.core.config import LaunchConfig, PipelineConfig, Recipe, TrainConfig
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.recipe import Device, dump_recipe, load_recipe
from phalanx.plan import run_problems
from phalanx.runtime.processes import device_here
from phalanx.train.resume import recipe_to_keep


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "device"), [(0, 1, "cpu"), (0, 64, "cpu"), (8, 8, "cuda"), (8, 1, "cuda")]
)
def test_a_gpu_for_every_rank_or_none_at_all(num_gpus: int, ranks: int, device: str) -> None:
    assert device_here(ranks, num_gpus=num_gpus) == device


def test_too_few_gpus_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"2 for 4 ranks; --launch.device cpu, or 2 ranks \(--launch.ranks 2\)"):
        device_here(4, num_gpus=2)


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_a_recipe_is_read_for_this_machine(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("RANK", raising=False)

    def read(*words: str) -> Recipe:
        request = Request(recipe_path=None, overrides=("--launch.ranks", "4", *words), dry_run=False)
        return read_recipe(request, world=None)

    assert read("--launch.device", "cpu").launch.device == "cpu"
    assert read("--launch.device", "cuda").launch.device == "cuda"  # its ranks say what is missing
    if num_gpus == 1:
        with pytest.raises(ConfigError, match=r"launch.device = 'auto': .* 1 for 4 ranks"):
            read()
    else:
        recipe = read("--train.dtype", "auto")
        assert recipe.launch.device == ("cuda" if num_gpus else "cpu")
        kept = dump_recipe(recipe_to_keep(recipe))
        assert f'device = "{recipe.launch.device}"' in kept, "the file that a run keeps gives the same run again"
        assert recipe.train.dtype == "bfloat16" or not num_gpus, "the type follows the device"


def test_a_launcher_says_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert read_recipe(Request(recipe_path=None, overrides=(), dry_run=False), world=4).launch.device == "cuda"


def test_a_recipe_of_a_program_goes_to_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = phalanx.load_recipe("tiny")
    assert recipe.launch.device == "auto" and phalanx.predict(recipe, "h100x4").step.seconds > 0
    monkeypatch.setattr("phalanx.cli.launching.request._device_here", lambda recipe: "cuda")
    with recipe_words(recipe, {"run.name": "here"}) as words:
        read = read_recipe(Request(recipe_path=words.path, overrides=words.overrides, dry_run=False), world=None)
    assert (read.launch.device, read.run.name) == ("cuda", "here")
    assert '# pair_passes: no effect where launch.device = "cuda"' in dump_recipe(recipe)


def test_what_is_wrong_with_a_recipe_of_a_program_names_no_file_of_ours() -> None:
    wrong = Recipe(train=TrainConfig(steps=0), pipeline=PipelineConfig(virtual=3))
    for work in (phalanx.load_recipe, partial(phalanx.predict, cluster="h100x4"), phalanx.train_model):
        with pytest.raises(ConfigError, match=r"recipe: pipeline.virtual = 3: has no effect") as caught:
            work(wrong)
        assert {p.where for p in caught.value.problems} == {"recipe: train.steps", "recipe: pipeline.virtual"}
    with pytest.raises(PhalanxError, match=r"recipe: train.steps = 0: must be at least 1"):
        phalanx.verify_mapping(wrong)


def test_its_problem_comes_with_the_others() -> None:
    def none(recipe: Recipe) -> Device:
        return device_here(recipe.launch.ranks, num_gpus=1)

    words = ["--launch.ranks", "2", "--train.steps", "0"]
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, words, auto_device=none)
    assert {p.where for p in caught.value.problems} == {"--train.steps", "launch.device"}


def test_nobody_looks_where_a_word_is_wrong_and_nothing_is_said_of_what_depends_on_it() -> None:
    def looks(recipe: Recipe) -> Device:
        raise AssertionError

    words = [
        "--nonsense",
        "1",
        "--dispatch.overlap",
        "fused",
        "--folding.ep",
        "2",
        "--optim.bucket_mb",
        "0",
        "--kernels.compiled",
        "false",
    ]
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, words, check=lambda r: run_problems(r, world=2), auto_device=looks)
    assert [p.where for p in caught.value.problems] == ["--nonsense"]


def test_nobody_has_looked(tmp_path: Path) -> None:
    """Then it stays as it is, so that what is written reads as the same recipe, and counts as cpu."""
    path = tmp_path / "a.toml"
    path.write_text(dump_recipe(Recipe()))
    assert load_recipe(path) == Recipe() and Recipe().launch.device == "auto"
    assert Recipe().launch.device_type == "cpu" and LaunchConfig(device="cuda").device_type == "cuda"


def test_a_launcher_that_binds_a_gpu_to_each_process_means_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert read_recipe(Request(recipe_path=None, overrides=(), dry_run=False), world=4).launch.device == "cuda"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="1 for 4 ranks"):
        read_recipe(Request(recipe_path=None, overrides=(), dry_run=False), world=4)


def test_looking_makes_no_context_of_cuda() -> None:
    """The parent of the ranks forks: a context would not survive that."""
    code = "import torch; from phalanx.runtime.processes import device_here; device_here(0); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Recipes that come with Phalanx: each fits its cluster by the dry run, is as fast as its head says, and has the mapping that the search finds; `phalanx recipes` lists and copies them."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.cli.launching import Request, read_recipe
from phalanx.cli.main import main
from phalanx.cli.predicting.dry_run import card_bytes, machine_of, peak_bytes
from phalanx.cli.predicting.packaged import packaged_recipes, read_predicted
from phalanx.cli.predicting.recipe import device_of, predict_on
from phalanx.core.config import Recipe
from phalanx.core.recipe import load_recipe
from phalanx.core.rules import value_of
from phalanx.plan.recovery import moment_bytes
from phalanx.simulate import resolve_recipe
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import Job, RouterModel
from phalanx.simulate.search import base_mapping, search
from phalanx.simulate.step import predict
from phalanx.simulate.step.device_memory import FIXED_BYTES

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
HERE = ("laptop", "tiny")
SMALL = ("olmoe-1b-7b-8", "mixtral-8x7b-16")
"""Whose search takes two seconds."""
LARGE = sorted(set(packaged_recipes()) - {*HERE, *SMALL})
EACH = [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]


def read(name: str) -> tuple[Recipe, GpuCluster]:
    found = read_predicted(packaged_recipes()[name].read_text())
    assert found is not None, f"{name} says nothing of its cluster"
    cluster = parse_cluster(found.cluster)
    request = Request(recipe_path=name, overrides=(), dry_run=True)
    return read_recipe(request, world=cluster.world, auto_device=lambda _: device_of(cluster)), cluster


def test_every_model_is_there() -> None:
    models = {load_recipe(path).model.preset for path in packaged_recipes().values()}
    real = {"olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3"}
    assert models == real | set(HERE)
    for preset in real:
        assert sum(name.startswith(f"{preset}-") for name in packaged_recipes()) == 2


@pytest.mark.parametrize("name", EACH)
def test_it_fits_and_is_as_its_head_says(name: str) -> None:
    recipe, cluster = read(name)
    machine = machine_of(cluster)
    peak = peak_bytes(recipe, machine, world=cluster.world)
    of_card = card_bytes(recipe, machine, world=cluster.world)
    assert machine.card is not None and of_card <= machine.card.room_bytes
    p = predict_on(recipe, resolve_recipe(recipe), cluster)
    assert p.peak_bytes == pytest.approx(of_card + FIXED_BYTES, rel=0.02)  # a search counts as the dry run does
    said = read_predicted(packaged_recipes()[name].read_text())
    assert said is not None and said.memory_bytes == pytest.approx(peak, rel=0.005)
    assert said.step_s == pytest.approx(p.step.seconds, rel=0.005)
    assert said.mfu == pytest.approx(p.mfu("causal"), abs=0.002)
    assert recipe.run.name == name == f"{recipe.model.preset}-{cluster.world}"


@pytest.mark.parametrize("name", EACH)
def test_its_mapping_is_that_of_the_search(name: str) -> None:
    """Within 5 % of the first of `phalanx search`, whether that fits by the dry run or not; both on the clock of a recipe."""
    recipe, cluster = read(name)
    spec, train = resolve_recipe(recipe), recipe.train
    job = Job(spec=spec, seq_len=train.seq_len, global_batch=train.global_batch)
    base = replace(base_mapping(RouterModel(kind="learned")), moment_bytes=moment_bytes(recipe))
    best = search(job, cluster, base=base).best[0]
    assert predict_on(recipe, spec, cluster).step.seconds <= 1.05 * predict(job, best.mapping, cluster).step.seconds


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_its_head_and_its_lines_say_what_to_know(name: str) -> None:
    text = packaged_recipes()[name].read_text()
    head = text.partition("\n\n[")[0]
    for word in ("Predicted, not measured", "arXiv", "--dry-run --cluster h100x", "Mapping: "):
        assert word in head
    for key in ("name", "sources", "tokenizer", "steps", "global_batch", "lr", "ranks"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{key} = "))
        assert "  # " in line, f"{key}: nothing beside it"
    assert len(text.splitlines()) < 70


def test_the_table_is_that_of_the_recipes() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "recipes.json").read_text())["figures"]
    assert {name.rpartition(" s")[0] for name in figures if name.endswith(" s")} == {*SMALL, *LARGE}
    for name in (*SMALL, *LARGE):
        said = read_predicted(packaged_recipes()[name].read_text())
        assert said is not None and figures[f"{name} s"] == pytest.approx(said.step_s, abs=2e-3)
        assert figures[f"{name} over best"] <= 1.05


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_recipes", ROOT / "scripts" / "make_recipes.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["make_recipes"] = module
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("preset", "world"), [("olmoe-1b-7b", 8), ("mixtral-8x7b", 16)])
def test_the_command_writes_them(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, world: int
) -> None:
    monkeypatch.setattr(script, "PACKAGED", tmp_path)
    name = f"{preset}-{world}"
    script.write(name, next(m for m in script.MODELS if m.preset == preset), parse_cluster(f"h100x{world}"))
    assert (tmp_path / f"{name}.toml").read_text() == packaged_recipes()[name].read_text()


def test_the_settings_of_the_command_are_in_all_recipes(script: ModuleType) -> None:
    """Without the search, whose mapping takes its time."""
    for model in script.MODELS:
        for world in model.worlds:
            path = packaged_recipes()[f"{model.preset}-{world}"]
            recipe, text = load_recipe(path), path.read_text()
            assert {name: value_of(recipe, name) for name in model.settings} == dict(model.settings)
            assert all(words in text for words in (*model.source, *model.comments.values()))


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("tensors") and "NCCL takes more" in lines[-1], "the memory that is shown is not all"
    assert [line.split()[0] for line in lines[1:3]] == ["tiny", "laptop"]
    (line,) = (line for line in lines if line.startswith("mixtral-8x7b-16 "))
    cells = line.split()
    assert (
        cells[:6] == ["mixtral-8x7b-16", "mixtral-8x7b", "46.7B", "12.9B", "16", "h100x16"]
        and "GiB" in line
        and "%" in line
    )


def test_one_is_copied_and_never_over_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my own.toml"
    assert main(["recipes", "laptop", "--out", str(out)]) == 0
    assert out.read_text() == packaged_recipes()["laptop"].read_text()
    assert capsys.readouterr().out == f"{out}: next\n  phalanx train '{out}'\n"
    assert main(["recipes", "laptop"]) == 0 and capsys.readouterr().out == out.read_text()
    assert main(["recipes", "tiny", "--out", str(out)]) == 2 and "is there already" in capsys.readouterr().err
    assert main(["recipes", "mixtral-8x7b"]) == 2 and "mixtral-8x7b-" in capsys.readouterr().err
    assert main(["recipes", "--out", str(out)]) == 2 and "needs the name" in capsys.readouterr().err
    big = tmp_path / "big.toml"
    assert main(["recipes", "mixtral-8x7b-64", "--out", str(big)]) == 0
    commands = capsys.readouterr().out.splitlines()[1:]
    assert [shlex.split(line)[1:] for line in commands] == [
        ["train", str(big), "--dry-run", "--cluster", "h100x64"],
        ["launch", "slurm", str(big), "--nodes", "8"],
    ]


def test_a_name_is_a_recipe_where_no_such_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder is no recipe
    assert load_recipe("tiny") == load_recipe(packaged_recipes()["tiny"]) == load_recipe("recipes/tiny.toml")
    (tmp_path / "laptop").write_text("[train]\nsteps = 7\n")
    assert load_recipe("laptop").train.steps == 7
    assert main(["train", "mixtral-8x7b", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "is not a file" in said and "mixtral-8x7b-" in said and "phalanx recipes" in said


def test_what_is_predicted_stands_in_one_line() -> None:
    text = "# A.\n# predicted: cluster=h100x8 step_s=1.500 mfu=0.400 memory_bytes=1000\n"
    found = read_predicted(text)
    assert found is not None and (found.cluster, found.step_s, found.mfu, found.memory_bytes) == (
        "h100x8",
        1.5,
        0.4,
        1000,
    )
    assert read_predicted(text.replace("mfu=0.400 ", "")) is None

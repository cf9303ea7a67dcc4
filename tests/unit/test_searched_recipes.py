"""What `phalanx search --recipe` writes is short, startable, and fits by the dry run; where nothing does, it says how many more GPUs would."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.launching import Request, read_recipe
from phalanx.cli.main import main
from phalanx.cli.predicting import searched
from phalanx.cli.predicting.cards import Card
from phalanx.cli.predicting.dry_run import machine_of
from phalanx.core.recipe import load_recipe
from phalanx.plan.model import PRESETS
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import Job
from phalanx.simulate.search import SearchResult, search

pytestmark = pytest.mark.unit
SEARCH = ("search", "--model", "olmoe-1b-7b", "--cluster", "h100x16", "--batch", "64", "--exact", "6")
SPEC = PRESETS["olmoe-1b-7b"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "found.toml"
    assert main([*SEARCH, "--recipe", str(path)]) == 0
    return path


def test_it_is_short_and_says_what_a_person_changes(written: Path) -> None:
    text = written.read_text()
    lines = [line for line in text.splitlines() if line]
    assert len(lines) < 45 and "seed" not in text and "resilience" not in text
    for name in ("name = ", "sources = ", "tokenizer = ", "steps = ", "ranks = ", "# lr = "):
        (line,) = (line for line in lines if line.startswith(name))
        assert "  # " in line, f"{name}: a person changes it, and nothing stands beside it"
    recipe = load_recipe(written)
    assert (recipe.train.seq_len, recipe.train.global_batch, recipe.run.name) == (4096, 64, "olmoe-1b-7b-16")


def test_every_launcher_takes_it(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.ranks is that of a host; torchrun's number counts under torchrun, the cluster's in a dry run."""
    assert load_recipe(written).launch.ranks == 8
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    request = Request(recipe_path=str(written), overrides=("--run.folder", "runs"), dry_run=False)
    assert read_recipe(request, world=16, several_machines=True).launch.ranks == 16


def test_the_dry_run_has_a_verdict_in_the_second_command(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(written), "--dry-run", "--cluster", "h100x16"]) == 0
    text = capsys.readouterr().out
    assert "verdict      fits: " in text and " of the 74.8 GiB that a GPU of h100x16 leaves" in text
    assert "predicted    step " in text and "MFU" in text and "tokens/s" in text and "300 steps take" in text
    assert " GB" not in text.replace("GiB", ""), "one unit of memory"
    if "stage  0" in text:
        assert "of the work  embedding" in text


def test_the_step_that_the_search_ends_with_is_that_of_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its list is ranked with even routing; the recipe that it writes has a learned router."""
    words = ["--model", "mixtral-8x7b", "--cluster", "h100x16", "--batch", "64", "--exact", "3"]
    path = str(tmp_path / "found.toml")
    assert main(["search", *words, "--recipe", path]) == 0
    told = re.search(r"by the dry run a step takes ([^,]+), a rank (\S+ \S+)\n", capsys.readouterr().out)
    assert told is not None and main(["train", path, "--dry-run", "--cluster", "h100x16"]) == 0
    text = capsys.readouterr().out
    assert f"predicted    step {told[1]}, MFU" in text and f"fits: {told[2]} of" in text


def test_what_does_not_fit_is_refused_with_what_would(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train.micro_batch", "16", "--train.global_batch", "256", "--train.recompute", "none"]
    words += ["--folding.pp", "1", "--pipeline.schedule", "none", "--pipeline.virtual", "none"]
    assert main(["train", str(written), *words, "--dry-run", "--cluster", "h100x16"]) == 2
    said = capsys.readouterr()
    assert "predicted    step " in said.out and "verdict" not in said.out
    assert "does not fit: a GPU of h100x16 leaves 74.8 GiB" in said.err and " takes " in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "h100x16"], "goes with --dry-run alone"),
        (["--dry-run", "--cluster", "h100x16", "--card-gb", "80"], "--card-gb has no effect"),
        (["--dry-run", "--cluster", "x100x16"], "x100"),
        (["--dry-run", "--cluster", "h100x16", "--launch.ranks", "4"], "h100x16 has 16 ranks"),
        (["--dry-run", "--cluster"], "--cluster"),
    ],
)
def test_wrong_clusters_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "--train.micro_batch", "1", *words]) == 2
    assert said in capsys.readouterr().err


def _found(cluster: GpuCluster, room: float) -> SearchResult:
    return search(Job(spec=SPEC, seq_len=4096, global_batch=64), cluster, keep=6, room=room)


def test_it_goes_down_the_list_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cards that are smaller than the search believes."""
    cluster = parse_cluster("h100x16")
    result = _found(cluster, 1.0)
    first, _ = searched.fastest_fitting(result, _found)
    assert first is not None and first.number == 1 and not first.passed_over
    least = first.peak_bytes - 1

    def smaller(where: GpuCluster) -> object:
        return replace(machine_of(where), card=Card(name="small", room_bytes=least))

    monkeypatch.setattr(searched, "machine_of", smaller)
    found, _ = searched.fastest_fitting(result, _found)
    assert found is not None and found.peak_bytes <= least and found.passed_over
    assert "by the dry run" in found.passed_over[0]
    least = 10**9
    none, why = searched.fastest_fitting(result, _found)
    assert none is None and why


def test_a_larger_cluster_is_named_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.toml"
    words = ["--model", "mixtral-8x7b", "--cluster", "h100x8", "--batch", "64", "--exact", "4", "--recipe", str(out)]
    assert main(["search", *words]) == 2
    said = capsys.readouterr().err
    assert "nothing fits on h100x8" in said and "more GPUs would: --cluster h100x" in said and not out.exists()


def test_what_the_search_may_fill_is_bounded() -> None:
    result = _found(parse_cluster("h100x16"), 0.5)
    assert result.best and all(p.peak_bytes <= 0.5 * 80 * 2**30 for p in result.best)


def test_the_next_commands_are_said(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my b.toml"
    assert main([*SEARCH, "--recipe", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"phalanx train '{path}' --dry-run --cluster h100x16" in text
    assert f"phalanx launch slurm '{path}' --nodes 2" in text
    assert path.read_text() == written.read_text(), "the same search writes the same"

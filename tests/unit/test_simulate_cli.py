"""`phalanx simulate` and `phalanx search`: what they print and write, recipes in and out, errors all at once."""

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from phalanx.cli.main import main

pytestmark = pytest.mark.unit
RECIPE = """
[model]
preset = "mixtral-8x22b"
vocab = 32000
[router]
force = "balanced"
[folding]
tp = 2
pp = 8
ep = 8
[pipeline]
schedule = "interleaved_1f1b"
virtual = 7
[train]
seq_len = 4096
global_batch = 256
micro_batch = 1
[launch]
device = "cuda"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return path


def test_a_step_of_a_recipe(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"x.{name}" for name in ("json", "trace", "svg")}
    wanted = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main(["simulate", str(recipe), "--cluster", "h100x128", *wanted]) == 0
    text = capsys.readouterr().out
    result = json.loads(files["json"].read_text())
    assert result["fits"] and len(result["memory"]) == 8
    assert result["seconds"]["p10"] < result["seconds"]["p50"] < result["seconds"]["p90"]
    assert sum(result["parts"].values()) == pytest.approx(result["seconds"]["p50"])
    assert f"{result['mfu']['causal']:.1%}" in text and "fits: stage 0" in text
    assert json.loads(files["trace"].read_text())["traceEvents"]
    xml.etree.ElementTree.fromstring(files["svg"].read_text())


def test_overrides_and_what_does_not_fit(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["simulate", str(recipe), "--cluster", "h100x128"]
    assert main([*plain, "--train.micro_batch", "4"]) == 2
    assert "DOES NOT FIT: stage 0" in capsys.readouterr().out
    assert main([*plain, "--train.micro_batch", "4", "--train.recompute", "full"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "h10x128", "--folding.tp", "5"], ["h10", "did you mean 'h100'"]),
        (
            ["--cluster", "h100x128", "--folding.tp", "5", "--train.global_batch", "0"],
            ["folding.tp", "train.global_batch"],
        ),
        (["--cluster", "h100x128", "--train.dtype", "float64"], ["clusters compute in bf16 or fp32"]),
        (["--cluster", "h100x12"], ["folding"]),
        (["--cluster", "h100x128", "--kernels.implementation", "reference"], ["plain kernels are not modelled"]),
    ],
)
def test_errors_come_all_at_once(
    recipe: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(recipe), *arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert "Traceback" not in error


def test_another_device_than_the_recipe_names_is_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device, told in (("cuda", False), ("cpu", True)):
        main(["simulate", str(recipe), "--cluster", "h100x128", "--launch.device", device])
        assert ("predicted as if it said so" in capsys.readouterr().err) is told


def test_a_mapping_without_a_pipeline_is_drawn_too(recipe: Path, tmp_path: Path) -> None:
    flat = ["--folding.pp", "1", "--cluster", "h200x128", "--train.recompute", "full"]
    text = RECIPE.replace("[pipeline]", "").replace('schedule = "interleaved_1f1b"', "").replace("virtual = 7", "")
    recipe.write_text(text)
    picture, trace = tmp_path / "x.svg", tmp_path / "x.json"
    main(["simulate", str(recipe), *flat, "--svg", str(picture), "--trace", str(trace)])
    assert "<svg" in picture.read_text() and json.loads(trace.read_text())["traceEvents"]


def test_hardware_is_listed_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "clusters"]) == 0
    assert "b200" in capsys.readouterr().out
    assert main(["simulate", "clusters", "h100"]) == 0
    assert "data sheet" in capsys.readouterr().out
    assert main(["simulate", "clusters", "h1000"]) == 2


def test_a_search_and_the_recipe_of_its_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, found = tmp_path / "s.json", tmp_path / "p.svg", tmp_path / "w.toml"
    words = "--model olmoe-1b-7b --cluster h100x16 --batch 128 --exact 12 --routing balanced"
    assert main(["search", *words.split(), "--json", str(out), "--svg", str(picture), "--recipe", str(found)]) == 0
    text = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert "best choice of each folding" in text and "even routing" in text
    assert result["choices"] > result["evaluated"] >= result["fitting"]
    times = [entry["seconds"] for entry in result["best"]]
    assert times == sorted(times) and all(entry["reason"] for entry in result["best"])
    xml.etree.ElementTree.fromstring(picture.read_text())
    again = tmp_path / "again.json"
    main(["simulate", str(found), "--cluster", "h100x16", "--json", str(again), "--router.force", "balanced"])
    assert json.loads(again.read_text())["seconds"]["p50"] == pytest.approx(times[0], rel=0.01)
    assert json.loads(again.read_text())["hash"] == result["best"][0]["hash"]


def test_a_search_names_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--model", "mixtrl-8x7b", "--cluster", "x100x8", "--batch", "0"]) == 2
    error = capsys.readouterr().err
    assert "3 problems" in error and "mixtral-8x7b" in error
    assert main(["search", "--model", "mixtral-8x22b", "--cluster", "h100x8"]) == 2
    assert "nothing fits" in capsys.readouterr().err


def test_unequal_shares_of_a_step_take_as_long_as_the_largest(recipe: Path, tmp_path: Path) -> None:
    """dp is 8: 250 micro-batches are 32 rounds, in which six ranks have one micro-batch less."""
    found = {}
    for batch in ("256", "250"):
        file = tmp_path / f"{batch}.json"
        shares = ["--resilience.mode", "fast", "--train.global_batch", batch]
        assert main(["simulate", str(recipe), "--cluster", "h100x128", *shares, "--json", str(file)]) == 0
        found[batch] = json.loads(file.read_text())
    assert found["250"]["microbatches"] == found["256"]["microbatches"] == 32
    assert found["250"]["seconds"] == found["256"]["seconds"]
    assert found["250"]["tokens_per_s"] == pytest.approx(found["256"]["tokens_per_s"] * 250 / 256)


def test_without_such_a_mode_shares_are_equal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(recipe), "--cluster", "h100x128", "--train.global_batch", "250"]) == 2
    assert "train.global_batch" in capsys.readouterr().err


# ---- rates ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given", "convention", "asked", "wanted"),
    [
        # (arXiv 2504.14960, tables 2 and 3): 487.7 TFLOPS are 49.3 % of 989.5
        ("--model mixtral-8x22b", "--tflops 487.7", "causal", ("mfu_pct", "causal"), 49.3),
        # MegaScale (NSDI 24, table 2): 32.0 s and 6.34 s of 768 and 6144 sequences are 65.3 % and 55.2 % of an A100
        ("--model GPT3-175B --seq 2048 --cluster a100x256 --batch 768", "--step 32.0", "", ("mfu_pct", "causal"), 65.3),
        ("--model GPT3-175B --seq 2048 --cluster a100x12288 --batch 6144", "--step 6.34", "", ("mfu_pct", "causal"), 55.2),
        # Llama 3 (arXiv 2407.21783, table 4): 430 TFLOPS are 43 %
        ("--model Llama3.1-405B --seq 8192", "--tflops 430", "causal", ("mfu_pct", "causal"), 43.5),
        # reference of the subject (folding.md 2.4): 1,946 tokens/s of Mixtral-8x22B are 487.7 TFLOPS, all scores counted
        ("--model Mixtral-8x22B", "--tokens 1946", "", ("tflops_per_rank", "full"), 487.7),
        ("--model Mixtral-8x22B-G8T8", "--tokens 1909", "", ("mfu_pct", "full"), 28.8),
        ("--model Qwen2-57B-A14B", "--tokens 4428", "", ("mfu_pct", "full"), 39.0),
        ("--model Llama3-8x70B", "--tokens 523", "", ("mfu_pct", "full"), 41.6),
    ],
)  # fmt: skip
def test_published_rates_in_other_units(
    words: str, given: str, convention: str, asked: tuple[str, str], wanted: float, tmp_path: Path
) -> None:
    """To 1 %."""
    file = tmp_path / "r.json"
    extra = ["--convention", convention] if convention else []
    assert main(["simulate", "flops", *words.split(), *given.split(), *extra, "--json", str(file)]) == 0
    assert json.loads(file.read_text())[asked[0]][asked[1]] == pytest.approx(wanted, rel=0.01)


def test_a_rate_without_its_convention_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "flops", "--model", "mixtral-8x22b", "--tflops", "470"]) == 2
    assert "--convention" in capsys.readouterr().err
    wrong = ["--model", "mixtrel", "--cluster", "h10x8", "--seq", "-1", "--tokens", "0", "--step", "1"]
    assert main(["simulate", "flops", *wrong]) == 2
    error = capsys.readouterr().err
    for word in ("6 problems", "mixtrel", "h10", "--seq", "--tokens", "say the same thing", "--batch"):
        assert word in error
    assert main(["simulate", "flops", "--model", "mixtral-8x22b"]) == 0
    assert "causal half" in capsys.readouterr().out


# ---- dispatch beside computation, and rows that are dropped ------------------------------------------------------------------------


def seconds_of(recipe: Path, tmp_path: Path, *settings: str) -> float:
    file = tmp_path / "s.json"
    assert main(["simulate", str(recipe), "--cluster", "h100x128", *settings, "--json", str(file)]) in (0, 2)
    return float(json.loads(file.read_text())["seconds"]["p50"])


def test_overlap_of_a_recipe_has_its_effect(recipe: Path, tmp_path: Path) -> None:
    """16 ranks of two hosts exchange rows: chunks hide them, until each has too few rows for its weights."""
    wide = ("--folding.etp", "2")
    found = {
        how: seconds_of(recipe, tmp_path, *wide, "--dispatch.overlap", how)
        for how in ("serial", "coarse:2", "coarse:32")
    }
    assert found["coarse:2"] < found["serial"] < found["coarse:32"]


def test_dropped_rows_bound_the_imbalance(recipe: Path, tmp_path: Path) -> None:
    learned = ("--router.force", "none")
    dropless, even, some = (
        seconds_of(recipe, tmp_path, *learned, *more)
        for more in (
            (),
            ("--dispatch.policy", "drop"),
            ("--dispatch.policy", "drop", "--dispatch.capacity_factor", "1.1"),
        )
    )
    assert even < some < dropless
    assert even == seconds_of(recipe, tmp_path)


def test_what_is_not_modelled_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(recipe), "--cluster", "h100x128", "--train.dtype", "float64"]) == 2
    assert "train.dtype" in capsys.readouterr().err


def test_the_winner_of_a_dense_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.toml"
    words = ["--model", "Llama3-8B", "--cluster", "h200x8", "--batch", "16", "--exact", "2", "--recipe", str(file)]
    assert main(["search", *words]) == 0
    first = capsys.readouterr().out
    assert "8 ranks on 1 host," in first
    assert main(["simulate", str(file), "--cluster", "h200x8"]) == 0
    assert main(["search", "--model", "laptop", "--cluster", "a100x8", "--precision", "fp8"]) == 2
    assert "has no products in fp8" in capsys.readouterr().err

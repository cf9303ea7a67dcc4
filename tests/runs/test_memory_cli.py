"""What a person sees of the memory estimate: the table of the dry run, its warning, the benchmark; and the program's start."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from memory_help import bench
from rich.console import Console

from phalanx.cli.allocator import TUNABLE, start_again, with_tunable
from phalanx.cli.predicting.dry_run import Machine, available_bytes, dry_run
from phalanx.core.config import Recipe
from phalanx.core.recipe import load_recipe
from phalanx.data.size import token_file_bytes

ROOT = Path(__file__).resolve().parents[2]
PLENTY = Machine(local_ranks=4, threads=1, available_bytes=1 << 40)


def shown(recipe: Recipe, machine: Machine = PLENTY, *, world: int = 4) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    dry_run(recipe, machine, world=world, console=console)
    return console.export_text()


@pytest.mark.parametrize("overlap", ["fused", "fine"])
def test_the_recipe_of_fused_kernels_in_the_guide_has_an_estimate(tmp_path: Path, overlap: str) -> None:
    (text,) = re.findall(
        r"```toml[^\n]*\n(\[dispatch\].*?)```",
        (ROOT / "docs" / "explanation" / "overlap-gpu.md").read_text(),
        re.DOTALL,
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    words = "--model.preset laptop --folding.ep 4 --launch.ranks 4 --dispatch.overlap"
    found = load_recipe(recipe, [*words.split(), overlap], auto_dtype=lambda _: "bfloat16")
    assert found.dispatch.left_free == 16
    assert "tensors and NCCL take" in shown(found)


def test_the_table_names_terms_and_total() -> None:
    text = shown(load_recipe("recipes/laptop.toml", [], auto_dtype=lambda _: "bfloat16"))
    for words in (
        "optimizer state",
        "50.3 MiB",
        "activations",
        "generated code",
        "total",
        "4 ranks need",
        "trains a tokenizer",
    ):
        assert words in text, text
    assert "if every token chose" in text and "WARNING" not in text
    assert "17.6M, 8.14M" in text and "300 of 32 sequences" in text  # what it printed before


def test_too_little_memory_is_a_warning() -> None:
    recipe = load_recipe("recipes/laptop.toml", [], auto_dtype=lambda _: "bfloat16")
    text = shown(recipe, dataclasses.replace(PLENTY, available_bytes=1 << 30))
    assert "WARNING" in text and "1.00 GiB are available" in text and "train.micro_batch" in text
    assert "does not say" in shown(recipe, dataclasses.replace(PLENTY, available_bytes=None))


def test_a_pipeline_shows_its_stages() -> None:
    changes = ["--folding.pp", "2", "--folding.ep", "2", "--data.sources", "nowhere.txt"]
    text = shown(load_recipe("recipes/laptop.toml", changes, auto_dtype=lambda _: "bfloat16"))
    assert "stages       0: " in text and ", 1: " in text
    assert "WARNING: data.sources[0] = 'nowhere.txt': does not exist" in text


def test_available_memory(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       24684492 kB\nMemAvailable:    1024 kB\n")
    assert available_bytes(info) == 1 << 20
    info.write_text("MemTotal: 1 kB\n")
    assert available_bytes(info) is None and available_bytes(tmp_path / "none") is None


def test_size_of_token_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3600)
    data = dataclasses.replace(Recipe().data, sources=(str(tmp_path),))
    assert token_file_bytes(data, vocab=8192) == 2000
    assert token_file_bytes(data, vocab=100_000) == 4000
    assert token_file_bytes(dataclasses.replace(data, tokenizer="byte"), vocab=257) == 7200


def test_the_setting_is_added_once() -> None:
    found = with_tunable({"A": "1"})
    if found is None:
        pytest.skip("this C library is not glibc")
    assert found == {"A": "1", "GLIBC_TUNABLES": TUNABLE}
    assert with_tunable(found) is None
    assert with_tunable({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}) is None
    more = with_tunable({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert more is not None and more["GLIBC_TUNABLES"] == f"glibc.malloc.check=1:{TUNABLE}"
    start_again({"A": "1"}, program="/nowhere/python")  # returns: what cannot be started again goes on as it is


def test_training_starts_with_the_setting_and_in_the_same_process() -> None:
    code = (
        "import os, sys; from phalanx.cli.allocator import start_again; start_again(os.environ); "
        "print(os.getpid(), os.environ.get('GLIBC_TUNABLES'), sys.argv[1:])"
    )
    environ = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    with subprocess.Popen([sys.executable, "-c", code, "a b"], env=environ, stdout=subprocess.PIPE, text=True) as child:
        text = child.communicate(timeout=360)[0]
    if with_tunable(environ) is None:
        pytest.skip("this C library is not glibc")
    assert text.strip() == f"{child.pid} {TUNABLE} ['a b']"


SMALL = [
    "--data.builtin_bytes",
    "2000000",
    "--data.tokenizer",
    "byte",
    "--observe.console",
    "none",
    "--train.eval_batches",
    "1",
]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_promise_is_kept(tmp_path: Path) -> None:
    """The default model, mapping and batch, for a few steps of bytes with a checkpoint behind each, measured in every rank: never less than
    is needed, and at most a fifth more, for the promise adds up what need not meet (the unevenness of the first steps, the copy that a
    checkpoint is written from): 595 to 650 MiB were seen on three machines where 686 are promised."""
    recipe = "recipes/laptop.toml"
    changes = [
        "--model.vocab",
        "8192",
        "--train.steps",
        "4",
        "--train.eval_interval",
        "2",
        "--checkpoint.interval",
        "1",
    ]
    result = bench(tmp_path, recipe, *SMALL, *changes, "--optim.warmup_steps", "2", "--tolerance", "0.2")
    assert len(result["ranks"]) == 4 and not result["failures"]
    assert -0.02 <= result["error"] <= 0.2


@pytest.mark.ranks
@pytest.mark.slow
def test_a_missed_promise_fails(tmp_path: Path) -> None:
    recipe = "recipes/tiny.toml"
    words = [
        sys.executable,
        "-m",
        "phalanx",
        "bench",
        "memory",
        recipe,
        *SMALL,
        "--train.steps",
        "2",
        "--tolerance",
        "0.0001",
    ]
    more = ["--launch.ranks", "1", "--data.cache", str(tmp_path / "cache"), "--train.eval_interval", "0"]
    done = subprocess.run(
        [*words, *more, "--checkpoint.interval", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr

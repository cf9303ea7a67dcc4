"""A package outside the repository adds a sink, a schedule, a family and a data format: `examples/extension`, installed and used as docs/how-to/extend.md says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

pytestmark = [pytest.mark.ranks, pytest.mark.core]
EXAMPLE = Path(__file__).parents[2] / "examples" / "extension"
RECIPE = [
    "recipes/tiny.toml",
    "--data.builtin_bytes",
    "none",
    "--train.eval_interval",
    "0",
    "--observe.console",
    "none",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example is installed."""
    sources, target = tmp_path_factory.mktemp("sources") / "extension", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, sources)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(sources)], check=True)
    return target


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`phalanx WORDS...` in `folder`, where the package is installed."""
    paths = [str(installed), str(Path(phalanx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)


def test_sink_schedule_and_format_in_one_run(installed: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = "".join(f'"the {n} quick brown foxes jump over {n * 7} lazy dogs, again and again"\n' for n in range(300))
    (texts / "a.csv").write_text(f"text\n{rows}")
    more = ["--data.sources", "texts", "--launch.ranks", "2", "--folding.pp", "2", "--train.micro_batch", "4"]
    more += ["--pipeline.schedule", "patient_1f1b", "--train.steps", "4", "--observe.sinks", '["csv:file=loss.csv"]']
    done = run(installed, tmp_path, "train", *RECIPE, *more)
    assert done.returncode == 0, done.stderr
    written = [line.split(",")[0] for line in (tmp_path / "runs/tiny/loss.csv").read_text().splitlines()]
    assert written == ["1", "2", "3", "4"]


def test_a_mapping_with_the_schedule_equals_one_rank(installed: Path, tmp_path: Path) -> None:
    words = ["verify", "recipes/tiny.toml", "--ranks", "2", "--folding.pp", "2", "--pipeline.schedule", "patient_1f1b"]
    done = run(installed, tmp_path, *words, "--json", "proof.json")
    assert done.returncode == 0 and not json.loads((tmp_path / "proof.json").read_text())["failures"], done.stderr


def test_the_family_goes_out_and_comes_back(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a small text\n" for n in range(4000)))
    model = ["--model.preset", "mixtral-8x7b", "--model.qk_norm", "head", "--model.num_layers", "2"]
    model += ["--model.hidden", "32", "--model.num_heads", "4", "--model.num_kv_heads", "2", "--model.head_dim", "8"]
    model += [
        "--model.expert_ffn",
        "32",
        "--model.vocab",
        "320",
        "--data.tokenizer",
        "byte",
        "--data.sources",
        "text.txt",
    ]
    train = ["--train.steps", "2", "--train.seq_len", "64", "--observe.console", "none", "--run.name", "mine"]
    done = run(installed, tmp_path, "train", *model, *train)
    assert done.returncode == 0, done.stderr
    out = run(installed, tmp_path, "export-hf", "runs/mine", "exported", "--family", "mymoe")
    assert out.returncode == 0 and "MyMoeForCausalLM" in out.stdout, out.stderr
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "mymoe"
    back = run(installed, tmp_path, "import-hf", "exported", "--run.name", "back")
    assert back.returncode == 0 and (tmp_path / "runs/back/recipe.toml").is_file(), back.stderr


def test_what_cannot_be_used_is_told_with_its_package(installed: Path, tmp_path: Path) -> None:
    words = [*RECIPE, "--data.sources", "builtin:python", "--train.steps", "1", "--launch.ranks", "1"]
    unknown = run(installed, tmp_path, "train", *words, "--observe.sinks", '["csw"]')
    assert unknown.returncode == 2 and "observe.sinks[0] = 'csw'" in unknown.stderr and "csv" in unknown.stderr
    wrong = run(installed, tmp_path, "train", *words, "--observe.sinks", '["csv:file"]')
    assert wrong.returncode == 2 and "key=value" in wrong.stderr
    schedule = run(installed, tmp_path, "train", *words, "--folding.pp", "2", "--pipeline.schedule", "patient_1f2b")
    assert schedule.returncode == 2 and "did you mean 'patient_1f1b'" in schedule.stderr
    broken = installed / "phalanx_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx-broken\nVersion: 1.0\n")
    for entry, rule in (
        ("1f1b = nowhere:X", "is a name that Phalanx itself has already"),
        ("mine = nowhere:X", "cannot be imported"),
    ):
        (broken / "entry_points.txt").write_text(f"[phalanx.schedules]\n{entry}\n")
        said = run(installed, tmp_path, "plan", "schedule", "--name", "1f1b", "--pp", "2", "--microbatches", "4")
        assert said.returncode == 2 and rule in said.stderr and "phalanx-broken 1.0" in said.stderr, said.stderr
    shutil.rmtree(broken)

"""What helps a person before a run: `phalanx doctor`, completion of words, a schema for editors, and how extras are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.cli import doctor
from phalanx.cli.main import COMMANDS, main
from phalanx.core.arguments import WIDTH, wrapped
from phalanx.core.process import is_installed
from phalanx.core.recipe import PACKAGED
from phalanx.core.settings import describe_settings
from phalanx.kernels.native import build

pytestmark = pytest.mark.unit


def test_the_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for subject in ("Python", "torch", "processor", "memory", "GPUs", "open files", "this folder"):
        assert subject in text
    assert "phalanx train laptop --train.steps 3" in text
    monkeypatch.setattr(doctor, "most_open_files", lambda: 32)
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "MISSING open files" in text and "ulimit -n 4096" in text and "could not start here" in text


def test_the_doctor_names_what_is_missing_and_the_way_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda name: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "user_folder", lambda: Path("/proc/nowhere/deep"))
    found = {f.subject: f for f in doctor.findings()}
    for subject in ("wandb", "cryptography", "compiler", "kept here"):
        assert found[subject].verdict == "note", subject
    assert "pip install -e '.[service]'" in found["cryptography"].way and "g++" in found["compiler"].way
    assert not any("pip install phalanx" in f.way or "'phalanx[" in f.way for f in found.values())


def test_the_doctor_tries_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in build.COMPILERS:
        (tmp_path / name).write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    build.attempt.cache_clear()
    try:
        found = {f.subject: f for f in doctor.findings()}["compiler"]
        assert found.verdict == "note" and "c++: ends with 1 (no such header)" in found.text and "g++" in found.way
    finally:
        build.attempt.cache_clear()


@pytest.mark.parametrize("where", ["", "runs", "cache"])
def test_the_doctor_says_that_no_run_could_be_kept_here(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if where:
        (tmp_path / where).symlink_to("/proc")
    monkeypatch.chdir(tmp_path if where else "/proc")
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "MISSING this folder" in text and "cannot be written" in text and "go to one of yours" in text
    assert "a run could not start here" in text and "phalanx train laptop" not in text


def test_the_doctor_takes_no_folder_for_a_package_and_speaks_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wandb_of_a_run").mkdir()
    assert is_installed("pytest") and not is_installed("wandb_of_a_run")
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {f.subject: f for f in doctor.findings()}
    assert found["torch"].verdict == "missing" and "torch" in found["torch"].way and "wandb" in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_setting_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = {w.strip("'\"") for w in script.split()}
    assert all(c.name in words or f"'{c.name}" in script for c in COMMANDS)
    assert all((f"-l {s.name} " if shell == "fish" else f"--{s.name}") in script for s in describe_settings())
    assert "laptop" in script and "local torchrun slurm kubernetes" in script
    for option in ("nodes", "elastic", "dry-run", "card-gb"):
        assert (f"-l {option} " if shell == "fish" else f"--{option}") in script, option
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out

    def complete(*words: str) -> set[str]:
        line = f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _phalanx; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert complete("phalanx", "tra") == {"train", "trace"}
    assert complete("phalanx", "train", "lap") == {"laptop"}
    assert complete("phalanx", "train", "tiny", "--train.st") == {"--train.steps"}
    assert complete("phalanx", "train", "--train.recompute", "") == {"none", "selective", "full"}
    assert complete("phalanx", "metrics", "--train.st") == set()
    assert complete("phalanx", "train", "--dry") == {"--dry-run"}
    assert complete("phalanx", "launch", "") == {"local", "torchrun", "slurm", "kubernetes"}
    assert complete("phalanx", "launch", "lap") == set()
    assert complete("phalanx", "launch", "slurm", "lap") == {"laptop"}
    assert complete("phalanx", "launch", "slurm", "laptop", "--gp") == {"--gpus-per-node"}
    assert complete("phalanx", "launch", "slurm", "laptop", "--train.st") == {"--train.steps"}


def test_a_shell_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fisch"]) == 2
    assert "'fisch': must be one of bash, zsh, fish; did you mean 'fish'" in capsys.readouterr().err


def test_the_schema_takes_every_recipe_of_the_wheel_and_names_every_setting(tmp_path: Path) -> None:
    assert main(["settings", "--schema", str(tmp_path / "s.json")]) == 0
    schema = json.loads((tmp_path / "s.json").read_text())
    found = {f"{s}.{k}": v for s, of in schema["properties"].items() for k, v in of["properties"].items()}
    assert found.keys() == {s.name for s in describe_settings()}
    assert found["train.steps"]["minimum"] == 1 and found["optim.lr"]["exclusiveMinimum"] == 0
    assert found["data.sources"]["type"] == "array" and "cosine" in found["optim.schedule"]["enum"]
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list}
    for recipe in PACKAGED.glob("*.toml"):
        for section, content in tomllib.loads(recipe.read_text()).items():
            for key, value in content.items():
                of = found[f"{section}.{key}"]
                assert value in of["enum"] if "enum" in of else "anyOf" in of or isinstance(value, kinds[of["type"]])


OTHERS = [["plan", "model"], ["plan", "placement"], ["simulate", "goodput"], ["simulate", "flops"], ["testbed", "run"], ["bench", "trace"], ["bench", "train"]]  # fmt: skip


@pytest.mark.parametrize("words", [[], *([c.name] for c in COMMANDS), *OTHERS], ids=" ".join)
@pytest.mark.parametrize("columns", [80, 180])
def test_every_help_looks_alike_and_fits_the_terminal(
    words: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words, "--help"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == "" and lines[0].startswith("usage: " + " ".join(["phalanx", *words]))
    assert max(map(len, lines)) <= min(columns - 1, WIDTH), max(lines, key=len)
    assert not set(said.out) & set("│╭╰") and "None" not in said.out and "MISSING" not in said.out
    assert (len(lines) > 3 and lines[1].startswith(" ")) or lines[1] == ""


def test_what_is_set_in_stays_in_its_column() -> None:
    text = "phalanx x\n\nA paragraph\nof two lines.\n\n  --one N   first\n            goes on\n  --longer  second of many words\n"
    assert wrapped(text, 24).split("\n\n") == [
        "phalanx x",
        "A paragraph of two\nlines.",
        "  --one N   first goes\n            on\n  --longer  second of\n            many words",
    ]

"""The wheels of the product and of the lab, without a checkout: what the first holds is enough to list recipes, look at the machine and train. Each is installed into an empty folder, beside the packages that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.core]
ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def install(code: str, *files: str, temporary: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but the wheel made of a folder of code and of the files beside it."""
    sources, wheels = temporary.mktemp("sources"), temporary.mktemp("wheels")
    folder = Path(code).name
    shutil.copytree(ROOT / code, sources / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in files:
        shutil.copy(ROOT / name, sources)
    subprocess.run([*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(sources)], check=True)  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    target = temporary.mktemp("installed")
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("src", "pyproject.toml", "README.md", "LICENSE", temporary=tmp_path_factory)


def not_in(installed: Path, code: str) -> list[str]:
    """Files of a package, as git knows it, that are not installed."""
    listed = subprocess.run(["git", "ls-files", code], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout: " + listed.stderr.strip())
    files = [Path(name).relative_to(Path(code).parent) for name in listed.stdout.splitlines()]
    assert len(files) > 100
    return [str(f) for f in files if not (installed / f).is_file()]


def phalanx(installed: Path, folder: Path, *words: str) -> str:
    """What `phalanx WORDS...` prints in an empty folder."""
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run([sys.executable, "-c", "import phalanx; print(phalanx.__file__)"], cwd=folder, env=environ, capture_output=True, text=True, check=True)  # fmt: skip
    assert where.stdout.startswith(str(installed)), where.stdout
    done = subprocess.run([sys.executable, "-m", "phalanx", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_recipes_doctor_and_a_run(installed: Path, tmp_path: Path) -> None:
    assert "mixtral-8x7b" in phalanx(installed, tmp_path, "recipes")
    assert "ready: phalanx train laptop --train.steps 3" in " ".join(phalanx(installed, tmp_path, "doctor").split())
    assert "tiny: finished" in phalanx(installed, tmp_path, "train", "tiny", "--train.steps", "3")
    assert (tmp_path / "runs" / "tiny" / "recipe.toml").is_file()


def test_what_is_not_python_is_in_it(installed: Path) -> None:
    assert not_in(installed, "src/phalanx") == []


def test_what_is_not_python_is_in_the_lab_s(tmp_path_factory: pytest.TempPathFactory) -> None:
    lab = install("lab/phalanx_lab", "lab/pyproject.toml", temporary=tmp_path_factory)
    assert not_in(lab, "lab/phalanx_lab") == []

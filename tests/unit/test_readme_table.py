"""The README's table of figures is that of benchmarks/results/, and a result that is no result is named."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("readme_table", ROOT / "scripts" / "readme_table.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_the_readme_has_the_figures_of_the_files(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(ROOT, ["--check"]) == 0, capsys.readouterr().err


def test_a_figure_cannot_outlive_its_file(script: ModuleType, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "benchmarks" / "results" / "verify-4.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "figures": {"cases": 1}}))
    assert script.main(copy, ["--check"]) == 1
    assert "run python scripts/readme_table.py" in capsys.readouterr().err
    assert script.main(copy, []) == 0 and script.main(copy, ["--check"]) == 0
    path.unlink()
    assert script.main(copy, ["--check"]) == 1
    assert "verify-4.json: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "other"}, "must be the name of the file"),
        ({"date": "yesterday"}, "must be written like 2026-11-23"),
        ({"figures": {"cases": "many"}}, "figure 'cases' must be a number"),
        ({"command": ""}, "command is empty"),
        ({"more": 1}, "must have exactly the fields"),
        ({"note": None}, "note must be a str"),
    ],
)
def test_what_is_wrong_with_a_result_is_named(
    script: ModuleType, copy: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    path = copy / "benchmarks" / "results" / "verify-4.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert script.main(copy, ["--check"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("verify-4.json: ") and said in err


def test_what_is_no_json_is_named(script: ModuleType, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "benchmarks" / "results" / "broken.json").write_text("{")
    assert script.main(copy, []) == 1
    assert "broken.json: is not JSON" in capsys.readouterr().err

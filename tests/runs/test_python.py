"""`import phalanx`: training, opening, planning, predicting and proving from a Python program, and errors that are caught like any other."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

import phalanx
from phalanx.api import training
from phalanx.api.programs import Program, ProgramError, start
from phalanx.api.runs import RunHandle
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.events import Event, StepEnded

pytestmark = pytest.mark.ranks
SMALL = {"data.builtin_bytes": 100_000, "launch.ranks": 2, "train.eval_interval": 0}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.core
def test_a_program_trains_stops_goes_on_and_reads_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[int] = []

    def until_the_fourth(event: Event) -> bool:
        if isinstance(event, StepEnded):
            steps.append(event.step)
        return steps[-1:] == [4]

    run = phalanx.train_model("recipes/tiny.toml", {**SMALL, "train.steps": 500}, callbacks=[until_the_fourth])
    assert run.status["status"] == "interrupted" and 4 <= run.status["step"] < 500
    assert steps == list(range(1, run.status["step"] + 1)), "every event came once, until the run had saved and ended"
    assert "2 ranks" in capsys.readouterr().out

    more = run.status["step"] + 2
    again = phalanx.train_model(phalanx.load_recipe("recipes/tiny.toml", {**SMALL, "train.steps": more}), show=False)
    assert capsys.readouterr().out == "" and again.folder == run.folder
    table = again.metrics()
    assert again.status["status"] == "finished" and table["step"].to_pylist() == list(range(1, more + 1))
    assert table["validation/loss"].null_count == more - 1 and len(table["experts/load_of"][0]) > 0
    assert table["checkpoint/bytes"].to_pylist()[-1] > 0 and not any(n.startswith("team/") for n in table.column_names)
    assert phalanx.open_run("runs/tiny").recipe.train.steps == more
    assert again.generate("import ", tokens=3).startswith("import ")
    assert (again.export(tmp_path / "exported") / "config.json").is_file()


def test_what_a_callback_raises_comes_back_when_the_run_has_saved() -> None:
    def wrong(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == 3:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        phalanx.train_model("recipes/tiny.toml", {**SMALL, "train.steps": 500}, callbacks=[wrong], show=False)
    status = phalanx.open_run("runs/tiny").status
    assert status["status"] == "interrupted" and status["checkpoint_step"] == status["step"] >= 3


def test_callbacks_that_cannot_be_called_are_refused_before_anything_starts() -> None:
    for wrong in (print, "print", [print, 3], None):
        with pytest.raises(ConfigError, match=r"callbacks.*: must be a list of functions.*use callbacks=\[print\]"):
            phalanx.train_model("recipes/tiny.toml", SMALL, callbacks=wrong)  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_a_run_that_cannot_be_followed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    started: list[Program] = []
    monkeypatch.setattr(training, "start", lambda words: started.append(start(words)) or started[0])
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        phalanx.train_model("recipes/tiny.toml", {**SMALL, "train.steps": 100_000})
    monkeypatch.undo()
    assert started[0].communicate(timeout=60) and started[0].returncode != 0


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda: phalanx.load_recipe(3), "recipe = 3: must be a Recipe, a file"),
        (lambda: phalanx.load_recipe("tiny", ["train.steps"]), r"settings = \['train.steps'\]: must be a dict"),
        (lambda: phalanx.make_plan("tiny", "train.steps"), "settings = 'train.steps': must be a dict"),
        (lambda: phalanx.train_model("tiny", 3), "settings = 3: must be a dict"),
        (lambda: phalanx.predict("tiny", 64), 'cluster = 64: must be text; use "h100x64"'),
        (lambda: phalanx.search(None, "h100x8"), "model: must be text; use"),
        (lambda: phalanx.search(phalanx.Recipe(), 8), "2 problems with the arguments"),
        (lambda: phalanx.verify_mapping("tiny", ranks="two"), "ranks = 'two': must be a whole number, at least 1"),
        (lambda: phalanx.verify_mapping("tiny", dtype=64), "dtype = 64: is not known; legal: bfloat16, float32"),
        (lambda: phalanx.open_run(None), 'folder: must be the folder of a run; use "runs/laptop"'),
        (lambda: RunHandle(Path("x")).generate(5), 'prompt = 5: must be text; use "import "'),
        (lambda: RunHandle(Path("x")).generate(tokens="5", temperature="hot"), "tokens = '5': must be a whole number"),
        (lambda: RunHandle(Path("x")).export(None), 'folder: must be a path; use "exported"'),
        (lambda: RunHandle(Path("x")).export("y", dtype=16), 'dtype = 16: must be text or None; use "bfloat16"'),
    ],
)
def test_arguments_of_another_kind_are_named(work: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        work()


@pytest.mark.core
def test_errors_come_before_anything_starts_or_with_what_the_program_said() -> None:
    with pytest.raises(ConfigError) as found:
        phalanx.train_model("recipes/tiny.toml", {"train.stepz": 3, "folding.tp": 3})
    assert [p.where for p in found.value.problems] and "train.steps" in str(found.value) and not Path("runs").exists()
    Path("empty").mkdir()
    with pytest.raises((ProgramError, DataError)) as ended:
        phalanx.train_model("recipes/tiny.toml", {"data.sources": ["empty"], "data.builtin_bytes": None}, show=False)
    assert ended.value.exit_code == 2 and "is an empty folder" in str(ended.value)
    with pytest.raises(ConfigError, match=r"a program gets the events of its run") as given:
        phalanx.train_model("recipes/tiny.toml", {"observe.log_interval": 1, "observe.console": "plain"})
    assert [p.where for p in given.value.problems] == ["observe.console", "observe.log_interval"]
    with pytest.raises(ConfigError, match=r"must be text, a number, true or false, None, or a list of these"):
        phalanx.load_recipe("recipes/tiny.toml", {"train.steps": {3}})
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        phalanx.open_run("nowhere")


def test_the_run_of_a_program_that_is_killed_saves_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import phalanx
        def tell(event):
            if type(event).__name__ == "StepEnded":
                print(event.step, flush=True)
        phalanx.train_model("recipes/tiny.toml", {SMALL | {"train.steps": 100_000}!r}, callbacks=[tell], show=False)
    """)
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert next(line for line in started.stdout if line.strip() == "3")
        os.kill(started.pid, signal.SIGKILL)
    limit = time.monotonic() + 60
    while (status := phalanx.open_run("runs/tiny").status)["status"] == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    assert status["status"] == "interrupted" and status["checkpoint_step"] >= 3


@pytest.mark.core
def test_plans_and_predictions_start_nothing() -> None:
    plan = phalanx.make_plan("recipes/tiny.toml", {"folding.ep": 2}, ranks=4)
    assert (plan.folding.ep, plan.ranks, len(plan.memory_bytes)) == (2, 4, 1) and "4 ranks" in plan.explain()
    assert plan.to_dict()["parameters"] == plan.spec.num_params
    alone = phalanx.make_plan("recipes/tiny.toml", {"launch.ranks": 2})  # each rank is a host: experts need two holders
    assert alone.folding.label() == "dp2|edp2" and alone.explain().endswith(f"elastic      {alone.elastic}")
    assert "are replaced" in alone.elastic and phalanx.make_plan("recipes/tiny.toml", ranks=1).elastic.startswith(
        "no: "
    )
    best = phalanx.search("olmoe-1b-7b", "h100x8", global_batch=64).best[0]
    predicted = phalanx.predict("recipes/tiny.toml", "h100x4", {"train.global_batch": 32})
    assert best.fits and predicted.step.seconds > 0 and phalanx.predict(None, "h100x4").step.seconds > 0
    with pytest.raises(ConfigError) as found:
        phalanx.search("olmoe-1b-8b", "h100y8")
    assert len(found.value.problems) == 2 and "olmoe-1b-7b" in str(found.value)
    with pytest.raises(ConfigError) as found:
        phalanx.search("olmoe-1b-7b", "h100x8", seq_len=0, keep=0, precision="int8", routing="even")  # type: ignore[arg-type]
    assert [p.where for p in found.value.problems] == ["seq_len", "keep", "routing", "precision"]
    for ranks in (0, -1, 2.5, True):
        for work in (phalanx.load_recipe, phalanx.make_plan):
            with pytest.raises(ConfigError, match=rf"ranks = {str(ranks).lower()}: must be a whole number, at least 1"):
                work("recipes/tiny.toml", ranks=ranks)  # type: ignore[operator]
    given = {
        "train.steps": numpy.int64(3),
        "optim.lr": numpy.float32(0.5),
        "data.sources": [Path("/data/\N{OPEN FILE FOLDER}/x.txt")],
    }
    told = phalanx.load_recipe("recipes/tiny.toml", given | {"data.builtin_bytes": None})
    assert (told.train.steps, told.optim.lr, told.data.sources) == (3, 0.5, ("/data/\N{OPEN FILE FOLDER}/x.txt",))


def test_a_mapping_is_proven() -> None:
    proof = phalanx.verify_mapping("recipes/tiny.toml", {"folding.ep": 2}, ranks=2)
    assert proof.agrees and proof.mappings >= 1 and proof.worst_gradient_error < 1e-12


def test_public_names_are_few_and_rebind_nothing() -> None:
    code = """
    import sys, phalanx
    assert "torch" not in sys.modules
    names = {name: getattr(phalanx, name) for name in NAMES}
    import phalanx.train, phalanx.simulate.search, phalanx.verify, phalanx.plan, phalanx.cli.main
    assert all(getattr(phalanx, name) is value for name, value in names.items())
    """
    from phalanx.core.faces import face_of

    names = sorted(face_of(Path(phalanx.__file__).read_text()))
    assert len(names) <= 13
    subprocess.run([sys.executable, "-c", textwrap.dedent(code).replace("NAMES", repr(names))], check=True)


@pytest.mark.core
def test_every_cell_of_the_notebook_runs() -> None:
    """As a kernel runs them: one after the other, in one namespace."""
    cells = json.loads((Path(__file__).parents[2] / "examples/first-steps.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for text in code:
        exec(compile(text, "first-steps.ipynb", "exec"), names)
    assert len(code) == 6

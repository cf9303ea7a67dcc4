"""The program itself: what it says without a command, how it ends, what it imports; and the commands that need nothing but this package."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_events import a_run, ended, started
from speed_help import slowness

import phalanx_lab
from phalanx.cli import lab, metrics as metrics_command, settings as settings_command, train
from phalanx.cli.main import COMMANDS, help_text, main
from phalanx.cli.tables import markdown_table, replace_part
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.process import begun, most_open_files
from phalanx.core.rules import EFFECTS
from phalanx.core.settings import describe_settings
from phalanx.data.cache import ensure_folder, silent, write_atomically
from phalanx.observe.event_log import JsonlSink, read_history
from phalanx.observe.metrics import METRICS

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=360, **more)  # type: ignore[call-overload, no-any-return]


def with_command(monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    """`phalanx bench` runs `body` in this test."""
    monkeypatch.setitem(sys.modules, "phalanx_lab.bench.commands", SimpleNamespace(main=body))


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(args) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command.name} +{re.escape(command.summary)}$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100


def test_the_nccl_backend_that_recovery_knows_is_chosen_before_torch_is_imported(tmp_path: Path) -> None:
    """torch 2.15 reads it when its backends are registered."""
    code = (
        "import os, sys\nfrom types import SimpleNamespace\nfrom phalanx.cli.main import main\n"
        "say = lambda args: print(os.environ['TORCH_DIST_USE_NCCL2'], 'torch' in sys.modules)\n"
        "sys.modules['phalanx.cli.train'] = SimpleNamespace(main=say)\nmain(['train'])\n"
    )
    done = python(code, env={**os.environ, "TORCH_DIST_USE_NCCL2": "1"}, cwd=tmp_path)
    assert done.stdout == "0 False\n", done.stderr


def test_every_command_exists() -> None:
    files = {c.name: ROOT / "src/phalanx/cli" / f"{c.name.replace('-', '_')}.py" for c in COMMANDS if not c.in_lab}
    assert not [name for name, path in files.items() if not path.exists()]
    assert {c.name for c in COMMANDS if c.in_lab} == phalanx_lab.PARTS.keys() - {"faults", "validation"}


@pytest.mark.parametrize(
    "words", [["bench"], ["testbed", "clean"], ["verify", "--plant", "all"], ["simulate", "validate"]]
)
def test_without_the_lab_a_command_says_how_to_get_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.cli.lab._lab", lambda: None)
    assert main(words) == 2
    assert "belongs to the lab, which is not installed here; run `make env`" in capsys.readouterr().err
    assert main(["--help"]) == 0 and f"  {words[0]} " in capsys.readouterr().out


def test_the_lab_is_found_with_and_without_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab._lab() is phalanx_lab
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **group: [])
    assert lab._lab() is phalanx_lab
    monkeypatch.setitem(sys.modules, "phalanx_lab", None)
    assert lab._lab() is None


def test_help_answers_at_once_and_imports_no_command() -> None:
    code = (
        "import sys\nfrom phalanx.cli.main import main\nassert main(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'tyro', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # computing time: how long a busy machine lets a process wait is not the program's doing
        seconds.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / max(1.0, slowness()))
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.3


@pytest.mark.core
@pytest.mark.parametrize(
    "args",
    [
        ["plan", "folding", "--world", "8", "--ep", "4"],
        ["settings", "train"],
        ["metrics", "--names"],
        ["train", "--help"],
    ],
)
def test_commands_without_torch(args: list[str]) -> None:
    done = python(
        f"import sys\nfrom phalanx.cli.main import main\nassert main({args!r}) == 0\nsys.exit('torch' in sys.modules)\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_m_phalanx_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "phalanx", "--help"], capture_output=True, text=True, timeout=360)
    assert (done.returncode, done.stdout) == (0, help_text() + "\n")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_names_what_decides_a_run(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert re.fullmatch(r"phalanx \d[\w.]*, torch 2\.\S+, numpy \d\S+, Python 3\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["veryfi"]) == 2
    assert (
        capsys.readouterr().err
        == "phalanx: 'veryfi' is not a command; did you mean 'verify'? (phalanx --help lists them)\n"
    )


def test_errors_for_people_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(args: list[str]) -> int:
        assert args == ["a", "--b"]
        raise ConfigError.of("train.steps", 0, "must be at least 1", "use 1", subject="the recipe")

    with_command(monkeypatch, fails)
    monkeypatch.delenv("PHALANX_DEBUG", raising=False)
    assert main(["bench", "a", "--b"]) == 2
    message = "phalanx bench: 1 problem with the recipe:\n  - train.steps = 0: must be at least 1; use 1\n"
    assert capsys.readouterr() == ("", message)
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    assert main(["bench", "a", "--b"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith(message)


@pytest.mark.parametrize(
    ("error", "status", "err"),
    [
        (KeyboardInterrupt(), 130, "phalanx bench: interrupted\n"),
        (RunError("rank 2 is gone"), 2, "phalanx bench: rank 2 is gone\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("words"), 1, "words\n"),
    ],
)
def test_ways_to_end(
    error: BaseException, status: int, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(args: list[str]) -> int:
        raise error

    with_command(monkeypatch, ends)
    assert main(["bench"]) == status
    assert capsys.readouterr().err == err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: list[str]) -> int:
        raise ZeroDivisionError("a bug")

    with_command(monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        main(["bench"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    phalanx = f"{sys.executable} -m phalanx settings"
    done = subprocess.run(
        ["bash", "-c", f"{phalanx} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("[run]")


# --- phalanx settings, and the tables in the documents


def test_settings_show_all_or_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{s.name} " in out for s in describe_settings())
    assert main(["settings", "optim.lr", "launch"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"--(\S+)", out) == [
        "optim.lr",
        "launch.ranks",
        "launch.threads",
        "launch.device",
        "launch.timeout_s",
        "launch.host",
        "launch.rack",
        "launch.keep_service",
    ]
    assert "--optim.lr  float, above 0\n      Highest learning rate." in out
    assert main(["settings", "model.preset"]) == 0
    assert "mixtral-8x7b" in capsys.readouterr().out


def test_settings_name_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "optim.lrr", "trian"]) == 2
    err = capsys.readouterr().err
    assert "name = 'optim.lrr': is neither a section nor a setting; did you mean 'optim.lr'" in err
    assert "name = 'trian': is neither a section nor a setting; did you mean 'train'" in err


def test_settings_say_where_they_are_an_error() -> None:
    text = settings_command.settings_markdown(describe_settings())
    for effect in EFFECTS:
        named = effect.reason.replace("|", "\\|")
        assert f"An error where {named}" in text or f" or {named}" in text


@pytest.mark.parametrize(
    ("page", "command", "content"),
    [
        ("reference/settings.md", "settings", lambda: settings_command.settings_markdown(describe_settings())),
        ("reference/metrics.md", "metrics", metrics_command.names_markdown),
    ],
)
def test_tables_in_the_documents_are_those_of_the_code(
    page: str, command: str, content: object, tmp_path: Path
) -> None:
    """If this fails: `phalanx settings --write docs/reference/settings.md; phalanx metrics --write docs/reference/metrics.md`."""
    copy = tmp_path / "page.md"
    copy.write_text((ROOT / "docs" / page).read_text())
    assert content() in copy.read_text()  # type: ignore[operator]
    assert main([command, "--write", str(copy)]) == 0
    assert copy.read_text() == (ROOT / "docs" / page).read_text()


def test_a_page_without_marks_is_refused_untouched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin settings -->\nno end")
    assert main(["settings", "--write", str(page)]) == 2
    assert (
        "has no place for this table; add the lines <!-- begin settings --> and <!-- end settings -->"
        in capsys.readouterr().err
    )
    assert page.read_text() == "<!-- begin settings -->\nno end"
    assert main(["settings", "--write", str(tmp_path / "none.md")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


def test_markdown_helpers(tmp_path: Path) -> None:
    assert markdown_table(["a", "b"], [["x|y", "z"]]) == "| a | b |\n| --- | --- |\n| x\\|y | z |\n"
    page = tmp_path / "p.md"
    page.write_text("before\n<!-- begin t -->\nold\n<!-- end t -->\nafter\n")
    replace_part(page, "t", "new\n")
    assert page.read_text() == "before\n<!-- begin t -->\nnew\n<!-- end t -->\nafter\n"


# --- phalanx metrics


def test_metrics_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(tmp_path / "laptop", rank=0)
    for event in a_run(300):
        sink.write(event)
    sink.close()
    figures = tmp_path / "f.json"
    assert main(["metrics", str(tmp_path / "laptop"), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert (found["step"], found["total_steps"], found["starts"], found["ended"]) == (300, 300, 1, "finished")
    assert found["tokens"] == 300 * 8192 and found["validation_loss"] == pytest.approx(5.127, abs=1e-3)
    rows = [int(line.split()[0]) for line in out.splitlines() if re.match(r" +\d+ +\d\.\d{4}", line)]
    assert rows[0] == 1 and rows[-1] == 300 and {50, 100, 150, 200, 250} <= set(rows) and len(rows) <= 20
    assert "train loss\n8.8516 ┤█▃" in out
    assert "laptop: 300 of 300 steps (finished, 1 start)" in out and "(unigram model 6.214)" in out
    assert found["mtp_loss"] is None and "after the next one" not in out
    (tmp_path / "file").write_text("")
    assert main(["metrics", str(tmp_path / "laptop"), "--json", str(tmp_path / "file" / "f.json")]) == 2
    assert capsys.readouterr().err.endswith("file/f.json: File exists; name another file\n")


def test_metrics_shows_the_loss_of_further_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(tmp_path / "further", rank=0)
    for event in (started(), ended(1, mtp_loss=5.75)):
        sink.write(event)
    sink.close()
    assert main(["metrics", str(tmp_path / "further")]) == 0
    assert "loss of the tokens after the next one 5.7500 (train/mtp_loss)" in capsys.readouterr().out


def test_metrics_adds_up_tokens_and_knows_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonlSink(tmp_path / "a", rank=0)
    steps = [ended(s, tokens=100 if s < 3 else 1000, mfu=0.0) for s in range(1, 5)]
    for event in (started(), *steps[:2], started(step=2), *steps[2:]):
        sink.write(event)
    sink.close()
    assert main(["metrics", str(tmp_path / "a"), "--json", str(tmp_path / "f.json")]) == 0
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["tokens"] == 2200 and found["mfu"] is None and "MFU not measured (medians)" in told
    assert metrics_command._tokens_until(read_history(tmp_path / "a")) == {1: 100, 2: 200, 3: 1200, 4: 2200}


def test_metrics_of_a_run_that_has_not_stepped_or_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    JsonlSink(tmp_path, rank=0).close()
    assert main(["metrics", str(tmp_path)]) == 2
    assert "has logged no step yet; wait for its first step" in capsys.readouterr().err
    assert main(["metrics", str(tmp_path / "no")]) == 2
    assert "cannot be read: No such file or directory; give the folder of a run" in capsys.readouterr().err
    assert main(["metrics"]) == 2
    assert "give the folder of a run, or --names" in capsys.readouterr().err


def test_metric_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--names"]) == 0
    out = capsys.readouterr().out
    assert all(f"| `{m.name}` |" in out for m in METRICS)
    assert os.environ.get("PHALANX_DEBUG") in (None, "", "0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_text_is_prepared_is_a_line_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """What was half written is gone, and the next handler is that of before."""
    before = signal.getsignal(signal.SIGTERM)

    def build(folder: Path) -> None:
        (folder / "part").write_text("half")
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    def prepare(request: object) -> int:
        ensure_folder(tmp_path / "tokens", complete=Path.exists, build=build, progress=silent)
        return 0

    monkeypatch.setattr(train, "_train", prepare)
    assert main(["train"]) == 130 and capsys.readouterr().err == "phalanx train: interrupted\n"
    assert not [p for p in tmp_path.iterdir() if p.name != ".locks"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_small_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "pin", b"1")

    def stopped(path: Path, content: bytes) -> int:
        path.write_text("h")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "pin", b"2")
    assert [p.name for p in tmp_path.iterdir()] == ["pin"] and (tmp_path / "pin").read_text() == "1"


def test_two_processes_with_one_number_write_the_same_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, over a folder that they share."""
    write, begun = Path.write_bytes, list[Path]()

    def beside(path: Path, content: bytes) -> int:
        done = write(path, content)
        if not begun:  # the other one is there in the middle of it
            begun.append(path)
            write_atomically(tmp_path / "pin", content)
        return done

    monkeypatch.setattr(Path, "write_bytes", beside)
    write_atomically(tmp_path / "pin", b"1")
    assert [p.name for p in tmp_path.iterdir()] == ["pin"] and (tmp_path / "pin").read_text() == "1"


@pytest.mark.parametrize("words", [("settings",), ("train", "--dry-run", "--model.preset", "tiny")])
def test_a_reader_that_has_seen_enough_is_no_failure(words: tuple[str, ...]) -> None:
    """As `| head -1` is: under `set -o pipefail` it would be the script's."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        command = [sys.executable, "-m", "phalanx", *words]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=360)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [("settings",), ("train", "--dry-run", "--model.preset", "tiny"), ("--version",)])
def test_output_on_a_full_disk_is_a_line_and_no_traceback(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "phalanx", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=360)
    assert done.returncode == 2 and done.stderr == f"phalanx {words[0]}: No space left on device\n".replace(
        " --version", ""
    )


@pytest.mark.parametrize("what", ["ENOSPC", "EACCES", "EPERM"])
def test_an_error_of_another_file_leaves_what_was_said(what: str, tmp_path: Path) -> None:
    code = (
        "import errno, sys\nfrom types import SimpleNamespace\nfrom phalanx.cli.main import main\n"
        f"def body(args):\n    print('said before')\n    raise OSError(errno.{what}, 'full', 'other.json')\n"
        "sys.modules['phalanx.cli.runs'] = SimpleNamespace(main=body)\nsys.exit(main(['runs']))\n"
    )
    done = python(code, env={name: word for name, word in os.environ.items() if name != "PYTHONUNBUFFERED"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "said before\n", "phalanx runs: other.json: full\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_at_the_start_is_read_from_nowhere_and_written_nowhere(closed: str, tmp_path: Path) -> None:
    """Errors were told on standard output, and standard output was an AttributeError; a file that was opened had its number. Programs that this one starts have it too."""
    told = tmp_path / "told"
    code = (
        "import os, subprocess, sys\nfrom phalanx.cli.main import main\ncodes = main(['settings']), main(['nonsense'])\n"
        f"place = os.open({str(told)!r}, os.O_CREAT | os.O_WRONLY)\nassert place > 2 and not subprocess.run([sys.executable, '-c', 'import sys; sys.stdout.flush(); sys.stderr.flush()']).returncode\n"
        "os.write(place, repr(codes).encode())\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$@" {closed}', sys.executable, "-c", code], capture_output=True, text=True, timeout=360
    )
    assert told.read_text() == "(0, 2)" and done.returncode == 0, done.stderr
    assert "nonsense" not in done.stdout and (done.stderr == "" or closed == ">&-")


@pytest.mark.parametrize(
    "start", ["runpy.run_module('phalanx', run_name='__main__')", "sys.exit(pkgutil.resolve_name(entry)())"]
)
def test_ctrl_c_while_the_program_is_imported_is_a_code(start: str) -> None:
    """It was a traceback."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["phalanx"]
    code = (
        f"import os, pkgutil, runpy, signal, sys\nentry = {entry!r}\n"
        "class Pressed:\n    def find_spec(self, name, *_):\n        if name == 'phalanx.core.errors':\n            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.meta_path.insert(0, Pressed())\n{start}\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_files_of_the_present_folder_hide_no_module_from_programs_that_this_one_starts(tmp_path: Path) -> None:
    """Of `phalanx`, whose own modules they do not hide; `python -m phalanx` looks there first, as Python has it."""
    for name in ("json", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')\n")
    code = (
        "from phalanx.api.programs import start\nfrom phalanx.core.pipes import start_program\n"
        "print(start_program('builtins:print').communicate()[0], start(['settings', 'train.seed']).wait())\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=360, cwd=tmp_path)
    assert done.stdout == "b'[]\\n' 0\n", done.stderr


def test_a_run_whose_summary_cannot_be_written_has_ended_well() -> None:
    """Its log lies on a disk that became full: the job was called failed, and a script started it again."""
    code = (
        "from pathlib import Path\nfrom phalanx.train.reporting import Outcome, RunEnd\n"
        "known = dict(step=1, total_steps=1, reason='finished', tokens=1, loss=1.0, unigram_loss=1.0)\n"
        "outcome = Outcome(**known, validation_loss=None, validation_step=None, sample=None, talks=False)\n"
        "RunEnd(lambda event: None, lambda: 1).summarize(Path('runs/a'), outcome)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    assert "the summary cannot be written ([Errno 28] No space left on device); the run is whole" in done.stderr


@pytest.mark.parametrize("coding", ["latin-1", "ascii"])
def test_a_locale_without_our_signs_shows_others(coding: str, tmp_path: Path) -> None:
    """They were a traceback in `phalanx metrics`, and after the last step of a run."""
    log = JsonlSink(tmp_path, rank=0)
    for event in a_run(20):
        log.write(event)
    log.close()
    command = [sys.executable, "-m", "phalanx", "metrics", str(tmp_path)]
    environ = {**os.environ, "PYTHONIOENCODING": coding}
    done = subprocess.run(command, capture_output=True, timeout=360, env=environ)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    assert b"?" in done.stdout


@pytest.mark.parametrize(
    "words", [("tiny", "--nonsense", "1"), ("tiny", "--nonsense"), ("tiny", "--launch.ranks", "x"), ("tyni",)]
)
def test_a_wrong_word_is_answered_without_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    """Importing it takes seconds."""
    code = f"import sys\nfrom phalanx.cli.main import main\nassert main({['train', *words]!r}) == 2\nsys.exit('torch' in sys.modules)\n"
    environ = {name: word for name, word in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = python(code, env=environ, cwd=tmp_path)
    assert done.returncode == 0 and "1 problem with the recipe" in done.stderr, done.stderr


def test_too_few_open_files_are_refused_and_as_many_as_may_be_are_taken() -> None:
    """They were a hang: ranks that cannot open sockets wait for each other."""
    (problem,) = train._file_problems(64)
    assert "open files (ulimit -n) = 64: must be 256 at least" in str(problem) and "ulimit -n 4096" in str(problem)
    assert train._file_problems(256) == []
    (problem,) = train._file_problems(4096, sockets=4 * 2048)
    assert "must be 8192 at least" in str(problem) and "ulimit -n 8192" in str(problem)
    for hard, most in ((300, 300), (64, 64)):
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(100, hard), hard))
            os._exit(most_open_files() != most or resource.getrlimit(resource.RLIMIT_NOFILE)[0] != most)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_process_whose_name_is_no_text() -> None:
    """Linux cuts names after fifteen bytes, through a letter too."""
    code = "import sys; open('/proc/self/comm', 'wb').write(b'a\\xc3'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert begun(other.pid).isdigit() and begun(other.pid) != begun(os.getpid())
        other.kill()

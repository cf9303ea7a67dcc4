"""What the scripts that run the tests, and the costs they are chosen by, make of how tests end: nothing that went wrong comes out as a success, and nothing goes on behind a script that has ended.

Each script runs in a folder of its own, beside programs that only write down how they were called and end as told.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from tiers import Costs, still_there

ROOT = Path(__file__).parents[2]
SAYS = """#!/bin/sh
echo "$@" >>called
case "$*" in
*"-c "*) ;;
{cases}
esac
"""


def place(folder: Path, script: str, programs: dict[str, str]) -> Path:
    """A copy of the script, with `programs`: path -> the lines of a `case` over its arguments."""
    (folder / script).parent.mkdir(parents=True)
    shutil.copy(ROOT / script, folder / script)
    for name, cases in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SAYS.format(cases=cases))
        path.chmod(0o755)
    return folder / script


def ended(folder: Path, script: str, *words: str, **programs: str) -> tuple[int, str]:
    """Exit code, and how the program was called. `cases`: of the interpreter."""
    path = place(folder, script, {".venv/bin/python": programs["cases"]})
    done = subprocess.run(["sh", str(path), *words], capture_output=True, text=True, timeout=30)
    return done.returncode, (folder / "called").read_text()


@pytest.mark.parametrize(
    ("words", "cases", "code"),
    [
        ((), "", 0),
        ((), "*ranks*testbed*) exit 1 ;;", 1),
        ((), "*'not alone and not ranks'*) exit 5 ;;", 5),  # as with a misspelt marker
        ((), "*cache/alone*) exit 139 ;;", 139),
        ((), "*cache/alone*) exit 1 ;;", 1),
        (("drawn", "6"), "*) exit 5 ;;", 0),
        (("drawn", "6"), "*) exit 1 ;;", 1),
    ],
)
def test_a_tier_passes_where_its_tests_did(tmp_path: Path, words: tuple[str, ...], cases: str, code: int) -> None:
    found, called = ended(tmp_path, "scripts/tests.sh", *words, cases=cases)
    assert found == code, called
    calls = [line for line in called.splitlines() if "pytest" in line]
    assert len(calls) == len(set(calls)) == (1 if words else 3), "each once, whatever it ended with"


def test_each_test_is_in_a_folder_where_it_is_looked_for() -> None:
    """`scripts/tests.sh` looks for tests that launch ranks in three folders alone, and tests/unit is where no rank is launched."""
    strays = [
        p.name for p in (ROOT / "tests/unit").glob("test_*.py") if "\npytestmark = pytest.mark.ranks" in p.read_text()
    ]
    assert strays == []


def test_a_lock_that_cannot_be_made_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    makes = 'for name in pip uv; do mkdir -p "$3/bin"; printf "#!/bin/sh\\n[ $name = pip ]\\n" >"$3/bin/$name"; chmod +x "$3/bin/$name"; done'
    script = place(tmp_path, "scripts/lock.sh", {"bin/python3": f"*venv*) {makes} ;;"})
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/dev.txt").write_text("numpy==2.4.0")
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "venv" in (tmp_path / "called").read_text(), done.stderr
    assert [(p.name, p.read_text()) for p in (tmp_path / "requirements").iterdir()] == [("dev.txt", "numpy==2.4.0")]


@pytest.mark.parametrize("without_pip", [False, True])
def test_an_environment_in_any_folder_is_made_where_it_is_not_whole(tmp_path: Path, without_pip: bool) -> None:
    """One that was interrupted while it was made has a Python and no pip."""
    folder = tmp_path / "a folder"
    own = f"*'pip --version'*) exit {int(without_pip)} ;;"
    script = place(folder, "scripts/make-env.sh", {".venv/bin/python": own, "bin/python3.11": ""})
    shutil.copy(ROOT / "constraints.txt", folder)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=30)
    called = (folder / "called").read_text()
    assert done.returncode == 0, done.stderr
    assert ("-m venv --clear .venv" in called) == without_pip
    assert "pip install" in called and "--require-hashes --requirement requirements/dev.txt" in called


def processor_files(folder: Path) -> list[str]:
    """Makes the files that the script names; their paths."""
    names = next(
        line for line in (ROOT / "scripts/processors.sh").read_text().splitlines() if line.startswith("names=")
    )
    paths = [f"tests/unit/{name.replace('*', 'some')}" for name in names.partition("=")[2].strip('"').split()]
    (folder / "tests/unit").mkdir(parents=True)
    for path in paths:
        (folder / path).touch()
    return paths


def test_each_file_of_the_other_processors_is_there_and_is_run(tmp_path: Path) -> None:
    paths = processor_files(tmp_path)
    lines = "".join(f"echo '{path} ..  [ 10%]'; " for path in paths)
    script = place(tmp_path, "scripts/processors.sh", {".venv/bin/python": f"*pytest*) {lines} ;;"})

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", str(script), "plain"], capture_output=True, text=True, timeout=30)

    assert run().returncode == 0
    program = tmp_path / ".venv/bin/python"
    program.write_text(program.read_text().replace(f"echo '{paths[-1]} ..", f"echo 'not {paths[-1]} .."))
    done = run()
    assert done.returncode == 2 and f"no test of {paths[-1]} was selected" in done.stdout
    (tmp_path / paths[-1]).unlink()
    done = run()
    assert done.returncode == 2 and "is named test_context_parallel_kernels.py" in done.stderr


def gone(pid: int, *, within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def started(path: Path, *, within_s: float = 30) -> int:
    """The process that has written its number there."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"nothing wrote {path}")


WAITS = "echo $$ >{name}; exec sleep 60 ;;"


def test_tests_of_other_processors_end_with_their_script(tmp_path: Path) -> None:
    processor_files(tmp_path)
    waits = WAITS.format(name="pytest.pid")
    script = place(tmp_path, "scripts/processors.sh", {".venv/bin/python": f"*pytest*) {waits}"})
    running = subprocess.Popen(["sh", str(script), "plain"], cwd=tmp_path)
    process = started(tmp_path / "pytest.pid")
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 143 and gone(process)


def test_what_ci_runs_beside_itself_is_shown_and_ends_with_it(tmp_path: Path) -> None:
    programs = {"bin/make": "lint) echo a complaint; exit 1 ;;", ".venv/bin/phalanx": "*) exit 3 ;;"}
    script, left = place(tmp_path, ".ci/run", programs), tmp_path / "left"
    left.mkdir()
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(left)}
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode in (1, 3) and "a complaint" in done.stdout and not list(left.iterdir())
    waits = WAITS.format(name="lint.pid")
    place(tmp_path / "again", ".ci/run", {"bin/make": f"lint) {waits}", ".venv/bin/phalanx": "*) sleep 1 ;;"})
    env["PATH"] = f"{tmp_path}/again/bin:{os.environ['PATH']}"
    running = subprocess.Popen(["sh", str(tmp_path / "again/.ci/run")], env=env)
    process = started(tmp_path / "again" / "lint.pid")
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 143 and gone(process) and not list(left.iterdir())


def test_stored_costs_are_those_of_tests_that_exist(tmp_path: Path) -> None:
    """A renamed test leaves none behind; files that a call does not collect keep theirs."""
    for name in ("one.py", "other.py"):
        (tmp_path / name).touch()
    stored = ["one.py::old", "one.py::same", "other.py::kept", "deleted.py::gone"]
    found = still_there(stored, ["one.py::same", "one.py::new"], tests=tmp_path)
    assert found == {"one.py::same", "one.py::new", "other.py::kept"}
    assert still_there(stored, (), tests=tmp_path) == {"one.py::old", "one.py::same", "other.py::kept"}


def test_what_tests_share_is_paid_once_by_those_that_are_drawn() -> None:
    shared = frozenset({"f.py::made (shared)"})
    costs = Costs(
        of={"f.py::a": 0.5, "f.py::b": 0.25, "f.py::made (shared)": 10.0, "g.py::c": 1.0},
        shared={"f.py::a": shared, "f.py::b": shared},
    )
    assert costs.total("f.py::a") == 10.5 and costs.total("g.py::c") == 1.0 and costs.total("g.py::new") is None
    assert costs.is_cheap("g.py::c", ranks=False) and not costs.is_cheap("f.py::a", ranks=False)
    assert costs.is_cheap("g.py::new", ranks=False) and not costs.is_cheap("g.py::new", ranks=True)
    assert [costs.is_nothing(name, ranks=False) for name in ("f.py::b", "g.py::c", "g.py::new")] == [False] * 3
    little = Costs(of={"f.py::a": 0.2}, shared={})
    assert little.is_nothing("f.py::a", ranks=False) and not little.is_nothing("f.py::a", ranks=True)
    assert [costs.takes_turns(name) for name in ("f.py::b", "g.py::c", "g.py::new")] == [True, False, True]
    for seed in range(20):
        assert costs.draw(costs.of.keys() - shared, budget_s=11.75, seed=seed) == {"f.py::a", "f.py::b", "g.py::c"}
        assert len(costs.draw(costs.of.keys() - shared, budget_s=11.5, seed=seed)) == 2


# ---- what `make env` installs -------------------------------------------------------------------------------------------


def locked(name: str) -> dict[str, set[str]]:
    """Package -> versions, of a lock in which every line has hashes."""
    found: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.txt").read_text().strip()):
        if not block.startswith("#"):
            match = re.match(r"([a-z0-9.-]+)==([^ ;\\]+)", block)
            assert match and re.search(r"--hash=sha256:[0-9a-f]{64}$", block.strip()), block
            found.setdefault(match[1], set()).add(match[2])
    return found


def test_everything_that_is_installed_is_locked() -> None:
    own = {"torch", "phalanx", "phalanx-lab", "pip"}
    there = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version for d in metadata.distributions()}
    locks = {**locked("cuda"), **locked("docs"), **locked("dev")}
    assert {f"{n}=={v}" for n, v in there.items() if n not in own and v not in locks.get(n, set())} == set()
    torch = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch and there["torch"].split("+")[0] == torch[1]


def test_locks_have_what_constraints_choose_and_no_packages_for_cuda() -> None:
    chosen = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("dev", "docs"):
        found = locked(name)
        assert not [p for p in found if p.startswith(("nvidia-", "cuda-", "torch"))]
        assert {p: v for p, v in chosen.items() if p in found and found[p] != {v}} == {}
    assert locked("docs") and not locked("docs").keys() & locked("dev").keys()  # what builds the pages comes on top
    assert locked("cuda") and all(p.startswith(("nvidia-", "cuda-")) for p in locked("cuda"))


def test_a_wheel_with_one_wrong_byte_is_refused_by_name(tmp_path: Path) -> None:
    """By the words with which the script calls pip."""
    wheel, lock = tmp_path / "spoiled-1.0-py3-none-any.whl", tmp_path / "lock.txt"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("spoiled.py", "answer = 42\n")
        file.writestr("spoiled-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("spoiled-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: spoiled\nVersion: 1.0\n")
        file.writestr("spoiled-1.0.dist-info/RECORD", "")
    whole = wheel.read_bytes()
    lock.write_text(f"spoiled==1.0 \\\n    --hash=sha256:{hashlib.sha256(whole).hexdigest()}\n")
    words = re.search(
        r"^ +\$pip (--no-deps --require-hashes --requirement) \"requirements/\$lock.txt\"$",
        (ROOT / "scripts/make-env.sh").read_text(),
        re.MULTILINE,
    )
    assert words
    where = ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "there"), "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", *where, *words[1].split(), str(lock)]
    for spoiled in (True, False):
        data = bytearray(whole)
        data[whole.index(b"42")] ^= spoiled
        wheel.write_bytes(data)
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode != 0) == spoiled, done.stderr
        assert not spoiled or ("DO NOT MATCH THE HASHES" in done.stderr and "spoiled==1.0" in done.stderr)

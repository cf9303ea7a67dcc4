"""One training cluster on this machine, for every benchmark and test that hurts one: hosts are started, waited for, killed, frozen and stopped.

Decides what a host is (a process in a session of its own, with all that it starts, which ends with the program that started it), how the process of a rank is found (it has
the event log of its slot open), and the tiny run that all of them train. Must never change: after the `with` block no process of the cluster is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.core.clock import now_s
from phalanx.core.errors import RunError
from phalanx.observe.event_log import log_path
from phalanx.runtime.processes.launch import die_with_parent
from phalanx.train.recovery.drained_slots import write_drained_slots

WAIT_S = 120.0
"""Longest wait for what a run should come to."""
KILL_S = 10.0
"""Longest wait for the process of a slot that is to be killed (a worker that still starts)."""
GONE_S = 30.0
"""Longest wait for killed processes to be gone."""
LOOK_S = 0.005
TINY: dict[str, object] = {
    "model.preset": "tiny",
    "data.tokenizer": "byte",
    "train.dtype": "float32",
    "train.eval_interval": 0,
    "train.eval_batches": 1,
    "observe.console": "none",
    "observe.tensorboard": "false",
}
"""What whole runs of benchmarks and tests have in common."""

Record = dict[str, Any]
Program = Callable[[], int | None] | Sequence[str]
"""Program of a host: a function in a fork, which gives its exit code, or a command."""


def tiny_run(runs: Path, name: str, cache: Path, changes: Mapping[str, object]) -> dict[str, object]:
    """Settings of the tiny run `name` in the folder `runs`, with what it has of its own; None removes a setting."""
    own = {"run.folder": runs, "run.name": name, "data.cache": cache}
    return {key: value for key, value in {**TINY, **own, **changes}.items() if value is not None}


def overrides(settings: Mapping[str, object]) -> list[str]:
    """Arguments of `phalanx train`."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def train_command(settings: Mapping[str, object], *launcher: str) -> list[str]:
    """`phalanx train` as a user starts it, where need be by the module `launcher` with its arguments."""
    return [sys.executable, *launcher, "-m", "phalanx", "train", *overrides(settings)]


def write_text(folder: Path, *, files: int = 12) -> Path:
    """A little of the standard library as text files, to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]:
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:20_000])
    return folder


@contextlib.contextmanager
def kept_or_temporary(folder: Path | None, *, prefix: str) -> Iterator[Path]:
    """The folder that was asked for, which stays, or a temporary one."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        yield Path(name)


class Logs:
    """Event logs of a run as they grow: new records since the last look."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self._read = dict.fromkeys(range(slots), 0)

    def new(self) -> list[Record]:
        """Complete lines since the last call, of all slots, each with its `slot`."""
        found = []
        for slot in range(self.slots):
            with contextlib.suppress(FileNotFoundError), log_path(self.folder, slot).open("rb") as file:
                file.seek(self._read[slot])
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._read[slot] += len(whole)
                found += [{**json.loads(line), "slot": slot} for line in whole.splitlines()]
        return found


class TrainingCluster:
    """Hosts by name. A context manager for the main thread; `run` is the folder of the run that they train, on `ranks` ranks in all."""

    def __init__(self, run: Path | None = None, *, ranks: int = 0) -> None:
        self.run, self.ranks = run or Path(), ranks
        self.pids: dict[str, int] = {}
        """Hosts that run."""
        self.codes: dict[str, int] = {}
        """Exit codes of those that have ended, negative for a signal."""
        self.logs = Logs(self.run, slots=ranks)
        self._told: list[Record] = []
        self._printed: dict[str, Path] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # ---- hosts

    def start(self, host: str, program: Program, *, out: Path | None = None) -> None:
        """Begin a host in a fork of this process, which has everything imported. What it prints is appended to `out`."""
        sys.stdout.flush()
        sys.stderr.flush()
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._printed[host] = out
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                die_with_parent(parent)
                code = _become(program, out)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.pids[host] = pid
        self.codes.pop(host, None)

    def running(self) -> bool:
        """Whether a host still runs; those that ended are collected, and what is due is done."""
        now = time.monotonic()
        for entry in [e for e in self._due if e[0] <= now]:
            self._due.remove(entry)
            entry[1]()
        for host in list(self.pids):
            code = self.exit_code(host)
            if code is not None:
                del self.pids[host]
                self.codes[host] = code
        return bool(self.pids)

    def exit_code(self, host: str) -> int | None:
        """Exit code of a host that has ended and was not collected yet; None while it runs."""
        found, status = os.waitpid(self.pids[host], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something in `delay_s`, when `running` is asked."""
        self._due.append((time.monotonic() + delay_s, act))

    def calm(self) -> bool:
        """Whether everything that was to come back is back."""
        return not self._due

    def processes(self, host: str) -> list[int]:
        """Those under a host, and those that it left behind in its session."""
        under = children_of(self.pids[host])
        return [*under, *(pid for pid in _session(self.pids[host]) if pid not in under)]

    def kill_host(self, host: str) -> None:
        """Kill -9 of its process, whatever becomes of those under it."""
        pid = self.pids.pop(host)
        send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def stop(self) -> None:
        """End every host and everything under it at once. Raises `RunError` where a process stays."""
        pids = [pid for host, own in self.pids.items() for pid in (own, *self.processes(host))]
        for pid in pids:
            send(pid, signal.SIGKILL)
        for host in list(self.pids):
            self.kill_host(host)
        self._due.clear()
        await_end(pids)

    def last_words(self) -> str:
        """The end of what the hosts printed."""
        return "\n".join(p.read_text(errors="replace")[-3000:] for p in self._printed.values() if p.exists())

    # ---- waiting

    def until(self, done: Callable[[], bool], limit_s: float, *, look_s: float = LOOK_S) -> bool:
        """Whether `done` came true within the time, while hosts run."""
        end_s = time.monotonic() + limit_s
        while not done():
            if not self.running() or time.monotonic() > end_s:
                return False
            time.sleep(look_s)
        return True

    def wait_for(self, done: Callable[[], bool], what: str, *, limit_s: float = WAIT_S, look_s: float = LOOK_S) -> None:
        """Waits until `done` comes true. Raises `RunError` with what was printed where all hosts end before, or nothing happens for `limit_s`."""
        if not self.until(done, limit_s, look_s=look_s):
            how = f"nothing happened for {limit_s:g} s" if self.pids else f"it ended with exit code {self.codes}"
            raise RunError(f"the run in {self.run} did not come to {what}: {how}\n{self.last_words()}")

    def rest(self, seconds: float) -> None:
        """Let hosts go on for so long, and what is due happen."""
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end_s, seconds + 1.0)

    def wait_for_end(self, limit_s: float) -> int:
        """How many hosts still run after so long."""
        end_s = time.monotonic() + limit_s
        while self.running() and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return len(self.pids)

    # ---- ranks

    def told(self) -> list[Record]:
        """What the ranks have written since the last `forget`, each record with its `slot`."""
        self._told += self.logs.new()
        return self._told

    def forget(self, *, but: str = "") -> None:
        """What was told until now, but for events of one kind."""
        self._told = [record for record in self.told() if record["kind"] == but]

    def workers(self) -> dict[int, int]:
        """Slot -> process of its rank, of those that there are."""
        found: dict[int, int] = {}
        for pid in self.pids.values():
            found |= workers_of(self.run, pid, ranks=self.ranks)
        return found

    def lose(self, slots: Collection[int], *, there: frozenset[int]) -> float:
        """Kill -9 the ranks of `slots` at once; when. All slots that are not `there` stay empty, and that is said before, so that none is started again by chance."""
        found: dict[int, int] = {}

        def all_found() -> bool:
            found.update(self.workers())
            return found.keys() >= set(slots)

        self.wait_for(all_found, f"processes of slots {sorted(slots)}", limit_s=KILL_S)
        write_drained_slots(self.run, frozenset(range(self.ranks)) - there)
        at_s = now_s()
        for slot in sorted(slots):
            send(found[slot], signal.SIGKILL)
        return at_s


def _become(program: Program, out: Path | None) -> int:
    """Turns the child into the program: no launcher's environment, no input, output in a file; then the program."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if out is not None:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    if callable(program):
        return program() or 0
    os.execvp(program[0], list(program))


# ---- processes of this machine


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def state_of(pid: int) -> str:
    """State of a process, as the kernel says it: R, S, D, T, Z; X where there is none."""
    return (_stat(pid) or ["X"])[0]


def _stat(pid: int) -> list[str]:
    """Fields of proc(5)'s `stat` from the state on: state, parent, group, session, ..."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()
    return []


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return state_of(pid) not in "ZX"


def await_end(pids: Collection[int]) -> None:
    """Waits until none of them runs. Raises `RunError` after `GONE_S`."""
    end_s = time.monotonic() + GONE_S
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > end_s:
            raise RunError(f"processes {[p for p in pids if is_running(p)]} did not exit")
        time.sleep(LOOK_S)


def children_of(pid: int) -> list[int]:
    """All processes under one, each after its parent."""
    found, todo = [], [pid]
    while todo:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{(at := todo.pop())}/task"):
                own = [int(p) for p in Path(f"/proc/{at}/task/{task}/children").read_text().split()]
                found += own
                todo += own
    return found


def workers_of(run: Path, pid: int, *, ranks: int) -> dict[int, int]:
    """Slot -> process of its rank under `pid`: the first that has the slot's event log open (what a rank forks has it, too)."""
    logs = {str(log_path(run, slot).resolve()): slot for slot in range(ranks)}
    found: dict[int, int] = {}
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            opened = {os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")}
            for path in opened & logs.keys():
                found.setdefault(logs[path], child)
    return found


def _session(pid: int) -> list[int]:
    """Processes of the session that `pid` leads, but for itself."""
    others = (int(name) for name in os.listdir("/proc") if name.isdecimal() and name != str(pid))
    return [other for other in others if _stat(other)[3:4] == [str(pid)]]

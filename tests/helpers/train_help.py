"""Whole runs in tests: small text, the tiny model, started as a user starts them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

from phalanx_lab.bench.cluster import overrides, tiny_run, write_text

__all__ = ["write_text"]
SETTINGS = {
    "data.validation_fraction": "0.2",
    "train.steps": "8",
    "train.seq_len": "32",
    "train.global_batch": "16",
    "train.micro_batch": "2",
    "checkpoint.interval": "4",
    "checkpoint.wait_s": "0",
    "launch.ranks": "4",
}


def train_args(base: Path, **changes: Any) -> list[str]:
    """Arguments of `phalanx train` for a run in `base/runs/NAME`; keys with `__` for the dot; None removes a setting."""
    own = {"data.sources": f'["{base / "text"}"]', **{key.replace("__", "."): v for key, v in changes.items()}}
    return overrides(tiny_run(base / "runs", "run", base / "cache", {**SETTINGS, **own}))


@functools.cache
def server() -> ForkServerContext:
    """Forks the processes of runs. It has imported whatever runs, verifications and the bodies of tests import, and done what every rank would do first (`quick_starts.py`)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "phalanx.train.run",
            "phalanx.train.placement.rebalancer",
            "phalanx.train.generation",
            "phalanx.runtime.checkpoint.planner",
            "phalanx.cli.main",
            "phalanx.cli.train",
            "phalanx.cli.predicting.dry_run",
            "phalanx.train.recovery.run",
            "phalanx.train.recovery.run_hosts",
            "phalanx.verify.session",
            "torch._dynamo",
            "torch.fx.experimental.symbolic_shapes",
            "quick_starts",
            "test_elastic",
        ]
    )
    tests = Path(__file__).parents[1]
    folders = [str(tests / name) for name in ("helpers", "oracles", "unit", "ranks", "runs", "lab")]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.chdir(tests.parent), mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        ensure_running()
    return context


class Running:
    """A process that runs `body(*given)`, with what it printed so far in files (`out` and `err` in `folder`). Started by the server: 3 s of processor less each."""

    def __init__(
        self,
        body: Callable[..., object],
        *given: Any,
        env: Mapping[str, str] | None = None,
        file_limit: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="phalanx-run-") if folder is None else None
        self.folder = Path(self._own.name) if self._own is not None else folder
        self.folder.mkdir(exist_ok=True)
        env = _clean_env() if env is None else dict(env)
        self.process = server().Process(target=_begin, args=(body, given, env, str(self.folder), file_limit))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return what was printed."""
        self.process.join(timeout)
        out, err = ((self.folder / n).read_text() for n in ("out", "err"))
        if self.process.exitcode is None:
            raise TimeoutError(f"still running after {timeout:g} s\n{out}\n{err}")
        return out, err


def _begin(
    body: Callable[..., object], given: Sequence[Any], env: dict[str, str], folder: str, file_limit: int | None
) -> None:
    """Body of the forked process."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.exit(body(*given))  # type: ignore[arg-type]


def _command(args: list[str], cwd: Path | None) -> int:
    """Become `phalanx ARGS...`."""
    if cwd is not None:
        os.chdir(cwd)
    from phalanx.cli.main import main

    return main(args)


def _program(code: str, argument: str, cwd: str | None) -> None:
    """Become `python -c CODE ARGUMENT`."""
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = ["-c", argument]
    exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})


def _clean_env() -> dict[str, str]:
    drop = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {k: v for k, v in os.environ.items() if k not in drop}


def start_program(
    code: str, argument: str = "", *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Running:
    """Begin a program of Python that is given as text."""
    return Running(_program, code, argument, None if cwd is None else str(cwd), env={**_clean_env(), **(env or {})})


def start(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    file_limit: int | None = None,
    cwd: Path | None = None,
) -> Running:
    """Begin a command; `file_limit` is the largest file in bytes that it may write."""
    return Running(_command, list(args), cwd, env={**_clean_env(), **(env or {})}, file_limit=file_limit)


def phalanx(*args: str, timeout_s: float = 360.0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    running = start(args, **more)
    try:
        out, err = running.communicate(timeout=timeout_s)
    finally:
        running.kill()
    return subprocess.CompletedProcess(args, running.returncode or 0, out, err)

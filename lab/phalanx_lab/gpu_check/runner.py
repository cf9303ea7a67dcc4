"""Runs checks one after the other, each in a forked process with a limit of time, and writes one line of JSON for each, flushed at once.

Must never change: this process makes no call of CUDA (each check makes its own context, so that one that hangs or corrupts it takes nothing with it); when a check
ends, however it ends, no process of it is left; a line once written stays.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from phalanx.runtime.processes import die_with_parent
from phalanx_lab.gpu_check.checks import CheckLine, GpuCheck
from phalanx_lab.gpu_check.here import Here, Skipped

LOOK_S = 0.02
FOLDERS = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), Path(__file__).resolve().parents[3])
"""Of this machine; what is written of files begins below them."""
SHOWN = 1200
"""Characters of an error, and of what a process printed before it ended."""


def run_all(checks: Sequence[GpuCheck], here: Here, *, out: Path | None, limit_s: float) -> list[CheckLine]:
    """The lines of all checks, each written to `out` (appended) and printed when its check ends. A check that would begin after `limit_s` does not and counts as an error, one that still runs then is killed and told."""
    begin_s, lines = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-gpu-check-")))
        file = stack.enter_context(out.open("a")) if out is not None else None
        for check in checks:
            left_s = limit_s - (time.monotonic() - begin_s)
            if left_s <= 0:
                why = f"{limit_s:g} s had passed: run it by itself with --only {check.name}"
                line = CheckLine(check=check.name, status="error", value={}, bar={}, seconds=0.0, why=why)
            else:
                line = run_check(replace(check, limit_s=min(check.limit_s, left_s)), here, folder=folder)
            lines.append(line)
            _write(line, file)
    return lines


def _write(line: CheckLine, file: IO[str] | None) -> None:
    text = json.dumps(asdict(line))
    print(text, flush=True)
    if file is not None:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_check(check: GpuCheck, here: Here, *, folder: Path) -> CheckLine:
    """Run one check in a process of its own, killed with all that it started when its time is over."""
    told, said = folder / f"{check.name}.jsonl", folder / f"{check.name}.txt"
    told.unlink(missing_ok=True)
    begin_s = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _child(check, replace(here, told=told), said, parent=parent)
    try:
        status = _wait(pid, until_s=begin_s + check.limit_s)
    finally:
        _kill_group(pid)
    if status is None:
        os.waitpid(pid, 0)
    return _line(check, told, said, status=status, seconds=time.monotonic() - begin_s)


def _child(check: GpuCheck, here: Here, said: Path, *, parent: int) -> None:
    """The body of a check's process; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(0.8 * check.limit_s, file=2)  # where it hangs, if it does
        ended = {"ended": "pass", "why": ""}
        module, function = check.run.split(":")
        try:
            getattr(importlib.import_module(f"phalanx_lab.gpu_check.{module}"), function)(here)
        except Skipped as reason:
            ended = {"ended": "skip", "why": str(reason)}
        except Exception as error:
            traceback.print_exc()
            ended = {"ended": "error", "why": f"{type(error).__name__}: {str(error)[-SHOWN:]}{_place(error)}"}
        with here.told.open("a") as file:
            file.write(json.dumps(ended) + "\n")
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _place(error: BaseException) -> str:
    """The innermost line of the project."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "phalanx" in f.filename]
    return f" (at {frames[-1].filename.split('phalanx', 1)[-1]}:{frames[-1].lineno})" if frames else ""


def _wait(pid: int, *, until_s: float) -> int | None:
    """Status of the process; None where it still runs then."""
    while time.monotonic() < until_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(LOOK_S)
    return None


def _kill_group(pid: int) -> None:
    """Kill the check's process and all that it started; those with sessions of their own end with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # before it had a group
        os.kill(pid, signal.SIGKILL)


def _line(check: GpuCheck, told: Path, said: Path, *, status: int | None, seconds: float) -> CheckLine:
    """What came of a check, from what it told; a last line that was cut off is left out."""
    records = [json.loads(text) for text in _read(told).split("\n")[:-1]]
    values = [r for r in records if "name" in r]
    ended = next((r for r in records if "ended" in r), None)
    failed = [r for r in values if r["failed"]]
    if ended is None:
        last = _last_words(_read(said))
        how = (
            f"killed after its {check.limit_s:.3g} s" if status is None else f"its process ended with {_words(status)}"
        )
        ended = {"ended": "error", "why": f"{how}; it printed: {last or 'nothing'}"}
    why = ended["why"]
    if ended["ended"] in ("pass", "skip") and failed:
        ended = {"ended": "fail"}
        why = "; ".join(f"{r['name']} is {r['value']}, not {r['bar']}" for r in failed)
    return CheckLine(
        check=check.name,
        status=ended["ended"],
        value={r["name"]: r["value"] for r in values},
        bar={r["name"]: r["bar"] for r in values if r["bar"]},
        seconds=round(seconds, 2),
        why=why,
    )


def _read(file: Path) -> str:
    """What was written there, without the folders of this machine; empty where there is nothing."""
    text = file.read_text(errors="replace") if file.exists() else ""
    for folder in FOLDERS:
        text = text.replace(f"{folder}/", "")
    return text


def _last_words(text: str) -> str:
    """The end of what a process printed, and the innermost frames of where it hung."""
    printed, mark, stack = text.partition("Timeout (")
    return (printed.strip()[-SHOWN:] + "\n" + mark + stack[:SHOWN]).strip()


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def table(lines: Sequence[CheckLine], checks: Sequence[GpuCheck]) -> str:
    """What a person reads at the end."""
    titles = {c.name: c.title for c in checks}
    width = max((len(line.check) for line in lines), default=0)
    rows = [f"{x.check:<{width}}  {x.status:<5} {x.seconds:7.1f} s  {titles[x.check]}" for x in lines]
    rows += [f"{x.check}: {x.why}" for x in lines if not x.is_good]
    counts = {s: sum(x.status == s for x in lines) for s in ("pass", "fail", "error", "skip")}
    return "\n".join([*rows, ", ".join(f"{n} {s}" for s, n in counts.items())])

"""What the system says of processes, and of the cores, the memory and the open files of this one, without any library."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from importlib.util import find_spec
from pathlib import Path


def say(text: str) -> None:
    """A line for a person on standard error. Where nobody reads that any more (a terminal that is closed, a program that ended) it is lost, and the work goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Where this process was started without standard input, output or errors (`>&-`), each comes from nowhere and goes nowhere from now on, here and in processes that it starts.
    Python has None for such a stream, and the next file that is opened would have its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free is that of the stream
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


def flush_or_drop_output() -> None:
    """After an error that may be of standard output. What its buffer holds is written; where that is not possible it is lost, and so is what comes from here on: the interpreter must not
    complain when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # one that is closed, or no file
        try:
            sys.stdout.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def is_installed(module: str) -> bool:
    """Whether a module can be imported. A folder of its name in the present one is none: wandb and mlflow leave such folders where they ran."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def name_process(name: str) -> None:
    """Let `ps`, `top` and `pkill` call this process so: at most 15 characters count (Linux; elsewhere nothing changes)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    return _status_kib("VmRSS") * 1024


def peak_resident_bytes() -> int:
    """The most memory of this process that was in RAM at one time. (`ru_maxrss` alone would count the process that started it, too.)"""
    peak = _status_kib("VmHWM") * 1024
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def begun(pid: int) -> str:
    """When that process began, in the system's own words, so that another one with its number differs; empty: there is none. Where the system does not tell, that it is there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "there"


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def most_open_files() -> int:
    """Lets this process, and those it starts, open as many files as it may; returns how many. A rank needs some for each of its peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (OSError, ValueError):  # macOS: less than it says
            pass
    return soft if soft != resource.RLIM_INFINITY else most


def _status_kib(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text("utf-8", "replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0

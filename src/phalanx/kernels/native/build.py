"""Compiles `rows.cpp` on the machine that runs it, once, where there is a C++ compiler.

Decides which compiler, which options and where the result is kept: `~/.cache/phalanx`, or a folder of this user among the system's
temporary files where that cannot be written. A compiler that makes nothing that can be used is followed by the next one. The name of a result holds a digest of everything that it depends on: source, options, compiler,
processor. A machine without a compiler loses speed and nothing else.

Must never change: a library is seen under its final name only when it is complete; ranks that start together compile once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import first_line

SOURCE = Path(__file__).with_name("rows.cpp")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    # products are fused, and sums reordered where rows.cpp says so; NaN and infinities are respected: a step must see them
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
)
WIDEST = {"x86_64": ("-mprefer-vector-width=512",)}
"""Flag without which compilers use half of the vector registers of processors that have long ones."""
PATIENCE_S = 300.0
OF_OTHERS = 0o022
"""Permissions by which others write."""


def cpp_compilers() -> list[Path]:
    """Those of this machine, in the order in which they are tried; each once, whatever names it has."""
    found = map(Path, filter(None, map(shutil.which, COMPILERS)))
    return list({path.resolve(): path for path in reversed(list(found))}.values())[::-1]


@dataclass(frozen=True)
class Attempt:
    """What became of the library in this process."""

    library: ctypes.CDLL | None
    compiler: str = ""
    """Which one made it."""
    failures: tuple[str, ...] = ()
    """Why others made none, a line for each compiler and folder that were tried before."""


@functools.cache
def attempt() -> Attempt:
    """Tried once in a process: every compiler in every folder, until one works."""
    failures: list[str] = []
    for compiler in cpp_compilers():
        for folder in _folders():
            try:
                return Attempt(_opened(_built(compiler, folder)), compiler.name, tuple(failures))
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{compiler}: {_reason(error)}")
    return Attempt(None, failures=tuple(failures))


def library() -> ctypes.CDLL | None:
    """The compiled library, or None: no compiler, or none that works, or no folder to write to."""
    return attempt().library


def why_uncompiled() -> str:
    """Why the first compiler made nothing that could be used, and no other one did; empty where there is a library, or no compiler."""
    return next(iter(attempt().failures), "") if attempt().library is None else ""


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return f"ends with {error.returncode}" + (f" ({said[0]})" if said else "")
    if isinstance(error, subprocess.TimeoutExpired):
        return f"takes more than {PATIENCE_S:g} s"
    return first_line(error)


def _opened(path: Path) -> ctypes.CDLL:
    """The library itself, and not what a link leads to. Its folder is one in which nobody else can change anything. Raises `OSError` where somebody else could have written it."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(handle)
    os.close(handle)
    if found.st_uid != os.getuid() or found.st_mode & OF_OTHERS:
        raise PermissionError(f"{path} belongs to somebody else, or others may write to it")
    return ctypes.CDLL(str(path))


def user_folder() -> Path:
    """Where what was found out about this machine is kept for this user. May not be there, nor be writable."""
    return next(_folders())


def _folders() -> Iterator[Path]:
    with contextlib.suppress(
        RuntimeError
    ):  # a user without a home: containers start processes under numbers that nobody has
        yield Path("~/.cache/phalanx").expanduser()
    yield Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"


def _built(compiler: Path, folder: Path) -> Path:
    """Path of the library in `folder`, compiled if it is not there. Raises `OSError` or `SubprocessError`."""
    options = (*OPTIONS, *WIDEST.get(platform.machine(), ()))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OF_OTHERS:
        raise PermissionError(f"{folder} is a link or somebody else's")  # who could put any code there
    target = folder / f"rows-{_digest(compiler, options)}.so"
    if _is_ours(target):
        return target
    with open(folder / "rows.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_ours(target):
            unfinished = target.with_suffix(f".{os.getpid()}")
            command = [str(compiler), *options, str(SOURCE), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
            unfinished.chmod(0o700)
            unfinished.replace(target)
    return target


def _is_ours(target: Path) -> bool:
    return target.exists() and not target.stat().st_mode & OF_OTHERS


def _digest(compiler: Path, options: tuple[str, ...]) -> str:
    facts = hashlib.sha256(SOURCE.read_bytes())
    for word in (str(compiler.resolve()), str(compiler.stat().st_mtime_ns), *options, _processor()):
        facts.update(word.encode() + b"\0")
    return facts.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` looks at: homes are shared between machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

"""A program alongside this one that answers questions through its pipes: how it starts, what a message is, how it ends.

It ends with this process, however that ends. `data/template.py`, `data/pieces.py` and `runtime/checkpoint/helper_process.py` say what is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")
"""Stands before each message."""


def start_program(
    serve: str, words: Sequence[str] = (), *, isolated: bool = False, threads: int | None = None
) -> subprocess.Popen[bytes]:
    """Runs `serve` (module:function) on `words` in another interpreter. `isolated`: of its errors nothing is seen, and the environment changes nothing. `threads` of the library of
    tokenizers (None: as many as it likes); others that would start one for each core then have one. Raises `OSError`."""
    module, _, function = serve.partition(":")
    few = "" if threads is None else f"import os; os.environ.update({_environment(threads)}); "
    program = f"{few}import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import {function}; {function}(sys.argv[2:])"
    command = [sys.executable, "-I" if isolated else "-P", "-c", program, json.dumps(sys.path), *words]
    pipe, errors = subprocess.PIPE, subprocess.DEVNULL if isolated else None
    # a session of its own: Ctrl-C is for this process, which ends the other in good order
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _environment(threads: int) -> dict[str, str]:
    """What libraries read when they are imported. OpenBLAS starts a thread for each core with NumPy."""
    several = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}
    return {**several, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def end_program(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a disk dies later
        process.wait(timeout=1.0)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def write_message(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: BinaryIO | Any) -> bytes | None:
    """One message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data: bytes = pipe.read(length)
    return data if len(data) == length else None


def ask(process: subprocess.Popen[bytes], question: bytes) -> None:
    """Writes it in a thread: it may be longer than a pipe holds, and the program may not read yet, or never."""
    threading.Thread(target=_write, args=(process.stdin, question), name="question", daemon=True).start()


def _write(pipe: BinaryIO | Any, question: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        write_message(pipe, question)


def answer_of(process: subprocess.Popen[bytes], *, seconds: float, most: int | None = None) -> bytes | None:
    """One message; None at the end, and where it is longer than `most`. Raises `TimeoutError` where it is not there in time, also where a kill would not end the program soon."""
    assert process.stdout is not None
    fd, end_s = process.stdout.fileno(), time.monotonic() + seconds
    comes = select.poll()  # select() knows no descriptor above 1,023, and a rank of many peers has more
    comes.register(fd, select.POLLIN)
    found, wanted = bytearray(), _LENGTH.size
    while len(found) < wanted:
        if not comes.poll(1000 * max(0.0, end_s - time.monotonic())):
            raise TimeoutError
        part = os.read(fd, min(wanted - len(found), 1 << 20))
        if not part:
            return None
        found += part
        if len(found) == _LENGTH.size == wanted:
            (length,) = _LENGTH.unpack(found)
            if most is not None and length > most:
                return None
            wanted += length
    return bytes(found[_LENGTH.size :])

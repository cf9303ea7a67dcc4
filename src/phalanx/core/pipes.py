"""A program alongside this one that answers questions through its pipes: how it starts, what a message is, how it ends.

It ends with this process, however that ends. `data/template.py` and `runtime/checkpoint/helper_process.py` say what is asked.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
"""Stands before each message."""


def start_program(serve: str, words: Sequence[str] = (), *, isolated: bool = False) -> subprocess.Popen[bytes]:
    """Runs `serve` (module:function) on `words` in another interpreter. `isolated`: of its errors nothing is seen, and the environment changes nothing. Raises `OSError`."""
    module, _, function = serve.partition(":")
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import {function}; {function}(sys.argv[2:])"
    command = [sys.executable, *(["-I"] if isolated else []), "-c", program, json.dumps(sys.path), *words]
    pipe, errors = subprocess.PIPE, subprocess.DEVNULL if isolated else None
    # a session of its own: Ctrl-C is for this process, which ends the other in good order
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def end_program(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a disk dies later
        process.wait(timeout=1.0)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def write_message(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: BinaryIO | Any, *, most: int | None = None) -> bytes | None:
    """One message; None at the end, and where it is longer than `most`."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if most is not None and length > most:
        return None
    data: bytes = pipe.read(length)
    return data if len(data) == length else None

"""A `phalanx` for shell scripts in tests that starts in 0.1 s: the command runs in a process that is forked from one that has imported torch already.

    shim      a file called `phalanx`, to be first on the path: tells what it was called with over a socket and ends with the status that comes back
    Programs  answers, with a thread for each call: forks the process (the server of `train_help.py`) with the shim's directory, variables and streams

What it leaves out is the interpreter's start, the imports and the C library's settings (`cli/allocator.py`); scripts that are to show those run the installed program.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from train_help import server

SOCKET = "PHALANX_TEST_PROGRAMS"
SHIM = f"""#!{sys.executable} -IS
import json, os, socket, sys
call = {{"pid": os.getpid(), "args": sys.argv[1:], "folder": os.getcwd(), "env": dict(os.environ)}}
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["{SOCKET}"])
    s.sendall(json.dumps(call).encode() + b"\\n")
    status = s.recv(16)
sys.exit(int(status or b"1"))
"""


class Programs:
    """Use as a context; `folder` becomes what is put on the path."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        program = folder / "phalanx"
        program.write_text(SHIM)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self._listener = socket.socket(socket.AF_UNIX)
        self._place = tempfile.TemporaryDirectory(prefix="phalanx-")  # a socket's path has about a hundred letters

    @property
    def env(self) -> dict[str, str]:
        """What a script needs to use it, beside the path."""
        return {SOCKET: f"{self._place.name}/socket"}

    def __enter__(self) -> Programs:
        self._listener.bind(self.env[SOCKET])
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._place.cleanup()

    def _serve(self) -> None:
        while True:
            try:
                call, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(call,), daemon=True).start()

    def _answer(self, call: socket.socket) -> None:
        with call, call.makefile("rb") as lines:
            asked: dict[str, Any] = json.loads(lines.readline())
            process = server().Process(target=_become, args=(asked,))
            process.start()
            process.join()
            status = process.exitcode or 0
            call.sendall(str(status if status >= 0 else 128 - status).encode())


def _become(asked: dict[str, Any]) -> None:
    """Body of the forked process."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND), (2, os.O_WRONLY | os.O_APPEND)):
        os.dup2(os.open(f"/proc/{asked['pid']}/fd/{number}", flags), number)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    from phalanx.cli.main import main

    sys.exit(main(asked["args"]))

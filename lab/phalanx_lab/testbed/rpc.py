"""The owner's end of the connections to the switch and the hosts: one order, one answer, with a time limit.

Decides nothing. A dead or silent agent ends in a `TestbedError` that names it; nothing here waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from phalanx.core.errors import TestbedError
from phalanx_lab.testbed.owner import VARIABLE, Owner
from phalanx_lab.testbed.supervisor import MESSAGE_BYTES

_TIMEOUT_S = 60.0
"""Longest wait for an answer. Orders take milliseconds; a machine with hundreds of busy processes may take seconds."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(ours, theirs): keeps message boundaries; ours learns the sender's process id as this process knows it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(_TIMEOUT_S)
    return ours, theirs


class Remote:
    """One agent of a bed. Safe to use from several threads."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.hello: dict[str, Any] = {}
        self.pid = 0
        """Process id of the agent as the owner knows it (for `nsenter`, `py-spy`, ...)."""
        self._connection = connection
        self._lock = threading.Lock()
        self._number = 0

    def expect_hello(self) -> None:
        """Wait until the agent has entered its namespaces. Raises `TestbedError` with its reason if it could not."""
        self.hello, self.pid = self._receive()
        if "error" in self.hello:
            raise self._error("start", self.hello["error"])

    def ask(self, order: str, *, fds: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
        """Send an order and wait for its answer. Raises `TestbedError` if the agent is gone or could not do it."""
        with self._lock:
            self._number += 1
            message = json.dumps({"n": self._number, "order": order, **fields}).encode()
            if len(message) > MESSAGE_BYTES:
                rule = f"command, environment and paths of one rank must fit in {MESSAGE_BYTES} bytes"
                raise TestbedError.of(f"testbed.{self.name}", len(message), rule, subject=order)
            try:
                socket.send_fds(self._connection, [message], fds)
            except OSError as error:
                raise self._error(order, f"has ended ({error})") from error
            answer: dict[str, Any] = {"n": 0}
            while answer["n"] != self._number:  # an answer that came after its time limit is skipped
                answer, _ = self._receive()
        if "error" in answer:
            raise self._error(order, answer["error"])
        return answer

    def quit(self) -> None:
        """Ask the agent to end, and forget it. Never fails."""
        with contextlib.suppress(OSError):
            self._connection.send(b'{"n": 0, "order": "quit"}')
        self._connection.close()

    def _receive(self) -> tuple[dict[str, Any], int]:
        try:
            raw, ancillary, _, _ = self._connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(struct.calcsize("3i")))
        except TimeoutError as error:
            raise self._error("answer", f"has not answered for {_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise self._error("answer", f"has ended ({error})") from error
        if not raw:
            raise self._error("answer", "has ended")
        credentials = [
            data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        pid = struct.unpack("3i", credentials[0])[0] if credentials else 0
        return json.loads(raw), pid

    def _error(self, order: str, reason: str) -> TestbedError:
        return TestbedError.of(f"testbed.{self.name}", order, reason, subject="testbed")


def start_supervisor(owner: Owner, access: str, *, log: Path) -> tuple[subprocess.Popen[bytes], Remote]:
    """Start the supervisor of a bed; the switch still has to say hello."""
    ours, theirs = socket_pair()
    owner_fd = os.pidfd_open(owner.pid)
    request = {"owner": owner.pid, "control": theirs.fileno(), "owner_fd": owner_fd, "access": access}
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx_lab.testbed.supervisor", json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, VARIABLE: owner.tag},
                pass_fds=(theirs.fileno(), owner_fd),
                start_new_session=True,
            )
    finally:
        theirs.close()
        os.close(owner_fd)
    return process, Remote("switch", ours)

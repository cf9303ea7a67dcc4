"""The membership service of one machine: a TCPStore in a process of its own, which a supervisor starts and starts again.

It lives outside of the workers, so that no worker's death takes it along, and outside of the supervisor, which forks. Its values die with it:
`epoch` tells its clients so. The kernel ends it when the supervisor ends. With a lease (`until_s`) it ends by itself when that is over, unless it is renewed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from phalanx.core.clock import since_boot_s
from phalanx.core.errors import RunError
from phalanx.runtime.comm import STOP_SIGNALS, die_with_parent, listening_socket
from phalanx.runtime.membership.keys import EPOCH, TcpService

START_S = 10.0
LOOK_S = 0.05
"""How often a process with a lease looks whether that is over."""
LEASE = struct.Struct("d")


@dataclass
class StoreProcess:
    """A running service."""

    pid: int
    address: TcpService
    ended: bool = False
    lease: int = -1
    """Through which the process hears until when it may go on; -1: for ever."""

    def reap(self) -> bool:
        """Whether it has ended; its status is collected."""
        if not self.ended:
            with contextlib.suppress(ChildProcessError):
                self.ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self.ended

    def renew(self, until_s: float) -> None:
        """It may go on until then (`since_boot_s`)."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.lease, LEASE.pack(until_s))

    def stop(self) -> None:
        """End it at once."""
        if not self.reap():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True
        if self.lease >= 0:
            os.close(self.lease)
            self.lease = -1


def start_store(host: str = "127.0.0.1", port: int = 0, *, until_s: float | None = None) -> StoreProcess:
    """Fork a process that keeps a TCPStore at `host:port` (0: the system chooses). Raises `RunError` where the port is taken.

    `until_s`: when it ends by itself unless `StoreProcess.renew` is called (`since_boot_s`); None: never.

    Call it from the main thread: the kernel ends the service when the thread that forked it ends.
    """
    listener = listening_socket(host, port)
    number = listener.getsockname()[1]
    ready, tell = os.pipe()
    hear, lease = (-1, -1) if until_s is None else os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            if lease >= 0:
                os.close(lease)
            store = _keep(host, number, listener.fileno(), parent=parent, tell=tell)
            _stay(store, hear, until_s)
        finally:
            os._exit(1)
    os.close(tell)
    if hear >= 0:
        os.close(hear)
    listener.close()
    try:
        if os.read(ready, 1) != b"+":  # the pipe closes where it died before
            raise RunError(f"the membership service at {host}:{number} ended while it started")
    finally:
        os.close(ready)
    return StoreProcess(pid=pid, address=TcpService(host, number), lease=lease)


def _keep(host: str, port: int, listen_fd: int, *, parent: int, tell: int) -> dist.TCPStore:
    os.setsid()
    die_with_parent(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends it, last of all
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timeout=timedelta(seconds=START_S),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    store.set(EPOCH, secrets.token_hex(6))
    os.write(tell, b"+")
    os.close(tell)
    return store


def _stay(store: dist.TCPStore, hear: int, until_s: float | None) -> None:
    """While this process is allowed to; `store` serves in threads of its own."""
    while until_s is None:
        time.sleep(3600.0)
    poll = select.poll()
    poll.register(hear, select.POLLIN)
    while (left_s := until_s - since_boot_s()) > 0:
        if poll.poll(min(left_s, LOOK_S) * 1000):  # which does not count while the machine is suspended
            data = os.read(hear, LEASE.size * 512)
            if not data:  # whoever renewed it has ended
                return
            until_s = LEASE.unpack(data[-LEASE.size :])[0]

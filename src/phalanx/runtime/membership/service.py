"""The membership service of one machine: a TCPStore in a process of its own, which a supervisor starts and starts again.

It lives outside of the workers, so that no worker's death takes it along, and outside of the supervisor, which forks. Its values die with it:
its clients see another `epoch`. This file also finds the service of a recipe's address and asks it, before any rank is started, what run it serves. The kernel ends it when the supervisor ends. With a lease (`until_s`) it ends by itself when that is over, unless it is renewed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from phalanx.core.clock import since_boot_s
from phalanx.core.errors import RunError
from phalanx.core.service_address import ServiceAddress
from phalanx.runtime.membership.keys import EPOCH, Service, ServiceLost, TcpKeys, TcpService
from phalanx.runtime.membership.keys_etcd import EtcdService
from phalanx.runtime.processes import STOP_SIGNALS, die_with_parent, listening_socket

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
    """Pipe that carries the end of its lease to the process; -1: it has none."""

    def reap(self) -> bool:
        """Whether it has ended; its status is collected."""
        if not self.ended:
            with contextlib.suppress(ChildProcessError):
                self.ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self.ended

    def renew(self, until_s: float) -> None:
        """Extend its lease until then (`since_boot_s`)."""
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
    ready, started = os.pipe()
    renewals, lease = (-1, -1) if until_s is None else os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            if lease >= 0:
                os.close(lease)
            store = _keep(host, number, listener.fileno(), parent=parent, started=started)
            _stay(store, renewals, until_s)
        finally:
            os._exit(1)
    os.close(started)
    if renewals >= 0:
        os.close(renewals)
    listener.close()
    try:
        if os.read(ready, 1) != b"+":  # the pipe closes where it died before
            raise RunError(f"the membership service at {host}:{number} ended while it started")
    finally:
        os.close(ready)
    return StoreProcess(pid=pid, address=TcpService(host, number), lease=lease)


def _keep(host: str, port: int, listen_fd: int, *, parent: int, started: int) -> dist.TCPStore:
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
    os.write(started, b"+")
    os.close(started)
    return store


def _stay(store: dist.TCPStore, renewals: int, until_s: float | None) -> None:
    """Return when the lease is over; `store` serves in threads of its own."""
    while until_s is None:
        time.sleep(3600.0)
    poll = select.poll()
    poll.register(renewals, select.POLLIN)
    while (left_s := until_s - since_boot_s()) > 0:
        if poll.poll(min(left_s, LOOK_S) * 1000):  # which does not count while the machine is suspended
            data = os.read(renewals, LEASE.size * 512)
            if not data:  # whoever renewed it has ended
                return
            until_s = LEASE.unpack(data[-LEASE.size :])[0]


AGAIN_S = 0.1
NOTICE_S = 2.0
WANTED = "wanted"
"""How many ranks a run began with, on which its mapping rests: a host that comes later with another number takes this one."""


def service_at(address: ServiceAddress) -> TcpService | EtcdService | AnyService:
    """Where members meet."""
    if address.is_etcd:
        return EtcdService(address.host, address.port, address.run)
    if address.standbys:
        return AnyService([TcpService(host, port) for host, port in ((address.host, address.port), *address.standbys)])
    return TcpService(address.host, address.port)


class AnyService:
    """Services of which one at most keeps values (`runtime/membership/lighthouse.py`): the one that answers is meant."""

    def __init__(self, services: Sequence[TcpService]) -> None:
        self.services = list(services)

    @property
    def host(self) -> str:
        """Host of the one that answered last: names of the others may not resolve any more."""
        return self.services[0].host

    @property
    def port(self) -> int:
        return self.services[0].port

    def connect(self) -> TcpKeys:
        """Raises `ServiceLost` where none answers. The one that answered last is asked first."""
        errors = list[str]()
        for service in self.services:
            try:
                keys = service.connect()
            except ServiceLost as err:
                errors.append(str(err))
            else:
                self.services = sorted(self.services, key=lambda s: s != service)  # a new list: threads share this one
                return keys
        raise ServiceLost("; ".join(errors))


def expect_service(service: Service, where: str, *, wait_s: float, tell: Callable[[str], None]) -> bool:
    """Return once it answers: whether a run is under way there. Raises `RunError` where it does not within `wait_s`, or serves a run that is over or was stopped."""
    end_s, notice_s = time.monotonic() + wait_s, time.monotonic() + NOTICE_S
    while True:
        try:
            keys = service.connect()
            break
        except ServiceLost as err:
            if time.monotonic() > end_s:
                raise RunError(f"{err}; waited {wait_s:g} s for it (resilience.wait_s)") from None
            if time.monotonic() > notice_s:
                notice_s = float("inf")
                tell(f"waiting for the membership service at {where} (`phalanx service` keeps one)")
            time.sleep(AGAIN_S)
    try:
        over, first = keys.get("finished"), keys.get("first")
        stopped, stop = keys.get("stopped"), keys.get("stop")
    finally:
        keys.close()
    if over is not None:
        raise RunError(
            f"the run of the membership service at {where} is over, after {over.split()[0]} steps; "
            "start another service, or in etcd use another name"
        )
    if stopped is not None or stop is not None:
        state = "was stopped" if stopped is not None else "is being stopped"
        raise RunError(
            f"the run of the membership service at {where} {state} ({stop or 'no reason given'}); no member can join it. "
            "Start another service, or in etcd use another name; the same command then continues from the newest checkpoint"
        )
    return first is not None


def run_at(service: Service, *, wanted: int) -> tuple[int, bool]:
    """(ranks that the run there begins with: those of the first host that asked, else `wanted`; whether it is under way)."""
    try:
        keys = service.connect()
        try:
            return int(keys.create(WANTED, str(wanted))), keys.get("first") is not None
        finally:
            keys.close()
    except ServiceLost:
        return wanted, False

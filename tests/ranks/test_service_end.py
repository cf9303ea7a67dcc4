"""When `phalanx service` ends: on Ctrl-C at once, on SIGTERM after the hosts of its run, with `--until-over` by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError
from phalanx.core.service_address import ServiceAddress
from phalanx.runtime.membership import service
from phalanx.runtime.membership.credentials import VARIABLE
from phalanx.runtime.membership.keys import Keys, ServiceLost, TlsService
from phalanx.runtime.membership.membership import ENDED, Beat, Membership
from phalanx_lab.testbed.slurm import free_ports

pytest.importorskip("cryptography", reason="no package cryptography here (extra service)")
pytestmark = pytest.mark.ranks
LIMIT_S = 60.0


class Host:
    """Sends heartbeats until it ends."""

    def __init__(self, keys: Keys) -> None:
        self._keys, self._over = keys, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        for count in range(1_000_000):
            try:
                Membership(self._keys).heartbeat("h0", Beat(count))
            except ServiceLost:  # ended by Ctrl-C
                break
            if self._over.wait(0.1):
                break

    def end(self, *, said: bool) -> None:
        self._over.set()
        self._thread.join()
        if said:
            self._keys.put(f"{ENDED}h0", "null")


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run.pem"))
    return free_ports(1)[0]


def begin(port: int, *, until_over: bool) -> int:
    """The process that serves. Its exit code: 0, or 3 where the run was not finished."""
    pid = os.fork()
    if pid == 0:
        try:
            finished = service.serve(ServiceAddress("127.0.0.1", port), until_over=until_over, tell=lambda text: None)
            os._exit(0 if finished else 3)
        finally:
            os._exit(1)
    return pid


def connected(port: int) -> Keys:
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return TlsService("127.0.0.1", port).connect()
        except (ServiceLost, ConfigError):  # it makes its credentials
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def code_of(pid: int) -> int:
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the service did not end")


@pytest.mark.parametrize("said", [True, False])
def test_sigterm_ends_it_after_the_hosts(port: int, said: bool) -> None:
    pid = begin(port, until_over=False)
    host = Host(connected(port))
    os.kill(pid, signal.SIGTERM)
    time.sleep(service.SILENT_S / 2)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a host is there: it hands over by what is kept here"
    host.end(said=said)
    assert code_of(pid) == 3


def test_ctrl_c_ends_it_at_once(port: int) -> None:
    pid = begin(port, until_over=False)
    host = Host(connected(port))
    begin_s = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert code_of(pid) == 3
    assert time.monotonic() - begin_s < service.HOSTS_END_S / 4
    with pytest.raises(ServiceLost):
        TlsService("127.0.0.1", port).connect()
    host._over.set()


@pytest.mark.parametrize(("key", "code"), [("finished", 0), ("stopped", 3)])
def test_it_ends_by_itself_when_the_run_is_over(port: int, key: str, code: int) -> None:
    pid = begin(port, until_over=True)
    keys = connected(port)
    host = Host(keys)
    time.sleep(1.5)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    host.end(said=True)
    keys.put(key, "8 1")
    assert code_of(pid) == code

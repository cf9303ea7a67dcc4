"""A store of values: what it keeps, whom it answers, and what a stranger can do to it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.files import private_folder
from phalanx.runtime.membership import store as server
from phalanx.runtime.membership.credentials import (
    VARIABLE,
    check_private,
    client_context,
    make_credentials,
    own_credentials,
)
from phalanx.runtime.membership.keys import Keys, ServiceLost, TlsService, UnixService
from phalanx.runtime.membership.reachability import ProbeListener, probe_all
from phalanx.runtime.membership.service import StoreProcess, _came, start_network_store, start_store
from phalanx.runtime.membership.store import ARGUMENTS, LENGTH, Refused, Values, read_request
from phalanx.runtime.processes.addresses import interfaces

pytestmark = pytest.mark.unit
KINDS = ("socket", "tls")
NOBODY = 65534


def started(kind: str) -> StoreProcess:
    return start_store() if kind == "socket" else start_network_store("127.0.0.1", 0)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[StoreProcess]:
    process = started(request.param)
    yield process
    process.stop()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[StoreProcess]:
    """What it says is in `said(tmp_path)`."""
    before = os.dup(2)
    with (tmp_path / "said").open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        process = started("tls")
    finally:
        os.dup2(before, 2)
        os.close(before)
    yield process
    process.stop()


def later(keys: Keys) -> threading.Thread:
    """Write the key in a moment."""
    thread = threading.Timer(0.2, lambda: keys.put("k", "x"))
    thread.start()
    return thread


def test_a_wait_ends_when_the_key_is_there_when_its_time_is_over_or_when_its_caller_says_so(
    store: StoreProcess,
) -> None:
    one, two = store.address.connect(), store.address.connect()
    begin_s = time.monotonic()
    assert not one.wait("k", 0.1) and time.monotonic() - begin_s > 0.09
    assert not one.wait("k", 100.0, over=lambda: time.monotonic() - begin_s > 0.3)
    writing = later(two)
    assert one.wait("k", 100.0) and one.wait("k", 100.0) and time.monotonic() - begin_s < 50.0
    writing.join()
    assert not one.wait("other", 0.0) and one.get("k") == "x"


def test_one_that_ends_in_a_wait_is_forgotten(store: StoreProcess) -> None:
    one, two = store.address.connect(), store.address.connect()

    def wait() -> None:
        with pytest.raises(ServiceLost):
            one.wait("k", 50.0)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.2)
    one._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    waiting.join(20.0)
    two.put("k", "x")
    assert not waiting.is_alive() and two.get("k") == "x"


def test_nobody_but_its_user_can_reach_a_socket() -> None:
    process = start_store()
    try:
        assert isinstance(process.address, UnixService)
        path = process.address.path
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600 and stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(path))
                    code = 1
            except PermissionError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        process.stop()
    assert not path.parent.exists()


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder()
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(RunError, match="nobody else can reach"):
        private_folder()
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(RunError, match=r"nobody else can reach .*; remove it, or set XDG_RUNTIME_DIR to a folder"):
        private_folder()
    monkeypatch.setattr(os, "geteuid", lambda: folder.lstat().st_uid + 1)  # in a sticky /tmp nobody else can remove it
    with pytest.raises(RunError, match=r"is another user's, who alone can remove it: set XDG_RUNTIME_DIR to a folder"):
        private_folder()


def test_what_a_killed_keeper_left_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lives, dead = start_store(), start_store()
    assert isinstance(lives.address, UnixService) and isinstance(dead.address, UnixService)
    dead.kill()
    dead._listener.close()
    other = start_store()
    assert lives.address.path.exists() and not dead.address.path.parent.exists()
    for process in (lives, other):
        process.stop()


def test_credentials_that_a_service_has_made_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = start_network_store("127.0.0.1", 0)
    assert isinstance(process.address, TlsService)
    made = own_credentials(process.address.port)
    assert made.exists()
    process.stop()
    assert not made.exists()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept.pem"))
    start_network_store("127.0.0.1", 0).stop()
    assert (tmp_path / "kept.pem").exists()


@pytest.mark.skipif("::1" not in interfaces(), reason="this machine has no IPv6")
def test_a_cluster_of_ipv6_alone_has_a_service_and_members_that_are_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = start_network_store("::1", 0)
    assert isinstance(process.address, TlsService)
    keys = process.address.connect()
    assert keys.create("a", "1") == "1" and keys.where == f"[::1]:{process.address.port}"
    listener = ProbeListener("::1")
    addresses = {"here": listener.address}
    assert probe_all(addresses).answered == {"here"}
    listener.close()
    assert probe_all(addresses).refused == {"here"}
    keys.close()
    process.stop()


# -- strangers


def said(folder: Path, limit_s: float = 60.0) -> str:
    """What the store has said once somebody was refused."""
    end_s = time.monotonic() + limit_s
    while not (text := (folder / "said").read_text()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return text


def address_of(process: StoreProcess) -> tuple[str, int]:
    assert isinstance(process.address, TlsService)
    return process.address.host, process.address.port


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", LENGTH.pack(20) + b'["put", "stop", "x"]', pickle.dumps({"a": 1})]
)
def test_a_stranger_without_tls_is_refused_and_named(data: bytes, network: StoreProcess, tmp_path: Path) -> None:
    member = network.address.connect()
    with socket.create_connection(address_of(network)) as sock:
        sock.sendall(data)
        sock.settimeout(20.0)
        found = sock.recv(1 << 16)
    assert b"ok" not in found
    assert "the membership service refused 127.0.0.1: " in said(tmp_path)
    assert member.listed("") == []


@pytest.mark.parametrize("with_own", [False, True])
def test_a_stranger_with_another_certificate_or_none_is_refused(
    with_own: bool, network: StoreProcess, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # he does not care whom he speaks with
    if with_own:
        make_credentials(tmp_path / "his.pem")
        context.load_cert_chain(tmp_path / "his.pem")
    with pytest.raises(OSError), socket.create_connection(address_of(network), timeout=20.0) as sock:
        wrapped = context.wrap_socket(sock)  # TLS 1.3: he learns with his first answer
        message = json.dumps(["put", "stop", "x"]).encode()
        wrapped.sendall(LENGTH.pack(len(message)) + message)
        if not wrapped.recv(1 << 16):
            raise OSError("closed")
    assert "refused 127.0.0.1" in said(tmp_path)
    assert network.address.connect().get("stop") is None


def test_a_member_does_not_believe_a_service_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ours.pem", "his.pem"):
        make_credentials(tmp_path / name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "his.pem"))
    process = start_network_store("127.0.0.1", 0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ours.pem"))
    with pytest.raises(ServiceLost, match="certificate"):
        process.address.connect()
    process.stop()


def test_idle_strangers_keep_no_member_out(network: StoreProcess) -> None:
    idle = [socket.create_connection(address_of(network)) for _ in range(300)]
    begin_s = time.monotonic()
    members = [network.address.connect() for _ in range(3)]
    members[0].put("k", "x")
    assert members[1].get("k") == "x" and time.monotonic() - begin_s < 20.0
    for sock in idle:
        sock.close()


@pytest.mark.parametrize(
    "message",
    [b"", b"{}", b"[]", b"[1]", b'["get"]', b'["get", "a"]', b'["put", "a"]', b'["put", "a", 1]', b'["wait", "a", -1]', b'["wait", "a", NaN]',
     b'["__init__"]', b'["delete_below", "a", true]', b"[" * 100_000, pickle.dumps("x")],
)  # fmt: skip
def test_what_is_no_request_is_refused(message: bytes) -> None:
    with pytest.raises(Refused):
        read_request(message)


def test_a_member_that_talks_nonsense_loses_its_connection_only(store: StoreProcess) -> None:
    for message in (b"nonsense", b'["get", 5]'):
        keys = store.address.connect()
        keys._socket.sendall(LENGTH.pack(len(message)) + message)  # type: ignore[attr-defined]
        with pytest.raises(ServiceLost, match=r"refused|does not answer"):
            keys.get("x")
            keys.get("x")
    keys = store.address.connect()
    keys._socket.sendall(LENGTH.pack((1 << 32) - 1))  # type: ignore[attr-defined]
    with pytest.raises(ServiceLost):
        keys.get("x")
        keys.get("x")
    assert store.address.connect().get("x") is None


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    values = Values()
    monkeypatch.setattr(server, "TOTAL_BYTES", 1000)
    values.put("a", "x" * 700)
    with pytest.raises(Refused, match="'b' would take more"):
        values.put("b", "y" * 100)
    values.put("a", "x" * 10)
    values.put("b", "y" * 100)
    values.delete("a")
    values.put("c", "z" * 400)
    assert values.delete_below("", 9) == 2 and values._bytes == 0
    with pytest.raises(Refused, match="characters"):
        values.put("k" * 2000, "")


def test_every_operation_is_known_to_its_values() -> None:
    assert all(hasattr(Values, name) for name in ARGUMENTS if name not in ("wait", "cancel"))


# -- credentials


def test_credentials_are_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    make_credentials(path)
    check_private(path)
    client_context(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"has mode 0640.*chmod 600"):
        check_private(path)
    path.chmod(0o600)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="no key with certificates"):
        client_context(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_private(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        check_private(tmp_path)


def test_a_service_without_credentials_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no service of this user has left any there
    with pytest.raises(ConfigError, match=rf"{VARIABLE}.*phalanx service.*export {VARIABLE}=FILE"):
        TlsService("10.0.0.1", 1).connect()


def test_who_keeps_a_service_and_was_stopped_for_a_while_keeps_it() -> None:
    """SIGSTOP while it waits for a signal, SIGCONT after the time of that wait: CPython then returns a signal that never came."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            came = [_came({signal.SIGTERM}, 0.02) for _ in range(20)]
            os._exit(3 if any(came) else 0 if _came({signal.SIGTERM}, 5.0) == signal.SIGTERM else 4)
        finally:
            os._exit(1)
    for _ in range(3):
        time.sleep(0.03)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.6)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

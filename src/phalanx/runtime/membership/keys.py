"""Named values that all members of a run see, kept by a process outside of them: what membership and votes are built on.

Two kinds of keys exist: those that the first writer decides for ever (`create`), and those that one owner writes again and again (`put`). No value
is ever added to or counted up, because a client that lost its connection cannot know whether an addition has happened; all calls here may be repeated.

    SocketKeys  a store of our own (`runtime/membership/store.py`), over a UNIX socket or TLS; nothing outlives its process
    EtcdKeys    etcd (`runtime/membership/keys_etcd.py`); values outlive its restart

`KeysStore` is a `torch.distributed` store on top of `Keys`, so that process groups meet at the membership service whatever it is. torch's own TCPStore knows neither users nor
certificates: whoever reaches its port may read and write. Its values are bytes and travel as base64.

Must never change: one object is one connection. Once it has failed it fails for ever, and whoever connects again looks at `epoch`: another one
means that all values are gone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line
from phalanx.core.reading import parse_json
from phalanx.core.service_address import is_loopback, place
from phalanx.runtime.membership.credentials import client_context, find_credentials, named_credentials, own_credentials
from phalanx.runtime.membership.store import LENGTH, MESSAGE_BYTES

CALL_S = 2.0
"""A service that does not answer for so long counts as lost."""
EPOCH = "epoch"

FIRST_LOOK_S = 0.0002
LAST_LOOK_S = 0.01
ASKED_PER_S = 10_000
"""Most polls per second that all clients that wait for a key send to a service together. Not a measured limit: it keeps the load of a job independent of its number of ranks."""
OPENING = threading.Lock()
"""Held while this process opens connections, so that none of them is taken for a socket of a process group (`runtime/membership/rendezvous.py`)."""


class ServiceLost(PeerError):
    """The membership service does not answer. What was asked of it last may or may not have happened."""


Over = Callable[[], bool]


class Keys(Protocol):
    """One connection to the service. Every call raises `ServiceLost` where the service does not answer."""

    epoch: str
    """Names the life of the values: a service that lost them has another one."""

    def get(self, key: str) -> str | None:
        """The value, or None where there is none."""

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """Values of all keys, each as `get` returns it, in a number of calls that hardly depends on how many they are. For keys
        that are not deleted meanwhile."""

    def put(self, key: str, value: str) -> None:
        """Write; returns when the service has it."""

    def create(self, key: str, value: str) -> str:
        """Write where nothing stands yet; returns what then stands there. The first writer decides."""

    def all_there(self, keys: Sequence[str]) -> bool:
        """Whether every one of `keys` exists."""

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        """Block until `key` exists; False after the time, or once `over` returns true.

        `sharing`: how many clients wait at the service at once, so that all together do not ask too often.
        """

    def listed(self, prefix: str) -> list[str]:
        """Names of all keys with this prefix, sorted."""

    def delete(self, key: str) -> None:
        """Delete the key, whether it exists or not."""

    def delete_below(self, prefix: str, *, most: int) -> int:
        """Delete keys with this prefix; returns how many, `most` where there may be more."""

    def tidy(self) -> None:
        """Let the service drop old versions of values, where it keeps them. Called periodically, by few clients."""

    def close(self) -> None:
        """Close the connection."""


class Service(Protocol):
    """Where the service is."""

    def connect(self) -> Keys:
        """A new connection. Raises `ServiceLost`."""


@dataclass(frozen=True)
class UnixService:
    """A store at a socket of this machine, which only its user can open."""

    path: Path

    def connect(self) -> SocketKeys:
        """Raises `ServiceLost` where nothing listens."""
        return SocketKeys(str(self.path), self._open)

    def _open(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CALL_S)
            sock.connect(str(self.path))
        except BaseException:
            sock.close()
            raise
        return sock


@dataclass(frozen=True)
class TlsService:
    """A store at an address, which only who has the credentials of its run can open."""

    host: str
    port: int

    def connect(self) -> SocketKeys:
        """Raises `ServiceLost` where nothing listens, or what listens does not believe this process or is not believed; `ConfigError` without credentials."""
        if is_loopback(self.host) and named_credentials() is None and not own_credentials(self.port).exists():
            raise ServiceLost(
                f"the membership service at {place(self.host, self.port)} cannot be reached: none was ever started there"
            )
        context = client_context(find_credentials(self.port))
        return SocketKeys(place(self.host, self.port), lambda: self._open(context))

    def _open(self, context: ssl.SSLContext) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=CALL_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(sock)
        except BaseException:
            sock.close()
            raise


class SocketKeys:
    """A client of a store. Threads may share it, but a wait of one holds up the others."""

    def __init__(self, where: str, connect: Callable[[], socket.socket], *, timeout_s: float = CALL_S) -> None:
        self.where, self.timeout_s = where, timeout_s
        self._lost = ""
        self._lock = threading.Lock()
        self._read = bytearray()
        with OPENING:
            try:
                self._socket = connect()
            except OSError as err:  # ssl.SSLError is one
                raise ServiceLost(f"the membership service at {where} cannot be reached: {_reason(err)}") from None
        with self._lock:
            self.epoch = str(self._answer(time.monotonic() + timeout_s))

    def get(self, key: str) -> str | None:
        return self.values([key])[0]

    def values(self, keys: Sequence[str]) -> list[str | None]:
        found: list[str | None] = self._ask("get", list(keys))
        return found

    def put(self, key: str, value: str) -> None:
        self._ask("put", key, value)

    def create(self, key: str, value: str) -> str:
        return str(self._ask("create", key, value))

    def all_there(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("there", list(keys)))

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        with self._lock:
            self._send("wait", key, timeout_s)
            end_s = time.monotonic() + timeout_s + self.timeout_s
            while over is not None and not self._arrives(LAST_LOOK_S):
                if time.monotonic() > end_s or over():
                    self._send("cancel")
                    break
            return bool(self._answer(end_s))

    def listed(self, prefix: str) -> list[str]:
        found: list[str] = self._ask("listed", prefix)
        return found

    def delete(self, key: str) -> None:
        self._ask("delete", key)

    def delete_below(self, prefix: str, *, most: int) -> int:
        return int(self._ask("delete_below", prefix, most))

    def tidy(self) -> None:
        """Values have no versions here."""

    def close(self) -> None:
        self._lost = self._lost or "this connection was closed"
        self._socket.close()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            self._send(operation, *arguments)
            return self._answer(time.monotonic() + self.timeout_s)

    def _send(self, operation: str, *arguments: Any) -> None:
        if self._lost:
            raise ServiceLost(self._lost)
        data = json.dumps([operation, *arguments]).encode()
        try:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(LENGTH.pack(len(data)) + data)
        except OSError as err:
            raise self._failed(_reason(err)) from None

    def _arrives(self, seconds: float) -> bool:
        """Whether a whole answer is here within so many seconds."""
        end_s = time.monotonic() + seconds
        while not self._is_whole():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                self._socket.settimeout(left_s)
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError as err:
                raise self._failed(_reason(err)) from None
            if not data:
                raise self._failed("it closed the connection")
            self._read += data
        return True

    def _is_whole(self) -> bool:
        if len(self._read) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(self._read)
        if length > MESSAGE_BYTES:
            raise self._failed(f"it sent a message of {length} bytes")
        return len(self._read) >= LENGTH.size + length

    def _answer(self, end_s: float) -> Any:
        while not self._arrives(max(0.001, end_s - time.monotonic())):
            if time.monotonic() > end_s:
                raise self._failed("timed out")
        (length,) = LENGTH.unpack_from(self._read)
        end = LENGTH.size + length
        message = bytes(self._read[LENGTH.size : end])
        del self._read[:end]
        try:
            state, result = parse_json(message, where="an answer")
        except (ValueError, TypeError):
            raise self._failed("it sent what is no answer") from None
        if state != "ok":
            raise self._failed(f"it refused: {result}")
        return result

    def _failed(self, why: str) -> ServiceLost:
        self._lost = self._lost or f"the membership service at {self.where} does not answer: {why}"
        self._socket.close()
        return ServiceLost(self._lost)


def _reason(err: OSError) -> str:
    return err.strerror or first_line(err) or type(err).__name__


def open_sockets() -> dict[int, str]:
    """File descriptor -> inode of every socket of this process (empty where the system does not list them)."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


MEETINGS = "store/"
"""Where keys of process groups are."""


def poll(
    found: Callable[[], bool],
    timeout_s: float,
    *,
    last_look_s: float = LAST_LOOK_S,
    sharing: int = 1,
    over: Over | None = None,
) -> bool:
    """Poll `found`, after 0.2 ms at first and every `last_look_s` later; False after the timeout or once `over` returns true. Slower where many share the service."""
    last_look_s = max(last_look_s, sharing / ASKED_PER_S)
    end_s, pause_s = time.monotonic() + timeout_s, max(FIRST_LOOK_S, last_look_s * FIRST_LOOK_S / LAST_LOOK_S)
    while not found():
        left_s = end_s - time.monotonic()
        if left_s <= 0 or (over is not None and over()):
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, last_look_s)
    return True


WAIT_S = 3.0
SUMS = "store-sum/"


class KeysStore(dist.Store):
    """Store with as many verbs as gloo and `init_process_group` use. A wait ends once `over` returns true."""

    def __init__(self, keys: Keys, *, timeout_s: float = WAIT_S, over: Over | None = None) -> None:
        super().__init__()
        self.keys = keys
        self.timeout_s, self.over = timeout_s, over

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.keys.put(f"{MEETINGS}{key}", base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return base64.b64decode(self.keys.get(f"{MEETINGS}{key}") or "")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """All at once, again where some have not been set yet: gloo asks so for all ranks (`runtime/processes/world.py: ease_gloo`)."""
        found: dict[str, bytes] = {}
        while missing := [key for key in keys if key not in found]:
            self.wait(missing[:1])
            values = self.keys.values([f"{MEETINGS}{key}" for key in missing])
            found |= {k: base64.b64decode(v) for k, v in zip(missing, values, strict=True) if v is not None}
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def add(self, key: str, amount: int) -> int:
        """The sum after the addition. The N-th addition to a key is a key of its own that holds the sum so far."""
        total, number, mark = 0, 0, secrets.token_hex(8)
        while True:
            place = f"{SUMS}{key}/{number}"
            found = self.keys.create(place, f"{total + amount} {mark}") if amount else self.keys.get(place)
            if found is None:
                return total
            total, number = int(found.split()[0]), number + 1
            if found.endswith(mark):
                return total

    def check(self, keys: Sequence[str]) -> bool:
        return self.keys.all_there([f"{MEETINGS}{k}" for k in keys])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Only from nothing: what process groups use."""
        if expected not in ("", b""):
            raise NotImplementedError("this store only sets values that do not exist yet")
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        return base64.b64decode(self.keys.create(f"{MEETINGS}{key}", base64.b64encode(data).decode()))

    def delete_key(self, key: str) -> bool:
        self.keys.delete(f"{MEETINGS}{key}")
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end_s = time.monotonic() + (self.timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            if not self.keys.wait(f"{MEETINGS}{key}", max(0.0, end_s - time.monotonic()), over=self.over):
                raise dist.DistStoreError(f"{key} was not set within {self.timeout_s:g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

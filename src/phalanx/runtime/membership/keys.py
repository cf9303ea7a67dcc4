"""Named values that all members of a run see, kept by a process outside of them: what membership and votes are built on.

Two kinds of keys exist: those that the first writer decides for ever (`create`), and those that one owner writes again and again (`put`). No value
is ever added to or counted up, because a client that lost its connection cannot know whether an addition has happened; all calls here may be repeated.

    TcpKeys    the TCPStore of torch, in a process that the supervisor keeps (`runtime/membership/service.py`); nothing outlives that process
               (of several such processes on several machines, the one that a lighthouse selects: `runtime/membership/lighthouse.py`)
    EtcdKeys   etcd (`runtime/membership/keys_etcd.py`); values outlive its restart

A `KeyWatcher` is a thread that blocks at the service until a key exists, on a connection of its own, so that its clients need not poll. They still poll now and
then (`Keys.watch`): a watcher that fails silently only delays them until the next poll. Where a connection ends in a wait, torch writes a C++ stack trace to
standard error, whoever ended it; so the service is asked to end the wait first.

`KeysStore` is a `torch.distributed` store on top of `Keys`, so that process groups meet at the membership service whatever it is (etcd has no store in torch but through a client that
speaks its old interface). Its values are bytes and travel as base64.

Must never change: one object is one connection. Once it has failed it fails for ever, and whoever connects again looks at `epoch`: another one
means that all values are gone.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line

END_S = 1.0
"""How long `close` waits for a thread that ends at once, as a rule: after it has asked the service, and again after it has ended the connection."""


class KeyWatcher:
    """Watches one key after another. `block` returns when a key exists and raises when the connection ends; `shut` ends it.

    `cancel` asks the service to end the wait, without waiting for the answer.
    """

    def __init__(
        self, block: Callable[[str], None], shut: Callable[[], None], *, cancel: Callable[[], None] | None = None
    ) -> None:
        self.failed = False
        self._block, self._shut, self._cancel = block, shut, cancel
        self._key = ""
        self._found = threading.Event()
        self._keys: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, key: str, timeout_s: float) -> bool | None:
        """Whether `key` was found within the time; None if this does not know, because it failed or watches another key."""
        if key != self._key and (not self._key or self._found.is_set()) and not self.failed:
            self._found.clear()
            self._key = key
            self._keys.put(key)
        if key != self._key or self.failed:
            return None
        found = self._found.wait(timeout_s)
        return None if self.failed else found

    def close(self) -> None:
        """End the thread, and wait for it: one that comes back from C++ while the interpreter ends aborts the process. From any other; safe to call again."""
        self._keys.put("")
        if self._cancel is not None and self._thread.is_alive():
            self._cancel()
            self._thread.join(END_S)
        self._shut()
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            while key := self._keys.get():
                self._block(key)
                self._found.set()
        except Exception:  # whatever the connection raises: its clients poll
            self.failed = True
            self._found.set()


CALL_S = 2.0
"""A service that does not answer for so long counts as lost."""
PROBE_S = 0.5
EPOCH = "epoch"
NEVER = timedelta(days=20)
"""Longest wait at a TCPStore (31 bits of milliseconds)."""

CANCEL_WAIT = bytes([12])
"""What a client of a TCPStore sends when the time of its wait has ended (`QueryType` in torch's TCPStoreBackend.hpp, 2.0 to 2.13). Where another version
does not know it, the connection is shut as before, and torch logs it."""

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

    def watch(self, key: str, timeout_s: float, *, sharing: int = 1) -> bool:
        """Waits as `wait` does, for a caller that waits for one key again and again and mostly without success: where the service can
        notify of a key, each call polls once. For one thread of the process."""

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
class TcpService:
    """A TCPStore at an address."""

    host: str
    port: int

    def connect(self) -> TcpKeys:
        """Raises `ServiceLost` within about a second where no service listens."""
        return TcpKeys(self.host, self.port)


class TcpKeys:
    """Client of a TCPStore, in a name space of our own."""

    def __init__(self, host: str, port: int, *, timeout_s: float = CALL_S) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._lost = ""
        self._watcher: KeyWatcher | None = None
        self._watch_failed = False
        """A watcher failed although the service did not: from then on `watch` polls."""
        with OPENING:
            try:
                self.store, _ = _open_store(host, port, timeout_s)
                self.store.wait([EPOCH], timedelta(seconds=timeout_s))
                self.epoch = self.store.get(EPOCH).decode()
            except (OSError, RuntimeError) as err:
                where = f"{host}:{port}"
                raise ServiceLost(f"the membership service at {where} cannot be reached: {first_line(err)}") from None

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        if self._lost:
            raise ServiceLost(self._lost)
        try:
            yield
        except (RuntimeError, OSError) as err:
            self._lost = f"the membership service does not answer: {first_line(err)}"
            self._close_watcher()
            raise ServiceLost(self._lost) from None

    def get(self, key: str) -> str | None:
        with self._call():
            return self.store.get(_own(key)).decode() if self.store.check([_own(key)]) else None

    def values(self, keys: Sequence[str]) -> list[str | None]:
        names = [_own(k) for k in keys]
        with self._call():
            return self._values(names)

    def _values(self, names: list[str]) -> list[str | None]:
        """The store's own call for many waits until all are there; so where some are missing, halves are asked."""
        if not names:
            return []
        if self.store.check(names):
            return [value.decode() for value in self.store.multi_get(names)]
        half = len(names) // 2
        return [None] if half == 0 else [*self._values(names[:half]), *self._values(names[half:])]

    def put(self, key: str, value: str) -> None:
        with self._call():
            self.store.set(_own(key), value)  # has no reply: a dead service would go unnoticed
            self.store.check([_own(key)])

    def create(self, key: str, value: str) -> str:
        with self._call():
            return self.store.compare_set(_own(key), "", value).decode()

    def all_there(self, keys: Sequence[str]) -> bool:
        with self._call():
            return bool(self.store.check([_own(k) for k in keys]))

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        # the store's own wait logs a warning whenever its time ends
        return poll(lambda: self.all_there([key]), timeout_s, sharing=sharing, over=over)

    def watch(self, key: str, timeout_s: float, *, sharing: int = 1) -> bool:
        if self.all_there([key]):
            return True
        watcher = self._open_watcher()
        found = None if watcher is None else watcher.wait_for(_own(key), timeout_s)
        if watcher is not None and watcher.failed:
            self._close_watcher()
            self._watch_failed = True
        return self.wait(key, timeout_s, sharing=sharing) if found is None else found

    def _open_watcher(self) -> KeyWatcher | None:
        """None while process groups form, for as long as a constructor takes, and after a failure."""
        if self._watcher is None and not self._watch_failed and OPENING.acquire(blocking=False):
            try:
                store, fds = _open_store(self.host, self.port, self.timeout_s)
                sockets = [socket.socket(fileno=os.dup(fd)) for fd in fds]
                # its time never ends, so it logs nothing; what ends it is `CANCEL_WAIT`, or else the end of its connection
                self._watcher = KeyWatcher(
                    lambda key: store.wait([key], NEVER),
                    lambda: _shut_all(sockets),
                    cancel=lambda: _cancel_wait(sockets),
                )
                weakref.finalize(self, _close_in_owner, self._watcher, os.getpid())
            except (OSError, RuntimeError):
                self._watch_failed = True
            finally:
                OPENING.release()
        return self._watcher

    def _close_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._watcher = None

    def listed(self, prefix: str) -> list[str]:
        with self._call():
            found = (k.lstrip("/") for k in self.store.list_keys())
            return sorted(k[len(SPACE) :] for k in found if k.startswith(SPACE + prefix))

    def delete(self, key: str) -> None:
        with self._call():
            self.store.delete_key(_own(key))

    def delete_below(self, prefix: str, *, most: int) -> int:
        below = (SPACE + prefix, prefix.removeprefix(MEETINGS)) if prefix.startswith(MEETINGS) else (SPACE + prefix,)
        with self._call():
            names = [k.lstrip("/") for k in self.store.list_keys()]
            gone = [k for k in names if k.startswith(below)][:most]
            for name in gone:
                self.store.delete_key(name)
        return len(gone)

    def tidy(self) -> None:
        """Values have no versions here."""

    def close(self) -> None:
        self._lost = self._lost or "this connection was closed"
        self._close_watcher()
        self.store = None


def _close_in_owner(watcher: KeyWatcher, pid: int) -> None:
    """Does nothing in a process that was forked since, which shares the connection."""
    if os.getpid() == pid:
        watcher.close()


def _open_store(host: str, port: int, timeout_s: float) -> tuple[Any, list[int]]:
    """A client, and the descriptors of its connection (none where the system does not list them). The caller holds `OPENING`."""
    before = open_sockets()
    # torch tries a port that refuses again and again, for twice its timeout (measured, 2.13)
    socket.create_connection((host, port), timeout=PROBE_S).close()
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    found = [fd for fd in open_sockets().keys() - before.keys() if _is_to(fd, port)]
    for fd in found:
        _limit_silence(fd, timeout_s)
    return store, found


def _is_to(fd: int, port: int) -> bool:
    """Whether the socket is connected to that port: other threads may have opened some that are not ours."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port
    return False


def _cancel_wait(sockets: Sequence[socket.socket]) -> None:
    """Let the service end the wait of these connections: it answers, and the wait raises without output on standard error."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.send(CANCEL_WAIT, socket.MSG_DONTWAIT)


def _shut_all(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


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


def _limit_silence(fd: int, timeout_s: float) -> None:
    """The store's own timeout does not cover its short calls: a service that is stopped would hold them for ever (measured, 2.13)."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


SPACE = "phalanx/"
"""Keys of membership, apart from those that process groups leave in the same store."""
MEETINGS = "store/"
"""Where keys of process groups are, as seen from outside of them; in a TCPStore they are outside of `SPACE`."""


def _own(key: str) -> str:
    return SPACE + key


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
    """Store with as many verbs as gloo and `init_process_group` use."""

    def __init__(self, keys: Keys, *, timeout_s: float = WAIT_S) -> None:
        super().__init__()
        self.keys = keys
        self.timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.keys.put(f"{MEETINGS}{key}", base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return base64.b64decode(self.keys.get(f"{MEETINGS}{key}") or "")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

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
            if not self.keys.wait(f"{MEETINGS}{key}", max(0.0, end_s - time.monotonic())):
                raise LookupError(f"{key} was not set within {self.timeout_s:g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

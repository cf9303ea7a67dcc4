"""The values of one run, kept by a process that answers its members over a socket (`runtime/membership/keys.py` has their side).

A message is a length of 4 bytes, big endian, and as many bytes of JSON: a request is an operation and its arguments, an answer `["ok", result]` or `["refused", why]`. The first
message of a connection is an answer nobody asked for: the epoch. A connection asks one thing at a time. Messages, values and their sum are bounded.

Who may ask: on a UNIX socket the user that the kernel names, on any other whoever shows the certificate of this run (mutual TLS, `runtime/membership/credentials.py`) within
`HANDSHAKE_S`; of those that have not shown one yet at most `STRANGERS` are heard. Whoever is refused is named once on standard error.

Must never change: nothing of a message is executed, and no operation adds to a value (see `keys.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.errors import first_line
from phalanx.core.reading import MalformedError, parse_json

LENGTH = struct.Struct(">I")
MESSAGE_BYTES = 64 << 20
"""Longest message: the votes and reports of ten thousand members fit."""
TOTAL_BYTES = 512 << 20
KEY_CHARACTERS = 1024
KEY_COSTS = 200
"""What a key takes beside its characters and those of its value, in bytes."""
HANDSHAKE_S = 5.0
STRANGERS = 128
"""Connections that have not shown a certificate yet; of more, the oldest are closed."""
BACKLOG = 1024
NAMED_AGAIN_S = 60.0
"""Whoever is refused again and again from one address is named so often."""


class Refused(ValueError):
    """A request that is not answered, and why."""


class Values:
    """Keys and values, and what is done with them. Raises `Refused`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self._values.get(key) for key in keys]

    def there(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def put(self, key: str, value: str) -> None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else KEY_COSTS + len(key) + len(value)
        if len(key) > KEY_CHARACTERS:
            raise Refused(f"a key of {len(key)} characters; at most {KEY_CHARACTERS}")
        if more > 0 and self._bytes + more > TOTAL_BYTES:
            raise Refused(f"all values together may take {TOTAL_BYTES >> 20} MiB, and {key!r} would take more")
        self._values[key] = value
        self._bytes += more

    def create(self, key: str, value: str) -> str:
        if key not in self._values:
            self.put(key, value)
        return self._values[key]

    def listed(self, prefix: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(prefix))

    def delete(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= KEY_COSTS + len(key) + len(value)

    def delete_below(self, prefix: str, most: int) -> int:
        gone = self.listed(prefix)[: max(0, most)]
        for key in gone:
            self.delete(key)
        return len(gone)


ARGUMENTS: dict[str, tuple[str, ...]] = {
    "get": ("keys",), "there": ("keys",), "put": ("text", "text"), "create": ("text", "text"), "wait": ("text", "seconds"), "cancel": (),
    "listed": ("text",), "delete": ("text",), "delete_below": ("text", "count"),
}  # fmt: skip
"""Operations, and what their arguments are."""
KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda x: isinstance(x, str),
    "keys": lambda x: isinstance(x, list) and all(isinstance(each, str) for each in x),
    "seconds": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1e9,
    "count": lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31,
}


def read_request(data: bytes) -> tuple[str, list[Any]]:
    """(operation, arguments). Raises `Refused`."""
    try:
        found = parse_json(data, where="a request")
    except MalformedError:
        raise Refused("a message that is not JSON") from None
    if not isinstance(found, list) or not found or not isinstance(found[0], str) or found[0] not in ARGUMENTS:
        raise Refused(f"a message that is no request; operations are {', '.join(ARGUMENTS)}")
    kinds, given = ARGUMENTS[found[0]], found[1:]
    if len(given) != len(kinds) or not all(KINDS[kind](x) for kind, x in zip(kinds, given, strict=True)):
        raise Refused(f"{found[0]} takes ({', '.join(kinds)})")
    return found[0], given


class ValueServer:
    """Serves `Values` in an event loop."""

    def __init__(self, epoch: str, *, tell: Callable[[str], None]) -> None:
        self.epoch, self.tell = epoch, tell
        self.values = Values()
        self.waiting: dict[str, list[_Connection]] = {}
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}
        self._named: dict[str, float] = {}

    async def serve(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Answer whoever connects, until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or who connected has gone again
                self._close_oldest_stranger()
                await asyncio.sleep(0.01)
                continue
            while len(self._strangers) >= STRANGERS:
                self._close_oldest_stranger()
            task = loop.create_task(self._admit(sock, context))
            self._strangers[task] = sock
            task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _admit(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        """Let one in that may ask. Everything about it goes wrong for itself alone."""
        loop = asyncio.get_running_loop()
        who = _name_of(sock)
        try:
            if sock.family == socket.AF_UNIX:
                _check_user(sock)
            elif context is None:
                raise Refused("no address but a UNIX socket is served without TLS")
            limit_s = None if context is None else HANDSHAKE_S
            await loop.connect_accepted_socket(
                lambda: _Connection(self), sock, ssl=context, ssl_handshake_timeout=limit_s
            )
        except asyncio.CancelledError:
            sock.close()
            raise
        except (OSError, ssl.SSLError, Refused) as err:
            sock.close()
            if not isinstance(err, ConnectionError):  # it went by itself, as who waited for a process that was killed
                self.refuse(who, first_line(err) or type(err).__name__)

    def _close_oldest_stranger(self) -> None:
        for task in self._strangers:
            task.cancel()
            self._strangers.pop(task)
            return

    def refuse(self, who: str, why: str) -> None:
        """Name whoever was refused, not more often than `NAMED_AGAIN_S` for one address."""
        now = time.monotonic()
        self._named = {name: at_s for name, at_s in self._named.items() if now - at_s < NAMED_AGAIN_S}
        if who not in self._named and len(self._named) < STRANGERS:
            self._named[who] = now
            self.tell(f"the membership service refused {who}: {why}")

    def wrote(self, key: str) -> None:
        """Answer those that wait for it."""
        for connection in self.waiting.pop(key, []):
            connection.end_wait(True)


class _Connection(asyncio.Protocol):
    def __init__(self, store: ValueServer) -> None:
        self.store = store
        self._data = bytearray()
        self._key: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._answer("ok", self.store.epoch)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_wait()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= LENGTH.size and not self.transport.is_closing():
            (length,) = LENGTH.unpack_from(self._data)
            end = LENGTH.size + length
            if length > MESSAGE_BYTES or len(self._data) > LENGTH.size + MESSAGE_BYTES:
                self._refuse(f"a message of {length} bytes; at most {MESSAGE_BYTES}")
                return
            if len(self._data) < end:
                return
            message = bytes(self._data[LENGTH.size : end])
            del self._data[:end]
            self._handle(message)

    def _handle(self, message: bytes) -> None:
        try:
            operation, given = read_request(message)
        except Refused as err:  # who says such things is no member
            self._refuse(str(err))
            return
        if (self._key is not None and operation != "cancel") or self.transport.get_write_buffer_size() > MESSAGE_BYTES:
            self._refuse("a request before the last one was answered")
            return
        values = self.store.values
        try:
            if operation == "wait":
                self._wait(*given)
            elif operation == "cancel":
                self.end_wait(False)
            else:
                self._answer("ok", getattr(values, operation)(*given))
        except Refused as err:
            self._answer("refused", str(err))
            return
        if operation in ("put", "create"):
            self.store.wrote(given[0])

    def _wait(self, key: str, timeout_s: float) -> None:
        if key in self.store.values:
            self._answer("ok", True)
            return
        self._key = key
        self.store.waiting.setdefault(key, []).append(self)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.end_wait, False)

    def end_wait(self, found: bool) -> None:
        """Answer the wait under way, if there is one."""
        if self._key is not None:
            self._forget_wait()
            self._answer("ok", found)

    def _forget_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        others = self.store.waiting.get(self._key or "", [])
        if self in others:
            others.remove(self)
            if not others:
                del self.store.waiting[self._key or ""]
        self._key = self._timer = None

    def _answer(self, state: str, result: Any) -> None:
        data = json.dumps([state, result]).encode()
        self.transport.write(LENGTH.pack(len(data)) + data)

    def _refuse(self, why: str) -> None:
        self.store.refuse(_peer_name(self.transport.get_extra_info("peername")), why)
        self._answer("refused", why)
        self.transport.close()


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end of a UNIX socket, as the kernel says."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _check_user(sock: socket.socket) -> None:
    """Raises `Refused` where a UNIX socket's other end is another user's, whom its mode should have kept out."""
    _, uid = _peer(sock)
    if uid not in (os.geteuid(), 0):
        raise Refused(f"user {uid} is not the user of this run")


def _name_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            pid, uid = _peer(sock)
            return f"process {pid} of user {uid}"
        return _peer_name(sock.getpeername())
    return "a peer that has gone"


def _peer_name(address: Any) -> str:
    return str(address[0]) if isinstance(address, tuple) else "a process of this machine"


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def run_store(
    listener: socket.socket, context: ssl.SSLContext | None, *, epoch: str, ready: Callable[[], None]
) -> None:
    """Serve for ever, in this thread. `ready` is called once it answers."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def serve() -> None:
        ready()
        await ValueServer(epoch, tell=_tell).serve(listener, context)

    asyncio.run(serve())

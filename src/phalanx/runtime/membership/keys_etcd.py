"""Membership values in etcd, for those who run it: its third interface as JSON over HTTP, which every etcd since 3.4 serves, with the standard library.

torch's own client (`torch.distributed.elastic.rendezvous.etcd_store`) speaks the second interface through python-etcd; etcd 3.6 has removed it. What is asked
of etcd here is one transaction (create where nothing stands), reads, writes and deletions. Values outlive a restart of etcd: `epoch` stays the same,
votes and decisions stand, and members do not announce themselves again.

Over a network it speaks TLS and shows the run's certificate (`runtime/membership/credentials.py`), which etcd's authority lets in. Users and roles of etcd must be off: this interface takes no user from a certificate.
Every run needs a name of its own; its values stay in etcd under `phalanx/NAME/` (`etcdctl del --prefix phalanx/NAME/` deletes them).
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from phalanx.core.reading import parse_table
from phalanx.core.service_address import is_loopback, place
from phalanx.runtime.membership.credentials import client_context, find_credentials, named_credentials
from phalanx.runtime.membership.keys import CALL_S, EPOCH, OPENING, Over, ServiceLost, poll
from phalanx.runtime.membership.store import MESSAGE_BYTES

LOOK_S = 0.02
"""A call costs about a millisecond: look less often than at a store of our own."""
SLOWER = 5
"""A call costs so many times what it costs there, in round numbers."""
HISTORY_S = 300.0
"""Old versions are kept for so long, for whoever else watches this etcd (Kubernetes keeps its own for as long)."""
T = TypeVar("T")
Answer = dict[str, Any]
MAX_OPERATIONS = 100
"""Most operations in one transaction (etcd allows 128 by default)."""


@dataclass(frozen=True)
class EtcdService:
    """An etcd at an address, and the run whose values are meant."""

    host: str
    port: int
    run: str

    def connect(self) -> EtcdKeys:
        """Raises `ServiceLost`; `ConfigError` where etcd is on another machine and there are no credentials for it."""
        return EtcdKeys(self.host, self.port, run=self.run)


class EtcdKeys:
    """One connection. Threads may share it; each should have its own."""

    def __init__(self, host: str, port: int, *, run: str, timeout_s: float = CALL_S) -> None:
        self.where = place(host, port)
        self.prefix = f"phalanx/{run}/"
        self._lost = ""
        self._revision = 0
        """Revision of etcd as a whole, when it answered last."""
        self._revisions: list[tuple[float, int]] = []
        """What it was when `tidy` was called."""
        self._lock = threading.Lock()
        if is_loopback(host) and named_credentials() is None:
            self._http = http.client.HTTPConnection(host, port, timeout=timeout_s)
        else:
            context = client_context(find_credentials(port, of="etcd"))
            context.check_hostname = True
            self._http = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        self._http.auto_open = 0  # or a second connection would be opened in the place of one that has ended, without asking whose values are there
        self._http.response_class = partial(_Response, limit_s=timeout_s)  # type: ignore[assignment]
        with OPENING:
            try:
                self._http.connect()
            except OSError as err:
                raise self._failed(err) from None
        self.epoch = self.create(EPOCH, secrets.token_hex(6))

    def get(self, key: str) -> str | None:
        return self._ask("kv/range", {"key": self._name(key)}, _value)

    def values(self, keys: Sequence[str]) -> list[str | None]:
        found: list[str | None] = []
        for i in range(0, len(keys), MAX_OPERATIONS):
            part = [{"requestRange": {"key": self._name(k)}} for k in keys[i : i + MAX_OPERATIONS]]
            found += self._ask("kv/txn", {"success": part}, partial(_each, _value, len(part)))
        return found

    def put(self, key: str, value: str) -> None:
        self._ask("kv/put", {"key": self._name(key), "value": _coded(value)}, _nothing)

    def create(self, key: str, value: str) -> str:
        name = self._name(key)
        stood = self._ask(
            "kv/txn",
            {
                "compare": [{"key": name, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}],
                "success": [{"requestPut": {"key": name, "value": _coded(value)}}],
                "failure": [{"requestRange": {"key": name}}],
            },
            lambda answer: None if answer.get("succeeded") else _each(_value, 1, answer),
        )
        return value if stood is None else stood[0] or ""

    def all_there(self, keys: Sequence[str]) -> bool:
        for i in range(0, len(keys), MAX_OPERATIONS):
            part = [{"requestRange": {"key": self._name(k), "countOnly": True}} for k in keys[i : i + MAX_OPERATIONS]]
            if not all(
                self._ask("kv/txn", {"success": part}, partial(_each, lambda found: "count" in found, len(part)))
            ):
                return False
        return True

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        there = partial(self.all_there, [key])
        return poll(there, timeout_s, last_look_s=LOOK_S, sharing=sharing * SLOWER, over=over)

    def listed(self, prefix: str) -> list[str]:
        names = self._ask("kv/range", {**self._below(prefix), "keysOnly": True}, _names)
        return sorted(n[len(self.prefix) :] for n in names)

    def delete(self, key: str) -> None:
        self._ask("kv/deleterange", {"key": self._name(key)}, _nothing)

    def delete_below(self, prefix: str, *, most: int) -> int:
        """All in one call, whatever `most` is."""
        return min(most, self._ask("kv/deleterange", self._below(prefix), lambda answer: int(answer.get("deleted", 0))))

    def tidy(self) -> None:
        """Compact etcd up to what stood `HISTORY_S` ago: it keeps every version of every value otherwise, until its quota is full and it refuses to write.

        For all that etcd serves, as its own `--auto-compaction-retention` does. Another one who was faster, or who forbids it, is no error.
        """
        now = time.monotonic()
        self._revisions.append((now, self._revision))
        old = [revision for at_s, revision in self._revisions if now - at_s >= HISTORY_S]
        if old and old[-1]:
            self._revisions = [(at_s, r) for at_s, r in self._revisions if r > old[-1]]
            self._ask("kv/compaction", {"revision": str(old[-1])}, _nothing, refused=True)

    def close(self) -> None:
        self._lost = self._lost or "this connection was closed"
        self._http.close()

    def _name(self, key: str) -> str:
        return _coded(self.prefix + key)

    def _below(self, prefix: str) -> dict[str, str]:
        """The range of all names that begin so: up to the same text with its last character one higher."""
        first = self.prefix + prefix
        return {"key": _coded(first), "range_end": _coded(first[:-1] + chr(ord(first[-1]) + 1))}

    def _ask(self, call: str, body: dict[str, Any], read: Callable[[Answer], T], *, refused: bool = False) -> T:
        """What `read` finds in the answer; one that is no answer of etcd ends the connection. `refused`: etcd may also say no."""
        with self._lock:
            if self._lost:
                raise ServiceLost(self._lost)
            try:
                self._http.request("POST", f"/v3/{call}", json.dumps(body), {"Content-Type": "application/json"})
                answer = self._http.getresponse()
                text = answer.read(MESSAGE_BYTES + 1)
                if len(text) > MESSAGE_BYTES:
                    raise ValueError(f"its answer has more than {MESSAGE_BYTES >> 20} MiB")
                if answer.status != 200 and refused:
                    return read({})
                if answer.status != 200:
                    raise OSError(f"{answer.status} {text[:200].decode(errors='replace')}")
                found = parse_table(text, where="an answer of etcd")
                self._revision = max(self._revision, int(found.get("header", {}).get("revision", 0)))
                return read(found)
            except (OSError, http.client.HTTPException, ValueError) as err:
                raise self._failed(err) from None
            except (LookupError, TypeError, AttributeError) as err:
                raise self._failed(ValueError(f"{call} was answered by something else ({err})")) from None

    def _failed(self, err: BaseException) -> ServiceLost:
        self._lost = f"etcd at {self.where} does not answer: {str(err).strip() or type(err).__name__}"
        self._http.close()
        return ServiceLost(self._lost)


class _Response(http.client.HTTPResponse):
    """An answer that has come as a whole within `limit_s`: a socket's own limit begins again with every byte."""

    def __init__(self, sock: socket.socket, *args: Any, limit_s: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Until(self.fp, sock, time.monotonic() + limit_s))


class _Until(io.RawIOBase):
    def __init__(self, file: io.BufferedReader, sock: socket.socket, end_s: float) -> None:
        self._file, self._sock, self._end_s = file, sock, end_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(max(1e-3, self._end_s - time.monotonic()))
        return self._file.raw.readinto(buffer) or 0

    def close(self) -> None:
        self._file.close()
        super().close()


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _value(answer: Answer) -> str | None:
    found = answer.get("kvs")
    return base64.b64decode(found[0].get("value", "")).decode() if found else None


def _names(answer: Answer) -> list[str]:
    return [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]


def _each(read: Callable[[Answer], T], count: int, answer: Answer) -> list[T]:
    """What `read` finds in each answer of a transaction, which has `count`."""
    found = answer["responses"]
    if len(found) != count:
        raise ValueError(f"{len(found)} answers came to {count} questions")
    return [read(one["response_range"]) for one in found]


def _nothing(answer: Answer) -> None:
    pass

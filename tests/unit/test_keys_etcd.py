"""What an etcd may answer: nothing that it says, or how, keeps a call longer than its limit, or ends in another error than that the service is lost."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.runtime.membership import keys_etcd
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.keys_etcd import EtcdKeys

pytestmark = pytest.mark.unit
CREATED = b'{"succeeded":true}'


def answer(body: bytes, *, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body)


def drips(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(100):
        sock.sendall(b" ")
        time.sleep(0.05)


def drips_its_head(sock: socket.socket) -> None:
    for _ in range(100):
        sock.sendall(b"H")
        time.sleep(0.05)


def never_ends(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        sock.sendall(bytes(1 << 16))


class StandIn:
    """An etcd that lets each connection create its epoch, and then answers as it is told."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.says: Callable[[socket.socket], None] = lambda sock: None
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            self._take(sock)
            sock.sendall(answer(CREATED))
            while self._take(sock):
                try:
                    self.says(sock)
                except OSError:
                    return

    def _take(self, sock: socket.socket) -> bool:
        head, _, body = b"", b"", b""
        while b"\r\n\r\n" not in head:
            got = sock.recv(65536)
            if not got:
                return False
            head += got
        head, _, body = head.partition(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        while len(body) < length:
            body += sock.recv(65536)
        return True

    def connect(self, **more: Any) -> EtcdKeys:
        return EtcdKeys("127.0.0.1", self.socket.getsockname()[1], run="r", **more)


@pytest.fixture
def etcd() -> Iterator[StandIn]:
    found = StandIn()
    yield found
    found.socket.close()


CALLS: dict[str, Callable[[EtcdKeys], Any]] = {
    "values": lambda keys: keys.values(["x", "y"]),
    "get": lambda keys: keys.get("x"),
    "listed": lambda keys: keys.listed("x"),
    "all_there": lambda keys: keys.all_there(["x"]),
    "create": lambda keys: keys.create("x", "1"),
    "delete_below": lambda keys: keys.delete_below("x/", most=3),
}
NO_TEXT = base64.b64encode(b"\xff\xfe").decode()
ODD = [
    ("values", "{}"),
    ("values", '{"responses": [{"response_range": {}}]}'),
    ("create", '{"responses": []}'),
    ("create", "{}"),
    ("get", "[]"),
    ("get", '{"header": []}'),
    ("get", '{"header": {"revision": null}}'),
    ("get", '{"kvs": [{"value": 7}]}'),
    ("get", '{"kvs": 7}'),
    ("get", f'{{"kvs": [{{"value": "{NO_TEXT}"}}]}}'),
    ("listed", '{"kvs": [{}]}'),
    ("all_there", '{"responses": []}'),
    ("delete_below", '{"deleted": "x"}'),
]


@pytest.mark.parametrize(("call", "body"), ODD)
def test_what_is_no_answer_of_etcd_is_a_lost_service(call: str, body: str, etcd: StandIn) -> None:
    etcd.says = lambda sock: sock.sendall(answer(body.encode()))
    keys = etcd.connect()
    for _ in range(2):  # and stays one
        with pytest.raises(ServiceLost, match="does not answer"):
            CALLS[call](keys)


@pytest.mark.parametrize("says", [drips, drips_its_head])
def test_a_call_ends_in_time_whatever_comes(says: Callable[[socket.socket], None], etcd: StandIn) -> None:
    etcd.says = says
    keys, begin_s = etcd.connect(timeout_s=0.4), time.monotonic()
    with pytest.raises(ServiceLost):
        keys.get("x")
    assert time.monotonic() - begin_s < 3


def test_an_answer_that_never_ends_is_left(etcd: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_etcd, "MESSAGE_BYTES", 1 << 20)
    etcd.says = never_ends
    with pytest.raises(ServiceLost, match="more than 1 MiB"):
        etcd.connect().get("x")


def test_a_connection_that_ends_is_not_replaced_unseen(etcd: StandIn) -> None:
    """Another etcd may be there by then, with another history: whoever connects again looks at the epoch."""
    etcd.says = lambda sock: sock.sendall(answer(b"{}", more=b"Connection: close\r\n"))
    keys = etcd.connect()
    assert keys.get("x") is None
    with pytest.raises(ServiceLost):
        keys.get("x")
    assert etcd.connections == 1

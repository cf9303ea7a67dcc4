"""The web server of the page: who may ask, what can be asked, and what goes out with every answer.

Decides that a request is answered where it is GET or HEAD, calls this machine by a name of its own in `Host` (else a page of somebody else could point its name here), and has the token: in the
address at first, from then on in a cookie that no script can read and no other site's request carries. Must never change: nothing of an address reaches the file system; runs, files and steps are
looked up among those that the server knows.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from phalanx.core.service_address import is_loopback, place
from phalanx.observe import differences, recipe_values
from phalanx.observe.page.lanes import step_lanes
from phalanx.observe.page.view import RunView, find_runs, peek, written_s

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_CONNECTIONS = 64
MOST_COMPARED = 8
WAIT_S = 20.0
"""How long a browser waits for news before it asks again."""
WANTED_S = 60.0
"""How long a run is followed after somebody asked for it."""
TICK_S = 0.2
LIST_S = 3.0


class Unknown(Exception):
    """What was asked for is not there."""


class PageServer(ThreadingHTTPServer):
    """Serves the runs in `folders`, and those that appear below `below`. Raises `OSError` where the address cannot be had."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, *, folders: Sequence[Path], below: Path | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.token = secrets.token_urlsafe(24)
        self.files = {p.name: (TYPES[p.suffix], p.read_bytes()) for p in sorted(STATIC.iterdir()) if p.suffix in TYPES}
        self.views: dict[str, RunView] = {}
        self._by_folder: dict[Path, str] = {}
        self._summaries: tuple[float, list[dict[str, Any]]] = (-1e9, [])
        self._peeked: dict[str, tuple[float, dict[str, Any]]] = {}
        self._folders, self._below = [f.absolute() for f in folders], None if below is None else below.absolute()
        self._news, self._over = threading.Condition(), threading.Event()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lists = threading.Lock()
        super().__init__((address, port), _Handler)
        self.names, self.is_open = _names_of(address), not is_loopback(address)
        self._find()

    @property
    def url(self) -> str:
        """What a person opens, with the token."""
        host, port = str(self.server_address[0]), self.server_address[1]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        return f"http://{place(host, port)}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Name of the cookie: cookies do not tell ports apart."""
        return f"phalanx_{self.server_address[1]}"

    # ---- threads -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Follow the logs and answer, in threads of its own."""
        threading.Thread(target=self._follow, name="logs", daemon=True).start()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="page", daemon=True).start()

    def stop(self) -> None:
        """End both."""
        self._over.set()
        with self._news:
            self._news.notify_all()
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: browsers hang up when a page is closed."""

    def _follow(self) -> None:
        """Reads the logs of the runs that somebody looks at."""
        while not self._over.wait(TICK_S):
            now_s, busy = time.monotonic(), True
            while busy and not self._over.is_set():
                wanted = [v for v in list(self.views.values()) if now_s - v.asked_s < WANTED_S]
                if sum(view.advance() for view in wanted):  # each of them
                    with self._news:
                        self._news.notify_all()
                busy = any(view.progress is not None for view in wanted)

    # ---- what can be asked -------------------------------------------------------------------------------------------

    def _find(self) -> None:
        below = find_runs(self._below) if self._below is not None and self._below.is_dir() else []
        for folder in [*self._folders, *below]:
            if folder not in self._by_folder:
                id = f"r{len(self.views) + 1}"
                self.views[id], self._by_folder[folder] = RunView(folder, id=id), id

    def runs(self) -> dict[str, Any]:
        """All runs, the newest first."""
        with self._lists:
            asked_s, found = self._summaries
            if time.monotonic() - asked_s > LIST_S:
                self._find()
                found = [self._summary(view) for view in list(self.views.values())]
                found.sort(key=lambda s: -s["heard_s"])
                self._summaries = time.monotonic(), found
        return {"runs": found, "now_s": time.time()}

    def first(self) -> dict[str, Any]:
        """What a browser opens that asked for nothing: the runs that were named, else the one that wrote last; and all there are."""
        with self._lists:
            self._find()
        views = list(self.views.values())
        named = [v.id for v in views if v.folder in self._folders]
        newest = max(views, key=lambda v: written_s(v.folder), default=None)
        return {"ids": named or ([newest.id] if newest else []), "all": [v.id for v in views]}

    def _summary(self, view: RunView) -> dict[str, Any]:
        if time.monotonic() - view.asked_s < WANTED_S:
            return view.summary()
        at, known = written_s(view.folder), self._peeked.get(view.id)
        if known is None or known[0] != at or known[1]["status"] in ("training", "starting"):
            known = self._peeked[view.id] = at, peek(view.folder, id=view.id).summary()
        return known[1]

    def view(self, id: str) -> RunView:
        """A run, which is followed from now on. Raises `Unknown`."""
        if id not in self.views:
            raise Unknown(id)
        view = self.views[id]
        view.open()
        return view

    def changes(self, asked: Sequence[str]) -> dict[str, Any]:
        """Those of the runs that have news, once there are some. `asked`: id:version:progress:width:first of each."""
        wanted = [_Asked(self, text) for text in asked[:MOST_COMPARED]]
        until_s = time.monotonic() + WAIT_S
        while not self._over.is_set():
            news = [a for a in wanted if (a.view.index.version, a.view.progress) != a.known]
            left_s = until_s - time.monotonic()
            if news or left_s <= 0:
                return {"runs": [a.view.snapshot(known=a.known[0], width=a.width, first=a.first) for a in news]}
            with self._news:
                self._news.wait(min(left_s, 1.0))
        return {"runs": []}

    def recipes(self, ids: Sequence[str]) -> dict[str, Any]:
        """Settings of one run, or those in which several differ."""
        views = [self.view(id) for id in ids[:MOST_COMPARED]]
        found = {v.id: recipe_values(v.folder) for v in views}
        alone = len(views) == 1
        rows = [(k, [v]) for values in found.values() for k, v in values.items()] if alone else differences(found)
        return {
            "ids": [v.id for v in views],
            "names": [v.name for v in views],
            "rows": rows,
            "read": [bool(found[v.id]) for v in views],
        }


class _Asked:
    """What a browser has of a run."""

    def __init__(self, server: PageServer, text: str) -> None:
        id, version, progress, width, first = text.split(":")
        self.view = server.view(id)
        self.known = int(version), None if progress == "-" else float(progress)
        self.width, self.first = int(width), int(first)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""
    timeout = 60.0

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _refuse(self) -> None:
        self.close_connection = True  # of what else was sent nothing is read
        self._send(405, "text/plain; charset=utf-8", b"only GET and HEAD\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what strangers ask does not belong on a terminal."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Without a word of the request."""
        self.close_connection = True
        self._send(code, "text/plain; charset=utf-8", b"this request cannot be answered\n")

    def _answer(self) -> None:
        if len(self.headers.get_all("Host") or []) != 1 or not self._names_us(self.headers["Host"]):
            return self._text(421, "this server has another name")
        try:
            parts = urlsplit(self.path)
            query = {k: v[-1] for k, v in parse_qs(parts.query, max_num_fields=20).items()}
        except ValueError:
            return self._text(400, "this cannot be asked")
        if parts.path == "/" and "token" in query:
            return self._first_visit(query["token"])
        if not self._has_token():
            return self._text(403, "open the address that `phalanx watch` has printed, with its token")
        try:
            self._route(parts.path, query)
        except (Unknown, KeyError):
            self._text(404, "there is no such thing here")
        except (ValueError, OverflowError):
            self._text(400, "this cannot be asked")
        except ConnectionError:
            raise
        except OSError as error:
            self._text(503, f"the logs cannot be read ({error.strerror or 'not a file'})")

    def _names_us(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        return name in self.server.names or (self.server.is_open and _is_address(name))

    def _has_token(self) -> bool:
        for part in "; ".join(self.headers.get_all("Cookie") or [])[:8192].split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie:
                return _same(value, self.server.token)
        return False

    def _first_visit(self, token: str) -> None:
        """Keep the token in a cookie, and take it out of the address."""
        if not _same(token, self.server.token):
            return self._text(403, "this is not the token that `phalanx watch` has printed")
        cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._send(303, "text/plain; charset=utf-8", b"", {"Location": "/", "Set-Cookie": cookie})

    def _route(self, path: str, query: dict[str, str]) -> None:
        first, *rest = [part for part in path.split("/") if part] or ["index.html"]
        if first in ("index.html", "static"):
            kind, body = self.server.files[rest[0] if first == "static" and rest else first]
            return self._send(200, kind, body)
        ids = [id for id in query.get("of", "").split(",") if id]
        if first == "first":
            return self._json(self.server.first())
        if first == "runs":
            return self._json(self.server.runs())
        if first == "changes":
            return self._json(self.server.changes(ids))
        if first == "recipes":
            return self._json(self.server.recipes(ids))
        if first != "run" or len(rest) != 2:
            raise Unknown(first)
        self._of_run(self.server.view(rest[0]), rest[1], query)

    def _of_run(self, view: RunView, what: str, query: dict[str, str]) -> None:
        answers: dict[str, Callable[[], Any]] = {
            "all": view.snapshot,
            "zoom": lambda: view.zoom(_whole(query["first"]), _whole(query["last"])),
            "experts": lambda: view.experts(_whole(query["layer"])),
            "lanes": lambda: step_lanes(view.folder, _recorded(view, _whole(query["step"]))),
            "holders": lambda: view.holders(_moment(query.get("at", ""))),
        }
        self._json(answers[what]())

    def _json(self, found: Any) -> None:
        self._send(200, "application/json", json.dumps(found, separators=(",", ":"), allow_nan=False).encode())

    def _text(self, code: int, text: str) -> None:
        self._send(code, "text/plain; charset=utf-8", text.encode() + b"\n")

    def _send(self, code: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        if len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            packer = zlib.compressobj(5, zlib.DEFLATED, 31)
            body = packer.compress(body) + packer.flush()
            self.send_header("Content-Encoding", "gzip")
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _recorded(view: RunView, step: int) -> dict[str, Any]:
    """Raises `Unknown`."""
    for entry in reversed(view.index.course.recorded):
        if entry["step"] == step:
            return entry
    raise Unknown(str(step))


def _whole(text: str) -> int:
    if len(text) > 12:
        raise ValueError("a number that long")
    return int(text)


def _moment(text: str) -> float | None:
    if len(text) > 40:
        raise ValueError("a number that long")
    return float(text) if text else None


def _same(given: str, token: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        return False


def _names_of(address: str) -> frozenset[str]:
    """What `Host` may say: the loopback names, the address, and of a server that others reach the machine's names (and any address in numbers, which nobody can point elsewhere)."""
    names = {"localhost", "127.0.0.1", "::1", address.lower()}
    if not is_loopback(address):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)

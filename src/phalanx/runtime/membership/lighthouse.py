"""`phalanx service`: one membership service, or several of one run, of which torchft's lighthouse selects the one that stores the values (extra `lighthouse`).

A lighthouse (meta-pytorch/torchft) receives heartbeats and forms quorums; it stores no values. So the values stay in a TCPStore (`runtime/membership/service.py`), and the lighthouse decides
*whose*: every `phalanx service --lighthouse URL` takes part in its quorums, the one that they name has its store open, the others wait with theirs closed. Hosts of the run know
all addresses, try one after the other, and need no torchft. When the keeper or its machine dies another one opens, without values: the run pauses and continues, as after a restart.

    pilot   a process that talks with the lighthouse (its client has threads, and this program forks): heartbeats, one quorum after another, each reported through a pipe
    store   a process that keeps the values and ends by itself when its lease does, whoever else stands still
    here    `Tenure` says when the store may be open

Values are in one place at a time. All members of a quorum see the last keeper that each of them knows, so all select the same one.

Must never change: whoever keeps values stops a *lease* after it asked for the last quorum that named it, by its own clock; whoever is to keep them waits longer
than the longest lease known to it after it first sees a quorum that names it, and begins to wait anew whenever it may have missed one. So no two keep values at the
same time, however the network is partitioned, as long as clocks run equally fast within `WAIT - 1`. (A longer lease of a service that no member of the quorum knows of is not respected: all should have the same.)

Only the compiled part of torchft is loaded: its package imports telemetry and process groups that are not needed here.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.core.clock import since_boot_s
from phalanx.core.errors import ConfigError, Problem, first_line
from phalanx.core.service_address import ServiceAddress
from phalanx.runtime.membership.service import StoreProcess, start_store
from phalanx.runtime.processes import STOP_SIGNALS, die_with_parent

WAIT = 1.25
"""Leases, of the longest, that a new keeper waits."""


@dataclass(frozen=True)
class Claim:
    """What one service reports in a quorum: `keeper` is the last one that it knows of, the `term`-th (0: none), `longest_s` the longest lease, its own or another's."""

    name: str
    keeper: str = ""
    term: int = 0
    longest_s: float = 0.0


def keeper_of(claims: Sequence[Claim]) -> tuple[str, int]:
    """(keeper, term) of a quorum: the latest known keeper if it takes part, else the first by name, one term later."""
    latest = max(claims, key=lambda c: (c.term, c.keeper))
    names = sorted(c.name for c in claims)
    return (latest.keeper, latest.term) if latest.keeper in names else (names[0], latest.term + 1)


def longest_lease(claims: Sequence[Claim]) -> float:
    """Longest lease known in a quorum, also of a service outside of it that may still hold values."""
    return max(c.longest_s for c in claims)


@dataclass
class Tenure:
    """Whether the service `name` may keep values. Seconds are those of one clock that never stands still."""

    name: str
    lease_s: float
    until_s: float = 0.0
    """Values must be given up then."""
    holds: bool = False
    longest_s: float = 0.0
    """Longest lease of another service that this one knows of."""
    _since_s: float | None = None
    _quorum: int = 0

    def observe(self, keeper: str, *, quorum: int, asked_s: float, now_s: float, longest_s: float = 0.0) -> None:
        """A quorum with this number, asked for at `asked_s`, names `keeper`; the longest lease known there is `longest_s`."""
        self.longest_s = max(self.longest_s, longest_s)
        self.look(now_s)
        if keeper != self.name:
            self._end()
            return
        if not self.holds and (self._since_s is None or quorum != self._quorum):
            self._since_s = now_s
        self._quorum, self.until_s = quorum, asked_s + self.lease_s

    def look(self, now_s: float) -> bool:
        """Whether values may be kept now."""
        if now_s >= self.until_s:
            self._end()
        elif self._since_s is not None and now_s >= self._since_s + WAIT * max(self.lease_s, self.longest_s):
            self.holds = True
        return self.holds

    def _end(self) -> None:
        self.holds, self._since_s, self.until_s = False, None, 0.0


LOOK_S = 0.02
BEAT_S = 0.2
CONNECT_S = 2.0
ROUNDS = 20
"""Quorums in a lease, about."""


def engine() -> ModuleType:
    """torchft's compiled part (`LighthouseServer`, `LighthouseClient`). Raises `ConfigError` where torchft is not installed."""
    found = importlib.util.find_spec("torchft")
    for folder in [] if found is None else found.submodule_search_locations or []:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder) / f"_torchft{suffix}"
            if path.exists():
                spec = importlib.util.spec_from_file_location("torchft._torchft", path)
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    rule = "needs the package torchft, which is not installed"
    problem = Problem(where="--lighthouse", value="", rule=rule, hint='pip install "phalanx[lighthouse]"')
    raise ConfigError([problem], subject="phalanx service")


class Pilot:
    """The process that takes part in quorums. `read` returns its messages since the last call."""

    def __init__(self, name: str, lighthouse: str, *, address: str, lease_s: float) -> None:
        self._pipe, tell = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        self._rest = b""
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._pipe)
                os.setsid()
                die_with_parent(parent)
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # whoever started it ends it
                _take_part(name, lighthouse, address=address, lease_s=lease_s, tell=tell)
            finally:
                os._exit(1)
        os.close(tell)

    def read(self) -> list[dict[str, Any]]:
        """Quorums (`keeper`, `quorum`, `asked_s`) and what went wrong (`error`)."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 65536):
                data += chunk
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def ended(self) -> bool:
        """Whether it is gone; its status is collected."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True

    def stop(self) -> None:
        """End it at once."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._pipe)


def _take_part(name: str, lighthouse: str, *, address: str, lease_s: float, tell: int) -> None:
    torchft = engine()
    threading.Thread(target=_beat, args=(torchft, name, lighthouse), daemon=True).start()
    client, keeper, term, longest_s = None, "", 0, lease_s
    while True:
        try:
            if client is None:
                client = torchft.LighthouseClient(lighthouse, timedelta(seconds=CONNECT_S))
            asked_s = since_boot_s()
            found = client.quorum(
                name, timedelta(seconds=lease_s), store_address=address, step=0, world_size=1, shrink_only=False,
                data={"keeper": keeper, "term": term, "longest_s": longest_s},
            )  # fmt: skip
            reports = [(p.replica_id, p.data) for p in found.participants if isinstance(p.data, dict)]
            claims = [Claim(who, d.get("keeper", ""), d.get("term", 0), d.get("longest_s", 0.0)) for who, d in reports]
            (keeper, term), longest_s = keeper_of(claims), max(longest_s, longest_lease(claims))
            words = {"keeper": keeper, "quorum": int(found.quorum_id), "asked_s": asked_s, "longest_s": longest_s}
        except Exception as err:  # whatever its client raises: the lease ends by itself
            client, words = None, {"error": first_line(err)}
        os.write(tell, json.dumps(words).encode() + b"\n")
        time.sleep(lease_s / ROUNDS)


def _beat(torchft: Any, name: str, lighthouse: str) -> None:
    """Sends heartbeats, without which a lighthouse counts a member that waits for a quorum as dead."""
    client = None
    while True:
        try:
            client = client or torchft.LighthouseClient(lighthouse, timedelta(seconds=CONNECT_S))
            client.heartbeat(name, timedelta(seconds=CONNECT_S))
        except Exception:
            client = None
        time.sleep(BEAT_S)


def serve(
    address: ServiceAddress,
    lighthouse: str = "",
    *,
    lease_s: float,
    stop: Collection[signal.Signals],
    tell: Callable[[str], None],
) -> None:
    """Keep the membership service of one run at `address` until one of `stop` arrives, and start it again when it ends. From the main thread, whose `stop` are blocked from here on.

    With a `lighthouse` only while its quorums name this program, by leases of `lease_s`. Raises `ConfigError` where torchft is not installed, `RunError` where the port is taken.
    """
    if lighthouse:
        engine()  # or fail at once
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        keep_while_named(address, lighthouse, lease_s=lease_s, stop=stop, tell=tell)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stop, signal.SIGCHLD})
    store = start_store(address.host, address.port)
    tell(f"membership service at {address.host}:{address.port}, process {store.pid}")
    while signal.sigwait({*stop, signal.SIGCHLD}) not in stop:
        if store.reap():
            store = start_store(address.host, address.port)
            tell(f"membership service restarted, process {store.pid}; its values were lost")
    store.stop()


def keep_while_named(
    address: ServiceAddress,
    lighthouse: str,
    *,
    lease_s: float,
    stop: Collection[signal.Signals],
    tell: Callable[[str], None],
) -> None:
    """Keeps a store at `address` whenever the lighthouse's quorums name this program, until one of `stop`, which must be blocked,
    arrives."""
    where = f"{address.host}:{address.port}"
    name = f"{socket.gethostname()}:{address.port}-{secrets.token_hex(3)}"
    keeps = _LeasedStore(Tenure(name, lease_s), address, tell)
    pilot = Pilot(name, lighthouse, address=where, lease_s=lease_s)
    tell(f"{name} waits until the lighthouse {lighthouse} selects it to store the values")
    try:
        while signal.sigtimedwait(stop, LOOK_S) is None:
            for words in pilot.read():
                keeps.observe(words)
            keeps.look()
            if pilot.ended():
                pilot.stop()
                pilot = Pilot(name, lighthouse, address=where, lease_s=lease_s)
    finally:
        keeps.close()
        pilot.stop()


class _LeasedStore:
    """The store of one service, open while its tenure lasts."""

    def __init__(self, tenure: Tenure, address: ServiceAddress, tell: Callable[[str], None]) -> None:
        self.tenure, self.address, self.tell = tenure, address, tell
        self.store: StoreProcess | None = None
        self._reported = ""

    def observe(self, words: dict[str, Any]) -> None:
        text = f"no quorum: {words['error']}" if "error" in words else f"the quorum selects {words['keeper']}"
        if text != self._reported:
            self.tell(text)
        self._reported = text
        if "error" in words:
            return
        longest_s = words["longest_s"]
        if longest_s > max(self.tenure.lease_s, self.tenure.longest_s):
            self.tell(
                f"another service has --lease {longest_s:g}, this one {self.tenure.lease_s:g}: waiting for the longer one; give all the same --lease"
            )
        self.tenure.observe(
            words["keeper"], quorum=words["quorum"], asked_s=words["asked_s"], now_s=since_boot_s(), longest_s=longest_s
        )

    def look(self) -> None:
        """Open, renew or close."""
        if not self.tenure.look(since_boot_s()):
            if self.store is not None:
                self.tell("this service no longer stores the values")
            self.close()
            return
        if self.store is None or self.store.reap():
            self.close()
            self.store = start_store(self.address.host, self.address.port, until_s=self.tenure.until_s)
            self.tell(
                f"this service stores the values, at {self.address.host}:{self.address.port}, process {self.store.pid}"
            )
        self.store.renew(self.tenure.until_s)

    def close(self) -> None:
        """Whatever was kept is gone."""
        if self.store is not None:
            self.store.stop()
        self.store = None

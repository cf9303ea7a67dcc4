"""The membership service of one run: a store (`runtime/membership/store.py`) in a process of its own, which a supervisor or `phalanx service` starts and starts again.

It lives outside of the workers, so that no worker's death takes it along, and outside of the supervisor, which forks. Its values die with it:
its clients see another `epoch`. Whoever keeps it holds the listening socket, so its address stays its own while its process is replaced, and the kernel ends the process when the keeper ends.
This file also finds the service of a recipe's address and asks it, before any rank is started, what run it serves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.core.files import private_folder
from phalanx.core.service_address import ServiceAddress, place
from phalanx.runtime.membership.credentials import (
    VARIABLE,
    check_private,
    make_credentials,
    named_credentials,
    own_credentials,
    server_context,
)
from phalanx.runtime.membership.keys import Keys, Service, ServiceLost, TlsService, UnixService
from phalanx.runtime.membership.keys_etcd import EtcdService
from phalanx.runtime.membership.membership import BEAT, ENDED, Membership
from phalanx.runtime.membership.store import BACKLOG, run_store
from phalanx.runtime.processes import STOP_SIGNALS, addresses_of, die_with_parent

HUNG_S = 6.0
"""A store that has answered nothing for so long is replaced: three calls in a row have failed (`keys.CALL_S`)."""
LOOK_S, PULSE_S = 0.05, 1.0
END_S = 2.0
"""How long a process that was killed may take to end: one in a call that cannot be interrupted takes longer, and is left alone."""
PREFIX = "run-"
ENDS = frozenset({signal.SIGINT, signal.SIGTERM})
HOSTS_END_S = 120.0
"""How long a service that is to end waits for the hosts of its run. (SLURM kills a job 30 s after SIGTERM, Kubernetes a pod after `terminationGracePeriodSeconds`.)"""
SILENT_S, ENDED_S = 5.0, 1.0
"""A host without a new heartbeat for so long is not waited for: one that said nothing of its end, and one that did."""


class StoreProcess:
    """A running store, and the socket at which it listens."""

    def __init__(
        self, listener: socket.socket, address: UnixService | TlsService, context: ssl.SSLContext | None
    ) -> None:
        self.address = address
        self.pid = 0
        self._listener, self._context = listener, context
        self._ended = True
        self._owner = os.getpid()

    def start(self) -> None:
        """Fork the process that serves, without values. Raises `RunError` where it does not begin to.

        Call it from the main thread: the kernel ends the process when the thread that forked it ends.
        """
        ready, started = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ready)
                os.setsid()
                die_with_parent(parent)
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # whoever keeps it ends it, last of all
                gc.freeze()
                run_store(self._listener, self._context, epoch=secrets.token_hex(6), ready=lambda: _say(started, b"+"))
            finally:
                os._exit(1)
        os.close(started)
        self.pid, self._ended = pid, False
        try:
            if os.read(ready, 1) != b"+":  # the pipe closes where it died before
                raise RunError(f"the membership service at {self.address} ended while it started")
        finally:
            os.close(ready)

    def reap(self) -> bool:
        """Whether it has ended; its status is collected."""
        if not self._ended:
            with contextlib.suppress(ChildProcessError):
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self._ended

    def kill(self) -> None:
        """End the process at once; the socket stays. Waits `END_S` for it at most."""
        if self.reap():
            return
        os.kill(self.pid, signal.SIGKILL)
        end_s = time.monotonic() + END_S
        while not self.reap() and time.monotonic() < end_s:
            time.sleep(0.001)
        self._ended = True

    def stop(self) -> None:
        """End it, and give its address up."""
        self.kill()
        self._listener.close()
        if os.getpid() != self._owner:
            return
        if isinstance(self.address, UnixService):
            shutil.rmtree(self.address.path.parent, ignore_errors=True)
        elif named_credentials() is None:  # made at this start, they open nothing any more
            own_credentials(self.address.port).unlink(missing_ok=True)


def _say(pipe: int, data: bytes) -> None:
    os.write(pipe, data)
    os.close(pipe)


def start_store() -> StoreProcess:
    """Keep a store for this machine, at a socket that only this user can open. Raises `RunError`."""
    folder = private_folder()
    _clean(folder)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder)) / "store"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as err:
        listener.close()
        shutil.rmtree(path.parent, ignore_errors=True)
        raise RunError(
            f"cannot listen at {path}: {err.strerror or err}; set XDG_RUNTIME_DIR to a folder of your own with a short name"
        ) from None
    finally:
        os.umask(mask)
    store = StoreProcess(listener, UnixService(path), None)
    store.start()
    return store


def _clean(folder: Path) -> None:
    """Remove what keepers left behind that were killed."""
    for path in folder.glob(f"{PREFIX}*/store"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(END_S)
                sock.connect(str(path))
            except ConnectionRefusedError:
                shutil.rmtree(path.parent, ignore_errors=True)


def start_network_store(host: str, port: int) -> StoreProcess:
    """Keep a store at an address, for whoever has this run's credentials: those that `PHALANX_CREDENTIALS` names, which are made where they are not there, else new ones
    in the user's runtime folder. Raises `ConfigError`, or `RunError` where the port is taken."""
    try:
        family, where = addresses_of(host, port, socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as unless_kept:
            listener = unless_kept.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
            number = int(listener.getsockname()[1])
            store = StoreProcess(listener, TlsService(host, number), server_context(kept_credentials(number)))
            store.start()
            unless_kept.pop_all()
    except OSError as err:
        raise RunError(
            f"the membership service cannot listen at {place(host, port)} ({err.strerror}); choose another port, or an address of this machine"
        ) from None
    return store


def kept_credentials(port: int) -> Path:
    """The file with which a service at that port of this machine serves; made where it must be."""
    named = named_credentials()
    path = own_credentials(port) if named is None else named
    if named is None or not path.exists():
        make_credentials(path)
    check_private(path)
    return path


def serve(address: ServiceAddress, *, until_over: bool, tell: Callable[[str], None]) -> bool:
    """Keep the membership service of one run at `address` until SIGINT, or until SIGTERM and the run's hosts have ended (`HOSTS_END_S` at most): whoever ends a
    whole job sends SIGTERM to everything in it, and hosts hand over and save by what is kept here. `until_over`: also once the run is over or was stopped and its hosts have ended. Starts it again when it ends or hangs. From the main thread, whose
    two signals are blocked from here on. Returns whether all steps of the run are done.

    Raises `RunError` where the port is taken, `ConfigError` for credentials that cannot be used.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    store = start_network_store(address.host, address.port)
    port: int = store.address.port  # type: ignore[union-attr]
    try:
        tell(f"membership service at {place(address.host, port)}, process {store.pid}")
        tell(
            f"its credentials are in {named_credentials() or own_credentials(port)}: copy the file to the hosts of the run, and export {VARIABLE}=FILE there"
        )
        pulse, until_s = Pulse(store.address), float("inf")
        while time.monotonic() < until_s:
            came = _came(ENDS, LOOK_S)
            if came == signal.SIGTERM and until_s == float("inf"):
                until_s = time.monotonic() + HOSTS_END_S
                tell(f"waiting for the hosts of the run to end, {HOSTS_END_S:g} s at most")
            ends = until_s < float("inf") or (until_over and pulse.is_over())
            if came == signal.SIGINT or (ends and not pulse.hosts()):
                break
            if store.reap() or pulse.missed_s() > HUNG_S:
                store.kill()
                store.start()
                pulse = Pulse(store.address)
                tell(f"membership service restarted, process {store.pid}; its values were lost")
        return pulse.is_finished()
    finally:
        store.stop()


def _came(stop: Collection[signal.Signals], limit_s: float) -> int:
    """The one of `stop` that arrives within the time, or 0. Where this process is stopped and goes on after it, CPython (3.11 to 3.14: `signal_sigtimedwait_impl`)
    returns what was never written."""
    found = signal.sigtimedwait(stop, limit_s)
    return found.si_signo if found is not None and found.si_signo in stop else 0


class Pulse:
    """Asks a store every second whether it is there, and at the end which hosts still are."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._beats: dict[str, tuple[str | None, float]] = {}
        """Host -> its last heartbeat, and when that was new here."""
        self._keys: Keys | None = None
        self._next_s = 0.0
        self._missed: float | None = None
        self._over = False

    def missed_s(self) -> float:
        """For how long it has not answered."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PULSE_S
            try:
                self._keys = self._service.connect() if self._keys is None else self._keys
                self._over = any(text is not None for text in self._keys.values(["finished", "stopped"]))
                self._missed = None
            except ServiceLost:
                self._keys, self._missed = None, self._missed or now
        return 0.0 if self._missed is None else time.monotonic() - self._missed

    def is_over(self) -> bool:
        """Whether the run is over or was stopped, as of the last second."""
        return self._over

    def is_finished(self) -> bool:
        """Whether all steps of the run are done."""
        with contextlib.suppress(ServiceLost):
            return self._keys is not None and self._keys.get("finished") is not None
        return False

    def hosts(self) -> list[str]:
        """Hosts of the run whose heartbeat was another one within `SILENT_S`, or `ENDED_S` where they said that they ended (some come back). A store that does not
        answer has none."""
        now = time.monotonic()
        try:
            self._keys = self._service.connect() if self._keys is None else self._keys
            beating = [key.removeprefix(BEAT) for key in self._keys.listed(BEAT)]
            ended = {key.removeprefix(ENDED) for key in self._keys.listed(ENDED)}
            for host, beat in Membership(self._keys).heartbeats(beating).items():
                if host not in self._beats or self._beats[host][0] != beat:
                    self._beats[host] = beat, now
        except ServiceLost:
            self._keys = None
            return []
        return [h for h in beating if now - self._beats[h][1] <= (ENDED_S if h in ended else SILENT_S)]


AGAIN_S = 0.1
NOTICE_S = 2.0
WANTED = "wanted"
"""How many ranks a run began with, on which its mapping rests: a host that comes later with another number takes this one."""


def service_at(address: ServiceAddress) -> TlsService | EtcdService:
    """Where members meet."""
    if address.is_etcd:
        return EtcdService(address.host, address.port, address.run)
    return TlsService(address.host, address.port)


def expect_service(service: Service, where: str, *, wait_s: float, tell: Callable[[str], None]) -> None:
    """Return once it answers. Raises `RunError` where it does not within `wait_s`, or serves a run that is over or was stopped."""
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
        over = keys.get("finished")
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

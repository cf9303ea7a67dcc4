"""Hosts, workers and a membership service that a storm can hurt: forked supervisors, told apart from what they train.

A *host* is a process with a `Supervisor` and its workers; killing it kills them all. The service is a process beside the hosts. Workers write what they are
doing on a board in shared memory, so a fault can be aimed at a phase. Every process writes its events to a file of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from phalanx.core.clock import now_s
from phalanx.core.errors import RunError
from phalanx.core.events import Emit, Event
from phalanx.observe import event_log
from phalanx.runtime.membership.keys import Service
from phalanx.runtime.membership.service import HUNG_S, Pulse, StoreProcess, start_store
from phalanx.runtime.membership.supervisor import Supervisor, SupervisorSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx_lab.bench.cluster import TrainingCluster, send, state_of
from phalanx_lab.bench.storm.board import PhaseBoard

KINDS = ("kill", "freeze", "notice", "service", "two", "host")
"""kill -9 of a worker; SIGSTOP, later SIGCONT; SIGTERM to a host; kill -9 of the service, of two workers at once, of a whole host. Hosts come back."""
MORE_KINDS = (
    "two hosts", "two notices", "hang", "unkillable", "all silent", "flip", "hung service", "robbed service",
)  # fmt: skip
"""kill -9 of two whole hosts at once, for which a run needs copies; SIGTERM to two at once, which hand over what they have; a worker whose own thread stands still while its
heartbeats go on, and one of these that SIGKILL does not end for a while; SIGSTOP of all workers of all hosts, later SIGCONT; kill -9 of a worker, and one wrong bit in what its
successor receives; SIGSTOP of the service; kill -9 of the service, whose port another process tries to take."""
STILL_KINDS = ("hang", "unkillable")
THAW_S = 5.0
"""How much longer than it should a frozen worker waits for its host to put it out."""
PUT_OUT_KINDS = ("freeze", "host", "two hosts", "cut", "part", "slow", *STILL_KINDS)
"""Faults for which a worker may be removed although its process exists, as far as others know."""
KEPT_S = 3.0
"""How long an unkillable process outlives what is done to end it."""
AIM_S = 1.0
"""How long to wait for a worker to be in the phase that a fault is aimed at."""

WorkerMain = Callable[[WorkerAgent, int, Emit], int]
"""(worker agent, place on the board, where events go) -> exit code."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """One thing that was done to the run."""

    kind: str
    at_s: float
    phase: str
    victims: tuple[str, ...]
    step: int
    """Steps that the victim had committed."""


class EventFile:
    """Events as JSON lines, written at once: a process that is killed loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __call__(self, event: Event, /) -> None:
        os.write(self._fd, event_log.encode(event, time_s=now_s()))


class ChaosCluster(TrainingCluster):
    """Each host runs `main` in its workers, and `settings(host)` are those of its supervisor; a subclass
    whose hosts run something else leaves both out and has its own `_host`."""

    def __init__(
        self,
        main: WorkerMain | None = None,
        settings: Callable[[str], SupervisorSettings] | None = None,
        *,
        hosts: int,
        slots: int,
        folder: Path,
        board: PhaseBoard,
        service: Service | StoreProcess | None = None,
    ) -> None:
        super().__init__()
        self.main, self.settings, self.folder, self.board = main, settings, folder, board
        self.slots = slots
        self.names = [f"h{i}" for i in range(hosts)]
        service = start_store() if service is None else service
        self.store = service if isinstance(service, StoreProcess) else None
        self.service: Service = service.address if isinstance(service, StoreProcess) else service
        self.faults: list[InjectedFault] = []
        self.away_s: list[float] = []
        """How long what each fault took away stays away."""
        self.begun: list[tuple[str, float]] = []
        """Every start of a host: which, and when."""
        self.keep_s = KEPT_S
        self.wrong: list[str] = []
        """What a fault has shown at once."""
        self._starts = 0

    def __enter__(self) -> Self:
        for name in self.names:
            self.start_host(name)
        return self

    def stop(self) -> None:
        super().stop()
        if self.store is not None:
            self.store.stop()

    def start_host(self, name: str) -> None:
        """Fork its supervisor. A host that was here before comes back with workers without state."""
        self._starts += 1
        self.begun.append((name, now_s()))
        start = self._starts
        self.start(name, lambda: self._try_host(name, start), out=self.folder / f"stderr-{name}-{start}")

    def _try_host(self, name: str, start: int) -> int:
        try:
            return self._host(name, start)
        except BaseException as err:
            (self.folder / f"error-{name}-{start}").write_text(f"{type(err).__name__}: {err}")
            return 1

    def _host(self, name: str, start: int) -> int:
        index = self.names.index(name)

        def main(agent: WorkerAgent) -> int:
            slot = int(agent.uid.split(".")[1])
            if self.main is None:
                raise RunError("this cluster does not say what its workers run")
            return self.main(agent, index * self.slots + slot, EventFile(self.folder / f"worker-{agent.uid}.jsonl"))

        if self.settings is None:
            raise RunError("this cluster does not say how its hosts take part")
        tell = EventFile(self.folder / f"host-{name}-{start}.jsonl")
        return Supervisor(main, self.settings(name), service=self.service, tell=tell).run()

    # -- what goes on

    def places(self) -> list[int]:
        """Places of workers that are there and not stopped."""
        found = []
        for place in range(self.board.places):
            pid = self.process_of(place)
            if pid is not None and self.host_of(place) in self.pids and state_of(pid) in "RSD":
                found.append(place)
        return found

    def process_of(self, place: int) -> int | None:
        """The worker at a place, as this machine knows it; None where it is gone."""
        return self.board.read(place)[0] or None

    def step(self) -> int:
        """The most steps that a worker has committed."""
        return max((self.board.read(p)[2] for p in range(self.board.places)), default=0)

    def stop_run(self, why: str) -> None:
        """All members end after the same step. Raises `ServiceLost`."""
        keys = self.service.connect()
        keys.put("stop", why)
        keys.close()

    def left(self) -> list[str]:
        """What is still there of it once it was taken down, but for processes of this machine."""
        return []

    def said(self) -> list[str]:
        """What each process wrote to its error output."""
        return [p.read_text(errors="replace") for p in sorted(self.folder.glob("stderr-*"))]

    # -- faults

    def hurt(
        self,
        kind: str,
        rng: random.Random,
        *,
        phase: str,
        back_s: float = 0.3,
        place: int | None = None,
        aim_s: float = AIM_S,
    ) -> InjectedFault | None:
        """Do one fault to the worker at `place` (None: a random one), aimed at `phase`; None where there is nobody to do it to."""
        places = self.places()
        if not places:
            return None
        place = rng.choice(places) if place is None else place
        found = self._aim(place, phase, aim_s)
        _, now_phase, step = self.board.read(place)
        at_s = now_s()
        victims = self._strike(kind, place, rng, back_s)
        self.board.release(place)
        if victims is None:
            return None
        fault = InjectedFault(
            kind=kind,
            at_s=at_s,
            phase=now_phase if found else f"{now_phase} (aimed at {phase})",
            victims=tuple(victims),
            step=step,
        )
        self.faults.append(fault)
        self.away_s.append(back_s)
        return fault

    def _thaw(self, place: int, pid: int, end_s: float) -> None:
        """Let it go on once another has its place: on a busy machine its host finds late that it is silent."""
        if self.process_of(place) == pid and time.monotonic() < end_s:
            self.later(0.1, partial(self._thaw, place, pid, end_s))
        else:
            send(pid, signal.SIGCONT)

    def _strike(self, kind: str, place: int, rng: random.Random, back_s: float) -> list[str] | None:
        """Whom it hit; None where there is no such fault here."""
        name = self.host_of(place)
        match kind:
            case "kill":
                self.signal_worker(place, signal.SIGKILL)
            case "freeze":
                pid = self.process_of(place)  # the one that is there now goes on, whoever has the place then
                self.signal_worker(place, signal.SIGSTOP)
                if pid is not None:
                    self.later(back_s, partial(self._thaw, place, pid, time.monotonic() + back_s + THAW_S))
            case "notice":
                self.signal_host(name, signal.SIGTERM)
                self.later(back_s, lambda: self._come_back(name))
                return [name]
            case "two notices":
                others = sorted(h for h in self.pids if h != name)
                leaving = [name, *rng.sample(others, k=min(1, len(others)))]
                for host in leaving:
                    self.signal_host(host, signal.SIGTERM)
                    self.later(back_s, partial(self._come_back, host))
                return leaving
            case "two":
                other = rng.choice([p for p in self.places() if p != place] or [place])
                self.signal_worker(place, signal.SIGKILL)
                self.signal_worker(other, signal.SIGKILL)
                return [self.name_of(place), self.name_of(other)]
            case "host":
                return self._kill_host(name, back_s)
            case "two hosts":
                others = [h for h in self.pids if h != name]
                other_host = [rng.choice(others)] if others else []
                return [h for n in (name, *other_host) for h in self._kill_host(n, back_s)]
            case "hang" | "unkillable":
                if kind == "unkillable":
                    self._keep_alive(place)
                self.board.stand_still(place)
            case "all silent":
                pids = [pid for p in self.places() if (pid := self.process_of(p)) is not None]
                for number, delay_s in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, back_s)):
                    self.later(delay_s, partial(_send_all, pids, number))
                return [self.name_of(p) for p in self.places()]
            case "flip":
                self.board.spoil_next(place)
                self.signal_worker(place, signal.SIGKILL)
            case "service" | "robbed service" if self.can_kill_service():
                self.kill_service(back_s)
                if kind == "robbed service" and self.takes_port():
                    self.wrong.append("another process took the port of the service while its process was dead")
                return ["service"]
            case "hung service" if self.can_kill_service():
                self.stop_service()
                return ["service"]
            case _:
                return None
        return [self.name_of(place)]

    # -- what a fault does here; emulated hosts do it in another way

    def host_of(self, place: int) -> str:
        """Name of the host of a place."""
        return self.names[place // self.slots]

    def signal_worker(self, place: int, number: signal.Signals) -> None:
        """Sends a signal to the worker's process, if it is still there."""
        pid = self.process_of(place)
        if pid is not None:
            send(pid, number)

    def signal_host(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the host's supervisor."""
        send(self.pids[name], number)

    def name_of(self, place: int) -> str:
        return f"{self.names[place // self.slots]}.{place % self.slots}"

    def _aim(self, place: int, phase: str, aim_s: float) -> bool:
        self.board.set_trap(place, phase)
        end_s = time.monotonic() + aim_s
        while time.monotonic() < end_s:
            if self.board.caught(place):
                return True
            time.sleep(0.0005)
        return self.board.caught(place)

    def _kill_host(self, name: str, back_s: float) -> list[str]:
        self.kill_host(name)
        for slot in range(self.slots):
            self.board.write(self.names.index(name) * self.slots + slot, 0, "waits", 0)
        self.later(back_s, lambda: self.start_host(name))
        return [name]

    def _come_back(self, name: str) -> None:
        """Once it has left."""
        if name in self.pids:
            self.later(0.02, lambda: self._come_back(name))
        else:
            self.start_host(name)

    def can_kill_service(self) -> bool:
        """Whether this cluster keeps it."""
        return self.store is not None

    def kill_service(self, back_s: float) -> None:
        """It comes back after `back_s` at the same address, without its values."""
        store = self.store
        if store is None:
            raise RunError("this cluster does not keep the service")
        store.kill()
        self.later(back_s, store.start)

    def stop_service(self) -> None:
        """It answers nothing any more. Whoever keeps it sees that, as `phalanx service` does."""
        if self.store is not None:
            send(self.store.pid, signal.SIGSTOP)
            self._replace_hung(self.store, Pulse(self.store.address))

    def _replace_hung(self, store: StoreProcess, pulse: Pulse) -> None:
        if pulse.missed_s() > HUNG_S:
            store.kill()
            store.start()
        else:
            self.later(0.1, partial(self._replace_hung, store, pulse))

    def takes_port(self) -> bool:
        """Whether a process that is not the service can listen at its address now."""
        where: Any = self.service
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where.host, where.port))
            sock.listen()
            return True
        return False

    def _keep_alive(self, place: int) -> None:
        pid = self.process_of(place)
        self.board.keep_alive(place, True)

        def end() -> None:
            self.board.keep_alive(place, False)
            if pid is not None:
                send(pid, signal.SIGKILL)

        self.later(self.keep_s, end)


def _send_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        send(pid, number)


def users_of(folder: Path) -> list[int]:
    """Processes that have a file in `folder` open: every process of a cluster has its error output there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if any(os.readlink(f).startswith(f"{folder}/") for f in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
    return found


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of all processes, one process after another. The last line of a killed process may be cut."""
    return [event for path in sorted(folder.glob("*.jsonl")) for event in event_log.read_events(path)]

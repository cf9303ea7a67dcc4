"""An cluster on the testbed: hosts with process, network and mount namespaces of their own, joined by shaped links; the service on a host beside them.

Faults of links (`cut`; `part`, two hosts that reach all but each other; `slow`) are only here. A host's processes have ids of its namespace on the board; signals are sent by the ids that this machine knows them by.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from phalanx.core.clock import now_s
from phalanx.core.errors import RunError
from phalanx.runtime.membership.credentials import VARIABLE
from phalanx.runtime.membership.keys import ServiceLost, TlsService
from phalanx.train.recovery.watch import PHASES
from phalanx_lab.bench.storm.board import PhaseBoard
from phalanx_lab.bench.storm.chaos_cluster import ChaosCluster
from phalanx_lab.bench.storm.trainer import StormSetup
from phalanx_lab.testbed import links
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.job import TestbedJob
from phalanx_lab.testbed.testbed import Testbed

PORT = 29400
RATE = 1e9
SLOW = 5e6
"""Bits a second of a slow link."""
SLOW_S = 3.0
PART_S = 10.0
"""How long two hosts cannot reach each other."""
STOP_S = 180.0
"""Limit for a program that imports torch and writes one key, where a dozen ranks share two cores."""
LOOK_S = 0.05
START_S = 60.0
"""How long the service may take to answer."""


class TestbedChaosCluster(ChaosCluster):
    """Use as a context manager from the main thread."""

    def __init__(self, setup: StormSetup, folder: Path) -> None:
        board = PhaseBoard(setup.ranks, PHASES, path=folder / "board")
        where = TlsService(links.address(setup.hosts), PORT)

        super().__init__(hosts=setup.hosts, slots=setup.slots, folder=folder, board=board, service=where)
        self.setup = replace(setup, service=f"{where.host}:{PORT}")
        self.jobs: dict[str, TestbedJob] = {}
        self._outer: dict[tuple[str, int, int], int] = {}
        self._look_s = dict.fromkeys(self.names, 0.0)
        """Moment for each host when its job is looked at next."""

    def __enter__(self) -> Self:
        spec = ClusterSpec(hosts=self.setup.hosts + 1, ranks_per_host=1, link_bit_per_s=RATE)
        self.bed = Testbed(spec, folder=self.folder / "bed")
        try:
            command = [sys.executable, "-m", "phalanx", "service", f"0.0.0.0:{PORT}"]
            self.keeper = self.bed.run(command, env=_environment(self.folder), hosts=[self.setup.hosts], name="service")
            self._await_service()
            for name in self.names:
                self.start_host(name)
        except BaseException:
            self.bed.close()
            raise
        return self

    def stop(self) -> None:
        self.bed.close()
        self.pids.clear()

    def _await_service(self) -> None:
        end_s = time.monotonic() + START_S
        while "membership service" not in self.keeper.output(0):
            if time.monotonic() > end_s or not self.keeper.running():
                raise RunError(f"the membership service did not start: {self.keeper.output(0)}")
            time.sleep(LOOK_S)

    def start_host(self, name: str) -> None:
        index = self.names.index(name)
        if not self.bed.host(index).alive:
            self.bed.start_host(index)
            for slot in range(self.slots):
                self.board.go_on(index * self.slots + slot)
        self._starts += 1
        self.begun.append((name, now_s()))
        request = {
            "setup": asdict(self.setup),
            "folder": str(self.folder),
            "host": name,
            "index": index,
            "start": self._starts,
        }
        command = [sys.executable, "-m", "phalanx_lab.bench.storm.host", json.dumps(request)]
        self.jobs[name] = self.bed.run(
            command, env=_environment(self.folder), hosts=[index], name=f"{name}-{self._starts}"
        )
        self.pids[name] = self.bed.host(index).pid
        self.codes.pop(name, None)

    # -- what goes on

    def exit_code(self, host: str) -> int | None:
        if time.monotonic() < self._look_s[host]:
            return None
        self._look_s[host] = time.monotonic() + LOOK_S
        return None if self.jobs[host].running() else self.jobs[host].ranks[0].status or 0

    def process_of(self, place: int) -> int | None:
        """The id by which this machine knows the worker at a place; None where it is gone."""
        inner, name = self.board.read(place)[0], self.host_of(place)
        index = self.names.index(name)
        key = (name, self.bed.host(index).generation, inner)
        if key not in self._outer:
            found = _outer_pid(inner, self.bed.host(index).pid) if inner and self.bed.host(index).alive else None
            if found is None:
                return None
            self._outer[key] = found
        return self._outer[key]

    # -- what faults do here

    def signal_host(self, name: str, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self.jobs[name].terminate_rank(0)

    def _kill_host(self, name: str, back_s: float) -> list[str]:
        index = self.names.index(name)
        self.pids.pop(name)
        self.bed.kill_host(index)
        for slot in range(self.slots):
            self.board.write(index * self.slots + slot, 0, "waits", 0)
        self.later(back_s, lambda: self.start_host(name))
        return [name]

    def _strike(self, kind: str, place: int, rng: random.Random, back_s: float) -> list[str] | None:
        name = self.host_of(place)
        index = self.names.index(name)
        if kind == "cut":
            self.bed.cut_link(index)
            self.later(back_s, lambda: self.bed.restore_link(index))
            return [name]
        if kind == "slow":
            self.bed.set_rate(index, SLOW)
            self.later(SLOW_S, lambda: self.bed.set_rate(index, RATE))
            return [name]
        if kind == "part":
            others = [h for h in self.pids if h != name]
            if not others:
                return None
            other = rng.choice(others)
            pair = index, self.names.index(other)
            self.bed.part_hosts(*pair)
            self.later(PART_S, lambda: self.bed.rejoin_hosts(*pair))
            return [name, other]
        if kind in ("service", "robbed service"):
            self._kill_store(back_s)
            if kind == "robbed service" and self.takes_port():
                self.wrong.append("another process took the port of the service while its process was dead")
            return ["service"]
        if kind == "hung service":
            for pid in self._stores()[1]:
                os.kill(pid, signal.SIGSTOP)
            return ["service"]
        return super()._strike(kind, place, rng, back_s)

    def _kill_store(self, back_s: float) -> None:
        """The process that has the values. The one that would start it again at once is held for so long."""
        keepers, stores = self._stores()
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)
        for pid in stores:
            os.kill(pid, signal.SIGKILL)

        def go_on() -> None:
            for pid in keepers:
                os.kill(pid, signal.SIGCONT)

        self.later(back_s, go_on)

    def _stores(self) -> tuple[list[int], list[int]]:
        """Processes of `phalanx service`, and those that have its values."""
        host = self.bed.host(self.setup.hosts)
        mine = _processes_in(host.pid)
        keepers = [pid for pid, parent in mine.items() if parent == host.pid]
        return keepers, [pid for pid, parent in mine.items() if parent in keepers]

    def takes_port(self) -> bool:
        take = f"import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('0.0.0.0', {PORT})); s.listen()"
        name = f"rob-{len(self.bed.jobs)}"
        return self.bed.run([sys.executable, "-c", take], hosts=[self.setup.hosts], name=name).wait(STOP_S).ok

    def stop_run(self, why: str) -> None:
        command = [sys.executable, "-m", "phalanx_lab.bench.storm.host", json.dumps({"stop": why, "port": PORT})]
        job = self.bed.run(
            command, env=_environment(self.folder), hosts=[self.setup.hosts], name=f"stop-{len(self.bed.jobs)}"
        )
        if not job.wait(STOP_S).ok:
            raise ServiceLost("the run could not be told to end")

    def left(self) -> list[str]:
        return self.bed.leftovers()

    def said(self) -> list[str]:
        return [p.read_text(errors="replace") for p in sorted((self.folder / "bed").glob("*/rank-*.log"))]


def _environment(folder: Path) -> dict[str, str]:
    """Hosts import what this program has imported, and share the credentials that the service makes."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", VARIABLE: str(folder / "credentials.pem")}


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {}


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _outer_pid(inner: int, host: int) -> int | None:
    """The process with id `inner` in the namespace of process `host`."""
    wanted = _namespace(host)
    for pid in _all_pids():
        if _namespace(pid) == wanted and _status(pid).get("NSpid", "").split()[-1:] == [str(inner)]:
            return pid
    return None


def _processes_in(host: int) -> dict[int, int]:
    """Process -> parent, of all in the namespace of process `host`."""
    wanted = _namespace(host)
    return {pid: int(_status(pid).get("PPid", "0")) for pid in _all_pids() if _namespace(pid) == wanted}

"""A storm whose membership service is an etcd: killed with -9 and started again with its folder, it has lost nothing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from phalanx.core.errors import RunError
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.keys_etcd import EtcdService
from phalanx_lab.bench.storm.trainer import StormSetup, TrainerChaosCluster
from phalanx_lab.testbed.slurm import free_ports

START_S = 20.0


class EtcdChaosCluster(TrainerChaosCluster):
    """Local hosts and an etcd of their own; `program` is its path (`sh scripts/etcd.sh` prints one)."""

    def __init__(self, setup: StormSetup, folder: Path, *, program: Path) -> None:
        self._program, self._ports = program, free_ports(2)
        where = EtcdService("127.0.0.1", self._ports[0], run="storm")
        address = f"etcd://{where.host}:{where.port}/{where.run}"
        super().__init__(replace(setup, service=address), folder, service=where)
        self._etcd: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start_etcd()
        self._await_etcd()
        return super().__enter__()

    def stop(self) -> None:
        super().stop()
        self._stop_etcd()

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        words = {
            "data-dir": str(self.folder / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        command = [str(self._program), *(f"--{key}={value}" for key, value in words.items())]
        with (self.folder / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _await_etcd(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(ServiceLost):
                self.service.connect().close()
                return
            time.sleep(0.05)
        said = (self.folder / "etcd.log").read_text(errors="replace")[-2000:]
        raise RunError(f"{self._program}: does not answer within {START_S:g} s of its start: {said}")

    def _stop_etcd(self) -> None:
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()

    def can_kill_service(self) -> bool:
        return True

    def kill_service(self, back_s: float) -> None:
        self._stop_etcd()
        self.later(back_s, self._start_etcd)

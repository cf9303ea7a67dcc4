"""One emulated host as its owner sees it: alive or dead, frozen, its link's state, the programs on it.

Decides the order of the small steps (a dead host's link is gone before it starts anew; a silent death takes the link first). The steps
themselves are `links.py` (text) and `supervisor.py` (hands).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import TestbedError
from phalanx_lab.testbed import links
from phalanx_lab.testbed.rpc import Remote, socket_pair

_RUN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Tools:
    """Paths of the programs that make links."""

    ip: str
    tc: str

    def ip_batch(self, agent: Remote, batch: str) -> None:
        run_tool(agent, [self.ip, "-batch", "-"], batch)

    def tc_batch(self, agent: Remote, batch: str) -> None:
        if batch:
            run_tool(agent, [self.tc, "-batch", "-"], batch)


def run_tool(agent: Remote, argv: Sequence[str], batch: str) -> None:
    """Run `ip` or `tc` where `agent` is. Raises `TestbedError` with the batch and what the tool said."""
    done = agent.ask("run", argv=list(argv), input=batch, timeout_s=_RUN_TIMEOUT_S)
    if done["status"]:
        said = " ".join(done["output"].split())
        hint = ""
        if "kind is unknown" in said or "Unknown device type" in said or "not supported" in said.lower():
            kind = next((k for k in ("netem", "tbf", "bridge", "veth") if f" {k} " in batch), "this kind of device")
            hint = f"this kernel lacks {kind} (load or build the module)"
            hint += "; leave link_latency_s at 0" if kind == "netem" else ""
        value = "; ".join(batch.strip().splitlines())
        rule = f"{Path(argv[0]).name} said: {said}"
        raise TestbedError.of(f"testbed.{agent.name}", value, rule, hint, subject="testbed")


class Host:
    """See the module. Made dead; `start` brings it to life, any number of times."""

    def __init__(
        self,
        index: int,
        *,
        switch: Remote,
        tools: Tools,
        hosts_file: Path,
        grain: links.Grain = links.FINE,
        cores: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.cores = tuple(cores)
        """Those that its programs use; none: all."""
        self.generation = 0
        """Counts its lives: a program of an earlier one is dead."""
        self.frozen = False
        self.cut = False
        self.rate: float | None = None
        self._switch = switch
        self._tools = tools
        self._hosts_file = hosts_file
        self._grain = grain
        self._agent: Remote | None = None
        self._inner_pid = 0

    @property
    def alive(self) -> bool:
        return self._agent is not None

    @property
    def pid(self) -> int:
        """Its first process as the owner's machine knows it: `nsenter --all --target PID`."""
        return self.agent.pid

    @property
    def agent(self) -> Remote:
        if self._agent is None:
            rule = "the host is dead"
            raise TestbedError.of("testbed.host", self.index, rule, "start it first", subject="testbed")
        return self._agent

    def start(self, *, rate: float | None, latency_s: float) -> None:
        """New namespaces, a new link of this rate, no programs."""
        if self.alive:
            raise TestbedError.of("testbed.host", self.index, "is alive already", "kill it first", subject="testbed")
        name = links.host_name(self.index)
        ours, theirs = socket_pair()
        agent = Remote(name, ours)
        try:
            made = self._switch.ask(
                "host", fds=(theirs.fileno(),), name=name, hosts_file=str(self._hosts_file), cores=self.cores
            )
        finally:
            theirs.close()
        agent.expect_hello()
        self._agent, self._inner_pid = agent, made["pid"]
        self.generation += 1
        self.frozen = self.cut = False
        self.rate = rate
        self._tools.ip_batch(self._switch, links.plug_in(self.index, pid=made["pid"], rate=rate, grain=self._grain))
        self._tools.ip_batch(agent, links.configure(self.index, rate=rate, grain=self._grain))
        self._shape(latency_s)

    def _ends(self) -> tuple[tuple[Remote, str], tuple[Remote, str]]:
        """(agent, device) of both ends of the link."""
        return (self.agent, links.INTERFACE), (self._switch, links.port(self.index))

    def _shape(self, latency_s: float) -> None:
        for agent, device in self._ends():
            self._tools.tc_batch(agent, links.shape(device, rate=self.rate, latency_s=latency_s, grain=self._grain))

    def set_rate(self, rate: float | None, *, latency_s: float) -> None:
        """Change the rate of the link in both directions; what is queued stays queued."""
        shaped, self.rate = self.rate is not None, rate
        for agent, device in self._ends():
            self._tools.ip_batch(agent, links.resize(device, rate=rate, grain=self._grain))
            if rate is None and shaped:
                self._tools.tc_batch(agent, links.unshape(device))
        self._tools.ip_batch(self.agent, links.forget_routes())
        self._shape(latency_s)

    def set_link(self, *, up: bool) -> None:
        self.agent  # noqa: B018 - a dead host has no link
        self._tools.ip_batch(self._switch, links.set_link(self.index, up=up))
        self.cut = not up

    def block(self, other: int, *, blocked: bool) -> None:
        """Throw away what goes to host `other`, or do so no longer."""
        self._tools.ip_batch(self.agent, links.block(other, blocked=blocked))

    def kill(self, *, silent: bool) -> None:
        """SIGKILL to everything on it, at once. Its kernel still closes connections, unless `silent` takes the link first."""
        if silent:
            self._unplug()
        self._switch.ask("kill_host", pid=self._inner_pid)
        self.agent.quit()
        self._agent = None

    def clear_link(self) -> None:
        """Remove what a dead host may have left at the switch, so that it can start anew."""
        self._unplug()

    def _unplug(self) -> None:
        try:
            self._tools.ip_batch(self._switch, links.unplug(self.index))
        except TestbedError as error:
            if "Cannot find device" not in str(error):
                raise

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to every process of the host."""
        self.agent.ask("signal", id=None, signal=int(number))
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.frozen = number == signal.SIGSTOP

    def spawn(self, name: str, argv: Sequence[str], *, env: dict[str, str], cwd: Path, log: Path) -> None:
        """Start a program under a name that is new on this host. Raises `TestbedError` if it cannot be started."""
        self.agent.ask("spawn", id=name, argv=list(argv), env=env, cwd=str(cwd), log=os.path.abspath(log))

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Sends a signal to a program and what it forked in its session; False if all of it has ended."""
        return bool(self.agent.ask("signal", id=name, signal=int(number))["sent"])

    def exited(self) -> dict[str, tuple[int, float]]:
        """Name -> (status, time since the epoch) of every program that has ended; a negative status is a signal."""
        return {name: (status, at) for name, (status, at) in self.agent.ask("poll")["exited"].items()}

"""The process that a bed hangs on: `python -m phalanx_lab.testbed.supervisor REQUEST`, started by `Testbed` and by nobody else.

    owner (Testbed)
      └─ supervisor  watches the owner, and kills the switch when the owner is gone
           └─ switch     first process of the bed's process namespace; its network namespace holds the bridge
                ├─ host 0   first process of its own namespaces (network, processes, mounts, host name)
                │    ├─ rank 0
                │    └─ rank 1
                └─ host 1 ...

When the first process of a process namespace dies, the kernel kills everything in it, whatever it forked or hid. When the last process
of a network namespace is gone, the kernel removes its interfaces. So killing a host is one signal, and nothing here needs a clean-up
that could be missed: the death of the owner, even by SIGKILL, ends all of it.

Decides nothing: switch and hosts carry out small orders (`run`, `spawn`, `poll`, `signal`; the switch also `host`, `kill_host`), one
JSON message each way over a socket pair. Standard library only; must never start a thread (user namespaces refuse those).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx_lab.testbed import kernel

MESSAGE_BYTES = 1 << 17
"""Longest message; below the default buffer of a socket pair, which must hold a message whole."""
_OUTPUT_CHARS = 20_000

Message = dict[str, Any]


@dataclass
class Agent:
    """Carries out orders in its namespaces: the switch, or a host."""

    control: socket.socket
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Ranks by the id that the owner gave them."""
    exited: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Id -> (status, time of its end); a negative status is a signal."""
    received_fds: list[int] = field(default_factory=list)

    def orders(self) -> dict[str, Callable[[Message], Message]]:
        return {"run": self.run, "spawn": self.spawn, "poll": self.poll, "signal": self.signal}

    def serve(self) -> None:
        """Answer orders until the owner closes the connection or says quit."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        orders = self.orders()
        while True:
            ready, _, _ = select.select([self.control.fileno(), read_end], [], [])
            if read_end in ready:
                os.read(read_end, 4096)
            self.reap()
            if self.control.fileno() in ready:
                raw, self.received_fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
                message = json.loads(raw) if raw else {"order": "quit"}
                if message["order"] == "quit":
                    return
                self.control.send(json.dumps(self.answer(orders[message["order"]], message)).encode())

    def answer(self, order: Callable[[Message], Message], message: Message) -> Message:
        try:
            return {"n": message["n"], **order(message)}
        except (OSError, subprocess.SubprocessError) as error:
            return {"n": message["n"], "error": f"{error}"}

    def reap(self) -> None:
        """Collect every child that ended; a first process inherits the orphans of its namespace too."""
        by_pid = {p.pid: name for name, p in self.processes.items() if name not in self.exited}
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.ended(pid)
            if pid in by_pid:
                status = os.waitstatus_to_exitcode(raw)
                self.processes[by_pid[pid]].returncode = status
                self.exited[by_pid[pid]] = (status, time.time())

    def ended(self, pid: int) -> None:
        """Hears of every child that was reaped."""

    def run(self, message: Message) -> Message:
        """Run a short program to its end."""
        done = subprocess.run(
            message["argv"],
            input=message.get("input", ""),
            capture_output=True,
            text=True,
            timeout=message["timeout_s"],
        )
        return {"status": done.returncode, "output": (done.stdout + done.stderr)[-_OUTPUT_CHARS:]}

    def spawn(self, message: Message) -> Message:
        """Start a program in a session of its own, its output appended to a log file."""
        with Path(message["log"]).open("ab") as log:
            process = subprocess.Popen(
                message["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **message["env"]},
                cwd=message["cwd"],
                start_new_session=True,
            )
        self.processes[message["id"]] = process
        return {"pid": process.pid}

    def poll(self, _: Message) -> Message:
        self.reap()
        return {"exited": self.exited}

    def signal(self, message: Message) -> Message:
        """Send a signal to one program and what it forked, or (`id` null) to every process of the namespace but this one."""
        number, name = message["signal"], message["id"]
        if name is not None and self._is_reused(name):
            return {"sent": False}
        try:
            if name is None:
                os.kill(-1, number)
            else:
                os.killpg(self.processes[name].pid, number)
        except ProcessLookupError:
            return {"sent": False}
        return {"sent": True}

    def _is_reused(self, name: str) -> bool:
        """Whether the process id of a program that has ended belongs to another one now."""
        pid = self.processes[name].pid
        live = {p.pid for other, p in self.processes.items() if other not in self.exited}
        return name in self.exited and pid in live


@dataclass
class Switch(Agent):
    """The agent that holds the bridge and makes hosts."""

    hosts: set[int] = field(default_factory=set)
    """Process ids of the hosts that run."""

    def orders(self) -> dict[str, Callable[[Message], Message]]:
        return {**super().orders(), "host": self.host, "kill_host": self.kill_host}

    def host(self, message: Message) -> Message:
        """Start a host that takes orders from the socket that came with the message; its process id, as `ip` here knows it."""
        control = socket.socket(fileno=self.received_fds[0])
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            signal.set_wakeup_fd(-1)
            _start_host(control, message, report=write_end, also_close=self.control)
        os.close(write_end)
        control.close()
        with os.fdopen(read_end, "rb") as stream:
            report: Message = json.loads(stream.read() or b'{"error": "the host process died at its start"}')
        os.waitpid(child, 0)
        if "pid" in report:
            self.hosts.add(report["pid"])
        return report

    def ended(self, pid: int) -> None:
        self.hosts.discard(pid)

    def kill_host(self, message: Message) -> Message:
        """Kill a host and wait until the kernel has killed everything in it."""
        pid = message["pid"]
        if pid in self.hosts:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.hosts.discard(pid)
        return {}


def _start_host(control: socket.socket, message: Message, *, report: int, also_close: socket.socket) -> None:
    """Starts a host in a fork of the switch: new namespaces, fork their first process, tell its id, end. Never returns."""
    try:
        also_close.close()
        kernel.unshare(kernel.HOST_NAMESPACES)
        pid = os.fork()
        if pid == 0:
            os.close(report)
            _be_host(control, message)
        answer: Message = {"pid": pid}
    except OSError as error:
        answer = {"error": str(error)}
    os.write(report, json.dumps(answer).encode())
    os._exit(0)


def _show_own_processes() -> None:
    """In /proc. Inside containers that hide parts of it the kernel refuses; it then goes on to show the outer process ids."""
    with contextlib.suppress(OSError):
        kernel.mount_proc()


_TCP = {
    # Linux remembers for each peer at which rate a connection had to slow down; here rates change, and runs must repeat
    "tcp_no_metrics_save": "1",
    # bbr, the default of some systems, takes the rate of a bucket's burst for that of the link: a quarter more time for nine moves between hosts
    "tcp_congestion_control": "reno",
}


def _be_host(control: socket.socket, message: Message) -> None:
    """The first process of a host. Never returns."""
    status = 1
    try:
        kernel.make_mounts_private()
        kernel.set_hostname(message["name"])
        if message["cores"]:
            os.sched_setaffinity(0, message["cores"])
        if Path("/etc/hosts").exists():
            kernel.bind(Path(message["hosts_file"]), Path("/etc/hosts"))
        _show_own_processes()
        for name, value in _TCP.items():
            with contextlib.suppress(OSError):
                Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
        control.send(b'{"n": 0}')
        Agent(control).serve()
        status = 0
    finally:
        os._exit(status)


def _enter(access: str) -> str:
    """Give the children of this process a namespace of their own, as root or through a user namespace. Returns which way worked."""
    refused = []
    for way in ("root", "user") if access == "auto" else (access,):
        try:
            if way == "user":
                kernel.enter_user_namespace()
            kernel.unshare(kernel.HOST_NAMESPACES)
            kernel.make_mounts_private()  # refused in a changed root that is no mount
            return way
        except OSError as error:
            refused.append(f"{'as root' if way == 'root' else 'through a user namespace'}: {error.strerror}")
    raise PermissionError("; ".join(refused))


def _watch(owner: int, child: int) -> None:
    """Wait until the owner or the child has ended; then the child is dead."""
    handle = os.pidfd_open(child)
    select.select([owner, handle], [], [])
    os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still its own
    os.waitpid(child, 0)


def main(argv: list[str]) -> int:
    """REQUEST: `{"owner": pid, "control": fd, "owner_fd": pidfd, "access": "auto|root|user"}`."""
    request = json.loads(argv[0])
    control = socket.socket(fileno=request["control"])
    try:
        way = _enter(request["access"])
    except OSError as error:
        control.send(json.dumps({"n": 0, "error": str(error)}).encode())
        return 1
    supervisor = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        control.close()
        _watch(request["owner_fd"], child)
        return 0
    kernel.die_with_parent(signal.SIGKILL)
    if select.select([supervisor], [], [], 0)[0]:
        os._exit(1)  # the supervisor died before the line above
    os.close(supervisor)
    control.send(json.dumps({"n": 0, "access": way}).encode())
    _show_own_processes()  # `ip` from iproute2 7 on looks for the namespace of a process there
    Switch(control).serve()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

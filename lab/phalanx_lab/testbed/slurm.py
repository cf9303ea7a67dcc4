"""A real SLURM on this machine: munged, slurmctld and a slurmd for each emulated node, in a temporary folder, on free ports, without systemd.

Decides how the nodes look (`configuration`), and what may happen to them: set DOWN, lost with everything on them, drained by a job that comes first. Must never change: after the `with` block no
process of it is left. All of them carry the tag of their owner (`testbed/owner.py`), so those of an owner that was killed are found again.

The nodes are processes of one machine: they share its processors, its host name and its files. What is real is every decision of SLURM's.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.core.errors import TestbedError
from phalanx_lab.testbed.owner import VARIABLE, make_folder, new_owner, processes_of, reap_stale

OVER = (
    *("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""States from which a job does not come back (squeue(1)). On its way to be started anew it is SIGNALING, REQUEUED and others for moments."""
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
PACKAGES = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
START_S = 60.0
"""Longest wait for what SLURM should come to."""
LOOK_S = 0.02
KILL_WAIT_S = 20
"""Seconds from SIGTERM to SIGKILL (SLURM's default is 30)."""


def missing_programs() -> list[str]:
    """Programs of SLURM that this machine lacks (`PACKAGES` installs them)."""
    places = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=places) is None]


def configuration(folder: Path, ports: Sequence[int], *, cpus: int) -> str:
    """slurm.conf: `ports` are the controller's and those of the nodes n1, n2 ...; each node says that it has `cpus` processors.

    A requeued job waits `cred_expire`; a job in the partition `first` takes nodes from one in `low`, which is queued again.
    """
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000"
        for i, port in enumerate(ports[1:], start=1)
    )
    return f"""ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={_user()}
SlurmdUser={_user()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
KillWait={KILL_WAIT_S}
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={KILL_WAIT_S}
PartitionName=first Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


class SlurmCluster:
    """Nodes n1, n2 ... under a controller of their own. A context manager; raises `TestbedError` where a program is missing or does not begin."""

    def __init__(self, *, nodes: int = 3, cpus: int = 4) -> None:
        self.nodes = tuple(f"n{i}" for i in range(1, nodes + 1))
        self.cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        if missing := missing_programs():
            rule = "is not installed here"
            raise TestbedError.of("SLURM", ", ".join(missing), rule, PACKAGES, subject="this machine")
        reap_stale()
        self.owner = new_owner()
        self.folder = make_folder(self.owner)
        self.environ = {
            **os.environ,
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            VARIABLE: self.owner.tag,
        }
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _begin(self) -> None:
        for name in ("munge", "state", *self.nodes):
            (self.folder / name).mkdir(mode=0o755)
        self.folder.chmod(0o755)
        ports = free_ports(1 + len(self.nodes))
        (self.folder / "slurm.conf").write_text(configuration(self.folder, ports, cpus=self.cpus))
        self._begin_munge()
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._start(node, "slurmd", "-D", "-N", node)
        self.wait(lambda: all(self.state_of(node) == "IDLE" for node in self.nodes), "idle nodes")

    def _begin_munge(self) -> None:
        munge = self.folder / "munge"
        self.call("mungekey", "--create", f"--keyfile={munge}/key")
        options = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={munge}/socket", *options)
        self.wait((munge / "socket").exists, "munged")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def stop(self) -> None:
        """End every process, and remove the folder."""
        end_s = time.monotonic() + START_S
        while (pids := processes_of(self.owner)) and time.monotonic() < end_s:
            _kill(pids)
            for daemon in self._daemons.values():
                daemon.poll()
            time.sleep(LOOK_S)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- commands

    def call(self, *command: str, more: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Output of a command of SLURM's. Raises `TestbedError` with what it said where it fails."""
        done = subprocess.run(
            command, env={**self.environ, **(more or {})}, cwd=cwd, capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise TestbedError.of(" ".join(command), done.returncode, f"failed: {said}", subject="SLURM")
        return done.stdout

    def submit(self, *arguments: str, more: Mapping[str, str] | None = None, cwd: Path) -> int:
        """Number of a new job (`sbatch ARGUMENTS...`)."""
        return int(self.call("sbatch", "--parsable", *arguments, more=more, cwd=cwd).strip())

    def state_of(self, node: str) -> str:
        """In SLURM's words: IDLE, MIXED, ALLOCATED, DOWN ...; empty where the controller does not answer. (`sinfo` called nodes mixed for a minute after their jobs.)"""
        with contextlib.suppress(TestbedError):
            words = self.call("scontrol", "--oneliner", "show", "node", node).split()
            return next(w for w in words if w.startswith("State=")).removeprefix("State=").rstrip("*")
        return ""

    def job_state(self, job: int) -> str:
        """In SLURM's words: PENDING, RUNNING, COMPLETED ...; empty where the controller does not know the job any more."""
        with contextlib.suppress(TestbedError):
            return self.call("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T").strip()
        return ""

    def is_over(self, job: int) -> bool:
        """Whether it does not come back."""
        return self.job_state(job) in OVER

    def nodes_of(self, job: int) -> tuple[str, ...]:
        """Nodes that a job has, the one of its batch script first."""
        listed = self.call("squeue", "-h", "-j", str(job), "-o", "%N").strip()
        return tuple(self.call("scontrol", "show", "hostnames", listed).split()) if listed else ()

    def wait(self, there: Callable[[], bool], what: str, *, limit_s: float = START_S) -> float:
        """Seconds until it is there. Raises `TestbedError` with the ends of the logs where it does not come, or a daemon has ended."""
        begin_s = time.monotonic()
        while not there():
            if time.monotonic() - begin_s > limit_s:
                rule = f"did not come within {limit_s:g} s; nodes are {[self.state_of(n) for n in self.nodes]}\n{self.logs()}"
                raise TestbedError.of("SLURM", what, rule, subject="SLURM")
            time.sleep(LOOK_S)
        return time.monotonic() - begin_s

    def logs(self) -> str:
        """The last lines of every daemon."""
        files = sorted([*self.folder.glob("*.log"), self.folder / "munge" / "log"])
        return "\n".join(f"-- {f.name}\n{f.read_text(errors='replace')[-800:]}" for f in files if f.exists())

    # ---- what happens to nodes

    def set_down(self, node: str) -> None:
        """An administrator, or a failed health check, takes the node away: its part of every job is killed."""
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lab")

    def set_up(self, node: str) -> None:
        """The node may be used again; its slurmd is started where it was lost."""
        if self._daemons[node].poll() is not None:
            self._start(node, "slurmd", "-D", "-N", node)
        with contextlib.suppress(TestbedError):  # it has come back by itself
            self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait(lambda: self.state_of(node) in ("IDLE", "MIXED", "ALLOCATED"), f"node {node}")

    def lose(self, node: str) -> None:
        """kill -9 of everything on a node, as when its power fails: slurmd, slurmstepd and what they started."""
        work = self.processes_on(node)
        steps = [pid for pid in map(_parent, work) if _name(pid).startswith("slurmstepd")]
        self._daemons[node].kill()
        _kill([*steps, *work])
        self._daemons[node].wait()

    def processes_on(self, node: str) -> list[int]:
        """What jobs run on a node."""
        marker = f"SLURMD_NODENAME={node}".encode()
        return [pid for pid in processes_of(self.owner) if marker in _environ(pid).split(b"\0")]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now, and that the kernel gives to no connection meanwhile (`ip_local_port_range`)."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            sock, port = stack.enter_context(socket.socket()), random.SystemRandom().randrange(10_000, 32_000)
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace")
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return 0

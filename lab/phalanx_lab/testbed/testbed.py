"""`Testbed`: emulated hosts on this machine, joined by shaped links.

    with Testbed(ClusterSpec(hosts=3, ranks_per_host=2, link_bit_per_s=1e9)) as bed:
        job = bed.run(["python", "train.py"])
        bed.kill_host(1)
        bed.cut_link(2)
        print(job.wait(60).explain())

Decides what is built and what is asked of it; `supervisor.py` says how it lives and dies, `links.py` how it is wired. Must never change:
nothing is made outside namespaces of its own, so that no traffic, interface or process of a bed can meet anything else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from phalanx.core.errors import Problem, TestbedError, raise_if
from phalanx_lab.testbed import links
from phalanx_lab.testbed.access import find_tools, machine_problems, refusal
from phalanx_lab.testbed.cluster import ClusterSpec, cluster_problems
from phalanx_lab.testbed.cpu_groups import CpuGroups
from phalanx_lab.testbed.host import Host, Tools
from phalanx_lab.testbed.job import RankState, TestbedJob
from phalanx_lab.testbed.owner import FOLDER_PREFIX, make_folder, new_owner, processes_of, reap_stale
from phalanx_lab.testbed.rpc import start_supervisor

Access = Literal["auto", "root", "user"]
_FIRST_PORT = 29_500
_CLOSE_S = 10.0


def _usable(folder: Path) -> Path:
    """The folder, made. Raises `TestbedError` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror}"
        raise TestbedError.of("testbed.folder", str(folder), rule, "name another folder", subject="testbed") from error
    return folder


class Testbed:
    """Built when made; `close` it, or use it in a `with`. If its process dies in any way, the kernel takes all of it down."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        access: Access = "auto",
        folder: Path | None = None,
        grain: links.Grain = links.FINE,
        own_cores: bool = False,
        even_cores: bool = False,
    ) -> None:
        """Raises `TestbedError` with all problems: of the spec, of missing tools, or why namespaces are refused here.

        `access`: namespaces made as root, through a user namespace, or whichever works. `folder` keeps logs; by default they live in
        a temporary folder that goes with the bed. `grain`: how fine the time of shaped links is. `own_cores`: the cores are divided
        among the hosts, where there is one for each, so that no program of one host runs on a core of another. `even_cores`: every host that wants it gets as
        much processor time as any other, however many programs it has (a control group for each); where that is refused, `uneven` says why.
        """
        problems = cluster_problems(spec) or links.link_problems(spec)
        raise_if([*problems, *machine_problems()], TestbedError, subject="testbed")
        self.spec = spec
        self._grain, self._own_cores, self._even_cores = grain, own_cores, even_cores
        made = _usable(folder) if folder else None
        self.reaped = reap_stale()
        """What a dead owner had left behind, in words."""
        self.owner = new_owner()
        self._scratch = make_folder(self.owner)
        self._shares: CpuGroups | None = None
        self.uneven = ""
        """Why hosts have no even shares of the cores although they were asked for."""
        self.folder = made or self._scratch
        self.jobs: list[TestbedJob] = []
        self.hosts: tuple[Host, ...] = ()
        self._supervisor, self._switch = start_supervisor(self.owner, access, log=self._scratch / "supervisor.log")
        try:
            self._build(find_tools())
        except BaseException:
            self.close()
            raise

    def _build(self, tools: Tools) -> None:
        try:
            self._switch.expect_hello()
        except TestbedError as error:
            said = (self._scratch / "supervisor.log").read_text(errors="replace").strip()
            raise refusal("; ".join(p.rule for p in error.problems), said=said) from error
        self.access: str = self._switch.hello["access"]
        """How the namespaces were made: `root` or `user`."""
        tools.ip_batch(self._switch, links.make_switch())
        hosts_file = self._scratch / "hosts"
        hosts_file.write_text(links.hosts_file(self.spec))
        self.hosts = tuple(
            Host(h, switch=self._switch, tools=tools, hosts_file=hosts_file, grain=self._grain, cores=self._cores(h))
            for h in range(self.spec.hosts)
        )
        if self._even_cores:
            try:
                self._shares = CpuGroups(f"{FOLDER_PREFIX}{self.owner.tag}", self.spec.hosts)
            except OSError as error:
                self.uneven = f"control groups cannot be made ({error})"
        for h in range(self.spec.hosts):
            self.start_host(h)

    def _cores(self, host: int) -> list[int]:
        cores, hosts = sorted(os.sched_getaffinity(0)), self.spec.hosts
        if not self._own_cores or len(cores) < hosts:
            return []
        return cores[host * len(cores) // hosts : (host + 1) * len(cores) // hosts]

    # -- life -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill everything in the bed and wait until it is gone."""
        for host in self.hosts:
            if host.alive:
                host.agent.quit()
        self._switch.quit()
        try:
            self._supervisor.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self._shares is not None:
            self._shares.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """What is still there of this bed, in words: nothing once it is closed."""
        processes = [f"process {pid}" for pid in processes_of(self.owner)]
        groups = [] if self._shares is None else [f"control group {g}" for g in self._shares.groups if g.exists()]
        return processes + groups + ([f"folder {self._scratch}"] if self._scratch.exists() else [])

    def explain(self) -> str:
        """The bed in a few lines, with the way into each host."""
        lines = [self.spec.explain(), f"  made {'as root' if self.access == 'root' else 'through a user namespace'}"]
        if self._even_cores:
            lines.append(f"  cores in shares {f'that are NOT even: {self.uneven}' if self.uneven else 'that are even'}")
        for host in self.hosts:
            if host.alive:
                way = f"nsenter --all --preserve-credentials --target {host.pid}"
                lines.append(f"  {links.host_name(host.index)}  {links.address(host.index)}  enter it: {way}")
            else:
                lines.append(f"  {links.host_name(host.index)}  dead")
        return "\n".join(lines)

    # -- programs ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        hosts: Sequence[int] | None = None,
        ranks_per_host: int | None = None,
        name: str | None = None,
    ) -> TestbedJob:
        """Start `command` in every rank, in torchrun's environment plus `env`, and return at once.

        `hosts` and `ranks_per_host` change where it runs (a membership service on host 0, a torchrun on each host); each job has a
        master port of its own. Raises `TestbedError` if it cannot be started; then nothing of it runs.
        """
        per_host = self.spec.ranks_per_host if ranks_per_host is None else ranks_per_host
        used = list(range(self.spec.hosts) if hosts is None else hosts)
        number = len(self.jobs)
        folder = self.folder / (name or f"job{number}")
        self._check_run(command, used, per_host, folder)
        job = TestbedJob(
            name=name or f"job{number}",
            command=tuple(command),
            hosts=self.hosts,
            ranks=[RankState(i * per_host + l, host, l) for i, host in enumerate(used) for l in range(per_host)],
            port=_FIRST_PORT + number,
            env=dict(env or {}),
            cwd=(cwd or Path.cwd()).absolute(),
            folder=folder,
        )
        job.folder.mkdir(parents=True)
        self.jobs.append(job)
        try:
            for rank in range(job.world):
                job.start_rank(rank)
        except TestbedError:
            job.stop()
            raise
        return job

    def _check_run(self, command: Sequence[str], used: Sequence[int], per_host: int, folder: Path) -> None:
        problems = [self._no_host(h) for h in used if not 0 <= h < self.spec.hosts]
        if not command:
            problems.append(
                Problem(where="testbed.command", value="", rule="no command to run", hint="give one after --")
            )
        if per_host < 1:
            problems.append(Problem(where="testbed.ranks_per_host", value=per_host, rule="must be at least 1"))
        if len(set(used)) != len(used) or not used:
            rule = "a job needs one host or more, each once"
            problems.append(Problem(where="testbed.hosts", value=list(used), rule=rule))
        if folder.exists():
            rule = "holds the logs of another job"
            hint = "give the job another name, or the bed another folder"
            problems.append(Problem(where="testbed.folder", value=str(folder), rule=rule, hint=hint))
        raise_if(problems, TestbedError, subject="testbed")

    # -- hosts and links --------------------------------------------------------------------------------------------------

    def host(self, index: int) -> Host:
        """Raises `TestbedError` if there is no such host."""
        raise_if([] if 0 <= index < self.spec.hosts else [self._no_host(index)], TestbedError, subject="testbed")
        return self.hosts[index]

    def _no_host(self, index: int) -> Problem:
        return Problem(where="testbed.host", value=index, rule=f"the cluster has hosts 0 to {self.spec.hosts - 1}")

    def start_host(self, index: int) -> None:
        """Bring a dead host back, with the address it had, a link at the cluster's rate, and no programs."""
        host = self.host(index)
        if not host.alive and host.generation:
            host.clear_link()
        host.start(rate=self.spec.link_bit_per_s, latency_s=self.spec.link_latency_s)
        self._share_evenly(index)

    def _share_evenly(self, index: int) -> None:
        if self._shares is None:
            return
        try:
            self._shares.place(index, self.host(index).pid)
        except OSError as error:
            self.uneven = f"a host cannot be put into a control group ({error})"

    def kill_host(self, index: int, *, silent: bool = False) -> None:
        """SIGKILL to everything on a host at once. `silent`: its link goes first, as when the power fails."""
        for job in self.jobs:
            job.poll()  # who ended before, ended by itself
        self.host(index).kill(silent=silent)

    def terminate_host(self, index: int) -> None:
        """SIGTERM to every process of a host."""
        host = self.host(index)
        for job in self.jobs:
            job.poll()
            for state in job.ranks:
                if state.host == index and state.life and state.status is None:
                    state.cause = "terminated"
        host.signal_all(signal.SIGTERM)

    def freeze_host(self, index: int) -> None:
        """SIGSTOP to every process of a host. Its kernel still answers at the connections that are open."""
        self.host(index).signal_all(signal.SIGSTOP)

    def thaw_host(self, index: int) -> None:
        self.host(index).signal_all(signal.SIGCONT)

    def cut_link(self, index: int) -> None:
        """Pull the cable of a host: nothing comes in or goes out, and nobody is told."""
        self.host(index).set_link(up=False)

    def restore_link(self, index: int) -> None:
        self.host(index).set_link(up=True)

    def part_hosts(self, first: int, second: int) -> None:
        """Two hosts do not reach each other any more; all others reach both."""
        for one, other in ((first, second), (second, first)):
            self.host(one).block(other, blocked=True)

    def rejoin_hosts(self, first: int, second: int) -> None:
        """They do again. A host that was started anew meanwhile has forgotten it already."""
        for one, other in ((first, second), (second, first)):
            if self.host(one).alive:
                self.host(one).block(other, blocked=False)

    def set_rate(self, index: int, bit_per_s: float | None) -> None:
        """Change the rate of a host's link, both directions. None: not limited."""
        spec = replace(self.spec, link_bit_per_s=bit_per_s)
        raise_if(cluster_problems(spec) or links.link_problems(spec), TestbedError, subject="testbed")
        self.host(index).set_rate(bit_per_s, latency_s=self.spec.link_latency_s)

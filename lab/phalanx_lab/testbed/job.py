"""One command run in every rank of a bed: its ranks, their logs, how each ended.

Decides when a job is over: when no rank runs any more and none will be started, when a rank fails and the others had `_GRACE_S` to say why,
when only frozen ranks are left and nothing more will happen to them, or at the time limit. A rank that was killed on purpose does not make the job fail.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.errors import TestbedError
from phalanx_lab.testbed import links
from phalanx_lab.testbed.host import Host

_GRACE_S = 2.0
_STOP_S = 10.0
_TICK_S = 0.01
_POLL_S = 0.05
"""Seconds between two looks at the ranks. Agents note the time of an end themselves, and more looks would take processor time from
the ranks."""
_LOG_LINES = 6


@dataclass
class RankState:
    """A rank and its present life."""

    rank: int
    host: int
    local_rank: int
    name: str = ""
    generation: int = 0
    life: int = 0
    frozen: bool = False
    status: int | None = None
    """Exit status of this life, a signal if negative; None while it runs."""
    ended_at: float = 0.0
    cause: str = ""
    """Why it ended, if the testbed ended it."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    rank: int
    host: int
    status: int | None
    """None: it never began."""
    seconds: float
    """Seconds from the start of the job to the end of the rank."""
    cause: str
    """Empty if it ended by itself."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    ranks: tuple[RankEnd, ...]
    seconds: float
    problems: tuple[str, ...]
    """What was not as it should be; empty if every rank that was not ended on purpose ended with 0."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def explain(self) -> str:
        lines = [
            f"rank {r.rank} on host {r.host}: {_status(r.status)} after {r.seconds:.1f} s{f' ({r.cause})' if r.cause else ''}"
            for r in self.ranks
        ]
        return "\n".join([*lines, *self.problems])


def _status(status: int | None) -> str:
    if status is None:
        return "never began"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


@dataclass
class TestbedJob:
    """Made by `Testbed.run`, already running."""

    name: str
    command: tuple[str, ...]
    hosts: Sequence[Host]
    """All hosts of the bed."""
    ranks: list[RankState]
    port: int
    env: Mapping[str, str]
    cwd: Path
    folder: Path
    """Logs: `rank-N.log`."""
    started_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def world(self) -> int:
        return len(self.ranks)

    def log(self, rank: int) -> Path:
        """Where the output of `rank` is."""
        return self.folder / f"rank-{rank:04d}.log"

    def output(self, rank: int) -> str:
        """What `rank` has printed so far."""
        return self.log(rank).read_text(errors="replace")

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank is told, in torchrun's words; the master is on the host of rank 0."""
        state = self.ranks[rank]
        used = list(dict.fromkeys(r.host for r in self.ranks))
        return {
            **self.env,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(state.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(r.host == state.host for r in self.ranks)),
            "GROUP_RANK": str(used.index(state.host)),
            "GROUP_WORLD_SIZE": str(len(used)),
            "MASTER_ADDR": links.address(self.ranks[0].host),
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": links.INTERFACE,
            "NCCL_SOCKET_IFNAME": links.INTERFACE,
        }

    # -- one rank ---------------------------------------------------------------------------------------------------------

    def start_rank(self, rank: int) -> None:
        """Start a rank, for the first time or again. Its host must be alive; its log goes on."""
        state = self._state(rank)
        self.poll()
        if state.life and state.status is None:
            raise _error("rank", rank, "runs already", "kill it first")
        host = self.hosts[state.host]
        state.life += 1
        state.name = f"{self.name}/{rank}/{state.life}"
        host.spawn(state.name, self.command, env=self.environment(rank), cwd=self.cwd, log=self.log(rank))
        state.generation, state.status, state.cause, state.frozen = host.generation, None, "", False

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to a rank and what it forked."""
        self._signal(rank, signal.SIGKILL, cause="killed")

    def terminate_rank(self, rank: int) -> None:
        """SIGTERM, as a scheduler does before it takes a machine away."""
        self._signal(rank, signal.SIGTERM, cause="terminated")

    def freeze_rank(self, rank: int) -> None:
        """SIGSTOP: it holds its connections and says nothing."""
        self._signal(rank, signal.SIGSTOP)
        self._state(rank).frozen = True

    def thaw_rank(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)
        self._state(rank).frozen = False

    def _state(self, rank: int) -> RankState:
        if not 0 <= rank < self.world:
            raise _error("rank", rank, f"the job has ranks 0 to {self.world - 1}", "")
        return self.ranks[rank]

    def _signal(self, rank: int, number: signal.Signals, *, cause: str = "") -> None:
        state = self._state(rank)
        self.poll()
        if state.status is not None or not self.hosts[state.host].signal(state.name, number):
            raise _error("rank", rank, f"has ended already, so {number.name} has no effect", "")
        state.cause = cause or state.cause

    # -- all ranks --------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Learn which ranks have ended."""
        running = [r for r in self.ranks if r.life and r.status is None]
        exited = {h: self.hosts[h].exited() for h in {r.host for r in running} if self.hosts[h].alive}
        for r in running:
            host = self.hosts[r.host]
            if not host.alive or host.generation != r.generation:
                r.status, r.ended_at, r.cause = -signal.SIGKILL, time.time(), r.cause or "host killed"
            elif r.name in exited[r.host]:
                r.status, r.ended_at = exited[r.host][r.name]

    def running(self) -> tuple[int, ...]:
        """Ranks that have not ended, frozen ones included."""
        self.poll()
        return tuple(r.rank for r in self.ranks if r.status is None and r.life)

    def is_frozen(self, rank: int) -> bool:
        state = self._state(rank)
        return state.frozen or self.hosts[state.host].frozen

    def stop(self) -> None:
        """SIGKILL to every rank that still runs, and to what ended ranks left running in their sessions."""
        self.poll()
        for r in self.ranks:
            host = self.hosts[r.host]
            if r.life and host.alive and host.generation == r.generation:
                if r.status is None:
                    r.cause = "frozen to the end" if self.is_frozen(r.rank) else "stopped with the job"
                host.signal(r.name, signal.SIGKILL)
        deadline = time.monotonic() + _STOP_S
        while self.running():
            if time.monotonic() > deadline:
                raise _error(
                    "ranks", self.running(), f"do not die within {_STOP_S:g} s of SIGKILL", "look at the machine"
                )
            time.sleep(_TICK_S)

    def failed(self) -> tuple[int, ...]:
        """Ranks that ended by themselves with another status than 0."""
        return tuple(r.rank for r in self.ranks if r.status not in (None, 0) and not r.cause)

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        tick: Callable[[], Collection[str]] | None = None,
        keep_going: bool = False,
    ) -> JobResult:
        """Wait until the job is over, then kill what is left of it.

        `tick` is called about every 10 ms; it returns what it will do when its time comes (`start`, `thaw`, ...), whatever the ranks do.
        `keep_going` lets the others run on when a rank fails.
        """
        failed_at: float | None = None
        next_poll, problem = 0.0, ""
        while True:
            to_come = tick() if tick else ()
            now = time.time()
            if now >= next_poll:
                running, next_poll = self.running(), now + _POLL_S
                if self._is_over(running, to_come):
                    break
                if self.failed() and not keep_going:
                    failed_at = failed_at or now
                    if now > failed_at + _GRACE_S:
                        break
                if timeout_s is not None and now > self.started_at + timeout_s:
                    problem = f"time limit of {timeout_s:g} s reached, still running: {', '.join(map(str, running)) or 'no rank'}"
                    break
            time.sleep(_TICK_S)
        failed = self.failed()
        self.stop()
        return self._result([*([problem] if problem else []), *map(self._describe, failed)])

    def _is_over(self, running: Sequence[int], to_come: Collection[str]) -> bool:
        if not running:
            return "start" not in to_come
        return not to_come and all(self.is_frozen(r) for r in running)

    def _describe(self, rank: int) -> str:
        tail = self.output(rank).splitlines()[-_LOG_LINES:]
        said = "".join(f"\n    {line}" for line in tail) or " nothing"
        state = self.ranks[rank]
        return f"rank {rank} on host {state.host} failed ({_status(state.status)}); its log {self.log(rank)} ends with{said}"

    def _result(self, problems: Sequence[str]) -> JobResult:
        ends = tuple(
            RankEnd(
                rank=r.rank, host=r.host, status=r.status, seconds=max(r.ended_at - self.started_at, 0.0), cause=r.cause
            )
            for r in self.ranks
        )
        return JobResult(ranks=ends, seconds=time.time() - self.started_at, problems=tuple(problems))


def _error(what: str, value: object, rule: str, hint: str) -> TestbedError:
    return TestbedError.of(f"testbed.{what}", value, rule, hint, subject="testbed")

"""Carries a scenario out on a running job, and writes down what happened when.

Decides nothing but the moment: an action by the clock happens at the first tick after its time, an action by the step at the first tick
after some rank has told that step. An action that could not be done, or never came to pass, is a problem of the run, never a silence.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from phalanx.core.errors import TestbedError
from phalanx_lab.testbed.job import JobResult, TestbedJob
from phalanx_lab.testbed.output import Echo
from phalanx_lab.testbed.progress import StepWatcher
from phalanx_lab.testbed.scenario import UNDONE_BY, Scenario, ScenarioAction
from phalanx_lab.testbed.testbed import Testbed


@dataclass(frozen=True, kw_only=True)
class Done:
    """One action that was carried out, or was tried."""

    action: str
    time: float
    """Seconds since the epoch, when it was complete."""
    seconds: float
    """The same since the job began."""
    took_s: float
    step: int | None
    """Highest step told at that moment; None without [progress], -1 before the first."""
    problem: str = ""


@dataclass
class Player:
    scenario: Scenario
    bed: Testbed
    job: TestbedJob
    done: list[Done] = field(default_factory=list)
    _pending: list[ScenarioAction] = field(default_factory=list)
    _watcher: StepWatcher | None = None

    def __post_init__(self) -> None:
        self.scenario.check(self.bed.spec)
        self._pending = list(self.scenario.actions)
        if self.scenario.progress is not None:
            self._watcher = StepWatcher(self.scenario.progress, self.job.cwd)

    @property
    def record(self) -> Path:
        """One JSON line for each action that was carried out."""
        return self.job.folder / "scenario.jsonl"

    def tick(self) -> tuple[str, ...]:
        """Carry out what is due; what is still to come by the clock."""
        step = self._watcher.update() if self._watcher else None
        for action in self._due(step):
            self._pending.remove(action)
            self._carry_out(action, step)
        return tuple(a.do for a in self._pending if a.at_s is not None)

    def _due(self, step: int | None) -> list[ScenarioAction]:
        """Pending actions whose time has come: those by the clock in its order, then those by the step."""
        now = time.time() - self.job.started_at
        by_clock = sorted(
            (a for a in self._pending if a.at_s is not None and a.at_s <= now), key=lambda a: a.at_s or 0.0
        )
        by_step = [a for a in self._pending if a.at_step is not None and step is not None and a.at_step <= step]
        return by_clock + sorted(by_step, key=lambda a: a.at_step or 0)

    def _carry_out(self, action: ScenarioAction, step: int | None) -> None:
        begin, problem = time.time(), ""
        try:
            _act(action, self.bed, self.job)
        except TestbedError as error:
            problem = "; ".join(map(str, error.problems))
        end = time.time()
        since = end - self.job.started_at
        self.done.append(
            Done(action=action.explain(), time=end, seconds=since, took_s=end - begin, step=step, problem=problem)
        )
        with self.record.open("a") as file:
            file.write(json.dumps(asdict(self.done[-1])) + "\n")
        if action.for_s is not None and not problem:
            undo = replace(
                action, do=UNDONE_BY[action.do], at_s=since + action.for_s, at_step=None, for_s=None, bit_per_s=None
            )
            self._pending.append(undo)

    def problems(self) -> list[str]:
        """What of the scenario did not come to pass."""
        step = f" (last step told: {self._watcher.step})" if self._watcher else ""
        failed = [f"scenario: {d.action} could not be done: {d.problem}" for d in self.done if d.problem]
        return failed + [f"scenario: {a.explain()} never happened, the job was over{step}" for a in self._pending]


def _act(action: ScenarioAction, bed: Testbed, job: TestbedJob) -> None:
    """Do it. Raises `TestbedError` if it cannot have its effect."""
    if action.rank is not None:
        of_rank = {
            "kill": job.kill_rank,
            "terminate": job.terminate_rank,
            "freeze": job.freeze_rank,
            "thaw": job.thaw_rank,
            "start": job.start_rank,
        }
        of_rank[action.do](action.rank)
        return
    host = action.host or 0
    match action.do:
        case "kill":
            bed.kill_host(host, silent=action.silent)
        case "terminate":
            bed.terminate_host(host)
        case "freeze":
            bed.freeze_host(host)
        case "thaw":
            bed.thaw_host(host)
        case "cut":
            bed.cut_link(host)
        case "restore":
            bed.restore_link(host)
        case "rate":
            bed.set_rate(host, bed.spec.link_bit_per_s if action.bit_per_s is None else action.bit_per_s)
        case "start":
            if not bed.hosts[host].alive:
                bed.start_host(host)
            for state in job.ranks:
                if state.host == host:
                    job.start_rank(state.rank)


def play(
    bed: Testbed,
    scenario: Scenario,
    job: TestbedJob,
    *,
    timeout_s: float | None = None,
    keep_going: bool = False,
    echo: TextIO | None = None,
) -> tuple[JobResult, tuple[Done, ...]]:
    """Wait for a job of `bed` while a scenario happens to it; what of the scenario did not come to pass is a problem of the result."""
    player = Player(scenario, bed, job)
    printer = Echo(job, echo) if echo else None

    def tick() -> tuple[str, ...]:
        if printer:
            printer.tick()
        return player.tick()

    result = job.wait(timeout_s, tick=tick, keep_going=keep_going)
    if printer:
        printer.finish()
    return replace(result, problems=(*result.problems, *player.problems())), tuple(player.done)

"""Membership without processes: values in memory, a scheduler that lets one thread at a time make one call, and members that train nothing.

The state of a simulated member is the list of the generations in which its steps were reduced. Members that end with different lists have trained
different runs.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from phalanx.core.errors import PeerError
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.membership import Announcement, FirstRule, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.rendezvous import ready_keys
from phalanx.runtime.membership.votes import BEGUN, InDoubt, MemberReport, Resolution, Then, Votes, resolve
from phalanx.runtime.membership.watcher import AgentSettings, End, Left, later
from phalanx.runtime.membership.worker_agent import WorkerAgent, _leavers_key


class Killed(BaseException):
    """A simulated SIGKILL: no handler of the code may catch it."""


class MemoryService:
    """Values in memory. `lose` forgets them, as a restarted TCPStore does."""

    def __init__(self, turn: Callable[[], None] = lambda: None) -> None:
        self.turn = turn
        self.lives = 0
        self.lose()

    def lose(self) -> None:
        self.lives += 1
        self.values: dict[str, str] = {}
        self.epoch = f"life{self.lives}"

    def connect(self) -> MemoryKeys:
        self.turn()
        return MemoryKeys(self)


class MemoryKeys:
    def __init__(self, service: MemoryService) -> None:
        self.service, self.epoch = service, service.epoch

    def _values(self) -> dict[str, str]:
        self.service.turn()
        if self.service.epoch != self.epoch:
            raise ServiceLost("lost")
        return self.service.values

    def get(self, key: str) -> str | None:
        return self._values().get(key)

    def values(self, keys: Sequence[str]) -> list[str | None]:
        values = self._values()
        return [values.get(k) for k in keys]

    def put(self, key: str, value: str) -> None:
        self._values()[key] = value

    def create(self, key: str, value: str) -> str:
        return self._values().setdefault(key, value)

    def all_there(self, keys: Sequence[str]) -> bool:
        values = self._values()
        return all(k in values for k in keys)

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Callable[[], bool] | None = None) -> bool:
        return key in self._values()

    def watch(self, key: str, timeout_s: float, *, sharing: int = 1) -> bool:
        return self.wait(key, timeout_s, sharing=sharing)

    def listed(self, prefix: str) -> list[str]:
        return sorted(k for k in self._values() if k.startswith(prefix))

    def delete(self, key: str) -> None:
        self._values().pop(key, None)

    def delete_below(self, prefix: str, *, most: int) -> int:
        values = self._values()
        gone = [k for k in values if k.startswith(prefix)][:most]
        for key in gone:
            del values[key]
        return len(gone)

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        pass


class Scheduler:
    """Threads that run one at a time, each up to its next `turn`. Which one goes next is random, and with it the whole history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ticks = 0
        self.frozen: set[str] = set()
        self.killed: set[str] = set()
        self._local = threading.local()
        self._go: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self.errors: list[str] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        go = self._go[name] = threading.Semaphore(0)

        def main() -> None:
            self._local.name = name
            go.acquire()
            try:
                if name not in self.killed:
                    work()
            except Killed:
                pass
            except BaseException as err:
                self.errors.append(f"{name}: {type(err).__name__}: {err}")
            del self._go[name]
            self._back.release()

        threading.Thread(target=main, daemon=True).start()

    def turn(self) -> None:
        """Called by the threads: let others go on."""
        name = getattr(self._local, "name", None)
        if name is None:
            return
        go = self._go[name]
        self._back.release()
        go.acquire()
        if name in self.killed:
            raise Killed

    def alive(self) -> list[str]:
        return sorted(self._go)

    def one(self) -> None:
        """Let one thread do one thing."""
        self.ticks += 1
        ready = [n for n in self.alive() if n not in self.frozen or n in self.killed]
        if ready:
            self._go[self.rng.choice(ready)].release()
            self._back.acquire()

    def end(self) -> None:
        """Kill what is left."""
        self.killed.update(self._go)
        while self._go:
            self._go[self.alive()[0]].release()
            self._back.acquire()


@dataclass
class World:
    """A simulated run of `steps` steps."""

    seed: int
    steps: int = 8
    resolve: Callable[[Sequence[MemberReport]], Resolution] = resolve
    events: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    states: dict[str, list[int]] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("kill", "freeze", "service", "join")
    """Faults that may happen."""
    refused: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    handed: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    """(who left, to whom what they held was given) of every hand-over that succeeded."""
    stopped: bool = False

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.seed)
        self.service = MemoryService(self.scheduler.turn)
        self.arrived: dict[tuple[int, int], set[str]] = {}
        self.host_agent = HostAgent("h", self.service, FirstRule(wanted=4, minimum=1, gather_s=3.0), limit_s=1e9)
        self.over = False
        self.started = 0

    # -- processes

    def start_supervisor(self) -> None:
        def work() -> None:
            while not self.over:
                self.host_agent.tick()
                self.scheduler.turn()

        self.scheduler.start("supervisor", work)

    def start_member(self) -> str:
        uid = f"h.{self.started}.x"
        self.started += 1
        self.scheduler.start(uid, lambda: SimulatedMember(self, uid).run())
        return uid

    def members(self) -> list[str]:
        return [n for n in self.scheduler.alive() if n != "supervisor"]


class SimulatedMember:
    """What `runtime/membership/member.py` and `runtime/membership/worker_agent.py` do, without threads and sockets, over the same votes, reports and generations."""

    def __init__(self, world: World, uid: str) -> None:
        self.world, self.uid = world, uid
        self.agent = WorkerAgent(Member(uid, "h"), world.service, pipe=-1, settings=AgentSettings())
        self.agent._say = lambda words: None  # type: ignore[method-assign]
        self.watch: Any = None
        self.state: list[int] = []
        self.holds, self.doubt = False, 0
        self.reduced: int | None = None

    def run(self) -> None:
        world = self.world
        self.agent._said = Announcement(member=Member(self.uid, "h"), plan_hash="p", version="1")
        world.host_agent.announced(Member(self.uid, "h"))
        before: Generation | None = None
        try:
            while len(self.state) < world.steps:
                generation = self.next_generation(before)
                if generation is None:
                    return
                before = generation
                try:
                    self.in_generation(generation)
                except (PeerError, InDoubt):
                    continue
        except StaleMember:
            world.refused.append(self.uid)
            return
        except Left:
            world.left.append(self.uid)
            world.host_agent.gone(self.uid)
            return
        world.host_agent.finished = End(len(self.state), before.number if before else 0).text
        world.service.values["finished"] = world.host_agent.finished  # as `WorkerAgent.finish`
        world.host_agent.gone(self.uid)
        world.ends[self.uid] = tuple(self.state)

    def look(self) -> None:
        try:
            self.watch = self.agent._glance(self.watch, 0.0)
        except ServiceLost:
            self.watch = None
            self.world.scheduler.turn()

    def next_generation(self, before: Generation | None) -> Generation | None:
        asked = 0
        while True:
            self.look()
            found = self.agent.newest
            end = None if self.world.host_agent.finished is None else End.read(self.world.host_agent.finished)
            if end is not None:
                if self.doubt == end.generation and len(self.state) + 1 == end.step:
                    self.commit(end.generation, doubt=True)
                    self.world.ends[self.uid] = tuple(self.state)
                return None
            if found is not None and later(found, before) and self.agent._is_for_me(found):
                return found
            asked += 1
            if before is not None and asked % 8 == 0 and found is not None and not later(found, before):
                self.agent._renew(before)

    def broken(self, generation: Generation) -> bool:
        """Also where the run has ended without it: nobody sends it anything any more."""
        self.look()
        return self.agent._ends(generation) or self.agent._over is not None

    def in_generation(self, generation: Generation) -> None:
        world = self.world
        keys = world.service.connect()
        if keys.epoch != generation.epoch:
            raise ServiceLost("lost")
        report = MemberReport(uid=self.uid, step=len(self.state), holds=self.holds, doubt=self.doubt > 0)
        keys.put(ready_keys(generation)[generation.uids.index(self.uid)], report.to_json())
        while not keys.all_there(ready_keys(generation)):
            self.look()
            if self.agent._newer(generation):
                raise PeerError("newer")
        reports = [MemberReport.from_json(keys.get(k) or "") for k in ready_keys(generation)]
        begun = keys.get(BEGUN) is not None
        self.enter(generation, reports, begun=begun)
        votes = Votes(keys, generation, self.uid)
        while len(self.state) < world.steps:
            step = len(self.state)
            self.reduce(generation, step)
            try:
                decision = votes.vote(
                    step,
                    then=lambda: self.then(keys, generation),
                    broken=lambda: self.broken(generation),
                )
            except InDoubt:
                self.doubt = generation.number
                raise
            if not decision.commit:
                self.reduced = None
                raise PeerError("abort")
            self.commit(generation.number)
            if decision.then == "stop":
                world.stopped = True
            if decision.then == "leave":
                self.hand_over(keys, generation)
            if decision.then != "go on":
                return

    def then(self, keys: Any, generation: Generation) -> Then:
        """As `WorkerAgent._then`, which wants a team."""
        self.agent._keys, self.agent._voting = keys, len(self.state)
        self.agent.team = SimpleNamespace(generation=generation, size=len(generation.members), abort=lambda: 0)  # type: ignore[assignment]
        try:
            return self.agent._then()
        finally:
            self.agent.team = None

    def hand_over(self, keys: Any, generation: Generation) -> None:
        """All members of the team come here, or somebody is lost."""
        world, step = self.world, len(self.state)
        leavers = json.loads(keys.get(_leavers_key(generation, step - 1)) or "{}")
        assert leavers, "nobody leaves"
        place = world.arrived.setdefault((generation.number, -step), set())
        place.add(self.uid)
        while not place >= set(generation.uids):
            if self.broken(generation):
                raise PeerError("a peer is lost while state is handed over")
        stay = [u for u in generation.uids if u not in leavers]
        world.handed.append((tuple(leavers), tuple(stay)))
        Membership(keys).propose_leave(list(leavers), "notice", generation, given_to=stay)

    def enter(self, generation: Generation, reports: Sequence[MemberReport], *, begun: bool) -> None:
        resolution = self.world.resolve(reports)
        if self.uid in resolution.finish:
            self.commit(generation.number, doubt=True)
        self.doubt, self.reduced = 0, None
        if resolution.step is None:
            if begun:
                raise AssertionError("a run that has begun has no holder of its state")
            self.holds = True
        elif not self.holds:
            first = resolution.holders[0]
            while len(self.world.states[first]) < resolution.step:  # in doubt until now
                if self.broken(generation):
                    raise PeerError("the holder is lost")
            self.state = list(self.world.states[first][: resolution.step])
            self.holds = True
        self.world.states[self.uid] = self.state
        self.world.events.append({"kind": "Reformed", "uid": self.uid, "generation": generation.number})

    def reduce(self, generation: Generation, step: int) -> None:
        """All members of the generation come here, or somebody is lost."""
        place = self.world.arrived.setdefault((generation.number, step), set())
        place.add(self.uid)
        while not place >= set(generation.uids):
            if self.broken(generation):
                self.settle(generation, step)
                raise PeerError("a peer is lost")
        self.reduced = generation.number

    def settle(self, generation: Generation, step: int) -> None:
        keys = self.world.service.connect()
        if keys.epoch == generation.epoch:
            assert not Votes(keys, generation, self.uid).settle(step).commit, "a commit without this member's vote"

    def commit(self, generation: int, *, doubt: bool = False) -> None:
        assert self.reduced is not None, "cannot commit a step whose gradient was not reduced"
        self.state.append(self.reduced)
        self.reduced = None
        self.world.events.append(
            {
                "kind": "Committed",
                "uid": self.uid,
                "generation": generation,
                "step": len(self.state),
                "doubt": doubt,
                "at_s": float(len(self.world.events)),
            }
        )


def membership(service: MemoryService) -> Membership:
    return Membership(service.connect())

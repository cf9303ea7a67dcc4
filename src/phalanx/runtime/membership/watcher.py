"""Background threads of a member: they send heartbeats, watch for generations, and abort what a lost member would block.

First come the terms that it and its worker agent share: how it takes part, how a run ended, why it waits.

One thread writes heartbeats into a pipe to the supervisor (no service is needed for that), one waits for the next generation and aborts the groups the
moment that a member of them is lost. What they learn is kept here, under one lock, for the worker's own thread (`runtime/membership/worker_agent.py`).

Must never change: a member that missed a generation never takes part in a newer one (`_check_missed`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass, replace

from phalanx.core.clock import now_s
from phalanx.core.errors import PhalanxError, printable
from phalanx.core.events import Event
from phalanx.runtime.comm import RankProgress, State
from phalanx.runtime.membership.keys import Keys, Service, ServiceLost
from phalanx.runtime.membership.membership import (
    LEAVE_REQUESTS,
    Announcement,
    Generation,
    Member,
    Membership,
    StaleMember,
    TooFewMembers,
)
from phalanx.runtime.membership.reachability import ProbeListener, probe_key
from phalanx.runtime.membership.rendezvous import GroupEpoch
from phalanx.runtime.membership.votes import BEGUN, broken_key


@dataclass(frozen=True)
class End:
    """How a run ended."""

    step: int
    """Steps committed."""
    generation: int
    """Generation in which the last one was."""

    @property
    def text(self) -> str:
        return f"{self.step} {self.generation}"

    @classmethod
    def read(cls, text: str) -> End:
        step, generation = text.split()
        return cls(int(step), int(generation))


class RunOver(PhalanxError):
    """The run has ended, or was asked to end, while this member waited."""

    def __init__(self, end: End | None, text: str) -> None:
        super().__init__(text)
        self.end = end
        """None: it was asked to stop."""


class Left(PhalanxError):
    """This member has left the run in good order."""


@dataclass(frozen=True, kw_only=True)
class TooFew(Event):
    """A generation has fewer members than the run needs: this one waits for more."""

    uid: str
    generation: int
    members: tuple[str, ...]
    minimum: int
    why: str
    """Cause of the last change, in words."""


@dataclass(frozen=True, kw_only=True)
class NotForming(Event):
    """Generations fail to form one after another, so that this member waits."""

    uid: str
    generation: int
    why: str


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """How a worker takes part."""

    heartbeat_s: float = 0.1
    timeout_s: float = 600.0
    """Timeout of collectives. A dead peer is detected earlier."""
    meet_s: float = 60.0
    """How long members of a generation may take to become ready for it."""
    vote_s: float = 600.0
    """How long a member waits for the votes of others that live."""
    service_s: float = 600.0
    """How long a member waits for a lost service."""
    device: str = "cpu"
    own_machine: bool = True
    probe_peers: bool = False
    """Members of several hosts probe each other to find lost and unreachable ones (`runtime/membership/reachability.py`)."""


def too_few(generation: Generation, waited_s: float) -> TooFewMembers:
    """Error of a run that has waited too long for members."""
    return TooFewMembers(
        f"{len(generation.members)} members ({', '.join(generation.uids) or 'none'}) and the run needs {generation.minimum}; "
        f"waited {waited_s:g} s for more. What was committed is safe"
    )


BEATS: dict[tuple[State, bool], bytes] = {
    (state, quick): f".{state[0]}{'q' if quick else ''}\n".encode()
    for state in ("moves", "waits", "still")
    for quick in (False, True)
}
"""A heartbeat: what the worker's own thread has done since the last one, and whether it is at a place that it should leave soon."""
STANDS_S = 0.5
"""A thread that has shown no progress for so long is asked where it stands."""
WATCH_S = 0.25
"""How long the watching thread waits at a time; a new generation wakes it at once."""
WATCHED_PER_S = 2000
"""Most looks per second of all members together, each of two or three calls of some 40 us of the service; of more members than a few hundred each looks more rarely."""
AGAIN_S = 0.05
STUCK_S = 120.0
"""Seconds that the worker's own thread has, on a device, to return after an abort. Else it is in a call that only
the end of the process ends."""


class MembershipWatcher:
    """The part of a `WorkerAgent` that watches the membership service."""

    def __init__(self, member: Member, service: Service, *, pipe: int, settings: AgentSettings) -> None:
        self.member, self.service, self.settings = member, service, settings
        self.uid = member.uid
        self.team: GroupEpoch | None = None
        self.newest: Generation | None = None
        self.last: Generation | None = None
        """The newest generation that this member is in."""
        self.progress = RankProgress()
        """Of the worker's own thread, which makes this."""
        self._pipe = pipe
        self._said: Announcement | None = None
        self._said_in = ""
        self._refused: Exception | None = None
        """Why this member takes part no longer: raised in the worker's own thread."""
        self._begun = False
        self._committed = 0
        """Steps, as far as it was in the votes for them."""
        self._written: list[str] = []
        """Own keys that are no longer read."""
        self._over: tuple[End | None, str] | None = None
        self.closing = False
        """The run was stopped while it had too few members: those that are left meet once more, to save their state."""
        self._leave_requests: dict[str, str] = {}
        """Members that are to leave, and why. They stay members until their state was handed over."""
        self._leave_mark: str | None = None
        self._seen_s: dict[int, float] = {}
        self._forming = False
        """The group epoch is not connected yet."""
        self._inside: GroupEpoch | None = None
        """The group epoch that the worker's own thread may be in a call of: from before it connects until it is dropped."""
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._probe_listener: ProbeListener | None = None
        """Socket that members on other machines probe."""

    def _start(self) -> None:
        for work in (self._beat, self._watch):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def _stop(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * WATCH_S)
        if self._probe_listener is not None:
            self._probe_listener.close()

    # -- what the threads have learned, for the worker's own thread

    def told_s(self, generation: Generation) -> float:
        """Seconds from when the supervisor knew of a loss until this member did; 0 where none is lost."""
        seen_s = self._seen_s.get(generation.number, 0.0)
        return max(0.0, seen_s - generation.lost_s) if seen_s and generation.lost_s else 0.0

    def broken(self) -> bool:
        """Whether the group epoch cannot continue: a member of it is lost, or this one is excluded."""
        with self._news:
            return self.team is not None and (self._refused is not None or self._ends(self.team.generation))

    def _newer(self, generation: Generation) -> bool:
        """Whether to stop forming a generation because there is a newer one."""
        with self._news:
            return self._over is not None or (self.newest is not None and later(self.newest, generation))

    # -- the threads

    def _say(self, words: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, json.dumps(words).encode() + b"\n")

    def _beat(self) -> None:
        told_s = 0.0
        while not self._closed.wait(self.settings.heartbeat_s):
            state, quick, still_s = self.progress.look(), self.progress.quick, self.progress.still_s
            if state == "still" and still_s > STANDS_S + told_s:  # once, and each time it has stood twice as long
                told_s = still_s
                self._say({"stands": printable(self.progress.stands())})
            told_s = 0.0 if state == "moves" else told_s
            try:
                os.write(self._pipe, BEATS[state, quick])
            except OSError:  # no supervisor: the kernel is about to end this process
                return

    def _watch(self) -> None:
        keys: Keys | None = None
        while not self._closed.is_set():
            try:
                members = 0 if self.newest is None else len(self.newest.members)
                keys = self._glance(keys, max(WATCH_S, members / WATCHED_PER_S))
            except ServiceLost:
                keys = None
                self._closed.wait(AGAIN_S)
            except Exception as err:  # whatever it is: a member that nobody watches would wait for a lost one for ever
                with self._news:
                    self._refused = err
                    if self.team is not None:
                        self.team.abort()
                    self._news.notify_all()
                return

    def _glance(self, keys: Keys | None, wait_s: float) -> Keys:
        """One look for a newer generation, of at most `wait_s`; returns the connection to look with again."""
        if keys is None:
            keys = self.service.connect()
            self._announce_again(keys)
            self._leave_mark = None
        if self._probe_listener is not None:
            self._probe_listener.clear()
        self._end_if_stuck()
        self._abort_if_left(keys)
        self._delete_written(keys)
        membership = Membership(keys)
        found = membership.wait(self.newest, wait_s)
        if found is not None:
            self._check_missed(membership, found)
            self._see(found)
        else:
            self._look_for_the_end(keys)
        return keys

    def _end_if_stuck(self) -> None:
        team = self._inside
        if self.settings.device == "cpu" or team is None or not team.aborted_s:
            return
        stuck_s = time.monotonic() - team.aborted_s
        if stuck_s > STUCK_S:
            text = f"{self.uid} is stuck in generation {team.generation.number} for {stuck_s:.0f} s; exiting so that it is replaced\n"
            os.write(2, text.encode())
            os._exit(1)

    def _abort_if_left(self, keys: Keys) -> None:
        """A member that goes shuts its sockets, and wakes no kernel that waits for it; where nobody is lost the newer generation ends nothing either. Nor does anything on a device end by its time:
        a link that fails, or a message that is not met, would hold members that all live for ever, each waiting for the others."""
        with self._news:
            team = self.team
        if self.settings.device == "cpu" or team is None or team.aborted:
            return
        if self.progress.message_failed:
            os.write(2, f"{self.uid} leaves generation {team.generation.number}: a message failed, or took longer than launch.timeout_s\n".encode())  # fmt: skip
            self._abort(team)
            with contextlib.suppress(ServiceLost):  # this is told by the next call
                keys.put(broken_key(team.generation), self.uid)
        elif keys.get(broken_key(team.generation)) is not None:
            self._abort(team)

    def _abort(self, team: GroupEpoch) -> None:
        """Unless the worker has left it meanwhile, and may be in the next one."""
        with self._news:
            if self.team is team:
                team.abort()

    def _delete_written(self, keys: Keys) -> None:
        with self._news:
            written, self._written = self._written, []
        for key in written:
            keys.delete(key)

    def _check_missed(self, membership: Membership, found: Generation) -> None:
        """A member that was left out of one generation is excluded, even if the newest contains it: the others continued without it."""
        if self.last is not None and found.epoch != self.last.epoch and found.number <= self.last.number:
            raise StaleMember(
                f"{self.uid} has {self._committed} steps and was in generation {self.last.number}; while the membership service was unavailable the others continued without it "
                f"as generation {found.number} ({found.why}), FROM AN OLDER STATE if that has fewer steps; its state is discarded"
            )
        if self.last is None or self.uid not in found.uids:
            return  # `_is_for_me` decides
        for generation in membership.between(self.last, found):
            if self.uid not in generation.uids:
                raise StaleMember(
                    f"{self.uid} was excluded from the run in generation {generation.number} ({generation.why}); its state is discarded"
                )

    def _announce_again(self, keys: Keys) -> None:
        if self._said is None or keys.epoch == self._said_in:
            return
        if self._probe_listener is not None:
            keys.put(probe_key(self.uid), self._probe_listener.address)
        if self._begun:
            keys.put(BEGUN, "1")
        Membership(keys).announce(replace(self._said, last=self.last, data={"steps": self._committed}))
        self._said_in = keys.epoch
        self._say({"announced": True})

    def _see(self, found: Generation) -> None:
        with self._news:
            self.newest = found
            self._seen_s[found.number] = now_s()
            if self.uid in found.uids:
                self.last = found
            if self.team is not None and (self._forming or self._ends(self.team.generation)):
                self.team.abort()  # one that is not connected yet never will be: others may have gone on to the newer one
            self._news.notify_all()

    def _ends(self, generation: Generation) -> bool:
        new = self.newest
        if new is None or not later(new, generation):
            return False
        stays = self.uid in new.uids or self.uid in new.leaving
        return new.epoch != generation.epoch or bool(new.lost_of(generation)) or not stays

    def _read_leave_requests(self, keys: Keys, mark: str | None) -> None:
        if mark is not None and mark != self._leave_mark:
            found = Membership(keys).leave_requests()
            with self._news:
                self._leave_requests, self._leave_mark = found, mark
                self._news.notify_all()

    def _look_for_the_end(self, keys: Keys) -> None:
        finished, stop, stopped, mark = keys.values(["finished", "stop", "stopped", LEAVE_REQUESTS])
        self._read_leave_requests(keys, mark)
        enough = self.newest is not None and self.newest.enough
        taking_part = self.newest is not None and self.uid in self.newest.uids
        with self._news:
            if finished is None and stopped is not None:
                self._over = None, stop or "the run was stopped"
            elif finished is not None:
                end = End.read(finished)
                self._over = end, f"the run is over: {end.step} steps are done"
            elif stop is not None and not enough and taking_part:
                self.closing = True
            elif stop is not None and not enough:
                self._over = None, stop
            self._news.notify_all()


def later(new: Generation, before: Generation | None) -> bool:
    return before is None or new.number > before.number

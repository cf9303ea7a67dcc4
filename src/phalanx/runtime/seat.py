"""A worker's place in a run: it says that it lives, watches for generations, and connects to the members of each.

Two threads work beside the worker's own: one writes heartbeats into a pipe to the supervisor (no service is needed for that), one waits for the next
generation and kicks the groups the moment that a member of them is lost. The worker's own thread asks for the next team, computes, and votes.

    waiting for a generation ── in it ──> barrier ──> groups ──> steps ── lost peer, abort, "next" ──> drop, wait again
                             └─ not in it, but was before ──> StaleMember: the process ends, whatever it holds

A service that is lost pauses the worker at its next vote. When it is back without its values, the watching thread announces the member again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.core.clock import now_s
from phalanx.core.errors import PeerError, PhalanxError, RunError
from phalanx.core.events import Emit, Event, ignore
from phalanx.runtime.forming import NewerGeneration, NoMapping, Order, Team, as_listed, form, ready_keys
from phalanx.runtime.keys import Keys, Service, ServiceLost
from phalanx.runtime.membership import WISHES, Announcement, Generation, Member, Membership, StaleMember, TooFewMembers
from phalanx.runtime.reach import Door, agree_who_goes, door_key, knock_at
from phalanx.runtime.votes import BEGUN, Decision, Report, Then, Votes

WATCH_S = 0.25
"""How long the watching thread waits at a time; a new generation wakes it at once."""
AGAIN_S = 0.05
SLOW = "put out, "
"""How the reason begins of a member that the others go on without because it is slow: its place stays empty for a while."""
WISH_AGAIN_S = 10.0
"""A hand-over that the disk refused: after so long it is tried again."""
KNOCK_AFTER_S = 0.1
"""A failed collective without a lost member: after so long a member asks at the doors of the others whether they are there."""
STUCK_S = 120.0
"""On a device: the worker's own thread has this long to come back from a team that was kicked. Else it is in a call that only the end of the process ends."""
RENEW_S = 0.4
"""A failed collective without a lost member: after so long the members ask for a new generation themselves."""


@dataclass(frozen=True)
class End:
    """How a run ended."""

    step: int
    """Steps committed."""
    generation: int
    """In which the last one was."""

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
    """Who is gone, in words."""


@dataclass(frozen=True, kw_only=True)
class SeatSettings:
    """How a worker takes part."""

    heartbeat_s: float = 0.1
    timeout_s: float = 600.0
    """Of collectives. Nobody waits for it when a peer dies."""
    meet_s: float = 60.0
    """How long members of a generation may take to become ready for it."""
    vote_s: float = 600.0
    """How long a member waits for the votes of others that live."""
    service_s: float = 600.0
    """How long a member waits for a lost service."""
    device: str = "cpu"
    own_machine: bool = True
    doors: bool = False
    """Members of several hosts find out themselves who is gone and whom they cannot reach (`runtime/reach.py`)."""


class Seat:
    """Use as a context manager; `announce` once the worker can begin to work."""

    def __init__(self, member: Member, service: Service, *, pipe: int, settings: SeatSettings) -> None:
        self.member, self.service, self.settings = member, service, settings
        self.uid = member.uid
        self.team: Team | None = None
        self.newest: Generation | None = None
        self.last: Generation | None = None
        """The newest generation that this member is in."""
        self._pipe = pipe
        self._keys: Keys | None = None
        self._said: Announcement | None = None
        self._said_in = ""
        self._refused: PhalanxError | None = None
        self._begun = False
        self._committed = 0
        """Steps, as far as it was in the votes for them."""
        self._written: list[str] = []
        """Keys that nobody reads any more."""
        self._votes: Votes | None = None
        self._over: tuple[End | None, str] | None = None
        self.closing = False
        """The run was stopped while it had too few members: those that are left meet once more, to save what they hold."""
        self.tell: Emit = ignore
        self._wishes: dict[str, str] = {}
        """Members that are to leave, and why. They are members until what they hold was handed over."""
        self._wishes_mark: str | None = None
        self._wishes_s = 0.0
        """Not before: a hand-over that the disk refused is tried again then."""
        self._voting = 0
        self._seen_s: dict[int, float] = {}
        self._forming = False
        """The team is not connected yet."""
        self._inside: Team | None = None
        """The team that the worker's own thread may be in a call of: from before it connects until it is dropped."""
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._door: Door | None = None
        """Where members on other machines find out whether they reach this one."""

    def __enter__(self) -> Seat:
        for work in (self._beat, self._watch):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()  # while somebody watches over it
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * WATCH_S)
        if self._door is not None:
            self._door.close()

    # -- what the worker calls

    def announce(self, *, plan_hash: str, version: str) -> None:
        """This worker is ready. Raises `MembershipError` where the run is another one. Waits while it cannot reach all members of the run."""
        said = Announcement(member=self.member, plan_hash=plan_hash, version=version)
        while True:
            try:
                keys = self.keys()
                self._open_door(keys)
                Membership(keys).announce(said)
                break
            except ServiceLost:
                self._forget_keys()
        self._said, self._said_in = said, keys.epoch
        self._say({"announced": True})

    def under_way(self) -> bool:
        """Whether the run has begun before this worker: it takes the place of another. False where the service does not say."""
        with contextlib.suppress(ServiceLost):
            return self.keys().get("first") is not None
        return False

    def _open_door(self, keys: Keys) -> None:
        """Where members are on several machines: one that does not reach the others would only stop them again and again."""
        if not self.settings.doors:
            return
        if self._door is None:
            where: Any = self.service
            try:
                self._door = Door(where.host, where.port)
            except OSError as err:  # its name does not resolve now, or there is no way to it
                raise ServiceLost(f"no way to the membership service at {where.host}: {err}") from None
        keys.put(door_key(self.uid), self._door.address)
        told = False
        while (now := Membership(keys).current()) and (silent := knock_at(keys, now.uids, own=self.uid).silent):
            if not told:
                os.write(2, f"{self.uid} waits: it cannot reach {', '.join(sorted(silent))}\n".encode())
            told = True
            time.sleep(RENEW_S)

    def next_team(self, report: Report, *, order: Order = as_listed) -> Team:
        """Connect to the next generation that this member is in and that has enough members; all their reports are in `team.reports`, their ranks as `order` says.

        Raises `StaleMember`, `Left`, `RunOver`, `TooFewMembers`, and `RunError` where the service stays away.
        """
        before = None if self.team is None else self.team.generation
        self.drop()
        while True:
            generation = self._next_generation(before)
            before = generation
            try:
                return self._form(generation, report, order)
            except NewerGeneration:
                continue
            except ServiceLost:
                self._forget_keys()
            except NoMapping as err:
                if self.closing:
                    raise RunOver(None, str(err)) from None
                if self.uid in self._wishes:  # those that are left can neither train nor save
                    self.gave_up({self.uid: self._wishes[self.uid]}, given_to=())
                self._renew(generation)
            except PeerError:
                if self._door is not None:
                    self._look_who_goes(generation)
                self._renew(generation)

    def vote(self, step: int) -> Decision:
        """Vote for `step` and return the decision. Raises `InDoubt`."""
        if self.team is None:
            raise RunError("a member votes in a generation that it is connected to")
        self._voting = step
        votes = self._votes_of(self.team.generation)
        decision = votes.vote(step, then=self._then, broken=self.broken, limit_s=self.settings.vote_s)
        if decision.commit and not self._begun:
            self._begun = True
            self._say({"begun": True})
        if decision.commit:
            self._committed = step + 1
            self._say({"step": step + 1})
            with self._news:
                self._written += votes.written(step - 1)  # the watching thread deletes it: nobody waits for that
        return decision

    def _votes_of(self, generation: Generation) -> Votes:
        """The same as long as generation and connection are."""
        keys = self._keys_of(generation)
        if self._votes is None or self._votes.keys is not keys or self._votes.generation != generation:
            self._votes = Votes(keys, generation, self.uid)
        return self._votes

    def settle(self, step: int) -> Decision | None:
        """The decision of `step`, "abort" if there was none; None where the service cannot say."""
        if self.team is None:
            return None
        generation, end_s = self.team.generation, time.monotonic() + self.settings.service_s
        while True:  # the others wait for it: a member that lost its connection for a moment must say it all the same
            try:
                return self._votes_of(generation).settle(step)
            except ServiceLost:
                values_lost = self._keys is not None and self._keys.epoch != generation.epoch
                self._forget_keys()
            if values_lost or self.broken() or time.monotonic() > end_s:
                return None

    def told_s(self, generation: Generation) -> float:
        """From when the supervisor knew of a loss until this member did; 0 where nobody is lost."""
        seen_s = self._seen_s.get(generation.number, 0.0)
        return max(0.0, seen_s - generation.lost_s) if seen_s and generation.lost_s else 0.0

    def broken(self) -> bool:
        """Whether the team cannot go on: somebody of it is lost, or this member is."""
        with self._news:
            return self.team is not None and (self._refused is not None or self._ends(self.team.generation))

    def _check_stands(self, generation: Generation) -> None:
        """Ask the service, and not what was heard: this process may have stood still for long. For the worker's own thread."""
        newest: Generation | None = None
        while newest is None:
            try:
                keys = self.keys()
                if keys.epoch != generation.epoch:
                    raise PeerError(f"generation {generation.number} is over: the membership service lost its values")
                newest = Membership(keys).current(generation)
            except ServiceLost:
                self._forget_keys()
        if newest.lost_of(generation) or self.uid not in newest.uids:
            raise PeerError(f"generation {generation.number} is over: the newest is {newest.number} ({newest.why})")

    def leave(self) -> None:
        """Ask to leave the run after the step under way (the supervisor does so for its whole host)."""
        self._say({"leave": True})

    def finish(self, step: int) -> None:
        """All steps are done. Returns when everyone who asks later will know."""
        end = End(step, 0 if self.team is None else self.team.generation.number)
        while True:
            try:
                self.keys().put("finished", end.text)
                break
            except ServiceLost:
                self._forget_keys()
        self._say({"finished": end.text})

    def stopped(self) -> None:
        """The run has ended before its last step, and what must stay was written down: nobody waits for it any more."""
        with contextlib.suppress(ServiceLost):
            self.keys().put("stopped", "1")

    def wish_away(self, slow: Mapping[str, str]) -> None:
        """These are to leave after a hand-over because they are slow. All that know it say so; a service that is away hears it after another step."""
        if slow:
            with contextlib.suppress(ServiceLost):
                Membership(self.keys()).wish_to_leave({uid: f"{SLOW}{why}" for uid, why in slow.items()})

    def leavers(self) -> dict[str, str]:
        """Who leaves after "leave", and why: the same for all members of the team. Raises `ServiceLost`."""
        assert self.team is not None
        text = self._keys_of(self.team.generation).get(_leavers_key(self.team.generation, self._voting))
        found: dict[str, str] = json.loads(text or "{}")
        return found

    def waits_or_ends(self) -> dict[str, str]:
        """A team with too few members has met: who leaves it after a hand-over; nobody: all save, and the run ends. The same for all. Raises `ServiceLost`."""
        assert self.team is not None
        generation = self.team.generation
        wanted = {} if self.closing else self._leaving_of(generation)
        mine = {} if len(wanted) == len(generation.uids) else wanted
        found: dict[str, str] = json.loads(
            self._keys_of(generation).create(_leavers_key(generation, -1), json.dumps(mine))
        )
        return found

    def gave_up(self, leavers: Mapping[str, str], *, given_to: Collection[str]) -> None:
        """What `leavers` hold was handed over to `given_to`: from now on they are no members. Whoever knows it says so."""
        known = self.newest if self.team is None else self.team.generation
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if known is not None and keys.epoch == known.epoch:
                Membership(keys).propose_leave(list(leavers), next(iter(leavers.values())), known, given_to=given_to)

    def kept(self) -> None:
        """A hand-over failed although nobody was lost: those that are to leave stay for now."""
        self._wishes_s = time.monotonic() + WISH_AGAIN_S

    def _leaving_of(self, generation: Generation) -> dict[str, str]:
        with self._news:
            return {uid: self._wishes[uid] for uid in generation.uids if uid in self._wishes}

    def drop(self) -> None:
        """Forget the team."""
        with self._news:
            team, self.team = self.team, None
        if team is not None:
            team.drop()
        self._inside = None

    def came_from_nowhere(self) -> bool:
        """Whether an error of any kind may be of numbers that nobody sent: on a device the messages of a kicked team end with anything in them."""
        with self._news:
            return self.settings.device != "cpu" and self.team is not None and self.team.kicked

    def keys(self) -> Keys:
        """The connection of the worker's own thread, opened again as long as `service_s` allows."""
        end_s = time.monotonic() + self.settings.service_s
        while self._keys is None:
            try:
                self._keys = self.service.connect()
            except ServiceLost as err:
                if time.monotonic() > end_s:
                    raise RunError(f"{err}; waited {self.settings.service_s:g} s for it") from None
                time.sleep(AGAIN_S)
        return self._keys

    # -- waiting for a generation

    def _next_generation(self, before: Generation | None) -> Generation:
        """The newest one after `before`, with this member and enough others."""
        asked_s, told = time.monotonic() + RENEW_S, 0
        knock_s = time.monotonic() + KNOCK_AFTER_S
        while True:
            short = self._too_few(before)
            if short is not None and short.generation > told:
                told = short.generation
                self.tell(short)
            with self._news:
                found = self.newest
                if self._refused is not None:
                    raise self._refused
                if self._over is not None:
                    raise RunOver(*self._over)
                usable = found is not None and _later(found, before)
                if not usable or found is None or not self._is_for_me(found):
                    self._news.wait(KNOCK_AFTER_S)
                    found = None
            if found is not None:
                return found
            if before is not None and not usable and self._door is not None and time.monotonic() > knock_s:
                self._look_who_goes(before)
                knock_s = time.monotonic() + RENEW_S
            if before is not None and not usable and time.monotonic() > asked_s:
                self._renew(before)
                asked_s = time.monotonic() + RENEW_S

    def _too_few(self, before: Generation | None) -> TooFew | None:
        """What is to be told where this member can only wait."""
        with self._news:
            new = self.newest
            if new is None or new.enough or self.closing or self.uid not in new.uids or not _later(new, before):
                return None
        return TooFew(uid=self.uid, generation=new.number, members=new.uids, minimum=new.minimum, why=new.why)

    def _is_for_me(self, found: Generation) -> bool:
        if self.uid in found.uids:
            return found.enough or self.closing or any(uid in self._wishes for uid in found.uids)
        if self.uid in found.leaving:
            if self._wishes.get(self.uid, "").startswith(SLOW):
                self._say({"rest": True})
            raise Left(f"{self.uid} has left the run")
        if self.last is not None:
            raise StaleMember(
                f"{self.uid} was put out of the run: generation {found.number} ({found.why}) is without it and its last one was "
                f"{self.last.number}; what it holds is not used"
            )
        return False

    def _look_who_goes(self, before: Generation) -> None:
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if keys.epoch == before.epoch:
                agree_who_goes(keys, before, own=self.uid, over=lambda: self._newer(before))

    def _renew(self, after: Generation) -> None:
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if keys.epoch == after.epoch:
                Membership(keys).renew(after, f"{self.uid} could not reach all others")
            return
        self._forget_keys()

    def _form(self, generation: Generation, report: Report, order: Order) -> Team:
        keys = self._keys_of(generation)
        mine = ready_keys(generation)[generation.uids.index(self.uid)]
        keys.put(mine, json.dumps(asdict(report)))
        try:
            team = form(
                generation,
                self.uid,
                keys,
                newer=lambda: self._newer(generation),
                device=self.settings.device,
                timeout_s=self.settings.timeout_s,
                limit_s=self.settings.meet_s,
                own_machine=self.settings.own_machine,
                watch=self._connect_watched,
                order=order,
            )
        except BaseException:
            self._inside = None  # `form` has dropped what it could not make
            raise
        finally:
            with self._news:
                self._forming = False
        try:
            team.begun = keys.get(BEGUN) is not None
        except PeerError:
            self.drop()
            raise
        return team

    def _connect_watched(self, team: Team) -> None:
        team.check = lambda: self._check_stands(team.generation)
        self._inside = team
        with self._news:
            self.team, self._forming = team, True
            if self.newest is not None and _later(self.newest, team.generation):
                team.kick()

    def _newer(self, generation: Generation) -> bool:
        """Whether a generation that does not form yet should be given up. One with other members only is a better one to form."""
        with self._news:
            return self._over is not None or (self.newest is not None and _later(self.newest, generation))

    def _ends(self, generation: Generation) -> bool:
        new = self.newest
        if new is None or not _later(new, generation):
            return False
        stays = self.uid in new.uids or self.uid in new.leaving
        return new.epoch != generation.epoch or bool(new.lost_of(generation)) or not stays

    def _then(self) -> Then:
        if self._keys is not None and self._keys.get("stop") is not None:
            return "stop"
        with self._news:
            new, team = self.newest, self.team
        if new is None or team is None:
            return "go on"
        if _later(new, team.generation):
            return "next"
        leaving = self._leaving_of(team.generation)
        if not leaving or time.monotonic() < self._wishes_s or self._keys is None:
            return "go on"
        if len(leaving) == team.size:  # nobody would be left to hand over to
            return "stop"
        self._keys.create(_leavers_key(team.generation, self._voting), json.dumps(leaving))
        return "leave"

    def _keys_of(self, generation: Generation) -> Keys:
        """Keys of the life of the service that decided `generation`. Raises `ServiceLost` where that is over."""
        keys = self._keys if self._keys is not None else self.service.connect()
        self._keys = keys
        if keys.epoch != generation.epoch:
            raise ServiceLost("the membership service has lost its values")
        return keys

    def _forget_keys(self) -> None:
        if self._keys is not None:
            self._keys.close()
        self._keys = None
        time.sleep(AGAIN_S)

    # -- the threads beside the worker's own

    def _say(self, words: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, json.dumps(words).encode() + b"\n")

    def _beat(self) -> None:
        while not self._closed.wait(self.settings.heartbeat_s):
            try:
                os.write(self._pipe, b".\n")
            except OSError:  # no supervisor: the kernel is about to end this process
                return

    def _watch(self) -> None:
        keys: Keys | None = None
        while not self._closed.is_set():
            try:
                keys = self._glance(keys, WATCH_S)
            except ServiceLost:
                keys = None
                self._closed.wait(AGAIN_S)
            except PhalanxError as err:
                with self._news:
                    self._refused = err
                    if self.team is not None:
                        self.team.kick()
                    self._news.notify_all()
                return

    def _glance(self, keys: Keys | None, wait_s: float) -> Keys:
        """One look for a newer generation, of at most `wait_s`; returns the connection to look with again."""
        if keys is None:
            keys = self.service.connect()
            self._announce_again(keys)
            self._wishes_mark = None
        if self._door is not None:
            self._door.clear()
        self._end_if_stuck()
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
        if self.settings.device == "cpu" or team is None or not team.kicked_s:
            return
        stuck_s = time.monotonic() - team.kicked_s
        if stuck_s > STUCK_S:
            text = f"{self.uid} has not come back from generation {team.generation.number} for {stuck_s:.0f} s, and ends, so that another one takes its place\n"
            os.write(2, text.encode())
            os._exit(1)

    def _delete_written(self, keys: Keys) -> None:
        with self._news:
            written, self._written = self._written, []
        for key in written:
            keys.delete(key)

    def _check_missed(self, membership: Membership, found: Generation) -> None:
        """A member that was not in a generation is out, whatever the newest says: while it did not hear, the others went on."""
        if self.last is not None and found.epoch != self.last.epoch and found.number <= self.last.number:
            raise StaleMember(
                f"{self.uid} has {self._committed} steps and was in generation {self.last.number}; while the membership service was away the others began again without it, "
                f"as generation {found.number} ({found.why}), FROM AN OLDER STATE where that has fewer steps; what it holds is not used"
            )
        if self.last is None or self.uid not in found.uids:
            return  # `_is_for_me` decides
        for generation in membership.between(self.last, found):
            if self.uid not in generation.uids:
                raise StaleMember(
                    f"{self.uid} was put out of the run: generation {generation.number} ({generation.why}) is without it; "
                    "what it holds is not used"
                )

    def _announce_again(self, keys: Keys) -> None:
        if self._said is None or keys.epoch == self._said_in:
            return
        if self._door is not None:
            keys.put(door_key(self.uid), self._door.address)
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
                self.team.kick()  # one that is not connected yet never will be: others may have gone on to the newer one
            self._news.notify_all()

    def _hear_wishes(self, keys: Keys) -> None:
        mark = keys.get(WISHES)
        if mark is not None and mark != self._wishes_mark:
            found = Membership(keys).wishes()
            with self._news:
                self._wishes, self._wishes_mark = found, mark
                self._news.notify_all()

    def _look_for_the_end(self, keys: Keys) -> None:
        finished, stop, stopped = keys.get("finished"), keys.get("stop"), keys.get("stopped")
        self._hear_wishes(keys)
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


def _leavers_key(generation: Generation, step: int) -> str:
    """Who leaves after that step: all members hand over to the same others, whatever they have heard themselves."""
    return f"leavers/{generation.number}/{step}"


def too_few(generation: Generation, waited_s: float) -> TooFewMembers:
    """For whom a run waits."""
    return TooFewMembers(
        f"{len(generation.members)} members ({', '.join(generation.uids) or 'nobody'}) and the run needs {generation.minimum}; "
        f"waited {waited_s:g} s for more. What was committed is safe"
    )


def _later(new: Generation, before: Generation | None) -> bool:
    return before is None or new.number > before.number

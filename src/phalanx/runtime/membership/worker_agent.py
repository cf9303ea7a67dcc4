"""A worker's place in a run: it says that it lives, watches for generations, and connects to the members of each.

Threads work beside the worker's own (`runtime/membership/watcher.py`): they write heartbeats, wait for the next generation, and abort the groups the moment that
a member of them is lost. The worker's own thread asks for the next team, computes, and votes: what is here.

    waiting for a generation ── in it ──> barrier ──> groups ──> steps ── lost peer, abort, "next" ──> drop, wait again
                             └─ not in it, but was before ──> StaleMember: the process ends, whatever it holds

A service that is lost pauses the worker at its next vote. When it is back without its values, the watching thread announces the member again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.core.errors import PeerError, RunError
from phalanx.core.events import Emit, ignore
from phalanx.runtime.membership.keys import Keys, Service, ServiceLost
from phalanx.runtime.membership.membership import Announcement, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.reachability import ReachabilityProbe, agree_who_goes, door_key, knock_at
from phalanx.runtime.membership.rendezvous import (
    GroupEpoch,
    NewerGeneration,
    NoMapping,
    Order,
    as_listed,
    form,
    ready_keys,
)
from phalanx.runtime.membership.votes import BEGUN, Decision, MemberReport, Then, Votes
from phalanx.runtime.membership.watcher import (
    AGAIN_S,
    AgentSettings,
    End,
    Left,
    MembershipWatcher,
    RunOver,
    TooFew,
    later,
)

SLOW = "removed, "
"""How the reason begins of a member that the others go on without because it is slow: its place stays empty for a while."""
WISH_AGAIN_S = 10.0
"""A hand-over that the disk refused: after so long it is tried again."""
KNOCK_AFTER_S = 0.1
"""A failed collective without a lost member: after so long a member asks at the doors of the others whether they are there."""
RENEW_S = 0.4
"""A failed collective without a lost member: after so long the members ask for a new generation themselves."""


class WorkerAgent(MembershipWatcher):
    """Use as a context manager; `announce` once the worker can begin to work."""

    def __init__(self, member: Member, service: Service, *, pipe: int, settings: AgentSettings) -> None:
        super().__init__(member, service, pipe=pipe, settings=settings)
        self._keys: Keys | None = None
        self._votes: Votes | None = None
        self.tell: Emit = ignore
        self._wishes_s = 0.0
        """Not before: a hand-over that the disk refused is tried again then."""
        self._voting = 0

    def __enter__(self) -> WorkerAgent:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()  # while somebody watches over it
        self._stop()

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
                self._door = ReachabilityProbe(where.host, where.port)
            except OSError as err:  # its name does not resolve now, or there is no way to it
                raise ServiceLost(f"no way to the membership service at {where.host}: {err}") from None
        keys.put(door_key(self.uid), self._door.address)
        told = False
        while (now := Membership(keys).current()) and (silent := knock_at(keys, now.uids, own=self.uid).silent):
            if not told:
                os.write(2, f"{self.uid} waits: it cannot reach {', '.join(sorted(silent))}\n".encode())
            told = True
            time.sleep(RENEW_S)

    def next_team(self, report: MemberReport, *, order: Order = as_listed) -> GroupEpoch:
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
        """A hand-over failed although no rank was lost: those that are to leave stay for now."""
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
        """Whether an error of any kind may be of numbers that nobody sent: on a device the messages of an aborted team end with anything in them."""
        with self._news:
            return self.settings.device != "cpu" and self.team is not None and self.team.aborted

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
                usable = found is not None and later(found, before)
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
            if new is None or new.enough or self.closing or self.uid not in new.uids or not later(new, before):
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
                f"{self.uid} was removed from the run: generation {found.number} ({found.why}) is without it and its last one was "
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

    def _form(self, generation: Generation, report: MemberReport, order: Order) -> GroupEpoch:
        keys = self._keys_of(generation)
        mine = ready_keys(generation)[generation.uids.index(self.uid)]
        keys.put(mine, report.to_json())
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

    def _connect_watched(self, team: GroupEpoch) -> None:
        team.check = lambda: self._check_stands(team.generation)
        self._inside = team
        with self._news:
            self.team, self._forming = team, True
            if self.newest is not None and later(self.newest, team.generation):
                team.abort()

    def _then(self) -> Then:
        if self._keys is not None and self._keys.get("stop") is not None:
            return "stop"
        with self._news:
            new, team = self.newest, self.team
        if new is None or team is None:
            return "go on"
        if later(new, team.generation):
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


def _leavers_key(generation: Generation, step: int) -> str:
    """Who leaves after that step: all members hand over to the same others, whatever they have heard themselves."""
    return f"leavers/{generation.number}/{step}"

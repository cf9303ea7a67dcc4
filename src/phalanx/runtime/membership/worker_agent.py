"""The worker agent: it sends heartbeats, watches for generations, and connects to the members of each.

Background threads (`runtime/membership/watcher.py`) write heartbeats, wait for the next generation, and abort the groups the moment that
a member of them is lost. The worker's own thread forms the next group epoch, computes, and votes; that is in this file.

    waiting for a generation ── in it ──> barrier ──> groups ──> steps ── lost peer, abort, "next" ──> drop, wait again
                             └─ not in it, but was before ──> StaleMember: the process ends, whatever state it holds

A service that is lost pauses the worker at its next vote. When it is back without its values, the watching thread announces the member again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.core.errors import PeerError, RunError
from phalanx.core.events import Emit, ignore
from phalanx.core.reading import json_text, parse_json, typed
from phalanx.runtime.membership.keys import Keys, Service, ServiceLost
from phalanx.runtime.membership.membership import Announcement, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.reachability import ProbeListener, probe_key, probe_members, remove_unreachable
from phalanx.runtime.membership.rendezvous import (
    GroupEpoch,
    NewerGeneration,
    NoMapping,
    Order,
    as_listed,
    form,
    ready_keys,
)
from phalanx.runtime.membership.votes import BEGUN, Decision, MemberReport, Then, Votes, broken_key
from phalanx.runtime.membership.watcher import (
    AGAIN_S,
    AgentSettings,
    End,
    Left,
    MembershipWatcher,
    NotForming,
    RunOver,
    TooFew,
    later,
)

SLOW = "removed, "
"""Prefix of the reason for which a slow member is excluded: its slot stays empty for a while."""
LEAVE_RETRY_S = 10.0
"""Seconds until a failed hand-over is tried again."""
PROBE_AFTER_S = 0.1
"""Seconds after a failed collective without a lost member until a member probes the others."""
RENEWALS = 2
"""Generations in a row that failed to form until a member says so."""
RENEW_S = 0.4
"""Seconds after a failed collective without a lost member until the members propose a new generation themselves."""


class WorkerAgent(MembershipWatcher):
    """Use as a context manager; `announce` once the worker can begin to work."""

    def __init__(self, member: Member, service: Service, *, pipe: int, settings: AgentSettings) -> None:
        super().__init__(member, service, pipe=pipe, settings=settings)
        self._keys: Keys | None = None
        self._votes: Votes | None = None
        self.tell: Emit = ignore
        self._leave_retry_s = 0.0
        """No leave request is served before: a failed hand-over is tried again then."""
        self._voting = self._renewed = 0
        self._formed = False
        """Whether it has formed a generation."""

    def __enter__(self) -> WorkerAgent:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()  # while the watcher can still end a call that hangs
        self._stop()

    # -- what the worker calls

    def announce(self, *, plan_hash: str, version: str) -> None:
        """This worker is ready. Raises `MembershipError` where the run is another one. Waits while it cannot reach all members of the run."""
        announcement = Announcement(member=self.member, plan_hash=plan_hash, version=version)
        while True:
            try:
                keys = self.keys()
                self._open_probe_listener(keys)
                Membership(keys).announce(announcement)
                joins = _has_begun(keys)
                break
            except ServiceLost:
                self._forget_keys()
        self._said, self._said_in = announcement, keys.epoch
        self._say({"announced": True, "joins": joins})

    def under_way(self) -> bool:
        """Whether the run has begun before this worker: it takes the place of another. False if the service does not answer."""
        with contextlib.suppress(ServiceLost):
            return _has_begun(self.keys())
        return False

    def _open_probe_listener(self, keys: Keys) -> None:
        """Where members are on several machines: one that does not reach the others would only stop them again and again."""
        if not self.settings.probe_peers:
            return
        if self._probe_listener is None:
            where: Any = self.service
            try:
                self._probe_listener = ProbeListener(where.host)
            except OSError as err:  # its name does not resolve now, or there is no way to it
                raise ServiceLost(f"cannot reach the membership service at {where.host}: {err}") from None
        keys.put(probe_key(self.uid), self._probe_listener.address)
        reported = False
        while (now := Membership(keys).current()) and (silent := probe_members(keys, now.uids, own=self.uid).silent):
            if not reported:
                os.write(2, f"{self.uid} waits: cannot reach {', '.join(sorted(silent))}\n".encode())
            reported = True
            time.sleep(RENEW_S)

    def next_epoch(self, report: MemberReport, *, order: Order = as_listed) -> GroupEpoch:
        """Connect to the next generation that this member is in and that has enough members; all their reports are in its `reports`, their ranks as `order` says.

        Raises `StaleMember`, `Left`, `RunOver`, `TooFewMembers`, and `RunError` where the service stays unavailable.
        """
        self.progress.at("waiting for a generation")
        with self.progress.waiting():
            epoch = self._next_epoch(report, order)
        if not self._formed:
            self._formed = True
            self._say({"formed": True})  # before any state moves
        return epoch

    def _next_epoch(self, report: MemberReport, order: Order) -> GroupEpoch:
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
                if self.uid in self._leave_requests:  # those that are left can neither train nor save
                    self.gave_up({self.uid: self._leave_requests[self.uid]}, given_to=())
                self._renew(generation)
            except PeerError as err:
                if self._probe_listener is not None:
                    self._remove_unreachable(generation)
                self._renew(generation)
                self._say_renewed(generation, str(err))

    def vote(self, step: int) -> Decision:
        """Vote for `step` and return the decision. Raises `InDoubt`."""
        if self.team is None:
            raise RunError("a member votes in a generation that it is connected to")
        self._voting = step
        votes = self._votes_of(self.team.generation)
        with self.progress.waiting():
            decision = votes.vote(step, then=self._then, broken=self.broken, limit_s=self.settings.vote_s)
        if decision.commit and not self._begun:
            self._begun = True
            self._say({"begun": True})
        if decision.commit:
            self._committed = step + 1
            self.progress.committed()
            self._renewed = 0
            self._say({"step": step + 1, "pause": self.progress.pause_s, "holders": self.progress.holders})
            with self._news:
                self._written += votes.written(
                    step - 1
                )  # the watching thread deletes it, so that no step waits for that
        return decision

    def _votes_of(self, generation: Generation) -> Votes:
        """The same as long as generation and connection are."""
        keys = self._keys_of(generation)
        if self._votes is None or self._votes.keys is not keys or self._votes.generation != generation:
            self._votes = Votes(keys, generation, self.uid)
        return self._votes

    def settle(self, step: int) -> Decision | None:
        """The decision of `step`, "abort" if there was none; None if the service does not answer."""
        if self.team is None:
            return None
        with self.progress.waiting():
            return self._settle(self.team.generation, step)

    def _settle(self, generation: Generation, step: int) -> Decision | None:
        end_s = time.monotonic() + self.settings.service_s
        while True:  # the others wait for it, also if this member lost its connection for a moment
            try:
                return self._votes_of(generation).settle(step)
            except ServiceLost:
                values_lost = self._keys is not None and self._keys.epoch != generation.epoch
                self._forget_keys()
            if values_lost or self.broken() or time.monotonic() > end_s:
                return None

    def _check_stands(self, generation: Generation) -> None:
        """Ask the service itself: this process may have been stopped, so what its watcher saw may be old. For the worker's own thread."""
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
        """Record that all steps are done. Returns once the service has it. Raises `StaleMember` where the others have gone on without this one, which was stopped meanwhile: its end is not theirs."""
        end = End(step, 0 if self.team is None else self.team.generation.number)
        while True:
            try:
                keys = self.keys()
                newest = None if self.last is None else Membership(keys).current(self.last)
                if newest is not None:
                    self._check_member(newest)
                keys.put("finished", end.text)
                break
            except ServiceLost:
                self._forget_keys()
        self._say({"finished": end.text})

    def stopped(self) -> None:
        """Record that the run ended before its last step, after its state was saved: no host waits for it any more."""
        with contextlib.suppress(ServiceLost):
            self.keys().put("stopped", "1")

    def request_exclusion(self, slow: Mapping[str, str]) -> None:
        """Ask slow members to leave after a hand-over. All members that know of them do so; if the service is unavailable, again after another step."""
        if slow:
            with contextlib.suppress(ServiceLost):
                Membership(self.keys()).request_leave({uid: f"{SLOW}{why}" for uid, why in slow.items()})

    def leavers(self) -> dict[str, str]:
        """Who leaves after "leave", and why: the same for all members. Raises `ServiceLost`."""
        assert self.team is not None
        text = self._keys_of(self.team.generation).get(_leavers_key(self.team.generation, self._voting))
        found: dict[str, str] = typed(parse_json(text or "{}", where="leavers"), dict[str, str], where="leavers")
        return found

    def waits_or_ends(self) -> dict[str, str]:
        """Too few members have met: those that leave after a hand-over; if none, all save and the run ends. The same for all. Raises `ServiceLost`."""
        assert self.team is not None
        generation = self.team.generation
        wanted = {} if self.closing else self._leaving_of(generation)
        mine = {} if len(wanted) == len(generation.uids) else wanted
        text = self._keys_of(generation).create(_leavers_key(generation, -1), json_text(mine, where="leavers"))
        found: dict[str, str] = typed(parse_json(text, where="leavers"), dict[str, str], where="leavers")
        return found

    def gave_up(self, leavers: Mapping[str, str], *, given_to: Collection[str]) -> None:
        """Propose a generation without `leavers`, whose state was handed over to `given_to`. All members that know of it do so."""
        known = self.newest if self.team is None else self.team.generation
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if known is not None and keys.epoch == known.epoch:
                Membership(keys).propose_leave(list(leavers), next(iter(leavers.values())), known, given_to=given_to)

    def kept(self) -> None:
        """A hand-over failed although no rank was lost: the leavers stay for now."""
        self._leave_retry_s = time.monotonic() + LEAVE_RETRY_S

    def _leaving_of(self, generation: Generation) -> dict[str, str]:
        with self._news:
            return {uid: self._leave_requests[uid] for uid in generation.uids if uid in self._leave_requests}

    def drop(self) -> None:
        """Drop the group epoch."""
        with self._news:
            team, self.team = self.team, None
        self.progress.forget()
        if team is not None:
            team.drop()
        self._inside = None

    def leave_broken(self) -> None:
        """This member goes on in the next generation alone, if the others do not know yet: they may wait for it on their devices, where only an abort of their own ends that."""
        team = self.team
        if team is not None and not team.aborted:
            with contextlib.suppress(ServiceLost):
                self._keys_of(team.generation).put(broken_key(team.generation), self.uid)

    def may_be_invalid(self) -> bool:
        """Whether any error may come from invalid data: on a device, messages that were aborted end with arbitrary contents."""
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
        asked_s, reported = time.monotonic() + RENEW_S, 0
        probe_s = time.monotonic() + PROBE_AFTER_S
        while True:
            short = self._too_few(before)
            if short is not None and short.generation > reported:
                reported = short.generation
                self.tell(short)
            with self._news:
                found = self.newest
                if self._refused is not None:
                    raise self._refused
                if self._over is not None:
                    raise RunOver(*self._over)
                usable = found is not None and later(found, before)
                if not usable or found is None or not self._is_for_me(found):
                    self._news.wait(PROBE_AFTER_S)
                    found = None
            if found is not None:
                return found
            if before is not None and not usable and self._probe_listener is not None and time.monotonic() > probe_s:
                self._remove_unreachable(before)
                probe_s = time.monotonic() + RENEW_S
            if before is not None and not usable and time.monotonic() > asked_s:
                self._renew(before)
                asked_s = time.monotonic() + RENEW_S

    def _too_few(self, before: Generation | None) -> TooFew | None:
        """The event to emit while this member can only wait."""
        with self._news:
            new = self.newest
            if new is None or new.enough or self.closing or self.uid not in new.uids or not later(new, before):
                return None
        return TooFew(uid=self.uid, generation=new.number, members=new.uids, minimum=new.minimum, why=new.why)

    def _is_for_me(self, found: Generation) -> bool:
        if self.uid in found.uids:
            return found.enough or self.closing or any(uid in self._leave_requests for uid in found.uids)
        if self.uid in found.leaving:
            if self._leave_requests.get(self.uid, "").startswith(SLOW):
                self._say({"rest": True})
            raise Left(f"{self.uid} has left the run")
        self._check_member(found)
        return False

    def _check_member(self, found: Generation) -> None:
        """Raises `StaleMember` where this one was a member and is none of the newest generation."""
        if self.last is not None and self.uid not in found.uids:
            raise StaleMember(
                f"{self.uid} was excluded from the run in generation {found.number} ({found.why}); its last one was {self.last.number}; "
                "its state is discarded"
            )

    def _remove_unreachable(self, before: Generation) -> None:
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if keys.epoch == before.epoch:
                remove_unreachable(keys, before, own=self.uid, over=lambda: self._newer(before))

    def _renew(self, after: Generation) -> None:
        with contextlib.suppress(ServiceLost):
            keys = self.keys()
            if keys.epoch == after.epoch:
                Membership(keys).renew(after, f"{self.uid} could not reach all others")
            return
        self._forget_keys()

    def _say_renewed(self, generation: Generation, why: str) -> None:
        """A generation that breaks once is part of every recovery; one that breaks again is said, once until the next step."""
        self._renewed += 1
        if self._renewed == RENEWALS:
            self.tell(NotForming(uid=self.uid, generation=generation.number, why=why))

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
                progress=self.progress,
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
        if not leaving or time.monotonic() < self._leave_retry_s or self._keys is None:
            return "go on"
        if len(leaving) == team.size:  # no member would be left to hand over to
            return "stop"
        self._keys.create(_leavers_key(team.generation, self._voting), json_text(leaving, where="leavers"))
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


def _has_begun(keys: Keys) -> bool:
    return keys.get("first") is not None


def _leavers_key(generation: Generation, step: int) -> str:
    """Who leaves after that step: all members hand over to the same others, whichever requests they have read themselves."""
    return f"leavers/{generation.number}/{step}"

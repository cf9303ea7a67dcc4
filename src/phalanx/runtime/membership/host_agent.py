"""What a supervisor reports to the membership service, kept until the service has it: workers that announced themselves, died or leave; whether the run is over.

Everything is proposed again until the newest generation shows it, so a lost service costs time and nothing else. When it comes back without its
values, what this host knows is reported again and the first generation of the new history is made by `FirstRule`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.core.clock import now_s
from phalanx.core.config import HOST_BEAT_S
from phalanx.core.errors import printable
from phalanx.core.reading import json_text, parse_json
from phalanx.runtime.membership.hangs import OtherHosts
from phalanx.runtime.membership.keys import MEETINGS, SUMS, Keys, Service, ServiceLost
from phalanx.runtime.membership.membership import (
    BEAT,
    ENDED,
    KEPT,
    Announcement,
    Beat,
    FirstRule,
    Generation,
    Member,
    Membership,
)
from phalanx.runtime.membership.reachability import probe_key, probe_members
from phalanx.runtime.membership.votes import BEGUN, stepped_key, written_for

LOOK_S = 0.05
MANY_HOSTS = 200
"""Of more, each looks more rarely, so that all together look as often: 4,000 times a second."""
BEATS_PER_S = 500_000
"""Most beats that all hosts together read, whose number grows with the square of theirs. A service gives 2 million of them in a second of its processor, and does nothing else."""
MEMBERS_PER_LOOK = 32
"""Announced members up to which each look reads all of them before the first generation; with more, looks are rarer in proportion."""
TIDY_S = 60.0
TIDY_SOON_S = 1.0
"""Seconds until the next generation is tidied up, where there are more."""
TIDY_MOST = 256
HOSTS_S = 0.5
"""How often the beats of other hosts are read, all in one call; more often where `limit_s` is short."""
TOGETHER_S = 0.5
"""How long a worker that is ready waits for others of its host, so that they join in one generation: each one stops the run for a moment."""

PROBE_S = 0.3
"""How long the kernel of a silent host may take to answer for its processes."""
FORMS_S = 2.0
"""How long a worker that is ready leaves a new generation alone that has not made a step yet: one that forms would have to be formed again."""


@dataclass
class Lost:
    """A member of this host that was lost."""

    uid: str
    why: str
    at_s: float
    told_s: float = 0.0
    generation: int = 0


class HostAgent:
    """The members of one host. `tick` does whatever is due and never waits long."""

    def __init__(
        self, host: str, service: Service, rule: FirstRule, *, limit_s: float, f: int = 2, alone: bool = True
    ) -> None:
        """`alone`: no other host can take part in the run. `f`: hosts that hold each piece of state at least."""
        self.host, self.service, self.rule, self.limit_s, self.alone = host, service, rule, limit_s, alone
        self.f = f
        self.newest: Generation | None = None
        self.begun = False
        self.finished: str | None = None
        """How the run ended, as `watcher.End` writes it."""
        self._keys: Keys | None = None
        self._epoch = ""
        self._epoch_s = 0.0
        self._ready: dict[str, Member] = {}
        self._own: set[str] = set()
        """Every worker of this host that this process started."""
        self._taken: set[str] = set()
        """Workers of this host that were in a generation: one that is in none any more is never proposed again."""
        self._seen: tuple[int, float] = 0, 0.0
        """Number of the newest generation, and when this host saw it."""
        self._ready_s = 0.0
        """When the first of those that wait to join was ready; 0: none waits."""
        self._dead: dict[str, Lost] = {}
        self._reported_dead: set[str] = set()
        """Dead workers reported to this life of the service before its first generation."""
        self._unreported: list[Lost] = []
        self._leaving: dict[str, str] = {}
        self._stop = ""
        self._beats = 0
        self._beat_s = 0.0
        self._try_s = 0.0
        self._looked_s = 0.0
        self._look_s = LOOK_S
        self._first_s = 0.0
        """When to look again for announced members."""
        self._tidied: tuple[str, int] = "", 0
        """Life of the service, and the generation in it that is to be tidied up next."""
        self._tidy_s = 0.0
        self._forgot: set[str] = set()
        """Dead workers whose keys were deleted."""
        self._forget_s = 0.0
        self._watched_s = 0.0
        """When other hosts were looked at last."""
        self._unanswered: float | None = None
        """When the service left a call unanswered first, since it last answered one."""
        self._others: dict[str, tuple[str | None, float]] = {}
        """Other hosts: the last heartbeat of each, and when it was first seen."""
        self._quiet, self._waits_s = False, 0.0
        self._together: tuple[set[str], float] = set(), 0.0
        """Hosts that were awaited last because many were silent at once, and when that was."""
        self.awaited = ""
        """Why hosts that are silent are not removed for now; empty where none is awaited."""

    # -- what happened

    def announced(self, member: Member) -> None:
        """A worker of this host is ready."""
        self._ready[member.uid] = member
        self._own.add(member.uid)
        self._looked_s = 0.0

    def died(self, uid: str, why: str) -> None:
        """A worker of this host was lost; reported to the service at the next tick."""
        self._ready.pop(uid, None)
        if uid not in self._dead:
            self._dead[uid] = Lost(uid, printable(why), now_s())
            self._unreported.append(self._dead[uid])

    def gone(self, uid: str) -> None:
        """A worker of this host has ended well."""
        self._ready.pop(uid, None)

    def leave(self, uids: Sequence[str], why: str) -> None:
        """These leave after a hand-over."""
        self._leaving.update(dict.fromkeys(uids, why))
        self._looked_s = 0.0

    def leave_or_stop(self, uids: Sequence[str], why: str) -> None:
        """These leave; if no other member is in the run, it stops. Before it has begun they hold no state, and other hosts may begin without them."""
        others = [] if self.newest is None else [u for u in self.newest.uids if u not in uids]
        if self.newest is None and not self.alone:
            for uid in uids:
                self.died(uid, why)
        elif others:
            self.leave(uids, why)
        else:
            self.stop(f"the run was stopped: {why}")

    def stop(self, why: str) -> None:
        """The run ends after the step under way."""
        self._stop = printable(why)
        self._looked_s = 0.0

    def forgive(self) -> None:
        """This process was stopped, or the service was unavailable: silence of others in that time means nothing."""
        now, self._unanswered = time.monotonic(), None
        self._others = {h: (beat, now) for h, (beat, _) in self._others.items()}

    def workers_are(self, *, quiet: bool, waits_s: float) -> None:
        """Whether a member of this host is silent or still, and for how long one has waited for others; the other hosts hear of it."""
        if quiet and not self._quiet:
            self._beat_s = self._looked_s = 0.0
        self._quiet, self._waits_s = quiet, waits_s

    def other_hosts(self) -> OtherHosts:
        """What the other hosts of the newest generation said last."""
        hosts = self._other_hosts()
        now, beats = time.monotonic(), {h: self._others[h] for h in hosts if h in self._others}
        quiet = [h for h, (text, at_s) in beats.items() if now - at_s > self.limit_s / 2 or Beat.read(text).quiet]
        return OtherHosts(
            len(hosts), len(quiet), max((Beat.read(text).waits_s for text, _ in beats.values()), default=0.0)
        )

    def _other_hosts(self) -> set[str]:
        return set() if self.newest is None else {m.host for m in self.newest.members} - {self.host}

    def take_lost(self) -> list[Lost]:
        """Losses that were reported to the service since the last call."""
        reported = [lost for lost in self._unreported if lost.generation]
        self._unreported = [lost for lost in self._unreported if not lost.generation]
        return reported

    @property
    def waits(self) -> bool:
        """Whether workers of this host are ready and no generation has been in this life of the service."""
        return bool(self._ready) and (self.newest is None or self.newest.epoch != self._epoch)

    def is_over(self) -> bool:
        """Whether the run has ended; False if the service does not answer."""
        try:
            keys = self._connected()
            return keys is not None and any(keys.get(key) is not None for key in ("finished", "stopped"))
        except ServiceLost:
            self._keys = None
            return False

    def num_ready(self) -> int:
        """Number of announced members; those of this host alone if the service does not answer."""
        try:
            keys = self._connected()
            return len(self._ready) if keys is None else len(Membership(keys).announced())
        except ServiceLost:
            self._keys = None
            return len(self._ready)

    # -- telling

    def tick(self) -> None:
        """Report what the service does not have yet, send the heartbeat, check other hosts."""
        try:
            keys = self._connected()
            if keys is None:
                return
            membership = Membership(keys)
            if self._unreported and self.newest is not None and self.newest.epoch == keys.epoch:
                self._propose_deaths(membership)
            now = time.monotonic()
            if now - self._looked_s >= self._look_s:
                self._looked_s = now
                self._look(membership)
                self._unanswered = None
        except ServiceLost:
            self._keys = None
            self._unanswered = self._unanswered or time.monotonic()

    @property
    def unanswered_s(self) -> float:
        """For how long the service has answered no call, of which there was at least one."""
        return 0.0 if self._unanswered is None else time.monotonic() - self._unanswered

    def _connected(self) -> Keys | None:
        now = time.monotonic()
        if self._keys is None and now >= self._try_s:
            self._try_s = now + LOOK_S
            self._keys = self.service.connect()
            self.forgive()  # no host could send anything while the service was unavailable
            if self._keys.epoch != self._epoch:
                self._new_epoch(self._keys)
        return self._keys

    def _new_epoch(self, keys: Keys) -> None:
        """Report again what this host knows."""
        if self.newest is not None:
            keys.put(f"history/{self.host}", self.newest.to_json())
        keys.delete(ENDED + self.host)  # that of a supervisor before this one
        self._reported_dead.clear()
        self._report_dead(keys)
        keys.put(_own_key(self.host), json_text(sorted(self._own), where=_own_key(self.host)))
        keys.create("wanted", str(self.rule.wanted))
        if self.begun:
            keys.put(BEGUN, "1")
        if self.finished is not None:
            keys.put("finished", self.finished)
        self._epoch, self._epoch_s = keys.epoch, time.monotonic()
        self._others.clear()

    def _report_dead(self, keys: Keys) -> None:
        """Dead workers must not be in a first generation although they announced themselves."""
        for lost in [lost for uid, lost in list(self._dead.items()) if uid not in self._reported_dead]:
            keys.put(f"dead/{lost.uid}", lost.why)
            self._reported_dead.add(lost.uid)

    def _propose_deaths_if_begun(self, membership: Membership) -> None:
        """Propose the deaths if another host has begun with workers that are dead now."""
        self.newest = membership.current()
        if self.newest is not None and self._unreported:
            self._propose_deaths(membership)

    def _propose_deaths(self, membership: Membership) -> None:
        unreported = [lost for lost in self._unreported if not lost.generation]  # a signal may add others meanwhile
        uids = {lost.uid: lost.why for lost in unreported}
        lost_s = min((lost.at_s for lost in unreported), default=0.0)
        self.newest = membership.propose_death(
            uids, "; ".join(dict.fromkeys(uids.values())), self.newest, lost_s=lost_s
        )
        for lost in unreported:
            if self.newest is not None:
                lost.generation = self.newest.number
                lost.told_s = now_s() - lost.at_s

    def _look(self, membership: Membership) -> None:
        self._beat(membership)
        newest = membership.current(self.newest)
        if newest is None:
            self._report_dead(membership.keys)
            if self._stop and self.newest is None:
                membership.keys.put("stop", self._stop)  # before anything began
            else:
                self._first_in_time(membership)
            return
        self._note_taken(membership, newest)
        self.newest = newest
        self._look_s = min(LOOK_S * max(1.0, len(self._other_hosts()) / MANY_HOSTS), max(LOOK_S, self.limit_s / 4))
        if self._unreported:
            self._propose_deaths(membership)
        strangers = [m.uid for m in newest.members if m.host == self.host and m.uid not in self._own]
        if strangers:  # this host came back before anyone missed it
            newest = self._remove(membership, strangers, "its host restarted") or newest
        if self._stop:
            membership.keys.put("stop", self._stop)
        if self.finished is None and not self._stop:
            self._join(membership, newest)
        leaving = [u for u in list(self._leaving) if u in newest.uids]
        if leaving:
            self._leave(membership, leaving, newest)
        self._watch_hosts(membership)
        self._tidy(membership.keys, newest)
        self._forget_dead(membership, newest)

    def _note_taken(self, membership: Membership, newest: Generation) -> None:
        """Also those between: a member may have come and been removed while this host was not reached.

        Where one between was forgotten, so were the announcements of its members that have left the run (`Membership.forget`, before it empties it): `_may_join` misses them.
        """
        for generation in [newest] if self.newest is None else membership.between(self.newest, newest):
            self._taken.update(u for u in generation.uids if u in self._own)

    def _join(self, membership: Membership, newest: Generation) -> None:
        joining = [m for m in list(self._ready.values()) if m.uid not in newest.uids and self._may_join(m, membership)]
        now = time.monotonic()
        self._ready_s = (self._ready_s or now) if joining else 0.0
        if joining and now - self._ready_s >= TOGETHER_S and not self._forms(membership, newest):
            found = membership.propose_join(joining, self.newest)
            if found is not None:
                self._note_taken(membership, found)
                self._taken.update(m.uid for m in joining)
                self.newest = found

    def _forms(self, membership: Membership, newest: Generation) -> bool:
        """Whether the newest generation is probably on its way to its first step: whoever joins then would stop the others twice as long."""
        now = time.monotonic()
        if self._seen[0] != newest.number:
            self._seen = newest.number, now
        if not newest.enough or now - self._seen[1] > FORMS_S:
            return False  # it waits for more members, or takes long steps
        return membership.keys.get(stepped_key(newest)) is None

    def _may_join(self, member: Member, membership: Membership) -> bool:
        """A member that was in the run before and is not any more is never taken back."""
        if member.uid in self._dead or member.uid in self._leaving or member.uid in self._taken:
            return False
        text = membership.keys.get(f"member/{member.uid}")
        return text is not None and Announcement.from_json(text).last is None

    def _leave(self, membership: Membership, leaving: Sequence[str], newest: Generation) -> None:
        if len(leaving) == len(newest.uids):
            self.stop(f"the run was stopped: {self._leaving[leaving[0]]}")
        else:
            membership.request_leave({uid: self._leaving[uid] for uid in leaving})  # the members see to it

    def _first_in_time(self, membership: Membership) -> None:
        """The more announced members, the longer until the next look, because every host reads them."""
        now = time.monotonic()
        if now >= self._first_s:
            announced = self._first(membership)
            self._first_s = now + LOOK_S * announced / MEMBERS_PER_LOOK if announced > MEMBERS_PER_LOOK else 0.0

    def _first(self, membership: Membership) -> int:
        """No generation in this life of the service yet. Returns the number of announced members."""
        keys = membership.keys
        dead = {*self._dead, *(k.removeprefix("dead/") for k in keys.listed("dead/"))}
        known = [Generation.from_json(text) for text in keys.values(keys.listed("history/")) if text is not None]
        above = max([*known, *([] if self.newest is None else [self.newest])], key=lambda g: g.number, default=None)
        announced = membership.announced()
        last = self.rule.last(announced, above)
        if last is not None:
            dead |= self._replaced(keys, last)
        found = self.rule.members(announced, above=above, dead=dead, waited_s=time.monotonic() - self._epoch_s)
        if found is not None:
            members, number = found
            why = "the run begins" if last is None else _lost_values(last, announced, members, dead)
            self.newest = membership.start(members, above=number, minimum=self.rule.minimum, why=why)
            for lost in self._unreported:
                if lost.uid not in self.newest.uids:
                    lost.generation = self.newest.number
                    lost.told_s = now_s() - lost.at_s
        return len(announced)

    def _replaced(self, keys: Keys, last: Generation) -> set[str]:
        """Members of hosts whose supervisor is a new one: none of theirs has outlived the old one."""
        hosts = sorted({m.host for m in last.members})
        own = dict(zip(hosts, keys.values([_own_key(h) for h in hosts]), strict=True))
        told = {host: parse_json(text, where=_own_key(host)) for host, text in own.items() if text is not None}
        return {m.uid for m in last.members if isinstance(told.get(m.host), list) and m.uid not in told[m.host]}

    def _tidy(self, keys: Keys, newest: Generation) -> None:
        """The host of the first member deletes keys that are no longer read: few at a time, and nothing while a generation forms."""
        now = time.monotonic()
        if now < self._tidy_s or (newest.members[:1] and newest.members[0].host != self.host):
            return
        self._tidy_s = now + TIDY_S
        keys.tidy()
        if self._tidied[0] != keys.epoch:
            first = keys.get("first")
            self._tidied = keys.epoch, newest.number if first is None else Generation.from_json(first).number
        number = self._tidied[1]
        if number > newest.number - 2 or keys.get(stepped_key(newest)) is None:
            return
        old = replace(newest, number=number)
        prefixes = [
            *written_for(number), f"ready/{number}/", f"unreached/{number}/",
            f"{MEETINGS}{old.meeting}/", f"{SUMS}{old.meeting}/",
        ]  # fmt: skip
        keys.delete(stepped_key(old))
        full = [keys.delete_below(prefix, most=TIDY_MOST) >= TIDY_MOST for prefix in prefixes]
        for uid in Membership(keys).forget(number - KEPT, newest):
            keys.delete(probe_key(uid))
        self._tidied = keys.epoch, number + (not any(full))
        self._tidy_s = now + TIDY_SOON_S

    def _forget_dead(self, membership: Membership, newest: Generation) -> None:
        """Deletes the keys of ended workers of this host, also of those that were never in a generation. Now and then, and not while a generation forms."""
        now = time.monotonic()
        if now < self._forget_s:
            return
        self._forget_s = now + TIDY_S
        ended = [uid for uid in self._dead if uid not in self._forgot and uid not in newest.uids]
        waits = any(not lost.generation for lost in self._unreported)
        if waits or not ended or membership.keys.get(stepped_key(newest)) is None:
            return
        for uid in ended:
            membership.forget_member(uid)
        self._forgot.update(ended)

    def _remove(self, membership: Membership, uids: Sequence[str], why: str) -> Generation | None:
        """Members that are not ours."""
        at_s = now_s()
        self.newest = membership.propose_death(uids, why, self.newest, lost_s=at_s) or self.newest
        if self.newest is not None:
            lost = Lost("", why, at_s, told_s=now_s() - at_s, generation=self.newest.number)
            self._unreported += [replace(lost, uid=uid) for uid in uids]
        return self.newest

    # -- other hosts

    def _beat(self, membership: Membership) -> None:
        now = time.monotonic()
        if now - self._beat_s >= HOST_BEAT_S:
            self._beat_s, self._beats = now, self._beats + 1
            membership.heartbeat(self.host, Beat(self._beats, waits_s=self._waits_s, quiet=self._quiet))

    def _watch_hosts(self, membership: Membership) -> None:
        others = sorted(self._other_hosts())
        now, every_s = time.monotonic(), max(min(HOSTS_S, self.limit_s / 4), len(others) ** 2 / BEATS_PER_S)
        if self.newest is None or now - self._watched_s < (0.0 if self._quiet else every_s):
            return
        if now - self._watched_s > every_s + self._look_s + self.limit_s / 4:
            self.forgive()  # the last look was answered late, and so were the beats of others
        self._watched_s = now
        silent = {}
        for host, beat in membership.heartbeats(others).items():
            known = self._others.get(host)
            if known is None or known[0] != beat:
                self._others[host] = (beat, now)
            elif now - known[1] > self.limit_s:
                silent[host] = now - known[1]
        awaited = self._awaited(membership, silent)
        self.awaited = (
            f"{', '.join(sorted(awaited))} and others are silent at once, their processes exist, and what they hold may be nobody else's: "
            f"none is removed for {self.rule.lone_s:g} s (resilience.wait_s)"
            if awaited
            else ""
        )
        for host in silent.keys() - awaited:
            uids = [m.uid for m in self.newest.members if m.host == host]
            self._remove(membership, uids, f"host {host} was silent for {silent[host]:.1f} s")

    def _awaited(self, membership: Membership, silent: Mapping[str, float]) -> set[str]:
        """Hosts among the silent ones that are not removed yet: so many are quiet at once that what they hold may be nobody else's, and the kernels of
        these answer for their processes."""
        others, (woken, at_s) = self.other_hosts(), self._together
        if others.quiet + self._quiet < min(self.f, others.hosts + 1):
            # what stopped them is over, and not all come back at once
            return silent.keys() & woken if time.monotonic() - at_s < self.limit_s else set()
        known = [host for host, s in silent.items() if s < self.rule.lone_s]
        members = [] if self.newest is None else [m for m in self.newest.members if m.host in known]
        uids = [m.uid for m in members]
        answers = probe_members(membership.keys, uids, own="", limit_s=PROBE_S, whole=True) if uids else None
        found = set() if answers is None else {m.host for m in members if m.uid in answers.answered}
        self._together = found, time.monotonic()
        return found

    def others_alive(self) -> bool:
        """Whether another host still sends heartbeats (asked at the end by the host that keeps the service)."""
        try:
            keys = self._connected()
            if keys is None or self.newest is None:
                return False
            return any(keys.get(ENDED + h) is None and self._spoke(keys, h) for h in self._other_hosts())
        except ServiceLost:
            return False

    def _spoke(self, keys: Keys, host: str) -> bool:
        beat, known = keys.get(BEAT + host), self._others.get(host)
        now = time.monotonic()
        if known is None or known[0] != beat:
            self._others[host] = (beat, now)
            return True
        return now - known[1] <= self.limit_s

    def close(self) -> None:
        """Report that this host has ended. If there was no generation yet, the first one must not wait for its workers."""
        try:
            keys = self._connected()
            if keys is not None:
                if self.newest is None:
                    for uid in list(self._ready):
                        self.died(uid, "its host ended before the run began")
                    self._report_dead(keys)
                    self._propose_deaths_if_begun(Membership(keys))
                keys.put(ENDED + self.host, json.dumps(self.finished))
        except ServiceLost:
            self._keys = None


def _own_key(host: str) -> str:
    """Where the supervisor of a host writes which workers it has started so far, when a service is new to it."""
    return f"own/{host}"


def _lost_values(
    last: Generation, announced: Sequence[Announcement], members: Sequence[Member], dead: Collection[str]
) -> str:
    """Why a run begins again, and with which state."""
    here = {m.uid for m in members} & {*last.uids}
    alive = [uid for uid in last.uids if uid not in dead]
    steps = max((int(a.data.get("steps", 0)) for a in announced if a.member.uid in here), default=0)
    if not alive:
        return f"the membership service lost its values, and all members of generation {last.number} are dead"
    text = f"the membership service lost its values; {len(here)} of {len(last.uids)} members of generation {last.number} continue from step {steps}"
    few = (
        "; THE OTHERS MAY HAVE COMMITTED MORE STEPS: none of them came back in time"
        if 2 * len(here) <= len(alive)
        else ""
    )
    return text + few

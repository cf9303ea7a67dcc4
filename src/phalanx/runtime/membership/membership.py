"""Who takes part in a run: generations of members, kept by an existing service outside the workers.

A *generation* is a list of members in order, with a number that only grows. Generation n+1 is the value of the key `gen/{n+1}`, which the first
writer decides (`Keys.create`). So there is one history, whoever writes it: a supervisor that saw a process end, one that missed a heartbeat,
one whose new worker is ready. There is no election and no consensus among workers.

    announce          a member publishes its name, plan, version and the generation it saw last; another plan or version is refused by name
    request_leave     a member is asked to leave; it stays a member until its state was handed over
    propose_death     next generation without some members        propose_join    with more        propose_leave   without, after a hand-over
    renew             the same members again: their connections broke and none was lost
    current, wait     the newest generation; the next one after n

A service that lost its values (`Keys.epoch`) starts a new history: all members announce again, and its first generation gets a number above all
that any of them saw. Who is not in it has no part in the run any more; what it holds counts for nothing.

Old generations are emptied (`forget`): their key stays, or a process that stood still for long could make the same number a second time and find others of its kind in it.

Must never change: a number is used once; a member that misses a generation is never taken back (its process is replaced by one without
state), or two groups could train the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from phalanx.core.errors import Problem, ProblemsError, RunError, printable
from phalanx.core.reading import is_count, json_text, parse_json, parse_table, typed
from phalanx.runtime.membership.keys import Keys

KEPT = 100
"""Generations whose members are known; a member that missed more than these counts as excluded."""


class MembershipError(ProblemsError):
    """A member cannot take part: it runs something else than the others do."""


class StaleMember(RunError):
    """This member was excluded from the run while it did not answer: its state is out of date and must not be used."""


class TooFewMembers(RunError):
    """The run had fewer members than it needs for longer than it waits. Their state is saved; the same command continues when there are more."""

    exit_code = 75


@dataclass(frozen=True)
class Member:
    """One worker process. A process that replaces it is another member."""

    uid: str
    """`host.slot.mark`, never used again."""
    host: str
    """Failure domain."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One version of the membership."""

    number: int
    """Counts from 1 and only grows."""
    epoch: str
    """Life of the service in which it was decided."""
    members: tuple[Member, ...]
    """Members in the order of their ranks: those of the generation before keep theirs, new ones follow."""
    minimum: int = 1
    left: tuple[tuple[str, int], ...] = ()
    """Those that went out of the run in good health, after a hand-over, and the generation that was the first without each: `KEPT` generations back."""
    why: str = ""
    """Reason in words, for people."""
    lost_s: float = 0.0
    """When the proposer detected the loss of a member (seconds since the epoch); 0: none was lost."""
    forgotten: bool = False
    """Who was in it is not known any more; there are many newer ones."""

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(m.uid for m in self.members)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of those that have left."""
        return tuple(uid for uid, _ in self.left)

    @property
    def enough(self) -> bool:
        """Whether they may train."""
        return len(self.members) >= self.minimum

    @property
    def meeting(self) -> str:
        """Prefix under which the process groups of this generation meet, never used by another."""
        return f"meet/{self.epoch}/{self.number}"

    def lost_of(self, before: Generation) -> tuple[str, ...]:
        """Members of `before` that are gone without a hand-over."""
        return tuple(u for u in before.uids if u not in self.uids and u not in self.leaving)

    def to_json(self) -> str:
        """As others read it: a text that they would refuse ends the proposer, with `MalformedError`, and not the run."""
        return json_text(asdict(self), where="a generation")

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """Raises `MalformedError`."""
        found: Generation = typed(parse_json(text, where="a generation"), cls, where="a generation")
        return found


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a member publishes before it takes part."""

    member: Member
    plan_hash: str
    """Hash of the plan that it runs; all members must have the same."""
    version: str
    """Version of the code, likewise."""
    last: Generation | None = None
    """The newest generation that it was a member of."""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        last = None if self.last is None else self.last.to_json()
        return json_text({**asdict(replace(self, last=None)), "last": last}, where="an announcement")

    @classmethod
    def from_json(cls, text: str) -> Announcement:
        """Raises `MalformedError`."""
        data = parse_table(text, where="an announcement")
        last = data.pop("last", None)
        found: Announcement = typed(data, cls, where="an announcement")
        return found if last is None else replace(found, last=Generation.from_json(typed(last, str, where="last")))


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a host."""

    count: int
    waits_s: float = 0.0
    """Longest time for which a member of it waits for others."""
    quiet: bool = False
    """A member of it is silent or still."""

    @property
    def text(self) -> str:
        return f"{self.count} {self.waits_s:.1f} {int(self.quiet)}"

    @classmethod
    def read(cls, text: str | None) -> Beat:
        """What stands there; one that cannot be read says nothing but that it differs."""
        try:
            count, waits_s, quiet = (text or "").split()
            return cls(int(count), float(waits_s), quiet == "1")
        except ValueError:
            return cls(0)


Change = Callable[[Generation], Generation | None]
"""The next generation from the present one; None: nothing is to be done. The number is set for it."""


class Membership:
    """The protocol, over one connection. Every call may raise `ServiceLost`."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def announce(self, who: Announcement) -> None:
        """Raises `MembershipError` where this member runs another plan or version than the run."""
        mine = {"plan hash": who.plan_hash, "code version": who.version}
        text = self.keys.create("run", json_text(mine, where="run"))
        run = typed(parse_json(text, where="run"), dict[str, str], where="run")
        problems = [
            Problem(
                where=name,
                value=mine[name],
                rule=f"the run has {run.get(name)!r}",
                hint=f"{who.member.uid} was refused",
            )
            for name in mine
            if mine[name] != run.get(name)
        ]
        if problems:
            raise MembershipError(problems, subject=f"member {who.member.uid}")
        self.keys.put(f"member/{who.member.uid}", who.to_json())

    def announced(self) -> list[Announcement]:
        """All that were made in this life of the service."""
        texts = self.keys.values(self.keys.listed("member/"))
        return [Announcement.from_json(t) for t in texts if t is not None]

    def heartbeat(self, host: str, beat: Beat) -> None:
        """`host` lives; the beat's count differs from the last one."""
        self.keys.put(BEAT + host, beat.text)

    def heartbeats(self, names: Sequence[str]) -> dict[str, str | None]:
        """The last beat of each, as `Beat.read` reads it."""
        return dict(zip(names, self.keys.values([BEAT + n for n in names]), strict=True))

    def current(self, known: Generation | None = None) -> Generation | None:
        """The newest generation (None: there is none yet). `known` is where to begin to look."""
        if known is None or known.epoch != self.keys.epoch:
            hint = self.keys.get("newest")
            text = self.keys.get("first") if hint is None else self.keys.get(_key(int(hint)))
            if text is None:
                return None
            known = Generation.from_json(text)
        while (text := self.keys.get(_key(known.number + 1))) is not None:
            known = Generation.from_json(text)
        return known

    def wait(self, after: Generation | None, timeout_s: float) -> Generation | None:
        """The newest generation if it is newer than `after`, else None when the time is over."""
        same = after is not None and after.epoch == self.keys.epoch
        key = _key(after.number + 1) if same and after is not None else "first"
        sharing = 1 if after is None else len(after.members)
        return self.current(after) if self.keys.wait(key, timeout_s, sharing=sharing) else None

    def between(self, before: Generation, after: Generation) -> list[Generation]:
        """Those later than `before`, up to `after`, of the same life of the service; `after` alone where `before` is of another one."""
        if before.epoch != after.epoch:
            return [after]
        texts = self.keys.values([_key(number) for number in range(before.number + 1, after.number)])
        return [*(Generation.from_json(text) for text in texts if text is not None), after]

    def start(self, members: Sequence[Member], *, above: int, minimum: int, why: str) -> Generation:
        """The first generation of this life of the service: ours, or that of whoever was faster."""
        own = Generation(number=above + 1, epoch=self.keys.epoch, members=tuple(members), minimum=minimum, why=why)
        first = Generation.from_json(self.keys.create("first", own.to_json()))
        self._publish(first)
        return first

    def propose(self, change: Change, known: Generation | None = None) -> Generation | None:
        """Make `change` the next generation, whatever others propose meanwhile. Returns the newest; None before the first one."""
        now = self.current(known)
        while now is not None:
            wanted = change(now)
            if wanted is None:
                return now
            kept = tuple((uid, number) for uid, number in wanted.left if number > now.number - KEPT)
            wanted = replace(wanted, number=now.number + 1, epoch=now.epoch, left=kept)
            now = Generation.from_json(self.keys.create(_key(wanted.number), wanted.to_json()))
            if now.forgotten:  # long ago: others went on and on
                now = self.current(now)
            else:
                self._publish(now)
        return None

    def forget(self, number: int, newest: Generation) -> list[str]:
        """Empty an old generation, and delete the keys of members that were in it and are not in `newest`. Returns their names; none if it was emptied before."""
        text = self.keys.get(_key(number))
        old = None if text is None else Generation.from_json(text)
        if old is None or old.forgotten or number >= newest.number:
            return []
        gone = sorted({*old.uids} - {*newest.uids})
        for uid in gone:
            self.forget_member(uid)
        empty = Generation(number=number, epoch=old.epoch, members=(), why="forgotten", forgotten=True)
        self.keys.put(_key(number), empty.to_json())
        return gone

    def forget_member(self, uid: str) -> None:
        """Delete the keys of a member that is in no generation any more."""
        for key in (f"member/{uid}", _leave_request_key(uid)):
            self.keys.delete(key)

    def _publish(self, generation: Generation) -> None:
        """Where to begin to look. Others may have gone on since: readers look further themselves."""
        self.keys.create(_key(generation.number), generation.to_json())
        self.keys.put("newest", str(generation.number))

    def propose_death(
        self, uids: Collection[str], why: str, known: Generation | None = None, *, lost_s: float = 0.0
    ) -> Generation | None:
        """A generation without those; members of it stop what they do together at once. `lost_s` as in `Generation`."""
        return self.propose(without(uids, why, lost_s=lost_s), known)

    def propose_join(self, members: Sequence[Member], known: Generation | None = None) -> Generation | None:
        """A generation with those, entered when the step under way has ended."""
        return self.propose(with_more(members), known)

    def request_leave(self, requests: Mapping[str, str]) -> None:
        """Ask members (name -> reason) to leave; may be repeated. They do so at the end of a step, after their state was handed over."""
        new = [uid for uid in requests if self.keys.get(_leave_request_key(uid)) is None]
        for uid in new:
            self.keys.put(_leave_request_key(uid), printable(requests[uid]))
        if new:
            self.keys.put(LEAVE_REQUESTS, " ".join(new))  # after the requests themselves

    def leave_requests(self) -> dict[str, str]:
        """All requests so far: member -> reason."""
        names = [key.removeprefix(_leave_request_key("")) for key in self.keys.listed(_leave_request_key(""))]
        said = {uid: self.keys.get(_leave_request_key(uid)) for uid in names}
        return {uid: why for uid, why in said.items() if why is not None}

    def propose_leave(
        self, uids: Collection[str], why: str, known: Generation | None = None, *, given_to: Collection[str] = ()
    ) -> Generation | None:
        """A generation without those, who have handed over to `given_to`. Where one of these is lost the hand-over is void: they stay."""
        leave = without(uids, why, leave=True)
        return self.propose(lambda now: leave(now) if set(given_to) <= set(now.uids) else None, known)

    def renew(self, after: Generation, why: str) -> Generation | None:
        """The same members under a new number, unless there is a newer generation than `after` already."""

        def change(now: Generation) -> Generation | None:
            return replace(now, why=why, lost_s=0.0) if now.number == after.number else None

        return self.propose(change, known=after)


LEAVE_REQUESTS = "leave-requests"
"""Key whose value changes with each new leave request."""
BEAT, ENDED = "beat/", "ended/"
"""Before the name of a host: its last heartbeat; that it has ended."""


def _leave_request_key(uid: str) -> str:
    return f"leave-request/{uid}"


def _key(number: int) -> str:
    return f"gen/{number}"


def without(uids: Collection[str], why: str, *, leave: bool = False, lost_s: float = 0.0) -> Change:
    """The rule that takes members out. `why` may be any text: a file name in an error, say."""

    def change(now: Generation) -> Generation | None:
        gone = [u for u in now.uids if u in uids]
        died_leaving = [u for u in now.leaving if u in uids] if not leave else []
        left = tuple((u, number) for u, number in now.left if u not in died_leaving)
        if not gone and not died_leaving:
            return None
        return replace(
            now,
            members=tuple(m for m in now.members if m.uid not in uids),
            left=(*left, *((u, now.number + 1) for u in gone if leave)),
            why=printable(f"{', '.join(gone or died_leaving)}: {why}"),
            lost_s=lost_s,
        )

    return change


def with_more(members: Sequence[Member]) -> Change:
    """The rule that takes members in."""

    def change(now: Generation) -> Generation | None:
        new = [m for m in members if m.uid not in now.uids]
        if not new:
            return None
        names = ", ".join(m.uid for m in new)
        return replace(now, members=(*now.members, *new), why=f"{names}: ready to join", lost_s=0.0)

    return change


@dataclass(frozen=True, kw_only=True)
class FirstRule:
    """When the first generation of a life of the service is decided, and who is in it."""

    wanted: int
    """Members of a fresh run; it begins with fewer (`minimum`) after `gather_s`."""
    minimum: int
    gather_s: float
    """How long to wait for members that have not announced themselves."""
    lone_s: float = 600.0
    """Minimum wait where those announced are a minority: the others may have continued without them."""

    @staticmethod
    def last(announced: Sequence[Announcement], above: Generation | None) -> Generation | None:
        """The newest generation that any member knows."""
        seen = [a.last for a in announced if a.last is not None] + ([above] if above is not None else [])
        return max(seen, key=lambda g: g.number, default=None)

    def members(
        self, announced: Sequence[Announcement], *, above: Generation | None, dead: Collection[str], waited_s: float
    ) -> tuple[list[Member], int] | None:
        """(members, number that theirs must be above), or None to wait on. `above` is the newest generation that the caller knows of.

        A run that was under way begins again with those that took part in it last, with more than half of those that may live: a few of them
        may have been removed and not know it. Without any of them it does not begin, unless all of them are known to be dead: what they held is lost, and
        others go back to a checkpoint.
        """
        last = self.last(announced, above)
        alive = [a for a in announced if a.member.uid not in dead]
        new = [a.member for a in alive if a.last is None and (last is None or a.member.uid not in last.uids)]
        expected = [] if last is None else [m for m in last.members if m.uid not in dead]
        if last is None or not expected:
            full = len(new) >= self.wanted or (waited_s > self.gather_s and len(new) >= self.minimum)
            return (sorted(new, key=_order), 0 if last is None else last.number) if full and new else None
        here = {a.member.uid for a in alive}
        back = [m for m in expected if m.uid in here]
        enough = len(back) == len(expected) or waited_s > (
            self.gather_s if 2 * len(back) > len(expected) else self.lone_s
        )
        if not back or not enough:
            return None
        return [*back, *sorted(new, key=_order)], last.number


def _order(member: Member) -> tuple[str, list[tuple[int, str]]]:
    """Sorting key by host, then by slot, numbers as numbers."""
    parts = member.uid.split(".")
    return member.host, [(int(p), "") if is_count(p) else (0, p) for p in parts]

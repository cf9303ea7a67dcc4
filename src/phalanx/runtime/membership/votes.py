"""Steps as transactions: votes, and one decision for each (generation, step) that the first writer makes.

    all gradients reduced  ->  vote  ->  the last one to vote decides "commit"      ->  all apply the update
    an error, a lost peer  ->            whoever sees it decides "abort"            ->  no update; the same step again

A member that has voted can finish the step alone, so that a death after the vote changes nothing. A member that cannot learn the decision, because
the service was lost, is *in doubt*: it keeps what it reduced, and in the next generation `resolve` settles it from what all members say. This is
two-phase commit with a register that is written once in the place of a coordinator (Gray and Lamport, ACM TODS 31(1), 2006, section 3, for
the protocol that it avoids).

Must never change: a member applies an update only after "commit" stands, or after `resolve` says so; votes are never added up (a repeated vote
would count twice), each member has a key of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from phalanx.core.errors import RunError
from phalanx.core.reading import json_text, parse_table, typed
from phalanx.plan.recovery import StateReport
from phalanx.runtime.membership.keys import Keys, ServiceLost
from phalanx.runtime.membership.membership import Generation
from phalanx.runtime.membership.steps import ABORT, Decision, Then

SLICE_S = 0.02
"""Seconds after which a member that waits for a decision counts the votes again, and then after twice as long each time, up to
`LAST_SLICE_S`."""
LAST_SLICE_S = 1.0
BLOCK = 16
"""Members that count each other's votes; of more members, the last one of each block to vote marks the block, so that the load of the service grows linearly."""


BEGUN = "begun"
"""Exists before the first commit of a run does: from then on no member may start from scratch."""


def written_for(generation: int) -> list[str]:
    """Prefixes of a generation's keys of votes and hand-overs. They are not read once the generation after the next has committed a step."""
    return [f"{what}/{generation}/" for what in ("vote", "voted", "decision", "leavers", "broken")]


def broken_key(generation: Generation) -> str:
    """Has a member that has left a generation by an error of its own, on devices."""
    return f"broken/{generation.number}/by"


def stepped_key(generation: Generation) -> str:
    """Exists once a generation has committed a step: it is formed, and changing it again interrupts no member that forms it."""
    return f"stepped/{generation.number}"


class InDoubt(ServiceLost):
    """This member has voted and cannot learn the decision. It keeps what it reduced until `resolve` settles it."""


class Votes:
    """The votes of one member in one generation."""

    def __init__(self, keys: Keys, generation: Generation, uid: str) -> None:
        if keys.epoch != generation.epoch:
            raise ServiceLost(f"the membership service has lost the values of generation {generation.number}")
        self.keys, self.generation, self.uid = keys, generation, uid
        self._begun = False

    def vote(
        self, step: int, *, then: Callable[[], Then], broken: Callable[[], bool], limit_s: float = 60.0
    ) -> Decision:
        """Say that `step` (steps committed so far) is reduced here, and return the decision.

        `then` is called by the member that decides, `broken` repeatedly: if it is true (a member of the generation is lost) this member
        decides "abort", as it does after `limit_s`, and before any "commit" where it votes alone: nobody else would. Raises `InDoubt` where the service is lost after the vote may have been counted.
        """
        try:
            self.keys.put(self._vote(step, self.uid), "1")
            if len(self.generation.members) == 1 and broken():
                return self._decide(step, ABORT)
            if self._all_voted(step):
                return self._commit(step, then())
            end_s, slice_s, sharing = time.monotonic() + limit_s, SLICE_S, len(self.generation.members)
            while not self.keys.wait(self._decision(step), slice_s, sharing=sharing, over=broken):
                slice_s = min(2 * slice_s, LAST_SLICE_S)
                if broken() or time.monotonic() > end_s:
                    return self._decide(step, ABORT)
                if self._all_voted(step):  # the last one may have lost its connection before it could decide
                    return self._commit(step, then())
            return Decision.read(self.keys.get(self._decision(step)) or ABORT.text)
        except ServiceLost as err:
            raise InDoubt(str(err)) from None

    def settle(self, step: int) -> Decision:
        """The decision that stands, made "abort" where there is none. For a member that failed, or comes back to a service that lost nothing."""
        return self._decide(step, ABORT)

    def written(self, step: int) -> list[str]:
        """What of `step` this member is to delete. Only once a later step of the generation is decided: then all have read it."""
        place = self.generation.uids.index(self.uid)
        block = [self._block(step, place // BLOCK)] if place % BLOCK == 0 and len(self._blocks(step)) > 1 else []
        return [self._vote(step, self.uid), *block, *([self._decision(step)] if place == 0 else [])]

    def _all_voted(self, step: int) -> bool:
        """Checks the votes of the own block, and if it is complete the marks of the others."""
        uids, blocks = self.generation.uids, self._blocks(step)
        own = uids.index(self.uid) // BLOCK
        if not self.keys.all_there([self._vote(step, u) for u in uids[own * BLOCK : (own + 1) * BLOCK]]):
            return False
        if len(blocks) == 1:
            return True
        self.keys.put(blocks[own], "1")
        return self.keys.all_there(blocks)

    def _blocks(self, step: int) -> list[str]:
        return [self._block(step, i) for i in range(-(-len(self.generation.uids) // BLOCK))]

    def _commit(self, step: int, then: Then) -> Decision:
        if not self._begun:
            self.keys.put(BEGUN, "1")
            self.keys.put(stepped_key(self.generation), "1")
            self._begun = True
        return self._decide(step, Decision(True, then))

    def _decide(self, step: int, decision: Decision) -> Decision:
        return Decision.read(self.keys.create(self._decision(step), decision.text))

    def _vote(self, step: int, uid: str) -> str:
        return f"vote/{self.generation.number}/{step}/{uid}"

    def _block(self, step: int, number: int) -> str:
        """Exists once all members of a block have voted."""
        return f"voted/{self.generation.number}/{step}/{number}"

    def _decision(self, step: int) -> str:
        return f"decision/{self.generation.number}/{step}"


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """What a member brings to a new generation; all members read all reports."""

    uid: str
    step: int
    """Steps that it has committed."""
    holds: bool
    """Whether it has state at all: a process that has just started has none."""
    doubt: bool = False
    """It has voted for `step` and does not know the decision."""
    sum: str = ""
    """Checksum of its state; empty: none given."""
    about: StateReport = field(default_factory=StateReport)
    """What the next plan needs of its state and its process."""

    @property
    def history(self) -> int:
        """Which history its state belongs to: the generation in which the run last went back to a checkpoint, 0 where it never did."""
        return self.about.history

    def to_json(self) -> str:
        """As it is written for the others."""
        table = {**asdict(replace(self, about=StateReport())), "about": self.about.to_dict()}
        return json_text(table, where="a member's report")

    @classmethod
    def from_json(cls, text: str) -> MemberReport:
        """Reads what `to_json` writes."""
        data = parse_table(text, where="a member's report")
        about = StateReport.from_dict(data.pop("about", None))
        found: MemberReport = typed(data, cls, where="a member's report")
        return replace(found, about=about)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What follows from the reports of a generation, the same for all its members."""

    step: int | None
    """Steps committed, from which all continue. None: no member holds state."""
    finish: tuple[str, ...]
    """Members in doubt that must apply what they reduced."""
    repeat: tuple[str, ...]
    """Members in doubt that must drop it."""
    holders: tuple[str, ...]
    """Members that have the state of `step` once `finish` is done, in order. The state of others belongs to an abandoned history."""


def resolve(reports: Sequence[MemberReport]) -> Resolution:
    """Settle doubts: who voted for a step that another member has committed commits it too, else all repeat it.

    Sound because a commit needs the votes of all, so a member one step ahead proves that the decision was "commit"; and because a member that is
    not among `reports` has no part in the run any more, whatever it read. Raises `RunError` where members are further apart than that allows.

    Only the newest history counts. A member that went back to a checkpoint did so in a generation in which not all state was left; one that was lost in
    the middle of that generation may still hold more steps of the old history, and no step of the new one can have been committed without it.
    """
    holding = [r for r in reports if r.holds]
    if not holding:
        return Resolution(step=None, finish=(), repeat=(), holders=())
    newest = max(r.history for r in holding)
    held = [r for r in holding if r.history == newest]
    top = max(r.step for r in held)
    doubtful = [r for r in held if r.doubt]
    finish = tuple(r.uid for r in doubtful if r.step == top - 1)
    wrong = [r for r in held if r.step < top and r.uid not in finish]
    if wrong:
        who = ", ".join(f"{r.uid} ({r.step} steps{', in doubt' if r.doubt else ''})" for r in wrong)
        raise RunError(f"members disagree about the steps committed: others have {top}, {who}; nothing was changed")
    return Resolution(
        step=top,
        finish=finish,
        repeat=tuple(r.uid for r in doubtful if r.step == top),
        holders=tuple(r.uid for r in held),
    )

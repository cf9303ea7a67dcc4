"""What a member of an elastic run tells a person of its generations: who was lost, what it took to form the next one, when training went on."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.events import Emit, Event, Note, TeamFormed, TrainingResumed
from phalanx.runtime.membership import Committed, NotForming, Reformed, TooFew
from phalanx.train.placement import Moved


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What entering a generation took; reported once the loop says how it was formed."""

    folding: str
    plan: str
    """Hash of what was decided."""
    built_s: float
    moved_s: float
    moved: Moved
    wanted: int = 0
    """This and the next two, as in `TeamFormed`."""
    holders: int = 0
    holders_wanted: int = 0


class Telling:
    """Takes the events of the loop (`runtime/membership/member.py`) and tells `emit` what follows."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.entry: Entry | None = None
        """Entry of the generation that this member has entered."""
        self._broken_s = 0.0
        """When the last generation was seen broken, or this one was connected; 0 once a step was committed since."""
        self._lost_s = 0.0
        """When the supervisor knew of the first loss since then."""

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Reformed) and self.entry is not None:
            self._formed(event, self.entry)
        if isinstance(event, TooFew):
            self._too_few(event)
        if isinstance(event, NotForming):
            text = f"{event.uid} waits: {event.why}; the members try again until all of them answer"
            self.emit(Note(level="warning", text=text))
        if isinstance(event, Committed) and self._broken_s:
            since_lost_s = event.at_s - self._lost_s if self._lost_s else 0.0
            seconds = event.at_s - self._broken_s
            self._broken_s = self._lost_s = 0.0
            self.emit(
                TrainingResumed(
                    generation=event.generation, step=event.step, seconds=seconds, since_lost_s=since_lost_s
                )
            )

    def _too_few(self, event: TooFew) -> None:
        missing = event.minimum - len(event.members)
        here = ", ".join(event.members)
        text = (
            f"generation {event.generation}: {event.why}; {len(event.members)} members are left ({here}) and the run needs {event.minimum}: "
            f"it waits for {missing} more, then it saves and ends"
        )
        self.emit(Note(level="warning", text=text))

    def _formed(self, event: Reformed, entry: Entry) -> None:
        entered_s = event.at_s - event.entered_s
        if event.generation > 1:
            self._broken_s = event.broken_s or entered_s
            self._lost_s = self._lost_s or event.lost_s
        self.emit(
            TeamFormed(
                generation=event.generation,
                members=event.members,
                step=event.step,
                folding=entry.folding,
                why=event.why or "the run begins",
                noticed_s=entered_s - event.broken_s if event.broken_s else 0.0,
                formed_s=event.formed_s,
                built_s=entry.built_s,
                moved_s=entry.moved_s,
                moved_bytes=entry.moved.received_bytes,
                checked=entry.moved.checked,
                lost_s=event.lost_s,
                told_s=event.told_s,
                plan=entry.plan,
                life=event.life,
                wanted=entry.wanted,
                holders=entry.holders,
                holders_wanted=entry.holders_wanted,
            )
        )

"""What a member and its worker agent tell each other: how a run ended, why a member waits, how it takes part."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.core.events import Event
from phalanx.runtime.membership.membership import Generation, TooFewMembers


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
class AgentSettings:
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
    """Members of several hosts find out themselves who is gone and whom they cannot reach (`runtime/membership/reachability.py`)."""


def too_few(generation: Generation, waited_s: float) -> TooFewMembers:
    """For whom a run waits."""
    return TooFewMembers(
        f"{len(generation.members)} members ({', '.join(generation.uids) or 'nobody'}) and the run needs {generation.minimum}; "
        f"waited {waited_s:g} s for more. What was committed is safe"
    )

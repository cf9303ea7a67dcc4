"""Steps and what is decided of each: the loop that a fixed world and each generation of an elastic run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Then = Literal["go on", "next", "leave", "stop"]
"""What all members do after a commit: another step, the next generation (a member joins), a hand-over from members that leave, or the end of the run."""


@dataclass(frozen=True)
class Decision:
    """What stands for one (generation, step)."""

    commit: bool
    then: Then = "go on"

    @property
    def text(self) -> str:
        return f"commit {self.then}" if self.commit else "abort"

    @classmethod
    def read(cls, text: str) -> Decision:
        commit, _, then = text.partition(" ")
        return cls(commit == "commit", then or "go on")  # type: ignore[arg-type]


ABORT, GO_ON = Decision(False), Decision(True)


class Steps(Protocol):
    """What is done step by step."""

    def finished(self) -> bool:
        """Whether all steps are done; the same answer on all members at the same step."""


def run_steps(body: Steps, step: Callable[[], Decision]) -> Decision:
    """The loop of training: steps until all are done, or until a decision ends this sequence. Returns the last decision."""
    decision = GO_ON
    while decision == GO_ON and not body.finished():
        decision = step()
    return decision

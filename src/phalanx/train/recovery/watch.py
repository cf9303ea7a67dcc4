"""What somebody who tests an elastic run sees of it, from inside its processes: `phalanx bench storm` aims its faults by this.

A run without a watch asks for nothing of this: every place that could tell looks at one attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

from phalanx.core.events import Event
from phalanx.core.op_ids import read_op_id
from phalanx.observe import Sink, Sinks

Phase = Literal[
    "waits", "data", "forward", "all-to-all", "backward", "reduction", "vote", "commit", "migration", "checkpoint"
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class MemberWatch(Protocol):
    """Called by one member. Calls come from its own thread, and may block it."""

    def phase(self, name: Phase, step: int) -> None:
        """The member is now in this phase; `step` steps are committed."""

    def tell(self, event: Event, /) -> None:
        """What `runtime/membership/member.py` tells, and what goes to the sinks."""


class Watch(Protocol):
    """Called by one host."""

    def host(self, event: Event, /) -> None:
        """What the supervisor tells."""

    def member(self, slot: int) -> MemberWatch:
        """Called in each worker's own process, once."""


class WatchedSinks(Sinks):
    """Sinks that pass their events on to a watch as well. They are closed by whoever opened the inner ones."""

    def __init__(self, sinks: Sinks, watch: MemberWatch) -> None:
        super().__init__([])
        self._inner, self._watch = sinks, watch

    @property
    def has_screen(self) -> bool:
        return self._inner.has_screen

    @property
    def is_watched(self) -> bool:
        return self._inner.is_watched

    @property
    def has_taken_place(self) -> bool:
        return self._inner.has_taken_place

    def take_place(self, open_watched: Callable[[], Sequence[Sink]]) -> None:
        self._inner.take_place(open_watched)

    def give_place_back(self) -> None:
        self._inner.give_place_back()

    def __call__(self, event: Event, /) -> None:
        self._inner(event)
        self._watch.tell(event)


def collective_watch(to: Callable[[Phase], None]) -> Callable[[str, bool], None]:
    """A watch over the collectives of a step (`Collectives.watch`), by their ids: dispatch and combine are "all-to-all" while they are waited for, what
    follows belongs to the pass that they are of, and the sums of gradients are the reduction."""

    def watch(op_id: str, begins: bool) -> None:
        place = read_op_id(op_id)
        if place.direction is not None and place.name.startswith(("dispatch.", "combine.")):
            to("all-to-all" if begins else "backward" if place.direction == "backward" else "forward")
        elif begins and op_id.startswith("gradient/"):
            to("reduction")

    return watch

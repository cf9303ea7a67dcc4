"""Steps whose every operation goes to the event log (`observe.trace_steps`), for `phalanx trace`.

Must never change: while a step is recorded nothing is written; a step that fails leaves what it did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.core.clock import now_s
from phalanx.core.events import Emit, Event, StepRecorded
from phalanx.runtime.clocks import compare_clocks
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.peers import Peers


class Recorder:
    """Records the steps from `first` to `last`, counted as in `StepEnded`; None records nothing."""

    def __init__(self, steps: tuple[int, ...] | None, *, comms: Collectives, peers: Peers, emit: Emit) -> None:
        self.steps = range(0) if steps is None else range(steps[0], steps[-1] + 1)
        self._comms, self._peers, self._emit = comms, peers, emit
        self._compared = False
        self._kept: list[Event] = []

    def prepare(self, step: int) -> None:
        """Before `step`: compare clocks, once. Collective, as all ranks have the same steps."""
        if step in self.steps and not self._compared:
            self._emit(compare_clocks(self._peers))
            self._compared = True

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """The step itself; `tell` then writes what was recorded."""
        if step not in self.steps:
            yield
            return
        begin_s = now_s()
        with self._comms.recording() as self._kept:
            try:
                yield
            except BaseException:
                self._end(step, begin_s)
                self.tell()
                raise
        self._end(step, begin_s)

    def _end(self, step: int, begin_s: float) -> None:
        self._kept.append(StepRecorded(step=step, begin_s=begin_s, end_s=now_s()))

    def tell(self) -> None:
        """Write what has been recorded, if anything."""
        kept, self._kept = self._kept, []
        for event in kept:
            self._emit(event)

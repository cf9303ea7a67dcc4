"""Steps whose every operation goes to the event log (`observe.trace_steps`), for `phalanx trace`, and moves of state right before such steps.

In an elastic run a step begins with `begin` and ends with `end`, whether it was committed or discarded; its parameters are published later (`publishing`), and those messages
are its own too, as in the program of a step (`plan/program/step.py`). Every generation has a recorder of its own.

Must never change: while a step is recorded nothing is written; a step that fails leaves what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.clock import now_s
from phalanx.core.events import Emit, Event, MoveRecorded, StepPublished, StepRecorded
from phalanx.plan.reshard import Move
from phalanx.runtime.comm import Collectives, Peers
from phalanx.runtime.reshard import Resharder
from phalanx.train.setup import compare_clocks


class Recorder:
    """Records the steps from `first` to `last`, counted as in `StepEnded`; None records nothing."""

    def __init__(self, steps: tuple[int, ...] | None, *, comms: Collectives, peers: Peers, emit: Emit) -> None:
        self.steps = range(0) if steps is None else range(steps[0], steps[-1] + 1)
        self.rank: int | None = None
        """Rank in the generation, of an elastic run."""
        self.generation = 0
        self._comms, self._peers, self._emit = comms, peers, emit
        self._compared = False
        self._kept: list[Event] = []
        self._open: ExitStack | None = None
        self._unpublished = 0
        """Recorded step whose parameters are still to be published; 0: none."""
        self._step, self._begin_s, self._voted_s, self._decided_s = 0, 0.0, 0.0, 0.0

    def prepare(self, step: int) -> None:
        """Compares clocks, once, before `step`. Collective, as all ranks have the same steps."""
        if step in self.steps and not self._compared:
            self._emit(compare_clocks(self._peers))
            self._compared = True

    def begin(self, step: int) -> None:
        """Begins to record here, if `step` is to be recorded. What an earlier one left behind is dropped."""
        self.end(committed=False)
        if step in self.steps:
            self._step, self._begin_s, self._voted_s, self._decided_s = step, now_s(), 0.0, 0.0
            self._open = ExitStack()
            self._kept = self._open.enter_context(self._comms.recording())

    def voted(self) -> None:
        """The rank waits for the decision from now on."""
        self._voted_s = now_s()

    def decided(self) -> None:
        """The decision is known."""
        self._decided_s = now_s() if self._voted_s else 0.0

    def end(self, *, committed: bool = True) -> None:
        """Up to here; nothing where no step is being recorded."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        self._unpublished = self._step if committed else 0
        self._kept.append(
            StepRecorded(
                step=self._step, begin_s=self._begin_s, end_s=now_s(), rank=self.rank, generation=self.generation, committed=committed,
                voted_s=self._voted_s, decided_s=self._decided_s,
            )
        )  # fmt: skip

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """What is inside publishes the parameters of the last step, if they are not yet."""
        step, self._unpublished = self._unpublished, 0
        if not step:
            yield
            return
        begin_s = now_s()
        with self._comms.recording() as kept:
            yield
        if kept:
            published = StepPublished(
                step=step, begin_s=begin_s, end_s=now_s(), rank=self.rank, generation=self.generation
            )
            for event in (*kept, published):
                self._emit(event)

    def moves(self, step: int, order: Callable[[], Mapping[str, Any]]) -> MoveRecorder | None:
        """Recorder of moves of state after `step` steps, planned from `order`, which is called only where the next step is recorded;
        None where it is not."""
        if step + 1 not in self.steps:
            return None
        return MoveRecorder(step=step, rank=self.rank, generation=self.generation, order=order(), emit=self._emit)

    def tell(self) -> None:
        """Write what has been recorded, if anything."""
        kept, self._kept = self._kept, []
        for event in kept:
            self._emit(event)


@dataclass(kw_only=True)
class MoveRecorder:
    """Writes what a rank did in each move of some state, right behind it; what all of them were planned from with the first."""

    step: int
    rank: int | None
    generation: int
    order: Mapping[str, Any]
    emit: Emit
    _told: bool = field(default=False, init=False)

    @contextmanager
    def recording(self, resharder: Resharder, moves: Sequence[Move], *, op_id: str) -> Iterator[None]:
        """The move itself, whose messages are called `op_id`."""
        begin_s, done = now_s(), False
        try:
            with resharder.comms.recording() as kept:
                yield
            done = True
        finally:
            self._tell(kept, resharder, moves, op_id=op_id, begin_s=begin_s, done=done)

    def _tell(
        self,
        kept: Sequence[Event],
        resharder: Resharder,
        moves: Sequence[Move],
        *,
        op_id: str,
        begin_s: float,
        done: bool,
    ) -> None:
        plan = resharder.prepare(moves).plan if done else None  # the one that was carried out is kept
        end_s = now_s()
        for event in kept:
            self.emit(event)
        self.emit(
            MoveRecorded(
                op_id=op_id, step=self.step, begin_s=begin_s, end_s=end_s, rank=self.rank, generation=self.generation,
                world=resharder.axis.size, done=done, plan="" if plan is None else plan.hash,
                hosts=() if plan is None else resharder.hosts.host_of_rank, order={} if self._told else self.order,
            )
        )  # fmt: skip
        self._told = True

"""Two passes of one rank beside one another: while one waits for a message, the other computes.

Decides nothing: which passes are a pair is `plan/pipeline/schedule/pairs.py`'s. The first pass runs on the thread that asks, the second on one of its own, and
there is one *baton*: only who has it does anything. A pass gives it away where it waits for communication (`Collectives` does that in every wait
of a host) and takes it back before it goes on. So no state of a rank is ever touched by two threads at once, sums keep their order, and
a rank computes on as many threads as without pairs.

    one thread    forward |==| waits ........ |==| waits ....        backward |===| waits ........ |===|
    a pair        forward |==|     |==|   |==|
                  backward    |===|    |===|   |===|

What ranks send must come in one order on all ranks of a process group, and whose turn it is differs from rank to rank. So the second pass
has groups of its own (`Groups.second`). Each group then sees the passes of one thread, in their order; reductions of gradients, which a
backward pass starts, stay on the groups of the first.

Must never change: the results are those, bit by bit, of one pass after the other; an error in one pass ends both and is raised once, in the caller's
thread; no thread is left behind but one in the middle of a message, whose wait nothing ends (`runtime/comm/abortable.py`): the run ends. For hosts (gloo): a device has streams for this.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch

from phalanx.core.errors import first_line
from phalanx.runtime.comm import Axis, Collectives, SecondGroups

First = TypeVar("First")
Second = TypeVar("Second")
GRACE_S = 0.1
"""How long a pass may take to notice that the other has failed, before what it waits for is broken off; and then, before it is left behind. Twice this, and what lanes may take
(`runtime/pipeline/boundary.py`), is less than a launcher waits for more errors once a rank has ended."""


class _OtherFailed(BaseException):
    """Ends a pass whose other pass has failed. Never leaves `CoScheduler.run`."""


class Baton:
    """Who has it goes on. For two threads."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._taken = False
        self._wanted = 0
        self._turns = 0

    def take(self) -> None:
        """Wait until nobody has it, and have it."""
        with self._free:
            self._wanted += 1
            self._free.wait_for(lambda: not self._taken)
            self._wanted -= 1
            self._taken, self._turns = True, self._turns + 1

    def give(self) -> None:
        """Let it go."""
        with self._free:
            self._taken = False
            self._free.notify_all()

    def offer(self) -> None:
        """Let the other have a turn, if it waits for one."""
        with self._free:
            if not self._wanted:
                return
            self._taken, turn = False, self._turns
            self._free.notify_all()
            self._free.wait_for(lambda: self._turns > turn and not self._taken)
            self._taken, self._turns = True, self._turns + 1


class _Side:
    """One of the two passes that run."""

    def __init__(self) -> None:
        self.thread = 0
        self.waits_for: Axis | None = None
        self.ended = threading.Event()


class CoScheduler:
    """Runs pairs of passes that communicate by `comms`. Close it on the thread that made it; `with` does.

    `second`: the groups of the second pass.
    """

    def __init__(self, comms: Collectives, second: SecondGroups) -> None:
        self.comms, self._second = comms, second
        self._baton = Baton()
        self._sides: tuple[_Side, _Side] = (_Side(), _Side())
        self._failed: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Both results, once both have ended. Collective over whatever the passes communicate with.

        The first runs on this thread, with this rank's groups; the second has the first turn (a pass that never waits would leave it none).
        Raises the error that came first; the groups that the other pass waited on may be lost with it.
        """
        out: list[First] = []
        made: list[Second] = []
        mine, its = self._sides = (_Side(), _Side())
        self._failed = None
        settings = (torch.is_grad_enabled(), torch.get_num_threads())  # torch has them per thread
        begun = threading.Event()

        def beside() -> None:
            self._baton.take()
            begun.set()
            torch.set_num_threads(settings[1])
            with torch.set_grad_enabled(settings[0]):
                self._to_its_end(its, mine, lambda: made.append(second()))

        mine.thread, its.thread = threading.get_ident(), self._start()
        self.comms.beside = self
        try:
            self._work.put(beside)
            begun.wait()
            self._baton.take()
            self._to_its_end(mine, its, lambda: out.append(first()))
            if self._failed is None:
                its.ended.wait()
        finally:
            self.comms.beside = None
        failed = self._failed
        if its.ended.is_set():
            self._failed = None  # its traceback holds what the passes held
        if failed is not None:
            raise failed
        return out[0], made[0]

    def _to_its_end(self, side: _Side, other: _Side, task: Callable[[], None]) -> None:
        """Run a pass that has the baton; keep the first error, and see to it that the other pass ends after one, or is left behind (the run ends)."""
        try:
            self._raise_if_failed()
            task()
        except _OtherFailed:
            pass
        except BaseException as error:
            if self._failed is None:
                self._failed = error
        finally:
            side.ended.set()
            self._baton.give()
        while (failed := self._failed) is not None and not other.ended.wait(GRACE_S):
            if (axis := other.waits_for) is not None:
                self.comms.break_off(axis)
                if not other.ended.wait(GRACE_S) and other is self._sides[0]:
                    self.comms.give_up(failed)
                return

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise _OtherFailed

    # ---- what Collectives asks

    def axis(self, axis: Axis) -> Axis:
        """The axis with the groups of the pass that asks."""
        if axis.group is None or threading.get_ident() != self._sides[1].thread:
            return axis
        return dataclasses.replace(axis, group=self._second.of(axis))

    @contextmanager
    def away(self, axis: Axis) -> Iterator[None]:
        """Wait for a message over `axis` inside, while the other pass has the baton."""
        side = next((side for side in self._sides if side.thread == threading.get_ident()), None)
        if side is None:  # a thread that is no pass
            yield
            return
        side.waits_for = axis
        self._baton.give()
        try:
            yield
        finally:
            side.waits_for = None
            self._baton.take()
        self._raise_if_failed()

    @property
    def failed(self) -> str:
        """What to say of a pass that has failed; empty while none has."""
        error = self._failed
        return "" if error is None else f"a pass beside this one failed: {type(error).__name__}: {first_line(error)}"

    def offer(self) -> None:
        """Let the other pass go on, if what it waits for is there: for a pass that computes long without a wait."""
        self._baton.offer()
        self._raise_if_failed()

    # ---- the second thread

    def _start(self) -> int:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._work,), name="second pass", daemon=True)
            self._thread.start()
        assert self._thread.ident is not None  # it has been started
        return self._thread.ident

    def close(self) -> None:
        """End the second thread; one that was left behind ends when it can."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(None if self._sides[1].ended.is_set() or not self._sides[1].thread else 0)
            self._thread = None

    def __enter__(self) -> CoScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()
        del task  # what it has made belongs to the caller

"""Lanes: the threads among which a kernel divides its work on a CPU.

A *lane* is a thread that runs whole pieces of work (the rows of one expert, one sequence of attention) with one-threaded torch
operations. Torch's own way, all threads inside every single operation, meets at a barrier after each of them: 160 matrix products
of a mixture-of-experts layer of unequal sizes lose a third of two idle cores so, and nearly everything where another process takes
a core for a moment (docs/explanation/cpu-performance.md has the figures). Pieces are handed out in order, to whichever lane is free.

Must never change: a piece writes its own part of the output and is computed by one thread, so results are the same bits whatever the
number of lanes and whoever was free. While lanes are open, torch's own threads are set to one: after a parallel operation libgomp's
workers spin for milliseconds on the cores that the lanes need.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

import torch

from phalanx.kernels.cpu.products import Factors, ProductSums
from phalanx.kernels.native import CompiledRows, Seen, not_seen

Item = TypeVar("Item")


class Lanes:
    """`count` lanes: the caller's thread and `count - 1` workers, started at first use, again in a forked child.

    With one lane everything runs in the caller's thread with whatever threads torch has, and no state is kept. `rows`: the compiled
    kernels that work done here may use; without them it is done with torch operations. `sums`: where the matrix products of work done here are checked
    (None: they are not). A process that builds its model again keeps its lanes (`with_rows`): once they have started, torch's own threads no longer say how
    many there were.
    """

    def __init__(self, count: int = 1, *, rows: CompiledRows | None = None, sums: ProductSums | None = None) -> None:
        self.count = count
        self.rows = rows
        self.sums = sums
        self._workers = _Workers(count - 1)

    def with_rows(self, rows: CompiledRows | None, *, sums: ProductSums | None = None) -> Lanes:
        """The same threads for work that may use `rows`, and whose products `sums` checks."""
        other = Lanes(self.count, rows=rows, sums=sums)
        other._workers = self._workers
        return other

    def run(self, task: Callable[[Item, int], object], items: Sequence[Item]) -> None:
        """Call `task(item, lane)` for each item, without gradients. The first error is raised here, after all lanes have stopped."""
        helpers = min(self.count, len(items)) - 1
        with torch.no_grad():
            if helpers < 1:
                for item in items:
                    task(item, 0)
                return
            self._workers.start()
            job = _Job(task, items, helpers)
            for lane in range(1, helpers + 1):
                self._workers.queue.put(job.part(lane))
            job.work(0)
            job.finish()

    def rows_for(self, *tensors: torch.Tensor | None) -> CompiledRows | None:
        """The compiled kernels, where they exist for these tensors (None stands for an operand that is not there)."""
        return self.rows if self.rows is not None and self.rows.can_take(*tensors) else None

    def check(self, place: str, product: torch.Tensor, *factors: Factors, seen: Seen | None = None) -> None:
        """Check a product (`kernels/cpu/products.py`), where products are checked."""
        if self.sums is not None:
            self.sums.check(place, product, *factors, rows=self.rows, seen=seen)

    def late_look(self, native: CompiledRows | None) -> Seen | None:
        """Room for what a compiled kernel sees of a product that it reads anyway; None where products are looked at before, or not at all."""
        return not_seen() if native is not None and self.sums is not None and self.sums.looks_late else None

    def close(self) -> None:
        """Stop the workers and give torch its own threads back."""
        self._workers.stop()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Workers:
    """Threads of lanes, and the queue that they read. While they run, torch has one thread of its own."""

    def __init__(self, count: int) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._owner: int | None = None
        self._threads_before = 1
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Nothing where they run already in this process."""
        if self._owner == os.getpid():
            return
        self.queue = queue.SimpleQueue()  # a forked child has the parent's queue, but not the threads that read it
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._threads = [
            threading.Thread(target=_serve, args=(self.queue,), name=f"lane-{lane}", daemon=True)
            for lane in range(1, self._count + 1)
        ]
        for thread in self._threads:
            thread.start()
        self._owner = os.getpid()

    def stop(self) -> None:
        if self._owner == os.getpid():
            for _ in self._threads:
                self.queue.put(None)
            for thread in self._threads:  # a daemon still inside torch when the interpreter ends aborts the process
                thread.join()
            torch.set_num_threads(self._threads_before)
        self._owner = None


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(1)  # per thread; the process has one already
    with torch.no_grad():
        while (part := work.get()) is not None:
            part()


class _Job(Generic[Item]):
    """One call of `run`."""

    def __init__(self, task: Callable[[Item, int], object], items: Sequence[Item], helpers: int) -> None:
        self._task, self._items = task, iter(items)
        self._lock = threading.Lock()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._helpers = helpers
        self._errors: list[BaseException] = []

    def part(self, lane: int) -> Callable[[], None]:
        def run() -> None:
            self.work(lane)
            self._done.put(None)

        return run

    def work(self, lane: int) -> None:
        try:
            while not self._errors:
                with self._lock:
                    found = list(itertools.islice(self._items, 1))
                if not found:
                    return
                self._task(found[0], lane)
        except BaseException as error:  # raised again by `finish` in the caller's thread
            self._errors.append(error)

    def finish(self) -> None:
        for _ in range(self._helpers):
            self._done.get()
        # A worker remembers its last job until the next one. What the job has made must not look shared: autograd copies shared gradients.
        del self._task, self._items
        if self._errors:
            raise self._errors[0]


SERIAL = Lanes(1)
"""The default of every kernel: no workers, torch's own threads."""

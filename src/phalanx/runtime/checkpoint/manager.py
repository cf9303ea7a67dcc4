"""Saves and loads the state of a run by logical tensors: any mapping and number of ranks to any other, bit for bit.

A save stages (copies) this rank's primary boxes (`host_copies.py`) and returns; a thread of each rank writes them while training goes on. We run
`dcp.save` in our own thread and not `dcp.async_save`: a checkpoint is more than its tensors (checksums, run state, rename,
`latest`, deletion of old ones), all of that must follow the tensors on every rank in one agreed order, and with `async_save` it would
need a second thread anyway. The threads talk over a gloo group of their own, so that their messages never mix with those of
training. Every outcome is agreed by all ranks: either the checkpoint is complete for all, or an error reached all.

`torch.distributed.checkpoint` is imported with the first save or load (`planner.py`): it brings DTensor and sympy, which a process that joins a run under way
would wait for. `import_beside` does it in a thread.

Must never change: nothing that is complete is touched before its successor is complete (see `folder.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from phalanx.core.errors import CheckpointError, PeerError, Problem, first_line, raise_if
from phalanx.runtime.checkpoint.differences import must_stay
from phalanx.runtime.checkpoint.failures import TensorsFailed, WriteFailure, failed_save, refusal_hint, write_failure
from phalanx.runtime.checkpoint.folder import (
    CheckpointFolder,
    RunState,
    Writer,
    with_files,
)
from phalanx.runtime.checkpoint.host_copies import HostCopies, HostCopy
from phalanx.runtime.comm import AbortableCall, LostPeers, Peers, run_abortable
from phalanx.runtime.state import BoxTensor

if TYPE_CHECKING:
    from phalanx.runtime.checkpoint.planner import CheckpointReader, SavedShare

T = TypeVar("T")
Fill = Callable[[Sequence[BoxTensor]], None]
"""Gives boxes their values."""
LOOK_S = 0.05
"""How often who waits for a save looks whether the others still do."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    path: Path
    bytes: int
    blocked_s: float
    """How long the caller stood still."""
    total_s: float
    not_deleted: str = ""
    """Why older ones than `checkpoint.keep_last` are still there; empty: they are not."""
    not_pinned: str = ""
    """Why what this rank copies from a device stops training for longer; empty: it does not, or it was said before."""


@dataclass
class _Job:
    copied: HostCopy
    state: RunState
    begin_s: float
    blocked_s: float
    fill: Fill | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Set once it is abandoned."""
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set once a rank waits for it: it is written as fast as possible."""
    bytes_per_s: float = math.inf
    """Bytes per second of this rank."""
    written: SavedShare | Exception | None = None


class CheckpointManager:
    """Checkpoints of one run. Collective: all ranks call `save`, `finish` and `load` in the same order.

    `group` spans all ranks and is used by nothing else (the background threads talk over it). `by_steps`: an asynchronous save begins in `save` and is completed in a `poll` between later steps, and its thread
    communicates with no other, so that members may be lost at any moment. `write_rate`: MB/s of all ranks together, 0 for no limit. `writer`: the generation that saves, where others may follow it.
    """

    def __init__(
        self,
        path: Path,
        *,
        group: dist.ProcessGroup | None = None,
        keep_last: int = 3,
        asynchronous: bool = True,
        by_steps: bool = False,
        write_rate: float = 0.0,
        escape: AbortableCall | None = None,
        lost: LostPeers | None = None,
        writer: Writer | None = None,
    ) -> None:
        self.folder = CheckpointFolder(path, writer)
        self._peers = Peers(group, escape=escape, lost=lost)
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._write_rate = write_rate
        self._by_steps = by_steps
        self._job: _Job | None = None
        """Job of the thread that was started last; `by_steps` until all ranks have completed it."""
        self._thread: threading.Thread | None = None
        self._outcomes: list[Saved | CheckpointError] = []
        self._copies = HostCopies()
        self._opens_later = False
        self._reader: CheckpointReader | None = None
        """Of the checkpoint of which parts were asked for last."""

    def open(self) -> list[str]:
        """Make the folder and remove what interrupted writes left; returns their names."""
        return self._first(self._open)

    def open_later(self) -> None:
        """Opens as `open` does, with the first save: for who is waited for now, and knows that the folder is there."""
        self._opens_later = True

    def _open(self) -> list[str]:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        return self.folder.clean()

    # ---- saving --------------------------------------------------------------------------------------------------------

    def save(self, boxes: Sequence[BoxTensor], state: RunState, *, fill: Fill | None = None) -> None:
        """Begin to save; `poll` and `finish` say how it went. Waits for the previous save first.

        With `fill` the boxes hold nothing (device "meta"): it fills each part of one just before that is written, so that memory is taken for one part at a time.
        """
        begin_s = time.perf_counter()
        self._join()
        primary = [b for b in boxes if b.primary]
        copies = self._asynchronous and fill is None
        copied = self._copies.copy(primary) if copies else HostCopy(boxes=primary)
        job = _Job(copied, state, begin_s, time.perf_counter() - begin_s, fill)
        if not self._asynchronous:
            self._run(job, lambda: self._write(job))
        elif self._by_steps:
            self._run(job, lambda: self._write_beside(job))
        else:
            self._start(job, lambda: self._run(job, lambda: self._write(job)))

    def order(self) -> None:
        """Call it before state is changed or dropped: on a device that then comes behind the copy of it that a save has begun."""
        self._copies.order()

    def poll(self) -> Saved | None:
        """A save that ended since the last call, if any; `by_steps` all ranks call it together. Raises `CheckpointError` if it failed; nothing saved before is harmed."""
        self._settle()
        if not self._outcomes:
            return None
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def finish(self) -> Saved | None:
        """Wait for the save under way, which goes on without a limit to its rate, then `poll`."""
        job, begin_s = self._job, time.perf_counter()
        if job is not None:
            job.hurry.set()
        self._join()
        if job is not None:
            job.blocked_s += time.perf_counter() - begin_s
        return self.poll()

    @property
    def pending(self) -> bool:
        """`by_steps`: whether a save waits to be completed; the same on all ranks."""
        return self._by_steps and self._job is not None

    def close(self) -> None:
        """Abandon the save under way; its thread ends by itself."""
        if self._job is not None:
            self._job.over.set()
            self._job.hurry.set()  # it may wait for its rate
            self.order()
            self._job, self._copies = None, HostCopies()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, job: _Job, work: Callable[[], None]) -> None:
        self._job = job
        # a daemon: a rank that must end at once (a dead peer, a second Ctrl-C) does not wait for the disk
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is None:
            return
        escape = self._peers.escape
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            if escape is not None and escape.aborted():
                raise PeerError("a checkpoint was abandoned: the other ranks have continued")
        self._thread = None

    def _write_beside(self, job: _Job) -> None:
        """All ranks begin together; each writes by itself."""
        path = self._begin(job)

        def work() -> None:
            job.written = self._share(job, path)

        self._start(job, work)
        job.blocked_s = time.perf_counter() - job.begin_s

    def _settle(self) -> None:
        """Complete what all ranks have written. Collective where a save waits for it."""
        job = self._job
        if job is None or not self._by_steps:
            return
        begin_s = time.perf_counter()
        if not all(self._peers.gather(job.written is not None)):
            job.blocked_s += time.perf_counter() - begin_s
            return
        assert job.written is not None
        mine, self._job = job.written, None

        def work() -> Saved:
            saved = self._complete(job, mine)
            return replace(saved, blocked_s=job.blocked_s + job.begin_s + saved.total_s - begin_s)

        self._run(job, work)

    def _run(self, job: _Job, work: Callable[[], Saved | None]) -> None:
        try:
            saved = work()
            if saved is not None:
                self._outcomes.append(saved)
        except CheckpointError as err:
            self._outcomes.append(err)
        except Exception as err:  # a peer went away in the middle
            if isinstance(err, PeerError) and threading.current_thread() is not self._thread:
                raise  # the caller stands in the midst of what all ranks do; if it went on, the others would wait for it here
            rule = f"the ranks could not write it together: {type(err).__name__}: {err}".splitlines()[0]
            hint = f"nothing saved before was touched ({self.folder.list_steps()})"
            problem = Problem(where=str(self.folder.of(job.state.step)), value="not saved", rule=rule, hint=hint)
            self._outcomes.append(CheckpointError([problem], subject="saving a checkpoint"))

    def _write(self, job: _Job) -> Saved:
        return self._complete(job, self._share(job, self._begin(job)))

    def _begin(self, job: _Job) -> Path:
        """An empty folder to write to. Collective."""
        try:
            path = Path(self._first(partial(self._empty_folder, job.state.step, opens=self._opens_later)))
            self._opens_later = False
            if self._write_rate:  # who has more to write has more of it
                mine = sum(b.tensor.nbytes for b in job.copied.boxes)
                job.bytes_per_s = self._write_rate * 1e6 * mine / max(1, sum(self._peers.gather(mine))) or math.inf
            return path
        except CheckpointError as err:
            self._first(lambda: self.folder.abandon(job.state.step))
            raise failed_save(err, self.folder.of(job.state.step), listed=self.folder.list_steps) from None

    def _empty_folder(self, step: int, *, opens: bool) -> str:
        if opens:
            self._open()
        return str(self.folder.begin(step))

    def _share(self, job: _Job, path: Path) -> SavedShare | Exception:
        """What this rank wrote, or why it could not."""
        try:
            return self._write_tensors(job, path)
        except PeerError:
            raise
        except (CheckpointError, WriteFailure) as err:
            return err
        except Exception as err:
            return write_failure(err, path)

    def _write_tensors(self, job: _Job, path: Path) -> SavedShare:
        """Writes by this rank alone; a save that all stand still for in a thread that is left behind where the others have gone
        on, for a disk may take its time."""
        from phalanx.runtime.checkpoint.planner import write_boxes

        job.copied.wait()
        work = partial(
            write_boxes, job.copied.boxes, path, rank=self._peers.rank, fill=job.fill, bytes_per_s=job.bytes_per_s,
            over=job.over, hurry=job.hurry,
        )  # fmt: skip
        return work() if self._asynchronous else run_abortable(self._peers.escape, work)

    def _complete(self, job: _Job, mine: SavedShare | Exception) -> Saved:
        """A checkpoint of what all ranks wrote. Collective."""
        from phalanx.runtime.checkpoint.planner import write_table

        step = job.state.step
        path = self.folder.writing(step)
        failed = mine.args if isinstance(mine, WriteFailure) else mine
        sent = failed if isinstance(mine, Exception) else mine.files
        told: list[Any] = [WriteFailure(*s) if isinstance(s, tuple) else s for s in self._peers.gather(sent)]
        try:
            failures = {rank: share for rank, share in enumerate(told) if isinstance(share, Exception)}
            if failures or isinstance(mine, Exception):
                raise TensorsFailed(failures)
            shares = self._peers.to_first(mine)  # which only who writes the table needs
            table = self._first(lambda: write_table(path, list(shares)))
            state = with_files(job.state, [*told, table], created=datetime.now(UTC).isoformat(timespec="seconds"))
            self._first(lambda: str(self.folder.commit(state)))
        except (CheckpointError, TensorsFailed) as err:
            self._first(lambda: self.folder.abandon(step))
            raise failed_save(err, self.folder.of(job.state.step), listed=self.folder.list_steps) from None
        not_deleted = self._prune(step)
        now_s = time.perf_counter()
        size = sum(e.bytes for e in state.files.values())
        blocked_s = job.blocked_s if self._asynchronous else now_s - job.begin_s
        total_s = now_s - job.begin_s
        return Saved(
            step=step, path=self.folder.of(step), bytes=size, blocked_s=blocked_s, total_s=total_s,
            not_deleted=not_deleted, not_pinned=job.copied.note,
        )  # fmt: skip

    def _prune(self, step: int) -> str:
        """Delete old checkpoints; returns what the disk had against it, which makes the new one no less complete. Collective."""
        try:
            self._first(lambda: self.folder.prune(current=step, keep=self._keep_last))
        except CheckpointError as err:
            return str(err)
        return ""

    def _first(self, work: Callable[[], T]) -> T:
        return self._peers.first(lambda: _on_disk(work, self.folder.path))

    def _agree(self, work: Callable[[], T]) -> list[T]:
        return self._peers.agree(lambda: _on_disk(work, self.folder.path))

    # ---- loading -------------------------------------------------------------------------------------------------------

    def choose(self, step: int | None = None) -> int | None:
        """Chooses as `CheckpointFolder.choose` does. The same on all ranks."""
        return self._first(lambda: self.folder.choose(step))

    def candidates(self) -> list[int]:
        """The newest checkpoint and all before it, from the newest down. The same on all ranks."""
        return self._first(self.folder.candidates)

    def go_back(self, step: int) -> list[str]:
        """Goes back as `CheckpointFolder.go_back` does. Collective."""
        return self._first(lambda: self.folder.go_back(step))

    def read_state(self, step: int, *, model: Mapping[str, Any]) -> RunState:
        """The run state of `step`, checked: every file is as it was written and the model is this run's, but for what only training reads of it.

        Raises `CheckpointError` naming damaged files with a way out, or the fields that differ. The ranks share the reading.
        """

        found: list[RunState] = []  # not sent: it names a file of each rank

        def work() -> None:
            state = self.folder.read_state(step)
            hint = f"go on with the recipe in {self.folder.path.parent}, or give this run another --run.name"
            raise_if(
                [replace(p, hint=hint) for p in must_stay(state.model, model)],
                CheckpointError,
                subject=f"settings that must stay as they are in the checkpoint {self.folder.of(step)}",
            )
            damage = self.folder.damage(step, state, index=self._peers.rank, count=self._peers.size)
            raise_if(
                self.folder.with_way_out(step, damage),
                CheckpointError,
                subject=f"the checkpoint {self.folder.of(step)}",
            )
            found.append(state)

        self._agree(work)
        return found[0]

    def load(self, boxes: Sequence[BoxTensor], *, step: int, partial: bool = False) -> None:
        """Fill the boxes in place: each rank reads what it needs, and all agree at the end.

        With `partial` the checkpoint may hold tensors that no rank asks for. Takes the memory of one saved box (`largest_box`) besides.
        """
        self.order()
        names = None if partial else set[str]().union(*self._peers.gather({b.name for b in boxes}))

        def work() -> None:
            try:
                self._reader_of(step, keep=partial).fill(boxes, names=names)
            except CheckpointError:
                raise
            except Exception as err:  # whatever a damaged file leads to
                rule = f"cannot be read: {type(err).__name__}: {first_line(err)}"
                hint = refusal_hint(err) or self.folder.way_out(step)
                problem = Problem(where=str(self.folder.of(step)), value=step, rule=rule, hint=hint)
                raise CheckpointError([problem], subject="checkpoint") from err

        self._agree(work)

    def largest_box(self, step: int, names: Collection[str]) -> int:
        """Bytes of the largest box as which one of these tensors was saved. Raises `CheckpointError` where the checkpoint has no table of contents that can be read."""
        return self._reader_of(step, keep=True).largest_box(names)

    def _reader_of(self, step: int, *, keep: bool) -> CheckpointReader:
        """`keep`: its table of contents is wanted again. That of a large model takes 100 MB."""
        from phalanx.runtime.checkpoint.planner import CheckpointReader

        path, known = self.folder.of(step), self._reader
        reader = known if known is not None and known.path == path else CheckpointReader(path)
        self._reader = reader if keep else None
        return reader


def _on_disk(work: Callable[[], T], path: Path) -> T:
    """`work`, with the operating system's refusals as `CheckpointError`."""
    try:
        return work()
    except OSError as err:
        where, rule = str(err.filename or path), err.strerror or str(err)
        problem = Problem(where=where, value=None, rule=rule, hint=refusal_hint(err))
        raise CheckpointError([problem], subject="the checkpoint folder") from err


def import_beside() -> None:
    """Import in a thread what the first save needs, so that it need not wait for that."""
    threading.Thread(target=import_now, name="import of checkpoints", daemon=True).start()


def import_now() -> None:
    """Import what the first save or load needs: 680 modules, with DTensor and sympy."""
    import phalanx.runtime.checkpoint.planner  # noqa: F401

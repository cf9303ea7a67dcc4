"""Agreement between ranks on control matters: who failed, what the first rank found on the disk. Small values, no tensors (`core/messages.py` has their types).

Must never change: a failure of one rank becomes the same error on all of them, so that no rank waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.core import messages
from phalanx.core.errors import PeerError, PhalanxError, ProblemsError, RunError, first_line
from phalanx.runtime.comm.abortable import AbortableCall, run_abortable
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.comm.lost import LostPeers

T = TypeVar("T")
FIRST_BYTES = 8192
"""Bytes of a rank's value that go with its length. Mostly that is all of it, and a second exchange is saved."""
LEAST_BYTES, OF_ALL_BYTES = 256, 1 << 20
"""Fewer of them where there are many ranks: a rank gets the first part of all."""
FEW = 4
"""So many ranks with more than their first part send the rest one after the other; of more, all ranks send as much as the longest."""


def own_group(world: int, *, timeout_s: float, patience_s: float | None = None) -> dist.ProcessGroup | None:
    """A gloo group over all ranks that nothing else uses, so that its messages mix with no others. Collective. It is made within `timeout_s`; its messages wait for `patience_s` (None: as long)."""
    if world == 1:
        return None
    debug = dist.get_debug_level() == dist.DebugLevel.DETAIL  # its groups keep the time that they were made with
    made_s = timeout_s if patience_s is None or not debug else patience_s
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=made_s), backend="gloo")
    if patience_s is not None and not debug:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=patience_s), group)
    return group


class Peers:
    """The ranks of a gloo group (None: one rank alone)."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        escape: AbortableCall | None = None,
        lost: LostPeers | None = None,
    ) -> None:
        self.group = group
        self.escape = escape
        """Way out of calls, as in `Collectives`."""
        self._lost = lost
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None and lost is not None else (self.rank,)
        self._axis = Axis("world", ranks, self.rank, group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Raises `PeerError` where a rank has gone."""
        return [value] if self.group is None else self._together(partial(gathered, value, self.group))

    def to_first(self, value: T) -> Iterator[T]:
        """Every rank's value in rank order on the first rank, which alone has room for them; on the others none. They are read as they are asked for, where an error can be told to all (`first`).
        Raises `PeerError` where a rank has gone."""
        if self.group is None:
            return iter([value])
        return map(messages.decode, self._together(partial(sent_to_first, messages.encode(value), self.group)))

    def part(self, *, timeout_s: float) -> None:
        """Nobody leaves while another waits for a third: the last thing that ranks do together. They are whole without it, so it fails for nothing, and `LostPeers` does not watch it."""
        if self.group is not None:
            limit = dist.BarrierOptions()
            limit.timeout = timedelta(
                seconds=timeout_s
            )  # of the barrier, not of the wait alone: else the group's end would wait for it
            with suppress(RuntimeError):
                self.group.barrier(limit).wait()

    def _together(self, call: Callable[[], T]) -> T:
        try:
            if self._lost is None:
                return run_abortable(self.escape, call)
            return self._lost.during(call, self._axis)
        except RuntimeError as err:  # torch's DistError and its children derive from it
            raise PeerError(f"rank {self.rank} received nothing from some other rank: {first_line(err)}") from err

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results. Where some ranks fail, all raise the same error.

        Problems found by several ranks come together, each once; an error that is not ours becomes a `RunError` that names the rank.
        """
        value, error = None, None
        try:
            value = work()
        except PhalanxError as err:
            error = err
        except Exception as err:
            if self.group is None:
                raise
            error = RunError(f"rank {self.rank}: {type(err).__name__}: {err}")
        results = self.gather((value, error))
        errors = [err for _, err in results if err is not None]
        if errors:
            raise joined(errors)
        return [v for v, _ in results]  # type: ignore[misc]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; all get its result or its error."""
        return self.agree(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def first_bytes(world: int) -> int:
    """Number of bytes of each rank's value in the first message between so many."""
    return max(LEAST_BYTES, min(FIRST_BYTES, OF_ALL_BYTES // world))


def gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's value. As `all_gather_object`, which first asks for all lengths."""
    data, part = messages.encode(value), first_bytes(dist.get_world_size(group))
    first = _all_gather(len(data).to_bytes(8, "little") + data[:part].ljust(part, b"\0"), group)
    lengths = [int.from_bytes(head[:8], "little") for head in first]
    most, rest = _longest(lengths), [b""] * len(first)
    longer = [rank for rank, length in enumerate(lengths) if length > part]
    if len(longer) > FEW:
        rest = _all_gather(data[part:].ljust(most - part, b"\0"), group)
    # mostly the first one: with room for the longest of all, its 60 kB would be 1 GB for 16,384 ranks
    for rank in longer if len(longer) <= FEW else ():
        theirs = torch.empty(lengths[rank] - part, dtype=torch.uint8)
        if rank == dist.get_rank(group):
            theirs = torch.frombuffer(bytearray(data[part:]), dtype=torch.uint8)
        dist.broadcast(theirs, group=group, group_src=rank)
        rest[rank] = theirs.numpy().tobytes()
    return [messages.decode((a[8:] + b)[:length]) for a, b, length in zip(first, rest, lengths, strict=True)]


def sent_to_first(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes on the first rank."""
    lengths = [int.from_bytes(head, "little") for head in _all_gather(len(data).to_bytes(8, "little"), group)]
    mine = torch.frombuffer(bytearray(data.ljust(_longest(lengths), b"\0")), dtype=torch.uint8)
    rows = torch.empty((len(lengths) if dist.get_rank(group) == 0 else 0, len(mine)), dtype=torch.uint8)
    dist.gather(mine, list(rows.unbind()) or None, group=group, group_dst=0)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=False)]


def _longest(lengths: Sequence[int]) -> int:
    """Raises `PeerError` where one is too long."""
    most = max(lengths)
    if most > messages.MOST_BYTES:
        raise PeerError(f"a rank says that its message has {most} bytes; at most {messages.MOST_BYTES}")
    return most


def _all_gather(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Gathers as many bytes of every rank."""
    gathered = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.uint8)
    dist.all_gather(list(gathered.unbind()), torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=group)
    return [row.numpy().tobytes() for row in gathered]


def joined(errors: Sequence[PhalanxError]) -> PhalanxError:
    """The first error, with the problems of all others of its type."""
    first = errors[0]
    if not isinstance(first, ProblemsError):
        return first
    problems = [p for err in errors if isinstance(err, type(first)) for p in err.problems]
    unique = {str(p): p for p in problems}  # thousands of ranks may have the same ones
    return type(first)([*unique.values()], subject=first.subject)

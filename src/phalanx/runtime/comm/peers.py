"""Agreement between ranks on control matters: who failed, what the first rank found on the disk. Small values, no tensors (`core/messages.py` has their types).

Must never change: a failure of one rank becomes the same error on all of them, so that no rank waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.core import messages
from phalanx.core.errors import PeerError, PhalanxError, ProblemsError, RunError, first_line
from phalanx.runtime.comm.abortable import AbortableCall, run_abortable

T = TypeVar("T")
FIRST_BYTES = 8192
"""Bytes of a rank's value that go with its length. Mostly that is all of it, and a second exchange is saved."""
LEAST_BYTES, OF_ALL_BYTES = 256, 1 << 20
"""Fewer of them where there are many ranks: a rank gets the first part of all."""


def own_group(world: int, *, timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group over all ranks that nothing else uses, so that its messages mix with no others. Collective."""
    if world == 1:
        return None
    return dist.new_group(list(range(world)), timeout=timedelta(seconds=timeout_s), backend="gloo")


class Peers:
    """The ranks of a gloo group (None: one rank alone)."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, escape: AbortableCall | None = None) -> None:
        self.group = group
        self.escape = escape
        """Way out of calls, as in `Collectives`."""
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Raises `PeerError` where a rank has gone."""
        if self.group is None:
            return [value]
        try:
            return run_abortable(self.escape, partial(gathered, value, self.group))
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
    most, rest = max(lengths), [b""] * len(first)
    if most > messages.MOST_BYTES:
        raise PeerError(f"a rank says that its message has {most} bytes; at most {messages.MOST_BYTES}")
    if most > part:
        rest = _all_gather(data[part:].ljust(most - part, b"\0"), group)
    return [messages.decode((a[8:] + b)[:length]) for a, b, length in zip(first, rest, lengths, strict=True)]


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
    unique = [p for i, p in enumerate(problems) if p not in problems[:i]]
    return type(first)(unique, subject=first.subject)

"""One collective of this rank, as `runtime/comm/collectives.py` carries it out: what is counted of it, messages under way, sizes checked, errors named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.comm.sums import Passed

ALL_TO_ALL_TAG = 2**31 - 2
"""Tag of the messages of an all-to-all between ranks."""


@dataclass
class Counter:
    """Collectives of one kind on one axis since the counters were last cleared."""

    calls: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    """Seconds for which waits for them blocked this rank."""


AT_ONCE = 8
"""Rounds of NCCL's schedule whose messages its kernel carries at the same time (`NCCL_MAX_DEV_WORK_P2P_PER_BATCH`; src/enqueue.cc of v2.28.9, `addP2pToPlan`)."""


def travels_together(num_ranks: int) -> bool:
    """Whether messages that are posted together over a communicator of so many ranks travel at the same time. With more ranks than rounds at once those of later rounds wait for the others,
    whatever their order was: what two ranks post in different places, and not all ranks at the same one, may wait in a circle."""
    return num_ranks <= AT_ONCE


@dataclass(frozen=True, eq=False)
class Message:
    """A contiguous tensor that goes to, or comes from, the rank at position `peer` of an axis.

    Messages between two ranks of an axis that have the same `tag` arrive in the order in which they were sent.
    """

    tensor: torch.Tensor
    peer: int
    tag: int = 0


class Exchange:
    """Messages under way (`Collectives.start_exchange`). Neither what is sent nor what is received may be touched before `wait`.

    On a device `wait` orders the stream that it is called on, and `again` a further one.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        *,
        again: Callable[[], None] | None = None,
        poll: Callable[[], bool] = lambda: False,
    ) -> None:
        """`poll`: whether all is there already; an exchange without it only knows once it has been waited for."""
        self._finish: Callable[[], None] | None = finish
        self._again, self._poll = again, poll

    @property
    def is_there(self) -> bool:
        """Whether `wait` would return at once, as far as that is known."""
        return self._finish is None or self._poll()

    def wait(self) -> None:
        """Return when all messages are there and gone; on a host at once from the second call on. Raises `PeerError`."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        elif self._again is not None:
            self._again()


@dataclass(frozen=True, eq=False)
class Checked:
    """What `runtime/comm/sums.py` notes of one collective."""

    place: str
    goes: Sequence[Passed]
    comes: Sequence[Passed]


@dataclass(frozen=True)
class Call:
    """What `_run` needs to know of one collective."""

    op_id: str
    sent_bytes: int
    on_host: bool = True
    words: str = ""
    """What an error calls it; the operation's name where empty."""
    to: tuple[int, ...] = ()
    """Positions on the axis, of messages between single ranks."""
    source: tuple[int, ...] = ()
    checked: Checked | None = None
    """What of it is summed, where messages are checked."""


CARRIED = frozenset(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
)  # fmt: skip
"""Types that collectives of gloo and NCCL take as they are. Others, fp8 among them, end in "Invalid scalar type" on gloo, and the group is lost."""
_SUMMED = CARRIED - {torch.bool}


def carried(x: torch.Tensor) -> torch.Tensor:
    """What a transport that only moves it is given for a contiguous tensor: the same memory, as bytes where the transport does not know the type. Rows stay rows."""
    if x.dtype in CARRIED:
        return x
    return x.unsqueeze(-1).view(torch.uint8)


def check_summed(x: torch.Tensor, axis: Axis, op: str) -> None:
    """Raise `ValueError` for a type that transports cannot reduce, before the attempt breaks the group."""
    if x.dtype not in _SUMMED:
        raise ValueError(f"{op} over {axis.name}: reduction is not supported for {x.dtype}; convert to a wider type")


def between_ranks(
    out: torch.Tensor,
    x: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    axis: Axis,
    *,
    tag: int,
    own: bool = True,
) -> _Several:
    """An all-to-all of rows by messages: gloo's own fills a link in one direction at a time, and takes twice as long (docs/explanation/what-did-not-work.md).
    Without `own` a rank's own share is not copied."""
    comes, goes = carried(out).split(list(out_splits)), carried(x).split(list(in_splits))
    if own:
        comes[axis.index].copy_(goes[axis.index])
    ring = [(axis.index + step) % axis.size for step in range(1, axis.size)]
    works = [dist.irecv(comes[i], axis.ranks[i], axis.group, tag) for i in reversed(ring) if comes[i].numel()]
    works += [dist.isend(goes[i], axis.ranks[i], axis.group, tag) for i in ring if goes[i].numel()]
    return _Several(works)


class _Several:
    """Messages that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@contextmanager
def named_errors(op: str, axis: Axis, timeout_s: float, op_id: str = "") -> Iterator[None]:
    """Turn whatever the transport raises into a `PeerError` that says which collective it was."""
    try:
        yield
    except RuntimeError as err:  # torch's DistError and its children derive from it
        why = _reason(str(err).lower(), timeout_s)
        name = f"{op} [{op_id}]" if op_id else op
        raise PeerError(
            f"{name} over axis {axis.name}, ranks {axis.ranks}, failed on rank {axis.ranks[axis.index]}: {why} ({first_line(err)})"
        ) from err


def _reason(text: str, timeout_s: float) -> str:
    if "timed out" in text or "timeout" in text:
        return f"no answer within {timeout_s:g} s"
    return "a rank left or failed" if is_departure(text) else "the transport refused it"


def is_departure(text: str) -> bool:
    """Whether an error of the transport, in small letters, is about the other end of a connection."""
    words = ("connection", "closed", "reset by", "broken pipe", "socket", "remote", "no route", "unreachable")
    return any(word in text for word in words)


def num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def check_splits_of(x: torch.Tensor, splits: Sequence[int], axis: Axis, op: str) -> None:
    """Sizes must be right before anything is posted: gloo aborts the process on a short receive buffer."""
    if len(splits) != axis.size or sum(splits) != x.shape[0] or min(splits, default=0) < 0:
        raise ValueError(
            f"{op} over {axis.name}: splits {tuple(splits)} do not divide {x.shape[0]} rows among {axis.size} ranks"
        )


def check_own(x: torch.Tensor, sizes: Sequence[int], axis: Axis) -> None:
    if len(sizes) != axis.size or sizes[axis.index] != x.shape[0]:
        raise ValueError(
            f"all_gather_rows over {axis.name}: sizes {tuple(sizes)} give rank {axis.index} of {axis.size} "
            f"another number of rows than its {x.shape[0]}"
        )

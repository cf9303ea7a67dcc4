"""A transport that matches messages as NCCL does: collectives of a communicator by their order and not by tag, and with equal shapes and types.

gloo carries the tensors; what differs is who meets whom. Each rank writes what it posts to a file for each communicator, and compares it with what the others have written there at the same
place; whoever comes later sees both. A difference raises `OrderError`, which names both sides. Where NCCL would hang, or add up what does not belong together, the run so ends with the reason.

    with in_order(folder, rank=rank):
        train_step(...)
    stuck(folder)     what never ends, though no two differ: ranks that wait for each other on one communicator
    crossed(folder)   communicators whose collectives two ranks posted in different orders: NCCL asks for one order of all

And a thread in which a message has failed may post no more: with NCCL it can have left a group call open, and then nothing of it would be launched (`runtime/comm/devices.py`, "thread").

Files outlive ranks that are killed, so the order can be read after a failure too.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, RunError
from phalanx.runtime.comm import collectives, exchange

Entry = dict[str, Any]
"""What a rank posts: a collective (`op`, `id`, `dtype`, and what of its shape must be equal or fit), or a batch of messages (`ends`)."""


class OrderError(RunError):
    """Two ranks posted on one communicator what does not belong together."""


@dataclass(eq=False)
class _Reader:
    """What a rank has posted on a communicator so far, read as it grows."""

    path: Path
    at: int = 0
    posted: list[Entry] = field(default_factory=list)
    collectives: list[Entry] = field(default_factory=list)
    messages: dict[tuple[str, int], list[Entry]] = field(default_factory=lambda: defaultdict(list))
    """By direction and peer; each with the number of collectives before it."""

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                self.take(json.loads(line))

    def take(self, entry: Entry) -> None:
        self.posted.append(entry)
        if entry["op"] != "messages":
            self.collectives.append(entry)
            return
        for way, peer, what in entry["ends"]:
            self.messages[way, peer].append({"what": what, "id": entry["id"], "after": len(self.collectives)})


class Orders:
    """What one rank has posted on all its communicators."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._lock = threading.Lock()
        self.begin(folder, rank)

    def begin(self, folder: Path, rank: int) -> None:
        """Groups of another generation of a run have the same names, and other ranks: each has a folder of its own."""
        with self._lock:
            self.folder, self.rank = folder, rank
            self._readers: dict[tuple[str, int], _Reader] = {}

    def post(self, group: dist.ProcessGroup, entry: Entry) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"{group.group_name}-{'.'.join(map(str, ranks))}"
        with self._lock:
            mine = self._reader(name, self.rank)
            mine.path.parent.mkdir(parents=True, exist_ok=True)
            with mine.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
            mine.take(entry)
            if entry["op"] != "messages":
                with (self.folder / f"order-{self.rank}").open("a") as file:
                    file.write(f"{name} {entry['op']} [{entry['id']}]\n")
            for rank in ranks:
                if rank != self.rank:
                    other = self._reader(name, rank)
                    other.read()
                    where = f"communicator {name.rpartition('-')[0]} of ranks {tuple(ranks)}"
                    _compare(where, (self.rank, mine), (rank, other), entry)

    def _reader(self, name: str, rank: int) -> _Reader:
        return self._readers.setdefault((name, rank), _Reader(self.folder / name / str(rank)))


def _compare(where: str, mine: tuple[int, _Reader], other: tuple[int, _Reader], entry: Entry) -> None:
    """The entry that was just posted, with what the other rank has at its place, if it is there."""
    (rank, own), (peer, theirs) = mine, other
    if entry["op"] != "messages":
        number = len(own.collectives) - 1
        if number < len(theirs.collectives) and not _fit(entry, theirs.collectives[number]):
            said = f"rank {rank} posted {_text(entry)}, rank {peer} posted {_text(theirs.collectives[number])}"
            raise OrderError(f"{where}, collective {number}: {said}")
        return
    for way, opposite in (("send", "receive"), ("receive", "send")):
        ours, others = own.messages[way, peer], theirs.messages[opposite, rank]
        new = sum(end[0] == way and end[1] == peer for end in entry["ends"])
        for number in range(len(ours) - new, min(len(ours), len(others))):
            a, b = ours[number], others[number]
            if a["what"] != b["what"] or a["after"] != b["after"]:
                said = [
                    f"rank {r} posted its {w} of {m['what']} [{m['id']}] after {m['after']} collectives"
                    for r, w, m in ((rank, way, a), (peer, opposite, b))
                ]
                raise OrderError(f"{where}, message {number} between ranks {rank} and {peer}: {', '.join(said)}")


def _fit(a: Entry, b: Entry) -> bool:
    if {k: a[k] for k in ("op", "what")} != {k: b[k] for k in ("op", "what")}:
        return False
    if a["op"] == "all_to_all":
        return bool(a["sends"][b["at"]] == b["takes"][a["at"]] and b["sends"][a["at"]] == a["takes"][b["at"]])
    return True


def _text(entry: Entry) -> str:
    splits = f", sends {entry['sends']}, takes {entry['takes']}" if entry["op"] == "all_to_all" else ""
    return f"{entry['op']} of {entry['what']}{splits} [{entry['id']}]"


# ---- what never ends -----------------------------------------------------------------------------------------------------------


def stuck(folder: Path) -> list[str]:
    """What a communicator that takes one thing after the other, on each rank, never comes to the end of."""
    return [text for group in sorted(folder.iterdir()) if group.is_dir() for text in _stuck(group)]


def _stuck(group: Path) -> list[str]:
    ranks = [int(r) for r in group.name.rpartition("-")[2].split(".")]
    readers = {rank: _Reader(group / str(rank)) for rank in ranks}
    for reader in readers.values():
        reader.read()
    heads = dict.fromkeys(ranks, 0)
    left: dict[int, list[tuple[str, int]]] = {rank: [] for rank in ranks}

    def head(rank: int) -> Entry | None:
        posted = readers[rank].posted
        return posted[heads[rank]] if heads[rank] < len(posted) else None

    def begin(rank: int) -> None:
        now = head(rank)
        left[rank] = (
            [(way, peer) for way, peer, _ in now["ends"]] if now is not None and now["op"] == "messages" else []
        )

    def advance(rank: int) -> None:
        heads[rank] += 1
        begin(rank)

    for rank in ranks:
        begin(rank)
    moved = True
    while moved:
        moved = False
        now = {rank: head(rank) for rank in ranks}
        if all(entry is not None and entry["op"] != "messages" for entry in now.values()):
            for rank in ranks:
                advance(rank)
            moved = True
            continue
        for rank in ranks:
            for way, peer in list(left[rank]):
                end = ("receive" if way == "send" else "send", rank)
                if end in left[peer]:
                    left[rank].remove((way, peer))
                    left[peer].remove(end)
                    moved = True
        for rank in ranks:
            entry = head(rank)
            if entry is not None and entry["op"] == "messages" and not left[rank]:
                advance(rank)
                moved = True
    waiting = [(rank, head(rank)) for rank in ranks]
    return [f"{group.name}: rank {rank} waits in {entry['op']} [{entry['id']}]" for rank, entry in waiting if entry]


def crossed(folder: Path) -> list[str]:
    """The first place, for each two ranks, at which their collectives on communicators of both come in different orders."""
    posted = {int(path.name.removeprefix("order-")): path.read_text().splitlines() for path in folder.glob("order-*")}
    found = []
    for a, b in itertools.combinations(sorted(posted), 2):
        ours, theirs = ([line for line in posted[rank] if _is_of(line, {a, b})] for rank in (a, b))
        for number, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            if x.split()[0] != y.split()[0]:
                found.append(f"ranks {a} and {b}, collective {number} of those that both are in: {x}; {y}")
                break
    return found


def _is_of(line: str, ranks: set[int]) -> bool:
    return ranks <= set(map(int, line.split()[0].rpartition("-")[2].split(".")))


# ---- what stands in for torch.distributed ---------------------------------------------------------------------------------------


class _Dist:
    """`torch.distributed` of `runtime/comm/collectives.py`, which says what it is asked before it does it."""

    def __init__(self, told: _Told) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool) -> Any:
        self._told(group, "all_reduce", f"{_what(x)} {str(op).rpartition('.')[2]}")
        return dist.all_reduce(x, op, group=group, async_op=async_op)

    def broadcast(self, x: torch.Tensor, source: int, *, group: Any, async_op: bool) -> Any:
        self._told(group, "broadcast", f"{_what(x)} from rank {source}")
        return dist.broadcast(x, source, group=group, async_op=async_op)

    def barrier(self, *, group: Any, async_op: bool) -> Any:
        self._told(group, "barrier", "nothing")
        return dist.barrier(group=group, async_op=async_op)

    def P2POp(self, op: Any, x: torch.Tensor, peer: int, group: Any, tag: int) -> dist.P2POp:
        real = dist.isend if op == self.isend else dist.irecv
        return dist.P2POp(real, x, peer, group, tag)

    def batch_isend_irecv(self, ops: Sequence[dist.P2POp]) -> Any:
        ends = [("send" if op.op is dist.isend else "receive", op.peer, _what(op.tensor)) for op in ops]
        self._told.messages(ops[0].group, ends)
        return dist.batch_isend_irecv(list(ops))

    def isend(self, x: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._told.messages(group, [("send", peer, _what(x))])
        return dist.isend(x, peer, group, tag)

    def irecv(self, x: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._told.messages(group, [("receive", peer, _what(x))])
        return dist.irecv(x, peer, group, tag)


def _what(x: torch.Tensor) -> str:
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"


class _Told:
    """Calls of `torch.distributed` as entries, with the id of the operation that is posted."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.now = threading.local()

    def __call__(self, group: dist.ProcessGroup, op: str, what: str, **more: Any) -> None:
        self._post(group, {"op": op, "what": what, **more})

    def messages(self, group: dist.ProcessGroup, ends: Sequence[tuple[str, int, str]]) -> None:
        self._post(group, {"op": "messages", "ends": ends})

    def _post(self, group: dist.ProcessGroup, entry: Entry) -> None:
        if getattr(self.now, "failed", False):
            raise OrderError(
                f"{entry['op']} is posted by a thread in which a message has failed: NCCL may never launch it"
            )
        self.orders.post(group, {**entry, "id": getattr(self.now, "id", "")})


@contextmanager
def in_order(folder: Path, *, rank: int) -> Iterator[Orders]:
    """Inside, collectives of this process match by their order. All ranks are given the same empty folder."""
    orders = Orders(folder, rank)
    told = _Told(orders)
    gather, scatter, posted, library = (
        collectives._all_gather_into,
        collectives._reduce_scatter_into,
        collectives.Collectives._posted,
        collectives.Collectives.by_library,
    )

    def all_gather(out: torch.Tensor, x: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        told(group, "all_gather", _what(x))
        return gather(out, x, group=group, async_op=async_op)

    def reduce_scatter(out: torch.Tensor, x: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        told(group, "reduce_scatter", _what(x))
        return scatter(out, x, group=group, async_op=async_op)

    def between(
        out: torch.Tensor, x: torch.Tensor, takes: Sequence[int], sends: Sequence[int], axis: Any, **kw: Any
    ) -> Any:
        kind = str(x.dtype).removeprefix("torch.")
        width = "x".join(map(str, x.shape[1:]))
        told(axis.group, "all_to_all", f"{kind} rows of ({width})", at=axis.index, sends=list(sends), takes=list(takes))
        return exchange.between_ranks(out, x, takes, sends, axis, **kw)

    def note(self: collectives.Collectives, call: exchange.Call) -> float:
        told.now.id = call.op_id
        return posted(self, call)

    @contextmanager
    def noted(*args: Any, **words: Any) -> Iterator[None]:
        try:
            with exchange.named_errors(*args, **words):
                yield
        except PeerError:
            told.now.failed = True
            raise

    def by_library(self: collectives.Collectives, op: str, axis: Any, op_id: str, *launch: Any, **kw: Any) -> Any:
        told.now.id = op_id
        told(axis.group, op, "tokens")
        return library(self, op, axis, op_id, *launch, **kw)

    with (
        mock.patch.object(collectives, "dist", _Dist(told)),
        mock.patch.object(collectives, "_all_gather_into", all_gather),
        mock.patch.object(collectives, "_reduce_scatter_into", reduce_scatter),
        mock.patch.object(collectives, "between_ranks", between),
        mock.patch.object(collectives, "named_errors", noted),
        mock.patch.object(collectives.Collectives, "_posted", note),
        mock.patch.object(collectives.Collectives, "by_library", by_library),
    ):
        yield orders

"""A transport that matches messages as NCCL does: collectives of a communicator by their order and not by tag, and with equal shapes and types.

gloo carries the tensors; what differs is who meets whom. Each rank writes what it posts to a file for each communicator, and compares it with what the others have written there at the same
place; whoever comes later sees both. A difference raises `OrderError`, which names both sides. Where NCCL would hang, or add up what does not belong together, the run so ends with the reason.

    with in_order(folder, rank=rank):
        train_step(...)
    stuck(folder)     what never ends, though no two differ: ranks that wait for each other on one communicator. Of what is posted together the second message one way with a rank comes after
                      the first one of every rank; and the first message ever between two ranks waits, before it is posted, for the other rank to post it (ncclTransportP2pSetup)
    crossed(folder)   communicators whose collectives two ranks posted in different orders: NCCL asks for one order of all

And a thread in which a message has failed may post no more: with NCCL it can have left a group call open, and then nothing of it would be launched (`runtime/comm/devices.py`, "thread").

Files outlive ranks that are killed, so the order can be read after a failure too.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, RunError
from phalanx.runtime.comm import collectives, exchange, groups

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
        if entry["op"] == "connect":
            return
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
            if entry["op"] == "connect":
                return
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


@dataclass(eq=False)
class _Place:
    """How far a rank has come on a communicator."""

    rank: int
    posted: list[Entry]
    at: int = 0
    is_posted: bool = False
    """Whether the messages at `at` are; each has been connected."""
    left: list[list[tuple[int, int]]] = field(default_factory=list)
    """What has not come of them, as (from, to): what goes at the same time together."""
    turn: Callable[[tuple[int, int]], int] = lambda pair: 0
    """What has a lower one goes before."""

    def __post_init__(self) -> None:
        self.posted = [entry for entry in self.posted if entry["op"] != "connect"]
        self._begin()

    @property
    def entry(self) -> Entry | None:
        return self.posted[self.at] if self.at < len(self.posted) else None

    @property
    def has_messages(self) -> bool:
        return self.entry is not None and self.entry["op"] == "messages"

    @property
    def pairs(self) -> set[tuple[int, int]]:
        return {pair for together in self.left for pair in together}

    def advance(self) -> None:
        self.at += 1
        self._begin()

    def _begin(self) -> None:
        self.is_posted, self.left = False, []
        times, turns = Counter[tuple[int, int]](), dict[tuple[int, int], list[tuple[int, int]]]()
        for way, peer, _ in self.entry["ends"] if self.entry is not None and self.has_messages else ():
            pair = (self.rank, peer) if way == "send" else (peer, self.rank)
            turns.setdefault((times[pair], self.turn(pair)), []).append(pair)
            times[pair] += 1
        self.left = [turns[when] for when in sorted(turns)]


def _stuck(group: Path) -> list[str]:
    ranks = [int(r) for r in group.name.rpartition("-")[2].split(".")]
    readers = {rank: _Reader(group / str(rank)) for rank in ranks}
    for reader in readers.values():
        reader.read()
    uses = {entry["what"] for entry in readers[ranks[0]].posted if entry["op"] == "connect"}
    left = unfinished({rank: readers[rank].posted for rank in ranks}, connected="exchange" in uses)
    return [f"{group.name}: rank {rank} waits in {entry['op']} [{entry['id']}]" for rank, entry in left.items()]


def rounds_of_nccl(world: int, of_host: int) -> Callable[[tuple[int, int]], int]:
    """When a message (from, to) travels of those that are posted together: the eight rounds of NCCL's schedule that it is in, where all messages take one channel. Hosts are that far apart after so many rounds
    of `of_host` ranks each (`ncclP2pSchedule` in src/init.cc of v2.28.9)."""
    hosts, round_of, apart = world // of_host, dict[tuple[int, int], int](), 0
    steps = 1 << (hosts - 1).bit_length()
    for step in range(1, steps + 1):
        if apart < hosts:
            round_of |= {(apart, ranks): len(round_of) + ranks for ranks in range(of_host)}
        apart = (apart + step) % steps

    def turn(pair: tuple[int, int]) -> int:
        (host, rank), (to_host, to_rank) = (divmod(end, of_host) for end in pair)
        return round_of[(to_host - host) % hosts, (to_rank - rank) % of_host] // 8

    return turn


def unfinished(
    posted: Mapping[int, list[Entry]], *, connected: bool, turn: Callable[[tuple[int, int]], int] = lambda pair: 0
) -> dict[int, Entry]:
    """Where each rank of a communicator that does not come to its end stands. `connected`: all ranks have exchanged messages before."""
    places = {rank: _Place(rank, entries, turn=turn) for rank, entries in posted.items()}
    pairs = set(itertools.permutations(posted, 2)) if connected else set()
    while _moves(places, pairs):
        pass
    return {rank: place.entry for rank, place in places.items() if place.entry is not None}


def _moves(places: dict[int, _Place], connected: set[tuple[int, int]]) -> bool:
    """One round, in which each rank goes on as far as others let it; whether one did."""
    if all(place.entry is not None and not place.has_messages for place in places.values()):
        for place in places.values():
            place.advance()
        return True
    moved = False
    posting = {rank: place for rank, place in places.items() if place.has_messages and not place.is_posted}
    while alone := [r for r, place in posting.items() if not _meets(place, posting, connected)]:
        for rank in alone:
            del posting[rank]
    for place in posting.values():
        place.is_posted = moved = True
    for place in posting.values():
        connected |= place.pairs
    for place in places.values():
        while place.is_posted and place.left:
            gone = [p for p in place.left[0] if p in _under_way(places[p[0]]) and p in _under_way(places[p[1]])]
            for pair in gone:
                for end in pair:
                    places[end].left[0].remove(pair)
            moved |= bool(gone)
            if place.left[0]:
                break
            place.left.pop(0)
            moved = True
    for place in places.values():
        if place.is_posted and not any(place.left):
            place.advance()
            moved = True
    return moved


def _meets(place: _Place, posting: dict[int, _Place], connected: set[tuple[int, int]]) -> bool:
    """Whether everyone that a rank has a first message with posts it now, too."""
    new = place.pairs - connected
    return all(end in posting and pair in posting[end].pairs for pair in new for end in pair)


def _under_way(place: _Place) -> Sequence[tuple[int, int]]:
    return place.left[0] if place.is_posted and place.left else ()


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

    def connect(group: dist.ProcessGroup, used: Sequence[str], *_: Any) -> None:
        for use in used:  # which a device does where the group is made
            told(group, "connect", use)

    with (
        mock.patch.object(groups, "connect", connect),
        mock.patch.object(collectives, "dist", _Dist(told)),
        mock.patch.object(collectives, "_all_gather_into", all_gather),
        mock.patch.object(collectives, "_reduce_scatter_into", reduce_scatter),
        mock.patch.object(collectives, "between_ranks", between),
        mock.patch.object(collectives, "named_errors", noted),
        mock.patch.object(collectives.Collectives, "_posted", note),
        mock.patch.object(collectives.Collectives, "by_library", by_library),
    ):
        yield orders

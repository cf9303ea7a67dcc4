"""Does every communicator see the same calls in the same order on all of its members? NCCL matches calls by their order alone: where ranks differ it hangs, or takes rows for gradients.

A call of all members meets the calls of the same number on the others: operation, types and sizes must fit. Messages between two ranks are posted in batches, whose messages
travel beside one another: a batch ends when each of its messages has met its other half, which must stand at the head of the peer's queue as well.

Nothing here needs torch: the calls are those that `watch.py` took down.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[Mapping[str, Any]]
MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Difference:
    """Where the members of a communicator no longer do the same."""

    ranks: tuple[int, ...]
    """Of the communicator."""
    number: int
    """Calls that had met before."""
    found: tuple[tuple[int, str], ...]
    """(rank, what it calls next) of each member."""

    def explain(self) -> str:
        """One sentence for a person."""
        calls = "; ".join(f"rank {rank}: {what}" for rank, what in self.found)
        return f"communicator of ranks {', '.join(map(str, self.ranks))}, after {self.number} calls: {calls}"


def differences(calls_of_rank: Mapping[int, Calls]) -> list[Difference]:
    """One for each communicator whose members, all of them traced, could not go on together; empty where all calls met."""
    queues: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for rank, calls in calls_of_rank.items():
        for call in calls:
            queues.setdefault(json.dumps(call["on"]), {}).setdefault(rank, []).append(call)
    found = []
    for key, of_rank in sorted(queues.items()):
        ranks = tuple(json.loads(key)[0])
        found.append(_meet(ranks, {r: of_rank.get(r, []) for r in ranks if r in calls_of_rank}))
    return [f for f in found if f is not None]


def _meet(ranks: tuple[int, ...], calls: Mapping[int, Calls]) -> Difference | None:
    """Let the calls of one communicator meet, as far as they do."""
    queues = {rank: deque(_batches(own)) for rank, own in calls.items()}
    number = 0
    while any(queues.values()):
        heads = {rank: queue[0] if queue else [] for rank, queue in queues.items()}
        if not (_meet_all(heads) or _meet_messages(heads)):
            return Difference(ranks, number, tuple((rank, _words(head)) for rank, head in heads.items()))
        for queue in queues.values():
            if queue and not queue[0]:
                queue.popleft()
        number += 1
    return None


def _batches(calls: Calls) -> list[list[Mapping[str, Any]]]:
    """Calls one by one, messages with those of the same batch."""
    out: list[list[Mapping[str, Any]]] = []
    last: object = None
    for call in calls:
        batch = call.get("batch")
        if batch is not None and batch == last:
            out[-1].append(call)
        else:
            out.append([call])
        last = batch
    return out


def _meet_all(heads: Mapping[int, list[Mapping[str, Any]]]) -> bool:
    """A call of all members at every head; it is taken from them."""
    if any(len(head) != 1 or head[0]["op"] in MESSAGES for head in heads.values()):
        return False
    calls = {rank: head[0] for rank, head in heads.items()}
    if len({_kind(call) for call in calls.values()}) > 1 or not _splits_fit(calls):
        return False
    for head in heads.values():
        head.clear()
    return True


def _kind(call: Mapping[str, Any]) -> str:
    """What must be equal on all members: the operation and, but for uneven rows, types and sizes."""
    if call["op"] == "alltoall_base":
        return json.dumps([call["op"], [dtype for _, dtype in call["sizes"]]])
    return json.dumps([call["op"], call["sizes"]])


def _splits_fit(calls: Mapping[int, Mapping[str, Any]]) -> bool:
    """Rows that each sends are those that the other expects. `splits`: of what comes, of what goes."""
    if any(call["op"] != "alltoall_base" for call in calls.values()):
        return True
    for i, (_, sender) in enumerate(sorted(calls.items())):
        for j, (_, receiver) in enumerate(sorted(calls.items())):
            comes, goes = receiver["splits"][0], sender["splits"][1]
            if len(comes) == len(goes) == len(calls) and comes[i] != goes[j]:
                return False
    return True


def _meet_messages(heads: Mapping[int, list[Mapping[str, Any]]]) -> bool:
    """Some message at the heads whose other half is there too; both are taken from their batches."""
    for rank, head in heads.items():
        for call in head:
            other = heads.get(call.get("peer", -1), [])
            wanted = {"send": "recv", "recv": "send"}.get(call["op"])
            half = next(
                (c for c in other if c["op"] == wanted and c["peer"] == rank and c["sizes"] == call["sizes"]), None
            )
            if half is not None:
                head.remove(call)
                other.remove(half)
                return True
    return False


def _words(head: list[Mapping[str, Any]]) -> str:
    if not head:
        return "nothing more"
    call = head[0]
    sizes = ", ".join(f"{n} {dtype.removeprefix('torch.')}" for n, dtype in call["sizes"])
    peer = f" rank {call['peer']}" if "peer" in call else ""
    return f"{call['op']}{peer} ({sizes}) in {call['phase']}"

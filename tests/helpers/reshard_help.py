"""Hand-made plans and layouts. (Drawn ones, and their oracle, are in `phalanx_lab/bench/reshard/drawn.py`.)"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.plan.layout.parameters import Box
from phalanx.plan.reshard.types import Hop, Hosts, Move, MovePart, Reduction
from phalanx_lab.bench.reshard.drawn import DTYPES as DTYPES, SENTINEL as SENTINEL


@dataclass(frozen=True)
class HandPlan:
    """A plan written down by hand: what an executor reads of one."""

    moves: tuple[Move, ...]
    hosts: Hosts
    hops: tuple[Hop, ...]
    reductions: tuple[Reduction, ...] = ()
    kept: dict[int, tuple[MovePart, ...]] = field(default_factory=dict)
    message_bytes: int = 1 << 20
    open_hops: int = 2
    hash: str = "0" * 64

    def program(self, rank):
        return tuple(h for h in self.hops if rank in (h.src, h.dst))

    def copies(self, rank):
        return self.kept.get(rank, ())


def box(*runs):
    """Box of (start, stop) pairs."""
    return Box(tuple(a for a, _ in runs), tuple(b - a for a, b in runs))


def equal_hosts(host_of_rank):
    count = max(host_of_rank) + 1
    return Hosts(host_of_rank=tuple(host_of_rank), send_bytes_per_s=(1.0,) * count, recv_bytes_per_s=(1.0,) * count)

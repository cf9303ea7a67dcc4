"""Moves to plan, and an oracle that follows a plan's messages with whole logical tensors in NumPy: plain, slow, obviously right."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.layout.mesh.placements import Partial, Placement, Ragged, Replicate, Shard, Strided, mesh_layout
from phalanx.plan.layout.state import StateLayouts
from phalanx.plan.layout.tensors import TensorLayout
from phalanx.plan.reshard.plan import ReshardPlan
from phalanx.plan.reshard.types import WHOLE, Hosts, Move

LONGEST = {1: 40, 2: 12, 3: 7, 4: 5}


def equal_hosts(count: int, per_host: int, *, rate: float = 1.0) -> Hosts:
    ranks = tuple(rank // per_host for rank in range(count * per_host))
    return Hosts(host_of_rank=ranks, send_bytes_per_s=(rate,) * count, recv_bytes_per_s=(rate,) * count)


def shard_layouts(state: StateLayouts, **options: Any) -> dict[str, TensorLayout]:
    """What the ranks of a folding keep of each parameter's optimizer state, all of them together."""
    of_ranks = [(state.first_rank + rank, state.shards_of(rank, **options)) for rank in range(state.folding.world)]
    out = {}
    for name, param in state.params.items():
        ranks, held, shapes = zip(*((rank, *of[name]) for rank, of in of_ranks if name in of), strict=True)
        out[name] = TensorLayout(shape=param.shape, ranks=ranks, held=held, local_shapes=shapes)
    return out


def random_layout(draw: random.Random, shape: tuple[int, ...], first_rank: int, *, partial: bool) -> TensorLayout:
    """One to three mesh axes; uneven, strided, ragged, replicated, in any order of axes."""
    sizes = tuple(draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 3)))
    placements: list[Placement] = []
    for size in sizes:
        kind, dim = draw.random(), draw.randrange(len(shape))
        if partial and kind < 0.3:
            placements.append(Partial())
        elif kind < 0.55:
            placements.append(Shard(dim))
        elif kind < 0.7:
            placements.append(Strided(dim, draw.randint(1, 3)))
        elif kind < 0.8 and not any(isinstance(p, (Shard, Strided, Ragged)) and p.dim == dim for p in placements):
            cuts = sorted(draw.randint(0, shape[dim]) for _ in range(size - 1))
            bounds = [0, *cuts, shape[dim]]
            placements.append(Ragged(dim, tuple(b - a for a, b in itertools.pairwise(bounds))))
        else:
            placements.append(Replicate())
    order = draw.sample(range(len(sizes)), len(sizes))
    order.sort(key=lambda axis: not isinstance(placements[axis], Ragged))  # a ragged cut is the first of its dim
    ranks = draw.sample(range(first_rank, first_rank + math.prod(sizes)), math.prod(sizes))
    return mesh_layout(shape, sizes, placements, ranks=ranks, order=order)


def random_moves(draw: random.Random) -> tuple[list[Move], Hosts]:
    """One to three tensors between meshes that may overlap, on hosts with links of their own."""
    moves = []
    for number in range(draw.randint(1, 3)):
        dims = draw.randint(1, 4)
        shape = tuple(draw.randint(1, LONGEST[dims]) for _ in range(dims))
        src = random_layout(draw, shape, 0, partial=draw.random() < 0.2)
        dst = random_layout(draw, shape, draw.choice((0, 2, len(src.ranks))), partial=False)
        moves.append(Move(name=f"w{number}", itemsize=draw.choice((2, 4)), src=src, dst=dst))
    world = max(rank for move in moves for rank in (*move.src.ranks, *move.dst.ranks)) + 1
    per_host = draw.choice((1, 2, 4))
    count = -(-world // per_host)
    equal = draw.random() < 0.5
    hosts = Hosts(
        host_of_rank=tuple(rank // per_host for rank in range(world)),
        send_bytes_per_s=tuple(1.0 if equal else draw.uniform(0.25, 1.0) for _ in range(count)),
        recv_bytes_per_s=tuple(1.0 if equal else draw.uniform(0.25, 1.0) for _ in range(count)),
    )
    return moves, hosts


class Oracle:
    """Every rank's copy of every logical tensor, -1 where it has nothing."""

    def __init__(self, plan: ReshardPlan) -> None:
        self.plan = plan
        rng = np.random.default_rng(0)
        self.terms = [rng.integers(1, 1000, (m.src.num_terms, *m.src.shape)) for m in plan.moves]
        self.whole = [terms.sum(axis=0) for terms in self.terms]
        self.got: dict[tuple[int, int], NDArray[np.int64]] = {}
        self.sums: dict[tuple[int, int], NDArray[np.int64]] = defaultdict(lambda: np.zeros(0, dtype=np.int64))

    def source(self, rank: int, move: int) -> NDArray[np.int64]:
        """What a rank holds of its term."""
        layout = self.plan.moves[move].src
        out = np.full(layout.shape, -1)
        for held in layout.of_rank(rank):
            out[held.box.slices()] = self.terms[move][layout.term_of(rank)][held.box.slices()]
        return out

    def target(self, rank: int, move: int) -> NDArray[np.int64]:
        return self.got.setdefault((rank, move), np.full(self.plan.moves[move].dst.shape, -1))

    def incoming(self, rank: int, move: int) -> NDArray[np.int64]:
        """Terms that a rank has, its own among them."""
        key = rank, move
        if key not in self.sums:
            self.sums[key] = np.full(self.terms[move].shape, -1)
            layout = self.plan.moves[move].src
            if rank in layout.ranks:
                self.sums[key][layout.term_of(rank)] = self.source(rank, move)
        return self.sums[key]

    def run(self) -> None:
        """Follow copies and messages; every value that is sent must be there."""
        for rank in range(len(self.plan.hosts.host_of_rank)):
            for part in self.plan.copies(rank):
                values = self.source(rank, part.move)[part.box.slices()]
                assert (values >= 0).all()
                self.target(rank, part.move)[part.box.slices()] = values
        for hop in self.plan.hops:
            for part in hop.parts:
                at = part.box.slices()
                if part.term != WHOLE:
                    assert self.plan.moves[part.move].src.term_of(hop.src) == part.term
                    values = self.source(hop.src, part.move)[at]
                    self.incoming(hop.dst, part.move)[part.term][at] = values
                else:
                    values = self._value(hop.src, part.move)[at]
                    assert (self.target(hop.dst, part.move)[at] == -1).all(), "twice"
                    self.target(hop.dst, part.move)[at] = values
                assert (values >= 0).all(), "sent before it was there"
        self._finish()

    def _value(self, rank: int, move: int) -> NDArray[np.int64]:
        """Whole values that a rank has: of its source, received, or added."""
        out = self.target(rank, move).copy()
        if self.plan.moves[move].src.num_terms == 1:
            source = self.source(rank, move)
            return np.where(out >= 0, out, source)
        terms = self.incoming(rank, move)
        complete = (terms >= 0).all(axis=0)
        for reduction in self.plan.reductions:
            if (reduction.rank, reduction.move) == (rank, move):
                at = reduction.box.slices()
                out[at] = np.where(complete[at], terms.sum(axis=0)[at], out[at])
        return out

    def _finish(self) -> None:
        for number, move in enumerate(self.plan.moves):
            for rank in move.dst.ranks:
                value = self._value(rank, number) if move.src.num_terms > 1 else self.target(rank, number)
                for held in move.dst.of_rank(rank):
                    at = held.box.slices()
                    assert (value[at] == self.whole[number][at]).all(), (rank, move.name)


def follow(plan: ReshardPlan) -> None:
    """Raise `AssertionError` where a plan does not bring every rank exactly what it needs."""
    Oracle(plan).run()

"""Random moves between layouts, a slicing oracle for them, and hand-made plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from phalanx.plan.layout.mesh.placements import Partial, Ragged, Replicate, Shard, Strided, mesh_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout
from phalanx.plan.reshard.plan import METHODS
from phalanx.plan.reshard.types import Hop, Hosts, Move, MovePart, Reduction

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.float16,
    torch.uint8,
    torch.bool,
)
SENTINEL = 113


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


# ---- random moves --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    seed: int
    moves: tuple[Move, ...]
    dtypes: tuple[torch.dtype, ...]
    hosts: Hosts
    method: str
    message_bytes: int | None
    open_hops: int
    staging_bytes: int | None


def random_case(seed, *, world=8):
    rng = np.random.default_rng(seed)
    hosts = random_hosts(rng, world)
    moves, dtypes = [], []
    for i in range(int(rng.integers(1, 3))):
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        shape = random_shape(rng)
        src_ranks, dst_ranks = random_ranks(rng, world)
        partial = rng.random() < 0.25 and dtype != torch.bool
        src = random_layout(rng, shape, src_ranks, partial=partial)
        dst = random_layout(rng, shape, dst_ranks, partial=False)
        moves.append(Move(name=f"t{i}", itemsize=dtype.itemsize, src=src, dst=dst))
        dtypes.append(dtype)
    return Case(
        seed=seed,
        moves=tuple(moves),
        dtypes=tuple(dtypes),
        hosts=hosts,
        method="best" if rng.random() < 0.7 else METHODS[int(rng.integers(len(METHODS)))],
        message_bytes=(None, 16, 64, 256, 1000)[int(rng.integers(5))],
        open_hops=int(rng.integers(1, 5)),
        staging_bytes=None if rng.random() < 0.8 else int(rng.integers(16, 500)),
    )


def random_hosts(rng, world):
    """Up to four hosts, in any order of ranks; links equal or not."""
    count = int(rng.integers(1, 5))
    of = rng.permutation(np.r_[np.arange(count), rng.integers(0, count, world - count)]).tolist()
    rates = (1.0,) * count if rng.random() < 0.5 else tuple(rng.uniform(0.25, 1.0, count).tolist())
    return Hosts(host_of_rank=tuple(of), send_bytes_per_s=rates, recv_bytes_per_s=rates)


def random_shape(rng):
    dims = int(rng.integers(1, 5))
    return tuple(int(rng.integers(1, (40, 17, 9, 6)[dims - 1])) for _ in range(dims))


def random_ranks(rng, world):
    """Disjoint, or any two sets of ranks; in any order."""
    order = rng.permutation(world).tolist()
    if rng.random() < 0.5:
        cut = int(rng.integers(1, world))
        return order[:cut], order[cut:]
    other = rng.permutation(world).tolist()
    return order[: int(rng.integers(1, world + 1))], other[: int(rng.integers(1, world + 1))]


def random_layout(rng, shape, ranks, *, partial):
    sizes = random_mesh(rng, len(ranks))
    ranks = ranks[: math.prod(sizes)]
    placements = [random_placement(rng, shape, size) for size in sizes]
    if partial:
        placements[int(rng.integers(len(sizes)))] = Partial()
    order = rng.permutation(len(sizes)).tolist()
    seen = set()
    for axis in order:  # given sizes must be of the whole dim
        dim = getattr(placements[axis], "dim", None)
        if isinstance(placements[axis], Ragged) and dim in seen:
            placements[axis] = Shard(dim)
        seen.add(dim)
    return mesh_layout(shape, sizes, placements, ranks=ranks, order=order)


def random_mesh(rng, count):
    """Sizes of 1 to 3 axes for at most `count` ranks."""
    while True:
        sizes = tuple(int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4))))
        if math.prod(sizes) <= count:
            return sizes


def random_placement(rng, shape, size):
    dim = int(rng.integers(len(shape)))
    kind = rng.random()
    if kind < 0.4:
        return Shard(dim)
    if kind < 0.6:
        return Strided(dim, int(rng.integers(1, 4)))
    if kind < 0.75:
        cuts = np.sort(rng.integers(0, shape[dim] + 1, size - 1))
        return Ragged(dim, tuple(np.diff([0, *cuts, shape[dim]]).tolist()))
    return Replicate()


# ---- the oracle ----------------------------------------------------------------------------------------------------------------


def logical_terms(case, number):
    """Every term of tensor `number`, whole: (num_terms, *shape), no two neighbours equal."""
    move, dtype = case.moves[number], case.dtypes[number]
    shape = (move.src.num_terms, *move.src.shape)
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    n = torch.arange(math.prod(shape)).view(shape)
    return (n * 7 + 3).to(dtype)


def whole(terms):
    """The sum of the terms in their order, 16-bit types in fp32 and rounded once."""
    wide = terms.float() if terms.dtype in (torch.bfloat16, torch.float16) else terms
    total = wide[0].clone()
    for term in wide[1:]:
        total += term
    return total.to(terms.dtype)


def local_of(full, layout: TensorLayout, rank):
    """What a rank holds of a whole tensor; None where it is not in the layout."""
    if rank not in layout.ranks:
        return None
    at = layout.ranks.index(rank)
    out = torch.full(layout.local_shapes[at], SENTINEL).to(full.dtype)
    for held in layout.held[at]:
        out[held.local_box().slices()] = full[held.box.slices()]
    return out


def sources(case, rank):
    out = []
    for number, move in enumerate(case.moves):
        terms = logical_terms(case, number)
        term = move.src.term_of(rank) if rank in move.src.ranks else 0
        out.append(local_of(terms[term], move.src, rank))
    return out


def wanted(case, rank):
    return [local_of(whole(logical_terms(case, n)), m.dst, rank) for n, m in enumerate(case.moves)]


def prefilled(case, rank):
    """Destinations full of a sentinel."""
    return [
        torch.full(m.dst.local_shapes[m.dst.ranks.index(rank)], SENTINEL).to(d) if rank in m.dst.ranks else None
        for m, d in zip(case.moves, case.dtypes, strict=True)
    ]


def same(a, b):
    """Bitwise, None included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def held_whole(shape):
    return Held(Box((0,) * len(shape), tuple(shape)), (0,) * len(shape))

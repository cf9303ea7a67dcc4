"""Moves between drawn layouts, a slicing oracle for them, and tensors that lie awkwardly in memory.

Decides nothing about moving. Must never change: a case is a function of its seed (and of `world` and `odd`) alone. `odd` cases have tensors of no dims,
of no elements and of complex numbers as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.plan.layout.mesh.placements import Partial, Placement, Ragged, Replicate, Shard, Strided, mesh_layout
from phalanx.plan.layout.tensors import TensorLayout
from phalanx.plan.reshard.plan import METHODS
from phalanx.plan.reshard.types import Hosts, Move

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

# ---- random moves --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnMove:
    """Tensors that move together, and how their move is planned."""

    seed: int
    moves: tuple[Move, ...]
    dtypes: tuple[torch.dtype, ...]
    hosts: Hosts
    method: str
    message_bytes: int | None
    open_hops: int
    staging_bytes: int | None


def random_case(seed: int, *, world: int = 8, odd: bool = False) -> DrawnMove:
    """Case of a seed."""
    rng = np.random.default_rng(seed)
    kinds = (*DTYPES, torch.complex64) if odd else DTYPES
    hosts = random_hosts(rng, world)
    moves, dtypes = [], []
    for i in range(int(rng.integers(1, 3))):
        dtype = kinds[int(rng.integers(len(kinds)))]
        shape = random_shape(rng, odd=odd)
        src_ranks, dst_ranks = random_ranks(rng, world)
        partial = rng.random() < 0.25 and dtype != torch.bool
        src = random_layout(rng, shape, src_ranks, partial=partial)
        dst = random_layout(rng, shape, dst_ranks, partial=False)
        moves.append(Move(name=f"t{i}", itemsize=dtype.itemsize, src=src, dst=dst))
        dtypes.append(dtype)
    return DrawnMove(
        seed=seed,
        moves=tuple(moves),
        dtypes=tuple(dtypes),
        hosts=hosts,
        method="best" if rng.random() < 0.7 else METHODS[int(rng.integers(len(METHODS)))],
        message_bytes=(None, 16, 64, 256, 1000)[int(rng.integers(5))],
        open_hops=int(rng.integers(1, 5)),
        staging_bytes=None if rng.random() < 0.8 else int(rng.integers(16, 500)),
    )


def random_hosts(rng: np.random.Generator, world: int) -> Hosts:
    """Up to four hosts, in any order of ranks; links equal or not."""
    count = int(rng.integers(1, 5))
    of = rng.permutation(np.r_[np.arange(count), rng.integers(0, count, world - count)]).tolist()
    rates = (1.0,) * count if rng.random() < 0.5 else tuple(rng.uniform(0.25, 1.0, count).tolist())
    return Hosts(host_of_rank=tuple(of), send_bytes_per_s=rates, recv_bytes_per_s=rates)


def random_shape(rng: np.random.Generator, *, odd: bool = False) -> tuple[int, ...]:
    """One to four dims; `odd`: none, too, and some of no size, or of one."""
    dims = int(rng.integers(0 if odd else 1, 5))
    shape = [int(rng.integers(1, (40, 17, 9, 6)[dims - 1])) for _ in range(dims)]
    for dim in range(dims):
        if odd and rng.random() < 0.3:
            shape[dim] = int(rng.random() < 0.7)
    return tuple(shape)


def random_ranks(rng: np.random.Generator, world: int) -> tuple[list[int], list[int]]:
    """Disjoint, or any two sets of ranks; in any order."""
    order = rng.permutation(world).tolist()
    if rng.random() < 0.5:
        cut = int(rng.integers(1, world))
        return order[:cut], order[cut:]
    other = rng.permutation(world).tolist()
    return order[: int(rng.integers(1, world + 1))], other[: int(rng.integers(1, world + 1))]


def random_layout(
    rng: np.random.Generator, shape: tuple[int, ...], ranks: Sequence[int], *, partial: bool
) -> TensorLayout:
    """Over a mesh of some of the ranks."""
    sizes = random_mesh(rng, len(ranks))
    ranks = ranks[: math.prod(sizes)]
    placements: list[Placement] = [random_placement(rng, shape, size) for size in sizes]
    if partial:
        placements[int(rng.integers(len(sizes)))] = Partial()
    order = rng.permutation(len(sizes)).tolist()
    seen = set[int]()
    for axis in order:  # given sizes must be of the whole dim
        placement = placements[axis]
        if isinstance(placement, Replicate | Partial):
            continue
        if isinstance(placement, Ragged) and placement.dim in seen:
            placements[axis] = Shard(placement.dim)
        seen.add(placement.dim)
    return mesh_layout(shape, sizes, placements, ranks=ranks, order=order)


def random_mesh(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """Sizes of 1 to 3 axes for at most `count` ranks."""
    while True:
        sizes = tuple(int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4))))
        if math.prod(sizes) <= count:
            return sizes


def random_placement(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> Placement:
    """Along any dim; replicated where there is none."""
    if not shape:
        return Replicate()
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


def logical_terms(case: DrawnMove, number: int) -> torch.Tensor:
    """Every term of tensor `number`, whole: (num_terms, *shape), no two neighbours equal."""
    move, dtype = case.moves[number], case.dtypes[number]
    shape = (move.src.num_terms, *move.src.shape)
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    n = torch.arange(math.prod(shape)).view(shape)
    return (n * 7 + 3).to(dtype)


def whole(terms: torch.Tensor) -> torch.Tensor:
    """The sum of the terms in their order, 16-bit types in fp32 and rounded once."""
    wide = terms.float() if terms.dtype in (torch.bfloat16, torch.float16) else terms
    total = wide[0].clone()
    for term in wide[1:]:
        total += term
    return total.to(terms.dtype)


def local_of(full: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor | None:
    """What a rank holds of a whole tensor; None where it is not in the layout."""
    if rank not in layout.ranks:
        return None
    at = layout.ranks.index(rank)
    out = torch.full(layout.local_shapes[at], SENTINEL).to(full.dtype)
    for held in layout.held[at]:
        out[held.local_box().slices()] = full[held.box.slices()]
    return out


def sources(case: DrawnMove, rank: int) -> list[torch.Tensor | None]:
    """What the rank holds before."""
    out = []
    for number, move in enumerate(case.moves):
        terms = logical_terms(case, number)
        term = move.src.term_of(rank) if rank in move.src.ranks else 0
        out.append(local_of(terms[term], move.src, rank))
    return out


def wanted(case: DrawnMove, rank: int) -> list[torch.Tensor | None]:
    """What it must hold afterwards."""
    return [local_of(whole(logical_terms(case, n)), m.dst, rank) for n, m in enumerate(case.moves)]


def prefilled(case: DrawnMove, rank: int) -> list[torch.Tensor | None]:
    """Destinations full of a sentinel."""
    return [
        torch.full(m.dst.local_shapes[m.dst.ranks.index(rank)], SENTINEL).to(d) if rank in m.dst.ranks else None
        for m, d in zip(case.moves, case.dtypes, strict=True)
    ]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bitwise, None included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        *(x.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b))
    )


# ---- memory --------------------------------------------------------------------------------------------------------------------


def awkward(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The same values in memory that is not one run in order: transposed, with holes, at an odd place, of any stride, conjugate."""
    kind = int(rng.integers(6))
    if kind == 0 and x.dim() > 1:
        order = rng.permutation(x.dim()).tolist()
        return x.permute(order).contiguous().permute(np.argsort(order).tolist())
    if kind == 1 and x.dim():
        return x.repeat_interleave(2, dim=-1)[..., ::2] if x.shape[-1] else x
    if kind == 2:
        room = x.new_empty(x.numel() + 3)
        return room[3:].view(x.shape).copy_(x)
    if kind == 3 and x.numel() == 1:
        room = x.new_empty(9)
        return room.as_strided(x.shape, [int(n) for n in rng.integers(0, 5, x.dim())], 2).copy_(x)
    if kind == 4 and x.is_complex():
        return x.conj().resolve_conj().conj()
    if kind == 5 and x.dim() > 1 and x.shape[0] > 1:
        return x.flip(0).contiguous().flip(0).transpose(0, -1).contiguous().transpose(0, -1)
    return x

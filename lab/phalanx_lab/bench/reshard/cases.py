"""Cases for planners of moves between layouts: the nine of arXiv 2211.05322, random ones, and a state of 47,397 tensors.

Decides what is measured, not how. Must never change: a random case depends on its seed and number alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.plan.layout.mesh.placements import Placement, Replicate, Shard, mesh_layout, read_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout
from phalanx.plan.reshard.types import Hosts, Move, equal_hosts

PAPER = (1024, 1024, 512)
NINE = (
    ("2x4 S0RR", "2x4 S0RR", PAPER),
    ("2x4 RRR", "2x4 S0RR", PAPER),
    ("2x4 RS0R", "2x4 S0RR", PAPER),
    ("2x4 RS01R", "2x4 S01RR", PAPER),
    ("2x4 S1RR", "2x4 S0RR", PAPER),
    ("2x4 S0RR", "3x4 S0RR", (3072, 1024, 170)),
    ("1x4 S01RR", "2x4 RRR", PAPER),
    ("1x4 S01RR", "2x4 RRR", PAPER),
    ("2x4 RS0R", "2x4 RRS0", PAPER),
)
"""Source, destination, shape; int32, four ranks a host. Seven and eight are the same in the authors' artifact."""


ROWS: dict[int, tuple[int, ...]] = {1: (16384,), 2: (64,), 3: ()}
"""Rows of a last dim that is not split, by the number of dims that may be split. Tensors of a few hundred bytes measure latency,
which no planner of bandwidth can help."""


@dataclass(frozen=True)
class ReshardCase:
    """Tensors to move over hosts."""

    label: str
    moves: tuple[Move, ...]
    hosts: Hosts


def even_hosts(num_hosts: int, ranks_per_host: int, *, rate: float = 1.0) -> Hosts:
    """Hosts with the same number of consecutive ranks and the same links."""
    return equal_hosts([rank // ranks_per_host for rank in range(num_hosts * ranks_per_host)], rate=rate)


def nine_cases(*, rate: float = 1.0) -> list[ReshardCase]:
    """The paper's multi-device cases."""
    cases = []
    for number, (source, target, shape) in enumerate(NINE, 1):
        src = read_layout(source, shape)
        dst = read_layout(target, shape, first_rank=len(src.ranks))
        hosts = even_hosts((len(src.ranks) + len(dst.ranks)) // 4, 4, rate=rate)
        cases.append(ReshardCase(f"case {number}", (Move(name="x", itemsize=4, src=src, dst=dst),), hosts))
    return cases


def random_cases(seed: int, *, unequal_links: bool = False) -> Iterator[ReshardCase]:
    """Endless cases of one to three dims between disjoint meshes, whose axes may cut across hosts."""
    number = 0
    while True:
        yield _random_case(random.Random(f"{seed}/{number}/{unequal_links}"), number, unequal_links=unequal_links)
        number += 1


def _random_case(draw: random.Random, number: int, *, unequal_links: bool) -> ReshardCase:
    per_host = draw.choice((2, 4, 8))
    src_hosts = draw.randint(2 if unequal_links else 1, 8)
    dst_hosts = draw.randint(1, 8)
    shape = tuple(round(math.exp(draw.uniform(math.log(16), math.log(1100)))) for _ in range(draw.randint(1, 3)))
    dims = len(shape)
    shape += ROWS[dims]
    src = _random_layout(draw, shape, dims, (src_hosts, per_host), first_rank=0)
    dst = _random_layout(draw, shape, dims, (dst_hosts, per_host), first_rank=src_hosts * per_host)
    hosts = even_hosts(src_hosts + dst_hosts, per_host)
    if unequal_links:
        rates = tuple(draw.uniform(0.25 if host < src_hosts else 0.5, 1.0) for host in range(hosts.count))
        hosts = Hosts(host_of_rank=hosts.host_of_rank, send_bytes_per_s=rates, recv_bytes_per_s=rates)
    label = f"#{number}: {shape} on {src_hosts} -> {dst_hosts} hosts x {per_host}"
    return ReshardCase(label, (Move(name="x", itemsize=4, src=src, dst=dst),), hosts)


def _random_layout(
    draw: random.Random, shape: tuple[int, ...], dims: int, sizes: tuple[int, int], *, first_rank: int
) -> TensorLayout:
    """Each mesh axis splits one of the first `dims` dims, or replicates; the mesh is hosts x ranks or has another shape."""
    world = math.prod(sizes)
    if draw.random() < 0.5:
        first = draw.choice([d for d in range(1, world + 1) if world % d == 0])
        sizes = (first, world // first)
    placements: list[Placement] = [Shard(draw.randrange(dims)) if draw.random() < 0.8 else Replicate() for _ in sizes]
    order = draw.sample(range(2), 2)
    return mesh_layout(shape, sizes, placements, ranks=range(first_rank, first_rank + world), order=order)


# ---- scale ----------------------------------------------------------------------------------------------------------------------


def wide_case() -> ReshardCase:
    """Every rank has a part of what every rank needs: ranks x ranks unit tasks."""
    ranks, shape = 512, (8192, 8192)
    src = read_layout(f"{ranks // 8}x8 S01R", shape)
    dst = read_layout(f"{ranks // 8}x8 RS01", shape, first_rank=ranks)
    return ReshardCase(
        f"{ranks} -> {ranks} S01R -> RS01",
        (Move(name="x", itemsize=2, src=src, dst=dst),),
        even_hosts(ranks // 4, 8, rate=400e9),
    )


STAGES, STAGE_RANKS, TENSOR_PARALLEL, REPLICAS = 16, 16, 32, 8
LAYERS, EXPERTS, HIDDEN, FFN, LATENT = 61, 256, 7168, 2048, 512


def large_state() -> tuple[ReshardCase, list[list[Move]]]:
    """A state in the shape of DeepSeek-V3 (47,397 tensors), from pp 16 x ep 16 on 256 ranks to tp 32 x dp 8 on another 256. Also by stage.

    In the source the layers are dealt over 16 stages of 16 ranks: each expert on one rank, all else on each rank of its stage. In the
    destination the large matrices are cut over 32 ranks, and there are 8 such groups; the small ones are everywhere.
    """
    made: dict[tuple[object, ...], TensorLayout] = {}

    def kept(key: tuple[object, ...], layout: TensorLayout) -> TensorLayout:
        return made.setdefault(key, layout)

    def on(shape: tuple[int, ...], ranks: range) -> TensorLayout:
        if (shape, ranks) in made:
            return made[shape, ranks]
        held = (Held(Box((0,) * len(shape), shape), (0,) * len(shape)),)
        return kept(
            (shape, ranks),
            TensorLayout(
                shape=shape, ranks=tuple(ranks), held=(held,) * len(ranks), local_shapes=(shape,) * len(ranks)
            ),
        )

    first = STAGES * STAGE_RANKS
    target = range(first, first + TENSOR_PARALLEL * REPLICAS)

    def over(shape: tuple[int, ...], dim: int | None) -> TensorLayout:
        if ("to", shape, dim) in made:
            return made["to", shape, dim]
        inner = Replicate() if dim is None else Shard(dim)
        return kept(
            ("to", shape, dim), mesh_layout(shape, (REPLICAS, TENSOR_PARALLEL), (Replicate(), inner), ranks=target)
        )

    by_stage: list[list[Move]] = [[] for _ in range(STAGES)]
    for name, shape, dim, stage, expert in _tensors():
        start = stage * STAGE_RANKS
        ranks = range(start, start + STAGE_RANKS)
        if expert is not None:
            rank = start + expert * STAGE_RANKS // EXPERTS
            ranks = range(rank, rank + 1)
        by_stage[stage].append(Move(name=name, itemsize=2, src=on(shape, ranks), dst=over(shape, dim)))
    hosts = even_hosts(2 * first // 8, 8, rate=400e9)
    return ReshardCase("pp16 x ep16 -> tp32 x dp8", tuple(m for one in by_stage for m in one), hosts), by_stage


def _tensors() -> Iterator[tuple[str, tuple[int, ...], int | None, int, int | None]]:
    """(name, shape, dim that is cut, stage, expert) of each tensor: 61 layers of 9 + 3 x 256."""
    for layer in range(LAYERS):
        stage = layer * STAGES // LAYERS
        for name, shape, dim in (*ATTENTION, *_mlp("shared")):
            yield f"layers.{layer}.{name}", shape, dim, stage, None
        for expert in range(EXPERTS):
            for name, shape, dim in _mlp(f"experts.{expert}"):
                yield f"layers.{layer}.{name}", shape, dim, stage, expert


ATTENTION: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("q_a", (1536, HIDDEN), None),
    ("q_b", (24576, 1536), 0),
    ("kv_a", (LATENT + 64, HIDDEN), None),
    ("kv_b", (32768, LATENT), 0),
    ("o", (HIDDEN, 16384), 1),
    ("router", (EXPERTS, HIDDEN), None),
)


def _mlp(name: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    yield f"{name}.gate", (FFN, HIDDEN), 0
    yield f"{name}.up", (FFN, HIDDEN), 0
    yield f"{name}.down", (HIDDEN, FFN), 1

"""Seconds of one MoE layer that runs tile by tile (`dispatch.overlap` of `tiles`, `fine`, `auto`): the executor's own plan on the constants of a cluster.

Decides which batch stands for all (every expert is chosen equally often, the fullest rank's load on all ranks alike) and what its pieces cost on the hardware; operations, their order, parts
and bytes are those of `plan/overlap*.py`, the clock is `plan/moe/overlap/prediction/clock.py: seconds_of`, of one rank whose peers do what it does. Must never change: `auto` takes
what the chooser of a run would take by the same seconds, and nothing that the plan does not have hides anything.

    a tile           two products of its rows by the cost oracle (each tile reads the weights of its expert), its activation, and a kernel's time for each kernel of `kernels/cpu/tiles.py`
    rows in memory   gathered for a tile, added up when a part is complete: a row is read and written
    the link         a message has its bytes over the rate of a rank's links and, once, what an all-to-all takes to start and to fill its pipes
    while bytes move products have the multiprocessors that messages leave (20 of them move rows, DeepEP)

T tokens of a rank, K experts of each, P = ep x etp ranks, E experts, G = E / ep slots of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from phalanx.plan.moe import DispatchPlan, Ints
from phalanx.plan.moe.overlap import CANDIDATES, MOST_BLOCKS
from phalanx.plan.moe.overlap.prediction import (
    MARGIN,
    SERIAL,
    LayerWork,
    OverlapCost,
    PassTime,
    Route,
    Traffic,
    WireBytes,
    choose_transport,
    link_s,
    pair_s,
    seconds_of,
    traffic_of,
    wire_bytes,
)
from phalanx.plan.moe.overlap.tiles import (
    RankPlan,
    TileSchedule,
    can_forward,
    joint_slots,
    parts_of,
    plan_overlap,
    tile_sizes,
)
from phalanx.simulate.hardware import BF16, GroupSpan, Network, Oracle, at, distinct

__all__ = [
    "TILE_WAYS",
    "LayerPass",
    "Pieces",
    "TileLayer",
    "ExpertWidths",
    "TileWay",
    "layer_passes",
    "link_cost",
    "num_tiles",
    "tile_pieces",
    "plan_of",
    "wire_of",
    "work_on",
]

TileWay = Literal["tiles", "fine", "auto"]
TILE_WAYS: tuple[TileWay, ...] = ("tiles", "fine", "auto")
Direction = Literal["forward", "backward"]
TILE_ROWS = 512
"""Rows of a tile, as `runtime/moe/overlap.py` cuts them."""
UNITS = MOST_BLOCKS
"""Products into which the second product of a tile is cut by columns (`kernels/cpu/tiles.py: column_units`)."""
FIRST_KERNELS: dict[Direction, int] = {"forward": 4, "backward": 12}
"""Kernels of a tile, besides its products and gathers: activation and row weights, backward with sums, as `kernels/cpu/tiles.py`
writes them out on a device."""
ROW_SMS = 20
"""Multiprocessors of a kernel that moves rows (DeepEP)."""
MOST_GATEWAY_RANKS = 64
"""Larger groups are not asked whether a copy for each host would pay: counting their messages takes seconds."""


@dataclass(frozen=True, kw_only=True)
class TileLayer:
    """What tiles, parts and bytes of a layer depend on."""

    tokens: int
    rows: int
    """Rows of a rank's tokens that go to experts: about T K."""
    top_k: int
    experts: int
    ep: int
    etp: int
    row_bytes: int
    ranks_per_host: int
    gateways: bool = False
    """Ranks of a host may pass on what comes from other hosts: on processors."""
    most_blocks: int = MOST_BLOCKS
    """Most blocks into which the columns of a row can be cut."""

    @property
    def size(self) -> int:
        return self.ep * self.etp

    @property
    def slots(self) -> int:
        return self.experts // self.ep

    @property
    def hosts(self) -> tuple[int, ...]:
        """Hosts of the group's ranks, which stand side by side."""
        return tuple(rank // self.ranks_per_host for rank in range(self.size))

    def rows_PG(self, experts: int | None = None) -> Ints:
        """(P, E) rows from each source to each expert, or to the first few: equal but for one, and the surplus goes round."""
        base, rest = divmod(self.rows, self.experts)
        shift = self.slots * (np.arange(self.size)[:, None] // self.etp)
        turn = (np.arange(self.experts if experts is None else experts) - shift) % self.experts
        rows: Ints = base + (turn < rest).astype(np.int64)
        return rows


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Seconds of one pass's pieces on a machine."""

    tiles: tuple[tuple[int, float, float], ...]
    """(rows, first product, second product) of a tile of so many rows."""
    slots: tuple[tuple[int, float], ...]
    """(rows, gradients of the weights) of a slot."""
    row_s: float
    """A row gathered or added up."""
    kernel_s: float
    """Once for each gather or sum."""
    shared_s: float
    """The shared expert."""
    link: OverlapCost


@dataclass(frozen=True)
class LayerPass:
    """One pass of a layer: its clock, and what of it is computing."""

    seconds: float
    compute_s: float
    """Operations of this rank by themselves, the shared expert among them."""
    communication_s: float
    """Its messages on the link, both ways, one after the other."""
    schedule: TileSchedule
    weights_s: float = 0.0
    """Part of `compute_s` for gradients of weights."""
    beside_s: float | None = None
    """What it is longer for beside the opposite pass of another micro-batch; None: it runs alone."""

    @property
    def exposed_s(self) -> float:
        """Longer than computing alone: waits, and products that messages slow down."""
        return self.seconds - self.compute_s if self.beside_s is None else self.beside_s


# ---- what the layer is ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _dispatch(layer: TileLayer) -> DispatchPlan:
    return DispatchPlan(tuple(range(layer.experts)), layer.ep, layer.etp, layer.rows_PG())


@lru_cache(maxsize=512)
def _traffic(layer: TileLayer) -> Traffic:
    """Expected counts: of the tokens that choose K different experts evenly, those that a rank, or a host, needs."""
    dispatch = _dispatch(layer)
    pairs = np.repeat(dispatch.rows_PG.reshape(layer.size, layer.ep, -1).sum(2), layer.etp, axis=1)
    kept = layer.rows / (layer.tokens * layer.top_k)
    wanted = layer.tokens * kept * distinct(layer.ep, layer.top_k, layer.experts) / layer.ep
    copies = np.clip(np.full_like(pairs, round(wanted)), -(-pairs // layer.slots), np.minimum(pairs, layer.tokens))
    hosts = layer.hosts
    num_hosts = hosts[-1] + 1
    to_host = layer.tokens * min(1.0, distinct(num_hosts, layer.top_k, layer.experts) / num_hosts)
    by_host = np.full((layer.size, num_hosts), max(int(copies.max()), round(to_host)), dtype=np.int64)
    return traffic_of(dispatch, copies, tokens_P=[layer.tokens] * layer.size, host_of_rank=hosts, copies_PH=by_host)


@lru_cache(maxsize=512)
def _route(layer: TileLayer) -> Route:
    """What a run takes: the least bytes between hosts, then in all."""
    among: list[Route] = ["all_to_all", "dedup"]
    if layer.gateways and can_forward(layer.hosts) and layer.size <= MOST_GATEWAY_RANKS:
        among.append("dedup_host")
    return choose_transport(_traffic(layer), row_bytes=layer.row_bytes, among=among).route


@lru_cache(maxsize=1024)
def wire_of(layer: TileLayer, direction: Direction) -> WireBytes:
    """Bytes of one pass, by the transport with the least of them."""
    return wire_bytes(_traffic(layer), _route(layer), row_bytes=layer.row_bytes, direction=direction)


@lru_cache(maxsize=2048)
def plan_of(layer: TileLayer, schedule: TileSchedule, direction: Direction, *, has_shared: bool = False) -> RankPlan:
    """The plan of the group's first rank, as its executor would make it of these counts."""
    return plan_overlap(
        _dispatch(layer),
        schedule,
        rank=0,
        tile_rows=TILE_ROWS,
        direction=direction,
        host_of_rank=layer.hosts,
        through_hosts=_route(layer) == "dedup_host",
        has_shared=has_shared,
    )


@lru_cache(maxsize=4096)
def _cut(layer: TileLayer) -> tuple[Counter[int], Counter[int]]:
    """Cut of the first rank: how many tiles of how many rows it computes, and slots of how many."""
    mine = layer.rows_PG(layer.slots)
    joint = [] if _route(layer) == "dedup_host" else list(joint_slots(_dispatch(layer), tile_rows=TILE_ROWS)[0])
    apart = np.delete(mine, joint, axis=1)
    tiles: Counter[int] = Counter()
    for rows, number in Counter([*apart.ravel().tolist(), *mine[:, joint].sum(0).tolist()]).items():
        for size in tile_sizes(rows, TILE_ROWS):
            tiles[size] += number
    return tiles, Counter(mine.sum(0).tolist())


def num_tiles(layer: TileLayer) -> tuple[int, int]:
    """Tiles and slots of the first rank."""
    return sum(_cut(layer)[0].values()), layer.slots


# ---- what it costs ----------------------------------------------------------------------------------------------------------------


def link_cost(
    network: Network, layer: TileLayer, *, num_bytes: float, taken: float, left_free: int | None = None
) -> OverlapCost:
    """The link as the clock of tiles takes it: an all-to-all of `num_bytes` a rank takes as long as `Network` says where nothing runs beside it.

    `taken`: the share of a device that messages take while they move; `left_free`: multiprocessors that products leave to them all along, and which they keep to (`dispatch.left_free`).
    """
    h, n = network.hardware, layer.size
    span = GroupSpan(min(n, layer.ranks_per_host), layer.hosts[-1] + 1)
    inside = at(h.inside_bytes_per_s, max(2, span.inside))
    bare = Network(replace(h, measured_links=(), measured_between=()))
    formula = bare.all_to_all(num_bytes, span)
    slower = network.all_to_all(num_bytes, span) / formula if formula else 1.0
    few = 1.0
    if left_free:
        few, taken = max(1.0, ROW_SMS / left_free), 0.0
    fill_s = h.inside_half_bytes / inside * (1 - 1 / n)
    rates: dict[str, float | None] = {"bytes_per_s": inside / (slower * few)}
    if span.hosts > 1:
        rates = {
            "bytes_per_s": h.between_bytes_per_s * h.between_efficiency / (slower * few),
            "near_bytes_per_s": inside / (slower * few),
        }
        fill_s = 0.0
    start = h.inside_latency_s + (h.between_latency_s if span.hosts > 1 else 0.0)
    return OverlapCost(
        latency_s=(start + fill_s) * slower,
        block_s=h.kernel_s,  # of the sum of one block more
        flops_by_rows=((1, 1.0),),  # seconds of products are the oracle's
        interference=taken / (1 - taken) if taken < 1 else 1e9,
        **rates,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True)
class ExpertWidths:
    """Widths of an expert on a rank."""

    hidden: int
    ffn: float
    matrices: int
    item: int = BF16
    """Bytes of an element."""


def tile_pieces(
    oracle: Oracle,
    layer: TileLayer,
    shape: ExpertWidths,
    link: OverlapCost,
    direction: Direction,
    *,
    shared_s: float,
    slower: float = 1.0,
) -> Pieces:
    """Seconds by the cost oracle. Backward, the first product is the gradient of the hidden rows, the second that of the input. `slower`: of products, which leave a part of the device to messages."""
    h, n, up = shape.hidden, shape.ffn, shape.matrices - 1
    tiles, slots = _cut(layer)
    forward = direction == "forward"
    kernel_s = oracle.hardware.kernel_s

    def tile(rows: int) -> tuple[int, float, float]:
        around = oracle.memory(
            (1.0 if forward else 5 / 3) * rows * shape.matrices * n * shape.item, kernels=FIRST_KERNELS[direction]
        )
        first = oracle.product(rows, up * n, h) if forward else oracle.product(rows, n, h)
        second = UNITS * oracle.product(rows, h / UNITS, n if forward else up * n)
        return rows, slower * first + around + kernel_s, slower * second

    def weights(rows: int) -> float:
        again = oracle.memory(2 * 2 * rows * layer.row_bytes, kernels=2 * layer.size)
        made = oracle.product(rows, up * n, h, accumulate=True) + oracle.product(rows, h, n, accumulate=True)
        return slower * made + again

    return Pieces(
        tiles=tuple(tile(rows) for rows in sorted(tiles)),
        slots=tuple((rows, 0.0 if forward else weights(rows)) for rows in sorted(slots)),
        row_s=2 * layer.row_bytes / oracle.bytes_per_s,
        kernel_s=kernel_s,
        shared_s=slower * shared_s,
        link=link,
    )


def work_on(plan: RankPlan, pieces: Pieces) -> LayerWork:
    """What the clock must know of a plan's parts."""
    of_rows = {rows: (first, second) for rows, first, second in pieces.tiles}
    of_slot = dict(pieces.slots)
    share, first_s, second_s, copy_s, sum_s = [], [], [], [], []
    slot_rows, joint = [0] * plan.num_slots, frozenset(plan.joint)
    for tiles, ends in zip(plan.tiles, plan.part_ends, strict=True):
        for tile in tiles:
            slot_rows[tile.slot] += tile.rows
        rows = [0, *accumulate(tile.rows for tile in tiles)]
        own = [tile.rows if tile.slot not in joint else 0 for tile in tiles]
        alone = [0, *accumulate(own)]
        firsts = [0.0, *accumulate(of_rows[n][0] if n else 0.0 for n in own)]
        seconds = [0.0, *accumulate(of_rows[n][1] if n else 0.0 for n in own)]
        cuts = [*pairwise((0, *ends))]
        share.append([(rows[b] - rows[a]) / rows[-1] for a, b in cuts])
        first_s.append([firsts[b] - firsts[a] for a, b in cuts])
        second_s.append([seconds[b] - seconds[a] for a, b in cuts])
        copy_s.append([(alone[b] - alone[a]) * pieces.row_s + pieces.kernel_s for a, b in cuts])
        sum_s.append([(rows[b] - rows[a]) * pieces.row_s + pieces.kernel_s for a, b in cuts])
    joint_s = {slot: (0.0, 0.0, slot_rows[slot] * pieces.row_s + pieces.kernel_s) for slot in plan.joint}
    for tile in plan.joint_tiles:
        first, second, copies = joint_s[tile.slot]
        more = of_rows[tile.rows]
        joint_s[tile.slot] = first + more[0], second + more[1], copies
    parts = parts_of(plan)
    weights = [of_slot[rows] for rows in slot_rows] if plan.direction == "backward" else []
    return LayerWork(
        rank=plan.rank,
        size=plan.size,
        come=parts.come,
        go=parts.go,
        share=share,
        first_s=first_s,
        second_s=second_s,
        copy_s=copy_s,
        sum_s=sum_s,
        weights_s=weights,
        shared_s=pieces.shared_s,
        blocks=plan.blocks,
        relay=parts.relay,
        joint_s=joint_s,
    )


@lru_cache(maxsize=8192)
def _clocked(layer: TileLayer, pieces: Pieces, schedule: TileSchedule, direction: Direction) -> tuple[float, float]:
    """Seconds on the clock, and of the operations by themselves."""
    plan = plan_of(layer, schedule, direction, has_shared=pieces.shared_s > 0)
    work = work_on(plan, pieces)
    alone = sum(work.seconds(op, pieces.link) for op in plan.ops)
    return seconds_of(plan.ops, work, pieces.link, wire_of(layer, direction)), alone


def _pair_s(layer: TileLayer, forward: Pieces, backward: Pieces, schedule: TileSchedule) -> float:
    """Seconds of both passes beside one another (`plan/moe/overlap/prediction/pair.py`)."""

    def of(pieces: Pieces, direction: Direction) -> PassTime:
        alone, computing = _clocked(layer, pieces, schedule, direction)
        return PassTime(alone, computing, link_s(0, pieces.link, wire_of(layer, direction)))

    return pair_s(of(forward, "forward"), of(backward, "backward"), forward.link)


@lru_cache(maxsize=4096)
def _chosen(layer: TileLayer, pieces: Pieces, backward: Pieces | None = None) -> TileSchedule:
    """Schedule chosen by the forward pass, as a run chooses; with `backward` by the pair of both."""

    def of(schedule: TileSchedule) -> float:
        if backward is None:
            return _clocked(layer, pieces, schedule, "forward")[0]
        return _pair_s(layer, pieces, backward, schedule)

    seconds = {s: of(s) for s in dict.fromkeys((SERIAL, *map(partial(_cut_to, layer), CANDIDATES)))}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - MARGIN) * seconds[SERIAL] else SERIAL


def _cut_to(layer: TileLayer, schedule: TileSchedule) -> TileSchedule:
    """Schedule with as many blocks as the columns of the layer can be cut into: an executor takes no more."""
    return replace(schedule, blocks=min(schedule.blocks, layer.most_blocks))


def layer_passes(
    layer: TileLayer,
    of: Callable[[Direction], Pieces],
    schedule: TileSchedule | None,
    *,
    puts_off: bool = False,
    bound: bool = False,
    paired: bool = False,
) -> tuple[LayerPass, LayerPass]:
    """Forward and backward, by a schedule, or by the one that the chooser takes (None). `puts_off`: gradients of weights are made by a later pass, so nothing hides beside them; their time is in the backward one.

    `bound`: what no schedule can beat, without a plan: all that is computed, or all bytes. `paired`: the two run beside one another, each with another micro-batch;
    what the pair is longer than all computing is shared out by messages.
    """
    forward, backward = of("forward"), of("backward")
    if bound and not paired:  # a pair hides more than either bound knows of
        return _bound(layer, forward), _bound(layer, backward)
    schedule = _cut_to(layer, schedule or _chosen(layer, forward, backward if paired else None))
    _, slots = _cut(layer)
    seconds, later = dict(backward.slots), 0.0
    weights_s = sum(number * seconds[rows] for rows, number in slots.items())
    if puts_off:
        later = weights_s
        backward = replace(backward, slots=tuple((rows, 0.0) for rows, _ in backward.slots))

    def timed(pieces: Pieces, direction: Direction, more: float = 0.0, weights: float = 0.0) -> LayerPass:
        clock, alone = _clocked(layer, pieces, schedule, direction)
        return LayerPass(clock + more, alone + more, _bytes_s(layer, pieces.link, direction), schedule, weights)

    passes = timed(forward, "forward"), timed(backward, "backward", later, weights_s)
    if not paired:
        return passes
    left = _pair_s(layer, forward, backward, schedule) - sum(one.compute_s for one in passes) + later
    bytes_s = sum(one.communication_s for one in passes)
    first, second = (replace(one, beside_s=left * one.communication_s / bytes_s) for one in passes)
    return first, second


def _bytes_s(layer: TileLayer, link: OverlapCost, direction: Direction) -> float:
    """Both ways over the busier of a rank's links."""
    wire = wire_of(layer, direction)
    hosts = np.asarray(wire.host_of_rank)
    if link.near_bytes_per_s is None:
        return float(wire.outbound_PP[0].sum() + wire.inbound_PP[0].sum()) / link.bytes_per_s
    out = 0.0
    for of_rank in (wire.outbound_PP[0], wire.inbound_PP[0]):
        far = of_rank[hosts != hosts[0]].sum() / link.bytes_per_s
        out += max(float(far), float(of_rank[hosts == hosts[0]].sum()) / link.near_bytes_per_s)
    return out


def _bound(layer: TileLayer, pieces: Pieces) -> LayerPass:
    """All tiles and slots, and rows gathered and added up once each: a plan has at least as many parts, and as many kernels."""
    tiles, slots = _cut(layer)
    of_rows, of_slot = {rows: a + b for rows, a, b in pieces.tiles}, dict(pieces.slots)
    compute = sum(number * (of_rows[rows] + 2 * rows * pieces.row_s) for rows, number in tiles.items())
    weights = sum(number * of_slot[rows] for rows, number in slots.items())
    compute += weights + pieces.shared_s
    return LayerPass(compute, compute, 0.0, SERIAL, weights)

"""Routed experts tile by tile as entries of a layer's ledger: what `block_time.py` adds up when `dispatch.overlap` is `tiles`, `fine` or `auto`.

Decides which of the plan's seconds count as experts, as imbalance, as exposed messages, and how many kernels the host starts for them. Must never change: the sum is that of the plan's clock and of
what stands before its first message and behind its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from phalanx.plan.moe.overlap import most_blocks, parse_overlap
from phalanx.simulate.hardware import Network, Oracle, distinct
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step.tile_time import (
    FIRST_KERNELS,
    ROW_SMS,
    TILE_WAYS,
    UNITS,
    Direction,
    ExpertWidths,
    LayerPass,
    Pieces,
    TileLayer,
    layer_passes,
    link_cost,
    num_tiles,
    tile_pieces,
)

Both = tuple[float, float]
"""Seconds forward and backward."""


@dataclass(frozen=True)
class LedgerEntries:
    """Entries of a ledger."""

    seconds: dict[str, Both]
    hidden: float
    weight_grad: float
    kernels: int


@dataclass(frozen=True)
class TiledExperts:
    """Experts of one job under one mapping. `bound`: what no plan can beat (`layer_passes`)."""

    job: Job
    mapping: Mapping
    oracle: Oracle
    network: Network
    bound: bool = False

    def layer(self, load: float) -> TileLayer:
        """What every rank has if each is as full as one whose rows are `load` times the even share."""
        s, f, h = self.job.spec, self.mapping.folding, self.oracle.hardware
        tokens = self.mapping.tokens(self.job) * load
        return TileLayer(
            tokens=max(1, round(tokens)),
            rows=max(1, round(tokens * s.top_k * self.mapping.rows_share(self.job))),
            top_k=s.top_k,
            experts=s.num_experts,
            ep=f.ep,
            etp=f.etp,
            row_bytes=s.hidden * self.mapping.item_bytes,
            ranks_per_host=h.ranks_per_host,
            gateways=h.sms is None,
            most_blocks=most_blocks(s.hidden),
        )

    def passes(self, layer: TileLayer, shared: Both) -> tuple[LayerPass, LayerPass]:
        """Passes on the clock. `shared`: seconds of the shared expert, which computes in a gap."""
        overlap = self.mapping.overlap
        assert overlap.ep in TILE_WAYS  # the only caller asks
        setting = parse_overlap(":".join([overlap.ep, *([overlap.tiles] if overlap.tiles else [])]))
        of = partial(self.pieces, layer, shared)
        return layer_passes(
            layer,
            of,
            None if setting.kind == "auto" else setting.schedule,
            puts_off=self.mapping.splits_backward,
            bound=self.bound,
            paired=overlap.paired,
        )

    def pieces(self, layer: TileLayer, shared: Both, direction: Direction) -> Pieces:
        s, f = self.job.spec, self.mapping.folding
        shape = ExpertWidths(
            hidden=s.hidden, ffn=s.expert_ffn / f.etp, matrices=s.ffn_matrices, item=self.mapping.item_bytes
        )
        link = link_cost(
            self.network,
            layer,
            num_bytes=layer.rows * layer.etp * layer.row_bytes,
            taken=self.oracle.hardware.share_of(ROW_SMS),
            left_free=self.mapping.overlap.left_free,
        )
        beside = shared[direction == "backward"]
        return tile_pieces(self.oracle, layer, shape, link, direction, shared_s=beside, slower=self._slower)

    @property
    def _slower(self) -> float:
        """How much longer products take on what they do not leave to messages (`dispatch.left_free`)."""
        free, sms = self.mapping.overlap.left_free, self.oracle.hardware.sms
        return sms / (sms - free) if free and sms is not None else 1.0

    def entries(self, shared: Both) -> LedgerEntries:
        """Everything between the router and the sum over ranks."""
        m, o = self.mapping, self.oracle
        load = m.load(self.job)
        even, hot = self.layer(1.0), self.layer(load)
        full = self.passes(hot, shared)
        calm = full if hot == even else self.passes(even, shared)
        alone = [one.compute_s - s for one, s in zip(calm, shared, strict=True)]
        late = [one.compute_s - other.compute_s for one, other in zip(full, calm, strict=True)]
        kind = "a2a_between" if hot.hosts[-1] else "a2a_inside"
        sends = hot.size - 1
        # rows are picked before the first message, entries added up behind the last: read and written once each
        copies = distinct(hot.ep, hot.top_k, hot.experts) * hot.etp * hot.tokens * hot.row_bytes
        around = o.memory(2 * copies, kernels=sends) + o.memory(copies + hot.tokens * hot.row_bytes, kernels=2)
        exposed = [one.exposed_s for one in full]
        tiles, slots = num_tiles(hot)
        kernels = {d: tiles * (FIRST_KERNELS[d] + 2 + UNITS) + 2 * hot.size for d in FIRST_KERNELS}
        seconds = {
            "experts": (alone[0], alone[1]),
            "imbalance": (late[0], late[1]),
            "memory": (around, around),
            kind: (exposed[0], exposed[1]),
        }
        return LedgerEntries(
            seconds=seconds,
            hidden=sum(max(0.0, one.communication_s - one.exposed_s) for one in full),
            weight_grad=full[1].weights_s,
            # the ledger takes a backward pass to have twice the kernels of a forward one
            kernels=sends + (kernels["forward"] + kernels["backward"] + slots * (2 + 2 * hot.size)) // 3,
        )

"""Experts with replicas: where they are in verification, and what must hold beyond the comparison with one rank.

    placement_of    random copies on random ranks (several of an expert on one rank among them), or those that the planner makes of the loads
    Listener        hears every dispatch: replicas of an expert differ by one row (exact mode: one chunk) at most, all ranks have made the same plan, how even the ranks' work is
    train_on        so many more steps; then all holders of an expert have the same bits

Must never change: a case in which no expert has two holders on different ranks, or no rank several slots of one, proves nothing and is an error.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from phalanx.core.errors import RunError
from phalanx.models import Block, TokenBatch
from phalanx.plan.mapping import AnyFolding, AnyPlacement, Folding, LayerPlacements, Placement, Stage, plain_placement
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.placement import ReplicaSettings, run_placement
from phalanx.runtime.comm import Axis
from phalanx.runtime.state import ShardedState
from phalanx.train.step import StepParts, train_step
from phalanx.verify.setups import Setup

NEARER = 2.0
"""How much nearer to 1 the busiest rank's share of work must come by replicas, where loads are skewed and replicas follow them."""


def placement_of(
    setup: Setup,
    folding: AnyFolding,
    stages: Sequence[Stage],
    rank: int,
    *,
    loads_LE: NDArray[np.int64] | None = None,
) -> AnyPlacement:
    """Where the rank's stage has its experts. `loads_LE` are those of the one-rank run, for the planner."""
    spec, asked = setup.spec, setup.replicas
    if asked is None or not spec.moe_layers:
        return plain_placement(max(spec.num_experts, 1), folding.of_rank(rank))
    if asked.kind == "planned":
        wish = ReplicaSettings(slots_per_rank=asked.slots_per_rank, f=1, loads=np.asarray(loads_LE, dtype=np.float64))
        return run_placement(spec, folding, stages, rank=rank, asked=wish)
    assert isinstance(folding, Folding)  # stages with foldings of their own have no replicas
    return random_placements(spec.moe_layers, spec.num_experts, folding.ep, asked.slots_per_rank, asked.seed)


@lru_cache(maxsize=64)
def random_placements(
    layers: tuple[int, ...], num_experts: int, ep: int, slots_per_rank: int, seed: int
) -> LayerPlacements:
    """Every expert somewhere, the other slots drawn; an expert twice on some rank and on several ranks in each layer."""
    rng = random.Random(f"replicas/{seed}/{num_experts}/{ep}/{slots_per_rank}")
    made = LayerPlacements(layers={layer: _random(rng, num_experts, ep, slots_per_rank) for layer in layers})
    made.check()
    return made


def _random(rng: random.Random, num_experts: int, ep: int, slots_per_rank: int) -> Placement:
    for _ in range(1000):
        slots = [*range(num_experts), *rng.choices(range(num_experts), k=ep * slots_per_rank - num_experts)]
        rng.shuffle(slots)
        found = Placement(
            num_experts=num_experts,
            slots=(tuple(tuple(slots[r * slots_per_rank : (r + 1) * slots_per_rank]) for r in range(ep)),),
        )
        twice = any(len(set(held)) < len(held) for held in found.slots[0])
        if twice and any(len(found.holders(e)) > 1 for e in range(num_experts)):
            return found
    raise RunError(
        f"verification data: no random placement of {num_experts} experts on {ep} ranks x {slots_per_rank} slots"
    )


@dataclass(eq=False)
class Listener:
    """What the dispatchers of one rank did in one step."""

    plans: list[DispatchPlan] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    work: list[tuple[float, float, float]] = field(default_factory=list)
    """(busiest rank, busiest rank without replicas, mean rank) of each dispatch, in rows."""

    def listen(self, parts: StepParts) -> None:
        """Hear every dispatch of the model from now on."""
        for layer, block in parts.model.layers.items():
            if isinstance(block, Block) and block.moe is not None:
                block.moe.routed.dispatcher.listen = self._hear(int(layer))

    def _hear(self, layer: int) -> Callable[[DispatchPlan, ArrayLike], None]:
        def hear(plan: DispatchPlan, counts_PE: ArrayLike) -> None:
            self.plans.append(plan)
            counts, slots = np.asarray(counts_PE), np.asarray(plan.slots_G)
            rows_G, units_G = plan.rows_PG.sum(0), plan.units_PG.sum(0)
            for expert in range(counts.shape[1]):
                rows, units = rows_G[slots == expert], units_G[slots == expert]
                if units.max() - units.min() > 1 or rows.sum() != counts[:, expert].sum():
                    text = f"layer {layer}: the {counts[:, expert].sum()} rows of expert {expert} are {rows.tolist()} at its replicas"
                    self.failures.append(text)
            by_rank = rows_G.reshape(plan.ep, -1).sum(1)
            self.work.append((by_rank.max(), max(_rows_without_replicas(counts, plan.ep)), by_rank.mean()))

        return hear

    @property
    def digest(self) -> str:
        """Digest of all plans: the same on all ranks of a group, or rows get lost."""
        return hashlib.sha256("".join(plan.hash for plan in self.plans).encode()).hexdigest()[:16]

    @property
    def max_over_mean(self) -> tuple[float, float]:
        """Largest over mean of the ranks' rows, with replicas and without, over all dispatches: ranks wait for the busiest one in
        each. Raises `RunError` where there was none."""
        if not self.work:
            raise RunError(
                "verification data: this rank has seen no dispatch, so nothing says how even the ranks' work is"
            )
        with_them, without, mean = (sum(column) for column in zip(*self.work, strict=True))
        return with_them / mean, without / mean


def _rows_without_replicas(counts_PE: NDArray[np.int64], ep: int) -> list[int]:
    """Rows of each ep rank if every expert were on one rank: consecutive experts, as equal in number as can be.

    Where ep divides the experts this is the plain placement. With more ranks than experts, which only replicas allow, some ranks have none.
    """
    return [int(part.sum()) for part in np.array_split(counts_PE.sum(0), ep)]


def must_exercise(parts: StepParts) -> None:
    """Raise `RunError` where a placement has no expert on two ranks: sums over holders would have nothing to do."""
    assert isinstance(parts.placement, LayerPlacements)
    for layer, placement in parts.placement.layers.items():
        if not any(len(placement.holders(e)) > 1 for e in range(placement.num_experts)):
            raise RunError(f"verification data: in layer {layer} no expert has two holders")


def not_alike(parts: StepParts) -> list[str]:
    """Experts whose holders do not have the same bits. Collective over ep."""
    axis: Axis = parts.groups.axis("ep")
    told = parts.comms.gather_objects(_digests(parts), axis)
    out = []
    for key in dict.fromkeys(key for of_rank in told for key in of_rank):
        by_rank = {rank: of_rank[key] for rank, of_rank in zip(axis.ranks, told, strict=True) if key in of_rank}
        if len(set(by_rank.values())) > 1:
            out.append(f"{key[0]} of expert {key[1]} is not the same on ranks {', '.join(map(str, by_rank))}")
    return out


def _digests(parts: StepParts) -> dict[tuple[str, int], str]:
    """(tensor, expert) -> digest of this rank's copy: weights, and the state that it has whole."""
    out = {}
    for family in parts.state.families.values():
        if family.layout.holders is None:
            continue
        state = () if family.layout.scattered is not None else ShardedState.KINDS
        for kind in ("flat", *state):
            tensor: torch.Tensor = getattr(family, kind)
            for local, start in zip(family.layout.params, family.layout.starts, strict=True):
                whole = tensor[start : start + local.num_elements].view(local.shape)
                for piece in local.pieces:
                    for i in range(piece.box.sizes[0]):
                        row = whole[piece.local.offsets[0] + i].contiguous()
                        name = (f"{kind}/{local.param.name}", piece.box.offsets[0] + i)
                        out[name] = hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return out


def train_on(parts: StepParts, batches: Callable[[int], Sequence[TokenBatch]], *, steps: int, rate: float) -> list[str]:
    """Train so many steps on, with other data in each; what is not alike then. Collective."""
    for step in range(steps):
        listener = Listener()
        listener.listen(parts)
        train_step(parts, batches(step), step=step, lr=rate)
        if listener.failures:
            return [f"step {step}: {listener.failures[0]}"]
    return not_alike(parts)

"""Random batches and schedules for the tests of `plan/overlap*.py`."""

import numpy as np
from copies import count_copies

from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import traffic_of
from phalanx.plan.moe.overlap.tiles.plan import plan_overlap
from phalanx.plan.moe.overlap.tiles.types import TileSchedule


def routed(rng, *, ep, per_rank, top_k, tokens, etp=1, skew=0.0):
    """(dispatch plan, experts of each source (T, K)): one replica an expert; `skew` > 0 prefers low experts."""
    num_experts = ep * per_rank
    liking = np.arange(num_experts, dtype=float) * skew
    experts = [
        np.argsort(rng.gumbel(size=(tokens, num_experts)) - liking, axis=1)[:, num_experts - top_k :][:, ::-1]
        for _ in range(ep * etp)
    ]
    counts = np.stack([np.bincount(e.ravel(), minlength=num_experts) for e in experts])
    return plan_dispatch(counts, range(num_experts), ep=ep, etp=etp), experts


def traffic_by_routing(dispatch, experts, **rest):
    """Counts of a routing with one replica an expert, so that experts are slots."""
    ep, etp = dispatch.ep, dispatch.etp
    copies = [count_copies(e, ep=ep, etp=etp, slots_per_rank=dispatch.slots_per_rank) for e in experts]
    return traffic_of(dispatch, np.stack(copies), tokens_P=[len(e) for e in experts], **rest)


def random_dispatch(rng):
    """Counts of any kind: 1 to 4 ranks, up to 64 experts, ranks without tokens, experts without rows, all rows to one."""
    ep, etp = ((1, 1), (2, 1), (2, 1), (2, 1), (1, 2), (2, 1), (3, 1), (3, 1), (2, 2), (4, 1))[int(rng.integers(10))]
    per_rank = int(rng.integers(1, 17)) if rng.random() < 0.1 else int(rng.integers(1, 4))
    num_experts = ep * per_rank
    counts = rng.integers(0, 40, (ep * etp, num_experts))
    counts[:, rng.random(num_experts) < 0.3] = 0
    counts[rng.random(ep * etp) < 0.15] = 0
    if rng.random() < 0.1:
        counts[:, 1:] = 0
    return plan_dispatch(counts, range(num_experts), ep=ep, etp=etp)


def random_schedule(rng):
    """Any order, a tenth of them drawn."""
    order = ("serial", "own_first", "arrival")[int(rng.integers(3))]
    seed = int(rng.integers(1 << 30)) if rng.random() < 0.1 else None
    share = round(float(rng.random()), 2) if order == "arrival" and seed is None else 1.0
    return TileSchedule(
        parts=int(rng.integers(1, 4)), blocks=int(rng.integers(1, 3)), order=order, own_before=share, seed=seed
    )


def plans_of_group(dispatch, schedule, **rest):
    """The plans of all ranks."""
    return [plan_overlap(dispatch, schedule, rank=rank, **rest) for rank in range(dispatch.ep * dispatch.etp)]

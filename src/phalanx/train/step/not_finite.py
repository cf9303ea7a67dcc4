"""Why a step or a validation is not finite: what its error says. Collective and slow, once the run is at its end or the step is given up."""

from __future__ import annotations

from phalanx.core.errors import PeerError, RunError
from phalanx.train.step.parts import StepParts
from phalanx.train.step.vote import Tally


def gave_up(parts: StepParts) -> str:
    """What fused kernels say that waited for another rank in vain, with the ranks; the same on all. Empty where none did. Collective."""
    world = parts.groups.axis("world")
    told = parts.comms.gather_objects([] if parts.fused is None else parts.fused.failures(), world)
    return "; ".join(
        f"{failure} on rank {rank}" for rank, failed in zip(world.ranks, told, strict=True) for failure in failed
    )


def why_not_finite(parts: StepParts, tally: Tally) -> tuple[type[RunError], str, str]:
    """Error, reason and what may help; the same on all ranks. `PeerError` where kernels have waited in vain or a layer routed otherwise, which is no matter of numbers. Collective, and slow: it reads every gradient again."""
    if parts.fused is not None and (waited := gave_up(parts)):
        return PeerError, waited, ""
    world = parts.groups.axis("world")
    doubted = any(map(bool, parts.comms.doubts))
    told = parts.comms.gather_objects((doubted, parts.buffers.non_finite()), world)
    otherwise = [str(rank) for rank, (doubts, _) in zip(world.ranks, told, strict=True) if doubts]
    if otherwise:
        kind = RunError if parts.comms.escape is None else PeerError  # which an elastic run tries again
        text = f"a MoE layer that ran again in the backward pass routed otherwise than before, as rank {', '.join(otherwise)} found"
        return kind, text, "; with train.recompute = none no layer runs again"
    sources: dict[str, list[int]] = {}
    for rank, (_, names) in zip(world.ranks, told, strict=True):
        for name in names:
            sources.setdefault(name, []).append(rank)
    head = f"the gradient is not finite (loss {tally.loss:g}, aux {tally.aux_loss:g}, z {tally.z_loss:g})"
    if not sources:
        where = "every rank's own gradients are finite, so a sum or the norm overflowed"
    else:
        shown = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in list(sources.items())[:8]]
        where = "; ".join(shown) + (f"; and {len(sources) - 8} more parameters" if len(sources) > 8 else "")
    return RunError, f"{head}: {where}", "; lower optim.lr, raise optim.warmup_steps or look at this step's data"

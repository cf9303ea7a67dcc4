"""What is looked at before a step counts, where the run is checked (`resilience.check = "sums"`): products, messages, and the state at rest.

    products     each rank's own findings (`kernels/cpu/products.py`)
    messages     what all have sent less what all have received (`runtime/comm/sums.py`)
    state        parameters that are not what was published (`runtime/state/sums.py`); masters and moments are looked at where they are read: in the commit, and by a save

The ranks tell one another in one gather of three numbers a rank, after the vote and before anything is committed; only where something is wrong do they tell what.

A wrong step is made again, once: most errors of hardware pass. What is wrong again, and what was wrong at rest, where making it again would read the same, ends
with an `UnsoundError`: on the rank in question where others can replace it, else on all. Must never change: all ranks come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from phalanx.core.errors import PeerError, UnsoundError
from phalanx.runtime.comm import MessageNote, wrong_messages
from phalanx.train.step.parts import StepParts

SHOWN = 4
"""Findings that a message has in full."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong in a step, by global rank; the same on all ranks. False where nothing is."""

    products: Mapping[int, list[str]] = field(default_factory=dict)
    state: Mapping[int, list[str]] = field(default_factory=dict)
    messages: Mapping[int, list[str]] = field(default_factory=dict)
    """By the rank that received."""

    def __bool__(self) -> bool:
        return bool(self.products or self.state or self.messages)

    @property
    def ranks(self) -> list[int]:
        """Those whose numbers are wrong."""
        return sorted({*self.products, *self.state, *self.messages})

    def explain(self) -> list[str]:
        """A sentence for each of the first."""
        texts = [
            f"rank {rank}: {text}"
            for found in (self.state, self.messages, self.products)
            for rank, each in found.items()
            for text in each
        ]
        return texts[:SHOWN] + ([f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else [])


def is_checked(parts: StepParts) -> bool:
    return parts.comms.sums is not None


def look(parts: StepParts) -> Findings:
    """What is wrong in the step that has just been voted for. Collective over the world."""
    messages, state = parts.comms.sums, parts.state.sums
    assert messages is not None and state is not None  # made together
    state.compare(parts.state.read_in_a_step())
    at_rest = state.take()
    products = [str(wrong) for wrong in (parts.lanes.sums.take() if parts.lanes.sums is not None else ())]
    left, sent, received = messages.take()
    world = parts.groups.step_axis("world")
    mine = torch.tensor([left, len(products), len(at_rest)]).to(_device(parts), non_blocking=True)
    told = (
        parts.comms.all_gather(mine, world, op_id="check").view(-1, 3).cpu()
    )  # SYNC: all ranks must know it before anything is committed
    balanced = int(told[:, 0].sum()) % 2**32 == 0
    if balanced and not told[:, 1:].any():
        return Findings()
    notes = ([], []) if balanced else (sent, received)
    said = parts.comms.gather_objects((products, at_rest, *notes), world)
    return _findings(said, list(world.ranks))


def _findings(
    said: list[tuple[list[str], list[str], list[MessageNote], list[MessageNote]]], ranks: list[int]
) -> Findings:
    sent = [note for _, _, gone, _ in said for note in gone]
    received = [note for _, _, _, came in said for note in came]
    messages: dict[int, list[str]] = {}
    for _, receiver, text in wrong_messages(sent, received):
        messages.setdefault(receiver, []).append(text)
    return Findings(
        products={rank: found for rank, (found, *_) in zip(ranks, said, strict=True) if found},
        state={rank: found for rank, (_, found, *_) in zip(ranks, said, strict=True) if found},
        messages=messages,
    )


def unsound(parts: StepParts, found: Findings, *, step: int) -> UnsoundError | PeerError:
    """The error that ends the step on this rank. Where others can replace it, only a rank whose numbers are wrong has to end."""
    who = ", ".join(map(str, found.ranks))
    rank = parts.groups.rank
    if parts.comms.escape is not None and rank not in found.ranks:
        return PeerError(
            f"step {step + 1}: rank {who} computes or keeps other numbers than it should, and leaves the run"
        )
    end = (
        "this process ends"
        if parts.comms.escape is not None
        else "continue from the newest checkpoint, on other hardware"
    )
    return UnsoundError(f"step {step + 1}: {'; '.join(found.explain())}; nothing was committed; {end}")


def check_commit(parts: StepParts, *, step: int) -> None:
    """Raise `UnsoundError` on a rank whose masters or moments were not, when this step read them, what the last one had written. They are not to be used any more."""
    _refuse_changed(parts, f"step {step + 1}", "what this rank holds is lost; an elastic run replaces it")


def check_saved(parts: StepParts, *, step: int) -> None:
    """Raise `UnsoundError` on a rank whose masters or moments, which a checkpoint of `step` steps is to hold, are not what the last update wrote."""
    parts.state.look_at_rest()
    _refuse_changed(parts, f"the checkpoint of step {step}", "nothing was saved; an elastic run replaces this rank")


def _refuse_changed(parts: StepParts, what: str, end: str) -> None:
    wrong = parts.state.sums.take() if parts.state.sums is not None else []
    if wrong:
        found = "; ".join(Findings(state={parts.groups.rank: wrong}).explain())
        raise UnsoundError(
            f"{what}: {found}: memory that nobody wrote; {end}; else continue from the newest checkpoint"
        )


def _device(parts: StepParts) -> torch.device:
    return next(iter(parts.state.families.values())).flat.device

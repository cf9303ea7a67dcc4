"""Times of dispatch and combine of a step, over all ranks: what each rank has measured travels with the vote.

Must never change: a figure of a layer is the mean over the ranks that have the layer. Not the largest: who waits longest is who came first.

Legend: L MoE layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.runtime.comm import ExchangeTime, Place

COLUMNS = ("exposed_forward_s", "exposed_backward_s", "hidden_forward_s", "hidden_backward_s")


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Seconds per MoE layer, as in `core.events.StepEnded`; all empty where they are not known."""

    exposed_forward_s: tuple[float, ...] = ()
    exposed_backward_s: tuple[float, ...] = ()
    hidden_forward_s: tuple[float, ...] = ()
    hidden_backward_s: tuple[float, ...] = ()


def own_times(
    found: Mapping[Place, ExchangeTime], *, moe_layers: Sequence[int], here: frozenset[int], device: torch.device
) -> torch.Tensor:
    """(L, 5) fp64 of this rank, to be summed: the columns, and 1 for a layer that it has. `here`: numbers of its layers."""
    rows = []
    for layer in moe_layers:
        there, back = found.get((layer, "forward"), NOTHING), found.get((layer, "backward"), NOTHING)
        rows.append([there.exposed_s, back.exposed_s, there.hidden_s, back.hidden_s, float(layer in here)])
    return torch.tensor(rows, dtype=torch.float64, device=device).view(len(rows), len(COLUMNS) + 1)


def mean_times(summed_L5: torch.Tensor) -> ExchangeTimes:
    """Of the sum over all ranks."""
    means = summed_L5[:, :-1] / summed_L5[:, -1:].clamp(min=1.0)
    return ExchangeTimes(**{name: tuple(column) for name, column in zip(COLUMNS, means.T.tolist(), strict=True)})


NOTHING = ExchangeTime(under_way_s=0.0, exposed_s=0.0)

"""The vote of a step: every rank's figures in one vector, one all-reduce over the world, the same outcome on all ranks.

Two ballots. In the plain one numbers are fp64, and a NaN or an infinity anywhere makes a sum that is not finite: that is the veto. In exact
mode all are integers (fixed point, `kernels/cpu/fixed_point.py`), so that the figures do not depend on the number of ranks either; vetoes are
counted in cells of their own. Counts are exact in both: fp64 holds whole numbers up to 2^53.

Times of dispatch and combine travel with it. A figure of a layer is the mean over the ranks that have the layer. Not the largest: who waits longest is who came first.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.kernels.cpu.fixed_point import root_of_squares
from phalanx.runtime.comm import Collectives, ExchangeTime, Place
from phalanx.runtime.state import NORM_BITS, ReducedGradients
from phalanx.train.step.loss import LossShare
from phalanx.train.step.parts import StepParts

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
    times_L5 = torch.tensor(rows, dtype=torch.float64).view(len(rows), len(COLUMNS) + 1)
    return times_L5.to(device, non_blocking=True)


def mean_times(summed_L5: torch.Tensor) -> ExchangeTimes:
    """Mean times, made of the sum over all ranks."""
    means = summed_L5[:, :-1] / summed_L5[:, -1:].clamp(min=1.0)
    return ExchangeTimes(**{name: tuple(column) for name, column in zip(COLUMNS, means.T.tolist(), strict=True)})


NOTHING = ExchangeTime(under_way_s=0.0, exposed_s=0.0)


LOSSES = ("cross_entropy", "aux_loss", "z_loss", "mtp_loss")
LOSS_BITS = 40
"""Binary places of a loss in an exact ballot: 1e-12 nats, up to 4 million of them."""
ENTROPY_BITS = 24
"""Bits of the sum of entropies, which is over all tokens and layers."""
NANOSECOND = 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class Tally:
    """Outcome of the vote, on the host and the same on all ranks."""

    finite: bool
    grad_norm: float
    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    dropped: int
    entropy_sum: float
    stop: bool
    exchange: ExchangeTimes
    counts_LE: NDArray[np.int64]
    seconds: tuple[float, ...] = ()
    """What each rank took for its own share of the step, waits left out; empty where it is not known (`own_seconds`)."""
    too_large: bool = False
    """Exact mode: some sum had no room for its gradients; the step must be computed again with fewer binary places."""


def plain_vote(
    parts: StepParts,
    gradients: ReducedGradients,
    shares: Sequence[LossShare],
    *,
    stop: bool,
    own_s: float | None = None,
) -> Tally:
    """Add up every rank's ballot. `own_s`: as in `Tally.seconds`; None on all ranks where it is not known."""
    with parts.comms.doing("norm"):
        square_sum = gradients.square_sum(parts.groups, lanes=parts.lanes)
    for veto in (_doubt(parts.comms), None if parts.fused is None else parts.fused.fault()):
        square_sum = square_sum if veto is None else square_sum + veto
    numbers = [square_sum]
    for name in (*LOSSES, "dropped", "entropy_sum"):
        numbers.append(torch.stack([getattr(share, name).to(torch.float64) for share in shares]).sum())
    numbers.append(torch.full_like(square_sum, float(stop)))
    counts_LE, times_L5 = _counts(shares), _times(parts, shares)
    seconds = _seconds(parts, own_s, square_sum.device)
    ballot = torch.cat([torch.stack(numbers), times_L5.flatten(), counts_LE.flatten().to(torch.float64), seconds])
    parts.comms.all_reduce(ballot, parts.groups.step_axis("world"), op_id="vote")
    ballot = ballot.cpu()  # SYNC: all ranks must know the outcome before anything is committed
    squares, loss, aux_loss, z_loss, mtp_loss, dropped, entropy_sum, stops = ballot[: len(numbers)].tolist()
    times_L5, counts, seconds = ballot[len(numbers) :].split([times_L5.numel(), counts_LE.numel(), seconds.numel()])
    finite = all(map(math.isfinite, (squares, loss, aux_loss, z_loss, mtp_loss)))
    return Tally(
        finite=finite,
        grad_norm=math.sqrt(squares) if finite else math.nan,
        loss=loss,
        aux_loss=aux_loss,
        z_loss=z_loss,
        mtp_loss=mtp_loss,
        dropped=int(dropped),
        entropy_sum=entropy_sum,
        stop=stops > 0,
        exchange=_exchange(parts, times_L5),
        counts_LE=counts.view(counts_LE.shape).to(torch.int64).numpy(),
        seconds=tuple(seconds.tolist()),
    )


def exact_vote(
    parts: StepParts,
    gradients: ReducedGradients,
    shares: Sequence[LossShare],
    *,
    stop: bool,
    own_s: float | None = None,
) -> Tally:
    """The same in integers."""
    bits = parts.buffers.bits
    scale = 2.0 ** (bits - NORM_BITS)
    top, room = parts.buffers.top, parts.buffers.limit
    sound = math.isfinite(top) and top < room
    with parts.comms.doing("norm"):
        squares = gradients.squares(parts.groups, scale=scale, lanes=parts.lanes) if sound else (0, 0, 0)
    losses = {name: _fixed([getattr(share, name) for share in shares], LOSS_BITS) for name in LOSSES}
    entropy = _fixed([share.entropy_sum for share in shares], ENTROPY_BITS)
    bad = sum(n is None for n in losses.values()) + (not math.isfinite(top))
    dropped = sum(int(share.dropped) for share in shares)
    numbers = [*squares, *(n or 0 for n in losses.values()), entropy or 0, dropped, int(stop), bad]
    numbers.append(int(math.isfinite(top) and top >= room))
    counts_LE, times_L5 = _counts(shares), _times(parts, shares)
    times = (times_L5 * NANOSECOND).round().to(torch.int64).flatten()
    seconds = (_seconds(parts, own_s, counts_LE.device) * NANOSECOND).round().to(torch.int64)
    ballot = torch.cat([torch.tensor(numbers, device=counts_LE.device), times, counts_LE.flatten(), seconds])
    parts.comms.all_reduce(ballot, parts.groups.step_axis("world"), op_id="vote")
    ballot = ballot.cpu()  # SYNC: all ranks must know the outcome before anything is committed
    a, b, c, loss, aux, z, mtp, entropy_sum, all_dropped, stops, all_bad, large = ballot[: len(numbers)].tolist()
    times, counts, seconds = ballot[len(numbers) :].split([times.numel(), counts_LE.numel(), seconds.numel()])
    finite = all_bad == 0
    return Tally(
        finite=finite,
        grad_norm=root_of_squares((a, b, c), scale=scale) if finite else math.nan,
        loss=loss / 2**LOSS_BITS if finite else math.nan,
        aux_loss=aux / 2**LOSS_BITS,
        z_loss=z / 2**LOSS_BITS,
        mtp_loss=mtp / 2**LOSS_BITS,
        dropped=all_dropped,
        entropy_sum=entropy_sum / 2**ENTROPY_BITS,
        stop=stops > 0,
        exchange=_exchange(parts, times.to(torch.float64) / NANOSECOND),
        counts_LE=counts.view(counts_LE.shape).numpy(),
        seconds=tuple((seconds.to(torch.float64) / NANOSECOND).tolist()),
        too_large=finite and large > 0,
    )


def _doubt(comms: Collectives) -> torch.Tensor | None:
    """() fp32 on the device: NaN where this rank doubts something of the step, else 0; None where nothing was in question."""
    if not comms.doubts:
        return None
    doubted = torch.stack(comms.doubts).any()
    return torch.zeros((), device=doubted.device).masked_fill_(doubted, float("nan"))


def _fixed(values: Sequence[torch.Tensor], bits: int) -> int | None:
    """The sum in units of 2^-bits, each value rounded by itself; None where one is not finite."""
    numbers = [float(v) for v in values]  # SYNC: of the vote
    if not all(map(math.isfinite, numbers)):
        return None
    return sum(round(n * 2.0**bits) for n in numbers)


def _counts(shares: Sequence[LossShare]) -> torch.Tensor:
    return torch.stack([share.counts_LE for share in shares]).sum(0)


def _times(parts: StepParts, shares: Sequence[LossShare]) -> torch.Tensor:
    return own_times(
        parts.comms.layers.take(),
        moe_layers=parts.spec.moe_layers,
        here=frozenset(map(int, parts.model.layers)),
        device=shares[0].counts_LE.device,
    )


def _seconds(parts: StepParts, own_s: float | None, device: torch.device) -> torch.Tensor:
    """(world,) fp64, to be summed: each rank writes its own; (0,) where it is not measured."""
    size = 0 if own_s is None else parts.groups.axis("world").size
    out = torch.zeros(size, dtype=torch.float64, device=device)
    if own_s is not None:
        out[parts.groups.rank] = own_s
    return out


def _exchange(parts: StepParts, times: torch.Tensor) -> ExchangeTimes:
    """Known on a CPU, where the host waits for what travels."""
    return mean_times(times.view(-1, 5)) if parts.model.device.type == "cpu" else ExchangeTimes()

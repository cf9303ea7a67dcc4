"""How a device is divided between computing and communication, for the least predicted time: how many multiprocessors products leave to NCCL's messages, and how many programs of the
fused second product send. `benchmarks/gpu` measures the rates and compares; a recipe gives the result (`dispatch.left_free`).

NCCL's messages are kernels: while one moves bytes, it takes multiprocessors from products. A product whose thread blocks fill the whole device then needs a second wave for the few that found
no place, and may take twice as long (pytorch #147966). Two ways out, which this file weighs for a plan at hand:

    0      nothing is left free: products have the whole device, and are slowed while bytes move (`OverlapCost.interference`, as measured)
    n      products leave n multiprocessors, messages use at most n (`message_ctas` of `runtime/comm/groups.py`): products take all the time S / (S - n) as long and are not slowed further,
           messages go at the rate of the link or of n thread blocks, whichever is less

The trade is that of COMET's division point (arXiv 2502.19811, section 3.2), made on the host: products and messages stay the library's. The clock is that of every other choice
(`clock.py`), so order, parts and blocks count. The rates must be measured (`benchmarks/gpu/streams.py`). None of it has been on a GPU.

Programs that send (`division`) are the other case: the second product's own kernel does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.fused import SecondCost, predicted_s
from phalanx.plan.moe.overlap.prediction import LayerShape, OverlapCost, WireBytes, seconds_of
from phalanx.plan.moe.overlap.prediction.cost import work_of
from phalanx.plan.moe.overlap.tiles import RankPlan


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What products and messages share."""

    multiprocessors: int
    block_bytes_per_s: float
    """Bytes that one thread block of a message moves in a second; measured."""
    candidates: tuple[int, ...] = (4, 8, 16, 24, 32)
    """How many may be left free; groups of so few thread blocks must exist."""


def shared_cost(cost: OverlapCost, device: DeviceShare, left_free: int) -> OverlapCost:
    """The cost on a device whose products leave `left_free` multiprocessors to messages. `cost`: measured with none left free."""
    if not left_free:
        return cost
    share = (device.multiprocessors - left_free) / device.multiprocessors
    return replace(
        cost,
        flops_by_rows=tuple((rows, rate * share) for rows, rate in cost.flops_by_rows),
        bytes_per_s=min(cost.bytes_per_s, left_free * device.block_bytes_per_s),
        interference=0.0,
    )


def choose_left_free(
    plans: Sequence[RankPlan], shape: LayerShape, cost: OverlapCost, wire: WireBytes, device: DeviceShare
) -> tuple[int, dict[int, float]]:
    """The best number for passes of these plans one after the other (forward and backward, of the busiest rank), and predicted seconds by number. Ties go to fewer.

    Raises `PlanError` where a candidate leaves products nothing, or a rate is not above 0.
    """
    problems = [
        Problem(where="device.candidates", value=n, rule=f"from 1 to {device.multiprocessors - 1}")
        for n in device.candidates
        if not 1 <= n < device.multiprocessors
    ]
    if not device.block_bytes_per_s > 0:
        problems.append(Problem(where="device.block_bytes_per_s", value=device.block_bytes_per_s, rule="above 0"))
    raise_if(problems, PlanError, subject="multiprocessors left to messages")
    seconds = {}
    for n in sorted({0, *device.candidates}):
        shared = shared_cost(cost, device, n)
        seconds[n] = sum(seconds_of(plan.ops, work_of(plan, shape, shared), shared, wire) for plan in plans)
    return min(seconds, key=lambda n: (seconds[n], n)), seconds


def division(cost: SecondCost) -> int:
    """How many programs send while the others compute, for the least predicted time; 0 is: all compute, then all send. Ties go to fewer."""
    bad = [f"{name} {value}" for name, value in vars(cost).items() if value < (name in ("programs", "blocks"))]
    if bad:
        raise ValueError(f"division: {', '.join(bad)} must not be negative, programs and blocks at least 1")
    return min(range(cost.programs), key=lambda senders: predicted_s(cost, senders))

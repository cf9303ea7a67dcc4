"""How the fused kernels of a MoE layer are launched on one device: how many programs compute and how many carry rows, and how finely messages are cut.

Decides the division of the multiprocessors from their number and what is left to messages (`dispatch.left_free`; arXiv 2502.19811, section 3.2, calls it the division point). A
launch never has more programs than multiprocessors, for programs wait for one another; those that bring rows to others have room beside those that wait for rows.

The capacity is no decision: a token goes to a rank at most once, so as many places for each source as a rank has tokens hold every routing, and nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PlanError, Problem, raise_if

__all__ = ["LEFT_FREE", "FusedLaunch", "fused_launch"]

LEFT_FREE = 16
"""Where the recipe does not say. Not measured on a device: `benchmarks/gpu/overlap.py` would say which number is best there."""
PARTS = 4
"""Flags for each source's entries, where there are as many entries."""
BLOCKS = 4
"""Blocks of the columns on the way back."""


@dataclass(frozen=True, kw_only=True)
class FusedLaunch:
    """Programs of each launch, each on a multiprocessor of its own."""

    first: int
    """Compute the first product, beside those that send entries."""
    send: int
    second: int
    """Compute the second product and send its results."""
    senders: int
    """Number of these that only send."""
    parts: int
    blocks: int


def fused_launch(multiprocessors: int, *, left_free: int | None, capacity: int, columns: int) -> FusedLaunch:
    """Launch for a device. `left_free`: multiprocessors that carry rows while the others compute; None: `LEFT_FREE`, or half of a
    small device.

    Raises `PlanError` where nothing is left to compute, or nobody carries rows.
    """
    free = min(LEFT_FREE, multiprocessors // 2) if left_free is None else left_free
    if not 1 <= free < multiprocessors:
        rule = f"from 1 to {multiprocessors - 1}, of the {multiprocessors} multiprocessors that this device has"
        raise_if(
            [Problem(where="dispatch.left_free", value=free, rule=rule, hint=str(min(LEFT_FREE, multiprocessors - 1)))],
            PlanError,
            subject="the division of a device",
        )
    return FusedLaunch(
        first=multiprocessors - free,
        send=free,
        second=multiprocessors,
        senders=free,
        parts=min(PARTS, capacity),
        blocks=min(BLOCKS, columns),
    )

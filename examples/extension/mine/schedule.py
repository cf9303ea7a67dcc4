"""A pipeline schedule: 1F1B that does one forward pass more before its first backward pass. `--pipeline.schedule patient_1f1b` selects it.

It is checked like every other: an order in which a rank would wait for ever, or hold more than it promises, is refused.
"""

from phalanx.plan.pipeline.schedule import Action, Order
from phalanx.plan.pipeline.schedule.make import ScheduleRule


def _warmup(rank: int, pp: int, microbatches: int) -> int:
    return min(microbatches, pp - rank)


def _order(rank: int, pp: int, virtual: int, microbatches: int, extra: int) -> Order:
    """Passes of one rank: forward (F) and backward (B) of its stage, which has the rank's number."""
    ahead = _warmup(rank, pp, microbatches)
    order = [Action("F", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        order += [Action("B", rank, m)] + [Action("F", rank, m + ahead)] * (m + ahead < microbatches)
    return tuple(order)


PATIENT_1F1B = ScheduleRule(
    about="1F1B whose backward passes come one forward pass later",
    order=_order,
    live=lambda rank, pp, virtual, microbatches, extra: _warmup(rank, pp, microbatches),
    virtual=1,
)

"""How a tensor moves from one layout to another: units, the bound, schedules between hosts, and messages between ranks (arXiv 2211.05322).

`plan_reshard` decides which rank sends which bytes to whom and in which order, near the lower bound on the busiest link (`ReshardPlan`). `Move` says what is wanted, `Hosts` which links there are, `Hop` is one message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.reshard.plan import METHODS as METHODS, ReshardPlan as ReshardPlan, plan_reshard as plan_reshard
    from phalanx.plan.reshard.types import (
        WHOLE as WHOLE,
        Hop as Hop,
        Hosts as Hosts,
        Move as Move,
        MovePart as MovePart,
        Reduction as Reduction,
        equal_hosts as equal_hosts,
    )
    from phalanx.plan.reshard.weight_waves import (
        Wave as Wave,
        divide as divide,
        readers_layout as readers_layout,
        wave_rows as wave_rows,
    )
else:
    __getattr__ = lazy(__name__)

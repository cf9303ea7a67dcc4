"""What a schedule of tiles costs, and which one is fastest: bytes by link, products, a clock over both, and the choice that all ranks make alike from figures that they have measured.

`Chooser` decides for a run, from a `Fit` of its own samples; the simulator uses the same costs with rates of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.overlap.prediction.bytes import (
        Route as Route,
        Traffic as Traffic,
        WireBytes as WireBytes,
        choose_transport as choose_transport,
        traffic_of as traffic_of,
        wire_bytes as wire_bytes,
    )
    from phalanx.plan.moe.overlap.prediction.choose import (
        MARGIN as MARGIN,
        SERIAL as SERIAL,
        Chooser as Chooser,
        LayerSample as LayerSample,
        MatmulSample as MatmulSample,
        MessageSample as MessageSample,
        Sample as Sample,
        compare_schedules as compare_schedules,
        fit as fit,
        worth_timing as worth_timing,
    )
    from phalanx.plan.moe.overlap.prediction.clock import seconds_of as seconds_of
    from phalanx.plan.moe.overlap.prediction.cost import (
        LayerShape as LayerShape,
        LayerWork as LayerWork,
        OverlapCost as OverlapCost,
    )
    from phalanx.plan.moe.overlap.prediction.pair import (
        PassTime as PassTime,
        link_s as link_s,
        pair_s as pair_s,
        paired_share as paired_share,
    )
else:
    __getattr__ = lazy(__name__)

"""What devices and links do: constants of clusters, costs of operations and collectives.

The room decides what a cluster's name means (`parse_cluster`), and how long one product or one collective takes on it; every constant has its source beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.hardware.clusters import (
        LINKS as LINKS,
        GpuCluster as GpuCluster,
        Hardware as Hardware,
        at as at,
        known_hardware as known_hardware,
        load_hardware as load_hardware,
        parse_cluster as parse_cluster,
        parse_hardware as parse_hardware,
    )
    from phalanx.simulate.hardware.collectives import (
        NCCL_SMS as NCCL_SMS,
        GroupSpan as GroupSpan,
        Network as Network,
        beside as beside,
        distinct as distinct,
        span_of as span_of,
    )
    from phalanx.simulate.hardware.cost import (
        BF16 as BF16,
        FP32 as FP32,
        SIGMA as SIGMA,
        Cost as Cost,
        Oracle as Oracle,
        experts_s as experts_s,
    )
else:
    __getattr__ = lazy(__name__)

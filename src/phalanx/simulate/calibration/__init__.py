"""The constants of a machine from times that were measured on it, on one host or on several.

The room decides which constants the times of a machine determine (`fit`) and how good they are; it measures nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.calibration.fit import (
        Calibration as Calibration,
        Measurements as Measurements,
        TimedAttention as TimedAttention,
        TimedCollective as TimedCollective,
        TimedProduct as TimedProduct,
        TimedStream as TimedStream,
        calibrate as calibrate,
    )
    from phalanx.simulate.calibration.hosts import (
        HostRows as HostRows,
        apart as apart,
        combined as combined,
        ranks_of_host as ranks_of_host,
    )
else:
    __getattr__ = lazy(__name__)

"""A run that goes on when hosts are lost or join.

The room decides what a member keeps, fetches and repeats when its generation ends, and when a run goes back to a checkpoint; who is a member is decided in `runtime/membership`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.recovery.run import train_elastic as train_elastic
else:
    __getattr__ = lazy(__name__)

"""A run that goes on when hosts are lost or join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.recovery.run import train_elastic as train_elastic
else:
    __getattr__ = lazy(__name__)

"""Carries out one rank's part of a pipeline schedule, and what travels between stages.

`run_pipeline` runs the order that it is given. The room decides only how far ahead receives are posted and which sends it still waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.pipeline.boundary import Boundary as Boundary, direct_edges as direct_edges
    from phalanx.runtime.pipeline.runner import (
        Passes as Passes,
        Tensors as Tensors,
        agree_on as agree_on,
        run_pipeline as run_pipeline,
    )
else:
    __getattr__ = lazy(__name__)

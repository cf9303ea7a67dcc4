"""What a recipe may say of overlap inside a MoE layer, and where it can apply (arXiv 2502.19811).

The tiles of a schedule and their order are in `tiles/`, what a schedule costs and which one is fastest in `prediction/`, the division of a device among fused kernels in `fused/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.overlap.settings import (
        BLOCK_COLUMNS as BLOCK_COLUMNS,
        CANDIDATES as CANDIDATES,
        FINE as FINE,
        MOST_BLOCKS as MOST_BLOCKS,
        OverlapSetting as OverlapSetting,
        block_problems as block_problems,
        fused_setting_problems as fused_setting_problems,
        most_blocks as most_blocks,
        overlap_problems as overlap_problems,
        parse_overlap as parse_overlap,
        replica_problems as replica_problems,
        setting_problems as setting_problems,
    )
else:
    __getattr__ = lazy(__name__)

"""Operations of a model that are one launch each on a GPU, around the Triton programs in `programs/`.

The room decides how work is cut into programs (by shapes alone, so that results depend on nothing else) and what a backward pass keeps. Nothing here reads a value of the device.
The plain references, and who asks for which, are in `kernels/ops`; `runs_programs` says whether the programs can run. Under Triton's interpreter they run on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.kernels.device.adamw import (
        AdamRule as AdamRule,
        RunTable as RunTable,
        fused_adamw as fused_adamw,
        has_adamw as has_adamw,
        rounding_seed as rounding_seed,
    )
    from phalanx.kernels.device.attention import device_attention as device_attention, padded as padded
    from phalanx.kernels.device.cross_entropy import (
        LossWork as LossWork,
        device_cross_entropy as device_cross_entropy,
    )
    from phalanx.kernels.device.launch import runs_programs as runs_programs
    from phalanx.kernels.device.norm import WIDEST_NORM as WIDEST_NORM, fused_norm as fused_norm
    from phalanx.kernels.device.rope import fused_normed_rope as fused_normed_rope, fused_rope as fused_rope
    from phalanx.kernels.device.router import Choice as Choice, RouterRule as RouterRule, fused_choice as fused_choice
    from phalanx.kernels.device.rows import (
        TakeWeighted as TakeWeighted,
        sum_rows as sum_rows,
        take_rows as take_rows,
    )
    from phalanx.kernels.device.sorting import (
        SortedKeys as SortedKeys,
        ends_of_groups as ends_of_groups,
        sort_keys as sort_keys,
        zero_empty_groups as zero_empty_groups,
    )
    from phalanx.kernels.device.sums import (
        device_checksums as device_checksums,
        device_square_sums as device_square_sums,
    )
    from phalanx.kernels.device.swiglu import fused_swiglu as fused_swiglu, swiglu_backward as swiglu_backward
    from phalanx.kernels.device.three_parts import wide_product_backward as wide_product_backward
    from phalanx.kernels.device.weight_sums import (
        WeightSum as WeightSum,
        WeightSums as WeightSums,
        sums_of as sums_of,
        sums_of_experts as sums_of_experts,
    )
else:
    __getattr__ = lazy(__name__)

"""Operations of one MoE layer on GPUs that wait on flags, around the Triton programs in `programs/`.

The room decides how one layer lies in memory that devices share (`ArenaSpec`), in which order rows travel (`SendIndex`, `Arranged`), and which flag stands for what. `runtime/moe/fused.py` runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.kernels.triton.first_product import Arrivals as Arrivals, fused_first as fused_first
    from phalanx.kernels.triton.index import Arranged as Arranged, SendIndex as SendIndex
    from phalanx.kernels.triton.layer import (
        ArrivalCounts as ArrivalCounts,
        LaunchShape as LaunchShape,
        begin as begin,
        finish as finish,
        pack_weights as pack_weights,
        route as route,
        row_weights as row_weights,
        send as send,
    )
    from phalanx.kernels.triton.second_product import Division as Division, fused_second as fused_second
    from phalanx.kernels.triton.symmetric import (
        ArenaSpec as ArenaSpec,
        SymmetricMemory as SymmetricMemory,
        symmetric_arena as symmetric_arena,
    )
    from phalanx.kernels.triton.tiles import status_words as status_words
else:
    __getattr__ = lazy(__name__)

"""The decoder and its parts.

The room decides what a block computes and where it communicates; how is the executors' (`runtime/moe`, `runtime/comm`). `ModelContext` is all that a model is told of its rank, `Decoder` is one pipeline stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.models.block import Block as Block
    from phalanx.models.context import (
        ForwardInfo as ForwardInfo,
        ModelContext as ModelContext,
        TokenBatch as TokenBatch,
    )
    from phalanx.models.decoder import Decoder as Decoder, DecoderOutput as DecoderOutput
    from phalanx.models.moe import MoE as MoE
    from phalanx.models.router import (
        Routing as Routing,
        counts_of_text as counts_of_text,
        update_expert_bias as update_expert_bias,
    )
    from phalanx.models.shard import part_of as part_of, parts_of_all as parts_of_all
else:
    __getattr__ = lazy(__name__)

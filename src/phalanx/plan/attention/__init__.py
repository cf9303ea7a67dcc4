"""Context parallelism: which part of a sequence each rank holds, and which blocks of attention it computes against each other rank's part (`runtime/comm/context_parallel.py` carries it out).

The room decides the layout of a sequence (`make_layout`: contiguous or zigzag) and the order of the ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.attention.zigzag import (
        AttentionBlock as AttentionBlock,
        SequenceLayout as SequenceLayout,
        attention_blocks as attention_blocks,
        first_and_last as first_and_last,
        gathered_blocks as gathered_blocks,
        make_layout as make_layout,
        ring_source as ring_source,
    )
else:
    __getattr__ = lazy(__name__)

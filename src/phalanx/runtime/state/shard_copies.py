"""A rank's reduced shard of a gradient, to the other ranks that keep it: the executor of `plan/layout/shard_copies.py`, where sums travel apart (`sums_whole`).

Decides nothing. Before the vote every keeper of a shard has its gradient, bit for bit what the owner has, so that after it each of them can make the same update
alone. In exact mode what travels are the sums read back as numbers, half the bytes of the integers and no less exact.
"""

from __future__ import annotations

import torch

from phalanx.plan.layout import FlatLayout
from phalanx.runtime.comm import Collectives, Exchange, Groups, Message

_TAG = 7
"""Tag of these messages, so that they meet one another only."""


class ShardCopies:
    """The shards of one buffer that come to this rank. Made (collectively) when its own one is there; not to be touched before `wait`."""

    def __init__(
        self, layout: FlatLayout, shard: torch.Tensor, groups: Groups, comms: Collectives, *, op_id: str
    ) -> None:
        """`shard` (shard_length,): this rank's own, in any type."""
        axis = groups.step_axis(layout.rule.shard_over)
        self.shard = shard.contiguous()
        self.arrived = [shard.new_empty(layout.shard_length) for _ in layout.copies]
        sends = [Message(self.shard, peer, _TAG) for peer in layout.keepers[layout.shard_index][1:]]
        receives = [Message(x, owner, _TAG) for x, owner in zip(self.arrived, layout.copies, strict=True)]
        self.exchange: Exchange = comms.start_exchange(sends, receives, axis, op_id=op_id)

    def wait(self) -> list[torch.Tensor]:
        """(shard_length,) each, in the order of `layout.copies`."""
        self.exchange.wait()
        return self.arrived

"""Messages of one direction of an overlapped layer on a device, posted round by round in the one order of all ranks (`plan/moe/overlap/tiles/rounds.py`).

Decides nothing. The executor gives each end of a message when it has the tensor; a round leaves for the message stream when all its ends have been given and all rounds
before it have left. What has come is waited for by the current stream, never by the host.

Must never change: no round leaves before another that stands before it; nobody waits for a round that has not left (there would be no event, and no waiting);
tensors of a round live until the current stream is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.tiles import MessageEnd, MessageKind, Round
from phalanx.runtime.comm import Axis, Collectives, Exchange, Message
from phalanx.runtime.moe.streams import CudaStreams, Posted


class RoundMessages:
    """`op_id` names the operation that the messages of a kind belong to."""

    def __init__(
        self,
        rounds: Sequence[Round],
        streams: CudaStreams,
        comms: Collectives,
        axis: Axis,
        *,
        op_id: Callable[[MessageKind], str],
    ) -> None:
        self._rounds, self._streams, self._comms, self._axis, self._op_id = rounds, streams, comms, axis, op_id
        self._round_of = {leg: at for at, one in enumerate(rounds) for leg in one.legs}
        self._tensors: dict[MessageEnd, torch.Tensor] = {}
        """Tensors of rounds that have not left."""
        self._given: set[MessageEnd] = set()
        self._missing = [len(one.legs) for one in rounds]
        self._posted: list[Posted | None] = []

    def give(self, leg: MessageEnd, tensor: torch.Tensor) -> Exchange:
        """One end of a message, once: what is sent, or where what comes is to go. Empty ones, empty at both ends, are not sent.

        The exchange's `wait` orders the current stream behind the round. Raises `PlanError` for a message that the rounds do not have, or have had.
        """
        at = self._round_of.get(leg)
        if at is None or leg in self._given:
            rule = "each message of the plan's rounds, once"
            raise_if([Problem(where="message", value=str(leg), rule=rule)], PlanError, subject="rounds of messages")
        assert at is not None  # else raised above
        self._given.add(leg)
        self._tensors[leg] = tensor
        self._missing[at] -= 1
        while len(self._posted) < len(self._rounds) and not self._missing[len(self._posted)]:
            self._posted.append(self._post(self._rounds[len(self._posted)]))
        return Exchange(lambda: self._order(at, leg))

    def _post(self, one: Round) -> Posted | None:
        messages = [(leg, Message(self._tensors.pop(leg), leg.peer)) for leg in one.legs]
        sends = [message for leg, message in messages if leg.is_send and message.tensor.numel()]
        receives = [message for leg, message in messages if not leg.is_send and message.tensor.numel()]
        if not sends and not receives:
            return None
        posted = self._streams.post(self._comms, sends, receives, self._axis, op_id=self._op_id(one.legs[0].kind))
        if self._comms.synchronous:
            self._streams.order(posted)
            return None
        return posted

    def _order(self, at: int, leg: MessageEnd) -> None:
        if at >= len(self._posted):
            rule = "waited for before its round was posted"
            raise_if([Problem(where="message", value=str(leg), rule=rule)], PlanError, subject="rounds of messages")
        posted, self._posted[at] = self._posted[at], None
        if posted is not None:  # the first wait for a round is enough: there is one current stream
            self._streams.order(posted)

"""A move between layouts (a recovery's state, experts placed anew, weights to another run) as a program: an ordered list of operations per rank, like a step's.

Decides the names of messages: `runtime/reshard/executor.py` records them under the ids that are made here, so a move that was predicted and one that ran are compared id by id.

    heal/state.plan      one integer of each rank: the hash of the plan
    heal/state.3to1.0    the first message of rank 3 to rank 1, on both of them
    heal/state.end       all is there (nothing that a run records)

Everything travels beside: a message starts once what it carries has come (`needs`), and the end waits for all that comes in. Must never change: `needs` of a message are the messages that bring what it
carries, as the executor finds them from the places of all bytes (test). Not listed: copies on the rank itself, sums, and how many messages are open at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from phalanx.plan.layout import Box
from phalanx.plan.program.ops import Op
from phalanx.plan.program.step import StepProgram
from phalanx.plan.reshard import WHOLE, Hop, MovePart, ReshardPlan

AXIS = "reshard"
"""Name of the group over which a move goes."""
HASH_BYTES = 8
"""Bytes of the integer that ranks compare."""


def compare_id(op_id: str) -> str:
    """Id of the exchange of hashes before a move."""
    return f"{op_id}.plan"


def message_id(op_id: str, src: int, dst: int, tag: int) -> str:
    """Id of message number `tag` of global rank `src` to `dst`, the same on both."""
    return f"{op_id}.{src}to{dst}.{tag}"


def move_program(plan: ReshardPlan, rank: int, *, ranks: Sequence[int], op_id: str = "reshard") -> StepProgram:
    """The operations of global rank `rank` in a move over the group `ranks`."""
    return StepProgram(rank=rank, ops=tuple(_Lowering(plan, rank, tuple(ranks), op_id).ops()))


class _Lowering:
    """Messages of one rank in the plan's order, and what came before each."""

    def __init__(self, plan: ReshardPlan, rank: int, ranks: tuple[int, ...], op_id: str) -> None:
        self.plan, self.rank, self.op_id = plan, rank, op_id
        self.position = {r: i for i, r in enumerate(ranks)}
        self.tags: dict[tuple[int, int], int] = defaultdict(int)
        self.whole: dict[int, list[tuple[Box, str]]] = defaultdict(list)
        """Boxes of whole values that came for each move, with the message."""
        self.terms: dict[int, list[tuple[Box, str]]] = defaultdict(list)
        """Boxes of terms of sums that came for each move."""
        self.sums: dict[int, list[Box]] = defaultdict(list)
        for reduction in plan.reductions:
            if reduction.rank == rank:
                self.sums[reduction.move].append(reduction.box)

    def ops(self) -> list[Op]:
        n = len(self.position)
        sent = HASH_BYTES * (n - 1)
        compare = Op(
            id=compare_id(self.op_id),
            kind="collective",
            lane="comm",
            axis=AXIS,
            collective="all_gather",
            sent_bytes=sent,
        )
        out = [compare] if n > 1 else []
        out += [self._message(hop) for hop in self.plan.programs.get(self.rank, ())]
        ids = tuple(op.id for op in out if op.beside)
        return [*out, Op(id=f"{self.op_id}.end", kind="host", lane="host", needs=ids)]

    def _message(self, hop: Hop) -> Op:
        tag = self.tags[hop.src, hop.dst]
        self.tags[hop.src, hop.dst] += 1
        id, sends = message_id(self.op_id, hop.src, hop.dst, tag), hop.src == self.rank
        needs: set[str] = set()
        for part in hop.parts:
            if sends:
                needs |= self._bringing(part)
            else:
                (self.whole if part.term == WHOLE else self.terms)[part.move].append((part.box, id))
        peer = self.position[hop.dst if sends else hop.src]
        return Op(
            id=id,
            kind="collective",
            lane="comm",
            axis=AXIS,
            collective="exchange",
            sends_to=peer if sends else None,
            receives_from=None if sends else peer,
            beside=True,
            needs=tuple(sorted(needs)),
            sent_bytes=sum(part.num_bytes(self.plan.moves) for part in hop.parts) if sends else 0.0,
        )

    def _bringing(self, part: MovePart) -> set[str]:
        """Messages that brought what is sent on: none where the rank had it."""
        move = self.plan.moves[part.move]
        if part.term != WHOLE or (move.src.num_terms == 1 and self._covers(part)):
            return set()
        exact = [id for box, id in self.whole[part.move] if box == part.box]
        found = {exact[-1]} if exact else {id for box, id in self.whole[part.move] if box.intersection(part.box)}
        for total in self.sums[part.move]:
            if part.box.intersection(total):
                found |= {id for box, id in self.terms[part.move] if box.intersection(total)}
        return found

    def _covers(self, part: MovePart) -> bool:
        """Whether the rank's source holds all of a part."""
        own = (held.box.intersection(part.box) for held in self.plan.moves[part.move].src.of_rank(self.rank))
        return sum(common.num_elements for common in own if common is not None) == part.box.num_elements

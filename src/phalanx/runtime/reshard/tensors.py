"""One rank's tensors under a reshard program: reads what it sends, writes what it receives, adds, copies.

Decides nothing: `program.py` says where everything lies. Must never change: source tensors are only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from phalanx.plan.reshard import ReshardPlan
from phalanx.runtime.reshard.program import PartPiece, Placed, RankProgram, Step
from phalanx.runtime.reshard.staging import Usage
from phalanx.runtime.reshard.sums import BoxSum

Tensors = Sequence[torch.Tensor | None]
"""One for each move; None where the rank holds nothing of it."""


class RankTensors:
    """Source and destination tensors of `program`, and its sums."""

    def __init__(self, plan: ReshardPlan, program: RankProgram, *, source: Tensors, dest: Tensors) -> None:
        self.program, self.source, self.dest = program, source, dest
        self.usage = Usage()
        """Usage of the sums."""
        self._copies = iter(program.copies)
        self.sums = [
            BoxSum(
                place,
                num_terms=plan.moves[place.reduction.move].src.num_terms,
                like=self._like(place.reduction.move),
                own=partial(self._gathered, place.own, place.reduction.box.sizes) if place.own else None,
                keep=partial(self._keep, place.kept),
                usage=self.usage,
            )
            for place in program.sums
        ]

    def _like(self, move: int) -> torch.Tensor:
        found = self.source[move] if self.source[move] is not None else self.dest[move]
        assert found is not None, "a rank that moves part of a tensor holds some of it before or after"
        return found

    # ---- messages ------------------------------------------------------------------------------------------------------

    def direct(self, step: Step, wire: torch.device) -> torch.Tensor | None:
        """The bytes of a message where they lie, if that is one run in a source or destination tensor that the wire can reach."""
        if len(step.placed) != 1 or len(step.placed[0].pieces) != 1:
            return None
        piece = step.placed[0].pieces[0]
        if piece.store not in ("source", "dest"):
            return None
        view = self._view(piece)
        plain = view.is_contiguous() and not view.is_conj() and not view.is_neg()  # memory is what is sent
        return _bytes(view) if plain and view.device == wire else None

    def pack(self, step: Step, buffer: torch.Tensor) -> torch.Tensor:
        """Put a message together at the beginning of `buffer`; returns its bytes there."""
        for placed in step.placed:
            into = self._typed(placed, buffer)
            target = into if into is not None else self._scratch(placed, buffer.device)
            for piece in placed.pieces:
                target[piece.within.slices()].copy_(self._view(piece))
            if into is None:
                buffer[placed.start : placed.stop].copy_(_bytes(target))
        for number in step.reads:
            self.sums[number].read()
        return buffer[: step.nbytes]

    def unpack(self, step: Step, buffer: torch.Tensor) -> None:
        """Take a message apart: into the destination, or into sums."""
        for placed in step.placed:
            values = self._typed(placed, buffer)
            if values is None:
                values = self._scratch(placed, buffer.device)
                _bytes(values).copy_(buffer[placed.start : placed.stop])
            for piece in placed.pieces:
                found = values[piece.within.slices()]
                if piece.store == "term":
                    self.sums[piece.number].feed(placed.part.term, piece.local, found)
                else:
                    self._view(piece).copy_(found)

    def _typed(self, placed: Placed, buffer: torch.Tensor) -> torch.Tensor | None:
        """A part in a buffer, as the box that it is; None where its first byte is not a multiple of its element size."""
        dtype = self._like(placed.part.move).dtype
        if placed.start % dtype.itemsize:
            return None
        return buffer[placed.start : placed.stop].view(dtype).view(placed.part.box.sizes)

    def _scratch(self, placed: Placed, device: torch.device) -> torch.Tensor:
        return torch.empty(placed.part.box.sizes, dtype=self._like(placed.part.move).dtype, device=device)

    def _view(self, piece: PartPiece) -> torch.Tensor:
        if piece.store == "sum":
            return self.sums[piece.number].value(piece.local)
        tensor = self.source[piece.number] if piece.store == "source" else self.dest[piece.number]
        assert tensor is not None, "checked before anything was sent"
        return tensor[piece.local.slices()]

    # ---- inside the rank -----------------------------------------------------------------------------------------------

    def copy_some(self) -> bool:
        """Do the next local copy; False where all are done."""
        copy = next(self._copies, None)
        if copy is None:
            return False
        source, dest = self.source[copy.move], self.dest[copy.move]
        assert source is not None and dest is not None, "checked before anything was sent"
        dest[copy.dest.slices()].copy_(source[copy.source.slices()])
        return True

    def _gathered(self, own: tuple[PartPiece, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """The rank's own term of a box: a view, or its pieces put together."""
        if len(own) == 1:
            return self._view(own[0])
        out = torch.empty(sizes, dtype=self._like(own[0].number).dtype, device=self._like(own[0].number).device)
        for piece in own:
            out[piece.within.slices()].copy_(self._view(piece))
        return out

    def _keep(self, kept: tuple[PartPiece, ...], total: torch.Tensor) -> None:
        for piece in kept:
            self._view(piece).copy_(total[piece.within.slices()])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy. (One of one element may have any stride, which a view of bytes refuses.)"""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)

"""Adds the terms of a partial tensor, box by box, in the order of the terms whatever order they arrive in.

Decides nothing: which rank adds which box is the plan's. Must never change: 16-bit values are added in fp32 and rounded once, so the sum does not
depend on where it is made; a term that arrives in its turn is added from the message itself, others wait in a buffer of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.plan.layout import Box
from phalanx.runtime.reshard.program import SumPlace
from phalanx.runtime.reshard.staging import Usage

NARROW = (torch.bfloat16, torch.float16)


class BoxSum:
    """The sum of all terms of one box on its way. `own` reads the rank's own term, `keep` writes the finished sum to the destination."""

    def __init__(
        self,
        place: SumPlace,
        *,
        num_terms: int,
        like: torch.Tensor,
        own: Callable[[], torch.Tensor] | None,
        keep: Callable[[torch.Tensor], None],
        usage: Usage,
    ) -> None:
        self.place = place
        self.num_terms = num_terms
        self.sizes = place.reduction.box.sizes
        self._like, self._own, self._keep, self._usage = like, own, keep, usage
        self._next = 0
        self._total: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}
        self._missing = {t: place.reduction.box.num_elements for t in range(num_terms) if t != place.own_term}
        self._readers = place.readers
        self.done = False

    def feed(self, term: int, local: Box, values: torch.Tensor) -> None:
        """Take in part of a term; adds what has its turn."""
        self._missing[term] -= local.num_elements
        if term == self._next and local.sizes == self.sizes:
            self._add(values)
        else:
            if term not in self._waiting:
                self._waiting[term] = self._buffer(self._like.dtype)
            self._waiting[term][local.slices()].copy_(values)
        self._advance()

    def _advance(self) -> None:
        while not self.done:
            term = self._next
            if term == self.place.own_term:
                assert self._own is not None
                self._add(self._own())
            elif term in self._waiting and self._missing[term] == 0:
                buffer = self._waiting.pop(term)
                self._add(buffer)
                self._free(buffer)
            else:
                return

    def _add(self, values: torch.Tensor) -> None:
        if self._total is None:
            wide = torch.float32 if self._like.dtype in NARROW else self._like.dtype
            self._total = self._buffer(wide)
            self._total.copy_(values)
        else:
            self._total += values
        self._next += 1
        if self._next == self.num_terms:
            self._finish()

    def _finish(self) -> None:
        self.done = True
        assert self._total is not None
        self._keep(self._total)
        if self._readers == 0:
            self.drop()

    def value(self, local: Box) -> torch.Tensor:
        """Part of the finished sum."""
        assert self.done and self._total is not None, "the plan sends a sum that is not complete"
        return self._total[local.slices()]

    def read(self) -> None:
        """A message that carries (part of) the sum has been packed."""
        self._readers -= 1
        if self._readers == 0:
            self.drop()

    def drop(self) -> None:
        """Forget the sum."""
        if self._total is not None:
            self._free(self._total)
            self._total = None

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(self.sizes, dtype=dtype, device=self._like.device)
        self._usage.take(buffer.numel() * buffer.element_size())
        return buffer

    def _free(self, buffer: torch.Tensor) -> None:
        self._usage.give(buffer.numel() * buffer.element_size())


def not_summable(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Types in which terms cannot be added: of torch's wide unsigned ones only the bits can be moved."""
    never = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
    return [d for d in dtypes if d in never or (d.itemsize == 1 and d.is_floating_point)]

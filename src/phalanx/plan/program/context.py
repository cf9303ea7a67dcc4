"""Attention itself, with what context parallelism sends around it: the operations of `runtime/comm/context_parallel.py`.

    ring         forward a hop for each step but the last; backward the keys travel again, each hop from the third step on also (or only)
                 carries gradients of keys, and `home` the last ones
    all_gather   keys of all ranks, in the backward pass again, then their gradients back
    ulysses      rows to heads and back, in both passes

Must never change: a hop is listed before the computing beside which it travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.plan.program.ops import At, Op, compute, exchange

CpMethod = Literal["ring", "all_gather", "ulysses"]


def _after(op: Op, at: At, hop: int) -> Op:
    """What needs the keys (or gradients) that a hop brings; hop 0 is none."""
    return replace(op, needs=(at.id(f"attention.ring.{hop}"),)) if hop else op


@dataclass(frozen=True, kw_only=True)
class Context:
    """A rank's place on the cp axis. Without that axis, attention is one operation."""

    method: CpMethod
    size: int
    index: int

    def forward(self, at: At) -> Iterator[Op]:
        """Adds the forward part of any pass that runs the whole layer."""
        yield from self._until_computed(at)
        if self.size > 1 and self.method == "ulysses":
            yield self._collective("ulysses.out", "all_to_all_rows", at)

    def backward(self, at: At, *, again: bool) -> Iterator[Op]:
        """`again`: attention alone is recomputed. That run ends with the last thing that the backward pass needs, before rows go back."""
        rerun = self._until_computed(at._replace(phase="re")) if again else iter(())
        if self.size > 1 and self.method == "ulysses":
            yield self._collective("ulysses.out", "all_to_all_rows", at)
            yield from rerun
            yield compute("attention.core", at)
            yield self._collective("ulysses.in", "all_to_all_rows", at)
            return
        yield from rerun
        if self.size == 1:
            yield compute("attention.core", at)
        elif self.method == "ring":
            yield from self._ring_backward(at)
        else:
            yield self._collective("keys_again", "all_gather_rows", at)
            yield compute("attention.core", at)
            yield self._collective("keys", "reduce_scatter_rows", at)

    def _until_computed(self, at: At) -> Iterator[Op]:
        if self.size > 1 and self.method == "ring":
            for step in range(1, self.size + 1):
                if step < self.size:
                    yield self._hop(f"ring.{step}", at, after=step - 1)
                yield _after(compute(f"attention.core.{step}", at), at, step - 1)
            return
        if self.size > 1 and self.method == "all_gather":
            yield self._collective("keys", "all_gather_rows", at)
        elif self.size > 1:
            yield self._collective("ulysses.in", "all_to_all_rows", at)
        yield compute("attention.core", at)

    def _ring_backward(self, at: At) -> Iterator[Op]:
        """Keys travel in all steps but the last; gradients of keys in all but the first two, and home."""
        for step in range(1, self.size + 1):
            travels = step < self.size or step > 2
            if travels:
                yield self._hop(f"ring.{step}", at, after=step - 1)
            yield _after(compute(f"attention.core.{step}", at), at, step - 1)
        last = self.size if self.size > 2 else 0
        yield self._hop("ring.home", at, after=last)
        yield _after(compute("attention.core.home", at), at, last)

    def _hop(self, name: str, at: At, *, after: int = 0) -> Op:
        ends = {"to": (self.index + 1) % self.size, "source": (self.index - 1) % self.size}
        return _after(replace(exchange(at.id(f"attention.{name}"), "cp", at, **ends), beside=True), at, after)

    def _collective(self, name: str, kind: str, at: At) -> Op:
        id = at.id(f"attention.{name}")
        return Op(id=id, kind="collective", lane="comm", axis="cp", collective=kind, **at._asdict())

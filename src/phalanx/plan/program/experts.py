"""Routed experts of one layer and micro-batch, as operations in the order of a run: one list for each value of `dispatch.overlap`.

Decides nothing: it says what `runtime/moe/experts.py`, `runtime/moe/coarse.py`, `runtime/moe/overlap.py` and `runtime/moe/fused.py` do. Must never change: the same thing has the same id in all of
them, so that ways can be compared id by id:

    dispatch.rows      rows to the experts (all messages of all parts, tile by tile; by DeepEP tokens with their weights); backward: gradients of the tokens come back
    dispatch.weights   what the rows weigh (tile by tile also where their tokens are); backward: the gradients of the weights
    experts            the products of the experts; tile by tile with all waits in between, which a trace cuts out
    combine.rows       results back; backward: gradients of the output leave
    *.chunk2.*         the same of one chunk of tokens (`coarse:N`)

How many messages an exchange has tile by tile depends on the batch (and with `auto` on what the cost model finds), so all of them have the one id, and a comparison
adds up their bytes. Groups of one rank communicate nothing: there every setting is serial. Rows of one source, or for one slot, arrive in the order of slots: there nothing is sorted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.mapping import AnyFolding, micro_axis
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.moe.overlap import OverlapSetting, parse_overlap
from phalanx.plan.program.ops import At, Op, compute, host


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The groups of one rank. `shares_table` are the ranks that have the same part of the embedding's table."""

    folding: AnyFolding
    rank: int
    shares_table: tuple[int, ...]

    def size(self, axis: str) -> int:
        if axis == "embedding":
            return len(self.shares_table)
        return len(self.folding.group_of(self.rank, axis))

    def group(self, axis: str) -> tuple[int, ...]:
        """Ranks on an axis, this one among them."""
        return self.folding.group_of(self.rank, axis)

    def collective(self, id: str, kind: str, axis: str) -> Iterator[Op]:
        """Nothing, where the rank is alone on the axis."""
        if self.size(axis) > 1:
            yield Op(id=id, kind="collective", lane="comm", axis=axis, collective=kind)

    def at(self, at: At, name: str, kind: str, axis: str) -> Iterator[Op]:
        """The same of one layer and micro-batch."""
        for op in self.collective(at.id(name), kind, axis):
            yield dataclasses.replace(op, **at._asdict())


def moe_operations(
    reach: Reach, spec: DispatchSpec, at: At, beside: Sequence[Op] = (), *, slots: int = 2
) -> Iterator[Op]:
    """Dispatch, experts and combine; `beside` are the operations of the shared expert, `slots` the experts that a rank holds."""
    alone = reach.size("ep_etp") == 1
    way = OverlapSetting(kind="serial") if alone else parse_overlap(spec.overlap)
    experts = _Experts(reach, spec, at, sorts=not alone and slots > 1)
    if way.kind == "serial":
        return iter((*experts.serial(), *beside))
    if way.kind == "coarse":
        return iter((*experts.coarse(way.chunks), *beside))
    if way.kind == "fused":
        return iter((*experts.fused(), *beside))
    return experts.by_tiles(beside)


def _posted(op: Op, after: str) -> Op:
    """An exchange of a chunk, posted long before it is waited for; what is not sent stays."""
    return dataclasses.replace(op, posted_after=after) if op.collective == "all_to_all_rows" else op


@dataclass(frozen=True)
class _Experts:
    reach: Reach
    spec: DispatchSpec
    at: At
    sorts: bool
    """Whether rows must be brought into the order of slots, and back."""

    def serial(self) -> Iterator[Op]:
        yield from self._decided()
        yield from self._dispatch("dispatch.")
        yield compute("experts", self.at)
        yield from self._combine("combine.")

    def coarse(self, chunks: int) -> Iterator[Op]:
        """Chunk by chunk in the order in which they are waited for: each leaves before the one before is waited for, and all come back at the end."""
        yield from self._decided()
        back: list[Op] = []
        leaving = [[*self._dispatch(f"dispatch.chunk{number}.")] for number in range(chunks)]
        yield leaving[0][0]
        for number, (permute, *arriving) in enumerate(leaving):
            yield from (following[0] for following in leaving[number + 1 : number + 2])
            yield from (_posted(op, permute.id) for op in arriving)
            experts = compute(f"experts.chunk{number}", self.at)
            yield experts
            ways = [*self._combine(f"combine.chunk{number}.")]
            at_once = [op for op in ways if op.id.endswith((".sort", "_etp"))]
            yield from at_once
            back += [_posted(op, [experts, *at_once][-1].id) for op in ways[len(at_once) :]]
        yield from back

    def fused(self) -> Iterator[Op]:
        """Rows travel inside the kernels of the experts."""
        yield from self._decided()
        yield from self.reach.at(self.at, "dispatch.weights", "all_to_all_rows", "ep")
        yield compute("experts", self.at)

    def by_tiles(self, beside: Sequence[Op]) -> Iterator[Op]:
        """The shared expert is computed while the first rows travel."""
        yield from self._decided()
        rows, experts = self._messages("dispatch.rows"), compute("experts", self.at)
        results, pieces = self._messages("combine.rows"), len(rows.peers) + 1
        yield self._messages("dispatch.weights")
        yield compute("dispatch.permute", self.at)
        yield dataclasses.replace(rows, beside=True, pieces=pieces)
        yield from beside
        yield dataclasses.replace(experts, streams=(rows.id,), pieces=pieces)
        yield dataclasses.replace(results, streams=(experts.id,), pieces=pieces)
        yield compute("combine.sum", self.at)

    def _messages(self, name: str) -> Op:
        """Messages from this rank to every other of the group and back, as many as the batch needs."""
        others = tuple(i for i, rank in enumerate(self.reach.group("ep_etp")) if rank != self.reach.rank)
        id = self.at.id(name)
        return Op(
            id=id,
            kind="collective",
            lane="comm",
            axis="ep_etp",
            collective="messages",
            peers=others,
            **self.at._asdict(),
        )

    def _decided(self) -> Iterator[Op]:
        """Which pairs are kept, and how many there are of each."""
        spec, at = self.spec, self.at
        if self._sends_tokens:
            return
        if spec.policy == "drop" and spec.drop_scope == "full_sequence":
            for what in ("experts", "weights", "index"):
                yield from self.reach.at(at, f"dispatch.full_{what}", "all_gather", micro_axis(self.reach.folding))
        if not spec.is_static:
            yield from self.reach.at(at, "dispatch.counts", "all_gather", "ep_etp")
            yield host("dispatch.sizes", at)

    @property
    def _gathers(self) -> bool:
        return self.spec.transport == "all_gather" and self.reach.size("ep_etp") > 1

    @property
    def _sends_tokens(self) -> bool:
        return self.spec.transport == "deepep" and self.reach.size("ep") > 1

    def _dispatch(self, name: str) -> Iterator[Op]:
        at = self.at
        if self._sends_tokens:
            yield from self.reach.at(at, name + "rows", "dispatch_tokens", "ep")
            yield host("dispatch.sizes", at)  # the library's own wait
            yield compute(name + "permute", at)
            return
        if self._gathers:
            for what in ("rows", "weights", "pairs"):
                yield from self.reach.at(at, name + what, "all_gather_rows", "ep_etp")
            yield compute(name + "permute", at)
            return
        yield compute(name + "permute", at)
        for what in ("rows", "weights"):
            yield from self.reach.at(at, name + what, "all_to_all_rows", "ep")
            yield from self.reach.at(at, f"{name}{what}_etp", "all_gather_rows", "etp")
        yield from self._sort(name)

    def _sort(self, name: str) -> Iterator[Op]:
        if self.sorts:
            yield compute(name + "sort", self.at)

    def _combine(self, name: str) -> Iterator[Op]:
        at = self.at
        if self._gathers:
            yield compute(name + "sum", at)
            yield from self.reach.at(at, name + "rows", "reduce_scatter_rows", "ep_etp")
            return
        if self._sends_tokens:
            yield compute(name + "sum", at)
            yield from self.reach.at(at, name + "rows", "combine_tokens", "ep")
            return
        yield from self._sort(name)
        yield from self.reach.at(at, name + "rows_etp", "reduce_scatter_rows", "etp")
        yield from self.reach.at(at, name + "rows", "all_to_all_rows", "ep")
        yield compute(name + "sum", at)

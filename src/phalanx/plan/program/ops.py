"""Operations of a step and their ids: what a program lists, a run records and a prediction costs.

Must never change: an operation that a run records carries the id that is made here; `runtime/`, `models/` and `train/` build theirs with these
functions. What carries the gradient of an operation has its id with `bwd` in place of `fwd`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.plan.pipeline import Transfer

Phase = Literal["fwd", "bwd", "re", "count", "eval"]
Kind = Literal["compute", "collective", "host"]


def op_id(name: str, *, microbatch: int | None = None, layer: int | None = None, phase: Phase | None = None) -> str:
    """Id of an operation: `mb{microbatch}.L{layer}.{phase}.{name}`, parts that are None left out."""
    parts = (
        None if microbatch is None else f"mb{microbatch}",
        None if layer is None else f"L{layer}",
        phase,
        name,
    )
    return ".".join(part for part in parts if part is not None)


def gradient_id(key: str, axis: str) -> str:
    """Id of the reduction of a flat layout (a key of `plan.layout.flat_layouts`) over an axis."""
    return f"gradient/{key}/{axis}"


def boundary_id(transfer: Transfer, *, microbatch: int, phase: Phase) -> str:
    """`mb3.fwd.boundary1`: what crosses from stage 1 to stage 2 for micro-batch 3 of the step (or back: `bwd`).

    A skip connection names both of its stages: `mb3.fwd.skip0to3`. `phase` is that of the pass forward.
    """
    lower, upper = transfer.edge
    name = f"boundary{lower}" if transfer.span == 1 else f"skip{lower}to{upper}"
    return op_id(name, microbatch=microbatch, phase=phase if transfer.direction == "forward" else "bwd")


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of one rank. A collective names its axis (a key of `folding.GROUP_AXES`) and its kind in `collective`.

    An `exchange` names positions on that axis: whom this rank sends to, whom it receives from; or one of both.
    """

    id: str
    kind: Kind
    lane: Literal["compute", "comm", "host"]
    microbatch: int | None = None
    layer: int | None = None
    phase: Phase | None = None
    axis: str = ""
    collective: str = ""
    sends_to: int | None = None
    receives_from: int | None = None
    peers: tuple[int, ...] = ()
    """All peers of an exchange with several ranks; the first is also in `sends_to` or `receives_from`."""
    beside: bool = False
    """The rank goes on while it is under way; whoever has to wait for it names it in `needs`. All else holds the rank until its end."""
    needs: tuple[str, ...] = ()
    """Operations of this rank that must have ended before this one begins, besides those that hold the rank before it."""
    posted_after: str = ""
    """Operation at whose end a collective, which stands where it is waited for, was posted."""
    streams: tuple[str, ...] = ()
    """Operations whose output it takes piece by piece: it begins with their first piece, and ends a piece after them at the earliest."""
    pieces: int = 1
    """Number of pieces."""
    products: tuple[tuple[float, int, int, int], ...] = ()
    """What it multiplies in a forward pass: rows, columns of the result, inner dim, and how many matrices share the rows (experts)."""
    flops: float = 0.0
    """FLOP of products and attention (causal half counted); of one rank, as all else here. See `plan/program/work.py`."""
    moved_bytes: float = 0.0
    """Read and written by what is bound by memory."""
    sent_bytes: float = 0.0
    """What leaves this rank for others, as `core.events.Collective` counts it."""


class At(NamedTuple):
    """Where in a step an operation of the model stands. `layer` is None for embedding, loss and boundaries."""

    microbatch: int
    layer: int | None
    phase: Phase

    def id(self, name: str) -> str:
        return op_id(name, microbatch=self.microbatch, layer=self.layer, phase=self.phase)


def compute(name: str, at: At) -> Op:
    return Op(id=at.id(name), kind="compute", lane="compute", **at._asdict())


def host(name: str, at: At) -> Op:
    """Something that the host waits for."""
    return Op(id=at.id(name), kind="host", lane="host", **at._asdict())


def exchange(id: str, axis: str, at: At, *, to: int | None = None, source: int | None = None) -> Op:
    """Messages to and from single ranks of an axis."""
    return Op(
        id=id,
        kind="collective",
        lane="comm",
        axis=axis,
        collective="exchange",
        sends_to=to,
        receives_from=source,
        **at._asdict(),
    )


_MIRROR = {
    "all_gather_rows": "reduce_scatter_rows",
    "reduce_scatter_rows": "all_gather_rows",
    "dispatch_tokens": "combine_tokens",
    "combine_tokens": "dispatch_tokens",
}
"""What carries the gradient of a collective, where it is another one."""

_FORWARD_ONLY = (
    "router.balance",
    "dispatch.full_experts",
    "dispatch.full_weights",
    "dispatch.full_index",
    "dispatch.counts",
    "dispatch.sizes",
    "dispatch.pairs",
    "loss.shares",
)
"""Integers and decisions: they have no gradient."""


def mirrored(ops: Iterable[Op]) -> Iterator[Op]:
    """The backward pass of operations that are listed in forward order: what was waited for is what is posted, and the other way."""
    forward = list(ops)
    streams, needs, posted = _reversed_edges(forward)
    kept = [op for op in reversed(forward) if not op.id.endswith(_FORWARD_ONLY)]
    listed = {op.id for op in kept}
    for op in kept:
        waited = {id: None for id in needs.get(op.id, ()) if id in listed}
        yield dataclasses.replace(
            op,
            collective=_MIRROR.get(op.collective, op.collective),
            beside=op.beside or op.id in posted,
            needs=tuple(waited),
            posted_after="",
            streams=tuple(id for id in streams.get(op.id, ()) if id in listed),
        )


def _reversed_edges(forward: list[Op]) -> tuple[dict[str, list[str]], dict[str, list[str]], set[str]]:
    """What the gradient of each operation takes piece by piece, what it waits for; and which gradients are posted where they
    stand."""
    streams: dict[str, list[str]] = {}
    needs: dict[str, list[str]] = {}
    posted = set()
    for before, op in zip([None, *forward], forward, strict=False):
        for id in op.streams:
            streams.setdefault(id, []).append(op.id)
        if op.posted_after:
            posted.add(op.id)
            needs.setdefault(op.posted_after, []).append(op.id)
        elif op.beside and before is not None:
            needs.setdefault(before.id, []).append(op.id)
    return streams, needs, posted

"""Causal attention over sequences that the ranks of one axis share in the zigzag layout of `plan/attention/zigzag.py`, in three ways.

    ring         keys and values travel from rank to rank while each rank computes with those that it has (arXiv 2310.01889); in the backward
                 pass they travel again, and the gradients of each rank's keys follow one step behind, to arrive home at the end
    all_gather   every rank gets all keys, and again in the backward pass; their gradients are summed where they belong
    ulysses      an all-to-all gives each rank whole sequences of some heads (arXiv 2309.14509), and the ordinary kernel runs on them

All keep nothing for the backward pass but this rank's part of queries, keys, values and output (ulysses: as much of whole sequences).

What the ring hides: in the forward pass keys arrive during the step before the one that needs them. In the backward pass as well, and gradients
travel during the step after the one that added to them; the last hop, home, takes place while the rank does that part of the work with its
own keys which was left for it (`first_and_last`). With `Collectives.synchronous` nothing is hidden and all else is the same.

Must never change: gradients of keys are summed in the wide type (fp32 for 16-bit types), rank after rank in the order of the ring, so they have the
same bits every time.

Legend: B sequences, L positions of this rank, S = size * L, A/G query and key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops.attention import Segments, causal_attention
from phalanx.kernels.ops.block_attention import (
    Blocks,
    PartialAttention,
    SavedAttention,
    attend,
    attend_backward,
    wide_type,
)
from phalanx.plan.attention import (
    SequenceLayout,
    attention_blocks,
    first_and_last,
    gathered_blocks,
    make_layout,
    ring_source,
)
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.comm.row_collectives import backward_id

Method = Literal["ring", "all_gather", "ulysses"]
Name = Callable[[str], str]
"""What an operation does -> its id."""
KEYS, GRADIENTS = 0, 1
"""Tags of the ring's messages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextParallel:
    """One attention layer's way over the ranks of `axis`."""

    axis: Axis
    comms: Collectives
    method: Method = "ring"
    impl: Impl = "fast"
    lanes: Lanes = SERIAL

    @property
    def in_steps(self) -> bool:
        """Whether a recorded step has an event for each of its steps."""
        return self.method == "ring" and self.axis.size > 1

    def takes_widths(self, q_BLAD: torch.Tensor) -> bool:
        """Whether values may have another width than queries and keys: on a device that holds whole sequences."""
        return self.axis.size == 1 and self.impl == "fast" and q_BLAD.device.type != "cpu"

    def attention(
        self, q_BLAD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor, segments: Segments, *, name: Name
    ) -> torch.Tensor:
        """Softmax(q k^T / sqrt(D)) v over the keys that each query may see, those of other ranks included; (B, L, A, D).

        `segments` are the documents of the whole sequences.
        """
        if self.axis.size == 1:
            return causal_attention(q_BLAD, k_BLGD, v_BLGD, segments, impl=self.impl, lanes=self.lanes)
        layout = make_layout("zigzag", seq_len=q_BLAD.shape[1] * self.axis.size, cp=self.axis.size)
        work = _Work(self, layout, tuple(tuple(row) for row in segments), name)
        if self.method == "ulysses":
            return _ulysses(q_BLAD, k_BLGD, v_BLGD, work)
        function = _Ring if self.method == "ring" else _Gathered
        out: torch.Tensor = function.apply(q_BLAD, k_BLGD, v_BLGD, work)
        return out


@dataclass(frozen=True, eq=False)
class _Work:
    """One call of `attention`."""

    how: ContextParallel
    layout: SequenceLayout
    segments: tuple[tuple[int, ...], ...]
    name: Name

    @property
    def ring(self) -> tuple[Blocks, ...]:
        """Blocks of each step of the ring."""
        return _ring_blocks(self.layout, self.segments, self.how.axis.index)

    def recorded(self, what: str, *, backward: bool = False) -> AbstractContextManager[None]:
        """Records what is computed inside, in a step that is traced."""
        id = self.name(what)
        return self.how.comms.doing(backward_id(id) if backward else id)

    def add_keys(self, q_BLAD: torch.Tensor, kv: torch.Tensor, blocks: Blocks, partial: PartialAttention) -> None:
        attend((q_BLAD, kv[0], kv[1]), blocks, partial, impl=self.how.impl, lanes=self.how.lanes)

    def add_gradients(
        self, q_BLAD: torch.Tensor, kv: torch.Tensor, blocks: Blocks, known: SavedAttention, *grads: torch.Tensor
    ) -> None:
        """`grads` of q and of both k and v."""
        dq, dkv = grads
        attend_backward(
            (q_BLAD, kv[0], kv[1]), blocks, known, (dq, dkv[0], dkv[1]), impl=self.how.impl, lanes=self.how.lanes
        )


@lru_cache(maxsize=64)
def _ring_blocks(layout: SequenceLayout, segments: tuple[tuple[int, ...], ...], rank: int) -> tuple[Blocks, ...]:
    sources = [ring_source(rank, step, cp=layout.cp) for step in range(layout.cp)]
    return tuple(tuple(attention_blocks(layout, row, q_rank=rank, kv_rank=s) for row in segments) for s in sources)


@lru_cache(maxsize=64)
def _gathered_blocks(layout: SequenceLayout, segments: tuple[tuple[int, ...], ...], rank: int) -> Blocks:
    return tuple(gathered_blocks(layout, row, q_rank=rank) for row in segments)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    """Sums of gradients of `x`."""
    return torch.zeros(x.shape, dtype=wide_type(x.dtype), device=x.device)


# ---- ring --------------------------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Keys and values of step t came from the rank t places before; each step passes them on to the next rank."""

    @staticmethod
    def forward(
        ctx: Any, q_BLAD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor, work: _Work
    ) -> torch.Tensor:
        kv, partial = torch.stack((k_BLGD, v_BLGD)), PartialAttention.empty(q_BLAD)
        steps = work.how.axis.size
        for step, blocks in enumerate(work.ring):
            hop = _Hop(work, work.name(f"ring.{step + 1}"))
            coming = hop.take(kv, tag=KEYS) if step + 1 < steps else kv
            with hop, work.recorded(f"core.{step + 1}"):
                work.add_keys(q_BLAD, kv, blocks, partial)
            kv = coming
        out_BLAD = partial.out_BLAD.to(q_BLAD.dtype)
        ctx.save_for_backward(q_BLAD, k_BLGD, v_BLGD, out_BLAD, partial.lse_BAL)
        ctx.work = work
        return out_BLAD

    @staticmethod
    def backward(ctx: Any, d_out_BLAD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BLAD, k_BLGD, v_BLGD, out_BLAD, lse_BAL = ctx.saved_tensors
        work: _Work = ctx.work
        steps, known = work.how.axis.size, SavedAttention.of(out_BLAD, lse_BAL, d_out_BLAD)
        kv = own = torch.stack((k_BLGD, v_BLGD))
        dq, d_own, d_before = _zeros(q_BLAD), _zeros(own), None
        parts = [first_and_last(row) for row in work.ring[0]]
        first, last = (tuple(part[i] for part in parts) for i in range(2))
        for step, blocks in enumerate((first, *work.ring[1:])):
            hop = _Hop(work, backward_id(work.name(f"ring.{step + 1}")))
            coming = hop.take(kv, tag=KEYS) if step + 1 < steps else kv
            arrived = hop.take(d_before, tag=GRADIENTS) if d_before is not None else None
            d_here = d_own if step == 0 else _zeros(kv)
            with hop, work.recorded(f"core.{step + 1}", backward=True):
                work.add_gradients(q_BLAD, kv, blocks, known, dq, d_here)
            if step:
                d_before = d_here if arrived is None else d_here.add_(arrived)
            kv = coming
        hop = _Hop(work, backward_id(work.name("ring.home")))
        assert d_before is not None  # an axis of one rank does not come here
        home = hop.take(d_before, tag=GRADIENTS)
        with hop, work.recorded("core.home", backward=True):
            work.add_gradients(q_BLAD, own, last, known, dq, d_own)
        d_own.add_(home)
        return dq.to(q_BLAD.dtype), d_own[0].to(k_BLGD.dtype), d_own[1].to(v_BLGD.dtype), None


class _Hop:
    """What goes to the next rank and comes from the one before it, all at once, while the body of `with` computes.

    `take` says what goes and returns where its counterpart will be; nothing is sent where nothing was said.
    """

    def __init__(self, work: _Work, op_id: str) -> None:
        self._work, self._op_id = work, op_id
        self._sends: list[Message] = []
        self._receives: list[Message] = []
        self._exchange: Exchange | None = None

    def take(self, x: torch.Tensor, *, tag: int) -> torch.Tensor:
        axis, coming = self._work.how.axis, torch.empty_like(x)
        self._sends.append(Message(x, (axis.index + 1) % axis.size, tag))
        self._receives.append(Message(coming, (axis.index - 1) % axis.size, tag))
        return coming

    def __enter__(self) -> None:
        if self._sends:
            how = self._work.how
            self._exchange = how.comms.start_exchange(self._sends, self._receives, how.axis, op_id=self._op_id)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._exchange is not None:
            self._exchange.wait()


# ---- all-gather --------------------------------------------------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks in the order of the sequence; not kept, but gathered again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q_BLAD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor, work: _Work
    ) -> torch.Tensor:
        partial = PartialAttention.empty(q_BLAD)
        kv = _gather(torch.stack((k_BLGD, v_BLGD)), work, work.name("keys"))
        work.add_keys(q_BLAD, kv, _gathered_blocks(work.layout, work.segments, work.how.axis.index), partial)
        out_BLAD = partial.out_BLAD.to(q_BLAD.dtype)
        ctx.save_for_backward(q_BLAD, k_BLGD, v_BLGD, out_BLAD, partial.lse_BAL)
        ctx.work = work
        return out_BLAD

    @staticmethod
    def backward(ctx: Any, d_out_BLAD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BLAD, k_BLGD, v_BLGD, out_BLAD, lse_BAL = ctx.saved_tensors
        work: _Work = ctx.work
        known = SavedAttention.of(out_BLAD, lse_BAL, d_out_BLAD)
        kv = _gather(torch.stack((k_BLGD, v_BLGD)), work, backward_id(work.name("keys_again")))
        dq, dkv = _zeros(q_BLAD), _zeros(kv)
        blocks = _gathered_blocks(work.layout, work.segments, work.how.axis.index)
        work.add_gradients(q_BLAD, kv, blocks, known, dq, dkv)
        own = _scatter(dkv, work, backward_id(work.name("keys")))
        return dq.to(q_BLAD.dtype), own[0].to(k_BLGD.dtype), own[1].to(v_BLGD.dtype), None


def _gather(kv: torch.Tensor, work: _Work, op_id: str) -> torch.Tensor:
    """(2, B, L, G, D) of each rank -> (2, B, S, G, D) on all, in the order of the sequence."""
    axis = work.how.axis
    parts = work.how.comms.gather_rows_raw(kv.unsqueeze(0), axis, (1,) * axis.size, op_id)
    return parts.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, _index(work.layout.inverse, kv)]


def _scatter(dkv: torch.Tensor, work: _Work, op_id: str) -> torch.Tensor:
    """(2, B, S, G, D) gradients of each rank -> this rank's (2, B, L, G, D) of their sum."""
    axis = work.how.axis
    parts = dkv[:, :, _index(work.layout.order, dkv)].unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4, 5)
    return work.how.comms.scatter_rows_raw(parts, axis, (1,) * axis.size, op_id)[0]


def _index(places: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places).to(like.device, non_blocking=True)


# ---- Ulysses -----------------------------------------------------------------------------------------------------------------------


def _ulysses(q_BLAD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor, work: _Work) -> torch.Tensor:
    """Whole sequences of A / size query heads and the key/value heads that they use, which several ranks may share."""
    how, size, num_kv = work.how, work.how.axis.size, k_BLGD.shape[2]
    copies = max(1, size // num_kv)
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k_BLGD, v_BLGD))
    parts = [x.unflatten(2, (size, -1)) for x in (q_BLAD, k, v)]
    heads = [x.shape[3] for x in parts]
    rows = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4)  # (size, B, L, heads of a rank, D)
    inverse, order = (_index(x, q_BLAD) for x in (work.layout.inverse, work.layout.order))
    swapped = _swap(rows, work, work.name("ulysses.in"))  # (size: who has the positions, B, L, ...)
    whole = swapped.permute(1, 0, 2, 3, 4).flatten(1, 2)[:, inverse]
    q, k, v = whole.split(heads, dim=2)
    out_BSaD = causal_attention(q, k, v, work.segments, impl=how.impl, lanes=how.lanes)
    back = out_BSaD[:, order].unflatten(1, (size, -1)).permute(1, 0, 2, 3, 4)
    return _swap(back, work, work.name("ulysses.out")).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _swap(x: torch.Tensor, work: _Work, op_id: str) -> torch.Tensor:
    """(size, ...): part j goes to rank j of the axis, and part i comes from rank i."""
    ones = (1,) * work.how.axis.size
    return work.how.comms.all_to_all_rows(x, in_splits=ones, out_splits=ones, axis=work.how.axis, op_id=op_id)

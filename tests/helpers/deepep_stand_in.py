"""What stands in for DeepEP's module: a `Buffer` with the same calls, checks and results as the library's, over gloo, for any floating-point type.

Written by the documentation and the assertions of github.com/deepseek-ai/DeepEP (2.1, `deep_ep/buffers/legacy.py`, `csrc/legacy/buffer.hpp`); no line is copied. Tokens arrive by source, those of a
source in their order, with choices of this rank's experts only (-1 and weight 0 elsewhere); sums are taken over ranks, ascending, in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

Plant = Literal["", "order", "sum"]
"""What is wrong: tokens arrive in another order than their choices; sums go to other tokens."""


@dataclass(frozen=True)
class Config:
    """Room of a buffer, as it is asked for."""

    nvl: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvl * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass
class Seen:
    """What the library was asked for, by this rank."""

    made: int = 0
    waits: int = 0
    """Dispatches that wait on the host."""
    cached: int = 0
    combined: int = 0


def stand_in(group: dist.ProcessGroup, *, plant: Plant = "") -> SimpleNamespace:
    """A module for `TokenBuffers(library=...)`, whose buffers move tokens over `group`; `seen` counts."""
    seen = Seen()

    class Here(Buffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, over=group, seen=seen, plant=plant)

    return SimpleNamespace(Buffer=Here, seen=seen)


class Buffer:
    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *,
        comm: Any = None,
        over: Any,
        seen: Seen,
        plant: Plant,
    ) -> None:
        assert group is None and num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._over, self._seen, self._plant = over, seen, plant
        handles = comm.allgather(bytearray([self.rank, 255]))
        assert handles == [bytearray([rank, 255]) for rank in range(self.size)]
        assert comm.allgather(self.rank) == list(range(self.size)) and comm.allgather(None) == [None] * self.size
        seen.made += 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(2)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(1)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        _check_choices(topk_idx)
        assert num_experts % self.size == 0
        each = num_experts // self.size
        is_in_TP = torch.stack([(topk_idx // each == rank).any(1) for rank in range(self.size)], 1)
        to_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).to(torch.int32)
        return is_in_TP.sum(0, dtype=torch.int32), None, to_expert, is_in_TP, None

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.dim() == 2 and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            self._seen.cached += 1
            token_of_entry, sends, takes, tokens = handle
            assert len(x) == tokens
            return self._travel(x[token_of_entry], sends, takes), None, None, None, None, None
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        _check_choices(topk_idx)
        assert topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape and len(x) == len(topk_idx)
        assert topk_weights.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        self._seen.waits += 1
        sends = num_tokens_per_rank.tolist()
        takes = self._travel(num_tokens_per_rank, [1] * self.size, [1] * self.size).tolist()
        token_of_entry = torch.cat([is_token_in_rank[:, rank].nonzero().squeeze(1) for rank in range(self.size)])
        came = [self._travel(tensor[token_of_entry], sends, takes) for tensor in (x, topk_idx, topk_weights)]
        each = len(num_tokens_per_expert) // self.size
        local = came[1] - self.rank * each
        here = (local >= 0) & (local < each)
        local, weights = torch.where(here, local, -1), torch.where(here, came[2], 0)
        counts = torch.bincount(local[here], minlength=each).tolist()
        rows = came[0].flip(0) if self._plant == "order" else came[0]
        return rows, local, weights, counts, (token_of_entry, sends, takes, len(x)), None

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
        assert x.dim() == 2 and x.is_contiguous()
        self._seen.combined += 1
        token_of_entry, sends, takes, tokens = handle
        assert len(x) == sum(takes) and (topk_weights is None or len(topk_weights) == len(x))
        if self._plant == "sum":
            token_of_entry = token_of_entry.flip(0)
        summed = [
            None if part is None else _summed(self._travel(part, takes, sends), token_of_entry, sends, tokens)
            for part in (x, topk_weights)
        ]
        return *summed, None

    def _travel(self, x: torch.Tensor, sends: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        out = x.new_empty((sum(takes), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(takes), list(sends), group=self._over)
        return out


def _check_choices(topk_idx: torch.Tensor) -> None:
    assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64


def _summed(parts: torch.Tensor, token_of_entry: torch.Tensor, sends: Sequence[int], tokens: int) -> torch.Tensor:
    """Rank after rank; a token is at most once in the part of each."""
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
    total = wide.new_zeros((tokens, *wide.shape[1:]))
    for rows, at in zip(wide.split(list(sends)), token_of_entry.split(list(sends)), strict=True):
        total[at] += rows
    return total.to(parts.dtype)

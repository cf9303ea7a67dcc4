"""Causal attention inside documents on a GPU: one call of torch whatever the documents are, by the kernel that the card has.

    one document each      `scaled_dot_product_attention`: cuDNN's kernel first from compute capability 9 on, flash first below
    packed documents       flash attention over runs of one long sequence; where it cannot (fp32, heads too wide), document by document
    values of other width  as they are where cuDNN takes them (192 and 128, as of DeepSeek-V3), else filled up with zeros

Must never change: nothing is read from the device; which kernel is taken follows from shapes, types and the card alone.

Legend: B sequences, S sequence length, A query heads, G key/value heads, D head dim, V width of the values, T = B*S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Segments = Sequence[Sequence[int]]
WIDEST = 256
"""Head dim up to which flash attention exists."""
CUDNN_FIRST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


def device_attention(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGV: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """(B, S, A, V)."""
    attention = partial(_by_documents, segments=segments)
    if takes_widths(q_BSAD, v_BSGV, packed=_are_packed(segments)):
        return attention(q_BSAD, k_BSGD, v_BSGV)
    return padded(q_BSAD, k_BSGD, v_BSGV, attention)


def padded(
    q_BSAD: torch.Tensor,
    k_BSAD: torch.Tensor,
    v_BSAV: torch.Tensor,
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Causal attention whose values are narrower or wider than its queries; (B, S, A, V).

    The kernels know one width, so the narrower side is filled up with zeros: they change no score and no value.
    """
    dim, value_dim = q_BSAD.shape[-1], v_BSAV.shape[-1]
    if dim == value_dim:
        return attention(q_BSAD, k_BSAD, v_BSAV)
    width = max(dim, value_dim)
    if width > dim:
        q_BSAD = q_BSAD * math.sqrt(width / dim)  # the kernel divides the scores by the root of the width
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q_BSAD, k_BSAD, v_BSAV))
    return attention(q, k, v)[..., :value_dim]


def _by_documents(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGV: torch.Tensor, *, segments: Segments
) -> torch.Tensor:
    if not _are_packed(segments):
        return _whole(q_BSAD, k_BSGD, v_BSGV)
    return (_runs if takes_runs(q_BSAD) else _one_by_one)(q_BSAD, k_BSGD, v_BSGV, segments)


def takes_runs(q_BSAD: torch.Tensor) -> bool:
    """Whether flash attention takes such heads."""
    return q_BSAD.dtype in (torch.bfloat16, torch.float16) and q_BSAD.shape[-1] <= WIDEST and q_BSAD.shape[-1] % 8 == 0


def takes_widths(q_BSAD: torch.Tensor, v_BSGV: torch.Tensor, *, packed: bool) -> bool:
    """Whether values may be of another width than keys: cuDNN's kernel takes some widths, of whole sequences."""
    if packed or q_BSAD.shape[-1] == v_BSGV.shape[-1] or not _prefers_cudnn(q_BSAD.device):
        return False
    q, v = (x.transpose(1, 2) for x in (q_BSAD, v_BSGV))
    params = torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params, False))


@lru_cache(maxsize=8)
def _prefers_cudnn(device: torch.device) -> bool:
    """cuDNN's kernel uses what Hopper has and flash attention 2 does not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _are_packed(segments: Segments) -> bool:
    return any(len(row) > 1 for row in segments)


def _whole(q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGV: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSAD, k_BSGD, v_BSGV))
    order = list(CUDNN_FIRST if _prefers_cudnn(q.device) else FLASH_FIRST)
    with sdpa_kernel(order, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _runs(q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGV: torch.Tensor, segments: Segments) -> torch.Tensor:
    """All documents in one launch: T positions in runs that see nothing of one another."""
    lengths = tuple(length for row in segments for length in row)
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends, longest = ends.to(q_BSAD.device, non_blocking=True), max(lengths)
    q, k, v = (x.flatten(0, 1) for x in (q_BSAD, k_BSGD, v_BSGV))
    flash = (
        torch.ops.aten._flash_attention_forward
    )  # with a gradient of its own; `varlen_attn` (torch 2.10) is this call
    out_TAV: torch.Tensor = flash(q, k, v, ends, ends, longest, longest, 0.0, True, False)[0]
    return out_TAV.view(*q_BSAD.shape[:3], -1)


def _one_by_one(q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGV: torch.Tensor, segments: Segments) -> torch.Tensor:
    lengths = [length for row in segments for length in row if length]  # a kernel may divide by the length
    parts = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (q_BSAD, k_BSGD, v_BSGV)), strict=True)
    out_TAV = torch.cat([_whole(*(x.unsqueeze(0) for x in part)).squeeze(0) for part in parts])
    return out_TAV.view(*q_BSAD.shape[:3], -1)

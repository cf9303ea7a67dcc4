"""Causal attention inside documents: a token sees the earlier tokens of its own document and nothing else.

Legend: B sequences, S sequence length, A query heads, G key/value heads (A a multiple of G), D head dim, T = B*S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from phalanx.kernels.choice import Impl

Segments = Sequence[Sequence[int]]
"""Lengths of the documents packed in each sequence, host integers that sum to S."""


def causal_attention(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, segments: Segments, *, impl: Impl = "fast"
) -> torch.Tensor:
    """Softmax(q k^T / sqrt(D)) v over the keys that each query may see; (B, S, A, D)."""
    return _reference(q_BSAD, k_BSGD, v_BSGD, segments)


def segment_ids(segments: Segments, *, device: torch.device) -> torch.Tensor:
    """(B, S) number of the document that each token belongs to."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(list(row))) for row in segments]
    return torch.stack(rows).to(device)


def _reference(q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, segments: Segments) -> torch.Tensor:
    wide = torch.promote_types(q_BSAD.dtype, torch.float32)
    repeat = q_BSAD.shape[2] // k_BSGD.shape[2]
    ids_BS = segment_ids(segments, device=q_BSAD.device)
    length = ids_BS.shape[1]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=q_BSAD.device).tril()
    visible_BSS = causal_SS & (ids_BS.unsqueeze(2) == ids_BS.unsqueeze(1))
    q = q_BSAD.to(wide)
    k = k_BSGD.to(wide).repeat_interleave(repeat, dim=2)
    v = v_BSGD.to(wide).repeat_interleave(repeat, dim=2)
    scores_BASS = torch.einsum("bsad,btad->bast", q, k) / math.sqrt(q.shape[-1])
    scores_BASS = scores_BASS.masked_fill(~visible_BSS.unsqueeze(1), float("-inf"))
    return torch.einsum("bast,btad->bsad", scores_BASS.softmax(-1), v).to(q_BSAD.dtype)

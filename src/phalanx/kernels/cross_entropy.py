"""The last projection and the cross-entropy in one, so that the logits of all tokens never exist at once.

Legend: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl

IGNORE = -100
"""Label of a token that is not predicted."""


def linear_cross_entropy(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, *, impl: Impl = "fast"
) -> torch.Tensor:
    """Sum over tokens with a label of `-log softmax(hidden weight^T)[label]`, 0-d fp32 (fp64 in fp64). Divide it yourself."""
    return _reference(hidden_TH, weight_VH, labels_T)


def _reference(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    logits_TV = (hidden_TH @ weight_VH.T).to(wide)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")

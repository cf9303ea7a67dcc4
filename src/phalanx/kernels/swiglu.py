"""The gated activation silu(gate) * up (arXiv 2002.05202).

Legend: M rows, F width. `gate_up_M2F[:, 0]` is the gate, `[:, 1]` the up projection.
"""

from __future__ import annotations

import torch

from phalanx.kernels.choice import Impl


def swiglu(
    gate_up_M2F: torch.Tensor, *, row_weights_M: torch.Tensor | None = None, impl: Impl = "fast"
) -> torch.Tensor:
    """`silu(gate) * up [* row weight]`, (M, F) in the type of `gate_up_M2F`; computed in fp32 (fp64 in fp64)."""
    return reference_swiglu(gate_up_M2F, row_weights_M)


def reference_swiglu(gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
    """Plain operations, differentiated by autograd."""
    wide = torch.promote_types(gate_up_M2F.dtype, torch.float32)
    gate, up = gate_up_M2F.to(wide).unbind(-2)
    out = torch.nn.functional.silu(gate) * up
    if row_weights_M is not None:
        out = out * row_weights_M.to(wide).unsqueeze(-1)
    return out.to(gate_up_M2F.dtype)

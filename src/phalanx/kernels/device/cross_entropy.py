"""The last projection and the cross-entropy in one on devices: chunk by chunk, each a handful of launches whatever the vocabulary.

As in `kernels/ops/cross_entropy.py`, the gradient is made in the forward pass, in the place of the logits, for an upstream gradient of one. Two versions: Triton's
programs (two launches a chunk between the products) and plain operations. The host waits for neither.

Legend: T tokens, H hidden, V vocabulary (of this rank), P ranks that share it, c tokens of a chunk, v rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.kernels.device.launch import block_of, launch, warps_of, wide_of

CHUNK_BYTES = 512 << 20
"""Bytes of the logits of a chunk, which has whole thousands of tokens, one at least. Plain operations make one copy of them in the wide type. All tokens are one chunk where their
logits take no more than the sum in the wide type that several chunks need for the gradient of the weight (of programs alone)."""
TOKENS = 1024
WEIGHT_PARTS = 2
"""Products by which a chunk's part of the weight's gradient comes, so that the whole of it is not there twice."""
BLOCK = 4096
"""Logits that a program takes at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossWork:
    """What of the vocabulary is here, and how it is worked on."""

    ignore: int
    """Label of a token that is not predicted, below zero."""
    first: int = 0
    """Row of the vocabulary with which the weight of this rank begins."""
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes (P, ...) of each rank's equally shaped tensor; None: the whole vocabulary is here."""
    check: Callable[..., None] | None = None
    """Is called as `check(place, product, factors)` after each product, where products are checked."""
    programs: bool
    """Triton's programs; plain operations otherwise."""
    chunk: int | None = None
    """Tokens of a chunk; None: by `CHUNK_BYTES`."""


def device_cross_entropy(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, how: LossWork
) -> torch.Tensor:
    """`linear_cross_entropy`: the sum over tokens with a label, 0-d fp32 (fp64 in fp64). Collective where `how.gather` is."""
    out: torch.Tensor = _DeviceCrossEntropy.apply(hidden_TH, weight_VH, labels_T, how)
    return out


def losses_and_gradients(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    how: LossWork,
    *,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The sum, and the gradients of `hidden_TH` and `weight_VH` where they are needed, for an upstream gradient of one."""
    work = _Calculation(hidden_TH, weight_VH, labels_T.contiguous(), how, needs=needs)
    if len(hidden_TH):
        for chunk in work.chunks():
            work.take(chunk)
    return work.losses_T.sum(), work.d_hidden_TH, work.weight_gradient()


def scaled(x: torch.Tensor, grad: torch.Tensor, *, programs: bool) -> torch.Tensor:
    """`grad * x` of dense `x` with the 0-d `grad` in its own precision (torch would round it to the type of `x` first)."""
    if not programs or not x.numel():
        return (x.to(grad.dtype) * grad).to(x.dtype)
    from phalanx.kernels.device.programs import cross_entropy

    out = torch.empty_like(x)
    launch(
        cross_entropy.scaled, (-(-x.numel() // BLOCK),),
        x, grad, out, x.numel(), WIDE=wide_of(x.dtype, grad.dtype), BLOCK=BLOCK, num_warps=warps_of(BLOCK),
    )  # fmt: skip
    return out


class _DeviceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, how: LossWork
    ) -> torch.Tensor:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        loss, *gradients = losses_and_gradients(hidden_TH, weight_VH, labels_T, how, needs=needs)
        ctx.save_for_backward(*gradients)
        ctx.programs = how.programs
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(None if x is None else scaled(x, grad, programs=ctx.programs) for x in ctx.saved_tensors), None, None


class _Calculation:
    """One call: losses of all tokens and the gradients, collected chunk by chunk."""

    def __init__(
        self,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_T: torch.Tensor,
        how: LossWork,
        *,
        needs: tuple[bool, bool],
    ) -> None:
        self.hidden_TH, self.weight_VH, self.labels_T, self.how, self.needs = hidden_TH, weight_VH, labels_T, how, needs
        num_tokens, vocab = len(hidden_TH), len(weight_VH)
        self.wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        fit = CHUNK_BYTES // (vocab * hidden_TH.element_size()) // TOKENS * TOKENS
        at_once = hidden_TH.shape[1] * self.wide.itemsize // hidden_TH.element_size()
        fit = num_tokens if how.programs and num_tokens <= at_once else max(TOKENS, fit)
        self.size = max(1, min(num_tokens, fit if how.chunk is None else how.chunk))
        self.losses_T = torch.empty(num_tokens, dtype=self.wide, device=hidden_TH.device)
        self.d_hidden_TH = torch.empty_like(hidden_TH, memory_format=torch.contiguous_format) if needs[0] else None
        self._sum_VH: torch.Tensor | None = None

    def chunks(self) -> Iterator[_Chunk]:
        """Views of what belongs to each chunk."""
        columns = [self.hidden_TH, self.labels_T, self.losses_T]
        if not self.how.programs:
            columns += _local_labels(self.labels_T, self.how, vocab=len(self.weight_VH), dtype=self.wide)
        parts = [list(x.split(self.size)) for x in columns]
        gradients: list[Any] = [None] * len(parts[0])
        if self.d_hidden_TH is not None:
            gradients = list(self.d_hidden_TH.split(self.size))
        for gradient, hidden, labels, losses, *local in zip(gradients, *parts, strict=True):
            yield _Chunk(hidden, labels, losses, gradient, tuple(local))

    def take(self, chunk: _Chunk) -> None:
        """Losses and gradients of a chunk, whose logits are alive during this call only."""
        factors = chunk.hidden_cH, self.weight_VH.T
        logits_cV = torch.mm(*factors)
        self._check("logits forward", logits_cV, factors)
        if self.how.programs:
            self._by_programs(logits_cV, chunk)
        else:
            logits_cV = self._by_operations(logits_cV, chunk)
        if chunk.d_hidden_cH is not None:
            torch.mm(logits_cV, self.weight_VH, out=chunk.d_hidden_cH)
            self._check("logits input gradient", chunk.d_hidden_cH, (logits_cV, self.weight_VH))
        if self.needs[1]:
            self._add_weight_gradient(logits_cV, chunk.hidden_cH)

    def weight_gradient(self) -> torch.Tensor | None:
        if not self.needs[1]:
            return None
        return torch.zeros_like(self.weight_VH) if self._sum_VH is None else self._sum_VH.to(self.weight_VH.dtype)

    def _check(self, place: str, product: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.how.check is not None:
            self.how.check(place, product, factors)

    def _add_weight_gradient(self, d_logits_cV: torch.Tensor, hidden_cH: torch.Tensor) -> None:
        """`d_logits^T hidden`; over several chunks it is added up in the wide type."""
        place = "logits weight gradient"
        if self.size >= len(self.hidden_TH):
            self._sum_VH = torch.mm(d_logits_cV.T, hidden_cH)
            return self._check(place, self._sum_VH, (d_logits_cV.T, hidden_cH))
        if self._sum_VH is None:
            self._sum_VH = torch.zeros_like(self.weight_VH, dtype=self.wide, memory_format=torch.contiguous_format)
        rows = -(-len(self.weight_VH) // WEIGHT_PARTS)
        for target_vH, grad_cv in zip(self._sum_VH.split(rows), d_logits_cV.split(rows, 1), strict=True):
            part_vH = torch.mm(grad_cv.T, hidden_cH)
            self._check(place, part_vH, (grad_cv.T, hidden_cH))
            target_vH.add_(part_vH)
            del part_vH  # else two of them are there

    # ---- logits to losses and gradients --------------------------------------------------------------------------------------

    def _by_programs(self, logits_cV: torch.Tensor, chunk: _Chunk) -> None:
        from phalanx.kernels.device.programs import cross_entropy as programs

        (num_tokens, vocab), how = logits_cV.shape, self.how
        own_c3 = self.losses_T.new_empty(num_tokens, 3)
        block = block_of(vocab, BLOCK)
        shape: dict[str, Any] = {"WIDE": wide_of(logits_cV.dtype), "BLOCK": block, "num_warps": warps_of(block)}
        launch(programs.token_shares, (num_tokens,), logits_cV, chunk.labels_c, own_c3, how.first, vocab, **shape)
        shares_Pc3 = own_c3.unsqueeze(0) if how.gather is None else how.gather(own_c3)
        launch(
            programs.token_slopes, (num_tokens, -(-vocab // block) if any(self.needs) else 1),
            logits_cV, chunk.labels_c, shares_Pc3, chunk.losses_c, how.first, vocab, num_tokens, len(shares_Pc3), how.ignore,
            GRADIENT=any(self.needs), **shape,
        )  # fmt: skip

    def _by_operations(self, logits_cV: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """Makes the gradient of new memory. The largest of the probabilities is one over the sum of exponentials from the largest logit."""
        row_c1, here_c, minus_c1, ignored_c = chunk.local
        p_cV = torch.softmax(logits_cV, -1, dtype=self.wide)
        top_c, sum_c = logits_cV.amax(-1).to(self.wide), p_cV.amax(-1).reciprocal()
        z_label_c = logits_cV.gather(1, row_c1).squeeze(1) * here_c
        own_lse_c = lse_c = top_c + sum_c.log()
        if self.how.gather is not None:
            shares_Pc3 = self.how.gather(torch.stack((top_c, sum_c, z_label_c), -1))
            top_Pc, sum_Pc, z_label_Pc = shares_Pc3.unbind(-1)
            lse_c, z_label_c = torch.logsumexp(top_Pc + sum_Pc.log(), 0), z_label_Pc.sum(0)
            if any(self.needs):
                p_cV.mul_((own_lse_c - lse_c).exp().unsqueeze(1))
        torch.sub(lse_c, z_label_c, out=chunk.losses_c).masked_fill_(ignored_c, 0.0)
        if any(self.needs):
            p_cV.masked_fill_(ignored_c.unsqueeze(1), 0.0)
            p_cV.scatter_add_(1, row_c1, minus_c1)
        return p_cV.to(logits_cV.dtype)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What belongs to some tokens."""

    hidden_cH: torch.Tensor
    labels_c: torch.Tensor
    losses_c: torch.Tensor
    d_hidden_cH: torch.Tensor | None
    local: tuple[torch.Tensor, ...]
    """`_local_labels`, where operations work on it."""


def _local_labels(labels_T: torch.Tensor, how: LossWork, *, vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Row of each label here (T, 1) (any row where it is not); as numbers, whether it is here (T,), and minus that (T, 1); whether the token has none (T,)."""
    local_T = labels_T - how.first
    here_T = ((local_T >= 0) & (local_T < vocab)).to(dtype)
    row_T1 = local_T.clamp(0, vocab - 1).unsqueeze(1)
    return [row_T1, here_T, -here_T.unsqueeze(1), labels_T == how.ignore]

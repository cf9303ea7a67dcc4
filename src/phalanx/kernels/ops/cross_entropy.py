"""The last projection and the cross-entropy in one, so that the logits of all tokens never exist at once.

The gradient is computed in the forward pass, chunk by chunk, while the logits are there, for an upstream gradient of one; the backward
pass scales it. Logits are rounded to the type of `hidden`, everything after them is fp32 (fp64 in fp64). A token that is not predicted is left
out, not multiplied by zero: even where its hidden state is not finite it has no part in the loss, and its logits have no gradient.

Where ranks share the vocabulary (`VocabShard`) each has the logits of its rows only, and three numbers a token are exchanged: the largest
logit, the sum of exponentials, the label's logit. Logits are never gathered (arXiv 1909.08053, section 3).

Legend: T tokens, H hidden, V vocabulary (of this rank), P ranks that share it, c tokens of a chunk, g of a group of chunks, r tokens of a
block that fits a cache in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.core.errors import DataError, Problem
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.products import checked_linear, stands_out
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.cpu.shapes import BLOCK, cache_blocks, spaced
from phalanx.kernels.device import LossWork, device_cross_entropy, runs_programs
from phalanx.kernels.native import Seen

IGNORE = -100
"""Label of a token that is not predicted."""
CHUNK = 512
"""Tokens of one product with the vocabulary."""
GROUP_BYTES = 64 << 20
"""Bytes of logit gradients that exist at once (at least one chunk)."""
COLUMNS = 512
"""Rows of the weight's gradient that are one piece of work."""
SHOWN = 4
"""Labels outside the vocabulary that a message names."""


@dataclass(frozen=True, eq=False)
class VocabShard:
    """This rank has rows `[first, first + V)` of the `size` of the vocabulary. `gather` makes (P, ...) of each rank's equally shaped tensor."""

    first: int
    size: int
    gather: Callable[[torch.Tensor], torch.Tensor]


def linear_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """Sum over tokens with a label of `-log softmax(hidden weight^T)[label]`, 0-d fp32 (fp64 in fp64). Divide it yourself.

    With a `shard` the value is that of the whole vocabulary, the same on all ranks, and the gradients are this rank's: of its rows of the
    weight, and its partial sum of the gradient of `hidden_TH`. Collective over the ranks that share the vocabulary.

    Raises `DataError` where a label is neither in the vocabulary nor `IGNORE`, on each of these ranks; on a device torch's assertion fails there, later.
    """
    _check_labels(labels_T, weight_VH.shape[0] if shard is None else shard.size)
    if impl == "reference":
        if shard is not None:
            return _sharded_reference(hidden_TH, weight_VH, labels_T, shard, lanes)
        return _reference(hidden_TH, weight_VH, labels_T, lanes)
    if hidden_TH.device.type != "cpu":
        first, gather = (0, None) if shard is None else (shard.first, shard.gather)
        with_programs = runs_programs(hidden_TH)
        how = LossWork(ignore=IGNORE, first=first, gather=gather, check=lanes.check, programs=with_programs)
        return device_cross_entropy(hidden_TH, weight_VH, labels_T, how)
    out: torch.Tensor = _LinearCrossEntropy.apply(hidden_TH, weight_VH, labels_T, shard, lanes)
    return out


def _check_labels(labels_T: torch.Tensor, size: int) -> None:
    """Without it a label that no rank has counts as one whose logit is 0, and memory is written where it says."""
    strange_T = ((labels_T < 0) | (labels_T >= size)) & (labels_T != IGNORE)
    if labels_T.device.type != "cpu":
        torch._assert_async(~strange_T.any(), "a label is outside of the vocabulary")
    elif strange_T.any():
        places = strange_T.nonzero().flatten().tolist()
        hint = f"ids are 0 to {size - 1}, and {IGNORE} is a token that is not predicted"
        rule = f"is outside of the vocabulary, as are {len(places)} of {len(labels_T)} labels"
        found = [Problem(where=f"labels[{at}]", value=int(labels_T[at]), rule=rule, hint=hint) for at in places[:SHOWN]]
        raise DataError(found, subject="the labels of a loss")


def _logits(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """(T, V) in the wide type."""
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    if lanes.sums is not None:
        return checked_linear(lanes.sums, hidden_TH, weight_VH, place="logits").to(wide)
    return (hidden_TH @ weight_VH.T).to(wide)


def _reference(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, lanes: Lanes = SERIAL
) -> torch.Tensor:
    logits_TV = _logits(hidden_TH, weight_VH, lanes).masked_fill((labels_T == IGNORE).unsqueeze(1), 0.0)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")


def _sharded_reference(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, shard: VocabShard, lanes: Lanes = SERIAL
) -> torch.Tensor:
    ignored_T = labels_T == IGNORE
    z_TV = _logits(hidden_TH, weight_VH, lanes).masked_fill(ignored_T.unsqueeze(1), 0.0)
    wide = z_TV.dtype
    with torch.no_grad():
        one_hot_TV = (labels_T - shard.first).unsqueeze(1) == torch.arange(z_TV.shape[1], device=labels_T.device)
        lse_T = torch.logsumexp(shard.gather(torch.logsumexp(z_TV, -1)), 0)
        label_T = shard.gather((z_TV * one_hot_TV).sum(-1)).sum(0)
        value = (lse_T - label_T).masked_fill_(ignored_T, 0.0).sum()
        slope_TV = (z_TV - lse_T.unsqueeze(1)).exp() - one_hot_TV.to(wide)
    linear = (z_TV * slope_TV).sum()  # has the gradient; the value comes from all ranks
    return linear - linear.detach() + value


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_T: torch.Tensor,
        shard: VocabShard | None,
        lanes: Lanes,
    ) -> torch.Tensor:
        work = _Work(hidden_TH, weight_VH, labels_T, lanes, shard=shard, needs=ctx.needs_input_grad[:2])
        num_tokens = hidden_TH.shape[0]
        size = max(CHUNK, GROUP_BYTES // (weight_VH.shape[0] * hidden_TH.element_size()) // CHUNK * CHUNK)
        for start in range(0, num_tokens, size):
            work.group(slice(start, min(start + size, num_tokens)), whole=size >= num_tokens)
        ctx.save_for_backward(work.d_hidden_TH, work.weight_gradient())
        ctx.lanes = lanes
        return work.losses_T.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(None if x is None else _scaled(x, grad, ctx.lanes) for x in ctx.saved_tensors), None, None, None


def _scaled(x: torch.Tensor, grad: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """`grad * x` with the 0-d `grad` in its own precision (torch would round it to the type of `x` first)."""
    factor, out = float(grad), torch.empty_like(x)
    lanes.run(lambda rows, _: torch.mul(x[rows], factor, out=out[rows]), cache_blocks(*x.shape))
    return out


class _Work:
    """One call: losses of all tokens and the gradients, collected group by group."""

    def __init__(
        self,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_T: torch.Tensor,
        lanes: Lanes,
        *,
        shard: VocabShard | None,
        needs: tuple[bool, ...],
    ) -> None:
        self.hidden_TH, self.weight_VH, self.labels_T, self.lanes = hidden_TH, weight_VH, labels_T, lanes
        self.shard = shard
        self.wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        self.losses_T = torch.zeros(hidden_TH.shape[0], dtype=self.wide, device=hidden_TH.device)
        self.d_hidden_TH = torch.empty_like(hidden_TH) if needs[0] else None
        self.needs, self.needs_weight = any(needs), needs[1]
        self.work = scripted(_losses_of_chunk)
        native = lanes.rows_for(hidden_TH, weight_VH) if shard is None else None
        self.native = native if native is not None and native.can_take_labels(labels_T) else None
        self._sum_VH: torch.Tensor | None = None

    def group(self, tokens: slice, *, whole: bool) -> None:
        """Losses and gradients of `tokens`; the logit gradients of the group are alive during this call only."""
        chunks = [slice(i, min(i + CHUNK, tokens.stop)) for i in range(tokens.start, tokens.stop, CHUNK)]
        logits = [spaced(c.stop - c.start, self.weight_VH.shape[0], self.hidden_TH) for c in chunks]
        work = list(zip(chunks, logits, strict=True))
        if self.shard is None:
            self.lanes.run(lambda part, _: self._chunk(*part), work)
        else:
            self._sharded_group(self.shard, tokens, work)
        if self.needs_weight:
            self._add_weight_gradient(logits, tokens, whole=whole)

    def _add_weight_gradient(self, grads: list[torch.Tensor], tokens: slice, *, whole: bool) -> None:
        """`d_logits^T hidden` of a group: one product per block of the vocabulary, over all of the group's tokens."""
        if self._sum_VH is None:
            zeros = torch.zeros_like(self.weight_VH, dtype=self.wide) if not whole else None
            self._sum_VH = torch.empty_like(self.weight_VH) if zeros is None else zeros
        total_VH, hidden_tH = self._sum_VH, self.hidden_TH[tokens]
        scratch = [spaced(COLUMNS, len(hidden_tH), hidden_tH) for _ in range(self.lanes.count)]

        def run(rows: slice, lane: int) -> None:
            target_vH = total_VH[rows]
            turned_vt = scratch[lane][: len(target_vH)]
            parts = torch.split(turned_vt, [len(g) for g in grads], dim=1)
            for part_vc, grad_cV in zip(parts, grads, strict=True):
                part_vc.copy_(grad_cV[:, rows].T)
            product_vH = torch.mm(turned_vt, hidden_tH, out=target_vH if whole else None)
            self.lanes.check("logits weight gradient", product_vH, (turned_vt, hidden_tH))
            if not whole:
                target_vH.add_(product_vH)

        self.lanes.run(run, [slice(i, i + COLUMNS) for i in range(0, self.weight_VH.shape[0], COLUMNS)])

    def weight_gradient(self) -> torch.Tensor | None:
        if self._sum_VH is None:
            return torch.zeros_like(self.weight_VH) if self.needs_weight else None
        return self._sum_VH.to(self.weight_VH.dtype)

    def _chunk(self, tokens: slice, logits_cV: torch.Tensor) -> None:
        seen = self.lanes.late_look(self.native)
        self._project(tokens, logits_cV, late=seen is not None)
        labels_c, losses_c = self.labels_T[tokens], self.losses_T[tokens]
        if self.native is not None:
            self.native.cross_entropy(logits_cV, labels_c, losses_c, gradient=self.needs, seen=seen)
            if seen is not None and stands_out(seen):
                self._look_again(tokens, seen)
        else:
            self.work(labels_c, logits_cV, losses_c, self.needs, IGNORE, max(1, BLOCK // logits_cV.shape[1]))
        self._project_back(tokens, logits_cV)

    def _look_again(self, tokens: slice, seen: Seen) -> None:
        """Logits that became their gradient are made again, where they have to be checked."""
        assert self.lanes.sums is not None and self.native is not None  # who has looked
        factors = self.hidden_TH[tokens], self.weight_VH.T
        again_cV = torch.mm(*factors)
        self.lanes.sums.check_again("logits forward", seen, again_cV, factors, rows=self.native)

    def _project(self, tokens: slice, logits_cV: torch.Tensor, *, late: bool = False) -> None:
        factors = self.hidden_TH[tokens], self.weight_VH.T
        torch.mm(*factors, out=logits_cV)
        if not late:
            self.lanes.check("logits forward", logits_cV, factors)

    def _project_back(self, tokens: slice, d_logits_cV: torch.Tensor) -> None:
        if self.d_hidden_TH is not None:
            torch.mm(d_logits_cV, self.weight_VH, out=self.d_hidden_TH[tokens])
            self.lanes.check("logits input gradient", self.d_hidden_TH[tokens], (d_logits_cV, self.weight_VH))

    # ---- a shared vocabulary ---------------------------------------------------------------------------------------------

    def _sharded_group(self, shard: VocabShard, tokens: slice, work: Sequence[tuple[slice, torch.Tensor]]) -> None:
        """Does what `_chunk` does for all chunks of a group, with one exchange between the logits and what is made of them."""
        own_g3 = torch.empty((tokens.stop - tokens.start, 3), dtype=self.wide, device=self.hidden_TH.device)
        self.lanes.run(lambda part, _: self._shares(shard, part[0], part[1], own_g3[_within(part[0], tokens)]), work)
        top_Pg, sum_Pg, label_Pg = shard.gather(own_g3).unbind(-1)
        top_g = top_Pg.amax(0)
        sum_g = (sum_Pg * (top_Pg - top_g).exp()).sum(0)
        lse_g = top_g + sum_g.log()
        self.losses_T[tokens] = (lse_g - label_Pg.sum(0)).masked_fill_(self.labels_T[tokens] == IGNORE, 0.0)
        if self.needs:
            self.lanes.run(lambda part, _: self._slopes(shard, part[0], part[1], lse_g[_within(part[0], tokens)]), work)

    def _shares(self, shard: VocabShard, tokens: slice, logits_cV: torch.Tensor, own_c3: torch.Tensor) -> None:
        """Logits of a chunk; per token their maximum, the sum of exponentials from there, the label's logit (0 where it is elsewhere)."""
        self._project(tokens, logits_cV)
        label_c, here_c = self._local_labels(shard, tokens)
        own_c3[:, 2] = torch.where(here_c, logits_cV.gather(1, label_c.unsqueeze(1)).squeeze(1).to(self.wide), 0.0)
        for rows in cache_blocks(*logits_cV.shape):
            z_rV = logits_cV[rows].to(self.wide, copy=True)
            top_r1 = z_rV.amax(-1, keepdim=True)
            own_c3[rows, 0] = top_r1.squeeze(1)
            own_c3[rows, 1] = z_rV.sub_(top_r1).exp_().sum(-1)

    def _slopes(self, shard: VocabShard, tokens: slice, logits_cV: torch.Tensor, lse_c: torch.Tensor) -> None:
        """Turns the logits of a chunk, in place, into their gradient, and multiplies it back."""
        label_c, here_c = self._local_labels(shard, tokens)
        z_label_c = logits_cV.gather(1, label_c.unsqueeze(1)).squeeze(1).to(self.wide)
        for rows in cache_blocks(*logits_cV.shape):
            z_rV = logits_cV[rows].to(self.wide, copy=True)
            logits_cV[rows].copy_(z_rV.sub_(lse_c[rows].unsqueeze(1)).exp_())
        logits_cV.index_fill_(0, _places(self.labels_T[tokens] == IGNORE), 0.0)
        at_c = _places(here_c)
        slope_c = (z_label_c - lse_c).exp() - 1
        logits_cV[at_c, label_c[at_c]] = slope_c[at_c].to(logits_cV.dtype)
        self._project_back(tokens, logits_cV)

    def _local_labels(self, shard: VocabShard, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each label here (any row where it is not), and whether it is here."""
        local_c = self.labels_T[tokens] - shard.first
        num_rows = self.weight_VH.shape[0]
        return local_c.clamp(0, num_rows - 1), (local_c >= 0) & (local_c < num_rows)


def _places(true_c: torch.Tensor) -> torch.Tensor:
    return true_c.nonzero().squeeze(1)


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _losses_of_chunk(
    labels_c: torch.Tensor, logits_cV: torch.Tensor, losses_c: torch.Tensor, needs: bool, ignore: int, block: int
) -> None:
    """Scripted: losses of one chunk; turns its logits, in place, into their gradient."""
    wide = losses_c.dtype
    label_c1 = labels_c.clamp(min=0).unsqueeze(1)
    ignored_c = labels_c == ignore
    z_label_c1 = logits_cV.gather(1, label_c1).to(wide)
    sum_c1 = torch.empty_like(z_label_c1)
    for start in range(0, logits_cV.shape[0], block):
        stop = start + block
        z_rV = logits_cV[start:stop].to(wide, copy=True)
        top_r1 = z_rV.amax(-1, keepdim=True)
        z_label_c1[start:stop].sub_(top_r1)
        z_rV.sub_(top_r1).exp_()
        sum_r1 = z_rV.sum([-1], keepdim=True)
        sum_c1[start:stop] = sum_r1
        if needs:
            logits_cV[start:stop].copy_(z_rV.mul_(sum_r1.reciprocal()))
    losses_c.copy_((sum_c1.log() - z_label_c1).squeeze(1).masked_fill_(ignored_c, 0.0))
    if needs:
        d_label_c1 = (z_label_c1.exp().div_(sum_c1) - 1).masked_fill_(ignored_c.unsqueeze(1), 0.0)
        logits_cV.index_fill_(0, ignored_c.nonzero().squeeze(1), 0.0)
        # not scatter_: in bf16 it copies all logits to fp32 and back
        each_c = torch.arange(labels_c.shape[0], device=labels_c.device)
        logits_cV[each_c, label_c1.squeeze(1)] = d_label_c1.squeeze(1).to(logits_cV.dtype)

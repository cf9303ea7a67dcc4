"""What a micro-batch leaves in memory on one rank: kept by each layer for the backward pass, and needed only while something runs.

Every function mirrors one place of the code, named in its docstring, and returns the sizes in bytes of the tensors that live there: lists and
not sums, because the C library treats large blocks unlike small ones (`memory.py`). tests/test_memory_terms.py counts the real
tensors. Must never change without the code that it mirrors.

Legend: T tokens of a rank's micro-batch, N = T before a sequence-parallel split, H hidden, A/G query and key/value heads of this rank, D head dim,
E experts, K experts of a token, M rows of this rank's slots, P the same padded, R rows sent, e slots, f expert width here, V vocabulary here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.plan.dispatch import DispatchSpec, rows_of_source
from phalanx.plan.folding import Folding
from phalanx.plan.model import ModelSpec
from phalanx.simulate.kernel_facts import (
    BLOCK,
    BLOCK_ROWS,
    CORRECTION,
    KEY_BLOCK,
    LOGIT_CHUNK,
    LOGIT_COLUMNS,
    LOGIT_GROUP_BYTES,
    SPACE,
    pieces,
)

Recompute = Literal["none", "selective", "full"]
INDEX = 8
"""Bytes of an int64."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """One rank's part of a model and of a micro-batch."""

    spec: ModelSpec
    folding: Folding
    dispatch: DispatchSpec
    sequences: int
    seq_len: int
    item: int
    """Bytes of the compute type."""
    recompute: Recompute
    lanes: int
    rows_share: float
    """Rows of this rank's experts over the even share."""

    @property
    def wide(self) -> int:
        return max(4, self.item)

    @property
    def length(self) -> int:
        """Tokens of a sequence that this rank holds (context parallelism divides it)."""
        return self.seq_len // self.folding.cp

    @property
    def attended(self) -> int:
        return self.sequences * self.length

    @property
    def tokens(self) -> int:
        return self.attended // self.folding.tp

    @property
    def heads(self) -> int:
        return self.spec.num_heads // self.folding.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.spec.num_kv_heads // self.folding.tp)

    @property
    def width(self) -> int:
        return self.spec.expert_ffn // self.folding.etp

    @property
    def slots(self) -> int:
        return self.spec.num_experts // self.folding.ep

    @property
    def vocab(self) -> int:
        return self.spec.vocab // self.folding.tp

    def stream(self) -> int:
        """(T, H)"""
        return self.tokens * self.spec.hidden * self.item

    # ---- rows of the experts

    @property
    def sources(self) -> int:
        return self.folding.ep * self.folding.etp

    @property
    def sent(self) -> int:
        """Rows that this rank sends."""
        pairs = self.tokens * self.spec.top_k
        most = self.spec.num_experts * self._capacity
        return most if self.dispatch.is_static else min(pairs, most) if self._drops else pairs

    @property
    def held(self) -> int:
        """Rows that its experts compute: the even share, times `rows_share` as far as routing and capacity allow it."""
        even = self.tokens * self.spec.top_k * self.folding.etp
        most = self.tokens * self.sources * min(self.spec.top_k, self.slots)
        if self._drops:
            full = self.slots * self._capacity * self.sources
            return full if self.dispatch.is_static else min(math.ceil(even * self.rows_share), most, full)
        return min(math.ceil(even * self.rows_share), most)

    @property
    def _drops(self) -> bool:
        return self.dispatch.policy == "drop"

    @property
    def _capacity(self) -> int:
        """Rows of one source for one expert, at most."""
        s, sharing = self.spec, self.folding.tp * self.folding.cp
        sizes = {"sharing": sharing, "top_k": s.top_k, "num_experts": s.num_experts}
        return rows_of_source(self.dispatch, num_tokens=self.tokens, **sizes)

    @property
    def most_of_slot(self) -> int:
        """Rows that one slot can get at most."""
        return self.sources * (min(self.tokens, self._capacity) if self._drops else self.tokens)

    @property
    def slot_pieces(self) -> tuple[int, int]:
        """(pieces of one slot, padded rows of each), the rows spread evenly over the slots."""
        return pieces(-(-self.held // max(1, self.slots)), self.item)

    @property
    def padded(self) -> int:
        num, size = self.slot_pieces
        return self.slots * num * size

    @property
    def sorts_rows(self) -> bool:
        """Rows arrive from several sources for several slots (`Dispatcher._slot_order`)."""
        return self.sources > 1 and self.slots > 1


# ---- kept for the backward pass -------------------------------------------------------------------------------------------------


def kept_attention(x: Local) -> list[int]:
    """`Block.forward` up to the attention's output, `Attention`, `_CpuRmsNorm`, `_CpuLinear`, `_CpuAttention`."""
    s = x.spec
    q, kv = (x.attended * heads * s.head_dim * x.item for heads in (x.heads, x.kv_heads))
    scale = x.tokens * x.wide
    kept = [x.stream(), scale, x.stream()]
    if x.recompute == "selective":
        return [*kept, q, kv, kv, q]
    if s.qk_norm == "head":
        kept += [q, kv, x.attended * x.heads * x.wide, x.attended * x.kv_heads * x.wide]
    elif s.qk_norm == "hidden":
        kept += [q, kv, x.attended * x.wide, x.attended * x.wide]
    return [*kept, q, kv, kv, q, x.attended * x.heads * x.wide]


def _kept_mlp(x: Local, width: int) -> list[int]:
    """`Mlp`: gate and up projection, and what goes into the way back."""
    local = width // x.folding.tp
    return [x.attended * 2 * local * x.item, x.attended * local * x.item]


def kept_dense(x: Local) -> list[int]:
    """The second half of a dense block."""
    return [x.stream(), x.tokens * x.wide, x.stream(), *_kept_mlp(x, x.spec.dense_ffn)]


def kept_router(x: Local) -> list[int]:
    """`Router.forward`: what autograd keeps of scores, choice and weights."""
    s, r = x.spec, x.spec.router
    table, pairs, column = x.tokens * s.num_experts * x.wide, x.tokens * s.top_k, x.tokens * x.wide
    late = r.score == "softmax" and r.softmax_order == "after_topk"
    kept = [pairs * INDEX]
    if not late or r.aux_loss:
        kept.append(table)
    if late:
        kept.append(pairs * x.wide)
    elif r.renormalize and s.top_k > 1:
        kept += [pairs * x.wide, column]
    if r.score == "sigmoid" and r.aux_loss:
        kept.append(column)
    if r.z_loss:
        kept += [table, column]
    return kept


def kept_rows(x: Local) -> list[int]:
    """`Dispatcher`, `_CpuExpertFfn`: index maps, the rows, their weights and the first projection."""
    s, pairs = x.spec, x.tokens * x.spec.top_k
    rows = x.held
    kept = [pairs * INDEX, pairs * INDEX, x.sent * INDEX]
    if x.dispatch.transport == "all_gather" and x.sources > 1:
        kept += [pairs * x.sources * INDEX, rows * INDEX, rows * INDEX]
    elif x.sorts_rows:
        kept += [rows * INDEX, rows * INDEX]
    kept += [rows * s.hidden * x.item, rows * x.wide]
    if x.recompute != "selective":
        kept.append(x.padded * (2 * x.width + SPACE) * x.item)
    return kept


def kept_moe(x: Local) -> list[int]:
    """The second half of a block with experts."""
    s = x.spec
    kept = [x.stream(), x.tokens * x.wide, x.stream(), *kept_router(x), *kept_rows(x)]
    if s.shared_ffn:
        kept += _kept_mlp(x, s.shared_ffn)
        if s.shared_gate:
            kept += [x.stream(), x.tokens * x.wide, x.tokens * x.item]
    return kept


def kept_layer(x: Local, layer: int) -> list[int]:
    """All of a block; with `recompute = full` its input only."""
    if x.recompute == "full":
        return [x.stream()]
    return kept_attention(x) + (kept_moe(x) if layer in x.spec.moe_layers else kept_dense(x))


def kept_ends(x: Local) -> list[int]:
    """`Decoder.forward`: rope's table and the final norm, and the hidden state that the step holds until its next micro-batch."""
    table = x.attended * x.spec.head_dim // 2 * x.wide
    return [table, table, x.stream(), x.tokens * x.wide, x.stream()]


# ---- while something runs --------------------------------------------------------------------------------------------------------


def head_forward(x: Local) -> list[int]:
    """`cross_entropy._Work.group` at its largest: the logits of a group, the gradients that collect, and one lane's scratch."""
    row = x.vocab * x.item
    group = max(LOGIT_CHUNK, LOGIT_GROUP_BYTES // row // LOGIT_CHUNK * LOGIT_CHUNK)
    rows, whole = min(x.attended, group), group >= x.attended
    chunks = [min(LOGIT_CHUNK, rows - i) * (x.vocab + SPACE) * x.item for i in range(0, rows, LOGIT_CHUNK)]
    weight = x.vocab * x.spec.hidden
    total = weight * (x.item if whole else x.wide)
    blocks = [max(1, BLOCK // x.vocab) * x.vocab * x.wide] * x.lanes
    turned = [LOGIT_COLUMNS * (rows + SPACE) * x.item] * x.lanes
    collect = [total, *turned] if whole else [total, *turned, *[LOGIT_COLUMNS * x.spec.hidden * x.wide] * x.lanes]
    work = max(collect, blocks if whole else [total, *blocks], key=sum)
    narrow = [total, weight * x.item] if not whole and x.item < x.wide else []
    return [x.stream(), *max([*chunks, *work], narrow, key=sum)]


def head_backward(x: Local) -> list[int]:
    """`_LinearCrossEntropy.backward`: both gradients, and their scaled copies."""
    weight = x.vocab * x.spec.hidden * x.item
    return [x.stream(), weight, x.stream(), weight]


def _expert_scratch(x: Local, *, backward: bool) -> list[int]:
    """`grouped._Scratch` or `_BackwardScratch` of each lane."""
    m, hidden, f = x.slot_pieces[1], x.spec.hidden + SPACE, x.width
    one = [m * hidden, m * hidden, m * f, m * (2 * f + SPACE)]
    if backward:
        one += [m * hidden, m * f, m * (2 * f + SPACE), 2 * min(m, BLOCK_ROWS) * f]
    return [n * x.item for n in one] * x.lanes


def experts_forward(x: Local) -> list[int]:
    """`run_experts` without what it keeps: rows on their way, or the experts' output and scratch."""
    rows, sent = (n * x.spec.hidden * x.item for n in (x.held, x.sent))
    way = [rows, sent] if x.sources > 1 else [rows]
    return max(way, [rows, *_expert_scratch(x, backward=False)], [rows, rows], key=sum)


def experts_backward(x: Local) -> list[int]:
    """`_CpuExpertFfn.backward`: rows' gradients in and out, the weights' gradients, scratch; and the residual stream's gradient."""
    rows = x.held * x.spec.hidden * x.item
    per_slot = 3 * x.width * x.spec.hidden * x.item
    extra = [per_slot // 3 * 2, per_slot // 3] * (x.slots * (x.slot_pieces[0] - 1))
    weights = [x.slots * per_slot // 3 * 2, x.slots * per_slot // 3]
    shared = [x.stream()] if x.spec.shared_ffn else []
    return [x.stream(), *shared, rows, rows, *weights, *extra, *_expert_scratch(x, backward=True)]


def attention_backward(x: Local) -> list[int]:
    """`_CpuAttention.backward`: gradients of output, queries, keys and values, and each lane's scratch."""
    s, q = x.spec, x.attended * x.heads * x.spec.head_dim * x.item
    kv = q // x.heads * x.kv_heads
    parts = max(1, min(x.kv_heads, -(-8 // x.sequences)))
    groups = -(-x.kv_heads // parts)
    queries = groups * (x.heads // x.kv_heads)
    wide_dim, keys = s.head_dim + CORRECTION, min(KEY_BLOCK, x.length)
    rows = x.length * wide_dim
    inner = queries * x.length * s.head_dim
    lane = [groups * rows * x.item] * 2 + [queries * rows * x.item] * 4 + [inner * x.wide, inner * x.item]
    lane += [keys * queries * x.length * x.item] * 2
    again = [q, kv, q, x.attended * x.heads * x.wide] if x.recompute == "selective" else []
    mask = [x.sequences * keys * x.length * x.item]
    return [x.stream(), x.stream(), q, q, kv, kv, *mask, *again, *lane * x.lanes]


def embedding_backward(x: Local) -> list[int]:
    """`_CpuEmbedding.backward`: sums of the tokens that occur, and the whole gradient."""
    seen = min(x.attended, x.vocab)
    return [x.stream(), seen * x.spec.hidden * x.wide, x.vocab * x.spec.hidden * x.item]


def batch_bytes(x: Local) -> int:
    """Tokens, labels and positions of one micro-batch."""
    return 3 * x.sequences * x.length * INDEX

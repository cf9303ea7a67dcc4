"""What a micro-batch leaves in memory on one rank: kept by each layer for the backward pass, and needed only while something runs.

Every function mirrors one place of the code, named in its docstring, and returns the sizes in bytes of the tensors that live there: lists and
not sums, because the C library treats large blocks unlike small ones (`simulate/memory/memory.py`). tests/ranks/test_memory_terms.py counts the real
tensors. Must never change without the code that it mirrors.

Legend: T tokens of a rank's micro-batch, N = T before a sequence-parallel split, H hidden, A/G query and key/value heads of this rank, D head dim,
E experts, K experts of a token, M rows of this rank's slots, P the same padded, R rows sent, e slots, f expert width here, V vocabulary here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from phalanx.plan.mapping import Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec, rows_of_source
from phalanx.simulate.memory.kernel_facts import (
    BLOCK,
    BLOCK_ROWS,
    CORRECTION,
    KEY_BLOCK,
    LOGIT_CHUNK,
    LOGIT_COLUMNS,
    LOGIT_GROUP_BYTES,
    MAX_QUERIES,
    SPACE,
    pieces,
)

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
    recompute: Literal["none", "selective", "full"]
    lanes: int
    rows_share: float
    """Rows of this rank's experts over the even share."""
    on_device: bool = False
    """Kernels are those of a GPU (`device_activations.py`)."""
    crowded: bool = False
    """All tokens choose much the same K experts, as those of a fresh router do; else the rows are spread evenly over the slots."""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    experts_held: int | None = None
    """Different experts that the rank holds in a layer; None: as many as without replicas."""
    widens: bool = False
    """A product of bf16 is summed up in a room of fp32 first (`Processor.widens_bf16`)."""
    exact: bool = False
    """Products are over rows of one source alone, and weight gradients go to fixed point slot by slot (`kernels/ops/exact_experts.py`)."""
    sums_experts: bool = False
    """Gradients of experts are added up in buffers, to which their products may add them (`kernels/device/weight_sums.py`)."""

    @property
    def wide(self) -> int:
        return max(4, self.item)

    def room(self, *results: int) -> list[int]:
        """What the largest of some products needs in each lane besides its operands and its result; `results`: elements of one matrix of each result."""
        return [max(results) * self.wide] * self.lanes if self.widens else []

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
        return self.experts_held if self.experts_held is not None else self.spec.num_experts // self.folding.ep

    @property
    def vocab(self) -> int:
        return self.spec.vocab // self.folding.tp

    def stream(self) -> int:
        """(T, H)"""
        return self.tokens * self.spec.hidden * self.item

    def gathered(self) -> int:
        """(N, H): what a layer whose weights are split over tp computes with."""
        return self.attended * self.spec.hidden * self.item

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
        """(pieces of one slot, padded rows of each), the rows spread evenly over the slots, and in exact mode over the sources."""
        lists = self.sources if self.exact else 1
        num, size = pieces(-(-self.held // max(1, self.slots * lists)), self.item)
        return num * lists, size

    @property
    def fullest_slot(self) -> int:
        """Rows of the fullest slot (of one source, in exact mode)."""
        even = -(-self.held // max(1, self.slots))
        rows = min(self.held, max(even, self.most_of_slot)) if self.crowded and not self.dispatch.is_static else even
        return -(-rows // self.sources) if self.exact else rows

    @property
    def further_pieces(self) -> int:
        """Pieces of all slots but the first of each."""
        if not self.crowded or not self.fullest_slot:
            return self.slots * (self.slot_pieces[0] - 1)
        return max(1, self.held // self.fullest_slot) * (pieces(self.fullest_slot, self.item)[0] - 1)

    @property
    def padded(self) -> int:
        num, size = self.slot_pieces
        return self.slots * num * size

    @property
    def swaps_heads(self) -> bool:
        """Heads are exchanged for positions."""
        return self.folding.cp > 1 and self.cp_method == "ulysses"

    @property
    def sends_tokens(self) -> bool:
        """By DeepEP, once to each rank that has an expert of theirs."""
        return self.dispatch.transport == "deepep" and self.sources > 1

    @property
    def came(self) -> int:
        """Tokens that come so, at most: each for one row."""
        return min(self.held, self.tokens * self.sources)

    @property
    def sorts_rows(self) -> bool:
        """Rows arrive from several sources for several slots (`Dispatcher.slot_order`)."""
        return self.sources > 1 and self.slots > 1


# ---- kept for the backward pass -------------------------------------------------------------------------------------------------


def kept_attention(x: Local) -> list[int]:
    """`Block.forward` up to the attention's output, `Attention`, `_CpuRmsNorm`, `_CpuLinear`, `_CpuAttention`."""
    s = x.spec
    q, kv = (x.attended * heads * s.head_dim * x.item for heads in (x.heads, x.kv_heads))
    scale = x.tokens * x.wide
    kept = [x.stream(), scale, x.gathered()]
    if x.recompute == "selective":
        return [*kept, q, kv, kv, q]
    if x.swaps_heads:  # what the heads made, and what came back of it
        kept.append(q)
    if s.qk_norm == "head":
        kept += [q, kv, x.attended * x.heads * x.wide, x.attended * x.kv_heads * x.wide]
    elif s.qk_norm == "hidden":
        kept += [q, kv, x.attended * x.wide, x.attended * x.wide]
    return [*kept, q, kv, kv, q, x.attended * x.heads * x.wide]


def kept_mlp(x: Local, width: int) -> list[int]:
    """`Mlp`: gate and up projection, and what goes into the way back."""
    local = width // x.folding.tp
    return [x.attended * 2 * local * x.item, x.attended * local * x.item]


def kept_dense(x: Local) -> list[int]:
    """The second half of a dense block."""
    return [x.stream(), x.tokens * x.wide, x.gathered(), *kept_mlp(x, x.spec.dense_ffn)]


def kept_router(x: Local) -> list[int]:
    """`Router.forward`: what autograd keeps of scores, choice and weights."""
    s, r = x.spec, x.spec.router
    table, pairs, column = x.tokens * s.num_experts * x.wide, x.tokens * s.top_k, x.tokens * x.wide
    late = r.softmax_order == "after_topk"
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
    return [x.stream(), x.tokens * x.wide, x.stream(), *kept_router(x), *kept_rows(x), *kept_shared(x)]


def kept_shared(x: Local) -> list[int]:
    """The expert that all tokens go through, if there is one."""
    s = x.spec
    if not s.shared_ffn:
        return []
    kept = kept_mlp(x, s.shared_ffn)
    if x.folding.tp > 1:
        kept.append(x.gathered())
    if s.shared_gate:
        kept += [x.stream(), x.tokens * x.wide, x.tokens * x.item]
    return kept


def kept_layer(x: Local, layer: int) -> list[int]:
    """All of a block; with `recompute = full` its input only."""
    if x.recompute == "full":
        return [x.stream()]
    return kept_attention(x) + (kept_moe(x) if layer in x.spec.moe_layers else kept_dense(x))


def kept_table(x: Local) -> list[int]:
    """`Decoder.run_stage`: rope's cosines and sines of a stage's pass."""
    table = x.attended * x.spec.head_dim // 2 * x.wide
    return [table, table]


def kept_norm(x: Local) -> list[int]:
    """The final norm."""
    return [x.stream(), x.tokens * x.wide]


def kept_loss(x: Local) -> list[int]:
    """`_LinearCrossEntropy`: the gradients of the hidden states and of the head's weight, made with the loss."""
    return [x.gathered(), x.vocab * x.spec.hidden * x.item]


def owed_layer(x: Local, layer: int) -> list[int]:
    """`kernels/ops/deferred.py`: what the products of a block's weight gradients need, where they are deferred: inputs and gradients of outputs."""
    return owed_dense_part(x, layer) + (owed_experts(x) if layer in x.spec.moe_layers else [])


def owed_dense_part(x: Local, layer: int) -> list[int]:
    """Of all but the routed experts."""
    s = x.spec
    q, kv = (x.attended * heads * s.head_dim * x.item for heads in (x.heads, x.kv_heads))
    owed = [x.gathered(), q, kv, kv, q, x.gathered()]

    def mlp(width: int) -> list[int]:
        inner = x.attended * (width // x.folding.tp) * x.item
        return [x.gathered(), 2 * inner, inner, x.gathered()]

    if layer not in s.moe_layers:
        return owed + mlp(s.dense_ffn)
    return owed + (mlp(s.shared_ffn) if s.shared_ffn else [])


def owed_experts(x: Local) -> list[int]:
    """`grouped._Kept`: rows, their gradients, `h` and the gradient of the first projection."""
    rows = x.held * x.spec.hidden * x.item
    return [rows, rows, x.padded * (x.width + SPACE) * x.item, x.padded * (2 * x.width + SPACE) * x.item]


def largest_owed_gradient(x: Local, layer: int) -> list[int]:
    """The weight gradients of a block that are made at once: those of its experts, or of its MLP."""
    s = x.spec
    if layer in s.moe_layers:
        made = [x.slots * 2 * x.width * s.hidden * x.item, x.slots * x.width * s.hidden * x.item]
        return made + x.room(2 * x.width * s.hidden)
    return [2 * s.dense_ffn // x.folding.tp * s.hidden * x.item]


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
    sums = [LOGIT_COLUMNS * x.spec.hidden * x.wide] * x.lanes
    collect = [total, *turned, *([] if whole else sums), *x.room(LOGIT_COLUMNS * x.spec.hidden)]
    product = x.room(min(LOGIT_CHUNK, rows) * x.vocab)[: len(chunks)]
    held = [] if whole else [total]
    work = max(collect, [*held, *blocks], [*held, *product], key=sum)
    narrow = [total, weight * x.item] if not whole and x.item < x.wide else []
    rows_in = [x.stream()] if x.folding.tp == 1 else [x.stream(), x.gathered()]
    return [*rows_in, x.gathered(), *max([*chunks, *work], narrow, key=sum)]


def head_backward(x: Local) -> list[int]:
    """`_LinearCrossEntropy.backward`: scaled copies of both gradients that the loss has left."""
    return kept_loss(x)


def _expert_scratch(x: Local, *, backward: bool) -> list[int]:
    """`grouped.Scratch` or `BackwardScratch` of each lane."""
    m, hidden, f = pieces(x.fullest_slot, x.item)[1], x.spec.hidden + SPACE, x.width
    one = [m * hidden, m * hidden, m * f, m * (2 * f + SPACE)]
    results = [m * 2 * f, m * x.spec.hidden]
    if backward:
        one += [m * hidden, m * f, m * (2 * f + SPACE), 2 * min(m, BLOCK_ROWS) * f]
        results.append(2 * f * x.spec.hidden)
    return [n * x.item for n in one] * x.lanes + x.room(*results)


def experts_forward(x: Local) -> list[int]:
    """`run_experts` without what it keeps: rows on their way, or the experts' output and scratch; whole tokens where they are gathered."""
    rows, sent = (n * x.spec.hidden * x.item for n in (x.held, x.sent))
    if x.dispatch.transport == "all_gather" and x.sources > 1:
        everyone = x.stream() * x.sources
        ways = [[rows, everyone], [everyone, everyone]]
    else:
        ways = [[rows, sent] if x.sources > 1 else [rows]]
    return max(*ways, [rows, *_expert_scratch(x, backward=False)], [rows, rows], key=sum)


def experts_backward(x: Local, *, weights: bool = True) -> list[int]:
    """`_CpuExpertFfn.backward`: rows' gradients in and out, the weights' gradients (or what they need, if they are deferred), scratch; and the residual stream's gradient."""
    rows = x.held * x.spec.hidden * x.item
    per_slot = 3 * x.width * x.spec.hidden * x.item
    if not weights:
        made = owed_experts(x)[2:]
    elif x.exact:
        made = [per_slot // 3 * 2, per_slot // 3] * x.lanes
    else:
        made = [x.slots * per_slot // 3 * 2, x.slots * per_slot // 3]
        made += [per_slot // 3 * 2, per_slot // 3] * x.further_pieces
    shared = [x.stream()] if x.spec.shared_ffn else []
    return [x.stream(), *shared, rows, rows, *made, *_expert_scratch(x, backward=True)]


def attention_backward(x: Local) -> list[int]:
    """The way back through attention, by how the ranks share sequences."""
    if x.folding.cp == 1:
        return _own_backward(x)
    if x.swaps_heads:
        return _swapped_backward(x)
    return _ring_backward(x) if x.cp_method == "ring" else _gathered_backward(x)


def _swapped_backward(x: Local) -> list[int]:
    """`_ulysses`: whole sequences of fewer heads, then their gradients on their way back, each step a copy."""
    cp = x.folding.cp
    whole = dataclasses.replace(x, folding=dataclasses.replace(x.folding, cp=1, world=x.folding.world // cp))
    q = x.attended * x.heads * x.spec.head_dim * x.item
    rows = q + 2 * q // x.heads * max(x.kv_heads, cp)
    return max(_own_backward(whole, share=cp), [x.stream(), x.stream(), rows, rows, rows], key=sum)


def _known(x: Local) -> tuple[int, int, list[int]]:
    """(q, both k and v) in the wide type, and what every step of the way back holds: the streams' gradient, d_out, delta, dq."""
    q = x.attended * x.heads * x.spec.head_dim
    kv = 2 * q // x.heads * x.kv_heads
    return q * x.wide, kv * x.wide, [x.stream(), q * x.item, x.attended * x.heads * x.wide, q * x.wide]


def _ring_backward(x: Local) -> list[int]:
    """`_Ring.backward`: own keys, those that are here and those that come; gradients of own ones, of these, those that leave and those that arrive."""
    _, kv, held = _known(x)
    narrow = kv // x.wide * x.item
    return [*held, narrow, narrow, narrow, kv, kv, kv, kv, *_tile_scratch(x, keys=x.length)]


def _gathered_backward(x: Local) -> list[int]:
    """`_Gathered.backward`: all keys and all gradients of keys, at the end sorted by rank, in one piece, and what the others send."""
    _, kv, held = _known(x)
    every, cp = kv * x.folding.cp, x.folding.cp
    here = [*held, kv // x.wide * x.item * cp, every]
    return [*here, *max([every] * 3, _tile_scratch(x, keys=x.length * cp), key=sum)]


def _tile_scratch(x: Local, *, keys: int) -> list[int]:
    """`block_attention.backward_by_tiles` of each lane: operands with their corrections, gradients, and a strip's scores and slopes."""
    s, parts = x.spec, max(1, min(x.kv_heads, -(-8 // x.sequences)))
    groups = -(-x.kv_heads // parts)
    queries, width = groups * (x.heads // x.kv_heads), s.head_dim + CORRECTION
    rows_q, rows_k = queries * x.length, groups * keys
    strip = min(MAX_QUERIES, x.length) * queries
    lane = [rows_k * width * x.item] * 2 + [rows_q * width * x.item] * 2
    lane += [rows_q * width * x.wide, rows_k * s.head_dim * x.wide, rows_k * width * x.wide]
    block = min(KEY_BLOCK, keys)
    lane += [strip * block * x.item] * 2 + [strip * width * x.item] * 3
    return lane * x.lanes + x.room(strip // groups * max(block, width))


def _own_backward(x: Local, *, share: int = 1) -> list[int]:
    """`_CpuAttention.backward`: gradients of output, queries, keys and values, and each lane's scratch. `share`: of the heads, other ranks have the rest."""
    s, q = x.spec, x.attended * x.heads // share * x.spec.head_dim * x.item
    num_heads, num_kv = x.heads // share, max(1, x.kv_heads // share)
    kv = q // num_heads * num_kv
    parts = max(1, min(num_kv, -(-8 // x.sequences)))
    groups = -(-num_kv // parts)
    queries = groups * (num_heads // num_kv)
    wide_dim, keys = s.head_dim + CORRECTION, min(KEY_BLOCK, x.length)
    rows = x.length * wide_dim
    inner = queries * x.length * s.head_dim
    lane = [groups * rows * x.item] * 2 + [queries * rows * x.item] * 4 + [inner * x.wide, inner * x.item]
    lane += [keys * queries * x.length * x.item] * 2
    again = [q, kv, q, x.attended * num_heads * x.wide] if x.recompute == "selective" else []
    mask = [x.sequences * keys * x.length * x.item]
    streams = [x.stream() // share, x.stream() // share]
    room = x.room(max(keys, s.head_dim) * (queries // groups) * x.length)
    return [*streams, q, q, kv, kv, *mask, *again, *lane * x.lanes, *room]


def embedding_backward(x: Local) -> list[int]:
    """`_CpuEmbedding.backward`: sums of the tokens that occur, and the whole gradient."""
    seen = min(x.attended, x.vocab)
    rows = [x.stream()] if x.folding.tp == 1 else [x.gathered(), x.gathered()]  # gathered, and what of it is here
    return [*rows, seen * x.spec.hidden * x.wide, x.vocab * x.spec.hidden * x.item]


def batch_bytes(x: Local) -> int:
    """Tokens, labels and positions of one micro-batch."""
    return 3 * x.sequences * x.length * INDEX

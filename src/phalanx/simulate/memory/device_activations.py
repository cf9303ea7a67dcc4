"""What a micro-batch leaves in the memory of a GPU, and what is needed only while something runs: `activations.py` for the kernels of devices.

The functions have the names and the results of that module, which has the others too; each mirrors `kernels/device`, or the path that `kernels/ops` takes on a device.
tests/lab/test_device_trace.py compares their sums with traces of the real step (`phalanx bench trace`), shapes that nothing was fitted to among them. Nothing was measured on a GPU.

Legend: as of `activations.py`.
"""

from __future__ import annotations

from phalanx.plan.model import MlaSpec
from phalanx.plan.moe.overlap import parse_overlap
from phalanx.simulate.memory import activations as act
from phalanx.simulate.memory.activations import INDEX, Local

LOSS_CHUNK_BYTES = 512 << 20
"""`kernels/device/cross_entropy.py: CHUNK_BYTES`: logits of a chunk, where all tokens are not one."""
LOSS_CHUNK_TOKENS = 1024
"""Its `TOKENS`: a chunk has whole thousands."""
LOSS_WEIGHT_PARTS = 2
"""Its `WEIGHT_PARTS`: pieces in which a chunk's part of the weight's gradient comes."""
LARGE_EXPERT = 1 << 23
"""`kernels/device/weight_sums.py: LARGE_EXPERT`: elements of an expert's second projection, from which on its products add its gradients to their sums."""
SCALE = 4
"""Bytes of what a norm keeps of a row."""

kept_table, kept_norm, kept_loss = act.kept_table, act.kept_norm, act.kept_loss
head_backward = act.head_backward


def kept_attention(x: Local) -> list[int]:
    """`Block.forward` up to the attention's output; with selective recomputation up to its operands (`models/recompute.py: attend`)."""
    norm = [x.stream(), x.tokens * SCALE, *_normed(x, gathered=True)]
    if x.spec.mla is not None:
        return norm + _kept_latent(x, x.spec.mla)
    q, kv = (x.attended * heads * x.spec.head_dim * x.item for heads in (x.heads, x.kv_heads))
    if x.recompute == "selective":
        return [*norm, q, kv, kv]
    # values; turned queries and keys; the output and its log-sum-exp
    kept = [*norm, kv, q, kv, q, x.attended * x.heads * 4]
    if x.swaps_heads:
        kept.append(q)
    if x.spec.qk_norm == "head":
        return [*kept, q, kv]
    return [*kept, q, kv, 2 * x.attended * SCALE] if x.spec.qk_norm == "hidden" else kept


def _normed(x: Local, *, gathered: bool) -> list[int]:
    """What is normed, here and as it was gathered; with selective recomputation it is made again (`models/recompute.py: normed_again`)."""
    selective = x.recompute == "selective"
    if not gathered or x.folding.tp == 1:
        return [] if selective else [x.stream()]
    return [x.gathered(), *([] if selective else [x.stream()])]


def kept_dense(x: Local) -> list[int]:
    """The second half of a dense block."""
    return [x.stream(), x.tokens * SCALE, *_normed(x, gathered=True), *act.kept_mlp(x, x.spec.dense_ffn)]


def _kept_latent(x: Local, mla: MlaSpec) -> list[int]:
    """`LatentAttention`: both latents before and after their norms, keys and values as they were projected, whole queries and keys."""
    down = [x.tokens * (mla.kv_rank + mla.rope_dim) * x.item, x.attended * mla.kv_rank * x.item, x.tokens * SCALE]
    if mla.q_rank:
        down += [x.tokens * mla.q_rank * x.item, x.attended * mla.q_rank * x.item, x.tokens * SCALE]
    made = x.attended * x.heads * (mla.nope_dim + mla.value_dim) * x.item
    whole = x.attended * x.heads * (mla.nope_dim + mla.rope_dim) * x.item
    if x.recompute == "selective":
        return [*down, made, whole]
    return [*down, made, whole, whole, x.attended * x.heads * (mla.value_dim * x.item + 4)]


def kept_router(x: Local) -> list[int]:
    """`kernels/device/router.py`: choice and logits."""
    if x.spec.router.force != "none":
        return act.kept_router(x)
    return [x.tokens * x.spec.top_k * INDEX, x.tokens * x.spec.num_experts * x.wide]


def kept_rows(x: Local) -> list[int]:
    """`Dispatcher`, `_GroupedFfn`: index maps, the rows and their weights, and the first projection."""
    pairs, rows = x.tokens * x.spec.top_k, x.held
    kept = [pairs * INDEX, pairs * INDEX, x.sent * INDEX]
    if x.sends_tokens:
        kept = [x.came * x.spec.top_k * INDEX, x.came * x.spec.top_k * INDEX, rows * INDEX, kept_handle(x)]
    elif x.dispatch.transport == "all_gather" and x.sources > 1:
        kept += [pairs * x.sources * INDEX, rows * INDEX, rows * INDEX]
    elif x.sorts_rows:
        kept += [rows * INDEX, rows * INDEX]
    kept += [rows * x.spec.hidden * x.item, rows * 4]
    return kept if x.recompute == "selective" else [*kept, rows * 2 * x.width * x.item]


def kept_handle(x: Local) -> int:
    """DeepEP's: where each token came from, and for each rank whether this rank's tokens went there and at which place."""
    return x.came * 4 + x.tokens * x.sources * (1 + 4)


def kept_moe(x: Local) -> list[int]:
    """The second half of a block with experts."""
    beside = act.kept_shared(x)
    normed = _normed(x, gathered=False)
    return [x.stream(), x.tokens * SCALE, *normed, *kept_router(x), *kept_rows(x), *beside]


def kept_layer(x: Local, layer: int) -> list[int]:
    """All of a block; with `recompute = full` its input only, and what DeepEP needs to send the same tokens again."""
    if x.recompute == "full":
        if not (x.sends_tokens and layer in x.spec.moe_layers):
            return [x.stream()]
        return [x.stream(), x.came * x.spec.top_k * (INDEX + 4), x.tokens * x.spec.top_k * INDEX, kept_handle(x)]
    return kept_attention(x) + (kept_moe(x) if layer in x.spec.moe_layers else kept_dense(x))


def owed_experts(x: Local) -> list[int]:
    """Rows, their gradients, `h` and the gradient of the first projection."""
    rows = x.held * x.spec.hidden * x.item
    return [rows, rows, x.held * x.width * x.item, x.held * 2 * x.width * x.item]


def owed_layer(x: Local, layer: int) -> list[int]:
    """What deferred weight gradients of a block need."""
    cpu = act.owed_layer(x, layer)
    return cpu if layer not in x.spec.moe_layers else act.owed_dense_part(x, layer) + owed_experts(x)


largest_owed_gradient = act.largest_owed_gradient


def head_forward(x: Local) -> list[int]:
    """`cross_entropy.losses_and_gradients` at its largest: a chunk's logits beside what collects, or the gradient of the weight in both types."""
    rows, weight = x.attended, x.vocab * x.spec.hidden
    fit = LOSS_CHUNK_BYTES // (x.vocab * x.item) // LOSS_CHUNK_TOKENS * LOSS_CHUNK_TOKENS
    at_once = x.spec.hidden * x.wide // x.item
    chunk = rows if rows <= at_once else min(rows, max(LOSS_CHUNK_TOKENS, fit))
    logits = chunk * x.vocab * x.item
    here = [x.gathered(), *([x.gathered()] if x.folding.tp > 1 else [])]
    if chunk >= rows:
        return [*here, logits, weight * x.item]
    ways = [[logits, -(-weight // LOSS_WEIGHT_PARTS) * x.item], [weight * x.item]]
    return [*here, weight * x.wide, *max(ways, key=sum)]


def experts_forward(x: Local) -> list[int]:
    """Rows as they leave, arrive and are sorted (or are made of whole tokens, and added up); or the experts' own: `h`, their output, and that in the order of the way back."""
    rows, sent = (n * x.spec.hidden * x.item for n in (x.held, x.came if x.sends_tokens else x.sent))
    inner = x.held * x.width * x.item
    first = [2 * inner] if x.recompute == "selective" else []
    back = [rows, sent, x.stream()] if x.sends_tokens else [rows, rows, sent]
    return max([sent, rows], [*first, inner, rows], back, key=sum)


def products_add(x: Local) -> bool:
    """`weight_sums.sums_of_experts`, and who asks it: counts of rows are on the host, and neither tiles nor fused kernels make the gradients."""
    large = x.item == 2 and x.width * x.spec.hidden >= LARGE_EXPERT
    counted = x.folding.ep * x.folding.etp > 1 or x.dispatch.is_static
    return large and counted and x.sums_experts and parse_overlap(x.dispatch.overlap).kind in ("serial", "coarse")


def experts_backward(x: Local, *, weights: bool = True) -> list[int]:
    """`_GroupedFfn.backward` when the gradients of its weights are made; and the residual stream's gradient.

    `h` lies where its gradient was; so does the gradient of a first projection that was computed again.
    """
    rows, inner = x.held * x.spec.hidden * x.item, x.held * x.width * x.item
    per_slot = 3 * x.width * x.spec.hidden * x.item
    made = [x.slots * per_slot] if weights and not products_add(x) else []
    shared = [x.stream()] if x.spec.shared_ffn else []
    return [x.stream(), *shared, rows, inner, 2 * inner, rows, *made]


def attention_backward(x: Local) -> list[int]:
    """Gradients of output, queries, keys and values, turned and not; flash attention adds up that of the queries in fp32."""
    s, heads = x.spec, x.heads
    width = s.head_dim if s.mla is None else s.mla.nope_dim + s.mla.rope_dim
    q = x.attended * heads * width * x.item
    kv = x.attended * (x.kv_heads if s.mla is None else heads) * width * x.item
    again = [q, kv, q, x.attended * heads * 4] if x.recompute == "selective" else []
    return [x.stream(), x.stream(), *again, q, q, kv, kv, q, kv, x.attended * heads * width * 4]


def embedding_backward(x: Local) -> list[int]:
    """The whole gradient of the table."""
    rows = [x.stream()] if x.folding.tp == 1 else [x.gathered(), x.gathered()]
    return [*rows, x.vocab * x.spec.hidden * x.item]

"""A3: each kernel by itself on the device, in fp32 and bf16, against its plain reference in fp64 on the CPU: outputs and every gradient.

Calls the public functions of `kernels/ops` alone, whatever stands behind them on the device. Memory is poisoned first, so that elements which a kernel leaves unwritten show.

Legend: B sequences, S length, A query heads, G key/value heads, D head dim, T tokens, K choices of a token, M rows, H hidden, F expert width, E experts, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.config import OptimConfig
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.words import on_host, word_sum
from phalanx.kernels.device import WeightSum, padded
from phalanx.kernels.ops import attention, cross_entropy, grouped, norm, permute, rope, swiglu
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.block_attention import PartialAttention, SavedAttention, attend, attend_backward
from phalanx.kernels.ops.checksum import checksums
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.router import Router, router_logits
from phalanx.plan.attention import AttentionBlock
from phalanx.plan.layout import flat_layouts
from phalanx.plan.mapping import make_folding, plain_placement
from phalanx.plan.model import PRESETS, ModelSpec, parameters
from phalanx.runtime.moe.dispatch import inverse_exact, sorted_keys
from phalanx.runtime.state import ReducedGradients, Segment, ShardedState
from phalanx.train.step import AdamW
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.layer import PARTS, context

MOST = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference relative to the largest element; bf16 rounds each of several steps by up to 4e-3."""
Tensors = Sequence[torch.Tensor]
Segments = tuple[tuple[int, ...], ...]
Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelCase:
    """A kernel with its inputs in fp64: `run(impl, *inputs)`. Inputs are leaves; whatever else it needs moves to their device."""

    name: str
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    inputs: Tensors
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    wide: frozenset[int] = frozenset()
    """Inputs that stay in fp32 where the others are bf16."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """fp64 numbers that bf16 holds exactly, the same on every machine."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * scale).to(torch.bfloat16).to(torch.float64)


def poison(device: torch.device, *, most_bytes: int) -> None:
    """Fill memory with NaN and give it back, in blocks of all sizes, so that what is allocated next holds NaN until it is written."""
    size, held = 1 << 10, []
    while size <= most_bytes:
        held += [torch.full((size // 4,), torch.nan, device=device) for _ in range(4)]
        size *= 4


def check_case(here: Here, case: KernelCase) -> None:
    """Tell the largest error of a kernel in each type."""
    want = _outcome(partial(case.run, "reference"), case, torch.float64, torch.device("cpu"))
    for dtype in case.dtypes:
        poison(here.device, most_bytes=here.pick(1 << 30, 1 << 20))
        name = f"{case.name} {str(dtype).removeprefix('torch.')}"
        got = _outcome(partial(case.run, "fast"), case, dtype, here.device)
        here.tell(name, max(map(error, got, want)), most=MOST[dtype])


def _outcome(kernel: Kernel, case: KernelCase, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Outputs, then gradients of all inputs for random gradients of the outputs, in fp64 on the CPU."""
    leaves = []
    for i, x in enumerate(case.inputs):
        own = torch.promote_types(dtype, torch.float32) if i in case.wide else dtype
        leaves.append(x.to(device, own, copy=True).requires_grad_())  # the case keeps its own
    out = kernel(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    upstream = [normal(*y.shape, seed=99 + i).to(y.device, y.dtype) for i, y in enumerate(outputs)]
    torch.autograd.backward(list(outputs), upstream)
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [x.detach().cpu().to(torch.float64) for x in (*outputs, *grads)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest element; infinite where something is not a number."""
    if want.numel() == 0:
        return 0.0
    found = ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
    return found if found == found else float("inf")


def check_cases(here: Here, cases: Sequence[KernelCase]) -> None:
    for case in cases:
        check_case(here, case)


# ---- attention -----------------------------------------------------------------------------------------------------------------


def attention_cases(here: Here) -> list[KernelCase]:
    """Whole sequences, packed documents, shared key/value heads, and heads of 192 as in latent attention."""
    length, heads, dim = here.pick((640, 8, 128), (40, 4, 16))

    def case(name: str, kv: int, dim: int, segments: Segments) -> KernelCase:
        shape = (len(segments), length)
        inputs = [normal(*shape, n, dim, seed=i) for i, n in enumerate((heads, kv, kv))]

        def run(impl: Impl, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention.causal_attention(q, k, v, segments, impl=impl)

        return KernelCase(name=name, run=run, inputs=inputs)

    whole, packed = ((length,),) * 2, ((length // 4, 1, length - length // 4 - 1), (length,))
    many = (1, *range(3, 3 + here.pick(32, 5)))
    return [
        case("one document", heads, dim, whole),
        case("packed, shared heads", heads // 4, dim, packed),
        case("many documents", heads, dim, ((*many, length - sum(many)),)),
        case("heads of 192", heads, here.pick(192, 24), whole),
    ]


def latent_cases(here: Here) -> list[KernelCase]:
    """Values of another width than keys, as latent attention has them (192 and 128), whole and packed, as they are where the card takes them; and filled up with zeros."""
    length, heads, dim, value_dim = here.pick((512, 8, 192, 128), (40, 2, 24, 16))

    def case(name: str, dim: int, value_dim: int, segments: Segments, *, fills: bool) -> KernelCase:
        inputs = [normal(1, length, heads, width, seed=i) for i, width in enumerate((dim, dim, value_dim))]

        def run(impl: Impl, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attend_equal = partial(attention.causal_attention, segments=segments, impl=impl)
            if impl == "reference" or not fills:
                return attend_equal(q, k, v)
            return padded(q, k, v, attend_equal)

        return KernelCase(name=name, run=run, inputs=inputs)

    fills = not here.on_gpu  # kernels of a CPU have one width
    whole, packed = ((length,),), ((length // 4, length - length // 4),)
    return [
        case("latent", dim, value_dim, whole, fills=fills),
        case("latent, packed", dim, value_dim, packed, fills=fills),
        case("narrow values, filled up", dim, value_dim, whole, fills=True),
        case("wide values, filled up", value_dim // 2, value_dim, packed, fills=True),
    ]


def attend_cases(here: Here) -> list[KernelCase]:
    """What a rank of a ring computes: its second half of a sequence, block by block, forward and backward by hand."""
    length, heads, kv, dim = here.pick((512, 8, 2, 128), (48, 4, 2, 16))
    half = length // 2
    parts = [
        (slice(half, length), AttentionBlock(0, half, 0, half, True)),
        (slice(0, half), AttentionBlock(0, half, 0, half, False)),
    ]

    def run(impl: Impl, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if impl == "reference":
            return attention.causal_attention(q, k, v, ((length,),), impl=impl)[:, half:]
        out: torch.Tensor = _Ring.apply(q, k, v, half, parts)
        return out

    inputs = [normal(1, length, n, dim, seed=i) for i, n in enumerate((heads, kv, kv))]
    return [KernelCase(name="ring", run=run, inputs=inputs)]


class _Ring(torch.autograd.Function):
    """Queries of the second half over the keys of `parts`, as `runtime/comm/context_parallel.py` computes them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, half: int, parts: Any) -> torch.Tensor:
        own = q[:, half:].contiguous()
        partial = PartialAttention.empty(own)
        for keys, block in parts:
            attend((own, k[:, keys].contiguous(), v[:, keys].contiguous()), ((block,),), partial)
        ctx.save_for_backward(own, k, v, partial.out_BLAD, partial.lse_BAL)
        ctx.half, ctx.parts = half, parts
        return partial.out_BLAD.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, k, v, out, lse = ctx.saved_tensors
        known = SavedAttention.of(out.to(own.dtype), lse, d_out.contiguous())
        dq, dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (own, k, v))
        for keys, block in ctx.parts:
            qkv, grads = (own, k[:, keys].contiguous(), v[:, keys].contiguous()), (dq, dk[:, keys], dv[:, keys])
            attend_backward(qkv, ((block,),), known, grads)
        whole = torch.cat([torch.zeros_like(dq), dq], dim=1)
        return whole.to(own.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def check_attention(here: Here) -> None:
    """A3.attention."""
    check_cases(here, [*attention_cases(here), *latent_cases(here), *attend_cases(here)])


def check_backends(here: Here) -> None:
    """A3.backends: torch's own attention by each backend that takes these shapes, those of latent attention too; one that refuses says so and is no failure."""
    length, heads, dim, wide = here.pick((512, 8, 128, 192), (40, 4, 16, 24))
    taken = Counter[str]()
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for name, dims, backend in [
        (n, d, b) for n, d in (("", (dim,) * 3), ("latent ", (wide, wide, dim))) for b in backends
    ]:
        inputs = [normal(1, heads, length, width, seed=i) for i, width in enumerate(dims)]

        def run(
            impl: Impl, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend = backend
        ) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH if impl == "reference" else backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        case = KernelCase(name=name + backend.name.lower(), run=run, inputs=inputs, dtypes=(torch.bfloat16,))
        taken[name] += _if_it_takes(here, case)
    if here.on_gpu:
        here.tell("backends that take them", taken[""], least=1)
        here.tell("backends that take latent ones", taken["latent "])


REFUSALS = ("No available kernel", "No viable backend", "not compiled")
"""How torch says that a backend does not take some shapes."""


def _if_it_takes(here: Here, case: KernelCase) -> bool:
    """Whether it was compared. A backend that refuses these shapes says so; any other error is one."""
    try:
        check_case(here, case)
    except (RuntimeError, ImportError, TypeError, NotImplementedError) as error:
        words = str(error).strip().splitlines()[0]
        if isinstance(error, RuntimeError) and not any(said in words for said in REFUSALS):
            raise
        here.tell(f"{case.name} refused", words[:120])
        return False
    return True


# ---- experts, rows -------------------------------------------------------------------------------------------------------------


def expert_cases(here: Here) -> list[KernelCase]:
    """Full groups, empty ones in all places, no row at all; and a first projection that is computed again, whose gradient is written over it."""
    hidden, width = here.pick((512, 1088), (16, 24))
    kinds = (("even", (64,) * 4), ("computed again", (64,) * 4), ("empty groups", (0, 100, 0, 0, 7, 0)), ("no rows", (0, 0)))  # fmt: skip
    cases = []
    for name, counts in kinds:
        inputs = [
            normal(sum(counts), hidden, seed=1),
            normal(len(counts), 2, width, hidden, seed=2, scale=hidden**-0.5),
            normal(len(counts), hidden, width, seed=3, scale=width**-0.5),
            normal(sum(counts), seed=4).abs() + 0.25,
        ]

        def run(impl: Impl, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...] = counts, again: bool = name == "computed again") -> torch.Tensor:  # fmt: skip
            return grouped.expert_ffn(x, w13, w2, counts, row_weights_M=weight, recompute=again, impl=impl)

        cases.append(KernelCase(name=f"experts, {name}", run=run, inputs=inputs, wide=frozenset({3})))
    return cases


def check_experts(here: Here) -> None:
    """A3.experts."""
    check_cases(here, expert_cases(here))
    _check_sums(here)


def _check_sums(here: Here) -> None:
    """Gradients that products add up in fp32, of a projection and of groups of which one has no rows: twice, in memory that held something else."""
    rows, outputs, inputs = here.pick((960, 1088, 512), (12, 16, 8))
    counts = (rows // 3, 0, rows - rows // 3)
    a, b = normal(rows, outputs, seed=1), normal(rows, inputs, seed=2)
    products = torch.stack([x.T @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])
    for dtype in (torch.float32, torch.bfloat16):
        operands = a.to(here.device, dtype), b.to(here.device, dtype)
        for name, want in (("a projection", products.sum(0)), ("groups", products)):
            total = torch.full(want.shape, torch.nan, device=here.device)
            for begun in (False, True):
                own = WeightSum(partial(_as_it_is, total, begun))
                if name == "groups":
                    own.add_groups(*operands, counts=counts)
                else:
                    own.add(*operands)
            found = error(total.cpu().double(), 2 * want)
            here.tell(
                f"gradients added up, {name} {str(dtype).removeprefix('torch.')}", found, most=MOST[torch.float32]
            )


def _as_it_is(total: torch.Tensor, begun: bool) -> tuple[torch.Tensor, bool]:
    return total, begun


def row_cases(here: Here) -> list[KernelCase]:
    """Rows to experts and back, with pairs that were dropped; SwiGLU with row weights; rotation; norms."""
    tokens, top_k, hidden = here.pick((1000, 8, 2048), (11, 3, 32))
    places = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(7)).view(tokens, top_k)
    places[::5, 0] = -1
    token_of_row = torch.full((tokens * top_k,), -1)
    kept = places >= 0
    token_of_row[places[kept]] = torch.arange(tokens).unsqueeze(1).expand_as(places)[kept]

    def gather(impl: Impl, x: torch.Tensor) -> torch.Tensor:
        where = token_of_row.to(x.device), places.to(x.device)
        return permute.gather_rows(x, where[0], rows_of_token_TK=where[1], impl=impl)

    def combine(impl: Impl, y: torch.Tensor) -> torch.Tensor:
        where = places.to(y.device), token_of_row.to(y.device)
        return permute.combine_rows(y, where[0], token_of_row_M=where[1], impl=impl)

    x_TH, y_MH = normal(tokens, hidden, seed=1), normal(tokens * top_k, hidden, seed=2)
    return [
        KernelCase(name="gather rows", run=gather, inputs=[x_TH]),
        KernelCase(name="combine rows", run=combine, inputs=[y_MH]),
        *_elementwise_cases(here, tokens, hidden),
    ]


def _elementwise_cases(here: Here, tokens: int, hidden: int) -> list[KernelCase]:
    heads, dim = here.pick((8, 128), (2, 8))
    positions_BS = torch.arange(tokens).unsqueeze(0) * here.pick(37, 3)

    def gated(impl: Impl, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return swiglu.swiglu(x, row_weights_M=weight, impl=impl)

    def turned(impl: Impl, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope.rope_table(positions_BS.to(q.device), head_dim=dim, theta=1e4, dtype=q.dtype)
        return rope.apply_rope(q, k, table=table, impl=impl)

    def normed_heads(
        impl: Impl, q: torch.Tensor, k: torch.Tensor, q_D: torch.Tensor, k_D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions_3S = positions_BS.expand(3, -1).to(q.device)
        table = rope.rope_table(positions_3S, head_dim=dim, theta=1e4, dtype=q.dtype)
        return rope.apply_rope(q, k, table=table, norms=rope.HeadNorms(q_D, k_D, 1e-6), impl=impl)

    def neighbours(impl: Impl, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope.rope_table(positions_BS.to(q.device), head_dim=dim, theta=1e4, dtype=q.dtype)
        if impl == "reference":
            return _turned_neighbours(q, table), _turned_neighbours(k, table)
        halves = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k)]
        return rope.apply_rope(*halves, table=table, impl=impl)

    def parts_turned(impl: Impl, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope.rope_table(positions_BS.to(q.device), head_dim=dim // 2, theta=1e4, dtype=q.dtype)
        return rope.apply_rope(q[..., dim // 2 :], k[..., dim // 2 :], table=table, impl=impl)

    def normed(impl: Impl, x: torch.Tensor, delta: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.residual_norm(x, delta, w, 1e-6, impl=impl)

    def norm_only(impl: Impl, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return norm.rms_norm(x, w, 1e-6, impl=impl)

    x_TH, delta_TH = normal(tokens, hidden, seed=1), normal(tokens, hidden, seed=2)
    weight_H = 1 + normal(hidden, seed=3, scale=0.1)
    gate_up = [normal(tokens, 2, hidden // 2, seed=4), normal(tokens, seed=5).abs()]
    q_and_k = [normal(1, tokens, n, dim, seed=6 + n) for n in (heads, heads // 2)]
    many_heads = [normal(3, tokens, n, dim, seed=7 + n) for n in (3 * heads, heads // 2)]
    head_weights = [1 + normal(dim, seed=i, scale=0.1) for i in (16, 17)]
    return [
        KernelCase(name="swiglu", run=gated, inputs=gate_up, wide=frozenset({1})),
        KernelCase(name="rope", run=turned, inputs=q_and_k),
        KernelCase(name="rope of normed heads", run=normed_heads, inputs=[*many_heads, *head_weights]),
        KernelCase(name="rope of neighbours", run=neighbours, inputs=q_and_k),
        KernelCase(name="rope of parts of heads", run=parts_turned, inputs=q_and_k),
        KernelCase(name="norm", run=norm_only, inputs=[x_TH, weight_H]),
        KernelCase(name="residual norm", run=normed, inputs=[x_TH, delta_TH, weight_H]),
    ]


def _turned_neighbours(x: torch.Tensor, table: rope.RopeTable) -> torch.Tensor:
    """Dims 2j and 2j + 1 as one complex number each, turned; real parts, then imaginary ones."""
    turn = torch.complex(table.cos_BSN, table.sin_BSN).unsqueeze(2)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def check_rows(here: Here) -> None:
    """A3.rows."""
    check_cases(here, row_cases(here))


def check_router(here: Here) -> None:
    """A3.router: choice, weights, losses and gradient of routers of three models, whose logits are their input, without and with padding; their product; and how routed pairs are sorted."""
    tokens = here.pick(2000, 20)
    for preset in PARTS:
        spec = PRESETS[preset]
        router = replace(spec.router, aux_loss=0.01, z_loss=1e-3)
        spec = replace(spec, hidden=spec.num_experts, router=router)
        x_TE = normal(tokens, spec.num_experts, seed=1)
        if spec.router.num_groups == 1:  # sums of groups that are equal in one type need not be in another
            x_TE[::2] = x_TE[::2].round()  # tokens with many equal scores
        for padding in (tokens // 5, 0):
            got = _routed(spec, x_TE, padding=padding, device=here.device, dtype=torch.float32)
            want = _routed(spec, x_TE, padding=padding, device=torch.device("cpu"), dtype=torch.float64)
            name = f"{preset}, padding" if padding else preset
            here.tell(f"{name}: other experts", int((got[0] != want[0]).sum()), most=0)
            here.tell(f"{name}: other counts", int((got[1] != want[1]).sum()), most=0)
            here.tell(
                f"{name}: weights, losses, gradients", max(map(error, got[2:], want[2:])), most=MOST[torch.float32]
            )
        keys_N = want[0].reshape(-1).to(torch.int64)
        keys_N[::7] = spec.num_experts  # pairs that were dropped
        ours = sorted_keys(keys_N.to(here.device), spec.num_experts, impl="fast")
        plain = sorted_keys(keys_N, spec.num_experts, impl="reference")
        placed = int((keys_N < spec.num_experts).sum())
        pairs = [(ours.counts_E, plain.counts_E), (ours.order_N[:placed], plain.order_N[:placed])]
        if ours.places_N is not None and ours.tokens_N is not None:  # those of programs
            pairs += [(ours.places_N, inverse_exact(plain.order_N[:placed], len(keys_N)))]
            pairs += [(ours.tokens_N[:placed], plain.order_N[:placed])]
        wrong = sum(int((a.cpu() != b).sum()) for a, b in pairs if a is not None and b is not None)
        here.tell(f"{preset}: pairs in another place", wrong, most=0)
        here.tell(f"{preset}: product and its gradients", _logits_error(here, tokens, spec.num_experts), most=1e-2)


def _logits_error(here: Here, tokens: int, experts: int) -> float:
    """Of the router's product in bf16. Operands are equal in pairs and gradients cancel but for a ten-thousandth, which fewer than their 24 bits would lose."""
    hidden = here.pick(1024, 24)
    pairs = (normal(rows // 2, hidden, seed=i).repeat_interleave(2, 0) for i, rows in enumerate((tokens, experts)))
    digits = [normal(tokens // 2, experts // 2, seed=2 + i, scale=2.0 ** (-8 * i)) for i in range(3)]
    large_TE = torch.stack(digits).sum(0).repeat_interleave(2, 0).repeat_interleave(2, 1)
    small_TE = normal(tokens, experts, seed=5, scale=2.0**-13)
    sign_TE = 1 - 2 * ((torch.arange(tokens).unsqueeze(1) + torch.arange(experts)) % 2)
    dy_TE = (sign_TE * large_TE + small_TE).to(torch.float32).to(torch.float64)
    x_TH, w_EH = pairs
    leaves = [x.to(here.device, torch.bfloat16).requires_grad_() for x in (x_TH, w_EH)]
    logits_TE = router_logits(*leaves)
    grads = torch.autograd.grad(logits_TE, leaves, dy_TE.to(logits_TE))
    got = [x.detach().cpu().to(torch.float64) for x in (logits_TE, *grads)]
    return max(map(error, got, (x_TH @ w_EH.T, dy_TE @ w_EH, dy_TE.T @ x_TH)))


def _routed(
    spec: ModelSpec, x_TE: torch.Tensor, *, padding: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Of two sequences, the second with `padding`: experts, counts, then weights, losses, entropy and the gradients of the input and of the weight, in fp64 on the CPU."""
    kernels: Impl = "reference" if dtype == torch.float64 else "fast"
    router = Router(context(spec, device=device, dtype=dtype, kernels=kernels), spec.dense_layers)
    with torch.no_grad():
        router.weight.copy_(torch.eye(spec.num_experts))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.arange(spec.num_experts) % 3 * 0.0625)
    leaf = x_TE.to(device, dtype, copy=True).requires_grad_()
    tokens_BS = torch.zeros((2, len(leaf) // 2), dtype=torch.int64, device=device)
    text = TokenBatch(tokens_BS, tokens_BS, tokens_BS, ((len(leaf) // 2,),) * 2, padding=(0, padding)).text
    found = router(leaf, ForwardInfo(), num_sequences=2, text=text)
    upstream = normal(*found.weights_TK.shape, seed=9).to(device, dtype)
    ((found.weights_TK * upstream).sum() + found.aux_loss + found.z_loss).backward()
    numbers = (found.weights_TK, found.aux_loss, found.z_loss, found.entropy_sum, leaf.grad, router.weight.grad)
    every = [found.experts_TK, found.counts_E, *(x for x in numbers if x is not None)]
    return [x.detach().cpu().to(torch.float64) for x in every]


# ---- loss, state ---------------------------------------------------------------------------------------------------------------


def loss_cases(here: Here) -> list[KernelCase]:
    """Two vocabularies, tokens that are not predicted, and the way of tp ranks (with one of them)."""
    tokens, hidden = here.pick((512, 256), (9, 16))
    cases = []
    for vocab, sharded in here.pick(((32_000, False), (151_936, False), (32_000, True)), ((40, False), (40, True))):
        labels_T = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(vocab))
        labels_T[::7] = cross_entropy.IGNORE

        def run(impl: Impl, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor = labels_T, sharded: bool = sharded) -> torch.Tensor:  # fmt: skip
            alone = cross_entropy.VocabShard(0, weight_VH.shape[0], lambda x: x.unsqueeze(0))
            shard = alone if sharded and impl == "fast" else None
            labels = labels_T.to(hidden_TH.device)
            return cross_entropy.linear_cross_entropy(hidden_TH, weight_VH, labels, shard=shard, impl=impl)

        inputs = [normal(tokens, hidden, seed=1), normal(vocab, hidden, seed=2, scale=hidden**-0.5)]
        cases.append(KernelCase(name=f"loss, V {vocab}{', by tp' if sharded else ''}", run=run, inputs=inputs))
    return cases


def check_loss(here: Here) -> None:
    """A3.loss."""
    check_cases(here, loss_cases(here))


def check_state(here: Here) -> None:
    """A3.state: AdamW with gradients of both types, of whole shards and with narrow moments; sums of squares, sums of bits, and the checksums by which members compare their state."""
    length = here.pick(3_000_001, 1001)
    master, grad, avg = (normal(length, seed=i) for i in range(3))
    square = normal(length, seed=4).square()
    for dtype in (torch.float32, torch.bfloat16):
        want = _adamw(master, grad, avg, square, grad_dtype=torch.float64, device=torch.device("cpu"), impl="reference")
        got = _adamw(master, grad, avg, square, grad_dtype=dtype, device=here.device, impl="fast")
        name = str(dtype).removeprefix("torch.")
        here.tell(f"adamw, gradient {name}", max(map(error, got[:3], want[:3])), most=1e-5)
        here.tell(f"adamw, rounded copy, gradient {name}", error(got[3], want[3]), most=1e-2)
        tensors = [x.to(here.device, dtype) for x in (master, grad)]
        total = square_sums(tensors).cpu().to(torch.float64)
        here.tell(f"square sums {name}", error(total, master.square().sum() + grad.square().sum()), most=1e-5)
        sums = on_host([word_sum(x) for x in (*tensors, *(x.cpu() for x in tensors))])
        here.tell(f"word sums differ {name}", sum(sums[i] != sums[i + 2] for i in range(2)), most=0)
    here.tell("checksums differ", _differing_checksums(here, master), most=0)
    for moments in (torch.float32, torch.bfloat16):
        _check_commit(here, moments)


def _differing_checksums(here: Here, x: torch.Tensor) -> int:
    """Of tensors of all sizes of elements, whole and from the middle of others, how many have other checksums than their copies on the host."""
    kinds = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
    there = [(100 * x).to(here.device).to(kind) for kind in kinds]
    there += [t[3:] for t in there] + [t[:0] for t in there]
    return sum(a != b for a, b in zip(checksums(there), checksums([t.cpu() for t in there]), strict=True))


def _check_commit(here: Here, moments: torch.dtype) -> None:
    """The optimizer's update of all runs of a shard, in one launch on a GPU, some of which do not decay; against fp64."""
    name = f"moments {str(moments).removeprefix('torch.')}"
    want, got = (
        _committed(torch.float64, torch.float64, torch.device("cpu")),
        _committed(torch.bfloat16, moments, here.device),
    )
    worst: dict[str, float] = {}
    for family, exact in want.items():
        for kind, x in exact.items():
            worst[kind] = max(worst.get(kind, 0.0), error(got[family][kind], x))
    narrow = moments == torch.bfloat16
    for kind, difference in worst.items():
        is_narrow = kind == "parameters" or (narrow and kind != "master")
        here.tell(f"commit, {name}: {kind}", difference, most=1e-2 if is_narrow else 1e-5)
    if narrow:  # rounded up and down alike
        moment = torch.cat([got[family]["exp_avg_sq"] - exact["exp_avg_sq"] for family, exact in want.items()])
        size = torch.cat([exact["exp_avg_sq"] for exact in want.values()])
        here.tell(f"commit, {name}: lean", abs(float(moment.sum() / size.sum())), most=1e-3)


def _committed(dtype: torch.dtype, moments: torch.dtype, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Family -> state and parameters of a rank of four after a step, in fp64 on the CPU. In fp64 by the plain reference."""
    spec, folding = PRESETS["tiny"], make_folding(world=4)
    layouts = flat_layouts(parameters(spec), folding, plain_placement(spec.num_experts, folding), 1)
    params = {p.param.name: normal(*p.shape, seed=2).to(device, dtype) for x in layouts.values() for p in x.params}
    groups: Any = None  # for what is sent
    wide = torch.promote_types(dtype, torch.float32)
    state = ShardedState(params, layouts, groups=groups, buffers={}, dtype=wide, moments=moments)
    segments = {}
    for name, family in state.families.items():
        grads = normal(len(family.master), seed=3).to(device, wide)
        family.exp_avg.copy_(normal(len(grads), seed=4))
        family.exp_avg_sq.copy_(normal(len(grads), seed=5).square().to(torch.bfloat16))
        half = len(grads) // 2 + 1
        segments[name] = (Segment(0, grads[:half]), Segment(half, grads[half:]))
    rule = AdamW(OptimConfig(weight_decay=0.1), impl="reference" if dtype == torch.float64 else "fast")
    rule.commit(state, ReducedGradients(layouts=layouts, segments=segments), step=3, lr=0.1, scale=0.5)
    return {
        name: {
            kind: x.cpu().to(torch.float64)
            for kind, x in (
                *((kind, getattr(family, kind)) for kind in ShardedState.KINDS),
                ("parameters", family.published),
            )
        }
        for name, family in state.families.items()
    }


def _adamw(*state: torch.Tensor, grad_dtype: torch.dtype, device: torch.device, impl: Impl) -> list[torch.Tensor]:
    """Masters, moments and the bf16 copy after a step, in fp64 on the CPU."""
    wide = torch.float64 if impl == "reference" else torch.float32
    master, avg, square = (state[i].to(device, wide, copy=True) for i in (0, 2, 3))
    out = torch.empty_like(master, dtype=torch.float64 if impl == "reference" else torch.bfloat16)
    rule: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw_(master, state[1].to(device, grad_dtype), avg, square, out, **rule, step=3, scale=0.5, impl=impl)  # type: ignore[arg-type]
    return [x.cpu().to(torch.float64) for x in (master, avg, square, out)]

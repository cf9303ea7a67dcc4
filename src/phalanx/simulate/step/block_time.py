"""Seconds of one layer on one rank, forward and backward, by kind of operation.

Decides what a layer does: products, attention, memory-bound kernels, collectives, and which collectives hide behind which products. Must
never change: a backward pass has two products for each of the forward pass, and recomputation repeats communication too.

    kinds  gemm attention memory experts launch | tp cp etp a2a_inside a2a_between | imbalance

Only exposed seconds of communication are counted; `hidden` has the rest. Tokens of a rank t = b S / (T C), those it sees inside a tensor
parallel region t T; rows of its experts t k times ETP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.plan.model import ModelSpec
from phalanx.simulate.hardware import FP32, NCCL_SMS, GroupSpan, Network, Oracle, beside
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step.fused_time import FusedExperts
from phalanx.simulate.step.tile_layer import TiledExperts
from phalanx.simulate.step.tile_time import TILE_WAYS

COMMUNICATION = ("tp", "cp", "etp", "a2a_inside", "a2a_between")


class ProductTime(NamedTuple):
    """Seconds of a product forward, of its input's gradient, of its weight's gradient: what communication can run beside."""

    forward: float
    input_grad: float
    weight_grad: float


@dataclass
class Ledger:
    """Seconds by kind, forward and backward, and kernels that the host starts."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    weight_grad: float = 0.0
    """Seconds of the backward pass that make weight gradients: what a split backward can defer."""
    kernels: int = 0
    again: dict[str, float] = field(default_factory=dict)
    """What selective recomputation repeats in the backward pass."""

    def add(self, kind: str, forward: float, backward: float) -> None:
        self.forward[kind] = self.forward.get(kind, 0.0) + forward
        self.backward[kind] = self.backward.get(kind, 0.0) + backward

    def both(self, kind: str, seconds: float, *, backward: float | None = None) -> None:
        """The same in both passes unless the backward pass is given."""
        self.add(kind, seconds, seconds if backward is None else backward)

    @property
    def seconds(self) -> tuple[float, float]:
        return sum(self.forward.values()), sum(self.backward.values())

    def times(self, number: int) -> Ledger:
        """The same so many times."""
        return Ledger(
            forward={kind: number * s for kind, s in self.forward.items()},
            backward={kind: number * s for kind, s in self.backward.items()},
            hidden=number * self.hidden,
            weight_grad=number * self.weight_grad,
            kernels=number * self.kernels,
        )

    def close(self, launch_s: float) -> None:
        """The host starts kernels no faster than `launch_s` each: what is missing is waiting."""
        f, b = self.seconds
        self.add("launch", max(0.0, self.kernels * launch_s - f), max(0.0, 2 * self.kernels * launch_s - b))


@dataclass(frozen=True)
class Blocks:
    """Layers of one job under one mapping, on one oracle."""

    job: Job
    mapping: Mapping
    oracle: Oracle
    network: Network
    bound: bool = False
    """Time of layers tile by tile that no plan can beat, in place of the plan on a clock."""

    @property
    def spec(self) -> ModelSpec:
        return self.job.spec

    @property
    def tokens(self) -> float:
        return self.mapping.tokens(self.job)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.mapping.item_bytes

    def span(self, size: int, stride: int) -> GroupSpan:
        return self.mapping.span(size, stride, ranks_per_host=self.oracle.hardware.ranks_per_host)

    # ---- pieces

    def linear(self, ledger: Ledger, m: float, n: float, k: float, *, groups: int = 1) -> ProductTime:
        """A product with its two gradients."""
        o = self.oracle
        forward, back = o.product(m, n, k, groups=groups), o.product(m, k, n, groups=groups)
        weight = o.product(m, n, k, groups=groups, accumulate=True)
        ledger.add("gemm", forward, back + weight)
        ledger.weight_grad += weight
        ledger.kernels += 1
        if o.eight_bits:  # read bf16, write two orders of bytes: the input forward, the output's gradient backward
            ledger.add("memory", o.memory(4 * m * k), o.memory(4 * m * n))
            ledger.kernels += 1
        return ProductTime(forward, back, weight)

    def kernel(self, ledger: Ledger, num_bytes: float, *, kernels: int = 1, backward: float = 2.0) -> None:
        """A memory-bound kernel; its backward pass moves `backward` times the bytes."""
        o = self.oracle
        ledger.add("memory", o.memory(num_bytes, kernels=kernels), o.memory(backward * num_bytes, kernels=kernels))
        ledger.kernels += kernels

    def tensor_parallel(self, ledger: Ledger, first: ProductTime | None, last: ProductTime | None) -> None:
        """Gather before the `first` product of a region, scatter behind the `last` (sequence parallel).

        Backward the outer gradient is gathered bare; the first product's input is gathered once more beside its input gradient, and that is
        scattered beside the weight gradient (Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication`), unless that is deferred.
        """
        f = self.mapping.folding
        if f.tp == 1:
            return
        whole = self.tokens * f.tp * self.spec.hidden * self.item
        comm = self.network.all_gather(whole, self.span(f.tp, 1))
        ends = (first is not None) + (last is not None)
        if self.mapping.overlap.tp:
            rooms = [p.forward for p in (first, last) if p is not None]
            left = sum(comm / f.tp + max(0.0, comm * (1 - 1 / f.tp) - room) for room in rooms)
            ledger.both("tp", left)
            ledger.hidden += 2 * (ends * comm - left)
            return
        backward = comm * (last is not None)
        if first is not None:
            rooms = [first.input_grad, 0.0 if self.mapping.splits_backward else first.weight_grad]
            left = sum(beside(comm, room, self.oracle.hardware.share_of(NCCL_SMS)) for room in rooms)
            ledger.hidden += 2 * comm - left
            backward += left
        ledger.add("tp", ends * comm, backward)

    # ---- attention

    def attention(self) -> Ledger:
        """Norm, projections, core and residual of one attention layer."""
        out, s, f = Ledger(), self.spec, self.mapping.folding
        full, h = self.tokens * f.tp, s.hidden
        self.kernel(out, self.tokens * 2 * self.item * h)
        if s.mla is None:
            heads, kv = s.num_heads / f.tp, max(1.0, s.num_kv_heads / f.tp)
            before = self.linear(out, full, (heads + 2 * kv) * s.head_dim, h)
            turned = (heads + kv) * s.head_dim
        else:
            before = self._latent(out, full)
            turned = 2 * s.num_heads / f.tp * (s.mla.nope_dim + s.mla.rope_dim)
        self.kernel(out, full * turned * 2 * self.item, kernels=2, backward=1.0)
        self._core(out, full)
        after = self.linear(out, full, h, s.value_width / f.tp)
        self.tensor_parallel(out, before, after)
        self.kernel(out, self.tokens * 3 * self.item * h, backward=0.7)
        return out

    def _latent(self, out: Ledger, full: float) -> ProductTime:
        """Projections of multi-head latent attention: the way down is the same on all tensor parallel ranks."""
        s, m, t = self.spec, self.spec.mla, self.mapping.folding.tp
        assert m is not None
        q = s.num_heads / t * (m.nope_dim + m.rope_dim)
        if m.q_rank:
            self.linear(out, full / t, m.q_rank, s.hidden)
        before = self.linear(out, full, q, m.q_rank or s.hidden)
        self.linear(out, full / t, m.kv_rank + m.rope_dim, s.hidden)
        self.linear(out, full, s.num_heads / t * (m.nope_dim + m.value_dim), m.kv_rank)
        self.kernel(out, full / t * (m.q_rank + m.kv_rank) * 2 * self.item, kernels=2)
        return before

    def _core(self, out: Ledger, full: float) -> None:
        """Scores and values, with the exchange of context parallelism."""
        s, f, o, seq = self.spec, self.mapping.folding, self.oracle, self.job.seq_len
        flops = 2 * full * s.score_products(seq) / f.tp
        # zigzag: kernels work on halves of a rank's part of the sequence
        piece = seq / (2 * f.cp) if f.cp > 1 and self.mapping.cp_method == "ring" else seq
        forward, backward = o.attention(flops, piece), o.attention(flops, piece, backward=True)
        if not self.mapping.fused_attention:
            scores = full * f.cp * (seq / f.cp) * s.num_heads / f.tp  # b S (S/C) a/T elements
            forward, backward = self._unfused(flops, scores)
            if self.mapping.recompute == "core":
                out.again["attention"] = forward
        out.add("attention", forward, backward)
        out.kernels += 2
        if f.cp == 1:
            return
        width = (
            s.head_dim * 2 * max(1.0, s.num_kv_heads / f.tp) if s.mla is None else 2 * s.num_heads / f.tp * s.head_dim
        )
        part, span = full * width * self.item, self.span(f.cp, f.tp)
        if self.mapping.cp_method == "ring":
            # outputs of each step are merged in fp32 (read and write, and the step's own), gradients of queries and keys likewise
            merged = (f.cp - 1) * full * s.value_width / f.tp * (2 * FP32 + self.item)
            self.kernel(out, merged, kernels=3 * (f.cp - 1), backward=1.5)
            step = self.network.send(part, between=span.hosts > 1)
            comm = (f.cp - 1) * step
            out.add("cp", max(0.0, comm - forward), max(0.0, 2 * comm - backward))
            out.hidden += min(comm, forward) + min(2 * comm, backward)
        elif self.mapping.cp_method == "all_gather":
            out.both("cp", self.network.all_gather(part * f.cp, span))
        else:
            q = full * s.num_heads / f.tp * s.head_dim * self.item
            out.both("cp", 2 * self.network.all_to_all(q, span) + self.network.all_to_all(part, span))

    def _unfused(self, flops: float, scores: float) -> tuple[float, float]:
        """Scores in memory: two batched products of all scores, softmax and dropout over them several times."""
        o = self.oracle
        products = 2 * flops / o.hardware.bf16_flops_per_s / 0.5
        forward = products + o.memory(scores * 9, kernels=3)
        return forward, 2 * products + o.memory(scores * 11, kernels=3)

    # ---- feed-forward

    def dense(self, width: int, *, shared: bool = False) -> Ledger:
        """A dense feed-forward layer, or the shared expert beside routed ones (then norm and residual are theirs)."""
        out, s, f = Ledger(), self.spec, self.mapping.folding
        full, h, n = self.tokens * f.tp, s.hidden, width / f.tp
        if not shared:
            self.kernel(out, self.tokens * 2 * self.item * h)
        before = self.linear(out, full, (s.ffn_matrices - 1) * n, h)
        self.kernel(out, full * s.ffn_matrices * n * self.item, backward=5 / 3)
        after = self.linear(out, full, h, n)
        self.tensor_parallel(out, before, after)
        self.kernel(out, self.tokens * 3 * self.item * h, backward=0.7)
        return out

    def experts(self) -> Ledger:
        """Router, dispatch, grouped experts, combine; and the shared expert where there is one."""
        shared = self.shared()
        out = self.routed(shared)
        self._merge(out, shared)
        return out

    def shared(self) -> Ledger:
        """The shared expert; nothing where there is none."""
        return self.dense(self.spec.shared_ffn, shared=True) if self.spec.shared_ffn else Ledger()

    def routed(self, shared: Ledger) -> Ledger:
        """The layer of experts but for the `shared` one, of which only tiles ask how long it takes: it computes in a gap of theirs."""
        out, s, f, m = Ledger(), self.spec, self.mapping.folding, self.mapping
        t, h = self.tokens, s.hidden
        self.kernel(out, t * 2 * self.item * h)
        self.linear(out, t, s.num_experts, h)
        self.kernel(out, t * s.num_experts * 16, kernels=6, backward=1.0)
        self._decide_together(out, t)
        by_kernels = m.overlap.ep in (*TILE_WAYS, "fused") and f.ep * f.etp > 1
        again = self._by_kernels(out, shared) if by_kernels else self._by_products(out)
        self.kernel(out, t * 3 * self.item * h, backward=0.7)
        if m.recompute == "selective":
            out.again["recompute"] = again
        return out

    def _by_products(self, out: Ledger) -> float:
        """Rows there, products, rows back; what selective recomputation repeats."""
        s, f, m = self.spec, self.mapping.folding, self.mapping
        t, h = self.tokens, s.hidden
        rows, local, load = (
            t * s.top_k * m.rows_share(self.job),
            max(1, round(m.held_experts(self.job))),
            m.load(self.job),
        )
        self._permute(out, t, rows, arrive=False)
        comm = self._dispatch(out, t, rows, load)
        here = rows * f.etp
        if f.ep > 1 and local > 1 and m.dispatch != "all_gather":
            self.kernel(out, 2 * 2 * here * h * self.item, kernels=2, backward=1.0)  # sort by expert, and back
        if (
            self.oracle.eight_bits
        ):  # rows of each expert are copied to a multiple of 16, and back (Megatron-LM: `Fp8Padding`, `Fp8Unpadding`)
            self.kernel(out, 2 * 2 * here * h * self.item, kernels=2, backward=1.0)
        even, hot = self._expert_products(here, local), self._expert_products(here * load, local)
        for kind, ledger, factor in (("experts", even, 1.0), ("imbalance", hot, 1.0), ("imbalance", even, -1.0)):
            f_s, b_s = ledger.seconds
            out.add(kind, factor * f_s, factor * b_s)
        out.kernels += hot.kernels
        out.weight_grad += hot.weight_grad
        self._hide(out, comm, hot.seconds)
        self._permute(out, t, rows, arrive=True)
        return even.seconds[0]

    def _by_kernels(self, out: Ledger, shared: Ledger) -> float:
        """The same by the plan of tiles (`tile_layer.py`) or by the kernels that wait on flags (`fused_time.py`)."""
        if self.mapping.overlap.ep == "fused":
            fused = FusedExperts(self.job, self.mapping, self.oracle, self.network)
            entries, again = fused.entries(), fused.again_s()
        else:
            tiled = TiledExperts(self.job, self.mapping, self.oracle, self.network, bound=self.bound)
            beside = [
                sum(ledger.get(k, 0.0) for k in ("gemm", "memory")) for ledger in (shared.forward, shared.backward)
            ]
            entries = tiled.entries((beside[0], beside[1]))
            again = entries.seconds["experts"][0]
        for kind, (forward, backward) in entries.seconds.items():
            out.add(kind, forward, backward)
        out.kernels += entries.kernels
        out.hidden += entries.hidden
        out.weight_grad += entries.weight_grad
        return again

    def _decide_together(self, out: Ledger, t: float) -> None:
        """What is dropped, where capacity is of the whole micro-batch: its ranks gather experts (int32), weights (fp32) and places (int64), and sort."""
        f, drop, k = self.mapping.folding, self.mapping.drop, self.spec.top_k
        if drop is None or drop.drop_scope != "full_sequence" or f.tp * f.cp == 1:
            return
        whole = t * f.tp * f.cp
        span = self.span(f.tp * f.cp, 1)
        seconds = sum(self.network.all_gather(whole * each, span) for each in (4 * k, 4 * k, 8))
        out.add("tp" if f.tp > 1 else "cp", seconds, 0.0)

    def _permute(self, out: Ledger, t: float, rows: float, *, arrive: bool) -> None:
        """Rows out to experts, or back and summed by weight. Unfused, rows are read and written by each operation: index_select (2) and
        its index_add (3) one way; a product with the weights (2, backward 5) and scatter_add (3, backward 2) the other.
        """
        one = self.spec.hidden * self.item
        if self.mapping.fused_permute:
            self.kernel(out, (t + rows) * one, kernels=2, backward=1.3 if arrive else 1.0)
        elif arrive:
            self.kernel(out, (t + 5 * rows) * one, kernels=4, backward=7 / 5)
        else:
            self.kernel(out, 2 * rows * one, kernels=3, backward=3 / 2)

    @property
    def _chunks(self) -> int:
        """Parts in which rows travel and are computed: each has a latency of its own and reads all weights."""
        o = self.mapping.overlap
        return o.chunks if o.ep == "chunks" and self.mapping.folding.ep > 1 else 1

    def _expert_products(self, rows: float, local: int) -> Ledger:
        """All rows of a rank's experts; in chunks each product is of the rows of a chunk, and every chunk reads the weights anew."""
        return self._expert_rows(rows / self._chunks, local).times(self._chunks)

    def _expert_rows(self, rows: float, local: int) -> Ledger:
        out, s, f = Ledger(), self.spec, self.mapping.folding
        n = s.expert_ffn / f.etp
        groups = local if self.mapping.grouped_experts else 1
        for _ in range(1 if self.mapping.grouped_experts else local):
            part = rows if self.mapping.grouped_experts else rows / local
            self.linear(out, part, (s.ffn_matrices - 1) * n, s.hidden, groups=groups)
            self.kernel(out, part * s.ffn_matrices * n * self.item, backward=5 / 3)
            self.linear(out, part, s.hidden, n, groups=groups)
        return out

    def _dispatch(self, out: Ledger, t: float, rows: float, load: float) -> tuple[str, float]:
        """Kind and seconds of one exchange (dispatch or combine); gathers of expert tensor parallelism are added here."""
        s, f, m = self.spec, self.mapping.folding, self.mapping
        row = s.hidden * self.item
        if m.dispatch == "all_gather":
            span = self.span(f.ep * f.etp, 1)
            seconds = self.network.all_gather(t * span.size * row, span)  # whatever experts they choose
            return ("a2a_between" if span.hosts > 1 else "a2a_inside"), seconds
        if f.etp > 1:
            span = self.span(f.etp, 1)
            out.both("etp", 2 * self.network.all_gather(rows * f.etp * row * load, span))
        if f.ep == 1:
            return "a2a_inside", 0.0
        span = self.span(f.ep, f.etp)
        if m.dispatch == "dedup":
            limit = s.router.group_topk if s.router.num_groups > 1 else None
            seconds = self.network.all_to_all_dedup(
                t * row, span, top_k=s.top_k, num_experts=s.num_experts, host_limit=limit
            )
        elif m.slots is not None:  # local first: what the busiest rank exchanges is counted in the plan
            crossing = rows * row * m.slots.exchange / self._chunks
            seconds = self._chunks * self.network.all_to_all(crossing, span) / load
        else:
            seconds = self._chunks * self.network.all_to_all(rows * row / self._chunks, span)
        return ("a2a_between" if span.hosts > 1 else "a2a_inside"), seconds * load

    def _hide(self, out: Ledger, comm: tuple[str, float], experts: tuple[float, float]) -> None:
        """What is left of dispatch and combine (two in each pass) beside computation."""
        kind, one = comm
        overlap = self.mapping.overlap
        if overlap.ep == "none" or not one:
            out.both(kind, 2 * one)
            return
        taken = self.oracle.hardware.share_of(20)  # a kernel that moves rows takes 20 multiprocessors (DeepEP)
        in_pairs = overlap.ep == "pair" or overlap.paired  # then the partner computes beside the first chunk too
        f, b = (sum(out.forward.values()), sum(out.backward.values())) if in_pairs else experts
        first = 0.0 if in_pairs else 2 * one / overlap.chunks
        beside = 2 * one - first
        left = [first + max(0.0, beside - room) + min(beside, room) * taken for room in (f, b)]
        if in_pairs:  # a forward runs beside a backward: each has the other's time to hide in
            left.reverse()
        out.add(kind, left[0], left[1])
        out.hidden += 4 * one - sum(left)

    @staticmethod
    def _merge(out: Ledger, other: Ledger) -> None:
        for kind in {**other.forward, **other.backward}:  # in an order: sums of seconds are the same in every process
            out.add(kind, other.forward.get(kind, 0.0), other.backward.get(kind, 0.0))
        out.kernels += other.kernels
        out.hidden += other.hidden
        out.weight_grad += other.weight_grad

    # ---- ends of the model

    def head(self) -> Ledger:
        """Final norm, logits and loss."""
        out, s, f = Ledger(), self.spec, self.mapping.folding
        full = self.tokens * f.tp
        self.kernel(out, self.tokens * 2 * self.item * s.hidden)
        wide = "fp32" if self.mapping.precision == "fp32" else "bf16"  # never in eight bits
        own = Blocks(self.job, self.mapping, Oracle(self.oracle.hardware, wide), self.network)
        before = own.linear(out, full, s.vocab / f.tp, s.hidden)
        # vocabulary-parallel loss in fp32, operation by operation: 38 bytes a logit forward, 18 backward (Megatron-LM, not fused)
        self.kernel(out, full * s.vocab / f.tp * 38, kernels=8, backward=18 / 38)
        self.tensor_parallel(out, before, None)
        return out

    def embedding(self) -> Ledger:
        """Rows of the table, summed over tensor parallel ranks."""
        out, s = Ledger(), self.spec
        self.kernel(out, self.tokens * self.mapping.folding.tp * s.hidden * 2 * self.item)
        self.tensor_parallel(out, None, ProductTime(0.0, 0.0, 0.0))
        return out

    def layer(self, *, moe: bool) -> Ledger:
        """Attention and feed-forward of one layer with its recomputation, closed by the host's pace."""
        part = self.experts() if moe else self.dense(self.spec.dense_ffn)
        return self.joined(self.attention(), part)

    def joined(self, attention: Ledger, part: Ledger) -> Ledger:
        """A layer of two halves, with what recomputation repeats."""
        out = Ledger()
        self._merge(out, attention)
        again = {**attention.again, **part.again}
        self._merge(out, part)
        if self.mapping.recompute == "full":
            again = dict(out.forward)
        if self.mapping.recompute == "half":
            again = {kind: 0.5 * s for kind, s in out.forward.items() if kind not in COMMUNICATION}
        for kind, seconds in again.items():
            out.backward["recompute" if kind not in COMMUNICATION else kind] = (
                out.backward.get("recompute" if kind not in COMMUNICATION else kind, 0.0) + seconds
            )
        out.close(self.oracle.hardware.launch_s)
        return out

"""How much each operation of a step's program is: FLOPs, bytes of memory, bytes that leave the rank.

Decides nothing: it counts what `models/`, `kernels/` and `runtime/` do. Rows of routed experts are counted for even routing. Must never change: `sent_bytes` of
every collective is what a run with such routing tells (`core.events.Collective`), but for messages of tiles and whole tokens, which save the second row to a rank where a token has two experts there.

FLOPs are those of products (2 for each multiplication and addition) and of attention with the causal half of the scores. A backward pass has twice
those of the forward pass, 2.5 times in attention; where weight gradients are put off, the products' half of it stands at `weights`.

Legend: T tokens of this rank, N tokens of its tp group (one cp part of a micro-batch), H hidden, K experts of a token, M rows of this rank's experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.op_ids import read_op_id
from phalanx.core.reading import is_count
from phalanx.plan.layout import FlatLayout, LocalParam, publication
from phalanx.plan.mapping import AnyFolding, micro_axis
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec, rows_of_source
from phalanx.plan.moe.overlap import parse_overlap
from phalanx.plan.program.ops import Op

INT32, INT64, FP32 = 4, 8, 4
STREAMS = {"projections": 4, "out": 2, "router": 2, "mlp": 4, "shared": 4, "loss": 2, "experts": 4}
"""Passes over rows of H that go with the products of each use of matrices."""
VOTE_NUMBERS, VOTE_TIMES = 8, 5
"""Numbers of a ballot (`train/step/vote.py`): its own numbers, and times of each MoE layer."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a micro-batch is: `sequences` of `seq_len` tokens, in a type of `itemsize` bytes; sums and state in one of `state_itemsize`."""

    sequences: int
    seq_len: int
    itemsize: int = 2
    state_itemsize: int = 4


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Counts the operations of one rank. `layouts` are its flat layouts by name."""

    folding: AnyFolding
    spec: ModelSpec
    dispatch: DispatchSpec
    rank: int
    sizes: Sizes
    layouts: Mapping[str, FlatLayout]
    splits_backward: bool
    layers_of_stage: Mapping[int, tuple[int | None, ...]]
    """Layers (None: head, embedding) of each stage of this rank."""

    def counted(self, op: Op) -> Op:
        """The operation with its amounts."""
        if op.kind == "host":
            return op
        if op.id.startswith(("gradient/", "publish/")):
            return replace(op, sent_bytes=self._of_layout(op))
        place = read_op_id(op.id)
        if op.kind == "collective":
            return replace(op, sent_bytes=self._sent(op, place.name, place.phase == "bwd"))
        flops, moved = self._work(op, place.name)
        if place.phase == "bwd":
            flops, moved = flops * self._backward(place.name), 2 * moved
        return replace(op, flops=flops, moved_bytes=moved, products=self._products(op.layer, place.name))

    # ---- sizes -----------------------------------------------------------------------------------------------------------------

    @cached_property
    def _stage(self) -> tuple[int, int, int, int]:
        """Degrees tp, cp, ep, etp of the rank's stage."""
        f = self.folding.of_rank(self.rank)
        return f.tp, f.cp, f.ep, f.etp

    @property
    def _rows_N(self) -> int:
        _, shares = self.folding.share_of(self.rank)
        return self.sizes.sequences // shares * self.sizes.seq_len // self._stage[1]

    @property
    def _rows_T(self) -> int:
        return self._rows_N // self._stage[0]

    @property
    def _sent_rows(self) -> float:
        """Rows that a rank has for experts, its own among them."""
        rows, experts = self._rows_T * self.spec.top_k, self.spec.num_experts
        if self.dispatch.is_static:
            sizes = {"sharing": self._sharing, "top_k": self.spec.top_k, "num_experts": experts}
            return experts * rows_of_source(self.dispatch, num_tokens=self._rows_T, **sizes)
        return rows

    @property
    def _sharing(self) -> int:
        """Ranks that share a micro-batch."""
        return self._size(micro_axis(self.folding))

    @property
    def _hidden_bytes(self) -> int:
        return self.spec.hidden * self.sizes.itemsize

    def _size(self, axis: str) -> int:
        return len(self.folding.group_of(self.rank, axis))

    @property
    def _kv_width(self) -> int:
        """Columns of keys and values together, of the heads of this rank, as they travel over cp."""
        spec, tp = self.spec, self._stage[0]
        if spec.mla is not None:
            heads = spec.num_heads // tp
            return 2 * heads * (spec.mla.nope_dim + spec.mla.rope_dim)
        return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim

    @property
    def _score_width(self) -> float:
        """Multiplications of one score, and of its way to the output, over all heads of this rank."""
        spec, tp = self.spec, self._stage[0]
        if spec.mla is not None:
            return spec.num_heads / tp * (spec.mla.nope_dim + spec.mla.rope_dim + spec.mla.value_dim)
        return 2 * spec.num_heads / tp * spec.head_dim

    # ---- collectives -------------------------------------------------------------------------------------------------------------

    def _of_layout(self, op: Op) -> float:
        """Work of a reduction of gradients, or of the parameters that come from it."""
        key = op.id.split("/", 1)[1]
        key = key if op.id.startswith("publish/") else key.rsplit("/", 1)[0]
        layout, n = self.layouts[key], self._size(op.axis)
        if op.collective == "all_gather":
            return layout.shard_length * self.sizes.itemsize * (n - 1)
        if op.id.startswith("publish/") and layout.keepers:
            parcels = publication(layout.keepers, layout.shard_index)
            return 0.0 if parcels is None else layout.shard_length * self.sizes.itemsize * len(parcels.sends)
        length = layout.length if op.collective == "reduce_scatter" else layout.shard_length
        summed = layout.rule.sum_over.index(op.axis) if op.axis in layout.rule.sum_over else 0
        whole = layout.length if op.collective == "reduce_scatter" or not summed or layout.num_shards == 1 else length
        return self._collective(op.collective, whole * self.sizes.state_itemsize, n)

    @staticmethod
    def _collective(kind: str, whole: float, n: int) -> float:
        """Bytes that a rank sends of a tensor of `whole` bytes."""
        return (2 if kind == "all_reduce" else 1) * whole * (n - 1) / n

    def _sent(self, op: Op, name: str, backward: bool) -> float:
        n = self._size(op.axis)
        if op.axis == "pp":
            if op.sent_bytes:  # counted by the plan of the edge
                return op.sent_bytes
            sends = op.sends_to is not None
            return self._rows_T * self._hidden_bytes * (1 if sends else 0) * max(1, len(op.peers))
        if name.startswith("attention.ring"):
            return self._hop(name, backward)
        whole = self._whole(name)
        if whole is not None:
            return self._collective(op.collective, whole, n)
        return self._experts_sent(op, name, n)

    def _hop(self, name: str, backward: bool) -> float:
        """Keys and values forward; backward keys again, and behind them their gradients in the wide type."""
        elements = self._rows_N * self._kv_width
        keys, grads = elements * self.sizes.itemsize, elements * max(FP32, self.sizes.itemsize)
        if not backward:
            return keys
        step = name.rsplit(".", 1)[1]
        if step == "home":
            return grads
        cp = self._stage[1]
        return (keys if int(step) < cp else 0) + (grads if int(step) > 2 else 0)

    def _whole(self, name: str) -> float | None:
        """Bytes of the whole tensor of what is spread evenly; None for experts' rows and for keys."""
        tp, s = self._stage[0], self.sizes
        wide = max(FP32, s.itemsize)
        if name == "attention.gather" and self.spec.mla is not None:  # latents travel
            mla = self.spec.mla
            return self._rows_N * ((mla.q_rank or self.spec.hidden) + mla.kv_rank + mla.rope_dim) * s.itemsize
        if name.endswith((".gather", ".scatter")):
            return self._rows_N * self._hidden_bytes
        if name.endswith(("q_norm", "k_norm")):
            return self._rows_N * wide
        if name == "attention.kv":  # rows to the ranks that work on the same head alone
            copies = tp // self.spec.num_kv_heads
            sent = self._rows_N * 2 * self.spec.head_dim / copies * (copies - 1) * s.itemsize
            return sent * tp / (tp - 1)
        if name in ("attention.keys", "attention.keys_again"):
            return self._rows_N * self._stage[1] * self._kv_width * s.itemsize
        if name.startswith("attention.ulysses"):
            return self._rows_N * self._ulysses_width(name) * s.itemsize
        if name == "loss.shares":
            return self._rows_N * 3 * wide * tp
        if name == "valid_tokens":
            return INT64
        if name in ("router.balance", "balance_counts"):
            layers = len(self.spec.moe_layers) if name == "balance_counts" else 1
            return self.spec.num_experts * layers * INT64
        if name == "vote":
            layers = len(self.spec.moe_layers)
            return (VOTE_NUMBERS + layers * (VOTE_TIMES + self.spec.num_experts)) * 8
        return None

    def _ulysses_width(self, name: str) -> float:
        """Columns that travel: queries, keys and values there, the output back."""
        spec, (tp, cp, _, _) = self.spec, self._stage
        heads = spec.num_heads // tp
        if spec.mla is not None:
            whole = spec.mla.nope_dim + spec.mla.rope_dim
            return heads * (3 * whole if name.endswith("in") else whole)
        if name.endswith("out"):
            return heads * spec.head_dim
        return (heads + 2 * max(spec.num_kv_heads // tp, min(cp, heads))) * spec.head_dim

    def _experts_sent(self, op: Op, name: str, n: int) -> float:
        """Rows of routed experts, their weights and their counts."""
        rows, share = self._sent_rows, 1.0
        if ".chunk" in name:
            share = 1.0 / self._num_chunks
        if name == "dispatch.counts":
            further = 2 if self.dispatch.by_tile else 1 if self.dispatch.transport == "all_gather" else 0
            return (self.spec.num_experts * self._num_chunks + further) * INT64 * (n - 1)
        if name == "dispatch.full_index":
            return self._rows_T * INT64 * (n - 1)
        if name in ("dispatch.full_experts", "dispatch.full_weights"):
            width = INT32 if name.endswith("experts") else max(FP32, self.sizes.itemsize)
            return self._rows_T * self.spec.top_k * width * (n - 1)
        etp = self._stage[3]
        per_row = max(FP32, self.sizes.itemsize) if "weights" in name else self._hidden_bytes
        if self.dispatch.transport == "all_gather":
            tokens = self._rows_T * (self.spec.top_k if "weights" in name or "pairs" in name else 1)
            return tokens * (INT32 if "pairs" in name else per_row) * (n - 1)
        if op.collective in ("dispatch_tokens", "combine_tokens"):
            return self._rows_T * self._distinct() * self._token_bytes(name, read_op_id(op.id).phase) * (n - 1) / n
        if name.endswith("_etp"):
            return rows * share * per_row * (etp - 1)
        if op.collective == "messages":  # to every rank of ep_etp, a row to each part of its expert
            if "weights" not in name:
                rows = self._rows_T * self._distinct()
            return rows * etp * per_row * (n - 1) / n
        return rows * share * per_row * (n - 1) / n

    def _token_bytes(self, name: str, phase: str | None) -> float:
        """Bytes of a token that DeepEP sends: there with its choices and weights, but in a pass that runs again; their gradients come back."""
        wide = max(FP32, self.sizes.itemsize)
        choice = {"re": 0, "bwd": wide}.get(phase or "", INT64 + wide) if name == "dispatch.rows" else 0
        return self._hidden_bytes + self.spec.top_k * choice

    def _distinct(self) -> float:
        """Ranks of ep that a token goes to, if its experts are drawn without replacement: P (1 - C(E - E/P, K) / C(E, K)); its experts, where a row travels for each."""
        experts, top_k, ep = self.spec.num_experts, self.spec.top_k, self._stage[2]
        if parse_overlap(self.dispatch.overlap).rows == "pairs":
            return top_k
        return ep * (1 - math.comb(experts - experts // ep, top_k) / math.comb(experts, top_k))

    @property
    def _num_chunks(self) -> int:
        kind, _, count = str(self.dispatch.overlap).partition(":")
        return int(count) if kind == "coarse" and is_count(count) else 1

    # ---- compute -----------------------------------------------------------------------------------------------------------------

    def _backward(self, name: str) -> float:
        if name.startswith("attention.core"):
            return 2.5
        return 1.0 if self.splits_backward and not name.startswith("weights") else 2.0

    @cached_property
    def _matrices(self) -> dict[tuple[int | None, str], int]:
        """(layer, what uses them) -> elements of this rank's matrices; of experts those of one expert."""
        return {key: sum(columns * inner for columns, inner, _ in sides) for key, sides in self._sides.items()}

    @cached_property
    def _sides(self) -> dict[tuple[int | None, str], list[tuple[int, int, int]]]:
        """(layer, what uses them) -> columns, inner dim and number of this rank's matrices."""
        found: dict[tuple[int | None, str], list[tuple[int, int, int]]] = {}
        for layout in self.layouts.values():
            for held in layout.params:
                part = _used_by(held)
                if part is not None:
                    experts = held.param.family == "expert"
                    columns = math.prod(held.shape[experts:-1])
                    one = columns, held.shape[-1], held.shape[0] if experts else 1
                    found.setdefault((held.param.layer, part), []).append(one)
        return found

    def _products(self, layer: int | None, name: str) -> tuple[tuple[float, int, int, int], ...]:
        """Products of one operation; of a pass of weight gradients those of its whole stage."""
        if name.startswith("weights"):
            held = self.layers_of_stage.get(int(name.removeprefix("weights")), ())
            return tuple(p for at in held for part in self._rows_of_part for p in self._multiplied(at, part))
        part, _, chunk = name.removeprefix("attention.").partition(".chunk")
        layer = None if part == "loss" else layer
        share = 1.0 / self._num_chunks if chunk and part == "experts" else 1.0
        return tuple((rows * share, *sides) for rows, *sides in self._multiplied(layer, part))  # type: ignore[misc]

    def _multiplied(self, layer: int | None, part: str) -> list[tuple[float, int, int, int]]:
        if part not in self._rows_of_part:
            return []
        return [(self._rows_of_part[part], *sides) for sides in self._sides.get((layer, part), [])]

    @cached_property
    def _rows_of_part(self) -> dict[str, float]:
        """Rows that each use of matrices multiplies."""
        n, t = self._rows_N, self._rows_T
        return {"projections": n, "out": n, "router": t, "mlp": n, "shared": n, "loss": n, "experts": self._expert_rows}

    def _work(self, op: Op, name: str) -> tuple[float, float]:
        """FLOPs and bytes of memory of a forward pass."""
        if name == "commit":
            return 0.0, sum(layout.shard_length for layout in self.layouts.values()) * 28.0
        if name == "norm":
            shards = (layout.shard_length for layout in self.layouts.values())
            return 0.0, sum(shards) * float(self.sizes.state_itemsize)
        if name.startswith("weights"):
            return self._weights(int(name.removeprefix("weights"))), 0.0
        if name.startswith("attention.core"):
            return self._scores(name, backward=op.phase == "bwd"), 0.0
        if name == "embedding":
            return 0.0, self._rows_N * 2.0 * self._hidden_bytes
        part = name.removeprefix("attention.").partition(".chunk")[0]
        if part in STREAMS:
            return self._rows_of(part, None if part == "loss" else op.layer, STREAMS[part])
        if part.startswith(("dispatch", "combine")):  # permute, sort, sum: each row read and written
            share = 1.0 / self._num_chunks if ".chunk" in name else 1.0
            return 0.0, 2.0 * self._expert_rows * share * self._hidden_bytes
        return 0.0, 0.0

    @property
    def _expert_rows(self) -> float:
        """Rows that come to this rank's experts, if all ranks get as many: of every part of an expert all of its rows."""
        return self._sent_rows * self._stage[3]

    def _rows_of(self, part: str, layer: int | None, streams: int) -> tuple[float, float]:
        """FLOPs of the products with a part's matrices, and bytes of so many passes over rows of H; chunks share them."""
        elements, rows = self._matrices.get((layer, part), 0), self._rows_of_part[part]
        share = 1.0 / self._num_chunks if part == "experts" else 1.0
        return 2.0 * rows * share * elements, rows * share * streams * self._hidden_bytes

    def _scores(self, name: str, *, backward: bool) -> float:
        """Scores of the causal half and what is summed with them. The steps of a ring have equal parts; backward the own keys' is done half
        first and half while gradients come home."""
        cp = self._stage[1]
        steps = 1.0 if name == "attention.core" else float(cp)
        if backward and name.endswith((".core.1", ".home")):
            steps *= 2
        return self._rows_N * self.sizes.seq_len * self._score_width / steps

    def _weights(self, stage: int) -> float:
        """What a pass of weight gradients makes: every product of the stage once more."""
        rows, held = self._rows_of_part, self.layers_of_stage.get(stage, ())
        return math.fsum(2.0 * rows[part] * n for (layer, part), n in self._matrices.items() if layer in held)


def _used_by(held: LocalParam) -> str | None:
    """Which operation multiplies with a matrix; None for norms, biases and tables."""
    name = held.param.name
    if len(held.param.shape) < 2:
        return None
    if held.param.family == "expert":
        return "experts"
    if ".attention." in name:
        return "out" if name.endswith("wo.weight") else "projections"
    rules = {".router": "router", ".shared": "shared", ".mlp": "mlp", "head.weight": "loss"}
    return next((part for word, part in rules.items() if word in name), None)

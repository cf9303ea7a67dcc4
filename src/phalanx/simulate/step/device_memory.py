"""Bytes on the devices of a cluster, for each pipeline rank: weights, gradients, optimizer, activations, buffers.

What layers of our own runs keep is what `simulate/memory/device_activations.py` lists for the dry run, which adds it up moment by moment and rank by rank; here it is the most that a schedule holds
at once, since a search asks for a million. Of runs that others published (`Mapping.is_ours`) layers keep what closed forms say, fitted to their frameworks. Decides per rank of the pipeline, never an average: the first holds most micro-batches, the last the logits. Must
never change: more recomputation never keeps more.

Widths: weights of the compute type (bf16, or fp32), gradients fp32, master weights and two moments fp32. Closed forms are per token and layer, with sequence parallelism and
fused attention; rows of experts as their fullest rank holds them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from phalanx.plan.mapping import Folding
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.pipeline import AHEAD
from phalanx.plan.pipeline.schedule import Order, make_schedule, most_extra, schedules
from phalanx.simulate.hardware import BF16, FP32, Hardware
from phalanx.simulate.mapping import AnyMapping, Job, Mapping
from phalanx.simulate.memory import (
    LEAST_OPEN,
    Local,
    attention_backward,
    experts_backward,
    head_forward,
    kept_layer,
    owed_layer,
)
from phalanx.simulate.step.nccl import nccl_bytes
from phalanx.simulate.step.stage_layers import StageContent, contents
from phalanx.simulate.step.tile_time import TILE_WAYS

FIXED_BYTES = 1.2e9
"""Context of the device with the programs that it has loaded (0.5 GB at once, 1.06 GB before the first exchange in NVIDIA/nccl issue 1685), and workspaces of products."""
WASTE = 0.04
"""Share of the device that the caching allocator cannot hand out: holes between blocks."""
UNNAMED = 0.037
"""Tensors of others' runs that no formula here names, as a share of those that one does: Megatron-LM's golden values of allocated memory are 23.0, 17.7 and 19.7 GB
where these formulas give 22.1, 17.4 and 18.7 (Mixtral-8x22B, Mixtral-8x7B, and a third functional test)."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on a rank of one pipeline rank."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    communication: float
    live: int
    """Activations of a virtual stage held at once, at most."""

    @property
    def total(self) -> float:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(parts) + self.communication

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def usable_bytes(hardware: Hardware) -> float:
    """What a framework can fill before it is out of memory."""
    return hardware.memory_bytes * (1 - WASTE)


def reserved_bytes(mapping: Mapping, hardware: Hardware | None = None) -> float:
    """What the allocator of tensors does not see. `hardware`: where it runs; None: 8 GPUs a host."""
    if hardware is not None and hardware.sms is None:
        return FIXED_BYTES
    per_host = 8 if hardware is None else hardware.ranks_per_host
    return FIXED_BYTES + nccl_bytes(
        mapping.folding,
        ranks_per_host=per_host,
        cp_exchanges=mapping.cp_method != "ring",
        sums_whole=mapping.sharding == "none",
        by_purpose=mapping.by_purpose,
        rows="ep_etp" if mapping.overlap.ep in TILE_WAYS else "ep",
    )


def activation_bytes(job: Job, mapping: Mapping, *, moe: bool) -> float:
    """Bytes that a layer keeps of one micro-batch until its backward pass, with an even load."""
    tokens = mapping.tokens(job)
    if mapping.recompute == "full":
        return tokens * mapping.item_bytes * job.spec.hidden
    return tokens * (_attention_bytes(job, mapping) + (_moe_bytes(mapping, job) if moe else _dense_bytes(job, mapping)))


def _attention_bytes(job: Job, mapping: Mapping) -> float:
    """Bytes per token of a rank (1/T of those it attends for, with 1/T of the heads: the two cancel). `selective` drops norm
    outputs."""
    s, f, item = job.spec, mapping.folding, mapping.item_bytes
    norms = item * s.hidden * (1 if mapping.recompute == "selective" else 2)
    kv = max(1.0, s.num_kv_heads / f.tp) * f.tp
    if s.mla is None:
        core = item * (s.num_heads + 2 * kv) * s.head_dim + item * s.num_heads * s.head_dim + FP32 * s.num_heads
    else:
        m = s.mla
        q = s.num_heads * (m.nope_dim + m.rope_dim)
        core = item * (2 * q + 2 * s.value_width) + item * (m.q_rank + m.kv_rank) + FP32 * s.num_heads
    if not mapping.fused_attention and mapping.recompute == "none":
        core += 5 * s.num_heads * job.seq_len / f.cp
    return norms + core


def _dense_bytes(job: Job, mapping: Mapping) -> float:
    s, item = job.spec, mapping.item_bytes
    norms = item * s.hidden * (1 if mapping.recompute == "selective" else 2)
    inner = (s.ffn_matrices - 1) if mapping.recompute == "selective" else s.ffn_matrices
    return norms + item * inner * s.dense_ffn


def _moe_bytes(mapping: Mapping, job: Job) -> float:
    """Bytes with an even load; `_row_bytes` of it grow with the load."""
    s, item = job.spec, mapping.item_bytes
    norms = item * s.hidden * (1 if mapping.recompute == "selective" else 2)
    shared = item * s.ffn_matrices * s.shared_ffn
    return norms + 8 * s.num_experts + _row_bytes(mapping, job) + shared + _index_bytes(mapping, s.top_k)


def _index_bytes(mapping: Mapping, top_k: int) -> float:
    """Index bytes of fused kernels, per token: what goes and what comes are tables with a place for every token and source, int32
    or fp32, kept for the backward pass (`kernels/triton/index.py`): slots and choices that go, slots and weights that come, rows
    of copies; tokens of entries and back."""
    if mapping.overlap.ep != "fused":
        return 0.0
    return 4.0 * (mapping.folding.ep * (5 * top_k + 2) + top_k)


def _row_bytes(mapping: Mapping, job: Job) -> float:
    """Rows that experts keep, per token; `selective` keeps the rows that arrived and runs the experts again."""
    s, f, item = job.spec, mapping.folding, mapping.item_bytes
    inner = 0.0 if mapping.recompute == "selective" else item * s.ffn_matrices * s.expert_ffn
    return s.top_k * mapping.rows_share(job) * (item * s.hidden * f.etp + inner)


def later_bytes(job: Job, mapping: Mapping, *, moe: bool) -> float:
    """Bytes that a layer keeps of one micro-batch between its input gradient and a weight gradient that was deferred: inputs of its products, and
    gradients of their outputs, recomputed or not.
    """
    s, f, tokens = job.spec, mapping.folding, mapping.tokens(job)
    if s.mla is None:
        inner = (s.num_heads + 2 * max(1.0, s.num_kv_heads / f.tp) * f.tp) * s.head_dim
    else:
        m = s.mla
        inner = s.num_heads * (m.nope_dim + m.rope_dim + m.nope_dim + m.value_dim) + 2 * (m.q_rank + m.kv_rank)
    elements = 2 * s.hidden + inner + s.value_width
    sent = s.top_k * mapping.rows_share(job) if moe else 1.0
    width, rows = (s.expert_ffn * sent, s.hidden * f.etp * sent) if moe else (s.dense_ffn, s.hidden)
    elements += 2 * rows + s.ffn_matrices * width
    if moe and s.shared_ffn:
        elements += 2 * s.hidden + s.ffn_matrices * s.shared_ffn
    return mapping.item_bytes * tokens * elements


def _load(mapping: Mapping, job: Job) -> float:
    return mapping.load(job, worst=True)


def _working_bytes(job: Job, mapping: Mapping) -> float:
    """The largest layer at work: rows on their way, experts' inputs and gradients; everything of it where it is recomputed."""
    s, f, item, tokens = job.spec, mapping.folding, mapping.item_bytes, mapping.tokens(job)
    bare = tokens * 4 * item * s.hidden * f.tp
    if s.num_moe_layers:
        rows = tokens * s.top_k * mapping.rows_share(job) * _load(mapping, job)
        bare += rows * f.etp * item * (2 * s.hidden + 2 * s.expert_ffn / f.etp)
        if (
            mapping.overlap.ep == "fused"
        ):  # a pair of buffers for all layers, with a place for every token of every source
            bare += 2 * f.ep * tokens * s.hidden * item
        if mapping.dispatch == "all_gather":  # every rank's tokens, there and back
            bare += 2 * tokens * f.ep * f.etp * s.hidden * item
    if mapping.recompute in ("selective", "full"):
        bare += activation_bytes(job, replace(mapping, recompute="none"), moe=s.num_moe_layers > 0)
    return bare


def parameters_of_rank(job: Job, mapping: Mapping, content: StageContent) -> tuple[float, float]:
    """(dense, expert) parameters of a rank that holds these layers."""
    s, f = job.spec, mapping.folding
    dense = content.layers * s.attention_matrices / f.tp + content.dense_layers * s.dense_matrices / f.tp
    dense += content.moe_layers * (s.shared_matrices / f.tp + s.num_experts * s.hidden) + content.layers * 2 * s.hidden
    dense += content.tables(tied=s.tied_embeddings) * s.vocab * s.hidden / f.tp
    expert = content.moe_layers * mapping.held_experts(job) * s.expert_matrices / f.etp if s.num_moe_layers else 0.0
    return dense, expert


def shards(mapping: Mapping) -> tuple[int, int]:
    """Ranks over which state of (dense, expert) parameters is spread."""
    f = mapping.folding
    if mapping.sharding == "none":
        return 1, 1
    if mapping.sharding == "parameters" and not mapping.shard_over_cp:
        return f.dp, max(1, f.edp // f.cp)
    return f.dp * f.cp, f.edp


def kept_state(job: Job, mapping: Mapping, own: tuple[float, float]) -> tuple[float, float]:
    """Those of a rank's (dense, expert) parameters whose optimizer state it keeps."""
    by_dense, by_expert = shards(mapping)
    dense, expert = own
    if mapping.slots is not None:
        expert *= mapping.kept_experts(job) / mapping.held_experts(job)
    return dense / by_dense * min(mapping.holders, by_dense), expert / by_expert * min(mapping.holders, by_expert)


@dataclass(frozen=True)
class LayerBytes:
    """What depends on one layer of one micro-batch alone, whatever the pipeline."""

    moe: float
    rows: float
    """Part of `moe` that grows with the load of the fullest rank."""
    load: float
    """Load of one layer, at its worst."""
    dense: float
    moe_later: float
    """Kept until a weight gradient that was deferred."""
    dense_later: float
    rows_later: float
    """Part of `moe_later` that grows with the load."""
    working: float
    """With an even load, where a run is ours."""
    working_excess: float
    """And what its fullest layer adds."""
    message: float
    """From one stage to the next, where a run of ours has it open beside others."""
    logits: float


def _local(job: Job, mapping: Mapping) -> Local:
    """A rank's part of a micro-batch, with an even load, as a run of ours has it."""
    assert mapping.recompute in ("none", "selective", "full")
    dispatch = mapping.drop or DispatchSpec()
    return Local(
        spec=job.spec,
        folding=mapping.folding,
        dispatch=replace(dispatch, transport="all_gather") if mapping.dispatch == "all_gather" else dispatch,
        sequences=mapping.micro_batch,
        seq_len=job.seq_len,
        item=mapping.item_bytes,
        recompute=mapping.recompute,
        lanes=1,
        rows_share=1.0,
        on_device=True,
        cp_method=mapping.cp_method,
        sums_experts=True,
        experts_held=max(1, round(mapping.held_experts(job))) if job.spec.num_moe_layers else None,
    )


def layer_bytes(job: Job, mapping: Mapping) -> LayerBytes:
    """Activations of a layer of either kind, the largest layer at work, logits."""
    return (_layer_of_ours if mapping.is_ours else _layer_of_others)(job, mapping)


def _layer_of_ours(job: Job, mapping: Mapping) -> LayerBytes:
    """By the lists of the dry run."""
    s, moe = job.spec, job.spec.num_moe_layers > 0
    x, layer, load = _local(job, mapping), s.moe_layers[0] if moe else -1, _load(mapping, job) if moe else 1.0
    half = replace(x, rows_share=0.5)
    kept, owed = (sum(of(x, layer)) if moe else 0 for of in (kept_layer, owed_layer))
    working, fullest = (float(_working_of_ours(replace(x, rows_share=each), layer)) for each in (1.0, load))
    logits = max(0.0, sum(head_forward(x)) - working)  # one is there after the other
    fused = 2 * mapping.folding.ep * x.stream() if mapping.overlap.ep == "fused" else 0  # there and back
    indices = mapping.tokens(job) * _index_bytes(mapping, s.top_k) if moe and mapping.recompute != "full" else 0.0
    return LayerBytes(
        moe=kept + indices,
        rows=2.0 * (kept - sum(kept_layer(half, layer))) if moe else 0.0,
        rows_later=2.0 * (owed - sum(owed_layer(half, layer))) if moe else 0.0,
        load=load,
        dense=sum(kept_layer(x, -1)),
        moe_later=owed,
        dense_later=sum(owed_layer(x, -1)),
        working=working + fused,
        working_excess=fullest - working,
        message=x.tokens * mapping.item_bytes * s.hidden,
        logits=logits,
    )


def _working_of_ours(x: Local, layer: int) -> int:
    """The layer at work in the backward pass; all of it where it is computed again."""
    working = max(sum(attention_backward(x)), sum(experts_backward(x)) if layer in x.spec.moe_layers else 0)
    again = sum(kept_layer(replace(x, recompute="none"), layer)) - sum(kept_layer(x, layer))
    return working + again if x.recompute == "full" else working


def _layer_of_others(job: Job, mapping: Mapping) -> LayerBytes:
    """By the closed forms."""
    s, moe = job.spec, job.spec.num_moe_layers > 0
    return LayerBytes(
        moe=activation_bytes(job, mapping, moe=True) if moe else 0.0,
        rows=mapping.tokens(job) * _row_bytes(mapping, job) if moe and mapping.recompute != "full" else 0.0,
        rows_later=0.0,
        load=_load(mapping, job) if moe else 1.0,
        dense=activation_bytes(job, mapping, moe=False),
        moe_later=later_bytes(job, mapping, moe=True) if moe else 0.0,
        dense_later=later_bytes(job, mapping, moe=False),
        working=_working_bytes(job, mapping),
        working_excess=0.0,
        message=0.0,
        logits=mapping.micro_batch
        * job.seq_len
        / mapping.folding.cp
        * s.vocab
        / mapping.folding.tp
        * (FP32 + 2 * BF16),
    )


States = tuple[tuple[int, int], ...]
"""(activations, put-off weight gradients) of a virtual stage that a rank holds at once: the states that no other exceeds in both."""


def states_of_ranks(mapping: Mapping, microbatches: int) -> tuple[States, ...]:
    """What each pipeline rank holds at its fullest moments."""
    key = (mapping.schedule, mapping.folding.pp, mapping.virtual)
    if mapping.splits_backward:
        return _split_states(*key, min(microbatches, 3 * mapping.folding.pp), mapping.extra_warmup)
    return _plain_states(*key, microbatches, mapping.extra_warmup)


@lru_cache(maxsize=8192)
def _plain_states(
    schedule: str, pp: int, virtual: int, microbatches: int, extra_warmup: tuple[int, ...] | None
) -> tuple[States, ...]:
    """States of every rank, by its schedule's promise."""
    if pp == 1:
        return (((1, 0),),)
    extra = extra_warmup or most_extra(pp)  # an eager schedule whose numbers are not given takes the most
    live = (schedules()[schedule].live(rank, pp, virtual, microbatches, extra[rank]) for rank in range(pp))
    return tuple(((each, 0),) for each in live)


@lru_cache(maxsize=1024)
def _split_states(
    schedule: str, pp: int, virtual: int, microbatches: int, extra_warmup: tuple[int, ...] | None
) -> tuple[States, ...]:
    """States of every rank, found by walking through its order; more micro-batches than three rounds repeat the steady state."""
    made = make_schedule(schedule, pp=pp, virtual=virtual, num_microbatches=microbatches, extra_warmup=extra_warmup)
    return tuple(_front(order) for order in made.actions)


def _front(order: Order) -> tuple[tuple[int, int], ...]:
    change = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
    most: dict[int, int] = {}
    live = later = 0
    for action in order:
        a, b = change[action.kind]
        live, later = live + a, later + b
        during = later + (action.kind == "B")  # a whole backward pass puts its weight gradients off to its end
        most[live] = max(most.get(live, 0), during)
    front: list[tuple[int, int]] = []
    for number in sorted(most, reverse=True):
        if not front or most[number] > front[-1][1]:
            front.append((number, most[number]))
    return tuple(front)


def stage_memory(job: Job, mapping: Mapping, *, pipeline_rank: int, hardware: Hardware | None = None) -> StageMemory:
    """Memory of the ranks at one place of the pipeline."""
    states = states_of_ranks(mapping, mapping.num_microbatches(job))[pipeline_rank]
    place = PipelinePlace(pipeline_rank, contents(job, mapping)[pipeline_rank], states)
    return memory_at(job, mapping, place, layer_bytes(job, mapping), hardware=hardware)


class PipelinePlace(NamedTuple):
    """What the ranks at one place of a pipeline hold, and how much of it is in flight."""

    pipeline_rank: int
    content: StageContent
    states: States


def _state_bytes(job: Job, mapping: Mapping, content: StageContent) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank that holds these layers."""
    dense, expert = parameters_of_rank(job, mapping, content)
    own = sum(kept_state(job, mapping, (dense, expert)))
    kept = dense + expert
    if mapping.sharding == "parameters":
        if mapping.reshard_after_forward:
            kept = 2 * kept / max(1, content.layers)
        kept += own
    gradients = mapping.gradient_bytes * (own if mapping.sharding == "gradients" else kept)
    return mapping.item_bytes * kept, gradients, (FP32 + 2 * mapping.moment_bytes) * own


def least_bytes(job: Job, mapping: Mapping, hardware: Hardware | None = None) -> float:
    """Less than the fullest rank of the folding needs, whatever pipeline, micro-batch, recomputation and overlap it has: the state alone, as if each rank of the pipeline held as much.

    Not of sharded parameters, of which a rank collects a layer at a time.
    """
    assert mapping.sharding != "parameters"
    whole = contents(job, replace(mapping, folding=Folding(world=1), schedule="1f1b", virtual=1))[0]
    state = sum(_state_bytes(job, mapping, whole)) / mapping.folding.pp
    return state * (1.0 if mapping.is_ours else 1 + UNNAMED) + reserved_bytes(mapping, hardware)


def memory_at(
    job: Job, mapping: Mapping, place: PipelinePlace, layer: LayerBytes, *, hardware: Hardware | None = None
) -> StageMemory:
    content = place.content
    weights, gradients, of_optimizer = _state_bytes(job, mapping, content)
    # layers are uneven each on its own: over those of a rank, what exceeds the even share grows with their root, but where the fullest is at work alone
    root = math.sqrt(max(1, content.moe_layers))
    alone = root if mapping.recompute == "full" else 1.0
    uneven = (layer.load - 1) * content.moe_layers / root * alone
    held = content.moe_layers * layer.moe + uneven * layer.rows + content.dense_layers * layer.dense
    state = weights + gradients + of_optimizer
    later = content.moe_layers * layer.moe_later + content.dense_layers * layer.dense_later
    later += uneven * layer.rows_later
    activations = max(held * n + later * w for n, w in place.states) / max(1, len(content.chunk_layers))
    if mapping.folding.pp > 1:  # sends that may be open, receives that are posted ahead
        activations += (max(LEAST_OPEN, *(n for n, _ in place.states)) + AHEAD) * layer.message
    logits = layer.logits if content.heads else 0.0
    working = layer.working + layer.working_excess / root * alone
    return StageMemory(
        pipeline_rank=place.pipeline_rank,
        weights=weights,
        gradients=gradients,
        optimizer=of_optimizer,
        activations=activations,
        logits=logits,
        buffers=working + (0.0 if mapping.is_ours else UNNAMED * (state + activations + logits + working)),
        communication=reserved_bytes(mapping, hardware),
        live=max(n + w for n, w in place.states),
    )


def memory_of(job: Job, mapping: AnyMapping, hardware: Hardware | None = None) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank."""
    places = enumerate(mapping.places)
    return tuple(stage_memory(job, own, pipeline_rank=rank, hardware=hardware) for rank, own in places)


def fits(job: Job, mapping: Mapping, hardware: Hardware) -> bool:
    """Whether the fullest pipeline rank fits on a device."""
    return max(stage.total for stage in memory_of(job, mapping, hardware)) <= usable_bytes(hardware)

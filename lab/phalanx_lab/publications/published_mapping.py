"""The mapping and the job of a published row, and its measured step time.

Decides what a silent source is taken to have done: no recomputation, virtual stages as many as layers on a stage, micro-batch 1,
layers divided by count as evenly as they can be (Megatron-LM's and torchtitan's default). A method named FSDP gathers parameters for each pass, reduces gradients of each micro-batch, and shards over dp alone (cp ranks hold the same).
"""

from __future__ import annotations

import dataclasses
import re

from phalanx.plan.mapping.folding import Folding
from phalanx.plan.model.model import flops_per_token
from phalanx.simulate.hardware.clusters import GpuCluster, load_hardware
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap, Recompute
from phalanx.simulate.mapping.routing import RouterModel
from phalanx_lab.publications.published import Row


def job_of(row: Row) -> Job:
    """What the row trained."""
    return Job(spec=row.spec, seq_len=row.seq_len, global_batch=row.global_batch)


def cluster_of(row: Row) -> GpuCluster:
    """Where it ran."""
    return GpuCluster(hardware=load_hardware(row.hardware), world=row.gpus)


def measured_seconds(row: Row) -> float:
    """The published figure as seconds of a step. Raises `ValueError` for a row that has none (out of memory)."""
    tokens = row.seq_len * row.global_batch
    if row.metric == "step_time_s":
        return row.value
    if row.metric == "tokens_per_s_per_GPU":
        return tokens / (row.value * row.gpus)
    if row.metric == "OOM":
        raise ValueError("a run out of memory has no step time")
    flops = flops_per_token(row.spec, row.seq_len, attention=row.convention) * tokens / row.gpus
    peak = load_hardware(row.hardware).bf16_flops_per_s
    return flops / (row.value / 100 * peak if row.metric == "MFU_pct" else row.value * 1e12)


def mapping_of(row: Row) -> tuple[Mapping, tuple[str, ...]]:
    """How the row ran, and what was assumed of it."""
    recompute, stated = _recompute(row)
    flags = () if stated else ("recomputation not stated: none",)
    return dataclasses.replace(_base(row), recompute=recompute), (*row.flags, *flags)


def _recompute(row: Row) -> tuple[Recompute, bool]:
    """Words of the row first, then those of its source; whether anything was said."""
    low = row.text.lower()
    if re.search(r"full (recompute|ac\b|activation)", low):
        return "full", True
    if "no recompute" in low:
        return "none", True
    if re.search(r"selective (recompute|ac\b)|selective\+|per-op sac", low):
        return ("half" if row.source.startswith("torchtitan") else "core"), True
    if row.facts.recompute:
        return row.facts.recompute, True  # type: ignore[return-value]
    return "none", False


def _base(row: Row) -> Mapping:
    facts, low, d = row.facts, row.text.lower(), row.degrees
    folding = Folding(world=row.gpus, tp=d["tp"], cp=d["cp"], pp=d["pp"], ep=d["ep"], etp=d["etp"])
    named = row.method.lower().startswith("fsdp")
    sharded = named or facts.sharding == "parameters"
    virtual = _virtual(row, folding)
    tp_overlap = "async tp" in low or "asynctp" in low or facts.tp_overlap
    if "vanilla tp" in low:
        tp_overlap = False
    # with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core asks for with tensor parallelism, gathers of sharded parameters do not run
    # beside computation (Megatron-FSDP user guide)
    serial = named and facts.method_is_megatron and folding.tp > 1
    overlap = Overlap(
        dp=facts.dp_overlap,
        tp=tp_overlap,
        ep="pair" if re.search(r"(1f1b|ep|a2a)[- ](a2a[- ])?overlap", low) else "none",
        fsdp=not serial,
    )
    micro = min(row.micro_batch, row.global_batch)
    if folding.pp > 1 and facts.pipeline_micro_batch:
        micro = facts.pipeline_micro_batch
    learned = facts.routing == "learned" or "no token drop, real routing" in low
    stages = folding.pp * virtual if folding.pp > 1 else 1
    return Mapping(
        folding=folding,
        stage_layers=even_layers(row.spec.num_layers, stages),
        micro_batch=micro,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual=virtual,
        overlap=overlap,
        precision="fp8" if row.precision == "fp8" else "bf16",
        sharding="parameters" if sharded else "optimizer",
        reshard_after_forward=(facts.reshard_after_forward or named) and folding.pp == 1,
        shard_over_cp=not named,
        gradient_bytes=2 if facts.gradient_bytes == 2 else 4,
        fused_permute=facts.fused_permute,
        dispatch="dedup" if re.search(r"deepep|hybridep", low) else "all_to_all",
        cp_method=facts.cp_method,  # type: ignore[arg-type]
        routing=RouterModel(kind="learned" if learned else "balanced"),
        fused_attention=facts.fused_attention,
        by_purpose=False,
    )


def _virtual(row: Row, folding: Folding) -> int:
    """Virtual stages: as given, else as many as there are layers on a stage (the smallest bubble)."""
    if folding.pp == 1:
        return 1
    if row.virtual is not None:
        return row.virtual
    if row.facts.virtual != "layers":
        return 1
    most = (row.spec.num_layers + 2) // folding.pp  # embedding and head may have stages of their own
    return max(1, min(most, -(-row.spec.num_layers // folding.pp)))


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of stages, as Megatron-LM divides them: as even as can be by count; where that does not divide, fewer at the ends, which have embedding and head."""
    size, more = divmod(layers, stages)
    counts = [size] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    start = max(0, (len(middle) - 2 - more) // 2) if stages > 2 else 0
    for i in range(more):
        counts[middle[(start + i) % len(middle)]] += 1
    return tuple(counts)

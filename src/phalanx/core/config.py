"""The sections of a recipe, one frozen dataclass each, with defaults that run on a laptop.

A recipe is a TOML file; ``--section.key value`` overrides it. A field that is ``None`` is *not set*: the preset, the plan or the
machine decides it. Fields that have an effect only beside another setting default to ``None``, so that setting them where
they would be ignored is an error (see ``core/recipe.py``), never a silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model: a preset, and any of its numbers changed."""

    preset: str = "laptop"
    """Named shape; `phalanx train --help` lists them."""
    num_layers: int | None = None
    hidden: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    """Rows of the embedding. Default: the tokenizer's size rounded up to a multiple of 64."""
    num_experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    """Width of the shared expert, 0 for none."""
    dense_layers: int | None = None
    """This many first layers have a dense MLP in place of experts."""
    dense_ffn: int | None = None
    qk_norm: Literal["none", "head", "hidden"] | None = None
    attention_bias: bool | None = None
    tied_embeddings: bool | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts. ``None`` takes the preset's value."""

    score: Literal["softmax", "sigmoid"] | None = None
    softmax_order: Literal["before_topk", "after_topk"] | None = None
    """Softmax over all experts and then top-k, or top-k and then softmax over the chosen logits (softmax only)."""
    renormalize: bool | None = None
    """Divide the chosen weights by their sum."""
    scale: float | None = None
    """Factor on the chosen weights (DeepSeek's routed_scaling_factor)."""
    num_groups: int | None = None
    group_topk: int | None = None
    """Group-limited routing: only experts of the best `group_topk` of `num_groups` groups may be chosen."""
    group_score: Literal["sum_topk", "top2"] | None = None
    """Score of a group: sum of its best top_k/group_topk scores (Megatron), or of its best two (DeepSeek-V3)."""
    z_loss: float = 0.0
    aux_loss: float = 0.01
    """Coefficient of the load-balancing loss, 0 for none."""
    aux_scope: Literal["micro_batch", "sequence", "global_batch"] | None = None
    """Tokens over which balance is asked for. Default: micro_batch where aux_loss > 0."""
    bias_rate: float = 0.0
    """Step of the aux-loss-free expert bias (arXiv 2408.15664), 0 for none."""
    force: Literal["none", "balanced", "imbalanced"] = "none"
    """Benchmarks only: replaces the router's choice by a workload that depends on (seed, step, layer) alone."""
    force_skew: float | None = None
    """Zipf exponent of `force = "imbalanced"` (default 1.0)."""


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """How routed tokens travel to their experts, and which of them are dropped."""

    policy: Literal["dropless", "drop"] = "dropless"
    capacity_factor: float | None = None
    """Rows an expert takes, as a multiple of the even share (policy = "drop" only; default 1.0)."""
    drop_by: Literal["probability", "position"] | None = None
    """Which rows an overfull expert keeps (policy = "drop" only; default probability)."""
    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """Capacity counted over a rank's own tokens, or over the whole micro-batch (policy = "drop" only; default sub_sequence)."""
    pad_to_capacity: bool | None = None
    """Every expert computes exactly its capacity, so that no size depends on the routing (policy = "drop" only; default false)."""
    transport: Literal["all_to_all", "all_gather"] = "all_to_all"


@dataclass(frozen=True, kw_only=True)
class FoldingConfig:
    """Degrees of the two rank grids; dp and edp follow from the number of ranks (arXiv 2504.14960)."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int | None = None
    """Expert parallel degree. Default: as many ranks as divide the experts."""
    etp: int = 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    sources: tuple[str, ...] = ("builtin:python",)
    """Files, folders or globs (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .bin/.idx), or builtin:python."""
    weights: tuple[float, ...] | None = None
    """Share of samples from each source. Default: by size."""
    tokenizer: str = "bpe:8192"
    """byte, bpe:VOCAB (trained once on the sources), or a Hugging Face tokenizer.json."""
    text_field: str = "text"
    validation_fraction: float = 0.02
    cache: str = "cache"
    """Folder of tokenised files, shared by runs."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch and precision."""

    steps: int = 300
    seq_len: int = 256
    global_batch: int = 32
    """Sequences per optimizer step over all ranks."""
    micro_batch: int = 8
    """Sequences per forward pass of one data-parallel rank."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Compute type. Master weights and moments are fp32 (fp64 with float64)."""
    recompute: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False
    seed: int = 0
    eval_interval: int = 50
    """Steps between validations, 0 for none but the last."""
    eval_batches: int = 8
    """Global batches per validation."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101), its schedule and its sharding."""

    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_steps: int | None = None
    """Length of the final decay (schedule = "wsd" only; default a fifth of the run)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down, 0 for none."""
    zero: Literal[0, 1] = 1
    """1 shards master weights and moments over dp x cp (dense) and edp (experts)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: int = 50
    """Steps between checkpoints, 0 for none but the last."""
    keep_last: int = 3
    asynchronous: bool = True
    resume: bool = True
    """Go on from the newest checkpoint of the run folder."""
    step: int | None = None
    """Resume from this step's checkpoint instead of the newest."""


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    console: Literal["auto", "live", "plain", "none"] = "auto"
    tensorboard: bool = True
    wandb_project: str | None = None
    prometheus_port: int | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Ranks on this machine. Under torchrun the launcher's variables decide instead."""

    ranks: int = 1
    threads: int | None = None
    """Compute threads of each rank. Default: cores / ranks, at least 1."""
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: float = 600.0
    """Longest wait of one collective."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    implementation: Literal["fast", "reference"] = "fast"
    """`reference` runs the plain version that each fast path is tested against."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "laptop"
    folder: str = "runs"
    """The run lives in `folder/name`."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Written to the run folder as `recipe.toml`; running that file again gives the same run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    folding: FoldingConfig = field(default_factory=FoldingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

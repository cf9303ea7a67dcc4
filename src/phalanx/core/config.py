"""The sections of a recipe, one frozen dataclass each, with defaults that run on a laptop.

A recipe is a TOML file; ``--section.key value`` overrides it. A field that is ``None`` is *not set*: the preset, the plan or the
machine decides it. Fields that have an effect only beside another setting default to ``None``, so that setting them where
they would be ignored is an error (see ``core/recipe.py``), never a silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RECIPE_FILE, STATUS_FILE = "recipe.toml", "run_state.json"
"""In the folder of a run: its resolved recipe, and how far it is."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model: a preset, and any of its numbers changed."""

    preset: str = "laptop"
    """Named shape; `phalanx settings model` lists them."""
    num_layers: int | None = None
    """Blocks of attention and experts (or a dense MLP)."""
    hidden: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads; fewer than `num_heads` is grouped-query attention."""
    head_dim: int | None = None
    """Width of one head; even, for the rotary embedding."""
    vocab: int | None = None
    """Rows of the embedding. Default: the tokenizer's size rounded up to a multiple of 64."""
    num_experts: int | None = None
    """Routed experts of each MoE layer."""
    top_k: int | None = None
    """Experts that each token is routed to."""
    expert_ffn: int | None = None
    """Inner width of one routed expert."""
    shared_ffn: int | None = None
    """Width of the shared expert, 0 for none."""
    dense_layers: int | None = None
    """This many first layers have a dense MLP in place of experts."""
    dense_ffn: int | None = None
    """Inner width of the dense MLP of those layers."""
    qk_norm: Literal["none", "head", "hidden"] | None = None
    """RMSNorm on queries and keys: of each head (Qwen3), or over all heads at once (OLMoE)."""
    attention_bias: bool | None = None
    """Biases on the query, key and value projections (Qwen2)."""
    tied_embeddings: bool | None = None
    """The head shares the embedding's weight."""
    rope_theta: float | None = None
    """Base of the rotary embedding's wavelengths."""
    norm_eps: float | None = None
    """Added to the mean square in every RMSNorm."""
    init_std: float | None = None
    """Standard deviation of initial matrices (default 0.02); those that add to the residual stream have it over sqrt(2 num_layers)."""
    shared_gate: bool | None = None
    """The shared expert's output is multiplied by a sigmoid of one number per token (Qwen2-MoE)."""
    mtp_layers: int | None = None
    """Tokens after the next one that are predicted as well in training (arXiv 2412.19437 section 2.2), a block for each."""
    mtp_weight: float | None = None
    """Weight of their mean loss in the objective (default 0.3)."""
    q_rank: int | None = None
    """Latent attention: width of the compressed query, 0 for none."""
    kv_rank: int | None = None
    """Latent attention: width of the compressed keys and values."""
    nope_dim: int | None = None
    """Latent attention: width of a head without position."""
    rope_dim: int | None = None
    """Latent attention: width of a head that is rotated, even."""
    value_dim: int | None = None
    """Latent attention: width of a value head."""
    rope_interleaved: bool | None = None
    """Latent attention: neighbouring dims are rotated together (else the halves of the rotated part)."""
    yarn_factor: float | None = None
    """Stretch the rotary embedding to this many times its original length (YaRN, arXiv 2309.00071); 1 for not at all."""
    yarn_original_length: int | None = None
    """Sequence length before stretching."""
    yarn_beta_fast: float | None = None
    """Pairs that turn more often in the original length are not stretched (default 32)."""
    yarn_beta_slow: float | None = None
    """Pairs that turn less often in the original length are stretched fully (default 1)."""
    yarn_mscale: float | None = None
    """DeepSeek's growth of cosine and sine with the factor, 0 for the usual one."""
    yarn_mscale_all_dim: float | None = None
    """DeepSeek's growth of the scores of latent attention with the factor, 0 for none."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts. What is not set is as the preset has it."""

    score: Literal["softmax", "sigmoid"] | None = None
    """What turns the router's logits into weights."""
    softmax_order: Literal["before_topk", "after_topk"] | None = None
    """Softmax over all experts and then top-k, or top-k (by either score) and then softmax over the chosen logits."""
    renormalize: bool | None = None
    """Divide the chosen weights by their sum (a single one stays as it is: else the router had no gradient)."""
    scale: float | None = None
    """Factor on the chosen weights (DeepSeek's routed_scaling_factor)."""
    num_groups: int | None = None
    """Groups of experts for group-limited routing (goes with `group_topk`)."""
    group_topk: int | None = None
    """Group-limited routing: only experts of the best `group_topk` of `num_groups` groups may be chosen."""
    group_score: Literal["sum_topk", "top2", "max"] | None = None
    """Score of a group: sum of its best top_k/group_topk scores (Megatron), of its best two (DeepSeek-V3), or its best one (V2)."""
    z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of each layer's logits (arXiv 2202.08906), 0 for none; layers are added up."""
    aux_loss: float = 0.01
    """Coefficient of the load-balancing loss of each layer, which is 1 where all is balanced, 0 for none; layers are added up, as in Megatron-LM."""
    aux_scope: Literal["micro_batch", "sequence", "global_batch"] | None = None
    """Tokens over which balance is asked for, padding left out. Default: micro_batch where aux_loss > 0."""
    bias_rate: float | None = None
    """Step of the aux-loss-free expert bias (arXiv 2408.15664), 0 for none."""
    force: Literal["none", "balanced", "imbalanced"] = "none"
    """Benchmarks only: replaces the router's choice by a workload that depends on (seed, step, layer) alone."""
    force_skew: float | None = None
    """Zipf exponent of `force = "imbalanced"` (default 1.0)."""


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """How routed tokens travel to their experts, and which of them are dropped."""

    policy: Literal["dropless", "drop"] = "dropless"
    """Whether an overfull expert takes all of its rows, or only up to its capacity."""
    capacity_factor: float | None = None
    """Rows of text an expert takes, as a multiple of the even share of all tokens (default 1.0)."""
    drop_by: Literal["probability", "position"] | None = None
    """Which rows an overfull expert keeps (default probability)."""
    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """Capacity counted over a rank's own tokens, or over the whole micro-batch (default sub_sequence)."""
    pad_to_capacity: bool | None = None
    """Every expert computes exactly its capacity, so that no size depends on the routing (default false)."""
    transport: Literal["all_to_all", "all_gather", "deepep"] = "all_to_all"
    """Rows sent to the ranks that need them, or whole tokens: gathered everywhere (for tiny ep), or sent once to each rank with an expert of theirs by DeepEP, which is installed apart (deepep: GPUs, bfloat16, dropless, every expert once; no GPU has run it)."""
    overlap: str = "serial"
    """Communication beside the experts' computing: serial (none), coarse:N (N chunks of tokens), fine (tile by tile), auto (by a measured model), tiles (serial, the bits of fine; any schedule as tiles:parts=4,order=arrival,blocks=2), fused (kernels that compute while they receive and send; GPUs of one host; several have not run it)."""
    left_free: int | None = None
    """Multiprocessors of a GPU that products inside an overlapped layer leave to messages, which get no more. Default: tile by tile none are left and messages take what they like; fused 16."""


@dataclass(frozen=True, kw_only=True)
class FoldingConfig:
    """Degrees of the two rank grids; dp and edp follow from the number of ranks (arXiv 2504.14960)."""

    tp: int = 1
    """Tensor parallel degree of everything that is not a routed expert."""
    cp: int = 1
    """Context parallel degree (parts of the sequence)."""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How the ranks that share a sequence attend: keys travel around them, keys gathered by all, or heads exchanged for positions."""
    pp: int = 1
    """Pipeline parallel degree (stages)."""
    ep: int | None = None
    """Expert parallel degree. Default: as many ranks as divide the experts; fewer in a run that recovers by default, so that each has `resilience.f` holders."""
    etp: int = 1
    """Tensor parallel degree of the routed experts."""
    stages: tuple[str, ...] | None = None
    """Degrees of each pipeline stage in place of all others, e.g. ["tp1", "tp2.dp2.ep4"]; each stage has tp x cp x dp ranks. Default: all alike."""

    @property
    def num_stages(self) -> int:
        """Ranks, or groups of ranks, of a pipeline."""
        return self.pp if self.stages is None else len(self.stages)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Order in which the stages of a pipeline work, and the layers they hold (`folding.pp` above 1, or `folding.stages`;
    `pair_passes` always)."""

    schedule: str | None = None
    """Order of the passes: gpipe, 1f1b, interleaved_1f1b, zero_bubble, eager_1f1b, eager_1f1b_split, zbv, dualpipev, or one of an installed package; `phalanx plan schedule` draws each. Default: 1f1b, or interleaved_1f1b with several virtual stages."""
    virtual: int | None = None
    """Stages of each rank. Default: 1, or the 2 that a V-shaped schedule (zbv, dualpipev) has."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage, first to last (pp x virtual numbers). Default: divided by cost."""
    extra_warmup: tuple[int, ...] | Literal["auto"] | None = None
    """Forwards of each rank ahead of 1F1B in the eager schedules (or one number for all), or auto: as many as the first step's times ask for. Default: the most."""
    memory_gb: float | None = None
    """Activations that a rank may hold, in GB; bounds extra_warmup = "auto". Default: no bound."""
    pair_passes: bool = False
    """Run the forward pass of one micro-batch beside the backward pass of another, so that each computes while the other's messages travel; also without a pipeline, from 2 micro-batches a rank on. CPU only."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    sources: tuple[str, ...] = ("builtin:python",)
    """Files, folders or globs (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, .bin/.idx), a folder of Hugging Face's save_to_disk, or builtin:python. An entry may name the field of its text: `a/*.jsonl#content`."""
    weights: tuple[float, ...] | None = None
    """Share of samples from each source. Default: by size."""
    tokenizer: str = "bpe:8192"
    """byte, bpe:VOCAB (trained once on the sources), or a Hugging Face tokenizer.json."""
    text_field: str = "text"
    """Name of the text in a JSON line, or of the parquet column, for sources that name none themselves. Of conversations the default is `messages`."""
    chat_template: str | None = None
    """Records are conversations, lists of messages of which only answers are predicted: chatml, model (the template beside the tokenizer.json), or the path of a template (Jinja). Default: records are texts."""
    eos_token: str | None = None
    """End-of-document token of a tokenizer.json (default: what its own files name)."""
    bos_token: str | None = None
    """Token of a tokenizer.json before every document and prompt (default: none; `phalanx import-hf` sets what the model's own files put there). Conversations have what their template writes, to which this is `bos_token` where no file beside it names one."""
    builtin_bytes: int | None = None
    """Text taken from builtin:python at most (default 40 MB)."""
    validation_fraction: float = 0.02
    """Share of the documents that is kept for validation."""
    cache: str = "cache"
    """Folder of tokenised files, shared by runs."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch and precision."""

    steps: int = 300
    """Optimizer steps of the whole run."""
    seq_len: int = 256
    """Tokens per packed sequence."""
    global_batch: int = 32
    """Sequences per optimizer step over all ranks."""
    micro_batch: int = 8
    """Sequences per forward pass of one data-parallel rank."""
    dtype: Literal["bfloat16", "float32", "float64", "auto"] = "bfloat16"
    """Compute type. Master weights and moments are fp32 (fp64 with float64). `auto`: that of the run where it has begun; else bfloat16, or float32 on one machine whose processor has no products of bf16."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those inside attention and experts (on GPUs the norms' too), or whole blocks."""
    deterministic: bool = False
    """Bitwise the same run each time, at some cost in speed."""
    seed: int = 0
    """Decides initial weights and the order of samples."""
    eval_interval: int = 50
    """Steps between validations, 0 for none but the last."""
    eval_batches: int = 8
    """Global batches per validation."""


MOST_LR = 3e-3
"""Highest learning rate that is chosen for a small model."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101), its schedule and its sharding."""

    lr: float | None = None
    """Highest learning rate. Default: 0.3118 C^-0.125 for a training of C FLOPs (arXiv 2401.02954, section 3.1), taken as 20 tokens an active parameter at least, and at most 3e-3; that of the run where it has begun; 2e-5 for imported weights."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the highest."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: 20, or a tenth of the run where that is less."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """What follows warm-up: half a cosine, stable then linear decay (WSD), or nothing."""
    decay_steps: int | None = None
    """Length of the final decay (default a fifth of the run)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, as a multiple of the learning rate; norms and biases have none."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down, 0 for none."""
    zero: Literal[0, 1, 2] = 1
    """1 shards master weights and moments over dp x cp (dense) and edp (experts; of experts with replicas `resilience.expert_state` decides). 2 also adds up gradients in shards (not of experts with replicas): 4 bytes a parameter less, and a reduction for each micro-batch."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of both moments (float64 where train.dtype is). bfloat16 rounds them stochastically: 4 bytes a parameter less; a run keeps the type that it began with."""
    bucket_mb: float = 64.0
    """Megabytes (10^6 bytes) of gradient that are reduced together, as soon as the backward pass has made them; 0: all at its end."""

    @property
    def peak_lr(self) -> float:
        """`lr`, or the most that its default is."""
        return MOST_LR if self.lr is None else self.lr

    def warmup(self, total_steps: int) -> int:
        """`warmup_steps`, with its default resolved."""
        return min(20, total_steps // 10) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved, and where training goes on."""

    interval: int = 50
    """Steps between checkpoints, 0 for none but the last."""
    keep_last: int = 3
    """Newest checkpoints to keep."""
    asynchronous: bool = True
    """Write while training goes on; the run waits for its last checkpoint only."""
    write_rate: float = 0.0
    """MB/s that all ranks of the run together write at most; 0: no limit. For storage that others need too. A save that somebody waits for (the last one, one before members leave, one that is still written when the next is due) has no limit, unless all are waited for (checkpoint.asynchronous = false, or checkpoint.interval = 0)."""
    resume: bool = True
    """Go on from the newest checkpoint of the run folder."""
    fall_back: bool = False
    """Go on from the newest sound checkpoint where the newest one is damaged; damaged ones are moved to checkpoints/abandoned. The templates of schedulers turn it on; otherwise a damaged one is an error that says how to go on."""
    wait_s: float = 300.0
    """How long the last save of a run tries again where the disk refuses it (every 10 s), before the run ends without it."""
    step: int | None = None
    """Resume from this step's checkpoint instead of the newest."""


HOST_BEAT_S = 0.2
"""How often a host says that it lives."""
REPLACE_INTERVAL = 200
"""Steps, as often as arXiv 2407.04656 moves experts."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """What a run keeps when its ranks change, and replicas of the routed experts (docs/how-to/survive-host-failures.md)."""

    mode: Literal["off", "fast", "exact"] = "off"
    """fast: the step is a fixed set of micro-batches that any number of ranks shares, equal within rounding. exact: bitwise equal, for any number of ranks and any dp and ep, as long as tp, cp, etp and pp stay."""
    heal: bool | None = None
    """Ranks that die are replaced and the others continue meanwhile, inside their processes; wants mode fast or exact. Default: a run on two or more ranks of this machine does, in mode fast where mode is off, unless something else in its recipe speaks against it; the dry run says what."""
    service: str | None = None
    """Membership service of an elastic run on several hosts: host:port of `phalanx service`, or etcd://host:port/NAME with a name that no other start of a run has; an address of IPv6 in brackets. Default: one for the ranks of this machine alone."""
    wanted: int | None = None
    """Ranks of all hosts together when the run begins; it may shrink and grow from there. With a service it must be set; without one it is launch.ranks."""
    minimum: int = 1
    """The run waits while it has fewer ranks."""
    wait_s: float = 600.0
    """How long it waits for them, then it ends. Also how long it waits, and removes none, where f ranks (or hosts) are silent or stand still at once."""
    limit_s: float = 3.0
    """A rank, or a host, that says nothing for so long is removed from the run and replaced."""
    hang_s: float = 30.0
    """A rank that makes no progress within a step is replaced after so long, or after 10 times the longest pause seen in a committed step where that is more (half of launch.timeout_s at most), if other ranks wait for it; between steps after half of launch.timeout_s."""
    straggler: float = 0.0
    """A host (on one machine: a rank) that takes so many times as long for its work as the others do is removed after a hand-over. 0: only reported, from a factor of 2 on."""
    straggler_steps: int = 20
    """So many steps in a row it must be slow."""
    straggler_rest_s: float = 600.0
    """How long a host that was removed for being slow stays away before it may come back."""
    state_gb: float | None = None
    """GB of a rank that parameters, gradients and optimizer state may take: after a loss no mapping is taken that needs more; ranks are rather idle, or degrees change. Leave room for activations. Default: the run does not ask."""
    chunk_rows: int | None = None
    """exact: rows of an expert that are computed together, cut from the list of one micro-batch (default 2048; with slots_per_rank about a quarter of what an expert gets from a micro-batch, for its replicas share whole chunks)."""
    fixed_bits: int | None = None
    """exact: binary places of gradients in their fixed-point sums, fewer in a step whose gradients need the room (default 52)."""
    slots_per_rank: int | None = None
    """Expert replicas that a rank has room for in each layer; they are spread over all ranks of a pipeline stage. Default: no replicas, every expert once in each expert-parallel group."""
    check: Literal["off", "sums"] = "off"
    """sums: matrix products, messages and the state at rest are checked in each step, before it is committed; not with tile by tile overlap. A step in which something is wrong is given up and repeated. A rank whose results are wrong twice, or whose stored state has changed, exits with an error that names it: an elastic run replaces it, another one stops."""
    f: int = 2
    """Every expert, and with heal every shard of the optimizer state, is on so many hosts at least, so that any loss of fewer is survived; the ranks of a single machine count as hosts. With slots_per_rank experts have fewer, and it is said, where slots or hosts are too few; other mappings that cannot give so many are not elastic."""
    loads: str = "uniform"
    """Tokens of each expert, which decide how many replicas it gets: uniform, or a JSON file with a row of numbers for each layer (or one for all)."""
    replace_interval: int | None = None
    """Steps between decisions whether replicas should lie elsewhere, by the loads of late; they move where that pays, or where an expert is on too few hosts. 0: never. Default: 200, but 0 in mode off, with expert_state = "sharded" and with train.deterministic: when it pays is measured."""
    move_beside: bool = True
    """State of experts that move for even loads travels while the next step is computed, where it can (CPU, no rank idle). false: all stand still for it."""
    expert_state: Literal["whole", "sharded"] = "whole"
    """Master weights and moments of an expert: whole at each of its holders, or shared out among them (less memory, but a part is lost with its holder)."""

    @property
    def shard_holders(self) -> int:
        """Hosts that keep each shard of the optimizer state (`optim.zero` 1 or 2), as far as there are as many."""
        return self.f if self.heal else 1


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Where the run can be watched. The event log in the run folder is always written."""

    console: Literal["auto", "live", "plain", "none", "json"] = "auto"
    """A live display, plain lines, nothing, or each event as a line of JSON, for a program that reads them. auto: live on a terminal, plain elsewhere."""
    log_interval: int | None = None
    """Steps between printed rows. Default: the first and the last step, and one about every 5 seconds."""
    tensorboard: bool = True
    """Write event files for TensorBoard to the run folder."""
    wandb_project: str | None = None
    """Report to this Weights & Biases project (extra `wandb`)."""
    wandb_mode: Literal["online", "offline"] | None = None
    """Default: online. offline keeps the run on disk for `wandb sync`."""
    sinks: tuple[str, ...] | None = None
    """Further sinks, each with options: "trackio:project=NAME,space=OWNER/NAME", "mlflow:project=NAME,uri=URL" (extras of these names), and those that installed packages give."""
    prometheus_port: int | None = None
    """Serve the newest metrics over HTTP on this port (extra `prometheus`)."""
    prometheus_address: str | None = None
    """Address the endpoint listens on. Default: 127.0.0.1, this machine only."""
    trace_steps: tuple[int, ...] | None = None
    """First and last step (or the only one) of which every operation of each rank is recorded, for `phalanx trace`, e.g. [10, 12]."""

    @property
    def is_for_people(self) -> bool:
        """Whether a person reads what the run prints."""
        return self.console not in ("none", "json")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Ranks on this machine. Under torchrun the launcher's variables decide instead."""

    ranks: int = 1
    """Processes to start on this machine."""
    threads: int | None = None
    """Compute threads of each rank. Default: cores / ranks, at least 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live: gloo between CPUs, NCCL between GPUs. `auto`: cuda where torch finds a GPU for every rank of this machine, cpu where it finds none, an error in between."""
    timeout_s: float = 600.0
    """Longest wait of one collective. On GPUs, whose work is begun ahead of time, longer than a step."""
    host: str | None = None
    """Name of this host in a run on several, the same whenever it comes back and no other's. Default: what the machine calls itself."""
    rack: str | None = None
    """What this host shares with those that fail together with it (a rack, a switch, a zone): replicas and copies of shards stand in different ones where possible. Hosts that name none stand alone."""
    keep_service: bool = False
    """Keep the membership service at `resilience.service` in this program, and start it again when it ends. For one host of a run; it goes with that host."""

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """`device`; cpu where that is "auto" and nobody has looked at a machine (`core.recipe.load_recipe`)."""
        return "cuda" if self.device == "cuda" else "cpu"


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Which version of the compute kernels runs."""

    implementation: Literal["fast", "reference"] = "fast"
    """`reference` runs the plain version that each fast path is tested against."""
    compiled: bool = True
    """Compile elementwise kernels at the first start (seconds, once a machine), where there is a C++ compiler. CPU only."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept."""

    name: str = "laptop"
    """Name of the run's own folder."""
    folder: str = "runs"
    """The run lives in `folder/name`."""
    access: Literal["private", "group"] = "private"
    """Who may read a run folder that is made: this user alone (mode 0700), or its group too (2750), also in one that is there."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Written to the run folder as `recipe.toml`; running that file again gives the same run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    folding: FoldingConfig = field(default_factory=FoldingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def steps_between_placements(self) -> int:
        """`resilience.replace_interval`, with its default resolved. Where equal runs are to have equal bits (mode off, `train.deterministic`) experts do not move: when that pays is measured. In mode
        exact bits do not depend on where they are."""
        r = self.resilience
        if r.slots_per_rank is None:
            return 0
        if r.replace_interval is not None:
            return r.replace_interval
        alike = r.mode == "off" or (self.train.deterministic and r.mode != "exact")
        return 0 if alike or r.expert_state == "sharded" else REPLACE_INTERVAL

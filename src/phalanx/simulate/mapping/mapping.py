"""One way to train a model on a cluster: folding, schedule, recomputation, overlap. What simulator and search pass around.

Decides nothing: names the choices and says which are impossible. A *job* is a model, a sequence length, a global batch; a *mapping* is
everything about how it is spread. Words are those of a recipe where a recipe has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.samples import num_rounds
from phalanx.plan.mapping import Folding, folding_problems
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec, capacity, rows_of_source
from phalanx.plan.pipeline.schedule import schedule_problems, schedules, splits_backward
from phalanx.simulate.hardware import GroupSpan, span_of
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.mapping.slots import ExpertSlots

Recompute = Literal["none", "core", "half", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""What a recipe can say. `core` (scores of unfused attention alone) and `half` (every other product) are of published runs only."""
Precision = Literal["bf16", "fp8", "fp32"]
"""Precision of products. fp32 is that of everything: parameters, activations and messages are twice as wide as with the other
two."""
Sharding = Literal["none", "optimizer", "gradients", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which communication runs beside computation."""

    dp: bool = True
    """Gradients are reduced beside the backward pass of the last micro-batch, parameters gathered beside the next forward."""
    tp: bool = False
    """Gather and scatter of tensor parallelism in pieces beside the products that need them."""
    ep: Literal["none", "chunks", "pair", "tiles", "fine", "auto", "fused"] = "none"
    """Dispatch and combine: bare, beside experts in chunks, beside the opposite pass of another micro-batch, tile by tile, or by fused kernels (as `dispatch.overlap` names it)."""
    tiles: str = ""
    """Schedule of `tiles`, as `dispatch.overlap` writes it behind the colon; empty: serial order."""
    chunks: int = 4
    """Number of parts of the tokens into which `chunks` divides dispatch, experts and combine."""
    paired: bool = False
    """Chunks or tiles run beside the opposite pass of another micro-batch as well (`pair` alone: whole layers do)."""
    left_free: int | None = None
    """Multiprocessors that products leave to messages: of `fused` they carry rows (None: as a run divides a device), tile by tile messages have them alone (None: none are left, and messages take what they like)."""
    fsdp: bool = True
    """Gathers of sharded parameters run beside other layers' work."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    spec: ModelSpec
    seq_len: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class Mapping(Hashed):
    """How it is spread over ranks."""

    folding: Folding
    micro_batch: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: Recompute = "none"
    overlap: Overlap = field(default_factory=Overlap)
    precision: Precision = "bf16"
    sharding: Sharding = "optimizer"
    """Nothing, ZeRO-1, ZeRO-2, or parameters, gradients and optimizer all sharded and gathered for each micro-batch."""
    reshard_after_forward: bool = False
    """Gather sharded parameters for each pass of each micro-batch and reduce its gradients at once; else once a step."""
    shard_over_cp: bool = True
    """Sharded parameters are spread over the ranks of cp as well as over those of dp."""
    gradient_bytes: Literal[2, 4] = 4
    """Width of gradients as they are kept and reduced."""
    moment_bytes: int = 4
    """Width of both moments of the optimizer."""
    dispatch: Literal["all_to_all", "dedup", "all_gather"] = "all_to_all"
    """Rows to the ranks of their experts, one row of a token for each host, or every token to every rank."""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    routing: RouterModel = field(default_factory=RouterModel)
    drop: DispatchSpec | None = None
    """Capacity of experts: factor, scope and padding are read; None drops nothing."""
    fused_attention: bool = True
    grouped_experts: bool = True
    """Experts of a rank in one product; else one after another."""
    fused_permute: bool = True
    """Rows go to and from their experts in one kernel each; else by index_select, products and scatter_add over whole rows."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each virtual stage; None: as a run divides them, by cost."""
    extra_warmup: tuple[int, ...] | None = None
    """Forwards of an eager schedule ahead of 1F1B, by rank (None: the most)."""
    shares: Literal["equal", "any"] = "equal"
    """Shares of data-parallel ranks: equal, or as a fixed set of micro-batches divides (`core/samples.py`): some then have one
    less, and idle for it."""
    holders: int = 1
    """Hosts that keep each shard of the optimizer state, in an elastic run."""
    votes: bool = False
    """Ranks vote on every step."""
    slots: ExpertSlots | None = None
    """Replicas of experts; None: every expert once in each expert-parallel group."""
    by_purpose: bool = True
    """What passes and what the rest of a step communicate over has communicators of its own, also of the same ranks."""
    first_rank: int = 0
    """Rank of the cluster with which a stage that has a folding of its own begins (`stage_mappings.py`)."""

    @property
    def is_ours(self) -> bool:
        """Whether a run of Phalanx has it, and not one of another framework's that was published."""
        return (
            self.by_purpose and self.fused_attention and self.recompute in RECOMPUTES and self.sharding != "parameters"
        )

    def num_microbatches(self, job: Job) -> int:
        """Rounds of a step: micro-batches of the rank that has most."""
        if self.shares == "any":
            return max(1, num_rounds(job.global_batch // self.micro_batch, owners=self.folding.dp))
        return max(1, job.global_batch // (self.folding.dp * self.micro_batch))

    @property
    def places(self) -> tuple[Mapping, ...]:
        """The mapping at each place of the pipeline."""
        return (self,) * self.folding.pp

    def with_extra_warmup(self, extra_warmup: tuple[int, ...]) -> Mapping:
        """The same with these forwards ahead of 1F1B."""
        return replace(self, extra_warmup=extra_warmup)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of parameters, activations and messages."""
        return 4 if self.precision == "fp32" else 2

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are passes of their own, later than what they could hide."""
        return self.folding.pp > 1 and splits_backward(self.schedule)

    def span(self, size: int, stride: int, *, ranks_per_host: int) -> GroupSpan:
        """How a group of a stage lies on hosts."""
        own = self.folding.world // self.folding.pp
        return span_of(size, stride, ranks_per_host=ranks_per_host, first=self.first_rank, world=own)

    # ---- rows of experts

    def tokens(self, job: Job) -> float:
        """Tokens of a rank and micro-batch."""
        return self.micro_batch * job.seq_len / (self.folding.tp * self.folding.cp)

    def _capacity(self, job: Job) -> float:
        """Rows that an expert takes from a rank, over the even share of those that its tokens choose."""
        assert self.drop is not None
        s, n, f = job.spec, int(self.tokens(job)), self.folding
        even = n * s.top_k / s.num_experts
        sizes = {"top_k": s.top_k, "num_experts": s.num_experts}
        if self.drop.is_static:
            return rows_of_source(self.drop, num_tokens=n, sharing=f.tp * f.cp, **sizes) / even
        whole = f.tp * f.cp if self.drop.drop_scope == "full_sequence" else 1
        return capacity(self.drop, num_tokens=n * whole, **sizes) / (whole * even)

    def rows_share(self, job: Job) -> float:
        """Rows that a rank sends over those that its tokens choose: less where experts drop some, more where rows are padded."""
        if self.drop is None:
            return 1.0
        most = self._capacity(job)
        return most if self.drop.is_static else min(1.0, most)

    def held_experts(self, job: Job) -> float:
        """Different experts of a rank in a layer."""
        return self.slots.held if self.slots is not None else job.spec.num_experts / self.folding.ep

    def kept_experts(self, job: Job) -> float:
        """Experts' worth of optimizer state of a rank in a layer, before it is sharded over edp."""
        return self.slots.kept if self.slots is not None else job.spec.num_experts / self.folding.ep

    def load(self, job: Job, *, worst: bool = False) -> float:
        """Rows of the fullest expert-parallel rank over the mean of what is sent, in a layer of a typical pass; `worst`: what memory must hold."""
        s, f = job.spec, self.folding
        if self.slots is not None:
            return self.slots.most if worst else self.slots.load
        if self.drop is not None and self.drop.is_static:
            return 1.0
        rows = self.tokens(job) * s.top_k * f.ep
        hottest = self.routing.hottest(ep=f.ep, experts=s.num_experts, rows=rows, top_k=s.top_k, worst=worst)
        return hottest if self.drop is None else max(1.0, min(hottest, self._capacity(job)) / self.rows_share(job))

    def check(self, job: Job) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(mapping_problems(self, job), PlanError, subject="mapping")

    def to_dict(self) -> dict[str, Any]:
        """All choices; those that hashes are older than only where they are made."""
        table = super().to_dict()
        for part, name, default in (
            (table, "holders", 1),
            (table, "votes", False),
            (table, "slots", None),
            (table, "by_purpose", True),
            (table, "first_rank", 0),
            (table["routing"], "forced", None),
            (table["overlap"], "paired", False),
            (table["overlap"], "left_free", None),
        ):
            if part[name] == default:
                del part[name]
        return table

    def label(self) -> str:
        """One line for tables."""
        f = self.folding
        left = f"tp{f.tp} cp{f.cp} dp{f.dp} pp{f.pp}"
        right = f"etp{f.etp} ep{f.ep} edp{f.edp}"
        name = f"{self.schedule} v{self.virtual}" if f.pp > 1 else "no pipeline"
        way = f"{self.overlap.chunks} chunks" if self.overlap.ep == "chunks" else self.overlap.ep
        way += " in pairs" * self.overlap.paired
        drop = "" if self.drop is None else f" capacity {self.drop.capacity_factor:g}{' padded' * self.drop.is_static}"
        slots = "" if self.slots is None else f" slots {self.slots.slots_per_rank}"
        return (
            f"{left} | {right} | mb{self.micro_batch} {name} recompute {self.recompute} ep-overlap {way}{drop}{slots}"
        )

    def explain(self) -> str:
        """The mapping in a few lines that a person reads."""
        o = self.overlap
        beside = [name for name, on in (("dp", o.dp), ("tp", o.tp), (f"ep ({o.ep})", o.ep != "none")) if on]
        return f"{self.label()}\n  overlapped with computation: {', '.join(beside) or 'nothing'}; {self.precision}, {self.dispatch}"


def mapping_problems(mapping: Mapping, job: Job) -> list[Problem]:
    """Why a job cannot run so; all reasons."""
    problems = folding_problems(mapping.folding)
    for where, value in (
        ("seq_len", job.seq_len),
        ("global_batch", job.global_batch),
        ("micro_batch", mapping.micro_batch),
    ):
        if value < 1:
            problems.append(
                Problem(where=f"train.{where}", value=value, rule="must be at least 1", hint="use 1 or more")
            )
    if mapping.overlap.chunks < 1:
        value = mapping.overlap.chunks
        problems.append(Problem(where="dispatch.overlap", value=value, rule="needs at least 1 chunk", hint="coarse:2"))
    return problems or [*_size_problems(mapping, job), *_batch_problems(mapping, job)]


def _size_problems(mapping: Mapping, job: Job) -> list[Problem]:
    """Degrees against the sizes of the model."""
    f, s = mapping.folding, job.spec
    rules = [
        (s.num_heads % f.tp == 0, "folding.tp", f.tp, f"must divide num_heads = {s.num_heads}"),
        (
            not s.num_moe_layers or mapping.slots is not None or s.num_experts % f.ep == 0,
            "folding.ep",
            f.ep,
            f"must divide num_experts = {s.num_experts}",
        ),
        (mapping.slots is None or f.edp == 1, "folding.ep", f.ep, f"with replicas is all of a stage, {f.ep * f.edp}"),
        (s.num_moe_layers > 0 or f.ep == f.etp == 1, "folding.ep", f.ep, "has no effect in a model without experts"),
        (
            not s.num_moe_layers or s.expert_ffn % f.etp == 0,
            "folding.etp",
            f.etp,
            f"must divide expert_ffn = {s.expert_ffn}",
        ),
        (job.seq_len % (f.tp * f.cp) == 0, "folding.cp", f.cp, f"tp x cp must divide seq_len = {job.seq_len}"),
        (
            f.pp * mapping.virtual <= s.num_layers + 2,
            "pipeline.virtual",
            mapping.virtual,
            f"pp x virtual must not exceed the {s.num_layers} layers, embedding and head",
        ),
    ]
    return [Problem(where=where, value=value, rule=rule) for ok, where, value, rule in rules if not ok]


def _batch_problems(mapping: Mapping, job: Job) -> list[Problem]:
    """Whether the batch can be cut into micro-batches, and the schedule can run them."""
    f, size = mapping.folding, mapping.micro_batch
    unit = size * (1 if mapping.shares == "any" else f.dp)
    if job.global_batch % unit:
        rule = f"must be a multiple of micro_batch {size}" + (f" x dp {f.dp}" if unit > size else "")
        hint = f"nearest legal: {max(1, round(job.global_batch / unit)) * unit}"
        return [Problem(where="train.global_batch", value=job.global_batch, rule=rule, hint=hint)]
    if f.pp == 1 and mapping.schedule in schedules():
        return []
    return schedule_problems(
        mapping.schedule,
        pp=f.pp,
        virtual=mapping.virtual,
        num_microbatches=mapping.num_microbatches(job),
        extra_warmup=mapping.extra_warmup,
    )

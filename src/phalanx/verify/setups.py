"""What is verified: small models that together use every option, and a recipe's own model made small.

Decides the shapes, which options exist, and which of them meet (`pairwise.py`). A `Setup` says all that the one-rank run and the run over a
mapping have in common; `Case` adds the mapping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.core.config import OptimConfig, PipelineConfig, Recipe
from phalanx.plan.mapping import AnyFolding, Folding, legal_foldings, parse_stages
from phalanx.plan.model import MlaSpec, ModelSpec, RouterSpec
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.pipeline import Pipeline, choose_schedule, make_pipeline
from phalanx.verify.pairwise import pairwise

SEQ_LEN = 32
AXES = ("tp", "cp", "ep", "etp")
EXACT_AXES = (*AXES, "pp")
ROUNDED_AXES = ("ep", "etp")
"""Axes that, in fp32 and bf16, leave everything before the first router computed alike, so that rounding does not route its tokens
otherwise."""
PIPELINES = (2, 4)
"""Pipelines that are verified; each holds every schedule."""
SEQUENCES = 2
"""Number of sequences of one micro-batch; so a sequence-wise loss differs from one over the micro-batch."""

OPTIM = OptimConfig(lr=0.02, weight_decay=0.3, beta1=0.9, beta2=0.95, eps=1e-4, clip_norm=0.2)
"""A clipped step in which everything shows: eps near the size of the second moment's root, so that a wrong factor on the gradient is not
normalised away; a rate and a decay that move the weights by some per cent."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSetup:
    """Where the replicas of experts are, and how long holders of an expert are watched."""

    slots_per_rank: int
    kind: Literal["random", "planned"] = "random"
    """Drawn; or what the planner makes of the loads of the one-rank run, which are skewed then."""
    seed: int = 0
    state: Literal["whole", "sharded"] = "whole"
    steps: int = 1
    """Number of steps after which all holders of an expert must have the same bits."""


SMALL_BUCKET_MB = 0.03
"""Half a dozen buckets in the small model."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One model with its options, and how its step is run."""

    label: str
    spec: ModelSpec
    dispatch: DispatchSpec
    accumulation: int = 1
    """Micro-batches of a step on each data-parallel rank."""
    missing: int = 0
    """Data-parallel ranks that have one fewer."""
    packed: bool = False
    """Several documents per sequence, the last of which may be padding."""
    answers: bool = False
    """Labels on answers alone, as of conversations: few of them, in runs, and none at all in every third micro-batch."""
    zero: Literal[0, 1, 2] = 1
    holders: int = 1
    """Ranks that keep each shard of the optimizer state."""
    exact: bool = False
    """Gradients are added up in fixed point, those of experts chunk by chunk."""
    check: bool = False
    """Products, messages and the state at rest are checked before the step is committed."""
    recompute: Literal["none", "selective", "full"] = "none"
    kernels: Literal["fast", "compiled", "reference"] = "fast"
    """`compiled` is `fast` with the compiled elementwise kernels, where the machine has a compiler."""
    buckets: bool = True
    """Gradients are reduced in small buckets, during the backward pass."""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    replicas: ReplicaSetup | None = None
    """Experts have replicas, on a mapping whose ep is all that etp and pp leave."""

    @property
    def optim(self) -> OptimConfig:
        return dataclasses.replace(OPTIM, zero=self.zero, bucket_mb=SMALL_BUCKET_MB if self.buckets else 0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setup on a mapping."""

    setup: Setup
    folding: AnyFolding
    pipe: PipelineConfig = field(default_factory=PipelineConfig)

    @property
    def label(self) -> str:
        pipe = f"{self.pipeline.schedule} x{self.pipeline.virtual} " if self.folding.pp > 1 else ""
        pipe += "pairs " if self.pipe.pair_passes else ""
        return f"{self.folding.label()}  {pipe}{self.setup.label}"

    @property
    def num_microbatches(self) -> int:
        """Those of the step, over all ranks."""
        return self.folding.replicas * self.setup.accumulation - self.setup.missing

    @property
    def pipeline(self) -> Pipeline:
        return make_pipeline(self.pipe, self.setup.spec, pp=self.folding.pp, seq_len=SEQ_LEN)


_SOFTMAX = RouterSpec(score="softmax", softmax_order="before_topk")
ROUTING: Mapping[str, RouterSpec] = {
    "softmax": _SOFTMAX,
    "softmax-renorm": dataclasses.replace(_SOFTMAX, renormalize=True, scale=1.5),
    "softmax-after": RouterSpec(score="softmax", softmax_order="after_topk"),
    "sigmoid": RouterSpec(score="sigmoid"),
    "sigmoid-bias": RouterSpec(score="sigmoid", renormalize=True, scale=2.5, bias_rate=1e-3),
    "groups": dataclasses.replace(_SOFTMAX, num_groups=4, group_topk=2, group_score="sum_topk"),
    "groups-bias": RouterSpec(
        score="sigmoid", renormalize=True, num_groups=4, group_topk=2, group_score="top2", bias_rate=1e-3
    ),
}
_DROP = DispatchSpec(policy="drop", capacity_factor=1.0)
DISPATCH: Mapping[str, DispatchSpec] = {
    "dropless": DispatchSpec(),
    "drop-prob-sub": _DROP,
    "drop-prob-full": dataclasses.replace(_DROP, drop_scope="full_sequence"),
    "drop-pos-sub": dataclasses.replace(_DROP, drop_by="position"),
    "drop-pos-full": dataclasses.replace(_DROP, drop_by="position", drop_scope="full_sequence"),
    "drop-prob-pad": dataclasses.replace(_DROP, pad_to_capacity=True),
    "drop-pos-full-pad": dataclasses.replace(
        _DROP, drop_by="position", drop_scope="full_sequence", pad_to_capacity=True
    ),
}
TRAVEL: Mapping[str, Mapping[str, Any]] = {
    "all_to_all": {},
    "all_gather": {"transport": "all_gather"},
    "fine": {"overlap": "fine"},
    "coarse:2": {"overlap": "coarse:2"},
}
"""How rows get to their experts, and what runs beside it."""
_LATENT = MlaSpec(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6)
ATTENTION: Mapping[str, MlaSpec | None] = {
    "grouped": None,
    "latent": _LATENT,
    "latent-direct": dataclasses.replace(_LATENT, q_rank=0, value_dim=16, rope_interleaved=False),
}
LATENT = "latent"
"""Level of what latent attention has not: without it, an option that is absent there would count as met."""
FACTORS: Mapping[str, Sequence[Any]] = {
    "routing": tuple(ROUTING),
    "dispatch": tuple(DISPATCH),
    "travel": ("all_to_all", "all_gather", "fine", "coarse:2"),
    "shared": ("none", "shared", "gated"),
    "aux": ("none", "micro_batch", "sequence", "global_batch"),
    "z_loss": (0.0, 0.01),
    "recompute": ("none", "selective", "full"),
    "kernels": ("fast", "compiled", "reference"),
    "dense_layers": (0, 1),
    "attention": tuple(ATTENTION),
    "qk_norm": (LATENT, "none", "head", "hidden"),
    "attention_bias": (LATENT, False, True),
    "tied": (False, True),
    "packed": (False, True),
    "zero": (0, 1, 2),
    "buckets": (False, True),
    "cp_method": ("none", "ring", "all_gather", "ulysses"),
    "mtp": (0, 1),
    "accumulation": (1, 2),
}


DEAR = ("recompute", "accumulation", "mtp")
"""Factors whose later levels double the time of a case; beside them the other options cost little."""


def small_model(name: str, **changes: Any) -> ModelSpec:
    """Two layers; widths such that experts split over 8 ranks and bf16 rows stay multiples of 16 bytes (grouped matmul)."""
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab": 64,
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn": 64,
        "rope_theta": 1.5,  # all pairs turn within 16 positions: else the key bias has hardly a gradient, only rounding
    }
    return ModelSpec(name=name, **{**shape, **changes})


def setup_of(row: Mapping[str, Any], *, num_layers: int = 2) -> Setup:
    """The setup of one row of the pairwise table (factor -> level)."""
    router = dataclasses.replace(
        ROUTING[row["routing"]],
        z_loss=row["z_loss"],
        aux_loss=0.0 if row["aux"] == "none" else 0.1,
        aux_scope="micro_batch" if row["aux"] == "none" else row["aux"],
    )
    mla = ATTENTION[row["attention"]]
    heads = {} if mla is None else {"mla": mla, "num_kv_heads": 4, "head_dim": mla.nope_dim + mla.rope_dim}
    spec = small_model(
        "verify",
        **heads,
        num_layers=num_layers,
        router=router,
        shared_ffn=0 if row["shared"] == "none" else 48,
        shared_gate=row["shared"] == "gated",
        dense_layers=row["dense_layers"],
        dense_ffn=80 if row["dense_layers"] else 0,
        qk_norm="none" if mla else row["qk_norm"],
        attention_bias=row["attention_bias"] and mla is None,
        tied_embeddings=row["tied"],
        mtp_layers=row["mtp"],
    )
    return Setup(
        label=_label(row),
        spec=spec,
        dispatch=dataclasses.replace(DISPATCH[row["dispatch"]], **TRAVEL[row["travel"]]),
        accumulation=row["accumulation"],
        packed=row["packed"],
        zero=row["zero"],
        recompute=row["recompute"],
        kernels=row["kernels"],
        buckets=row["buckets"],
        cp_method="ring" if row["cp_method"] == "none" else row["cp_method"],
    )


def _label(row: Mapping[str, Any]) -> str:
    words = [row["routing"], row["dispatch"], row["travel"], f"zero{row['zero']}"]
    words += [f"{row['shared']}-expert"] if row["shared"] != "none" else []
    words += [f"aux-{row['aux']}"] if row["aux"] != "none" else []
    words += ["z-loss"] if row["z_loss"] else []
    words += [f"recompute-{row['recompute']}"] if row["recompute"] != "none" else []
    latent = row["attention"] != "grouped"
    words += [row["attention"]] if latent else []
    words += [f"qk-{row['qk_norm']}"] if row["qk_norm"] != "none" and not latent else []
    flags = {
        "dense-layer": row["dense_layers"],
        "bias": row["attention_bias"] and not latent,
        "tied": row["tied"],
        "packed": row["packed"],
        "mtp": row["mtp"],
    }
    words += [word for word, on in flags.items() if on]
    words += ["buckets"] if row["buckets"] else []
    words += [row["cp_method"], f"x{row['accumulation']}", row["kernels"]]
    return " ".join(words)


def default_cases(world: int, *, axes: Sequence[str] = EXACT_AXES) -> list[Case]:
    """All legal mappings of the small model over `world` ranks without a pipeline, each in at least one case; then (all axes) pipelines.

    Any two options meet in some case, and each option meets each mapping of the attention and each mapping of the experts. (All of
    them on all mappings would be 10^8 cases; with the two sides as factors, every pair of sides is a mapping.)
    """
    flat = [axis for axis in axes if axis != "pp"]
    foldings = list(legal_foldings(world, small_model("verify"), seq_len=SEQ_LEN, axes=flat))
    attention = list(dict.fromkeys((f.tp, f.cp) for f in foldings))
    experts = list(dict.fromkeys((f.ep, f.etp) for f in foldings))
    assert len(foldings) == len(attention) * len(experts)  # any attention side fits any expert side
    factors = {**FACTORS, "attention_side": attention, "expert_side": experts}
    factors["cp_method"] = [m for m in FACTORS["cp_method"] if any(_serves(m, *side) for side in attention)]
    if "pp" not in axes:
        factors["mtp"] = (0,)  # rounding routes a third layer as it likes (`reference.py`)
    cases = [_case(row, world) for row in pairwise(factors, dear=DEAR, excluded=_cannot_meet)]
    for pp in PIPELINES if "pp" in axes else ():
        cases += pipeline_cases(world, pp) if world % pp == 0 else []
    return cases + (staged_cases(world) + replicated_cases(world) + copied_cases(world) if "pp" in axes else [])


SCHEDULES: Sequence[PipelineConfig] = (
    PipelineConfig(schedule="gpipe"),
    PipelineConfig(schedule="1f1b"),
    PipelineConfig(schedule="zero_bubble"),
    PipelineConfig(schedule="gpipe", virtual=2),
    PipelineConfig(schedule="interleaved_1f1b", virtual=2),
    PipelineConfig(schedule="zero_bubble", virtual=2),
    PipelineConfig(schedule="eager_1f1b"),
    PipelineConfig(schedule="eager_1f1b_split"),
    PipelineConfig(schedule="zbv"),
    PipelineConfig(schedule="dualpipev"),
    PipelineConfig(schedule="eager_1f1b", pair_passes=True),
    PipelineConfig(schedule="interleaved_1f1b", virtual=2, pair_passes=True),
)
PIPELINE_FACTORS: Mapping[str, Sequence[Any]] = {
    "routing": ("softmax-renorm", "groups-bias"),
    "dispatch": ("dropless", "drop-prob-sub"),
    "travel": ("all_to_all", "fine"),
    "shared": ("none", "gated"),
    "aux": ("sequence", "global_batch"),
    "z_loss": (0.01,),
    "recompute": ("none", "full"),
    "kernels": ("fast",),
    "dense_layers": (0, 1),
    "attention": ("grouped", "latent"),
    "qk_norm": ("head",),
    "attention_bias": (True,),
    "tied": (False, True),
    "packed": (True,),
    "zero": (0, 1, 2),
    "buckets": (False, True),
    "cp_method": ("ring",),
    "mtp": (0, 1),
}
"""Options that can have something to do with the pipeline; the others are the business of a stage."""
MICROBATCHES: Mapping[int, Sequence[int]] = {2: (2, 3), 4: (3, 5)}
"""Micro-batches of a step, by pipeline ranks: too few for every stage to be busy at once (or just enough), and one more than there
are stages."""


def pipeline_cases(world: int, pp: int) -> list[Case]:
    """Every schedule with pp ranks, a layer a stage, beside each of the options above; the mappings inside a stage take turns.

    On more ranks than `PAIRED_WORLD` each schedule is there once: what its options do to it, fewer ranks have shown.
    """
    inside = list(legal_foldings(world // pp, small_model("verify"), seq_len=SEQ_LEN, axes=AXES))
    rows = pairwise({**PIPELINE_FACTORS, "accumulation": MICROBATCHES[pp], "pipe": SCHEDULES}, seed=pp, dear=DEAR)
    if world > PAIRED_WORLD:
        rows = [next(row for row in rows if row["pipe"] == pipe) for pipe in SCHEDULES]
    order = [i * STRIDE % len(inside) for i in range(len(rows))]
    cases = []
    for row, i in zip(rows, order, strict=True):
        stages = pp * choose_schedule(row["pipe"])[1]
        setup = setup_of(row, num_layers=stages)
        folding = dataclasses.replace(inside[i], world=world, pp=pp)
        cases.append(Case(setup=setup, folding=folding, pipe=row["pipe"]))
    return cases


STAGED: Mapping[int, Sequence[str]] = {
    4: ("tp1/tp2/tp1", "dp2.ep2/tp2.etp2"),
    8: ("tp1/tp2/tp4.ep4/tp1", "cp2.ep2/tp2.etp2/tp2.cp2.ep4", "dp2.ep2/tp2.dp2.ep4/cp2", "dp2.tp2.ep2.etp2/dp4.ep4"),
    9: ("tp1/tp2/tp4/tp2", "tp1/tp2.etp2/tp2.cp2.ep4/dp2.ep2"),
    16: ("tp4.ep4/dp2.tp2.ep4/cp4.ep2.etp2/tp2.dp2.ep2", "dp2.tp2.ep2.etp2/tp4.dp2.ep8/dp4.ep4"),
}
"""Stages with foldings of their own, by ranks. Degrees grow and shrink from stage to stage on every axis; dp that no other stage
has shares sequences."""


def staged_cases(world: int) -> list[Case]:
    """Each of `STAGED` with some of the schedules, which take turns; what a schedule does beside an option, uniform stages have shown."""
    factors = {**PIPELINE_FACTORS, "tied": (False,), "mtp": (0,), "dispatch": ("dropless", "drop-prob-full")}
    cases = []
    for i, text in enumerate(STAGED.get(world, ())):
        folding = parse_stages(text.split("/"))
        rows = pairwise({**factors, "accumulation": (3, 5), "pipe": SCHEDULES}, seed=i, dear=DEAR)
        first = {row["pipe"]: row for row in reversed(rows)}
        step = 1 if world == WHOLE_WORLD else len(STAGED[world]) if world <= PAIRED_WORLD else len(SCHEDULES) // 2
        for pipe in SCHEDULES[i % step :: step]:
            virtual = choose_schedule(pipe)[1]
            setup = setup_of(first[pipe], num_layers=folding.pp * virtual)
            cases.append(Case(setup=setup, folding=folding, pipe=pipe))
    return cases


REPLICA_FACTORS: Mapping[str, Sequence[Any]] = {
    "dispatch": ("dropless", "drop-prob-full", "drop-prob-pad"),
    "travel": ("all_to_all", "all_gather", "coarse:2"),
    "state": ("whole", "sharded"),
    "zero": (0, 1, 2),
    "accumulation": (1, 2),
}
"""Options that have to do with who holds an expert."""
PLAIN_ROW: Mapping[str, Any] = {
    "routing": "softmax-renorm",
    "shared": "none",
    "aux": "micro_batch",
    "z_loss": 0.0,
    "recompute": "none",
    "kernels": "fast",
    "dense_layers": 0,
    "attention": "grouped",
    "qk_norm": "none",
    "attention_bias": False,
    "tied": False,
    "packed": True,
    "buckets": True,
    "cp_method": "ring",
    "mtp": 0,
}
REPLICA_STEPS = 20
MOST_REPLICATED = 16
"""Mappings of more than 4 ranks on which experts have replicas; of more, as many are taken, spread by the golden ratio (neighbours are alike, and so is every third)."""
SKEW = RouterSpec(score="softmax", softmax_order="before_topk", force="imbalanced", force_skew=1.2)


def replicated_cases(world: int) -> list[Case]:
    """Experts with replicas at random places, on every folding of 4 ranks and a sample of those of more; the options above take turns. Then one for
    many steps, and one in which the planner places replicas for skewed loads."""
    sides = list(legal_foldings(world, small_model("verify"), seq_len=SEQ_LEN, axes=("tp", "cp", "etp", "pp")))
    sides = [f for f in sides if f.pp <= 2 and world // (f.etp * f.pp) > 1]
    if not sides:
        return []
    most = len(sides) if world <= 4 else MOST_REPLICATED
    taken = sorted(sorted(range(len(sides)), key=lambda i: i * 0.618034 % 1)[:most])
    rows = pairwise(REPLICA_FACTORS, seed=world, dear=("accumulation",))
    cases = [_replicated(f, rows[i % len(rows)], seed=i) for i, f in enumerate(sides[k] for k in taken)]
    flat = [f for f in sides if f.tp == f.cp == f.etp == f.pp == 1]
    row: dict[str, Any] = {"dispatch": "dropless", "travel": "all_to_all", "zero": 1, "accumulation": 1}
    row["state"] = "whole"  # each holder makes its own update; sharded, holders get the same bits sent
    cases.append(_replicated(flat[0], row, seed=100, steps=REPLICA_STEPS))
    planned = _replicated(flat[0], row, seed=0, kind="planned")
    skewed = dataclasses.replace(planned.setup, spec=dataclasses.replace(planned.setup.spec, router=SKEW))
    return [*cases, dataclasses.replace(planned, setup=skewed)]


def _replicated(
    side: Folding, row: Mapping[str, Any], *, seed: int, steps: int = 1, kind: Literal["random", "planned"] = "random"
) -> Case:
    folding = dataclasses.replace(side, ep=side.world // (side.etp * side.pp))
    each = -(-small_model("verify").num_experts // folding.ep) + 1 + seed % 2
    replicas = ReplicaSetup(
        slots_per_rank=max(4, each) if kind == "planned" else each,
        kind=kind,
        seed=seed,
        state=row["state"],
        steps=steps,
    )
    accumulation = max(row["accumulation"], folding.pp)
    setup = setup_of({**PLAIN_ROW, **row, "accumulation": accumulation}, num_layers=2)
    label = f"{setup.label} {kind} replicas x{replicas.slots_per_rank} {row['state']}"
    return Case(setup=dataclasses.replace(setup, replicas=replicas, label=label), folding=folding)


COPIED: Sequence[Mapping[str, int]] = ({}, {"ep": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2})


def copied_cases(world: int) -> list[Case]:
    """Shards of optimizer state with several holders, with and without buckets: two holders and, where they are as many, three."""
    cases = []
    for i, axes in enumerate(COPIED):
        if world == 1 or (axes and world % 4):
            continue
        row = {"dispatch": "dropless", "travel": "all_to_all", "zero": 1, "buckets": i % 2 == 0}
        setup = setup_of({**PLAIN_ROW, **row, "accumulation": axes.get("pp", 1)})
        holders = 2 + i % 2
        setup = dataclasses.replace(setup, holders=holders, label=f"{setup.label} {holders} holders")
        pipe = SCHEDULES[1] if "pp" in axes else PipelineConfig()
        cases.append(Case(setup=setup, folding=Folding(world=world, **axes), pipe=pipe))
    return cases


WHOLE_WORLD = 9
"""Small and uneven: here every schedule meets stages of its own."""
PAIRED_WORLD = 8
STRIDE = 7
"""Neighbouring mappings are alike; this many apart, few cases see many kinds."""


def _case(row: Mapping[str, Any], world: int) -> Case:
    (tp, cp), (ep, etp) = row["attention_side"], row["expert_side"]
    pair_passes = row["accumulation"] > 1 and row["packed"]  # half of those that have two micro-batches
    return Case(
        setup=setup_of(row),
        folding=Folding(world=world, tp=tp, cp=cp, ep=ep, etp=etp),
        pipe=PipelineConfig(pair_passes=pair_passes),
    )


def _cannot_meet(settings: Mapping[str, Any]) -> bool:
    """Options that shut each other out: a case of both would be one of something else."""
    latent = {settings[name] == LATENT for name in ("qk_norm", "attention_bias") if name in settings}
    latent |= {settings["attention"] != "grouped"} if "attention" in settings else set()
    if len(latent) == 2 or (settings.get("travel") == "fine" and settings.get("dispatch", "").endswith("-pad")):
        return True
    both = "cp_method" in settings and "attention_side" in settings
    return both and not _serves(settings["cp_method"], *settings["attention_side"])


def _serves(method: str, tp: int, cp: int) -> bool:
    """Whether the ranks of `cp` can exchange in this way; `none` is that of one rank."""
    if method == "none" or cp == 1:
        return method == "none" and cp == 1
    spec = small_model("verify")
    heads, kv = spec.num_heads // tp, max(1, spec.num_kv_heads // tp)
    return method != "ulysses" or (heads % cp == 0 and (kv % cp == 0 or cp % kv == 0))


def recipe_cases(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, dispatch: DispatchSpec) -> list[Case]:
    """The recipe's own options, mapping and pipeline on a shrunken model, with one micro-batch per rank and with two, fewer on as many ranks as in the run; of a pipeline one more than it has
    ranks, so that every stage is busy at once. What they leave out: `carried.py`."""
    pipe = dataclasses.replace(recipe.pipeline, layers=_fewer_layers(recipe.pipeline.layers, spec))
    virtual = choose_schedule(pipe)[1] if folding.pp > 1 else 1
    small = shrink(spec, folding, virtual=virtual, num_layers=0 if pipe.layers is None else sum(pipe.layers))
    setup = Setup(
        label=f"{recipe.run.name} shrunk",
        spec=small,
        dispatch=dispatch,
        packed=True,
        answers=recipe.data.chat_template is not None,
        zero=recipe.optim.zero,
        holders=recipe.resilience.shard_holders if recipe.optim.zero else 1,
        exact=recipe.resilience.mode == "exact",
        check=recipe.resilience.check == "sums",
        recompute=recipe.train.recompute,
        kernels=_kernels(recipe),
        buckets=recipe.optim.bucket_mb > 0,
        cp_method=recipe.folding.cp_method,
        replicas=_recipe_replicas(recipe, small, folding),
    )
    cases = []
    for each, missing in ((1, 0), (2 if folding.pp == 1 else folding.pp + 1, _missing(recipe, folding))):
        label = f"{setup.label} x{each}" + (f" less {missing}" if missing else "")
        own = dataclasses.replace(setup, label=label, accumulation=each, missing=missing)
        cases.append(Case(setup=own, folding=folding, pipe=pipe))
    return cases


def _missing(recipe: Recipe, folding: AnyFolding) -> int:
    """Ranks of the run that have one micro-batch fewer than others: a step of mode fast or exact need not be shared out equally."""
    t = recipe.train
    return 0 if recipe.resilience.mode == "off" else -(t.global_batch // t.micro_batch) % folding.replicas


MOST_OF_A_STAGE = 3
"""Layers of the fullest stage of a shrunken model whose recipe divides its layers itself."""


def _fewer_layers(layers: Sequence[int] | None, spec: ModelSpec) -> tuple[int, ...] | None:
    """The recipe's layers of each stage for a small model: the stage with the fewest has one, another as many more as it had, up to `MOST_OF_A_STAGE`, and
    one without any has none. Two layers have experts, as far as those of the model do."""
    if layers is None:
        return None
    least = min(n for n in layers if n)
    few = [min(n - least + 1, MOST_OF_A_STAGE) if n else 0 for n in layers]
    while sum(few) < min(spec.dense_layers, 1) + 2:
        few[few.index(max(few))] += 1
    return tuple(few)


def _recipe_replicas(recipe: Recipe, small: ModelSpec, folding: AnyFolding) -> ReplicaSetup | None:
    """Where the recipe's experts have replicas: those of the small model at random places, as many slots as leave room for some."""
    if recipe.resilience.slots_per_rank is None or not isinstance(folding, Folding) or folding.ep == 1:
        return None
    slots = -(-small.num_experts // folding.ep) + 1
    return ReplicaSetup(slots_per_rank=slots, state=recipe.resilience.expert_state)


def _kernels(recipe: Recipe) -> Literal["fast", "compiled", "reference"]:
    if recipe.kernels.implementation == "fast" and recipe.kernels.compiled:
        return "compiled"
    return recipe.kernels.implementation


def _largest(folding: AnyFolding) -> Folding:
    """The degrees that a model must divide by: of each axis the least common multiple of all stages."""
    if isinstance(folding, Folding):
        return folding
    most = {axis: math.lcm(*(s.degree(axis) for s in folding.stages)) for axis in ("tp", "cp", "ep", "etp")}
    return Folding(world=folding.world, pp=folding.pp, **most)


def shrink(spec: ModelSpec, mapping: AnyFolding, *, virtual: int = 1, num_layers: int = 0) -> ModelSpec:
    """Same options, small numbers: few layers (one a stage, or `num_layers`), narrow, no more experts than the mapping and the routing need."""
    folding = _largest(mapping)
    dense = min(spec.dense_layers, 1)
    layers = num_layers or max(dense + 2, folding.pp * virtual)
    heads, kv_heads = _fewest_heads(spec, folding)
    experts = _fewest_experts(spec, folding)
    mla = None
    if spec.mla is not None:
        mla = dataclasses.replace(
            spec.mla, q_rank=12 if spec.mla.q_rank else 0, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6
        )
    return dataclasses.replace(
        spec,
        mla=mla,
        name=f"{spec.name} (shrunk)",
        num_layers=layers,
        dense_layers=dense if spec.moe_layers else layers,
        hidden=32,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=math.lcm(8, max(1, folding.tp // kv_heads)) if mla is None else mla.nope_dim + mla.rope_dim,
        vocab=64 * folding.tp,
        num_experts=experts,
        expert_ffn=16 * folding.etp,
        shared_ffn=16 * folding.tp if spec.shared_ffn else 0,
        dense_ffn=16 * folding.tp if spec.dense_ffn else 0,
        router=dataclasses.replace(spec.router, force="none"),
    )


def _fewest_heads(spec: ModelSpec, folding: Folding) -> tuple[int, int]:
    """Query heads, and key/value heads: as many as the model has where those are fewer, so that the ranks of tp (and of cp, with ulysses) have as many copies of each as in the model itself."""
    heads = folding.tp * max(2, folding.cp)  # ulysses exchanges whole ones
    kv, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    if spec.mla is None and group > 1 and kv < heads and heads % kv == 0:
        return heads, kv
    return heads * min(group, 2), heads


def _fewest_experts(spec: ModelSpec, folding: Folding) -> int:
    """The smallest count that ep and the groups divide and in which top-k (inside the chosen groups) has a choice."""
    groups = spec.router.num_groups
    for count in range(1, spec.num_experts):
        fits = count % folding.ep == 0 and count % groups == 0
        if fits and count // groups * spec.router.group_topk >= spec.top_k and count >= 2 * spec.top_k:
            return count
    return spec.num_experts

"""A folding for each pipeline stage: stages with different tp, cp, dp, ep and etp over one world.

Decides which ranks a stage has and who works on the same micro-batch. Stage s of the pipeline has consecutive ranks, after those of the stage before it, and
a `Folding` of its own over them (without pp); a uniform `Folding` with pp > 1 is the case in which all are equal. Must never change: everything inside
a stage (sums of gradients, shards, expert parallelism) is decided by that stage's folding alone, as if there were no others.

*Replicas*: as many pipelines stand side by side as every stage can be divided into (the greatest common divisor of the stages' dp), and each runs its
own micro-batches, as data-parallel ranks do. A stage with more dp than that shares the sequences of each micro-batch among `dp / replicas` ranks; *share* is
the part of a rank. All ranks of a replica, of all stages, form one communication axis `pp`, over which activations cross by a plan
(`plan/pipeline/boundary/edges.py`). Sources: arXiv 2211.05322 section 2 (a mesh for each stage), 2504.14960 (foldings).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from phalanx.core.config import FoldingConfig
from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.plan.mapping.folding import (
    GROUP_AXES,
    PASS_GROUPS,
    STEP_GROUPS,
    Folding,
    fit_problems,
    folding_problems,
)
from phalanx.plan.model import ModelSpec

STAGE_DEGREES = ("tp", "cp", "dp", "ep", "etp")
"""What a person says of a stage, as `tp2.dp2.ep4`; what is left out is 1."""
ACROSS_STAGES = ("pp", "world", "embedding")
"""Groups of a uniform folding that reach beyond a stage."""
_PART = re.compile(r"(?P<axis>[a-z]+)(?P<degree>\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class StagedFolding(Hashed):
    """`stages[s]` is the folding of pipeline stage s over its own ranks, numbered from 0. Has the questions of `Folding`, asked of global ranks."""

    stages: tuple[Folding, ...]

    @property
    def world(self) -> int:
        return sum(stage.world for stage in self.stages)

    @property
    def pp(self) -> int:
        return len(self.stages)

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """Global rank of each stage's rank 0."""
        return tuple(accumulate((stage.world for stage in self.stages[:-1]), initial=0))

    @property
    def replicas(self) -> int:
        """Pipelines side by side."""
        return math.gcd(*(stage.dp for stage in self.stages))

    def stage_of(self, rank: int) -> int:
        """The stage that a global rank belongs to."""
        return bisect_right(self.first_ranks, rank) - 1

    def of_rank(self, rank: int) -> Folding:
        """The folding of the rank's stage."""
        return self.stages[self.stage_of(rank)]

    def coord(self, rank: int, axis: str) -> int:
        """Coordinate of a global rank on an axis of its stage; on `pp` the stage itself."""
        stage = self.stage_of(rank)
        return stage if axis == "pp" else self.stages[stage].coord(rank - self.first_ranks[stage], axis)

    def replica_of(self, rank: int) -> int:
        """The pipeline that a rank is part of."""
        return self.coord(rank, "dp") // self.share_of(rank)[1]

    def share_of(self, rank: int) -> tuple[int, int]:
        """(which, of how many) equal parts of the sequences of a micro-batch the rank works on."""
        count = self.of_rank(rank).dp // self.replicas
        return self.coord(rank, "dp") % count, count

    @property
    def group_names(self) -> tuple[str, ...]:
        """What `groups` knows: everything inside a stage, `micro` (who shares a micro-batch), and what reaches across."""
        inside = tuple(name for name in GROUP_AXES if name not in ACROSS_STAGES)
        return (*inside, "micro", "pp", "world", "embedding")

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called `name`; they partition the world. Those inside a stage stand stage after stage."""
        if name == "world":
            return (tuple(range(self.world)),)
        if name == "pp":
            return tuple(tuple(rank for ranks in pipeline for rank in ranks) for pipeline in self.pipelines)
        if name == "embedding":  # each stage has its own, see `staged_problems`
            return tuple((rank,) for rank in range(self.world))
        if name == "micro":
            return tuple(sorted(ranks for pipeline in self.pipelines for ranks in pipeline))
        return tuple(
            tuple(first + rank for rank in group)
            for first, stage in zip(self.first_ranks, self.stages, strict=True)
            for group in stage.groups(name)
        )

    @cached_property
    def pipelines(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[replica][stage] -> the ranks that work on its micro-batches: tp, cp and shares are the fastest coordinates of a stage."""
        sizes = [stage.world // self.replicas for stage in self.stages]
        return tuple(
            tuple(
                tuple(range(first + replica * size, first + (replica + 1) * size))
                for first, size in zip(self.first_ranks, sizes, strict=True)
            )
            for replica in range(self.replicas)
        )

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The group called `name` that a global rank belongs to."""
        if name in ("world", "pp", "embedding", "micro"):
            return next(group for group in self.groups(name) if rank in group)
        stage = self.stage_of(rank)
        first = self.first_ranks[stage]
        return tuple(first + r for r in self.stages[stage].group_of(rank - first, name))

    def embedding_groups(self, table_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Nobody shares a tied embedding with another stage."""
        return self.groups("embedding")

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        problems = [problem for stage in self.stages for problem in folding_problems(stage)]
        raise_if(problems or _shape_problems(self), PlanError, subject="foldings of the stages")

    def to_dict(self) -> dict[str, Any]:
        """Degrees of each stage."""
        return {"world": self.world, "pp": self.pp, "stages": [stage.to_dict() for stage in self.stages]}

    def label(self) -> str:
        """One word for tables: `tp1/tp2/tp4.ep2`."""
        return "/".join(stage_text(stage) for stage in self.stages)

    def explain(self) -> str:
        """The foldings in a few lines that a person reads."""
        many = "s" if self.replicas > 1 else ""
        lines = [f"{self.world} ranks in {self.pp} stages with foldings of their own, {self.replicas} pipeline{many}"]
        for index, (first, stage) in enumerate(zip(self.first_ranks, self.stages, strict=True)):
            count = stage.dp // self.replicas
            shared = f", each micro-batch shared by {count} ranks of dp" if count > 1 else ""
            lines.append(
                f"  stage {index} on ranks {first}-{first + stage.world - 1}: attention tp {stage.tp} x cp {stage.cp} x dp {stage.dp}, "
                f"experts etp {stage.etp} x ep {stage.ep} x edp {stage.edp}{shared}"
            )
        return "\n".join(lines)


AnyFolding = Folding | StagedFolding
"""The same for all stages, or one for each."""


def step_groups(
    folding: AnyFolding, table_ranks: Sequence[int] | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Groups of more than one rank, by name, of the rest of a step whose ranks its passes communicate over too. `table_ranks` as in `Folding.embedding_groups`.

    Where messages match by their order, as in NCCL, these ranks need a second group: gradients leave when they are complete, which is not at the same place
    between the exchanges of layers on all ranks.
    """
    passes = {ranks for name in PASS_GROUPS if name in folding.group_names for ranks in folding.groups(name)}
    found = {name: folding.groups(name) for name in STEP_GROUPS}
    if table_ranks is not None:
        found["embedding"] = folding.embedding_groups(table_ranks)
    return {name: tuple(g for g in groups if len(g) > 1 and g in passes) for name, groups in found.items()}


def micro_axis(folding: AnyFolding) -> str:
    """The group of ranks that share a micro-batch: `tp_cp`, and more where a stage divides its sequences among dp."""
    return "tp_cp" if isinstance(folding, Folding) else "micro"


def resolve_mapping(
    config: FoldingConfig,
    spec: ModelSpec,
    *,
    world: int,
    seq_len: int,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    slots_per_rank: int | None = None,
) -> AnyFolding:
    """The recipe's mapping over `world` ranks, `ep` filled in: as many as divide the experts, or with `slots_per_rank` all. Raises `ConfigError` naming every problem with model and batch.

    `slots_per_rank`: experts have replicas (`resilience.slots_per_rank`), which stages with foldings of their own do not know.
    """
    folding: AnyFolding
    if config.stages is None:
        blocks = max(1, world // max(1, config.pp * config.etp))
        most = blocks if slots_per_rank is not None else math.gcd(blocks, spec.num_experts)
        ep = config.ep if config.ep is not None else most if spec.moe_layers else 1
        folding = Folding(world=world, tp=config.tp, cp=config.cp, pp=config.pp, ep=ep, etp=config.etp)
        problems = fit_problems(
            folding,
            spec,
            seq_len=seq_len,
            global_batch=global_batch,
            micro_batch=micro_batch,
            cp_method=config.cp_method,
            slots_per_rank=slots_per_rank,
        )
    else:
        folding = parse_stages(config.stages)
        problems = [] if slots_per_rank is None else [_no_replicas(slots_per_rank)]
        problems += staged_problems(folding, spec, world=world, seq_len=seq_len, cp_method=config.cp_method)
        if not problems and global_batch is not None and micro_batch is not None:
            problems = _batch_problems(folding, global_batch=global_batch, micro_batch=micro_batch)
    raise_if(problems, ConfigError, subject=f"the mapping of {spec.name} over {world} ranks")
    return folding


def _no_replicas(slots: int) -> Problem:
    rule = "experts with replicas need one folding for all stages, and folding.stages gives each its own"
    hint = "folding.pp, or leave it out"
    return Problem(where="resilience.slots_per_rank", value=slots, rule=rule, hint=hint)


def staged_problems(
    folding: StagedFolding, spec: ModelSpec, *, world: int, seq_len: int, cp_method: str = "ring"
) -> list[Problem]:
    """Everything that keeps `spec` from running so, each problem named after its stage."""
    problems = []
    if folding.world != world:
        rule = f"has {folding.world} ranks in all ({' + '.join(str(s.world) for s in folding.stages)}), and the run has {world}"
        hint = f"start {folding.world} ranks, or change a stage"
        problems.append(Problem(where="folding.stages", value=folding.label(), rule=rule, hint=hint))
    if spec.table_at_both_ends:
        why, way = (
            ("a tied embedding", "model.tied_embeddings = false")
            if spec.tied_embeddings
            else ("multi-token prediction", "model.mtp_layers = 0")
        )
        rule = f"cannot share the embedding's table between first and last stage, which {why} needs"
        hint = f"set {way}, or one folding for all stages (folding.pp)"
        problems.append(Problem(where="folding.stages", value=folding.label(), rule=rule, hint=hint))
    for index, stage in enumerate(folding.stages):
        for problem in fit_problems(stage, spec, seq_len=seq_len, cp_method=cp_method):
            axis = problem.where.removeprefix("folding.")
            rule = f"{axis} {problem.value} {problem.rule}"
            problems.append(
                Problem(where=f"folding.stages[{index}]", value=stage_text(stage), rule=rule, hint=problem.hint)
            )
    return problems


def _batch_problems(folding: StagedFolding, *, global_batch: int, micro_batch: int) -> list[Problem]:
    """Every pipeline has as many micro-batches, and every share of one as many sequences."""
    unit, problems = micro_batch * folding.replicas, []
    if unit < 1 or global_batch % unit or global_batch < 1:
        rule = f"must be a positive multiple of micro_batch {micro_batch} x {folding.replicas} pipelines"
        hint = f"nearest legal: {max(1, round(global_batch / max(unit, 1))) * max(unit, 1)}"
        problems.append(Problem(where="train.global_batch", value=global_batch, rule=rule, hint=hint))
    shares = math.lcm(*(stage.dp // folding.replicas for stage in folding.stages))
    if micro_batch % shares:
        rule = f"must be a multiple of {shares}: stages share the sequences of a micro-batch among so many ranks of dp"
        hint = f"nearest legal: {max(1, round(micro_batch / shares)) * shares}"
        problems.append(Problem(where="train.micro_batch", value=micro_batch, rule=rule, hint=hint))
    return problems


def stage_text(stage: Folding) -> str:
    """A stage as a person writes it."""
    return ".".join(f"{a}{stage.degree(a)}" for a in STAGE_DEGREES if stage.degree(a) > 1) or "tp1"


def parse_stages(texts: Sequence[str], *, where: str = "folding.stages") -> StagedFolding:
    """The foldings that `["tp1", "tp2.dp2.ep4"]` says. Raises `ConfigError` naming every text that says none."""
    problems: list[Problem] = []
    stages = [parse_stage(text, problems, f"{where}[{i}]") for i, text in enumerate(texts)]
    if len(texts) < 2:
        rule = "needs two stages or more, each with its degrees"
        problems.append(
            Problem(where=where, value=list(texts), rule=rule, hint="one folding for all: folding.tp, folding.ep, ...")
        )
    raise_if(problems, ConfigError, subject="the foldings of the stages")
    return StagedFolding(stages=tuple(stages))


def parse_stage(text: str, problems: list[Problem], where: str) -> Folding:
    """The folding that a text says; what is wrong with it is added to `problems`."""
    degrees: dict[str, int] = {}
    for part in text.split("."):
        match = _PART.fullmatch(part.strip())
        if match is None or match["axis"] not in STAGE_DEGREES or int(match["degree"]) < 1 or match["axis"] in degrees:
            rule = (
                f"is made of degrees, each once: {', '.join(STAGE_DEGREES)} and a number of at least 1, joined by dots"
            )
            problems.append(Problem(where=where, value=text, rule=rule, hint='for example "tp2.dp2.ep4"'))
            return Folding(world=1)
        degrees[match["axis"]] = int(match["degree"])
    dp = degrees.pop("dp", 1)
    stage = Folding(world=dp * degrees.get("tp", 1) * degrees.get("cp", 1), **degrees)
    for problem in folding_problems(stage):
        problems.append(Problem(where=where, value=text, rule=problem.rule, hint=problem.hint))
    return stage


def _shape_problems(folding: StagedFolding) -> list[Problem]:
    """What would not be a set of stages at all."""
    problems = []
    if len(folding.stages) < 1:
        problems.append(Problem(where="folding.stages", value=0, rule="must have a stage", hint='"tp1"'))
    for index, stage in enumerate(folding.stages):
        if stage.pp != 1:
            rule = "is one stage: its folding has pp 1"
            problems.append(Problem(where=f"folding.stages[{index}]", value=stage.pp, rule=rule, hint="pp 1"))
    return problems

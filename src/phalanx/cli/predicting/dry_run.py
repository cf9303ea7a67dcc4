"""What `phalanx train --dry-run` prints: who the ranks are, what they hold, how much memory and how many steps. Nothing is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from phalanx.cli.predicting.cards import Card, card_of, check_card
from phalanx.cli.predicting.recipe import predict_on
from phalanx.core.config import DataConfig, Recipe
from phalanx.core.errors import ConfigError, DataError, PlanError
from phalanx.core.processor import MULTIPLIES_BF16, Processor, this_processor
from phalanx.core.units import format_bytes, format_count, format_rate, format_seconds
from phalanx.data import parse_choice, read_tokenizer_file, resolve, token_file_bytes
from phalanx.plan import choose_recovery, microbatches_per_rank, resolve_shape
from phalanx.plan.layout import FlatLayout, flat_layouts, local_param, stage_params
from phalanx.plan.mapping import AnyFolding, AnyPlacement, Stage, plain_placement, step_groups
from phalanx.plan.model import ModelSpec, flops_per_token
from phalanx.plan.moe import dispatch_spec
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.placement import ReplicaSettings, StageReplicas, replicas_of, stage_replicas
from phalanx.plan.recovery import optimizer_bytes
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.memory import PREPARE_BYTES, TERMS, MemoryEstimate, estimate_memory, worst_balance
from phalanx.simulate.step import nccl_bytes

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the ranks would run. `local_ranks` of them share its memory."""

    local_ranks: int
    threads: int
    available_bytes: int | None
    processor: Processor = MULTIPLIES_BF16
    launched: bool = False
    """Another program starts and ends the ranks."""
    card: Card | None = None
    """Memory of a GPU; None: there is none here, and nobody said."""
    cluster: GpuCluster | None = None
    """Where the run is predicted, which is not this machine; then `card` is that of its ranks."""


def dry_run(
    recipe: Recipe,
    machine: Machine,
    *,
    world: int,
    console: Console,
    fits: Callable[[Recipe], bool] = lambda recipe: True,
) -> None:
    """Print everything; `fits` is what a start would ask (`room.has_room`). Raises `ConfigError` or `DataError` for what cannot run."""
    choice = choose_recovery(recipe, launched=machine.launched, fits=fits)
    recipe = choice.recipe  # copies of shards, too
    console.print(
        describe(recipe, world=world, local_ranks=machine.local_ranks), markup=False, highlight=False, soft_wrap=True
    )
    console.print(f"elastic      {choice.explain()}", markup=False, highlight=False, soft_wrap=True)
    estimates = rank_estimates(recipe, machine, world=world)
    console.print(memory_table(estimates))
    for line in memory_notes(recipe, estimates, machine, world=world):
        console.print(line, highlight=False, soft_wrap=True)
    spec, _ = _shape(recipe, world=world)
    if machine.cluster is not None:
        for line in predicted_lines(recipe, spec, machine.cluster):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if recipe.launch.device == "cuda" or machine.card is not None:
        told = check_card(
            recipe, spec, world=world, peak_bytes=_on_card(_fullest(estimates), recipe, machine, world=world), card=machine.card,
            peak=lambda other: card_bytes(other, machine, world=world),
        )  # fmt: skip
        console.print(told, highlight=False, soft_wrap=True)


def machine_here(recipe: Recipe, *, local_ranks: int, available_bytes: int | None = None) -> Machine:
    """This machine's processors, shared by so many ranks of `recipe`."""
    from phalanx.runtime.processes import threads_per_rank  # with torch, which a cluster that is not here does without

    threads = threads_per_rank(local_ranks, recipe.launch.threads)
    return Machine(
        local_ranks=local_ranks, threads=threads, available_bytes=available_bytes, processor=this_processor()
    )


def machine_of(cluster: GpuCluster) -> Machine:
    """A cluster that is not here, as the place of a run."""
    hardware = cluster.hardware
    processor = MULTIPLIES_BF16 if hardware.native_dtype == "bfloat16" else Processor()
    return Machine(
        local_ranks=min(cluster.world, hardware.ranks_per_host), threads=hardware.threads or 1, available_bytes=None,
        processor=processor, card=card_of(cluster), cluster=cluster,
    )  # fmt: skip


def peak_bytes(recipe: Recipe, machine: Machine, *, world: int) -> int:
    """Bytes of tensors of the fullest rank."""
    return _fullest(rank_estimates(recipe, machine, world=world)).peak_bytes


def card_bytes(recipe: Recipe, machine: Machine, *, world: int) -> int:
    """Bytes of a GPU that the fullest rank needs: of tensors, and of NCCL's communicators."""
    return _on_card(_fullest(rank_estimates(recipe, machine, world=world)), recipe, machine, world=world)


def _on_card(fullest: MemoryEstimate, recipe: Recipe, machine: Machine, *, world: int) -> int:
    return fullest.peak_bytes + _nccl_bytes(recipe, machine, rank=fullest.rank, world=world)


def _nccl_bytes(recipe: Recipe, machine: Machine, *, rank: int, world: int) -> int:
    if recipe.launch.device != "cuda":
        return 0
    _, folding = _shape(recipe, world=world)
    exchanges, whole = recipe.folding.cp_method != "ring", recipe.optim.zero == 0
    rows = dispatch_spec(recipe.dispatch).rows_over
    return nccl_bytes(
        folding, ranks_per_host=machine.local_ranks, rank=rank, cp_exchanges=exchanges, sums_whole=whole, rows=rows
    )


def predicted_lines(recipe: Recipe, spec: ModelSpec, cluster: GpuCluster) -> list[str]:
    """Time, utilisation and length of the run on a cluster that is not here, or why they are not predicted."""
    try:
        p = predict_on(recipe, spec, cluster)
    except (ConfigError, PlanError) as error:
        return [f"predicted    no step: {problem}" for problem in error.problems]
    total = format_seconds(p.step.seconds * recipe.train.steps)
    return [
        f"predicted    step {format_seconds(p.step.seconds)}, MFU {p.mfu('causal'):.1%} (causal), {format_count(p.tokens_per_s)} tokens/s "
        f"on {cluster.name}; {recipe.train.steps} steps take {total}"
    ]


def describe(recipe: Recipe, *, world: int, local_ranks: int | None = None) -> str:
    """The run of `recipe` on `world` ranks, of which each machine has `local_ranks` (None: all), in a few lines.

    Raises `ConfigError` or `DataError` for what cannot run.
    """
    run = _Run.of(recipe, world=world, local_ranks=local_ranks or world)
    parts = [
        [f"{recipe.run.name}: a dry run, nothing is started"],
        run.folding.explain().splitlines(),
        _groups(run.folding, recipe.launch.device_type),
        run.pipeline.explain().splitlines() if run.folding.pp > 1 else [],
        _parameters(run),
        _replicas(run),
        _holders(run),
        _steps(run),
        _missing_data(recipe.data),
    ]
    return "\n".join(line for part in parts for line in part)


def _shape(recipe: Recipe, *, world: int) -> tuple[ModelSpec, AnyFolding]:
    return resolve_shape(recipe, world=world, tokenizer_vocab=tokenizer_vocab(recipe.data))


def tokenizer_vocab(config: DataConfig) -> int:
    """Tokens of the tokenizer, without preparing any text (a trained one may come out smaller, never larger)."""
    choice = parse_choice(config)
    if choice is None:
        return 257
    if isinstance(choice, int):
        return choice
    return read_tokenizer_file(choice, eos_token=config.eos_token, bos_token=config.bos_token).vocab_size


def _missing_data(config: DataConfig) -> list[str]:
    """A warning where training would end for want of its sources: they may be on the machine of the run and not on this one."""
    try:
        resolve(config)
    except DataError as error:
        return [f"data         WARNING: {p}" for p in error.problems]
    return []


def _groups(folding: AnyFolding, device: str) -> list[str]:
    """How many process groups there are; many names share one, and on a device some ranks have a second one (`plan.mapping.step_groups`)."""
    distinct = {group for name in folding.group_names for group in folding.groups(name) if len(group) > 1}
    further = set() if device != "cuda" else {group for of in step_groups(folding).values() for group in of}
    count = len(distinct) + len(further)
    return [f"groups       {count} process group{'s' if count != 1 else ''} of more than one rank"]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the ranks of a run hold."""

    recipe: Recipe
    spec: ModelSpec
    folding: AnyFolding
    pipeline: Pipeline
    asked: ReplicaSettings

    @classmethod
    def of(cls, recipe: Recipe, *, world: int, local_ranks: int) -> _Run:
        spec, folding = _shape(recipe, world=world)
        pipeline = make_pipeline(recipe.pipeline, spec, pp=folding.pp, seq_len=recipe.train.seq_len)
        asked = replicas_of(recipe, world=world, local_ranks=local_ranks)
        return cls(recipe=recipe, spec=spec, folding=folding, pipeline=pipeline, asked=asked)

    @property
    def has_replicas(self) -> bool:
        return self.asked.slots_per_rank is not None and bool(self.spec.moe_layers)

    def of_each_stage(self) -> list[int]:
        """The first rank of each pipeline stage."""
        first = {self.folding.coord(rank, "pp"): rank for rank in reversed(range(self.folding.world))}
        return [first[stage] for stage in sorted(first)]

    def that_differ(self) -> list[int]:
        """Ranks that may hold different numbers of elements: with replicas, one rank has more different experts in its slots than another."""
        if self.asked.slots_per_rank is None:
            return self.of_each_stage()
        return [rank for rank in range(self.folding.world) if self.folding.coord(rank, "etp") == 0]

    def fullest_of_each_stage(self) -> list[int]:
        """The rank of each pipeline stage that holds most."""
        best: dict[int, tuple[int, int]] = {}
        for rank in self.that_differ():
            stage, size = self.folding.coord(rank, "pp"), sum(self.held(rank))
            if stage not in best or size > best[stage][0]:
                best[stage] = size, rank
        return [best[stage][1] for stage in sorted(best)]

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        return tuple(self.pipeline.stages.of_rank(self.folding.coord(rank, "pp")))

    def replicas(self, rank: int) -> StageReplicas:
        """Planned once for all ranks of a stage: of their etp and pp position the first one stands for all."""
        asked = self.asked
        assert asked.slots_per_rank is not None
        first = min(self.folding.group_of(rank, "ep_etp"))
        rows = None if asked.loads is None else tuple(tuple(row) for row in asked.loads.tolist())
        how = asked.slots_per_rank, asked.f, rows, asked.ranks_per_host
        return _placed_by_stage(self.spec, self.folding, self.stages_of(rank), first, *how)

    def placement(self, rank: int) -> AnyPlacement:
        if self.has_replicas:
            return self.replicas(rank).placement
        return plain_placement(max(1, self.spec.num_experts), self.folding.of_rank(rank))

    def held(self, rank: int) -> tuple[int, int]:
        """Dense and expert parameters of a rank."""
        placement = self.placement(rank)
        params = stage_params(self.spec, self.stages_of(rank))
        local = [local_param(p, self.folding, placement, rank) for p in params]
        experts = sum(p.num_elements for p in local if p.param.family == "expert")
        return sum(p.num_elements for p in local) - experts, experts

    def layouts(self, rank: int, **how: Any) -> list[FlatLayout]:
        """Parameters and optimizer state of a rank, with `how` of `flat_layouts`."""
        params = stage_params(self.spec, self.stages_of(rank))
        return list(flat_layouts(params, self.folding, self.placement(rank), rank, **how).values())


@lru_cache(maxsize=64)
def _placed_by_stage(
    spec: ModelSpec,
    folding: AnyFolding,
    stages: tuple[Stage, ...],
    rank: int,
    slots: int,
    f: int,
    rows: Any,
    hosts: int,
) -> StageReplicas:
    loads = None if rows is None else np.array(rows, dtype=np.float64)
    asked = ReplicaSettings(slots_per_rank=slots, f=f, loads=loads, ranks_per_host=hosts)
    return stage_replicas(spec, folding, stages, rank=rank, asked=asked)


def _parameters(run: _Run) -> list[str]:
    """What the rank with the most holds; without a pipeline and replicas all hold as much."""
    held = [run.held(rank) for rank in run.that_differ()]
    dense, experts = max(held, key=sum)
    most = "  per rank   " if len(set(held)) == 1 else "  at most    "
    return [
        f"parameters   {format_count(run.spec.num_params)}, {format_count(run.spec.active_params)} of them for each token",
        f"{most}{format_count(dense + experts)}: {format_count(dense)} dense, {format_count(experts)} of experts",
    ]


def _replicas(run: _Run) -> list[str]:
    """Replicas of each stage's experts, and what their optimizer state takes either way."""
    if not run.has_replicas:
        return []
    lines = []
    for rank in run.of_each_stage():
        text = run.replicas(rank).explain().splitlines()
        lines += [f"replicas     {text[0]}", *(f"           {line}" for line in text[1:])]
    each, states = optimizer_bytes(run.recipe), []
    for state in ("whole", "sharded"):
        layouts = (run.layouts(rank, zero=run.recipe.optim.zero, expert_state=state) for rank in run.that_differ())
        most = max(sum(x.shard_length for x in own if x.rule.family == "expert") for own in layouts)
        states.append(f"{state} {format_bytes(each * most)}")
    return [
        *lines,
        f"  state      of experts, at most a rank: {', '.join(states)}; it is {run.recipe.resilience.expert_state}",
    ]


def _holders(run: _Run) -> list[str]:
    """Hosts that keep each shard of the optimizer state, and what the copies take."""
    wanted = run.recipe.resilience.shard_holders
    if not run.recipe.optim.zero or wanted == 1:
        return []
    own, kept, fewest = 0, 0, dict[str, int]()
    for rank in run.of_each_stage():
        layouts = [layout for layout in run.layouts(rank, holders=wanted) if layout.holders is None]
        own, kept = max(own, sum(x.shard_length for x in layouts)), max(kept, sum(x.kept_length for x in layouts))
        for layout in layouts:
            name = "experts" if layout.rule.family == "expert" else "dense"
            hosts = min(map(len, layout.keepers or [()]))
            fewest[name] = min(fewest.get(name, wanted), max(1, hosts))
    item = optimizer_bytes(run.recipe)
    words = f"{format_bytes(item * kept)} at most a rank in place of {format_bytes(item * own)}"
    lowered = [f"{name}: {n}, for their groups have no more" for name, n in fewest.items() if n < wanted]
    return [
        f"holders      each shard of masters and moments on {wanted} hosts: {words}",
        *(f"  {text}" for text in lowered),
    ]


def _steps(run: _Run) -> list[str]:
    recipe, t = run.recipe, run.recipe.train
    tokens = t.global_batch * t.seq_len
    per_rank = microbatches_per_rank(recipe, run.folding)
    flops = flops_per_token(run.spec, t.seq_len)
    return [
        f"steps        {t.steps} of {t.global_batch} sequences x {t.seq_len} tokens, {format_count(t.steps * tokens)} tokens in all",
        f"  per rank   {per_rank} micro-batch{'es' if per_rank > 1 else ''} of {t.micro_batch} sequences a step",
        f"  work       {format_rate(flops * tokens, 'FLOP').removesuffix('/s')} a step",
        f"checkpoints  every {recipe.checkpoint.interval or t.steps} steps, "
        f"{format_bytes(run.spec.num_params * optimizer_bytes(recipe))} each, the last {recipe.checkpoint.keep_last} kept",
    ]


# ---- memory ------------------------------------------------------------------------------------------------------------------------


def available_bytes(path: Path = MEMINFO) -> int | None:
    """Memory that programs can still get without swapping; None where the system does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def rank_estimates(recipe: Recipe, machine: Machine, *, world: int) -> list[MemoryEstimate]:
    """One estimate for each pipeline stage's first rank, for the others hold the same; with replicas for the one that holds most."""
    run = _Run.of(recipe, world=world, local_ranks=machine.local_ranks)
    how: dict[str, Any] = {
        "threads": machine.threads,
        "text_bytes": _text_bytes(recipe.data),
        "processor": machine.processor,
    }
    return [
        estimate_memory(recipe, run.spec, run.folding, rank=rank, placement=run.placement(rank), **how)
        for rank in run.fullest_of_each_stage()
    ]


def _text_bytes(config: DataConfig) -> int:
    """Tokens that a rank maps; none where the sources are not on this machine (yet)."""
    try:
        return token_file_bytes(config, vocab=tokenizer_vocab(config))
    except DataError:
        return 0


def _fullest(estimates: list[MemoryEstimate]) -> MemoryEstimate:
    return max(estimates, key=lambda e: e.peak_bytes)


def memory_table(estimates: list[MemoryEstimate]) -> Table:
    """The terms of the fullest rank at its largest moment."""
    peak = _fullest(estimates).peak
    table = Table(title=f"memory per rank at its peak ({peak.name})", title_justify="left", show_footer=True)
    table.add_column("term", footer="total")
    table.add_column("per rank", justify="right", footer=format_bytes(peak.total))
    table.add_column("what it is", style="dim")
    for name, text in TERMS.items():
        if peak.terms[name]:
            table.add_row(name, format_bytes(peak.terms[name]), text)
    return table


def memory_notes(recipe: Recipe, estimates: list[MemoryEstimate], machine: Machine, *, world: int) -> list[str]:
    """What the total rests on, and whether it fits."""
    fullest, (spec, folding) = _fullest(estimates), _shape(recipe, world=world)
    balance = fullest.balance
    lines = [
        f"routing      the fullest rank computes {balance.first:.2f} times its even share of rows in the first steps, "
        f"{balance.later:.2f} later: {balance.source}"
    ]
    stage = folding.of_rank(fullest.rank)
    if spec.router.force == "none" and stage.ep > 1 and spec.moe_layers and recipe.resilience.slots_per_rank is None:
        worst = worst_balance(spec, stage)
        most = estimate_memory(
            recipe, spec, folding, rank=fullest.rank, threads=machine.threads, balance=worst,
            text_bytes=_text_bytes(recipe.data), processor=machine.processor,
        )  # fmt: skip
        lines.append(f"             {format_bytes(most.peak_bytes)} if every token chose experts of the same rank")
    if _trains_tokenizer(recipe.data):
        lines.append(
            f"             the first run also trains a tokenizer (short text yields fewer tokens): {format_bytes(PREPARE_BYTES)} in one rank, before the first step"
        )
    if len(estimates) > 1:
        stages = ", ".join(f"{i}: {format_bytes(e.peak_bytes)}" for i, e in enumerate(estimates))
        lines.append(f"stages       {stages}")
    nccl = _nccl_bytes(recipe, machine, rank=fullest.rank, world=world)
    if nccl:
        lines.append(
            f"NCCL         {format_bytes(nccl)} beside the tensors, as its source says and nobody has measured"
        )
    if recipe.launch.device == "cuda" or machine.card is not None:
        return lines
    need = machine.local_ranks * fullest.peak_bytes
    ranks = "1 rank needs" if machine.local_ranks == 1 else f"{machine.local_ranks} ranks need"
    if machine.available_bytes is None:
        return [
            *lines,
            f"machine      {ranks} {format_bytes(need)}; how much there is, the system does not say",
        ]
    words = f"{ranks} {format_bytes(need)}, {format_bytes(machine.available_bytes)} are available"
    if need <= machine.available_bytes:
        return [*lines, f"machine      {words}"]
    hint = 'lower train.micro_batch or train.seq_len, set train.recompute = "full", or use fewer ranks'
    return [
        *lines,
        f"[bold red]WARNING      {words}: this run would end in the middle, killed by the system.[/] {hint}",
    ]


def _trains_tokenizer(config: DataConfig) -> bool:
    return isinstance(parse_choice(config), int)

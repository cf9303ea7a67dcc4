"""Leads from a recipe to everything that a rank trains with, in small steps that fail early and on all ranks alike.

    open_rank        join the others, make the run folder, open the sinks
    prepare_text     one process per host prepares, the others then find it done
    resolve_pipeline schedule and stages
    make_context     groups and what modules need

Decides nothing about training itself (`train/loop.py`). Must never change: whatever is wrong with recipe, text or mapping is an error
before the first parameter exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, PeerError, Problem, RunError
from phalanx.core.events import Emit, Note, ignore
from phalanx.data import PreparedData, prepare
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.products import ProductSums
from phalanx.kernels.native import CompiledRows, compiled_rows, user_folder, why_uncompiled
from phalanx.models import ModelContext
from phalanx.observe import PreparationProgress, Sinks, open_sinks, wants_live
from phalanx.plan import microbatches_per_rank
from phalanx.plan.mapping import AnyFolding, AnyPlacement
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import dispatch_spec
from phalanx.plan.moe.overlap.prediction import paired_share
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.placement import replicas_of, run_placement
from phalanx.runtime.checkpoint import import_now
from phalanx.runtime.comm import (
    AbortableCall,
    Collectives,
    GroupCache,
    Groups,
    LostPeers,
    MessageSums,
    Peers,
    build_groups,
    own_group,
    with_second_groups,
)
from phalanx.runtime.moe import FusedMemory, Tuner, leave_free
from phalanx.runtime.processes import (
    StopRequest,
    WorldInfo,
    init_world,
    keep_freed_memory,
    report_error,
    takes_spare_messages,
)
from phalanx.train.setup.machine import MemoryMeter, hosts_of, numbered
from phalanx.train.setup.run_folder import RunFolder, RunLock

PATIENCE_S = 24 * 3600.0
"""How long ranks wait for each other outside training steps: tokenising a large text takes hours, writing to a slow disk minutes."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Announced:
    """What all ranks have said of themselves before they met, so that it need not be asked again."""

    hosts: tuple[str, ...]
    """`own_host` of each rank."""
    kernels: tuple[str, ...]
    """Name of each rank's compiled kernels; empty: it has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """What a rank is before it knows text and model."""

    recipe: Recipe
    info: WorldInfo
    device: torch.device
    peers: Peers
    cache: GroupCache
    folder: RunFolder
    sinks: Sinks
    memory: MemoryMeter
    lanes: Lanes
    """Threads of its kernels: the same ones for whatever is built later in this process."""
    lock: RunLock | None
    """Open as long as this run is ours (first rank only)."""
    escape: AbortableCall | None = None
    """Abortable call of an elastic run."""
    lost: LostPeers | None = None
    """In other runs."""
    told: Announced | None = None
    """Announcement of an elastic run: from the members' reports."""

    @property
    def speaks(self) -> bool:
        """Whether this rank prints what a person reads."""
        return self.info.rank == 0 and self.recipe.observe.is_for_people


def lost_peers() -> LostPeers:
    """Ends this process where it waits for a rank that is gone, unless questions would do harm."""
    return LostPeers(report_error, asks=takes_spare_messages())


def open_rank(recipe: Recipe, info: WorldInfo) -> Rank:
    """Join the world and open the run folder. Collective."""
    timeout_s = recipe.launch.timeout_s
    import_now()  # nothing to do where the program that forked this rank has
    keep_freed_memory(threads=torch.get_num_threads() if recipe.launch.device != "cuda" else 1)
    device = init_world(info, device=recipe.launch.device_type, timeout_s=timeout_s)
    be_deterministic(recipe.train.deterministic)
    lost = lost_peers()
    peers = Peers(own_group(info.world, timeout_s=timeout_s, patience_s=PATIENCE_S), lost=lost)
    folder = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    # one rank of each host: on a file system that many share, each question of every rank is thousands
    peers.agree(
        lambda: folder.create(shared=recipe.run.access == "group") if 0 in (info.rank, info.local_rank) else None
    )
    lock = _lock(folder, peers)
    sinks = _open_sinks(recipe, folder, info, peers)
    return Rank(
        recipe=recipe,
        info=info,
        device=device,
        peers=peers,
        cache=GroupCache(timeout_s=timeout_s),
        folder=folder,
        sinks=sinks,
        memory=MemoryMeter(device),
        lanes=own_lanes(device),
        lock=lock,
        lost=lost,
    )


def own_lanes(device: torch.device) -> Lanes:
    """The lanes of this process. On a CPU the kernels divide work among threads themselves; other devices need one thread to feed them."""
    return Lanes(torch.get_num_threads() if device.type == "cpu" else 1)


def be_deterministic(asked: bool) -> None:
    """Does what `torch.use_deterministic_algorithms` does, which imports the compiler (`torch._inductor`) in order to tell it too:
    0.9 s of processor time for every rank, and nothing here is compiled by it."""
    torch.set_deterministic_debug_mode("error" if asked else "default")


def _lock(folder: RunFolder, peers: Peers) -> RunLock | None:
    """The first rank's claim on the run folder; where it is refused, all ranks hear why."""
    taken: list[RunLock] = []
    peers.first(lambda: taken.append(folder.lock()))
    return taken[0] if taken else None


def _open_sinks(recipe: Recipe, folder: RunFolder, info: WorldInfo, peers: Peers) -> Sinks:
    """This rank's sinks; where one rank cannot open its own, none goes on."""
    opened: list[Sinks] = []

    def work() -> None:
        opened.append(open_sinks(recipe.observe, folder=folder.path, rank=info.rank))

    peers.agree(work)
    return opened[0]


def prepare_text(rank: Rank, *, resume: str | None, stop: StopRequest) -> PreparedData:
    """The data sets. `resume` is the train fingerprint of the run that goes on. Collective."""
    console = Console() if rank.speaks else None
    live = console is not None and wants_live(rank.recipe.observe, console)
    found: list[PreparedData] = []

    def progress(phase: str, done_bytes: int, total_bytes: int, /) -> None:
        if stop.requested:
            raise RunError("stopped while the text was being prepared; run the same command to start again")
        bar(phase, done_bytes, total_bytes)

    def work() -> None:
        found.append(prepare(rank.recipe.data, progress=progress, resume=resume))

    with PreparationProgress(console, live=live) as bar:
        try:
            rank.peers.agree(work if rank.info.local_rank == 0 else lambda: None)
            rank.peers.agree(work if rank.info.local_rank != 0 else lambda: None)
        except PeerError as error:
            if "timed out" not in str(error).lower():
                raise
            hint = f"ranks wait {PATIENCE_S / 3600:g} h for their text; `phalanx prepare RECIPE` prepares it beforehand"
            raise PeerError(f"{error}; {hint}") from error
    seen = set(rank.peers.gather(found[0].fingerprint))
    if len(seen) > 1:
        rule = "hosts found different text; all need the same files (and packages, for builtin:python)"
        problem = Problem(
            where="data.sources", value=rank.recipe.data.sources, rule=rule, hint="share data.cache between hosts"
        )
        raise ConfigError([problem], subject="the data")
    return found[0]


def resolve_pipeline(recipe: Recipe, spec: ModelSpec, folding: AnyFolding) -> Pipeline:
    """Schedule and stages. Raises `ConfigError` with everything that is wrong with them, `PlanError` where an installed schedule makes no right order for the micro-batches of a step."""
    pipeline = make_pipeline(recipe.pipeline, spec, pp=folding.pp, seq_len=recipe.train.seq_len)
    pipeline.plan(max(1, microbatches_per_rank(recipe, folding)))
    return pipeline


def name_of_rows(found: CompiledRows | None) -> str:
    """What ranks compare."""
    return "" if found is None else found.name


def agreed_rows(found: CompiledRows | None, names: Sequence[str], *, emit: Emit) -> CompiledRows | None:
    """The compiled kernels, where all ranks have the very same ones. `names` of all ranks; `emit` tells where they differ.

    Ranks that hold the same weights (zero = 0, tp) update them each for itself: another rounding on one of them, and they would drift apart.
    """
    if len(set(names)) == 1:
        return found
    without = [i for i, name in enumerate(names) if not name]
    why = f"ranks {', '.join(map(str, without))} have none" if without else "processors or compilers differ"
    text = f"compiled kernels are disabled on all ranks, because results must be identical: {why}"
    emit(Note(level="warning", text=text))
    return None


def tell_uncompiled(recipe: Recipe, device: torch.device, *, emit: Emit) -> None:
    """Say where a compiler is here, and yet there are none of the kernels that the recipe asks for. Call it once in a run."""
    if not recipe.kernels.compiled or device.type != "cpu":
        return
    why = why_uncompiled()
    if why:
        text = f"elementwise kernels are not compiled, so steps are slower: {why}; phalanx doctor looks again"
        emit(Note(level="warning", text=text))


def _rows(rank: Rank) -> CompiledRows | None:
    """Collective, where ranks have not said what they have."""
    found = compiled_rows()
    names = rank.peers.gather(name_of_rows(found)) if rank.told is None else rank.told.kernels
    return agreed_rows(found, names, emit=rank.sinks if rank.info.rank == 0 else ignore)


def message_ctas(recipe: Recipe) -> int:
    """Multiprocessors that messages of overlapped layers get (`dispatch.left_free`); 0: as many as NCCL likes. Fused kernels carry rows themselves."""
    return 0 if recipe.dispatch.overlap == "fused" else recipe.dispatch.left_free or 0


def make_context(
    rank: Rank, spec: ModelSpec, folding: AnyFolding, pipeline: Pipeline, placement: AnyPlacement | None = None
) -> ModelContext:
    """Groups of the folding and all that modules need. Collective. `placement` of the rank's stage; None: as the recipe says."""
    recipe, dispatch = rank.recipe, dispatch_spec(rank.recipe.dispatch)
    rows = _rows(rank) if rank.device.type == "cpu" and recipe.kernels.compiled else None
    left_free = message_ctas(recipe)
    groups = build_groups(
        folding,
        rank=rank.info.rank,
        cache=rank.cache,
        table_ranks=pipeline.stages.table_ranks,
        message_ctas=left_free,
        in_order=rank.device.type != "cpu",
        rows=dispatch.rows_over,
    )
    if pipeline.pair_passes:
        groups = with_second_groups(groups, cache=rank.cache)
    if placement is None:
        asked = replicas_of(recipe, world=rank.info.world, local_ranks=rank.info.local_world)
        stages = pipeline.stages.of_rank(folding.coord(rank.info.rank, "pp"))
        placement = run_placement(spec, folding, stages, rank=rank.info.rank, asked=asked)
    comms = _collectives(rank, rows, left_free=left_free)
    return ModelContext(
        spec=spec,
        dispatch=dispatch,
        placement=placement,
        expert_state=recipe.resilience.expert_state,
        groups=groups,
        pipeline=pipeline.stages,
        comms=comms,
        dtype=DTYPES[recipe.train.dtype],
        device=rank.device,
        kernels=recipe.kernels.implementation,
        recompute=recipe.train.recompute,
        cp_method=recipe.folding.cp_method,
        seed=recipe.train.seed,
        lanes=rank.lanes.with_rows(rows, sums=None if comms.sums is None else ProductSums()),
        tuner=Tuner(
            user_folder(),
            paired=_paired(recipe, folding, pipeline, stage=folding.coord(rank.info.rank, "pp")),
            tell=lambda text: rank.sinks(Note(level="info", text=text)),
        ),
        fused=FusedMemory(left_free=recipe.dispatch.left_free),
        micro_tokens=_micro_tokens(recipe, groups),
        host_of_rank=hosts_of(rank.peers) if rank.told is None else numbered(rank.told.hosts),
    )


def _collectives(rank: Rank, rows: CompiledRows | None, *, left_free: int) -> Collectives:
    """Those of the rank, which sum what they move where the recipe asks for checks."""
    checks = rank.recipe.resilience.check == "sums"
    comms = Collectives(
        emit=rank.sinks,
        timeout_s=rank.recipe.launch.timeout_s,
        escape=rank.escape,
        lost=rank.lost,
        sums=MessageSums(rank.info.rank, rows=rows) if checks else None,
    )
    if rank.recipe.dispatch.transport == "deepep":
        comms.tokens.library()  # or an error, before there is a parameter
    if left_free:
        leave_free(comms, rank.device, multiprocessors=left_free)
    return comms


def _paired(recipe: Recipe, folding: AnyFolding, pipeline: Pipeline, *, stage: int) -> float:
    """The share of a rank's forward passes that run alongside a backward pass, in a step of the present ranks."""
    if not pipeline.pair_passes:
        return 0.0
    plan = pipeline.plan(microbatches_per_rank(recipe, folding))
    return paired_share(plan.schedule, plan.pairs, rank=stage)


def _micro_tokens(recipe: Recipe, groups: Groups) -> int:
    parts = groups.axis("tp").size * groups.axis("cp").size * groups.folding.share_of(groups.rank)[1]
    return recipe.train.micro_batch * recipe.train.seq_len // parts

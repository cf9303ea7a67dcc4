"""One training step of one rank of a world, on a device that computes nothing: the recipe's own model, groups, buffers and step.

Decides nothing: everything between the recipe and the result is what `phalanx train` runs (`train/build.py`, `train/step`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.config import Recipe
from phalanx.core.events import ignore
from phalanx.core.recipe import load_recipe
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.models import TokenBatch, part_of
from phalanx.plan import microbatches_per_rank, resolve_shape
from phalanx.plan.mapping import AnyFolding, plain_placement
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.runtime.checkpoint.host_copies import HostCopies
from phalanx.runtime.comm import GroupCache, Peers
from phalanx.runtime.processes import WorldInfo
from phalanx.simulate.memory import MemoryEstimate, estimate_memory
from phalanx.simulate.memory.balance import Balance
from phalanx.train.build import make_parts
from phalanx.train.setup import Announced, Rank, resolve_pipeline
from phalanx.train.step import StepParts, commit_step, publish, reduce_step
from phalanx_lab.bench.trace.device import World
from phalanx_lab.bench.trace.watch import Seen, Witness

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, kw_only=True)
class TracedCase:
    """A step that is traced."""

    settings: tuple[str, ...]
    """Of the recipe, as on a command line: `--model.preset`, `qwen3-30b-a3b`, ... The device is `cuda` whatever they say."""
    world: int = 1
    rank: int = 0
    samples: int | None = None
    """Micro-batches of the step over all ranks; None: one for each rank that has its own. Fewer leave ranks with an empty one."""
    documents: int = 1
    """Documents packed in each sequence."""
    saves: bool = False
    """Whether a checkpoint of the state before is copied beside the step."""


@dataclass(kw_only=True)
class Traced:
    """What a step did, as JSON takes it."""

    launches: dict[str, int] = field(default_factory=dict)
    """By phase."""
    ops: dict[str, dict[str, int]] = field(default_factory=dict)
    """Launches by phase and operation."""
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    """Launches by phase and line."""
    syncs: list[tuple[str, str, str, int]] = field(default_factory=list)
    """(phase, what, line, times)."""
    host: dict[str, int] = field(default_factory=dict)
    """Lines that compute on the host, and how often."""
    moved: dict[str, int] = field(default_factory=dict)
    moved_at: dict[str, int] = field(default_factory=dict)
    """Bytes by phase, operation and line."""
    flops: dict[str, int] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    flash: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    exchanges: list[tuple[str, str, str, tuple[int, ...], int]] = field(default_factory=list)
    """(phase, content, operation, ranks, bytes sent)."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    static_bytes: int = 0
    kept_bytes: int = 0
    """Above the static ones when the first backward pass began."""
    kept: dict[str, int] = field(default_factory=dict)
    """All that was alive then, by line."""
    peak_bytes: int = 0
    peak_at: str = ""
    peaks: dict[str, int] = field(default_factory=dict)
    """By phase."""
    tokens: int = 0
    """Tokens of this rank between the layers, over all its micro-batches."""
    num_groups: int = 0
    seconds: float = 0.0


def recipe_of(case: TracedCase) -> Recipe:
    """The recipe of a case. Raises `ConfigError` with everything that is wrong with it."""
    recipe = load_recipe(None, [*case.settings, "--launch.device", "cuda"])
    t = recipe.train
    recipe = replace(recipe, train=replace(t, global_batch=case.world * t.micro_batch))  # which any mapping divides
    _, folding = shape_of(recipe, world=case.world)
    samples = folding.replicas if case.samples is None else case.samples
    return replace(recipe, train=replace(t, global_batch=samples * t.micro_batch))


def shape_of(recipe: Recipe, *, world: int) -> tuple[ModelSpec, AnyFolding]:
    """Model and mapping, with the vocabulary of the preset where the recipe sets none. Raises `ConfigError` with everything that is wrong."""
    preset = PRESETS.get(recipe.model.preset)
    vocabulary = recipe.model.vocab or (preset.vocab if preset is not None else 1)
    return resolve_shape(recipe, world=world, tokenizer_vocab=vocabulary)


def stages_of(settings: Sequence[str], *, world: int) -> list[list[int]]:
    """First ranks of the places of a pipeline, those together that hold layers of the same kinds, and ask for the same."""
    recipe = recipe_of(TracedCase(settings=tuple(settings), world=world))
    spec, folding = shape_of(recipe, world=world)
    stages, found = resolve_pipeline(recipe, spec, folding).stages, dict[tuple[Any, ...], list[int]]()
    for place in range(folding.pp):
        held = stages.of_rank(place)
        kind = tuple((s.num_layers, len(s.moe_layers), s.has_embedding, s.has_head) for s in held)
        found.setdefault(kind, []).append(place * world // folding.pp)
    return list(found.values())


def trace_case(case: dict[str, Any], current: Any) -> dict[str, Any]:
    """`trace` for `child.py`: from JSON, to JSON."""
    return asdict(trace(TracedCase(**case | {"settings": tuple(case["settings"])}), current))


def trace(case: TracedCase, current: Any) -> Traced:
    """Run the step of `case`; `current(seen, world)` hears what is taken down from now on."""
    begin_s = time.monotonic()
    recipe = recipe_of(case)
    spec, folding = shape_of(recipe, world=case.world)
    watch, world = Witness(), world_of(recipe, folding, case.rank)
    current(watch.seen, world)
    if case.world > 1:
        dist.init_process_group("fake", rank=case.rank, world_size=case.world, store=FakeStore())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), watch, torch.autograd.set_multithreading_enabled(False):
            rank = make_rank(recipe, case, CUDA)
            parts = make_parts(rank, spec, folding, resolve_pipeline(recipe, spec, folding), warm=False, drawn=False)
            parts.state.make_room()
            parts.buffers.begin()  # the memory of a step that is not the first
            static_bytes = watch.seen.now_bytes
            clear(watch.seen)
            batches = [_batch(recipe, parts, case, world, j) for j in range(microbatches_per_rank(recipe, folding))]
            copies = HostCopies()
            writing = _begin_save(copies, parts) if case.saves else None
            reduced = reduce_step(parts, batches, step=0, lr=1e-3)
            copies.order()
            commit_step(parts, reduced)
            del reduced
            publish(parts)
            if writing is not None:
                writing.join()
            del parts, batches, copies
    finally:
        if case.world > 1:
            dist.destroy_process_group()
    found = told_of(watch.seen, static_bytes)
    found.tokens = world.tokens * sum(
        not world.is_empty(case.rank, j) for j in range(microbatches_per_rank(recipe, folding))
    )
    found.num_groups, found.seconds = len(rank.cache), time.monotonic() - begin_s
    return found


def _begin_save(copies: HostCopies, parts: StepParts) -> threading.Thread:
    """Begins the copy, and the thread that would write it."""
    copied = copies.copy([box for box in parts.state.boxes() if box.primary])
    writing = threading.Thread(target=copied.wait)
    writing.start()
    return writing


def even_estimate(settings: Sequence[str], *, world: int, rank: int = 0, samples: int | None = None) -> MemoryEstimate:
    """What the dry run says of a rank, for routing that loads all experts alike, as a trace has it. `samples`: micro-batches of the step, as of `TracedCase`."""
    recipe = recipe_of(TracedCase(settings=tuple(settings), world=world, rank=rank, samples=samples))
    spec, folding = shape_of(recipe, world=world)
    placement = plain_placement(spec.num_experts, folding.of_rank(rank))
    even = Balance(first=1.0, later=1.0, source="all experts alike")
    return estimate_memory(recipe, spec, folding, rank=rank, placement=placement, balance=even)


def world_of(recipe: Recipe, folding: AnyFolding, rank: int) -> World:
    """What the trace of a rank knows of the others."""
    t, stage = recipe.train, folding.of_rank(rank)
    return World(
        samples=t.global_batch // t.micro_batch,
        replicas=folding.replicas,
        replica_of=folding.replica_of,
        tokens=t.micro_batch * t.seq_len // (stage.cp * stage.tp) // folding.share_of(rank)[1],
    )


def make_rank(recipe: Recipe, case: TracedCase, device: torch.device) -> Rank:
    """A rank on `device` that has met nobody: what is asked of others is what this one says."""
    nothing: Any = None
    sinks: Any = ignore
    return Rank(
        recipe=recipe,
        info=WorldInfo(rank=case.rank, world=case.world, local_rank=0, local_world=case.world),
        device=device,
        peers=Peers(None),
        cache=GroupCache(),
        folder=nothing,
        sinks=sinks,
        memory=nothing,
        lanes=Lanes(1),
        lock=None,
        told=Announced(hosts=("host",) * case.world, kernels=("",) * case.world),
    )


def _batch(recipe: Recipe, parts: StepParts, case: TracedCase, world: World, microbatch: int) -> TokenBatch:
    t = recipe.train
    each = (t.seq_len // case.documents,) * (case.documents - 1)
    tokens_BS = torch.zeros((t.micro_batch, t.seq_len), dtype=torch.int64, device=CUDA)
    whole = TokenBatch(
        tokens_BS=tokens_BS,
        labels_BS=torch.zeros_like(tokens_BS),
        positions_BS=torch.zeros_like(tokens_BS),
        segments=((*each, t.seq_len - sum(each)),) * t.micro_batch,
        is_empty=world.is_empty(case.rank, microbatch),
    )
    return part_of(whole, parts.groups.folding, case.rank)


def clear(seen: Seen) -> None:
    """What came before the step is not of it."""
    for counter in (
        seen.launches,
        seen.lines,
        seen.syncs,
        seen.host,
        seen.moved,
        seen.moved_at,
        seen.flops,
        seen.attention,
        seen.flash,
        seen.fused,
        seen.exchanges,
    ):
        counter.clear()
    seen.calls.clear()
    seen.peak_bytes, seen.peaks = seen.now_bytes, {}


def told_of(seen: Seen, static_bytes: int) -> Traced:
    found = Traced(static_bytes=static_bytes, peak_bytes=seen.peak_bytes, peak_at=seen.peak_at, calls=list(seen.calls))
    found.kept_bytes = 0 if seen.kept_bytes is None else seen.kept_bytes - static_bytes
    for (phase, name), times in seen.launches.items():
        found.launches[phase] = found.launches.get(phase, 0) + times
        found.ops.setdefault(phase, {})[name] = times
    for (phase, line), times in seen.lines.items():
        found.lines.setdefault(phase, {})[line] = times
    found.syncs = [(*key, times) for key, times in sorted(seen.syncs.items())]
    found.host = dict(sorted(Counter({line: n for (_, line), n in seen.host.items()}).items()))
    found.kept, found.peaks = dict(seen.kept), dict(seen.peaks)
    found.moved, found.flops = dict(seen.moved), dict(seen.flops)
    found.moved_at = dict(seen.moved_at)
    found.attention, found.flash, found.fused = dict(seen.attention), dict(seen.flash), dict(seen.fused)
    found.exchanges = [(*key, size) for key, size in sorted(seen.exchanges.items()) if size]
    return found

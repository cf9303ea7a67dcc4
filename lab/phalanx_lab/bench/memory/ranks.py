"""What `phalanx bench memory` measures of a run, and what the dry run promises, rank by rank."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from phalanx.core.config import Recipe
from phalanx.core.errors import RunError
from phalanx.core.process import peak_resident_bytes, resident_bytes
from phalanx.core.processor import this_processor
from phalanx.data.preparation import prepare
from phalanx.data.size import token_file_bytes
from phalanx.plan import resolve_shape
from phalanx.plan.mapping.stage_foldings import AnyFolding
from phalanx.plan.model.model import ModelSpec
from phalanx.plan.placement.run import replicas_of, run_placement
from phalanx.runtime.comm.groups import build_groups
from phalanx.runtime.processes.launch import StopRequest, run_local, threads_per_rank
from phalanx.runtime.processes.world import WorldInfo, close_world
from phalanx.simulate.memory.memory import MemoryEstimate, estimate_memory
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.run import build_trainer
from phalanx.train.setup.rank import open_rank, resolve_pipeline
from phalanx_lab.bench.memory.elastic import measure_elastic


@dataclass(frozen=True, kw_only=True)
class MeasuredRankMemory:
    """Bytes of one rank."""

    rank: int
    stage: int
    """Stage of the pipeline."""
    baseline_bytes: int
    measured_bytes: int
    estimated_bytes: int
    moment: str
    """When the estimate has its peak."""

    @staticmethod
    def of(estimate: MemoryEstimate, baseline_bytes: int, measured_bytes: int) -> MeasuredRankMemory:
        """A promise beside what was measured."""
        return MeasuredRankMemory(
            rank=estimate.rank,
            stage=estimate.stage,
            baseline_bytes=baseline_bytes,
            measured_bytes=measured_bytes,
            estimated_bytes=estimate.peak_bytes,
            moment=estimate.peak.name,
        )

    @property
    def error(self) -> float:
        return self.estimated_bytes / max(1, self.measured_bytes) - 1.0


def estimates_of(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, *, vocab: int) -> list[MemoryEstimate]:
    """What the dry run says of each rank, the text being prepared."""
    threads = threads_per_rank(recipe.launch.ranks, recipe.launch.threads)
    text_bytes = token_file_bytes(recipe.data, vocab=vocab)
    pipeline = resolve_pipeline(recipe, spec, folding)
    asked = replicas_of(recipe, world=folding.world, local_ranks=folding.world)
    out = []
    for rank in range(folding.world):
        stages = pipeline.stages.of_rank(folding.coord(rank, "pp"))
        placement = run_placement(spec, folding, stages, rank=rank, asked=asked)
        out.append(
            estimate_memory(
                recipe,
                spec,
                folding,
                rank=rank,
                placement=placement,
                threads=threads,
                text_bytes=text_bytes,
                processor=this_processor(),
            )
        )
    return out


def promised_and_measured(recipe: Recipe) -> tuple[AnyFolding, list[MemoryEstimate], list[tuple[int, int]]]:
    """The mapping, what the dry run says of each rank, and (baseline, peak above it) of each rank of a run in a scratch folder."""
    vocab = prepare_apart(recipe)
    spec, folding = resolve_shape(recipe, world=recipe.launch.ranks, tokenizer_vocab=vocab)
    with tempfile.TemporaryDirectory(prefix="phalanx-memory-") as scratch:
        run = replace(
            recipe,
            run=replace(recipe.run, folder=scratch),
            checkpoint=replace(recipe.checkpoint, resume=False),
        )
        found = measure(run, spec, folding, folder=Path(scratch))
    return folding, estimates_of(recipe, spec, folding, vocab=vocab), found


def measure(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, *, folder: Path) -> list[tuple[int, int]]:
    """(baseline, peak above it) of each rank of a run of `recipe` in `folder`. The ranks are processes of this machine."""
    ranks = recipe.launch.ranks
    if recipe.resilience.heal:
        run = replace(
            recipe, checkpoint=replace(recipe.checkpoint, resume=True)
        )  # a folder of its own: nothing is there
        return measure_elastic(run, folder=folder)
    body = partial(_measured_rank, recipe, folding, folder)
    run_local(body, ranks=ranks, threads=threads_per_rank(ranks, recipe.launch.threads))
    return [tuple(json.loads(_report(folder, rank).read_text())) for rank in range(ranks)]


def _measured_rank(recipe: Recipe, folding: AnyFolding, folder: Path, info: WorldInfo, stop: StopRequest) -> int:
    rank = open_rank(recipe, info)
    build_groups(folding, rank=info.rank, cache=rank.cache)
    baseline = resident_bytes()
    with rank.sinks:
        build_trainer(rank, stop, hook=Rebalancer).run()
    _report(folder, info.rank).write_text(json.dumps([baseline, peak_resident_bytes() - baseline]))
    close_world()
    return 0


def _report(folder: Path, rank: int) -> Path:
    return folder / f"memory-{rank}.json"


def prepare_apart(recipe: Recipe) -> int:
    """Make the token files in a process of its own, so that nothing of it stays here; returns the tokenizer's size."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_prepare_in_child, args=(recipe, theirs))
    child.start()
    theirs.close()
    try:
        answer: int | str = mine.recv()
    except EOFError:
        answer = "the process that prepares the text ended without an answer"
    child.join()
    if isinstance(answer, str):
        raise RunError(answer)
    return answer


def _prepare_in_child(recipe: Recipe, answer: multiprocessing.connection.Connection) -> None:
    try:
        answer.send(prepare(recipe.data).tokenizer.vocab_size)
    except Exception as err:  # the parent tells
        answer.send(str(err))
    except KeyboardInterrupt:  # the parent is interrupted too
        pass

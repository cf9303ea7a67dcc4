"""Runs cases over local ranks and says what differs, and where.

One fork of `world` ranks runs everything: first the one-rank references, each made by whichever rank is free and left in a folder; then case after case, all
ranks together, each writing what it found as a JSON line. Process groups are cached by rank tuple for the whole session, for making
them costs more than a case. The parent reads the lines. Where a case ends the ranks (a planted fault may make them wait for
each other until the collective's timeout, or crash), that case has failed and the rest runs on fresh ranks.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.reading import parse_json
from phalanx.core.samples import num_rounds, owned
from phalanx.models import TokenBatch
from phalanx.plan.mapping import Folding
from phalanx.plan.model import parameters
from phalanx.runtime.comm import Collectives, GroupCache, build_groups, with_second_groups
from phalanx.runtime.processes import STOPPED, StopRequest, WorldInfo, close_world, init_world, run_local
from phalanx.train.step import StepParts
from phalanx.verify.compare import TOLERANCE, RankReport, compare, not_saved_once, uncovered
from phalanx.verify.numbers import Patch, StartingValues, empty, microbatch
from phalanx.verify.planted import HEALTHY, Fault
from phalanx.verify.reference import (
    HOST,
    Reference,
    collectives,
    context,
    model_boxes,
    on_mapping,
    partition,
    reference_run,
    run_step,
)
from phalanx.verify.replicas import NEARER, Listener, must_exercise, placement_of, train_on
from phalanx.verify.setups import Case, ReplicaSetup, Setup
from phalanx.verify.store import load_outline, load_reference, save_reference

TIMEOUT_S = 60.0
"""Longest wait of one collective: the watchdog against hangs."""
IMPORTED_LATE = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")
"""What torch imports when a block is first recomputed: 2.5 s, here once in place of once on every rank."""
MAX_CRASHES = 3
"""Number of crashes after which the machine, not the mapping, is the likelier cause."""


@dataclass(frozen=True)
class CaseTask:
    """A case, and what is done wrong in it."""

    case: Case
    fault: Fault = HEALTHY


@dataclass(frozen=True, kw_only=True)
class VerifyJob:
    """What the ranks are to do."""

    tasks: Sequence[CaseTask]
    world: int
    dtype: torch.dtype
    timeout_s: float = TIMEOUT_S
    device: str = "cpu"
    """Where the mappings run: `cpu` or `cuda`. The one-rank run is the host's."""


@dataclass(kw_only=True)
class CaseReport:
    """One case, all ranks together."""

    task: CaseTask
    gradient_error: float = 0.0
    norm_error: float = 0.0
    step_error: float = 0.0
    scalar_error: float = 0.0
    loss_error: float = 0.0
    replaced: int = 0
    """Tokens of the data that were replaced because rounding could have routed them."""
    failures: list[str] = field(default_factory=list)
    crashed: bool = False
    """The ranks did not survive it."""
    work: tuple[float, float] = (0.0, 0.0)
    """Where the planner placed replicas for skewed loads: the busiest rank's rows over the mean, with them and without."""


def run_job(
    job: VerifyJob, *, progress: Callable[[int], None] | None = None, run: Callable[..., int] = run_local
) -> list[CaseReport]:
    """Run all cases. Call it before any tensor operation of this process (it forks). `progress` hears how many cases are done; `run` starts the ranks, as `run_local` does."""
    reports: list[CaseReport] = []
    import_early()
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as name:
        while len(reports) < len(job.tasks):
            rest = dataclasses.replace(job, tasks=job.tasks[len(reports) :])
            folder = Path(name) / f"from-{len(reports)}"
            folder.mkdir()
            if sum(report.crashed for report in reports) > MAX_CRASHES:
                text = "not run: too many cases ended the ranks"
                reports += [CaseReport(task=task, failures=[text]) for task in rest.tasks]
                break
            reports += _run_until_crash(rest, folder, run)
            if progress is not None:
                progress(len(reports))
    return reports


def import_early() -> None:
    """Imports what torch imports late, before ranks are forked."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)


def _run_until_crash(job: VerifyJob, folder: Path, run: Callable[..., int]) -> list[CaseReport]:
    """Reports of the cases up to the first one that ended the ranks, that one included."""
    trouble = ""
    try:
        code = run(lambda info, stop: _rank_main(job, folder, info, stop), ranks=job.world, threads=1)
        if code == STOPPED:
            raise KeyboardInterrupt
    except PhalanxError as error:
        trouble = str(error)
    lines = [_read(folder / f"rank-{rank}.jsonl") for rank in range(job.world)]
    finished = min(map(len, lines))
    paths = _reference_paths(job, folder)
    reports = [_merge(job, i, [of_rank[i] for of_rank in lines], paths[i][1]) for i in range(finished)]
    if trouble:
        if finished == len(job.tasks):
            raise RunError(trouble)  # everything was compared, and then the ranks failed: not a finding of any case
        text = f"the ranks ended: {trouble}"
        reports.append(CaseReport(task=job.tasks[finished], failures=[text], crashed=True))
    return reports


def _read(path: Path) -> list[RankReport]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line feed was cut off by a crash
    return [RankReport(**parse_json(line, where=str(path), plain=False)) for line in lines]


# ---- on the ranks --------------------------------------------------------------------------------------------------------------


def _rank_main(job: VerifyJob, folder: Path, info: WorldInfo, stop: StopRequest) -> int:
    device = init_world(info, device=job.device, timeout_s=job.timeout_s)
    cache = GroupCache(timeout_s=job.timeout_s)
    paths, values = _reference_paths(job, folder), StartingValues()
    _make_references(dict.fromkeys(paths), job, stop, values)
    with (folder / f"rank-{info.rank}.jsonl").open("w") as out:
        for i, task in enumerate(job.tasks):
            end_if(stop)
            want = load_reference(paths[i][1])
            if isinstance(want, PhalanxError):
                report = RankReport(case=i, rank=info.rank, unequal=[str(want)])
            else:
                report = run_case(job, task, want, index=i, rank=info.rank, cache=cache, values=values, device=device)
            out.write(json.dumps(vars(report)) + "\n")
            out.flush()
    _barrier(job, info, cache)
    close_world()
    return 0


def _barrier(job: VerifyJob, info: WorldInfo, cache: GroupCache) -> None:
    groups = build_groups(job.tasks[0].case.folding, rank=info.rank, cache=cache)
    Collectives(timeout_s=job.timeout_s).barrier(groups.axis("world"))


def run_case(
    job: VerifyJob,
    task: CaseTask,
    want: Reference,
    *,
    index: int,
    rank: int,
    cache: GroupCache,
    values: StartingValues,
    device: torch.device = HOST,
) -> RankReport:
    """This rank's part of one case. Collective."""
    fault, setup, pipeline = task.fault, task.case.setup, task.case.pipeline
    groups = fault.groups(task.case.folding, rank, cache, pipeline.stages.table_ranks)
    if pipeline.pair_passes:
        groups = with_second_groups(groups, cache=cache)
    comms = collectives(setup, rank, timeout_s=job.timeout_s, make=fault.comms)
    replica, replicas = groups.folding.replica_of(rank), groups.folding.replicas
    total = len(want.patches)
    stages = pipeline.stages.of_rank(groups.folding.coord(rank, "pp"))
    placement = placement_of(setup, task.case.folding, stages, rank, loads_LE=want.result.counts_LE)
    ctx = context(setup, groups, comms, dtype=job.dtype, device=device, placement=placement)
    parts = on_mapping(setup, ctx, num_microbatches=total, pipeline=pipeline, rules=fault.rules)
    initial = [dataclasses.replace(b, tensor=b.tensor.clone()) for b in model_boxes(parts)]
    mine = owned(total, owners=replicas, owner=replica)

    def own(first: int, patches: Sequence[Sequence[Patch]]) -> list[TokenBatch]:
        whole = [microbatch(setup, first + j, patches=patches[j] if patches else ()) for j in mine]
        whole += [empty()] * (num_rounds(total, owners=replicas) - len(mine))
        return [fault.cut(batch.on(device), groups.folding, rank) for batch in whole]

    listener = Listener()
    if setup.replicas is not None:
        must_exercise(parts)
        listener.listen(parts)
    result, gradients = run_step(parts, own(0, want.patches), values=values, alter=fault.alter)
    report = compare(parts, result, gradients, initial=initial, want=want, case=index)
    if setup.replicas is not None:
        _watch_replicas(report, parts, listener, setup.replicas, lambda step: own((step + 1) * total, ()))
    return report


def _watch_replicas(
    report: RankReport,
    parts: StepParts,
    listener: Listener,
    replicas: ReplicaSetup,
    batches: Callable[[int], Sequence[TokenBatch]],
) -> None:
    """What must hold of experts with replicas beyond the comparison. Collective."""
    report.unequal += listener.failures[:1]
    axis = parts.groups.axis("ep_etp")
    if len(set(parts.comms.gather_objects(listener.digest, axis))) > 1:
        report.unequal.append(f"ranks {axis.ranks} have made different plans of who serves which rows")
    if replicas.kind == "planned":
        report.work = list(listener.max_over_mean)
    report.unequal += train_on(parts, batches, steps=replicas.steps - 1, rate=0.02)


# ---- references ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """What a one-rank run depends on."""

    setup: Setup
    num_microbatches: int
    folding: Folding
    """Its tp and cp alone, where rows are dropped by part of a sequence."""


def _reference_key(job: VerifyJob, case: Case) -> _Key:
    """Cases with the same key have the same one-rank run: what that run does not do (sharding, recomputing) is not in it."""
    setup = case.setup
    kernels = setup.kernels if job.dtype != torch.float64 else "reference"
    plain = dataclasses.replace(
        setup,
        label="",
        replicas=None,
        zero=0,
        holders=1,
        exact=False,
        check=False,
        recompute="none",
        buckets=False,
        cp_method="ring",
        kernels=kernels,
        accumulation=1,
        missing=0,
    )
    return _Key(plain, case.num_microbatches, partition(setup, case.folding))


def _reference_paths(job: VerifyJob, folder: Path) -> list[tuple[_Key, Path]]:
    """Reference of each case, and where it lies."""
    keys = [_reference_key(job, task.case) for task in job.tasks]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [(key, folder / f"{number[key]}.reference") for key in keys]


def _make_references(
    wanted: Iterable[tuple[_Key, Path]], job: VerifyJob, stop: StopRequest, values: StartingValues
) -> None:
    """Make those that no other rank has begun, until all are there. No collective: on a busy machine they take longer than its timeout."""
    wanted = list(wanted)
    for key, path in wanted:
        end_if(stop)
        if _claim(path):
            _save_reference(path, key, job, values)
    while not all(path.exists() for _, path in wanted):  # a rank that fails here ends all of them
        end_if(stop)
        time.sleep(0.01)


def _claim(path: Path) -> bool:
    try:
        path.with_suffix(".claimed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def end_if(stop: StopRequest) -> None:
    """End this rank at once where a person asked for it: nothing here is worth saving."""
    if stop.requested:
        os._exit(STOPPED)


def _save_reference(path: Path, key: _Key, job: VerifyJob, values: StartingValues) -> None:
    """Leave the reference, or the reason why there is none, for all ranks to read."""
    found: Reference | PhalanxError
    try:
        found = reference_run(
            key.setup, num_microbatches=key.num_microbatches, dtype=job.dtype, folding=key.folding, values=values
        )
    except PhalanxError as error:
        found = error
    save_reference(path, found)


# ---- in the parent -------------------------------------------------------------------------------------------------------------


def _merge(job: VerifyJob, index: int, reports: list[RankReport], reference: Path) -> CaseReport:
    task, limit = job.tasks[index], TOLERANCE[job.dtype]
    out = CaseReport(task=task)
    want = load_outline(reference)
    if isinstance(want, PhalanxError):
        out.failures.append(f"no reference to compare with: {want}")
        return out
    out.replaced = sum(map(len, want.patches))
    out.gradient_error = max(max(r.gradients.values()) for r in reports)
    out.norm_error = max(r.scalars["grad_norm"] for r in reports)
    out.step_error = max(max(r.step.values()) for r in reports)
    out.scalar_error = max(max(r.scalars.values()) for r in reports)
    out.loss_error = max(r.scalars["loss"] for r in reports)
    for kind in ("gradients", "scalars", "step"):
        out.failures += _beyond(kind, reports, limit)
    for report in reports:
        out.failures += [f"rank {report.rank}: {text}" for text in report.unequal]
    worst = max((r.work for r in reports if r.work), default=None)
    if worst is not None:
        out.work = worst[0], worst[1]
        if not out.work[1] - 1 >= NEARER * (out.work[0] - 1):
            text = (
                f"the busiest rank has {out.work[0]:.3f} times the mean work with replicas, {out.work[1]:.3f} without"
            )
            out.failures.append(f"{text}: not {NEARER:g} times nearer to 1")
    shapes = {p.name: p.shape for p in parameters(task.case.setup.spec)}
    out.failures += uncovered({f"gradient/{name}": shape for name, shape in shapes.items()}, reports)
    out.failures += not_saved_once({f"master/{name}": shape for name, shape in shapes.items()}, reports)
    return out


def _beyond(kind: str, reports: Sequence[RankReport], limit: float) -> list[str]:
    """One line for each thing whose error exceeds the limit on some rank, the worst first."""
    worst: dict[str, tuple[float, list[int]]] = {}
    for report in reports:
        for name, error in getattr(report, kind).items():
            if not error <= limit:
                size, ranks = worst.get(name, (0.0, []))
                worst[name] = (max(size, error), [*ranks, report.rank])
    ordered = sorted(worst.items(), key=lambda item: -item[1][0])
    return [
        f"{name} differs by {size:.1e} (limit {limit:.0e}) on rank {', '.join(map(str, ranks))}"
        for name, (size, ranks) in ordered
    ]

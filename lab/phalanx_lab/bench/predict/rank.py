"""One rank of `phalanx bench predict`: times the links, and what passes between operations; then takes steps of every plan in paced mode.

Decides when the clock runs: from when the last rank begins a step to when the last has ended it. Ranks are on one machine, on emulated hosts or not, and read one clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from phalanx.cli.calibration import measure_links, world_axis
from phalanx.core.errors import RunError
from phalanx.core.events import Collective, Event, Operation
from phalanx.models.context import TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.program.step import StepProgram
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.comm.pacing import Pace
from phalanx.runtime.comm.tracing import traced
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world
from phalanx.simulate.program.clock import programs_hash
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import StepParts, train_step
from phalanx_lab.bench.predict.plans import FLOOR_S, Glue, PlanSetup, StepPlan, paced_s
from phalanx_lab.bench.predict.spans import Told, told_step
from phalanx_lab.plain_model import plain_context

CHAIN = 15
"""Operations and collectives, forward and backward, whose gaps say what passes between them."""
TIMEOUT_S = 60.0
PROBE_SIDE, PROBE_ELEMENTS, PROBE_REPEATS = 384, 1 << 21, 12
"""Sizes of the work that tells how fast processors are: tens of milliseconds, about half of it products."""
SIZES = tuple(1 << i for i in range(6, 21, 2))
"""Bytes at which links are timed."""


def rank_report(
    info: WorldInfo,
    plans: Sequence[StepPlan],
    *,
    steps: int,
    ranks_per_host: int,
    sizes: Sequence[int] = SIZES,
    paced: bool = True,
) -> dict[str, Any]:
    """Links, glue and measured plans, the same on all ranks. Collective: the only thing that the ranks of a benchmark do. Without `paced` operations
    take what they take, all steps are told, and how fast the processors are is looked at before and behind each of them."""
    torch.set_num_threads(1)
    init_world(info, device="cpu", timeout_s=TIMEOUT_S)
    cache = GroupCache(timeout_s=TIMEOUT_S)
    comms = Collectives(timeout_s=TIMEOUT_S)
    links = measure_links(comms, cache, info, sizes=sizes, ranks_per_host=ranks_per_host)
    glue = measure_glue(world_axis(info, cache))
    told = [_measured(plan, info, cache, steps, paced=paced) for plan in plans]
    close_world()
    return {"links": [asdict(link) for link in links], "glue": asdict(glue), "plans": told}


def measure_glue(world: Axis) -> Glue:
    """What passes between operations that compute nothing and collectives of one number, forward and backward: medians of when the last of the ranks posts."""
    comms = Collectives(timeout_s=TIMEOUT_S)
    comms.pace = Pace(lambda op_id: FLOOR_S)
    for _ in range(2):  # the first chain starts connections and autograd's own thread
        comms.barrier(world)
        with comms.recording() as events:
            y = torch.ones(1, requires_grad=True)
            for number in range(CHAIN):
                y = traced(comms, f"mb{number}.fwd.nothing", torch.neg, y)
                for which in ("first", "second"):
                    y = comms.all_reduce_sum(y, world, op_id=f"mb{number}.fwd.{which}")
            y.sum().backward()
    lags = comms.gather_objects(_lags(events), world)
    return Glue(*(_last_of(lags, kind) for kind in (0, 1)))


def _lags(events: Sequence[Event]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(due, posted) of collectives behind an operation, and of those behind another collective."""
    after_work, after_other = list[tuple[float, float]](), list[tuple[float, float]]()
    end_s, before = 0.0, ""
    for event in events:
        if isinstance(event, Operation):
            before = "work"
        elif isinstance(event, Collective):
            if before == "work" and end_s:
                after_work.append((end_s + FLOOR_S, event.begin_s))
            elif before == "other":
                after_other.append((end_s, event.begin_s))
            end_s, before = event.end_s, "other"
    return after_work, after_other


def _last_of(lags: Sequence[Any], kind: int) -> float:
    """Median over collectives: from when the last rank was due to when the last had posted it."""
    each = zip(*(own[kind] for own in lags), strict=True)
    return max(0.0, statistics.median(max(p for _, p in one) - max(d for d, _ in one) for one in each))


def _measured(plan: StepPlan, info: WorldInfo, cache: GroupCache, steps: int, *, paced: bool) -> dict[str, Any]:
    """Seconds of each step of a plan, from when the last rank begins to when the last has ended."""
    comms = Collectives(timeout_s=TIMEOUT_S)
    parts, programs = _parts(plan, info.rank, cache, comms), plan.programs()
    seconds = {op.id: paced_s(op) for op in programs[info.rank].ops}
    pace = Pace(lambda op_id: seconds.get(op_id, 0.0))
    comms.pace = pace if paced else None
    first = plan.folding.replica_of(info.rank) * plan.microbatches
    batches = [part_of(_batch(first + j, plan.setup), plan.folding, info.rank) for j in range(plan.microbatches)]
    world, spans = world_axis(info, cache), list[tuple[float, float]]()
    strange, steps_told, probes = set[str](), list[Told](), list[float]()
    probe = None if paced else Probe()
    for step in range(steps + 1):
        comms.barrier(world)
        if probe is not None:
            probes.append(probe.seconds())
            comms.barrier(world)
        begin = time.monotonic()
        with comms.recording() as events:
            train_step(parts, batches, step=step, lr=1e-3)
        spans.append((begin, time.monotonic()))
        strange |= _strange(programs[info.rank], events)
        steps_told = [*(steps_told if step > 1 and not paced else ()), told_step(events, *spans[-1])]
    if probe is not None:
        comms.barrier(world)
        probes.append(probe.seconds())
    if strange:
        raise RunError(f"{plan.name}: rank {info.rank} did not do what its program says, such as {min(strange)}")
    told = comms.gather_objects((spans[1:], pace.late, pace.recorded, steps_told, probes), world)
    ranks = [each[0] for each in told]
    taken = [
        max(rank[i][1] for rank in ranks) - max(rank[i][0] for rank in ranks) for i in range(steps)
    ]  # one machine: its ranks share a clock
    return {
        "seconds": taken,
        "hash": programs_hash(programs),
        "late": sum(each[1] for each in told),
        "told": sum(each[2] for each in told),
        "probes": [max(each) for each in zip(*(each[4] for each in told), strict=True)][1:],
        "steps": [list(step) for step in zip(*(each[3] for each in told), strict=True)],
    }


class Probe:
    """How fast the processors are just now: a fixed piece of work, products and a copy, that all ranks do at once. Neighbours of a virtual machine change it within seconds."""

    def __init__(self) -> None:
        self.a, self.b = torch.ones(PROBE_SIDE, PROBE_SIDE), torch.ones(PROBE_SIDE, PROBE_SIDE)
        self.x, self.y = torch.ones(PROBE_ELEMENTS), torch.zeros(PROBE_ELEMENTS)

    def seconds(self) -> float:
        begin = time.monotonic()
        for _ in range(PROBE_REPEATS):
            torch.mm(self.a, self.b)
            self.y.copy_(self.x)
        return time.monotonic() - begin


def _strange(program: StepProgram, events: Sequence[Event]) -> set[str]:
    """Ids that a step told and its program does not have, and those of the program that it did not tell."""
    told = {event.op_id for event in events if isinstance(event, Collective)}
    work = {event.op_id for event in events if isinstance(event, Operation) and event.lane == "compute"}
    planned = {op.id for op in program.collectives}
    paced = {op.id for op in program.ops if paced_s(op)}
    return (told ^ planned) | (work ^ paced)


def _parts(plan: StepPlan, rank: int, cache: GroupCache, comms: Collectives) -> StepParts:
    pipeline = plan.planned
    groups = build_groups(plan.folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    how: dict[str, Any] = {"dispatch": plan.dispatch, "recompute": plan.recompute, "cp_method": plan.cp_method}
    ctx = plain_context(plan.setup.spec, groups, dtype=torch.float32, comms=comms, **how)
    return assemble(ctx, optim=plan.optim, num_microbatches=plan.microbatches, pipeline=pipeline)


def _batch(seed: int, of: PlanSetup) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, of.spec.vocab, (of.sequences, of.seq_len + 1), generator=generator)
    positions = torch.arange(of.seq_len).expand(of.sequences, of.seq_len)
    segments = ((of.seq_len,),) * of.sequences
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, segments)

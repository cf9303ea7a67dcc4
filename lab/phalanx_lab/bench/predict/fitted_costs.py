"""What operations cost, learned from steps that were recorded: a law for each kind, and how far single operations lie from it.

Decides how a recording becomes costs. A rank's step is divided among its operations without a rest: what no operation tells of (norms, sums, autograd, sums of gradients) is part of the operation behind it, or of the
posting of the collective before which it is done; what comes before the first and behind the last is `begin` and `end`. The seconds of a kind are those for its FLOPs, its bytes of memory, the elements of its matrices (their gradients are written
and added up whatever the tokens are) and a latency, none below 0, fitted to means of a step, for a step is a sum: of medians it would be too small a one. Single operations vary, and where ranks meet the slower one counts; so the ratios to the
law are kept and drawn from. Must never change: nothing is learned from a step that is compared.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from phalanx.plan.mapping.folding import Folding
from phalanx.plan.program.ops import Op
from phalanx.plan.program.step import StepProgram
from phalanx.simulate.program.cost import ProgramOracle, kind_of
from phalanx_lab.bench.predict.plans import StepPlan, paced_s
from phalanx_lab.bench.predict.spans import Told, recorded_step

ROUNDS_OF_FIT = 20
"""Rounds until the weights of a fit are those of its own law."""
BEGIN, END, POSTING = "begin", "end", "posting"
"""Parts of a step: before its first operation and behind its last; of collectives whose own kind was not recorded, what is done
before they are posted."""
GRADIENTS = "gradients"
_PART = re.compile(r"\.chunk|\.home")
Amounts = tuple[float, ...]


def kind_learned(op: Op, plan: StepPlan) -> str:
    """Kind under which an operation is learned. Chunks and steps of a ring are what they are parts of, a pass again is a forward pass; a rank's first micro-batch of a step finds other caches, and writes
    gradients where the others add them; a ring's products, and those of gathered keys, are another kernel's than those of whole sequences."""
    kind = re.sub(r"^(re|count)\.", "fwd.", _PART.sub("", kind_of(op.id)))
    folding = plan.folding
    if isinstance(folding, Folding) and folding.cp > 1 and plan.cp_method != "ulysses" and "attention.core" in kind:
        kind += " of blocks"
    first = op.microbatch is not None and op.microbatch % plan.microbatches == 0
    return f"{kind}, first" if first else kind


def amounts_of(op: Op) -> Amounts:
    """What the time of an operation grows with: FLOPs (bytes of memory where it has none, of a collective bytes sent), elements of matrices, and 1."""
    if op.kind == "collective":
        return op.sent_bytes, 0.0, 1.0
    return op.flops or op.moved_bytes, float(sum(n * k * groups for _, n, k, groups in op.products)), 1.0


@dataclass(frozen=True)
class Law:
    """Seconds of a kind for each unit of its amounts."""

    per_unit_s: Amounts

    def seconds(self, amounts: Amounts) -> float:
        return sum(s * amount for s, amount in zip(self.per_unit_s, amounts, strict=True))


def law_through(points: Sequence[tuple[Amounts, float]]) -> Law:
    """The law, nothing in it below 0, whose errors count by their squares over what it says: then it says as much in all as `points` do. Weights of 1 / seconds would make it a small one."""
    from scipy.optimize import nnls  # its import takes 0.3 s

    seconds, amounts = np.array([s for _, s in points]), np.array([a for a, _ in points])
    if not seconds.any():
        return Law((0.0,) * amounts.shape[1])
    scale = np.maximum(amounts.max(axis=0), 1e-300)
    said = np.full(len(seconds), seconds.mean())
    for _ in range(ROUNDS_OF_FIT):
        root = np.sqrt(np.maximum(said, 1e-3 * seconds.mean()))
        weights, _ = nnls(amounts / scale / root[:, None], seconds / root)
        said = amounts / scale @ weights
    return Law(tuple(float(w) for w in weights / scale))


def spent(told: Told) -> dict[str, float]:
    """Seconds of a rank's own by id: of an operation from the end of what the rank did before it, of a collective from then to its posting. `BEGIN` and `END`: before the first and behind all."""
    found: dict[str, float] = {}
    events = [(end_s, begin_s, id, "work") for id, begin_s, end_s in told["work"]]
    for m in told["messages"]:
        events.append((m["begin_s"], m["begin_s"], m["op_id"], "post"))
        events.append((m["end_s"], m["end_s"] - m["waited_s"], m["op_id"], "wait"))
    events.sort()
    free_s = events[0][1] if events else told["end_s"]
    found[BEGIN] = free_s - told["begin_s"]
    for end_s, begin_s, id, what in events:
        until_s = begin_s if what == "wait" else end_s
        found[id] = found.get(id, 0.0) + max(0.0, until_s - free_s)
        free_s = max(free_s, end_s)
    return found | {END: max(0.0, told["end_s"] - free_s)}


def paces(found: Mapping[str, Any]) -> list[float]:
    """Seconds of the probe around each recorded step: how slow the processors were."""
    return [(before + after) / 2 for before, after in pairwise(found["probes"])]


def usual_pace(told: Sequence[Mapping[str, Any]]) -> float:
    """Median over the steps that are learned from: costs are those at this one."""
    return statistics.median(pace for found in told for pace in paces(found))


@dataclass(frozen=True)
class Links:
    """Collectives of one kind between operations of a step, from what each takes by itself."""

    knots: tuple[tuple[float, float], ...]
    """(seconds by itself, seconds in a step over that), by the first."""

    def seconds(self, alone_s: float) -> float:
        """Seconds, linear in the logarithm of `alone_s` between the sizes that were recorded, beyond them as the nearest."""
        x, y = zip(*self.knots, strict=True)
        return alone_s * float(np.interp(math.log(max(alone_s, 1e-9)), np.log(x), y))


@dataclass(frozen=True, kw_only=True)
class Learned:
    """`work` by kind: operations of a rank's own, and what is done before a collective is posted. `links` by collective; `GRADIENTS`: reductions of gradients."""

    work: Mapping[str, Law]
    links: Mapping[str, Links]

    def of_collective(self, op: Op) -> Links:
        """Where none of the kind was recorded, all that were held count."""
        kind = GRADIENTS if op.id.startswith("gradient/") and op.posted_after else op.collective
        return self.links.get(kind, self.links[POSTING])


@dataclass(frozen=True)
class _Single:
    """One operation of a recorded step, at the usual pace. `amounts` of a collective: what it takes by itself."""

    kind: str
    amounts: Amounts
    seconds: float
    step: int


def learn(plans: Sequence[StepPlan], told: Sequence[Mapping[str, Any]], oracle: ProgramOracle) -> Learned:
    """Learns from all recorded steps of all ranks, at the usual pace. `oracle` says what collectives take by themselves."""
    usual_s, number = usual_pace(told), 0
    work, links = list[_Single](), list[_Single]()
    for plan, found in zip(plans, told, strict=True):
        programs = plan.programs()
        for step, pace_s in zip(found["steps"], paces(found), strict=True):
            faster = usual_s / pace_s
            work += [_Single(*each, number) for each in _own(plan, programs, step, faster)]
            links += [_Single(*each, number) for each in _held(plan, programs, step, oracle, faster)]
            number += 1
    return Learned(
        work={kind: law_through(points) for kind, points in _means(work).items()},
        links={
            kind: Links(tuple(sorted((alone_s, seconds / alone_s) for (alone_s,), seconds in points)))
            for kind, points in _means(links).items()
        },
    )


def _means(singles: Iterable[_Single]) -> dict[str, list[tuple[Amounts, float]]]:
    """(amounts, seconds) by kind, the mean over steps of the mean of a step."""
    steps: dict[tuple[str, Amounts], dict[int, list[float]]] = {}
    for one in singles:
        steps.setdefault((one.kind, one.amounts), {}).setdefault(one.step, []).append(one.seconds)
    found: dict[str, list[tuple[Amounts, float]]] = {}
    for (kind, amounts), each in steps.items():
        found.setdefault(kind, []).append((amounts, statistics.fmean(statistics.fmean(s) for s in each.values())))
    return found


Found = tuple[str, Amounts, float]


def _own(plan: StepPlan, programs: Sequence[StepProgram], step: Sequence[Told], faster: float) -> Iterator[Found]:
    """What ranks did themselves in one step: kind, amounts, seconds."""
    for program, one in zip(programs, step, strict=True):
        for id, taken_s in spent(one).items():
            op = program.by_id.get(id)
            if op is None:  # begin and end
                yield id, whole_amounts(program), taken_s * faster
                continue
            yield kind_learned(op, plan), amounts_of(op), taken_s * faster
            if op.kind == "collective":
                yield POSTING, (0.0, 0.0, 1.0), taken_s * faster


def whole_amounts(program: StepProgram) -> Amounts:
    """Amounts of `begin` and `end`: the bytes that are committed."""
    commit = program.by_id.get("commit")
    return commit.moved_bytes if commit is not None else 0.0, 0.0, 1.0


def _held(
    plan: StepPlan, programs: Sequence[StepProgram], step: Sequence[Told], oracle: ProgramOracle, faster: float
) -> Iterator[Found]:
    """Collectives of one step that held their ranks: collective and `POSTING`, what it takes by itself, seconds. Reductions of gradients count together, from when the first was posted to the last end."""
    for (rank, id), measured in recorded_step(step).items():
        op = programs[rank].by_id.get(id)
        if op is None or op.kind != "collective" or op.beside or op.posted_after:
            continue
        alone_s = oracle.cost(op, plan.folding.group_of(rank, op.axis)).seconds
        if alone_s > 0:
            for kind in (op.collective, POSTING):
                yield kind, (alone_s,), measured.seconds * faster
    yield from _reduced(programs, step, oracle, plan, faster)


def _reduced(
    programs: Sequence[StepProgram], step: Sequence[Told], oracle: ProgramOracle, plan: StepPlan, faster: float
) -> Iterator[Found]:
    """Reductions of gradients of each rank, together."""
    for program, told in zip(programs, step, strict=True):
        mine = [
            (m, program.by_id[m["op_id"]])
            for m in told["messages"]
            if m["op_id"] in program.by_id and program.by_id[m["op_id"]].posted_after
        ]
        alone_s = sum(oracle.cost(op, plan.folding.group_of(program.rank, op.axis)).seconds for _, op in mine)
        if alone_s > 0:
            seconds = max(m["end_s"] for m, _ in mine) - min(m["begin_s"] for m, _ in mine)
            yield GRADIENTS, (alone_s,), seconds * faster


def before_of(program: StepProgram, plan: StepPlan, work: Mapping[str, Law]) -> Iterable[tuple[str, Law, Amounts]]:
    """What a rank does besides its operations: (the operation that it is added to, its law, its amounts)."""
    holds = ""
    ops = [op for op in program.ops if op.kind == "collective" or paced_s(op)]
    whole = whole_amounts(program)
    for i, op in enumerate(ops):
        if not i:
            yield op.id, work[BEGIN], whole
        if op.kind == "collective":
            kind = kind_learned(op, plan)
            yield holds or op.id, work.get(kind, work[POSTING]), amounts_of(op)
        if not (op.kind == "collective" and op.beside):
            holds = op.id
    if ops:
        yield holds or ops[-1].id, work[END], whole

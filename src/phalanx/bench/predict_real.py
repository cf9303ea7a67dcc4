"""`phalanx bench predict --real`: two ranks of one thread that really compute, no more than there are cores.

Decides what operations cost: three ways of taking a step (everything on each rank; experts shared; sequences shared in a ring, whose products are another kernel's) are recorded at two sizes of a micro-batch, and each kind of operation gets
a latency and a rate from its medians at both. What no operation tells of (norms, sums, autograd) is part of the operation behind it, or of the collective before which it is done. All other plans
are predicted from these, from links that were measured, and from their programs; the recorded ones are not among those that are compared. Must never change: nothing is learned from a step that is compared.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from phalanx.bench.predict_plans import Plan, Setup, paced_s, pipe
from phalanx.bench.predict_spans import Told
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import Folding, make_folding
from phalanx.plan.model import PRESETS
from phalanx.plan.program import StepProgram
from phalanx.plan.program_ops import Op
from phalanx.simulate.cost import Cost
from phalanx.simulate.hardware import Hardware
from phalanx.simulate.program_cost import ProgramOracle, kind_of
from phalanx.simulate.program_time import ProgramTimeline, run_programs

WORLD = 2
SPEC = dataclasses.replace(
    PRESETS["laptop"], shared_ffn=256, router=dataclasses.replace(PRESETS["laptop"].router, force="balanced")
)
SMALL, LARGE = (Setup(world=WORLD, spec=SPEC, sequences=n, seq_len=128) for n in (1, 2))
SIZES = tuple(1 << i for i in range(6, 25, 3))


def _fold(**degrees: int) -> Folding:
    return make_folding(world=WORLD, **degrees)


def _plan(name: str, folding: Folding, **how: Any) -> Plan:
    return Plan(name=name, folding=folding, **{"setup": LARGE, **how})


LEARNED: tuple[Plan, ...] = tuple(
    _plan(f"{name} x {setup.sequences}", folding, setup=setup)
    for name, folding in (("dp2", _fold()), ("ep2", _fold(ep=2)), ("cp2 ring", _fold(cp=2)))
    for setup in (SMALL, LARGE)
)
PLANS: tuple[Plan, ...] = (
    _plan("dp2 zero 0", _fold(), zero=0),
    _plan("dp2 4 micro-batches", _fold(), microbatches=4),
    _plan("ep2 1 micro-batch", _fold(ep=2), microbatches=1),
    _plan("ep2 recompute full", _fold(ep=2), recompute="full"),
    _plan("ep2 recompute selective", _fold(ep=2), recompute="selective"),
    _plan("ep2 coarse:2", _fold(ep=2), dispatch=DispatchSpec(overlap="coarse:2")),
    _plan("ep2 gathered", _fold(ep=2), dispatch=DispatchSpec(transport="all_gather")),
    _plan("etp2", _fold(etp=2)),
    _plan("tp2 ep2", _fold(tp=2, ep=2)),
    _plan("tp2 etp2", _fold(tp=2, etp=2)),
    _plan("cp2 ep2 ring", _fold(cp=2, ep=2)),
    _plan("cp2 ep2 ulysses", _fold(cp=2, ep=2), cp_method="ulysses"),
    _plan("pp2 1f1b", _fold(pp=2), microbatches=4, pipeline=pipe("1f1b")),
    _plan("pp2 gpipe", _fold(pp=2), microbatches=4, pipeline=pipe("gpipe")),
    _plan("pp2 v2", _fold(pp=2), microbatches=4, pipeline=pipe("interleaved_1f1b", 2)),
)

_PART = re.compile(r"\.chunk|\.home")


def kind_learned(id: str) -> str:
    """Kind under which an operation is learned: chunks and steps of a ring are what they are parts of, a pass again is a forward pass."""
    return re.sub(r"^(re|count)\.", "fwd.", _PART.sub("", kind_of(id)))


@dataclass(frozen=True)
class Line:
    """Seconds of a kind: a latency, and so much for each unit of its amount."""

    latency_s: float
    per_unit_s: float

    def seconds(self, amount: float) -> float:
        return self.latency_s + self.per_unit_s * amount


def amount_of(op: Op) -> float:
    """What the time of an operation grows with: FLOPs, bytes where it has none, bytes sent of a collective."""
    return op.sent_bytes if op.kind == "collective" else op.flops or op.moved_bytes


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Through medians at the least and the largest amount, neither part below 0; in proportion where there is one amount."""
    by_amount: dict[float, list[float]] = {}
    for amount, seconds in points:
        by_amount.setdefault(amount, []).append(seconds)
    knots = sorted((amount, statistics.median(seconds)) for amount, seconds in by_amount.items())
    (x0, y0), (x1, y1) = knots[0], knots[-1]
    if x0 == x1:
        return Line(0.0, y1 / x1) if x1 else Line(y1, 0.0)
    slope = min(max(0.0, (y1 - y0) / (x1 - x0)), y1 / x1)
    return Line(y1 - slope * x1, slope)


def spent(told: Told) -> dict[str, float]:
    """Seconds of a rank's own by id: of an operation from the end of what the rank did before it, of a collective from then to its posting."""
    found: dict[str, float] = {}
    events = [(end_s, begin_s, id, "work") for id, begin_s, end_s in told["work"]]
    for m in told["messages"]:
        events.append((m["begin_s"], m["begin_s"], m["op_id"], "post"))
        events.append((m["end_s"], m["end_s"] - m["waited_s"], m["op_id"], "wait"))
    free_s = told["begin_s"]
    for end_s, begin_s, id, what in sorted(events):
        if what == "wait":
            found[id] = found.get(id, 0.0) + max(0.0, begin_s - free_s)
        else:
            found[id] = found.get(id, 0.0) + max(0.0, end_s - free_s)
        free_s = max(free_s, end_s)
    return found


Table = Mapping[str, Line]


def paces(found: Mapping[str, Any]) -> list[float]:
    """Seconds of the probe around each recorded step: how slow the processors were."""
    return [(before + after) / 2 for before, after in pairwise(found["probes"])]


def usual_pace(told: Sequence[Mapping[str, Any]]) -> float:
    """Median over the steps that are learned from: costs are those at this one."""
    return statistics.median(pace for found in told for pace in paces(found))


def learn(plans: Sequence[Plan], told: Sequence[Mapping[str, Any]]) -> dict[str, Line]:
    """A line for each kind, from all recorded steps of all ranks, at the usual pace; `posting` is that of all collectives together."""
    usual_s = usual_pace(told)
    points: dict[str, list[tuple[float, float]]] = {}
    for plan, found in zip(plans, told, strict=True):
        programs = plan.programs()
        for step, pace_s in zip(found["steps"], paces(found), strict=True):
            for rank, one in enumerate(step):
                for op, taken_s in _joined(programs[rank], spent(one)):
                    seconds = taken_s * usual_s / pace_s
                    points.setdefault(_kind(op, plan), []).append((amount_of(op), seconds))
                    if op.kind == "collective":
                        points.setdefault("posting", []).append((0.0, seconds))
    return {kind: line_through(found) for kind, found in points.items()}


def _kind(op: Op, plan: Plan) -> str:
    """A ring's products, and those of gathered keys, are another kernel's than those of whole sequences."""
    kind = kind_learned(op.id)
    folding = plan.folding
    blocks = isinstance(folding, Folding) and folding.cp > 1 and plan.cp_method != "ulysses"
    return f"{kind} of blocks" if blocks and kind.endswith("attention.core") else kind


def _joined(program: StepProgram, seconds: Mapping[str, float]) -> Iterable[tuple[Op, float]]:
    return ((program.by_id[id], s) for id, s in seconds.items() if id in program.by_id)


@dataclass(frozen=True, kw_only=True)
class RealPrediction:
    """A plan on the clock with what was learned. Work of a kind that was never seen costs what the hardware's formulas say."""

    plan: Plan
    hardware: Hardware
    table: Table
    slower: float = 1.0
    """The pace of the processors around the steps that are predicted, over the usual one."""

    def timeline(self) -> ProgramTimeline:
        """Every operation of every rank."""
        programs = self.plan.programs()
        before = {id: s for program in programs for id, s in self._before(program)}
        oracle = ProgramOracle(hardware=self.hardware, precision="fp32", seq_len=self.plan.setup.seq_len)

        def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
            posting_s = before.get(op.id, 0.0)
            if op.kind == "collective":  # gloo is work of the processors as well
                found = oracle.cost(op, ranks)
                return dataclasses.replace(found, seconds=self.slower * (found.seconds + posting_s))
            return Cost(self.slower * (self._work_s(op, oracle) + posting_s), 0.0, "learned")

        return run_programs(programs, self.plan.folding, cost)

    def _work_s(self, op: Op, oracle: ProgramOracle) -> float:
        if not paced_s(op):
            return 0.0
        line = self.table.get(_kind(op, self.plan))
        return line.seconds(amount_of(op)) if line is not None else oracle.cost(op, (0,)).seconds

    def _before(self, program: StepProgram) -> Iterable[tuple[str, float]]:
        """What a rank does before it posts a collective, added to what it did before that."""
        ops = [op for op in program.ops if op.kind == "collective" or paced_s(op)]
        for before, op in pairwise(ops):
            if op.kind == "collective" and not (before.kind == "collective" and before.beside):
                line = self.table.get(kind_learned(op.id), self.table["posting"])
                yield before.id, line.seconds(amount_of(op))

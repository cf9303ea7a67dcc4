"""`phalanx bench predict --real`: two ranks of one thread that really compute, no more than there are cores.

Decides which ways of taking a step are recorded and which are predicted from them: one for each axis that divides something (everything on each rank; experts, sequences, tensors shared), at two sizes of a micro-batch. All
other plans were chosen for what they cover (numbers and sizes of micro-batches, recomputation, transports, chunks, every axis and pairs of them, pipelines), and are predicted from the recorded ones (`phalanx_lab/bench/predict/fitted_costs.py`), from links that were
measured, and from their programs. All plans are measured in two rounds: what a plan differs from itself by says which plans nobody can put in order. Must never change: nothing is learned from a step that is compared.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.program.ops import Op
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import ProgramTimeline, run_programs
from phalanx.simulate.program.cost import ProgramOracle
from phalanx_lab.bench.predict.fitted_costs import Learned, amounts_of, before_of, kind_learned
from phalanx_lab.bench.predict.plans import PlanSetup, StepPlan, paced_s, pipe

WORLD = 2
SPEC = dataclasses.replace(
    PRESETS["laptop"], shared_ffn=256, router=dataclasses.replace(PRESETS["laptop"].router, force="balanced")
)
SMALL, LARGE, LARGER = (PlanSetup(world=WORLD, spec=SPEC, sequences=n, seq_len=128) for n in (1, 2, 4))
SIZES = tuple(1 << i for i in range(6, 25, 3))


def _fold(**degrees: int) -> Folding:
    return make_folding(world=WORLD, **degrees)


def _plan(name: str, folding: Folding, **how: Any) -> StepPlan:
    return StepPlan(name=name, folding=folding, **{"setup": LARGE, **how})


LEARNED: tuple[StepPlan, ...] = tuple(
    _plan(f"{name} x {setup.sequences}", folding, setup=setup)
    for name, folding in (("dp2", _fold()), ("ep2", _fold(ep=2)), ("cp2 ring", _fold(cp=2)), ("tp2", _fold(tp=2)))
    for setup in (SMALL, LARGE)
)
PLANS: tuple[StepPlan, ...] = (
    _plan("dp2 zero 0", _fold(), zero=0),
    _plan("dp2 1 micro-batch", _fold(), microbatches=1),
    _plan("dp2 4 micro-batches", _fold(), microbatches=4),
    _plan("dp2 recompute full", _fold(), recompute="full"),
    _plan("ep2 1 micro-batch", _fold(ep=2), microbatches=1),
    _plan("ep2 4 sequences", _fold(ep=2), setup=LARGER),
    _plan("ep2 recompute full", _fold(ep=2), recompute="full"),
    _plan("ep2 recompute selective", _fold(ep=2), recompute="selective"),
    _plan("ep2 coarse:2", _fold(ep=2), dispatch=DispatchSpec(overlap="coarse:2")),
    _plan("ep2 gathered", _fold(ep=2), dispatch=DispatchSpec(transport="all_gather")),
    _plan("etp2", _fold(etp=2)),
    _plan("tp2 ep2", _fold(tp=2, ep=2)),
    _plan("tp2 etp2", _fold(tp=2, etp=2)),
    _plan("tp2 ep2 4 micro-batches", _fold(tp=2, ep=2), microbatches=4),
    _plan("cp2 ep2 ring", _fold(cp=2, ep=2)),
    _plan("cp2 ep2 ulysses", _fold(cp=2, ep=2), cp_method="ulysses"),
    _plan("cp2 all_gather", _fold(cp=2), cp_method="all_gather"),
    _plan("pp2 1f1b", _fold(pp=2), microbatches=4, pipeline=pipe("1f1b")),
    _plan("pp2 8 micro-batches", _fold(pp=2), microbatches=8, pipeline=pipe("1f1b")),
    _plan("pp2 gpipe", _fold(pp=2), microbatches=4, pipeline=pipe("gpipe")),
    _plan("pp2 v2", _fold(pp=2), microbatches=4, pipeline=pipe("interleaved_1f1b", 2)),
)


@dataclass(frozen=True, kw_only=True)
class RealPrediction:
    """A plan on the clock with what was learned, at the usual pace of the processors. Work of a kind that was never seen costs what the hardware's formulas say."""

    plan: StepPlan
    oracle: ProgramOracle
    learned: Learned

    def timeline(self) -> ProgramTimeline:
        """Every operation of every rank."""
        programs, beside = self.plan.programs(), dict[tuple[int, str], float]()
        for program in programs:
            for id, law, amounts in before_of(program, self.plan, self.learned.work):
                key = (program.rank, id)
                beside[key] = beside.get(key, 0.0) + law.seconds(amounts)

        def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
            more_s = max(beside.get((rank, op.id), 0.0) for rank in ranks)
            if op.kind != "collective":
                found = self._work(op)
                return Cost(found.seconds + more_s, found.sigma, found.origin)
            alone = self.oracle.cost(op, ranks)
            seconds = self.learned.of_collective(op).seconds(alone.seconds)
            return Cost(seconds + more_s, alone.sigma, alone.origin)

        return run_programs(programs, self.plan.folding, cost)

    def _work(self, op: Op) -> Cost:
        if not paced_s(op):
            return Cost(0.0, 0.0, "nothing")
        law = self.learned.work.get(kind_learned(op, self.plan))
        return self.oracle.cost(op, (0,)) if law is None else Cost(law.seconds(amounts_of(op)), 0.0, "learned")

"""`phalanx bench predict --recovery`: from kill -9 of a rank to the next committed step, predicted and measured.

Decides the runs whose ranks are killed, and what is compared: of each case (a run, and who has died before) the median over several kills, each in a start of its own and at a random
moment of a step. The prediction is `simulate/failures/recovery_time.py` on the plan of the very generation that forms, with the constants of `phalanx_lab/bench/recovery/constants.py` and the step time of that run
before the first kill. Killed slots stay empty (`train/recovery/drained_slots.py`), as those of a lost host do. Must never change: no recovery is measured before it is predicted, and both name the hash of the plan.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from phalanx.core.config import Recipe
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan import resolve_shape
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.program.step import StepProgram
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.recipe import recovery_planner
from phalanx.plan.recovery.state_descriptor import Fact
from phalanx.simulate.failures.recovery_time import (
    PHASES,
    Constants,
    RecoveryTime,
    notice_share,
    recovery_time,
    recovery_work,
    step_after,
)
from phalanx.simulate.program.recipe import programs_of_recipe
from phalanx.train.recovery.run import train_elastic
from phalanx.train.setup import DTYPES
from phalanx_lab.bench.cluster import TrainingCluster, overrides, tiny_run
from phalanx_lab.bench.recovery.constants import measure_constants

BAR = 0.25
CALM_STEPS = 6
"""Committed steps before a kill, of which the last ones say how long a step takes."""
COLD_STEPS = 2
VOCAB = 320


@dataclass(frozen=True, kw_only=True)
class KillTargets:
    """A run, and who of it is killed, one kill after the other."""

    name: str
    ranks: int
    words: tuple[tuple[str, object], ...]
    kills: tuple[tuple[int, ...], ...]
    """Slots that are killed at once, for each kill."""


def _run(name: str, ranks: int, kills: Sequence[tuple[int, ...]], **words: object) -> KillTargets:
    return KillTargets(name=name, ranks=ranks, words=tuple(words.items()), kills=tuple(kills))


def _model(hidden: int, ffn: int, layers: int = 2) -> dict[str, object]:
    return {"model_hidden": hidden, "model_expert_ffn": ffn, "model_num_layers": layers}


RUNS: tuple[KillTargets, ...] = (
    _run("small, ep 2", 4, [(3,), (2,)], **_model(64, 128), folding_ep=2, optim_zero=0),
    _run("wide, 3 ranks", 3, [(1,), (2,)], **_model(192, 768), optim_zero=0),
    _run("wide, zero 1", 3, [(2,)], **_model(192, 768), optim_zero=1),
    _run("2 ranks", 2, [(0,)], **_model(192, 768, 4), optim_zero=0),
    _run("tp 2", 4, [(0,)], **_model(128, 384), folding_tp=2, optim_zero=0),
    _run("pp 2", 4, [(3,)], **_model(128, 384), folding_pp=2, optim_zero=0),
    _run("ep 2, zero 1, wide", 4, [(2,)], **_model(256, 768), folding_ep=2, optim_zero=1),
    _run("two at once, f 3", 4, [(1, 3)], **_model(128, 384), optim_zero=1, resilience_f=3),
    _run("exact, ep 2", 4, [(1,)], **_model(128, 384), folding_ep=2, optim_zero=0, resilience_mode="exact"),
)


def recipe_of(targets: KillTargets, folder: Path, name: str) -> Recipe:
    """Raises `ConfigError` with all that is wrong."""
    own: dict[str, object] = {
        "model.vocab": VOCAB,
        "data.builtin_bytes": 1_000_000,
        "folding.ep": 1,
        "train.steps": 1_000_000,
        "train.seq_len": 64,
        "train.global_batch": 8,
        "train.micro_batch": 1,
        "resilience.mode": "fast",
        "resilience.heal": "true",
        "checkpoint.interval": 0,
        "launch.ranks": targets.ranks,
        "launch.threads": 1,
    }
    own |= {key.replace("_", ".", 1): value for key, value in targets.words}
    words = overrides(tiny_run(folder / "runs", name, folder / "cache", own))
    return load_recipe(None, words, check=lambda r: run_problems(r, world=targets.ranks))


# ---- predicted --------------------------------------------------------------------------------------------------------


class PlannedCourse:
    """Generations of a run, one after the other, as the plan makes them. Slots are known by their numbers."""

    def __init__(self, recipe: Recipe, constants: Constants) -> None:
        self.recipe, self.constants = recipe, constants
        self.planner = _recovery_planner(recipe)
        world = recipe.launch.ranks
        self.plan = self.planner.plan([_fact(slot) for slot in range(world)])
        self.first = self.plan.folding
        self.losses = 0

    def after(self, slots: Sequence[int], *, step_s: float) -> RecoveryTime:
        """The prediction where `slots` die now; the course goes on behind them. `step_s`: of the first mapping."""
        dead = {_fact(slot).uid for slot in slots}
        facts = [
            replace(fact, descriptor=self._descriptor(self.plan, rank))
            for rank, fact in enumerate(self.plan.members)
            if fact.uid not in dead
        ]
        width = DTYPES[self.recipe.train.dtype].itemsize
        plan = self.planner.plan(facts)
        work = recovery_work(self.planner, plan, lost=len(slots), itemsize=width)
        t = self.recipe.train
        before_s, after_s = (
            step_after(
                step_s,
                samples=t.global_batch // t.micro_batch,
                before=self.first,
                after=then,
                cores=self.constants.cores,
            )
            for then in (self.plan.folding, work.folding)
        )
        notice_s = before_s * notice_share(self._program(self.plan.folding))
        found = recovery_time(work, self.constants, step_s=after_s, notice_s=notice_s, fresh=self.losses == 0)
        self.plan, self.losses = plan, self.losses + 1
        return found

    def _program(self, folding: Folding) -> StepProgram:
        """Program of the first rank. Exact mode has the collectives of fast mode."""
        degrees = {axis: getattr(folding, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        recipe = replace(
            self.recipe,
            folding=replace(self.recipe.folding, **degrees),
            resilience=replace(self.recipe.resilience, mode="fast"),
        )
        return programs_of_recipe(recipe, self.planner.spec, world=folding.world).programs[0]

    @staticmethod
    def _descriptor(plan: GenerationPlan, rank: int) -> Any:
        return plan.state_descriptor(rank) if rank < plan.folding.world else None


def _fact(slot: int) -> Fact:
    return Fact(uid=f"local.{slot}.0", machine="local", descriptor=None)


def _recovery_planner(recipe: Recipe) -> RecoveryPlanner:
    """Recovery planner as `prepare_run` makes it, without the text: the vocabulary is written in the recipe."""
    spec, folding = resolve_shape(recipe, world=recipe.launch.ranks, tokenizer_vocab=VOCAB)
    assert isinstance(folding, Folding)
    return recovery_planner(recipe, spec, folding)


# ---- measured ---------------------------------------------------------------------------------------------------------


def play(
    targets: KillTargets, folder: Path, name: str, constants: Constants, draw: random.Random
) -> list[tuple[RecoveryTime, dict[str, Any]]]:
    """One start of a run with all its kills: (predicted, measured) of each."""
    recipe = recipe_of(targets, folder, name)
    course, out = PlannedCourse(recipe, constants), []
    there = frozenset(range(recipe.launch.ranks))
    with TrainingCluster(Path(recipe.run.folder) / name, ranks=recipe.launch.ranks) as run:
        run.start("local", partial(train_elastic, recipe, threads=1))  # what its members tell is in the event logs
        run.wait_for(lambda: _count(run, "StepEnded", slot=0) >= CALM_STEPS, "its first steps")
        step_s = statistics.median(_step_s(run.told())[COLD_STEPS:])
        for slots in targets.kills:
            predicted = course.after(slots, step_s=step_s)
            run.wait_for(lambda: _count(run, "StepEnded") >= CALM_STEPS, "steps between two kills")
            time.sleep(draw.random() * step_s)
            there -= set(slots)
            out.append((predicted, _kill(run, slots, there)))
    return out


def _kill(run: TrainingCluster, slots: Sequence[int], there: frozenset[int]) -> dict[str, Any]:
    """What their loss costs those that are left."""
    run.forget()
    at_s = run.lose(slots, there=there)
    run.wait_for(lambda: _count(run, "TrainingResumed") >= len(there), "its next step")
    found = measured(run.told(), at_s)
    run.forget(but="StepEnded")
    return found


def _count(run: TrainingCluster, kind: str, *, slot: int | None = None) -> int:
    return sum(r["kind"] == kind and slot in (None, r["slot"]) for r in run.told())


def _step_s(told: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from one commit to the next, on the first slot."""
    times = [r["time_s"] for r in told if r["kind"] == "StepEnded" and r["slot"] == 0]
    return [b - a for a, b in pairwise(times)]


def measured(told: Sequence[dict[str, Any]], at_s: float) -> dict[str, Any]:
    """Seconds of each phase of a recovery, from what its members told: each ends when the last of them is through with it."""
    teams = [r for r in told if r["kind"] == "TeamFormed"]
    newest = max(r["generation"] for r in teams)
    last = [r for r in teams if r["generation"] == newest]
    resumed_s = max(r["time_s"] for r in told if r["kind"] == "TrainingResumed")
    known_s = min(r["lost_s"] for r in teams if r["lost_s"])
    moved_s = max(r["time_s"] for r in last)
    built_s = max(r["time_s"] - r["moved_s"] for r in last)
    formed_s = max(r["time_s"] - r["moved_s"] - r["built_s"] for r in last)
    ends = (known_s, formed_s, built_s, moved_s, resumed_s)
    begins = (at_s, *ends[:-1])
    return {
        "seconds": resumed_s - at_s,
        "phases": {name: end - begin for name, begin, end in zip(PHASES, begins, ends, strict=True)},
        "hash": last[0]["plan"],
        "moved_bytes": sum(r["moved_bytes"] for r in last),
        "generations": newest - min(r["generation"] for r in teams) + 1,
    }


# ---- the comparison -----------------------------------------------------------------------------------------------------


def measure(runs: Sequence[KillTargets], *, kills: int, seed: int = 0) -> dict[str, Any]:
    """Every run `kills` times. Raises `RunError` where one does not go on."""
    constants, draw = measure_constants(), random.Random(seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as name:
        for i, targets in enumerate(runs):
            played = [play(targets, Path(name), f"run-{i}-{k}", constants, draw) for k in range(kills)]
            rows += [_row(targets, kill, [one[kill] for one in played]) for kill in range(len(targets.kills))]
    return report_of(rows) | {"constants": asdict(constants), "kills": kills}


def _row(targets: KillTargets, kill: int, found: Sequence[tuple[RecoveryTime, dict[str, Any]]]) -> dict[str, Any]:
    """A case: medians over its kills."""
    predicted_s = statistics.median(p.seconds for p, _ in found)
    measured_s = statistics.median(m["seconds"] for _, m in found)
    lost = sum(len(slots) for slots in targets.kills[:kill])
    return {
        "case": targets.name,
        "ranks": f"{targets.ranks - lost} -> {targets.ranks - lost - len(targets.kills[kill])}",
        "folding": found[0][0].folding,
        "plan_hash": {
            "predicted": found[0][0].hash,
            "measured": sorted({m["hash"] for _, m in found}),
        },
        "moved_bytes": {"predicted": found[0][0].moved_bytes, "measured": found[0][1]["moved_bytes"]},
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "samples_s": [m["seconds"] for _, m in found],
        "phases": {
            name: {
                "predicted_s": statistics.median(p.phases[name] for p, _ in found),
                "measured_s": statistics.median(m["phases"][name] for _, m in found),
            }
            for name in PHASES
        },
    }


def report_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows and what the bar asks of them."""
    wrong = [abs(row["error"]) for row in rows]
    same = all(row["plan_hash"]["measured"] == [row["plan_hash"]["predicted"]] for row in rows)
    median, worst = statistics.median(wrong), max(wrong)
    return {
        "mode": "recovery",
        "rows": list(rows),
        "median": median,
        "worst": worst,
        "worst_case": rows[wrong.index(worst)]["case"],
        "same_plans": same,
        "bar": BAR,
        "met": median <= BAR and same,
    }


def describe(report: dict[str, Any]) -> str:
    """A line for each case: predicted / measured of each phase in milliseconds."""
    head = "".join(f"{name:>14}" for name in PHASES)
    lines = [
        f"from kill -9 to the next committed step, medians of {report['kills']} kills each; by phase predicted/measured in ms",
        f"{'case':<20}{'ranks':<8}{'moved':>9}{'predicted':>10}{'measured':>10}{'error':>8}{head}  plan",
    ]
    for row in report["rows"]:
        phases = "".join(
            f"{1e3 * row['phases'][n]['predicted_s']:>8.0f}/{1e3 * row['phases'][n]['measured_s']:<5.0f}"
            for n in PHASES
        )
        same = "" if row["plan_hash"]["measured"] == [row["plan_hash"]["predicted"]] else "  PLANS DIFFER"
        lines.append(
            f"{row['case']:<20}{row['ranks']:<8}{format_bytes(row['moved_bytes']['predicted']):>9}{format_seconds(row['predicted_s']):>10}"
            f"{format_seconds(row['measured_s']):>10}{row['error']:>+8.1%}{phases}  {row['plan_hash']['predicted']}{same}"
        )
    lines.append(
        f"median error of {len(report['rows'])} cases {report['median']:.1%} (bar {report['bar']:.0%}), worst {report['worst']:.1%} "
        f"({report['worst_case']}): {'met' if report['met'] else 'missed'}"
    )
    return "\n".join(lines)

"""Memory of many foldings, promised and measured, for every rank: `phalanx bench memory --foldings [--part I/N] [--only WORDS] [--section.key VALUE ...]`.

Each case is a mapping (tp, cp, pp with its schedule, ep, etp, replicas, elastic recovery) of one small model on local ranks, trained for three steps with a checkpoint behind each, as
`phalanx train` does it. The promise of a rank is the largest moment of `simulate.memory.estimate_memory`; measured is the most that was ever resident above what the
process held when it had joined the others.

The unit of the bar is a pipeline stage: of its ranks the fullest, promised and measured. A router decides which of them that is, and no promise can know; a stage
is never averaged with another. *Fixed* is the part of a promise that does not depend on the model: libraries, generated code, pages of text.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes
from phalanx.plan.mapping.stage_foldings import AnyFolding
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery_choice import choose_recovery
from phalanx.simulate.memory.memory import MemoryEstimate
from phalanx_lab.bench.memory.ranks import MeasuredRankMemory, promised_and_measured

BAR = 0.10
"""Largest error of a stage, as a share of what was measured."""
FIXED_TERMS = ("libraries", "generated code", "mapped text")
BASE: tuple[str, ...] = (
    "--model.preset=laptop", "--model.vocab=8192", "--data.builtin_bytes=2000000", "--data.tokenizer=byte", "--train.seq_len=256",
    "--router.force=balanced", "--train.global_batch=32", "--train.micro_batch=8", "--train.steps=3", "--train.eval_interval=2", "--train.eval_batches=1",
    "--optim.warmup_steps=1", "--checkpoint.interval=1", "--observe.console=none", "--observe.tensorboard=false", "--launch.ranks=4",
)  # fmt: skip
"""Settings of every case, before its own. Wide enough that tensors decide, and no fixed part. Routing is forced to be even but
where a case says
otherwise, so that rows of experts are known and not a guess."""


@dataclass(frozen=True, kw_only=True)
class FoldingCase:
    """One folding. `settings` as on a command line, without the dashes; it is elastic only where it says so."""

    name: str
    settings: tuple[str, ...]

    def recipe(self, more: Sequence[str] = ()) -> Recipe:
        """What is trained. Raises `ConfigError` for what cannot run."""
        plain = () if any(s.startswith("resilience.heal=") for s in self.settings) else ("--resilience.heal=false",)
        words = [*BASE, *plain, *(f"--{s}" for s in self.settings), *more]
        recipe = load_recipe(None, words, check=lambda r: run_problems(r, world=r.launch.ranks))
        return choose_recovery(recipe).recipe


def _case(name: str, *settings: str) -> FoldingCase:
    return FoldingCase(name=name, settings=settings)


FP32 = "train.dtype=float32"
LEARNED = "router.force=none"
ELASTIC = ("resilience.heal=true", "resilience.mode=fast")
CASES: tuple[FoldingCase, ...] = (
    _case("ep4", "folding.ep=4"),
    _case("ep2, elastic recovery, f 2", "folding.ep=2", *ELASTIC),
    _case("dp4, zero 0, fp32", "optim.zero=0", FP32, "train.micro_batch=4"),
    _case("ep2 etp2, fp32", "folding.ep=2", "folding.etp=2", FP32),
    _case("tp2 ep2", "folding.tp=2", "folding.ep=2"),
    _case("tp2 etp2, fp32", "folding.tp=2", "folding.etp=2", FP32, "train.global_batch=16"),
    _case("cp2 ep4, ring", "folding.cp=2", "folding.ep=4", "train.seq_len=1024", "train.micro_batch=4", "train.global_batch=8"),
    _case("cp2 ep2, all-gather, fp32", "folding.cp=2", "folding.ep=2", "folding.cp_method=all_gather", FP32, "train.global_batch=16"),
    _case("cp4 ep2, ulysses", "folding.cp=4", "folding.ep=2", "folding.cp_method=ulysses", "train.seq_len=1024", "train.global_batch=8"),
    _case("pp2 ep2, 1f1b", "folding.pp=2", "folding.ep=2", "train.micro_batch=4"),
    _case("pp4, 1f1b, fp32", "folding.pp=4", FP32, "train.micro_batch=4"),
    _case("pp2 ep2, interleaved v2", "folding.pp=2", "folding.ep=2", "train.micro_batch=4", "pipeline.schedule=interleaved_1f1b", "pipeline.virtual=2"),
    _case("pp2 tp2, gpipe", "folding.pp=2", "folding.tp=2", "train.micro_batch=8", "pipeline.schedule=gpipe"),
    _case("pp2 ep2, zero_bubble, fp32", "folding.pp=2", "folding.ep=2", "train.micro_batch=4", "pipeline.schedule=zero_bubble", FP32),
    _case("pp2 cp2, eager", "folding.pp=2", "folding.cp=2", "pipeline.schedule=eager_1f1b", "train.micro_batch=4"),
    _case("ep4, recompute full", "folding.ep=4", "train.recompute=full", "train.micro_batch=16", "train.global_batch=64"),
    _case("ep2, recompute selective, fp32", "folding.ep=2", "train.recompute=selective", FP32),
    _case("ep4, exact mode", "folding.ep=4", "resilience.mode=exact", "launch.threads=1"),
    _case("pp2, elastic recovery, f 2, fp32", "folding.pp=2", "folding.ep=1", *ELASTIC, FP32, "train.micro_batch=4"),
    _case("replicas, 3 slots a rank", "folding.ep=4", "resilience.slots_per_rank=3"),
    _case("ep2, elastic recovery, exact, f 2", "folding.ep=2", "resilience.heal=true", "resilience.mode=exact", "launch.threads=1"),
    _case("ep4, learned router", "folding.ep=4", LEARNED),
    _case("ep2, elastic recovery, learned router", "folding.ep=2", *ELASTIC, LEARNED),
    _case("pp2 ep2, 1f1b, learned router", "folding.pp=2", "folding.ep=2", "train.micro_batch=4", LEARNED),
    _case("2 ranks, ep2, fp32", "launch.ranks=2", "launch.threads=1", "folding.ep=2", FP32, "train.global_batch=16"),
    _case("2 ranks, pp2, zbv", "launch.ranks=2", "launch.threads=1", "folding.pp=2", "pipeline.schedule=zbv", "train.micro_batch=4"),
    _case("2 ranks, tp2, gathered rows", "launch.ranks=2", "launch.threads=1", "folding.tp=2", "folding.ep=2", "dispatch.transport=all_gather", "train.global_batch=16"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredStageMemory:
    """Bytes of the fullest rank of one pipeline stage."""

    stage: int
    measured_bytes: int
    estimated_bytes: int
    fixed_bytes: int
    """Part of the promise that does not depend on the model."""
    moment: str

    @property
    def error(self) -> float:
        return self.estimated_bytes / max(1, self.measured_bytes) - 1.0


@dataclass(kw_only=True)
class CaseMemory:
    """One case: its stages, its ranks, and the promised terms of each stage's fullest rank."""

    name: str
    settings: tuple[str, ...]
    stages: list[MeasuredStageMemory] = field(default_factory=list)
    ranks: list[MeasuredRankMemory] = field(default_factory=list)
    terms: list[dict[str, int]] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""
    """Why there are no numbers."""

    @property
    def worst(self) -> float:
        return max((abs(stage.error) for stage in self.stages), default=float("inf"))

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON, the errors with them."""
        stages = [asdict(s) | {"error": s.error} for s in self.stages]
        ranks = [asdict(r) | {"error": r.error} for r in self.ranks]
        return asdict(self) | {"stages": stages, "ranks": ranks, "settings": list(self.settings)}


def chosen(*, part: str | None, only: str | None) -> list[FoldingCase]:
    """The cases of part I/N (all: None), and of those the ones whose names hold `only`. Raises `ConfigError` naming every problem."""
    problems, index, count = [], 1, 1
    if part is not None:
        words = part.split("/")
        if len(words) == 2 and all(w.isdecimal() for w in words):
            index, count = map(int, words)
        if len(words) != 2 or not all(w.isdecimal() for w in words) or not 1 <= index <= count <= len(CASES):
            rule = f"must be I/N with 1 <= I <= N <= {len(CASES)}"
            problems.append(Problem(where="--part", value=part, rule=rule, hint="1/2"))
    found = [case for case in CASES if only is None or only in case.name]
    if not found:
        names = ", ".join(repr(case.name) for case in CASES)
        problems.append(Problem(where="--only", value=only, rule="is in no case's name", hint=f"one of {names}"))
    raise_if(problems, ConfigError, subject="the options")
    return [case for case in found if CASES.index(case) % count == index - 1]


def run_cases(
    cases: Sequence[FoldingCase], more: Sequence[str] = (), *, tell: Console | None = None
) -> list[CaseMemory]:
    """Every case measured, one after the other; one that fails says why and the others go on. All recipes are checked before the first is trained."""
    recipes = [case.recipe(more) for case in cases]
    out = []
    for case, recipe in zip(cases, recipes, strict=True):
        begin_s = time.monotonic()
        try:
            found = run_case(case, recipe)
        except Exception as err:  # one folding that cannot run must not hide the others
            found = CaseMemory(name=case.name, settings=case.settings, failure=_why(err))
        found.seconds = time.monotonic() - begin_s
        if tell is not None:
            tell.print(_line(found), highlight=False, soft_wrap=True)
        out.append(found)
    return out


def _why(err: Exception) -> str:
    return f"{type(err).__name__}: {err}" if str(err) else traceback.format_exc(limit=1)


def run_case(case: FoldingCase, recipe: Recipe) -> CaseMemory:
    """Train it, and put what was measured beside what was promised."""
    folding, estimates, found = promised_and_measured(recipe)
    return compared(case, estimates, found, folding)


def compared(
    case: FoldingCase, estimates: Sequence[MemoryEstimate], found: Sequence[tuple[int, int]], folding: AnyFolding
) -> CaseMemory:
    """Ranks and, of each stage, the fullest promise beside the fullest measurement. `found`: (baseline, peak above it) of each rank."""
    out = CaseMemory(name=case.name, settings=case.settings)
    out.ranks = [MeasuredRankMemory.of(estimate, *pair) for estimate, pair in zip(estimates, found, strict=True)]
    for stage in range(folding.pp):
        ranks = [r for r in range(folding.world) if folding.coord(r, "pp") == stage]
        peak = max((estimates[r].peak for r in ranks), key=lambda moment: moment.total)
        fixed = sum(peak.terms[name] for name in FIXED_TERMS)
        measured = max(found[r][1] for r in ranks)
        out.stages.append(
            MeasuredStageMemory(
                stage=stage,
                measured_bytes=measured,
                estimated_bytes=peak.total,
                fixed_bytes=fixed,
                moment=peak.name,
            )
        )
        out.terms.append(dict(peak.terms))
    return out


# ---- what is shown -----------------------------------------------------------------------------------------------------------------


def _line(case: CaseMemory) -> str:
    if case.failure:
        return f"{case.name}: FAILED, {case.failure}"
    stages = ", ".join(
        f"{format_bytes(s.measured_bytes)} measured, {format_bytes(s.estimated_bytes)} promised ({s.error:+.1%})"
        for s in case.stages
    )
    return f"{case.name}: {stages}; {case.seconds:.0f} s"


def table(cases: Sequence[CaseMemory], *, bar: float = BAR) -> Table:
    """One row a pipeline stage."""
    missed = sum(stage_misses(case, bar=bar) for case in cases)
    made = Table(
        title=f"memory of {len(cases)} foldings, by pipeline stage: {missed} stages further off than {bar:.0%}"
    )
    for title in ("folding", "stage", "measured", "promised", "error", "fixed", "errors of its ranks", "promised peak"):
        right = title in ("measured", "promised", "error", "fixed")
        made.add_column(title, justify="right" if right else "left")
    for case in cases:
        if case.failure:
            made.add_row(case.name, "", "", "", "FAILED", "", case.failure, "")
        for stage in case.stages:
            share = f"{stage.fixed_bytes / stage.estimated_bytes:.0%}"
            sizes = [format_bytes(n) for n in (stage.measured_bytes, stage.estimated_bytes)]
            errors = " ".join(f"{r.error:+.0%}" for r in case.ranks if r.stage == stage.stage)
            made.add_row(case.name, str(stage.stage), *sizes, f"{stage.error:+.1%}", share, errors, stage.moment)
    return made


def stage_misses(case: CaseMemory, *, bar: float = BAR) -> int:
    """Stages of a case that are further off than the bar; one for a case without numbers."""
    return 1 if case.failure else sum(abs(stage.error) > bar for stage in case.stages)


def report(cases: Sequence[CaseMemory], *, bar: float = BAR) -> dict[str, Any]:
    """Report for JSON: every case with its stages and ranks, and whether the bar is met."""
    errors = [abs(stage.error) for case in cases for stage in case.stages]
    return {
        "bar": bar,
        "met": not any(stage_misses(case, bar=bar) for case in cases),
        "foldings": len(cases),
        "stages": len(errors),
        "worst": max(errors, default=None),
        "cases": [case.to_dict() for case in cases],
    }

"""`phalanx simulate RECIPE --cluster C --against RUN`: the program of the recipe on a clock, beside steps that a run of it has recorded, id by id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from phalanx.cli.trace import read_steps
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, DataError, Problem
from phalanx.core.files import write_json
from phalanx.core.recipe import Dtype, load_recipe
from phalanx.core.units import format_seconds
from phalanx.data.tokenizer import load_tokenizer
from phalanx.observe.lanes import RankStep, Recording, read_recording
from phalanx.plan.model import ModelSpec
from phalanx.plan.recipe import run_problems
from phalanx.simulate.compare_run import Comparison, Measured, RecordedStep, compare, table_of
from phalanx.simulate.from_recipe import resolve_recipe
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.program_cost import ProgramOracle
from phalanx.simulate.program_time import programs_hash, run_programs
from phalanx.simulate.recipe_program import RecipePrograms, oracle_of, programs_of_recipe

OUTSIDE = ("data",)
"""What a recorded step begins with, and is no operation of it."""


def against(
    recipe: Path, run: Path, cluster_name: str, overrides: Sequence[str], *, steps: str | None, learn: str | None,
    json_file: Path | None,
) -> int:  # fmt: skip
    """Print the comparison; 0. Raises `ConfigError` or `DataError` with what is wrong with recipe, run or cluster."""
    first, last = read_steps(steps)
    found = compare_with_run(recipe, run, cluster_name, overrides, steps=(first, last), learn=read_steps(learn))
    if json_file is not None:
        write_json(json_file, found.to_dict())
    print(describe(found))
    return 0


Steps = tuple[int | None, int | None]


def compare_with_run(
    recipe_file: Path,
    run: Path,
    cluster_name: str,
    overrides: Sequence[str],
    *,
    steps: Steps = (None, None),
    learn: Steps = (None, None),
) -> Comparison:
    """Prediction beside measurement. `learn`: recorded steps whose medians by kind come before the formulas; they are then not compared."""
    cluster = parse_cluster(cluster_name)
    recording = read_recording(run, first=steps[0], last=steps[1])
    world = len(recording.ranks)
    vocab = load_tokenizer(run / "tokenizer").vocab_size

    def check(given: Recipe) -> Sequence[Problem]:
        return run_problems(given, world=world, tokenizer_vocab=vocab)

    own = load_recipe(run / "recipe.toml")
    dtype = cast("Dtype", own.train.dtype)
    given = load_recipe(
        recipe_file, [*overrides, "--launch.ranks", str(world)], check=check, auto_dtype=lambda _: dtype
    )
    made, of_run = (_programs(r, vocab, world) for r in (given, own))
    _same(made, of_run)
    oracle, learned = oracle_of(given, cluster), set[int]()
    if learn != (None, None):
        before = read_recording(run, first=learn[0], last=learn[1])
        oracle = _learned(oracle, before)
        learned = set(before.steps)
    left = [step for step in recording.steps if step not in learned]
    if not left:
        rule, hint = "leaves no recorded step to compare", f"recorded are {recording.steps[0]} to {recording.steps[-1]}"
        raise DataError([Problem(where="--learn", value=sorted(learned), rule=rule, hint=hint)], subject="the run")
    timeline = run_programs(made.programs, made.folding, oracle.cost)
    return compare(timeline, [_measured(recording, s) for s in left], step_s=[_step_s(recording, s) for s in left])


def _programs(recipe: Recipe, vocab: int, world: int) -> RecipePrograms:
    spec: ModelSpec = resolve_recipe(recipe, tokenizer_vocab=vocab)
    return programs_of_recipe(recipe, spec, world=world)


def _same(made: RecipePrograms, of_run: RecipePrograms) -> None:
    """A prediction of other operations is none of this run."""
    predicted, ran = programs_hash(made.programs), programs_hash(of_run.programs)
    if predicted != ran:
        rule = f"has a step of other operations than the run (plan {predicted}, the run's {ran})"
        raise ConfigError([Problem(where="the recipe", value=None, rule=rule, hint="use the run's recipe.toml")],
                          subject="the comparison")  # fmt: skip


def _learned(oracle: ProgramOracle, recording: Recording) -> ProgramOracle:
    table = table_of([_measured(recording, step) for step in recording.steps])
    return ProgramOracle(
        hardware=oracle.hardware, precision=oracle.precision, seq_len=oracle.seq_len, table=table
    )  # fmt: skip


def _begin_s(step: RankStep) -> float:
    """When the step's own operations begin: behind the wait for data."""
    return max([step.begin_s, *(w.end_s for w in step.work if w.op_id in OUTSIDE)])


def _step_s(recording: Recording, step: int) -> float:
    """From when the last rank has its data to when the last has ended."""
    ranks = [steps[step] for steps in recording.ranks.values() if step in steps]
    return max(rank.end_s for rank in ranks) - max(_begin_s(rank) for rank in ranks)


def _measured(recording: Recording, step: int) -> RecordedStep:
    """One step of all ranks. What an id did in several pieces is added up."""
    found: dict[tuple[int, str], Measured] = {}
    for rank, steps in recording.ranks.items():
        if step not in steps:
            continue
        own = steps[step]
        begin = _begin_s(own)
        spans = [(w.op_id, w.begin_s, w.end_s - w.begin_s) for w in own.work if w.lane == "compute"]
        spans += [(m.op_id, m.begin_s, m.end_s - m.ready_s) for m in own.messages]
        for id, begin_s, seconds in spans:
            before = found.get((rank, id))
            at = begin_s - begin
            found[rank, id] = (
                Measured(at, seconds) if before is None else Measured(min(at, before.begin_s), before.seconds + seconds)
            )
    return found


def describe(c: Comparison) -> str:
    """The comparison as a person reads it."""
    lines = [
        f"plan {c.hash}, the same in both; {c.steps} recorded steps",
        f"step: predicted {format_seconds(c.predicted_s)} (error bar {c.sigma:.0%}), measured {format_seconds(c.measured_s)} ({c.error:+.1%})",
        f"ids: median error {c.median:.1%}, worst {c.worst:.1%} ({c.worst_id}); begins correlate at {c.begin_correlation:.4f}",
        f"{'kind':<36}{'ids':>6}{'predicted':>12}{'measured':>12}{'median':>9}{'worst':>9}",
    ]
    for k in c.kinds:
        errors = "".join(f"{'-' if e is None else f'{e:.1%}':>9}" for e in (k.median, k.worst))
        lines.append(
            f"{k.kind:<36}{k.count:>6}{format_seconds(k.predicted_s):>12}{format_seconds(k.measured_s):>12}{errors}"
        )
    for what, ids in (("predicted, not recorded", c.only_predicted), ("recorded, not predicted", c.only_measured)):
        if ids:
            lines.append(f"{what}: {len(ids)} ids, such as {ids[0]}")
    return "\n".join(lines)

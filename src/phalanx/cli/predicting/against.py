"""`phalanx simulate RECIPE --cluster C --against RUN`: the program of the recipe on a clock, beside steps and moves of state that a run of it has recorded, id by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from phalanx.cli.predicting.arguments import read_steps
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, DataError, PlanError, Problem
from phalanx.core.files import write_json
from phalanx.core.recipe import Dtype, load_recipe
from phalanx.core.units import format_bytes, format_seconds
from phalanx.data import load_tokenizer
from phalanx.observe.recorded import RankMove, RankStep, Recording, read_recording
from phalanx.plan import choose_recovery, equal_shares, run_problems
from phalanx.plan.mapping import Folding, resolve_mapping
from phalanx.plan.model import ModelSpec
from phalanx.plan.program import compare_id
from phalanx.plan.recovery import recovery_planner, wanted_ranks
from phalanx.simulate import resolve_recipe
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.program import (
    Comparison,
    MeasuredMove,
    MeasuredOp,
    MoveComparison,
    ProgramOracle,
    RecipePrograms,
    RecordedStep,
    compare_move,
    compare_steps,
    oracle_of,
    programs_hash,
    programs_of_recipe,
    run_programs,
    table_of,
)

OUTSIDE = ("data",)
"""What a recorded step begins with, and is no operation of it."""


Steps = tuple[int | None, int | None]


WRONG = 2
"""Exit status where something could not be compared that should be: as of the errors that end a command."""


@dataclass(frozen=True, kw_only=True)
class MoveLeft:
    """A recorded move that is not compared."""

    op_id: str
    step: int
    generation: int
    ranks: int
    why: str
    wrong: bool
    """Whether something is the matter with it; else there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """All that was compared."""

    steps: Comparison | None
    """None: no step could be."""
    why_not: str
    """Then why."""
    moves: tuple[MoveComparison, ...]
    moves_left: tuple[MoveLeft, ...] = ()

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return WRONG if any(left.wrong for left in self.moves_left) else 0

    def to_dict(self) -> dict[str, Any]:
        of_steps = {"steps": 0, "why_no_steps": self.why_not} if self.steps is None else self.steps.to_dict()
        moves = [move.to_dict() for move in self.moves]
        return {**of_steps, "moves": moves, "moves_not_compared": [vars(left) for left in self.moves_left]}


def against(
    recipe: Path, run: Path, cluster_name: str, overrides: Sequence[str], *, steps: str | None, learn: str | None,
    json_file: Path | None,
) -> int:  # fmt: skip
    """Print the comparison; `Against.status`. Raises `ConfigError` or `DataError` with what is wrong with recipe, run or cluster."""
    first, last = read_steps(steps)
    found = compare_with_run(recipe, run, cluster_name, overrides, steps=(first, last), learn=read_steps(learn))
    write_json(json_file, found.to_dict())
    print(describe(found))
    return found.status


def compare_with_run(
    recipe_file: Path,
    run: Path,
    cluster_name: str,
    overrides: Sequence[str],
    *,
    steps: Steps = (None, None),
    learn: Steps = (None, None),
) -> Against:
    """Prediction beside measurement. `learn`: recorded steps whose medians by kind come before the formulas; they are then not compared.

    Where the run recorded moves of state, they are compared too, and alone where its steps have no program. What is wrong with one of them ends neither the others nor the steps.
    """
    cluster = parse_cluster(cluster_name)
    recording = read_recording(run, first=steps[0], last=steps[1])
    own = load_recipe(run / "recipe.toml")
    world, ranks = (wanted_ranks(own), own.launch.ranks) if recording.is_elastic else (len(recording.ranks),) * 2
    vocab = load_tokenizer(run / "tokenizer").vocab_size

    def check(given: Recipe) -> Sequence[Problem]:
        return run_problems(given, world=world, tokenizer_vocab=vocab)

    dtype = cast("Dtype", own.train.dtype)
    given = load_recipe(
        recipe_file, [*overrides, "--launch.ranks", str(ranks)], check=check, auto_dtype=lambda _: dtype
    )
    own, given = (as_it_ran(recipe, is_elastic=recording.is_elastic) for recipe in (own, given))
    oracle = oracle_of(given, cluster)
    moves, left = _compare_moves(recording, given, vocab, oracle, world=world)
    try:
        made, of_run = (_programs(recipe, vocab, world) for recipe in (given, own))
        _same(made, of_run)
        found = _compare_steps(made, recording, run, oracle, learn=learn)
    except (ConfigError, DataError) as err:
        if not moves and not any(m.wrong for m in left):
            raise
        return Against(steps=None, why_not=str(err), moves=moves, moves_left=left)
    return Against(steps=found, why_not="", moves=moves, moves_left=left)


def as_it_ran(recipe: Recipe, *, is_elastic: bool) -> Recipe:
    """A run folder keeps the recipe as it was given: where that leaves elastic recovery open, what the run made of it."""
    return choose_recovery(recipe).recipe if is_elastic else recipe


def _compare_steps(
    made: RecipePrograms, recording: Recording, run: Path, oracle: ProgramOracle, *, learn: Steps
) -> Comparison:
    """Compares steps that all ranks of the mapping have recorded: an elastic run has others too."""
    learned = set[int]()
    if learn != (None, None):
        before = read_recording(run, first=learn[0], last=learn[1])
        oracle = _learned(oracle, before)
        learned = set(before.steps)
    world = len(made.programs)
    complete = [s for s in recording.steps if sum(s in steps for steps in recording.ranks.values()) == world]
    left = [step for step in complete if step not in learned]
    if not left:
        where, value = ("--learn", sorted(learned)) if learned else (str(run), None)
        rule = f"leaves no recorded step of all {world} ranks to compare"
        hint = f"recorded are {recording.steps[0]} to {recording.steps[-1]}"
        raise DataError.of(where, value, rule, hint, subject="the run")
    timeline = run_programs(made.programs, made.folding, oracle.cost)
    return compare_steps(
        timeline, [_measured(recording, s) for s in left], step_s=[_step_s(recording, s) for s in left]
    )


def _compare_moves(
    recording: Recording, recipe: Recipe, vocab: int, oracle: ProgramOracle, *, world: int
) -> tuple[tuple[MoveComparison, ...], tuple[MoveLeft, ...]]:
    """Each that can be, and why the others cannot."""
    moves, left = list[MoveComparison](), list[MoveLeft]()
    for ranks in recording.whole_moves.values():
        why, wrong = "one rank alone sends nothing", False
        if len(ranks) > 1:
            try:
                moves.append(_compare_move(ranks, recipe, vocab, oracle, world=world))
                continue
            except (ConfigError, DataError, PlanError) as err:
                why, wrong = "; ".join(map(str, err.problems)), True
        m = ranks[0]
        left.append(MoveLeft(op_id=m.op_id, step=m.step, generation=m.generation, ranks=m.world, why=why, wrong=wrong))
    return tuple(moves), tuple(left)


def _compare_move(
    ranks: Sequence[RankMove], recipe: Recipe, vocab: int, oracle: ProgramOracle, *, world: int
) -> MoveComparison:
    """`world`: ranks with which the run began."""
    spec, t = resolve_recipe(recipe, tokenizer_vocab=vocab), recipe.train
    folding = resolve_mapping(
        recipe.folding, spec, world=world, seq_len=t.seq_len, slots_per_rank=recipe.resilience.slots_per_rank,
        **equal_shares(recipe),
    )  # fmt: skip
    if not isinstance(folding, Folding):
        rule = "has stages with foldings of their own, which support neither elastic recovery nor replicas: the run that moved this is another"
        raise ConfigError.of("the recipe", None, rule, "use the run's recipe.toml", subject="the comparison")  # fmt: skip
    return compare_move(_measured_move(ranks), recovery_planner(recipe, spec, folding), oracle.cost)


def _measured_move(ranks: Sequence[RankMove]) -> MeasuredMove:
    """The move as two ranks or more measured it. Raises `DataError` where the log of one has lost how it began."""
    first, compared = ranks[0], compare_id(ranks[0].op_id)
    silent = [own.rank for own in ranks if all(m.op_id != compared for m in own.messages)]
    if silent:
        rule = f"has no {compared} of the move after step {first.step}, with which every rank begins"
        raise DataError.of(f"rank {silent[0]}", None, rule, subject="the run")
    began = {own.rank: min(m.begin_s for m in own.messages if m.op_id == compared) for own in ranks}
    told = {(own.rank, m.op_id): m for own in ranks for m in own.messages}
    return MeasuredMove(
        op_id=first.op_id,
        step=first.step,
        generation=first.generation,
        plan=first.plan,
        hosts=first.hosts,
        order=first.order,
        ranks=first.world,
        seconds=max(m.end_s for m in told.values()) - max(began.values()),
        messages={key: MeasuredOp(m.begin_s - began[key[0]], m.end_s - m.ready_s) for key, m in told.items()},
        sent_bytes={key: m.sent_bytes for key, m in told.items()},
    )


def _programs(recipe: Recipe, vocab: int, world: int) -> RecipePrograms:
    spec: ModelSpec = resolve_recipe(recipe, tokenizer_vocab=vocab)
    return programs_of_recipe(recipe, spec, world=world)


def _same(made: RecipePrograms, of_run: RecipePrograms) -> None:
    """A prediction of other operations is none of this run."""
    predicted, ran = programs_hash(made.programs), programs_hash(of_run.programs)
    if predicted != ran:
        rule = f"has a step of other operations than the run (plan {predicted}, the run's {ran})"
        raise ConfigError.of("the recipe", None, rule, "use the run's recipe.toml", subject="the comparison")  # fmt: skip


def _learned(oracle: ProgramOracle, recording: Recording) -> ProgramOracle:
    table = table_of([_measured(recording, step) for step in recording.steps])
    return ProgramOracle(
        hardware=oracle.hardware, precision=oracle.precision, seq_len=oracle.seq_len, table=table
    )  # fmt: skip


def _begin_s(step: RankStep) -> float:
    """When the step's own operations begin: behind the wait for data."""
    return max([step.begin_s, *(w.end_s for w in step.work if w.op_id in OUTSIDE)])


def _step_s(recording: Recording, step: int) -> float:
    """Seconds from when the last rank has its data to when the last has ended, including what publishes the parameters later."""
    ranks = [steps[step] for steps in recording.ranks.values() if step in steps]
    return max(rank.end_s + rank.published_s for rank in ranks) - max(_begin_s(rank) for rank in ranks)


def _measured(recording: Recording, step: int) -> RecordedStep:
    """One step of all ranks. What an id did in several pieces is added up."""
    found: dict[tuple[int, str], MeasuredOp] = {}
    for steps in recording.ranks.values():
        if step not in steps:
            continue
        own, rank = steps[step], steps[step].rank
        begin = _begin_s(own)
        spans = [(w.op_id, w.begin_s, w.end_s - w.begin_s) for w in own.work if w.lane == "compute"]
        spans += [(m.op_id, m.begin_s, m.end_s - m.ready_s) for m in own.messages]
        for id, begin_s, seconds in spans:
            before = found.get((rank, id))
            at = begin_s - begin
            found[rank, id] = (
                MeasuredOp(at, seconds)
                if before is None
                else MeasuredOp(min(at, before.begin_s), before.seconds + seconds)
            )
    return found


def describe(found: Against) -> str:
    """The comparison as a person reads it."""
    lines = [f"steps are not compared: {found.why_not}"] if found.steps is None else _of_steps(found.steps)
    for move in found.moves:
        lines += _of_move(move)
    for left in found.moves_left:
        who = "1 rank" if left.ranks == 1 else f"{left.ranks} ranks"
        lines.append(f"move {left.op_id} after step {left.step}, {who}, is not compared: {left.why}")
    return "\n".join(lines)


def _of_steps(c: Comparison) -> list[str]:
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
    return [*lines, *_alone(c)]


def _of_move(move: MoveComparison) -> list[str]:
    c, (predicted, measured) = move.found, move.sent_bytes
    told = "" if predicted == measured else f", {format_bytes(predicted)} predicted"
    lines = [
        f"move {move.op_id} after step {move.step}, {move.ranks} ranks, plan {c.hash}, the same in both: {move.messages} messages, {format_bytes(measured)}{told}",
        f"  predicted {format_seconds(c.predicted_s)}, measured {format_seconds(c.measured_s)} ({c.error:+.1%}); "
        f"ids: median error {c.median:.1%}, worst {c.worst:.1%} ({c.worst_id})",
    ]
    if move.other_bytes:
        lines.append(f"  of other bytes: {len(move.other_bytes)} ids, such as {move.other_bytes[0]}")
    return [*lines, *(f"  {line}" for line in _alone(c))]


def _alone(c: Comparison) -> list[str]:
    """What only one side has."""
    sides = (("predicted, not recorded", c.only_predicted), ("recorded, not predicted", c.only_measured))
    return [f"{what}: {len(ids)} ids, such as {ids[0]}" for what, ids in sides if ids]

"""The program of a run on a clock beside what the run recorded: matched by id, summed by kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from program_help import Run
from test_program_work import programs
from train_help import phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.program.ops import Op
from phalanx.simulate.from_recipe import resolve_recipe
from phalanx.simulate.hardware.clusters import load_hardware, parse_cluster
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import ProgramTimeline, run_programs
from phalanx.simulate.program.compare_run import MeasuredOp, compare_steps, table_of
from phalanx.simulate.program.cost import ProgramOracle, kind_of
from phalanx.simulate.program.recipe import oracle_of, programs_of_recipe


@pytest.mark.parametrize(
    ("id", "kind"),
    [
        ("mb3.L2.fwd.dispatch.rows", "fwd.dispatch.rows"),
        ("mb3.L12.bwd.dispatch.chunk2.rows", "bwd.dispatch.chunk.rows"),
        ("mb3.L2.fwd.attention.ring.1", "fwd.attention.ring"),
        ("mb3.bwd.boundary1", "bwd.boundary"),
        ("mb3.fwd.skip0to3", "fwd.skip"),
        ("gradient/expert/edp", "gradient/expert/edp"),
        ("vote", "vote"),
    ],
)
@pytest.mark.unit
def test_kinds(id: str, kind: str) -> None:
    assert kind_of(id) == kind


def timeline(seconds: float = 1.0) -> ProgramTimeline:
    run = Run(folding=Folding(world=2, ep=2))

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        return Cost(seconds if op.kind == "compute" else seconds / 2, 0.1, "given")

    return run_programs(programs(run), run.folding, cost)


@pytest.mark.unit
def test_a_step_that_went_as_predicted_has_no_error() -> None:
    predicted, twice = timeline(), timeline(2.0)
    step = {key: MeasuredOp(s.begin_s, s.seconds) for key, s in predicted.by_id.items()}
    same = compare_steps(predicted, [step], step_s=[predicted.seconds])
    assert same.error == same.median == same.worst == 0.0 and same.begin_correlation == pytest.approx(1.0)
    assert same.only_measured == same.only_predicted == ()
    wrong = compare_steps(twice, [step, step, step], step_s=[predicted.seconds] * 3)
    assert wrong.error == wrong.median == wrong.worst == pytest.approx(1.0)
    assert all(kind.predicted_s == pytest.approx(2 * kind.measured_s) for kind in wrong.kinds)


@pytest.mark.unit
def test_what_only_one_side_has_is_told() -> None:
    predicted = timeline()
    step = {key: MeasuredOp(s.begin_s, s.seconds) for key, s in predicted.by_id.items() if key[1] != "vote"}
    found = compare_steps(predicted, [{**step, (0, "mb0.dance"): MeasuredOp(0.0, 1.0)}], step_s=[1.0])
    assert found.only_predicted == ("vote",) and found.only_measured == ("mb0.dance",)


@pytest.mark.unit
def test_a_measured_table_comes_before_the_formulas() -> None:
    steps = [{(rank, f"mb{mb}.L0.fwd.experts"): MeasuredOp(0.0, 1.0 + rank) for rank in (0, 1, 2) for mb in (0, 1)}]
    table = table_of(steps)
    assert table == {"fwd.experts": 2.0}
    op = next(op for op in programs(Run(folding=Folding(world=2, ep=2)))[0].ops if op.id == "mb0.L0.fwd.experts")
    hardware = load_hardware("h100")
    assert ProgramOracle(hardware=hardware, table=table).cost(op, (0,)).origin == "measured"
    formula = ProgramOracle(hardware=hardware).cost(op, (0,))
    assert formula.origin == "formula" and 0 < formula.seconds < 1 and formula.sigma > 0


@pytest.mark.unit
def test_a_machines_tables_of_products_come_before_the_formula() -> None:
    """A program's products are looked up: forward the matrix as it is, backward its two gradients."""
    made = programs(Run(folding=Folding(world=2, ep=2)))[0].ops
    hardware = load_hardware("h100")
    for name, table in (("mb0.L0.{}.attention.out", "measured_gemm"), ("mb0.L0.{}.experts", "measured_experts")):
        forward, backward = (next(op for op in made if op.id == name.format(phase)) for phase in ("fwd", "bwd"))
        (rows, n, k, groups), *others = forward.products
        seconds = 10 * ProgramOracle(hardware=hardware).cost(forward, (0,)).seconds
        row = (rows, n, k, seconds) if groups == 1 else (rows, others[0][2], k, groups, seconds)
        known = ProgramOracle(hardware=dataclasses.replace(hardware, **{table: (tuple(row),)}))  # type: ignore[arg-type]
        plain = ProgramOracle(hardware=hardware)
        assert known.cost(forward, (0,)).origin in ("measured", "near a measurement")
        assert known.cost(forward, (0,)).seconds > plain.cost(forward, (0,)).seconds
        assert plain.cost(backward, (0,)).seconds > 1.5 * plain.cost(forward, (0,)).seconds


@pytest.mark.unit
def test_programs_of_a_recipe_on_a_cluster() -> None:
    settings = ["--model.preset", "laptop", "--model.vocab", "512", "--launch.ranks", "4", "--train.global_batch", "16"]
    recipe = load_recipe(None, [*settings, "--train.micro_batch", "2", "--folding.ep", "4"])
    made = programs_of_recipe(recipe, resolve_recipe(recipe), world=4)
    divided = dataclasses.replace(recipe, dispatch=dataclasses.replace(recipe.dispatch, overlap="fine", left_free=16))
    assert len(programs_of_recipe(divided, resolve_recipe(divided), world=4).programs) == 4
    cluster = parse_cluster("h100x4")
    found = run_programs(made.programs, made.folding, oracle_of(recipe, cluster).cost)
    assert len(made.programs) == 4 and 0 < found.seconds < 1 and found.sigma > 0
    wide = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, dtype="float32"))
    slower = run_programs(
        programs_of_recipe(wide, resolve_recipe(wide), world=4).programs, made.folding, oracle_of(wide, cluster).cost
    )
    assert slower.seconds > found.seconds
    silent = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, fp32_flops_per_s=None))
    with pytest.raises(ConfigError, match="phalanx calibrate"):
        oracle_of(wide, silent)


@pytest.mark.unit
def test_stages_with_foldings_of_their_own_on_a_cluster() -> None:
    settings = ["--model.preset", "laptop", "--model.vocab", "512", "--launch.ranks", "4", "--train.global_batch", "16"]
    recipe = load_recipe(None, [*settings, "--train.micro_batch", "2", "--folding.stages", '["tp2", "dp2.ep2"]'])
    made = programs_of_recipe(recipe, resolve_recipe(recipe), world=4)
    found = run_programs(made.programs, made.folding, oracle_of(recipe, parse_cluster("h100x4")).cost)
    sends = [op for op in made.programs[0].ops if "fwd.boundary" in op.id and op.sends_to is not None]
    # rank 0 has half of each sequence (tp 2); the stage above has whole sequences: one message to each of its ranks
    assert sends and all(len(op.peers) == 2 for op in sends) and 0 < found.seconds < 1
    spec, t = resolve_recipe(recipe), recipe.train
    assert sum(op.sent_bytes for op in sends) == t.global_batch * t.seq_len // 2 * spec.hidden * 2


@pytest.mark.unit
def test_what_has_no_program_is_told_at_once() -> None:
    base = Recipe()
    recipe = dataclasses.replace(
        base,
        pipeline=dataclasses.replace(base.pipeline, pair_passes=True),
        train=dataclasses.replace(base.train, dtype="float64"),
        resilience=dataclasses.replace(base.resilience, slots_per_rank=2, mode="exact"),
    )
    with pytest.raises(ConfigError) as caught:
        programs_of_recipe(recipe, resolve_recipe(recipe, tokenizer_vocab=512), world=2)
    assert all(
        word in str(caught.value) for word in ("pair_passes", "slots_per_rank", "train.dtype", "resilience.mode")
    )


@pytest.mark.unit
def test_arguments_of_the_other_way_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text("")
    plain = ["simulate", str(tmp_path / "r.toml"), "--cluster", "h100x2"]
    assert main([*plain, "--steps", "3", "--learn", "2"]) == 2
    told = capsys.readouterr().err
    assert "--steps" in told and "--learn" in told and "without --against" in told
    assert main([*plain, "--against", str(tmp_path), "--svg", str(tmp_path / "x.svg")]) == 2
    assert "has no effect with --against" in capsys.readouterr().err


# ---- real ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_recorded_run_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "text", files=3)
    done = phalanx("train", *train_args(
        tmp_path, launch__ranks=2, launch__threads=1, folding__ep=2, train__steps=4, train__global_batch=8,
        train__micro_batch=2, train__dtype="bfloat16", checkpoint__interval=0, observe__trace_steps="[2, 4]",
    ))  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    recipe, file = str(run / "recipe.toml"), tmp_path / "found.json"
    how = ["simulate", recipe, "--cluster", "h100x2", "--against", str(run)]
    assert main([*how, "--learn", "2:3", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["hash"]["predicted"] == found["hash"]["measured"] and found["steps"] == 1
    assert found["only_predicted"] == found["only_measured"] == []
    assert found["begin_correlation"] > 0.9 and {kind["kind"] for kind in found["kinds"]} >= {"fwd.experts", "vote"}
    assert main([*how, "--train.recompute", "full"]) == 2
    assert "other operations than the run" in capsys.readouterr().err
    assert main([*how, "--learn", "2:4"]) == 2
    assert "leaves no recorded step" in capsys.readouterr().err

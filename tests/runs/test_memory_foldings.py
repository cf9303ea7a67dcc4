"""Memory of a step's passes by the order of its schedule, what a router is assumed to do to ranks with replicas, and `phalanx bench memory --foldings`."""

import dataclasses
import math
import multiprocessing
from pathlib import Path

import pytest
from memory_help import bench, local_of, small_recipe, small_spec

from phalanx.core.config import PipelineConfig, Recipe
from phalanx.core.errors import ConfigError
from phalanx.kernels.ops import block_attention
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.runtime.pipeline import boundary
from phalanx.simulate.memory import activations as act, kernel_facts as facts
from phalanx.simulate.memory.balance import expected_balance, most_uneven, plain_shares
from phalanx.simulate.memory.passes import RankPasses, pass_moments
from phalanx_lab.bench.memory import ranks as memory_ranks
from phalanx_lab.bench.memory.foldings import (
    CASES,
    CaseMemory,
    FoldingCase,
    MeasuredStageMemory,
    chosen,
    report,
    run_cases,
    stage_misses,
)

SPEC = small_spec(num_layers=8)


def test_mirrored_constants_are_those_of_the_runtime() -> None:
    assert (facts.LEAST_OPEN, facts.MAX_QUERIES) == (boundary.LEAST_OPEN, block_attention.MAX_QUERIES)


# ---- passes by their order


def passes(schedule: str, place: int, *, pp: int = 4, microbatches: int = 8, virtual: int | None = None) -> RankPasses:
    pipeline = make_pipeline(PipelineConfig(schedule=schedule, virtual=virtual), SPEC, pp=pp, seq_len=64)  # type: ignore[arg-type]
    plan = pipeline.plan(microbatches)
    return RankPasses(
        x=local_of(small_recipe(), SPEC),
        stages=pipeline.stages.of_rank(place),
        order=plan.schedule.actions[place],
        max_live=plan.schedule.max_live[place],
        puts_off=pipeline.splits_backward,
        in_pairs=False,
        rank_of_stage=plan.schedule.rank_of_stage,
    )


def micro_batches_held(run: RankPasses) -> int:
    """Micro-batches of one stage without embedding and head that its backward pass finds, its own included, from the bytes."""
    (stage,) = run.stages
    every = sum(n for i in stage.layers for n in act.kept_layer(run.x, i)) + sum(act.kept_table(run.x))
    moment = next(m for m in pass_moments(run) if m.name == f"backward, layer {stage.layers[-1]}, experts")
    return (sum(moment.kept) - sum(under_way(run))) // every


def under_way(run: RankPasses) -> list[int]:
    stream = run.x.stream()
    return [stream] * (max(facts.LEAST_OPEN, run.max_live) + 2)


def test_each_place_of_1f1b_holds_one_micro_batch_less() -> None:
    """And GPipe holds all of them everywhere."""
    assert [micro_batches_held(passes("1f1b", place)) for place in (1, 2)] == [3, 2]
    assert [micro_batches_held(passes("gpipe", place)) for place in (1, 2)] == [8, 8]


def peak(run: RankPasses) -> int:
    return max(sum(m.kept) + sum(m.working) for m in pass_moments(run))


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved_1f1b", 2), ("zbv", None), ("dualpipev", None)])
def test_virtual_stages_are_counted_each_by_itself(schedule: str, virtual: int | None) -> None:
    """Of every stage there are moments, named so; what is held follows the order: never more than the schedule's promise of whole stages."""
    run = passes(schedule, 1, pp=2, virtual=virtual)
    names = {m.name.split(":")[0] for m in pass_moments(run)}
    assert names == {f"stage {stage.index}" for stage in run.stages}
    most = max(
        sum(n for i in s.layers for n in act.kept_layer(run.x, i)) + sum(act.kept_table(run.x)) for s in run.stages
    )
    ends = sum(act.kept_norm(run.x)) + sum(act.kept_loss(run.x))
    held = max(sum(m.kept) for m in pass_moments(run) if "forward" in m.name) - sum(under_way(run))
    assert 0 < held <= run.max_live * (most + ends)


def test_put_off_weight_gradients_keep_their_inputs() -> None:
    """Zero bubble takes more than 1F1B with as many micro-batches in flight: rows, gradients of outputs, first projections."""
    plain, split = passes("1f1b", 1), passes("zero_bubble", 1)
    assert peak(split) > peak(plain)
    assert not any("weight gradients" in m.name for m in pass_moments(plain))
    owed = next(m for m in pass_moments(split) if m.name == "weight gradients")
    layers = [i for stage in split.stages for i in stage.layers]
    assert sum(owed.kept) >= sum(n for i in layers for n in act.owed_layer(split.x, i))


def test_one_place_has_nothing_under_way() -> None:
    run = passes("1f1b", 0, pp=1, microbatches=2)
    head = next(m for m in pass_moments(run) if m.name == "forward, the head")
    every = sum(n for i in range(SPEC.num_layers) for n in act.kept_layer(run.x, i))
    assert sum(head.kept) == every + sum(act.kept_table(run.x)) + sum(act.kept_norm(run.x))


# ---- what axes add


def with_folding(**degrees: int) -> act.Local:
    x = local_of(small_recipe(seq_len=256), small_spec())
    return dataclasses.replace(x, folding=Folding(world=4, **degrees))


def test_tensor_parallel_layers_keep_the_rows_of_their_group() -> None:
    """Streams and norms are divided by tp; the inputs of split weights are not."""
    one, two = with_folding(), with_folding(tp=2)
    assert two.stream() * 2 == one.stream() and two.gathered() == one.gathered()
    assert sum(act.kept_attention(two)) > sum(act.kept_attention(one)) / 2


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_the_way_back_of_shared_sequences(method: str) -> None:
    """Gathered keys of all ranks take more than a ring's, on 4 ranks; Ulysses keeps a second output."""
    x = dataclasses.replace(with_folding(cp=4), cp_method=method)  # type: ignore[arg-type]
    plain = dataclasses.replace(with_folding(cp=4), cp_method="ring")
    assert (sum(act.kept_attention(x)) > sum(act.kept_attention(plain))) == (method == "ulysses")
    if method == "all_gather":
        assert sum(act.attention_backward(x)) > sum(act.attention_backward(plain))


# ---- routing


def test_chance_of_a_rank_follows_from_what_it_holds() -> None:
    """Without replicas (EP - 1) / K, less for draws without replacement; halves of twice as many experts vary less."""
    spec, folding = small_spec(), Folding(world=4, ep=4)
    plain = expected_balance(small_recipe(), spec, folding, num_layers=1)
    assert plain.later == pytest.approx(1 + math.sqrt(3 / 2 * 6 / 7))
    halves = [0.5] * 4 + [0.0] * 4
    spread = expected_balance(small_recipe(), spec, folding, num_layers=1, shares=[halves])
    assert 1.0 < spread.later < plain.later
    assert most_uneven(spec, folding, halves) == 2.0 < most_uneven(spec, folding, plain_shares(spec, folding))
    more = expected_balance(small_recipe(), spec, folding, num_layers=1, shares=[[1.0, 1.0, 0.5] + [0.0] * 5])
    assert more.later > plain.later  # five quarters of an even share, before chance


def test_one_layer_varies_more_than_four() -> None:
    spec, folding = small_spec(), Folding(world=4, ep=4)
    one, four = (expected_balance(small_recipe(), spec, folding, num_layers=n).later for n in (1, 4))
    assert one - 1 == pytest.approx(2 * (four - 1))


# ---- the command


def test_every_case_can_run_and_meets_what_the_bench_is_for() -> None:
    """Names differ; all axes, schedules, ways and modes that the table promises are there."""
    assert len({case.name for case in CASES}) == len(CASES) >= 24
    recipes = [case.recipe() for case in CASES]
    assert {r.launch.ranks for r in recipes} == {2, 4}
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        assert any(getattr(r.folding, axis) not in (None, 1) for r in recipes), axis
    assert {r.train.recompute for r in recipes} == {"none", "selective", "full"}
    assert {r.resilience.mode for r in recipes} == {"off", "fast", "exact"}
    assert {r.folding.cp_method for r in recipes} == {"ring", "all_gather", "ulysses"}
    assert len({r.pipeline.schedule for r in recipes}) >= 5
    assert any(r.resilience.heal and r.resilience.f == 2 for r in recipes)
    assert any(r.resilience.slots_per_rank for r in recipes) and {r.optim.zero for r in recipes} == {0, 1}


def test_parts_are_all_of_it_once() -> None:
    assert sorted(c.name for i in (1, 2, 3) for c in chosen(part=f"{i}/3", only=None)) == sorted(c.name for c in CASES)
    assert [c.name for c in chosen(part=None, only="gpipe")] == ["pp2 tp2, gpipe"]
    with pytest.raises(ConfigError) as caught:
        chosen(part="4/3", only="no such case")
    assert "--part" in str(caught.value) and "--only" in str(caught.value) and "gpipe" in str(caught.value)


def stage(error: float) -> MeasuredStageMemory:
    return MeasuredStageMemory(
        stage=0, measured_bytes=1000, estimated_bytes=round(1000 * (1 + error)), fixed_bytes=100, moment=""
    )


def test_one_stage_that_is_off_fails_the_whole() -> None:
    """A good stage beside it makes nothing better, nor does one that is off the other way; a case without numbers misses."""
    good, bad = (CaseMemory(name=n, settings=()) for n in ("good", "bad"))
    good.stages, bad.stages = [stage(0.09), stage(-0.1)], [stage(0.2), stage(-0.2)]
    assert (stage_misses(good), stage_misses(bad)) == (0, 2)
    assert report([good])["met"] and not report([good, bad])["met"]
    broken = CaseMemory(name="broken", settings=(), failure="no")
    assert stage_misses(broken) == 1 and not report([good, broken])["met"]


def test_a_case_that_cannot_run_says_so_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"folding\.tp"):
        run_cases([FoldingCase(name="none", settings=("folding.tp=3",))])


@pytest.mark.ranks
@pytest.mark.slow
def test_two_foldings_in_small(tmp_path: Path) -> None:
    """Experts on two ranks, and a pipeline with a V of stages: each stage within 10 % of what it took."""
    more = [
        "--train.global_batch=8",
        "--train.micro_batch=4",
        "--train.dtype=float32",
        "--train.steps=2",
    ]
    result = bench(tmp_path, "--foldings", "--only", "2 ranks, ", *more)
    assert result["met"]
    assert result["foldings"] == 3 and result["stages"] == 4 and result["worst"] <= 0.1


def test_options_that_mean_nothing_are_errors(tmp_path: Path) -> None:
    from phalanx_lab.bench.memory.command import main

    with pytest.raises(ConfigError) as caught:
        main(["--part", "1/2", "--only", "x", "--tolerance", "-1"])
    assert all(word in str(caught.value) for word in ("--part", "--only", "--tolerance", "without --foldings"))


def test_an_interrupted_preparation_leaves_the_telling_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal sends Ctrl-C to both."""

    def interrupted(data: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_ranks, "prepare", interrupted)
    mine, theirs = multiprocessing.Pipe()
    memory_ranks._prepare_in_child(Recipe(), theirs)
    assert not mine.poll()

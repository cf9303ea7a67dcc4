"""Stages with foldings of their own on a cluster: equal stages are the plain pipeline, and each stage is that of a plain pipeline at its place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from step_without_clock import step_without_clock

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.plan.mapping.stage_foldings import parse_stages
from phalanx.plan.pipeline.schedule.clock import chain
from phalanx.plan.recipe import run_problems
from phalanx.simulate.failures.slow_step import with_stragglers
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.hardware.collectives import Network, span_of
from phalanx.simulate.hardware.cost import Oracle
from phalanx.simulate.mapping.mapping import Mapping
from phalanx.simulate.mapping.slow_ranks import Stragglers, islands_of, paces
from phalanx.simulate.mapping.stage_mappings import StagedMapping
from phalanx.simulate.step.device_memory import parameters_of_rank
from phalanx.simulate.step.replicas import ReplicaTraffic
from phalanx.simulate.step.stage_layers import contents
from phalanx.simulate.step.timing import Prediction, pass_costs, predict
from phalanx.simulate.step.transfers import edge_seconds

pytestmark = pytest.mark.unit
TEXT = """
model = { preset = "qwen3-30b-a3b", vocab = 151936 }
router = { force = "balanced" }
train = { seq_len = 4096, global_batch = 256, micro_batch = 1 }
launch = { device = "cuda" }
"""
PLAIN = {"folding.tp": 2, "folding.ep": 8, "folding.pp": 4}
EQUAL = {"folding.stages": ["tp2.dp8.ep8"] * 4}
HALF = {"folding.tp": 2, "folding.ep": 8, "folding.pp": 2}


def read(tmp_path: Path, changes: dict[str, object], *, world: int = 64) -> Recipe:
    path = tmp_path / "r.toml"
    path.write_text(TEXT)
    settings = {**changes, "launch.ranks": world}
    words = [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    return load_recipe(path, words, check=lambda r: run_problems(r, world=world, tokenizer_vocab=r.model.vocab))


def predicted(tmp_path: Path, changes: dict[str, object], *, world: int = 64) -> Prediction:
    recipe, cluster = read(tmp_path, changes, world=world), parse_cluster(f"h100x{world}")
    spec = resolve_recipe(recipe)
    mapping = mapping_of_recipe(recipe, spec, world=world, cluster=cluster)
    return predict(job_of_recipe(recipe, spec), mapping, cluster)


def edges(p: Prediction) -> dict[tuple[int, int], float]:
    assert isinstance(p.mapping, StagedMapping)
    return edge_seconds(p.job, p.mapping, Network(p.cluster.hardware), tuple(range(p.mapping.folding.pp)))


# ---- equal stages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual": 2},
        {"pipeline.schedule": "eager_1f1b", "pipeline.extra_warmup": "auto"},
        {"pipeline.schedule": "zero_bubble"},
        {"pipeline.schedule": "zbv"},
        {"pipeline.layers": [10, 14, 14, 10]},
        {"optim.zero": 0},
        {"optim.bucket_mb": 0},
        {"dispatch.overlap": "coarse:2"},
        {"train.recompute": "full"},
        {"router.force": "none"},
    ],
)
def test_equal_stages_are_the_plain_pipeline(tmp_path: Path, changes: dict[str, object]) -> None:
    plain, staged = (predicted(tmp_path, {**mapping, **changes}) for mapping in (PLAIN, EQUAL))
    assert isinstance(staged.mapping, StagedMapping)
    assert staged.memory == plain.memory
    assert staged.step.parts == pytest.approx(plain.step.parts, rel=1e-12)
    for name in ("seconds", "p10", "p90", "hidden_s", "microbatches", "forward_s", "backward_s", "busy_s"):
        assert getattr(staged.step, name) == pytest.approx(getattr(plain.step, name), rel=1e-12)


@pytest.mark.parametrize(("world", "pp"), [(8, 2), (16, 4), (24, 6), (48, 4)])
@pytest.mark.parametrize(
    "way", [{}, {"pipeline.schedule": "zbv"}, {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual": 2}]
)
def test_edges_of_stages_smaller_than_a_host_lie_where_the_ranks_do(
    tmp_path: Path, world: int, pp: int, way: dict[str, object]
) -> None:
    """4 ranks a stage: every second edge crosses from one host of 8 to the next; 12 ranks a stage: all do."""
    stage, more = world // pp, {**way, "train.global_batch": 48}
    plain = predicted(tmp_path, {**more, "folding.ep": 4, "folding.pp": pp}, world=world)
    staged = predicted(tmp_path, {**more, "folding.stages": [f"dp{stage}.ep4"] * pp}, world=world)
    assert staged.step.parts == pytest.approx(plain.step.parts, rel=1e-12)
    assert staged.step.seconds == pytest.approx(plain.step.seconds, rel=1e-12)
    costs = pass_costs(plain.job, plain.mapping, plain.cluster)
    edges = {edge: costs.transfer_s(edge) for edge in chain(len(costs.forward))}
    assert (len(set(edges.values())) > 1) == (world in (16, 24)), edges


def test_where_the_first_rank_is_not_the_last_to_end_whoever_is_latest_counts(tmp_path: Path) -> None:
    """A V-shaped schedule ends on all ranks at about the same time: a rank that exchanges more than the first is waited for."""
    p = predicted(tmp_path, {**PLAIN, "pipeline.schedule": "zbv"})
    assert isinstance(p.mapping, Mapping)
    replicas, content = ReplicaTraffic(p.job, p.mapping, Network(p.cluster.hardware)), contents(p.job, p.mapping)[0]
    held = [p.step.passes[0], p.step.passes[-1]]
    first = replicas.exposed(
        parameters_of_rank(p.job, p.mapping, content),
        forward=sum(stage.seconds[0] for stage in held),
        backward=sum(stage.weight_grad for stage in held),
        layers=content.layers,
        passes=p.step.microbatches,
    )
    first += replicas.optimizer(parameters_of_rank(p.job, p.mapping, content), Oracle(p.cluster.hardware, "bf16"))
    quick = step_without_clock(p.job, p.mapping, p.cluster)  # without a clock
    clocked, closed = (step.parts["dp"] + step.parts["optimizer"] for step in (p.step, quick))
    assert min(clocked, closed) > 1.01 * first
    assert closed == pytest.approx(clocked, rel=0.05)


# ---- unequal stages -------------------------------------------------------------------------------------------------------------


def test_each_stage_is_that_of_a_plain_pipeline(tmp_path: Path) -> None:
    """8 pipelines: the first stage shares a micro-batch of 2 sequences among 2 ranks, the second has both of them on 4."""
    staged = predicted(tmp_path, {"folding.stages": ["tp2.dp16.ep8", "tp4.dp8.ep8"], "train.micro_batch": 2})
    first = predicted(tmp_path, HALF)
    second = predicted(tmp_path, {**HALF, "folding.tp": 4, "train.micro_batch": 2})
    assert staged.step.passes == (first.step.passes[0], second.step.passes[1])
    assert staged.memory == (first.memory[0], second.memory[1])
    assert staged.step.busy_s == (first.step.busy_s[0], second.step.busy_s[1])
    assert staged.step.microbatches == first.step.microbatches == second.step.microbatches
    assert staged.step.seconds == pytest.approx(sum(staged.step.parts.values()))
    assert staged.step.seconds > max(staged.step.busy_s)
    assert staged.step.parts["dp"] == pytest.approx(first.step.parts["dp"])  # the first stage is the last to end


@pytest.mark.parametrize("ep", [8, 16])
def test_gradients_of_a_stage_go_over_its_own_replicas(tmp_path: Path, ep: int) -> None:
    """Nearly all layers are on the second stage, so it is the latest: it ends a backward pass of the first stage sooner, and begins a forward pass later."""
    way = {"pipeline.layers": [2, 46], "optim.bucket_mb": 0}
    p = predicted(tmp_path, {"folding.stages": ["tp2.dp16.ep8", f"tp2.dp16.ep{ep}"], **way})
    alone = predicted(tmp_path, {**HALF, **way, "folding.ep": ep}).mapping
    assert isinstance(alone, Mapping)
    own = parameters_of_rank(p.job, alone, contents(p.job, alone)[1])
    gather, reduce = ReplicaTraffic(p.job, alone, Network(p.cluster.hardware)).traffic(own)
    forward, backward = (seconds + edges(p)[0, 1] for seconds in p.step.passes[0].seconds)
    assert reduce > backward and gather > forward
    assert p.step.parts["dp"] == pytest.approx(reduce - backward + gather - forward)


def test_fewer_ranks_for_a_stage_make_it_the_slow_one(tmp_path: Path) -> None:
    few = {"train.global_batch": 252, "train.micro_batch": 7}
    staged = predicted(tmp_path, {"folding.stages": ["tp2.dp4.ep8", "tp2.dp28.ep8"], **few})
    assert staged.step.busy_s[0] > 5 * staged.step.busy_s[1]
    assert staged.memory[0].total > staged.memory[1].total
    assert not staged.fits


# ---- what crosses ---------------------------------------------------------------------------------------------------------------


def test_an_edge_takes_what_its_busiest_rank_sends(tmp_path: Path) -> None:
    """Ranks 0-3 to 4-11 on hosts of 8: ranks 2 and 3 send all that they have to the second host."""
    p = predicted(tmp_path, {"folding.stages": ["tp4.ep4", "tp8.ep8"], "train.global_batch": 8}, world=12)
    network, held = Network(p.cluster.hardware), 4096 // 4 * 2048 * 2
    assert edges(p)[0, 1] == network.send(held, between=True)


def test_edges_inside_and_between_hosts(tmp_path: Path) -> None:
    """Three stages on 4 ranks each: the first two share a host."""
    p = predicted(tmp_path, {"folding.stages": ["tp4.ep4"] * 3, "train.global_batch": 8}, world=12)
    network, held = Network(p.cluster.hardware), 4096 // 4 * 2048 * 2
    assert edges(p) == {(0, 1): network.send(held, between=False), (1, 2): network.send(held, between=True)}


def test_what_every_rank_sends_is_the_whole_activation(tmp_path: Path) -> None:
    """From one rank to 4 on its host: all of it leaves the one, a quarter reaches each."""
    p = predicted(tmp_path, {"folding.stages": ["tp1", "tp4.ep4"], "train.global_batch": 8}, world=5)
    assert edges(p)[0, 1] == Network(p.cluster.hardware).send(4096 * 2048 * 2, between=False)


def test_groups_that_begin_in_the_middle_of_a_host() -> None:
    """Against every group of the stage, counted."""
    for first in range(12):
        for size, stride, world in ((8, 1, 16), (4, 2, 24), (2, 8, 16), (4, 4, 16), (5, 1, 15), (3, 2, 12), (6, 4, 24)):
            starts = [b + at for b in range(0, world, size * stride) for at in range(stride)]
            counted = max(len({(first + s + i * stride) // 8 for i in range(size)}) for s in starts)
            span = span_of(size, stride, ranks_per_host=8, first=first, world=world)
            plain = span_of(size, stride, ranks_per_host=8)
            assert span.hosts == (plain.hosts if first % 8 == 0 else max(counted, plain.hosts))
            assert span.size >= size
    assert span_of(8, 1, ranks_per_host=8, first=4, world=16).inside == 4


def test_a_stage_in_the_middle_of_a_host_exchanges_rows_between_hosts(tmp_path: Path) -> None:
    stages, way = ["tp2.dp4.ep8", "tp2.dp4.ep8"], {"train.global_batch": 16}
    aligned = predicted(tmp_path, {"folding.stages": stages, **way}, world=16)
    shifted = predicted(tmp_path, {"folding.stages": ["tp2.dp2.ep4", *stages], "train.micro_batch": 2, **way}, world=20)
    assert "a2a_between" not in aligned.step.passes[1].forward
    assert shifted.step.passes[1].forward["a2a_between"] > aligned.step.passes[1].forward["a2a_inside"]


# ---- slow ranks, and what is refused --------------------------------------------------------------------------------------------


def test_who_waits_for_a_slow_rank() -> None:
    """Equal stages as the plain mapping; else pipelines that any stage's expert groups join go together."""
    factors = 1 + np.arange(32) / 100
    equal = parse_stages(["tp2.dp8.ep4"] * 2)
    assert islands_of(equal) == 2
    assert np.array_equal(paces(equal, factors), factors.reshape(2, 4, 4).max(axis=2).T)
    unequal = parse_stages(["tp2.dp4.ep2", "tp2.dp8.ep8"])  # 4 pipelines; the second stage's experts join 2 of them
    assert islands_of(unequal) == 2
    assert paces(unequal, 1 + np.arange(24) / 100).tolist() == [[1.03, 1.15], [1.07, 1.23]]


def test_a_slow_rank_costs_less_on_a_stage_with_time_to_spare(tmp_path: Path) -> None:
    many = {"train.global_batch": 264, "train.micro_batch": 3}
    nominal = predicted(tmp_path, {"folding.stages": ["tp2.dp24.ep8", "tp2.dp8.ep8"], **many})
    first, last = (with_stragglers(nominal, Stragglers(ranks=((rank, 1.2),))).step for rank in (0, 63))
    assert nominal.step.seconds < first.seconds < 1.02 * nominal.step.seconds
    assert 1.1 * nominal.step.seconds < last.seconds < 1.2 * nominal.step.seconds
    drawn = with_stragglers(nominal, Stragglers(spread=0.05, draws=3)).step
    assert drawn.seconds > nominal.step.seconds and len(drawn.draws) == 3


def test_all_that_is_wrong_with_stages_is_said_at_once(tmp_path: Path) -> None:
    wrong = {"folding.stages": ["tp3.dp4", "dp52.ep7"], "train.global_batch": 0, "optim.lr": -1}
    with pytest.raises(ConfigError) as caught:
        predicted(tmp_path, wrong)
    told = {problem.where for problem in caught.value.problems}
    assert {"train.global_batch", "optim.lr"} <= {where.removeprefix("--") for where in told}
    assert any("folding.stages[1]" in where for where in told)


def test_what_is_not_modelled_of_stages_is_refused_by_name(tmp_path: Path) -> None:
    """Tiles in the middle of a host, beside another reason."""
    stages = {"folding.stages": ["dp4.ep4", "dp8.ep8"], "train.micro_batch": 2, "train.global_batch": 16}
    with pytest.raises(ConfigError) as caught:
        predicted(tmp_path, {**stages, "dispatch.overlap": "auto", "train.dtype": "float64"}, world=12)
    assert [problem.where for problem in caught.value.problems] == ["train.dtype", "dispatch.overlap"]
    assert "folding.stages[1], rank 4" in caught.value.problems[1].rule
    predicted(tmp_path, {**stages, "dispatch.overlap": "coarse:2"}, world=12)
    with pytest.raises(ConfigError, match="not modelled in stages with foldings of their own"):
        predicted(tmp_path, {**stages, "dispatch.overlap": "fused", "optim.bucket_mb": 0}, world=12)

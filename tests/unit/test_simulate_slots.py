"""Experts with replicas on a cluster: rows are the run's own dispatch, bytes those of the run's own holders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.recipe import load_recipe
from phalanx.plan.layout.holders import PART_MULTIPLE, HolderBlock, plan_holders
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.stages import Stage
from phalanx.plan.model.model import PRESETS
from phalanx.plan.placement.run import ReplicaSettings, stage_replicas
from phalanx.plan.placement.search.replicas import zipf_loads
from phalanx.plan.recipe import run_problems
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.mapping.slots import ExpertSlots, RoutedRows, _bytes_of, expert_slots
from phalanx.simulate.step.quick import QuickPredictor
from phalanx.simulate.step.timing import Prediction, predict

pytestmark = pytest.mark.unit
CLUSTER = parse_cluster("h100x32")
TEXT = """
model = { preset = "qwen3-30b-a3b", vocab = 151936, num_layers = 4 }
train = { seq_len = 1024, global_batch = 32, micro_batch = 1 }
launch = { device = "cuda" }
"""


def predicted(tmp_path: Path, **settings: object) -> Prediction:
    (tmp_path / "r.toml").write_text(TEXT)
    words = [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    words += ["--launch.ranks", "32"]
    recipe = load_recipe(tmp_path / "r.toml", words, check=lambda r: run_problems(r, world=32, tokenizer_vocab=151936))
    spec = resolve_recipe(recipe)
    return predict(job_of_recipe(recipe, spec), mapping_of_recipe(recipe, spec, world=32, cluster=CLUSTER), CLUSTER)


def stage_of(layers: int) -> Stage:
    """The first of a model."""
    every = tuple(range(layers))
    return Stage(
        index=0, rank=0, first_layer=0, num_layers=layers, moe_layers=every, has_embedding=True, has_head=True, cost=1.0
    )


def slots_of(p: Prediction) -> ExpertSlots:
    assert p.mapping.slots is not None
    return p.mapping.slots


def test_what_a_rank_holds_and_sends_is_the_plan_of_holders() -> None:
    spec, folding = PRESETS["mixtral-8x22b"], make_folding(world=8, ep=8)
    stage = stage_of(3)
    asked = ReplicaSettings(slots_per_rank=3, f=2, loads=zipf_loads(1, spec.num_experts, skew=1.0), ranks_per_host=2)
    made = stage_replicas(spec, folding, [stage], rank=0, asked=asked)
    placements = [made.placement.of_layer(layer) for layer in made.layers]
    row = 840 * PART_MULTIPLE  # divides by any number of holders up to 8
    plans = [plan_holders([HolderBlock(p, 0, row) for p in placements], ep=ep, size=8) for ep in range(8)]
    held, sent, owned = _bytes_of(placements, 8)
    elements = row * len(placements)
    assert sent * elements == pytest.approx(max(p.sent_elements for p in plans))
    assert owned * elements == pytest.approx(max(p.owned_elements for p in plans))
    assert held * len(placements) == max(len(p.experts) for p in plans)


def test_replicas_take_from_the_fullest_rank_and_cost_memory(tmp_path: Path) -> None:
    skewed = {"router__force": "imbalanced"}
    plain = predicted(tmp_path, folding__ep=32, **skewed)
    once, twice = (predicted(tmp_path, resilience__slots_per_rank=n, **skewed) for n in (4, 8))
    assert slots_of(once).plain_load == pytest.approx(plain.mapping.load(plain.job))
    assert slots_of(twice).load < slots_of(once).load and slots_of(twice).load < plain.mapping.load(plain.job)
    assert twice.step.parts["imbalance"] < plain.step.parts["imbalance"]
    assert twice.step.seconds < plain.step.seconds
    a, b = plain.memory[0], twice.memory[0]
    assert b.weights > a.weights and b.gradients > a.gradients
    sharded = predicted(tmp_path, resilience__slots_per_rank=8, resilience__expert_state="sharded", **skewed)
    assert sharded.memory[0].optimizer < b.optimizer and sharded.memory[0].weights == b.weights
    assert plain.mapping.hash != twice.mapping.hash != sharded.mapping.hash


def test_even_rows_stay_even_and_each_holder_sends_its_part(tmp_path: Path) -> None:
    even = predicted(tmp_path, resilience__slots_per_rank=8, router__force="balanced")
    slots = slots_of(even)
    assert slots.load == pytest.approx(1.0, abs=0.01) and slots.exchange < 1
    assert (slots.held, slots.sent, slots.owned) == (8, pytest.approx(4), pytest.approx(4))  # each expert twice
    plain = predicted(tmp_path, folding__ep=32, router__force="balanced")
    assert even.step.parts["dp"] > plain.step.parts["dp"]
    assert even.to_dict()["replicas"]["held"] == 8 and "replicas" not in plain.to_dict()


def test_replicas_that_follow_the_loads_are_worth_more_than_those_that_know_none(tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(json.dumps(zipf_loads(1, 128, skew=0.8, seed=3).tolist()))
    loads = {"resilience__slots_per_rank": 8, "resilience__loads": tmp_path / "loads.json"}
    known = slots_of(predicted(tmp_path, **loads))
    spec, folding = resolve_of(tmp_path), make_folding(world=32, ep=32)
    stage = stage_of(4)
    rows = RoutedRows(routing=RouterModel(kind="learned"), tokens=1024, seed=0)
    blind, late = (
        expert_slots(
            spec,
            folding,
            [stage],
            rank=0,
            asked=ReplicaSettings(slots_per_rank=8, ranks_per_host=8),
            rows=rows,
            follows=f,
        )
        for f in (False, True)
    )
    assert late.load < blind.load and late.follows
    assert known.plain_load is not None and known.load < known.plain_load / 2
    assert np.isfinite(known.exchange)


def resolve_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "r.toml").write_text(TEXT)
    return resolve_recipe(load_recipe(tmp_path / "r.toml", []))


def test_the_quick_way_counts_replicas_too(tmp_path: Path) -> None:
    p = predicted(tmp_path, resilience__slots_per_rank=8, resilience__mode="fast")
    assert QuickPredictor(p.job, CLUSTER).seconds(p.mapping) == pytest.approx(p.step.seconds, rel=1e-9)
    assert slots_of(p).follows

"""The pipeline of a run: defaults, legality in the words of the recipe, and the plan that only goes forward."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.core.config import PipelineConfig, Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.plan.model.model import PRESETS
from phalanx.plan.pipeline.comm import pipeline_plan_problems
from phalanx.plan.pipeline.run import make_pipeline, plain_pipeline
from phalanx.plan.pipeline.schedule.make import SCHEDULES
from phalanx.plan.recipe import run_problems

pytestmark = pytest.mark.unit
SPEC = dataclasses.replace(PRESETS["tiny"], num_layers=6)


def test_defaults() -> None:
    def chosen(**given) -> tuple[str, int]:
        pipeline = make_pipeline(PipelineConfig(**given), SPEC, pp=2, seq_len=32)
        return pipeline.schedule, pipeline.virtual

    assert chosen() == ("1f1b", 1)
    assert chosen(virtual=3) == ("interleaved_1f1b", 3)
    assert chosen(schedule="zbv") == ("zbv", 2)
    assert chosen(schedule="zero_bubble") == ("zero_bubble", 1)


def test_no_pipeline_is_one_stage_that_runs_each_microbatch_forward_and_back() -> None:
    pipeline = plain_pipeline(SPEC)
    assert len(pipeline.stages.stages) == 1 and not pipeline.splits_backward
    assert [str(a) for a in pipeline.plan(2).schedule.actions[0]] == ["F0.0", "B0.0", "F0.1", "B0.1"]
    assert pipeline.plan(2).transfers == ()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_a_forward_plan_has_all_forward_passes_and_comes_to_its_end(name: str, microbatches: int) -> None:
    pipeline = make_pipeline(PipelineConfig(schedule=name), SPEC, pp=2, seq_len=32)  # type: ignore[arg-type]
    plan = pipeline.forward_plan(microbatches)
    actions = [action for order in plan.schedule.actions for action in order]
    assert {action.kind for action in actions} == {"F"}
    assert len(set(actions)) == len(actions) == microbatches * 2 * pipeline.virtual
    assert all(transfer.direction == "forward" for transfer in plan.transfers)
    assert pipeline_plan_problems(plan) == []


@pytest.mark.parametrize(
    ("given", "pp", "says"),
    [
        ({"schedule": "1f1b", "virtual": 3}, 2, "pipeline.virtual = 3: must be 1: 1f1b has 1 virtual stage a rank; nearest legal: 1"),
        ({"schedule": "zbv", "virtual": 1}, 2, "pipeline.virtual = 1: must be 2: zbv has 2 virtual stages a rank; nearest legal: 2"),
        ({"virtual": 5}, 2, "pipeline.virtual = 5: with 5 virtual and 2 pipeline ranks there are 10 stages, and 6 layers"),
        ({"virtual": 5}, 2, "at most 8; nearest legal: 4"),
        ({"schedule": "zbv"}, 5, "folding.pp = 5: with 2 virtual and 5 pipeline ranks there are 10 stages"),
        ({"schedule": "zbv"}, 5, "at most 8; nearest legal: folding.pp 4"),
        ({"schedule": "interleaved_1f1b", "virtual": 9}, 9, "at most 8; nearest legal: pipeline.virtual 1"),
        ({"layers": (3, 2, 1)}, 2, "pipeline.layers = [3, 2, 1]: must give the layers of each of the 2 stages; for example"),
        ({"layers": (3, 2)}, 2, "pipeline.layers = [3, 2]: must sum to num_layers = 6, not to 5"),
        ({"layers": (2, 0, 4)}, 3, "pipeline.layers[1] = 0: must be at least 1: a stage in the middle would hold nothing"),
    ],
)  # fmt: skip
def test_what_is_illegal_is_said_in_the_words_of_the_recipe(given: dict, pp: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(PipelineConfig(**given), SPEC, pp=pp, seq_len=32)
    assert says in str(caught.value)


def test_a_pipeline_that_is_not_there_has_no_settings() -> None:
    for setting in ("--pipeline.schedule", "--pipeline.virtual", "--pipeline.layers"):
        value = {"--pipeline.schedule": "gpipe", "--pipeline.virtual": "2", "--pipeline.layers": "[1, 1]"}[setting]
        with pytest.raises(ConfigError, match=r"folding.pp = 1 has one stage for everything"):
            load_recipe(None, [setting, value])


def test_run_problems_has_those_of_the_pipeline_beside_the_others() -> None:
    recipe = Recipe()
    recipe = dataclasses.replace(
        recipe,
        folding=dataclasses.replace(recipe.folding, pp=2),
        pipeline=PipelineConfig(layers=(1, 1, 1)),
        train=dataclasses.replace(recipe.train, global_batch=33),
    )
    places = {p.where for p in run_problems(recipe, world=2)}
    assert {"train.global_batch", "pipeline.layers"} <= places


def test_it_explains_itself() -> None:
    text = make_pipeline(PipelineConfig(schedule="zero_bubble"), SPEC, pp=2, seq_len=32).explain()
    assert "pipeline of 2 ranks x 1 virtual stages, zero_bubble" in text and "stage  1 on rank 1" in text

"""A folding for each pipeline stage: groups, who works on which part of a micro-batch, legality, and how it is written."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from phalanx.core.config import FoldingConfig
from phalanx.core.errors import ConfigError, PlanError
from phalanx.core.recipe import load_recipe
from phalanx.models.context import TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.layout.activations import activation_layout
from phalanx.plan.layout.parameters import local_param
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.mapping.stage_foldings import (
    ACROSS_STAGES,
    StagedFolding,
    parse_stages,
    resolve_mapping,
    staged_problems,
)
from phalanx.plan.model.model import PRESETS, parameters
from phalanx.plan.recipe import run_problems

pytestmark = pytest.mark.unit

TINY = PRESETS["tiny"]
ISSUE = ("tp1", "tp2", "tp4", "tp2")


@st.composite
def stages(draw: st.DrawFn) -> Folding:
    tp, cp, ep, etp = (draw(st.sampled_from((1, 2, 3))) for _ in range(4))
    world = math.lcm(tp * cp, ep * etp) * draw(st.integers(1, 2))
    return make_folding(world=world, tp=tp, cp=cp, ep=ep, etp=etp)


staged = st.lists(stages(), min_size=2, max_size=4).map(lambda s: StagedFolding(stages=tuple(s)))


@given(staged)
@settings(max_examples=60, deadline=None)
def test_groups_partition_the_world_and_agree_with_group_of(folding: StagedFolding) -> None:
    folding.check()
    for name in folding.group_names:
        groups = folding.groups(name)
        assert sorted(r for g in groups for r in g) == list(range(folding.world))
        for group in groups:
            assert all(folding.group_of(rank, name) == group for rank in group)
            if name not in ACROSS_STAGES:
                assert len({folding.coord(rank, "pp") for rank in group}) == 1


@given(staged)
@settings(max_examples=60, deadline=None)
def test_every_pipeline_has_ranks_of_every_stage_and_each_rank_one_pipeline(folding: StagedFolding) -> None:
    seen = []
    for replica, pipeline in enumerate(folding.pipelines):
        assert len(pipeline) == folding.pp
        for stage, ranks in enumerate(pipeline):
            assert {folding.coord(rank, "pp") for rank in ranks} == {stage}
            assert {folding.replica_of(rank) for rank in ranks} == {replica}
            shares = {folding.share_of(rank) for rank in ranks}
            count = folding.stages[stage].dp // folding.replicas
            assert shares == {(i, count) for i in range(count)}
            seen += ranks
    assert sorted(seen) == list(range(folding.world))


def uniform(folding: Folding) -> StagedFolding:
    """The same stages, each said for itself: the ranks hold and share what they do in `folding`."""
    stage = Folding(world=folding.world // folding.pp, tp=folding.tp, cp=folding.cp, ep=folding.ep, etp=folding.etp)
    return StagedFolding(stages=(stage,) * folding.pp)


def test_a_uniform_folding_is_the_case_of_equal_stages() -> None:
    whole = make_folding(world=16, tp=2, pp=2, ep=4, etp=1)
    apart = uniform(whole)
    assert (apart.world, apart.pp, apart.replicas) == (16, 2, whole.dp)
    for rank in range(16):
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            assert apart.coord(rank, axis) == whole.coord(rank, axis)
        assert apart.replica_of(rank) == whole.replica_of(rank)
        for name in set(apart.group_names) - {"pp", "embedding", "micro"}:
            assert apart.group_of(rank, name) == whole.group_of(rank, name)
        assert apart.group_of(rank, "micro") == whole.group_of(rank, "tp_cp")
        for param in parameters(TINY):
            ours = local_param(param, apart, plain_placement(TINY.num_experts, apart.of_rank(rank)), rank)
            assert ours == local_param(param, whole, plain_placement(TINY.num_experts, whole), rank)


@given(staged, st.sampled_from((1, 2)))
@settings(max_examples=60, deadline=None)
def test_the_layout_of_activations_is_what_ranks_are_given(folding: StagedFolding, copies: int) -> None:
    sequences = copies * math.lcm(*(s.dp // folding.replicas for s in folding.stages))
    seq_len = 2 * math.lcm(*(s.tp * s.cp for s in folding.stages))
    tokens_BS = torch.arange(sequences * seq_len).view(sequences, seq_len)
    batch = TokenBatch(tokens_BS, tokens_BS, tokens_BS, ((seq_len,),) * sequences)
    for stage in range(folding.pp):
        layout = activation_layout(folding, stage, replica=0, sequences=sequences, seq_len=seq_len, hidden=1)
        for rank, held, shape in zip(layout.ranks, layout.held, layout.local_shapes, strict=True):
            part = part_of(batch, folding, rank)
            index_T = torch.arange(tokens_BS.numel()) if part.token_index_T is None else part.token_index_T
            local = np.full(shape, -1)
            for h in held:
                local[h.local_box().slices()] = tokens_BS.unsqueeze(-1).numpy()[h.box.slices()]
            assert local.flatten().tolist() == index_T.tolist()


def test_stages_are_written_and_read_as_text() -> None:
    folding = parse_stages(["tp1", "tp2.dp2.ep4", "cp2.etp2"])
    assert [s.world for s in folding.stages] == [1, 4, 2]
    assert folding.label() == "tp1/tp2.dp2.ep4/cp2.etp2"
    assert parse_stages(folding.label().split("/")) == folding
    assert "stage 1 on ranks 1-4" in folding.explain()
    assert folding.hash == StagedFolding(stages=folding.stages).hash != parse_stages(["tp1", "tp1"]).hash


def test_all_that_is_wrong_with_texts_comes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stages(["tp0", "xp2", "tp2.tp2", "tp2.ep3", "tp2"])
    assert [p.where for p in caught.value.problems] == [f"folding.stages[{i}]" for i in range(4)]
    assert "ep 2" in str(caught.value.problems[3].hint)
    with pytest.raises(ConfigError, match="two stages or more"):
        parse_stages(["tp2"])


def test_a_stage_with_a_pipeline_of_its_own_is_no_stage() -> None:
    with pytest.raises(PlanError, match="one stage"):
        StagedFolding(stages=(Folding(world=2, pp=2), Folding(world=1))).check()


def test_problems_are_named_after_their_stage() -> None:
    spec = dataclasses.replace(TINY, tied_embeddings=True)
    found = staged_problems(parse_stages(["tp1", "tp3", "dp3.ep3"]), spec, world=5, seq_len=64)
    assert {p.where for p in found} == {"folding.stages", "folding.stages[1]", "folding.stages[2]"}
    assert any("must divide num_heads" in p.rule for p in found)
    assert any("must divide num_experts" in p.rule for p in found)
    assert any("7 ranks in all (1 + 3 + 3), and the run has 5" in p.rule for p in found)
    assert any("tied embedding" in p.rule for p in found)


def test_batches_must_be_shared_evenly() -> None:
    config = FoldingConfig(stages=("dp2", "dp4"))
    with pytest.raises(ConfigError) as caught:
        resolve_mapping(config, TINY, world=6, seq_len=64, global_batch=6, micro_batch=1)
    assert [(p.where, p.hint) for p in caught.value.problems] == [("train.micro_batch", "nearest legal: 2")]
    with pytest.raises(ConfigError) as caught:
        resolve_mapping(config, TINY, world=6, seq_len=64, global_batch=6, micro_batch=2)
    assert [(p.where, p.hint) for p in caught.value.problems] == [("train.global_batch", "nearest legal: 8")]
    folding = resolve_mapping(config, TINY, world=6, seq_len=64, global_batch=8, micro_batch=2)
    assert isinstance(folding, StagedFolding) and folding.replicas == 2


def test_a_micro_batch_is_shared_by_the_ranks_of_each_stage() -> None:
    """By two and by three, so that neither number alone is enough."""
    config = FoldingConfig(stages=("dp2", "dp3"))
    with pytest.raises(ConfigError) as caught:
        resolve_mapping(config, TINY, world=5, seq_len=64, global_batch=3, micro_batch=3)
    assert [(p.where, p.hint) for p in caught.value.problems] == [("train.micro_batch", "nearest legal: 6")]


def test_a_recipe_says_stages_and_nothing_beside_them() -> None:
    args = ["--folding.stages", ",".join(ISSUE), "--launch.ranks", "9"]
    recipe = load_recipe(None, args, check=lambda r: run_problems(r, world=9))
    assert recipe.folding.stages == ISSUE and recipe.folding.num_stages == 4
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, [*args, "--folding.tp", "2", "--folding.cp_method", "ulysses"])
    assert {p.where for p in caught.value.problems} == {"--folding.tp", "--folding.cp_method"}
    load_recipe(None, ["--folding.stages", ",".join(ISSUE), "--pipeline.schedule", "gpipe"])
    load_recipe(None, ["--folding.stages", "cp2,tp2", "--folding.cp_method", "ulysses"])


def test_what_is_wrong_with_stages_is_said_of_the_settings_that_say_it() -> None:
    def said(*args: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_recipe(None, [*args], check=lambda r: run_problems(r, world=9))
        return str(caught.value)

    text = said("--model.preset", "tiny", "--folding.stages", ",".join(["tp1"] * 9), "--launch.ranks", "9")
    assert "--folding.stages = " in text and "nearest legal: 2 stages" in text and "folding.pp" not in text
    text = said("--folding.stages", ",".join(ISSUE), "--launch.ranks", "9", "--folding.tp", "2")
    assert "the degrees of each stage; leave it out" in text and "or set" not in text
    for setting, way in (("tied_embeddings", "true"), ("mtp_layers", "1")):
        text = said("--folding.stages", ",".join(ISSUE), "--launch.ranks", "9", f"--model.{setting}", way)
        assert f"set model.{setting} = {'false' if way == 'true' else 0}" in text

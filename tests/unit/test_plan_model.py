"""Shapes of real models against what their authors publish, and every way to get a shape wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import ConfigError, PlanError
from phalanx.plan.model.model import (
    PRESETS,
    RouterSpec,
    buffers,
    flops_per_token,
    model_problems,
    parameters,
    resolve_model,
)

pytestmark = pytest.mark.unit

PUBLISHED = [
    # preset, total and active parameters in billions, as printed in the model cards and reports
    ("mixtral-8x7b", 46.7, 12.9),
    ("mixtral-8x22b", 140.6, 39.2),
    ("mixtral-8x22b-g8t8", 140.6, 22.3),
    ("qwen2-57b-a14b", 57.4, 14.2),
    ("qwen3-30b-a3b", 30.5, 3.3),
    ("qwen3-235b-a22b", 235.1, 22.2),
    ("olmoe-1b-7b", 6.9, 1.3),
    ("deepseek-v3", 671.0, 37.6),
]


@pytest.mark.parametrize(("name", "total", "active"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_presets_have_the_published_parameter_counts(name: str, total: float, active: float) -> None:
    spec = PRESETS[name]
    assert spec.num_params / 1e9 == pytest.approx(total, abs=0.06)
    assert spec.active_params / 1e9 == pytest.approx(active, abs=0.06)


EXACT = {"mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624, "olmoe-1b-7b": 6_919_161_856}
"""Sums over the tensors of the published safetensors files."""


@pytest.mark.parametrize("name", EXACT)
def test_presets_have_every_element_of_the_published_files(name: str) -> None:
    assert PRESETS[name].num_params == EXACT[name]


FLOPS = [
    # preset, GFLOP per token at 4K: full attention, causal half (reference/folding.md 2.1, which counts the router; we do not)
    ("mixtral-8x22b", 250.6, 242.2),
    ("mixtral-8x22b-g8t8", 149.3, 140.8),
    ("qwen2-57b-a14b", 87.2, 84.7),
]


@pytest.mark.parametrize(("name", "full", "causal"), FLOPS, ids=[row[0] for row in FLOPS])
def test_flops_per_token_in_both_conventions(name: str, full: float, causal: float) -> None:
    spec = PRESETS[name]
    router = 6 * spec.num_layers * spec.hidden * spec.num_experts
    assert (flops_per_token(spec, 4096, attention="full") + router) / 1e9 == pytest.approx(full, abs=0.051)
    assert (flops_per_token(spec, 4096) + router) / 1e9 == pytest.approx(causal, abs=0.051)


def test_share_of_attention_grows_with_the_sequence_as_in_the_reference() -> None:
    spec = PRESETS["mixtral-8x22b"]
    for seq, ratio in ((4096, 1.035), (16384, 1.126), (32768, 1.224), (65536, 1.367), (131072, 1.537)):
        assert flops_per_token(spec, seq, attention="full") / flops_per_token(spec, seq) == pytest.approx(
            ratio, abs=6e-4
        )


def test_flops_of_latent_attention_by_hand() -> None:
    spec = PRESETS["deepseek-v3"]
    m, h, a, s = spec.mla, spec.hidden, spec.num_heads, 4096
    assert m is not None
    attention = m.q_rank * (h + a * 192) + m.kv_rank * (h + a * 256) + h * 64 + a * 128 * h + s * a * (192 + 128)
    ffn = 58 * 3 * h * (2048 * 8 + 2048) + 3 * 3 * h * 18432
    assert flops_per_token(spec, s, attention="full") == 6 * (61 * attention + ffn + h * spec.vocab)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sane_tables(name: str) -> None:
    spec = PRESETS[name]
    spec.check()
    table = parameters(spec)
    assert len({p.name for p in table}) == len(table)
    for p in table:
        split = [d for d in (p.tp_dim, p.ep_dim, p.etp_dim) if d is not None]
        assert len(set(split)) == len(split) and all(d < len(p.shape) for d in split)
        assert (p.family == "expert") == (p.ep_dim is not None)
        assert (p.family in ("dense_sharded", "dense_tied")) == (p.tp_dim is not None)
        assert (p.family == "dense_tied") == (spec.tied_embeddings and p.name == "embedding.weight")
        assert p.decay == (len(p.shape) > 1)
    assert name in spec.explain()
    assert {s for s, _ in buffers(spec)} == {
        f"layers.{i}.moe.router.expert_bias" for i in spec.moe_layers if spec.router.bias_rate
    }


# ---- recipes --------------------------------------------------------------------------------------------------------------------


def test_resolve_takes_the_preset_and_what_the_recipe_changes() -> None:
    spec = resolve_model(ModelConfig(preset="tiny", hidden=64), RouterConfig(scale=2.0), tokenizer_vocab=1000)
    assert (spec.hidden, spec.vocab, spec.num_heads, spec.router.scale) == (64, 1024, 4, 2.0)
    assert resolve_model(ModelConfig(preset="tiny", vocab=320), RouterConfig()).vocab == 320
    assert resolve_model(ModelConfig(preset="deepseek-v3"), RouterConfig()).router.bias_rate == 1e-3
    assert resolve_model(ModelConfig(preset="deepseek-v3"), RouterConfig(bias_rate=0.0)).router.bias_rate == 0


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'mixtral-8x7': is not a preset; did you mean 'mixtral-8x7b'"):
        resolve_model(ModelConfig(preset="mixtral-8x7"), RouterConfig())


IDLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"score": "sigmoid", "softmax_order": "before_topk"}, "router.softmax_order = 'before_topk': has no effect"),
    ({}, {"softmax_order": "after_topk", "renormalize": True}, "router.renormalize = true: has no effect"),
    ({}, {"group_topk": 1}, "router.group_topk = 1: has no effect: router.num_groups is 1"),
    ({}, {"group_score": "top2"}, "router.group_score = 'top2': has no effect"),
    ({}, {"aux_loss": 0.0, "aux_scope": "sequence"}, "router.aux_scope = 'sequence': has no effect"),
    ({}, {"force_skew": 2.0}, "router.force_skew = 2.0: has no effect: router.force is none"),
    ({"dense_ffn": 64}, {}, "model.dense_ffn = 64: has no effect: there are no dense layers"),
    ({"preset": "deepseek-v3", "head_dim": 64}, {}, "model.head_dim = 64: has no effect: deepseek-v3 has"),
    ({"dense_layers": 2, "dense_ffn": 64, "top_k": 1}, {}, "model.top_k = 1: has no effect: every layer is dense"),
]


@pytest.mark.parametrize(("model", "router", "message"), IDLE, ids=[row[2].split(" ")[0] for row in IDLE])
def test_settings_without_effect_are_errors(model: dict[str, Any], router: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(**{"preset": "tiny", **model}), RouterConfig(**router))
    assert len(caught.value.problems) == 1 and message in str(caught.value)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab = 128: must hold the tokenizer's 300 tokens; try 320"):
        resolve_model(ModelConfig(preset="tiny", vocab=128), RouterConfig(), tokenizer_vocab=300)


WRONG: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"hidden": 0, "vocab": -1}, {}, ["model.hidden = 0", "model.vocab = -1"]),
    ({"num_kv_heads": 3}, {}, ["num_kv_heads = 3: must divide num_heads = 4; try 1"]),
    ({"head_dim": 7}, {}, ["head_dim = 7: must be even"]),
    ({"dense_layers": 3}, {}, ["must lie between 0 and num_layers = 2; try 2", "dense_ffn = 0: must be at least 1"]),
    ({"top_k": 9}, {}, ["top_k = 9: must lie between 1 and num_experts = 8; try 8"]),
    ({"num_experts": 0}, {}, ["num_experts = 0: must be at least 1"]),
    ({"expert_ffn": 0}, {}, ["expert_ffn = 0"]),
    ({}, {"num_groups": 3}, ["num_groups = 3: must divide num_experts = 8; try 1"]),
    ({}, {"num_groups": 4, "group_topk": 5}, ["group_topk = 5: must lie between 1 and num_groups = 4; try 4"]),
    ({"top_k": 4}, {"num_groups": 4, "group_topk": 1}, ["top_k = 4: the 1 chosen groups hold only 2 experts; try 2"]),
    ({}, {"num_groups": 8, "group_topk": 2, "group_score": "top2"}, ["group_score top2 needs two experts in a group"]),
    ({}, {"aux_loss": -1.0, "z_loss": -1.0, "scale": 0.0}, ["aux_loss = -1.0", "z_loss = -1.0", "scale = 0.0"]),
    (
        {"shared_ffn": -1, "norm_eps": 0.0, "init_std": 0.0, "rope_theta": 0.0},
        {},
        ["shared_ffn", "norm_eps", "init_std", "rope_theta"],
    ),
]


@pytest.mark.parametrize(("shape", "router", "messages"), WRONG, ids=[row[2][0].split(":")[0] for row in WRONG])
def test_each_wrong_shape_is_named_and_all_at_once(
    shape: dict[str, Any], router: dict[str, Any], messages: list[str]
) -> None:
    base = PRESETS["tiny"]
    spec = dataclasses.replace(base, router=dataclasses.replace(base.router, **router), **shape)
    problems = [str(p) for p in model_problems(spec)]
    assert len(problems) == len(messages), problems
    assert all(any(message in p for p in problems) for message in messages), problems
    with pytest.raises(PlanError):
        spec.check()


def test_hashes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from phalanx.plan.mapping.folding import make_folding; from phalanx.plan.model.model import PRESETS;"
        "from phalanx.plan.mapping.placement import plain_placement; f = make_folding(world=16, tp=2, pp=2, ep=4);"
        "print(f.hash, plain_placement(8, f).hash, *(s.hash for s in PRESETS.values()), hash(f.process_groups()))"
    )

    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert run("0") == run("1") == run("4711") != ""


def test_hash_sees_every_field() -> None:
    base = PRESETS["tiny"]
    hashes = {
        base.hash,
        dataclasses.replace(base, hidden=64).hash,
        dataclasses.replace(base, tied_embeddings=True).hash,
        dataclasses.replace(base, router=RouterSpec(score="sigmoid")).hash,
    }
    assert len(hashes) == 4


def test_sizes_without_end_are_refused_at_once() -> None:
    """Such a model's plan would take all memory."""
    for name in ("num_layers", "hidden", "num_heads", "vocab", "num_experts", "expert_ffn"):
        found = model_problems(dataclasses.replace(PRESETS["tiny"], **{name: 10**9}))
        assert [p.where for p in found] == [f"model.{name}"] and "must be at most" in found[0].rule
    (found,) = model_problems(dataclasses.replace(PRESETS["tiny"], num_layers=9000, num_experts=9000))
    assert found.where == "model.num_experts" and "81000000 experts of all layers" in found.rule  # type: ignore[attr-defined]


def test_a_run_that_has_begun_is_the_same_with_other_initial_values() -> None:
    spec = PRESETS["tiny"]
    assert dataclasses.replace(spec, init_std=0.01).hash == spec.hash != dataclasses.replace(spec, norm_eps=0.01).hash

"""Names and options of the Hugging Face families as data: coverage, both directions, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import PlanError
from phalanx.models.families import Family, families_for, find_family
from phalanx.models.families.known import FAMILIES
from phalanx.models.families.names import NameLink, NameRule, in_tensor, links, shapes_of
from phalanx.models.families.options import DEFAULTS
from phalanx.models.router import routing_weights
from phalanx.plan import run_problems
from phalanx.plan.layout.parameters import Box
from phalanx.plan.model.model import PRESETS, ModelSpec, RouterSpec, resolve_model
from phalanx.plan.model.model_settings import settings_for
from phalanx.plan.model.rope import YarnSpec, amplitude

pytestmark = pytest.mark.unit
BY_NAME = {f.model_type: f for f in FAMILIES}


def small(family: Family, **changes: Any) -> ModelSpec:
    """The family's preset with two layers and few experts."""
    spec = PRESETS[family.preset]
    router = dataclasses.replace(
        spec.router, **({"num_groups": 4, "group_topk": 2} if spec.router.num_groups > 1 else {})
    )
    shape = {"num_layers": 2, "dense_layers": min(spec.dense_layers, 1), "num_experts": 8, "top_k": 2, "router": router}
    return dataclasses.replace(spec, **{**shape, **changes})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
@pytest.mark.parametrize("fused", [False, True])
def test_tensors_cover_every_element_once(family: Family, fused: bool) -> None:
    spec = small(family)
    found = family.links(spec, fused=fused)
    held: dict[str, int] = {}
    for link in found:
        assert link.param is not None and link.part.num_elements == link.box.num_elements
        held[link.param] = held.get(link.param, 0) + link.box.num_elements
    assert held == {name: math.prod(shape) for name, shape in shapes_of(spec).items()}
    boxes = [(link.param, link.box) for link in found]
    assert len(set(boxes)) == len(boxes)
    assert fused or (all(link.whole for link in found) and len({link.tensor for link in found}) == len(found))
    assert family.is_fused(link.tensor for link in found) == fused


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_options_survive_both_ways(family: Family) -> None:
    for spec in (PRESETS[family.preset], small(family), small(family, tied_embeddings=True, rope_theta=5e5)):
        again, problems = family.spec_of(family.config_of(spec))
        assert not problems and again == dataclasses.replace(spec, router=again.router)
        training = {n: getattr(spec.router, n) for n in ("aux_loss", "z_loss", "bias_rate")}
        assert dataclasses.replace(again.router, **training) == dataclasses.replace(spec.router, **training)
        assert resolve_model(*settings_for(again)) == again


def test_yarn_is_read_from_both_versions_of_the_config() -> None:
    family = BY_NAME["deepseek_v3"]
    yarn = YarnSpec(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    config = family.config_of(small(family, yarn=yarn))
    assert family.spec_of(config)[0].yarn == yarn
    old = {k: v for k, v in config.items() if k != "rope_parameters"} | {
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }  # fmt: skip
    assert family.spec_of(old)[0] == family.spec_of(config)[0]
    alone = {**old, "rope_scaling": {**old["rope_scaling"], "mscale_all_dim": 0.0}}
    assert family.spec_of(alone)[0].yarn == YarnSpec(factor=40.0, original_length=4096), (
        "one of them alone counts for nothing"
    )
    model, _ = settings_for(family.spec_of(old)[0])
    assert (model.yarn_factor, model.yarn_original_length, model.yarn_mscale_all_dim) == (40.0, 4096, 1.0)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}


def test_a_factor_on_cosine_and_sine_is_an_mscale_that_comes_to_it() -> None:
    """`attention_factor`, which transformers takes before mscale; the softmax of latent attention has mscale_all_dim as ever."""

    def read(name: str, **more: float) -> YarnSpec:
        family = BY_NAME[name]
        yarn = family.spec_of({**family.config_of(small(family)), "rope_parameters": {**YARN, **more}})[0].yarn
        assert yarn is not None and math.isclose(amplitude(yarn), more["attention_factor"], rel_tol=1e-12)
        return yarn

    own = YarnSpec(factor=2.0, original_length=16)
    assert (
        read("deepseek_v3", attention_factor=amplitude(own))
        == read("qwen3_moe", attention_factor=amplitude(own))
        == own
    )
    assert read("qwen3_moe", attention_factor=1.0) == dataclasses.replace(own, mscale=1.0, mscale_all_dim=1.0)
    assert read("deepseek_v3", attention_factor=1.3, mscale=5.0, mscale_all_dim=0.7).mscale_all_dim == 0.7


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"sliding_window": 4096, "max_position_embeddings": 32768}, "config.json: sliding_window = 4096"),
    ("mixtral", {"sliding_window": 4096, "max_position_embeddings": 4096}, "set it to null, if no sequence is to be"),
    ("mixtral", {"sliding_window": 4096, "use_sliding_window": False}, "config.json: sliding_window = 4096"),
    ("mixtral", {"sliding_window": 0}, "config.json: sliding_window = 0"),
    ("olmoe", {"sliding_window": 8}, "config.json: sliding_window = 8"),
    ("qwen2_moe", {"use_sliding_window": True}, "config.json: use_sliding_window = true"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    (
        "mixtral",
        {"num_experts": 4},
        "config.json: num_local_experts = 8: says 8, and num_experts, which means the same, 4",
    ),
    ("mixtral", {"is_causal": False}, "config.json: is_causal = false"),
    ("mixtral", {"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "config.json: per_layer_config"),
    ("mixtral", {"rope_theta": True, "rope_parameters": None}, "rope_theta must be a positive number"),
    ("mixtral", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "must be one table, the same for all"),
    ("mixtral", {"hidden_act": "gelu"}, "config.json: hidden_act = 'gelu': only SwiGLU"),
    ("mixtral", {"attention_dropout": 0.1}, "attention_dropout"),
    ("mixtral", {"hidden_size": "4096"}, "config.json: hidden_size = '4096': must be a whole number"),
    ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("mixtral", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ("mixtral", {"num_key_value_heads": 5}, "config.json: num_key_value_heads = 5: must divide num_attention_heads"),
    ("mixtral", {"head_dim": None, "hidden_size": 36}, "num_attention_heads = 32: makes heads of 1 dims"),
    ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}, "config.json: decoder_sparse_step = 2"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "config.json: mlp_only_layers = [1]: only the first layers"),
    ("qwen2_moe", {"mlp_only_layers": 5}, "must be a list of layer numbers"),
    ("qwen2_moe", {"layer_types": 5}, "every layer must be full_attention"),
    (
        "qwen2_moe",
        {"num_experts_per_tok": 9},
        "config.json: num_experts_per_tok = 9: must lie between 1 and num_experts",
    ),
    ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen2_moe", {"qkv_bias": "yes"}, "config.json: qkv_bias = 'yes': must be true or false"),
    ("qwen3_moe", {"attention_bias": True}, "config.json: attention_bias = true"),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_type 'llama3' is not supported",
    ),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn needs the numbers"),
    (
        "qwen3_moe",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 8,
                "truncate": False,
            }
        },
        "truncate is not supported",
    ),
    ("qwen3_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "a part of each head"),
    ("olmoe", {"clip_qkv": 8.0}, "config.json: clip_qkv = 8.0"),
    ("olmoe", {"head_dim": 32}, "head_dim"),
    ("deepseek_v2", {"norm_topk_prob": True}, "config.json: norm_topk_prob = true"),
    ("deepseek_v2", {"topk_method": "other"}, "topk_method"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v2", {"first_k_dense_replace": 1, "moe_layer_freq": [0, 0] + [1] * 26}, "moe_layer_freq"),
    (
        "qwen3_moe",
        {"rope_parameters": {**YARN, "attention_factor": 0.0}},
        "attention_factor 0.0 is a factor on cosine and sine",
    ),
    ("qwen3_moe", {"rope_parameters": {**YARN, "factor": 1.0, "attention_factor": 2.0}}, "attention_factor 2.0"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": "1"}}, "attention_factor '1'"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "leave it out for 1.0"),
    ("deepseek_v2", {"n_group": 7}, "config.json: n_group = 7: must divide n_routed_experts"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"n_group": 8}, "config.json: n_group = 8: each group needs 2 experts"),
    (
        "deepseek_v3",
        {"num_experts_per_tok": 5},
        "config.json: num_experts_per_tok = 5: the 2 chosen groups hold only 4",
    ),
    ("deepseek_v3", {"attention_bias": True}, "biases of latent attention"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights cannot be trained on"),
    ("deepseek_v3", {"num_key_value_heads": 8}, "keys and values of its own"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{r[0]}-{next(iter(r[1]))}" for r in REFUSED])
def test_what_cannot_be_had_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    family = BY_NAME[name]
    _, problems = family.spec_of({**family.config_of(small(family)), **changes})
    assert any(message in str(p) for p in problems), list(map(str, problems))


def test_all_problems_of_a_config_come_at_once() -> None:
    config = {**BY_NAME["mixtral"].config_of(small(BY_NAME["mixtral"])), "hidden_act": "gelu", "vocab_size": 0}
    assert len(BY_NAME["mixtral"].spec_of({**config, "router_jitter_noise": 1})[1]) == 3


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra `hf`)"
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_what_a_file_does_not_say_is_what_transformers_takes(family: Family) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family.model_type)
    theirs = {f.name: f.default for f in dataclasses.fields(config)} | {"rope_theta": type(config).default_theta}
    first = {name: key for name, key in family.aliases.items() if name in theirs}
    theirs |= {key: theirs[name] for name, key in first.items()}
    own = {**DEFAULTS, **family.defaults}
    assert not {k: (v, theirs[k]) for k, v in own.items() if k in theirs and theirs[k] != v}
    assert own.keys() - theirs.keys() <= {"head_dim", *DEFAULTS}
    assert dict(config.attribute_map).items() <= family.aliases.items() | {(v, k) for k, v in family.aliases.items()}
    read = {key for key in family.config_of(PRESETS[family.preset]) if key in theirs}
    assert read - own.keys() <= {"rope_parameters", "architectures", "head_dim"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_an_empty_file_is_the_model_of_transformers_defaults(family: Family) -> None:
    spec, problems = family.spec_of({})
    if family.model_type == "deepseek_v2":  # transformers has no default for this one
        assert [p.where for p in problems] == ["config.json: num_experts_per_tok"]
        return
    assert not problems and spec.num_layers == family.defaults["num_hidden_layers"]
    assert spec.rope_theta == (1e6 if family.model_type == "mixtral" else 1e4)
    if family.model_type == "deepseek_v3":
        r = spec.router
        assert (r.num_groups, r.group_topk, r.scale, spec.dense_layers) == (8, 4, 2.5, 3)


def test_nulls_mean_what_transformers_makes_of_them() -> None:
    v3 = BY_NAME["deepseek_v3"]
    config = v3.config_of(small(v3))
    spec, problems = v3.spec_of({**config, "rope_interleave": None, "norm_topk_prob": None, "q_lora_rank": None})
    assert not problems and spec.mla is not None
    assert (spec.mla.rope_interleaved, spec.router.renormalize, spec.mla.q_rank) == (False, False, 0)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_a_single_expert_with_its_weight_divided_by_itself_has_weight_one(name: str) -> None:
    family = BY_NAME[name]
    config = {**family.config_of(small(family)), "num_experts_per_tok": 1, "norm_topk_prob": True}
    spec, problems = family.spec_of(config)
    assert not problems and spec.router.softmax_order == "after_topk"
    assert resolve_model(*settings_for(spec)) == spec
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weights = routing_weights(logits, logits.softmax(-1), logits.argmax(-1, keepdim=True), spec.router)
    weights.sum().backward()
    assert (weights == spec.router.scale).all() and logits.grad is not None and not logits.grad.any()
    assert family.config_of(spec).get("norm_topk_prob", True) and not family.express_problems(spec)
    learned = dataclasses.replace(small(family), top_k=1)  # ours: the weight is the score, so that the router learns
    if name == "mixtral":
        assert any("router.softmax_order" in str(p) for p in family.express_problems(learned))
    else:
        assert not family.express_problems(learned) and family.config_of(learned)["norm_topk_prob"] is False


def test_legal_configs_that_no_recipe_could_say() -> None:
    v3, qwen = BY_NAME["deepseek_v3"], BY_NAME["qwen3_moe"]
    for family, changes in (
        (v3, {"n_group": 4, "topk_group": 4}),
        (v3, {"first_k_dense_replace": 2}),
        (qwen, {"mlp_only_layers": [0, 1, 7, 1]}),
        (qwen, {"decoder_sparse_step": 2}),
        (qwen, {"rope_parameters": {**YARN, "mscale_all_dim": 1.0, "truncate": True}}),
        (qwen, {"rope_parameters": {**YARN, "factor": 1}}),
        (qwen, {"rope_parameters": {**YARN, "factor": 1, "attention_factor": 1}}),
        (qwen, {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
        (v3, {"rope_parameters": {**YARN, "mscale_all_dim": 0.7, "attention_factor": 1.3}}),
        (v3, {"moe_layer_freq": [0, 1]}),
    ):
        spec, problems = family.spec_of({**family.config_of(small(family)), **changes})
        assert not problems, list(map(str, problems))
        settings = settings_for(spec)
        recipe = dataclasses.replace(
            Recipe(), model=settings[0], router=dataclasses.replace(settings[1], aux_loss=0.01)
        )
        assert resolve_model(*settings) == spec and not run_problems(recipe, world=1)
        assert family.says(family.config_of(spec), spec)
    assert v3.spec_of({**v3.config_of(small(v3)), "n_group": 4, "topk_group": 4})[0].router.num_groups == 1


def test_two_tables_of_the_rotary_embedding() -> None:
    family = BY_NAME["qwen2_moe"]
    config = without(family.config_of(small(family)), "rope_parameters")
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    spec, problems = family.spec_of(
        {**config, "rope_scaling": yarn, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 7.0}}
    )
    assert not problems and spec.rope_theta == 5e5 and spec.yarn == YarnSpec(factor=2.0, original_length=16)
    spec, _ = family.spec_of({**config, "rope_scaling": yarn, "original_max_position_embeddings": 32})
    assert spec.yarn == YarnSpec(factor=2.0, original_length=32), "transformers takes the one beside the table"
    spec, _ = family.spec_of({**config, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert spec.yarn == YarnSpec(factor=2.0, original_length=32768), "max_position_embeddings, by its default"


def test_yarn_may_have_no_dims_between_those_that_turn_fast_and_slow() -> None:
    """Kimi-K2's file says 1 and 1."""
    family = BY_NAME["deepseek_v3"]
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    config = without(family.config_of(small(family)), "rope_parameters") | {"rope_scaling": yarn, "rope_theta": 5e4}
    spec, problems = family.spec_of(config)
    assert not problems and spec.yarn is not None and spec.yarn.beta_fast == spec.yarn.beta_slow == 1.0
    assert resolve_model(*settings_for(spec)) == spec and not family.express_problems(spec)
    wrong = {"rope_scaling": {**yarn, "beta_slow": 2.0}}
    assert "beta_fast not below beta_slow" in str(family.spec_of({**config, **wrong})[1][0])


def test_a_run_says_what_others_make_of_its_export() -> None:
    olmoe = BY_NAME["olmoe"]
    assert not olmoe.cautions(small(olmoe))
    renormalised = dataclasses.replace(small(olmoe), router=RouterSpec(renormalize=True))
    assert "vLLM ignores" in olmoe.cautions(renormalised)[0]


def test_an_unknown_architecture_is_not_offered_another() -> None:
    """DeepSeek-V3.2 attends to what an indexer chooses; whoever wrote the nearest name into its file lost that."""
    for name in ("deepseek_v32", "qwen3_next"):
        text = str(find_family(name))
        assert f"{name!r}: is not an architecture that can be imported; those are deepseek_v2, deepseek_v3, mix" in text
    assert find_family("olmoe") is BY_NAME["olmoe"]
    assert "its tensors are those of 'deepseek_v3': write that in its place" in str(find_family("kimi_k2"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_exported(preset: str) -> None:
    names = [f.model_type for f in families_for(PRESETS[preset])]
    wanted = {f.preset: f.model_type for f in FAMILIES}
    assert len(names) == 1 and names[0] == wanted.get(preset, names[0])


def test_what_a_family_cannot_say_is_told() -> None:
    odd = dataclasses.replace(PRESETS["tiny"], attention_bias=True, qk_norm="head")
    assert not families_for(odd)
    text = "\n".join(map(str, BY_NAME["mixtral"].express_problems(odd)))
    assert "model.attention_bias = true: cannot be expressed in a config.json of mixtral; mixtral has False" in text
    assert "model.qk_norm" in text
    group = dataclasses.replace(small(BY_NAME["deepseek_v2"]), router=RouterSpec(num_groups=4, group_topk=2))
    assert any("router.group_score" in str(p) for p in BY_NAME["deepseek_v2"].express_problems(group))


def test_a_model_that_no_recipe_can_say_is_refused() -> None:
    with pytest.raises(PlanError, match=r"model\.mla"):
        settings_for(dataclasses.replace(PRESETS["deepseek-v3"], name="deepseek-v3", mla=None))


def test_tensors_without_meaning_are_known() -> None:
    spec = small(BY_NAME["deepseek_v3"])
    v3 = BY_NAME["deepseek_v3"]
    assert v3.may_ignore("model.layers.2.eh_proj.weight", spec) and not v3.may_ignore("model.layers.1.x", spec)
    assert not BY_NAME["mixtral"].may_ignore("model.layers.2.x", small(BY_NAME["mixtral"]))
    tied = dataclasses.replace(spec, tied_embeddings=True)
    assert v3.may_ignore("lm_head.weight", tied) and not v3.may_ignore("lm_head.weight", spec)


def test_a_bias_that_the_model_lacks_is_zeros_on_disk() -> None:
    v3 = BY_NAME["deepseek_v3"]
    spec = small(v3, router=dataclasses.replace(small(v3).router, bias_rate=0.0))
    zeros = [link for link in v3.links(spec) if link.param is None]
    assert [z.tensor for z in zeros] == ["model.layers.1.mlp.gate.e_score_correction_bias"] and zeros[0].shape == (8,)


def test_a_box_finds_its_place_in_the_tensor() -> None:
    """Expert 1 of 4, rows 2 to 5 of the up projection (F = 8): rows 10 to 13 of the fused tensor."""
    spec = dataclasses.replace(PRESETS["tiny"], num_layers=1, num_experts=4, expert_ffn=8, hidden=16, head_dim=4)
    rule = NameRule("gate_up", "layers.{layer}.moe.experts.w13", ("all", "rows"))
    gate, up = links((rule,), spec)
    assert gate == NameLink("gate_up", (4, 16, 16), Box((0, 0, 0), (4, 8, 16)), "layers.0.moe.experts.w13",
                        Box((0, 0, 0, 0), (4, 1, 8, 16)), (0, 2, 3))  # fmt: skip
    box = Box((1, 0, 2, 0), (1, 2, 3, 16))
    shared = up.box.intersection(box)
    assert shared == Box((1, 1, 2, 0), (1, 1, 3, 16)) and in_tensor(up, shared) == Box((1, 10, 0), (1, 3, 16))
    assert gate.box.intersection(Box((0, 1, 0, 0), (4, 1, 8, 16))) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_initial_values_are_nothing_that_a_family_could_not_express(name: str) -> None:
    family = BY_NAME[name]
    spec = dataclasses.replace(PRESETS[family.preset], init_std=0.006)
    assert family.express_problems(spec) == [] and family.says(family.config_of(spec), spec)

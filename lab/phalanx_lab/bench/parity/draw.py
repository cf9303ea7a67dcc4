"""Configurations to compare: drawn ones of every family with every option, and each key of a file taken away, or null, in turn.

Decides nothing about what is right. Must never change: a case is a function of the seed and its number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Config = dict[str, Any]
SEQUENCES, LENGTH = 3, 20
LEAST_VOCAB = 257
"""A byte tokenizer has as many tokens."""
NO_MEANING = ("model_type", "architectures", "bos_token_id", "eos_token_id")
"""Keys that stay: without the first nobody knows whose file it is, the rest decides no number."""


@dataclass(frozen=True)
class Configuration:
    """`config` over weights that fit `base`."""

    name: str
    base: Config
    config: Config
    key: str = ""
    """The key that is not as in `base`; '' where all are."""


def drawn(seed: int, number: int) -> Configuration:
    """Configuration `number` of a seed: families take turns; about one in six has something that we refuse."""
    rng = np.random.default_rng([seed, number])
    model_type = list(FAMILIES)[number % len(FAMILIES)]
    config = _config(rng, model_type)
    if rng.random() < 1 / 6:
        odd = ODD[int(rng.integers(len(ODD)))]
        config |= odd
        return Configuration(f"drawn {number}: {model_type}, {next(iter(odd))}", config, config)
    return Configuration(f"drawn {number}: {model_type}", config, config)


def edges(seed: int) -> Iterator[Configuration]:
    """Each key of a drawn file of each family deleted, then null, in turn; and values at the edge of what is legal."""
    for at, model_type in enumerate(FAMILIES):
        rng = np.random.default_rng([seed, 1 << 20, at])
        base = _config(rng, model_type)
        base["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
        for key in base:
            if key in NO_MEANING:
                continue
            without = {k: v for k, v in base.items() if k != key}
            yield Configuration(f"{model_type} without {key}", base, without, key)
            yield Configuration(f"{model_type} with {key} null", base, {**base, key: None}, key)
        for change in (*EDGES, *EDGES_OF.get(model_type, ())):
            changed = {**base, **change}
            yield Configuration(f"{model_type} with {change}", changed, changed, next(iter(change)))


# ---- files -------------------------------------------------------------------------------------------------------------------


def _config(rng: np.random.Generator, model_type: str) -> Config:
    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    heads = one(1, 2, 4)
    config = {
        "model_type": model_type,
        "vocab_size": LEAST_VOCAB + int(rng.integers(40)),
        "hidden_size": {1: one(12, 16, 24), 2: one(16, 24, 40), 4: one(16, 32, 48)}[heads],
        "num_hidden_layers": one(1, 2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": one(*(n for n in (1, 2, 4) if heads % n == 0)),
        "hidden_act": one("silu", "silu", "swish"),
        "max_position_embeddings": one(32, 64, 100),
        "rms_norm_eps": one(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": bool(rng.random() < 0.3),
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": one(None, 1),
        **_rope(rng),
    }
    return config | FAMILIES[model_type](rng, config)


def _rope(rng: np.random.Generator) -> Config:
    """Plain or YaRN, as version 4 or version 5 writes it."""
    theta, old = float(rng.choice([500.0, 1e4, 1e6])), rng.random() < 0.4
    if rng.random() < 0.5:
        plain = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": None} if old else {"rope_parameters": plain}
    yarn: Config = {
        "type" if old else "rope_type": "yarn",
        "factor": float(rng.choice([1.0, 1.5, 4.0, 40.0])),
        "original_max_position_embeddings": int(rng.choice([8, 16, 4096])),
    }
    for key, values in _YARN_OPTIONS.items():
        if rng.random() < 0.4:
            yarn[key] = values[int(rng.integers(len(values)))]
    if rng.random() < 0.2:
        del yarn["original_max_position_embeddings"]
        if not old:
            yarn["original_max_position_embeddings"] = 32
    return {"rope_theta": theta, "rope_scaling": yarn} if old else {"rope_parameters": {**yarn, "rope_theta": theta}}


_YARN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "beta_fast": (32, 16.0, 4),
    "beta_slow": (1, 2.0, 0.5),
    "mscale": (1.0, 0.707, 0.0),
    "mscale_all_dim": (1.0, 0.707, 0.0),
    "truncate": (True,),
}


def _experts(rng: np.random.Generator) -> tuple[int, int]:
    """How many there are, and how many of them a token takes: often one."""
    count = int(rng.integers(1, 9))
    return count, 1 if rng.random() < 0.3 else int(rng.integers(1, min(count, 4) + 1))


def _mixtral(rng: np.random.Generator, config: Config) -> Config:
    count, chosen = _experts(rng)
    return {
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "intermediate_size": int(rng.choice([8, 16, 20])),
        "head_dim": (6, 8, 16, 12)[int(rng.integers(4))] if "yarn" in str(config) else None,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }


def _olmoe(rng: np.random.Generator, _: Config) -> Config:
    count, chosen = _experts(rng)
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "intermediate_size": int(rng.choice([8, 16, 20])),
        "norm_topk_prob": bool(rng.random() < 0.5),
        "attention_bias": False,
        "clip_qkv": None,
    }


def _qwen(rng: np.random.Generator, config: Config) -> Config:
    count, chosen = _experts(rng)
    layers = config["num_hidden_layers"]
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": int(rng.choice([8, 16, 20])),
        "intermediate_size": int(rng.choice([12, 24])),
        "norm_topk_prob": bool(rng.random() < 0.6),
        "mlp_only_layers": list(range(int(rng.integers(0, layers + 1)))) if rng.random() < 0.4 else [],
        "decoder_sparse_step": 1 if rng.random() < 0.85 else layers,
        "use_sliding_window": False,
    }


def _qwen2(rng: np.random.Generator, config: Config) -> Config:
    own = {
        "qkv_bias": bool(rng.random() < 0.6),
        "shared_expert_intermediate_size": int(rng.choice([8, 24])),
        "sliding_window": 4096,
        "max_window_layers": 1,
    }
    return _qwen(rng, config) | own


def _qwen3(rng: np.random.Generator, config: Config) -> Config:
    return _qwen(rng, config) | {"head_dim": int(rng.choice([4, 8, 16])), "attention_bias": False}


def _deepseek(rng: np.random.Generator, config: Config) -> Config:
    groups = int(rng.choice([1, 2, 4]))
    count = groups * int(rng.integers(2, 4))
    chosen_groups = int(rng.integers(1, groups + 1))
    room = chosen_groups * (count // groups)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": None if rng.random() < 0.4 else int(rng.choice([6, 12])),
        "kv_lora_rank": int(rng.choice([6, 10])),
        "qk_nope_head_dim": int(rng.choice([4, 8])),
        "qk_rope_head_dim": int(rng.choice([2, 4, 8])),
        "v_head_dim": int(rng.choice([4, 6, 16])),
        "first_k_dense_replace": int(rng.integers(0, config["num_hidden_layers"] + 1)),
        "intermediate_size": 20,
        "moe_intermediate_size": int(rng.choice([8, 12])),
        "n_routed_experts": count,
        "n_shared_experts": int(rng.integers(1, 3)),
        "num_experts_per_tok": int(rng.integers(1, min(room, 4) + 1)),
        "n_group": groups,
        "topk_group": chosen_groups,
        "routed_scaling_factor": float(rng.choice([1.0, 2.5, 16.0])),
        "attention_bias": False,
    }


def _deepseek_v2(rng: np.random.Generator, config: Config) -> Config:
    limited = rng.random() < 0.6
    own: Config = {"topk_method": "group_limited_greedy" if limited else "greedy", "norm_topk_prob": False}
    if not limited and rng.random() < 0.5:
        own |= {"n_group": None, "topk_group": None}
    return _deepseek(rng, config) | own | {"mlp_bias": False}


def _deepseek_v3(rng: np.random.Generator, config: Config) -> Config:
    return _deepseek(rng, config) | {
        "norm_topk_prob": bool(rng.random() < 0.6),
        "rope_interleave": bool(rng.random() < 0.6),
        "num_nextn_predict_layers": int(rng.integers(0, 2)),
    }


FAMILIES: dict[str, Callable[[np.random.Generator, Config], Config]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}

ODD: tuple[Config, ...] = (
    {"hidden_act": "gelu"},
    {"attention_dropout": 0.1},
    {"attention_bias": True},
    {"sliding_window": 5},
    {"sliding_window": 64, "max_position_embeddings": 64},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 4},
    {"router_jitter_noise": 0.1},
    {"clip_qkv": 0.1},
    {"mlp_bias": True},
    {"norm_topk_prob": True, "num_experts_per_tok": 1},
    {"mlp_only_layers": [1], "num_hidden_layers": 3},
    {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    {"n_group": 3},
    {"topk_group": 9},
    {"num_experts_per_tok": 9},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8,
                         "attention_factor": 2.0}, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8,
                         "truncate": False}, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_scaling": None},
    {"partial_rotary_factor": 0.5},
    {"is_causal": False},
    {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4},
    {"num_key_value_heads": 3},
    {"head_dim": 7},
    {"topk_method": "group_limited_greedy"},
    {"scoring_func": "softmax"},
)  # fmt: skip
"""What a file may have beside the rest; some of it means nothing to some families."""

_YARN_8 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
EDGES: tuple[Config, ...] = (
    {"original_max_position_embeddings": 16, "rope_parameters": {**_YARN_8, "rope_theta": 1e4}},
    {"rope_scaling": {**_YARN_8}, "rope_theta": 300.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    {"rope_parameters": {**_YARN_8, "rope_theta": 1e4, "mscale_all_dim": 1.0}},
    {"rope_parameters": {**_YARN_8, "rope_theta": 1e4, "mscale": 0.5}},
    {"rope_parameters": {**_YARN_8, "rope_theta": 1e4, "beta_fast": 1, "beta_slow": 8}},
    {"rope_parameters": {**_YARN_8, "rope_theta": 1e4, "beta_fast": 1.0, "beta_slow": 1.0}},
    {"rope_parameters": {**_YARN_8, "rope_theta": 1e4, "beta_fast": 0, "beta_slow": None}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}},
    {"rope_theta": 300.0, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 300.0, "rope_parameters": None},
    {"rope_parameters": {"rope_theta": 0.5}},
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 1, "norm_topk_prob": True},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_hidden_layers": 1},
    {"sliding_window": 0},
    {"sliding_window": 10, "max_position_embeddings": 8},
    {"num_experts": 2, "num_local_experts": 3},
    {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}},
    {"hidden_size": 30, "num_attention_heads": 4, "num_key_value_heads": 2},
)
EDGES_OF: dict[str, tuple[Config, ...]] = {
    "mixtral": ({"num_local_experts": 1, "num_experts_per_tok": 1},),
    "qwen2_moe": (
        {"mlp_only_layers": [0, 0, 9]},
        {"mlp_only_layers": [0, 1, 2], "num_hidden_layers": 3},
        {"layer_types": ["full_attention"] * 3},
        {"use_sliding_window": True, "sliding_window": 4},
        {"use_sliding_window": True, "sliding_window": None},
    ),
    "qwen3_moe": (
        {"mlp_only_layers": [0, 0, 9]},
        {"decoder_sparse_step": 2, "num_hidden_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"num_local_experts": 3, "num_experts": None},
    ),
    "olmoe": ({"head_dim": 16}, {"clip_qkv": 0.0}),
    "deepseek_v2": (
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 2, "n_routed_experts": 4},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 1},
        {"norm_topk_prob": True},
        {"head_dim": 24},
    ),
    "deepseek_v3": (
        {"n_group": 2, "topk_group": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
        {"n_group": 4, "topk_group": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
        {"n_group": 4, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 3},
        {"norm_topk_prob": None, "rope_interleave": None},
        {"first_k_dense_replace": 9},
        {"num_mtp_layers": 0},
    ),
}  # fmt: skip

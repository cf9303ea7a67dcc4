"""Reads and writes the fields of a `config.json` that decide a model's numbers; says what it cannot be.

Must never change: a field that is not there means what transformers takes for it; a field that would change the numbers and that we do not have
is refused by name, all of them at once. Fields about generation, initial values and storage are left alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.core.errors import Problem
from phalanx.core.rules import COUNT, LAYERS, POSITIVE
from phalanx.plan.model import ModelSpec, RouterSpec, YarnSpec, amplitude

DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "quantization_config": None,
    "layer_types": None,
    "per_layer_config": None,
    "is_causal": True,
}
"""What transformers takes for a field that the file does not have, where all families agree."""

KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "dense_ffn": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "num_groups": "n_group",
    "group_topk": "topk_group",
    "scale": "routed_scaling_factor",
}
"""Fields of the model -> keys of the file, as most families have them."""


@dataclass
class Options:
    """The fields of one config.json. What is wrong with them gathers in `problems`; a value is then a harmless stand-in."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    problems: list[Problem] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """What the file says, or what transformers takes where it says nothing."""
        return self.config[key] if key in self.config else self.defaults.get(key)

    def refuse(self, key: str, rule: str, hint: str = "") -> None:
        if key not in self.config and self.defaults.get(key) is not None:
            rule += " (the file does not have it: transformers takes this value)"
        self.problems.append(Problem(where=f"config.json: {key}", value=self.get(key), rule=rule, hint=hint))

    def whole(self, key: str, *, null: int | None = None, least: int = 1, most: float = COUNT.ceiling) -> int:
        """A whole number; `null` stands for null."""
        value = self.get(key)
        value = null if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.refuse(
            key,
            f"must be a whole number, at least {least}"
            + (f" and at most {most:g}" if isinstance(value, int) and value > most else ""),
        )
        return max(least, 2)

    def number(self, key: str) -> float:
        """A positive number."""
        value = finite(self.get(key))
        if value is not None and POSITIVE.allows(value):
            return value
        self.refuse(key, "must be a positive number")
        return 1.0

    def flag(self, key: str) -> bool:
        """True or false; null counts as false, as in transformers."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.refuse(key, "must be true or false")
        return False

    def only(self, key: str, *allowed: object, why: str) -> None:
        """Refuse every other value. A field that is neither in the file nor among the defaults is allowed."""
        if key not in self.config and key not in self.defaults:
            return
        value = self.get(key)
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            told = ("null" if a is None else repr(a) for a in allowed)
            self.refuse(key, why, "set it to " + " or ".join(told))


def finite(value: object) -> float | None:
    """A number of JSON that is neither a boolean nor too large, as a float; None for everything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def read_options(config: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> Options:
    """The fields of a file, those under a second name (`aliases`: that name -> the first) under their first."""
    options = Options({k: v for k, v in config.items() if k not in aliases}, {**DEFAULTS, **defaults})
    for other, key in aliases.items():
        if other not in config:
            continue
        if config.get(key, config[other]) != config[other]:
            rule, hint = (
                f"says {config[key]!r}, and {other}, which means the same, {config[other]!r}",
                f"leave {other} out",
            )
            options.refuse(key, rule, hint)
        options.config = {**options.config, key: config[other]}
    return options


def in_words_of_file(problem: Problem, keys: Mapping[str, str]) -> Problem:
    """A problem of the model, told in the keys of the file that it came from."""
    words = {**KEYS, **keys}
    name = problem.where.rpartition(".")[2]

    def told(text: str) -> str:
        return re.sub(r"\b[a-z]+_[a-z_]+\b", lambda found: words.get(found[0], found[0]), text)

    where = f"config.json: {words.get(name, name)}"
    return dataclasses.replace(problem, where=where, rule=told(problem.rule), hint=told(problem.hint))


def common(options: Options, *, latent: bool = False) -> dict[str, Any]:
    """Fields that all families share, as arguments of `ModelSpec`; refuses what none of ours has."""
    options.only("hidden_act", "silu", "swish", why="only SwiGLU is supported")
    options.only("attention_dropout", 0, 0.0, None, why="dropout is not supported")
    options.only("is_causal", True, why="attention sees all earlier tokens and no later ones")
    if options.get("quantization_config"):
        hint = "convert the weights to bfloat16, and then leave it out"
        options.refuse("quantization_config", "quantised weights cannot be trained on", hint)
    if options.get("per_layer_config"):
        options.refuse("per_layer_config", "layers that differ from each other are not supported", "leave it out")
    kinds = options.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        options.refuse("layer_types", "every layer must be full_attention")
    rope_theta, yarn = _rope(options, latent=latent)
    return {
        "num_layers": options.whole("num_hidden_layers", most=LAYERS.ceiling),
        "hidden": options.whole("hidden_size"),
        "num_heads": options.whole("num_attention_heads"),
        "vocab": options.whole("vocab_size"),
        "top_k": options.whole("num_experts_per_tok"),
        "tied_embeddings": options.flag("tie_word_embeddings"),
        "rope_theta": rope_theta,
        "yarn": yarn,
    }


def grouped_heads(options: Options) -> dict[str, Any]:
    """Key/value heads and head dim of grouped-query attention."""
    heads, hidden = options.whole("num_attention_heads"), options.whole("hidden_size")
    dim = options.whole("head_dim", null=max(1, hidden // heads))
    if dim % 2:
        given = options.get("head_dim") is not None
        key, what = ("head_dim", "") if given else ("num_attention_heads", f"makes heads of {dim} dims, which ")
        options.refuse(key, what + "must be even (rotary embedding)")
        dim += 1
    return {"num_kv_heads": options.whole("num_key_value_heads", null=heads), "head_dim": dim}


WHOLE_ATTENTION = "attention sees all earlier tokens, however many there are"


def no_sliding_window(options: Options) -> None:
    """A window would hide keys from all sequences that are longer, and no recipe remembers how long they may be."""
    if options.get("sliding_window") is not None:
        options.refuse("sliding_window", WHOLE_ATTENTION, "set it to null, if no sequence is to be longer")


def router_spec(*, top_k: int, renormalize: bool, **more: Any) -> RouterSpec:
    """Scores of all experts (their softmax, unless `more` says otherwise), then top-k. A single chosen weight that is divided by itself is 1, which is a
    softmax over one logit: our own `renormalize` never does that, as it would cut the router's gradient."""
    order: Literal["before_topk", "after_topk"] = "after_topk" if renormalize and top_k == 1 else "before_topk"
    return RouterSpec(renormalize=renormalize, softmax_order=order, **more)


def renormalizes(spec: ModelSpec) -> bool:
    """`norm_topk_prob`: what `router_spec` reads."""
    single = spec.top_k == 1
    return spec.router.softmax_order == "after_topk" if single else spec.router.renormalize


def sparse_layers(options: Options, num_layers: int) -> int:
    """How many first layers are dense, where `mlp_only_layers` and `decoder_sparse_step` say which ones."""
    listed = options.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        options.refuse("mlp_only_layers", "must be a list of layer numbers", "for example [0]")
        listed = []
    step = options.whole("decoder_sparse_step")
    dense = {i for i in range(num_layers) if i in listed or (i + 1) % step}
    if dense == set(range(len(dense))):
        return len(dense)
    if step > 1:
        options.refuse("decoder_sparse_step", "every layer after the dense ones must have experts", "set it to 1")
    else:
        hint = f"for example {list(range(len(dense)))}"
        options.refuse("mlp_only_layers", "only the first layers can be dense", hint)
    return 0


_OTHER_ROPE = {
    "rope_theta", "rope_type", "type", "finetuned", "partial_rotary_factor", "max_position_embeddings", "attention_factor",
}  # fmt: skip
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def _rope(options: Options, *, latent: bool) -> tuple[float, YarnSpec | None]:
    """Theta and YaRN, as version 5 (`rope_parameters`) or version 4 (`rope_theta`, `rope_scaling`) writes them. The second wins where both are there."""
    key = "rope_scaling" if options.get("rope_scaling") else "rope_parameters"
    rope = options.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        options.refuse(key, "must be one table, the same for all layers")
        return 10000.0, None
    theta = finite(rope["rope_theta"] if "rope_theta" in rope else options.get("rope_theta"))
    if theta is None or theta <= 0:
        options.refuse(key if "rope_theta" in rope else "rope_theta", "rope_theta must be a positive number")
        return 10000.0, None
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", options.get("partial_rotary_factor"))
    if part not in (None, 1.0) or isinstance(part, bool):
        where = key if "partial_rotary_factor" in rope else "partial_rotary_factor"
        options.refuse(where, "a rotary embedding on a part of each head is not supported")
    if kind == "default":
        return theta, None
    unknown = sorted(k for k, v in rope.items() if k not in _OTHER_ROPE | _YARN.keys() and v is not None)
    unknown = [k for k in unknown if (k, rope[k]) != ("truncate", True)]  # it is what we do
    if kind != "yarn" or unknown:
        what = f"rope_type {kind!r}" if kind != "yarn" else ", ".join(unknown)
        options.refuse(key, f"{what} is not supported; plain and yarn are")
        return theta, None
    return theta, _yarn(options, key, rope, theta=theta, latent=latent)


def _yarn(options: Options, key: str, rope: Mapping[str, Any], *, theta: float, latent: bool) -> YarnSpec | None:
    given = {ours: rope[theirs] for theirs, ours in _YARN.items() if rope.get(theirs) is not None}
    length = options.get("original_max_position_embeddings")  # beside the table it counts more than inside
    given["original_length"] = (
        given.get("original_length", options.get("max_position_embeddings")) if length is None else length
    )
    values = {name: finite(value) for name, value in given.items()}
    numbers = {name: value for name, value in values.items() if value is not None}
    length, factor = numbers.pop("original_length", 0.0), numbers.get("factor", 0.0)
    if len(numbers) < len(values) - 1 or not factor or length < 1 or length != int(length):
        options.refuse(key, "yarn needs the numbers factor and original_max_position_embeddings")
        return None
    numbers = {n: v for n, v in numbers.items() if v or n == "factor"}  # 0 counts as not given, there as here
    yarn = YarnSpec(original_length=int(length), **numbers)
    if (
        factor < 1
        or theta == 1.0
        or not yarn.beta_fast >= yarn.beta_slow > 0
        or min(yarn.mscale, yarn.mscale_all_dim) < 0
    ):
        rule = "yarn needs a factor of 1 or more, beta_fast not below beta_slow, and a rope_theta other than 1"
        options.refuse(key, rule)
        return None
    if (
        not yarn.mscale or not yarn.mscale_all_dim
    ):  # the first counts beside the second only, the second alone in latent attention
        yarn = dataclasses.replace(yarn, mscale=0.0, mscale_all_dim=yarn.mscale_all_dim if latent else 0.0)
    if rope.get("attention_factor") is not None:
        yarn = _with_amplitude(options, key, yarn, rope["attention_factor"], latent=latent)
    return yarn if factor > 1 else None


def _with_amplitude(options: Options, key: str, yarn: YarnSpec, given: object, *, latent: bool) -> YarnSpec:
    """YaRN with `attention_factor`, the factor on cosine and sine, by an `mscale` that comes to it. Beside that `mscale_all_dim` has to be there, which is in the softmax of latent attention as well."""
    wanted, growth = finite(given) or 0.0, 0.1 * math.log(yarn.factor)
    if math.isclose(wanted, amplitude(yarn), rel_tol=1e-12):
        return yarn
    scores = yarn.mscale_all_dim or (0.0 if latent else 1.0)
    own = scores + (wanted - 1) * (1 + growth * scores) / growth if scores and growth else 0.0
    if own > 0:
        return dataclasses.replace(yarn, mscale=own, mscale_all_dim=scores)
    rule = f"attention_factor {given!r} is a factor on cosine and sine that no mscale beside these keys comes to"
    options.refuse(key, rule, f"leave it out for {amplitude(yarn):.6g}")
    return yarn


# ---- the way back ---------------------------------------------------------------------------------------------------------------


def common_fields(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """The fields that `common` reads, and the architecture."""
    fields = {
        "architectures": [architecture],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab,
        "num_experts_per_tok": spec.top_k,
        "tie_word_embeddings": spec.tied_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": _rope_fields(spec),
    }
    return fields


def _rope_fields(spec: ModelSpec) -> dict[str, Any]:
    if spec.yarn is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    values = {theirs: getattr(spec.yarn, ours) for theirs, ours in _YARN.items()}
    values = {k: v for k, v in values.items() if v or not k.startswith("mscale")}
    return {"rope_type": "yarn", "rope_theta": spec.rope_theta, **values}


def dense_first(spec: ModelSpec) -> Sequence[int]:
    """`mlp_only_layers`."""
    return list(range(spec.dense_layers))

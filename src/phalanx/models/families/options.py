"""Reads and writes the fields of a `config.json` that decide a model's numbers; says what it cannot be.

Must never change: a field that would change the numbers and that we do not have is refused by name, all of them at once. Fields about
generation, initial values and storage are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import Problem
from phalanx.plan.model import ModelSpec, YarnSpec

_MISSING = object()


@dataclass
class Options:
    """The fields of one config.json. What is wrong with them gathers in `problems`; a value is then a harmless stand-in."""

    config: Mapping[str, Any]
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, key: str, rule: str, hint: str = "") -> None:
        self.problems.append(Problem(where=f"config.json: {key}", value=self.config.get(key), rule=rule, hint=hint))

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; `default` also stands for null."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.refuse(key, f"must be a whole number, at least {least}")
        return max(least, 2)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.refuse(key, "must be a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        self.refuse(key, "must be true or false")
        return default

    def only(self, key: str, *allowed: object, why: str, default: object = _MISSING) -> None:
        """Refuse every other value. A field that is not there is allowed, or counts as `default`."""
        value = self.config.get(key, allowed[0] if default is _MISSING else default)
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            self.refuse(key, why, "set it to " + " or ".join(map(repr, allowed)) if allowed else "")


def common(options: Options) -> dict[str, Any]:
    """Fields that all families share, as arguments of `ModelSpec`; refuses what none of ours has."""
    options.only("hidden_act", "silu", "swish", why="only SwiGLU is supported")
    options.only("attention_dropout", 0, 0.0, None, why="dropout is not supported")
    if options.config.get("quantization_config"):
        hint = "convert it to bfloat16 first"
        options.refuse("quantization_config", "quantised weights cannot be trained on", hint)
    rope_theta, yarn = _rope(options)
    return {
        "num_layers": options.whole("num_hidden_layers"),
        "hidden": options.whole("hidden_size"),
        "num_heads": options.whole("num_attention_heads"),
        "vocab": options.whole("vocab_size"),
        "top_k": options.whole("num_experts_per_tok"),
        "tied_embeddings": options.flag("tie_word_embeddings", False),
        "rope_theta": rope_theta,
        "yarn": yarn,
    }


def grouped_heads(options: Options) -> dict[str, Any]:
    """Key/value heads and head dim of grouped-query attention."""
    heads, hidden = options.whole("num_attention_heads"), options.whole("hidden_size")
    return {
        "num_kv_heads": options.whole("num_key_value_heads", heads),
        "head_dim": options.whole("head_dim", max(1, hidden // heads)),
    }


def no_sliding_window(options: Options) -> None:
    """A window that ends before the longest sequence would hide keys."""
    window = options.config.get("sliding_window")
    used = options.config.get("use_sliding_window", True)
    longest = options.config.get("max_position_embeddings")
    if used and isinstance(window, int) and window and (not isinstance(longest, int) or window < longest):
        options.refuse("sliding_window", f"attention sees all earlier tokens (sequences of up to {longest})")
    kinds = options.config.get("layer_types") or ["full_attention"]
    if set(kinds) != {"full_attention"}:
        options.refuse("layer_types", "every layer must be full_attention")


def sparse_layers(options: Options, num_layers: int) -> int:
    """How many first layers are dense, where `mlp_only_layers` and `decoder_sparse_step` say which ones."""
    dense = options.config.get("mlp_only_layers") or []
    count = len(dense) if isinstance(dense, list) else 0
    if sorted(dense) != list(range(count)):
        options.refuse("mlp_only_layers", "only the first layers can be dense", f"for example {list(range(count))}")
    step = options.whole("decoder_sparse_step", 1)
    expected = {i for i in range(num_layers) if (i + 1) % step}
    if step != 1 and not expected <= set(dense):
        options.refuse("decoder_sparse_step", "every layer after the dense ones must have experts", "set it to 1")
    return min(count, num_layers)


_IGNORED_ROPE = {"rope_theta", "rope_type", "type", "finetuned", "partial_rotary_factor", "max_position_embeddings"}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def _rope(options: Options) -> tuple[float, YarnSpec | None]:
    """Theta and YaRN, as version 5 (`rope_parameters`) or version 4 (`rope_theta`, `rope_scaling`) writes them."""
    config = options.config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        options.refuse(key, "must be a table")
        return 10000.0, None
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or theta <= 0:
        options.refuse("rope_theta", "must be a positive number")
        theta = 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        options.refuse(key, "a rotary embedding on a part of each head is not supported")
    if kind == "default":
        return float(theta), None
    unknown = sorted(k for k, v in rope.items() if k not in _IGNORED_ROPE | _YARN.keys() and v is not None)
    if kind != "yarn" or unknown:
        what = f"rope_type {kind!r}" if kind != "yarn" else ", ".join(unknown)
        options.refuse(key, f"{what} is not supported; plain and yarn are")
        return float(theta), None
    return float(theta), _yarn(options, key, rope)


def _yarn(options: Options, key: str, rope: Mapping[str, Any]) -> YarnSpec | None:
    given = {ours: rope[theirs] for theirs, ours in _YARN.items() if rope.get(theirs) is not None}
    if not given.get("mscale_all_dim"):
        given.pop("mscale", None)  # it counts beside the other only, there as here
    given.setdefault("original_length", options.config.get("max_position_embeddings"))
    if not all(isinstance(v, int | float) for v in given.values()) or "factor" not in given:
        options.refuse(key, "yarn needs the numbers factor and original_max_position_embeddings")
        return None
    if given["factor"] <= 1:
        options.refuse(key, "the factor of yarn must be above 1")
        return None
    length = int(given.pop("original_length"))
    return YarnSpec(original_length=length, **{k: float(v) for k, v in given.items()})


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

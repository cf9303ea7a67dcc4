"""What a family is: its names on disk and its options in `config.json`, in both directions.

A family is data and two small functions, in a file of its own (`mixtral.py`, ...). Must never change: whether a family can express a model is
decided by writing its config and reading it again, so that reader and writer cannot disagree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import Problem
from phalanx.models.families.names import Link, Rule, links
from phalanx.models.families.options import Options
from phalanx.plan.layout import Box
from phalanx.plan.model import PRESETS, ModelSpec, model_problems

TRAINING_ONLY = ("z_loss", "aux_loss", "aux_scope", "bias_rate", "force", "force_skew")
"""Fields of the router that a checkpoint of another program does not know."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    architecture: str
    preset: str
    """The preset that an imported run starts its recipe from."""
    rules: tuple[Rule, ...]
    """Names on disk."""
    fused_rules: tuple[Rule, ...]
    """Names where all experts of a layer are in one tensor."""
    read: Callable[[Options], ModelSpec]
    """The model that a config means; problems are left in the options."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """The fields that say so."""
    absent: tuple[Rule, ...] = ()
    """Tensors (one number for each expert) that must be there on disk, as zeros, where the model does not have them."""

    def spec_of(self, config: Mapping[str, Any]) -> tuple[ModelSpec, list[Problem]]:
        """The model, and everything about the config that it cannot be."""
        options = Options(config)
        spec = _canonical(self.read(options), PRESETS[self.preset])
        return spec, options.problems or model_problems(spec)

    def config_of(self, spec: ModelSpec) -> dict[str, Any]:
        return {"model_type": self.model_type, **self.write(spec)}

    def express_problems(self, spec: ModelSpec) -> list[Problem]:
        """Why this family cannot express `spec`."""
        again, problems = self.spec_of(self.config_of(spec))
        if problems:
            return [dataclasses.replace(p, where=f"{self.model_type}: {p.where}") for p in problems]
        rule = f"cannot be said in a config.json of {self.model_type}"
        return [
            Problem(where=f"model.{name}", value=value, rule=rule, hint=f"{self.model_type} has {other!r}")
            for name, value, other in differences(_canonical(spec, PRESETS[self.preset]), again)
        ]

    def links(self, spec: ModelSpec, *, fused: bool = False) -> tuple[Link, ...]:
        """All tensors of `spec`; those of `absent` have no parameter behind them."""
        found = links(self.fused_rules if fused else self.rules, spec)
        known = {link.tensor for link in found}
        whole = Box((0,), (spec.num_experts,))
        names = (r.tensor.format(layer=i) for r in self.absent for i in spec.moe_layers)
        zeros = (Link(n, whole.sizes, whole, None, whole, (0,)) for n in names if n not in known)
        return (*found, *zeros)

    def is_fused(self, tensors: Iterable[str]) -> bool:
        return any(name.endswith(".experts.gate_up_proj") for name in tensors)

    def may_ignore(self, tensor: str, spec: ModelSpec) -> bool:
        """A tensor that says nothing about the model: a head that is tied, a table of frequencies, layers for prediction further ahead."""
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        ahead = layer is not None and int(layer[1]) >= spec.num_layers and self.model_type == "deepseek_v3"
        tied = spec.tied_embeddings and tensor == "lm_head.weight"
        return ahead or tied or tensor.endswith("rotary_emb.inv_freq")


def _canonical(spec: ModelSpec, base: ModelSpec) -> ModelSpec:
    """Fields that this model never reads as the preset has them, and so the recipe too."""
    changes: dict[str, Any] = {"name": base.name}
    if not spec.dense_layers:
        changes["dense_ffn"] = base.dense_ffn
    if not spec.shared_ffn:
        changes["shared_gate"] = base.shared_gate
    if spec.router.num_groups == 1:
        changes["router"] = dataclasses.replace(spec.router, group_topk=1, group_score=base.router.group_score)
    return dataclasses.replace(spec, **changes)


def differences(spec: ModelSpec, other: ModelSpec) -> list[tuple[str, Any, Any]]:
    """(field, value, other's value) where two models compute different things, router fields as `router.x`."""
    pairs = [(f.name, getattr(spec, f.name), getattr(other, f.name)) for f in dataclasses.fields(spec)]
    routers = [
        (f"router.{f.name}", getattr(spec.router, f.name), getattr(other.router, f.name))
        for f in dataclasses.fields(spec.router)
        if f.name not in TRAINING_ONLY
    ]
    return [p for p in pairs + routers if p[1] != p[2] and p[0] not in ("name", "router")]

"""What a family is: its names on disk and its options in `config.json`, in both directions.

A family is data and two small functions, in a file of its own (`mixtral.py`, ...). Must never change: whether a family can express a model is
decided by writing its config and reading it again, so that reader and writer cannot disagree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import Problem
from phalanx.models.families.names import NameLink, NameRule, links
from phalanx.models.families.options import Options, in_words_of_file, read_options
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
    rules: tuple[NameRule, ...]
    """Names on disk."""
    fused_rules: tuple[NameRule, ...]
    """Names where all experts of a layer are in one tensor."""
    read: Callable[[Options], ModelSpec]
    """The model that a config means; problems are left in the options."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """The fields that say so."""
    defaults: Mapping[str, Any]
    """What transformers takes for a field that the file does not have, besides those that all families share."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of fields, as transformers knows them."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of the model -> keys of the file, where they are not those of most families."""
    cautions: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ()
    """What a person who exports `spec` should know of programs that read it otherwise."""
    mtp_rules: tuple[NameRule, ...] = ()
    """What blocks of multi-token prediction have besides the tensors of a block. Families without leave those blocks out."""
    copies: tuple[NameRule, ...] = ()
    """Tensors on disk that repeat a parameter: written, and not read."""
    absent: tuple[NameRule, ...] = ()
    """Tensors (one number for each expert) that must be there on disk, as zeros, where the model does not have them."""

    def spec_of(self, config: Mapping[str, Any]) -> tuple[ModelSpec, list[Problem]]:
        """The model, and everything about the config that it cannot be."""
        options = read_options(config, self.defaults, self.aliases)
        spec = self.read(options)
        problems = options.problems or [in_words_of_file(p, self.keys) for p in model_problems(spec)]
        return _canonical(spec, PRESETS[self.preset]), problems

    def config_of(self, spec: ModelSpec) -> dict[str, Any]:
        return {"model_type": self.model_type, **self.write(spec)}

    def express_problems(self, spec: ModelSpec) -> list[Problem]:
        """Why this family cannot express `spec`."""
        again, problems = self.spec_of(self.config_of(spec))
        if problems:
            return [dataclasses.replace(p, where=f"{self.model_type}: {p.where}") for p in problems]
        rule = f"cannot be expressed in a config.json of {self.model_type}"
        return [
            Problem(where=f"model.{name}", value=value, rule=rule, hint=f"{self.model_type} has {other!r}")
            for name, value, other in differences(_canonical(self.without_mtp(spec), PRESETS[self.preset]), again)
        ]

    def says(self, config: Mapping[str, Any], spec: ModelSpec) -> bool:
        """Whether `config` means `spec`, whatever it says of blocks of multi-token prediction."""
        found, problems = self.spec_of(config)
        own = _canonical(spec, PRESETS[self.preset])
        return not problems and not differences(own, dataclasses.replace(found, mtp_layers=spec.mtp_layers))

    def without_mtp(self, spec: ModelSpec) -> ModelSpec:
        """`spec` without the blocks that this family has no names for."""
        return spec if self.mtp_rules else dataclasses.replace(spec, mtp_layers=0)

    def links(self, spec: ModelSpec, *, fused: bool = False) -> tuple[NameLink, ...]:
        """All tensors of `spec`; those of `absent` have no parameter behind them."""
        spec = self.without_mtp(spec)
        found = links(self.mtp_rules + (self.fused_rules if fused else self.rules), spec)
        known = {link.tensor for link in found}
        whole = Box((0,), (spec.num_experts,))
        names = (r.tensor.format(layer=i) for r in self.absent for i in spec.moe_layers)
        zeros = (NameLink(n, whole.sizes, whole, None, whole, (0,)) for n in names if n not in known)
        return (*found, *zeros)

    def copies_of(self, spec: ModelSpec) -> tuple[NameLink, ...]:
        """Tensors to be written besides those of `links`."""
        if not self.mtp_rules:
            return ()
        whole = {link.param: link for link in links(tuple(NameRule("", rule.param) for rule in self.copies), spec)}
        return tuple(
            dataclasses.replace(whole[rule.param], tensor=rule.tensor.format(layer=layer))
            for layer in spec.mtp_blocks
            for rule in self.copies
            if rule.param in whole
        )

    def repeats(self, spec: ModelSpec, links: Iterable[NameLink]) -> dict[str, str]:
        """Tensors that are not read as they have the numbers of another of `links`, and which: a head that is tied, and what blocks of
        multi-token prediction repeat."""
        own = {link.param: link.tensor for link in links}
        tied = {"lm_head.weight": own["embedding.weight"]} if spec.tied_embeddings else {}
        return tied | {copy.tensor: own[copy.param] for copy in self.copies_of(spec)}

    def is_fused(self, tensors: Iterable[str]) -> bool:
        return any(name.endswith(".experts.gate_up_proj") for name in tensors)

    def may_ignore(self, tensor: str, spec: ModelSpec) -> bool:
        """A tensor that says nothing about the model: a head that is tied, a table of frequencies, blocks of multi-token prediction that
        nobody asked for, and what they repeat."""
        layer = re.match(r"model\.layers\.(\d{1,9})\.", tensor)
        further = bool(self.mtp_rules) and layer is not None and int(layer[1]) >= spec.num_layers
        known = further and int(layer[1]) < spec.num_layers + spec.mtp_layers  # type: ignore[index]
        copied = known and any(tensor == r.tensor.format(layer=layer[1]) for r in self.copies)  # type: ignore[index]
        tied = spec.tied_embeddings and tensor == "lm_head.weight"
        return (further and not known) or copied or tied or tensor.endswith("rotary_emb.inv_freq")


def _canonical(spec: ModelSpec, base: ModelSpec) -> ModelSpec:
    """Fields that this model never reads as the preset has them, and so the recipe too."""
    changes: dict[str, Any] = {"name": base.name, "init_std": base.init_std}
    if not spec.mtp_layers:
        changes["mtp_weight"] = base.mtp_weight
    if not spec.dense_layers:
        changes["dense_ffn"] = base.dense_ffn
    if not spec.shared_ffn:
        changes["shared_gate"] = base.shared_gate
    if not spec.moe_layers:
        names = ("num_experts", "top_k", "expert_ffn", "shared_ffn", "shared_gate", "router")
        return dataclasses.replace(spec, **changes | {n: getattr(base, n) for n in names})
    router = spec.router
    if router.num_groups == 1:
        router = dataclasses.replace(router, group_topk=1, group_score=base.router.group_score)
    if spec.top_k == 1 or router.softmax_order == "after_topk":
        router = dataclasses.replace(router, renormalize=base.router.renormalize)
    return dataclasses.replace(spec, **changes, router=router)


def differences(spec: ModelSpec, other: ModelSpec) -> list[tuple[str, Any, Any]]:
    """(field, value, other's value) where two models compute different things, router fields as `router.x`."""
    pairs = [(f.name, getattr(spec, f.name), getattr(other, f.name)) for f in dataclasses.fields(spec)]
    routers = [
        (f"router.{f.name}", getattr(spec.router, f.name), getattr(other.router, f.name))
        for f in dataclasses.fields(spec.router)
        if f.name not in TRAINING_ONLY
    ]
    return [p for p in pairs + routers if p[1] != p[2] and p[0] not in ("name", "router", "mtp_weight")]

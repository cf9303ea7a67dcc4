"""Turns a model into the settings that mean it: the inverse of `plan/model/model.py: resolve_model`, for recipes that are written by a program.

Must never change: `resolve_model` of what comes out gives the very model that went in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.plan.model.model import MLA_SETTINGS, PRESETS, ModelSpec, resolve_model
from phalanx.plan.model.rope import YarnSpec


def settings_for(spec: ModelSpec) -> tuple[ModelConfig, RouterConfig]:
    """[model] and [router] of a recipe: the preset `spec.name` and what differs from it. The vocabulary is always written down.

    Raises `PlanError` naming the fields that no recipe can say.
    """
    base = PRESETS[spec.name]
    model: dict[str, Any] = {"preset": spec.name, "vocab": spec.vocab, **_changed(spec, base, _PLAIN)}
    if spec.mla is not None and base.mla is not None:
        derived = ("head_dim", "num_kv_heads")
        model = {k: v for k, v in model.items() if k not in derived}
        model |= _changed(spec.mla, base.mla, MLA_SETTINGS)
    model |= _yarn_settings(spec.yarn, base.yarn)
    router = _changed(spec.router, base.router, tuple(f.name for f in dataclasses.fields(RouterConfig)))
    # these two have a default of their own in a recipe, whatever the preset says
    router |= {"aux_loss": spec.router.aux_loss, "z_loss": spec.router.z_loss}
    if spec.router.num_groups == 1:
        router.pop("group_topk", None)
    settings = ModelConfig(**model), RouterConfig(**router)
    raise_if(_lost(spec, *settings), PlanError, subject=f"model {spec.name}, written as settings")
    return settings


_PLAIN = tuple(
    f.name
    for f in dataclasses.fields(ModelConfig)
    if f.name != "preset" and f.name not in MLA_SETTINGS and not f.name.startswith("yarn_")
)


def _changed(value: Any, base: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {n: getattr(value, n) for n in names if getattr(value, n) != getattr(base, n)}


def _yarn_settings(yarn: YarnSpec | None, base: YarnSpec | None) -> dict[str, Any]:
    if yarn == base:
        return {}
    if yarn is None:
        return {"yarn_factor": 1.0}
    return {f"yarn_{f.name}": getattr(yarn, f.name) for f in dataclasses.fields(yarn)}


def _lost(spec: ModelSpec, model: ModelConfig, router: RouterConfig) -> list[Problem]:
    try:
        again = resolve_model(model, router)
    except ConfigError as error:
        return list(error.problems)
    hint = f"it differs from the preset {spec.name} in a field that has no setting"
    return [
        Problem(where=f"model.{f.name}", value=getattr(spec, f.name), rule="no recipe can say this", hint=hint)
        for f in dataclasses.fields(spec)
        if getattr(spec, f.name) != getattr(again, f.name)
    ]

"""What a checkpoint was written with and a run has otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.core.errors import Problem
from phalanx.core.reading import parse_json

TRAINING_ONLY = ("router.aux_loss", "router.z_loss", "router.bias_rate")
"""Coefficients of a model that change none of its values: they may change under way, as learning rates may."""


def must_stay(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Problem]:
    """What differs of two models and must not, by the names of settings."""
    problems = []
    for problem in differences(saved, current, prefix="model"):
        name = problem.where.removeprefix("model.")
        section, _, key = name.rpartition(".")
        prefix = {"router": "router.", "yarn": "model.yarn_"}.get(section, "model.")
        where = {"name": "model.preset", "yarn": "model.yarn_factor"}.get(name, prefix + key)
        if where == "router.bias_rate" and not (saved["router"].get(key) and current["router"].get(key)):
            problem = replace(problem, rule=f"{problem.rule}, and with 0 there are no biases of experts")
        elif where == "model.vocab":
            problem = replace(problem, rule=f"{problem.rule}; it follows from data.sources and data.tokenizer")
        elif where in TRAINING_ONLY:
            continue
        problems.append(replace(problem, where=where))
    return problems


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], *, prefix: str) -> list[Problem]:
    """Fields that are not the same, nested ones by their dotted name."""
    out: list[Problem] = []
    for key in sorted({*saved, *current}):
        where = f"{prefix}.{key}"
        old, new = saved.get(key, "(not set)"), current.get(key, "(not set)")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            out += differences(old, new, prefix=where)
        elif _plain(old) != _plain(new):
            out.append(Problem(where=where, value=_plain(new), rule=f"the checkpoint was written with {_plain(old)!r}"))
    return out


def _plain(value: Any) -> Any:
    """The value as JSON gives it back, so that a tuple equals the list it was saved as."""
    return parse_json(json.dumps(value), where="the run state")

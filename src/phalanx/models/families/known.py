"""The families of Hugging Face checkpoints that a run can come from and go to."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.errors import Problem
from phalanx.core.extensions import extensions
from phalanx.models.families.deepseek_v2 import DEEPSEEK_V2
from phalanx.models.families.deepseek_v3 import DEEPSEEK_V3
from phalanx.models.families.family import Family
from phalanx.models.families.mixtral import MIXTRAL
from phalanx.models.families.olmoe import OLMOE
from phalanx.models.families.qwen2_moe import QWEN2_MOE
from phalanx.models.families.qwen3_moe import QWEN3_MOE
from phalanx.plan.model import ModelSpec

FAMILIES: tuple[Family, ...] = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3)
"""Phalanx's own."""
SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Other names of these architectures, which transformers does not know either."""


def families() -> tuple[Family, ...]:
    """All families: our own, and those of installed packages (entry points of `phalanx.families`). Raises `ConfigError` for one that is no `Family`."""
    added = extensions("families", taken=[f.model_type for f in FAMILIES])
    return (*FAMILIES, *(each.load(Family) for each in added.values()))


def find_family(model_type: object) -> Family | Problem:
    """The family of a `model_type`, or what is wrong with it."""
    found = next((f for f in families() if f.model_type == model_type), None)
    if found is not None:
        return found
    hint = "those are " + ", ".join(sorted(f.model_type for f in families()))
    if str(model_type) in SAME_AS:
        hint = f"its tensors are those of {SAME_AS[str(model_type)]!r}: write that in its place"
    rule = "is not an architecture that can be imported"
    return Problem(where="config.json: model_type", value=model_type, rule=rule, hint=hint)


def families_for(spec: ModelSpec) -> list[Family]:
    """Families whose config.json can say what `spec` is."""
    return [f for f in families() if not f.express_problems(spec)]

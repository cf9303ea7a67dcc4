"""The shape of a model: its layers, its router, the list of its logical parameters with the gradient family of each, its positions (RoPE, YaRN), its floating-point operations.

The room decides what a recipe's model comes to (`resolve_model`) and knows no rank. `ModelSpec` is what every other room is given; `parameters` is the one table that shapes, layouts,
checkpoints and verification follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.model.model import (
        PRESETS as PRESETS,
        Convention as Convention,
        MlaSpec as MlaSpec,
        ModelSpec as ModelSpec,
        ParamSpec as ParamSpec,
        RouterSpec as RouterSpec,
        buffers as buffers,
        flops_per_token as flops_per_token,
        model_problems as model_problems,
        parameters as parameters,
        resolve_model as resolve_model,
    )
    from phalanx.plan.model.model_settings import settings_for as settings_for
    from phalanx.plan.model.rope import (
        YarnSpec as YarnSpec,
        amplitude as amplitude,
        frequencies as frequencies,
        softmax_factor as softmax_factor,
    )
else:
    __getattr__ = lazy(__name__)

"""Which rank does what: the shape of a model, the machines of a job, the two rank grids over one world (folding), pipeline stages, and where experts live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.mapping.cluster import ClusterSpec as ClusterSpec, read_rate as read_rate
    from phalanx.plan.mapping.folding import (
        DEGREES as DEGREES,
        GRADIENT_RULES as GRADIENT_RULES,
        GROUP_NAMES as GROUP_NAMES,
        Folding as Folding,
        GradientRule as GradientRule,
        fit_problems as fit_problems,
        folding_problems as folding_problems,
        legal_foldings as legal_foldings,
        make_folding as make_folding,
        nearest_folding as nearest_folding,
        to_dict as to_dict,
    )
    from phalanx.plan.mapping.model import (
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
    from phalanx.plan.mapping.model_settings import settings_for as settings_for
    from phalanx.plan.mapping.placement import (
        AnyPlacement as AnyPlacement,
        LayerPlacements as LayerPlacements,
        Placement as Placement,
        plain_placement as plain_placement,
    )
    from phalanx.plan.mapping.rope import (
        YarnSpec as YarnSpec,
        amplitude as amplitude,
        frequencies as frequencies,
        softmax_factor as softmax_factor,
    )
    from phalanx.plan.mapping.stage_foldings import (
        AnyFolding as AnyFolding,
        StagedFolding as StagedFolding,
        group_names as group_names,
        micro_axis as micro_axis,
        parse_stage as parse_stage,
        parse_stages as parse_stages,
        resolve_mapping as resolve_mapping,
        stage_text as stage_text,
        staged_problems as staged_problems,
        to_json_dict as to_json_dict,
    )
    from phalanx.plan.mapping.stages import (
        Stage as Stage,
        StagePlan as StagePlan,
        assign_stages as assign_stages,
        balanced_counts as balanced_counts,
        division_problems as division_problems,
        layer_costs as layer_costs,
    )
    from phalanx.plan.mapping.zigzag import (
        AttentionBlock as AttentionBlock,
        SequenceLayout as SequenceLayout,
        attention_blocks as attention_blocks,
        first_and_last as first_and_last,
        gathered_blocks as gathered_blocks,
        make_layout as make_layout,
        ring_source as ring_source,
    )
else:
    __getattr__ = lazy(__name__)

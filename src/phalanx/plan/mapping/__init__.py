"""Which rank does what: the two rank grids over one world (folding), foldings of single pipeline stages, the layers of each stage, and the ranks where experts live.

The room decides which ranks form a group and which group sums which gradient (`GRADIENT_RULES`), and what is a legal mapping. Its face is long because it is the vocabulary of all floors
above: `Folding`, `StagedFolding` and `AnyFolding`, `Stage` and `StagePlan`, `Placement` and `LayerPlacements`, each with the functions that read, check and write it. Nearly all of these
names have readers in several rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.mapping.folding import (
        DEGREES as DEGREES,
        GRADIENT_RULES as GRADIENT_RULES,
        PASS_GROUPS as PASS_GROUPS,
        STEP_GROUPS as STEP_GROUPS,
        SUMMED_GROUPS as SUMMED_GROUPS,
        Folding as Folding,
        GradientRule as GradientRule,
        exchanged_groups as exchanged_groups,
        fit_problems as fit_problems,
        folding_problems as folding_problems,
        legal_foldings as legal_foldings,
        make_folding as make_folding,
        nearest_folding as nearest_folding,
    )
    from phalanx.plan.mapping.grid import RankSet as RankSet
    from phalanx.plan.mapping.placement import (
        AnyPlacement as AnyPlacement,
        LayerPlacements as LayerPlacements,
        Placement as Placement,
        plain_placement as plain_placement,
    )
    from phalanx.plan.mapping.stage_foldings import (
        AnyFolding as AnyFolding,
        StagedFolding as StagedFolding,
        micro_axis as micro_axis,
        parse_stage as parse_stage,
        parse_stages as parse_stages,
        resolve_mapping as resolve_mapping,
        stage_text as stage_text,
        staged_problems as staged_problems,
        step_groups as step_groups,
    )
    from phalanx.plan.mapping.stages import (
        Stage as Stage,
        StagePlan as StagePlan,
        assign_stages as assign_stages,
        balanced_counts as balanced_counts,
        division_problems as division_problems,
        layer_costs as layer_costs,
    )
else:
    __getattr__ = lazy(__name__)

"""Who holds which box of which tensor: parameters, optimizer state, activations, and the holders of copies.

The room decides how a logical tensor is cut over the ranks of a mapping. `Box` and `TensorLayout` are the words in which all that moves or saves state speaks; `FlatLayout` is the gradient
buffer of a family, `StateLayouts` the state of a whole run, `HolderPlan` who else keeps a shard. Layouts written as meshes of ranks are in `mesh/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.layout.activations import activation_layout as activation_layout
    from phalanx.plan.layout.box_cells import cells as cells, cells_without as cells_without, is_covered as is_covered
    from phalanx.plan.layout.check import (
        box_problems as box_problems,
        box_text as box_text,
        coverage_problems as coverage_problems,
        overlapping_pair as overlapping_pair,
    )
    from phalanx.plan.layout.holders import ExpertState as ExpertState, HolderPlan as HolderPlan, Run as Run
    from phalanx.plan.layout.parameters import (
        Box as Box,
        FlatLayout as FlatLayout,
        FlatPiece as FlatPiece,
        LocalParam as LocalParam,
        Piece as Piece,
        boxes_of_range as boxes_of_range,
        expert_layers as expert_layers,
        flat_layouts as flat_layouts,
        local_param as local_param,
        stage_params as stage_params,
    )
    from phalanx.plan.layout.shard_copies import (
        GATHER_SHARE as GATHER_SHARE,
        copies_of as copies_of,
        keepers_of as keepers_of,
        publication as publication,
        sums_whole as sums_whole,
    )
    from phalanx.plan.layout.state import STATE_KINDS as STATE_KINDS, StateLayouts as StateLayouts
    from phalanx.plan.layout.tensors import Held as Held, TensorLayout as TensorLayout
else:
    __getattr__ = lazy(__name__)

"""One rank's step, or its part of a move of state, as an ordered list of operations with ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.program.moves import (
        compare_id as compare_id,
        message_id as message_id,
        move_program as move_program,
    )
    from phalanx.plan.program.ops import Op as Op
    from phalanx.plan.program.step import (
        Phase as Phase,
        Sizes as Sizes,
        StepOptions as StepOptions,
        StepProgram as StepProgram,
        boundary_id as boundary_id,
        gradient_id as gradient_id,
        op_id as op_id,
        step_program as step_program,
    )
else:
    __getattr__ = lazy(__name__)

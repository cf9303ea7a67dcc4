"""One rank's step, or its part of a move of state, as an ordered list of operations with ids.

The room decides the ids of everything that a step computes and sends (`step_program`), and of the messages of a move of state. Recordings, traces and predictions are compared by these ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.program.moves import (
        compare_id as compare_id,
        message_id as message_id,
        move_program as move_program,
    )
    from phalanx.plan.program.ops import (
        Op as Op,
        Phase as Phase,
        boundary_id as boundary_id,
        gradient_id as gradient_id,
        op_id as op_id,
    )
    from phalanx.plan.program.step import (
        StepOptions as StepOptions,
        StepProgram as StepProgram,
        step_program as step_program,
    )
    from phalanx.plan.program.work import Sizes as Sizes
else:
    __getattr__ = lazy(__name__)

"""A run's own program on a clock, operation by operation.

The room decides when an operation may begin on its lane and what it costs there; the order is the program's. A recorded run is compared with it id by id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.program.clock import (
        programs_hash as programs_hash,
        run_moves as run_moves,
        run_programs as run_programs,
    )
    from phalanx.simulate.program.compare_moves import (
        MeasuredMove as MeasuredMove,
        MoveComparison as MoveComparison,
        compare_move as compare_move,
    )
    from phalanx.simulate.program.compare_run import (
        Comparison as Comparison,
        MeasuredOp as MeasuredOp,
        RecordedStep as RecordedStep,
        compare_steps as compare_steps,
        table_of as table_of,
    )
    from phalanx.simulate.program.cost import ProgramOracle as ProgramOracle
    from phalanx.simulate.program.recipe import (
        RecipePrograms as RecipePrograms,
        oracle_of as oracle_of,
        programs_of_recipe as programs_of_recipe,
    )
else:
    __getattr__ = lazy(__name__)

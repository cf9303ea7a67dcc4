"""The oracle: any mapping against one rank, in float64; planted faults.

The room decides which mappings and settings are tried (`setups.py`), what counts as equal, and how a planted fault breaks a step; `run_job` runs cases and reports what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.verify.carried import not_verified as not_verified
    from phalanx.verify.forced import force_overlap as force_overlap
    from phalanx.verify.many_steps import follow as follow
    from phalanx.verify.planted import HEALTHY as HEALTHY, PLANT_TIMEOUT_S as PLANT_TIMEOUT_S
    from phalanx.verify.session import (
        TIMEOUT_S as TIMEOUT_S,
        CaseTask as CaseTask,
        VerifyJob as VerifyJob,
        run_job as run_job,
    )
    from phalanx.verify.setups import (
        EXACT_AXES as EXACT_AXES,
        ROUNDED_AXES as ROUNDED_AXES,
        default_cases as default_cases,
        recipe_cases as recipe_cases,
    )
else:
    __getattr__ = lazy(__name__)

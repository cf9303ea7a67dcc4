"""C2: whole runs whose ranks share the card and have unequal shares, against the same run of one rank on the CPU: losses, and all that a checkpoint of the last step holds.

NCCL matches collectives by their order alone, on all communicators of two ranks together, so a rank that posts one more or one less than others hangs them all. Each run here has a rank whose
last micro-batch of every step is empty, as some rank of a run has that goes on after a loss.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from phalanx_lab.bench.cluster import write_text
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.whole_runs import (
    PATIENCE_S,
    WATCHDOG_S,
    recipe_of,
    steps_of,
    tell_end,
    tell_state,
    train_still,
    worst_difference,
)

EQUAL = 1e-5
"""Losses in fp32 differ by rounding alone."""
SHARED: Mapping[str, object] = {"model.num_experts": 6, "train.global_batch": 10, "resilience.heal": "false"}
"""Five micro-batches a step."""
CASES: Mapping[str, Mapping[str, object]] = {
    "ep3": {"launch.ranks": 3, "folding.ep": 3},
    "ep2-zero2": {"launch.ranks": 2, "folding.ep": 2, "optim.zero": 2},
    "pp2-ep2": {"launch.ranks": 4, "folding.pp": 2, "folding.ep": 2},
}
"""In the last round of micro-batches the last rank (or pipeline) has none."""


def check_order(here: Here) -> None:
    """C2."""
    steps = here.pick(20, 2)
    with tempfile.TemporaryDirectory(prefix="phalanx-order-") as name:
        folder = Path(name)
        write_text(folder / "text")
        shared = {**SHARED, "train.steps": steps, "checkpoint.interval": steps, "checkpoint.asynchronous": "false"}
        alone = recipe_of(folder, "alone", **shared)
        tell_end(here, "alone", train_still(alone, still_s=PATIENCE_S))
        for case, own in CASES.items():
            recipe = recipe_of(folder, case, **shared, **own, launch__device=here.device.type)
            ended = train_still(recipe, still_s=here.pick(WATCHDOG_S, PATIENCE_S))
            tell_end(here, case, ended)
            got = steps_of(recipe)
            if got:
                here.tell(f"{case}: step ms", 1e3 * statistics.median(r["step_s"] for r in got))
            here.tell(f"{case}: steps", max((r["step"] for r in got), default=0), least=steps)
            here.tell(f"{case}: largest difference of a loss", worst_difference(got, steps_of(alone)), most=EQUAL)
            if ended.code == 0:
                tell_state(here, case, recipe, alone)

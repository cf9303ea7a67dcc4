"""How many forwards ahead of 1F1B a run would choose on a cluster (`pipeline.extra_warmup = "auto"`): its own rule on predicted passes.

Decides nothing: `plan/pipeline/schedule/eager.py` chooses. A run measures passes, transfers and what a micro-batch holds in its first step; here all three are predictions. Must never change: numbers are those that
`choose_warmup` gives for the costs of `timing.py`.
"""

from __future__ import annotations

from phalanx.core.errors import ConfigError, PlanError, Problem
from phalanx.plan.pipeline.schedule import choose_warmup
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import AnyMapping, Job
from phalanx.simulate.step.device_memory import memory_of
from phalanx.simulate.step.timing import pass_costs


def with_warmup(job: Job, mapping: AnyMapping, cluster: GpuCluster, *, memory_gb: float | None) -> AnyMapping:
    """The mapping with the chosen numbers. Raises `ConfigError` where not even 1F1B fits `memory_gb`."""
    plain = mapping.with_extra_warmup((0,) * mapping.folding.pp)
    live_bytes = [max(1, round(stage.activations / max(1, stage.live))) for stage in memory_of(job, plain)]
    try:
        choice = choose_warmup(
            mapping.schedule,
            pass_costs(job, plain, cluster),
            num_microbatches=mapping.num_microbatches(job),
            live_bytes=live_bytes,
            budget_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        )
    except PlanError as error:
        problems = [
            Problem(where="pipeline.memory_gb", value=memory_gb, rule=p.rule, hint=p.hint) for p in error.problems
        ]
        raise ConfigError(problems, subject="the recipe on a cluster") from error
    return mapping.with_extra_warmup(choice.extra_warmup)

"""How failures and slow hosts change the progress of a job.

The room decides the clock of weeks: when hosts fail, what each kind of run does about it (by the run's own rule), and what is left of the time as progress. The time of one recovery has a clock of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.failures.goodput import (
        LLAMA3_FAILURES_PER_RANK_HOUR as LLAMA3_FAILURES_PER_RANK_HOUR,
        Goodput as Goodput,
        Practice as Practice,
        expected_goodput as expected_goodput,
        poisson as poisson,
        practice_problems as practice_problems,
        read_removals as read_removals,
        simulate_goodput as simulate_goodput,
        sweep as sweep,
        swept_optimum as swept_optimum,
        young_daly as young_daly,
    )
    from phalanx.simulate.failures.goodput_elastic import (
        HostsLeft as HostsLeft,
        elastic_recipe as elastic_recipe,
        hosts_left as hosts_left,
        memory_left as memory_left,
    )
    from phalanx.simulate.failures.goodput_slow import SlowHosts as SlowHosts, slow_hosts as slow_hosts
    from phalanx.simulate.failures.recovery_cluster import host_lost as host_lost
    from phalanx.simulate.failures.recovery_time import RecoveryTime as RecoveryTime
    from phalanx.simulate.failures.slow_step import with_stragglers as with_stragglers
else:
    __getattr__ = lazy(__name__)

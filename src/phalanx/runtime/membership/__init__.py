"""Who takes part in a run: generations of members, heartbeats, votes, the membership service and the supervisor of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.membership.agent_terms import AgentSettings as AgentSettings, TooFew as TooFew
    from phalanx.runtime.membership.clocks import (
        compare_clocks as compare_clocks,
        hosts_of as hosts_of,
        numbered as numbered,
        own_host as own_host,
    )
    from phalanx.runtime.membership.lighthouse import engine as engine, keep_while_named as keep_while_named
    from phalanx.runtime.membership.member import (
        Committed as Committed,
        Reformed as Reformed,
        run_member as run_member,
        run_steps as run_steps,
    )
    from phalanx.runtime.membership.membership import Generation as Generation
    from phalanx.runtime.membership.rendezvous import GroupEpoch as GroupEpoch, NoMapping as NoMapping
    from phalanx.runtime.membership.service import start_store as start_store
    from phalanx.runtime.membership.service_address import (
        expect_service as expect_service,
        run_at as run_at,
        service_at as service_at,
    )
    from phalanx.runtime.membership.supervisor import (
        MemberMain as MemberMain,
        Supervisor as Supervisor,
        SupervisorSettings as SupervisorSettings,
    )
    from phalanx.runtime.membership.votes import (
        Decision as Decision,
        MemberReport as MemberReport,
        Resolution as Resolution,
        resolve as resolve,
    )
    from phalanx.runtime.membership.worker_agent import WorkerAgent as WorkerAgent
else:
    __getattr__ = lazy(__name__)

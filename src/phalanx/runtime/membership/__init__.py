"""Membership of a run, and the commit or abort of each of its steps.

The room decides three things and knows no model: which *generation*, a numbered list of members, a worker belongs to; whether a step is committed by all members or by none; what a
host does about a worker that ends or is silent. All of it rests on values that the first writer decides, in a service outside of the workers. A reader goes through the room by its verbs:

    serve                                keep that service (`service.py`, `store.py`; `credentials.py` says for whom)
    service_at, expect_service, run_at   find it, and what run it serves, before any rank starts
    Supervisor.run                       fork the workers of a host, see them die or freeze, report it to the service (`supervisor.py`, `worker.py`, `host_agent.py`)
    run_member                           one worker: join a generation, connect to its members, step, vote, commit, hand over, leave; and again (`member.py`)
    run_steps                            the steps alone, which a fixed world runs too: it is one generation that always commits (`steps.py`)

`membership.py` has the rules of generations and `votes.py` those of steps, both over `keys.py`. Between them and `member.py` are the worker agent (`worker_agent.py`), its background
threads (`watcher.py`), the process groups of a generation (`rendezvous.py`) and reachability probes (`reachability.py`).
The other names are the words in which these verbs speak with whoever trains: settings, the report of a member and what follows from all reports, a decision, and three events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.membership.credentials import make_credentials as make_credentials
    from phalanx.runtime.membership.member import (
        Committed as Committed,
        Reformed as Reformed,
        run_member as run_member,
    )
    from phalanx.runtime.membership.membership import Generation as Generation
    from phalanx.runtime.membership.rendezvous import GroupEpoch as GroupEpoch, NoMapping as NoMapping
    from phalanx.runtime.membership.service import (
        expect_service as expect_service,
        run_at as run_at,
        serve as serve,
        service_at as service_at,
        start_network_store as start_network_store,
    )
    from phalanx.runtime.membership.steps import Decision as Decision, run_steps as run_steps
    from phalanx.runtime.membership.supervisor import Supervisor as Supervisor, SupervisorSettings as SupervisorSettings
    from phalanx.runtime.membership.votes import (
        MemberReport as MemberReport,
        Resolution as Resolution,
        resolve as resolve,
    )
    from phalanx.runtime.membership.watcher import (
        AgentSettings as AgentSettings,
        NotForming as NotForming,
        TooFew as TooFew,
    )
    from phalanx.runtime.membership.worker_agent import WorkerAgent as WorkerAgent
else:
    __getattr__ = lazy(__name__)

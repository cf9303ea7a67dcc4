"""How long a job on a cluster takes to go on without a host, from replicas: the clock of `simulate/failures/recovery_time.py` on counts that are estimated, because a plan of thousands of ranks takes minutes.

Decides what losing the last host costs the ranks that are left, in the phases of a run on this machine. Members, mapping, groups and what is held are the run's own; of what moves the most is taken: under ZeRO every
rank gets its whole shard anew (with fewer ranks every shard begins elsewhere), and who keeps the copies of a lost host sends what it holds to two ranks. A test compares it with the counts of plans
(`recovery_work`). Rates of memory and links are those of the cluster. Must never change: no process, no torch; a constant that no cluster file has carries its source here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.layout import STATE_KINDS, stage_params
from phalanx.plan.mapping import Folding
from phalanx.plan.model import buffers
from phalanx.plan.recovery import RecoveryPlanner, StateRoom
from phalanx.simulate.failures.goodput_elastic import HostsLeft
from phalanx.simulate.failures.recovery_time import (
    Constants,
    RankRecoveryWork,
    RecoveryTime,
    RecoveryWork,
    num_groups,
    recovery_time,
)
from phalanx.simulate.hardware import Hardware
from phalanx.simulate.step import Prediction

COMMUNICATOR_S = 1.0
"""A communicator of NCCL made anew: "~1 s" of systems that heal (shared reference on resilience, section 9); not measured here."""
PLAN_S = 6e-5
"""A tensor and a rank in a plan, in Python: `phalanx bench predict --recovery` on the machine of this repository."""
TENSOR_S = 1e-4
"""A parameter with its module, gradient and state, there too."""
SUM_S_PER_BYTE = 1e-9
"""CRC-32 on a host's processor (zlib), there too."""
AXES = ("tp", "etp", "ep", "pp")
"""Ranks with the same coordinates hold the same, where state is not sharded."""


def cluster_constants(hardware: Hardware) -> Constants:
    """Units of a recovery on one kind of host. A rank has processors of its own."""
    copy_s = 2 / (hardware.memory_bytes_per_s * hardware.memory_efficiency)  # read and written
    return Constants(
        cores=math.inf,
        exit_s=0.0,  # a host that is gone says nothing: `Practice.detect_s`
        exit_s_per_byte=0.0,
        trip_s=2 * hardware.between_latency_s,
        look_s=0.01,  # `runtime/membership/keys.py: LAST_LOOK_S`
        drop_s=0.0,
        meet_s=COMMUNICATOR_S,
        member_s=0.0,
        group_s=COMMUNICATOR_S,
        gather_s=2 * hardware.between_latency_s,
        plan_s=PLAN_S,
        tensor_s=TENSOR_S,
        build_s_per_byte=copy_s,
        fresh_s_per_byte=0.0,
        sum_s=0.0,  # pieces and messages take 10 us each, beside bytes for which a rank takes seconds: their numbers are not estimated
        sum_s_per_byte=SUM_S_PER_BYTE,
        copy_s=0.0,
        copy_s_per_byte=copy_s,
        message_s=0.0,
        message_s_per_byte=1 / (hardware.between_bytes_per_s * hardware.between_efficiency),
    )


def host_lost(prediction: Prediction, left: HostsLeft) -> RecoveryTime:
    """Seconds from when a host is known to be lost to the next step of the job without it. `prediction`: of the job with all hosts.

    Raises `PlanError` where the others do not go on.
    """
    hosts = left.cluster.hosts - 1
    folding, hardware = left.folding(hosts), left.cluster.hardware
    if folding is None:
        problem = Problem(where="the other hosts", value=hosts, rule=f"do not go on: {left.why_not(hosts)}")
        raise PlanError([problem], subject="the loss of a host")
    work = work_without_host(left.planner, folding, members=left.ranks(hosts), per_host=hardware.ranks_per_host)
    step_s = prediction.step.seconds * left.cluster.world / folding.world
    return recovery_time(work, cluster_constants(hardware), step_s=step_s)


def work_without_host(planner: RecoveryPlanner, going_on: Folding, *, members: int, per_host: int) -> RecoveryWork:
    """Work of the generation that loses the last host, estimated. `members` are left, of which those of `going_on` compute; hosts have `per_host` ranks."""
    base = planner.base
    of_state = StateRoom(parameter=0, gradient=0, optimizer=planner.room.optimizer)
    of_weights = StateRoom(parameter=planner.room.parameter, gradient=0, optimizer=0)
    state, weights = replace(planner, room=of_state), replace(planner, room=of_weights)
    held = int(max(state.bytes_of_ranks(base, _hosts(base, per_host))))
    afterwards = state.bytes_of_ranks(going_on, _hosts(going_on, per_host))
    layers = [len(stage_params(planner.spec, planner.stages(going_on).of_rank(pp))) for pp in range(going_on.pp)]
    holders = min(members, base.world // min(base.pp, going_on.pp))
    lacking = _num_lacking(planner, going_on, members)
    rank = RankRecoveryWork(
        tensors=max(layers),
        parameter_bytes=int(weights.bytes_of(going_on)),
        state_bytes=0,
        held_bytes=held,
        held_pieces=0,
        pieces=0,
        kept_bytes=0,  # at most all of it comes from others
        copies=0,
        messages=0,
        sent_bytes=held * (2 if planner.zero else 1) if lacking else 0,
        received_bytes=0,
    )
    return RecoveryWork(
        hash="",  # of no plan
        folding=going_on,
        lost=base.world - members,
        members=members,
        groups=num_groups(going_on, members=members, in_order=True),
        planned=holders * (len(STATE_KINDS) * sum(layers) + len(buffers(planner.spec))),
        ranks=tuple(
            replace(rank, state_bytes=int(own), received_bytes=int(own) if number < lacking else 0)
            for number, own in enumerate(afterwards)
        ),
    )


def _hosts(folding: Folding, per_host: int) -> list[int]:
    return [rank // per_host for rank in range(folding.world)]


def _num_lacking(planner: RecoveryPlanner, going_on: Folding, members: int) -> int:
    """Ranks that get state from others: all, but where state is whole and the members that are left have mostly what ranks of the new mapping need."""
    base = planner.base
    if planner.zero or planner.slots_per_rank or any(base.degree(axis) != going_on.degree(axis) for axis in AXES):
        return going_on.world
    held, needed = (
        Counter(tuple(folding.coord(rank, axis) for axis in AXES) for rank in range(ranks))
        for folding, ranks in ((base, members), (going_on, going_on.world))
    )
    return (needed - held).total()

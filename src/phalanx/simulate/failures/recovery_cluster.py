"""How long a job on a cluster takes to go on without a host, from replicas: the clock of `simulate/failures/recovery_time.py` on counts of a mapping that is not here.

Decides what losing a host costs the ranks that are left, in the same phases as on this machine: all groups are made anew, and each rank gets a new shard of the optimizer state from
the others' network cards (with fewer replicas every shard begins elsewhere). Rates of memory and links are those of the cluster. Must never change: no process, no torch; a constant that no
cluster file has carries its source here.
"""

from __future__ import annotations

import math

from phalanx.core.errors import ConfigError, Problem
from phalanx.plan.mapping import Folding, StagedFolding
from phalanx.simulate.failures.recovery_time import (
    Constants,
    RankRecoveryWork,
    RecoveryTime,
    RecoveryWork,
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
PIECE_S = 1e-5
"""A piece of state whose checksum is compared, or that is sent, there too."""
MESSAGE_BYTES = 4 << 20
"""The largest message of a reshard plan (`plan/reshard/plan.py`)."""
LAYER_TENSORS, OTHER_TENSORS = 12, 3
"""Parameters of a layer with experts (attention, norms, router, experts), and those outside of the layers."""
STATES = 3
"""Master weights and two moments."""


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
        sum_s=PIECE_S,
        sum_s_per_byte=SUM_S_PER_BYTE,
        copy_s=PIECE_S,
        copy_s_per_byte=copy_s,
        message_s=PIECE_S + hardware.between_latency_s,
        message_s_per_byte=1 / (hardware.between_bytes_per_s * hardware.between_efficiency),
    )


def host_lost(prediction: Prediction, *, going_on: Folding | None = None) -> RecoveryTime:
    """Seconds from when a host is known to be lost to the next step of the job without it. Of the fullest stage, for the others
    wait for it.

    `going_on`: the mapping of those that are left, some of them idle perhaps; None: all of them compute, by the mapping before.
    """
    folding, hardware = prediction.mapping.folding, prediction.cluster.hardware
    if isinstance(folding, StagedFolding):
        rule, hint = "gives each stage a folding of its own, and such runs have no replicas to go on from", "folding.pp"
        problem = Problem(where="folding.stages", value=folding.label(), rule=rule, hint=hint)
        raise ConfigError([problem], subject="the loss of a host")
    fullest = max(prediction.memory, key=lambda stage: stage.weights + stage.optimizer)
    tensors = math.ceil(prediction.job.spec.num_layers / folding.pp) * LAYER_TENSORS + OTHER_TENSORS
    state, pieces = int(fullest.optimizer), STATES * tensors
    rank = RankRecoveryWork(
        tensors=tensors,
        parameter_bytes=int(fullest.weights + fullest.gradients),
        state_bytes=state,
        held_bytes=state,
        held_pieces=pieces,
        pieces=pieces,
        kept_bytes=0,  # at most all of it is another shard's
        copies=0,
        messages=2 * math.ceil(state / MESSAGE_BYTES),
        sent_bytes=state,
        received_bytes=state,
    )
    left = max(1, folding.world - hardware.ranks_per_host)
    own = {ranks for name in folding.group_names for ranks in [folding.group_of(0, name)] if len(ranks) > 1}
    again = {ranks for of_name in folding.step_groups().values() for ranks in of_name if 0 in ranks}
    work = RecoveryWork(
        hash=prediction.mapping.hash,
        folding=folding if going_on is None else going_on,
        lost=folding.world - left,
        members=left,
        groups=len(own) + len(again),
        planned=pieces * math.ceil(left / folding.pp),
        ranks=(rank,),
    )
    step_s = prediction.step.seconds * folding.world / (left if going_on is None else going_on.world)
    return recovery_time(work, cluster_constants(hardware), step_s=step_s)

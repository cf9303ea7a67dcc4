"""Everything that moves tensors or values between ranks: process groups, collectives, exchanges, what they wait for and how a wait is broken off.

All of it goes through `Collectives`, over the `Axis` of a group that `build_groups` made of a folding, or through `Peers` where values and no tensors are meant. The other names are parts of
messages that executors post by themselves (`Exchange`, `Message`, `RowsUnderWay`), and the times that were waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.comm.abortable import AbortableCall as AbortableCall, run_abortable as run_abortable
    from phalanx.runtime.comm.collectives import Collectives as Collectives
    from phalanx.runtime.comm.context_parallel import ContextParallel as ContextParallel
    from phalanx.runtime.comm.devices import (
        DeviceAbort as DeviceAbort,
        DeviceThread as DeviceThread,
        Use as Use,
        connect as connect,
        leave_behind as leave_behind,
        nccl_backends as nccl_backends,
        nccl_options as nccl_options,
        synchronize as synchronize,
    )
    from phalanx.runtime.comm.exchange import (
        Exchange as Exchange,
        Message as Message,
        travels_together as travels_together,
    )
    from phalanx.runtime.comm.groups import (
        DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S,
        Axis as Axis,
        GroupCache as GroupCache,
        Groups as Groups,
        SecondGroups as SecondGroups,
        build_groups as build_groups,
        with_second_groups as with_second_groups,
    )
    from phalanx.runtime.comm.lost import (
        LostPeers as LostPeers,
        PeerQuestions as PeerQuestions,
        print_error as print_error,
    )
    from phalanx.runtime.comm.peers import Peers as Peers, own_group as own_group
    from phalanx.runtime.comm.progress import RankProgress as RankProgress, State as State
    from phalanx.runtime.comm.row_collectives import RowsUnderWay as RowsUnderWay, backward_id as backward_id
    from phalanx.runtime.comm.sums import (
        MessageNote as MessageNote,
        MessageSums as MessageSums,
        wrong_messages as wrong_messages,
    )
    from phalanx.runtime.comm.tokens import TokensCame as TokensCame
    from phalanx.runtime.comm.tracing import traced as traced
    from phalanx.runtime.comm.waiting import ExchangeTime as ExchangeTime, Place as Place
else:
    __getattr__ = lazy(__name__)

"""Everything that moves tensors or values between ranks: process groups, collectives, the launch of local ranks, streams and time limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.comm.abortable import AbortableCall as AbortableCall, run_escapable as run_escapable
    from phalanx.runtime.comm.allocator import (
        give_back_freed_memory as give_back_freed_memory,
        in_huge_pages as in_huge_pages,
        keep_freed_memory as keep_freed_memory,
    )
    from phalanx.runtime.comm.collectives import Collectives as Collectives
    from phalanx.runtime.comm.context_parallel import ContextParallel as ContextParallel
    from phalanx.runtime.comm.devices import DeviceAbort as DeviceAbort, synchronize as synchronize
    from phalanx.runtime.comm.drained_slots import AWAY_FILE as AWAY_FILE, AwayFile as AwayFile
    from phalanx.runtime.comm.exchange import Exchange as Exchange, Message as Message
    from phalanx.runtime.comm.groups import (
        DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S,
        Axis as Axis,
        GroupCache as GroupCache,
        Groups as Groups,
        SecondGroups as SecondGroups,
        WorldInfo as WorldInfo,
        build_groups as build_groups,
        close_world as close_world,
        init_world as init_world,
        leave_errors_to_run as leave_errors_to_run,
        nccl_options as nccl_options,
        own_device as own_device,
        read_world as read_world,
        use_interface_to as use_interface_to,
        use_loopback as use_loopback,
        with_second_groups as with_second_groups,
    )
    from phalanx.runtime.comm.launch import (
        STOP_SIGNALS as STOP_SIGNALS,
        STOPPED as STOPPED,
        StopRequest as StopRequest,
        die_with_parent as die_with_parent,
        listening_socket as listening_socket,
        run_local as run_local,
        run_one as run_one,
        threads_per_rank as threads_per_rank,
        usable_cores as usable_cores,
    )
    from phalanx.runtime.comm.peers import Peers as Peers, own_group as own_group
    from phalanx.runtime.comm.row_collectives import RowsUnderWay as RowsUnderWay, backward_id as backward_id
    from phalanx.runtime.comm.streams import (
        CudaStreams as CudaStreams,
        Posted as Posted,
        Streams as Streams,
        leave_free as leave_free,
        leaving_free as leaving_free,
        streams_of as streams_of,
    )
    from phalanx.runtime.comm.tracing import traced as traced
    from phalanx.runtime.comm.waiting import ExchangeTime as ExchangeTime, Place as Place
else:
    __getattr__ = lazy(__name__)

"""The processes of a host: who a process is among all ranks and how it joins them, ranks that are forked here, their signals, threads and memory.

The room decides how a rank starts and ends (`run_local`, `StopRequest`) and what it takes from its environment (`read_world`, `init_world`). What ranks say to each other is in `runtime/comm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.processes.addresses import address_towards as address_towards, addresses_of as addresses_of
    from phalanx.runtime.processes.allocator import (
        give_back_freed_memory as give_back_freed_memory,
        in_huge_pages as in_huge_pages,
        keep_freed_memory as keep_freed_memory,
    )
    from phalanx.runtime.processes.gpus import device_here as device_here
    from phalanx.runtime.processes.launch import (
        ANSWER_STOP as ANSWER_STOP,
        STOP_SIGNALS as STOP_SIGNALS,
        STOPPED as STOPPED,
        STOPPING as STOPPING,
        StopRequest as StopRequest,
        die_with_parent as die_with_parent,
        end_with_parent as end_with_parent,
        ends_at_once as ends_at_once,
        leave_terminal as leave_terminal,
        on_stop as on_stop,
        run_local as run_local,
        run_one as run_one,
        threads_per_rank as threads_per_rank,
    )
    from phalanx.runtime.processes.reports import free_screen as free_screen, report_error as report_error
    from phalanx.runtime.processes.world import (
        WorldInfo as WorldInfo,
        close_world as close_world,
        ease_gloo as ease_gloo,
        init_world as init_world,
        leave_errors_to_run as leave_errors_to_run,
        own_device as own_device,
        read_world as read_world,
        takes_spare_messages as takes_spare_messages,
        use_interface_to as use_interface_to,
        use_loopback as use_loopback,
    )
else:
    __getattr__ = lazy(__name__)

"""A rank before it has a model: its machine, its run folder, the text, the mapping, the groups; every mistake in recipe, text or mapping is found here.

The room decides what a recipe comes to on this rank (`Rank`, `resolve_pipeline`, `make_context`) and where a run keeps its files (`RunFolder`). Its face is as long as it is
because a run in a fixed world, a member of an elastic run, a verification and an import of weights all begin here, each with some of the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.setup.machine import (
        MemoryMeter as MemoryMeter,
        compare_clocks as compare_clocks,
        lasting_rate as lasting_rate,
        matmul_flops_per_s as matmul_flops_per_s,
        own_host as own_host,
        rated_flops_per_s as rated_flops_per_s,
        versions as versions,
    )
    from phalanx.train.setup.rank import (
        DTYPES as DTYPES,
        PATIENCE_S as PATIENCE_S,
        Announced as Announced,
        Rank as Rank,
        be_deterministic as be_deterministic,
        lost_peers as lost_peers,
        make_context as make_context,
        message_ctas as message_ctas,
        name_of_rows as name_of_rows,
        open_rank as open_rank,
        own_lanes as own_lanes,
        prepare_text as prepare_text,
        resolve_pipeline as resolve_pipeline,
        tell_uncompiled as tell_uncompiled,
    )
    from phalanx.train.setup.run_folder import (
        RunFolder as RunFolder,
        RunLock as RunLock,
        RunStatus as RunStatus,
        choose_checkpoint as choose_checkpoint,
    )
else:
    __getattr__ = lazy(__name__)

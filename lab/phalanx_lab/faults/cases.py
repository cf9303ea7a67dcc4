"""Where a planted fault exists: conditions of a case, for `faults.py`. Dividing by edp changes nothing where edp is 1."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.plan.mapping.folding import Folding
from phalanx.verify.setups import Case


def over(*axes: str) -> Callable[[Case], bool]:
    """All of these axes are larger than one."""
    return lambda case: all(degrees(case).degree(axis) > 1 for axis in axes)


def degrees(case: Case) -> Folding:
    """Faults are planted where all stages are alike."""
    return case.folding if isinstance(case.folding, Folding) else Folding(world=1)


def replicated(case: Case) -> bool:
    return case.setup.replicas is not None


def all_of(*conditions: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: all(holds(case) for holds in conditions)


def experts_replicated_less(case: Case) -> bool:
    return degrees(case).edp < degrees(case).dp


def global_aux(case: Case) -> bool:
    return case.setup.spec.router.aux_loss > 0 and case.setup.spec.router.aux_scope == "global_batch"


def router_loss(case: Case) -> bool:
    router = case.setup.spec.router
    return not global_aux(case) and (router.z_loss > 0 or router.aux_loss > 0)


def local_aux(case: Case) -> bool:
    router = case.setup.spec.router
    return router.aux_loss > 0 and router.aux_scope != "global_batch"


def shared_microbatch(case: Case) -> bool:
    return degrees(case).tp * degrees(case).cp > 1


def predicts_further(case: Case) -> bool:
    return case.setup.spec.mtp_layers > 0


def bias(case: Case) -> bool:
    return case.setup.spec.router.bias_rate > 0


def all_to_all(case: Case) -> bool:
    """Rows travel by the collective that these faults change."""
    dispatch = case.setup.dispatch
    return dispatch.transport == "all_to_all" and dispatch.overlap == "serial"


def tiles(case: Case) -> bool:
    """Rows travel tile by tile, to and from other ranks."""
    return case.setup.dispatch.overlap in ("tiles", "fine", "auto") and sends_rows(case)


def chunks(case: Case) -> bool:
    return case.setup.dispatch.overlap.startswith("coarse") and sends_rows(case)


def sends_rows(case: Case) -> bool:
    return degrees(case).ep * degrees(case).etp > 1 and case.setup.dispatch.transport == "all_to_all"


def dropless(case: Case) -> bool:
    """Where rows are dropped, wrong weights would drop others."""
    return case.setup.dispatch.policy == "dropless"


def dropless_serial(case: Case) -> bool:
    dispatch = case.setup.dispatch
    return dispatch.policy == "dropless" and dispatch.overlap == "serial"


def static_rows(case: Case) -> bool:
    return case.setup.dispatch.is_static


def uneven_rows(case: Case) -> bool:
    return not static_rows(case)


def recomputes_nothing(case: Case) -> bool:
    return case.setup.recompute == "none"


def has_copies(case: Case) -> bool:
    return case.setup.holders > 1


def zero(level: int) -> Callable[[Case], bool]:
    return lambda case: case.setup.zero == level


def accumulates(case: Case) -> bool:
    return case.setup.accumulation > 1

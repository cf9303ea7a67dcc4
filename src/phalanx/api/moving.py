"""`open_resharder` as Python programs call it: its arguments are checked before it is there."""

from __future__ import annotations

from numbers import Real

import torch.distributed as dist

from phalanx.core.errors import ConfigError, Problem, of_kind, raise_if
from phalanx.plan.reshard import Hosts
from phalanx.runtime.comm import DEFAULT_TIMEOUT_S
from phalanx.runtime.reshard import PlanOptions, Resharder, open_resharder as opened


def open_resharder(
    group: dist.ProcessGroup | None = None,
    *,
    hosts: Hosts | None = None,
    options: PlanOptions | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Resharder:
    """What remembers plans from call to call: keep it, and a move that was made before costs one integer beside its bytes.

    `group`: all ranks of both meshes, by default all there are. Raises `ConfigError`.
    """
    problems = of_kind("group", group, dist.ProcessGroup | None, "must be a process group or None", "leave it out")
    rule = "must be phalanx.plan.reshard.Hosts or None"
    problems += of_kind("hosts", hosts, Hosts | None, rule, "leave it out: ranks tell the names of their hosts")
    rule = "must be phalanx.runtime.reshard.PlanOptions or None"
    problems += of_kind("options", options, PlanOptions | None, rule, "use PlanOptions()")
    if not (isinstance(timeout_s, Real) and timeout_s > 0):
        problems.append(Problem(where="timeout_s", value=timeout_s, rule="must be a number above 0", hint="use 20"))
    raise_if(problems, ConfigError, subject="the arguments")
    return opened(group, hosts=hosts, options=options, timeout_s=timeout_s)

"""The machines a job runs on: hosts, ranks on each, and the links between and inside them.

Decides which host holds which rank: consecutive ranks share a host (`rank = host * ranks_per_host + local_rank`), as torchrun
numbers them. A *host* is the failure domain. The testbed builds an emulated cluster from this spec.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PlanError, Problem, ProblemsError, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.units import format_rate, format_seconds, read_rate


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Hashed):
    """`hosts` equal hosts with `ranks_per_host` ranks each, joined by one switch that is never the bottleneck."""

    hosts: int = 2
    ranks_per_host: int = 1
    link_bit_per_s: float | None = 1e9
    """Rate of each host's link to the switch, in each direction, headers included. None: not limited."""
    link_latency_s: float = 0.0
    """Time that the links add to a packet on its way from host to host, on top of what the machine takes."""
    inside_bit_per_s: float | None = None
    """Rate between two ranks of a host. None: whatever the machine gives."""
    inside_latency_s: float = 0.0

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """Global ranks on `host`, ascending."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(cluster_problems(self), PlanError, subject="cluster")

    def explain(self) -> str:
        """The cluster in two lines that a person reads."""
        return (
            f"{self.hosts} hosts x {self.ranks_per_host} ranks = {self.world} ranks\n"
            f"  between hosts {_link(self.link_bit_per_s, self.link_latency_s)}, "
            f"inside a host {_link(self.inside_bit_per_s, self.inside_latency_s)}"
        )


def _link(bit_per_s: float | None, latency_s: float) -> str:
    rate = "unlimited" if bit_per_s is None else format_rate(bit_per_s, "bit")
    return f"{rate} + {format_seconds(latency_s)}" if latency_s else rate


def cluster_problems(spec: ClusterSpec) -> list[Problem]:
    """What is wrong with the numbers alone."""
    problems = [
        Problem(where=f"cluster.{name}", value=getattr(spec, name), rule="must be at least 1", hint="use 1 or more")
        for name in ("hosts", "ranks_per_host")
        if getattr(spec, name) < 1
    ]
    for name in ("link_bit_per_s", "inside_bit_per_s"):
        rate = getattr(spec, name)
        if rate is not None and not 0 < rate < float("inf"):
            rule = "must be above 0 and finite"
            problems.append(Problem(where=f"cluster.{name}", value=rate, rule=rule, hint="use 1e9 for 1 Gbit/s"))
    for name in ("link_latency_s", "inside_latency_s"):
        latency = getattr(spec, name)
        if not 0 <= latency < float("inf"):
            rule = "must be finite and not negative"
            problems.append(Problem(where=f"cluster.{name}", value=latency, rule=rule, hint="use 0"))
    return problems


def parse_rate(text: str, *, where: str, error: type[ProblemsError] = PlanError) -> float:
    """Bits per second from `1gbit`, `200 Mbit/s`, `1e9`. Raises `error` naming `where`."""
    rate, problem = read_rate(text, where=where)
    raise_if([problem] if problem else [], error, subject=where)
    return rate

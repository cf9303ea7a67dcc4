"""What the links of a bed really carry: one stream one way, both directions loaded, inside a host, and how long a small message takes.

Decides what is loaded when: only the streams of one figure run at a time. Every host sends once and receives once (host h to h + 1), so a
badly shaped link at either end of any host shows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import TestbedError
from phalanx.core.units import format_rate, format_seconds
from phalanx_lab.testbed import links
from phalanx_lab.testbed.testbed import Testbed

_PINGS = 200
_LIMIT_S = 60.0
_SLACK = 0.9
"""A link that carries less than this share of its rate is worth a warning: the machine is too slow or too busy for it."""


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """Rates count payload, so a perfect link shows 0.956 of its rate. Medians where a figure was measured on several links."""

    hosts: int
    rate_bit_per_s: float | None
    """What was asked for, in each direction."""
    one_way_bit_per_s: float
    one_way_each_bit_per_s: tuple[float, ...]
    """Host h to host h + 1, each alone."""
    both_ways_bit_per_s: float
    """Mean of the two directions of one link, loaded together."""
    both_ways_each_bit_per_s: tuple[float, ...]
    inside_bit_per_s: float
    """One stream from a host to itself while it has processors (probe.py)."""
    inside_over_link: float
    latency_s: float
    """One way between hosts, nothing else on the link."""
    inside_latency_s: float
    access: str
    seconds: float

    def warning(self) -> str:
        """Empty if the links carry what was asked for."""
        slowest = min(self.one_way_each_bit_per_s)
        if self.rate_bit_per_s is None or slowest >= _SLACK * self.rate_bit_per_s:
            return ""
        return (
            f"a link carries only {slowest / self.rate_bit_per_s:.0%} of its rate: "
            "this machine is too slow or too busy for it; use a lower rate"
        )

    def explain(self) -> str:
        asked = "not limited" if self.rate_bit_per_s is None else format_rate(self.rate_bit_per_s, "bit")
        each = ", ".join(format_rate(r, "bit") for r in self.one_way_each_bit_per_s)
        both = ", ".join(format_rate(r, "bit") for r in self.both_ways_each_bit_per_s)
        lines = [
            f"{self.hosts} hosts, links {asked} in each direction",
            f"  one stream one way        {format_rate(self.one_way_bit_per_s, 'bit')}  ({each})",
            f"  both directions loaded    {format_rate(self.both_ways_bit_per_s, 'bit')} each  ({both})",
            f"  inside a host             {format_rate(self.inside_bit_per_s, 'bit')}  ({self.inside_over_link:.0f}x the link)",
            f"  latency of a small message  {format_seconds(self.latency_s)} between hosts, "
            f"{format_seconds(self.inside_latency_s)} inside",
        ]
        return "\n".join(lines + ([f"  warning: {self.warning()}"] if self.warning() else []))


@dataclass(frozen=True)
class TrafficMeter:
    """Measures in one bed; `folder` keeps what the probes printed."""

    bed: Testbed
    folder: Path
    seconds: float

    def _probe(self, host: int, *words: str) -> tuple[int, str, Path]:
        name = f"probe/{time.monotonic_ns()}"
        log = self.folder / f"{name.replace('/', '-')}.log"
        argv = [sys.executable, "-P", "-m", "phalanx_lab.testbed.probe", *words]
        self.bed.host(host).spawn(name, argv, env={}, cwd=self.folder, log=log)
        return host, name, log

    def _results(self, probes: Sequence[tuple[int, str, Path]]) -> list[dict[str, float]]:
        """What each probe printed. Raises `TestbedError` if one failed or takes too long."""
        deadline = time.monotonic() + _LIMIT_S
        results = []
        for host, name, log in probes:
            while name not in (exited := self.bed.host(host).exited()):
                if time.monotonic() > deadline:
                    raise _failed(host, f"no end after {_LIMIT_S:g} s", log)
                time.sleep(0.01)
            if exited[name][0]:
                raise _failed(host, f"status {exited[name][0]}", log)
            results.append(json.loads(log.read_text().splitlines()[-1]))
        return results

    def streams(self, *pairs: tuple[int, int], figure: str = "bit_per_s") -> list[float]:
        """Bits per second of one stream for each (from, to), all at the same time (`figure`: see probe.py)."""
        receivers = [self._probe(to, "receive") for _, to in pairs]
        senders = [self._probe(source, "send", links.address(to), f"{self.seconds}") for source, to in pairs]
        self._results(senders)
        return [r[figure] for r in self._results(receivers)]

    def latency(self, source: int, to: int) -> float:
        """Seconds one way."""
        answering = self._probe(to, "echo")
        asking = self._probe(source, "ping", links.address(to), str(_PINGS))
        result, _ = self._results([asking, answering])
        return result["latency_s"]


def _failed(host: int, reason: str, log: Path) -> TestbedError:
    said = " ".join(log.read_text(errors="replace").split()[-30:])
    rule = f"a traffic probe failed; it said: {said or 'nothing'}"
    return TestbedError.of(f"testbed.host{host}", reason, rule, subject="measurement")


def measure(bed: Testbed, *, seconds: float = 1.0) -> LinkReport:
    """Load the links of a bed, `seconds` for each figure. Nothing else should run in it. Raises `TestbedError`."""
    hosts = bed.spec.hosts
    if hosts < 2:
        raise TestbedError.of("cluster.hosts", hosts, "a link joins two hosts", "use 2 or more", subject="measurement")
    begin = time.monotonic()
    folder = bed.folder / "probes"
    folder.mkdir(exist_ok=True)
    traffic = TrafficMeter(bed, folder, seconds + 0.3)
    one_way = [traffic.streams((h, (h + 1) % hosts))[0] for h in range(hosts)]
    both = traffic.streams((0, 1), (1, 0))
    inside = traffic.streams((0, 0), figure="best_bit_per_s")[0]
    return LinkReport(
        hosts=hosts,
        rate_bit_per_s=bed.spec.link_bit_per_s,
        one_way_bit_per_s=statistics.median(one_way),
        one_way_each_bit_per_s=tuple(one_way),
        both_ways_bit_per_s=statistics.fmean(both),
        both_ways_each_bit_per_s=tuple(both),
        inside_bit_per_s=inside,
        inside_over_link=inside / statistics.median(one_way),
        latency_s=traffic.latency(0, 1),
        inside_latency_s=traffic.latency(0, 0),
        access=bed.access,
        seconds=time.monotonic() - begin,
    )

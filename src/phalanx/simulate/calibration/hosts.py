"""What several hosts measured of themselves as one host's constants, and how the ranks of a job lie on hosts.

Decides what stands for all: of each row the median over the hosts, of memory and threads the least, so that what fits there fits on all. Must never change: a cluster
file has one kind of host, so hosts that differ by more than a fifth are reported (`apart`), and hosts with different numbers of ranks are refused.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TypeVar

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.messages import message
from phalanx.simulate.calibration.fit import (
    HostTimes,
    Measurements,
    TimedAttention,
    TimedCollective,
    TimedProduct,
    TimedStream,
)

MOST_APART = 1.2
"""Slowest over fastest host of which nothing is said."""
_TIMES = ("seconds", "forward_s", "backward_s")
_Row = TypeVar("_Row", TimedProduct, TimedAttention, TimedStream)


@message
@dataclass(frozen=True, kw_only=True)
class HostRows(HostTimes):
    """Rows of one host of several."""

    name: str


def ranks_of_host(names: Sequence[str]) -> int:
    """Ranks of each host, from the host of each rank. Raises `ConfigError` where hosts have different numbers of them, or the ranks of one do not stand side by side."""
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    problems = []
    for name in dict.fromkeys(names):
        places = [number for other, number in runs if other == name]
        if len(places) > 1:
            rule = f"has ranks in {len(places)} places, and the ranks of a host stand side by side in a cluster"
            problems.append(Problem(where="host", value=name, rule=rule, hint="number ranks host by host, as torchrun"))
        elif places[0] != runs[0][1]:
            rule = f"has {places[0]} of the ranks and {runs[0][0]} has {runs[0][1]}: a cluster has as many on each host"
            problems.append(Problem(where="host", value=name, rule=rule, hint=f"start {runs[0][1]} there"))
    raise_if(problems, ConfigError, subject="the hosts of the job")
    return runs[0][1]


def combined(
    hosts: Sequence[HostRows], links: Sequence[TimedCollective], *, ranks_per_host: int, title: str
) -> Measurements:
    """One host that stands for all. Raises `ConfigError` where hosts measured other rows than the first."""
    first = hosts[0]
    raise_if([p for host in hosts[1:] for p in _other_rows(first, host)], ConfigError, subject="the measurements")
    return Measurements(
        title=title,
        ranks=ranks_per_host,
        hosts=len(hosts),
        threads=min(host.threads for host in hosts),
        memory_bytes=min(host.memory_bytes for host in hosts),
        copy_bytes_per_s=statistics.median(host.copy_bytes_per_s for host in hosts),
        launch_s=statistics.median(host.launch_s for host in hosts),
        products=_medians([host.products for host in hosts]),
        experts=_medians([host.experts for host in hosts]),
        attention=_medians([host.attention for host in hosts]),
        streams=_medians([host.streams for host in hosts]),
        links=tuple(links),
    )


def apart(hosts: Sequence[HostRows]) -> list[str]:
    """How far hosts are from being equals, as a person reads it: kinds of work that the slowest takes more than `MOST_APART` times
    as long for as the fastest (median over rows), and threads."""
    found = []
    for kind, of_host in _by_kind(hosts).items():
        ratio = {
            host.name: statistics.median(own / usual for own, usual in zip(times, _usual(of_host), strict=True))
            for host, times in zip(hosts, of_host, strict=True)
        }
        slow, fast = max(ratio, key=ratio.__getitem__), min(ratio, key=ratio.__getitem__)
        if ratio[slow] > MOST_APART * ratio[fast]:
            found.append(f"{kind}: {slow} takes {ratio[slow] / ratio[fast]:.2f} times as long as {fast}")
    threads = {host.name: host.threads for host in hosts}
    if len(set(threads.values())) > 1:
        found.append("threads of a rank: " + ", ".join(f"{n} on {name}" for name, n in threads.items()))
    return found


def _by_kind(hosts: Sequence[HostRows]) -> dict[str, list[list[float]]]:
    """Seconds of all rows of a kind, of each host."""
    kinds: dict[str, list[list[float]]] = {}
    for what in ("products", "experts"):
        for precision in dict.fromkeys(row.precision for row in getattr(hosts[0], what)):
            kinds[f"{what} {precision}"] = [
                [row.seconds for row in getattr(host, what) if row.precision == precision] for host in hosts
            ]
    kinds["attention"] = [[row.forward_s for row in host.attention] for host in hosts]
    kinds["memory"] = [[row.seconds for row in host.streams] for host in hosts]
    return kinds


def _usual(of_host: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(row) for row in zip(*of_host, strict=True)]


def _other_rows(first: HostRows, host: HostRows) -> list[Problem]:
    problems = []
    for what in ("products", "experts", "attention", "streams"):
        one, other = ([_without_times(row) for row in getattr(each, what)] for each in (first, host))
        if one != other:
            rule = f"measured other {what} than {first.name}"
            problems.append(Problem(where="host", value=host.name, rule=rule, hint="run the same version on all hosts"))
    return problems


def _without_times(row: TimedProduct | TimedAttention | TimedStream) -> tuple[object, ...]:
    return tuple(getattr(row, field.name) for field in fields(row) if field.name not in _TIMES)


def _medians(of_host: Sequence[Sequence[_Row]]) -> tuple[_Row, ...]:
    """Row by row."""
    return tuple(
        replace(
            rows[0],
            **{
                field.name: statistics.median(getattr(row, field.name) for row in rows)
                for field in fields(rows[0])
                if field.name in _TIMES
            },
        )
        for rows in zip(*of_host, strict=True)
    )

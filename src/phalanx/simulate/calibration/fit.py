"""The constants of a machine from times that were measured on it, how well they fit, and the cluster file that holds them.

Decides the fit: each constant from rows of its own kind, by the least sum of absolute logarithms of predicted over measured, so that one row
that was disturbed moves nothing. Must never change: a constant is one of `hardware.Hardware` and carries as its source what it was fitted to; the error
that is reported for a kind is that of the formula alone, without the tables of measured times that the file has beside the constants.

Other fits answer other questions and stay where they are asked: a run fits overheads of its own overlap to whole layers, on the planning floor, so that all ranks agree; the lab fits a law to
each kind of operation of a recorded run, and pieces of a recovery to lines through two sizes.

    memory      share of the best rate measured, and the time of a kernel: elementwise operations and products
    products    share of the best rate measured, by type
    experts     nothing is fitted: the formula of products over all rows of a group, held against the run's own kernels
    attention   share of the best bf16 rate by length, at one number of heads; the error is that at another
    links       a latency for all and a rate for each number of ranks; between hosts one latency and one rate, that of a rank beside all others of its host
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.messages import message
from phalanx.core.reading import toml_value
from phalanx.simulate.hardware import LINKS, GroupSpan, Hardware, Network, Oracle, experts_s, parse_hardware

WIDTH = {"bf16": 2, "fp32": 4}
"""Bytes of an element."""
_SHARES = np.linspace(0.05, 1, 96)
"""Shares of a peak that are tried."""
HALF_BYTES = 1.0
"""Half-speed bytes of an alpha-beta link: its latency alone says how fast small messages are."""


@message
@dataclass(frozen=True, kw_only=True)
class TimedProduct:
    """(m, k) x (k, n), or with `groups` the two projections of experts: m rows in all, hidden k, width n of each."""

    m: int
    n: int
    k: int
    precision: str
    seconds: float
    groups: int = 1


@message
@dataclass(frozen=True, kw_only=True)
class TimedAttention:
    """Causal attention of one sequence."""

    seq: int
    heads: int
    dim: int
    forward_s: float
    backward_s: float

    @property
    def flops(self) -> float:
        """FLOP of a forward pass, causal half counted."""
        return 2.0 * self.seq**2 * self.heads * self.dim


@message
@dataclass(frozen=True, kw_only=True)
class TimedStream:
    """A memory-bound operation that moves so many bytes."""

    what: str
    moved_bytes: float
    seconds: float


@message
@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """A collective of `ranks` ranks on `hosts` hosts, from when the last of them has posted it to the last end; bytes as in `Hardware.measured_links`."""

    what: str
    ranks: int
    num_bytes: float
    seconds: float
    hosts: int = 1


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """What the ranks of one host measured, all at once."""

    threads: int
    memory_bytes: float
    """Memory bytes of each rank."""
    copy_bytes_per_s: float
    launch_s: float
    products: tuple[TimedProduct, ...]
    experts: tuple[TimedProduct, ...]
    attention: tuple[TimedAttention, ...]
    streams: tuple[TimedStream, ...]


@message
@dataclass(frozen=True, kw_only=True)
class Measurements(HostTimes):
    """Everything that was timed, and on what."""

    title: str
    ranks: int
    """Number of ranks of a host that were measured together."""
    links: tuple[TimedCollective, ...]
    hosts: int = 1

    def check(self) -> None:
        """Raise `ConfigError` with all problems: kinds without rows, and times, sizes and rates that are none."""
        raise_if(_problems(self), ConfigError, subject="the measurements")


@dataclass(frozen=True)
class Error:
    """How far predictions are from measurements: |predicted / measured - 1|."""

    rows: int
    median: float
    worst: float
    worst_row: str

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "median": self.median, "worst": self.worst, "worst_row": self.worst_row}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants, each with its source, and the error of each kind."""

    hardware: Hardware
    table: Mapping[str, Any] = field(repr=False)
    errors: Mapping[str, Error]

    def to_json(self) -> str:
        """The cluster file."""
        return json.dumps(self.table, indent=2) + "\n"

    def to_toml(self) -> str:
        """The same as TOML."""
        return "\n".join(_toml(self.table)) + "\n"


def _problems(m: Measurements) -> list[Problem]:
    problems = []
    for name in ("products", "experts", "attention", "streams"):
        if not getattr(m, name):
            problems.append(Problem(where=name, value=0, rule="needs at least one measured row"))
    if m.ranks > 1 and all(x.hosts > 1 for x in m.links):
        problems.append(Problem(where="links", value=0, rule="needs rows inside a host where it has several ranks"))
    if m.hosts > 1 and not any(1 < x.hosts == x.ranks for x in m.links):
        problems.append(Problem(where="links", value=0, rule="needs rows of one rank of each of several hosts"))
    named = [("", m), *((f"{name}[{i}].", row) for name in ("products", "experts", "attention", "streams", "links")
                        for i, row in enumerate(getattr(m, name)))]  # fmt: skip
    for where, row in named:
        for key, value in vars(row).items():
            if isinstance(value, int | float) and not 0 < value < math.inf:
                problems.append(Problem(where=where + key, value=value, rule="is a number above 0"))
    for i, link in enumerate(m.links):
        if link.what not in LINKS:
            problems.append(Problem(where=f"links[{i}].what", value=link.what, rule=f"is one of {', '.join(LINKS)}"))
    return problems


def calibrate(measured: Measurements, *, name: str, when: str) -> Calibration:
    """Fit all constants. `when` goes into the sources. Raises `ConfigError` where measurements are missing or impossible."""
    measured.check()
    fit = _Fit(measured, when)
    table = fit.table()
    hardware = parse_hardware(json.dumps(table), name=name, where=f"{name}.json")
    return Calibration(hardware=hardware, table=table, errors=fit.errors(hardware))


class _Fit:
    """The constants of one machine, one after another: what memory and kernels take decides what is left for products."""

    def __init__(self, measured: Measurements, when: str) -> None:
        self.m = measured
        beside = f"{measured.ranks} ranks of {measured.threads} threads at once"
        beside += f", on each of {measured.hosts} hosts" if measured.hosts > 1 else ""
        self.how = f"measured by phalanx calibrate on {when}, {beside}"

    def _constant(self, value: Any, what: str) -> dict[str, Any]:
        return {"value": value, "source": f"{what}, {self.how}"}

    def table(self) -> dict[str, Any]:
        m, c = self.m, self._constant
        bandwidth, share, kernel_s, efficiencies = self._rates()
        peaks = {kind: max(2.0 * p.m * p.n * p.k / p.seconds for p in self._of(kind)) for kind in WIDTH}
        peak, efficiency = peaks["bf16"], efficiencies["bf16"]
        table: dict[str, Any] = {
            "title": m.title,
            "ranks_per_host": c(m.ranks, "ranks that were measured together"),
            "bf16_flops_per_s": c(peak, "best of all products in bf16"),
            "memory_bytes": c(m.memory_bytes, "the machine's memory divided by its ranks"),
            "memory_bytes_per_s": c(bandwidth, "best rate of a copy or an elementwise operation, caches included"),
            "threads": c(m.threads, "threads of a rank"),
            "gemm_efficiency": c(efficiency, "fitted to products, with all that is bound by memory"),
            "memory_efficiency": c(share, "fitted to elementwise operations and products"),
            "kernel_s": c(kernel_s, "fitted to elementwise operations and products"),
            "launch_s": c(m.launch_s, "one addition of one number"),
            "fp32_flops_per_s": c(peaks["fp32"], "best of all products in float32"),
            "fp32_efficiency": c(efficiencies["fp32"], "fitted to products in float32"),
            "attention": self._attention(peak),
            **self._links(),
        }
        tables = {
            f"{what}{'' if kind == 'bf16' else '_fp32'}": [_row(p) for p in rows if p.precision == kind]
            for what, rows in (("gemm", m.products), ("experts", m.experts))
            for kind in WIDTH
        }
        links = [[x.what, x.ranks, x.num_bytes, x.seconds] for x in m.links if x.hosts == 1]
        between = [[x.what, x.ranks, x.hosts, x.num_bytes, x.seconds] for x in m.links if x.hosts > 1]
        table["measured"] = {
            name: rows for name, rows in {**tables, "links": links, "between": between}.items() if rows
        }
        return table

    def _of(self, kind: str) -> list[TimedProduct]:
        rows = [p for p in self.m.products if p.precision == kind]
        if not rows:
            raise ConfigError.of("products", kind, "has no measured row", subject="the fit")
        return rows

    def _rates(self) -> tuple[float, float, float, dict[str, float]]:
        """Best rate of memory, share of it that is reached, seconds of a kernel, and by type the share of the best rate of products: all at once,
        for small products are bound by memory and by starting."""
        streams = self.m.streams
        bandwidth = max(self.m.copy_bytes_per_s, *(s.moved_bytes / s.seconds for s in streams))
        least = min([*(s.seconds for s in streams), *(p.seconds for p in self.m.products)])
        shares, kernels = np.geomspace(0.02, 1, 70)[:, None, None], np.geomspace(least / 100, least, 50)[None, :, None]
        moved, seconds = (
            np.array(column) for column in zip(*((s.moved_bytes, s.seconds) for s in streams), strict=True)
        )
        error = np.abs(np.log((moved / (shares * bandwidth) + kernels) / seconds)).sum(axis=2)
        chosen = {}
        for kind in WIDTH:
            found = [self._products(kind, shares * bandwidth, kernels, float(x)) for x in _SHARES]
            chosen[kind] = np.stack(found)
            error = error + chosen[kind].min(axis=0)
        i, j = np.unravel_index(int(error.argmin()), error.shape)
        efficiencies = {kind: float(_SHARES[costs[:, i, j].argmin()]) for kind, costs in chosen.items()}
        return bandwidth, float(shares[i, 0, 0]), float(kernels[0, j, 0]), efficiencies

    def _products(self, kind: str, bandwidth: Any, kernels: Any, efficiency: float) -> Any:
        """Error of all products of one type with each bandwidth and each kernel time."""
        rows = self._of(kind)
        work, moved, seconds = (np.array(column) for column in zip(*(
            (2.0 * p.m * p.n * p.k, WIDTH[kind] * (p.m * p.k + p.m * p.n + p.k * p.n), p.seconds) for p in rows
        ), strict=True))  # fmt: skip
        peak = float((work / seconds).max())
        predicted = kernels * 4 / 3 + np.maximum(work / (peak * efficiency), moved / bandwidth)
        return np.abs(np.log(predicted / seconds)).sum(axis=2)

    def _attention(self, peak: float) -> dict[str, Any]:
        knots = _knots(self.m.attention)
        forward = [[a.seq, min(1.0, a.flops / a.forward_s / peak)] for a in knots]
        back = statistics.median(2.5 * a.forward_s / a.backward_s for a in knots)
        return {
            "forward": self._constant(forward, "share of bf16_flops_per_s by length, causal half counted"),
            "backward": self._constant(back, "rate of the backward pass, 2.5 times the work, over that of the forward"),
        }

    def _links(self) -> dict[str, Any]:
        """Latency and rates inside, and between hosts; on one host between repeats what is inside."""
        near = [x for x in self.m.links if x.hosts == 1]
        if near:
            latency, rates = _fit_links(near)
            what = "fitted to all collectives between ranks of a host"
        else:
            memory = self.m.copy_bytes_per_s
            latency, rates = self.m.launch_s, [[2, memory]]
            what = "one rank: no link was measured, memory's rate stands here"
        if self.m.hosts > 1:
            far_s, far_rate = _fit_between([x for x in self.m.links if 1 < x.hosts == x.ranks], start_s=latency)
            where = "fitted to collectives of one rank of each host, with all ranks of the hosts at work"
        else:
            far_s, far_rate = latency, rates[0][1]
            where = f"that inside, for no other host was measured ({what})"
        c = self._constant
        return {
            "inside": {
                "bytes_per_s": c(rates, what),
                "latency_s": c(latency, what),
                "half_bytes": c(HALF_BYTES, "latency and rate alone describe these links"),
            },
            "between": {
                "bytes_per_s": c(far_rate, where),
                "efficiency": c(1.0, "the rate is a measured one"),
                "latency_s": c(far_s, where),
            },
        }

    # ---- how well it fits --------------------------------------------------------------------------------------------------

    def errors(self, hardware: Hardware) -> dict[str, Error]:
        """Errors of the formulas with the fitted constants, by kind."""
        bare = without_tables(hardware)
        oracles = {kind: Oracle(bare, kind) for kind in WIDTH}
        bandwidth = oracles["bf16"].bytes_per_s
        found: dict[str, list[tuple[float, float, str]]] = {}
        for p in self.m.products:
            computed = oracles[p.precision].product(p.m, p.n, p.k)
            found.setdefault(f"products {p.precision}", []).append((computed, p.seconds, f"{p.m} x {p.n} x {p.k}"))
        for p in self.m.experts:
            rate, width = oracles[p.precision].peak_rate, WIDTH[p.precision]
            computed = experts_s(
                p.m, p.n, p.k, p.groups, rate=rate, bandwidth=bandwidth, kernel_s=bare.kernel_s, width=width
            )
            what = f"{p.groups} experts, {p.m // p.groups} rows each, {p.k} x {p.n}"
            found.setdefault(f"experts {p.precision}", []).append((computed, p.seconds, what))
        oracle = oracles["bf16"]
        held = set(map(id, _knots(self.m.attention)))
        for a in self.m.attention:
            what = f"{a.seq} tokens, {a.heads} heads of {a.dim}"
            if id(a) not in held:
                found.setdefault("attention", []).append((oracle.attention(a.flops, a.seq), a.forward_s, what))
            backward_s = oracle.attention(a.flops, a.seq, backward=True)
            found.setdefault("attention backward", []).append((backward_s, a.backward_s, what))
        for s in self.m.streams:
            what = f"{s.what} of {s.moved_bytes:.0f} bytes"
            found.setdefault("memory", []).append((oracle.memory(s.moved_bytes), s.seconds, what))
        network = Network(bare)
        for x in self.m.links:
            what = f"{x.num_bytes:.0f} bytes over {x.ranks} ranks{f' on {x.hosts} hosts' if x.hosts > 1 else ''}"
            kind = f"{'link' if x.hosts == 1 else 'between'} {x.what}"
            found.setdefault(kind, []).append((_link_s(network, x), x.seconds, what))
        return {kind: error_of(rows) for kind, rows in found.items()}


def _fit_links(links: Sequence[TimedCollective]) -> tuple[float, list[list[float]]]:
    """The latency that suits all numbers of ranks best, and the best rate of each."""
    by_ranks: dict[int, list[tuple[float, float, float]]] = {}
    for x in links:
        rounds = _times(x)
        by_ranks.setdefault(x.ranks, []).append((rounds, rounds * _share(x) * x.num_bytes, x.seconds))
    fastest = max(moved / s for rows in by_ranks.values() for _, moved, s in rows)
    rates = np.geomspace(fastest / 50, fastest * 3, 120)
    shortest = min(x.seconds for x in links)
    best: tuple[float, float, list[list[float]]] | None = None
    for latency in np.geomspace(shortest / 20, shortest * 10, 80):
        error, found = 0.0, []
        for ranks in sorted(by_ranks):
            times, moved, seconds = (np.array(column) for column in zip(*by_ranks[ranks], strict=True))
            predicted = times * latency + moved / rates[:, None]
            costs = np.abs(np.log(predicted / seconds)).sum(axis=1)
            found.append([float(ranks), float(rates[costs.argmin()])])
            error += float(costs.min())
        if best is None or error < best[0]:
            best = error, float(latency), found
    assert best is not None  # there is a latency
    return best[1], best[2]


def _fit_between(links: Sequence[TimedCollective], *, start_s: float) -> tuple[float, float]:
    """Latency of a message between hosts and rate of a rank's own link that suit all collectives of one rank a host best, as `Network` adds them up: `start_s` to start one (messages
    have no other latency), then a latency for each step of a ring, and one for an all-to-all."""
    rows = [
        (
            _times(x) * (1 if x.what == "all_to_all" else x.hosts - 1),
            _times(x) * _share(x) * x.num_bytes,
            0.0 if x.what == "send" else _times(x) * start_s,
            x.seconds,
        )
        for x in links
    ]
    steps, moved, begun, seconds = (np.array(column) for column in zip(*rows, strict=True))
    latencies = np.geomspace(seconds.min() / 50, seconds.min() * 10, 120)[:, None, None]
    rates = np.geomspace((moved / seconds).max() / 50, (moved / seconds).max() * 3, 120)[None, :, None]
    error = np.abs(np.log((begun + steps * latencies + moved / rates) / seconds)).sum(axis=2)
    i, j = np.unravel_index(int(error.argmin()), error.shape)
    return float(latencies[i, 0, 0]), float(rates[0, j, 0])


def _times(x: TimedCollective) -> float:
    """How often a ring carries the tensor round."""
    return 2.0 if x.what == "all_reduce" else 1.0


def _share(x: TimedCollective) -> float:
    """Share of the bytes that leaves a rank."""
    return 1.0 if x.what == "send" else (x.ranks - 1) / x.ranks


def with_links(hardware: Hardware, links: Sequence[TimedCollective], *, ranks_per_host: int) -> Hardware:
    """The hardware with links as they were measured, and nothing of its own links: tables, and a latency and a rate that go on where tables end.

    Raises `ConfigError` where nothing was measured between two ranks.
    """
    pairs = [x for x in links if x.ranks > 1]
    raise_if([] if pairs else [Problem(where="links", value=0, rule="needs rows of two ranks")], ConfigError,
             subject="the measurements")  # fmt: skip
    inside, between = ([x for x in pairs if (x.hosts > 1) == far] for far in (False, True))
    near, far = (_alpha_beta(rows or pairs) for rows in (inside, between))
    return replace(
        hardware,
        ranks_per_host=ranks_per_host,
        inside_bytes_per_s=((2.0, near[1]),),
        inside_latency_s=near[0],
        inside_half_bytes=HALF_BYTES,
        between_bytes_per_s=far[1],
        between_efficiency=1.0,
        between_latency_s=far[0],
        measured_links=tuple((x.what, x.ranks, x.num_bytes, x.seconds) for x in inside),
        measured_between=tuple((x.what, x.ranks, x.hosts, x.num_bytes, x.seconds) for x in between),
    )


def _alpha_beta(rows: Sequence[TimedCollective]) -> tuple[float, float]:
    """Shortest time, and best rate of any row."""
    return min(x.seconds for x in rows), max(_times(x) * _share(x) * x.num_bytes / x.seconds for x in rows)


def error_of(rows: Sequence[tuple[float, float, str]]) -> Error:
    """Error of (predicted, measured, what it is)."""
    wrong = [(abs(predicted / measured - 1), what) for predicted, measured, what in rows]
    worst, what = max(wrong)
    return Error(len(rows), statistics.median(error for error, _ in wrong), worst, what)


def without_tables(hardware: Hardware) -> Hardware:
    """The same constants, nothing measured beside them."""
    nothing: dict[str, Any] = {name: () for name in vars(hardware) if name.startswith("measured_")}
    return replace(hardware, **nothing)


def _row(p: TimedProduct) -> list[float]:
    """One row of a table of the file."""
    return [p.m, p.n, p.k, *([p.groups] if p.groups > 1 else []), p.seconds]


def _link_s(network: Network, x: TimedCollective) -> float:
    span = GroupSpan(x.ranks // x.hosts, x.hosts)
    match x.what:
        case "all_reduce":
            return network.all_reduce(x.num_bytes, span)
        case "all_to_all":
            return network.all_to_all(x.num_bytes, span)
        case "send":
            return network.send(x.num_bytes, between=x.hosts > 1)
        case _:
            return network.all_gather(x.num_bytes, span)


def _knots(rows: Iterable[TimedAttention]) -> list[TimedAttention]:
    """One row for each length: that of the fewest heads."""
    found: dict[int, TimedAttention] = {}
    for row in sorted(rows, key=lambda a: (a.seq, a.heads)):
        found.setdefault(row.seq, row)
    return list(found.values())


def _toml(table: Mapping[str, Any]) -> list[str]:
    """Constants first, then sections."""
    flat = {k: v for k, v in table.items() if not _is_section(v)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in flat.items()]
    for name, part in table.items():
        if _is_section(part):
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in part.items())]
    return lines


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and "value" not in value


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(x)}" for key, x in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return toml_value(value)

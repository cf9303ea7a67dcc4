"""Clusters of accelerators as numbers: what a device computes, moves and holds, and what links carry.

A cluster is a file of constants, each with its source (`simulate/data/clusters/*.toml`), and a number of ranks: `h100x128`, or
`my.toml:128`; `phalanx calibrate` writes such a file of the machine that it runs on. Must never change: no constant without a source, and none that depends on a model. The testbed's
emulated hosts and links are another thing.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from phalanx.core.errors import ConfigError, Problem, nearest, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.reading import MalformedError, is_count, parse_json, parse_toml, read_text
from phalanx.core.rules import RANKS, plain
from phalanx.core.units import format_bytes, format_rate

Curve = tuple[tuple[float, float], ...]
"""(x, y) with x ascending; between knots y is linear in log x, outside it is the nearest knot's."""

_FILES = (".toml", ".json")
_NAME = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*?)x(?P<ranks>[0-9]{1,9})", re.IGNORECASE)


DEVICE_HOP_S = 9e-7
"""Hop seconds of devices whose file does not say it: H100's (`h100.toml`, inside.hop_s)."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Constants of one kind of host. Rates are per rank and one way."""

    name: str
    title: str
    ranks_per_host: int
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    sms: int | None
    """Multiprocessors of a device; None where ranks compute on processors."""
    gemm_efficiency: float
    fp8_efficiency: float
    memory_efficiency: float
    kernel_s: float
    launch_s: float
    attention_forward: Curve
    attention_backward: float
    inside_bytes_per_s: Curve
    inside_latency_s: float
    inside_half_bytes: float
    between_bytes_per_s: float
    between_efficiency: float
    between_latency_s: float
    measured_gemm: tuple[tuple[int, int, int, float], ...] = ()
    """(m, n, k, seconds) in bf16, timed on this very machine; they come before the formula."""
    measured_gemm_fp32: tuple[tuple[int, int, int, float], ...] = ()
    measured_experts: tuple[tuple[int, int, int, int, float], ...] = ()
    """(rows, n, k, experts, seconds) of both products of experts and what lies between them, in bf16: hidden k, width n, `rows` of all experts."""
    measured_experts_fp32: tuple[tuple[int, int, int, int, float], ...] = ()
    measured_links: tuple[tuple[str, int, float, float], ...] = ()
    """(collective, ranks, bytes, seconds) inside a host, timed there too. Bytes are those of the whole tensor, of all-to-all what a rank sends."""
    measured_between: tuple[tuple[str, int, int, float, float], ...] = ()
    """(collective, ranks, hosts that they are on, bytes, seconds) between hosts; `hosts` divides `ranks`."""
    fp32_flops_per_s: float | None = None
    """FLOP/s of products in float32 without the tensor cores' TF32, as runs make them; None where nobody says it."""
    fp32_efficiency: float | None = None
    inside_hop_s: float | None = None
    """Seconds of each further step of a ring or chain inside a host; None: `hop_s` says what stands for it."""
    threads: int | None = None
    """Threads of a rank that computes on processors; None for a device."""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def hop_s(self) -> float:
        """Latency of one step between ranks of a host: the file's; else H100's on devices, a whole latency on processors, where gloo posts each step."""
        if self.inside_hop_s is not None:
            return self.inside_hop_s
        return self.inside_latency_s if self.sms is None else DEVICE_HOP_S

    def share_of(self, multiprocessors: int) -> float:
        """Share of a device, at most all of it, that a kernel takes beside computation; 0 on processors, where what it takes was not measured."""
        return 0.0 if self.sms is None else min(1.0, multiprocessors / self.sms)

    @property
    def native_dtype(self) -> Literal["bfloat16", "float32"]:
        """What `train.dtype = "auto"` of a run is there: bfloat16 on devices, on processors the type whose products the file has faster."""
        if self.sms is not None or self.fp32_flops_per_s is None:
            return "bfloat16"
        wide = self.fp32_flops_per_s * (self.fp32_efficiency or self.gemm_efficiency)
        return "float32" if wide > self.bf16_flops_per_s * self.gemm_efficiency else "bfloat16"

    def peak(self, precision: str) -> float:
        """Dense FLOPs per second; a precision that the device lacks runs as bf16."""
        if precision == "fp32" and self.fp32_flops_per_s is not None:
            return self.fp32_flops_per_s
        if precision == "fp8" and self.fp8_flops_per_s is not None:
            return self.fp8_flops_per_s
        return self.bf16_flops_per_s


@dataclass(frozen=True, kw_only=True)
class GpuCluster(Hashed):
    """`world` ranks of one kind of hardware; consecutive ranks share a host, as torchrun numbers them."""

    hardware: Hardware
    world: int
    file: str | None = None
    """Where its constants are, if they are the user's."""

    @property
    def name(self) -> str:
        return f"{self.hardware.name}x{self.world}"

    @property
    def word(self) -> str:
        """What `--cluster` takes."""
        return self.name if self.file is None else f"{self.file}:{self.world}"

    @property
    def hosts(self) -> int:
        return math.ceil(self.world / self.hardware.ranks_per_host)

    def check(self) -> None:
        """Raise `ConfigError` with all problems."""
        raise_if(cluster_problems(self), ConfigError, subject=f"cluster {self.name}")

    def explain(self) -> str:
        """The cluster in three lines that a person reads."""
        h = self.hardware
        return (
            f"{self.name}: {_many(self.world, 'rank')} on {_many(self.hosts, 'host')}, {h.title}\n"
            f"  {format_rate(h.bf16_flops_per_s, 'FLOP')} bf16, {format_bytes(h.memory_bytes)} at "
            f"{format_rate(h.memory_bytes_per_s, 'B')}\n"
            f"  inside a host {format_rate(h.inside_bytes_per_s[-1][1], 'B')}, "
            f"between hosts {format_rate(h.between_bytes_per_s, 'B')} a rank"
        )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def at(curve: Curve, x: float) -> float:
    """Value of a curve: linear in log x between knots."""
    xs = [knot[0] for knot in curve]
    i = bisect_left(xs, x)
    if i == 0 or i == len(xs):
        return curve[min(i, len(xs) - 1)][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))


def cluster_problems(cluster: GpuCluster) -> list[Problem]:
    """What is wrong with the numbers of a cluster."""
    if RANKS.allows(cluster.world):
        return []
    rule = f"needs at least 1 rank and at most {plain(RANKS.ceiling)}"
    return [Problem(where="cluster", value=cluster.name, rule=rule, hint="try h100x8")]


# ---- files ----------------------------------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "": (
        "ranks_per_host", "bf16_flops_per_s", "memory_bytes", "memory_bytes_per_s", "gemm_efficiency",
        "memory_efficiency", "kernel_s", "launch_s",
    ),
    "attention": ("forward", "backward"),
    "inside": ("bytes_per_s", "latency_s", "half_bytes"),
    "between": ("bytes_per_s", "efficiency", "latency_s"),
}  # fmt: skip
_OPTIONAL_OF: Mapping[str, tuple[str, ...]] = {"inside": ("hop_s",)}
"""What a file may leave out of each section, for which `Hardware` knows what stands."""
_OPTIONAL = {"fp8_flops_per_s": None, "fp8_efficiency": 0.57, "fp32_flops_per_s": None, "fp32_efficiency": None}
_GEMM = ("[m, n, k, seconds]", (int, int, int, float))
_EXPERTS = ("[rows, n, k, experts, seconds]", (int, int, int, int, float))
_MEASURED: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "gemm": _GEMM,
    "gemm_fp32": _GEMM,
    "experts": _EXPERTS,
    "experts_fp32": _EXPERTS,
    "links": ("[collective, ranks, bytes, seconds]", (str, int, float, float)),
    "between": ("[collective, ranks, hosts, bytes, seconds]", (str, int, int, float, float)),
}
"""How the rows of each table are written, and the types of their columns."""
LINKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
"""Collectives that a table of measured links may name."""
_CURVES = ("attention_forward", "inside_bytes_per_s")
MOST_NUMBER = 1e24
"""Largest constant of a cluster: a million times the fastest machine's operations a second."""
_SHARES = ("gemm_efficiency", "fp8_efficiency", "fp32_efficiency", "memory_efficiency", "between_efficiency")


_KINDS = ("sms", "threads")
"""What a file of devices, or of processors, has."""


def known_hardware() -> tuple[str, ...]:
    """Names of the cluster files that come with Phalanx."""
    folder = resources.files("phalanx.simulate") / "data" / "clusters"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_hardware(name: str) -> Hardware:
    """Constants by name, or from a file of the user's. Raises `ConfigError` for unknown hardware."""
    if name.endswith(_FILES):
        return _read_hardware(name)
    names = known_hardware()
    if name not in names:
        problem = Problem(where="--cluster", value=name, rule="is not known hardware", hint=nearest(name, names))
        raise ConfigError([problem], subject="the cluster")
    text = (resources.files("phalanx.simulate") / "data" / "clusters" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_hardware(text, name=name, where=f"{name}.toml")


def parse_cluster(text: str) -> GpuCluster:
    """`h100x128`, `path/to/file.toml:128` (or .json), or the file alone for one host of it. Raises `ConfigError` with all problems."""
    path, colon, count = text.rpartition(":")
    if not (colon and path.endswith(_FILES)):
        path, count = text, ""
    if path.endswith(_FILES):
        if colon and path != text and not is_count(count):
            rule, hint = "needs a number of ranks after the colon", f"try {path}:128"
            raise ConfigError.of("--cluster", text, rule, hint, subject="the cluster")
        hardware = _read_hardware(path)
        cluster = GpuCluster(hardware=hardware, world=int(count) if count else hardware.ranks_per_host, file=path)
    else:
        match = _NAME.fullmatch(text.strip())
        if match is None:
            rule = "is not HARDWARExRANKS"
            hint = f"try h100x128; hardware: {', '.join(known_hardware())}, or FILE.toml:128"
            raise ConfigError.of("--cluster", text, rule, hint, subject="the cluster")
        cluster = GpuCluster(hardware=load_hardware(match["name"].lower()), world=int(match["ranks"]))
    cluster.check()
    return cluster


def _read_hardware(path: str) -> Hardware:
    """Constants of a file of the user's."""
    try:
        content = read_text(path)
    except (OSError, MalformedError) as error:
        rule, hint = f"cannot be read ({getattr(error, 'strerror', 'not text')})", "name a cluster file"
        problem = Problem(where="--cluster", value=path, rule=rule, hint=hint)
        raise ConfigError([problem], subject="the cluster") from error
    return parse_hardware(content, name=Path(path).stem, where=path)


def parse_hardware(text: str, *, name: str, where: str) -> Hardware:
    """Constants from the text of a cluster file, TOML or (`where` ends in .json) JSON. Raises `ConfigError` with all problems of it."""
    try:
        table = parse_json(text, where=where) if where.endswith(".json") else parse_toml(text, where=where)
    except MalformedError as error:
        raise ConfigError(error.problems, subject="the cluster file") from error
    if not isinstance(table, dict):
        problem = Problem(where=where, value=type(table).__name__, rule="is a table of constants")
        raise ConfigError([problem], subject="the cluster file")
    problems: list[Problem] = _unknown(table, where)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for section, keys in _SECTIONS.items():
        part = table if not section else table.get(section, {})
        part = part if isinstance(part, dict) else {}
        optional = (
            {**dict.fromkeys(_KINDS), **_OPTIONAL} if not section else dict.fromkeys(_OPTIONAL_OF.get(section, ()))
        )
        for key in (*keys, *optional):
            full = f"{section}_{key}" if section else key
            if key in optional and key not in part:
                values[full] = optional[key]
                if optional[key] is not None:
                    sources[full] = "not in the file: what was fitted to H100"
                continue
            wrong = _read(part, key, full, values, sources)
            if wrong is not None:
                rule, value = wrong
                hint = f'write {key} = {{ value = ..., source = "..." }}' + (f" in [{section}]" if section else "")
                problems.append(Problem(where=f"{where}: {full}", value=value, rule=rule, hint=hint))
    problems += _range_problems(values, where) + _kind_problems(table, where)
    measured, found = _measured(table, where)
    raise_if(problems + found, ConfigError, subject="the cluster file")
    for key in ("ranks_per_host", *_KINDS):
        values[key] = None if values[key] is None else int(values[key])
    title = str(table.get("title", name))
    tables: dict[str, Any] = {f"measured_{key}": rows for key, rows in measured.items()}
    return Hardware(name=name, title=title, sources=sources, **tables, **values)


def _read(
    part: Mapping[str, Any], key: str, full: str, values: dict[str, Any], sources: dict[str, str]
) -> tuple[str, object] | None:
    """Take one constant; what is wrong with it, if anything."""
    entry = part.get(key)
    if entry is None:
        return "is missing", None
    if not isinstance(entry, dict) or "value" not in entry or not str(entry.get("source", "")).strip():
        return "is a table of value and source", entry
    value = entry["value"]
    if full in _CURVES:
        value = _curve(value)
        if value is None:
            return "is a list of [x, y] above 0 with x ascending", entry["value"]
    elif not _is_positive(value):
        return f"is a number above 0, at most {MOST_NUMBER:g}", value
    values[full], sources[full] = value, str(entry["source"])
    return None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_NUMBER


def _curve(value: object) -> Curve | None:
    if not isinstance(value, list) or not value:
        return None
    knots = [tuple(k) if isinstance(k, list) and len(k) == 2 else None for k in value]
    good = all(k and all(map(_is_positive, k)) for k in knots)
    if not good:
        return None
    xs = [k[0] for k in knots if k]
    return tuple((float(k[0]), float(k[1])) for k in knots if k) if xs == sorted(set(xs)) else None


def _range_problems(values: Mapping[str, Any], where: str) -> list[Problem]:
    """Shares above 1, and counts that are not whole."""
    shares = [
        Problem(where=f"{where}: {key}", value=values[key], rule="is a share of a peak, at most 1", hint="try 0.8")
        for key in _SHARES
        if values.get(key) is not None and values[key] > 1
    ]
    return shares + [
        Problem(where=f"{where}: {key}", value=values[key], rule="is a whole number of at least 1", hint=f"try {near}")
        for key in ("ranks_per_host", *_KINDS)
        if values.get(key) is not None and values[key] != (near := max(1, round(values[key])))
    ]


def _kind_problems(table: Mapping[str, Any], where: str) -> list[Problem]:
    """A file is of devices or of processors."""
    given = [key for key in _KINDS if key in table]
    sms = table.get("sms")
    if given == ["sms"] and isinstance(sms, dict) and str(sms.get("source", "")).startswith("threads of a rank"):
        rule = "counts threads, as `phalanx calibrate` of 2026-11-21 wrote it: this file would be taken for one of a device"
        return [
            Problem(
                where=f"{where}: sms", value=sms.get("value"), rule=rule, hint="calibrate again, or call it threads"
            )
        ]
    if len(given) == 1:
        return []
    rule = "cannot go with threads: ranks compute on a device or on processors" if given else "is missing"
    hint = "sms (multiprocessors) for devices, threads (of a rank) for processors"
    return [Problem(where=f"{where}: sms", value=table.get("sms"), rule=rule, hint=hint)]


def _unknown(table: Mapping[str, Any], where: str) -> list[Problem]:
    """Names that no constant has, of the file and of its sections."""
    known = {
        "": {"title", "measured", *_SECTIONS[""], *_KINDS, *_OPTIONAL, *filter(None, _SECTIONS)},
        "measured": set(_MEASURED),
    }
    known |= {section: {*keys, *_OPTIONAL_OF.get(section, ())} for section, keys in _SECTIONS.items() if section}
    problems = []
    for section, names in known.items():
        part = table if not section else table.get(section, {})
        for name in part if isinstance(part, dict) else ():
            if name not in names:
                full = f"{section}.{name}" if section else name
                rule = "is not a constant of a cluster"
                problems.append(Problem(where=f"{where}: {full}", value=None, rule=rule, hint=nearest(name, names)))
    return problems


_Rows = dict[str, tuple[tuple[Any, ...], ...]]


def _measured(table: Mapping[str, Any], where: str) -> tuple[_Rows, list[Problem]]:
    """Tables of measured times by name."""
    part = table.get("measured", {})
    if not isinstance(part, dict):
        return {}, [Problem(where=f"{where}: measured", value=part, rule="is a table of lists of rows")]
    found: _Rows = {}
    problems = []
    for name, (form, types) in _MEASURED.items():
        rows = part.get(name, [])
        bad = [row for row in rows if not _is_row(row, types)] if isinstance(rows, list) else [rows]
        if bad:
            names = f", with a collective of {', '.join(LINKS)}" if str in types else ""
            rule = f"holds rows {form}, all above 0{names}"
            problems.append(Problem(where=f"{where}: measured.{name}", value=bad[0], rule=rule))
        else:
            found[name] = tuple(tuple(to(x) for to, x in zip(types, row, strict=True)) for row in rows)
    return found, problems


def _is_row(row: object, types: Sequence[type]) -> bool:
    return (
        isinstance(row, list)
        and len(row) == len(types)
        and all(x in LINKS if kind is str else _is_positive(x) for kind, x in zip(types, row, strict=True))
    )

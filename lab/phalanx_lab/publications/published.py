"""Published measurements as jobs: a row of a CSV of the shared columns becomes a job, a mapping, a cluster and a step time.

Decides how a row is read: numbers from its columns, shapes from `data/models.csv` where the row's own columns agree, software from the words of
the row (`where_read`) and what is known of its source (`data/sources.toml`). Whatever had to be assumed is a flag of the row. Must
never change: nothing here depends on the measured value, but for its unit.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, nearest, raise_if
from phalanx.plan.model.model import Convention, ModelSpec
from phalanx.simulate.mapping.models import known_models, published_model

COLUMNS = (
    "source", "model", "hidden", "layers", "experts", "topk", "ffn", "seq_len", "gpus", "gpu", "TP", "CP", "EP", "ETP", "PP", "VPP",
    "DP", "micro_batch", "global_batch", "precision", "metric", "value", "where_read",
)  # fmt: skip
METRICS = ("step_time_s", "tokens_per_s_per_GPU", "MFU_pct", "model_TFLOPS_per_GPU", "OOM")
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8")
GPUS = (
    ("gb300", "gb300"), ("gb200", "gb200"), ("b300", "b300"), ("b200", "b200"), ("h200", "h200"), ("h800", "h800"),
    ("h100-96gb", "h100-hbm2e"), ("h100", "h100"), ("a800", "a800"), ("a100", "a100"),
)  # fmt: skip
"""(how the column begins, hardware), first match decides."""


@dataclass(frozen=True, kw_only=True)
class PublishedFacts:
    """What a source says about its software. The defaults are those of current Megatron-Core."""

    fused_attention: bool = True
    tp_overlap: bool = False
    dp_overlap: bool = True
    recompute: str = ""
    """Empty: the source is silent; then the least that fits."""
    sharding: str = "optimizer"
    reshard_after_forward: bool = False
    cp_method: str = "ring"
    virtual: str = "layers"
    """Where VPP is blank: as many virtual stages as layers on a stage, or 1."""
    routing: str = ""
    hardware: str = ""
    method_is_megatron: bool = False
    gradient_bytes: int = 4
    fused_permute: bool = True
    pipeline_micro_batch: int = 0
    """Micro-batch of runs with a pipeline, where the column has the batch of a whole step; 0: as the column says."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, read."""

    line: int
    source: str
    family: str
    calibration: bool
    spec: ModelSpec
    seq_len: int
    global_batch: int
    micro_batch: int
    gpus: int
    hardware: str
    degrees: AnyMapping[str, int]
    virtual: int | None
    precision: str
    metric: str
    value: float
    convention: Convention
    text: str
    method: str
    facts: PublishedFacts
    flags: tuple[str, ...] = ()

    @property
    def comparable(self) -> tuple[object, ...]:
        """Rows with equal keys are ways to do the same job on the same machines."""
        return (
            self.source,
            self.spec.name,
            self.spec.num_layers,
            self.seq_len,
            self.global_batch,
            self.gpus,
            self.precision,
        )


@dataclass
class _Reading:
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, where: str, value: object, rule: str, hint: str = "") -> None:
        self.problems.append(Problem(where=where, value=value, rule=rule, hint=hint))


def data_file(name: str) -> Path:
    """A file of published measurements that comes with the lab."""
    return Path(str(resources.files("phalanx_lab.publications") / "data" / name))


def read_rows(path: Path) -> tuple[Row, ...]:
    """All measurements of a CSV. Raises `DataError` with every problem of it: missing columns, words and numbers that cannot be."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin their files with a mark
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            table = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError.of(str(path), None, f"cannot be read ({reason})", subject="the rows") from error
    missing = [c for c in COLUMNS if c not in columns]
    rule, hint = "is missing from the header", "training_steps.csv has all columns"
    raise_if(
        [Problem(where=f"{path}: {c}", value=None, rule=rule, hint=hint) for c in missing],
        DataError,
        subject="the rows",
    )
    if not table:
        raise DataError.of(str(path), None, "has no rows", subject="the rows")
    models, sources, reading = known_models(), _sources(), _Reading()
    for line, entry in enumerate(table, start=2):
        _read(reading, f"{path}:{line}", line, {k: (v or "").strip() for k, v in entry.items() if k}, models, sources)
    raise_if(reading.problems, DataError, subject="the rows")
    return tuple(reading.rows)


def _sources() -> list[dict[str, Any]]:
    return list(tomllib.loads(data_file("sources.toml").read_text(encoding="utf-8"))["source"])


def _facts(source: str, sources: list[dict[str, Any]]) -> PublishedFacts:
    for entry in sources:
        if source.startswith(entry["match"]):
            return PublishedFacts(**{k: v for k, v in entry.items() if k != "match"})
    return PublishedFacts()


# ---- one row --------------------------------------------------------------------------------------------------------------------

_POSITIVE = ("hidden", "layers", "ffn", "seq_len", "gpus", "global_batch")
_NOT_NEGATIVE = ("experts", "topk")
_DEGREES = ("TP", "CP", "EP", "ETP", "PP", "VPP", "DP", "micro_batch")


def _number(reading: _Reading, where: str, entry: AnyMapping[str, str], key: str, least: int) -> int | None:
    text = entry[key]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf or value != int(value):
        reading.add(f"{where}: {key}", text, f"must be a whole number of at least {least}")
        return None
    return int(value)


def _experts(reading: _Reading, where: str, experts: int, top_k: int) -> None:
    """A token chooses at least one expert and at most all, where there are any."""
    if experts and not 1 <= top_k <= experts:
        reading.add(f"{where}: topk", top_k, f"must be 1 to the {experts} experts")
    if top_k and not experts:
        reading.add(f"{where}: experts", experts, f"must be at least topk = {top_k}", "topk 0 in a dense model")


def _read(
    reading: _Reading,
    where: str,
    line: int,
    entry: dict[str, str],
    models: AnyMapping[str, dict[str, str]],
    sources: list[dict[str, Any]],
) -> None:
    """Read one line; its problems go to `reading`."""
    before = len(reading.problems)
    for key in _POSITIVE:
        if not entry[key]:
            reading.add(f"{where}: {key}", None, "is empty")
        _number(reading, where, entry, key, 1)
    for key in _NOT_NEGATIVE:
        _number(reading, where, entry, key, 0)
    if len(reading.problems) == before:
        _experts(reading, where, int(float(entry["experts"] or 0)), int(float(entry["topk"] or 0)))
    degrees = {key: _number(reading, where, entry, key, 1) for key in _DEGREES}
    entry["metric"] = next((m for m in METRICS if m.lower() == entry["metric"].lower()), entry["metric"])
    metric, precision = entry["metric"], re.split(r"[-_ ]", entry["precision"].lower())[0]
    if metric not in METRICS:
        reading.add(f"{where}: metric", metric, "is not a metric", nearest(metric, METRICS))
    if precision not in PRECISIONS:
        reading.add(f"{where}: precision", entry["precision"], "is not a precision", nearest(precision, PRECISIONS))
    try:
        value = float(entry["value"])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        reading.add(f"{where}: value", entry["value"], "must be a number above 0")
    hardware = next((name for start, name in GPUS if start in entry["gpu"].lower()), None)
    if hardware is None:
        reading.add(f"{where}: gpu", entry["gpu"], "is not known hardware", "known: " + ", ".join(g for g, _ in GPUS))
    if len(reading.problems) > before or hardware is None:
        return
    reading.rows.append(
        _row(line, entry, degrees, value, precision, hardware, models, _facts(entry["source"], sources))
    )


def _row(
    line: int,
    entry: dict[str, str],
    degrees: AnyMapping[str, int | None],
    value: float,
    precision: str,
    hardware: str,
    models: AnyMapping[str, dict[str, str]],
    facts: PublishedFacts,
) -> Row:
    spec, flags = published_model(entry, models)
    text = entry["where_read"]
    method = (m.group(1).strip() if (m := re.search(r"method=([^;,)]*)", text)) else "").split(" -> ")[0]
    found, convention_flags = _convention(text, entry["metric"])
    flags += convention_flags
    given = {k.lower(): v for k, v in degrees.items() if v is not None and k in ("TP", "CP", "EP", "ETP", "PP")}
    full = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, **given}
    if spec.num_moe_layers and "etp" not in full:
        full["etp"] = _expert_tensor_parallel(full, int(entry["gpus"]), method, spec)
        flags.append(f"ETP is blank: {full['etp']}")
    if degrees["micro_batch"] is None:
        flags.append("micro batch is blank: 1")
    moe = "MoE" if spec.num_moe_layers else "dense"
    name = re.split(r" \(", entry["source"])[0]
    return Row(
        line=line,
        source=entry["source"],
        family=f"{name} {moe}",
        calibration=not spec.num_moe_layers or spec.name.startswith("Grok"),
        spec=spec,
        seq_len=int(float(entry["seq_len"])),
        global_batch=int(float(entry["global_batch"])),
        micro_batch=degrees["micro_batch"] or 1,
        gpus=int(float(entry["gpus"])),
        hardware=facts.hardware or hardware,
        degrees={"etp": 1, **full},
        virtual=degrees["VPP"],
        precision="fp8" if precision.endswith("fp8") else "bf16",
        metric=entry["metric"],
        value=value,
        convention=found,
        text=text,
        method=method,
        facts=facts,
        flags=tuple(flags),
    )


def _convention(text: str, metric: str) -> tuple[Convention, list[str]]:
    """How the source counts FLOPs, from its own words; what is not declared is flagged."""
    low = text.lower()
    if metric not in ("MFU_pct", "model_TFLOPS_per_GPU"):
        return "causal", []
    if "causal" in low:
        unsure = "not stated" in low or "favours" in low
        return "causal", ["FLOPs convention inferred: causal half"] if unsure else []
    if re.search(r"full[- ](attention|scores|score)", low):
        return "full", []
    return "causal", ["FLOPs convention not declared: causal half assumed"]


def _expert_tensor_parallel(degrees: AnyMapping[str, int], gpus: int, method: str, spec: ModelSpec) -> int:
    """Megatron-Core's default where ETP is not given: that of TP; a folded mapping has 1."""
    if "fold" in method.lower():
        return 1
    tp = degrees["tp"]
    fits = gpus % (tp * degrees["ep"] * degrees["pp"]) == 0 and spec.expert_ffn % tp == 0
    return tp if fits else 1

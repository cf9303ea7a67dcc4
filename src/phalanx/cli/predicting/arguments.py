"""Arguments that several commands read alike: which steps of a run, which model on which cluster."""

from __future__ import annotations

import argparse

from phalanx.core.errors import ConfigError, Problem, nearest
from phalanx.core.reading import is_count
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import known_models, published_model


def read_steps(text: str | None) -> tuple[int | None, int | None]:
    """`10:12`, `10:`, `:12`, `10`. Raises `ConfigError` for anything else."""
    if text is None:
        return None, None
    begin, colon, end = text.partition(":")
    parts = (begin, end if colon else begin)
    if all(part == "" or is_count(part) for part in parts) and any(parts):
        first, last = (int(part) if part else None for part in parts)
        if first is None or last is None or first <= last:
            return first, last
    rule = "must be the first and the last step"
    raise ConfigError.of("--steps", text, rule, "use 10:12, or 10", subject="the arguments")


def model_and_cluster(args: argparse.Namespace) -> tuple[ModelSpec | None, GpuCluster | None, list[Problem]]:
    """What `--model` and `--cluster` name, None where they name nothing, and why."""
    spec, cluster, problems = None, None, list[Problem]()
    try:
        spec = model_named(args.model)
    except ConfigError as error:
        problems += error.problems
    try:
        cluster = parse_cluster(args.cluster)
    except ConfigError as error:
        problems += error.problems
    return spec, cluster, problems


PRECISIONS = ("bf16", "fp8", "fp32")
"""Of products of matrices."""


def precision_problems(precision: str, cluster: GpuCluster | None, *, where: str) -> list[Problem]:
    """Products that are not known, or that the devices (None: not known either) do not have."""
    if precision not in PRECISIONS:
        return [Problem(where=where, value=precision, rule="is not known", hint=nearest(precision, PRECISIONS))]
    if cluster is not None and precision == "fp8" and cluster.hardware.fp8_flops_per_s is None:
        rule = f"has no effect: {cluster.hardware.name} has no products in fp8"
        return [Problem(where=where, value="fp8", rule=rule, hint="leave it out")]
    if cluster is not None and precision == "fp32" and cluster.hardware.fp32_flops_per_s is None:
        rule, hint = f"has no rate in the file of {cluster.hardware.name}", "give it fp32_flops_per_s"
        return [Problem(where=where, value="fp32", rule=rule, hint=hint)]
    return []


def model_named(name: str) -> ModelSpec:
    """A preset, or a published model. Raises `ConfigError`."""
    if name in PRESETS:
        return PRESETS[name]
    models = known_models()
    found = next((key for key in models if key.lower() == name.lower()), None)
    if found is None:
        hint = nearest(name, [*PRESETS, *models])
        raise ConfigError.of("--model", name, "is not a model", hint, subject="the arguments")
    m = models[found]
    ffn = m["expert_ffn"] if int(m["experts"]) else m["dense_ffn"]
    entry = {
        "model": found,
        "hidden": m["hidden"],
        "layers": m["layers"],
        "experts": m["experts"],
        "topk": m["topk"],
        "ffn": ffn,
        "TP": "1",
    }
    return published_model(entry, models)[0]

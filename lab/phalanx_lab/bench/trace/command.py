"""A training step on GPUs that compute nothing: `phalanx bench trace --model qwen3-30b-a3b --world 8 --ep 8 --json F`.

Runs the real step of the recipe (model, dispatch, groups, gradients, vote, optimizer) on fake tensors of a device that is not there, three times with 2 or 3 layers or two
micro-batches, and says what a real device would have been asked for:

    launches   of a layer's forward and backward pass, of the loss per 4,096 tokens, of the optimizer
    syncs      where the host waits for the device, by line: in each layer, each micro-batch, each step
    memory     kept for each token and layer, and the peak of the step beside what the dry run promises
    moved      bytes that operations other than products read and write, for each token and layer
    order      with `--order`: whether every communicator sees the same calls on all of its ranks, each rank of the world traced in turn

Nothing is measured: no time, no result. Settings of a recipe (`--train.recompute full`) may follow. Needs g++, once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes
from phalanx.kernels.native import user_folder
from phalanx.plan.model import PRESETS
from phalanx_lab.bench.trace.order import differences
from phalanx_lab.bench.trace.shim import run_traces
from phalanx_lab.bench.trace.steps import even_estimate, stages_of

LOSS_TOKENS = 4096
Trace = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceArgs:
    """What is traced."""

    model: str = "qwen3-30b-a3b"
    """Preset of the model (`model.preset`)."""
    world: int = 8
    """Ranks."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int | None = None
    etp: int = 1
    tokens: int = 4096
    """Tokens of a sequence."""
    documents: int = 1
    """Documents packed in each sequence."""
    rank: int = 0
    rounds: int = 8
    """Micro-batches of a rank in the step that the report's `step` is about."""
    order: bool = False
    """Trace every rank, and compare the order of calls on each communicator; one rank of them has an empty micro-batch."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench trace ARGS...`; exit status 1 where calls are not in one order."""
    options, rest = read_words(TraceArgs, args, prog="phalanx bench trace", description=__doc__, others=True)
    check_writable(options.json)
    raise_if(_problems(options), ConfigError, subject="the options")
    report = measure(options, rest)
    _show(report, Console())
    write_json(options.json, report)
    return 0 if report["order_equal"] in (True, None) else 1


def _problems(options: TraceArgs) -> list[Problem]:
    found = too_small(options, world=1, tokens=1, documents=1, rounds=1)
    if not 0 <= options.rank < max(1, options.world):
        found.append(Problem(where="--rank", value=options.rank, rule=f"is not one of {options.world} ranks", hint="0"))
    return found


def settings_of(options: TraceArgs, rest: Sequence[str]) -> list[str]:
    """The recipe's settings. Raises `ConfigError` with everything that is wrong with them."""
    degrees = {"tp": options.tp, "cp": options.cp, "pp": options.pp, "ep": options.ep, "etp": options.etp}
    settings = ["--model.preset", options.model, "--train.seq_len", str(options.tokens), "--train.micro_batch", "1"]
    for name, degree in degrees.items():
        settings += [] if degree is None else [f"--folding.{name}", str(degree)]
    settings += [*rest]
    load_recipe(None, settings)
    return settings


def measure(options: TraceArgs, rest: Sequence[str]) -> dict[str, Any]:
    """The report of one mapping."""
    settings = settings_of(options, rest)
    replicas = max(1, options.world // (options.tp * options.cp * options.pp))
    layers = [options.pp * n + _dense_layers(options.model) for n in (2, 3)]
    case: dict[str, Any] = {"world": options.world, "rank": options.rank, "documents": options.documents}
    few, more = ({**case, "settings": [*settings, "--model.num_layers", str(n)]} for n in layers)
    rounds = (
        (2, 3) if options.pp == 1 else (2 * options.pp, 3 * options.pp)
    )  # a pipeline that is not full has other counts
    cases = [few, more, {**few, "samples": 2 * replicas}]
    corners = [] if options.pp > 1 else [{**one, "samples": n * replicas} for n in rounds for one in (few, more)]
    cases += corners
    whole = {**case, "settings": settings}
    places = [] if options.pp == 1 else stages_of(settings, world=options.world)
    cases += [{**whole, "rank": of[0], "samples": n * replicas} for of in places for n in rounds]
    last = 1 + len(cases)
    if options.order:
        cases += [
            {
                **few,
                "rank": r,
                "samples": 2 * replicas - 1,
                "settings": [*few["settings"], "--resilience.mode", "fast", "--optim.bucket_mb", "1"],
            }
            for r in range(options.world)
        ]
    found = traced([whole, *cases])
    report = {"settings": settings, "options": json.loads(json.dumps(asdict(options), default=str))}
    report |= per_layer(found[1], found[2], found[3])
    report |= memory_of(settings, options, found[0])
    if options.pp == 1:
        left = PRESETS[options.model].num_layers - layers[0]
        ranks = [{"places": [0], **counts_of(options, found[4:last], layers=left, rounds=rounds)}]
    else:  # of all layers of each place
        ends = (found[4 + 2 * i : 6 + 2 * i] for i in range(len(places)))
        each = options.world // options.pp
        ranks = [
            {
                "places": [rank // each for rank in of],
                "peak_bytes": b["peak_bytes"],
                **counts_of(options, (a, a, b, b), layers=0, rounds=rounds),
            }
            for of, (a, b) in zip(places, ends, strict=True)
        ]
    report["step"] = {"settings": settings, "world": options.world, "rounds": options.rounds, "ranks": ranks}
    of_rank = {r: t["calls"] for r, t in enumerate(found[last:])}
    differing = [d.explain() for d in differences(of_rank)]
    return report | {"order_equal": not differing if options.order else None, "order": differing}


def _dense_layers(model: str) -> int:
    """First layers without experts, which are not counted."""
    preset = PRESETS.get(model)
    return 0 if preset is None else preset.dense_layers


def traced(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises `RunError` with the first error of a trace."""
    found = run_traces(cases, cache=user_folder())
    for case, trace in zip(cases, found, strict=True):
        if "error" in trace:
            raise RunError(f"the trace of {' '.join(case['settings'])} failed: {trace['error']}")
    return found


def per_layer(few: Trace, more: Trace, twice: Trace) -> dict[str, Any]:
    """What a layer more, and a micro-batch more, add. `few` and `more` differ by one layer of the rank, `few` and `twice` by a micro-batch."""
    tokens = few["tokens"]

    def of(name: str, *phases: str) -> int:
        return sum(more[name].get(p, 0) - few[name].get(p, 0) for p in phases)

    syncs = {
        t: Counter({tuple(s[:3]): s[3] for s in trace["syncs"]})
        for t, trace in (("few", few), ("more", more), ("twice", twice))
    }
    each_layer = syncs["more"] - syncs["few"]
    each_micro = syncs["twice"] - syncs["few"]
    in_passes = ("forward", "backward")
    return {
        "forward_launches": of("launches", "forward"),
        "backward_launches": of("launches", "backward"),
        "loss_launches": few["launches"].get("loss", 0),
        "loss_launches_per_4096": round(few["launches"].get("loss", 0) * LOSS_TOKENS / tokens),
        "optimizer_launches_per_layer": of("launches", "optimizer"),
        "syncs_per_layer": sum(n for (phase, *_), n in each_layer.items() if phase in in_passes),
        "syncs": {
            "layer": _lines(each_layer),
            "micro_batch": _lines(Counter({k: n for k, n in each_micro.items() if k not in each_layer})),
            "step": _lines(
                Counter({k: n for k, n in syncs["few"].items() if k not in each_layer and k not in each_micro})
            ),
        },
        "kept_bytes_per_token_layer": (more["kept_bytes"] - few["kept_bytes"]) / tokens,
        "moved_bytes_per_token_layer": of("moved", *in_passes) / tokens,
        "flops_per_token_layer": of("flops", *in_passes) / tokens,
        "hot_forward": _hot(few, more, "forward"),
        "hot_backward": _hot(few, more, "backward"),
        "kept": _of_token("kept", few, more),
        "moved": _of_token("moved_at", few, more),
        "groups": few["num_groups"],
    }


def _lines(syncs: Counter[tuple[Any, ...]]) -> list[str]:
    return [f"{phase}: {what} at {line}, {n}" for (phase, what, line), n in sorted(syncs.items())]


def _hot(few: Trace, more: Trace, phase: str) -> dict[str, int]:
    """Lines of a layer that launch most."""
    a, b = few["lines"].get(phase, {}), more["lines"].get(phase, {})
    return dict(Counter({line: n - a.get(line, 0) for line, n in b.items() if n > a.get(line, 0)}).most_common(10))


KINDS = {
    "launches": "launches",
    "product_flops": "flops",
    "attention_flops": "attention",
    "flash_flops": "flash",
    "fused_flops": "fused",
    "moved_bytes": "moved",
}
"""What `phalanx simulate traced` counts -> what a trace calls it."""


def counts_of(options: TraceArgs, corners: Sequence[Trace], *, layers: int, rounds: tuple[int, int]) -> dict[str, Any]:
    """A rank's step of `layers` more than the fewest layers that were traced, and of all micro-batches, by phase. `corners`: few layers and one more, each with one of two numbers
    of micro-batches (`rounds`), which are all that is needed: every count grows by as much with each layer, each micro-batch, and each layer of each."""
    at = (options.rounds - rounds[0]) / (rounds[1] - rounds[0])
    counts = [_counts(corner) for corner in corners]

    def whole(key: tuple[Any, ...]) -> int:
        few, more, few_later, more_later = (count[key] for count in counts)
        first, later = few + layers * (more - few), few_later + layers * (more_later - few_later)
        return max(0, round(first + at * (later - first)))

    phases: dict[str, dict[str, int]] = {}
    exchanges = []
    for key in sorted({key for count in counts for key in count}):
        if len(key) == 2:
            phases.setdefault(key[0], dict.fromkeys((*KINDS, "waits"), 0))[key[1]] = whole(key)
        else:
            exchanges.append([*key[:3], list(key[3]), whole(key)])
    return {"phases": phases, "exchanges": exchanges}


def _counts(trace: Trace) -> Counter[tuple[Any, ...]]:
    """By phase and kind; of exchanges by phase, content, operation and ranks."""
    found = Counter[tuple[Any, ...]]()
    for kind, name in KINDS.items():
        for phase, number in trace[name].items():
            found[phase, kind] = number
    for phase, _, _, times in trace["syncs"]:
        found[phase, "waits"] += times
    for phase, content, op, ranks, sent in trace["exchanges"]:
        found[phase, content, op, tuple(ranks)] += sent
    return found


def _of_token(name: str, few: Trace, more: Trace) -> dict[str, float]:
    """Bytes of a token in a layer, by line."""
    added = {line: n - few[name].get(line, 0) for line, n in more[name].items()}
    return {line: round(n / few["tokens"], 1) for line, n in sorted(added.items(), key=lambda kv: -kv[1]) if n > 0}


def memory_of(settings: Sequence[str], options: TraceArgs, whole: Trace) -> dict[str, Any]:
    """The peak of a step of the whole model, beside the dry run's."""
    estimate = even_estimate(settings, world=options.world, rank=options.rank)
    return {
        "static_bytes": whole["static_bytes"],
        "peak_bytes": whole["peak_bytes"],
        "peak_at": whole["peak_at"],
        "dry_run_bytes": estimate.peak_bytes,
        "dry_run_over_trace": estimate.peak_bytes / whole["peak_bytes"],
        "dry_run_terms": dict(estimate.peak.terms),
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"traced, nothing measured: {report['options']['model']} on {report['options']['world']} ranks")
    table.add_column("what")
    table.add_column("figure", justify="right")
    rows = {
        "launches of a layer, forward / backward": f"{report['forward_launches']} / {report['backward_launches']}",
        "launches of the loss per 4,096 tokens": str(report["loss_launches_per_4096"]),
        "launches of the optimizer for a layer": str(report["optimizer_launches_per_layer"]),
        "host waits of a layer": str(report["syncs_per_layer"]),
        "kept for a token and layer": f"{report['kept_bytes_per_token_layer'] / 1e3:.1f} KB",
        "moved for a token and layer": f"{report['moved_bytes_per_token_layer'] / 1e6:.2f} MB",
        "peak of the step": format_bytes(report["peak_bytes"]),
        "dry run / trace": f"{report['dry_run_over_trace']:.3f}",
        "calls in one order on all ranks": {None: "not asked (--order)", True: "yes", False: "NO"}[
            report["order_equal"]
        ],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for where, lines in report["syncs"].items():
        for line in lines:
            console.print(f"host waits, each {where.replace('_', '-')}: {line}", highlight=False)
    for text in report["order"]:
        console.print(f"NOT IN ONE ORDER: {text}", highlight=False)

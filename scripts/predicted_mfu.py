"""Traces steps of three models on GPUs that compute nothing, predicts what they would take on H100s, prints the table and renews benchmarks/results/trace-*.json.

    python scripts/predicted_mfu.py [MODEL ...]      about 20 minutes on two cores; MODEL: qwen3, mixtral, deepseek-v3
    python scripts/predicted_mfu.py pieces           layers, the loss and the update, beside what an H200 took for them

Nothing is measured. Each line is a run of its own: what an overlap computes, moves and launches is what that run would.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import tyro

from phalanx.cli.predicting.traced import describe, step_of
from phalanx.core.files import write_json
from phalanx.kernels.native import user_folder
from phalanx.simulate.step import TracedTime
from phalanx.simulate.step.traced import DeviceRates
from phalanx_lab.bench.trace.command import TraceArgs, measure
from phalanx_lab.bench.trace.pieces import trace_piece
from phalanx_lab.bench.trace.shim import run_traces

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MEASURED = RESULTS.parent / "gpu" / "results" / "h200-2026-11-26.json"
GIB = 2**30
PIECES = {
    "qwen3-30b-a3b": "B1.qwen3",
    "mixtral-8x7b": "B1.mixtral",
    "deepseek-v3": "B1.deepseek",
    "loss": "B3",
    "adamw": "B3",
}
"""What `phalanx gpu-check` has timed, and by which check."""
QWEN = "--model qwen3-30b-a3b --world 8 --ep 8 --optim.state_dtype bfloat16"
MIXTRAL = "--model mixtral-8x7b --world 32 --ep 8 --optim.state_dtype bfloat16"
DEEPSEEK = (
    "--model deepseek-v3 --world 1024 --pp 16 --rounds 240 --optim.state_dtype bfloat16 --train.recompute selective"
)
RUNS = {
    "qwen3": {
        "serial": f"{QWEN} --order",
        "coarse:2": f"{QWEN} --dispatch.overlap coarse:2",
        "fused": f"{QWEN} --dispatch.overlap fused",
        "selective": f"{QWEN} --train.recompute selective",
    },
    "mixtral": {
        "32 GPUs": MIXTRAL,
        "32 GPUs, coarse:2": f"{MIXTRAL} --dispatch.overlap coarse:2",
        "32 GPUs, zero 2": f"{MIXTRAL} --optim.zero 2",
        "8 GPUs": "--model mixtral-8x7b --world 8 --ep 8 --optim.state_dtype bfloat16 --optim.zero 2 --train.recompute selective",
    },
    "deepseek-v3": {
        "ep 8": f"{DEEPSEEK} --ep 8",
        "ep 8, coarse:2": f"{DEEPSEEK} --ep 8 --dispatch.overlap coarse:2",
        "ep 64": f"{DEEPSEEK} --ep 64",
    },
}
"""Model -> run -> arguments of `phalanx bench trace`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *RUNS, "pieces"], default=[])
    models = parser.parse_args().models
    if models == ["pieces"]:
        return print(pieces(json_lines(MEASURED)))
    if "pieces" in models:
        parser.error("pieces stands alone")
    times: dict[str, TracedTime] = {}
    for model in models or RUNS:
        reports = {}
        for run, words in RUNS[model].items():
            reports[run], times[f"{model}, {run}"] = traced(words)
        renew(model, reports, {run: times[f"{model}, {run}"] for run in reports})
    print(describe(times))


def json_lines(path: Path) -> dict[str, Any]:
    """Values of each check that passed or failed, by its name; of the last run of it."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["check"]: line["value"] for line in lines}


def pieces(measured: dict[str, Any]) -> str:
    """Lines of a table: milliseconds predicted and measured."""
    found = run_traces(
        [{"by": f"{trace_piece.__module__}:{trace_piece.__name__}", "piece": name} for name in PIECES],
        cache=user_folder(),
    )
    rates, lines = DeviceRates(), ["| piece | | predicted | measured | over |", "|---|---|---|---|---|"]
    for (name, check), told in zip(PIECES.items(), found, strict=True):
        products = 1e3 * told["product_flops"] / rates.product_flops_per_s
        rest = 1e3 * told["moved_bytes"] / rates.memory_bytes_per_s
        rows = {"all": products + rest + 1e3 * told["waits"] * rates.wait_s}
        took: dict[str, float] = {}
        if check.startswith("B1"):
            classes = dict(measured[check]["ms by class"])
            del classes["kernels"]
            took = {"products": classes.pop("products"), "rest": sum(classes.values())}
            took |= {"all": measured[check]["forward and backward ms"], "host": measured[check]["host ms"]}
            rows = {"products": products, "rest": rest, **rows, "host": 1e3 * told["launches"] * rates.launch_s}
        elif name == "loss":
            took["all"] = measured[check]["loss, forward and backward ms"]
        else:
            took["all"] = told["moved_bytes"] / measured[check]["AdamW GB/s"] / 1e6
        lines += [
            f"| {name} | {what} | {ms:.2f} | {took[what]:.2f} | {ms / took[what]:.2f} |" for what, ms in rows.items()
        ]
    return "\n".join(lines)


def traced(words: str) -> tuple[dict[str, Any], TracedTime]:
    """What one run is traced to do, and what it is predicted to take."""
    options, rest = tyro.cli(TraceArgs, args=words.split(), return_unknown_args=True)
    report = measure(options, rest)
    return report, step_of(report["step"], words).time()


def renew(model: str, reports: dict[str, dict[str, Any]], times: dict[str, TracedTime]) -> None:
    """Figures of the model's result: of its first run all, of the others the peak and the MFU."""
    path = RESULTS / f"trace-{model}.json"
    result = json.loads(path.read_text())
    (name, report), *_ = reports.items()
    figures: dict[str, float] = {}
    if times[name].parts["bubble"] == 0:
        figures = {
            "launches of a layer, forward": report["forward_launches"],
            "backward": report["backward_launches"],
            "of the loss per 4,096 tokens": report["loss_launches_per_4096"],
            "host waits a layer": report["syncs_per_layer"],
            "KB kept a token and layer": round(report["kept_bytes_per_token_layer"] / 1e3, 1),
            "MB moved a token and layer": round(report["moved_bytes_per_token_layer"] / 1e6, 2),
            "dry run over trace": round(report["dry_run_over_trace"], 3),
        }
    for run, time in times.items():
        peak = max(rank.get("peak_bytes", reports[run]["peak_bytes"]) for rank in reports[run]["step"]["ranks"])
        figures |= {f"{run}: peak, GiB": round(peak / GIB, 1), f"{run}: MFU predicted": round(time.mfu, 3)}
    if report["order_equal"] is not None:
        figures["calls in one order on all ranks"] = int(report["order_equal"])
    result |= {"figures": figures, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    write_json(path, result)


if __name__ == "__main__":
    main()

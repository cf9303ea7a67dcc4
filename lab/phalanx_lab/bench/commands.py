"""The list of benchmarks, and `phalanx bench NAME ...`. One file a benchmark in `phalanx_lab.bench`, each with `main(args) -> exit status`."""

from __future__ import annotations

import importlib
import sys

from phalanx.core.arguments import print_usage
from phalanx.core.errors import nearest

BENCHMARKS = {
    "train": ("train", "training speed on one rank, beside transformers in the same run"),
    "transformers": ("parity.command", "what a config.json means to us, beside the installed transformers"),
    "curve": ("curve", "the loss curve of the fast bf16 path beside that of the plain fp32 one"),
    "context": ("context", "memory of a step on one long sequence that 1, 2, 4 and 8 ranks share"),
    "reshard": (
        "reshard.command",
        "moving sharded tensors over shaped links of emulated hosts, beside the paper's baselines",
    ),
    "layer": ("layer.command", "one mixture-of-experts layer, serial, in chunks and overlapped, on emulated hosts"),
    "step": ("step", "training steps with and without overlap inside their layers, on emulated hosts"),
    "hiding": ("hiding", "what hiding communication behind computing is worth, on emulated hosts"),
    "pipeline": ("pipeline.command", "what pipelines gain from transfers beside passes, on emulated hosts"),
    "predict": (
        "predict.command",
        "step times of many plans beside their predictions: paced ranks, here or on emulated hosts, or ranks that compute",
    ),
    "trace": (
        "trace.command",
        "a step on GPUs that compute nothing: launches, host waits, memory, order of collectives",
    ),
    "memory": ("memory.command", "memory of the ranks of a run beside what the dry run promises"),
    "reshard-plan": ("reshard.plan", "plans of moves between layouts, against the bound and the paper's greedy"),
    "reshard-drawn": ("reshard.strange", "drawn reshards of strange tensors, and calls that are wrong on one rank"),
    "robust": ("robust.command", "kill ranks inside overlapped layers, and watch the memory of such layers for long"),
    "flips": ("flips", "planted flips of single bits: which are found before a step is committed, and what it costs"),
    "storm": (
        "storm.command",
        "faults of all kinds over an elastic run: samples, bits, recovery, what is left",
    ),
    "recovery": (
        "recovery.command",
        "training through a failure trace, elastic recovery itself beside restarts from checkpoints",
    ),
    "storm-members": (
        "storm.members",
        "faults of all kinds over members that train a toy: membership, votes, process groups",
    ),
    "heal-cost": (
        "heal_cost",
        "what elastic recovery (resilience.heal) costs while nobody dies, in fast and in exact mode, step by step in turn",
    ),
    "fuzz": ("fuzz.command", "every file and message that Phalanx reads, changed at random: read, or refused in words"),
    "kill": ("kill", "kill a run again and again; nothing may be lost"),
}
"""Name -> (its module in `phalanx_lab.bench`, what it measures)."""


def main(args: list[str]) -> int:
    """Run a benchmark by its name, or list them."""
    if not args or args[0] in ("-h", "--help"):
        _print_list()
        return 0
    name = args[0]
    if name not in BENCHMARKS:
        print(f"phalanx bench: {name!r} is not a benchmark; {nearest(name, BENCHMARKS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"phalanx_lab.bench.{BENCHMARKS[name][0]}").main(args[1:]))


def _print_list() -> None:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in BENCHMARKS.items()]
    text = "\n".join(["phalanx bench NAME [--json FILE] [options]", "", *lines, "", "phalanx bench NAME --help lists its options"])  # fmt: skip
    print_usage(text)

"""How unevenly the experts of a fresh router are chosen: what `simulate/memory/balance.py` assumes, in real models' routers and blocks, narrower and with fewer layers, on real text.

    python benchmarks/fresh_router.py deepseek-v3 qwen3-30b-a3b mixtral-8x7b      # about 3 minutes each on 2 cores

One rank trains; the counts of its experts are added up for as many ranks as there are said to be. Printed, over the layers of the steps: rows of the fullest rank over the even share, and the same
in the standard deviations that the assumption counts in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import numpy as np

FOLDER, STEPS, LAYERS, HIDDEN = Path("runs"), 50, 5, 512
PARTS = {"first 25": range(1, 26), "later": range(26, STEPS + 1)}
SETTINGS = {
    "model.num_layers": LAYERS, "model.hidden": HIDDEN, "model.num_heads": 8, "model.expert_ffn": 128, "model.vocab": 8192, "data.tokenizer": "bpe:8192", "data.builtin_bytes": 8_000_000,
    "train.seq_len": 512, "train.global_batch": 8, "train.micro_batch": 4, "train.steps": STEPS, "train.eval_interval": 0, "checkpoint.interval": 0,
    "train.dtype": "float32", "optim.lr": 3e-4 * STEPS / 2000, "optim.warmup_steps": STEPS - 1, "launch.ranks": 1, "observe.console": "none", "run.folder": FOLDER,
}  # fmt: skip
"""The begin of a warm-up of 2,000 steps to 3e-4, as real runs have it."""
MODELS: dict[str, dict[str, object]] = {
    "deepseek-v3": {"model.init_std": 0.006 * (7168 / HIDDEN) ** 0.5, "router.aux_loss": 1e-4, "router.aux_scope": "sequence", "router.bias_rate": 1e-3,
                    "model.dense_layers": 1, "model.dense_ffn": 1024, "model.shared_ffn": 128, "model.mtp_layers": 0, "model.q_rank": 128, "model.kv_rank": 64},
    "qwen3-30b-a3b": {"model.init_std": 0.02 * (2048 / HIDDEN) ** 0.5, "router.aux_loss": 1e-3, "model.num_kv_heads": 2},
    "mixtral-8x7b": {"model.init_std": 0.02 * (4096 / HIDDEN) ** 0.5, "router.aux_loss": 1e-2, "model.num_kv_heads": 2},
}  # fmt: skip


def train(name: str) -> None:
    from phalanx.cli.main import main
    from phalanx.train import reporting

    reporting.LOADS_S, reporting.LOADS_SHARE = 0.0, 10**9  # every step is told
    settings = {**SETTINGS, **MODELS[name], "run.name": f"fresh-{name}", "model.preset": name}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    if status := main(["train", *words]):
        sys.exit(status)


def read(name: str) -> None:
    from phalanx.plan.model import PRESETS
    from phalanx.simulate.memory import fresh_load

    (log,) = (FOLDER / f"fresh-{name}" / "events").glob("rank-0*.jsonl")
    told = [e for e in map(json.loads, log.read_text().splitlines()) if e["kind"] == "ExpertLoads"]
    experts, top_k = PRESETS[name].num_experts, PRESETS[name].top_k
    for ep in (ranks for ranks in (2, 4, 8, 16, 32, 64) if ranks <= experts):
        one = np.sqrt((ep - 1) / top_k * (experts - top_k) / (experts - 1))
        print(f"{name} ep {ep}: assumed {fresh_load(ep=ep, experts=experts, top_k=top_k):.2f}", end="")
        for part, steps in PARTS.items():
            counts_SLE = np.array([e["counts"] for e in told if e["step"] in steps], dtype=float)
            loads = counts_SLE.reshape(*counts_SLE.shape[:2], ep, -1).sum(3).max(2)
            loads *= ep / counts_SLE.sum(2)
            print(
                f"; {part}: median {median(loads.ravel()):.2f}, most {loads.max():.2f}, {(loads.max() - 1) / one:.1f} deviations",
                end="",
            )
        print()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        train(each)
        read(each)

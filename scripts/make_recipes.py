"""Writes the recipes of real models that come with Phalanx (src/phalanx/recipes) and benchmarks/results/recipes.json: published hyperparameters, a mapping from the search that fits by the dry run.

    .venv/bin/python scripts/make_recipes.py [NAME ...]        such as mixtral-8x7b-64; without a name all (minutes)

The search is that of `phalanx search`: a recipe trains its router, and the dry run predicts with one too.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.cli.predicting.cards import with_settings
from phalanx.cli.predicting.dry_run import machine_of, peak_bytes
from phalanx.cli.predicting.packaged import predicted_line
from phalanx.cli.predicting.recipe import predict_on
from phalanx.cli.predicting.searched import Fitting, fastest_fitting, recipe_text
from phalanx.core.recipe import PACKAGED
from phalanx.core.units import format_bytes, format_count, format_seconds
from phalanx.plan.model import PRESETS
from phalanx.simulate import resolve_recipe
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import Job, RouterModel
from phalanx.simulate.search import SearchResult, base_mapping, search
from phalanx.simulate.step import predict

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "recipes.json"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as it was published."""

    preset: str
    worlds: tuple[int, ...]
    """The smallest power of two of H100 on which it fits, and one that suits it."""
    batch: int
    settings: Mapping[str, Any]
    comments: Mapping[str, str]
    """What stands beside a setting: where it is from, or that nobody says."""
    source: tuple[str, ...]
    moment_bytes: int = 4
    """Width of the moments of the optimizer."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the preset, which is the model as it generates."""


COMMON = {"optim.weight_decay": 0.1, "train.eval_interval": 500}
INTERVALS = (25, 50, 100, 250, 500, 1000)
"""Steps between checkpoints, of which a recipe has the most that take no more than an hour by its predicted step."""
MEGATRON = "as in NVIDIA's Megatron-LM example (examples/mixtral/train_mixtral_8x7b_distributed.sh)"
MIXTRAL = Model(
    preset="mixtral-8x7b", worlds=(16, 64), batch=256,
    settings={"train.steps": 100_000, "optim.lr": 1e-4, "optim.warmup_steps": 500, "router.aux_loss": 0.01, "model.init_std": 0.01},
    comments={
        "train.steps": "ours: 105B tokens", "train.global_batch": "as in arXiv 2504.14960",
        "optim.lr": f"{MEGATRON}, as decay and aux loss", "optim.warmup_steps": "the same",
        "model.init_std": "as in the example",
    },
    source=("Shape: arXiv 2401.04088. The paper is silent about how it was trained: learning rate, warm-up, decay, router loss and initial weights", f"are {MEGATRON}."),
)  # fmt: skip
QWEN = Model(
    preset="qwen3-30b-a3b", worlds=(8, 64), batch=1024,
    settings={"train.steps": 100_000, "optim.lr": 3e-4, "optim.warmup_steps": 2000, "router.aux_scope": "global_batch", "router.aux_loss": 0.001},
    comments={
        "train.steps": "ours: 419B tokens (the paper: 36T)", "train.seq_len": "of the first stage (arXiv 2505.09388, section 3.2)", "train.global_batch": "ours: 4.2M tokens",
        "router.aux_scope": "the paper's, section 2", "router.aux_loss": "router_aux_loss_coef of its config.json",
        "optim.lr": "ours: the paper names none", "optim.warmup_steps": "ours",
    },
    source=("Shape, balance over the global batch and sequence length: arXiv 2505.09388. The paper is silent about learning rate, warm-up,", "batch and betas (it says that scaling laws chose them): those here are ours."),
)  # fmt: skip
MODELS = (
    Model(
        preset="olmoe-1b-7b", worlds=(8, 32), batch=1024,
        settings={"train.steps": 1_216_000, "optim.lr": 4e-4, "optim.warmup_steps": 2000, "router.aux_loss": 0.000625, "router.z_loss": 7.8125e-06},
        comments={
            "train.steps": "5.1T tokens, as the paper", "train.global_batch": "4.2M tokens", "optim.lr": "falls to a tenth along a cosine",
            "optim.warmup_steps": "8.4B tokens", "router.aux_loss": "0.01 there, of the mean over 16 layers: here each layer counts whole", "router.z_loss": "0.001 there, which its trainer divides by layers x top-k = 128",
        },
        source=("arXiv 2409.02060 and its configuration (github.com/allenai/OLMoE, configs/olmoe-8x1b-newhp-newds-cx5-fine1-normreorder.yml):", "AdamW 0.9, 0.95, 1e-8, decay 0.1 (there of norms and embeddings too), clipped at 1, cosine to a tenth, batch, both router losses", "as its trainer adds them up (github.com/Muennighoff/megablocks, branch olmoe, megablocks/layers/moe.py)."),
    ),
    MIXTRAL,
    replace(MIXTRAL, preset="mixtral-8x22b", worlds=(64, 128)),
    replace(
        QWEN, worlds=(8,), moment_bytes=2,
        comments={**QWEN.comments, "optim.state_dtype": "ours, of both moments; with float32 a step takes 62 s on tp 4, pp 2, ep 4 (predicted)"},
    ),
    replace(QWEN, worlds=(64,)),
    replace(QWEN, preset="qwen3-235b-a22b", worlds=(64, 128), settings={**QWEN.settings, "optim.lr": 2e-4}),
    Model(
        preset="deepseek-v3", worlds=(256, 512), batch=3072, shape={"mtp_layers": 1},
        moment_bytes=2,
        settings={
            "train.steps": 1_176_000, "optim.lr": 2.2e-4, "optim.warmup_steps": 2000, "optim.schedule": "wsd", "optim.decay_steps": 380_000,
            "router.aux_loss": 1e-4, "router.aux_scope": "sequence", "router.bias_rate": 1e-3, "model.init_std": 0.006,
        },
        comments={
            "train.steps": "14.8T tokens, as the paper", "train.global_batch": "the paper begins with it, and grows to 15360 in 469B tokens",
            "optim.lr": "the paper's", "optim.state_dtype": "of both moments, the paper's (section 3.3.2)", "optim.warmup_steps": "the paper's", "optim.decay_steps": "4.8T tokens; the paper's is a cosine, then two constants",
            "router.aux_loss": "of a sequence", "router.bias_rate": "of balance without a loss",
            "model.init_std": "the paper's; ours is less for matrices that add to the residual stream",
        },
        source=("arXiv 2412.19437, section 4.2: AdamW 0.9, 0.95, decay 0.1, clipped at 1, 2.2e-4 after 2,000 steps, then constant to 10T tokens,", "falling to a tenth; bias rate 0.001, balance loss 0.0001 in a sequence, one further token predicted (weight 0.3)."),
    ),
)  # fmt: skip


def main(names: list[str]) -> int:
    """Write the named recipes, or all, and their table."""
    kept = json.loads(RESULT.read_text())["figures"] if RESULT.is_file() else {}
    for model in MODELS:
        for world in model.worlds:
            name = f"{model.preset}-{world}"
            if not names or name in names:
                found = write(name, model, parse_cluster(f"h100x{world}"))
                kept |= {f"{name} {what}": figure for what, figure in found.items()}
                print(name, found, flush=True)
    order = [
        f"{model.preset}-{world} {what}" for model in MODELS for world in model.worlds for what in ("s", "over best")
    ]
    text = {
        "id": "recipes",
        "claim": "recipes of real models fit, and their mapping is within 5 % of the best that the search finds",
        "command": ".venv/bin/python scripts/make_recipes.py",
        "machine": f"{platform.machine()}, predicted, not measured",
        "date": datetime.date.today().isoformat(),
        "figures": {name: kept[name] for name in order if name in kept},
        "note": "Predicted seconds of a step, and over the fastest of `phalanx search`, whether that fits by the dry run or not.",
    }
    RESULT.write_text(json.dumps(text, indent=2) + "\n")
    return 0


def write(name: str, model: Model, cluster: GpuCluster) -> dict[str, float]:
    """Search, write the recipe, and return its line of the table."""
    found, best_s = find(model, cluster)
    settings = {**COMMON, **model.settings, "run.name": name}
    recipe = with_settings(found.recipe, settings)
    spec = resolve_recipe(recipe)
    p = predict_on(recipe, spec, cluster)
    steps = max(n for n in INTERVALS if n == INTERVALS[0] or n * p.step.seconds <= 3600)
    recipe = with_settings(recipe, {"checkpoint.interval": steps})
    peak = peak_bytes(recipe, machine_of(cluster), world=cluster.world)
    days = format_seconds(p.step.seconds * recipe.train.steps)
    head = (
        f"{model.preset} ({format_count(spec.num_params)} parameters, {format_count(spec.active_params)} of them for each token) on {cluster.world} GPUs, {cluster.name}.",
        f"Predicted, not measured: step {format_seconds(p.step.seconds)}, MFU {p.mfu('causal'):.1%}, {format_bytes(peak)} a rank, {recipe.train.steps:,} steps in {days}.",
        predicted_line(cluster.name, p, peak),
        "",
        *model.source,
        "Mapping: phalanx search, the fastest that fits by the dry run.",
        "",
        f"    phalanx train {name} --dry-run --cluster {cluster.name}",
        f"    phalanx launch slurm {name} --nodes {cluster.hosts} --data.sources my/text",
    )
    minutes = round(steps * p.step.seconds / 60)
    comments = {
        "checkpoint.interval": f"steps between checkpoints: some {minutes} minutes, by the prediction",
        **model.comments,
        "train.micro_batch": "sequences of a forward pass: fewer take less memory",
    }
    (PACKAGED / f"{name}.toml").write_text(recipe_text(recipe, cluster, head=head, comments=comments))
    return {"s": round(p.step.seconds, 3), "over best": round(p.step.seconds / best_s, 4)}


def find(model: Model, cluster: GpuCluster) -> tuple[Fitting, float]:
    """The fastest mapping whose recipe fits, and the step of the fastest of all."""
    spec = replace(PRESETS[model.preset], **model.shape)
    job = Job(spec=spec, seq_len=4096, global_batch=model.batch)

    def on(where: GpuCluster, room: float) -> SearchResult:
        return search(
            job,
            where,
            base=replace(base_mapping(RouterModel(kind="learned")), moment_bytes=model.moment_bytes),
            room=room,
        )

    result = on(cluster, 1.0)
    found, why = fastest_fitting(result, on)
    if found is None:
        raise SystemExit(f"{model.preset} on {cluster.name}: {why[:2]}")
    return found, predict(job, result.best[0].mapping, cluster).step.seconds  # on the clock of a recipe


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

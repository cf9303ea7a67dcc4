"""What a worker does before it says that it is ready: a step with a small model of the run's widths, alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_help import write_text

from phalanx.core.processor import this_processor
from phalanx.core.recipe import load_recipe
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.models.moe import MoE
from phalanx.plan.model.model import PRESETS, ModelSpec, model_problems
from phalanx.train.recovery import run as elastic_run, warm_up as warming
from phalanx.train.recovery.elastic import ElasticMember
from phalanx.train.recovery.run import prepare_run
from phalanx.train.recovery.warm_up import small_model, warm_up
from phalanx.train.setup.run_folder import RunFolder
from phalanx_lab.bench.storm.trainer import StormSetup, recipe_words

pytestmark = pytest.mark.ranks
WIDTHS = (
    "hidden",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "expert_ffn",
    "shared_ffn",
    "top_k",
    "mla",
    "router",
)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_a_small_model_has_the_widths_and_a_layer_of_each_kind(name: str, ep: int) -> None:
    spec = PRESETS[name]
    small = small_model(spec, experts_of_rank=spec.num_experts // ep)
    assert small is not None and not model_problems(small)
    assert all(getattr(small, width) == getattr(spec, width) for width in WIDTHS)
    assert small.vocab == min(spec.vocab, 4096)
    assert bool(small.moe_layers) == bool(spec.moe_layers) and small.dense_layers == min(1, spec.dense_layers)
    assert len(small.moe_layers) <= 1 + spec.mtp_layers and small.num_experts >= max(spec.top_k, spec.num_experts // ep)


def test_a_worker_that_cannot_warm_up_joins_cold_and_says_so() -> None:
    class Cold:
        def warm_up(self) -> None:
            raise MemoryError("no room")

    told = list[Any]()
    gc.unfreeze()
    elastic_run._warm_up(Cold(), told.append)  # type: ignore[arg-type]
    assert gc.get_freeze_count() > 10_000, "what it has imported is looked through once more and never again"
    gc.unfreeze()
    assert [(note.level, "MemoryError: no room" in note.text) for note in told] == [("warning", True)]


def test_the_recipe_that_all_hosts_share_says_nothing_of_one_of_them(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    own = ["--launch.host", "h3", "--launch.rack", "r7", "--launch.keep_service", "true"]
    recipe = load_recipe(None, [*recipe_words(StormSetup(), tmp_path), "--resilience.service", "node0:29400", *own])
    assert (recipe.launch.host, recipe.launch.rack, recipe.launch.keep_service) == ("h3", "r7", True)
    folder = RunFolder(tmp_path / "runs" / "x")
    folder.create()
    run = prepare_run(recipe, folder)
    shared = load_recipe(folder.path / "recipe.toml", []).launch
    assert shared == replace(recipe.launch, host=None, rack=None, keep_service=False)
    # a host that brings another recipe writes nothing before it is accepted (the run refuses it by name)
    kept, told = (folder.path / "recipe.toml").read_text(), list[Any]()
    other = prepare_run(replace(recipe, optim=replace(recipe.optim, lr=0.5)), folder)
    assert (folder.path / "recipe.toml").read_text() == kept
    ElasticMember._keep_recipe(SimpleNamespace(run=run, sinks=told.append))  # type: ignore[arg-type]
    assert (folder.path / "recipe.toml").read_text() == kept and not told
    ElasticMember._keep_recipe(SimpleNamespace(run=other, sinks=told.append))  # type: ignore[arg-type]
    assert load_recipe(folder.path / "recipe.toml", []).optim.lr == 0.5 and not told


def test_a_host_that_joins_imports_nothing_for_backward_passes(tmp_path: Path) -> None:
    """Torch imports sympy, 480 modules, for a gradient that it is given: half a second of each rank, for which the run waits."""
    write_text(tmp_path / "text")
    program = """
import sys
from pathlib import Path
from phalanx_lab.bench.storm.trainer import StormSetup, recipe_of
from phalanx.observe.sinks import Sinks
from phalanx.train.recovery.run import prepare_run
from phalanx.train.recovery.elastic import ElasticMember
from phalanx.train.setup.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]) / "x")
folder.create()
ElasticMember(prepare_run(recipe_of(StormSetup(service="127.0.0.1:1"), Path(sys.argv[1])), folder), Sinks([]), joins=True).warm_up()
print("sympy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    needs = this_processor().has_amx  # generated code is met with gradients of its own
    assert done.stdout.strip() == "False" or needs, done.stdout


def test_a_model_that_cannot_be_made_small_is_left_alone() -> None:
    spec = replace(PRESETS["tiny"], top_k=PRESETS["tiny"].num_experts + 1)
    assert small_model(spec, experts_of_rank=4) is None


@pytest.mark.parametrize(
    ("words", "as_on", "micros"),
    [
        ({"resilience.mode": "exact"}, "cpu", 1),
        ({"resilience.mode": "fast", "optim.zero": "1", "train.dtype": "bfloat16"}, "cuda", 2),
        ({"resilience.mode": "fast", "resilience.slots_per_rank": "6", "folding.ep": None}, "cpu", 1),
    ],
)
def test_warming_up_is_one_step_of_a_small_model_that_leaves_nothing(
    words: dict[str, str | None], as_on: str, micros: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs of two micro-batches, because the second one's products add to what the first one's left."""
    write_text(tmp_path / "text")
    said = recipe_words(StormSetup(), tmp_path)
    given = dict(zip(said[::2], said[1::2], strict=True)) | {f"--{k}": v for k, v in words.items()}
    given |= {"--train.steps": "50", "--launch.ranks": "4"}
    alone = ("--resilience.service", "--resilience.wanted", "--launch.host")
    recipe = load_recipe(None, [w for k, v in given.items() if v is not None and k not in alone for w in (k, v)])
    folder = RunFolder(tmp_path / "runs" / "x")
    folder.create()
    run = prepare_run(recipe, folder)
    before = sorted(p.name for p in folder.path.rglob("*"))
    steps: list[ModelSpec] = []
    commit = warming.commit_step

    def counted(parts: Any, reduced: Any) -> Any:
        steps.append(parts.spec)
        assert reduced.tally.finite
        layers = [m for m in parts.model.modules() if isinstance(m, MoE)]
        assert layers and all(m.routed.dispatcher.listen for m in layers), "counts are asked for as beside other ranks"
        return commit(parts, reduced)

    def batch(*args: Any, of: Any = warming.token_batch, **words: Any) -> Any:
        batches.append(of(*args, **words))
        return batches[-1]

    batches = list[Any]()
    recipe_of = warming._alone
    monkeypatch.setattr(warming, "_alone", lambda recipe, _: recipe_of(recipe, torch.device(as_on)))
    monkeypatch.setattr(warming, "token_batch", batch)
    monkeypatch.setattr(warming, "commit_step", counted)
    warm_up(
        recipe,
        run.spec,
        run.planner.base,
        prepared=run.prepared,
        device=torch.device("cpu"),
        folder=folder,
        lanes=Lanes(),
    )
    (spec,) = steps
    assert len(batches) == micros
    assert spec.num_layers <= 2 and spec.hidden == run.spec.hidden
    assert sorted(p.name for p in folder.path.rglob("*")) == before and not dist.is_initialized()

"""fp32 on a cluster: everything is twice as wide, products go at the rate of fp32, and a file without that rate is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.plan.recipe import run_problems
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import GpuCluster, known_hardware, load_hardware, parse_cluster
from phalanx.simulate.hardware.cost import Oracle
from phalanx.simulate.search.to_recipe import recipe_of_mapping
from phalanx.simulate.step.device_memory import memory_of
from phalanx.simulate.step.quick import QuickPredictor
from phalanx.simulate.step.timing import Prediction, predict

pytestmark = pytest.mark.unit
TEXT = """
model = { preset = "qwen3-30b-a3b", vocab = 151936 }
folding = { ep = 8 }
router = { force = "balanced" }
train = { seq_len = 4096, global_batch = 256, micro_batch = 1 }
launch = { device = "cuda" }
"""
H100 = parse_cluster("h100x64")


def read(tmp_path: Path, dtype: str) -> Recipe:
    (tmp_path / "r.toml").write_text(TEXT)
    words = ["--train.dtype", dtype, "--launch.ranks", "64"]
    return load_recipe(tmp_path / "r.toml", words, check=lambda r: run_problems(r, world=64, tokenizer_vocab=151936))


def predicted(tmp_path: Path, dtype: str, cluster: GpuCluster = H100) -> Prediction:
    recipe = read(tmp_path, dtype)
    spec = resolve_recipe(recipe)
    return predict(job_of_recipe(recipe, spec), mapping_of_recipe(recipe, spec, world=64, cluster=cluster), cluster)


def test_bytes_double_and_products_go_at_their_own_rate(tmp_path: Path) -> None:
    narrow, wide = (predicted(tmp_path, dtype) for dtype in ("bfloat16", "float32"))
    a, b = narrow.memory[0], wide.memory[0]
    assert b.weights == 2 * a.weights
    assert (b.gradients, b.optimizer) == (a.gradients, a.optimizer)
    assert 1.9 < b.activations / a.activations <= 2  # scores' log-sums and the router's tables are fp32 in both
    h = H100.hardware
    assert h.fp32_flops_per_s is not None
    slower = h.bf16_flops_per_s / h.fp32_flops_per_s
    for kind in ("gemm", "attention"):
        assert wide.step.parts[kind] / narrow.step.parts[kind] == pytest.approx(slower, rel=0.25)
    assert 1.5 < wide.step.parts["a2a_inside"] / narrow.step.parts["a2a_inside"] <= 2
    assert narrow.mapping.hash != wide.mapping.hash


def test_a_search_counts_the_same(tmp_path: Path) -> None:
    p = predicted(tmp_path, "float32")
    quick = QuickPredictor(p.job, H100, "fp32")
    assert quick.seconds(p.mapping) == pytest.approx(p.step.seconds, rel=1e-9)
    recipe, reasons = recipe_of_mapping(p.job, p.mapping)
    assert recipe is not None and recipe.train.dtype == "float32", reasons


def test_every_cluster_says_its_rate_and_one_that_does_not_is_refused(tmp_path: Path) -> None:
    for name in known_hardware():
        h = load_hardware(name)
        assert h.fp32_flops_per_s is not None and 10 < h.bf16_flops_per_s / h.fp32_flops_per_s < 40
        assert Oracle(h, "fp32").peak_rate < Oracle(h).peak_rate
    silent = replace(H100, hardware=replace(H100.hardware, fp32_flops_per_s=None))
    with pytest.raises(ConfigError, match=r"train\.dtype.*no rate in the cluster's file"):
        predicted(tmp_path, "float32", silent)


def test_auto_is_what_the_ranks_there_compute_fastest_in() -> None:
    processors = replace(H100.hardware, sms=None, threads=4, bf16_flops_per_s=1e11)
    assert H100.hardware.native_dtype == "bfloat16"
    assert replace(processors, fp32_flops_per_s=2e11).native_dtype == "float32"
    assert replace(processors, fp32_flops_per_s=5e10).native_dtype == "bfloat16"
    assert replace(processors, fp32_flops_per_s=None).native_dtype == "bfloat16"


def test_memory_of_wide_stages_is_counted_for_each(tmp_path: Path) -> None:
    p = predicted(tmp_path, "float32")
    assert memory_of(p.job, p.mapping) == p.memory
    assert p.peak_bytes > predicted(tmp_path, "bfloat16").peak_bytes

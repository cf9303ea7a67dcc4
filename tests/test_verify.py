"""The oracle itself: which cases it makes, how it measures, that it finds every planted fault and nothing in health."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.main import main as program
from phalanx.core.config import Recipe
from phalanx.kernels.cross_entropy import IGNORE
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import fit_problems, legal_foldings
from phalanx.plan.layout import Box
from phalanx.plan.model import PRESETS
from phalanx.runtime.boxes import BoxTensor
from phalanx.verify import session
from phalanx.verify.compare import RankReport, errors, uncovered
from phalanx.verify.faults import FAULTS, Fault, fault_named
from phalanx.verify.numbers import microbatch
from phalanx.verify.pairwise import pairwise
from phalanx.verify.session import Job, Task, run_job
from phalanx.verify.setups import (
    AXES,
    FACTORS,
    PIPELINES,
    SCHEDULES,
    SEQ_LEN,
    default_cases,
    recipe_cases,
    shrink,
    small_model,
)


def phalanx(*args: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


# ---- cases ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=7), st.integers(0, 5))
def test_pairwise_covers_every_pair_and_repeats_itself(sizes: list[int], seed: int) -> None:
    factors = {f"f{i}": range(size) for i, size in enumerate(sizes)}
    cases = pairwise(factors, seed=seed)
    for a, b in itertools.combinations(factors, 2):
        assert {(c[a], c[b]) for c in cases} == set(itertools.product(factors[a], factors[b]))
    assert cases == pairwise(factors, seed=seed)
    first, second = sorted(sizes)[-2:]
    assert len(cases) <= max(4, 2.5 * first * second)


@pytest.mark.parametrize(("world", "mappings"), [(1, 1), (2, 9), (4, 36), (8, 90)])
def test_default_cases_take_every_mapping_and_meet_every_option(world: int, mappings: int) -> None:
    cases = default_cases(world)
    legal = list(legal_foldings(world, small_model("verify"), seq_len=SEQ_LEN, axes=AXES))
    assert {c.folding for c in cases if c.folding.pp == 1} == set(legal) and len(legal) == mappings
    piped = {(c.folding.pp, c.pipe) for c in cases if c.folding.pp > 1}
    assert piped == {(pp, pipe) for pp in PIPELINES if world % pp == 0 for pipe in SCHEDULES}
    assert all(not fit_problems(c.folding, c.setup.spec, seq_len=SEQ_LEN) for c in cases)
    assert {c.setup.zero for c in cases} == set(FACTORS["zero"])
    assert {c.setup.dispatch.policy for c in cases} == {"dropless", "drop"}
    assert {c.setup.spec.router.aux_scope for c in cases if c.setup.spec.router.aux_loss} == set(FACTORS["aux"][1:])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_shrinks_onto_every_mapping(preset: str) -> None:
    spec = PRESETS[preset]
    for folding in legal_foldings(8, spec, seq_len=4096, axes=("ep", "etp")):
        small = shrink(spec, folding)
        assert not fit_problems(folding, small, seq_len=SEQ_LEN)
        assert small.num_params < 1_500_000
        assert dataclasses.replace(small.router, force="none") == dataclasses.replace(spec.router, force="none")
        assert (small.shared_ffn > 0) == (spec.shared_ffn > 0) and small.qk_norm == spec.qk_norm
        assert len(small.moe_layers) == 2 and small.top_k == spec.top_k
        cases = recipe_cases(Recipe(), spec, folding, DispatchSpec())
        assert [c.setup.accumulation for c in cases] == [1, 2] and all(c.folding == folding for c in cases)


def test_microbatches_differ_and_are_the_same_whoever_asks() -> None:
    setup = next(c.setup for c in default_cases(8) if c.setup.packed)
    batches = [microbatch(setup, j) for j in range(8)]
    assert len({tuple(b.tokens_BS.flatten().tolist()) for b in batches}) == 8
    assert len({int((b.labels_BS != IGNORE).sum()) for b in batches}) > 3
    again = microbatch(setup, 5)
    assert torch.equal(again.tokens_BS, batches[5].tokens_BS) and again.segments == batches[5].segments
    for b in batches:
        assert all(sum(lengths) == SEQ_LEN for lengths in b.segments) and any(len(x) > 1 for x in b.segments)
        starts = [int(b.tokens_BS[s, sum(x[:i])]) for s, x in enumerate(b.segments) for i in range(len(x))]
        assert len(set(starts)) == len(starts)
    patched = microbatch(setup, 5, patches=[(1, 3, 0)])
    assert int(patched.tokens_BS[1, 3]) == 0


# ---- measures ------------------------------------------------------------------------------------------------------------------


def box(tensor: list[float], start: int = 0) -> BoxTensor:
    part = torch.tensor(tensor)
    return BoxTensor("x", (4,), Box((start,), (len(tensor),)), part, primary=False)


def test_error_is_relative_to_the_whole_tensor_and_to_the_norm() -> None:
    want = {"x": torch.tensor([1.0, -8.0, 0.0, 0.0])}
    assert errors([box([1.0, -8.0, 0.0, 0.0])], want, floor=0.0) == {"x": 0.0}
    assert errors([box([2.0], 0), box([0.0], 3)], want, floor=0.0) == {"x": 1 / 8}
    assert errors([box([2.0])], want, floor=100.0) == {"x": 1 / 100}
    assert errors([box([float("nan")])], want, floor=0.0) == {"x": float("inf")}
    assert errors([box([1e-9])], {"x": torch.zeros(4)}, floor=1e-8)["x"] == pytest.approx(0.1)


def test_what_nobody_compared_is_a_failure() -> None:
    half = RankReport(case=0, rank=0, covered=[("x", [0, 0], [2, 2])])
    rest = RankReport(case=0, rank=1, covered=[("x", [2, 0], [2, 2])])
    assert uncovered({"x": (4, 2)}, [half, rest]) == []
    assert uncovered({"x": (4, 2)}, [half]) == ["x: 4 elements of its gradient were compared on no rank"]


def _leaves(parts):
    if parts.groups.rank == 1:
        raise RuntimeError("a rank went away")
    return parts


def test_a_case_that_ends_the_ranks_is_reported_and_the_others_run() -> None:
    case = next(c for c in default_cases(2) if c.folding.ep == 2)
    away = Fault(name="away", summary="rank 1 raises", alter=_leaves)
    job = Job(tasks=[Task(case), Task(case, away), Task(case)], world=2, dtype=torch.float64, timeout_s=10)
    sound, ended, after = run_job(job)
    assert not sound.failures and not after.failures
    assert ended.crashed and "a rank went away" in ended.failures[0] and "rank 1 failed" in ended.failures[0]


def test_when_too_many_cases_end_the_ranks_the_rest_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_CRASHES", 0)
    case = next(c for c in default_cases(2) if c.folding.ep == 2)
    away = Fault(name="away", summary="rank 1 raises", alter=_leaves)
    job = Job(tasks=[Task(case, away), Task(case)], world=2, dtype=torch.float64, timeout_s=10)
    ended, rest = run_job(job)
    assert ended.crashed and rest.failures == ["not run: too many cases ended the ranks"]


# ---- the command ---------------------------------------------------------------------------------------------------------------

KEYS = {
    "mappings",
    "worst_gradient_rel_error",
    "worst_norm_rel_error",
    "worst_step_rel_error",
    "seconds",
    "failures",
}


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_all_mappings_of_two_ranks_agree_with_one(dtype: str, limit: float, tmp_path: Path) -> None:
    """A quick part of what CI runs with 4 and 8 ranks."""
    done = phalanx("verify", "--ranks", "2", "--dtype", dtype, "--json", str(tmp_path / "v.json"))
    result = json.loads((tmp_path / "v.json").read_text())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    mappings = 10 if dtype == "float64" else 3  # rounding would route tokens otherwise: the axes of the experts alone
    assert result.keys() >= KEYS and result["failures"] == [] and result["mappings"] == mappings
    for name in ("worst_gradient_rel_error", "worst_norm_rel_error", "worst_step_rel_error"):
        assert result[name] <= limit
    assert result["worst_gradient_rel_error"] > 0  # a comparison with itself would say 0
    assert "cases agree" in done.stdout


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    done = phalanx("verify", "--plant", "all", "--ranks", "4", "--json", str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert result["not_on_these_ranks"] == [] and len(result["escaping_a_loss_check"]) >= 10
    return {row["name"]: row for row in result["faults"]}


FIRST_SIGN = {
    "experts-divided-by-edp": "moe.experts",
    "no-edp-reduction": "moe.experts",
    "experts-over-dp-cp": "moe.experts",
    "replicated-not-reduced": "norm.weight",
    "aux-counts-not-reduced": "moe.router.weight",
    "router-losses-per-rank": "gradient/layers.1.",  # the router's weight, or the norm before it
    "norm-skips-experts": "grad_norm",
    "norm-skips-experts-of-tp": "grad_norm",
    "norm-counts-replicas": "grad_norm",
    "stale-bias": "expert_bias",
    "bias-from-own-counts": "expert_bias",
    "shards-not-published": "param/",
}
"""Where the first complaint must point; for the others any parameter's gradient or state."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_fault_is_found(name: str, planted: dict[str, dict[str, object]]) -> None:
    row = planted[name]
    assert row["caught"] and row["cases"]
    signs = row["found_by"]
    assert isinstance(signs, list) and all(FIRST_SIGN.get(name, "/") in sign for sign in signs), signs


@pytest.mark.ranks
def test_planting_one_fault_fails_and_names_the_parameter(tmp_path: Path) -> None:
    done = phalanx("verify", "--plant", "no-edp-reduction", "--ranks", "2", "--json", str(tmp_path / "v.json"))
    result = json.loads((tmp_path / "v.json").read_text())
    assert done.returncode == 1 and "found" in done.stdout
    assert result["planted"] == "no-edp-reduction" and any("moe.experts.w13" in text for text in result["failures"])


@pytest.mark.ranks
def test_a_recipe_is_verified_on_its_own_mapping(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\npreset = "tiny"\nshared_ffn = 32\n[folding]\nep = 2\n[launch]\nranks = 2\n'
        '[dispatch]\npolicy = "drop"\ncapacity_factor = 0.75\n[router]\nz_loss = 0.001\n'
    )
    done = phalanx("verify", str(recipe), "--json", str(tmp_path / "v.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "v.json").read_text())
    assert result["mappings"] == 1 and result["cases"] == 2 and all("dp2|ep2" in label for label in result["labels"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--plant", "no-edp-reductoin"), "did you mean 'no-edp-reduction'"),
        (("--plant", "no-edp-reduction", "--ranks", "1"), "exists in no mapping of 1 rank;"),
        (("--ranks", "0"), "must be at least 1"),
        (("--plant", "all", "--dtype", "bfloat16"), "told from rounding in float64"),
        (("--ranks", "1", "--json", "/proc/none/v.json"), "cannot write /proc/none/v.json"),
    ],
)
def test_wrong_arguments_end_in_one_message(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["verify", *args]) == 2
    told = capsys.readouterr().err
    assert says in told and "Traceback" not in told


def test_recipe_that_does_not_fit_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "tiny"\n[folding]\nep = 3\n')
    assert program(["verify", str(recipe), "--ranks", "4"]) == 2
    assert "folding.ep" in capsys.readouterr().err
    assert program(["verify", str(recipe), "--plant", "all"]) == 2
    assert "has no effect beside a recipe" in capsys.readouterr().err


def test_fault_names_are_unique_and_found_by_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 10
    assert fault_named(FAULTS[3].name) is FAULTS[3]

"""Every family against transformers: logits, loss and every gradient, in fp32 and in float64, on one rank and on mappings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hf_help import ALL, CONFIGS, Theirs, hf_model, logical_gradients, relative, run_ours, run_theirs

from phalanx.plan.mapping.folding import Folding, make_folding
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra `hf`)"
)
ALONE = make_folding(world=1)
MAPPINGS = {
    "one rank": ALONE,
    "tp2": make_folding(world=2, tp=2),
    "ep2 x dp2": make_folding(world=2, ep=2),
    "cp2": make_folding(world=2, cp=2),
    "pp2": make_folding(world=2, pp=2),
    "tp2 dp2, etp2 ep2": make_folding(world=4, tp=2, etp=2, ep=2),
}
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10}


def check(folder: Path, theirs: Theirs, folding: Folding, dtype: torch.dtype) -> None:
    ranks = run_ranks(folding.world, run_ours, folder, folding, dtype, theirs.logits)
    limit, want = LIMIT[dtype], logical_gradients(folder, theirs)
    assert max(r.logits_error for r in ranks) < limit
    assert all(abs(r.loss - theirs.loss) < limit * theirs.loss for r in ranks)
    assert not any(g.isnan().any() for g in want.values())
    seen = {name: torch.zeros(g.shape, dtype=torch.bool) for name, g in want.items()}
    for ours in ranks:
        for box in ours.gradients:
            name = box.name.removeprefix("gradient/")
            scale = want[name].abs().max()
            error = (box.tensor - want[name][box.box.slices()]).abs().max() / scale
            assert error < limit, f"{name}: {error:.1e}"
            seen[name][box.box.slices()] = True
    assert all(mask.all() for mask in seen.values())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], tuple[Path, Theirs]]:
    """(folder, what transformers computes) by name and type, made on first use."""
    return {}


def made(store: dict, name: str, dtype: torch.dtype, tmp: pytest.TempPathFactory) -> tuple[Path, Theirs]:
    if (name, dtype) not in store:
        model, folder = hf_model(name, dtype), tmp.mktemp("hf")
        model.save_pretrained(folder)
        store[name, dtype] = folder, run_theirs(model)
    found: tuple[Path, Theirs] = store[name, dtype]
    return found


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_logits_and_gradients_on_one_rank(
    name: str, dtype: torch.dtype, checkpoints: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(*made(checkpoints, name, dtype, tmp_path_factory), ALONE, dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mapping", [m for m in MAPPINGS if m != "one rank"])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_logits_and_gradients_on_mappings(
    name: str, mapping: str, dtype: torch.dtype, checkpoints: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(*made(checkpoints, name, dtype, tmp_path_factory), MAPPINGS[mapping], dtype)


def test_the_oracle_itself_is_wide(checkpoints: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without the float64 mode transformers rounds to float32, so that 1e-10 could not be asked for."""
    _, theirs = made(checkpoints, "mixtral", torch.float64, tmp_path_factory)
    with torch.no_grad():
        from hf_help import tokens_and_labels

        rounded = hf_model("mixtral", torch.float64)(input_ids=tokens_and_labels()[0], use_cache=False).logits
    assert 1e-10 < relative(rounded, theirs.logits) < 1e-4

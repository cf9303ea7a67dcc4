"""Exact mode: the same recipe on 1, 2, 3, 4, 6 ranks ends with the same bits, and every planted mistake shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exact_help import Ranks, Run, ended
from tiers import some

from phalanx.plan.moe.dispatch import DispatchSpec

pytestmark = pytest.mark.ranks

ONE = Ranks(1)
MANY = (Ranks(2), Ranks(2, ep=2), Ranks(3), Ranks(4, ep=2), Ranks(4, ep=4, zero=0))
DROPPING = {
    "by probability": DispatchSpec(policy="drop", capacity_factor=1.0),
    "by position, whole": DispatchSpec(policy="drop", drop_by="position", drop_scope="full_sequence"),
}


def check_same(run: Run, many: tuple[Ranks, ...], one: Ranks = ONE) -> None:
    alone = ended(run, one)
    for ranks in many:
        assert ended(run, ranks) == alone, ranks


@pytest.mark.core
def test_ten_steps_end_with_the_same_bits_on_any_number_of_ranks() -> None:
    check_same(Run(), some(MANY, 2))


def test_in_bf16_and_with_products_of_few_rows() -> None:
    check_same(Run(dtype=torch.bfloat16, chunk_rows=16, steps=4), some((Ranks(2, ep=2), Ranks(3), Ranks(4, ep=4)), 1))


@pytest.mark.parametrize("name", some(list(DROPPING), 1))
def test_with_tokens_dropped(name: str) -> None:
    run = Run(dispatch=DROPPING[name], steps=4)
    alone = ended(run, ONE)
    assert any(figures[5] > 0 for figures in alone.figures)
    for ranks in (Ranks(2, ep=2), Ranks(3), Ranks(4, ep=2)):
        assert ended(run, ranks) == alone, ranks


def test_with_tensor_parallelism() -> None:
    run = Run(steps=4, dispatch=DROPPING["by position, whole"])
    check_same(run, some((Ranks(4, tp=2), Ranks(4, tp=2, ep=2), Ranks(6, tp=2, ep=2)), 2), Ranks(2, tp=2))


def test_with_a_pipeline() -> None:
    check_same(Run(steps=4, samples=5), (Ranks(4, pp=2), Ranks(4, pp=2, ep=2), Ranks(6, pp=2)), Ranks(2, pp=2))


@pytest.mark.parametrize("scope", ["sequence", pytest.param("global_batch", marks=pytest.mark.slow)])
def test_with_blocks_computed_again_and_balance_over(scope: str) -> None:
    run = Run(steps=3, recompute="full", router={"aux_scope": scope, "aux_loss": 0.1}, model={"shared_ffn": 16})
    check_same(run, (Ranks(2, ep=2), Ranks(4, ep=4)))


def test_with_further_tokens_predicted() -> None:
    check_same(Run(steps=3, model={"mtp_layers": 1}), (Ranks(2, ep=2), Ranks(3)))


def test_more_ranks_than_micro_batches() -> None:
    check_same(Run(samples=2, steps=3, router={"aux_scope": "global_batch"}), (Ranks(4, ep=2), Ranks(3)))


def test_with_plain_kernels_and_without_compiled_ones() -> None:
    check_same(Run(steps=3, compiled=False, model={"hidden": 36}), (Ranks(2, ep=2), Ranks(3)))
    check_same(Run(steps=3, kernels="reference"), (Ranks(2, ep=2), Ranks(3)))


@pytest.mark.slow
def test_with_two_threads_a_rank() -> None:
    check_same(Run(steps=3, threads=2), (Ranks(2, ep=2), Ranks(3)))


def test_resumed_from_a_checkpoint_of_another_number_of_ranks(tmp_path: Path) -> None:
    run = Run(steps=9)
    alone = ended(run, ONE)
    ended(run, Ranks(4, ep=2), steps=3, folder=tmp_path)
    ended(run, Ranks(3), first=3, steps=3, folder=tmp_path)
    last = ended(run, Ranks(2, ep=2), first=6, steps=3, folder=tmp_path)
    assert last.state == alone.state
    assert last.figures == alone.figures[6:]


def test_gradients_that_need_more_room_are_summed_again_with_fewer_places() -> None:
    run = Run(steps=3, fixed_bits=60)
    check_same(run, (Ranks(2, ep=2), Ranks(3)))
    usual = ended(replace(run, fixed_bits=None), ONE)
    assert [f[0] for f in ended(run, ONE).figures] == pytest.approx([f[0] for f in usual.figures], rel=1e-6)


def test_exact_mode_computes_what_fast_mode_does() -> None:
    exact, fast = (ended(Run(mode=mode, dtype=torch.float64, steps=4), Ranks(3)) for mode in ("exact", "fast"))
    for a, b in zip(exact.figures, fast.figures, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-11)


def test_fast_mode_shares_unequally_and_stays_within_rounding() -> None:
    run = Run(mode="fast", dtype=torch.float64, steps=3)
    alone = ended(run, ONE)
    for ranks in (Ranks(3), Ranks(4, ep=4), Ranks(4, pp=2, ep=2)):
        for a, b in zip(ended(run, ranks).figures, alone.figures, strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-11), ranks


@pytest.mark.parametrize(
    ("fault", "run"),
    [
        ("fp32 sums", Run(steps=3)),
        ("joined rows", Run(steps=3)),
        ("seeded by rank", Run(steps=1, router={"force": "imbalanced"})),
        ("every rank squares", Run(steps=1)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_planted_mistake_shows(fault: str, run: Run) -> None:
    alone = ended(run, ONE, faults=[fault])
    assert any(ended(run, ranks, faults=[fault]) != alone for ranks in (Ranks(3), Ranks(4, ep=2, zero=0)))


def test_fast_mode_is_not_exact() -> None:
    """The comparison is not blind: without exact mode the bits differ."""
    run = Run(mode="fast", steps=3)
    assert ended(run, Ranks(3)).state != ended(run, ONE).state

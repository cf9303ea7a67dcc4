"""An elastic run with sharded optimizer state: ranks killed before the reduction, after the vote, and while parameters are published."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_elastic import STEPS, base, check_equal, check_samples, events, losses, train
from train_help import phalanx, train_args

__all__ = ["base"]  # its undisturbed run has whole state on every rank
pytestmark = pytest.mark.ranks


def test_a_dry_run_says_how_many_hosts_keep_a_shard(tmp_path: Path) -> None:
    settings = {"resilience__heal": "true", "resilience__mode": "fast", "optim__zero": "1", "folding__ep": "1"}
    found = phalanx("train", *train_args(tmp_path, **settings, resilience__f="2", launch__ranks="2"), "--dry-run")
    assert found.returncode == 0, found.stderr
    assert "each shard of masters and moments on 2 hosts" in found.stdout
    found = phalanx("train", *train_args(tmp_path, **settings, resilience__f="3", launch__ranks="2"), "--dry-run")
    assert found.returncode == 2
    assert "it needs 3 (resilience.f); use 3 ranks" in found.stderr


def test_shards_with_two_holders_outlive_ranks_killed_around_a_commit(base: Path) -> None:
    faults = {"reduction": ((1,), 2), "commit": ((2,), 4), "publish": ((0,), 6), "vote": ((3,), 8)}
    assert train(base, "zero", faults, optim__zero="1") == set(faults)
    check_equal(base, "zero")
    check_samples(base, "zero")
    formed = events(base, "zero", "TeamFormed")
    assert {e["members"] for e in formed} == {3, 4} and all(e["checked"] for e in formed if e["generation"] > 1)
    assert not any("goes back" in e["text"] for e in events(base, "zero", "Note"))


def test_three_holders_outlive_two_at_once(base: Path) -> None:
    changes = {"optim__zero": "1", "resilience__f": "3", "folding__ep": "1"}
    assert train(base, "two", {"publish": ((1, 2), 5)}, **changes) == {"publish"}
    check_equal(base, "two")
    assert not any("goes back" in e["text"] for e in events(base, "two", "Note"))


@pytest.mark.slow
def test_fast_mode_recovers_within_rounding(base: Path) -> None:
    few = {"resilience__mode": "fast", "launch__ranks": "4", "train__steps": "6", "optim__zero": "1"}
    train(base, "zero-fast-calm", {}, **few)
    assert train(base, "zero-fast", {"publish": ((1,), 2)}, **few) == {"publish"}
    calm, hurt = losses(base, "zero-fast-calm"), losses(base, "zero-fast")
    assert set(hurt) == set(calm) == set(range(1, 7))
    for step, told in hurt.items():
        (wanted,) = calm[step]
        assert all(abs(loss - wanted[0]) <= 1e-5 * wanted[0] for loss, _ in told)


def test_more_losses_than_holders_go_back_to_the_checkpoint(base: Path) -> None:
    assert train(base, "zero-back", {"commit": ((1, 2), 6)}, optim__zero="1") == {"commit"}
    check_equal(base, "zero-back")
    notes = {e["text"] for e in events(base, "zero-back", "Note")}
    assert any("goes back to the checkpoint of step 4" in text for text in notes), notes
    assert set(losses(base, "zero-back")) == set(range(1, STEPS + 1))

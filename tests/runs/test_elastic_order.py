"""An elastic run on a transport that matches as NCCL does (`tests/helpers/in_order.py`), with the communicators that it has on devices: ranks are killed, and go on with unequal shares."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from in_order import crossed, in_order, stuck
from test_elastic import Faults, _command, base, losses, train

__all__ = ["base"]
pytestmark = pytest.mark.ranks
FEW = {"resilience__mode": "fast", "train__steps": "6", "optim__zero": "1", "optim__bucket_mb": "0.01"}
"""7 micro-batches on 4 ranks, and on the 3 that are left: always some have an empty one. Gradients are complete bucket by bucket."""


def _ordered(args: list[str], folder: str, faults: Faults, *, early: bool = False, one_thread: bool = False) -> int:
    """Body of a process as `_command`: collectives of each generation match by their order, and state moves in batches. `early`: gradients leave where each rank has them, as they once did.
    `one_thread`: all generations post from the same thread, as they once did."""
    from phalanx.runtime.comm.devices import DeviceThread
    from phalanx.runtime.comm.groups import build_groups
    from phalanx.runtime.membership.member import run_member
    from phalanx.runtime.reshard import executor
    from phalanx.train.recovery import elastic, run
    from phalanx.train.setup import rank
    from phalanx.train.step import passes

    enter = elastic.ElasticMember.enter

    def as_on_a_device(*args: Any, **words: Any) -> Any:
        return build_groups(*args, **{**words, "in_order": True})

    with (
        mock.patch.object(rank, "build_groups", as_on_a_device),
        mock.patch.object(elastic, "build_groups", as_on_a_device),
        mock.patch.object(passes, "_some_are_empty", (lambda *_: False) if early else passes._some_are_empty),
        mock.patch.object(executor, "_Tagged", executor._Batched),
        mock.patch.object(
            run,
            "run_member",
            lambda *a, **words: run_member(*a, **{**words, "thread": None if one_thread else DeviceThread()}),
        ),
        in_order(Path(folder), rank=-1) as orders,
    ):

        def entering(self: Any, team: Any, resolution: Any) -> None:
            orders.begin(Path(folder, f"generation-{team.generation.number}"), team.rank)
            enter(self, team, resolution)

        elastic.ElasticMember.enter = entering  # type: ignore[method-assign]
        return _command(args, folder, faults)


def test_ranks_that_heal_post_in_one_order(base: Path) -> None:
    faults: Faults = {"forward": ((1,), 2), "publish": ((2,), 4)}
    assert train(base, "ordered", faults, body=_ordered, **FEW) == set(faults)
    assert set(losses(base, "ordered")) == set(range(1, 7))
    assert _crossed(base / "printed-ordered", at_least=3) == []
    assert _stuck_in_moves(base / "printed-ordered") == []


def test_gradients_that_leave_wherever_a_rank_has_them_are_found(base: Path) -> None:
    train(base, "early", {}, body=partial(_ordered, early=True), **FEW)
    assert any("[gradient/" in text and "[mb" in text for text in _crossed(base / "printed-early", at_least=1))


def test_a_generation_that_posts_from_the_thread_of_a_failed_one_is_found(base: Path) -> None:
    train(base, "one-thread", {"forward": ((1,), 2)}, code=2, body=partial(_ordered, one_thread=True), **FEW)
    told = [path.read_text() for path in (base / "runs" / "one-thread" / "events").glob("rank-*.jsonl")]
    assert any("posted by a thread in which a message has failed" in text for text in told)


def _crossed(folder: Path, *, at_least: int) -> list[str]:
    generations = [path for path in sorted(folder.glob("generation-*")) if list(path.glob("order-*"))]
    assert len(generations) >= at_least
    return [found for path in generations for found in crossed(path)]


def _stuck_in_moves(folder: Path) -> list[str]:
    return [text for path in folder.glob("generation-*") for text in stuck(path) if "[heal/" in text]

"""The loop of training, one method at a time, with all around it made up: what is due and when, what an end writes, what is dropped."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.core.errors import PeerError, RunError, UnsoundError
from phalanx.runtime.comm.collectives import Collectives
from phalanx.train import loop
from phalanx.train.loop import PROMPT_TOKENS, Trainer, beginning
from phalanx.train.reporting import RunProgress

pytestmark = pytest.mark.unit


def a_trainer(done: list[Any], **have: Any) -> Any:
    """What it does goes to `done`."""

    def noting(name: str) -> Any:
        return lambda *_, **__: done.append(name)

    trainer: Any = object.__new__(Trainer)
    what: dict[str, Any] = {
        "parts": SimpleNamespace(comms=Collectives()), "progress": RunProgress(step=4), "total_steps": 8, "elastic": None,
        "moving": None, "_measured": None, "_reduced": None, "_first": False, "due": False,
        "recorder": SimpleNamespace(decided=noting("decided"), end=noting("end"), tell=noting("tell"), publishing=nullcontext),
        "rank": SimpleNamespace(device=torch.device("cpu"), recipe=SimpleNamespace(train=SimpleNamespace(eval_interval=0), optim=SimpleNamespace(warmup_steps=0, lr=1.0))),
        "reporter": SimpleNamespace(progress=None, outcome=lambda how, _: done.append(how)), "stop": SimpleNamespace(requested=False),
        "saving": SimpleNamespace(begun=None, last=noting("last"), between=lambda *_, first: done.append(first)),
    }  # fmt: skip
    vars(trainer).update({**what, **have})
    return trainer


@pytest.mark.parametrize(("step", "due"), [(0, False), (1, True), (7, True)])
def test_nothing_is_due_before_the_first_step(step: int, due: bool) -> None:
    trainer = a_trainer([])
    trainer.go_on(RunProgress(step=step), SimpleNamespace())
    assert trainer.due is due and trainer._first and trainer.saving.begun == (step or None)


def test_a_generation_is_new_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its first time between steps does not come again."""
    done: list[Any] = []
    trainer = a_trainer(done, _first=True)
    monkeypatch.setattr(Trainer, "_move_experts", lambda self: None)
    trainer._between_steps()
    trainer._between_steps()
    assert done == [True, False]


def test_a_step_that_was_not_computed_is_not_committed() -> None:
    with pytest.raises(RunError, match="whose gradient was not reduced"):
        a_trainer([]).commit()


def test_a_move_that_is_given_up_collects_no_gradients() -> None:
    done: list[Any] = []
    moving = SimpleNamespace(parts=SimpleNamespace(buffers=SimpleNamespace(close=lambda: done.append("closed"))))
    trainer = a_trainer(done, moving=moving, _reduced="a step")
    trainer.abort()
    assert "closed" in done and trainer.moving is None and trainer._reduced is None


@pytest.mark.parametrize("error", [PeerError, UnsoundError])
def test_an_elastic_run_outlives_what_other_members_would_not_meet_again(
    error: type[RunError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce_step(*_: Any, **__: Any) -> None:
        raise error("rank 1 is lost")

    monkeypatch.setattr(loop, "reduce_step", reduce_step)
    monkeypatch.setattr(loop, "learning_rate", lambda *_, **__: 1.0)
    trainer = a_trainer([], elastic=SimpleNamespace())
    with pytest.raises(error) as info:
        trainer._reduce(trainer.parts, [])
    assert type(info.value) is error


@pytest.mark.parametrize(("stopped", "end"), [(True, ["publish", "last", "interrupted"]), (False, ["publish", "last", "validate", "finished"])])  # fmt: skip
def test_however_a_run_ends_it_leaves_its_last_checkpoint(
    stopped: bool, end: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(loop, "publish", lambda parts: done.append("publish"))
    monkeypatch.setattr(Trainer, "validate", lambda self: done.append("validate"))
    trainer = a_trainer(done)
    trainer.rank.recipe.observe = SimpleNamespace(is_for_people=False)
    trainer.close(stopped=stopped)
    assert done == end


@pytest.mark.parametrize("first", [5, 40])
def test_a_prompt_has_no_token_of_the_second_text(first: int) -> None:
    tokens = np.arange(100, 148)
    batch: Any = SimpleNamespace(tokens=tokens[None], labels=tokens[None] + 1, segments=((first, 48 - first),))
    prompt, stops = beginning(batch, SimpleNamespace(eos_id=7))  # type: ignore[arg-type]
    assert prompt == tokens[: min(first, PROMPT_TOKENS)].tolist() and stops == {7}

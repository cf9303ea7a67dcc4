"""Who received state otherwise than it was sent, and what a member holds meanwhile."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recovery_plan_help import after, fresh, planner

from phalanx.core.errors import RunError
from phalanx.plan.layout import STATE_KINDS
from phalanx.plan.layout.parameters import Box
from phalanx.plan.mapping.folding import Folding
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.placement import state_transfer
from phalanx.train.placement.state_transfer import Examined, HeldState, Moved, differing, take_state
from phalanx.train.placement.suspects import NONE, StatePiece, Suspects, find_suspects, row_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("told", "now", "wrong"),
    [
        ([[7, NONE], [NONE, 8]], [[7, 8], [7, 8]], []),
        ([[7], [NONE], [NONE]], [[7], [7], [9]], [2]),
        ([[7], [7], [NONE]], [[9], [7], [9]], [0, 2]),
        ([[NONE], [NONE], [NONE]], [[5], [4], [5]], [1]),  # nobody held it: the majority
        ([[NONE], [NONE]], [[5], [4]], []),  # and who knows?
        ([[7, NONE], [NONE, NONE]], [[1, 5], [7, 4]], []),
        ([[NONE, 3], [2, NONE]], [[NONE, NONE], [2, 4]], [1]),
    ],
)
def test_who_differs_from_what_was_sent_is_wrong(told: list[list[int]], now: list[list[int]], wrong: list[int]) -> None:
    assert differing(np.array(told, dtype=np.int64), np.array(now, dtype=np.int64)) == wrong


PIECE = StatePiece("master/w", Box((0,), (2,)))


@pytest.mark.parametrize(
    ("said", "outvoted", "doubted"),
    [((7, 7, 8), (2,), ()), ((7, 8), (), (0, 1)), ((7, 7, 8, 9), (), (0, 1, 2, 3)), ((7, None, 7), (), ())],
)
def test_only_more_than_half_outvote_the_others(
    said: Sequence[int | None], outvoted: tuple[int, ...], doubted: tuple[int, ...]
) -> None:
    found = find_suspects([{} if value is None else {PIECE: value} for value in said])
    assert (*(who for who, _ in found.outvoted),) == outvoted and (*(who for who, _ in found.doubted),) == doubted


def test_a_piece_that_the_plan_does_not_know_is_refused() -> None:
    other = PIECE._replace(name="master/v")
    assert row_of({PIECE: 3}, [other, PIECE]).tolist() == [NONE, 3]
    with pytest.raises(ValueError, match="is not a piece of the plan"):
        row_of({PIECE: 3, other: 4}, [PIECE])


# ---- waves of state, of a member that is alone


class State(dict[str, float]):
    """Parameters of one value each, and all that a move does with them."""

    def __init__(self, **values: float) -> None:
        super().__init__(values)
        self.held = {f"{kind}/{name}": torch.full((2,), x) for name, x in values.items() for kind in STATE_KINDS}
        self.buffers: dict[str, torch.Tensor] = {}
        self.restored: list[dict[str, float]] = []

    def boxes(self, names: Container[str] | None = None) -> list[BoxTensor]:
        return [
            BoxTensor(name, (2,), PIECE.box, x, primary=True)
            for name, x in self.held.items()
            if names is None or name.split("/")[1] in names
        ]

    def make_room(self, names: Container[str]) -> None: ...

    def restore(self, comms: object) -> None:
        self.restored.append({name: float(x[0]) for name, x in self.held.items()})


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(state: State, kind: str, names: Container[str] | None = None) -> dict[str, torch.Tensor]:
        return {n: state.held[f"{kind}/{n}"] for n in state if names is None or n in names}

    monkeypatch.setattr(state_transfer, "shard_views", of)


def take(
    held: HeldState, new: State | None, come: Sequence[float], monkeypatch: pytest.MonkeyPatch, *, waves: int = 1
) -> Moved:
    """`come`: what arrives, send by send, of what is 1."""
    names, sends = [f"w{i}" for i in range(waves)], iter(come)
    plan: Any = SimpleNamespace(
        waves=[(name,) for name in names], moves_of=lambda wave: [], descriptor_after=lambda rank, waves, before: None
    )
    everyone: Any = SimpleNamespace(
        comms=SimpleNamespace(complete=lambda device: None), axis=None, hosts=None, device=torch.device("cpu"),
        peers=SimpleNamespace(rank=0, gather=lambda value: [value]),
    )  # fmt: skip
    pieces = tuple(StatePiece(f"{kind}/{name}", PIECE.box) for kind in STATE_KINDS for name in names)
    sent = state_transfer.checksums(State(**dict.fromkeys(names, 1.0)).boxes(), cut={})
    told = row_of(sent, pieces).reshape(1, -1)

    def move(resharder: object, moves: object, source: object, dest: Mapping[str, torch.Tensor], **_: object) -> int:
        value = next(sends)
        for x in dest.values():
            x.fill_(value)
        return 8 * len(dest)

    monkeypatch.setattr(state_transfer, "move_state", move)
    parts: Any = None if new is None else SimpleNamespace(state=new, comms=None)
    found = Examined(plan=plan, suspects=Suspects(), cut={}, pieces=pieces, told=told)
    return take_state(found, parts, held=held, everyone=everyone)


def holding(state: State) -> HeldState:
    held = HeldState(state, None)  # type: ignore[arg-type]
    held.begin("e/3")
    return held


def values(held: HeldState) -> dict[str, float]:
    return {name.split("/")[1]: float(x[0]) for name, x in held.tensors.items()}


def test_what_comes_otherwise_than_it_was_sent_is_sent_again(views: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody but who received it has it now; what does not come soundly takes nobody's place."""
    held, new = holding(State(w0=1.0)), State(w0=0.0)
    assert take(held, new, [9.0, 1.0], monkeypatch) == Moved(2 * 8 * len(STATE_KINDS), len(STATE_KINDS), 1)
    assert held.passed == "e/3/0" and held.tensors["master/w0"] is new.held["master/w0"]
    held = holding(State(w0=1.0))
    with pytest.raises(RunError, match="received other bits than were sent to it, 2 times in a row"):
        take(held, State(w0=0.0), [9.0, 8.0], monkeypatch)
    assert values(held) == {"w0": 1.0} and held.doubt == held.passed == ""


def test_what_a_wave_has_taken_away_is_let_go_of(views: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And parameters are made of the state once all of it is there."""
    held, new = holding(State(w0=1.0, w1=1.0)), State(w1=0.0)
    take(held, new, [1.0, 1.0], monkeypatch, waves=2)
    assert held.tensors.keys() == {f"{kind}/w1" for kind in STATE_KINDS}
    assert held.tensors["master/w1"] is new.held["master/w1"]
    assert new.restored == [dict.fromkeys(new.held, 1.0)]


def test_what_was_offered_in_another_move_is_no_part_of_this_one(views: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member cut off in a wave that nobody has passed: idle in the next generation, it keeps what it held."""
    held = holding(State(w0=1.0))
    plan: Any = SimpleNamespace(waves=[("w0",)], descriptor_after=lambda rank, waves, before: None)
    held.offer(plan, 0, 0, state_transfer._tensors_of(State(w0=9.0)))  # type: ignore[arg-type]
    assert held.doubt == "e/3/0"
    held.begin("e/4")
    assert held.doubt == "" and held.then is None
    take(held, None, [1.0], monkeypatch)
    assert values(held) == {"w0": 1.0}


def test_after_each_wave_a_member_stands_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.plan.recovery.planner.LEAST_WAVE", 1)
    run = planner(Folding(world=4))
    plan = run.plan(after(run.plan(fresh(4)), lost=["host0.3.x"]))
    older = plan.members[0].descriptor
    held = HeldState(None, older)
    held.begin("e/3")
    assert len(plan.waves) > 2
    for wave in range(len(plan.waves)):
        held.offer(plan, 0, wave, {})
        then = plan.descriptor_after(0, wave + 1, older)
        assert held.then == then and held.descriptor != then
        held.accept()
        assert (held.descriptor, held.passed, held.doubt) == (then, f"e/3/{wave}", "")

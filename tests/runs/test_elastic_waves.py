"""State that moves in several waves: a member that is lost or cut off between them, and the memory that a move takes."""

from __future__ import annotations

import gc
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic import Faults, _command, base, check_equal, check_samples, events, train

from phalanx.core.errors import PeerError
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.recovery.state_descriptor import StateDescriptor, StateReport
from phalanx.runtime.membership.membership import Generation, Member
from phalanx.runtime.membership.votes import MemberReport
from phalanx.train.recovery.elastic import facts_of

__all__ = ["base"]
pytestmark = pytest.mark.ranks
FIRST: Faults = {"reduction": ((1,), 2)}
SMALL = {"optim__bucket_mb": "0.01"}
AT = 3
"""Waves that all have when somebody is lost."""


@pytest.mark.parametrize(("passed", "counts"), [("e/3/2", True), ("e/3/1", False), ("", False)])
def test_a_wave_in_doubt_counts_where_any_member_has_passed_it(passed: str, counts: bool) -> None:
    """Also where that member has begun another move since, which its report does not tell."""
    old, new = (StateDescriptor(folding=Folding(world=world), rank=0) for world in (3, 2))
    then = replace(new, moved=5, rest=old)
    about = {
        "a": StateReport(descriptor=then, passed=passed),
        "b": StateReport(descriptor=old, then=then, doubt="e/3/2"),
        "joins": StateReport(then=replace(new, moved=5), doubt="e/3/2"),
        "idle": StateReport(descriptor=old),
    }
    reports = [MemberReport(uid=uid, step=4, holds=True, about=of) for uid, of in about.items()]
    generation = Generation(number=5, epoch="e", members=tuple(Member(uid, "host") for uid in about))
    found = {fact.uid: fact.descriptor for fact in facts_of(generation, reports)}
    assert (found["a"], found["idle"]) == (then, old)
    assert (found["b"], found["joins"]) == ((then, about["joins"].then) if counts else (old, None))


def _once(folder: str, name: str) -> bool:
    """True for the first process that asks."""
    try:
        os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _in_waves(args: list[str], folder: str, faults: Faults, *, size: int, lost: int, cut_off: int | None) -> int:
    """Body of a process as `_command`: state moves in many waves. In a generation of `size` members that is not the first, slot `lost` is killed in a wave, and slot `cut_off` leaves that generation
    without hearing whether the others have theirs; None: nobody's is known to be complete."""
    from phalanx.plan.recovery import planner
    from phalanx.train.placement.state_transfer import HeldState
    from phalanx.train.recovery import elastic, run

    planner.LEAST_WAVE = 1
    here = {"slot": -1, "size": 0}
    accept, offer, work = HeldState.accept, HeldState.offer, run.work
    enter, keep = elastic.ElasticMember.enter, elastic.ElasticMember._keep_state

    def is_now(wave: int) -> bool:
        return here["size"] == size and wave == AT

    def offering(self: Any, plan: Any, rank: int, wave: int, new: Any) -> None:
        if cut_off is None and is_now(wave) and here["slot"] == lost and _once(folder, "lost"):
            os.kill(os.getpid(), signal.SIGKILL)
        offer(self, plan, rank, wave, new)

    def accepting(self: Any) -> None:
        if cut_off is not None and self.doubt and is_now(int(self.doubt.split("/")[-1])):
            if here["slot"] == lost and _once(folder, "lost"):
                os.kill(os.getpid(), signal.SIGKILL)
            if here["slot"] == cut_off and _once(folder, "cut-off"):
                raise PeerError("the last message did not come")
        accept(self)

    def keeping(self: Any, reported: Any) -> Any:
        in_doubt = None if self.held is None else self.held.then
        if in_doubt is not None and here["slot"] == cut_off:
            Path(folder, "told" if in_doubt == reported else "not-told").touch()
        return keep(self, reported)

    def entering(self: Any, team: Any, resolution: Any) -> None:
        here["size"] = team.size if team.begun else 0
        enter(self, team, resolution)

    def working(member: Any, agent: Any, **words: Any) -> int:
        here["slot"] = int(agent.uid.split(".")[1])
        return work(member, agent, **words)

    HeldState.accept, HeldState.offer = accepting, offering  # type: ignore[method-assign]
    elastic.ElasticMember.enter, elastic.ElasticMember._keep_state = entering, keeping  # type: ignore[method-assign]
    run.work = working
    return _command(args, folder, faults)


@pytest.mark.parametrize(
    ("size", "lost", "cut_off", "zero"),
    [(3, 2, 3, "0"), (4, 2, 1, "1"), pytest.param(3, 2, None, "0", marks=pytest.mark.slow), (4, 3, None, "1")],
    ids=["left", "joins", "nobody", "nobody-shards"],
)
def test_a_member_lost_between_waves_changes_no_bit(
    base: Path, size: int, lost: int, cut_off: int | None, zero: str
) -> None:
    """What was let go of is with the others, also with one that does not know that all have it, and with one that has only just come."""
    name = f"waves-{size}-{lost}-{cut_off}-{zero}"
    body = partial(_in_waves, size=size, lost=lost, cut_off=cut_off)
    assert train(base, name, FIRST, body=body, optim__zero=zero, **SMALL) == {*FIRST}
    folder = base / f"printed-{name}"
    assert (folder / "lost").exists() and (folder / "told").exists() is (cut_off is not None)
    check_equal(base, name)
    check_samples(base, name)
    assert not any("goes back" in e["text"] for e in events(base, name, "Note"))


def _alive_bytes() -> int:
    """Bytes of all tensors that Python knows, whatever keeps them."""
    found = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta:
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _measured(args: list[str], folder: str, faults: Faults) -> int:
    """Body of a process as `_command`: each rank notes the memory of its tensors after steps and during moves of state."""
    from phalanx.plan.recovery import planner
    from phalanx.runtime.reshard import Resharder
    from phalanx.runtime.state import ShardedState
    from phalanx.train.recovery import elastic

    planner.LEAST_WAVE = 1
    take_over, commit, enter, move = (
        ShardedState.__init__,
        elastic.ElasticMember.commit,
        elastic.ElasticMember.enter,
        Resharder.move,
    )

    def note(what: str) -> None:
        with Path(folder, f"alive-{os.getpid()}").open("a") as file:
            file.write(json.dumps([what, _alive_bytes()]) + "\n")

    def committing(self: Any) -> None:
        commit(self)
        note("step")

    def entering(self: Any, *given: Any) -> None:
        gc.disable()  # what goes is to go at once
        enter(self, *given)
        gc.enable()

    def moving(self: Any, *given: Any, **words: Any) -> Any:
        note("move")
        found = move(self, *given, **words)
        note("move")
        return found

    elastic.ElasticMember.commit, elastic.ElasticMember.enter = committing, entering  # type: ignore[method-assign]

    def taking_over(self: Any, *given: Any, **words: Any) -> None:
        note("move")  # parameters are there twice by turns
        take_over(self, *given, **words)
        note("move")

    ShardedState.__init__, Resharder.move = taking_over, moving  # type: ignore[method-assign]
    return _command(args, folder, faults)


@pytest.mark.parametrize("zero", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_move_takes_no_more_memory_than_a_step_leaves(base: Path, zero: str) -> None:
    """Peak of all tensors while state moves, over what there is between two steps, before or afterwards: masters, moments, parameters, gradient buffers."""
    how = {"resilience__mode": "fast", "train__steps": "6", "optim__zero": zero, "checkpoint__interval": "0"}
    name = f"measured-{zero}"
    assert train(base, name, FIRST, body=_measured, checkpoint__asynchronous=None, **how, **SMALL) == {*FIRST}
    for path in (base / f"printed-{name}").glob("alive-*"):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        peaks = {what: max((size for kind, size in notes if kind == what), default=0) for what in ("step", "move")}
        print(f"{path.name}: {peaks['move'] / peaks['step']:.3f} of a step's state")
        assert peaks["move"] <= 1.15 * peaks["step"]

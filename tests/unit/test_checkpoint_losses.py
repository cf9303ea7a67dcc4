"""A member is lost inside the completion of a checkpoint, at each of its messages: those that are left part from it as from any lost peer, and what the next
generation finds is whole.

No process and no network: members are threads, and what they tell each other meets in memory. Folder, files and the code that saves are real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_help import fill, model_fields, run_state, small_spec, wrong_boxes

from phalanx.core.config import CheckpointConfig, Recipe
from phalanx.core.errors import CheckpointError, ConfigError, PeerError, UnsoundError
from phalanx.core.events import CheckpointSaved, Event, Note
from phalanx.plan.layout.parameters import Box
from phalanx.runtime.checkpoint.folder import CheckpointFolder, Writer
from phalanx.runtime.checkpoint.manager import CheckpointManager, Saved
from phalanx.runtime.comm.peers import Peers
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train import saving
from phalanx.train.saving import Saving

pytestmark = pytest.mark.unit
BEFORE, STEP, INTERVAL = 50, 100, 50
ROWS = 6
MESSAGES = 6
"""Of a completion: who has written, its files, its boxes (to the first member), the table, the rename, what is pruned."""
LIMIT_S = 30.0


def test_what_is_later_than_a_checkpoint_is_neither_counted_nor_deleted_for_it(tmp_path: Path) -> None:
    """As where the disk refused to set later ones aside: the one that was just written is the last to go."""
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 30, 40):
        folder.of(step).mkdir()
    assert folder.prune(current=20, keep=1) == [10] and folder.steps() == [20, 30, 40]
    assert folder.prune(current=20, keep=1) == []


class Killed(BaseException):
    """What ends the thread of a member that is lost."""


class Meeting:
    """What the members of one generation tell each other, call by call. `lost` falls out of call number `at` of those from `arm` on: before it has said anything, or
    (`said`) after, when of the others only `hear` know what it said, as where a ring breaks half way."""

    def __init__(
        self, size: int, *, lost: int = -1, at: int = 0, said: bool = False, hear: tuple[int, ...] = ()
    ) -> None:
        self.size, self.lost, self.at, self.said, self.hear = size, lost, at, said, hear
        self._calls: list[dict[int, Any]] = []
        self._next = [0] * size
        self._from: int | None = None
        self._change = threading.Condition()

    def arm(self) -> None:
        """From here on calls are counted."""
        self._from = len(self._calls)

    def gather(self, rank: int, value: Any) -> list[Any]:
        with self._change:
            number = self._next[rank]
            self._next[rank] += 1
            while len(self._calls) <= number:
                self._calls.append({})
            late = -1 if self._from is None else number - self._from
            falls = late >= 0 and rank == self.lost and late == self.at
            if not falls or self.said:
                self._calls[number][rank] = value
            self._change.notify_all()
            if falls:
                raise Killed
            heard = late < self.at or (late == self.at and self.said and rank in self.hear)
            if self.lost >= 0 and late >= 0 and not heard:
                raise PeerError("a peer is lost")
            assert self._change.wait_for(lambda: len(self._calls[number]) == self.size, LIMIT_S)
            return [self._calls[number][i] for i in range(self.size)]


class MeetingPeers(Peers):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.group, self.escape = meeting, rank, meeting.size, None, None

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.gather(self.rank, value)

    def to_first(self, value: Any) -> Iterator[Any]:
        told = self.meeting.gather(self.rank, value)
        return iter(told if self.rank == 0 else [])


class Member:
    """What one member does about checkpoints between two steps, around its real manager."""

    def __init__(self, folder: Path, meeting: Meeting, rank: int, *, generation: int) -> None:
        self.rank, self.meeting, self.generation, self.events = rank, meeting, generation, list[Any]()
        writer = Writer(generation=generation, life="one", check=lambda: None)
        self.manager = CheckpointManager(folder, by_steps=True, writer=writer)
        self.manager._peers = MeetingPeers(meeting, rank)
        size = ROWS // meeting.size
        self.boxes = [
            BoxTensor(f"{kind}/w", (ROWS, 4), Box((rank * size, 0), (size, 4)), torch.zeros(size, 4), primary=True)
            for kind in ("master", "exp_avg")
        ]
        fill(self.boxes)
        self.saving = Saving(
            recipe=Recipe(checkpoint=CheckpointConfig(interval=INTERVAL)), manager=self.manager, tell=self.events.append,
            state_after=run_state, on_saved=lambda: None, on_begin=lambda name: None,
        )  # fmt: skip
        self.first = True

    def open(self) -> None:
        if self.generation > 1:
            self.manager.open_later()
        else:
            self.manager.open()

    def say(self) -> None:
        self.manager._peers.gather(None)

    def after(self, step: int) -> None:
        """What is due between the steps."""
        first, self.first = self.first, False
        parts: Any = SimpleNamespace(
            state=SimpleNamespace(boxes=lambda: self.boxes, look_at_rest=lambda: None, sums=None)
        )
        self.saving.between(parts, step, first=first)

    def write(self) -> None:
        """Until this member's share of a save is on the disk."""
        self.manager._join()

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, CheckpointSaved)]


def together(members: list[Member], work: Callable[[Member], None]) -> list[str]:
    """`work` of all at once; how it ended for each: "", "lost" (itself) or "peer" (it heard of a loss). Raises whatever else goes wrong."""
    ended, wrong = ["hangs"] * len(members), list[BaseException]()

    def run(i: int) -> None:
        try:
            work(members[i])
            ended[i] = ""
        except Killed:
            ended[i] = "lost"
        except PeerError:
            ended[i] = "peer"
        except BaseException as err:
            wrong.append(err)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if wrong:
        raise wrong[0]
    return ended


def sound(folder: Path, step: int) -> list[str]:
    """Tensors of a checkpoint that are not bit for bit what was saved."""
    alone = CheckpointManager(folder)
    alone.read_state(step, model=model_fields(small_spec()))
    boxes = [
        BoxTensor(f"{kind}/w", (ROWS, 4), Box((0, 0), (ROWS, 4)), torch.zeros(ROWS, 4), True)
        for kind in ("master", "exp_avg")
    ]
    alone.load(boxes, step=step)
    return wrong_boxes(boxes)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("at", range(MESSAGES))
def test_a_loss_at_each_message_of_a_completion(tmp_path: Path, at: int, lost: int) -> None:
    other = 1 - lost
    for i, hear in enumerate([None, (other,), (2,)]):  # None: it says nothing
        story(tmp_path / f"run{i}", Meeting(3, lost=lost, at=at, said=hear is not None, hear=hear or ()))


def story(folder: Path, meeting: Meeting) -> None:
    """A checkpoint, one that is lost in its completion, and the next generation."""
    members = [Member(folder, meeting, rank, generation=1) for rank in range(3)]
    assert together(members, Member.open) == [""] * 3
    assert together(members, lambda m: m.after(BEFORE)) == [""] * 3  # the first save of a generation is waited for
    assert together(members, lambda m: m.after(STEP)) == [""] * 3
    together(members, Member.write)
    meeting.arm()
    ended = together(members, lambda m: m.after(STEP + 1))
    unaware = [m for m, how in zip(members, ended, strict=True) if not how]
    assert [m.rank for m in unaware] == (list(meeting.hear) if meeting.at == MESSAGES - 1 else [])
    ended += together(unaware, Member.say)  # whoever heard nothing of the loss meets it with the next message
    assert sorted(how for how in ended if how) == ["lost", "peer", "peer"]
    stay = [m for m in members if m.rank != meeting.lost]
    assert all(isinstance(event, CheckpointSaved) for m in stay for event in m.events)  # nobody took it for a disk
    for member in stay:
        member.saving.drop()
        assert not member.manager.pending
    told = any(STEP in m.saved for m in stay)

    renamed = meeting.at >= 4 or (meeting.at == 3 and 0 in meeting.hear)
    wanted = [BEFORE, STEP] if renamed else [BEFORE]
    new = [Member(folder, Meeting(2), 0, generation=2)]
    new.append(Member(folder, new[0].meeting, 1, generation=2))
    assert together(new, Member.open) == [""] * 2
    assert renamed or not told
    assert CheckpointFolder(folder).steps() == wanted and [sound(folder, step) for step in wanted] == [[]] * len(wanted)
    assert together(new, lambda m: m.after(STEP + 1)) == [""] * 2  # the first thing of a generation: what is missing
    assert [m.saved for m in new] == [[] if renamed else [STEP + 1]] * 2
    newest = CheckpointFolder(folder).newest()
    assert newest == (STEP if renamed else STEP + 1) and sound(folder, newest) == []
    assert not [p.name for p in folder.iterdir() if p.name.startswith((".writing", ".deleting"))]


class DiskIsFull:
    """A manager whose disk refuses the first saves. `newest`: the checkpoint that is there."""

    def __init__(self, refusals: int, *, newest: int = 8) -> None:
        self.refusals, self.newest, self.saves = refusals, newest, 0

    def poll(self) -> None: ...

    def choose(self, step: int | None = None) -> int | None:
        return self.newest

    def save(self, boxes: object, state: object) -> None:
        self.saves += 1

    def finish(self) -> Saved | None:
        if self.saves == 0:
            return None
        if self.saves <= self.refusals:
            raise CheckpointError.of("step-9", 28, "No space left on device", subject="saving")
        return Saved(step=9, path=Path("step-9"), bytes=1, blocked_s=0.0, total_s=0.0)


@pytest.mark.parametrize(("refusals", "wait_s"), [(0, 0.0), (3, 30.0), (4, 30.0), (1, 0.0), (2, 12.0), (3, 12.0)])
def test_the_last_save_tries_again_while_the_disk_refuses_it(
    refusals: int, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(saving.time, "sleep", slept.append)
    told: list[Event] = []
    manager = DiskIsFull(refusals)
    mine = saving.Saving(
        recipe=Recipe(checkpoint=CheckpointConfig(wait_s=wait_s)), manager=manager, tell=told.append,  # type: ignore[arg-type]
        state_after=lambda step: None, on_saved=lambda: None, on_begin=lambda name: None, begun=8, wait_s=wait_s,  # type: ignore[arg-type, return-value]
    )  # fmt: skip
    parts = SimpleNamespace(state=SimpleNamespace(boxes=lambda: [], look_at_rest=lambda: None, sums=None))
    waits = {0.0: [], 12.0: [10.0, 2.0], 30.0: [10.0, 10.0, 10.0]}[wait_s]
    if refusals <= len(waits):
        mine.last(parts, 9)  # type: ignore[arg-type]
        assert isinstance(told[-1], CheckpointSaved) and manager.saves == refusals + 1
    else:
        with pytest.raises(CheckpointError, match="No space left"):
            mine.last(parts, 9)  # type: ignore[arg-type]
    assert slept == waits[:refusals]
    notes = [event.text for event in told if isinstance(event, Note)]
    assert len(notes) == bool(slept) and all(
        f"keep the state of step 9 and try again for {wait_s:g} s" in text for text in notes
    )


PARTS: Any = SimpleNamespace(state=SimpleNamespace(boxes=lambda: []))


def saves_of(manager: Any, *, begun: int, **checkpoint: Any) -> Saving:
    """`begun`: the newest checkpoint of which these members know."""
    return Saving(
        recipe=Recipe(checkpoint=CheckpointConfig(**checkpoint)), manager=manager, tell=lambda event: None, begun=begun,
        state_after=lambda step: None, on_saved=lambda: None, on_begin=lambda name: None,  # type: ignore[arg-type, return-value]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("begun", "newest", "saves"),
    [(9, 9, 0), (8, 8, 1), (9, 8, 1), (8, 9, 1)],
    ids=["there", "older", "failed", "of another history"],
)
def test_the_last_checkpoint_is_of_the_last_step_of_these_members(
    begun: int, newest: int, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the one that was due then failed it is made again, and one of the same step that others have left is no other's."""
    monkeypatch.setattr(saving, "check_saved", lambda parts, *, step: None)
    manager = DiskIsFull(0, newest=newest)
    saves_of(manager, begun=begun).last(PARTS, 9)
    assert manager.saves == saves


def test_what_has_a_flipped_bit_is_saved_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(parts: object, *, step: int) -> None:
        raise UnsoundError(f"nothing was saved of step {step}")

    monkeypatch.setattr(saving, "check_saved", finds)
    manager = DiskIsFull(0)
    for save in (Saving.save, Saving.now, Saving.last):
        with pytest.raises(UnsoundError, match="nothing was saved of step 9"):
            save(saves_of(manager, begun=8), PARTS, 9)
    assert manager.saves == 0


@pytest.mark.parametrize(
    ("newest", "step", "lacks"), [(50, 50, False), (49, 50, True), (60, 50, True), (49, 57, True), (53, 57, False)]
)
def test_a_generation_makes_the_checkpoint_that_was_due_last_unless_there_is_a_later_one(
    newest: int, step: int, lacks: bool
) -> None:
    """At the step itself one of another step is none: what is later belongs to an abandoned history."""
    assert saves_of(DiskIsFull(0, newest=newest), begun=0)._lacks(step, 50) is lacks


def test_a_run_that_is_done_goes_on_from_its_end_and_from_no_later_step() -> None:
    manager: Any = SimpleNamespace(read_state=lambda step, *, model: SimpleNamespace(loader=None))
    loader: Any = None
    recipe = replace(Recipe(), train=replace(Recipe().train, steps=8))
    assert saving.read_run_state(manager, recipe, small_spec(), loader, found=8) == 8
    with pytest.raises(ConfigError, match=r"train\.steps = 8: is less than the 9 steps"):
        saving.read_run_state(manager, recipe, small_spec(), loader, found=9)


def test_a_save_is_completed_once_all_have_written(tmp_path: Path) -> None:
    manager, told = CheckpointManager(tmp_path, by_steps=True), list[bool]()
    peers: Any = SimpleNamespace(gather=lambda value: told.append(value) or [value, False], escape=None)
    job: Any = SimpleNamespace(written="mine", blocked_s=0.0)
    manager._peers, manager._job = peers, job
    assert manager.poll() is None and manager.pending and told == [True]

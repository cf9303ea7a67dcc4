"""A rank that stood still while it saved, and goes on when a newer generation saves: what that one writes is as it should be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_help import Mapping, fill, make_state, run_state
from membership_help import MemoryService

from phalanx.core.errors import CheckpointError, PeerError, Problem
from phalanx.runtime.checkpoint.folder import CheckpointFolder, Writer, file_entry, with_files, write_flushed
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.membership.membership import Generation, Member, Membership
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent

STEP = 100


class Service:
    """Says which generation is the newest."""

    newest = 1

    def writer(self, generation: int, life: str = "one") -> Writer:
        def check() -> None:
            if generation < self.newest:
                raise PeerError(f"generation {generation} is over")

        return Writer(generation=generation, life=life, check=check)


@pytest.mark.unit
@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_a_checkpoint_that_is_replaced_is_whole_until_the_new_one_is(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power fails before one of the renames of the second save of a step, or before what is replaced is removed."""
    folder, calls = CheckpointFolder(tmp_path), list[str]()
    folder.commit(write(folder, "before", step=25))
    folder.commit(write(folder, "before"))
    state = write(folder, "after")

    def failing(call: Callable[..., None]) -> Callable[..., None]:
        def work(*words: Any, **options: Any) -> None:
            calls.append(str(words))
            if len(calls) == fails:
                raise KeyboardInterrupt
            call(*words, **options)

        return work

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("os.rename", failing(os.rename))
        patched.setattr("shutil.rmtree", failing(shutil.rmtree))
        folder.commit(state)
    folder.clean()
    assert folder.steps() == [25, STEP] and folder.is_sound(25) and folder.is_sound(STEP)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000025", "step-00000100"]


def write(folder: CheckpointFolder, text: str, *, step: int = STEP) -> Any:
    """Begin to save, and write the files; what is left to do is to commit the state that is returned."""
    path = folder.begin(step)
    (path / "__0_0.distcp").write_text(text)
    return with_files(run_state(step), [{"__0_0.distcp": file_entry(path / "__0_0.distcp")}], created="now")


@pytest.mark.unit
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_going_back_that_is_cut_short_leaves_no_later_checkpoint_the_newest(
    moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename, moves = CheckpointFolder(tmp_path), os.rename, iter(range(9))
    for step in (10, 20, 30, 40):
        folder.commit(write(folder, "sound", step=step))

    def failing(*words: Any) -> None:
        if next(moves) == moved:
            raise KeyboardInterrupt
        rename(*words)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", failing)
        folder.go_back(10)
    assert folder.newest() == 10 and folder.steps() == [10, 20, 30, 40][: 4 - moved]
    folder.go_back(10)
    assert folder.steps() == [10] and len(folder.set_aside()) == 3


@pytest.mark.unit
def test_of_two_sound_checkpoints_the_earlier_one_is_the_way_out(tmp_path: Path) -> None:
    """The later one is of a history that the run may have gone back behind."""
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 21):
        folder.commit(write(folder, "sound", step=step))
    assert folder.way_out(20).startswith("--checkpoint.step 10 resumes from a sound one")
    assert folder.way_out(10).startswith("--checkpoint.step 20 ")


@pytest.mark.unit
def test_a_start_falls_back_from_the_latest_and_takes_no_file_for_a_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (10, 30, 20):
        folder.commit(write(folder, "sound", step=step))
    (tmp_path / "step-00000040").touch()
    assert folder.steps() == [10, 20, 30] and folder.candidates() == [20, 10]
    (tmp_path / "latest").write_text("step-00000050\n")
    assert folder.candidates() == [30, 20, 10]


@pytest.mark.unit
def test_a_problem_without_advice_gets_the_way_out_beside_one_that_has_some(tmp_path: Path) -> None:
    problems = [Problem(where=name, value=1, rule="is damaged", hint=hint) for name, hint in (("a", "do this"), ("b", ""))]  # fmt: skip
    told, untold = CheckpointFolder(tmp_path).with_way_out(20, problems)
    assert told.hint == "do this" and untold.hint.startswith("no other checkpoint here is sound")


@pytest.mark.unit
def test_what_a_deletion_left_does_not_stand_in_the_way_of_the_next(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20):
        folder.commit(write(folder, "sound", step=step))
    left = tmp_path / ".deleting-step-00000010"
    left.mkdir()
    (left / "__0_0.distcp").touch()
    assert folder.prune(current=20, keep=1) == [10]
    assert folder.steps() == [20] and not left.exists()


@pytest.mark.unit
def test_a_file_that_could_not_be_replaced_is_as_it_was_and_has_no_draft_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest").write_text("before")

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched, pytest.raises(PermissionError):
        patched.setattr(os, "replace", refuse)
        write_flushed(tmp_path / "latest", "after")
    assert [p.name for p in tmp_path.iterdir()] == ["latest"] and (tmp_path / "latest").read_text() == "before"


@pytest.mark.unit
def test_one_that_wakes_before_its_commit_takes_nothing_from_the_new_generation(tmp_path: Path) -> None:
    """As it was: the half of the new one became the checkpoint, and the new rank 0 found nothing to commit."""
    service = Service()
    old, new = (CheckpointFolder(tmp_path, service.writer(n)) for n in (1, 2))
    old_state = write(old, "written by the old one")  # and here it stands still
    service.newest = 2
    new.clean()
    (new.begin(STEP) / "__0_0.distcp").write_text("half of what the n")
    with pytest.raises((PeerError, FileNotFoundError)):
        old.commit(old_state)
    assert new.steps() == []
    new.commit(write(new, "written by the new one"))
    assert new.is_sound(STEP) and (new.of(STEP) / "__0_0.distcp").read_text() == "written by the new one"


@pytest.mark.unit
def test_even_one_that_asked_just_before_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """It asked the service, stood still, and renames now: in its own folder are its own files and nothing else."""
    service = Service()
    old, new = (CheckpointFolder(tmp_path, service.writer(n)) for n in (1, 2))
    old_state = write(old, "written by the old one")
    half = new.begin(STEP)
    (half / "__0_0.distcp").write_text("half of what the n")
    old.commit(old_state)
    assert old.is_sound(STEP) and half.exists()
    new.commit(write(new, "written by the new one"))
    assert new.is_sound(STEP) and (new.of(STEP) / "__0_0.distcp").read_text() == "written by the new one"


@pytest.mark.unit
@pytest.mark.parametrize("what", ["begin", "clean", "go_back", "prune"])
def test_nothing_that_others_see_is_changed_by_a_generation_that_is_over(tmp_path: Path, what: str) -> None:
    service = Service()
    service.newest = 2
    old, new = (CheckpointFolder(tmp_path, service.writer(n)) for n in (1, 2))
    for step in (50, STEP):
        new.commit(write(new, "sound", step=step))
    (new.begin(150) / "half").touch()
    calls: dict[str, Callable[[], object]] = {
        "begin": lambda: old.begin(150),
        "clean": old.clean,
        "go_back": lambda: old.go_back(50),
        "prune": lambda: old.prune(current=STEP, keep=1),
    }
    with pytest.raises(PeerError, match="generation 1 is over"):
        calls[what]()
    old.abandon(150)
    assert new.steps() == [50, STEP] and new.newest() == STEP and (new.writing(150) / "half").exists()


@pytest.mark.unit
def test_latest_is_not_set_back(tmp_path: Path) -> None:
    """Between its rename and `latest` the new generation has saved a later step."""
    service = Service()
    old, new = (CheckpointFolder(tmp_path, service.writer(n)) for n in (1, 2))
    state = write(old, "old")
    asked, check = [0], old.writer.check  # type: ignore[union-attr]

    def sleepy() -> None:
        asked[0] += 1
        if asked[0] == 2:
            service.newest = 2
            new.commit(write(new, "new", step=STEP + 50))
        check()

    slow = CheckpointFolder(tmp_path, Writer(generation=1, life="one", check=sleepy))
    with pytest.raises(PeerError):
        slow.commit(state)
    assert new.newest() == STEP + 50 and new.is_sound(STEP)


@pytest.mark.unit
def test_what_earlier_generations_and_lives_left_is_removed_and_nothing_later(tmp_path: Path) -> None:
    service = Service()
    folders = [
        CheckpointFolder(tmp_path, service.writer(n, life))
        for n, life in ((3, "one"), (4, "one"), (5, "one"), (9, "zero"))
    ]
    for folder in folders:
        folder.begin(STEP)
    CheckpointFolder(tmp_path).begin(STEP)
    folders[1].clean()
    assert [f.writing(STEP).exists() for f in folders] == [False, False, True, False]
    assert not CheckpointFolder(tmp_path).writing(STEP).exists()
    assert CheckpointFolder(tmp_path).clean() == [folders[2].writing(STEP).name]


@pytest.mark.unit
@pytest.mark.parametrize("what", ["death", "join", "lost"])
def test_the_service_is_asked_and_not_the_watcher(what: str) -> None:
    service = MemoryService()
    membership = Membership(service.connect())
    members = [Member(uid, uid[0]) for uid in ("a.0.x", "b.0.x")]
    first: Generation = membership.start(members, above=0, minimum=1, why="the run begins")
    agent = WorkerAgent(members[0], service, pipe=-1, settings=AgentSettings())
    team: Any = SimpleNamespace(generation=first, abort=lambda: 0)
    agent._connect_watched(team)
    team.check()
    if what == "join":
        membership.propose_join([Member("c.0.x", "c")])
        team.check()
        return
    if what == "death":
        membership.propose_death(["a.0.x"], "was silent for 3 s")
    else:
        service.lose()
    with pytest.raises(PeerError, match=r"generation 1 is over: .*(was silent for 3 s|lost its values)"):
        team.check()


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_of_a_generation_that_is_over_fails_and_leaves_what_was_saved(
    tmp_path: Path, asynchronous: bool
) -> None:
    """A thread tells of it when it is asked; who saves in the midst of a step must not go on as if only a disk were full."""
    service = Service()
    state = make_state(0, GroupCache(), Mapping(1))
    fill(state.boxes())
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous, writer=service.writer(1))
    manager.open()
    manager.save(state.boxes(), run_state(1))
    assert manager.finish() is not None
    service.newest = 2
    with pytest.raises(CheckpointError if asynchronous else PeerError, match="generation 1 is over"):
        manager.save(state.boxes(), run_state(2))
        manager.finish()
    assert manager.folder.steps() == [1] and manager.folder.is_sound(1)


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_connection_that_breaks_in_a_save_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Hosts that lose each other while they write: whoever took it for a failed write would begin the next step, and wait there for those that still write."""

    def broken(value: object) -> list[object]:
        raise PeerError("[pair.cc] Connection closed by peer")

    state = make_state(0, GroupCache(), Mapping(1))
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    manager.open()
    monkeypatch.setattr(manager._peers, "gather", broken)
    with pytest.raises(CheckpointError if asynchronous else PeerError, match="Connection closed by peer"):
        manager.save(state.boxes(), run_state(1))
        manager.finish()
    assert manager.folder.steps() == []

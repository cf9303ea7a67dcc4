"""How a run opens its checkpoints and what a person is told meanwhile, in a fixed world and in one where members come and go."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_help import run_state, small_spec

from phalanx.core.config import CheckpointConfig, LaunchConfig, Recipe
from phalanx.core.errors import CheckpointError, FinalError, RunError
from phalanx.core.events import CheckpointSaved, Note, RunEnded
from phalanx.plan.mapping.stage_foldings import parse_stages
from phalanx.runtime.checkpoint.folder import CheckpointFolder, parse_state
from phalanx.runtime.checkpoint.manager import CheckpointManager, Saved
from phalanx.runtime.comm.lost import LostPeers
from phalanx.runtime.comm.peers import Peers
from phalanx.runtime.processes import StopRequest
from phalanx.runtime.processes.world import WorldInfo
from phalanx.train import run as fixed
from phalanx.train.recovery import run as recovery_run
from phalanx.train.recovery.elastic import ElasticMember
from phalanx.train.resume import (
    load_newest,
    load_start,
    open_checkpoints,
    recipe_to_keep,
    set_later_aside,
    start_candidates,
    trained_text,
)
from phalanx.train.saving import Saving
from phalanx.train.setup.run_folder import RunFolder, choose_checkpoint

pytestmark = pytest.mark.unit


class Told(list[Any]):
    """Sinks that keep what they are told."""

    def __call__(self, event: Any, /) -> None:
        self.append(event)

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None: ...


def rank(path: Path, recipe: Recipe | None = None) -> Any:
    told = Told()
    return SimpleNamespace(
        recipe=recipe or Recipe(), folder=RunFolder(path), sinks=told, peers=Peers(), escape=None, lost=None, speaks=True, info=WorldInfo()
    )  # fmt: skip


def test_an_elastic_run_says_what_an_interrupted_save_left(tmp_path: Path) -> None:
    me = rank(tmp_path)
    left = me.folder.checkpoints.writing(4)
    left.mkdir(parents=True)
    generation = SimpleNamespace(number=1, epoch="a")
    team: Any = SimpleNamespace(generation=generation, begun=False, check=lambda: None)
    ElasticMember._manager(SimpleNamespace(), team, me)  # type: ignore[arg-type]
    assert [e.text for e in me.sinks] == [f"removed what an interrupted save left: {left.name}"]
    assert not left.exists()


def test_old_checkpoints_that_cannot_be_deleted_leave_the_new_one_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, **_: int) -> list[int]:
        raise PermissionError(13, "Permission denied", "step-00000002")

    monkeypatch.setattr(CheckpointFolder, "prune", refuse)
    manager = CheckpointManager(Path("x"))
    not_deleted = manager._prune(4)
    assert "Permission denied" in not_deleted and "step-00000002" in not_deleted
    saved = Saved(step=4, path=Path("x"), bytes=1, blocked_s=0.0, total_s=0.1, not_deleted=not_deleted)
    told, marks = list[Any](), list[str]()
    saving = Saving(
        recipe=Recipe(), manager=SimpleNamespace(poll=lambda: saved), tell=told.append, state_after=lambda step: None,  # type: ignore[arg-type]
        on_saved=lambda: marks.append("saved"), on_begin=lambda what: None,
    )  # fmt: skip
    saving.hear()
    assert marks == ["saved"] and isinstance(told[0], CheckpointSaved)
    assert told[1].level == "warning" and "Permission denied" in told[1].text and "complete" in told[1].text


def test_a_disk_that_refuses_the_log_of_a_host_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where a folder should be")
    watched = list[Any]()
    watch: Any = SimpleNamespace(host=watched.append)
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path))
    recovery_run._host_log(run, "h1", watch)(Note(level="info", text="x"))
    assert len(watched) == 1


def test_the_first_ctrl_c_is_answered_while_a_run_is_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    me, stop = rank(tmp_path), StopRequest(immediate=lambda: None)
    me.lost = LostPeers(asks=False)

    def build(*_: Any, **__: Any) -> Any:
        stop(signal.SIGINT, None)
        end_s = time.monotonic() + 10
        while not me.sinks and time.monotonic() < end_s:
            time.sleep(0.005)
        raise RunError("stopped")

    monkeypatch.setattr(fixed, "open_rank", lambda *_: me)
    monkeypatch.setattr(fixed, "build_trainer", build)
    with pytest.raises(RunError, match="stopped"):
        fixed.train(me.recipe, me.info, stop, hook=lambda *_: None)  # type: ignore[arg-type,return-value]
    said, ended = me.sinks
    assert said.text == "Stopping as soon as the run is set up. Press Ctrl-C again to stop immediately."
    assert isinstance(ended, RunEnded) and ended.reason == "RunError: stopped" and ended.step == 0


def test_going_back_moves_later_checkpoints_or_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(checkpoint=CheckpointConfig(resume=False, step=3))
    me, manager = rank(tmp_path, recipe), CheckpointManager(tmp_path)
    assert start_candidates(recipe, manager.folder) == []

    def refuse(self: Any, step: int) -> list[str]:
        raise OSError(28, "No space left on device", "abandoned")

    monkeypatch.setattr(CheckpointFolder, "go_back", refuse)
    assert set_later_aside(me, manager, 3) == ()
    assert [e.level for e in me.sinks] == ["warning"] and "stay where they are" in me.sinks[0].text


def damaged(step: int) -> CheckpointError:
    return CheckpointError.of(f"step-{step}", "gone", "is whole", subject="checkpoint")


def with_steps(path: Path, *steps: int, **config: Any) -> tuple[Any, CheckpointManager]:
    me = rank(path, Recipe(checkpoint=CheckpointConfig(**config)))
    for step in steps:
        me.folder.checkpoints.of(step).mkdir(parents=True)
    return me, CheckpointManager(me.folder.checkpoints.path)


@pytest.mark.parametrize(("interval", "asynchronous", "beside"), [(4, True, True), (4, False, False), (0, True, False)])
def test_checkpoints_that_the_end_of_a_run_alone_makes_are_written_at_once(
    interval: int, asynchronous: bool, beside: bool, tmp_path: Path
) -> None:
    me, _ = with_steps(tmp_path, interval=interval, asynchronous=asynchronous)
    assert open_checkpoints(me, group=None)._asynchronous is beside


def test_a_step_that_is_named_has_no_other_to_fall_back_to(tmp_path: Path) -> None:
    me, manager = with_steps(tmp_path, 3, 5, 7, step=5, fall_back=True)
    assert start_candidates(me.recipe, manager.folder) == [5]
    assert start_candidates(Recipe(checkpoint=CheckpointConfig(fall_back=True)), manager.folder) == [7, 5, 3]
    assert start_candidates(Recipe(), manager.folder) == [7]


def test_of_checkpoints_that_cannot_be_read_the_first_one_is_named() -> None:
    class Folder:
        def trained_text(self, step: int) -> str:
            if step > 1:
                raise damaged(step)
            return "text"

    folder: Any = Folder()
    assert trained_text(folder, [7, 5, 1]) == "text" and trained_text(folder, []) is None
    with pytest.raises(CheckpointError, match="step-7"):
        trained_text(folder, [7, 5])


def test_checkpoints_that_were_passed_over_are_told_from_the_newest_down() -> None:
    def load(step: int) -> int:
        if step > 3:
            raise damaged(step)
        return step

    found = load_newest([7, 5, 3], load, why="x")
    assert found is not None and found.step == 3 and found.damaged_steps == (7, 5)
    assert ["step-7" in str(found.damaged[0]), "step-5" in str(found.damaged[1])] == [True, True]
    with pytest.raises(FinalError, match=r"(?s)^nothing is left, and no checkpoint.*step-7.*step-5"):
        load_newest([7, 5], load, why="nothing is left")
    assert load_newest([], load, why="x") is None


def test_a_start_that_goes_back_sets_aside_what_is_later(tmp_path: Path) -> None:
    me, manager = with_steps(tmp_path, 3, 5, 7, step=3)
    assert load_start(me, manager, [3], lambda step: step) == 3
    assert manager.folder.steps() == [3] and manager.folder.set_aside() == ["step-00000005", "step-00000007"]
    assert [e.level for e in me.sinks] == ["info"] and "checkpoints after step 3 are now" in me.sinks[0].text


def test_a_start_behind_damaged_checkpoints_sets_them_aside_and_says_why(tmp_path: Path) -> None:
    me, manager = with_steps(tmp_path, 3, 5, 7, fall_back=True)

    def load(step: int) -> int:
        if step > 3:
            raise damaged(step)
        return step

    assert load_start(me, manager, [7, 5, 3], load) == 3
    assert manager.folder.steps() == [3] and manager.folder.set_aside() == ["step-00000005", "step-00000007"]
    (note,) = me.sinks
    assert note.level == "warning" and "step-7" in note.text and "resumes from that of step 3" in note.text


def test_the_recipe_that_is_kept_goes_back_nowhere_and_names_no_host() -> None:
    given = Recipe(
        checkpoint=CheckpointConfig(step=3), launch=LaunchConfig(host="h3", rack="r", keep_service=True, ranks=2)
    )
    assert recipe_to_keep(given) == Recipe(launch=LaunchConfig(ranks=2))


def test_a_checkpoint_of_stages_with_foldings_of_their_own_is_read() -> None:
    written = run_state(4, folding=parse_stages(["tp1", "dp2.ep2"]).to_dict())
    read = parse_state(written.to_json(), where="run_state.json")
    assert read.folding["pp"] == 2 and read.folding["stages"][1]["ep"] == 2


def test_a_checkpoint_of_another_model_is_not_chosen(tmp_path: Path) -> None:
    run, spec = RunFolder(tmp_path), small_spec()
    run.checkpoints.begin(1)
    run.checkpoints.commit(run_state(1, spec))
    assert choose_checkpoint(run, spec, None)[1] == 1
    with pytest.raises(CheckpointError, match="must stay"):
        choose_checkpoint(run, replace(spec, norm_eps=10 * spec.norm_eps), None)

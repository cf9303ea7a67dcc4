"""Whatever goes wrong with a run ends in one clear message, exit code 2, and nothing saved before is damaged."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from train_help import phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.observe.event_log import read_history
from phalanx.runtime.checkpoint.folder import CheckpointFolder

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def run(base: Path) -> CheckpointFolder:
    """Checkpoints of steps 2 and 4 of a run on 2 ranks."""
    done = phalanx("train", *train_args(base, launch__ranks=2, train__steps=4, checkpoint__interval=2))
    assert done.returncode == 0, done.stderr
    return CheckpointFolder(base / "runs" / "run")


def again(base: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    return phalanx(
        "train", *train_args(base, **{"launch__ranks": 2, "train__steps": 6, "checkpoint__interval": 2, **changes})
    )


# ---- recipes: told before any process starts ---------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"train__stesp": 4}, "--train.stesp = '4': is not a setting; did you mean '--train.steps'?"),
        ({"optim__decay_steps": 3}, "--optim.decay_steps = 3: has no effect because optim.schedule is not \"wsd\""),
        ({"folding__ep": 3}, "--folding.ep"),
        ({"folding__cp_method": "ulysses"}, "has no effect because folding.cp = 1 leaves every sequence whole"),
        ({"train__global_batch": 10}, "--train.global_batch = 10: must be a positive multiple of micro_batch 2 x dp 4"),
        ({"model__vocab": 128}, "model.vocab = 128: must hold the tokenizer's 257 tokens; try 320"),
        ({"launch__ranks": 0}, "--launch.ranks = 0: must be at least 1"),
    ],
)  # fmt: skip
def test_bad_settings(base: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], text: str) -> None:
    if "model__vocab" in changes:  # known only once the tokenizer is
        done = phalanx("train", *train_args(base, **changes, run__name="vocab"))
        code, err = done.returncode, done.stderr
    else:
        code, err = main(["train", *train_args(base, **changes)]), capsys.readouterr().err
    assert code == 2
    assert text in err and "Traceback" not in err


def test_recipe_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipes/tinny.toml"]) == 2
    assert "tinny.toml" in capsys.readouterr().err


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "--dry-run" in capsys.readouterr().out


def test_ranks_asked_for_under_a_launcher_have_no_effect(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *train_args(base, launch__ranks=4)]) == 2
    assert "--launch.ranks = 4: has no effect: the launcher started 2 ranks" in capsys.readouterr().err


# ---- the machine -------------------------------------------------------------------------------------------------------


def test_port_in_use(base: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        launcher = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        done = phalanx("train", *train_args(base, run__name="port", launch__ranks=None), env=launcher)
        assert done.returncode == 2
        assert f"MASTER_PORT = {port}: the port is in use" in done.stderr


def test_run_folder_that_cannot_be_written(base: Path) -> None:
    (base / "file").write_text("no folder")
    done = phalanx("train", *train_args(base, run__folder=base / "file"))
    assert done.returncode == 2
    assert "the run folder cannot be written" in done.stderr and "run.folder" in done.stderr


def test_text_that_is_not_there(base: Path) -> None:
    done = phalanx("train", *train_args(base, run__name="none", data__sources=f'["{base / "nothing"}"]'))
    assert done.returncode == 2
    assert "data.sources" in done.stderr and "nothing" in done.stderr


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoints(base: Path) -> CheckpointFolder:
    return CheckpointFolder(base / "runs" / "run" / "checkpoints")


@pytest.mark.core
@pytest.mark.parametrize("recovery", [{"resilience__heal": "false"}, {"resilience__mode": "fast"}])
def test_other_model_in_the_same_folder(run: CheckpointFolder, base: Path, recovery: dict[str, str]) -> None:
    kept = {p: p.read_text() for p in (base / "runs" / "run").glob("recipe*.toml")}
    done = again(base, model__hidden=64, folding__ep=1, **recovery)
    assert done.returncode == 2
    assert "model.hidden = 64: the checkpoint was written with 32" in done.stderr and "--run.name" in done.stderr
    assert checkpoints(base).steps() == [2, 4]
    assert kept == {p: p.read_text() for p in (base / "runs" / "run").glob("recipe*.toml")}, "the recipe of the run"


def test_settings_that_may_change_under_way_and_those_that_must_stay(run: CheckpointFolder, base: Path) -> None:
    """Which also says that the run is still as it was."""
    shutil.copytree(base / "runs" / "run", base / "runs" / "other")
    done = again(base, run__name="other", router__scale=2, router__aux_loss=0.5)
    assert done.returncode == 2 and "router.scale = 2.0: the checkpoint was written with 1.0" in done.stderr
    assert "aux_loss" not in done.stderr and "settings that must stay" in done.stderr
    (line,) = [line for line in phalanx("runs", str(base / "runs")).stdout.splitlines() if " other " in f" {line} "]
    assert "finished" in line and "failed" not in line
    done = again(base, run__name="other", router__aux_loss=0.5, observe__console="plain")
    assert done.returncode == 0 and "router.aux_loss = 0.5 (was" in done.stdout
    assert CheckpointFolder(base / "runs" / "other" / "checkpoints").newest() == 6
    (shown,) = re.findall(r"phalanx (train .*/other/recipe.toml --trust --train.steps 12)\s", done.stdout)
    assert phalanx(*shown.split()).returncode == 0, "data.cache lies elsewhere, which the file alone may not say"


def test_other_samples_in_the_same_folder(run: CheckpointFolder, base: Path) -> None:
    done = again(base, train__global_batch=32, train__seed=5)
    assert done.returncode == 2
    assert "train.global_batch = 32" in done.stderr and "train.seed = 5" in done.stderr


def test_starting_over_in_the_same_folder(run: CheckpointFolder, base: Path) -> None:
    done = again(base, checkpoint__resume="false")
    assert done.returncode == 2
    assert "holds checkpoints of steps 2, 4" in done.stderr and "--run.name" in done.stderr


def test_fewer_steps_than_done(run: CheckpointFolder, base: Path) -> None:
    done = again(base, train__steps=3)
    assert done.returncode == 2
    assert "train.steps = 3: is less than the 4 steps that this run has done" in done.stderr


def test_full_disk_while_saving(run: CheckpointFolder, base: Path) -> None:
    """Files over 100 kB are refused, as a full disk refuses them: training goes on, the end cannot be saved, the past is untouched."""

    args = train_args(base, launch__ranks=2, train__steps=8, checkpoint__interval=2, observe__console="plain")
    done = phalanx("train", *args, file_limit=100_000)
    assert done.returncode == 2
    assert "warning" in done.stdout and "training continues" in done.stdout and "File too large" in done.stdout
    assert "saving a checkpoint" in done.stderr and "nothing saved before was touched" in done.stderr
    folder = checkpoints(base)
    assert folder.steps() == [2, 4] and folder.is_sound(2) and folder.is_sound(4)
    assert max(read_history(base / "runs" / "run").steps) == 8
    assert not [n for n in os.listdir(folder.path) if n.startswith(".")]


def test_truncated_shard_and_the_way_out(run: CheckpointFolder, base: Path) -> None:
    folder = checkpoints(base)
    shard = folder.of(4) / "__1_0.distcp"
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    done = again(base)
    assert done.returncode == 2
    assert f"__1_0.distcp = '{size // 2} bytes': was written with {size} bytes" in done.stderr
    assert "--checkpoint.step 2 resumes from a sound one" in done.stderr
    done = again(base, checkpoint__step=2)
    assert done.returncode == 0, done.stderr
    assert read_history(base / "runs" / "run").started["step"] == 2
    assert folder.steps() == [2, 4, 6] and all(folder.is_sound(s) for s in folder.steps())
    assert folder.newest() == 6


@pytest.mark.parametrize("elastic", [False, True])
def test_an_unattended_run_resumes_from_the_newest_sound_checkpoint(base: Path, elastic: bool) -> None:
    """A shard that was cut, and (elastic) a run state that is none any more: one is found by the ranks, the other one before there are any."""
    own = {"run__name": f"unattended-{elastic}", "folding__ep": 1, "resilience__heal": str(elastic).lower()}
    own |= {"resilience__mode": "fast"} if elastic else {}
    assert again(base, train__steps=4, **own).returncode == 0
    folder = CheckpointFolder(base / "runs" / str(own["run__name"]) / "checkpoints")
    damaged = folder.of(4) / ("run_state.json" if elastic else "__1_0.distcp")
    os.truncate(damaged, 10)
    assert again(base, **own).returncode == 2
    assert folder.steps() == [2, 4], "nothing is moved unless it is asked for"
    done = again(base, checkpoint__fall_back="true", observe__console="plain", **own)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "newest checkpoint is damaged" in line]
    assert damaged.name in told and "resumes from that of step 2" in told and "step-00000004" in told
    kept = folder.path / "abandoned/step-00000004"
    assert (kept / damaged.name).stat().st_size == 10 and len(list(kept.iterdir())) > 2
    assert read_history(folder.path.parent).started["step"] == 2 and folder.newest() == 6
    for step in folder.steps():
        os.truncate(folder.of(step) / damaged.name, 10)
    done = again(base, checkpoint__fall_back="true", train__steps=8, **own)
    assert done.returncode == 2 and folder.steps() == [2, 4, 6], "none is sound: all stay, and nothing begins anew"


def test_disk_that_is_full_from_the_start(base: Path) -> None:
    done = phalanx("train", *train_args(base, run__name="full", launch__ranks=1, launch__threads=1), file_limit=2000)
    assert done.returncode == 2
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert "run.folder" in done.stderr or "--data.cache" in done.stderr

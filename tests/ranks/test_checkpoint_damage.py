"""What lies on the disk is not what was written: every case ends in one message that names the file and a way out, and harms nothing."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_help import Mapping, fill, make_state, model_fields, run_state, small_spec, wrong_boxes

from phalanx.core.errors import CheckpointError
from phalanx.plan.layout.parameters import Box
from phalanx.runtime.checkpoint import folder
from phalanx.runtime.checkpoint.failures import TensorsFailed, WriteFailure, failed_save
from phalanx.runtime.checkpoint.folder import CheckpointFolder
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.state.boxes import BoxTensor
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks
FIELDS = model_fields(small_spec())


@pytest.fixture
def two(tmp_path: Path) -> CheckpointManager:
    """Checkpoints of steps 1 and 2."""
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.open()
    state = make_state(0, GroupCache(), Mapping(1))
    fill(state.boxes())
    for step in (1, 2):
        manager.save(state.boxes(), run_state(step))
        manager.finish()
    return manager


def truncate(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 100)
    return rf"{path.name} = '{size - 100} bytes': was written with {size} bytes"


def flip(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return rf"{path.name} = 'sha256 [0-9a-f]+...': was written with sha256 [0-9a-f]+"


def remove(path: Path) -> str:
    path.unlink()
    return rf"{path.name} = 'No such file or directory': was written with \d+ bytes"


@pytest.mark.core
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_damaged_file_is_named_with_a_way_out(two: CheckpointManager, name: str, damage) -> None:  # type: ignore[no-untyped-def]
    pattern = damage(two.folder.of(2) / name)
    with pytest.raises(CheckpointError, match=pattern) as info:
        two.read_state(2, model=FIELDS)
    assert "--checkpoint.step 1 resumes from a sound one (others here: 1)" in str(info.value)
    assert two.read_state(1, model=FIELDS).step == 1


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_damaged_run_state(two: CheckpointManager, damage) -> None:  # type: ignore[no-untyped-def]
    damage(two.folder.of(2) / "run_state.json")
    with pytest.raises(CheckpointError, match=r"run_state.json.*--checkpoint.step 1 resumes from a sound one"):
        two.read_state(2, model=FIELDS)
    assert two.folder.is_sound(1) and not two.folder.is_sound(2)


def test_when_nothing_is_sound_the_message_says_so(two: CheckpointManager) -> None:
    flip(two.folder.of(1) / "__0_0.distcp")
    flip(two.folder.of(2) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no other checkpoint here is sound"):
        two.read_state(2, model=FIELDS)


def refuse(path: Path, *others: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_what_this_user_may_not_read_or_write_is_told_as_such(
    two: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFolder, "begin", lambda self, step: refuse(self.writing(step)))
        two.save(state.boxes(), run_state(3))
        with pytest.raises(CheckpointError) as unwritable:
            two.finish()
    untouched = "nothing saved before was touched (there are checkpoints of steps 1, 2)"
    told = "step-00000003: Permission denied; " + untouched + "; check its owner and permissions"
    assert str(unwritable.value).endswith(told) and "free" not in str(unwritable.value)

    for name in ("file_entry", "read_text"):
        with monkeypatch.context() as patched:
            patched.setattr(folder, name, refuse)
            with pytest.raises(
                CheckpointError, match=r"= 'Permission denied': .*; check its owner and permissions$"
            ) as found:
                two.read_state(2, model=FIELDS)
            assert not any(advice in str(found.value) for advice in ("--run.name", "resumes from", "remove"))


def read_damaged(rank: int, cache: GroupCache, path: Path) -> None:
    import torch.distributed as dist

    CheckpointManager(path, group=dist.group.WORLD).read_state(2, model=FIELDS)


@pytest.mark.core
def test_all_ranks_hear_of_damage_that_one_of_them_found(two: CheckpointManager) -> None:
    truncate(two.folder.of(2) / "__0_0.distcp")
    with pytest.raises(RankError) as info:
        run_ranks(3, read_damaged, two.folder.path)
    assert len(info.value.causes) == 3
    assert len({str(c) for c in info.value.causes.values()}) == 1
    assert all(isinstance(c, CheckpointError) for c in info.value.causes.values())


def test_step_that_is_not_there(two: CheckpointManager) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.step = 7: .*there are checkpoints of steps 1, 2"):
        two.choose(7)
    assert two.choose(1) == 1


def test_other_model_names_the_fields(two: CheckpointManager) -> None:
    other = model_fields(small_spec(hidden=64, top_k=4))
    with pytest.raises(CheckpointError) as info:
        two.read_state(2, model=other)
    assert {p.where for p in info.value.problems} == {"model.hidden", "model.top_k"}
    assert "model.hidden = 64: the checkpoint was written with 32" in str(info.value)
    assert "--run.name" in str(info.value)


def test_what_only_training_reads_of_a_model_may_change(two: CheckpointManager) -> None:
    """What must stay is told by the names of settings."""

    def fields(**router: object) -> dict[str, Any]:
        return FIELDS | {"router": FIELDS["router"] | router}

    assert two.read_state(2, model=fields(aux_loss=0.5, z_loss=0.5)).step == 2
    with pytest.raises(CheckpointError, match="1 problem with settings that must stay") as info:
        two.read_state(2, model=fields(aux_loss=0.5, scale=2.0))
    assert [p.where for p in info.value.problems] == ["router.scale"]
    rate = FIELDS["router"]["bias_rate"]
    with pytest.raises(CheckpointError, match=r"router.bias_rate = .* with 0 there are no biases of experts"):
        two.read_state(2, model=fields(bias_rate=0.0 if rate else 0.1))
    with pytest.raises(CheckpointError) as info:
        two.read_state(2, model=FIELDS | {"name": "other", "yarn": {"factor": 2.0}})
    assert [p.where for p in info.value.problems] == ["model.preset", "model.yarn_factor"]


def test_another_type_of_state_is_one_problem_of_its_setting(two: CheckpointManager) -> None:
    wide = make_state(0, GroupCache(), Mapping(1), dtype=torch.float64).boxes()
    plain = make_state(0, GroupCache(), Mapping(1)).boxes()
    narrow = [replace(b, tensor=b.tensor.bfloat16()) if b.name.startswith("exp_avg") else b for b in plain]
    for boxes, where, says in (
        (wide, "train.dtype", f"in {len(wide)} tensors, such as master/embedding.weight; state is never converted; use train.dtype = float32 or"),
        (narrow, "optim.state_dtype", "has torch.bfloat16 and the checkpoint has torch.float32 in"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as info:
            two.load(boxes, step=2)
        assert [p.where for p in info.value.problems] == [where] and says in str(info.value)


def test_other_tensors_are_named(two: CheckpointManager) -> None:
    bigger = make_state(0, GroupCache(), Mapping(1), spec=small_spec(num_layers=3, vocab=512))
    with pytest.raises(CheckpointError) as info:
        two.load(bigger.boxes(), step=2)
    text = str(info.value)
    assert "master/embedding.weight = (512, 32): the checkpoint has shape (256, 32)" in text
    assert "master/layers.2.moe.experts.w13 = (8, 2, 48, 32): is not in the checkpoint" in text
    smaller = make_state(0, GroupCache(), Mapping(1), spec=small_spec(num_layers=1))
    with pytest.raises(CheckpointError, match=r"master/layers.1.attention.wq.weight .* this model has no such tensor"):
        two.load(smaller.boxes(), step=2)


def test_other_precision_is_never_converted(two: CheckpointManager) -> None:
    wide = make_state(0, GroupCache(), Mapping(1), dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"torch.float64.*the checkpoint has torch.float32.*train.dtype"):
        two.load(wide.boxes(), step=2)


def test_part_of_a_checkpoint_can_be_loaded(two: CheckpointManager) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    weights = [b for b in state.boxes() if b.name.startswith("master/")]
    two.load(weights, step=2, partial=True)
    assert wrong_boxes(weights) == []


def test_a_saved_box_is_read_once_whatever_parts_of_it_are_wanted(
    two: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export wants the experts of a layer one by one, and may find all of them saved as one box."""
    weights = [b for b in make_state(0, GroupCache(), Mapping(1)).boxes() if b.name.startswith("master/")]
    rows = [
        BoxTensor(b.name, b.shape, Box((o + i, *rest), (1, *b.box.sizes[1:])), b.tensor[i : i + 1], primary=True)
        for b in weights
        for o, *rest in [b.box.offsets]
        for i in range(b.box.sizes[0])
    ]
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **how: read.append(given) or load(*given, **how))
    two.load(rows, step=2, partial=True)
    assert wrong_boxes(weights) == [] and len(rows) > 10 * len(weights) >= 10 * len(read) > 0


@pytest.mark.parametrize("text", ["step-00000009\n", "", "nonsense", "\x00\xff"])
def test_latest_that_names_nothing_falls_back_to_the_newest(two: CheckpointManager, text: str) -> None:
    (two.folder.path / "latest").write_text(text)
    assert two.choose() == 2
    (two.folder.path / "latest").unlink()
    assert two.choose() == 2


# ---- interrupted at every point --------------------------------------------------------------------------------------

CRASH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint_help import Mapping, fill, make_state, run_state
from phalanx.runtime.checkpoint.manager import CheckpointManager, import_now
from phalanx.runtime.comm.groups import GroupCache

import_now()  # once, for all that are forked

def attempt(folder, fatal):
    "Save step 3 and die just before the fatal-th time the disk is asked for anything durable."
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0
    def dying(name):
        real = getattr(os, name)
        def call(*args, **kw):
            nonlocal calls
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return real(*args, **kw)
        return call
    for name in ("fsync", "rename", "replace", "rmdir", "unlink", "mkdir"):
        setattr(os, name, dying(name))
    manager = CheckpointManager(folder, keep_last=2, asynchronous=False)
    state = make_state(0, GroupCache(), Mapping(1))
    fill(state.boxes())
    manager.save(state.boxes(), run_state(3))
    manager.finish()
    os._exit(0)

import shutil
start, scratch = Path(sys.argv[2]), Path(sys.argv[3])
fatal = 0
while True:
    folder = scratch / f"crash-{fatal}"
    shutil.copytree(start, folder)
    if attempt(folder, fatal) == 0:
        break
    fatal += 1
print(fatal)
"""


def test_killed_at_every_point_of_a_save(two: CheckpointManager, tmp_path: Path) -> None:
    """Two complete ones before; whatever moment the process dies at, a sound newest one is there and the rubbish goes at the next start."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    args = [sys.executable, "-c", CRASH, str(Path(__file__).parents[1] / "helpers"), str(two.folder.path), str(scratch)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points >= 10
    outcomes = set()
    for point in range(points + 1):
        manager = CheckpointManager(scratch / f"crash-{point}")
        assert all(manager.folder.is_sound(s) for s in manager.folder.steps())
        manager.open()
        newest = manager.choose()
        assert newest in (2, 3)
        state = make_state(0, GroupCache(), Mapping(1))
        assert manager.read_state(newest, model=FIELDS).step == newest
        manager.load(state.boxes(), step=newest)
        assert wrong_boxes(state.boxes()) == []
        names = {p.name for p in manager.folder.path.iterdir()}
        assert names <= {"latest", "step-00000001", "step-00000002", "step-00000003"}
        outcomes.add((newest, len(names)))
    assert {n for n, _ in outcomes} == {2, 3}


# ---- a real full disk, where this machine lets us make one --------------------------------------------------------------


def namespace_prefix() -> list[str] | None:
    """How to run a command that may mount, or None."""
    for prefix in (["unshare", "-Urm"], ["unshare", "-m"]):
        probe = [*prefix, "sh", "-c", "mount -t tmpfs none /mnt"]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return prefix
    return None


FULL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint_help import Mapping, make_state, run_state
from phalanx.core.errors import CheckpointError
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache

manager = CheckpointManager(Path(sys.argv[2]) / "checkpoints", keep_last=9)
manager.open()
state = make_state(0, GroupCache(), Mapping(1))
for step in range(1, 9):
    manager.save(state.boxes(), run_state(step))
    try:
        manager.finish()
    except CheckpointError as err:
        assert manager.folder.steps() == list(range(1, step)) and step > 1, step
        assert all(manager.folder.is_sound(s) for s in manager.folder.steps())
        print(err)
        break
"""


def test_full_disk_of_a_real_file_system(tmp_path: Path) -> None:
    prefix = namespace_prefix()
    if prefix is None:
        pytest.skip("neither root nor user namespaces: no small file system can be mounted here")
    script = tmp_path / "full.py"
    script.write_text(FULL)
    mount = tmp_path / "small"
    mount.mkdir()
    shell = f"mount -t tmpfs -o size=3m none {mount} && exec {sys.executable} {script} {Path(__file__).parents[1] / 'helpers'} {mount}"
    done = subprocess.run([*prefix, "sh", "-c", shell], capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout and "free on the disk" in done.stdout


def test_clean_start_leaves_strangers_alone(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-00000004").mkdir()
    (tmp_path / ".deleting-step-00000001").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert CheckpointFolder(tmp_path).clean() == [".deleting-step-00000001", ".writing-step-00000004"]
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_ranks_that_meet_the_same_share_a_line(two: CheckpointManager) -> None:
    full = {rank: WriteFailure(f"/disk/__{rank}_0.distcp", "No space left on device") for rank in range(3)}
    causes = TensorsFailed({**full, 3: WriteFailure("/disk/__3_0.distcp", "Permission denied", "ask its owner")})
    said = str(failed_save(causes, two.folder.of(3), listed=two.folder.list_steps))
    assert "2 problems" in said and "steps 1, 2" in said
    assert "'rank 0, __0_0.distcp and 2 more ranks': No space left on device" in said
    assert "'rank 3, __3_0.distcp': Permission denied" in said
    assert "free on the disk" in said.splitlines()[1] and said.splitlines()[2].endswith("steps 1, 2); ask its owner")

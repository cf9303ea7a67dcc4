"""Weights of a run on an inference mesh of another layout: the same bits, under the cap, or a clear refusal."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_help import Watch
from safetensors import safe_open
from train_help import phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.files import new_folder
from phalanx.runtime.checkpoint import planner
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.processes import WorldInfo
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.generation import load_model
from phalanx.train.sync import weight_sync
from ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 steps on 4 ranks with pp 2 x ep 2, with an expert bias."""
    base = tmp_path_factory.mktemp("sync")
    write_text(base / "text", files=4)
    more = {"train__steps": 4, "folding__pp": 2, "folding__ep": 2, "router__bias_rate": 0.001}
    done = phalanx("train", *train_args(base, **more))
    assert done.returncode == 0, done.stderr
    return base / "runs" / "run"


def delivered(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors, put together from every rank's file by what the index says; replicas must agree."""
    index = json.loads((folder / "index.json").read_text())
    files = [safe_open(folder / name, framework="pt") for name in index["files"]]
    whole = {}
    for name, entry in index["tensors"].items():
        out, seen = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"])), torch.zeros(entry["shape"])
        for rank, held in entry["held"].items():
            local = files[int(rank)].get_tensor(name)
            for h in held:
                at = tuple(slice(o, o + n) for o, n in zip(h["offsets"], h["sizes"], strict=True))
                here = local[tuple(slice(o, o + n) for o, n in zip(h["local"], h["sizes"], strict=True))]
                fresh = seen[at] == 0
                assert torch.equal(out[at][~fresh], here[~fresh]), name
                out[at], seen[at] = here, 1
        assert bool(seen.all()), name
        whole[name] = out
    return whole


@pytest.mark.core
@pytest.mark.parametrize(
    ("to", "more"),
    [
        ("tp2.dp2.ep4", ["--memory", "96KB", "--readers", "3", "--check"]),
        ("tp4.etp4", ["--dtype", "bfloat16"]),
        ("tp1", ["--readers", "1", "--memory", "88KB", "--step", "4"]),
    ],
)
def test_weights_arrive_bit_for_bit_under_the_cap(run: Path, tmp_path: Path, to: str, more: list[str]) -> None:
    report = tmp_path / "figures.json"
    done = phalanx("sync", str(run), "--to", to, "--out", str(tmp_path / "out"), "--json", str(report), *more)
    assert done.returncode == 0, done.stderr
    model = load_model(run).model
    want = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if "expert_bias" in n}}
    found = delivered(tmp_path / "out")
    assert set(found) == set(want)
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name].detach().to(tensor.dtype)), name
    figures = json.loads(report.read_text())
    assert figures["peak_held_bytes"] <= figures["memory_bytes"] and figures["waves"] >= 1
    assert figures["waves"] > 3 or "--memory" not in more
    total = sum(t.numel() * t.element_size() for t in found.values())
    assert sum(r["received_bytes"] for r in figures["ranks"]) >= total
    assert (figures["compared_bytes"] >= total) == ("--check" in more)
    assert not list(tmp_path.glob(".writing-*"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a larger model, whose checkpoint of step 1 has whole tensors, and that of step 2 the same in parts of 128 KiB."""
    base = tmp_path_factory.mktemp("wide")
    write_text(base / "text", files=4)
    size = {"model__hidden": 128, "model__expert_ffn": 256, "router__bias_rate": 0.001}
    done = phalanx("train", *train_args(base, train__steps=1, launch__ranks=1, checkpoint__interval=0, **size))
    assert done.returncode == 0, done.stderr
    run = base / "runs" / "run"
    manager = CheckpointManager(run / "checkpoints", asynchronous=False)
    boxes = []
    for saved in planner.read_table(manager.folder.of(1)).tensors:
        tensor = torch.empty(saved.shape, dtype=saved.torch_dtype)
        whole = planner.Box((0,) * len(saved.shape), saved.shape)
        boxes.append(BoxTensor(saved.name, saved.shape, whole, tensor, True))
    manager.load(boxes, step=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "PART_BYTES", 1 << 17)
        manager.save(boxes, dataclasses.replace(manager.folder.read_state(1), step=2))
        assert manager.finish() is not None
    return run


def measured(rank: int, cache: GroupCache, plan: weight_sync.SyncPlan) -> tuple[int, Any]:
    """Most that tensors took in a process of a sync, and what it tells."""
    cache.get(range(plan.world))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_world", "close_world"):  # these ranks have one
            patch.setattr(weight_sync, name, lambda *_, **__: None)
        with Watch() as watch:
            reports = weight_sync.run_sync(plan, WorldInfo(rank=rank, world=plan.world))
    return watch.peak, reports[rank]


@pytest.mark.core
@pytest.mark.parametrize(("step", "memory"), [(2, 1 << 20), (1, 4 << 20)])
def test_no_process_holds_more_than_the_cap(wide: Path, tmp_path: Path, step: int, memory: int) -> None:
    """Counted by what is allocated for tensors: rows as they are read and as they are sent, the saved box that is being read, messages, what a check reads again."""
    plan = weight_sync.plan_sync(
        wide, tmp_path / "out", to="dp2.ep2", memory=str(memory), readers=2, step=step, dtype="bfloat16"
    )
    assert plan.box_bytes == (1 << 17 if step == 2 else 4 * 8 * 2 * 256 * 128) and len(plan.waves) > 2
    plan.writing.mkdir()
    told = run_ranks(plan.world, measured, plan)
    mapped = [0, 0, *(plan.file_of(receiver).stat().st_size for receiver in range(2))]
    for (peak, report), file in zip(told, mapped, strict=True):
        # (as much again as a wave's rows where those of the wave before were still there)
        assert peak - file <= memory - plan.staging_bytes + report.staging_bytes + 50_000, report
        assert report.held_bytes <= memory - plan.staging_bytes and report.staging_bytes <= plan.staging_bytes
    assert max(report.held_bytes for _, report in told) > memory / 3
    with Watch() as watch:
        assert weight_sync.check_sync(plan) == sum(report.received_bytes for _, report in told)
    assert watch.peak - max(mapped) <= memory
    with plan.file_of(1).open("rb+") as damaged:
        damaged.seek(-1, 2)
        damaged.write(b"\x55")
    with pytest.raises(RunError, match=r"rank 1: .* is not what the checkpoint holds"):
        weight_sync.check_sync(plan)


def test_a_cap_that_a_saved_box_exceeds_is_refused_with_the_least(wide: Path, tmp_path: Path) -> None:
    def waves(memory: int) -> int:
        return len(weight_sync.plan_sync(wide, tmp_path / "out", to="tp2", memory=str(memory), step=1).waves)

    with pytest.raises(
        ConfigError, match=r"a row of layers.\d.moe.experts.w13 and a saved box while it is read"
    ) as info:
        waves(1 << 20)
    least = int(str(info.value).split("the least is ")[1].split()[0])
    with pytest.raises(ConfigError, match="the least is"):
        waves(least - 2)
    assert waves(least) > waves(2 * least)


def test_what_cannot_be_done_is_refused_at_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    args = ["--to", "tp3", "--out", str(tmp_path / "full"), "--dtype", "float8", "--readers", "1025"]
    assert main(["sync", str(run), *args]) == 2
    err = capsys.readouterr().err
    for text in (
        "must divide num_heads",
        "exists already",
        "is not a known data type",
        "--readers = 1025: must lie between 1 and 1024",
    ):
        assert text in err
    for memory, text in (("1KB", "the least is"), ("a lot", "is not a number of bytes")):
        assert main(["sync", str(run), "--to", "tp2", "--out", str(tmp_path / "new"), "--memory", memory]) == 2
        assert text in capsys.readouterr().err
    assert main(["sync", str(run), "--to", "xp2", "--out", str(tmp_path / "new")]) == 2
    assert "--to = 'xp2': is made of degrees" in capsys.readouterr().err
    assert main(["sync", str(tmp_path), "--to", "tp2", "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_one_sync_at_a_time_writes_to_a_folder(run: Path, tmp_path: Path) -> None:
    """The second is refused; what a killed one left, its lock too, is no obstacle. No folder gets the name without all its files."""
    plan = weight_sync.plan_sync(run, tmp_path / "out", to="tp2", memory="10MB")
    again = ["sync", str(run), "--to", "tp1", "--out", str(tmp_path / "out")]
    with pytest.raises(RunError, match="cannot write"), new_folder(plan.target, writer="sync"):
        weight_sync._map_file(plan, 0)
        with pytest.raises(RunError, match=r"rank-00001.safetensors: has 0 bytes, must have \d+"):
            weight_sync.finish_sync(plan)
        done = phalanx(*again)
        assert done.returncode == 2 and "another sync writes there" in done.stderr, done.stderr
        assert plan.file_of(0).exists() and not plan.target.exists()
        raise OSError(errno.EIO, "broken")
    assert not list(tmp_path.iterdir())
    plan.writing.mkdir()
    (tmp_path / ".writing-out.lock").touch()
    done = phalanx(*again)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert {p.name for p in plan.target.iterdir()} == {"index.json", "rank-00000.safetensors"}


@pytest.mark.parametrize(("code", "is_an_error"), [(errno.ENOSPC, True), (errno.EOPNOTSUPP, False)])
def test_a_full_disk_is_an_error_before_anything_is_mapped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_an_error: bool
) -> None:
    """A mapped file that finds no room later kills the process. A file system that cannot reserve any is taken as it is."""

    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    plan = weight_sync.plan_sync(run, tmp_path / "out", to="tp1", memory="10MB")
    plan.writing.mkdir()
    if is_an_error:
        with pytest.raises(RunError, match=r"cannot write .*rank-00000.safetensors: .*No space left"):
            weight_sync._map_file(plan, 0)
    else:
        assert weight_sync._map_file(plan, 0) and plan.file_of(0).stat().st_size > 1000


def test_the_folder_may_be_this_one(run: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = phalanx("sync", str(run), "--to", "tp1", "--out", ".", "--json", "../figures.json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in here.iterdir()} == {"index.json", "rank-00000.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == {"here", "figures.json"}


def test_all_words_that_are_wrong_are_named_together(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "tp4.foo2", "--memory", "3x", "--readers", "0", "--dtype", "fp8", "--out", str(tmp_path / "new")]
    assert main(["sync", str(run), *words]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("--to = 'tp4.foo2'", "--memory = '3x'", "--readers = 0", "--dtype = 'fp8'"))

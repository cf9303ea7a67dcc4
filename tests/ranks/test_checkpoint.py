"""Checkpoints of boxes: any mapping to any other bit for bit, each logical element once on the disk, asynchronous and agreed by all ranks."""

import json
import math
import os
import random
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_help import Mapping, fill, make_state, model_fields, run_state, small_spec, wrong_boxes
from memory_help import Watch

from phalanx.core.errors import CheckpointError
from phalanx.plan.layout import Box
from phalanx.runtime.checkpoint import planner
from phalanx.runtime.checkpoint.manager import CheckpointManager, Saved
from phalanx.runtime.checkpoint.table import BoxTable, SavedBox
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.state.boxes import BoxTensor
from ranks import run_ranks

pytestmark = pytest.mark.ranks

MAPPINGS = [
    Mapping(1),
    Mapping(2, ep=2),
    Mapping(2, etp=2),
    Mapping(2, ep=1, zero=0),
    Mapping(4, ep=4),
    Mapping(4, ep=2, etp=2),
    Mapping(4, ep=2, zero=0),
    Mapping(8, ep=4),
    Mapping(8, ep=2, etp=2),
]


def save_known(rank: int, cache: GroupCache, mapping: Mapping, path: Path, asynchronous: bool, step: int) -> Saved:
    state = make_state(rank, cache, mapping)
    fill(state.boxes())
    manager = CheckpointManager(path, group=own_group(mapping.world, timeout_s=240), asynchronous=asynchronous)
    manager.open()
    manager.save(state.boxes(), run_state(step))
    if asynchronous:
        for box in state.boxes():  # training goes on at once
            box.tensor.zero_()
    saved = manager.finish()
    assert saved is not None and saved.step == step
    return saved


def load_known(rank: int, cache: GroupCache, mapping: Mapping, paths: list[Path]) -> list[str]:
    wrong = []
    group = own_group(mapping.world, timeout_s=240)
    for path in paths:
        state = make_state(rank, cache, mapping)
        manager = CheckpointManager(path, group=group)
        step = manager.choose()
        assert step is not None
        read = manager.read_state(step, model=model_fields(small_spec()))
        assert read.samples == step * 8
        manager.load(state.boxes(), step=step)
        wrong += [f"{path.name}: {name}" for name in wrong_boxes(state.boxes())]
    return wrong


def test_every_mapping_to_every_other_bitwise(tmp_path: Path) -> None:
    paths = [tmp_path / f"{m.world}-{m.ep}-{m.etp}-{m.zero}" for m in MAPPINGS]
    for i, (mapping, path) in enumerate(zip(MAPPINGS, paths, strict=True)):
        run_ranks(mapping.world, save_known, mapping, path, i % 2 == 0, 7)
    for mapping in MAPPINGS:
        assert run_ranks(mapping.world, load_known, mapping, paths) == [[]] * mapping.world


@pytest.mark.parametrize("mapping", [Mapping(1), Mapping(8, ep=4), Mapping(4, ep=2, etp=2), Mapping(4, ep=2, zero=0)])
def test_each_logical_element_is_on_the_disk_once(tmp_path: Path, mapping: Mapping) -> None:
    spec = small_spec(hidden=128, expert_ffn=192)
    run_ranks(mapping.world, save_spec, mapping, tmp_path, {"hidden": 128, "expert_ffn": 192})
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-00000001").read_metadata()
    elements = sum(
        torch.Size(chunk.sizes).numel() for entry in metadata.state_dict_metadata.values() for chunk in entry.chunks
    )
    assert elements == 3 * spec.num_params + 2 * spec.num_experts  # weight and two moments, expert bias of two layers
    on_disk = sum(p.stat().st_size for p in (tmp_path / "step-00000001").glob("*.distcp"))
    assert 4 * elements <= on_disk <= 1.25 * 4 * elements


def save_spec(rank: int, cache: GroupCache, mapping: Mapping, path: Path, changes: dict[str, int]) -> None:
    spec = small_spec(**changes)
    manager = CheckpointManager(path, group=own_group(mapping.world, timeout_s=240))
    manager.open()
    manager.save(make_state(rank, cache, mapping, spec=spec).boxes(), run_state(1, spec))
    assert manager.finish() is not None


def test_a_lost_or_doubled_primary_is_refused(tmp_path: Path) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    first, *rest = state.boxes()
    lost = [BoxTensor(first.name, first.shape, first.box, first.tensor, False), *rest]
    missing = CheckpointManager(tmp_path)
    missing.save([b for b in lost if b.primary and b.name.startswith("buffer")] + [_half(rest)], run_state(1))
    with pytest.raises(CheckpointError, match=r"hold \d+ of \d+ elements"):
        missing.finish()
    missing.save([first, first, *rest], run_state(1))
    with pytest.raises(CheckpointError, match="some twice"):
        missing.finish()
    assert missing.folder.steps() == []


def _half(boxes: list[BoxTensor]) -> BoxTensor:
    box = next(b for b in boxes if b.box.sizes and b.box.sizes[0] % 2 == 0)
    part = type(box.box)(box.box.offsets, (box.box.sizes[0] // 2, *box.box.sizes[1:]))
    return BoxTensor(box.name, box.shape, part, box.tensor[: part.sizes[0]], True)


def keep_some(rank: int, cache: GroupCache, path: Path) -> list[list[int]]:
    manager = CheckpointManager(path, group=own_group(2, timeout_s=240), keep_last=2)
    manager.open()
    state = make_state(rank, cache, Mapping(2, ep=2))
    seen = []
    for step in (10, 20, 30, 40):
        manager.save(state.boxes(), run_state(step))  # waits for the one before
        manager.poll()
        seen.append(manager.folder.steps())
    manager.finish()
    return [*seen, manager.folder.steps()]


@pytest.mark.core
def test_keeps_the_newest_and_names_the_latest(tmp_path: Path) -> None:
    seen = run_ranks(2, keep_some, tmp_path)[0]
    assert seen[-1] == [30, 40]
    assert all(set(b) - set(a) <= {10, 20, 30, 40} and len(b) <= 3 for a, b in pairwise(seen))
    assert (tmp_path / "latest").read_text() == "step-00000040\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000030", "step-00000040"]


def save_by_steps(rank: int, cache: GroupCache, path: Path) -> tuple[int, Saved, list[str], list[int]]:
    """One save that is completed between later steps, one that nobody completes, and one that is waited for."""
    state = make_state(rank, cache, Mapping(2, ep=2))
    fill(state.boxes())
    size = sum(b.tensor.nbytes for b in state.boxes() if b.primary)
    manager = CheckpointManager(path, group=own_group(2, timeout_s=240), by_steps=True, write_rate=2 * size / 1e6 / 0.5)
    manager.open()
    manager.save(state.boxes(), run_state(10))
    assert manager.pending and manager.folder.steps() == []
    for box in state.boxes():  # training goes on at once
        box.tensor.zero_()
    polls, saved = 0, None
    while saved is None:
        polls, saved = polls + 1, manager.poll()
    manager.load(state.boxes(), step=10)
    wrong = wrong_boxes(state.boxes())
    manager.save(state.boxes(), run_state(20))
    manager.close()
    assert not manager.pending and manager.poll() is None
    # else its thread may write while the next one cleans the folder, which only the one after removes
    while manager.busy:
        time.sleep(0.01)
    again = CheckpointManager(path, group=own_group(2, timeout_s=240), by_steps=True, write_rate=size / 1e6 / 600)
    again.open()
    steps = again.folder.steps()
    again.save(state.boxes(), run_state(30))  # ten minutes, or at once where somebody waits
    hurried = again.finish()
    assert hurried is not None and hurried.total_s < 60
    return polls, saved, wrong, steps


def test_a_save_is_completed_between_later_steps_or_by_nobody(tmp_path: Path) -> None:
    for polls, saved, wrong, steps in run_ranks(2, save_by_steps, tmp_path):
        assert polls > 1 and saved.step == 10 and wrong == [] and steps == [10]
        assert saved.total_s >= 0.5 and saved.blocked_s < saved.total_s
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000010", "step-00000030"]


def test_going_back_replaces_but_never_deletes_later_steps(tmp_path: Path) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        manager.save(state.boxes(), run_state(step))
        manager.finish()
    assert manager.folder.steps() == [20, 30]
    fill(state.boxes())
    manager.save(state.boxes(), run_state(20))
    manager.finish()
    assert manager.folder.steps() == [20, 30]
    assert manager.choose() == 20
    manager.load(state.boxes(), step=20)
    assert wrong_boxes(state.boxes()) == []


def test_a_checkpoint_is_written_no_faster_than_the_limit(tmp_path: Path) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    fill(state.boxes())
    size = sum(b.tensor.nbytes for b in state.boxes() if b.primary)
    manager = CheckpointManager(tmp_path, asynchronous=False, write_rate=size / 1e6 / 0.5)
    manager.save(state.boxes(), run_state(5))
    saved = manager.finish()
    assert saved is not None and saved.total_s >= 0.5
    for box in state.boxes():
        box.tensor.zero_()
    manager.load(state.boxes(), step=5)
    assert wrong_boxes(state.boxes()) == []


# ---- in parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (9,), (6, 4), (1, 5), (3, 2, 7), (2, 1, 3, 5)])
def test_the_parts_of_a_box_are_it_in_order_and_none_is_larger(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = tuple(range(10, 10 + len(sizes)))
    whole = torch.arange(math.prod(sizes)).view(sizes)
    box = BoxTensor("x", tuple(30 for _ in sizes), Box(at, sizes), whole, True)
    for most in range(1, whole.numel() + 2):
        monkeypatch.setattr(planner, "PART_BYTES", 8 * most)
        parts = list(planner.parts_of(box))
        assert torch.equal(torch.cat([p.tensor.flatten() for p in parts]), whole.flatten())
        for part in parts:
            assert part.tensor.numel() <= most and part.tensor.is_contiguous() and part.tensor.shape == part.box.sizes
            assert torch.equal(whole[part.box.shifted([-o for o in at]).slices()], part.tensor)
        row = math.prod(sizes[1:])
        if row <= most:  # then only dim 0 is cut, into as few as can be
            assert all(p.box.sizes[1:] == sizes[1:] for p in parts)
            assert len(parts) == -(-sizes[0] // (most // row)) if sizes else len(parts) == 1


@pytest.mark.core
def test_what_was_saved_in_parts_is_read_by_any_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PART_BYTES", 3000)
    for asynchronous in (True, False):
        save_known(0, GroupCache(), Mapping(1), tmp_path / str(asynchronous), asynchronous, 7)
        entries = torch.distributed.checkpoint.FileSystemReader(tmp_path / str(asynchronous) / "step-00000007").read_metadata().state_dict_metadata  # fmt: skip
        sizes = [4 * math.prod(c.sizes) for entry in entries.values() for c in entry.chunks]
        assert max(sizes) <= 3000 and len(sizes) > 100
    for mapping in (Mapping(2, etp=2), Mapping(4, ep=2, zero=0), Mapping(8, ep=4)):
        found = run_ranks(mapping.world, load_known, mapping, [tmp_path / "True", tmp_path / "False"])
        assert found == [[]] * mapping.world


def test_what_is_read_of_saved_boxes_is_what_the_plain_way_finds() -> None:
    """Boxes of any cut, saved and wanted; each pair is compared."""
    draw = random.Random(5)
    for _ in range(60):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 3)))
        whole = torch.arange(math.prod(shape)).view(shape)
        saved, wanted = (
            [Box(*zip(*c, strict=True)) if shape else Box((), ()) for c in _tiles(shape, draw)] for _ in range(2)
        )
        draw.shuffle(saved)
        found = list(planner._parts(_rows(shape, saved), wanted))
        plain = [(s, w, both) for s, a in enumerate(saved) for w, b in enumerate(wanted) if (both := a.intersection(b))]
        assert sorted(found, key=lambda part: part[:2]) == plain
        filled = [torch.full(b.sizes, -1) for b in wanted]
        for _, i, part in found:
            filled[i][part.shifted([-o for o in wanted[i].offsets]).slices()] = whole[part.slices()]
        assert all(torch.equal(x, whole[b.slices()]) for x, b in zip(filled, wanted, strict=True))


def _rows(shape: tuple[int, ...], saved: list[Box]) -> planner.Rows:
    tensor = planner.SavedTensor("x", "float32", shape)
    return BoxTable.of(SavedBox(tensor, b.offsets, b.sizes, "f", 0, 1) for b in saved).rows


def test_the_plan_of_a_load_does_not_grow_as_chunks_times_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of many experts, saved and wanted one by one, whose rows are longer than their number."""
    compared, real = [0], planner._shared

    def counted(near: planner.Rows, *args: planner.Rows) -> Iterator[tuple[int, list[int], list[int]]]:
        compared[0] += len(near)
        return real(near, *args)

    monkeypatch.setattr(planner, "_shared", counted)
    boxes = [Box((i, 0, 0), (1, 1536, 4096)) for i in range(500)]
    rows = _rows((500, 1536, 4096), boxes)
    assert len(list(planner._parts(rows, boxes))) == 500 == compared[0]


def _tiles(shape: tuple[int, ...], draw: random.Random) -> list[tuple[tuple[int, int], ...]]:
    """The tensor cut again and again across a dim that is drawn: (offset, size) for each dim."""
    tiles = [tuple((0, n) for n in shape)]
    for _ in range(draw.randint(0, 9)):
        tile = tiles.pop(draw.randrange(len(tiles)))
        able = [d for d, (_, n) in enumerate(tile) if n > 1]
        if able:
            d = draw.choice(able)
            (at, n), first = tile[d], draw.randint(1, tile[d][1] - 1)
            tiles.append((*tile[:d], (at + first, n - first), *tile[d + 1 :]))
            tile = (*tile[:d], (at, first), *tile[d + 1 :])
        tiles.append(tile)
    return tiles


@pytest.mark.parametrize("filled", [True, False])
def test_a_save_takes_memory_for_one_part_and_a_load_for_one_saved_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: bool
) -> None:
    """Of a large flat buffer, which torch would copy, or of boxes that are filled as they are written."""
    part, rows = 1 << 20, 4096
    monkeypatch.setattr(planner, "PART_BYTES", part)
    names = [f"x{i}" for i in range(6)]
    flat = torch.arange(len(names) * rows * 256, dtype=torch.float32)  # 4 MiB each
    held = [BoxTensor(n, (rows, 256), Box((0, 0), (rows, 256)), x.view(rows, 256), True) for n, x in zip(names, flat.chunk(len(names)), strict=True)]  # fmt: skip
    empty = [BoxTensor(b.name, b.shape, b.box, b.tensor.to("meta"), True) for b in held]

    def fill(boxes: list[BoxTensor]) -> None:
        for box in boxes:
            box.tensor.copy_(held[names.index(box.name)].tensor[box.box.slices()])

    manager = CheckpointManager(tmp_path, asynchronous=False)
    with Watch() as watch:
        manager.save(empty if filled else held, run_state(1), **({"fill": fill} if filled else {}))
        assert manager.finish() is not None
    assert watch.peak < (part + 10_000 if filled else 10_000) and watch.left < 10_000
    found = torch.zeros_like(flat)
    targets = [BoxTensor(b.name, b.shape, b.box, x.view(rows, 256), True) for b, x in zip(held, found.chunk(len(names)), strict=True)]  # fmt: skip
    with Watch() as watch:
        manager.load(targets, step=1)
    assert torch.equal(found, flat) and part <= watch.peak < part + 10_000
    assert manager.largest_box(1, names) == part and manager.largest_box(1, []) == 0


def test_boxes_that_are_filled_may_be_saved_in_a_thread(tmp_path: Path) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    empty = [BoxTensor(b.name, b.shape, b.box, b.tensor.to("meta"), b.primary) for b in state.boxes()]
    manager = CheckpointManager(tmp_path)
    manager.save(empty, run_state(1), fill=fill)
    assert manager.finish() is not None
    manager.load(state.boxes(), step=1)
    assert wrong_boxes(state.boxes()) == []


def test_the_table_of_contents_is_read_once_and_again_where_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], planner.read_table
    monkeypatch.setattr(planner, "read_table", lambda path: read.append(path) or real(path))
    state = make_state(0, GroupCache(), Mapping(1))
    reader = CheckpointManager(tmp_path)
    for value in (1.0, 2.0):
        for box in state.boxes():
            box.tensor.fill_(value)
        writer = CheckpointManager(tmp_path)
        writer.save(state.boxes(), run_state(5))
        writer.finish()
        for box in state.boxes():
            box.tensor.zero_()
            reader.load([box], step=5, partial=True)
            assert (box.tensor == value).all()
    assert len(read) == 2
    reader.load(state.boxes(), step=5)
    reader.load(state.boxes(), step=5)
    assert len(read) == 3 and reader._reader is None  # a run that goes on keeps none


def test_run_state_reads_like_text(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(make_state(0, GroupCache(), Mapping(1)).boxes(), run_state(5))
    manager.finish()
    body = json.loads((tmp_path / "step-00000005" / "run_state.json").read_text())
    assert body["step"] == 5 and body["samples"] == 40 and body["model"]["num_experts"] == 8
    assert set(body["files"]) == {".metadata", "__0_0.distcp"}
    for name, entry in body["files"].items():
        assert (tmp_path / "step-00000005" / name).stat().st_size == entry["bytes"]


# ---- a disk that is full ---------------------------------------------------------------------------------------------


def full_for_one_rank(rank: int, cache: GroupCache, path: Path, asynchronous: bool) -> str:
    """Rank 1 may not write files over 4 KiB for a while, which the system reports just as it does a full disk."""
    mapping = Mapping(2, ep=2)
    manager = CheckpointManager(path, group=own_group(2, timeout_s=240), asynchronous=asynchronous)
    manager.open()
    state = make_state(rank, cache, mapping)
    fill(state.boxes())
    manager.save(state.boxes(), run_state(1))
    manager.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        manager.save(state.boxes(), run_state(2))
        with pytest.raises(CheckpointError) as info:
            manager.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.folder.steps() == [1] and manager.folder.is_sound(1)
    assert not manager.folder.writing(2).exists()
    manager.save(state.boxes(), run_state(3))
    manager.finish()
    assert manager.folder.steps() == [1, 3]
    return str(info.value)


@pytest.mark.core
@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_harms_nothing_and_is_told_to_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    texts = run_ranks(2, full_for_one_rank, tmp_path, asynchronous)
    assert texts[0] == texts[1]
    assert "step-00000002" in texts[0] and "rank 1" in texts[0] and "File too large" in texts[0]
    assert "nothing saved before was touched (there are checkpoints of steps 1)" in texts[0]
    assert "checkpoint.keep_last" in texts[0] and "free on the disk" in texts[0]


def test_error_of_a_background_write_surfaces_at_the_next_poll(tmp_path: Path) -> None:
    state = make_state(0, GroupCache(), Mapping(1))
    manager = CheckpointManager(tmp_path / "here")
    manager.open()
    os.rmdir(tmp_path / "here")
    (tmp_path / "here").write_text("a file where the folder was")
    manager.save(state.boxes(), run_state(1))
    while manager.busy:
        pass
    with pytest.raises(CheckpointError, match="here"):
        manager.poll()
    assert manager.poll() is None

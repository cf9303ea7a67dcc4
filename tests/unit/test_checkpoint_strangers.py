"""A checkpoint of a stranger: its table of contents is a pickle, which can do no more than be refused."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
import pickletools
import random
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from phalanx.core.errors import CheckpointError
from phalanx.plan.layout import Box
from phalanx.runtime.checkpoint import planner, table_reader
from phalanx.runtime.checkpoint.failures import WriteFailure
from phalanx.runtime.checkpoint.folder import file_entry
from phalanx.runtime.checkpoint.planner import SavedShare, write_table
from phalanx.runtime.checkpoint.table import BoxTable, SavedBox, SavedTensor, decode, encode, joined
from phalanx.runtime.checkpoint.table_reader import TABLE_FILE, read_table
from phalanx.runtime.state.boxes import BoxTensor

pytestmark = pytest.mark.unit
BOX = SavedBox(SavedTensor("a", "float32", (4,)), (0,), (4,), "__0_0.distcp", 0, 10)


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, call: Any, *words: Any) -> None:
        self.call, self.words = call, words

    def __reduce__(self) -> Any:
        return self.call, self.words


def table(folder: Path, **changed: Any) -> Metadata:
    """As torch writes one."""
    write_table(folder, [SavedShare.of([BOX], {})])
    found: Metadata = pickle.loads((folder / TABLE_FILE).read_bytes())
    for name, value in changed.items():
        setattr(found, name, value)
    (folder / TABLE_FILE).write_bytes(pickle.dumps(found))
    return found


def drawn(seed: int) -> BoxTable:
    """Tensors of several types, dims and ranks, in rows over files; with numbers of more than 32 bits, and names of other letters."""
    draw = random.Random(seed)
    shapes = [(), (6,), (4, 3), (2, 3, 5), (1 << 40, 2), (1 << 31,), (8, 1, 1, 7)]
    boxes = []
    for i, shape in enumerate(draw.sample(shapes, draw.randint(1, len(shapes)))):
        tensor = SavedTensor(
            f"w\u00e9/{i}" * draw.choice([1, 100]), draw.choice(["float32", "bfloat16", "int64"]), shape
        )
        cuts = sorted({0, *draw.sample(range(shape[0]), min(3, shape[0]))} | {shape[0]}) if shape else []
        spans = [((a, *[0] * len(shape[1:])), (b - a, *shape[1:])) for a, b in pairwise(cuts)] if shape else [((), ())]
        boxes += [
            SavedBox(tensor, offsets, sizes, f"__{draw.randint(0, 300)}_0.distcp", draw.choice([0, 9, 1 << 40]), 10)
            for offsets, sizes in spans
        ]
    draw.shuffle(boxes)
    return BoxTable.of(boxes).sorted()


def said(table: BoxTable) -> set[tuple[object, ...]]:
    rows = table.rows.tolist()
    return {(table.tensors[tensor], table.files[file], *rest) for tensor, file, *rest in rows}


@pytest.mark.parametrize("seed", range(30))
def test_what_we_write_is_read_by_us_step_by_step_and_by_torch(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drawn(seed)
    whole.check()
    (tmp_path / TABLE_FILE).write_bytes(data := encode(whole))
    pickletools.dis(data, out=io.StringIO())  # raises for one that is not whole
    by_torch = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata()
    steps = table_reader._step_by_step(data)
    with monkeypatch.context() as patch:
        patch.setattr(table_reader, "_step_by_step", None)  # of 4,096 ranks it takes 50 s
        assert said(read_table(tmp_path)) == said(steps) == said(whole)
    assert by_torch.planner_data is None and by_torch.version == "1.0.0"
    (tmp_path / TABLE_FILE).write_bytes(pickle.dumps(by_torch))  # as earlier versions wrote it
    assert decode(pickle.dumps(by_torch)) is None and said(read_table(tmp_path)) == said(whole)
    with monkeypatch.context() as patch:  # and wrote it under Python 3.11.2, Debian 12's
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: (getattr, (type(one), one.name)))
        (tmp_path / TABLE_FILE).write_bytes(old := pickle.dumps(by_torch))
    assert b"getattr" in old and said(read_table(tmp_path)) == said(whole)


@pytest.mark.parametrize("words", [(_MEM_FORMAT_ENCODING, "mro"), (str, "join"), (_MEM_FORMAT_ENCODING, 0)])
def test_a_table_asks_for_memory_formats_alone(tmp_path: Path, words: tuple[Any, ...]) -> None:
    class Stranger:
        def __reduce__(self) -> Any:
            return getattr, words

    (tmp_path / TABLE_FILE).write_bytes(pickle.dumps(Stranger()))
    with pytest.raises(CheckpointError, match=r"memory format has no name|names builtins.str"):
        read_table(tmp_path)


def test_a_table_with_a_changed_byte_is_read_as_torch_reads_it_or_not() -> None:
    data = encode(
        BoxTable.of([BOX, BOX._replace(tensor=SavedTensor("b", "float32", (2, 6)), offsets=(1, 0), sizes=(1, 5))])
    )
    taken = 0
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if (found := decode(changed)) is not None:
            taken += 1
            with contextlib.suppress(ValueError):  # it points outside of itself
                found.check()
                assert said(found) == said(table_reader._step_by_step(changed))
    assert 0 < taken < len(data) / 4  # its numbers alone


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        (0, 1, "no tensor"), (1, 1, "in no file"), (1, -1, "in no file"), (2, -1, "outside of a"), (3, -1, "outside of a"),
        (4, 3, "outside of a"), (4, -1, "outside of a"), (5, 5, "outside of a"), (5, (1 << 63) - 1, "outside of a"),
    ],
)  # fmt: skip
def test_numbers_that_point_outside_of_a_table_are_refused(column: int, value: int, rule: str) -> None:
    whole = BoxTable.of([BOX])
    whole.rows[0, column] = value
    with pytest.raises(ValueError, match=rule):
        whole.check()


@pytest.mark.parametrize(
    "tensor",
    [SavedTensor("a", "load", (4,)), SavedTensor("a", "float32\n", (4,)), SavedTensor("a", "float32", (1 << 31, 1 << 31)), SavedTensor("a", "float32", (1,) * 65)],
)  # fmt: skip
def test_a_tensor_that_none_can_be_is_refused(tensor: SavedTensor, tmp_path: Path) -> None:
    shape = tensor.shape
    (tmp_path / TABLE_FILE).write_bytes(encode(BoxTable.of([BOX._replace(tensor=tensor, offsets=(0,) * len(shape), sizes=shape)])))  # fmt: skip
    with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
        read_table(tmp_path)


def test_a_table_that_says_that_it_has_many_boxes_gets_no_room_for_them() -> None:
    data = encode(BoxTable.of([BOX]))
    many = data.replace(b'"boxes":[1]', b'"boxes":[9]')
    assert many != data and decode(many) is None
    longer = data.replace(b'"boxes":[1]', b'"boxes":[1000000000000000]')
    size = data.index(b"X", data.index(b"planner_data") + 12) + 1
    told = int.from_bytes(data[size : size + 4], "little") + 15
    assert decode(longer[:size] + told.to_bytes(4, "little") + longer[size + 4 :]) is None


def test_a_table_that_ends_behind_what_it_says_of_its_tensors_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [0], planner.BoxTable.rows_of

    def counted(table: BoxTable, number: int) -> Any:
        made[0] += 1
        return real(table, number)

    shapes = [(1,) * dims for dims in range(50)]
    data = encode(BoxTable.of([BOX._replace(tensor=SavedTensor(f"w{len(s)}", "float32", s), offsets=(0,) * len(s), sizes=s) for s in shapes]))  # fmt: skip
    monkeypatch.setattr(BoxTable, "rows_of", counted)
    assert decode(data) is not None and made[0] == 100
    made[0], begin = 0, data.index(b"state_dict_metadata")
    assert decode(data[:begin] + b"." * (len(data) - begin)) is None and made[0] == 0


def test_ranks_that_disagree_about_a_tensor_are_told_all_at_once() -> None:
    """And those that agree are joined, whatever dims the tensors of each have."""
    flat, square = (SavedTensor(name, "float32", shape) for name, shape in (("b", (2, 2)), ("c", (4,))))
    mine = BoxTable.of([BOX, BOX._replace(tensor=flat, offsets=(0, 0), sizes=(1, 2))])
    theirs = BoxTable.of([BOX._replace(tensor=flat, offsets=(1, 0), sizes=(1, 2), file="__1_0.distcp")])
    assert said(joined([mine, theirs])) == said(mine) | said(theirs)
    other = BoxTable.of([BOX._replace(tensor=SavedTensor(n, "int64", (4,))) for n in "abc"])
    with pytest.raises(CheckpointError, match="other ranks have") as info:
        joined([mine, BoxTable.of([BOX._replace(tensor=square)]), other])
    assert [p.where for p in info.value.problems] == ["a", "b", "c"]


def cut_up(draw: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Box]:
    """Boxes that fill the box at `offsets`, cut at random."""
    if draw.random() < 0.3 or max(sizes) < 2:
        return [Box(offsets, sizes)]
    dim = draw.choice([d for d, size in enumerate(sizes) if size > 1])
    at = draw.randint(1, sizes[dim] - 1)
    first, rest, behind = ([*numbers] for numbers in (sizes, sizes, offsets))
    first[dim], rest[dim], behind[dim] = at, sizes[dim] - at, offsets[dim] + at
    return cut_up(draw, offsets, tuple(first)) + cut_up(draw, tuple(behind), tuple(rest))


def shifted(draw: random.Random, box: Box, shape: tuple[int, ...]) -> Box:
    """A box of the same size somewhere in the shape."""
    offsets = (draw.randint(0, most - size) for most, size in zip(shape, box.sizes, strict=True))
    return Box(tuple(offsets), box.sizes)


def test_boxes_are_refused_unless_each_element_is_in_one() -> None:
    """Also where one is in two and another in none, so that their number is right."""
    draw, wrong = random.Random(0), 0
    for _ in range(300):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        boxes = cut_up(draw, (0,) * len(shape), shape)
        for _ in range(draw.choice([0, 1, 2])):
            i = draw.randrange(len(boxes))
            boxes[i] = draw.choice([shifted(draw, boxes[i], shape), draw.choice(boxes)])
        times = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            times[box.slices()] += 1
        tensor = SavedTensor("w", "float32", shape)
        saved = [SavedBox(tensor, box.offsets, box.sizes, "__0_0.distcp", 0, 10) for box in boxes]
        assert bool(planner.coverage_problems(BoxTable.of(saved))) == bool((times != 1).any()), boxes
        wrong += sum(box.num_elements for box in boxes) == times.numel() and bool((times != 1).any())
    assert wrong > 30


def test_of_thousands_of_tensors_some_are_named_and_the_others_counted(tmp_path: Path) -> None:
    halves = [BOX._replace(tensor=SavedTensor(f"w{i}", "float32", (8,))) for i in range(3000)]
    with pytest.raises(CheckpointError, match="its 1 boxes hold 4 of 8 elements") as info:
        write_table(tmp_path, [SavedShare.of(halves, {})])
    assert len(info.value.problems) == 51 and "2950 more: are not shown" in str(info.value)
    write_table(tmp_path, [SavedShare.of([box._replace(sizes=(8,)) for box in halves], {})])
    wanted = [BoxTensor(f"x{i}", (1,), Box((0,), (1,)), torch.zeros(1), True) for i in range(3000)]
    with pytest.raises(CheckpointError) as info:
        planner.CheckpointReader(tmp_path).fill(wanted, names={box.name for box in wanted})
    assert str(info.value).count("2950 more: are not shown") == 2
    assert "x0 = (1,): is not in the checkpoint" in str(info.value)
    assert "w0 = (8,): this model has no such tensor" in str(info.value)


@pytest.mark.parametrize(
    ("found", "rule"), [(torch.zeros(5), r"\(5,\) of"), (torch.zeros(4).bfloat16(), "of torch.bfloat16")]
)
def test_a_file_with_another_tensor_than_its_table_says_is_refused(
    found: torch.Tensor, rule: str, tmp_path: Path
) -> None:
    torch.save(found, tmp_path / "__0_0.distcp")
    length = (tmp_path / "__0_0.distcp").stat().st_size
    write_table(tmp_path, [SavedShare.of([BOX._replace(length=length)], {})])
    box = BoxTensor("a", (4,), Box((0,), (4,)), torch.zeros(4), True)
    with pytest.raises(ValueError, match=rf"a: .*{rule}.* is saved, and \(4,\) of torch.float32 is told"):
        planner.CheckpointReader(tmp_path).fill([box])


def test_a_table_of_the_same_size_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    reader = planner.CheckpointReader(tmp_path)
    for name in "ab":
        write_table(tmp_path, [SavedShare.of([BOX._replace(tensor=SavedTensor(name, "float32", (4,)))], {})])
        assert [tensor.name for tensor in reader.table().tensors] == [name]


def test_saved_boxes_are_read_in_the_order_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"a": ("__1_0.distcp", 0, 10), "b": ("__0_0.distcp", 20, 10), "c": ("__0_0.distcp", 0, 10)}
    saved = [SavedBox(SavedTensor(name, "float32", (4,)), (0,), (4,), *place) for name, place in places.items()]
    write_table(tmp_path, [SavedShare.of(saved, {})])
    read: list[tuple[str, int, int]] = []
    monkeypatch.setattr(planner.CheckpointReader, "_read", lambda self, place, parts: read.append(place))
    boxes = [BoxTensor(name, (4,), Box((0,), (4,)), torch.zeros(4), True) for name in places]
    planner.CheckpointReader(tmp_path).fill(boxes)
    assert read == sorted(places.values())


def test_parts_are_handed_out_as_they_and_those_before_may_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], list[float]()

    class Hurry(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            now[0] += waits[-1]
            return False

    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    boxes = [BoxTensor(name, (4,), Box((0,), (4,)), torch.zeros(4), True) for name in "abcd"]  # of 16 bytes
    planned = planner.BoxSavePlanner(boxes, bytes_per_s=16.0, hurry=Hurry())
    for item, written_s in zip(planned.create_local_plan().items, (0.25, 0.25, 1.5, 0.0), strict=True):
        planned.resolve_data(item)
        now[0] += written_s
    assert waits == [1.0, 0.75, 0.75, 0.0]  # a file that is slower than the limit is not slowed further


def test_a_save_that_was_abandoned_hands_out_nothing_and_boxes_of_others_are_never_its() -> None:
    boxes = [BoxTensor(name, (n,), Box((0,), (n,)), torch.zeros(n), mine) for name, n, mine in (("a", 4, True), ("b", 0, True), ("c", 4, False))]  # fmt: skip
    over = threading.Event()
    planned = planner.BoxSavePlanner(boxes, over=over)
    assert [part.name for part in planned.parts] == ["a"]
    (item,) = planned.create_local_plan().items
    assert planned.resolve_data(item).shape == (4,)
    over.set()
    with pytest.raises(WriteFailure, match="the save was abandoned"):
        planned.resolve_data(item)


def test_a_box_outside_of_its_tensor_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has a box outside of a"):
        write_table(tmp_path, [SavedShare.of([BOX._replace(sizes=(5,))], {})])
    assert not (tmp_path / TABLE_FILE).exists()


def test_a_table_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of too many ranks: the run would not go on from its checkpoint."""
    monkeypatch.setattr(planner, "TABLE_BYTES", 100)
    with pytest.raises(CheckpointError, match="there are too many boxes"):
        table(tmp_path)


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, "touch executed"), Evil(builtins.eval, "open('executed', 'w')"), Evil(builtins.exec, "open('executed', 'w')"), Evil(Path.touch, Path("executed")),
        Evil(torch.load, "executed"), Evil(torch.hub.load, "a/b", "c"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_data", "storage_meta"])
def test_nothing_is_executed(evil: Evil, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "whole":
        (tmp_path / TABLE_FILE).write_bytes(pickle.dumps(evil))
    else:
        table(tmp_path, **{place: evil})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"\.metadata: is no table of contents of a checkpoint: it names "):
        read_table(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "a/b", "..", "", "link"])
def test_no_file_outside_of_its_folder_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    found = table(tmp_path)
    (index,) = found.storage_data
    table(tmp_path, storage_data={index: _StorageInfo(name, 0, 10)})
    with pytest.raises(CheckpointError, match="which is not one of its folder"):
        read_table(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x05.", pickle.dumps(3), pickle.dumps({"a": 1}), b"(" * 100_000])
def test_what_is_no_table_is_a_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / TABLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
        read_table(tmp_path)
    (tmp_path / TABLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_table(tmp_path)


def bomb(name: str, first: bytes, double: bytes) -> bytes:
    """A pickle whose value doubles at each of 60 steps."""
    module, word = name.rsplit(".", 1)
    start = b"\x80\x02c" + f"{module}\n{word}\n".encode() + b"q\x00" + first + b"q\x01"
    return start + double * 60 + b"."


@pytest.mark.parametrize(
    "data",
    [
        bomb("pathlib.PurePosixPath", b"h\x00X\x01\x00\x00\x00a\x85R", b"h\x00h\x01h\x01\x86Rq\x01"),
        bomb("torch.Size", b"K\x01\x85", b"h\x01h\x01\x86q\x01") [:-1] + b"}h\x01Ns.",  # a key that takes 2^60 steps to hash
        bomb("torch.Size", b"(" + b"K\x01" * 65 + b"t", b"")[:-1] + b"h\x00h\x01\x85R.",  # the same numbers again and again
        bomb("torch.Size", b"}", b"")[:-1] + b"h\x00h\x01b.",  # a class of torch is changed
        bomb("torch.distributed.checkpoint.metadata.Metadata", b"}X\x04\x00\x00\x00evilNs", b"")[:-1] + b"h\x00h\x01b.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of 1 TB
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a place in memory far away
        b"\x80\x02]q\x00h\x00a.",  # a list of itself
    ],
    ids=["path", "key", "size", "function", "class", "bytearray", "far", "itself"],
)  # fmt: skip
def test_a_short_table_takes_little_time_and_memory(data: bytes, tmp_path: Path) -> None:
    (tmp_path / TABLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
        read_table(tmp_path)
    assert not hasattr(Metadata, "evil")


def test_names_and_sizes_of_another_type_are_refused(tmp_path: Path) -> None:
    """A nested tuple in the place of a size would make a message of any length."""
    for change in ({"size": ((4,), (4,))}, {"chunks": None}, {"properties": 3}):
        entry = table(tmp_path).state_dict_metadata["a"]
        vars(entry).update(change)
        table(tmp_path, state_dict_metadata={"a": entry})
        with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
            read_table(tmp_path)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TABLE_FILE)
    with pytest.raises(CheckpointError, match="cannot be read: not a regular file"):
        read_table(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        file_entry(tmp_path / TABLE_FILE)

"""Boxes to `torch.distributed.checkpoint` and back: what each rank writes, and which saved chunks a rank's boxes are read from.

A checkpoint holds logical tensors only: each saved item is a box of one, written by its `primary` holder, so that the bytes on
disk are each logical element once and no mapping is remembered. Loading asks for any other boxes of the same tensors. Nothing is
converted on the way, so that every value comes back bit for bit.

A box is written in parts of at most `PART_BYTES`, one after the other, and each part is read whole: so neither a writer that fills boxes as it goes nor a
reader needs memory for a whole tensor.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from phalanx.core.errors import CheckpointError, Problem, few, first_line, raise_if
from phalanx.core.messages import message
from phalanx.core.reading import parse_json, typed
from phalanx.plan.layout import Box
from phalanx.runtime.checkpoint.failures import WriteFailure, write_failure
from phalanx.runtime.checkpoint.folder import FileEntry, file_entry, write_flushed
from phalanx.runtime.checkpoint.table import DIMS, BoxTable, Rows, SavedBox, SavedTensor, encode, filled, joined
from phalanx.runtime.checkpoint.table_reader import TABLE_BYTES, TABLE_FILE, read_table
from phalanx.runtime.state import BoxTensor

PART_BYTES = 64 << 20
"""Most that is written as one item. A checkpoint of 235B parameters has 57,000 of them."""


@message
@dataclass(frozen=True, kw_only=True)
class SavedShare:
    """What one rank wrote of a checkpoint; crosses the process group."""

    tensors: tuple[str, ...]
    """As JSON: the first rank gets 120 from each, and reads each text once."""
    names: tuple[str, ...]
    """Of the files with boxes."""
    rows: np.ndarray[Any, Any]
    """As in `BoxTable`."""
    files: Mapping[str, FileEntry]

    @classmethod
    def of(cls, boxes: Iterable[SavedBox], files: Mapping[str, FileEntry]) -> SavedShare:
        table = BoxTable.of(boxes)
        texts = tuple(json.dumps(astuple(tensor)) for tensor in table.tensors)
        return cls(tensors=texts, names=table.files, rows=table.rows, files=files)

    def table(self) -> BoxTable:
        """Raises `MalformedError`."""
        return BoxTable(tensors=tuple(map(_read_tensor, self.tensors)), files=self.names, rows=self.rows)


@lru_cache(maxsize=1 << 16)
def _read_tensor(text: str) -> SavedTensor:
    said = typed(parse_json(text, where="a tensor"), tuple[str, str, tuple[int, ...]], where="a tensor")
    return SavedTensor(*said)


def write_boxes(
    boxes: Sequence[BoxTensor],
    path: Path,
    *,
    rank: int,
    fill: Callable[[Sequence[BoxTensor]], None] | None = None,
    bytes_per_s: float = math.inf,
    over: threading.Event | None = None,
    hurry: threading.Event | None = None,
) -> SavedShare:
    """Write the primary boxes of this rank to the folder `path`, at no more than `bytes_per_s` until `hurry` is set (somebody waits), by itself. Where there is a `fill`,
    the tensors of `boxes` say shape and type alone (device "meta"), and it fills each part just before it is written. Raises what it raises, and `WriteFailure`, also
    where `over` is set (the save was abandoned; `hurry` is set as well)."""
    _quiet()
    planner = BoxSavePlanner(boxes, fill=fill, bytes_per_s=bytes_per_s, over=over, hurry=hurry)
    writer = BoxWriter(path)
    plan = planner.create_local_plan()
    named = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    results = writer.write_data(named, planner).wait()
    try:
        files = {name: file_entry(path / name) for name in sorted({r.storage_data.relative_path for r in results})}
    except OSError as err:
        raise write_failure(err, path) from None
    places = {r.index: r.storage_data for r in results}
    return SavedShare.of((_saved(part, places[_index(part)]) for part in planner.parts), files)


def _saved(box: BoxTensor, place: _StorageInfo) -> SavedBox:
    tensor = SavedTensor(box.name, str(box.tensor.dtype).removeprefix("torch."), tuple(box.shape))
    return SavedBox(tensor, box.box.offsets, box.box.sizes, place.relative_path, place.offset, place.length)


def write_table(path: Path, shares: Sequence[SavedShare]) -> dict[str, FileEntry]:
    """What is where in the files that all ranks wrote; the entry of its own file. By one rank. Raises `CheckpointError` where the shares are not each element once."""
    try:
        table = joined([share.table() for share in shares])
        table.check()
    except ValueError as err:
        problem = Problem(where=TABLE_FILE, value=None, rule=f"cannot be written: {first_line(err)}")
        raise CheckpointError([problem], subject="the boxes to be saved") from err
    raise_if(coverage_problems(table), CheckpointError, subject="the boxes to be saved")
    data = encode(table)
    if len(data) > TABLE_BYTES:
        rule = (
            f"has {len(data) >> 20} MiB, and at most {TABLE_BYTES >> 20} MiB are read again: there are too many boxes"
        )
        problem = Problem(where=TABLE_FILE, value=len(table.rows), rule=rule, hint="use fewer ranks")
        raise CheckpointError([problem], subject="the boxes to be saved")
    write_flushed(path / TABLE_FILE, data)
    return {TABLE_FILE: file_entry(path / TABLE_FILE)}


def coverage_problems(table: BoxTable) -> list[Problem]:
    """Tensors whose boxes are not each element exactly once (a lost or doubled `primary`). The table is `sorted`."""
    problems = []
    for i, (tensor, shape) in enumerate(zip(table.tensors, table.shapes, strict=True)):
        rows, dims = table.rows_of(i), table.dims
        offsets, sizes = rows[:, DIMS : DIMS + dims], rows[:, DIMS + dims :]
        held, whole = int(sizes.prod(axis=1).sum()), math.prod(tensor.shape)
        if held == whole and (whole == 0 or _fill(offsets, sizes, shape)):
            continue
        twice = ", some twice" if held >= whole else ""
        rule = f"its {len(rows)} boxes hold {held} of {whole} elements{twice}"
        problems.append(Problem(where=tensor.name, value=tensor.shape, rule=rule))
    return few(problems)


def _fill(offsets: Rows, sizes: Rows, shape: Rows) -> bool:
    """Whether boxes fill a shape, overlapping nowhere. Signed by parity, the corners of all of them are then those of the shape, and the others cancel out: this is the mixed derivative
    of the number of boxes that an element is in, which says that number of each."""
    cut = (sizes != shape).any(axis=0)
    cut[0] = True  # where no dim is cut there is one box
    low = np.vstack([offsets[:, cut], np.zeros_like(shape[cut])])
    high = low + np.vstack([sizes[:, cut], shape[cut]])
    picks = list(product((False, True), repeat=int(cut.sum())))
    corners = np.vstack([np.where(pick, high, low) for pick in picks])
    signs = np.concatenate([[(-1.0) ** sum(pick)] * len(sizes) + [-((-1.0) ** sum(pick))] for pick in picks])
    order = np.lexsort(corners.T)
    corners = corners[order]
    first = np.concatenate([[True], (corners[1:] != corners[:-1]).any(axis=1)])
    return not np.add.reduceat(signs[order], np.flatnonzero(first)).any()


def _quiet() -> None:
    """No warning from torch that one process saves or loads alone, which is what we mean. (Scoped filters are not thread-safe.)"""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _chunk(box: BoxTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.box.offsets), sizes=torch.Size(box.box.sizes))


def _index(box: BoxTensor) -> MetadataIndex:
    return MetadataIndex(box.name, torch.Size(box.box.offsets))


def parts_of(box: BoxTensor) -> Iterator[BoxTensor]:
    """`box` in parts of at most `PART_BYTES` in order, each contiguous: cut along dim 0, and along the next one within a row that is larger by itself."""
    sizes, most = box.box.sizes, max(1, PART_BYTES // box.tensor.itemsize)
    if box.box.num_elements <= most:
        yield box
        return
    dim = next(d for d in range(len(sizes)) if math.prod(sizes[d + 1 :]) <= most)
    rows = most // math.prod(sizes[dim + 1 :])
    for *outer, start in product(*map(range, sizes[:dim]), range(0, sizes[dim], rows)):
        part = Box(
            (*outer, start, *(0 for _ in sizes[dim + 1 :])),
            (*(1 for _ in outer), min(rows, sizes[dim] - start), *sizes[dim + 1 :]),
        )
        yield replace(box, box=part.shifted(box.box.offsets), tensor=box.tensor[part.slices()])


class BoxSavePlanner(SavePlanner):
    """Writes the primary boxes of this rank in parts; `write_table` joins those of all ranks into one table of logical tensors.

    With a limit of bytes per second a part is handed out when it and those before it may have been written: never more than the limit on average since the first, one part at once.
    What is handed out and has memory of its own loses it when the next part is asked for, for torch keeps the last one of each name until the file is complete.
    """

    def __init__(
        self,
        boxes: Sequence[BoxTensor],
        *,
        fill: Callable[[Sequence[BoxTensor]], None] | None = None,
        bytes_per_s: float = math.inf,
        over: threading.Event | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        self.parts = [part for b in boxes if b.primary and b.box.num_elements for part in parts_of(b)]
        self._by_index = {_index(part): part for part in self.parts}
        self._fill, self._made = fill, torch.empty(0)
        self._bytes_per_s, self._begin_s, self._handed = bytes_per_s, 0.0, 0
        self._over, self._hurry = over or threading.Event(), hurry or threading.Event()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the boxes came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(part) for part in self.parts])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise TypeError("ranks agree by `write_table`, and not by a planner")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        self._made.untyped_storage().resize_(0)
        part = self._by_index[write_item.index]
        if not self._handed:
            self._begin_s = time.monotonic()
        self._handed += part.tensor.nbytes
        self._hurry.wait(max(0.0, self._begin_s + self._handed / self._bytes_per_s - time.monotonic()))
        if self._over.is_set():
            raise WriteFailure(write_item.index.fqn, "the save was abandoned")
        if self._fill is None and part.tensor.is_cpu:
            return _in_own_storage(part.tensor)
        if self._fill is None:
            self._made = part.tensor.detach().cpu()  # SYNC: nothing runs beside such a save
        else:
            self._made = torch.empty_like(part.tensor, device="cpu")
            self._fill([replace(part, tensor=self._made)])
        return self._made


def _in_own_storage(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is no larger: torch would copy a part of a larger one."""
    x = x.detach().contiguous()
    start = x.storage_offset() * x.itemsize
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()[start : start + x.nbytes]).view(x.shape)


def _write_item(box: BoxTensor) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(box), properties=TensorProperties(dtype=box.tensor.dtype), size=torch.Size(box.shape)
    )
    return WriteItem(index=_index(box), type=WriteItemType.SHARD, tensor_data=data)


class CheckpointReader:
    """Reads the boxes of a checkpoint of a stranger from whatever boxes were saved: nothing in its files is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: tuple[object, BoxTable] | None = None
        """Table of contents that was read, and what tells its file from others."""

    def table(self) -> BoxTable:
        """Read anew where the file is another one: a sync reads parts of one checkpoint thousands of times."""
        file = _identity(self.path / TABLE_FILE)
        if self._kept is None or self._kept[0] != file:
            self._kept = file, read_table(self.path)
        return self._kept[1]

    def largest_box(self, names: Collection[str]) -> int:
        """Bytes of the largest saved box of these tensors."""
        table = self.table()
        numbers = [i for name in names if (i := table.numbers.get(name)) is not None]
        return max((_most_elements(table, i) * table.tensors[i].torch_dtype.itemsize for i in numbers), default=0)

    def fill(self, boxes: Sequence[BoxTensor], *, names: Collection[str] | None = None) -> None:
        """Fill `boxes` in place. `names` are the tensors that all ranks together ask for; the checkpoint must hold no others. None: it may (generation leaves the moments on the disk).

        Each saved box is read once, in the order of the files, whatever parts of it are wanted: of a layer's experts each may be one. Raises `CheckpointError`, and what reading a damaged file raises."""
        table, wanted = self.table(), dict[str, list[BoxTensor]]()
        for box in boxes:
            if box.box.num_elements:
                wanted.setdefault(box.name, []).append(box)
        raise_if(_misfits(table, wanted, names), CheckpointError, subject="tensors of the checkpoint")
        places: dict[tuple[str, int, int], list[_Part]] = {}
        for name, targets in wanted.items():
            rows = table.rows_of(table.numbers[name])
            found = list(_parts(rows, [b.box for b in targets]))
            if sum(math.prod(part.sizes) for *_, part in found) != sum(b.box.num_elements for b in targets):
                rule = "the saved chunks do not cover the boxes of this rank"
                raise CheckpointError.of(name, len(found), rule, subject="checkpoint")
            for row, i, part in found:
                _, file, at, length, *_ = rows[row].tolist()
                saved = _box_of(rows[row], len(part.sizes))
                places.setdefault((table.files[file], at, length), []).append(_Part(targets[i], saved, part))
        for place, parts in sorted(places.items(), key=lambda found: found[0]):
            self._read(place, parts)  # which is gone before the next one is read

    def _read(self, place: tuple[str, int, int], parts: Sequence[_Part]) -> None:
        name, at, length = place
        with open(self.path / name, "rb") as file:
            found = torch.load(
                cast(IO[bytes], _create_file_view(file, at, length)), map_location="cpu", weights_only=True
            )
        for target, saved, part in parts:
            if (found.shape, found.dtype) != (saved.sizes, target.tensor.dtype):
                rule = f"{tuple(found.shape)} of {found.dtype} is saved, and {saved.sizes} of {target.tensor.dtype} is told"
                raise ValueError(f"{target.name}: {rule}")
            there, here = (part.shifted([-o for o in of.offsets]).slices() for of in (saved, target.box))
            target.tensor.detach()[here].copy_(found[there])


class _Part(NamedTuple):
    """What a box of this rank has from a saved one."""

    target: BoxTensor
    saved: Box
    both: Box


def _most_elements(table: BoxTable, number: int) -> int:
    return int(table.rows_of(number)[:, DIMS + table.dims :].prod(axis=1).max(initial=0))


def _parts(rows: Rows, boxes: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """(row, number of the box, what both have) of the saved boxes of a tensor. Those that a box may meet are found by their places along dim 0: of a layer's experts there may be
    hundreds, and as many boxes."""
    dims = (rows.shape[1] - DIMS) // 2
    offsets, ends = rows[:, DIMS : DIMS + dims], rows[:, DIMS : DIMS + dims] + rows[:, DIMS + dims :]
    order = np.argsort(offsets[:, 0], kind="stable")
    starts, reached = offsets[order, 0], np.maximum.accumulate(ends[order, 0])
    for i, box in enumerate(boxes):
        start = np.array(filled(box.offsets, dims, 0), np.int64)
        end = start + filled(box.sizes, dims, 1)
        near = order[np.searchsorted(reached, start[0], "right") : np.searchsorted(starts, end[0])]
        for row, low, size in _shared(near, offsets[near], ends[near], start, end):
            yield row, i, Box(tuple(low[: len(box.sizes)]), tuple(size[: len(box.sizes)]))


def _shared(
    near: Rows, offsets: Rows, ends: Rows, start: Rows, end: Rows
) -> Iterator[tuple[int, list[int], list[int]]]:
    """(row, offsets, sizes) of what each of the rows `near` has of the box from `start` to `end`, if anything."""
    low, size = np.maximum(offsets, start), np.minimum(ends, end) - np.maximum(offsets, start)
    met = (size > 0).all(axis=1)
    yield from zip(near[met].tolist(), low[met].tolist(), size[met].tolist(), strict=True)


def _box_of(row: Rows, dims: int) -> Box:
    at = (len(row) + DIMS) // 2
    return Box(tuple(row[DIMS : DIMS + dims].tolist()), tuple(row[at : at + dims].tolist()))


def _misfits(
    table: BoxTable, wanted: Mapping[str, Sequence[BoxTensor]], names: Collection[str] | None
) -> list[Problem]:
    saved = {tensor.name: tensor for tensor in table.tensors}
    out = [_misfit(boxes[0], saved.get(name)) for name, boxes in wanted.items()]
    extra = [] if names is None else sorted(saved.keys() - set(names))
    unknown = [Problem(where=n, value=saved[n].shape, rule="this model has no such tensor") for n in extra]
    return few([p for p in out if p is not None]) + few(unknown) + _other_types(saved, wanted)


def _other_types(saved: Mapping[str, SavedTensor], wanted: Mapping[str, Sequence[BoxTensor]]) -> list[Problem]:
    """A problem for each setting that gives tensors another type than the checkpoint has, not for each tensor."""
    alike: dict[tuple[str, torch.dtype, torch.dtype], list[str]] = {}
    for name, (box, *_) in wanted.items():
        there, here = saved[name].torch_dtype if name in saved else box.tensor.dtype, box.tensor.dtype
        if there != here:
            is_moment = name.startswith("exp_avg") and torch.float64 not in (there, here)
            alike.setdefault(("optim.state_dtype" if is_moment else "train.dtype", there, here), []).append(name)
    problems = []
    for (where, there, here), names in alike.items():
        legal = "torch.float32 or bfloat16" if (where, there) == ("train.dtype", torch.float32) else str(there)
        rule = f"this run has {here} and the checkpoint has {there} in {len(names)} tensors, such as {names[0]}; state is never converted"
        hint = f"use {where} = {legal.removeprefix('torch.')}"
        problems.append(Problem(where=where, value=None, rule=rule, hint=hint))
    return problems


def _misfit(box: BoxTensor, saved: SavedTensor | None) -> Problem | None:
    if saved is None:
        return Problem(where=box.name, value=box.shape, rule="is not in the checkpoint")
    if saved.shape != tuple(box.shape):
        return Problem(where=box.name, value=box.shape, rule=f"the checkpoint has shape {saved.shape}")
    return None


def _identity(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None  # who reads it says why it cannot
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class BoxWriter(FileSystemWriter):
    """Writes one flushed file a rank, none where there is nothing to write, and says plainly why it cannot."""

    def __init__(self, path: Path) -> None:
        # nothing is copied ahead: for every few MB torch would wait for what the device has been given meanwhile
        super().__init__(
            path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=True, per_thread_copy_ahead=0
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not plan.items:
            done: Future[list[WriteResult]] = Future()
            done.set_result([])
            return done
        try:
            future = super().write_data(plan, planner)
            future.wait()
        except (WriteFailure, CheckpointError):
            raise
        except Exception as err:
            raise write_failure(err, Path(self.path)) from None
        return future

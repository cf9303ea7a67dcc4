"""Boxes to `torch.distributed.checkpoint` and back: what each rank writes, and which saved chunks a rank's boxes are read from.

A checkpoint holds logical tensors only: each saved item is a box of one, written by its `primary` holder, so that the bytes on
disk are each logical element once and no mapping is remembered. Loading asks for any other boxes of the same tensors. Nothing is
converted on the way, so that every value comes back bit for bit.

A box is written in parts of at most `PART_BYTES`, one after the other, and each part is read whole: so neither a writer that fills boxes as it goes nor a
reader needs memory for a whole tensor.
"""

from __future__ import annotations

import io
import math
import threading
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemWriter, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.core.errors import CheckpointError, Problem, raise_if
from phalanx.core.messages import message
from phalanx.plan.layout import Box
from phalanx.runtime.checkpoint.failures import TensorsFailed, WriteFailure, write_failure
from phalanx.runtime.checkpoint.folder import FileEntry, file_entry
from phalanx.runtime.checkpoint.table_reader import TABLE_BYTES, TABLE_FILE, read_table
from phalanx.runtime.state import BoxTensor

PART_BYTES = 64 << 20
"""Most that is written as one item. A checkpoint of 235B parameters has 57,000 of them, which take 5 s to read in its table of contents."""


@message
@dataclass(frozen=True, kw_only=True)
class SavedBox:
    """Where a box of a tensor is in a file."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    file: str
    at: int
    """Byte at which it begins."""
    length: int
    """In bytes, as torch writes a tensor."""


@message
@dataclass(frozen=True, kw_only=True)
class SavedShare:
    """What one rank wrote of a checkpoint; crosses the process group."""

    boxes: tuple[SavedBox, ...]
    files: Mapping[str, FileEntry]


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
    saved = tuple(_saved(part, places[_index(part)]) for part in planner.parts)
    return SavedShare(boxes=saved, files=files)


def _saved(box: BoxTensor, place: _StorageInfo) -> SavedBox:
    return SavedBox(
        name=box.name, offsets=tuple(box.box.offsets), sizes=tuple(box.box.sizes), shape=tuple(box.shape), dtype=str(box.tensor.dtype).removeprefix("torch."),
        file=place.relative_path, at=place.offset, length=place.length,
    )  # fmt: skip


def write_table(path: Path, shares: Sequence[SavedShare]) -> dict[str, FileEntry]:
    """What is where in the files that all ranks wrote; the entry of its own file. By one rank. Raises `CheckpointError` where the shares are not each element once."""
    table = _table([box for share in shares for box in share.boxes])
    raise_if(coverage_problems(table), CheckpointError, subject="the boxes to be saved")
    writer = BoxWriter(path)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(dict(table)), [[_result(box) for box in share.boxes] for share in shares])
    written = file_entry(path / TABLE_FILE)
    if written.bytes > TABLE_BYTES:
        rule = f"has {written.bytes >> 20} MiB, and at most {TABLE_BYTES >> 20} MiB are read again: there are too many boxes"
        problem = Problem(
            where=TABLE_FILE, value=sum(len(share.boxes) for share in shares), rule=rule, hint="use fewer ranks"
        )
        raise CheckpointError([problem], subject="the boxes to be saved")
    return {TABLE_FILE: written}


def _table(boxes: Sequence[SavedBox]) -> dict[str, TensorStorageMetadata]:
    table: dict[str, TensorStorageMetadata] = {}
    for box in boxes:
        dtype, shape = getattr(torch, box.dtype), torch.Size(box.shape)
        entry = table.setdefault(box.name, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
        if (entry.size, entry.properties.dtype) != (shape, dtype):
            raise ValueError(f"{box.name}: ranks disagree about its shape or type")
        entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)))
    return table


def _result(box: SavedBox) -> WriteResult:
    place = _StorageInfo(relative_path=box.file, offset=box.at, length=box.length)
    return WriteResult(
        index=MetadataIndex(box.name, torch.Size(box.offsets)), size_in_bytes=box.length, storage_data=place
    )


def read_boxes(boxes: Sequence[BoxTensor], reader: TrustlessReader, *, names: Collection[str] | None) -> None:
    """Fill `boxes` in place; `names` as in `BoxLoadPlanner`. Raises `TensorsFailed`."""
    _quiet()
    try:
        dcp.load({}, storage_reader=reader, planner=BoxLoadPlanner(boxes, names=names), no_dist=True)
    except CheckpointException as err:
        raise TensorsFailed({rank: cause for rank, (cause, _) in err.failures.items()}) from err


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


def coverage_problems(table: Mapping[str, TensorStorageMetadata]) -> list[Problem]:
    """Tensors whose chunks are not each element exactly once (a lost or doubled `primary`)."""
    out = []
    for name, entry in table.items():
        held, whole = sum(math.prod(c.sizes) for c in entry.chunks), math.prod(entry.size)
        doubled = len({tuple(c.offsets) for c in entry.chunks}) < len(entry.chunks)
        if held != whole or doubled:
            rule = f"its {len(entry.chunks)} boxes hold {held} of {whole} elements" + (
                ", some twice" if doubled else ""
            )
            out.append(Problem(where=name, value=tuple(entry.size), rule=rule))
    return out


class BoxLoadPlanner(LoadPlanner):
    """Fills the tensors of `boxes` in place from whatever chunks were saved.

    `names` are the tensors that all ranks together ask for; the checkpoint must hold no others. None: it may (generation leaves the
    moments on the disk).
    """

    def __init__(self, boxes: Sequence[BoxTensor], *, names: Collection[str] | None = None) -> None:
        self._names = names
        self._wanted: dict[str, list[BoxTensor]] = {}
        self._metadata: Metadata | None = None
        for box in boxes:
            if box.box.num_elements:
                self._wanted.setdefault(box.name, []).append(box)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        if self._metadata is None:
            raise ValueError("a load plan needs the checkpoint's metadata")
        saved = self._metadata.state_dict_metadata
        raise_if(self._problems(saved), CheckpointError, subject="tensors of the checkpoint")
        items: list[ReadItem] = []
        for name, boxes in self._wanted.items():
            entry = saved[name]
            if not isinstance(entry, TensorStorageMetadata):
                continue  # reported above
            found = _read_items(name, entry, [b.box for b in boxes])
            if sum(math.prod(i.lengths) for i in found) != sum(b.box.num_elements for b in boxes):
                rule = "the saved chunks do not cover the boxes of this rank"
                raise CheckpointError([Problem(where=name, value=len(found), rule=rule)], subject="checkpoint")
            items += found
        return LoadPlan(items)

    def _problems(self, saved: Mapping[str, Any]) -> list[Problem]:
        out = [_fit(boxes[0], saved.get(name)) for name, boxes in self._wanted.items()]
        extra = [] if self._names is None else sorted(saved.keys() - set(self._names))
        unknown = [Problem(where=n, value=tuple(saved[n].size), rule="this model has no such tensor") for n in extra]
        return [p for p in out if p is not None] + unknown

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.storage_index.fqn}: checkpoints of boxes hold no bytes")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        if index.index is None:
            raise ValueError(f"{index.fqn}: a read item must say which box it fills")
        tensor = self._wanted[index.fqn][index.index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave a view of the destination."""


def _read_items(name: str, entry: TensorStorageMetadata, boxes: Sequence[Box]) -> list[ReadItem]:
    """What to read of the saved chunks for each of `boxes`. Those that a box may meet are found by their places along dim 0: of a layer's experts there may be
    hundreds of chunks, and as many boxes."""
    chunks = sorted((Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks), key=lambda c: c.offsets)
    spans = [_span(c) for c in chunks]
    starts, reached = [start for start, _ in spans], list(accumulate((stop for _, stop in spans), max))
    items = []
    for i, box in enumerate(boxes):
        start, stop = _span(box)
        for chunk in chunks[bisect_right(reached, start) : bisect_left(starts, stop)]:
            shared = chunk.intersection(box)
            if shared is None:
                continue
            there, here = (shared.shifted([-o for o in of.offsets]).offsets for of in (chunk, box))
            item = ReadItem(
                type=LoadItemType.TENSOR, lengths=torch.Size(shared.sizes),
                storage_index=MetadataIndex(name, torch.Size(chunk.offsets)), storage_offsets=torch.Size(there),
                dest_index=MetadataIndex(name, torch.Size(box.offsets), i), dest_offsets=torch.Size(here),
            )  # fmt: skip
            items.append(item)
    return items


def _span(box: Box) -> tuple[int, int]:
    """Its rows."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _fit(box: BoxTensor, entry: Any) -> Problem | None:
    if not isinstance(entry, TensorStorageMetadata):
        return Problem(where=box.name, value=box.shape, rule="is not in the checkpoint")
    if tuple(entry.size) != box.shape:
        return Problem(where=box.name, value=box.shape, rule=f"the checkpoint has shape {tuple(entry.size)}")
    if entry.properties.dtype != box.tensor.dtype:
        rule = f"the checkpoint has {entry.properties.dtype}; state is never converted"
        return Problem(
            where=box.name,
            value=str(box.tensor.dtype),
            rule=rule,
            hint="use the train.dtype and optim.state_dtype it was saved with",
        )
    return None


class TrustlessReader(dcp.FileSystemReader):
    """Reads checkpoints of strangers: nothing in their files is executed."""

    _kept: tuple[object, Metadata] | None = None
    """Table of contents that was read, and what tells its file from others."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read anew where the file is another one: a sync reads parts of one checkpoint thousands of times."""
        file = _identity(Path(self.path) / TABLE_FILE)
        if self._kept is None or self._kept[0] != file:
            self._kept = file, read_table(Path(self.path))
        found = self._kept[1]
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found

    def largest_box(self, names: Collection[str]) -> int:
        """Bytes of the largest saved box of these tensors."""
        saved = self.read_metadata().state_dict_metadata
        entries = [e for name in names if isinstance(e := saved.get(name), TensorStorageMetadata)]
        sizes = (math.prod(c.sizes) * e.properties.dtype.itemsize for e in entries for c in e.chunks)
        return max(sizes, default=0)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each saved box is read once, in the order of the files, whatever parts of it are wanted: torch reads it anew for each part, and of a layer's experts each may be one."""
        wanted: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            saved = self.storage_data[item.storage_index]
            wanted.setdefault((saved.relative_path, saved.offset), []).append(item)
        for _, items in sorted(wanted.items(), key=lambda found: found[0]):
            self._read_box(items, planner)  # which is gone before the next one is read
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_box(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        place = self.storage_data[items[0].storage_index]
        with open(Path(self.path) / place.relative_path, "rb") as file:
            box = torch.load(self._slice_file(file, place), map_location="cpu", weights_only=True)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            part = narrow_tensor_by_index(box, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise AssertionError(
                    f"{item.storage_index}: {tuple(part.shape)} is saved, {tuple(target.shape)} wanted"
                )
            target.copy_(part)


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

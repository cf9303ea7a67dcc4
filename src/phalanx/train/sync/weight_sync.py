"""Weights of a run's checkpoint delivered to an inference mesh of another layout, wave by wave under a memory cap.

    plan_sync      run folder, target layout, cap -> waves, layouts; nothing is started or written
    run_rank       readers read the rows of a wave, evenly shared, and round them; receivers get their boxes of it by a reshard plan
    finish         the index next to the ranks' files

Ranks 0 .. readers-1 read, those after them receive: rank r of the target is `readers + r`. Receivers write into files that they have mapped (one safetensors
file a rank, of the rank's local tensors), so they hold no more than what is under way. Must never change: a folder with the name asked for is complete; no
number is rounded but to the type asked for; the expert bias stays fp32.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, RunError, nearest, raise_if
from phalanx.core.files import writing_folder
from phalanx.core.messages import message
from phalanx.core.reading import parse_table
from phalanx.core.units import format_bytes, read_bytes
from phalanx.plan.layout import Box, StateLayouts, TensorLayout
from phalanx.plan.mapping import Folding, fit_problems, parse_stage, stage_text
from phalanx.plan.model import ModelSpec, buffers, parameters, resolve_model
from phalanx.plan.pipeline import plain_pipeline
from phalanx.plan.reshard import Move, Wave, divide, readers_layout, wave_rows
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.comm import Axis, Collectives
from phalanx.runtime.processes import WorldInfo, close_world, init_world
from phalanx.runtime.reshard import PlanOptions, Resharder
from phalanx.runtime.state import BoxTensor
from phalanx.train import state_dtype
from phalanx.train.setup import DTYPES, RunFolder, choose_checkpoint

INDEX = "index.json"
_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
MAX_READERS = 1024
"""Each is a process."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SyncPlan:
    """Who reads and who receives what, in which waves."""

    run: RunFolder
    target: Path
    recipe: Recipe
    spec: ModelSpec
    step: int
    dtype: torch.dtype
    folding: Folding
    """Folding of the receivers, over ranks of their own from 0 on."""
    readers: int
    memory_bytes: int
    box_bytes: int
    """Bytes of the largest box that is read: a saved box is read whole."""
    waves: tuple[Wave, ...]

    @property
    def world(self) -> int:
        return self.readers + self.folding.world

    @property
    def writing(self) -> Path:
        """Where the files gather until all are there."""
        return writing_folder(self.target)

    @property
    def staging_bytes(self) -> int:
        """Part of the cap that messages under way may take."""
        return self.memory_bytes // 4

    @cached_property
    def layouts(self) -> dict[str, TensorLayout]:
        """Layouts of the receivers, by name: parameters, then buffers."""
        stages = plain_pipeline(self.spec).stages
        state = StateLayouts(spec=self.spec, folding=self.folding, stages=stages, first_rank=self.readers)
        return {**state.parameters(), **state.buffers()}

    @cached_property
    def shapes(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Rank of a receiver -> shapes of its local tensors, by name."""
        out: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in range(self.readers, self.world)}
        for name, layout in self.layouts.items():
            for rank, shape in zip(layout.ranks, layout.local_shapes, strict=True):
                out[rank][name] = shape
        return out

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Name -> what it is called in a checkpoint before the slash."""
        return {p.name: "master" for p in parameters(self.spec)} | {n: "buffer" for n, _ in buffers(self.spec)}

    def type_of(self, name: str) -> torch.dtype:
        return self.dtype if self.kinds[name] == "master" else torch.float32

    def read_type(self, name: str) -> torch.dtype:
        """Type that the checkpoint has."""
        return state_dtype(DTYPES[self.recipe.train.dtype]) if self.kinds[name] == "master" else torch.float32

    def moves(self, wave: Wave) -> list[Move]:
        """One for each part of a tensor that travels in a wave."""
        return [
            Move(
                name=rows.name,
                itemsize=self.type_of(rows.name).itemsize,
                src=readers_layout(self.layouts[rows.name].shape, rows, readers=self.readers),
                dst=wave_rows(self.layouts[rows.name], rows),
            )
            for rows in wave
        ]

    def file_of(self, rank: int) -> Path:
        """File of a receiver, numbered in the target layout."""
        return self.writing / f"rank-{rank:05d}.safetensors"

    def explain(self) -> str:
        """The sync in a few lines that a person reads."""
        total = sum(math.prod(x.shape) * self.type_of(name).itemsize for name, x in self.layouts.items())
        return (
            f"step {self.step} of {self.run.path} to {stage_text(self.folding)}, {self.folding.world} ranks: {format_bytes(total)} in "
            f"{len(self.waves)} wave{'s' if len(self.waves) > 1 else ''}, {self.readers} readers\n"
            f"  at most {format_bytes(self.memory_bytes)} a process, {format_bytes(self.staging_bytes)} of it for messages under way"
        )


def plan_sync(
    run: Path,
    target: Path,
    *,
    to: str,
    memory: str,
    readers: int = 2,
    step: int | None = None,
    dtype: str | None = None,
) -> SyncPlan:
    """Everything decided and checked. Raises `ConfigError` or `CheckpointError` with all that is wrong."""
    folder, target = RunFolder(run), target.resolve()  # "." has no name that another could stand beside
    recipe, tokenizer = folder.read_recipe(), folder.read_tokenizer()
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer.vocab_size)
    problems: list[Problem] = []
    folding = parse_stage(to, problems, "--to")
    if not problems:
        found = fit_problems(folding, spec, seq_len=recipe.train.seq_len)
        problems += [dataclasses.replace(p, where=f"--to ({p.where.removeprefix('folding.')})") for p in found]
    if dtype is not None and dtype not in DTYPES:
        problems.append(
            Problem(where="--dtype", value=dtype, rule="is not a known data type", hint=nearest(dtype, DTYPES))
        )
    memory_bytes = read_bytes(memory)
    if memory_bytes is None:
        rule, hint = "is not a number of bytes", "write 256MB or 2GiB"
        problems.append(Problem(where="--memory", value=memory, rule=rule, hint=hint))
    if not 1 <= readers <= MAX_READERS:
        rule = f"must lie between 1 and {MAX_READERS}"
        problems.append(Problem(where="--readers", value=readers, rule=rule, hint="use 2"))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        rule, hint = "exists already, and nothing is overwritten", "give a new folder"
        problems.append(Problem(where="--out", value=str(target), rule=rule, hint=hint))
    raise_if(problems, ConfigError, subject="the sync")
    assert memory_bytes is not None  # else a problem was raised
    _, chosen = choose_checkpoint(folder, spec, step)
    plan = SyncPlan(
        run=folder, target=target, recipe=recipe, spec=spec, step=chosen, dtype=DTYPES[dtype or recipe.train.dtype],
        folding=folding, readers=readers, memory_bytes=memory_bytes, box_bytes=0, waves=(),
    )  # fmt: skip
    saved = [f"{kind}/{name}" for name, kind in plan.kinds.items()]
    plan = dataclasses.replace(plan, box_bytes=CheckpointManager(folder.checkpoints.path).largest_box(chosen, saved))
    return dataclasses.replace(plan, waves=_waves(plan))


def _waves(plan: SyncPlan) -> tuple[Wave, ...]:
    """A reader holds what it reads with one saved box, then what it reads and what it sends of it."""
    read = max(plan.read_type(name).itemsize for name in plan.layouts)
    wide = max(plan.read_type(name).itemsize + plan.type_of(name).itemsize for name in plan.layouts)
    shapes = {name: layout.shape for name, layout in plan.layouts.items()}
    room = plan.memory_bytes - plan.staging_bytes
    largest = max(shapes, key=lambda name: math.prod(shapes[name][1:]))
    row = math.prod(shapes[largest][1:])
    needed = max(row * wide, row * read + plan.box_bytes)
    if needed > room:
        rule = f"is too little: three quarters of it must hold a row of {largest} and a saved box while it is read, {format_bytes(needed)}"
        problem = Problem(
            where="--memory", value=plan.memory_bytes, rule=rule, hint=f"the least is {-(-4 * needed // 3)} bytes"
        )
        raise ConfigError([problem], subject="the sync")
    limit = min(room, (room - plan.box_bytes) * wide // read)
    return divide(shapes, element_bytes=wide, readers=plan.readers, limit_bytes=limit)


# ---- on the ranks --------------------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one rank held at most, by count."""

    rank: int
    held_bytes: int
    """Rows of a wave as they are read, and with them a saved box or the rounded rows."""
    staging_bytes: int
    received_bytes: int


def run_sync(plan: SyncPlan, info: WorldInfo) -> list[SyncReport]:
    """All waves on one rank, and the reports of all. Collective over `plan.world` ranks; the first one makes the folder."""
    init_world(info, timeout_s=_TIMEOUT_S)
    axis = Axis("sync", tuple(range(info.world)), info.rank, dist.group.WORLD)
    comms = Collectives(timeout_s=_TIMEOUT_S)
    comms.barrier(axis)  # the first one has made the folder
    resharder = Resharder(comms, axis, options=PlanOptions(staging_bytes=plan.staging_bytes))
    receiver = info.rank - plan.readers
    manager = CheckpointManager(plan.run.checkpoints.path)
    out = _map_file(plan, receiver) if receiver >= 0 else {}
    held = staged = received = 0
    for wave in plan.waves:
        moves = plan.moves(wave)
        source, nbytes = _read(plan, manager, moves, info.rank) if receiver < 0 else ([None] * len(moves), 0)
        dest = [out.get(rows.name) for rows in wave]
        resharder.move(moves, source, dtypes=[plan.type_of(rows.name) for rows in wave], out=dest, op_id="sync")
        del source  # or it would be there while the next wave is read
        assert resharder.report is not None  # of the move above
        held, staged = max(held, nbytes), max(staged, resharder.report.staging_peak_bytes)
        received += resharder.report.received_bytes
    if receiver >= 0:
        _settle(plan.file_of(receiver))
    report = SyncReport(rank=info.rank, held_bytes=held, staging_bytes=staged, received_bytes=received)
    reports: list[SyncReport] = comms.gather_objects(report, axis)
    close_world()
    return reports


def _read(
    plan: SyncPlan, manager: CheckpointManager, moves: list[Move], rank: int
) -> tuple[list[torch.Tensor | None], int]:
    """This reader's rows of a wave in the type that travels, and the bytes that it held for them."""
    wide: list[torch.Tensor] = []
    boxes: list[BoxTensor] = []
    for move in moves:
        wide.append(torch.empty(move.src.local_shapes[rank], dtype=plan.read_type(move.name)))
        name = f"{plan.kinds[move.name]}/{move.name}"
        boxes += [BoxTensor(name, move.src.shape, h.box, wide[-1], primary=True) for h in move.src.held[rank]]
    manager.load(boxes, step=plan.step, partial=True)
    out = [x.to(plan.type_of(move.name)) for x, move in zip(wide, moves, strict=True)]
    held = sum(x.nbytes for x in wide) + max(plan.box_bytes, sum(x.nbytes for x in out))
    return list(out), held


# ---- files ---------------------------------------------------------------------------------------------------------------------


def _contents(plan: SyncPlan, receiver: int) -> tuple[bytes, dict[str, dict[str, Any]], int]:
    """What a receiver's safetensors file begins with, its header's entries, and its size in bytes.

    The format is eight bytes of length, a header in JSON, then the tensors end to end; wider types first, so that each is aligned.
    """
    shapes = plan.shapes[plan.readers + receiver]
    names = sorted(shapes, key=lambda name: -plan.type_of(name).itemsize)
    entries: dict[str, dict[str, Any]] = {}
    at = 0
    for name in names:
        stop = at + math.prod(shapes[name]) * plan.type_of(name).itemsize
        entries[name] = {
            "dtype": _TYPE_NAMES[plan.type_of(name)],
            "shape": list(shapes[name]),
            "data_offsets": [at, stop],
        }
        at = stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, entries, 8 + len(header) + at


def _map_file(plan: SyncPlan, receiver: int) -> dict[str, torch.Tensor]:
    """The receiver's file, its header written and its tensors mapped: what is received there is in the file."""
    header, entries, size = _contents(plan, receiver)
    shapes = plan.shapes[plan.readers + receiver]
    path = plan.file_of(receiver)
    try:
        with path.open("wb+") as file:
            file.write(header)
            file.flush()
            _reserve(file.fileno(), size)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    data = mapped[len(header) :]
    return {
        name: data[slice(*entry["data_offsets"])].view(plan.type_of(name)).view(shapes[name])
        for name, entry in entries.items()
    }


def _reserve(handle: int, size: int) -> None:
    """Make a file as long as that, with room on the disk: a page of a mapping that finds none there kills the process (SIGBUS). Raises `OSError`."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    except OSError as error:  # a file system that cannot reserve, where libc has no way around it
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.truncate(handle, size)


def _settle(path: Path) -> None:
    """What was written through the mapping is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def check_sync(plan: SyncPlan) -> int:
    """Compare every box of every file, before they get their name, with the checkpoint; bytes compared. Raises `RunError` naming the first that differs."""
    from safetensors import safe_open

    manager, compared = CheckpointManager(plan.run.checkpoints.path), 0
    for receiver in range(plan.folding.world):
        with safe_open(plan.file_of(receiver), framework="pt") as file:
            for name, rows, local in _boxes(plan, receiver):
                if not _is_saved(plan, manager, name, rows, file.get_slice(name)[local.slices()]):
                    raise RunError(f"rank {receiver}: {name} {rows} is not what the checkpoint holds")
                compared += rows.num_elements * plan.type_of(name).itemsize
    whole = sum(
        held.box.num_elements * plan.type_of(name).itemsize
        for name, layout in plan.layouts.items()
        for receiver in range(plan.folding.world)
        for held in layout.of_rank(plan.readers + receiver)
    )
    if compared != whole:
        raise RunError(f"{compared} of {whole} bytes were delivered")
    return compared


def _is_saved(plan: SyncPlan, manager: CheckpointManager, name: str, rows: Box, found: torch.Tensor) -> bool:
    want = torch.empty(rows.sizes, dtype=plan.read_type(name))
    box = BoxTensor(f"{plan.kinds[name]}/{name}", plan.layouts[name].shape, rows, want, primary=True)
    manager.load([box], step=plan.step, partial=True)
    return torch.equal(found.view(torch.uint8), want.to(plan.type_of(name)).view(torch.uint8))


def _boxes(plan: SyncPlan, receiver: int) -> Iterator[tuple[str, Box, Box]]:
    """What a receiver got from each reader in each wave, no more than a reader may hold: tensor, box of it, and where that is in the receiver's."""
    for move in (move for wave in plan.waves for move in plan.moves(wave)):
        for held in move.dst.of_rank(plan.readers + receiver):
            for sent in (h.box for of_reader in move.src.held for h in of_reader):
                box = held.box.intersection(sent)
                if box is not None:
                    yield move.name, box, held.place(box)


def finish_sync(plan: SyncPlan) -> None:
    """The index, which says where each box of each tensor is. Raises `RunError` where a file is not whole."""
    for path, size in ((plan.file_of(i), _contents(plan, i)[2]) for i in range(plan.folding.world)):
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            rule = "something else wrote there; run the same command again"
            raise RunError(f"{path}: has {found} bytes, must have {size}: {rule}")
    (plan.writing / INDEX).write_text(json.dumps(index_of(plan), indent=1) + "\n")


def index_of(plan: SyncPlan) -> Mapping[str, Any]:
    """What `index.json` says."""
    tensors = {
        name: {
            "shape": layout.shape,
            "dtype": str(plan.type_of(name)).removeprefix("torch."),
            "held": {
                str(rank - plan.readers): [
                    {"offsets": h.box.offsets, "sizes": h.box.sizes, "local": h.local} for h in layout.of_rank(rank)
                ]
                for rank in layout.ranks
            },
        }
        for name, layout in plan.layouts.items()
    }
    return {
        "step": plan.step,
        "layout": stage_text(plan.folding),
        "files": [plan.file_of(i).name for i in range(plan.folding.world)],
        "model": parse_table(plan.spec.to_json(), where="the model"),
        "tensors": tensors,
    }

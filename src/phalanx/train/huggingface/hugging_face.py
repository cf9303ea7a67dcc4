"""A Hugging Face checkpoint on disk: what it holds, what is wrong with it, and reading any boxes of a model's parameters out of its shards.

Decides nothing about names (`models/families`). Must never change: a rank reads the slices that its boxes consist of and nothing else; values
come out as they lie on disk, widened to the type of the box; everything wrong with a folder is said before the first number is read.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from phalanx.core.errors import CheckpointError, Problem, nearest, raise_if
from phalanx.core.reading import MalformedError, load_json, open_regular
from phalanx.models.families import Family, NameLink, find_family, in_tensor
from phalanx.plan.model import ModelSpec
from phalanx.runtime.state import BoxTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Types of tensors that can be imported, with their bytes."""
MOST_OPEN = 4
"""Shards that are open at once: each is mapped, and its pages count as memory of the process. The experts of a layer lie in one shard or two."""
SHOWN = 12
"""Problems of one kind that are listed one by one."""
ROWS = 1024
"""Rows of two matrices that are compared at once."""


@dataclass(frozen=True)
class DiskTensor:
    """Where a tensor lies."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, eq=False)
class HfCheckpoint:
    """A folder that was found sound: its tensors are those of `spec`, with the shapes that the family says."""

    path: Path
    config: Mapping[str, Any]
    family: Family
    spec: ModelSpec
    tensors: Mapping[str, DiskTensor]
    links: tuple[NameLink, ...]
    ignored: tuple[str, ...]
    """Tensors that say nothing about the model."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are read."""
        return sum(link.part.num_elements * WIDTH[self.tensors[link.tensor].dtype] for link in self.links)


def open_checkpoint(path: Path, *, mtp_layers: int = 0) -> HfCheckpoint:
    """What is in the folder. Raises `CheckpointError` with every problem: config, shards, names, shapes, types.

    `mtp_layers`: blocks of multi-token prediction to read; others are left on the disk.
    """
    subject = f"the Hugging Face checkpoint {path}"
    if not path.is_dir():
        hint = "give the folder that holds config.json and the .safetensors files; nothing is downloaded"
        raise CheckpointError.of("DIR", str(path), "is not a folder", hint, subject=subject)
    raise_if(strange_links(path), CheckpointError, subject=subject)
    config, problems = read_config(path)
    family = find_family(config.get("model_type")) if config else None
    if isinstance(family, Problem):
        problems.append(family)
    tensors, shard_problems = _find_tensors(path)
    problems += shard_problems
    if not isinstance(family, Family):
        raise CheckpointError(problems, subject=subject)
    spec, refused = family.spec_of(config)
    problems += refused
    if mtp_layers > (spec.mtp_layers if family.mtp_rules else 0):
        there = f"{spec.mtp_layers}" if family.mtp_rules else "no"
        rule = f"the checkpoint has {there} blocks of multi-token prediction"
        problems.append(Problem(where="model.mtp_layers", value=mtp_layers, rule=rule, hint="leave it out"))
        raise CheckpointError(problems, subject=subject)
    spec = dataclasses.replace(spec, mtp_layers=mtp_layers)
    if refused:  # shapes would be compared with those of another model
        raise CheckpointError(problems, subject=subject)
    links = family.links(spec, fused=family.is_fused(tensors))
    links = tuple(link for link in links if link.param is not None)
    unknown = sorted(tensors.keys() - {link.tensor for link in links})
    ignored = tuple(name for name in unknown if family.may_ignore(name, spec))
    problems += _tensor_problems(links, tensors, [n for n in unknown if n not in ignored], complete=not shard_problems)
    raise_if(problems, CheckpointError, subject=subject)
    found = HfCheckpoint(
        path=path, config=config, family=family, spec=spec, tensors=tensors, links=links, ignored=ignored
    )
    raise_if(_unlike(found), CheckpointError, subject=subject)
    return found


def strange_links(folder: Path, *, whole: bool = False) -> list[Problem]:
    """Links in a folder that lead out of it, and (`whole`) the folder itself where it is one: what comes from a stranger must not name this user's files. Hugging
    Face's own cache links to `blobs/` beside its snapshots."""
    home = folder.resolve()
    roots = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    found = [p for p in sorted(folder.iterdir()) if p.is_symlink()] if folder.is_dir() else []
    hint = "copy the file itself into the folder, if it belongs there"
    if whole and folder.is_symlink():
        return [Problem(where=str(folder), value=os.readlink(folder), rule="is a link to another folder", hint=hint)]
    return [
        Problem(where=str(p), value=os.readlink(p), rule="is a link to a file outside of its folder", hint=hint)
        for p in found
        if not any(p.resolve().is_relative_to(root) for root in roots)
    ]


def read_config(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """config.json, empty where there is none that can be read."""
    where = path / "config.json"
    try:
        config = load_json(where)
    except OSError as error:
        hint = "give the folder that holds config.json and the .safetensors files"
        return {}, [Problem(where=str(where), value=error.strerror, rule="must be there", hint=hint)]
    except MalformedError as error:
        rule = f"must be JSON, and {error.problems[0].rule}"
        return {}, [Problem(where=str(where), value=None, rule=rule, hint="download it again")]
    if not isinstance(config, dict):
        return {}, [Problem(where=str(where), value=type(config).__name__, rule="must be a JSON table")]
    return config, []


# ---- shards -----------------------------------------------------------------------------------------------------------------


def _find_tensors(path: Path) -> tuple[dict[str, DiskTensor], list[Problem]]:
    """Every tensor of the folder by its shards' own headers, and what is wrong with shards and index."""
    index, problems = _read_index(path)
    files = sorted(set(index.values())) if index else [SINGLE_FILE]
    tensors: dict[str, DiskTensor] = {}
    for name in files:
        found, problem = _read_header(path, name)
        problems += [problem] if problem is not None else []
        tensors |= found
    broken = {Path(p.where).name for p in problems}
    lost = sorted(t for t, file in index.items() if t not in tensors and file not in broken)
    problems += _several(lost, "is not in the shard that the index names", values=index)
    return {t: d for t, d in tensors.items() if not index or t in index}, problems


def _read_index(path: Path) -> tuple[dict[str, str], list[Problem]]:
    """tensor -> file; empty where the folder has all in one file, which counts more than an index, as transformers has it (it leaves old ones behind)."""
    where = path / INDEX_FILE
    if (path / SINGLE_FILE).is_file():
        return {}, []
    try:
        weight_map = load_json(where)["weight_map"]
        if not all(isinstance(v, str) and Path(v).name == v for v in weight_map.values()):
            raise ValueError("weight_map must name files of this folder")
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [Problem(where=str(where), value=str(error), rule="must be an index with a weight_map")]
    return dict(weight_map), []


def _read_header(path: Path, name: str) -> tuple[dict[str, DiskTensor], Problem | None]:
    try:
        with safe_open(str(path / name), framework="pt") as shard:
            slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118 - no mapping
            return {k: DiskTensor(name, tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}, None
    except FileNotFoundError:
        hint = _other_formats(path)
        return {}, Problem(where=str(path / name), value=None, rule="the shard is missing", hint=hint)
    except (OSError, SafetensorError) as error:
        rule, hint = f"is not a complete safetensors file: {error}", "download it again"
        if _is_pointer(path / name):
            rule, hint = "is a pointer of Git LFS and not the file itself", "run git lfs pull in the folder"
        return {}, Problem(where=str(path / name), value=None, rule=rule, hint=hint)


def _is_pointer(path: Path) -> bool:
    """What git leaves of a large file where LFS did not fetch it."""
    try:
        with open_regular(path) as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


_POINTER = b"version https://git-lfs"


def _other_formats(path: Path) -> str:
    beside = sorted(p.name for p in path.glob("*.safetensors")) if path.is_dir() else []
    if beside:
        return f"there are {', '.join(beside[:4])}" + (" and others" if len(beside) > 4 else "")
    if path.is_dir() and (any(path.glob("*.bin")) or any(path.glob("*.pth"))):
        return "pickled weights are not read; save them with transformers as safetensors"
    return "fetch it again"


def _tensor_problems(
    links: Sequence[NameLink], tensors: Mapping[str, DiskTensor], extra: Sequence[str], *, complete: bool
) -> list[Problem]:
    """Missing (unless a missing shard explains it), misshapen and mistyped tensors, and those that the model has no place for."""
    wanted = {link.tensor: link.shape for link in links}
    problems = []
    if complete:
        problems += _several([t for t in wanted if t not in tensors], "is missing", shapes=wanted)
    mistyped: dict[str, str] = {}
    for name, shape in wanted.items():
        found = tensors.get(name)
        if found is not None and found.shape != shape:
            rule = f"must have the shape {shape}, by config.json"
            problems.append(Problem(where=name, value=found.shape, rule=rule, hint=f"in {found.file}"))
        elif found is not None and found.dtype not in WIDTH:
            mistyped[name] = found.dtype
    rule, hints = "must be one of " + ", ".join(WIDTH), dict.fromkeys(mistyped, "convert it to bfloat16 first")
    problems += _several(list(mistyped), rule, values=mistyped, hints=hints)
    near = {name: nearest(name, [t for t in wanted if t not in tensors]) for name in extra[:SHOWN]} if complete else {}
    close = {n: h for n, h in near.items() if h.startswith("did")}
    problems += _several(list(extra), "has no place in this model", hints=close)
    return problems[: 4 * SHOWN]


def _several(
    names: Sequence[str],
    rule: str,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    values: Mapping[str, str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> list[Problem]:
    """One problem for each of the first names, and one for the number of the rest."""
    known: Mapping[str, Any] = shapes or values or {}
    told = [Problem(where=n, value=known.get(n), rule=rule, hint=(hints or {}).get(n, "")) for n in names[:SHOWN]]
    if len(names) > SHOWN:
        told.append(Problem(where="...", value=f"{len(names) - SHOWN} more tensors", rule=rule))
    return told


def _unlike(checkpoint: HfCheckpoint) -> list[Problem]:
    """Tensors that are left on the disk since they repeat another, and do not. Their numbers are compared, some rows at a time."""
    repeats = checkpoint.family.repeats(checkpoint.spec, checkpoint.links)
    rule = "must have the numbers of {}, which it repeats by config.json"
    return [
        Problem(where=name, value=None, rule=rule.format(other), hint=_HINTS.get(name, "leave model.mtp_layers out"))
        for name, other in repeats.items()
        if name in checkpoint.ignored and not _same_numbers(checkpoint, name, other)
    ]


_HINTS = {"lm_head.weight": "transformers does not tie them then: set tie_word_embeddings to false"}


def _same_numbers(checkpoint: HfCheckpoint, name: str, other: str) -> bool:
    places = [checkpoint.tensors[n] for n in (name, other)]
    if places[0].shape != places[1].shape:
        return False
    a, b = (safe_open(str(checkpoint.path / place.file), framework="pt") for place in places)
    with a, b:
        parts = (a.get_slice(name), b.get_slice(other))
        rows = (slice(i, i + ROWS) for i in range(0, places[0].shape[0], ROWS))
        return all(torch.equal(*(part[some].to(torch.float64) for part in parts)) for some in rows)


# ---- reading ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BoxReader:
    """Fills boxes from the shards, of which the last that were needed are open until the end of the `with` block."""

    checkpoint: HfCheckpoint
    bytes_read: int = 0
    """Bytes of the slices that were read."""
    _open: dict[str, Any] = field(default_factory=dict)
    """By file, the one that was read last at the end."""

    def __post_init__(self) -> None:
        self._by_param: dict[str, list[NameLink]] = defaultdict(list)
        for link in self.checkpoint.links:
            self._by_param[str(link.param)].append(link)

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._close_oldest()

    def fill(self, boxes: Iterable[BoxTensor]) -> None:
        """Boxes named `kind/parameter` (kind: master, param, buffer; moments are not on disk and become zeros). Raises `CheckpointError` naming the tensor or the file."""
        for box in boxes:
            kind, name = box.name.split("/", 1)
            if kind in ("exp_avg", "exp_avg_sq"):
                box.tensor.zero_()
                continue
            self._fill(box, self._by_param.get(name, []))

    def _fill(self, box: BoxTensor, links: Sequence[NameLink]) -> None:
        done = 0
        for link in links:
            shared = link.box.intersection(box.box)
            if shared is None:
                continue
            target = box.tensor[shared.shifted([-o for o in box.box.offsets]).slices()]
            target.copy_(self._read(link.tensor, in_tensor(link, shared).slices()).view(shared.sizes))
            done += shared.num_elements
        if done != box.box.num_elements:
            rule = f"only {done} of {box.box.num_elements} elements of this box are in the checkpoint"
            raise CheckpointError.of(box.name, box.box, rule, subject=str(self.checkpoint.path))

    def _read(self, tensor: str, part: tuple[slice, ...]) -> torch.Tensor:
        file = self.checkpoint.tensors[tensor].file
        try:
            found: torch.Tensor = self._shard(file).get_slice(tensor)[part]
        except (OSError, SafetensorError) as error:
            rule, hint = f"{tensor} cannot be read: {error}", "download it again"
            problem = Problem(where=str(self.checkpoint.path / file), value=None, rule=rule, hint=hint)
            raise CheckpointError([problem], subject=f"the Hugging Face checkpoint {self.checkpoint.path}") from error
        self.bytes_read += found.numel() * found.element_size()
        return found.contiguous()

    def _shard(self, file: str) -> Any:
        shard = self._open.pop(file, None)
        if shard is None:
            if len(self._open) == MOST_OPEN:
                self._close_oldest()
            shard = safe_open(str(self.checkpoint.path / file), framework="pt").__enter__()
        self._open[file] = shard
        return shard

    def _close_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)

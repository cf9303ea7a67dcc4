"""References as files: the tensors of a run one behind the other, and before them a table of where each lies.

Every rank reads every reference. A pickled tensor costs 0.2 ms to read and a reference has 230 of them, so that reading them took as long as
a sixth of all cases; here they are views of one mapped file. Must never change: what is read equals what was saved, bit for bit, and a file that is
there is complete.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from phalanx.core.errors import PhalanxError
from phalanx.verify.reference import Reference

TABLES = ("initial", "gradients", "after")
ALIGNMENT = 16
"""Bytes at whose multiples a tensor begins, so that its buffer can be seen as its type."""

Place = tuple[torch.dtype, tuple[int, ...], int]
"""Type, shape and first byte of a tensor."""


def save_reference(path: Path, found: Reference | PhalanxError) -> None:
    """Leave the reference, or the reason why there is none, for all ranks to read. It appears complete or not at all."""
    unfinished = path.with_suffix(".writing")
    with unfinished.open("wb") as out:
        if isinstance(found, PhalanxError):
            pickle.dump((found, {}), out, protocol=pickle.HIGHEST_PROTOCOL)
        else:
            _write(found, out)
    unfinished.rename(path)


def _write(found: Reference, out: BinaryIO) -> None:
    places: dict[str, dict[str, Place]] = {name: {} for name in TABLES}
    parts: list[torch.Tensor] = []
    position = 0
    for table in TABLES:
        for name, tensor in getattr(found, table).items():
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            filler = raw.new_zeros(-len(raw) % ALIGNMENT)
            places[table][name] = (tensor.dtype, tuple(tensor.shape), position)
            parts += [raw, filler]
            position += len(raw) + len(filler)
    outline = dataclasses.replace(found, initial={}, gradients={}, after={})
    pickle.dump((outline, places), out, protocol=pickle.HIGHEST_PROTOCOL)
    out.write(bytes(-out.tell() % ALIGNMENT))
    out.flush()  # NumPy writes behind the back of `out`
    torch.cat(parts).numpy().tofile(out)


def load_outline(path: Path) -> Reference | PhalanxError:
    """The reference without its tensors."""
    with path.open("rb") as file:
        outline: Reference | PhalanxError = pickle.load(file)[0]
    return outline


def load_reference(path: Path) -> Reference | PhalanxError:
    with path.open("rb") as file:
        outline, places = pickle.load(file)
        if isinstance(outline, PhalanxError):
            return outline
        begin = file.tell() + -file.tell() % ALIGNMENT
    # mapped, not read: a rank looks at its part. Private ("c"), so that nothing that is done to a tensor reaches the file
    data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=begin))
    return dataclasses.replace(outline, **{table: _tensors(data, places[table]) for table in TABLES})


def _tensors(data: torch.Tensor, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    out = {}
    for name, (dtype, shape, begin) in places.items():
        end = begin + math.prod(shape) * dtype.itemsize
        out[name] = data[begin:end].view(dtype).view(shape)
    return out

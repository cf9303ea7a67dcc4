"""What the kernels that wait on flags have in common: sizes of tiles, how patient they are, what they report.

Legend: e local slots, N columns of a product, K depth of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.core.errors import PlanError, Problem, RunError, raise_if

PATIENCE = 20_000_000
"""Looks at a flag before it is given up: about ten seconds at half a microsecond each (the time of a look is to be measured, see docs/explanation/overlap-gpu.md)."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """One program's tile of a product, and how many row tiles make a problem. Powers of two, at least 16."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    row_tiles: int = 4
    """Row tiles of a problem: `kernels/triton/index.py` must be given `problem_rows`."""
    warps: int = 8
    stages: int = 3

    @property
    def problem_rows(self) -> int:
        return self.rows * self.row_tiles

    def problems(self) -> list[Problem]:
        """What no kernel can be built for."""
        found = [
            Problem(where=f"tile.{name}", value=value, rule="must be a power of two and at least 16", hint="64")
            for name, value in (("rows", self.rows), ("columns", self.columns), ("depth", self.depth))
            if value < 16 or value & (value - 1)
        ]
        return found + [
            Problem(where=f"tile.{name}", value=value, rule="must be at least 1")
            for name, value in (("row_tiles", self.row_tiles), ("warps", self.warps), ("stages", self.stages))
            if value < 1
        ]


@dataclass(frozen=True, kw_only=True)
class SendShape:
    """How entries are cut for sending: `chunk` of them a task, `entries` x `columns` at a time."""

    chunk: int = 32
    entries: int = 8
    columns: int = 256


def new_status(device: torch.device) -> torch.Tensor:
    """int32 (2,): what kernels report instead of hanging. [0]: number + 1 of a flag that never came; [1]: 1 if a block was never computed."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def check_status(status: torch.Tensor, *overflows: torch.Tensor) -> None:
    """Raise `RunError` if a kernel gave up waiting or rows found no room. Not for every step: it reads the device."""
    lost = sum(int(n) for n in overflows)
    words = status_words(status.tolist())  # SYNC: the only word that these kernels have for the host
    if lost:
        words.append(f"{lost} entries or rows found no room: raise the capacity")
    if words:
        raise RunError("overlapped MoE layer: " + "; ".join(words))


def status_words(status: Sequence[int]) -> list[str]:
    """What the two numbers of a status say; nothing where all went well."""
    flag, block = status
    words = []
    if flag:
        words.append(f"flag {flag - 1} was not raised in time: its rank left, or never began this call")
    if block:
        words.append("a block of columns was not computed in time")
    return words


def product_problems(
    x: torch.Tensor, w_eNK: torch.Tensor, problems_J4: torch.Tensor, tile: TileShape, *, name: str
) -> list[Problem]:
    """What is wrong with the operands of a product, all at once."""
    found = tile.problems()
    if x.dtype not in DTYPES or w_eNK.dtype != x.dtype:
        rule = f"must have one type of {', '.join(str(t).removeprefix('torch.') for t in DTYPES)}"
        found.append(Problem(where=f"{name}, weights", value=f"{x.dtype}, {w_eNK.dtype}", rule=rule))
    if x.dim() != 2 or w_eNK.dim() != 3 or x.shape[-1] != w_eNK.shape[-1]:
        shapes = f"{tuple(x.shape)}, {tuple(w_eNK.shape)}"
        found.append(Problem(where=f"{name}, weights", value=shapes, rule="must be (rows, K) and (slots, N, K)"))
    elif (w_eNK.shape[1] - 1) * w_eNK.stride(1) + (w_eNK.shape[2] - 1) * w_eNK.stride(2) >= 2**31:
        rule = "one expert's must span fewer than 2**31 elements: kernels count places of weights in 32 bits"
        found.append(Problem(where="weights", value=tuple(w_eNK.shape), rule=rule))
    if x.stride(-1) != 1:
        found.append(Problem(where=f"{name}.stride(-1)", value=x.stride(-1), rule="must be 1", hint="contiguous()"))
    if problems_J4.dim() != 2 or problems_J4.shape[-1] != 4 or problems_J4.dtype != torch.int32:
        shape = f"{problems_J4.dtype} {tuple(problems_J4.shape)}"
        found.append(Problem(where="problems", value=shape, rule="must be int32 (problems, 4)"))
    return found


def is_interpreted() -> bool:
    """Triton's kernels are run by its interpreter (TRITON_INTERPRET=1 when they were first imported), not by a GPU."""
    import triton

    from phalanx.kernels.triton.programs.first import first_kernel

    return not isinstance(first_kernel, triton.JITFunction)


def raise_problems(found: list[Problem], *, subject: str) -> None:
    raise_if(found, PlanError, subject=subject)

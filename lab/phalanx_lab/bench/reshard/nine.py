"""The nine cases of the paper on moving a sharded tensor between meshes (arXiv 2211.05322; `cases.py`), at any size.

A mesh row is a host of four ranks. Sources are on hosts 0 and 1, destinations from host 2 on. The paper's tensors (int32, 1024 x 1024 x 512 and, for
case 6, 3072 x 1024 x 170) are scaled down dim by dim, so that every split stays as even as it was. Cases 7 and 8 are the same in the paper's suite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.plan.layout.mesh.placements import read_layout
from phalanx.plan.reshard.types import Move
from phalanx_lab.bench.reshard.cases import NINE, PAPER

RANKS_PER_HOST = 4
SOURCE_HOSTS, DEST_HOSTS = 2, 3
FIRST_DEST_RANK = SOURCE_HOSTS * RANKS_PER_HOST
ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class NineCase:
    """Layouts as `2x4 S0RR` (mesh, then a symbol for each dim)."""

    number: int
    src: str
    dst: str
    wide: bool = False
    """The tensor of case 6."""

    def shape(self, mib: int) -> tuple[int, int, int]:
        """About `mib` MiB of int32."""
        return (12 * mib, 256, 85) if self.wide else (4 * mib, 256, 256)

    def num_bytes(self, mib: int) -> int:
        return math.prod(self.shape(mib)) * ITEM_BYTES

    def move(self, mib: int) -> Move:
        shape = self.shape(mib)
        src = read_layout(self.src, shape, where=f"case {self.number}")
        dst = read_layout(self.dst, shape, first_rank=FIRST_DEST_RANK, where=f"case {self.number}")
        return Move(name=f"case{self.number}", itemsize=ITEM_BYTES, src=src, dst=dst)


CASES = tuple(
    NineCase(number=number, src=src, dst=dst, wide=shape != PAPER) for number, (src, dst, shape) in enumerate(NINE, 1)
)

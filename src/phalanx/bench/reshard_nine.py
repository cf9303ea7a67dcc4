"""The nine cases of the paper on moving a sharded tensor between meshes (arXiv 2211.05322), at any size.

A mesh row is a host of four ranks. Sources are on hosts 0 and 1, destinations from host 2 on. The paper's tensors (int32, 1024 x 1024 x 512 and, for
case 6, 3072 x 1024 x 170) are scaled down dim by dim, so that every split stays as even as it was. Cases 7 and 8 are the same in the paper's suite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.plan.mesh_layout import read_layout
from phalanx.plan.reshard_types import Move

RANKS_PER_HOST = 4
SOURCE_HOSTS, DEST_HOSTS = 2, 3
FIRST_DEST_RANK = SOURCE_HOSTS * RANKS_PER_HOST
ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
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


CASES = (
    Case(number=1, src="2x4 S0RR", dst="2x4 S0RR"),
    Case(number=2, src="2x4 RRR", dst="2x4 S0RR"),
    Case(number=3, src="2x4 RS0R", dst="2x4 S0RR"),
    Case(number=4, src="2x4 RS01R", dst="2x4 S01RR"),
    Case(number=5, src="2x4 S1RR", dst="2x4 S0RR"),
    Case(number=6, src="2x4 S0RR", dst="3x4 S0RR", wide=True),
    Case(number=7, src="1x4 S01RR", dst="2x4 RRR"),
    Case(number=8, src="1x4 S01RR", dst="2x4 RRR"),
    Case(number=9, src="2x4 RS0R", dst="2x4 RRS0"),
)

"""A map of many cells over the steps of a run, such as the load of every expert of every layer, in bounded memory.

Decides how fine it is: at most `most` columns of equally many steps each, a power of two of them; whenever they would not do, two become one, by their mean. On
disk a cell is one byte, the logarithm of its value, with an error of at most 2 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 1 << 15
"""Largest model that is drawn: 128 layers of 256 experts."""
MOST_VALUES = 1 << 21
MOST_COLUMNS = 256
SCALE = 18.0
"""Bytes of a factor of e: 1 is e^-7 or less, 255 is e^7."""
OFFSET = 128


class HeatMap:
    """Values of `cells` cells, means over the steps of a column. NaN where nothing was told."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.most = max(32, min(MOST_COLUMNS, 1 << max(0, (MOST_VALUES // max(1, cells)).bit_length() - 1)))
        self.width = 1
        self.count = np.zeros(self.most, np.int64)
        self.total = np.zeros((self.most, cells), np.float32)

    def add(self, step: int, values: NDArray[Any]) -> None:
        """The values after a step, from 1."""
        while (step - 1) // self.width >= self.most:
            half = self.most // 2
            self.count[:half] = self.count[0::2] + self.count[1::2]
            self.total[:half] = self.total[0::2] + self.total[1::2]
            self.count[half:], self.total[half:] = 0, 0.0
            self.width *= 2
        at = (step - 1) // self.width
        self.count[at] += 1
        self.total[at] += values

    def void(self, after: int) -> None:
        """Forget the columns of steps above `after` alone."""
        first = -(-after // self.width)
        self.count[first:], self.total[first:] = 0, 0.0

    @property
    def columns(self) -> int:
        """Columns up to the last that was told of."""
        told = np.flatnonzero(self.count)
        return int(told[-1]) + 1 if len(told) else 0

    def means(self, cells: slice = slice(None)) -> NDArray[Any]:
        """(columns, cells) float32."""
        part = slice(0, self.columns)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[Any] = self.total[part, cells] / self.count[part, None].astype(np.float32)
        return found

    def codes(self, cells: slice = slice(None)) -> NDArray[np.uint8]:
        """(columns, cells) bytes: 0 nothing was told; 1 zero or next to it; else 128 + 18 ln(value)."""
        means = self.means(cells)
        with np.errstate(invalid="ignore", divide="ignore"):
            code = np.clip(np.rint(OFFSET + SCALE * np.log(means)), 1, 255)
        return np.nan_to_num(code, nan=0.0).astype(np.uint8)

    def to_bytes(self) -> tuple[dict[str, Any], bytes]:
        """What describes it, and its cells."""
        counts = self.count[: self.columns].tolist()
        return {"cells": self.cells, "width": self.width, "counts": counts}, self.codes().tobytes()

    @classmethod
    def from_bytes(cls, head: dict[str, Any], data: bytes) -> HeatMap:
        """Raises `ValueError` where this is no map of ours."""
        cells, width, counts = head["cells"], head["width"], head["counts"]
        if type(cells) is not int or not 0 < cells <= MOST_CELLS or type(width) is not int or not 1 <= width <= 10**9:
            raise ValueError("a size that cannot be")
        found = cls(cells)
        if len(counts) > found.most or len(data) != len(counts) * cells:
            raise ValueError("more or fewer bytes than its columns have")
        found.width = width
        found.count[: len(counts)] = np.array(counts, np.int64).clip(0, 2**40)
        codes = np.frombuffer(data, np.uint8).reshape(len(counts), cells).astype(np.float32)
        values = np.where(codes <= 1, 0.0, np.exp((codes - OFFSET) / SCALE))
        found.total[: len(counts)] = values * found.count[: len(counts), None]
        return found

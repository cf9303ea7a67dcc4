"""Figures of steps as curves of bounded size: the mean, the least and the largest value of each figure in rows of `width` steps.

Decides how much of a curve is kept: `MOST_ROWS` rows, each one step wide at first; whenever they would not do, two become one. Must never change: a
row has the same first step whoever made it, `i * width + 1`. What a void (`void`) takes away is taken by whole rows: of one that lies across it the rest stays in the mean.

Legend: R rows, C columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = (
    "loss", "aux_loss", "z_loss", "mtp_loss", "grad_norm", "lr", "tokens", "step_s", "data_s", "tokens_per_s", "mfu",
    "peak_memory_bytes", "load", "dead_experts", "dropped_tokens", "router_entropy", "exposed_s", "hidden_s", "slowness",
)  # fmt: skip
"""Figures of `StepEnded` by name; `load`, `exposed_s` and `hidden_s` are the worst layer and the sums of all."""
MOST_ROWS = 1 << 14
MOST_STEPS = 10**9
MOST_PENDING = 2048
LARGEST = 1e30
Numbers = NDArray[Any]


def number(value: Any) -> float:
    """A figure of a log as a float; NaN where it is none, or so large that no chart could show it."""
    if type(value) is float or type(value) is int:
        return float(value) if -LARGEST < value < LARGEST else math.nan
    return math.nan


class Curves:
    """Rows of steps. `last` is the highest step that is there."""

    def __init__(self) -> None:
        self.width = 1
        self.rows = 0
        """Rows up to the last that has a step."""
        self._pending: list[tuple[int, float, list[float]]] = []
        self._allocate(64)

    def _allocate(self, rows: int) -> None:
        shape = (rows, len(COLUMNS))
        self.count = np.zeros(shape, np.float32)
        self.total = np.zeros(shape, np.float64)
        self.low = np.full(shape, np.inf, np.float32)
        self.high = np.full(shape, -np.inf, np.float32)
        self.time_s = np.zeros(rows, np.float64)

    def _arrays(self) -> tuple[tuple[str, float], ...]:
        return ("count", 0.0), ("total", 0.0), ("low", np.inf), ("high", -np.inf), ("time_s", 0.0)

    def add(self, step: int, time_s: float, values: list[float]) -> None:
        """One step, from 1. `values`: one for each column, NaN where it is not known."""
        self._pending.append((step, time_s, values))
        if len(self._pending) >= MOST_PENDING:
            self.settle()

    def settle(self) -> None:
        """Put what was added into its rows."""
        if not self._pending:
            return
        steps_P = np.array([step for step, _, _ in self._pending], np.int64)
        times_P = np.array([time_s for _, time_s, _ in self._pending])
        values_PC = np.array([values for _, _, values in self._pending], np.float64)
        self._pending = []
        self._make_room(int(steps_P.max()))
        rows_P = (steps_P - 1) // self.width
        known_PC = np.isfinite(values_PC)
        np.add.at(self.count, rows_P, known_PC)
        np.add.at(self.total, rows_P, np.where(known_PC, values_PC, 0.0))
        np.minimum.at(self.low, rows_P, np.where(known_PC, values_PC, np.inf).astype(np.float32))
        np.maximum.at(self.high, rows_P, np.where(known_PC, values_PC, -np.inf).astype(np.float32))
        np.maximum.at(self.time_s, rows_P, times_P)
        self.rows = max(self.rows, int(rows_P.max()) + 1)

    def _make_room(self, step: int) -> None:
        while (step - 1) // self.width >= MOST_ROWS:
            self._widen()
        needed, there = (step - 1) // self.width + 1, len(self.time_s)
        if needed > there:
            more = min(MOST_ROWS, max(needed, 2 * there)) - there
            for name, empty in self._arrays():
                old = getattr(self, name)
                new = np.full((more, *old.shape[1:]), empty, old.dtype)
                setattr(self, name, np.concatenate([old, new]))

    def _widen(self) -> None:
        """Two rows become one."""
        for name, empty in self._arrays():
            old = getattr(self, name)
            if len(old) % 2:
                old = np.concatenate([old, np.full((1, *old.shape[1:]), empty, old.dtype)])
            join = {"count": np.add, "total": np.add, "low": np.minimum}.get(name, np.maximum)
            setattr(self, name, join(old[0::2], old[1::2]))
        self.width *= 2
        self.rows = (self.rows + 1) // 2

    def void(self, after: int, *, until_s: float) -> list[range]:
        """Forget the rows of steps above `after` that were told until `until_s`; returns their steps."""
        self.settle()
        first = -(-after // self.width)
        gone = (
            np.flatnonzero((self.time_s[first : self.rows] > 0) & (self.time_s[first : self.rows] <= until_s)) + first
        )
        for name, empty in self._arrays():
            getattr(self, name)[gone] = empty
        while self.rows and self.time_s[self.rows - 1] == 0:
            self.rows -= 1
        return [range(row * self.width + 1, (row + 1) * self.width + 1) for row in gone.tolist() if row < self.rows]

    @property
    def last(self) -> int:
        """Highest step that there may be."""
        return self.rows * self.width

    def joined(
        self, most: int, *, first: int = 1, last: int | None = None, width: int = 0
    ) -> tuple[int, int, Numbers, Numbers, Numbers, Numbers]:
        """The steps from `first` to `last` in at most `most` groups of rows, or in groups of `width` steps: steps of a group, first step, and (groups, C) least, mean and largest values (NaN:
        none) and (groups,) times.

        Groups begin where whole groups counted from step 1 do, so the same steps are in the same group whatever was added since.
        """
        self.settle()
        end = self.rows if last is None else min(self.rows, -(-last // self.width))
        begin = min(end, max(0, (first - 1) // self.width))
        size = max(1, width // self.width) if width else _size(begin, end, most)
        begin -= begin % size
        cuts = np.arange(begin, max(begin, end), size)
        if not len(cuts):
            empty = np.zeros((0, len(COLUMNS)))
            return size * self.width, begin * self.width + 1, empty, empty, empty, np.zeros(0)
        part = slice(begin, end)
        at = cuts - begin
        count = np.add.reduceat(self.count[part], at)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.add.reduceat(self.total[part], at) / count
        low = np.where(count > 0, np.minimum.reduceat(self.low[part], at), np.nan)
        high = np.where(count > 0, np.maximum.reduceat(self.high[part], at), np.nan)
        return size * self.width, begin * self.width + 1, low, mean, high, np.maximum.reduceat(self.time_s[part], at)

    def group_width(self, most: int) -> int:
        """Steps of a group where all of them are put in at most `most` groups."""
        self.settle()
        return self.width * _size(0, self.rows, most)

    # ---- as bytes ----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> tuple[dict[str, Any], bytes]:
        """What describes them, and the rows."""
        self.settle()
        parts = [np.ascontiguousarray(getattr(self, name)[: self.rows]) for name, _ in self._arrays()]
        head = {"columns": list(COLUMNS), "width": self.width, "rows": self.rows}
        return head, b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, head: dict[str, Any], data: bytes) -> Curves:
        """Raises `ValueError` where these are no curves of ours."""
        columns, width, rows = head["columns"], head["width"], head["rows"]
        if columns != list(COLUMNS) or type(width) is not int or type(rows) is not int:
            raise ValueError("other columns")
        if not (1 <= width <= MOST_STEPS and 0 <= rows <= MOST_ROWS and width & (width - 1) == 0):
            raise ValueError("a width or a number of rows that cannot be")
        found = cls()
        found._allocate(max(64, rows))
        found.width, found.rows, place = width, rows, 0
        for name, _ in found._arrays():
            array = getattr(found, name)
            size = rows * (array.shape[1] if array.ndim > 1 else 1) * array.itemsize
            values = np.frombuffer(data[place : place + size], array.dtype.newbyteorder("<"))
            array[:rows] = values.reshape(array[:rows].shape)
            place += size
        if place != len(data):
            raise ValueError("more or fewer bytes than its rows have")
        return found


def _size(begin: int, end: int, most: int) -> int:
    """Rows of a group, a power of two, so that the rows from `begin` to `end` make at most `most` groups."""
    size = 1
    while (end + size - 1) // size - begin // size > most:
        size *= 2
    return size

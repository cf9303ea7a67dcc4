"""Sets of moments on one clock, as sorted disjoint (begin, end) pairs in seconds; and who was doing what at each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Interval = tuple[float, float]
T = TypeVar("T")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that some interval has. Empty intervals add nothing."""
    out: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def subtract(base: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Moments of `base` that are not in `taken`; both sorted and disjoint."""
    out: list[Interval] = []
    first = 0
    for begin, end in base:
        while first < len(taken) and taken[first][1] <= begin:
            first += 1
        at = begin
        for lost_begin, lost_end in taken[first:]:
            if lost_begin >= end:
                break
            if lost_begin > at:
                out.append((at, lost_begin))
            at = max(at, lost_end)
        if at < end:
            out.append((at, end))
    return out


def total_s(intervals: Iterable[Interval]) -> float:
    """How long a disjoint set lasts."""
    return sum(end - begin for begin, end in intervals)


def innermost(items: Sequence[tuple[Interval, T]]) -> list[tuple[Interval, T]]:
    """The item that began last, at every moment, of those that are not over: what one thread is doing when one thing is within
    another."""
    out: list[tuple[Interval, T]] = []
    open_items: list[tuple[Interval, T]] = []

    def run(until: float, at: float) -> float:
        """Hand moments from `at` to the open items, the latest first, up to `until`."""
        while open_items and at < until:
            (_, end), what = open_items[-1]
            if end > at:
                stop = min(end, until)
                out.append(((at, stop), what))
                at = stop
            if end <= at:
                open_items.pop()
        return until

    at = float("-inf")
    for item in sorted(items, key=lambda item: (item[0][0], -item[0][1])):
        at = run(item[0][0], at)
        open_items.append(item)
    run(float("inf"), at)
    return out


def in_rows(items: Sequence[tuple[Interval, T]]) -> list[list[tuple[Interval, T]]]:
    """Arranges items in as few rows as possible such that no two items of a row overlap."""
    rows: list[list[tuple[Interval, T]]] = []
    for item in sorted(items, key=lambda item: item[0]):
        row = next((r for r in rows if r[-1][0][1] <= item[0][0]), None)
        if row is None:
            rows.append([item])
        else:
            row.append(item)
    return rows

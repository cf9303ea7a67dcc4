"""Processor time that a virtual machine's host gave to others: a benchmark whose parts met different shares of it compares hosts and not programs."""

from __future__ import annotations

from pathlib import Path

STAT = Path("/proc/stat")


class StolenTime:
    """Counts from now on. Linux; 0 where the system does not tell."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = _ticks(stat)

    def share(self) -> float:
        """Share of the time of all cores since then, idle time included."""
        every, stolen = (now - before for now, before in zip(_ticks(self._stat), self._before, strict=True))
        return stolen / every if every > 0 else 0.0


def _ticks(stat: Path) -> tuple[int, int]:
    """(all, stolen): user, nice, system, idle, iowait, irq, softirq and steal, which contain what guests had."""
    try:
        ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return 0, 0
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0

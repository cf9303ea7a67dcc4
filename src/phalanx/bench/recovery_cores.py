"""A share of the cores for each slot: a slot's rank computes neither faster when others are gone nor slower when they are busy, as on hosts of their own.

A control group for each slot (version 1 of the `cpu` controller, or version 2), with a quota of a few milliseconds in 10; workers are put into theirs as they appear.
What is no worker (supervisor, launcher, membership service) has no limit. Needs the right to make control groups; they are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.errors import RunError

PERIOD_US = 10_000
ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


class SlotCores:
    """`slots` groups of `cores` cores each. A context manager."""

    def __init__(self, slots: int, *, cores: float) -> None:
        self.slots, self.cores = slots, cores
        self.groups: list[Path] = []
        self._placed: dict[int, int] = {}

    def __enter__(self) -> SlotCores:
        quota = round(self.cores * PERIOD_US)
        try:
            root = next(r for r in ROOTS if (r / "cpu.cfs_quota_us").exists() or (r / "cgroup.controllers").exists())
            for slot in range(self.slots):
                group = root / f"phalanx-recovery-{os.getpid()}-{slot}"
                group.mkdir()
                self.groups.append(group)
                if (group / "cpu.max").exists():
                    (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(str(quota))
        except (OSError, StopIteration) as err:
            self.__exit__()
            raise RunError(
                f"cannot give each slot a share of the cores ({err}); leave --own-cores out, or run as a user who may make control groups"
            ) from err
        return self

    def __exit__(self, *_: object) -> None:
        """Groups can go when no process is in them; a killed one may take a moment."""
        end_s = time.monotonic() + 5.0
        for group in self.groups:
            while group.exists() and time.monotonic() < end_s:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.01)

    def place(self, workers: Mapping[int, int]) -> None:
        """Slot -> process, as they are now."""
        for slot, pid in workers.items():
            if self._placed.get(slot) != pid:
                with contextlib.suppress(OSError):
                    (self.groups[slot] / "cgroup.procs").write_text(str(pid))
                    self._placed[slot] = pid

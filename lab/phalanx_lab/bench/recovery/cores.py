"""A share of the cores for each slot: a slot's rank computes neither faster when others are gone nor slower when they are busy, as on hosts of their own.

A control group for each slot (`phalanx_lab/testbed/cpu_groups.py`), with a quota of a few milliseconds in 10; workers are put into theirs as they appear.
What is no worker (supervisor, launcher, membership service) has no limit. Needs the right to make control groups; they are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from phalanx.core.errors import RunError
from phalanx_lab.testbed.cpu_groups import CpuGroups


class SlotCores:
    """`slots` groups of `cores` cores each. A context manager."""

    def __init__(self, slots: int, *, cores: float) -> None:
        self.slots, self.cores = slots, cores
        self._groups: CpuGroups | None = None
        self._placed: dict[int, int] = {}

    def __enter__(self) -> SlotCores:
        try:
            self._groups = CpuGroups(f"phalanx-recovery-{os.getpid()}", self.slots, quota_cores=self.cores)
        except OSError as err:
            raise RunError(
                f"cannot give each slot a share of the cores ({err}); give --no-own-cores, or run as a user who may make control groups"
            ) from err
        return self

    def __exit__(self, *_: object) -> None:
        if self._groups is not None:
            self._groups.close()

    def place(self, workers: Mapping[int, int]) -> None:
        """Slot -> process, as they are now."""
        for slot, pid in workers.items():
            if self._groups is not None and self._placed.get(slot) != pid:
                with contextlib.suppress(OSError):
                    self._groups.place(slot, pid)
                    self._placed[slot] = pid

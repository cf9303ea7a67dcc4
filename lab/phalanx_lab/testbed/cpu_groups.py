"""Control groups for processor time: an equal share for each, or a quota. Version 1 of the `cpu` controller, or version 2.

Decides only where groups can be made: inside the group of this process, so that limits on it hold for them too, else at the top. Needs the right to make them.
A group is an empty folder once its processes are dead, and is removed by name; nothing else is left of it, but that version 2 keeps the `cpu` controller switched on.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

PERIOD_US = 10_000
"""Period of quotas: short, so that a rank that has used its part up does not stand still for long."""
EMPTY_S = 5.0
MOUNT = Path("/sys/fs/cgroup")
SHARES = 1024
"""Shares of each group (version 1); that of one process outside of them."""
WEIGHT = 100
"""The same in version 2."""


def tops(mount: Path = MOUNT, own: str | None = None) -> list[Path]:
    """Where groups may be made, the best first. `own`: what `/proc/self/cgroup` says."""
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    paths = {names: path.strip("/") for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    found = []
    for names, path in paths.items():
        if "cpu" in names.split(","):
            top = next((mount / n for n in (names, "cpu") if (mount / n).is_dir()), mount / names)
            found += [top / path, top]
    if not found and (mount / "cgroup.controllers").exists():
        found = [mount / paths.get("", ""), mount]
    return [top for top in dict.fromkeys(found) if top.is_dir()]


class CpuGroups:
    """Groups `NAME-0`, `NAME-1`, ... Made when made; `close` removes them. Raises `OSError` with the reason where they cannot be made."""

    def __init__(self, name: str, count: int, *, quota_cores: float | None = None, top: Path | None = None) -> None:
        """`quota_cores`: no group may use more; without it each gets as much as any other that wants it."""
        self.groups: list[Path] = []
        refused = ["this system has no controller `cpu`"]
        for at in tops() if top is None else [top]:
            try:
                self._make(at, name, count, quota_cores)
                return
            except OSError as err:
                self.close()
                refused.append(f"{err.filename or at}: {err.strerror}")
        raise OSError("; ".join(refused[1:] or refused))

    def _make(self, top: Path, name: str, count: int, quota_cores: float | None) -> None:
        handed_down = top / "cgroup.subtree_control"
        if handed_down.exists() and "cpu" not in handed_down.read_text().split():
            handed_down.write_text("+cpu")
        for i in range(count):
            group = top / f"{name}-{i}"
            group.mkdir()
            self.groups.append(group)
            one = (group / "cpu.shares").exists()
            if quota_cores is None:
                (group / ("cpu.shares" if one else "cpu.weight")).write_text(str(SHARES if one else WEIGHT))
            elif one:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(round(quota_cores * PERIOD_US)))
            else:
                (group / "cpu.max").write_text(f"{round(quota_cores * PERIOD_US)} {PERIOD_US}")

    def place(self, index: int, pid: int) -> None:
        """A process, with all that it forks from now on. Raises `OSError` where it is gone."""
        (self.groups[index] / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove them. A group can go when no process is in it; a killed one may take a moment."""
        end_s = time.monotonic() + EMPTY_S
        for group in self.groups:
            remove(group, until_s=end_s)
        self.groups = [group for group in self.groups if group.exists()]


def remove(group: Path, *, until_s: float = 0.0) -> None:
    """One group, tried until that time of the monotonic clock."""
    while group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() > until_s:
            return
        time.sleep(0.01)

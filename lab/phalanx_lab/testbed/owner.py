"""Who owns a bed, and what a dead owner left behind.

Every process of a bed carries its owner's tag in its environment, every folder in its name. A tag is the owner's process id, its start
time and its process namespace, so that a reused id or a look-alike in another container is never taken for the owner, and a number that
tells the beds of one owner apart.
Must never change: only processes and folders of this user whose tag names a *dead* owner in *this* process namespace are touched.

Namespaces, bridges and links need no reaping of their own: they have no names, so the kernel frees them with their last process.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx_lab.testbed.cpu_groups import remove, tops

VARIABLE = "PHALANX_TESTBED_OWNER"
FOLDER_PREFIX = "phalanx-testbed-"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """A process, for good, and one of its beds.

    `start` is its start time in clock ticks since boot, `namespace` the inode of its process namespace, `bed` a random number.
    """

    pid: int
    start: int
    namespace: int
    bed: int

    @property
    def tag(self) -> str:
        return f"{self.pid}.{self.start}.{self.namespace}.{self.bed}"

    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start


def new_owner() -> Owner:
    """The calling process, as the owner of a new bed."""
    pid = os.getpid()
    return Owner(pid, _start_time(pid) or 0, _process_namespace(), int.from_bytes(os.urandom(4)))


def parse_tag(tag: str) -> Owner | None:
    """The owner that a tag names; None if it is no tag."""
    parts = tag.split(".")
    if len(parts) != 4 or not all(p.isdigit() for p in parts):
        return None
    return Owner(*map(int, parts))


def _process_namespace() -> int:
    return (_PROC / "self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process or it is a zombie, which owns nothing any more."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _tag_of(pid: int) -> Owner | None:
    """The owner named in the environment of a process of this user; None for all others. What may not be looked at is not ours."""
    entry, marker = _PROC / str(pid), f"{VARIABLE}=".encode()
    try:
        if entry.stat().st_uid != os.geteuid():
            return None
        environment = (entry / "environ").read_bytes()
    except OSError:
        return None
    found = [
        item[len(marker) :].decode(errors="replace") for item in environment.split(b"\0") if item.startswith(marker)
    ]
    return parse_tag(found[-1]) if found else None


def tagged_processes() -> Iterator[tuple[int, Owner]]:
    """(pid, owner) of every process of this user that carries a tag and has not ended."""
    for name in os.listdir(_PROC):
        owner = _tag_of(int(name)) if name.isdigit() else None
        if owner is not None:
            yield int(name), owner


def processes_of(owner: Owner) -> list[int]:
    """Live processes that carry the tag of `owner`, itself excluded."""
    return sorted(pid for pid, other in tagged_processes() if other == owner and pid != owner.pid)


def make_folder(owner: Owner) -> Path:
    """A temporary folder that is reaped when its owner is dead."""
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner.tag}-"))


def _stale_folders(namespace: int) -> list[Path]:
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = parse_tag(folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0])
        mine = not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.geteuid()
        if mine and owner is not None and owner.namespace == namespace and not owner.is_alive():
            found.append(folder)
    return found


def _stale_groups(namespace: int) -> list[Path]:
    """Control groups of dead owners."""
    found = []
    try:
        groups = [g for top in tops() for g in top.glob(f"{FOLDER_PREFIX}*")]
    except OSError:  # no control groups here
        return []
    for group in groups:
        owner = parse_tag(group.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0])
        if owner is not None and owner.namespace == namespace and not owner.is_alive():
            found.append(group)
    return list(dict.fromkeys(found))


def _kill(pid: int, owner: Owner) -> None:
    """SIGKILL, but only to the very process that carries the tag: its id may have been reused since it was seen."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _tag_of(pid) == owner:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def reap_stale() -> list[str]:
    """Kill the processes and remove the folders of dead owners. Returns what was found, in words."""
    namespace = _process_namespace()
    reaped: dict[int, str] = {}
    deadline = time.monotonic() + 5.0
    while True:
        stale = [(p, o) for p, o in tagged_processes() if o.namespace == namespace and not o.is_alive()]
        for pid, owner in stale:
            reaped.setdefault(pid, f"process {pid} of the dead owner {owner.pid}")
            _kill(pid, owner)
        if not stale or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    folders, groups = _stale_folders(namespace), _stale_groups(namespace)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for group in groups:
        remove(group, until_s=deadline)
    return [*reaped.values(), *(f"folder {f}" for f in folders), *(f"control group {g}" for g in groups)]

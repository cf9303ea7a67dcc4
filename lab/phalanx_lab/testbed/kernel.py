"""The few Linux calls that Python 3.11 does not offer: namespaces, mounts, host name, death signal.

Decides nothing. Every call raises `OSError` whose text names the call, so that a refusal can be told to a person.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
HOST_NAMESPACES = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1


def _call(name: str, *args: object) -> None:
    """Run a function of the C library that returns -1 and sets errno on failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) == -1:
        number = ctypes.get_errno()
        text = "a limit on namespaces is reached" if number == errno.ENOSPC else os.strerror(number)
        raise OSError(number, f"{name}: {text}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces (`CLONE_NEWPID`: its children)."""
    _call("unshare", ctypes.c_int(flags))


def enter_user_namespace() -> None:
    """Become root of a new user namespace that maps to the present user and group. Must be called by a single-threaded process."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    proc = Path("/proc/self")
    # a user without privileges may map its own group only after giving up setgroups (user_namespaces(7))
    (proc / "setgroups").write_text("deny")
    (proc / "uid_map").write_text(f"0 {uid} 1")
    (proc / "gid_map").write_text(f"0 {gid} 1")


def set_hostname(name: str) -> None:
    raw = name.encode()
    _call("sethostname", raw, ctypes.c_size_t(len(raw)))


def make_mounts_private() -> None:
    """Nothing mounted from now on in this mount namespace is seen outside it."""
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def mount_proc() -> None:
    """A /proc that shows the processes of the present process namespace."""
    _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None)


def bind(source: Path, target: Path) -> None:
    """Show `source` in the place of `target`."""
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(_MS_BIND), None)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this signal when the thread that forked this process ends. Not inherited by children."""
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal_number), *[ctypes.c_ulong(0)] * 3)

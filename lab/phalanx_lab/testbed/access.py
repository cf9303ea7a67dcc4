"""Whether this machine lets us make a bed, and if not, what a person can do about it.

Two ways lead to namespaces: being root with CAP_SYS_ADMIN, or a user namespace, which most kernels give to everyone. Containers and some
distributions refuse both. Decides only the words; the supervisor has tried and tells what the kernel said.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.core.errors import Problem, TestbedError
from phalanx_lab.testbed.host import Tools

_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where `ip` and `tc` are; the PATH of ordinary users often leaves these out."""
_PACKAGES = "iproute2 (Debian, Ubuntu, Arch, Alpine) or iproute and iproute-tc (Fedora, RHEL)"


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_ADMIN_PATH)


def machine_problems(*, find: Callable[[str], str | None] = _find, platform: str = sys.platform) -> list[Problem]:
    """What is missing on this machine, before anything is tried."""
    if platform != "linux" or not hasattr(os, "pidfd_open"):
        rule = "emulated hosts are Linux namespaces (kernel 5.3 or later)"
        return [Problem(where="testbed", value=platform, rule=rule, hint="use a Linux machine")]
    missing = [name for name in ("ip", "tc") if find(name) is None]
    if not missing:
        return []
    rule = f"{' and '.join(missing)} not found; the links are made with {'them' if len(missing) > 1 else 'it'}"
    hint = f"install the package {_PACKAGES}; scripts/system-packages.sh does it on Debian"
    return [Problem(where="testbed", value=" ".join(missing), rule=rule, hint=hint)]


def find_tools() -> Tools:
    """Paths of `ip` and `tc`, where `machine_problems` found none missing."""
    return Tools(ip=_find("ip") or "ip", tc=_find("tc") or "tc")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def ways_out(read: Callable[[str], str] = _read) -> list[str]:
    """What to change on this machine so that one of the two ways works, by what the kernel's switches say."""
    found = []
    for kind in ("user", "net", "pid", "mnt", "uts"):
        if read(f"/proc/sys/user/max_{kind}_namespaces") == "0":
            found.append(f"sysctl user.max_{kind}_namespaces=10000 (it is 0)")
    if read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        found.append("sysctl kernel.unprivileged_userns_clone=1 (it is 0)")
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        found.append("sysctl kernel.apparmor_restrict_unprivileged_userns=0 (it is 1)")
    if any(line.split() == ["Seccomp:", "2"] for line in read("/proc/self/status").splitlines()):
        found.append(
            "in a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined (or --privileged)"
        )
    return found or ["run as root"]


def refusal(reason: str, *, said: str) -> TestbedError:
    """The error for a supervisor that could not enter namespaces; `said` is what it printed, which it does only if it is broken."""
    if said:
        rule = f"its first process broke: {said.splitlines()[-1]}"
        return TestbedError.of("testbed", sys.executable, rule, subject="testbed")
    rule = f"needs root or user namespaces, and has neither here ({reason})"
    return TestbedError.of("testbed", f"uid {os.geteuid()}", rule, "try " + ", ".join(ways_out()), subject="testbed")

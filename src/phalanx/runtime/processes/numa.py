"""The processors of a rank with a GPU: those of the NUMA node that the GPU is plugged into. Launches and pinned memory from another socket are slower.

Must never change: a launcher that has divided the processors between ranks has its way, and no run fails for this.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any


def stay_near(gpu: Any, *, tree: Path = Path("/sys")) -> None:
    """This thread, and those that it starts from now on, stay on the processors near `gpu` (properties of a CUDA device)."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        now = os.sched_getaffinity(0)
        near = near_cpus(address, now, tree=tree)
        if near != now:
            os.sched_setaffinity(0, near)


def near_cpus(address: str, cpus: set[int], *, tree: Path) -> set[int]:
    """Those of `cpus` on the NUMA node of a PCI device; all where the node is not known, or has less than half an even share of them: its ranks would crowd there.

    Raises `OSError` or `ValueError` where the system does not say.
    """
    node = int((tree / "bus/pci/devices" / address / "numa_node").read_text())  # -1: there is one node, or nobody knows
    lists = {int(path.parent.name[4:]): path for path in (tree / "devices/system/node").glob("node[0-9]*/cpulist")}
    shares = {number: cpus & parse_cpus(path.read_text()) for number, path in lists.items()}
    near, used = shares.get(node, set()), sum(1 for share in shares.values() if share)
    return near if near and 2 * used * len(near) >= len(cpus) else cpus


def parse_cpus(text: str) -> set[int]:
    """Numbers of a list as the kernel writes it: 0-3,8-11."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}

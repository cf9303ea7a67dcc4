"""Memory of this process as the system counts it, without any library."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    return _status_kib("VmRSS") * 1024


def peak_resident_bytes() -> int:
    """The most memory of this process that was in RAM at one time. (`ru_maxrss` alone would count the process that started it, too.)"""
    peak = _status_kib("VmHWM") * 1024
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_kib(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0

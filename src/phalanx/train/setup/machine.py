"""What this machine gives a rank: memory used so far, the matmul rate that utilisation is measured against, the versions of what decides a run; which
machine it is, and how its clock differs from that of others, so that times of several machines can stand in one picture.

Ranks of one machine read one counter, and differ by their anchors exactly. Of every other machine the first rank answers rank 0 some times: half
of a round trip is the most that the difference can be wrong by (as in NTP, RFC 5905 section 8), so the fastest round trip counts. Clocks drift
apart by some 10 microseconds a second at worst: compare shortly before what is to be drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.clock import ANCHOR_S, now_s
from phalanx.core.errors import PeerError
from phalanx.core.events import ClockCompared
from phalanx.core.files import draft_of
from phalanx.core.process import peak_resident_bytes, resident_bytes
from phalanx.core.processor import data_sheet_flops_per_s, this_processor
from phalanx.core.reading import MalformedError, load_json, typed
from phalanx.kernels.native import user_folder
from phalanx.runtime.comm import Peers, synchronize
from phalanx.runtime.processes import give_back_freed_memory

RATE_SIZES = (1024, 2048, 4096)
RATE_SECONDS = 0.2
"""Measuring time of each size."""
RATE_PATIENCE_S = 0.04
"""A size is tried only where the one before took less than this: each one takes eight times as long."""


class MemoryMeter:
    """Memory that training takes: the peak of this rank, less what it held when the meter was made (imports, process groups)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = resident_bytes()

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, peak_resident_bytes() - self._before)


@torch.no_grad()
def matmul_flops_per_s(dtype: torch.dtype, device: torch.device, *, threads: int | None = None) -> float:
    """Rate of square products on this rank with so many threads (None: those that torch has now). Ranks that share cores measure at the same time: their rates then add up to the machine's.

    The matrices are no smaller than a step's tensors, and come before them: their memory goes back to the system, or 50 MiB of fp32 stay in pieces that
    nothing fits into.
    """
    best, before = 0.0, torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    for size in RATE_SIZES:
        product_s = _product_s(size, dtype, device)
        best = max(best, 2.0 * size**3 / product_s)
        if product_s > RATE_PATIENCE_S:
            break
    torch.set_num_threads(before)
    if device.type == "cpu":
        give_back_freed_memory()
    return best


RATES_FILE = "matmul-rates.json"


def lasting_rate(measured: float, *, dtype: torch.dtype, device: torch.device, threads: int, sharing: int) -> float:
    """The highest rate that a rank like this one was ever measured at on this machine, so that utilisation does not jump with what else the machine did at a start.

    `sharing`: ranks of this machine that measure at the same time. Kept in the user's own folder; where that cannot be read or written, `measured` it is.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else this_processor().name
    key = f"{name}, {os.cpu_count()} cores, {sharing} ranks of {threads} threads, {str(dtype).removeprefix('torch.')}"
    path = user_folder() / RATES_FILE
    try:
        known = typed(load_json(path), dict[str, float], where=str(path))
    except (OSError, MalformedError):
        known = {}
    if known.get(key, 0.0) < measured:
        known[key] = measured
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = draft_of(path)
            temporary.write_text(json.dumps(known, indent=1, sort_keys=True))
            os.replace(temporary, path)
    return known[key]


def rated_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """bf16 rate of this rank's GPU by its data sheet; 0 where that is not known, and in other types."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return 0.0
    return data_sheet_flops_per_s(torch.cuda.get_device_name(device))


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Mean time of one square product. (The shortest would ignore that ranks take turns on a core.)"""
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.mm(a, b)
    synchronize(device)  # SYNC: a measurement, before training
    begin_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begin_s) < RATE_SECONDS:
        torch.mm(a, b, out=out)
        synchronize(device)  # SYNC: a measurement, before training
        count += 1
    return passed_s / count


def versions() -> dict[str, str]:
    """Versions of what decides a run."""
    found = {"python": platform.python_version()}
    for package in ("phalanx", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


ROUND_TRIPS = 8


def compare_clocks(peers: Peers) -> ClockCompared:
    """This rank's clock against rank 0's. Collective over `peers`; raises `PeerError` where a rank has gone."""
    told = peers.gather((machine(), ANCHOR_S))
    leaders = {name: rank for rank, (name, _) in reversed(list(enumerate(told)))}
    own, anchor_s = told[peers.rank]
    leader = leaders[own]
    measured: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    for other in sorted(leaders.values()):
        if other != 0 and peers.rank == 0:
            measured[other] = _ask(other, peers)
        elif other != 0 and peers.rank == other:
            _answer(peers)
    offset_s, error_s = peers.gather(measured)[0][leader]
    offset_s += anchor_s - told[leader][1]
    return ClockCompared(rank=peers.rank, host=socket.gethostname(), offset_s=offset_s, error_s=error_s)


def machine() -> str:
    """The same for processes that read the same counter, and for no others."""
    parts = []
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/time"))  # a namespace of its own may shift the counter
    except OSError:  # not Linux, or an old one
        parts.append(socket.gethostname())
    return " ".join(parts)


def own_host() -> str:
    """The same for ranks of one machine and one network, whose messages need no link."""
    try:
        network = os.readlink("/proc/self/ns/net")  # hosts that a testbed emulates share a machine
    except OSError:
        network = ""
    return f"{machine()} {network}"


def numbered(hosts: Sequence[str]) -> tuple[int, ...]:
    """Names of each rank's host as numbers, in the order of their first ranks."""
    names = list(dict.fromkeys(hosts))
    return tuple(names.index(name) for name in hosts)


def hosts_of(peers: Peers) -> tuple[int, ...]:
    """Which host each rank is on. Collective."""
    return numbered(peers.gather(own_host()))


def _ask(other: int, peers: Peers) -> tuple[float, float]:
    """(offset, largest error) of the clock of `other`."""
    best = (0.0, float("inf"))
    try:
        for _ in range(ROUND_TRIPS):
            there = torch.zeros(1, dtype=torch.float64)
            begin = time.monotonic()
            dist.send(there, other, group=peers.group)
            dist.recv(there, other, group=peers.group)
            end = time.monotonic()
            error_s = (end - begin) / 2
            if error_s < best[1]:
                best = (there.item() - (ANCHOR_S + (begin + end) / 2), error_s)
    except RuntimeError as err:
        raise PeerError(f"rank {other} does not answer: its clock cannot be compared ({err})") from err
    return best


def _answer(peers: Peers) -> None:
    try:
        for _ in range(ROUND_TRIPS):
            asked = torch.zeros(1, dtype=torch.float64)
            dist.recv(asked, 0, group=peers.group)
            dist.send(asked.fill_(now_s()), 0, group=peers.group)
    except RuntimeError as err:
        raise PeerError(f"rank 0 does not ask: clocks cannot be compared ({err})") from err

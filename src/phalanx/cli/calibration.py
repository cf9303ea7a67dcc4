"""Times of this machine's operations, for `phalanx calibrate`: the kernels of a run on all ranks at once, then the links between them; or of all machines of a job.

Ranks compute at the same time, as in training, each with its share of the cores; a row is the median over repeats, and of the ranks of a host the slowest's (of the hosts the median,
`simulate/calibration/hosts.py`). Links are timed from a barrier to the end, with nothing else going on; ranks of several machines compare their clocks before each size.
Must never change: what is timed is what a run calls (`kernels/`, `runtime/comm/collectives.py`), not a stand-in for it.

Legend: m rows, n and k the sides of a weight, S tokens of a sequence, A heads, D dim of a head.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.core import messages
from phalanx.core.clock import now_s
from phalanx.core.errors import RunError
from phalanx.core.messages import message
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.norm import rms_norm
from phalanx.kernels.ops.swiglu import swiglu
from phalanx.runtime.comm import Axis, Collectives, GroupCache, Message, Peers, own_group
from phalanx.runtime.processes import StopRequest, WorldInfo, close_world, init_world, run_local, threads_per_rank
from phalanx.simulate.calibration import (
    HostRows,
    Measurements,
    TimedAttention,
    TimedCollective,
    TimedProduct,
    TimedStream,
    apart,
    combined,
    ranks_of_host,
)
from phalanx.train.setup import compare_clocks, own_host

TIMEOUT_S = 60.0
REPEAT_S = 0.08
"""Time spent on one row; at least three repeats."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PRODUCTS = tuple((m, n, k) for m in (64, 256, 1024) for n, k in ((256, 256), (1024, 256), (256, 1024), (1024, 1024)))
LARGE = (1024, 2048, 2048)
EXPERTS = tuple((groups, rows) for groups in (4, 8) for rows in (16, 64, 256, 1024))
"""Experts of a rank and rows of each; hidden 256, width 512."""
HIDDEN, FFN = 256, 512
LENGTHS = (128, 256, 512, 1024)
HEADS = (4, 8)
HEAD_DIM = 64
STREAM_ELEMENTS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
IDLE_S = 4e-3
"""Pause between two repeats of a collective: what a rank computes between two collectives of a step."""
LINK_BYTES = tuple(1 << i for i in range(8, 24, 3))


@message
@dataclass(frozen=True)
class JobMeasured:
    """What stands for a host of the job, and in what its hosts differ."""

    measured: Measurements
    apart: tuple[str, ...]


def measure(*, ranks: int) -> JobMeasured:
    """Everything, on `ranks` local ranks. Raises `RunError` where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="phalanx-calibrate-") as folder:
        path = Path(folder) / "rows"

        def main(info: WorldInfo, stop: StopRequest) -> int:
            found = measure_job(info)
            if found is not None:
                path.write_bytes(messages.encode(found))
            return 0

        code = run_local(main, ranks=ranks, threads=threads_per_rank(ranks))
        if code:
            raise RunError(f"a rank of the measurement ended with {code}")
        found: JobMeasured = messages.decode(path.read_bytes())
    return found


def measure_job(info: WorldInfo, *, host: str | None = None) -> JobMeasured | None:
    """Everything, as one rank of a job on one or several hosts: what was found on rank 0, None on the others. Collective.

    `host`: the name of this rank's host (None: ranks share one that share a machine and its network). Raises `ConfigError` where hosts are no equals (`ranks_of_host`).
    """
    init_world(info, device="cpu", timeout_s=TIMEOUT_S)
    comms, cache = Collectives(timeout_s=TIMEOUT_S), GroupCache(timeout_s=TIMEOUT_S)
    peers = Peers(own_group(info.world, timeout_s=TIMEOUT_S))
    told = peers.gather((host or own_host(), host or platform.node()))
    per_host = ranks_of_host([key for key, _ in told])
    own = _host_axis(info, cache, per_host)
    with Lanes(torch.get_num_threads(), rows=compiled_rows()) as lanes:
        rows = _compute_rows(partial(_together, comms, own), lanes)
    threads, memory = torch.get_num_threads(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_host
    name = f"host {info.rank // per_host} ({told[info.rank][1]})"
    hosts = peers.gather(HostRows(name=name, threads=threads, memory_bytes=memory, **rows))[::per_host]
    shared = None if len(hosts) == 1 else peers
    links = measure_links(comms, cache, info, ranks_per_host=per_host, peers=shared) if info.world > 1 else ()
    close_world()
    if info.rank != 0:
        return None
    title = f"{platform.machine()}, {per_host} ranks of {threads} threads on {os.cpu_count()} processors"
    title += f", {len(hosts)} hosts measured" if len(hosts) > 1 else ""
    return JobMeasured(combined(hosts, links, ranks_per_host=per_host, title=title), tuple(apart(hosts)))


def _host_axis(info: WorldInfo, cache: GroupCache, per_host: int) -> Axis:
    """The ranks of this rank's host."""
    for first in range(0, info.world, per_host):
        ranks = tuple(range(first, first + per_host))
        group = cache.get(ranks)
        if info.rank in ranks:
            own = Axis("host", ranks, info.rank - first, group)
    return own


def world_axis(info: WorldInfo, cache: GroupCache) -> Axis:
    """All ranks."""
    ranks = tuple(range(info.world))
    return Axis("world", ranks, info.rank, cache.get(ranks))


Timed = Callable[[Callable[[], object]], float]
Clock = Callable[[], float]
"""The same seconds on all ranks."""


def _together(comms: Collectives, axis: Axis, work: Callable[[], object]) -> float:
    """Seconds of `work` while all ranks do it: the slowest rank's median."""
    work()
    work()
    comms.barrier(axis)
    seconds, begin = list[float](), time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - begin < REPEAT_S:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return float(max(comms.gather_objects(statistics.median(seconds), axis)))


@torch.no_grad()
def _compute_rows(timed: Timed, lanes: Lanes) -> dict[str, Any]:
    one = torch.ones(1)
    big = torch.ones(1 << 24, dtype=torch.uint8), torch.empty(1 << 24, dtype=torch.uint8)
    return {
        "launch_s": timed(lambda: [torch.add(one, one, out=one) for _ in range(100)]) / 100,
        "copy_bytes_per_s": 2.0 * big[0].numel() / timed(lambda: big[1].copy_(big[0])),
        "products": tuple(
            TimedProduct(m=m, n=n, k=k, precision=kind, seconds=_product(timed, m, n, k, dtype))
            for kind, dtype in DTYPES.items()
            for m, n, k in (*PRODUCTS, LARGE)
        ),
        "experts": tuple(
            TimedProduct(
                m=g * r, n=FFN, k=HIDDEN, groups=g, precision=kind, seconds=_experts(timed, g, r, dtype, lanes)
            )
            for kind, dtype in DTYPES.items()
            for g, r in EXPERTS
        ),
        "attention": tuple(_attention(timed, seq, heads, lanes) for heads in HEADS for seq in LENGTHS),
        "streams": tuple(_streams(timed, lanes)),
    }


def _product(timed: Timed, m: int, n: int, k: int, dtype: torch.dtype) -> float:
    x, w, out = (torch.ones(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
    return timed(lambda: torch.mm(x, w.t(), out=out))


def _experts(timed: Timed, groups: int, rows: int, dtype: torch.dtype, lanes: Lanes) -> float:
    x_MH = torch.ones(groups * rows, HIDDEN, dtype=dtype)
    w13, w2 = torch.ones(groups, 2, FFN, HIDDEN, dtype=dtype), torch.ones(groups, HIDDEN, FFN, dtype=dtype)
    weights = torch.ones(groups * rows)
    counts = [rows] * groups
    return timed(lambda: expert_ffn(x_MH, w13, w2, counts, row_weights_M=weights, lanes=lanes))


def _attention(timed: Timed, seq: int, heads: int, lanes: Lanes) -> TimedAttention:
    with torch.enable_grad():
        q, k, v = (torch.ones(1, seq, heads, HEAD_DIM, dtype=torch.bfloat16).requires_grad_() for _ in range(3))

        def forward() -> torch.Tensor:
            return causal_attention(q, k, v, ((seq,),), lanes=lanes)

        out = forward()
        back = torch.ones_like(out)
        return TimedAttention(
            seq=seq,
            heads=heads,
            dim=HEAD_DIM,
            forward_s=timed(forward),
            backward_s=timed(lambda: torch.autograd.grad(out, (q, k, v), back, retain_graph=True)),
        )


def _streams(timed: Timed, lanes: Lanes) -> list[TimedStream]:
    rows = []
    for count in STREAM_ELEMENTS:
        x = torch.ones(count // HIDDEN, HIDDEN, dtype=torch.bfloat16)
        w, pair = torch.ones(HIDDEN, dtype=torch.bfloat16), x.view(-1, 2, HIDDEN // 2)
        seconds = timed(lambda x=x, w=w: rms_norm(x, w, 1e-5, lanes=lanes))  # type: ignore[misc]
        rows.append(TimedStream(what="norm", moved_bytes=4.0 * count, seconds=seconds))
        seconds = timed(lambda pair=pair: swiglu(pair, lanes=lanes))  # type: ignore[misc]
        rows.append(TimedStream(what="swiglu", moved_bytes=3.0 * count, seconds=seconds))
        seconds = timed(lambda x=x: x + x)  # type: ignore[misc]
        rows.append(TimedStream(what="sum", moved_bytes=4.0 * count, seconds=seconds))
    return rows


# ---- links -----------------------------------------------------------------------------------------------------------------------


def measure_links(
    comms: Collectives,
    cache: GroupCache,
    info: WorldInfo,
    *,
    sizes: Sequence[int] = LINK_BYTES,
    repeats: int = 9,
    ranks_per_host: int | None = None,
    peers: Peers | None = None,
) -> tuple[TimedCollective, ...]:
    """Every collective over 2, 4, ... ranks, and a message between two. Collective; all groups of one kind work at once, as in a run.

    `ranks_per_host` (None: all ranks share one): groups inside a host, and groups with as many ranks on each of several hosts. All ranks read one clock (hosts are
    emulated ones of this machine), or compare theirs over `peers`.
    """
    per_host, rows = ranks_per_host or info.world, []
    for inside, hosts in _spans(info.world, per_host):
        groups = _groups(info.world, per_host, inside, hosts)
        made = [(ranks, cache.get(ranks)) for ranks in groups]
        axis = next((Axis("link", r, r.index(info.rank), g) for r, g in made if info.rank in r), None)
        n = inside * hosts
        for size in sizes:
            clock = time.monotonic if peers is None else _common_clock(peers)
            for what, call in _calls(comms, axis, n, size).items():
                seconds = _link_s(comms, world_axis(info, cache), axis, call, repeats, clock)
                rows.append(TimedCollective(what=what, ranks=n, num_bytes=float(size), seconds=seconds, hosts=hosts))
    return tuple(rows)


def _common_clock(peers: Peers) -> Clock:
    """Rank 0's, read here. Collective."""
    ahead_s = compare_clocks(peers).offset_s
    return lambda: now_s() - ahead_s


def _spans(world: int, per_host: int) -> list[tuple[int, int]]:
    """(ranks of a host, hosts) of the groups that are timed."""
    hosts = world // per_host
    inside = sorted({n for n in (1, 2, 4, 8) if n < per_host} | {per_host})
    across = sorted({n for n in (1, 2, 4, 8) if n < hosts} | {hosts})
    return [(i, h) for h in across for i in inside if i * h > 1]


def _groups(world: int, per_host: int, inside: int, hosts: int) -> list[tuple[int, ...]]:
    """Groups of one kind, as many as there are side by side: `inside` consecutive ranks of each of `hosts` consecutive hosts."""
    found = []
    for host in range(0, world // per_host - hosts + 1, hosts):
        for place in range(0, per_host - inside + 1, inside):
            firsts = [(host + h) * per_host + place for h in range(hosts)]
            found.append(tuple(first + i for first in firsts for i in range(inside)))
    return found


def _link_s(
    comms: Collectives,
    world: Axis,
    axis: Axis | None,
    call: Callable[[], object] | None,
    repeats: int,
    clock: Clock,
) -> float:
    """Median over repeats and groups of the time from when the last rank of a group has posted it to its last end. Ranks were idle before, as those that
    wait for a peer: a call right behind another finds threads awake, and is faster than any in a step."""
    found = []
    for _ in range(repeats + 1):
        comms.barrier(world)
        time.sleep(IDLE_S)
        begin_s = clock()
        if call is not None:
            call()
        found.append((begin_s, clock()))
    told = comms.gather_objects((axis.ranks if axis is not None else (), found[1:]), world)
    groups: dict[tuple[int, ...], list[list[tuple[float, float]]]] = {}
    for ranks, spans in told:
        if ranks:
            groups.setdefault(tuple(ranks), []).append(spans)
    seconds = [
        max(end for _, end in each) - max(begin for begin, _ in each)
        for spans in groups.values()
        for each in zip(*spans, strict=True)
    ]
    return statistics.median(seconds)


def _calls(comms: Collectives, axis: Axis | None, n: int, size: int) -> dict[str, Callable[[], object] | None]:
    """What this rank does in each collective (None: it is in no group). `size` are bytes of the whole tensor, or those that a rank
    sends."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *(("send",) if n == 2 else ()))
    if axis is None:
        return dict.fromkeys(names)
    count = max(n, size // 4 // n * n)
    whole, part = torch.ones(count), torch.ones(count // n)
    splits = (count // n,) * n
    calls: dict[str, Callable[[], object] | None] = {
        "all_reduce": lambda: comms.all_reduce(whole, axis),
        "all_gather": lambda: comms.all_gather(part, axis, out=whole),
        "reduce_scatter": lambda: comms.reduce_scatter(whole, axis),
        "all_to_all": lambda: comms.all_to_all_raw(whole.view(-1, 1), axis, splits, splits, ""),
        "send": lambda: _send(comms, axis, whole),
    }
    return {name: calls[name] for name in names}


def _send(comms: Collectives, axis: Axis, tensor: torch.Tensor) -> None:
    """Sends from the first of two ranks to the second."""
    message = [Message(tensor, 1 - axis.index)]
    sends, receives = (message, []) if axis.index == 0 else ([], message)
    comms.start_exchange(sends, receives, axis).wait()

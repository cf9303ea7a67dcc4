"""One emulated host of `phalanx bench reshard`: forks its ranks, which measure the link, move every case by every method, and check what arrived.

Decides when the clock runs: from the moment that all ranks stand at the barrier until the last of them has its destination complete, plans made and
destination pages there before. Methods take turns. The rate of the link is measured before each case, by the same transport, in one stream.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import TensorLayout
from phalanx.plan.reshard.types import Hosts, Move
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.processes.launch import StopRequest, run_local
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world, read_world
from phalanx.runtime.reshard.executor import ReshardReport
from phalanx.runtime.reshard.resharder import PlanOptions, Resharder
from phalanx_lab.bench.reshard.cases import even_hosts
from phalanx_lab.bench.reshard.counts import gather_counts
from phalanx_lab.bench.reshard.nine import CASES, FIRST_DEST_RANK, RANKS_PER_HOST, NineCase

PATIENCE_S = 300.0
STREAM_BYTES, STREAM_MESSAGES, STREAM_OPEN = 1 << 20, 20, 4
"""The stream that measures a link: a second of 160 Mbit/s."""


@dataclass(frozen=True, kw_only=True)
class ReshardJob:
    """What the hosts are to do; written to a file for them."""

    cases: tuple[int, ...]
    methods: tuple[str, ...]
    mib: int
    rounds: int
    slow: tuple[str, ...]
    slow_rounds: int
    """Turns of the methods named by `slow`."""
    message_kib: int | None
    open_hops: int | None


def host_main(job_file: Path) -> int:
    """Fork the ranks of this host and wait for them."""
    found = json.loads(job_file.read_text())
    job = ReshardJob(
        **{**found, "cases": tuple(found["cases"]), "methods": tuple(found["methods"]), "slow": tuple(found["slow"])}
    )
    host = read_world()
    assert host is not None  # the testbed sets it
    return run_local(partial(_rank, job, job_file, host), ranks=RANKS_PER_HOST, threads=1)


def _rank(job: ReshardJob, job_file: Path, host: WorldInfo, local: WorldInfo, stop: StopRequest) -> int:
    world = host.world * RANKS_PER_HOST
    info = WorldInfo(
        rank=host.rank * RANKS_PER_HOST + local.rank,
        world=world,
        local_rank=local.rank,
        local_world=RANKS_PER_HOST,
        master_addr=host.master_addr,
        master_port=host.master_port,
    )
    init_world(info, timeout_s=PATIENCE_S)
    ranks = tuple(range(world))
    axis = Axis("hosts", ranks, info.rank, GroupCache(timeout_s=PATIENCE_S).get(ranks))
    bench = _Bench(job, Collectives(timeout_s=PATIENCE_S), axis)
    for case in (c for c in CASES if c.number in job.cases):
        row = bench.case(case)
        if info.rank == 0:
            with job_file.with_suffix(".rows").open("a") as file:
                file.write(json.dumps(row) + "\n")
    bench.comms.barrier(axis)
    close_world()
    return 0


class _Bench:
    """One rank."""

    def __init__(self, job: ReshardJob, comms: Collectives, axis: Axis) -> None:
        self.job, self.comms, self.axis = job, comms, axis
        self.rank = axis.index

    def case(self, case: NineCase) -> dict[str, Any]:
        """Measure one case; the first rank's row has the counts."""
        rate = max(
            self.link_bytes_per_s(0, FIRST_DEST_RANK) for _ in range(2)
        )  # what a busy machine took away is not the link's
        count = self.axis.size // RANKS_PER_HOST
        hosts = even_hosts(count, RANKS_PER_HOST, rate=rate)
        move = case.move(self.job.mib)
        source = _held(move.src, self.rank)
        found = {method: _Method(self, method, hosts, move, source) for method in self.job.methods}
        self._warm_up(case, hosts)
        for number in range(self.job.rounds):
            for name, method in found.items():
                rounds = self.job.slow_rounds if name in self.job.slow else self.job.rounds
                if number < rounds:
                    method.turn(last=number == rounds - 1)
        plans = {name: method.prepared.plan for name, method in found.items()}
        return {
            "case": case.number,
            "src": case.src,
            "dst": case.dst,
            "shape": list(move.src.shape),
            "bytes": case.num_bytes(self.job.mib),
            "link_bit_per_s": rate * 8,
            "bound_s": next(iter(plans.values())).bound.seconds,
            "methods": {name: method.row() for name, method in found.items()},
        }

    def _warm_up(self, case: NineCase, hosts: Hosts) -> None:
        """Each method once on a smaller tensor: connections (their windows have grown) and code are then warm."""
        for method in self.job.methods:
            move = case.move(max(1, self.job.mib // (16 if method in self.job.slow else 4)))
            _Method(self, method, hosts, move, _held(move.src, self.rank)).turn(last=False)

    def link_bytes_per_s(self, source: int, dest: int) -> float:
        """What one stream of large messages from rank to rank carries, from the end of its first message to that of its last; told to all."""
        self.comms.barrier(self.axis)
        seconds = 0.0
        if self.rank in (source, dest):
            buffers = [torch.zeros(STREAM_BYTES, dtype=torch.uint8) for _ in range(STREAM_OPEN)]
            start = self.comms.start_send if self.rank == source else self.comms.start_receive
            peer = dest if self.rank == source else source
            ends: list[float] = []
            under_way: list[Exchange] = []
            for i in range(STREAM_MESSAGES):
                if len(under_way) == STREAM_OPEN:
                    under_way.pop(0).wait()
                    ends.append(time.monotonic())
                under_way.append(start(Message(buffers[i % STREAM_OPEN], peer, i), self.axis, op_id="link"))
            for one in under_way:
                one.wait()
                ends.append(time.monotonic())
            seconds = ends[-1] - ends[0]
        told = self.comms.broadcast(torch.tensor([seconds], dtype=torch.float64), self.axis, root=dest)
        return (STREAM_MESSAGES - 1) * STREAM_BYTES / float(told)

    def options(self, method: str) -> PlanOptions:
        kib = self.job.message_kib
        return PlanOptions(
            method=method, message_bytes=None if kib is None else kib << 10, open_hops=self.job.open_hops
        )


class _Method:
    """A case moved in one way, by one rank."""

    def __init__(self, bench: _Bench, method: str, hosts: Hosts, move: Move, source: torch.Tensor | None) -> None:
        self.bench, self.move = bench, move
        self.resharder = Resharder(bench.comms, bench.axis, hosts=hosts, options=bench.options(method))
        begin_s = time.perf_counter()
        self.prepared = self.resharder.prepare((move,))
        self.plan_s = time.perf_counter() - begin_s
        self.source = source
        self.seconds: list[float] = []
        self.right = True
        self.once = True
        self.entered_bytes = 0
        self.distinct_bytes = 0
        self.staging_bytes = 0
        self.cpu_s: list[float] = []
        """Processor time of all ranks together, per turn."""

    def turn(self, *, last: bool) -> None:
        """Move it once, by the clock; after the last turn look at what came, and how often."""
        dest = self._blank()
        self.bench.comms.barrier(self.bench.axis)
        cpu_s, begin_s = time.process_time(), time.monotonic()
        self.resharder.move(self.prepared, [self.source], dtypes=[torch.int32], out=[dest])
        end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        report = self.resharder.report
        assert report is not None
        mine = (begin_s, end_s, report.staging_peak_bytes, cpu_s)
        told = list(zip(*self.bench.comms.gather_objects(mine, self.bench.axis), strict=True))
        self.seconds.append(max(told[1]) - min(told[0]))
        self.staging_bytes = max(told[2])
        self.cpu_s.append(sum(told[3]))
        if last:
            self._look(dest, report)

    def _look(self, dest: torch.Tensor | None, report: ReshardReport) -> None:
        right = _is_right(self.move.dst, self.bench.rank, dest)
        self.right = all(self.bench.comms.gather_objects(right, self.bench.axis))
        counts = gather_counts(
            self.bench.comms, self.bench.axis, report, moves=(self.move,), hosts=self.resharder.hosts
        )
        self.once = all(c.once for c in counts)
        self.entered_bytes = sum(c.entered_bytes for c in counts)
        self.distinct_bytes = sum(c.distinct_bytes for c in counts)

    def _blank(self) -> torch.Tensor | None:
        """A destination whose pages are there, with no right value in it."""
        dst = self.move.dst
        if self.bench.rank not in dst.ranks:
            return None
        return torch.full(dst.local_shapes[dst.ranks.index(self.bench.rank)], -1, dtype=torch.int32)

    def row(self) -> dict[str, Any]:
        plan = self.prepared.plan
        return {
            "seconds": self.seconds,
            "predicted_s": plan.makespan_s,
            "plan_s": self.plan_s,
            "messages": len(plan.hops),
            "right": self.right,
            "once": self.once,
            "entered_bytes": self.entered_bytes,
            "distinct_bytes": self.distinct_bytes,
            "staging_bytes": self.staging_bytes,
            "cpu_s": self.cpu_s,
        }


def _values(box: Box, shape: Sequence[int]) -> torch.Tensor:
    """Elements of the tensor whose every element is its own number."""
    out = torch.zeros((1,) * len(shape), dtype=torch.int32)
    step = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], dtype=torch.int32) * step
        out = out + along.view([-1 if d == dim else 1 for d in range(len(shape))])
        step *= shape[dim]
    return out


def _held(layout: TensorLayout, rank: int) -> torch.Tensor | None:
    """What a rank holds of it."""
    if rank not in layout.ranks:
        return None
    out = torch.empty(layout.local_shapes[layout.ranks.index(rank)], dtype=torch.int32)
    for held in layout.of_rank(rank):
        out[held.local_box().slices()] = _values(held.box, layout.shape)
    return out


def _is_right(layout: TensorLayout, rank: int, found: torch.Tensor | None) -> bool:
    return found is None or torch.equal(found, _held(layout, rank))  # type: ignore[arg-type]

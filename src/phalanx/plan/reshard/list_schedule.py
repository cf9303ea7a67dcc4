"""Schedules in which a stream has its lanes for itself: one sender, all needers at once, as a pipelined broadcast.

Decides senders and order. Must never change: two streams never share a lane (the sending or the receiving side of a host's link); the result depends on
its arguments alone (fixed random state, iterations counted and not timed).

The list scheduler starts at every completion, by priority, each waiting stream whose lanes are free. The sender of a stream is the holder with the
least load, streams with one holder first, then the longest first. Restarts vary the priorities, and every third one the senders.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.plan.reshard.flows import Edge, Flow, FlowSchedule, FlowStream
from phalanx.plan.reshard.types import Hosts

RESTARTS = 48
WORK = 20_000
"""Streams that all restarts together may place."""
NOISE = 0.3
SAME = 1e-12
"""Times closer than this part of a schedule are one."""


class SendTask(NamedTuple):
    """Bytes [start, stop) of a flow that go from one of `holders`."""

    flow: int
    start: int
    stop: int
    holders: tuple[int, ...]
    needers: tuple[int, ...]


class _Sent(NamedTuple):
    """A task with its sender: chain of hosts, lanes, seconds."""

    chain: tuple[int, ...]
    lanes: tuple[int, ...]
    mask: int
    seconds: float


def flow_tasks(flows: Sequence[Flow]) -> list[SendTask]:
    """Each flow that crosses hosts as one task."""
    return [SendTask(i, 0, f.num_bytes, f.holders, f.needers) for i, f in enumerate(flows) if f.needers]


def share_tasks(flows: Sequence[Flow], first: Sequence[Sequence[tuple[int, int]]]) -> list[SendTask]:
    """Each flow divided among its holders as a division of sending says."""
    tasks = []
    for number, (flow, shares) in enumerate(zip(flows, first, strict=True)):
        start = 0
        for host, size in shares:
            tasks.append(SendTask(number, start, start + size, (host,), flow.needers))
            start += size
    return tasks


def cut_tasks(tasks: Sequence[SendTask], flows: Sequence[Flow], parts: int) -> list[SendTask]:
    """Every task in so many equal parts."""
    out = []
    for task in tasks:
        grain = flows[task.flow].grain
        edges = [task.start + (task.stop - task.start) * i // parts // grain * grain for i in range(parts)]
        edges.append(task.stop)
        out += [task._replace(start=a, stop=b) for a, b in itertools.pairwise(edges) if a < b]
    return out


def best_list_schedule(
    tasks: Sequence[SendTask], hosts: Hosts, *, goal_s: float, name: str, restarts: int | None = None
) -> FlowSchedule:
    """The best of some restarts; stops at `goal_s`."""
    if not tasks:
        return FlowSchedule(name=name, streams=(), makespan_s=0.0)
    # not for secrets: any fixed sequence does, and it must be the same on every rank
    noise = random.Random(len(tasks))
    count = max(2, min(RESTARTS, WORK // len(tasks))) if restarts is None else restarts
    senders = _balanced(tasks, hosts)
    best: tuple[float, list[float], list[_Sent], list[int]] | None = None
    for attempt in range(count):
        if best is not None and attempt % 3 == 0:
            senders = _moved(tasks, best[3], noise)
        elif best is not None:
            senders = best[3]
        sent = [_sent(task, sender, hosts) for task, sender in zip(tasks, senders, strict=True)]
        order = _priorities(sent, hosts, noise if attempt else None)
        starts, makespan = list_schedule(sent, order, lanes=2 * hosts.count)
        if best is None or makespan < best[0]:
            best = makespan, starts, sent, list(senders)
        if best[0] <= goal_s:
            break
    assert best is not None
    return FlowSchedule(name=name, streams=streams_of(tasks, best[2], best[1]), makespan_s=best[0])


def streams_of(tasks: Sequence[SendTask], sent: Sequence[_Sent], starts: Sequence[float]) -> tuple[FlowStream, ...]:
    """Placed tasks as streams."""
    return tuple(
        FlowStream(
            task.flow,
            task.start,
            task.stop,
            tuple(Edge(s.chain[d], s.chain[d + 1], d) for d in range(len(s.chain) - 1)),
            begin,
            begin + s.seconds,
        )
        for task, s, begin in zip(tasks, sent, starts, strict=True)
    )


def _sent(task: SendTask, sender: int, hosts: Hosts) -> _Sent:
    """The chain from a sender through all needers; the slowest of them comes last and passes nothing on."""
    send, recv = hosts.send_bytes_per_s, hosts.recv_bytes_per_s
    chain = (sender, *sorted(task.needers, key=lambda h: (-send[h], h)))
    lanes = (*chain[:-1], *(hosts.count + h for h in chain[1:]))
    rate = min(*(send[h] for h in chain[:-1]), *(recv[h] for h in chain[1:]))
    return _Sent(chain, lanes, sum(1 << lane for lane in lanes), (task.stop - task.start) / rate)


def _balanced(tasks: Sequence[SendTask], hosts: Hosts) -> list[int]:
    """Each task's sender: tasks without a choice first, then the longest, each to the holder that would be done first."""
    load = [0.0] * hosts.count
    senders = [0] * len(tasks)
    rank = sorted(range(len(tasks)), key=lambda i: (len(tasks[i].holders) > 1, tasks[i].start - tasks[i].stop, i))
    for i in rank:
        size = tasks[i].stop - tasks[i].start
        sender = min(tasks[i].holders, key=lambda h: (load[h] + size / hosts.send_bytes_per_s[h], h))
        load[sender] += size / hosts.send_bytes_per_s[sender]
        senders[i] = sender
    return senders


def _moved(tasks: Sequence[SendTask], senders: Sequence[int], noise: random.Random) -> list[int]:
    """The same with one task given to another of its holders, if any has a choice."""
    out = list(senders)
    choices = [i for i, task in enumerate(tasks) if len(task.holders) > 1]
    if choices:
        i = noise.choice(choices)
        out[i] = noise.choice([h for h in tasks[i].holders if h != senders[i]])
    return out


def _priorities(sent: Sequence[_Sent], hosts: Hosts, noise: random.Random | None) -> list[int]:
    """Tasks, the most urgent first: those on the busiest lanes, then those that take many lanes for long."""
    load = [0.0] * (2 * hosts.count)
    for one in sent:
        for lane in one.lanes:
            load[lane] += one.seconds
    keys = []
    for one in sent:
        key = max(load[lane] for lane in one.lanes) + 0.1 * (len(one.chain) - 1) * one.seconds
        keys.append(key if noise is None else key * (1 + noise.uniform(-NOISE, NOISE)))
    return sorted(range(len(sent)), key=lambda i: (-keys[i], i))


def list_schedule(sent: Sequence[_Sent], order: Sequence[int], *, lanes: int) -> tuple[list[float], float]:
    """Beginnings, and the end of the last: at each completion, in order, whatever has all its lanes free."""
    place = {task: at for at, task in enumerate(order)}
    waiting: list[list[int]] = [[] for _ in range(lanes)]
    for task in order:
        for lane in sent[task].lanes:
            waiting[lane].append(task)
    starts = [-1.0] * len(sent)
    running: list[tuple[float, int]] = []
    busy, now, left, end = 0, 0.0, len(sent), 0.0
    candidates: Sequence[int] = order
    while left:
        for task in candidates:
            if not sent[task].mask & busy:
                busy |= sent[task].mask
                starts[task] = now
                end = max(end, now + sent[task].seconds)
                heapq.heappush(running, (now + sent[task].seconds, task))
                left -= 1
        now = running[0][0]
        freed: set[int] = set()
        while running and running[0][0] <= now + SAME * end:
            _, task = heapq.heappop(running)
            busy &= ~sent[task].mask
            freed.update(sent[task].lanes)
        ready: set[int] = set()
        for lane in freed:
            waiting[lane] = [task for task in waiting[lane] if starts[task] < 0]
            ready.update(waiting[lane])
        candidates = sorted(ready, key=place.__getitem__)
    return starts, end

"""The strategies of arXiv 2211.05322 and of the systems before it, as baselines that can be run, and as history to read.

Decides nothing that a plan of ours uses. Must never change: they see each unit task by itself (no flows), in tile order, as in the paper's artifact; a
solution is a sender for each task and one order, and a task begins when its sender and all its receivers are free (`busy_times`).

    send_recv         each device gets its slice from some device that has it, by itself: a slice enters a host once for each of its devices
    local_all_gather  each device of a host gets an equal part of the slice, and they gather it inside the host
    global_all_gather each receiving host gets an equal part of the slice, and they gather it in a ring of hosts
    naive             pipelined broadcast from the first host that has the slice, in tile order
    size_balanced     from the host with the fewest bytes so far, in tile order
    depth_first       search over (next task, sender), pruned by what is left, the best found within a number of nodes (the paper: one second)
    greedy            rounds of tasks that share no host: of 100 random maximal sets the largest, ties by the balance of senders
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from phalanx.plan.reshard.flows import Edge, Entry, Flow, FlowSchedule, FlowSet, FlowStream
from phalanx.plan.reshard.types import Hosts

HISTORY = ("send_recv", "local_all_gather", "global_all_gather", "naive", "size_balanced", "depth_first", "greedy")
TRIALS = 100
NODES = 20_000
"""Nodes of the depth-first search, in place of the paper's second."""

Solution = list[tuple[int, int]]
"""(task, sender) in order."""


def history_schedule(flows: FlowSet, hosts: Hosts, *, method: str) -> FlowSchedule:
    """The schedule of one of `HISTORY` for unit tasks."""
    tasks = flows.flows
    if method in ("send_recv", "local_all_gather"):
        return _direct(flows, hosts, method=method)
    if method == "global_all_gather":
        return _ring(tasks, hosts)
    if method == "naive":
        solution = naive(tasks)
    elif method == "size_balanced":
        solution = size_balanced(tasks, hosts)
    elif method == "depth_first":
        solution = depth_first(tasks, hosts)
    else:
        solution = greedy(tasks, hosts)
    return _in_order(tasks, hosts, solution, name=method)


def crossing_tasks(tasks: Sequence[Flow]) -> list[int]:
    """Tasks with a host that lacks the slice."""
    return [i for i, task in enumerate(tasks) if task.needers]


def seconds(task: Flow, sender: int, hosts: Hosts) -> float:
    """Time of a pipelined broadcast: at the rate of its slowest link."""
    rate = min(hosts.send_bytes_per_s[sender], *(hosts.recv_bytes_per_s[h] for h in task.needers))
    return task.num_bytes / rate


def busy_times(tasks: Sequence[Flow], hosts: Hosts, solution: Solution) -> tuple[list[float], float]:
    """Beginning of each step of a solution, and the end of the last: `max(ready(sender), ready(receivers))`, hosts keep to the order.

    Sending and receiving sides are apart, as in a full-duplex link; a receiver that passes a slice on (all but the last) is busy on both, which shows where hosts
    are sources and destinations.
    """
    sends, receives = [0.0] * hosts.count, [0.0] * hosts.count
    starts = []
    for i, sender in solution:
        task = tasks[i]
        sending = (sender, *task.needers[:-1])
        begin = max(*(sends[h] for h in sending), *(receives[h] for h in task.needers))
        end = begin + seconds(task, sender, hosts)
        for host in sending:
            sends[host] = end
        for host in task.needers:
            receives[host] = end
        starts.append(begin)
    return starts, max([*sends, *receives])


def naive(tasks: Sequence[Flow]) -> Solution:
    """Always the first replica."""
    return [(i, tasks[i].holders[0]) for i in crossing_tasks(tasks)]


def size_balanced(tasks: Sequence[Flow], hosts: Hosts) -> Solution:
    """The holder with the least bytes so far."""
    load = [0] * hosts.count
    out = []
    for i in crossing_tasks(tasks):
        sender = min(tasks[i].holders, key=lambda h: (load[h], h))
        load[sender] += tasks[i].num_bytes
        out.append((i, sender))
    return out


def greedy(tasks: Sequence[Flow], hosts: Hosts, *, weights: Sequence[float] | None = None, seed: int = 0) -> Solution:
    """The paper's randomised greedy. `weights` replace the sizes of slices; the shipped code took those of whole source tiles."""
    sizes = [float(t.num_bytes) for t in tasks] if weights is None else list(weights)
    choose = random.Random(seed)
    left = crossing_tasks(tasks)
    load = [0.0] * (2 * hosts.count)
    out: Solution = []
    while left:
        best: tuple[int, float, Solution] | None = None
        for _ in range(TRIALS):
            chosen = _maximal_set(tasks, left, load, choose)
            if best is not None and len(chosen) < best[0]:
                continue
            spread = -_spread(load, chosen, sizes, tasks, hosts)
            if best is None or (len(chosen), spread) > best[:2]:
                best = len(chosen), spread, chosen
        assert best is not None
        out += best[2]
        for i, sender in best[2]:
            for lane in (sender, *(hosts.count + h for h in tasks[i].needers)):
                load[lane] += sizes[i]
        done = {i for i, _ in best[2]}
        left = [i for i in left if i not in done]
    return out


def _maximal_set(tasks: Sequence[Flow], left: Sequence[int], load: Sequence[float], choose: random.Random) -> Solution:
    """Tasks in random order, each taken if its receivers and one of its holders are still free."""
    sending: set[int] = set()
    receiving: set[int] = set()
    out = []
    for i in choose.sample(left, len(left)):
        if any(h in receiving for h in tasks[i].needers):
            continue
        free = [h for h in tasks[i].holders if h not in sending]
        if not free:
            continue
        top = max(load[h] for h in free)
        sender = choose.choices(free, weights=[top - load[h] + 1 for h in free])[0]
        sending.add(sender)
        receiving.update(tasks[i].needers)
        out.append((i, sender))
    return out


def _spread(
    load: Sequence[float], chosen: Solution, sizes: Sequence[float], tasks: Sequence[Flow], hosts: Hosts
) -> float:
    """Deviation of the loads of all hosts, senders and receivers alike, when a set is added.

    Over senders alone, case 6 of the paper would come out at 1.333 with the true sizes too; the paper's code reaches 1.
    """
    after = list(load)
    for i, sender in chosen:
        after[sender] += sizes[i]
        for host in tasks[i].needers:
            after[hosts.count + host] += sizes[i]
    senders = {h for t in tasks for h in t.holders}
    receivers = {hosts.count + h for t in tasks for h in t.needers}
    values = [after[lane] for lane in sorted(senders | receivers)]
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def depth_first(tasks: Sequence[Flow], hosts: Hosts) -> Solution:
    """Search with pruning, begun with the tile order; the best solution found when the nodes are used up."""
    best = size_balanced(tasks, hosts)
    best_s = busy_times(tasks, hosts, best)[1]
    left = NODES
    stack: list[tuple[Solution, tuple[int, ...]]] = [([], tuple(crossing_tasks(tasks)))]
    while stack and left > 0:
        left -= 1
        prefix, rest = stack.pop()
        if not rest:
            end = busy_times(tasks, hosts, prefix)[1]
            if end < best_s:
                best, best_s = prefix, end
            continue
        if prefix and _estimate(tasks, hosts, prefix, rest) >= best_s:
            continue
        for i in reversed(rest):
            others = tuple(j for j in rest if j != i)
            stack += [([*prefix, (i, sender)], others) for sender in reversed(tasks[i].holders)]
    return best


def _estimate(tasks: Sequence[Flow], hosts: Hosts, prefix: Solution, rest: Sequence[int]) -> float:
    """Least time at which a prefix can end, by the paper: the rest goes to the holders that are free first, added up host by host."""
    sends, receives = [0.0] * hosts.count, [0.0] * hosts.count
    starts, _ = busy_times(tasks, hosts, prefix)
    for (i, sender), begin in zip(prefix, starts, strict=True):
        end = begin + seconds(tasks[i], sender, hosts)
        sends[sender] = max(sends[sender], end)
        for host in tasks[i].needers:
            receives[host] = max(receives[host], end)
    for i in rest:
        sender = min(tasks[i].holders, key=lambda h: (sends[h], h))
        took = seconds(tasks[i], sender, hosts)
        sends[sender] += took
        for host in tasks[i].needers:
            receives[host] += took
    return max([*sends, *receives])


def _in_order(tasks: Sequence[Flow], hosts: Hosts, solution: Solution, *, name: str) -> FlowSchedule:
    starts, end = busy_times(tasks, hosts, solution)
    streams = tuple(
        FlowStream(i, 0, tasks[i].num_bytes, _chain(tasks[i], sender), begin, begin + seconds(tasks[i], sender, hosts))
        for (i, sender), begin in zip(solution, starts, strict=True)
    )
    return FlowSchedule(name=name, streams=streams, makespan_s=end)


def _chain(task: Flow, sender: int) -> tuple[Edge, ...]:
    chain = (sender, *task.needers)
    return tuple(Edge(chain[d], chain[d + 1], d) for d in range(len(chain) - 1))


def _direct(flows: FlowSet, hosts: Hosts, *, method: str) -> FlowSchedule:
    """Every receiving host by itself, in tile order; with send_recv, as many times as it has devices that need the slice."""
    entry: Entry = "each" if method == "send_recv" else "parts"
    sends, receives, load = [0.0] * hosts.count, [0.0] * hosts.count, [0] * hosts.count
    streams = []
    for number, copies in enumerate(needers_by_host(flows, hosts)):
        task = flows.flows[number]
        for host in task.needers:
            sender = min(task.holders, key=lambda h: (load[h], h))
            size = task.num_bytes * (copies[host] if entry == "each" else 1)
            load[sender] += size
            begin = max(sends[sender], receives[host])
            end = begin + size / min(hosts.send_bytes_per_s[sender], hosts.recv_bytes_per_s[host])
            sends[sender] = receives[host] = end
            streams.append(FlowStream(number, 0, task.num_bytes, (Edge(sender, host, 0),), begin, end))
    return FlowSchedule(
        name=method, streams=tuple(streams), makespan_s=max([*sends, *receives], default=0.0), entry=entry
    )


def _ring(tasks: Sequence[Flow], hosts: Hosts) -> FlowSchedule:
    """Parts are scattered in the first round and go round the receiving hosts in the others, all tasks side by side."""
    load = [0] * hosts.count
    streams: list[FlowStream] = []
    for i in crossing_tasks(tasks):
        task = tasks[i]
        sender = min(task.holders, key=lambda h: (load[h], h))
        load[sender] += task.num_bytes
        items, count = task.num_bytes // task.grain, len(task.needers)
        cuts = [items * n // count * task.grain for n in range(count)] + [task.num_bytes]
        for n, (start, stop) in enumerate(pairwise(cuts)):
            turned = (*task.needers[n:], *task.needers[:n])
            if start < stop:
                streams.append(FlowStream(i, start, stop, _chain(task._replace(needers=turned), sender), 0.0, 0.0))
    rounds = [0.0]
    for depth in range(max((len(s.edges) for s in streams), default=0)):
        rounds.append(rounds[-1] + _round_seconds(streams, hosts, depth))
    timed = tuple(stream._replace(end_s=rounds[-1]) for stream in streams)
    return FlowSchedule(name="global_all_gather", streams=timed, makespan_s=rounds[-1], rounds_s=tuple(rounds))


def _round_seconds(streams: Sequence[FlowStream], hosts: Hosts, depth: int) -> float:
    """Time of the busiest lane when all streams move along their edges of this depth."""
    sends, receives = [0] * hosts.count, [0] * hosts.count
    for stream in streams:
        for edge in stream.edges:
            if edge.depth == depth:
                sends[edge.src] += stream.stop - stream.start
                receives[edge.dst] += stream.stop - stream.start
    lanes = (*zip(sends, hosts.send_bytes_per_s, strict=True), *zip(receives, hosts.recv_bytes_per_s, strict=True))
    return max(num_bytes / rate for num_bytes, rate in lanes)


def needers_by_host(flows: FlowSet, hosts: Hosts) -> list[dict[int, int]]:
    """Number of ranks of each host that need each unit task and do not hold it."""
    out: list[dict[int, int]] = [{} for _ in flows.flows]
    for group, flow_of in zip(flows.groups, flows.flow_of, strict=True):
        for flow, source, target in zip(
            flow_of.tolist(), group.source_of.tolist(), group.target_of.tolist(), strict=True
        ):
            for rank in group.targets[target]:
                if rank not in group.sources[source]:
                    host = hosts.host_of_rank[rank]
                    out[flow][host] = out[flow].get(host, 0) + 1
    return out


def perfect_order_seconds(schedule: FlowSchedule, hosts: Hosts) -> float:
    """Time of the busiest lane alone: what the strategy would take in the best of orders."""
    load = [0.0] * (2 * hosts.count)
    for stream in schedule.streams:
        for edge in stream.edges:
            load[edge.src] += stream.end_s - stream.begin_s
            load[hosts.count + edge.dst] += stream.end_s - stream.begin_s
    return max(load, default=0.0)

"""The shortest schedule of a set of flows, out of several kinds, and the bound that it is measured by.

Decides which schedulers are tried, in which order, and when one is good enough. Must never change: no budget in seconds (every rank must find the same
schedule), and a schedule within `GOOD` of the bound ends the search.

    greedy+   whole flows, one sender each, a pipelined broadcast at a time on every lane
    split     the same with flows divided among their holders by a linear program, each share in 1, 2 or 4 parts
    relay     all flows side by side in rounds, passed on by receivers: within its fill of the optimum, whatever the links
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.reshard.bound import Bound, Shares, chains_suffice, quick_bound, solve_shares
from phalanx.plan.reshard.flows import Flow, FlowSchedule
from phalanx.plan.reshard.list_schedule import best_list_schedule, cut_tasks, flow_tasks, share_tasks
from phalanx.plan.reshard.relay import relay_schedule
from phalanx.plan.reshard.types import Hosts

GOOD = 1.001
MOST_TASKS = 8192
"""Tasks that a list schedule may have."""


def find_bound(flows: Sequence[Flow], hosts: Hosts) -> tuple[Bound, Shares]:
    """The bound, and the division of sending that reaches it."""
    quick = quick_bound(flows, hosts)
    if chains_suffice(flows, hosts) and all(len(flow.holders) == 1 for flow in flows if flow.needers):
        first = tuple(((flow.holders[0], flow.num_bytes),) if flow.needers else () for flow in flows)
        return quick, Shares(quick.seconds, first, None)
    shares, proven = solve_shares(flows, hosts)
    return max((quick, proven), key=lambda bound: bound.seconds), shares


def best_schedule(flows: Sequence[Flow], hosts: Hosts, *, least_bytes: int) -> tuple[FlowSchedule, Bound]:
    """The shortest schedule found, and a bound for these flows (the quick one where that was enough)."""
    quick = quick_bound(flows, hosts)
    tasks = flow_tasks(flows)
    tried = [best_list_schedule(tasks, hosts, goal_s=quick.seconds * GOOD, name="greedy+", restarts=4)]
    if tried[0].makespan_s <= quick.seconds * GOOD:
        return tried[0], quick
    bound, shares = find_bound(flows, hosts)
    goal_s = bound.seconds * GOOD

    def good() -> bool:
        return min(s.makespan_s for s in tried) <= goal_s

    if not good():
        tried.append(best_list_schedule(tasks, hosts, goal_s=goal_s, name="greedy+"))
    pieces = share_tasks(flows, shares.first)
    for parts in (1, 2, 4):
        if good() or len(pieces) * parts > MOST_TASKS:
            break
        tried.append(best_list_schedule(cut_tasks(pieces, flows, parts), hosts, goal_s=goal_s, name="split"))
    if not good():
        tried.append(relay_schedule(flows, shares, hosts, least_bytes=least_bytes))
    return min(tried, key=lambda s: s.makespan_s), bound

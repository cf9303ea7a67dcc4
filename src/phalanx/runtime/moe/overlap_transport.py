"""Which transports an overlapped layer may choose from, and the counts that their bytes follow from.

Decides nothing: `plan/moe/overlap/prediction/bytes.py` takes the least. What a rank counts of its own batch travels with the counts of rows, so it costs no message.

Legend: T tokens of this rank, K experts of a token, P ranks of ep_etp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from phalanx.core.errors import ConfigError
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.prediction import Route, Traffic, traffic_of
from phalanx.plan.moe.overlap.tiles import can_forward, members
from phalanx.runtime.moe.dispatch import Dispatcher


def usable_hosts(
    dispatcher: Dispatcher, host_of_rank: Sequence[int] | None, *, forced: bool, per_token: bool | None
) -> tuple[int, ...]:
    """0, 1, ... for the host of each rank, where a token may go through one; () where each rank is a host, all share one, or nothing is known."""
    names = list(dict.fromkeys(host_of_rank or ()))
    hosts = tuple(names.index(host) for host in host_of_rank or ())
    usable = dispatcher.is_plain and can_forward(hosts)
    if forced and (not usable or per_token is False):
        rule = "needs several hosts, one of them with several ranks, one replica of each expert, and a token sent once"
        raise ConfigError.of("through_hosts", host_of_rank, rule, subject="overlap")
    return hosts if usable else ()


def routes(per_token: bool | None, through_hosts: bool | None, *, counted: bool) -> tuple[Route, ...]:
    """Transports to choose from; `counted`: it is known how many tokens go where."""
    if through_hosts:
        return ("dedup_host",)
    found: tuple[Route, ...] = ("all_to_all",) if per_token is False else ("dedup",)
    if per_token is None and counted:
        found = ("all_to_all", "dedup")
    return (*found, "dedup_host") if through_hosts is None and per_token is not False else found


def traffic_told(
    dispatcher: Dispatcher, plan: DispatchPlan, told: np.ndarray | None, hosts: tuple[int, ...]
) -> Traffic:
    """What the bytes of each transport follow from; `told` (P, ep + hosts): what `count_copies` has found on each rank."""
    if told is None:
        return traffic_of(plan)
    copies = np.repeat(told[:, : dispatcher.ep.size], dispatcher.etp.size, axis=1)
    if not hosts:
        return traffic_of(plan, copies)
    return traffic_of(plan, copies, host_of_rank=hosts, copies_PH=told[:, dispatcher.ep.size :])


def count_copies(
    dispatcher: Dispatcher, experts_TK: torch.Tensor, kept_TK: torch.Tensor | None, hosts: tuple[int, ...]
) -> torch.Tensor:
    """(ep + hosts,) tokens of this rank that have an expert on each ep coordinate, and on each host where these count."""
    per_rank = len(dispatcher.slots_G) // dispatcher.ep.size
    ep = dispatcher.ep.size
    coordinate_TK = torch.div(experts_TK, per_rank, rounding_mode="floor")
    if kept_TK is not None:  # dropped pairs go to a column of their own
        coordinate_TK = torch.where(kept_TK, coordinate_TK, ep)
    needs = torch.zeros(experts_TK.shape[0], ep + 1, dtype=torch.bool, device=experts_TK.device)
    needs = needs.scatter_(1, coordinate_TK, True)[:, :ep]
    if not hosts:
        return needs.sum(0)
    by_host = [
        needs[:, sorted({peer // dispatcher.etp.size for peer in members(hosts, host)})].any(1)
        for host in range(max(hosts) + 1)
    ]
    return torch.cat([needs.sum(0), torch.stack(by_host).sum(1)])

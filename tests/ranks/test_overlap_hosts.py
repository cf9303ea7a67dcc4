"""One copy of a token for each host, on forked ranks that stand for two hosts: a dense model's numbers, the plan's bytes, the same bits by every schedule."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import test_dispatch as dense
import torch
from copies import count_copies
from moe_help import context, moe_spec
from overlap_bytes_by_hand import count_host_copies
from tiers import times

from phalanx.core.errors import ConfigError
from phalanx.core.events import Collective
from phalanx.kernels.cpu.lanes import SERIAL
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import traffic_of, wire_bytes
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.peers import Peers, own_group
from phalanx.runtime.moe import overlap
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from phalanx.train.setup import machine
from ranks import run_ranks

pytestmark = pytest.mark.ranks
TWO_HOSTS = (0, 0, 1, 1)


def drawn(seed):
    """A random configuration of 4 ranks on two hosts or three: grid, experts, tokens (none among them), skew, policy, schedule, tiles."""
    draw = random.Random(seed)
    ep, etp = draw.choice(((4, 1), (4, 1), (4, 1), (2, 2), (1, 4), (2, 1)))
    experts = ep * draw.choice((1, 2, 3, 5))
    case = dense.Case(
        dense.make_folding(world=4, ep=ep, etp=etp),
        dense.POLICIES[draw.choice(("dropless", "dropless", "drop", "drop by position"))],
        tuple(draw.choice((0, 1, 5, 9)) for _ in range(4)),
        draw.choice((0.0, 0.0, 2.0, 100.0)),
        num_experts=experts,
        top_k=min(experts, draw.randint(1, 6)),
    )
    parts, blocks, hot = draw.randint(1, 4), draw.randint(1, 3), draw.random() < 0.4
    if draw.random() < 0.5:
        schedule = TileSchedule(parts=parts, blocks=blocks, seed=seed, hot_first=hot)
    else:
        schedule = TileSchedule(
            parts=parts, blocks=blocks, order=draw.choice(("serial", "own_first", "arrival")), hot_first=hot
        )
    hosts = draw.choice((TWO_HOSTS, TWO_HOSTS, (0, 1, 0, 1), (0, 1, 1, 1), (5, 5, 2, 9)))
    return case, schedule, hosts if ep * etp == 4 else (0, 1), draw.choice((1, 2, 4, 512))


def run_cases(rank, cache, cases):
    kept_call, kept_rows, found = dense.run_experts, overlap.TILE_ROWS, []
    try:
        for case, schedule, hosts, tile_rows in cases:

            def call(call, *, dispatcher, schedule=schedule, hosts=hosts):
                return overlap.run_overlapped(
                    call, dispatcher=dispatcher, schedule=schedule, lanes=SERIAL, host_of_rank=hosts,
                    through_hosts=True if len(hosts) == 4 else None,
                )  # fmt: skip

            dense.run_experts, overlap.TILE_ROWS = call, tile_rows
            found.append(dense.run_case(rank, cache, case, Collectives(timeout_s=240)))
    finally:
        dense.run_experts, overlap.TILE_ROWS = kept_call, kept_rows
    return found


def test_60_random_configurations_equal_a_dense_model():
    cases = [drawn(seed) for seed in range(60, 120)]
    results = run_ranks(4, run_cases, cases, timeout_s=400)
    for i, (case, *_) in enumerate(cases):
        dense.check_case(case, [r[i] for r in results])


# ---- one layer, float32 ---------------------------------------------------------------------------------------------------------

T, H, F, E, K = 32, 512, 32, 16, 6


def layer(rank, cache, calls, comms=None):
    """Outputs and gradients of one layer by each call, on one routing of skewed loads."""
    folding = dense.make_folding(world=4, ep=4)
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    g = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(T, H, generator=g)
    weights, experts_TK = (torch.rand(T, E, generator=g) + torch.linspace(0, 0.6, E)).topk(K)
    w13 = torch.randn(E // 4, 2, F, H, generator=g) / 20
    w2 = torch.randn(E // 4, H, F, generator=g) / 8
    comms = comms or ctx.comms
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=K)
    kept, overlap.TILE_ROWS = overlap.TILE_ROWS, 8
    out = []
    try:
        for call in calls:
            leaves = [t.clone().requires_grad_() for t in (x, w13, w2, weights)]
            given = MoeCall(
                x_TH=leaves[0],
                weights_TK=leaves[3],
                experts_TK=experts_TK,
                experts=ExpertWeights(*leaves[1:3]),
                op_prefix="mb0.L0.fwd.",
            )
            y, _ = overlap.run_overlapped(given, dispatcher=dispatcher, lanes=SERIAL, **call)
            (y * torch.linspace(-1, 1, H)).sum().backward()
            out.append([y.detach(), *(t.grad for t in leaves)])
    finally:
        overlap.TILE_ROWS = kept
    return out, experts_TK


def different_from_the_first(rank, cache, calls):
    (first, *others), _ = layer(rank, cache, calls)
    return [
        i for i, found in enumerate(others, 1) if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    ]


@pytest.mark.core
@pytest.mark.parametrize("through", [True, False])
def test_the_bits_do_not_depend_on_the_schedule(through):
    """Random orders and all that have names, with the slots as they are and the most loaded first."""
    draw = random.Random(3)
    schedules = [
        TileSchedule(), TileSchedule(parts=2, order="own_first"), TileSchedule(parts=3, blocks=2, order="arrival", own_before=0.5),
        *(TileSchedule(parts=draw.randint(1, 5), blocks=draw.randint(1, 2), seed=i) for i in range(times(4, 1))),
    ]  # fmt: skip
    schedules += [dataclasses.replace(s, hot_first=True) for s in schedules[2:5]]
    calls = [{"schedule": s, "host_of_rank": TWO_HOSTS, "through_hosts": through} for s in schedules]
    if not through:  # one row for each pair as well: there the order of the slots moves whole rows
        calls = [{**call, "per_token": True} for call in calls]
        rows = [{"schedule": s, "per_token": False} for s in schedules[::3]]
        assert run_ranks(4, different_from_the_first, rows) == [[]] * 4
    assert run_ranks(4, different_from_the_first, calls) == [[]] * 4


def sent_between(rank, cache):
    """Bytes that this rank sent to each other, forward and backward, by the transport that was chosen; and its routing."""
    told = []
    seen = []

    def choose(plan, wire):
        seen.append(wire.route)
        return TileSchedule(parts=3, order="arrival", own_before=0.5)

    calls = [{"schedule": choose, "host_of_rank": TWO_HOSTS}, {"schedule": choose}]
    comms = Collectives(trace=True, emit=told.append, timeout_s=30)
    tables = []
    for call in calls:
        told.clear()
        experts_TK = layer(rank, cache, [call], comms)[1]
        table = torch.zeros(2, 4, dtype=torch.int64)
        for event in told:
            if isinstance(event, Collective) and event.op == "send":
                table[int(".bwd." in event.op_id), event.sends_to[0]] += event.sent_bytes
        tables.append(table)
    return tables, experts_TK.numpy(), seen


def test_bytes_between_ranks_are_those_of_the_plan():
    """Message by message; on two hosts the transport with fewer bytes between them is chosen, and they are fewer."""
    results = run_ranks(4, sent_between)
    experts = [found[1] for found in results]
    counts = np.stack([np.bincount(e.ravel(), minlength=E) for e in experts])
    dispatch = plan_dispatch(counts, range(E), ep=4, etp=1)
    common = {"ep": 4, "etp": 1, "slots_per_rank": E // 4}
    copies = np.stack([count_copies(e, **common) for e in experts])
    of_hosts = [count_host_copies(e, etp=1, slots_per_rank=E // 4, host_of_rank=TWO_HOSTS) for e in experts]
    traffic = traffic_of(dispatch, copies, host_of_rank=TWO_HOSTS, copies_PH=np.stack(of_hosts))
    assert {tuple(found[2]) for found in results} == {("dedup_host", "dedup")}
    between = []
    for number, route in enumerate(("dedup_host", "dedup")):
        sent = torch.stack([found[0][number] for found in results], 1).numpy()
        wires = [wire_bytes(traffic, route, row_bytes=4 * H, direction=d) for d in ("forward", "backward")]
        for found, wire in zip(sent, wires, strict=True):
            np.testing.assert_array_equal(found, wire.total_PP)
        between.append(sum(wire.between_hosts for wire in wires))
    assert between[0] < 0.75 * between[1]


def found_hosts(rank, cache):
    """As it is, and with ranks of two machines."""
    peers = Peers(own_group(4, timeout_s=20))
    here = machine.hosts_of(peers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "machine", lambda: f"machine {rank % 2}")
        return here, machine.hosts_of(peers)


def test_ranks_find_out_who_shares_a_host():
    assert run_ranks(4, found_hosts) == [((0, 0, 0, 0), (0, 1, 0, 1))] * 4


def refused(rank, cache):
    found = []
    for call in (
        {"through_hosts": True},
        {"through_hosts": True, "host_of_rank": (0, 1, 2, 3)},
        {"through_hosts": True, "host_of_rank": TWO_HOSTS, "per_token": False},
    ):
        try:
            layer(rank, cache, [{"schedule": TileSchedule(), **call}])
        except ConfigError as error:
            found.append(str(error))
    return found


def test_forwarding_that_cannot_be_is_refused():
    for found in run_ranks(4, refused):
        assert len(found) == 3 and all("several hosts, one of them with several ranks" in text for text in found)

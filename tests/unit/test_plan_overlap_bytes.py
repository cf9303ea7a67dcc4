"""Bytes of each transport: counted again message by message, against closed forms, and the choice of the least."""

from collections import defaultdict

import numpy as np
import pytest
from copies import count_copies
from overlap_bytes_by_hand import count_host_copies, expected_rows
from overlap_plan_help import routed, traffic_by_routing

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import ROUTES, choose_transport, traffic_of, wire_bytes

pytestmark = pytest.mark.unit
ROW = 4096


def by_hand(dispatch, experts, route, *, row_bytes, direction, hosts):
    """(outbound, inbound) bytes between ranks, token by token."""
    size, etp = dispatch.ep * dispatch.etp, dispatch.etp
    outbound, inbound = defaultdict(int), defaultdict(int)
    position = 0 if route == "all_to_all" else 4
    there, back = (4 + position, 0) if direction == "forward" else (0, 4)

    def hop(a, b, entries, pairs, pairs_back):
        if a != b:
            outbound[a, b] += entries * row_bytes + pairs * there
            inbound[b, a] += entries * row_bytes + pairs_back * back

    def gateway(source, host):
        if hosts[source] == host:
            return source
        members = [r for r in range(size) if hosts[r] == host]
        return members[[r for r in range(size) if hosts[r] == hosts[source]].index(source) % len(members)]

    for source, experts_TK in enumerate(experts):
        for chosen in experts_TK:
            pairs = [sum(int(e) // dispatch.slots_per_rank == d // etp for e in chosen) for d in range(size)]
            if route != "dedup_host":
                for d, n in enumerate(pairs):
                    hop(source, d, {"all_to_all": n, "dedup": n > 0, "all_gather": 1}[route], n, n)
                continue
            for host in sorted(set(hosts)):
                inside = [d for d in range(size) if hosts[d] == host]
                through, total = gateway(source, host), sum(pairs[d] for d in inside)
                hop(source, through, total > 0, total, 0)
                for d in inside:
                    hop(through, d, pairs[d] > 0, pairs[d], 0)
                    hop(source, d, 0, 0, pairs[d])
    table = np.zeros((2, size, size), dtype=np.int64)
    for matrix, found in zip(table, (outbound, inbound), strict=True):
        for (a, b), n in found.items():
            matrix[a, b] = n
    return table


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("route", ROUTES)
def test_bytes_are_those_of_every_single_message(route, direction):
    rng = np.random.default_rng(0)
    for ep, etp, per_rank, top_k, hosts in (
        (2, 1, 4, 3, (0, 1)),
        (4, 1, 2, 4, (0, 0, 1, 1)),
        (3, 1, 2, 2, (0, 0, 1)),
        (2, 2, 3, 2, (0, 0, 1, 1)),
        (2, 2, 3, 2, (0, 1, 0, 1)),
        (1, 2, 4, 2, (0, 0)),
    ):
        dispatch, experts = routed(rng, ep=ep, etp=etp, per_rank=per_rank, top_k=top_k, tokens=9, skew=0.3)
        of_hosts = [
            count_host_copies(e, etp=etp, slots_per_rank=dispatch.slots_per_rank, host_of_rank=hosts) for e in experts
        ]
        traffic = traffic_by_routing(dispatch, experts, host_of_rank=hosts, copies_PH=np.stack(of_hosts))
        wire = wire_bytes(traffic, route, row_bytes=100, direction=direction)
        outbound, inbound = by_hand(dispatch, experts, route, row_bytes=100, direction=direction, hosts=hosts)
        np.testing.assert_array_equal(wire.outbound_PP, outbound)
        np.testing.assert_array_equal(wire.inbound_PP, inbound)
        away = np.asarray(hosts)[:, None] != np.asarray(hosts)
        assert wire.between_hosts == (outbound + inbound)[away].sum()
        assert wire.total == (outbound + inbound).sum()


def test_the_table_of_the_reference():
    """Rows received by a rank of 8, in tokens of the group (closed form): all-gather, all-to-all, one copy a rank."""
    for experts, top_k, all_to_all, dedup in ((8, 2, 0.219, 0.219), (64, 4, 0.438, 0.369), (256, 8, 0.875, 0.579)):
        shares = [
            expected_rows(r, tokens=1, ranks=8, experts=experts, top_k=top_k)
            for r in ("all_gather", "all_to_all", "dedup")
        ]
        assert [round(s, 4) for s in shares] == pytest.approx([0.875, all_to_all, dedup], abs=6e-4)


def test_random_routing_comes_close_to_the_closed_form():
    rng = np.random.default_rng(1)
    for per_rank, top_k in ((1, 2), (8, 4)):
        dispatch, experts = routed(rng, ep=8, per_rank=per_rank, top_k=top_k, tokens=256)
        traffic = traffic_by_routing(dispatch, experts)
        for route in ("all_gather", "all_to_all", "dedup"):
            rows = wire_bytes(traffic, route, row_bytes=1, direction="backward").outbound_PP.sum() / 8
            wanted = expected_rows(route, tokens=8 * 256, ranks=8, experts=8 * per_rank, top_k=top_k)
            assert rows == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_two_of_eight_experts_over_eight_ranks_need_a_quarter_of_the_all_gather(direction):
    dispatch, experts = routed(np.random.default_rng(2), ep=8, per_rank=1, top_k=2, tokens=512)
    traffic = traffic_by_routing(dispatch, experts)
    choice = choose_transport(traffic, row_bytes=ROW)
    gathered = wire_bytes(traffic, "all_gather", row_bytes=ROW, direction=direction)
    chosen = wire_bytes(traffic, choice.route, row_bytes=ROW, direction=direction)
    assert chosen.total <= 0.26 * gathered.total


def test_the_choice_is_the_least_of_what_was_compared():
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(60):
        ep, per_rank = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        top_k = int(rng.integers(1, min(8, ep * per_rank) + 1))
        dispatch, experts = routed(rng, ep=ep, per_rank=per_rank, top_k=top_k, tokens=20, skew=0.2 * rng.random())
        traffic = traffic_by_routing(dispatch, experts)
        row_bytes = int(rng.choice([64, 4096]))
        choice = choose_transport(traffic, row_bytes=row_bytes)
        totals = {r: wire_bytes(traffic, r, row_bytes=row_bytes).total for r in ("all_to_all", "all_gather", "dedup")}
        assert totals[choice.route] == min(totals.values())
        assert {r: total for r, _, total in choice.totals} == totals
        seen.add(choice.route)
    assert seen == {"all_to_all", "all_gather", "dedup"}


def test_of_equal_bytes_the_simplest_is_taken():
    alone = plan_dispatch([[3, 4]], range(2), ep=1, etp=1)
    assert choose_transport(traffic_of(alone), row_bytes=ROW).route == "all_to_all"
    # every token to both ranks of an etp group, two pairs each: all-gather and one copy a rank are the same, all-to-all is twice as much
    sliced = plan_dispatch([[5, 5], [5, 5]], range(2), ep=1, etp=2)
    traffic = traffic_of(sliced, [[5, 5], [5, 5]], tokens_P=[5, 5])
    assert choose_transport(traffic, row_bytes=ROW).route == "all_gather"


def test_forwarding_inside_hosts_saves_bytes_between_them():
    dispatch, experts = routed(np.random.default_rng(4), ep=8, per_rank=8, top_k=8, tokens=64)
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    of_hosts = [count_host_copies(e, etp=1, slots_per_rank=8, host_of_rank=hosts) for e in experts]
    traffic = traffic_by_routing(dispatch, experts, host_of_rank=hosts, copies_PH=np.stack(of_hosts))
    choice = choose_transport(traffic, row_bytes=ROW, among=ROUTES)
    between = {route: n for route, n, _ in choice.totals}
    assert choice.route == "dedup_host" and between["dedup_host"] < 0.5 * between["dedup"]


def test_dropped_pairs_need_no_copy():
    slots = [[0, 3], [1, -1], [-1, -1], [2, 3]]
    assert count_copies(slots, ep=2, etp=2, slots_per_rank=2).tolist() == [2, 2, 2, 2]
    assert count_copies(slots, ep=4, etp=1, slots_per_rank=1).tolist() == [1, 1, 1, 2]
    assert count_host_copies(slots, etp=1, slots_per_rank=1, host_of_rank=[0, 0, 1, 1]).tolist() == [2, 2]
    assert count_host_copies(slots, etp=2, slots_per_rank=2, host_of_rank=[0, 1, 0, 1]).tolist() == [3, 3]


def test_counts_that_contradict_each_other_are_named():
    dispatch = plan_dispatch([[3, 4], [0, 2]], range(2), ep=2, etp=1)
    with pytest.raises(PlanError, match=r"copies\[0, 1\] = \(5, 4, 9\).*no more tokens than pairs"):
        traffic_of(dispatch, [[3, 5], [0, 2]], tokens_P=[9, 9])
    with pytest.raises(PlanError, match=r"tokens\[1, 1\].*no more tokens than the source has"):
        traffic_of(dispatch, [[3, 4], [0, 2]], tokens_P=[9, 1])
    with pytest.raises(PlanError, match=r"copies\[0, 0\].*at most once in each of 1 slots"):
        traffic_of(dispatch, [[2, 4], [0, 2]])
    with pytest.raises(PlanError, match="one entry for each of 2 ranks"):
        traffic_of(dispatch, tokens_P=[9])
    with pytest.raises(PlanError, match="one or more of all_to_all"):
        choose_transport(traffic_of(dispatch), row_bytes=ROW, among=["pigeon"])

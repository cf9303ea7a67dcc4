"""The executor for devices, on an emulated device of two streams: the bits of the one for hosts in every order that events allow, and what is left out shows.

No CUDA device is needed, and none was there: what these tests cannot show is in docs/explanation/overlap-gpu.md.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from emulated_device import EmulatedDevice
from thread_ranks import Hub, ThreadCollectives, run_threads, thread_groups
from tiers import times

from phalanx.kernels.cpu import tiles
from phalanx.kernels.cpu.lanes import SERIAL
from phalanx.kernels.ops import permute
from phalanx.kernels.ops.deferred import DeferredGradients, run
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.moe.overlap.tiles.rounds import rounds_of
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Counter
from phalanx.runtime.comm.groups import build_groups
from phalanx.runtime.moe import dispatch, overlap, overlap_exchange as overlap_flight, overlap_lists
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from ranks import run_ranks

H, F = 16, 8
COLLECTIVES = {"all_gather", "start_exchange", "_allgather_base_", "send", "recv_"}
"""Which an emulated device has to be idle for, and a device has not."""


def device_order(keys_N, largest):
    """`stable_order` as it is on a device."""
    return torch.sort(keys_N.to(torch.int32), stable=True).indices


def drawn(seed, world):
    """A random layer: grid, experts, top-k, tokens of each rank, transport, schedule, what else may be asked for."""
    draw = random.Random(seed)
    ep, etp = draw.choice([(ep, world // ep) for ep in (2, 3, 4) if world % ep == 0 and world // ep <= 2])
    experts = ep * draw.choice((1, 2, 4))
    schedule = TileSchedule(parts=draw.randint(1, 4), blocks=draw.randint(1, 2), seed=draw.randrange(1000))
    if draw.random() < 0.7:
        order = draw.choice(("serial", "own_first", "arrival"))
        before = draw.random() if order == "arrival" else 1.0
        schedule = TileSchedule(parts=schedule.parts, blocks=schedule.blocks, order=order, own_before=before)
    return {
        "grid": {"ep": ep, "etp": etp},
        "experts": experts,
        "top_k": min(experts, draw.randint(1, 3)),
        "tokens": [draw.choice((0, 3, 9, 14)) for _ in range(world)],
        "schedule": schedule,
        "per_token": draw.choice((True, False, None)),
        "skew": draw.choice((0.0, 3.0)),
        "dtype": draw.choice((torch.float32, torch.bfloat16)),
        "options": draw.choice((set(), set(), {"recompute"}, {"later"}, {"beside"}, {"two layers"})),
        "seed": seed,
    }


def one_pass(rank, case, groups, comms, device=None):
    """Output and gradients of one layer; by `device` where there is one."""
    folding = groups.folding
    dispatcher = Dispatcher(
        DispatchSpec(), placement=plain_placement(case["experts"], folding), groups=groups, comms=comms,
        top_k=case["top_k"],
    )  # fmt: skip
    g = torch.Generator().manual_seed(100 * case["seed"] + rank)
    tokens, slots = case["tokens"][rank], case["experts"] // folding.ep
    x = torch.randn(tokens, H, generator=g)
    scores = torch.rand(tokens, case["experts"], generator=g) + torch.linspace(case["skew"], 0, case["experts"])
    weights, experts_TK = scores.topk(case["top_k"])
    weights.requires_grad_()
    dy = torch.randn(tokens, H, generator=g).to(case["dtype"])
    g = torch.Generator().manual_seed(case["seed"] + folding.coord(rank, "ep"))
    w13, w2 = (
        torch.randn(*size, generator=g) for size in ((slots, 2, F // folding.etp, H), (slots, H, F // folding.etp))
    )
    leaves = [t.to(case["dtype"]).requires_grad_() for t in (x, w13, w2)]
    later = DeferredGradients() if "later" in case["options"] else None

    def layer(x):
        call = MoeCall(
            x_TH=x,
            weights_TK=weights,
            experts_TK=experts_TK,
            experts=ExpertWeights(*leaves[1:]),
            later=later,
            recompute="recompute" in case["options"],
            beside=(lambda: x * 2) if "beside" in case["options"] else None,
        )
        how = {"schedule": case["schedule"], "per_token": case["per_token"], "lanes": SERIAL}
        return overlap.run_overlapped(call, dispatcher=dispatcher, **how)[0]

    def forward_and_backward():
        y = layer(leaves[0])
        if "two layers" in case["options"]:
            y = layer(y)
        syncs = device.host_syncs if device else 0
        y.backward(dy)
        if later is not None:
            run(later.take())
        return y, syncs, device.host_syncs if device else 0

    if device is None:
        y, *_ = forward_and_backward()
    else:
        with device:
            y, *syncs = forward_and_backward()
        device.synchronise()
        if device.syncs_at_posts and "two layers" not in case["options"]:
            # from the first message posted to the end of the backward pass the host waits for nothing
            assert {*device.syncs_at_posts, *syncs} == {device.syncs_at_posts[0]}
            sizes = [why for why in device.host_reads if why not in COLLECTIVES]
            assert len(sizes) <= 3 and {*sizes} <= {"numpy", "tolist"}, (
                device.host_reads
            )  # counts; what goes, what comes
    return [t.detach().clone() for t in (y, *(t.grad for t in leaves), weights.grad)]


@contextmanager
def small_layers(*, on_device=False, rounds=rounds_of):
    """Small tiles and blocks. `on_device`: what a device does where a host looks at its own memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "TILE_ROWS", 4)
        patch.setattr(tiles, "COLUMNS", H // 2)
        patch.setattr(overlap_flight, "rounds_of", rounds)
        if on_device:
            patch.setattr(permute, "_is_complete", lambda index: False)
            for module in (overlap_lists, dispatch):
                patch.setattr(module, "stable_order", device_order)
        yield


def on_threads(case, seed=None, faults=(), rounds=rounds_of):
    """Of all ranks: what `one_pass` gives. `seed` and `faults` of the emulated devices; None: as hosts do it."""
    size = len(case["tokens"])
    folding, hub = make_folding(world=size, **case["grid"]), Hub(size)

    def rank_main(rank):
        device = None if seed is None else EmulatedDevice(size * seed + rank, faults)
        comms = ThreadCollectives(hub, rank, device)
        return one_pass(rank, case, thread_groups(folding, rank), comms, device)

    with small_layers(on_device=seed is not None, rounds=rounds):
        return run_threads(size, rank_main)


def same(all_a, all_b):
    return all(torch.equal(t, u) for a, b in zip(all_a, all_b, strict=True) for t, u in zip(a, b, strict=True))


@pytest.mark.parametrize(("world", "count"), [(2, times(12, 5)), (3, times(4, 2)), (4, times(4, 1))])
def test_the_bits_of_the_executor_for_hosts(world, count):
    """Forward and backward, both transports, any order of the streams; `one_pass` also asserts that the host waits for nothing once messages are posted."""
    for number in range(count):
        case = drawn(number, world)
        plain = on_threads(case)
        for seed, width in enumerate((None, 1)):
            got = on_threads(case, 10 * number + seed, rounds=partial(rounds_of, width=width))
            assert same(plain, got), (number, seed)


PLAIN = {**drawn(0, 2), "experts": 4, "top_k": 2, "tokens": [14, 14], "per_token": True, "skew": 0.0, "options": set()}
PLAIN["schedule"] = TileSchedule(parts=2, blocks=2, order="arrival", own_before=0.5)
PLAIN["dtype"] = torch.float32


@pytest.mark.parametrize("fault", ["post without waiting", "use without waiting", "keep nothing"])
def test_a_missing_event_and_memory_given_back_too_early_show(fault):
    plain = on_threads(PLAIN)
    assert not all(same(plain, on_threads(PLAIN, seed, (fault,))) for seed in range(12))


def test_rounds_in_the_wrong_order_show():
    """Two blocks of one part on one rank: messages of equal sizes, so that nothing but the numbers is wrong."""

    def wrong(plan):
        rounds = list(rounds_of(plan))
        at = next(i for i, one in enumerate(rounds) if one.legs[0].kind == "inbound")
        if plan.rank == 1:
            rounds[at : at + 2] = rounds[at + 1], rounds[at]
        return tuple(rounds)

    assert not same(on_threads(PLAIN), on_threads(PLAIN, 3, rounds=wrong))


# ---- messages by gloo ----------------------------------------------------------------------------------------------------------------


def by_gloo(rank, cache, cases):
    """Whether the device's bits are the host's, and the bytes that each has counted."""
    found = []
    for number, case in enumerate(cases):
        groups = build_groups(make_folding(world=len(case["tokens"]), **case["grid"]), rank=rank, cache=cache)
        host, beside, device = Collectives(timeout_s=240), Collectives(timeout_s=30), EmulatedDevice(number)
        beside.message_streams = device
        with small_layers():
            plain = one_pass(rank, case, groups, host)
        with small_layers(on_device=True):
            got = one_pass(rank, case, groups, beside, device)
        sent = [
            comms.counters.get((op, "ep_etp"), Counter()).sent_bytes
            for comms, op in ((host, "send"), (beside, "exchange"))
        ]
        found.append((same([plain], [got]), sent[0] == sent[1]))
    return found


@pytest.mark.ranks
def test_ranks_whose_messages_go_by_gloo():
    cases = [PLAIN, *(drawn(seed, 2) for seed in range(4))]
    assert run_ranks(2, by_gloo, cases, timeout_s=400) == [[(True, True)] * len(cases)] * 2

"""The executor for devices, on an emulated device of two streams: the bits of the one for hosts in every order that events allow, and what is left out shows.

No CUDA device is needed, and none was there: what these tests cannot show is in docs/overlap-gpu.md.
"""

from __future__ import annotations

import random

import pytest
import torch

import test_dispatch as dense
from emulated_device import EmulatedDevice
from moe_help import context, moe_spec
from phalanx.kernels import permute, tiles
from phalanx.kernels.lanes import SERIAL
from phalanx.kernels.later import Later, run
from phalanx.plan.overlap_rounds import rounds_of
from phalanx.plan.overlap_types import Schedule
from phalanx.runtime import overlap, overlap_lists
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.dispatch import Dispatcher
from phalanx.runtime.experts import ExpertWeights
from ranks import run_ranks

H, F = 16, 8


def device_order(keys_N, largest):
    """`stable_order` as it is on a device."""
    return torch.sort(keys_N.to(torch.int32), stable=True).indices


def drawn(seed, world):
    """A random layer: grid, experts, top-k, tokens of each rank, transport, schedule, what else may be asked for."""
    draw = random.Random(seed)
    ep, etp = draw.choice([(ep, world // ep) for ep in (2, 3, 4) if world % ep == 0 and world // ep <= 2])
    experts = ep * draw.choice((1, 2, 4))
    schedule = Schedule(parts=draw.randint(1, 4), blocks=draw.randint(1, 2), seed=draw.randrange(1000))
    if draw.random() < 0.7:
        order = draw.choice(("serial", "own_first", "arrival"))
        before = draw.random() if order == "arrival" else 1.0
        schedule = Schedule(parts=schedule.parts, blocks=schedule.blocks, order=order, own_before=before)
    return {
        "grid": {"ep": ep, "etp": etp},
        "experts": experts,
        "top_k": min(experts, draw.randint(1, 3)),
        "tokens": [draw.choice((0, 3, 9, 14)) for _ in range(world)],
        "schedule": schedule,
        "per_token": draw.choice((True, False, None)),
        "skew": draw.choice((0.0, 3.0)),
        "dtype": draw.choice((torch.float32, torch.bfloat16)),
        "options": draw.choice(({}, {}, {"recompute": True}, {"later": True})),
        "seed": seed,
    }


def one_pass(rank, cache, case, device=None, width=None):
    """Output and gradients of one layer; by `device` where there is one."""
    folding = dense.make_folding(world=len(case["tokens"]), **case["grid"])
    comms = Collectives(timeout_s=30)
    spec = moe_spec(num_experts=case["experts"], top_k=case["top_k"], hidden=H, expert_ffn=F)
    ctx = context(spec, folding=folding, rank=rank, cache=cache, comms=comms)
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=case["top_k"])
    g = torch.Generator().manual_seed(100 * case["seed"] + rank)
    tokens, slots = case["tokens"][rank], case["experts"] // folding.ep
    x = torch.randn(tokens, H, generator=g)
    scores = torch.rand(tokens, case["experts"], generator=g) + torch.linspace(case["skew"], 0, case["experts"])
    weights, experts_TK = scores.topk(case["top_k"])
    weights.requires_grad_()
    g = torch.Generator().manual_seed(case["seed"] + folding.coord(rank, "ep"))
    w13, w2 = (
        torch.randn(slots, 2, F // folding.etp, H, generator=g),
        torch.randn(slots, H, F // folding.etp, generator=g),
    )
    leaves = [t.to(case["dtype"]).requires_grad_() for t in (x, w13, w2)]
    dy = torch.randn(tokens, H, generator=g).to(case["dtype"])
    later = Later() if "later" in case["options"] else None

    def forward_and_backward():
        y, _ = overlap.run_overlapped(
            leaves[0], weights, experts_TK, experts=ExpertWeights(*leaves[1:]), dispatcher=dispatcher,
            schedule=case["schedule"], per_token=case["per_token"], lanes=SERIAL, later=later,
            recompute="recompute" in case["options"], op_prefix="layer.",
        )  # fmt: skip
        syncs = device.host_syncs if device else 0
        y.backward(dy)
        if later is not None:
            run(later.take())
        return y, syncs, device.host_syncs if device else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "TILE_ROWS", 4)
        patch.setattr(tiles, "COLUMNS", H // 2)
        if width is not None:
            patch.setattr(overlap, "rounds_of", lambda plan: rounds_of(plan, width=width))
        if device is None:
            y, *_ = forward_and_backward()
        else:  # what a device does where a host looks at its own memory
            patch.setattr(permute, "_is_complete", lambda index: False)
            patch.setattr(overlap_lists, "stable_order", device_order)
            comms.message_streams = device
            with device:
                y, *syncs = forward_and_backward()
            device.synchronise()
            assert not device.syncs_at_posts or {*device.syncs_at_posts, *syncs} == {device.syncs_at_posts[0]}
    return [t.detach().clone() for t in (y, *(t.grad for t in leaves), weights.grad)], comms


def same(a, b):
    return all(torch.equal(t, u) for t, u in zip(a, b, strict=True))


def different(rank, cache, cases, seeds, faults=(), width=None):
    """(case, seed) where the device's bits are not the host's."""
    found = []
    for number, case in enumerate(cases):
        plain, _ = one_pass(rank, cache, case)
        for seed in seeds:
            got, _ = one_pass(rank, cache, case, EmulatedDevice(1000 * number + seed, faults), width)
            found += [] if same(plain, got) else [(number, seed)]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "count"), [(2, 30), (3, 12), (4, 12)])
def test_the_bits_of_the_executor_for_hosts(world, count):
    """Forward and backward, every transport, every order of the streams; `one_pass` also asserts that the host waits for nothing once messages are posted."""
    cases = [drawn(seed, world) for seed in range(count)]
    for width in (None, 1):
        assert run_ranks(world, different, cases, range(2), (), width, timeout_s=120) == [[]] * world


PLAIN = {**drawn(0, 2), "experts": 4, "top_k": 2, "tokens": [14, 14], "per_token": True, "skew": 0.0, "options": {}}
PLAIN["schedule"] = Schedule(parts=2, blocks=2, order="arrival", own_before=0.5)
PLAIN["dtype"] = torch.float32


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["post without waiting", "use without waiting", "keep nothing"])
def test_a_missing_event_and_memory_given_back_too_early_show(fault):
    found = run_ranks(2, different, [PLAIN], range(12), (fault,), timeout_s=60)
    assert any(found)


def swapped(rank, cache, kind):
    """The bits with two neighbouring rounds of rank 1 in the wrong order."""
    plain, _ = one_pass(rank, cache, PLAIN)

    def wrong(plan):
        rounds = list(rounds_of(plan))
        at = next(i for i, one in enumerate(rounds) if one.legs[0].kind == kind)
        if plan.rank == 1:
            rounds[at : at + 2] = rounds[at + 1], rounds[at]
        return tuple(rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "rounds_of", wrong)
        got, _ = one_pass(rank, cache, PLAIN, EmulatedDevice(3))
    return same(plain, got)


@pytest.mark.ranks
def test_rounds_in_the_wrong_order_show():
    """Blocks of one part: messages of equal sizes, so that nothing but the numbers is wrong."""
    assert not all(run_ranks(2, swapped, "coming", timeout_s=60))


def counted(rank, cache):
    case = {**PLAIN, "per_token": False}
    (_, host), (_, device) = one_pass(rank, cache, case), one_pass(rank, cache, case, EmulatedDevice(1))
    return host.counters["send", "ep_etp"].sent_bytes, device.counters["exchange", "ep_etp"].sent_bytes


@pytest.mark.ranks
def test_as_many_bytes_are_counted():
    assert all(host == device > 0 for host, device in run_ranks(2, counted))

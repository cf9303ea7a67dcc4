"""An overlapped MoE layer on forked ranks: equal to a dense model of all ranks' tokens, and the same bits whatever the schedule."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest
import test_dispatch as dense
import torch
from moe_help import context, moe_spec
from tiers import some, times
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import RunError
from phalanx.kernels.cpu import tiles
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.kernels.ops.deferred import DeferredGradients, run
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.moe import MoE
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.moe.overlap.prediction.cost import LayerShape
from phalanx.plan.moe.overlap.settings import CANDIDATES
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.moe import overlap, overlap_tuner
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts
from phalanx.runtime.moe.routed import routed_experts
from ranks import run_ranks

SERIAL_TILES = TileSchedule()
SCHEDULES = (
    SERIAL_TILES,
    TileSchedule(parts=2, order="own_first"),
    TileSchedule(parts=3, blocks=2, order="arrival", own_before=0.5),
    TileSchedule(parts=4, blocks=2, seed=3),
)


def overlapped(schedule, per_token=True, dtype=torch.float64):
    """`run_experts` in the other way, computed in `dtype`; routing weights are fp32 at least, as the router gives them."""

    def run(call, *, dispatcher):
        as_computed = MoeCall(
            x_TH=call.x_TH.to(dtype),
            weights_TK=call.weights_TK.to(torch.promote_types(dtype, torch.float32)),
            experts_TK=call.experts_TK,
            experts=ExpertWeights(call.experts.w13_e2fH.to(dtype), call.experts.w2_eHf.to(dtype)),
        )
        how = {"schedule": schedule, "per_token": per_token, "lanes": SERIAL}
        y, dropped = overlap.run_overlapped(as_computed, dispatcher=dispatcher, **how)
        return y.to(call.x_TH.dtype), dropped

    return run


def run_case(rank, cache, case, schedule, per_token, tile_rows, columns=tiles.COLUMNS, dtype=torch.float64):
    """`columns`: least columns of a unit of the second product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "run_experts", overlapped(schedule, per_token, dtype))
        patch.setattr(overlap, "TILE_ROWS", tile_rows)
        patch.setattr(tiles, "COLUMNS", columns)
        return dense.run_case(rank, cache, case, Collectives(timeout_s=240))


def run_cases(rank, cache, cases):
    return [run_case(rank, cache, *case) for case in cases]


def run_and_check(world, cases):
    results = run_ranks(world, run_cases, cases, timeout_s=240)
    for i, case in enumerate(cases):
        dense.check_case(case[0], [r[i] for r in results])


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", some(SCHEDULES, 3), ids=lambda s: f"{s.order}{s.parts}")
def test_every_mapping_of_4_ranks(schedule):
    cases = [
        (dense.Case(f, dense.POLICIES[policy], (9,) * 4, skew), schedule, per_token, 3)
        for f in some(list(dense.mappings(4)), 6)
        for policy, skew in (("dropless", 0.0), ("drop", 2.0), ("drop by position, full sequence", 1.0))
        for per_token in (True, False)
    ]
    run_and_check(4, cases)


def drawn(seed):
    """A random configuration: ranks, grid, experts, top-k, tokens of each rank (zero among them), skew, policy, schedule, tiles, columns."""
    draw = random.Random(seed)
    world = draw.choice((1, 1, 2, 2, 2, 2, 2, 2, 3, 4))
    grids = [(ep, etp) for ep, etp in itertools.product((1, 2, 3, 4), repeat=2) if world % (ep * etp) == 0 and etp != 3]
    ep, etp = draw.choice(grids)
    experts = ep * draw.choice((1, 2, 3, 5, 8, 16))
    case = dense.Case(
        dense.make_folding(world=world, ep=ep, etp=etp),
        dense.POLICIES[draw.choice(("dropless", "dropless", "drop", "drop by position"))],
        tuple(draw.choice((0, 1, 2, 5, 9)) for _ in range(world)),
        draw.choice((0.0, 0.0, 2.0, 100.0)),
        num_experts=experts,
        top_k=min(experts, draw.randint(1, 8)),
    )
    schedule = TileSchedule(parts=draw.randint(1, 5), blocks=draw.randint(1, 4), seed=draw.randrange(1000))
    if draw.random() < 0.5:
        order = draw.choice(("serial", "own_first", "arrival"))
        before = draw.random() if order == "arrival" else 1.0
        schedule = TileSchedule(parts=schedule.parts, blocks=schedule.blocks, order=order, own_before=before)
    return world, (case, schedule, draw.random() < 0.7, draw.choice((1, 2, 4, 512)), draw.choice((2, 3, tiles.COLUMNS)))


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_configurations(world):
    """1,500 of them with all tests."""
    cases = [case for size, case in map(drawn, range(times(1500, 120))) if size == world]
    assert len(cases) > times(16, 4)
    for start in range(0, len(cases), 100):
        run_and_check(world, cases[start : start + 100])


# ---- bits ------------------------------------------------------------------------------------------------------------------


T, H, F, E, K = 96, 512, 64, 8, 3


def layer(rank, cache, folding, schedules, dtype, options):
    """Outputs and gradients of one layer by each schedule, on one routing."""
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    g = torch.Generator().manual_seed(7 + rank)
    x, scores = torch.randn(T, H, generator=g), torch.rand(T, E, generator=g) + torch.linspace(0.6, 0, E)
    weights, experts_TK = scores.topk(K)
    slots = E // folding.ep
    g = torch.Generator().manual_seed(1 + folding.coord(rank, "ep"))
    w13 = torch.randn(slots, 2, F // folding.etp, H, generator=g) / 20
    w2 = torch.randn(slots, H, F // folding.etp, generator=g) / 8
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    lanes = Lanes(options.get("lanes", 1), rows=compiled_rows() if options.get("compiled") else None)
    kept, overlap.TILE_ROWS = overlap.TILE_ROWS, options.get("tile_rows", 16)
    out = []
    try:
        for schedule in schedules:
            leaves = [t.to(dtype).clone().requires_grad_() for t in (x, w13, w2)]
            weights = weights.detach().requires_grad_()
            later = DeferredGradients() if options.get("later") else None
            call = MoeCall(
                x_TH=leaves[0],
                weights_TK=weights,
                experts_TK=experts_TK,
                experts=ExpertWeights(*leaves[1:]),
                later=later,
                recompute=schedule is not None and options.get("recompute", False),
            )
            if schedule is None:
                y, _ = run_experts(call, dispatcher=dispatcher, lanes=lanes)
            else:
                y, _ = overlap.run_overlapped(call, dispatcher=dispatcher, schedule=schedule, lanes=lanes)
            (y.float() * torch.linspace(-1, 1, H)).sum().backward()
            if later is not None:
                run(later.take())
            out.append([y.detach(), *(t.grad for t in leaves), weights.grad])
    finally:
        overlap.TILE_ROWS = kept
    return out


def different_from_the_first(rank, cache, folding, schedules, dtype, options):
    first, *others = layer(rank, cache, folding, schedules, dtype, options)
    return [
        i for i, found in enumerate(others, 1) if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    ]


def random_schedules(count):
    draw = random.Random(5)
    return [TileSchedule(parts=draw.randint(1, 6), blocks=draw.randint(1, 2), seed=i) for i in range(count)]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [{"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_the_bits_do_not_depend_on_the_schedule(grid, dtype):
    """With all tests 240 random orders, and every named one."""
    world = grid["ep"] * grid.get("etp", 1)
    schedules = [*SCHEDULES[:3], *random_schedules(times(40, 12))]
    folding = dense.make_folding(world=world, **grid)
    options = {"compiled": dtype == torch.bfloat16}
    assert run_ranks(world, different_from_the_first, folding, schedules, dtype, options) == [[]] * world


@pytest.mark.ranks
@pytest.mark.core
def test_what_auto_chooses_from_has_the_bits_of_serial_order():
    """In two blocks of columns where a candidate has two."""
    assert tiles.column_units(H) == 2
    folding = dense.make_folding(world=2, ep=2)
    schedules = [SERIAL_TILES, *CANDIDATES]
    assert run_ranks(2, different_from_the_first, folding, schedules, torch.float32, {}) == [[]] * 2


def named(rank, cache, texts):
    """Output and gradients of one layer, as it is built for values of `dispatch.overlap`."""
    folding, out = dense.make_folding(world=2, ep=2), []
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    g = torch.Generator().manual_seed(rank)
    x, (weights, experts_TK) = torch.randn(T, H, generator=g), torch.rand(T, E, generator=g).topk(K)
    held = torch.randn(4, 2, F, H, generator=g) / 20, torch.randn(4, H, F, generator=g) / 8
    for text in texts:
        spec = DispatchSpec(overlap=text)
        dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
        leaves = [t.clone().requires_grad_() for t in (x, *held, weights)]
        experts = ExpertWeights(*leaves[1:3])
        call = MoeCall(x_TH=leaves[0], weights_TK=leaves[3], experts_TK=experts_TK, experts=experts)
        way = routed_experts(dispatcher)
        y, _ = way(call)
        (y * torch.linspace(-1, 1, H)).sum().backward()
        out.append((way.way.func.__name__, [y.detach(), *(t.grad for t in leaves)]))  # type: ignore[attr-defined]
    return out


@pytest.mark.ranks
@pytest.mark.core
def test_a_schedule_is_run_by_its_name():
    """The way is chosen when a layer is built; schedules that send the same rows have the same bits, and the others are equal but for rounding."""
    schedule = "parts=4,order=arrival,own_before=0.5,blocks=2"
    texts = ("tiles", f"tiles:{schedule}", f"tiles:{schedule},rows=tokens", "tiles:rows=pairs", f"tiles:{schedule},rows=pairs", "auto", "serial", "coarse:2")  # fmt: skip
    for found in run_ranks(2, named, texts):
        ways, values = zip(*found, strict=True)
        assert ways == (*["run_overlapped"] * 5, "_run_tuned", "run_experts", "run_coarse")
        alike = [[at for at, other in enumerate(values) if all(map(torch.equal, one, other))] for one in values]
        assert alike[0] == [0, 1, 2, 5] and alike[3] == [3, 4]
        for other in values[1:]:
            for a, b in zip(values[0], other, strict=True):
                assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"recompute": True}, {"later": True}, {"lanes": 2}], ids=str)
def test_nor_do_they_on_what_else_should_not_matter(options):
    """Recomputed activations, put-off weight gradients and threads against the plain run of the serial schedule."""
    folding = dense.make_folding(world=2, ep=2)
    plain = run_ranks(2, layer, folding, [SERIAL_TILES], torch.float32, {})
    other = run_ranks(2, layer, folding, [SCHEDULES[2]], torch.float32, options)
    for a, b in zip(plain, other, strict=True):
        assert all(torch.equal(t, u) for t, u in zip(a[0], b[0], strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_it_is_the_plain_layer_but_for_rounding(dtype, tolerance):
    folding = dense.make_folding(world=2, ep=2)
    for plain, ours in run_ranks(2, layer, folding, [None, SCHEDULES[2]], dtype, {"tile_rows": 512}):
        for a, b in zip(plain, ours, strict=True):
            assert (a.float() - b.float()).abs().max() <= tolerance * a.float().abs().max()


@pytest.mark.ranks
def test_no_token_goes_to_a_rank_twice():
    """Rows on the wire: with an entry for each token, those of distinct (token, rank) pairs; else one for each expert."""
    folding = dense.make_folding(world=2, ep=2)
    sent = run_ranks(2, sent_rows, folding)
    for per_token, per_row, distinct, pairs in sent:
        assert per_token == 2 * distinct and per_row == 2 * pairs and distinct < pairs


def sent_rows(rank, cache, folding):
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    experts_TK = torch.rand(T, E, generator=torch.Generator().manual_seed(rank)).topk(K).indices
    found = []
    for per_token in (True, False):
        comms = Collectives(timeout_s=240)
        dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=K)
        weights = ExpertWeights(torch.zeros(4, 2, F, H), torch.zeros(4, H, F))
        x, weights_TK = torch.zeros(T, H), torch.ones(T, K)
        with torch.no_grad():
            call = MoeCall(x_TH=x, weights_TK=weights_TK, experts_TK=experts_TK, experts=weights)
            how = {"schedule": SCHEDULES[1], "per_token": per_token, "lanes": SERIAL}
            overlap.run_overlapped(call, dispatcher=dispatcher, **how)
        meta = int((experts_TK // 4 != rank).sum()) * (8 if per_token else 4)
        found.append((comms.counters["send", "ep_etp"].sent_bytes - meta) / (4 * H))
    away_TK = experts_TK // 4 != rank
    back = run_ranks_sum(ctx, away_TK)
    return found[0], found[1], (int(away_TK.any(1).sum()) + back[0]) / 2, (int(away_TK.sum()) + back[1]) / 2


def run_ranks_sum(ctx, away_TK):
    """The same two numbers of the other rank, whose rows go back from here."""
    mine = (int(away_TK.any(1).sum()), int(away_TK.sum()))
    told = ctx.comms.gather_objects(mine, ctx.groups.axis("ep_etp"))
    return told[1 - ctx.groups.axis("ep_etp").index]


# ---- the choice ------------------------------------------------------------------------------------------------------------


class Other:
    """A pass that runs beside, and does nothing."""

    def axis(self, axis):
        return axis

    def away(self, axis):
        return contextlib.nullcontext()


def tuned_layer(rank, cache, folding, folder, disturb, beside=False):
    """Passes of one layer by `auto`: what was chosen, how often was calibrated, whether results are those of the fine layer. `beside`: each has another beside it."""
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    g = torch.Generator().manual_seed(rank)
    x, (weights, experts_TK) = torch.randn(T, H, generator=g), torch.rand(T, E, generator=g).topk(K)
    experts = ExpertWeights(torch.randn(4, 2, F, H, generator=g) / 20, torch.randn(4, H, F, generator=g) / 8)
    tuner, found = overlap_tuner.Tuner(folder, paired=float(beside)), []
    ctx.comms.beside = Other() if beside else None
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(overlap_tuner, "EVERY", 3)
    with torch.no_grad():
        for _ in range(2 * overlap_tuner.EVERY + 2):
            known = tuner.of(dispatcher, x, experts, SERIAL)
            tuned = overlap_tuner.Tuned(known, compares=not beside)
            call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts_TK, experts=experts)
            y, _ = overlap.run_overlapped(call, dispatcher=dispatcher, schedule=tuned, lanes=SERIAL)
            tuned.done()
            if known.ratios:
                known.ratios[-1] *= disturb
            found.append(known.chooser.cost)
        plain, _ = overlap.run_overlapped(call, dispatcher=dispatcher, schedule=SERIAL_TILES, lanes=SERIAL)
    monkeypatch.undo()
    ctx.comms.beside = None
    return tuner.calibrations, torch.equal(y, plain), found[-1]


@pytest.mark.ranks
def test_a_calibration_is_kept_and_renewed_where_it_no_longer_fits(tmp_path):
    folding = dense.make_folding(world=2, ep=2)
    first = run_ranks(2, tuned_layer, folding, tmp_path, 1e-3)
    calibrations, _same, cost = first[0]
    assert calibrations >= 2 and all(s for _, s, _ in first)  # a thousand times faster than predicted: once again
    assert first[1][0] == calibrations and first[1][2] == cost  # all ranks have the same numbers
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    kept = run_ranks(2, tuned_layer, folding, tmp_path, 1e-3)
    assert kept[0][0] == calibrations - 1  # the first was found
    next(tmp_path.iterdir()).write_text('{"cost": "damaged"}')
    assert run_ranks(2, tuned_layer, folding, tmp_path, 1e-3)[0][0] == calibrations


def test_a_calibration_is_of_one_machine_device_threads_and_hosts():
    dispatcher = SimpleNamespace(ep_etp=SimpleNamespace(ranks=(0, 1, 2, 3)), top_k=K)
    shape = LayerShape(tokens=T, hidden=H, ffn=F, element_bytes=4, slots=4)
    x, other = torch.zeros(T, H), torch.zeros(T, H, device="meta")
    ways = [(x, SERIAL, None), (x, Lanes(2), None), (other, SERIAL, None), (x, SERIAL, [0, 0, 1, 1])]
    assert len({overlap_tuner._key(dispatcher, shape, *way) for way in ways}) == len(ways)


def timed_routes(rank, cache, folding, hosts):
    """The hosts by which the layers of a calibration go."""
    ctx = context(moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F), folding=folding, rank=rank, cache=cache)
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    experts = ExpertWeights(torch.zeros(4, 2, F, H), torch.zeros(4, H, F))
    monkeypatch, found = pytest.MonkeyPatch(), []
    timed = overlap_tuner.run_overlapped

    def run(*args, host_of_rank, **more):
        found.append(host_of_rank)
        return timed(*args, host_of_rank=host_of_rank, **more)

    monkeypatch.setattr(overlap_tuner, "run_overlapped", run)
    overlap_tuner.Tuner().of(dispatcher, torch.randn(T, H), experts, SERIAL, hosts=hosts)
    monkeypatch.undo()
    return found


@pytest.mark.ranks
def test_a_calibration_times_layers_on_the_route_that_a_run_takes():
    found = run_ranks(2, timed_routes, dense.make_folding(world=2, ep=2), [0, 1])
    assert all(routes and all(route == [0, 1] for route in routes) for routes in found)


@pytest.mark.ranks
def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    folding = dense.make_folding(world=2, ep=2)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert all(same for _, same, _ in run_ranks(2, tuned_layer, folding, folder, 1.0))


@pytest.mark.ranks
def test_passes_beside_others_are_not_compared():
    found = run_ranks(2, tuned_layer, dense.make_folding(world=2, ep=2), None, 1e-3, True)
    assert [calibrations for calibrations, *_ in found] == [1, 1]


def full_disk(rank, cache, folding, folder):
    """A folder that is there and takes no file, whoever writes."""
    monkeypatch = pytest.MonkeyPatch()

    def refuse(path, value):
        raise RunError(f"{path}: no space left on device")

    monkeypatch.setattr(overlap_tuner, "write_json", refuse)
    found = tuned_layer(rank, cache, folding, folder, 1.0)
    monkeypatch.undo()
    return found


@pytest.mark.ranks
def test_a_full_disk_ends_no_run(tmp_path):
    assert all(same for _, same, _ in run_ranks(2, full_disk, dense.make_folding(world=2, ep=2), tmp_path))


def asked_for(rank, cache, folding):
    """What a MoE layer with a shared expert asks its tuner for."""
    ctx = context(dense.LAYER, folding=folding, rank=rank, cache=cache, dispatch=DispatchSpec(overlap="auto"))
    layer = MoE(ctx, 0)
    dense.fill(layer, ctx)
    with torch.no_grad():
        layer(torch.randn(8, 16, dtype=torch.float64), ForwardInfo(), dense.batch_of(8))
    return [known.chooser.shape.shared_ffn for known in ctx.tuner.known.values()]


def calibrated_in_a_checkpoint(rank, cache, folding):
    """Gradients of a layer that calibrates in a pass which is recomputed, and of one that knows its calibration, without recomputation."""
    ctx = context(dense.LAYER, folding=folding, rank=rank, cache=cache, dispatch=DispatchSpec(overlap="auto"))
    layer = MoE(ctx, 0)
    dense.fill(layer, ctx)
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def run(x):
        return layer(x, ForwardInfo(), dense.batch_of(8))[0]

    outputs = (checkpoint(run, x, use_reentrant=False), run(x))
    return [torch.autograd.grad(y.square().sum(), x)[0].numpy() for y in outputs]


@pytest.mark.ranks
def test_a_calibration_in_a_pass_that_is_recomputed_keeps_nothing():
    for first, second in run_ranks(2, calibrated_in_a_checkpoint, dense.make_folding(world=2, ep=2)):
        assert first.any() and (first == second).all()


def passes_without_tokens(rank, cache, folding):
    """Ratios that a tuner keeps of passes in which rank 1 has no tokens."""
    ctx = context(
        dense.LAYER, folding=folding, rank=rank, cache=cache, dispatch=DispatchSpec(overlap="auto"), micro_tokens=8
    )
    layer = MoE(ctx, 0)
    dense.fill(layer, ctx)
    empty = torch.zeros(1, 0, dtype=torch.int64)
    nothing = TokenBatch(empty, empty, empty, ((),), is_empty=True)
    with torch.no_grad():
        for tokens in (8, 8 if rank == 0 else 0, 8, 5):  # no micro-batch of training has five
            batch = dense.batch_of(8) if tokens else nothing
            layer(torch.randn(tokens, 16, dtype=torch.float64), ForwardInfo(), batch)
    return [len(known.ratios) for known in ctx.tuner.known.values()]


@pytest.mark.ranks
def test_passes_of_ranks_without_tokens_say_nothing_of_the_calibration():
    assert run_ranks(2, passes_without_tokens, dense.make_folding(world=2, ep=2)) == [[2], [2]]


@pytest.mark.ranks
def test_a_shared_expert_is_part_of_what_is_predicted():
    assert run_ranks(2, asked_for, dense.make_folding(world=2, ep=2)) == [[16], [16]]

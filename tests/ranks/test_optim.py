"""Gradient buffers, sharded state and AdamW on made-up parameters: against torch's AdamW, sharded against whole, every element once."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.core.config import OptimConfig
from phalanx.core.errors import PeerError
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.plan.layout.parameters import FlatLayout, flat_layouts, local_param
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ParamSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, Groups, build_groups
from phalanx.runtime.state.gradients import GradientBuffers, borrowable
from phalanx.runtime.state.optimizer import ShardedState, _decay_runs
from phalanx.train.step.optim import AdamW, clip_scale, learning_rate
from ranks import run_ranks

NUM_EXPERTS = 4
TABLE = (
    ParamSpec(name="embedding", shape=(10, 7), family="dense_sharded", tp_dim=0),
    ParamSpec(name="bias", shape=(13,), family="dense_sharded", decay=False),
    ParamSpec(name="matrix", shape=(5, 9), family="dense_sharded"),
    ParamSpec(name="norm", shape=(7,), family="dense_replicated", decay=False),
    ParamSpec(name="router", shape=(NUM_EXPERTS, 7), family="dense_replicated"),
    ParamSpec(name="w13", shape=(NUM_EXPERTS, 2, 6, 5), family="expert", ep_dim=0, etp_dim=2),
    ParamSpec(name="w2", shape=(NUM_EXPERTS, 5, 6), family="expert", ep_dim=0, etp_dim=2),
)
CONFIG = OptimConfig(lr=0.05, weight_decay=0.1, eps=1e-6, warmup_steps=0)


def logical(name: str, shape: tuple[int, ...], what: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A logical tensor that depends on its name alone."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name + what)) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def local(spec: ParamSpec, groups: Groups, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a logical tensor."""
    held = local_param(spec, groups.folding, plain_placement(NUM_EXPERTS, groups.folding), groups.rank)
    out = torch.empty(held.shape, dtype=value.dtype)
    for piece in held.pieces:
        out[piece.local.slices()] = value[piece.box.slices()]
    return out


def one_rank() -> Groups:
    return build_groups(make_folding(world=1), rank=0, cache=GroupCache())


def make(groups: Groups, *, zero: int, dtype: torch.dtype = torch.float64, num_microbatches: int = 1):
    params = {s.name: torch.nn.Parameter(local(s, groups, logical(s.name, s.shape, "value", dtype))) for s in TABLE}
    placement = plain_placement(NUM_EXPERTS, groups.folding)
    layouts = flat_layouts(TABLE, groups.folding, placement, groups.rank, zero=zero)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = ShardedState(params, layouts, groups=groups, buffers={}, dtype=wide)
    borrowed = borrowable(layouts, groups, num_microbatches=num_microbatches)
    return params, state, GradientBuffers(params, layouts, dtype=wide, borrowed=borrowed)


def backward(params, groups: Groups, what: str, *, skip: tuple[str, ...] = ()) -> None:
    """Gradient of each parameter = the named logical tensor's local part, times this rank's share."""
    terms = []
    for spec in TABLE:
        if spec.name in skip:
            continue
        gradient = local(spec, groups, logical(spec.name, spec.shape, what)).to(params[spec.name].dtype)
        terms.append((params[spec.name] * gradient).sum())
    torch.stack(terms).sum().backward()


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_run_that_is_dropped_frees_its_weights(num_microbatches: int) -> None:
    """Hooks of a tensor are hidden from Python's collector: what they hold of a run would stay."""
    run = make(one_rank(), zero=1, num_microbatches=num_microbatches)
    weights = [weakref.ref(x) for x in run[0].values()]
    backward(run[0], one_rank(), "a step")
    del run
    gc.collect()
    assert not any(found() is not None for found in weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_equals_torch(dtype: torch.dtype) -> None:
    groups = one_rank()
    params, state, buffers = make(groups, zero=1, dtype=dtype)
    decayed = {s.name for s in TABLE if s.decay}
    theirs = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in theirs.items() if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in theirs.items() if n not in decayed], "weight_decay": 0.0},
        ],
        lr=CONFIG.lr,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
    )
    for step in range(5):
        buffers.begin()
        backward(params, groups, f"gradient {step}")
        backward(theirs, groups, f"gradient {step}")
        reduced = buffers.reduce(groups, Collectives())
        norm = math.sqrt(reduced.square_sum(groups).item())
        want = torch.nn.utils.clip_grad_norm_(theirs.values(), 1e9)
        assert norm == pytest.approx(want.item(), rel=1e-6)
        scale = clip_scale(norm, norm / 3)
        for p in theirs.values():
            p.grad *= scale
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            AdamW(CONFIG).commit(state, reduced, step=step, lr=CONFIG.lr, scale=scale)
        buffers.release()
        state.publish(Collectives())
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), theirs[name].detach(), rtol=tolerance, atol=tolerance)
        assert p.grad is None


def test_borrowed_and_flat_gradients_give_the_same_bits() -> None:
    groups = one_rank()
    results = []
    for num_microbatches in (1, 2):
        params, state, buffers = make(groups, zero=1, num_microbatches=num_microbatches)
        families = frozenset(spec.family for spec in TABLE)
        assert buffers.borrowed == (families if num_microbatches == 1 else frozenset())
        buffers.begin()
        backward(params, groups, "gradient", skip=("matrix", "w2"))
        reduced = buffers.reduce(groups, Collectives())
        boxes = {b.name: b.tensor for b in reduced.boxes()}
        assert not boxes["gradient/matrix"].any() and not boxes["gradient/w2"].any()  # unused: zero, not stale
        AdamW(CONFIG).commit(state, reduced, step=0, lr=0.1, scale=1.0)
        results.append({n: p.detach().clone() for n, p in params.items()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_accumulation_adds_and_an_unused_parameter_does_not_keep_the_last_step() -> None:
    groups = one_rank()
    params, _, buffers = make(groups, zero=1, num_microbatches=2)
    for names in (("one", "two"), ("three",)):
        buffers.begin()
        for what in names:
            backward(params, groups, what, skip=("w2",) if what == "three" else ())
        for box in buffers.reduce(groups, Collectives()).boxes():
            name = box.name.removeprefix("gradient/")
            want = torch.zeros(box.shape, dtype=torch.float64)
            if not (name == "w2" and names == ("three",)):
                for what in names:
                    want += logical(name, box.shape, what)
            assert torch.equal(box.tensor, want[box.box.slices()]), name


def test_second_microbatch_of_a_borrowed_gradient_is_refused() -> None:
    groups = one_rank()
    params, _, buffers = make(groups, zero=1)
    buffers.begin()
    backward(params, groups, "one")
    with pytest.raises(ValueError, match="second micro-batch"):
        backward(params, groups, "two")


def test_non_finite_names_the_parameter() -> None:
    groups = one_rank()
    for num_microbatches in (1, 2):
        params, _, buffers = make(groups, zero=1, num_microbatches=num_microbatches)
        buffers.begin()
        backward(params, groups, "one", skip=("router",))
        bad = torch.ones_like(params["router"])
        bad[1, 2] = math.inf
        (params["router"] * bad).sum().backward()
        assert buffers.non_finite() == ("router",)


def _steps(rank: int, cache: GroupCache, mapping: dict[str, int], world: int, zero: int, dtype: torch.dtype):
    groups = build_groups(make_folding(world=world, **mapping), rank=rank, cache=cache)
    comms = Collectives()
    params, state, buffers = make(groups, zero=zero, dtype=dtype)
    norms = []
    for step in range(2):
        buffers.begin()
        backward(params, groups, f"step {step} dp {groups.axis('dp').index}")
        reduced = buffers.reduce(groups, comms)
        total = comms.all_reduce(reduced.square_sum(groups), groups.axis("world"))
        norms.append(total.sqrt().item())
        AdamW(CONFIG).commit(state, reduced, step=step, lr=0.1, scale=0.5)
        buffers.release()
        state.publish(comms)
    held = {n: p.detach().clone() for n, p in params.items()}
    return norms, held, [(b.name, b.shape, b.box, b.tensor.clone(), b.primary) for b in state.boxes()]


def _expected_gradient(spec: ParamSpec, step: int, world: int, mapping: dict[str, int]) -> torch.Tensor:
    """Dense: summed over all ranks. Experts: over the ranks that hold the same part, one per coordinate of edp."""
    folding = make_folding(world=world, **mapping)
    placement = plain_placement(NUM_EXPERTS, folding)
    out = torch.zeros(spec.shape, dtype=torch.float64)
    for rank in range(world):
        gradient = logical(spec.name, spec.shape, f"step {step} dp {folding.coord(rank, 'dp')}")
        for piece in local_param(spec, folding, placement, rank).pieces:
            out[piece.box.slices()] += gradient[piece.box.slices()]
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("mapping", [{}, {"ep": 2}, {"ep": 4}, {"etp": 2}, {"ep": 2, "etp": 2}], ids=str)
def test_sharded_state_is_the_whole_state(mapping: dict[str, int]) -> None:
    """ZeRO 0 and 1 over 4 ranks: norm counts every element once, state boxes tile the logical tensors, parameters agree."""
    kept = []
    for zero in (0, 1):
        results = run_ranks(4, _steps, mapping, 4, zero, torch.float64)
        want = math.sqrt(sum(_expected_gradient(s, 1, 4, mapping).square().sum().item() for s in TABLE))
        for norms, held, _ in results:
            assert norms == results[0][0]  # bitwise the same on all ranks
            assert norms[1] == pytest.approx(want, rel=1e-13)
            for spec in TABLE:
                if spec.family != "expert":
                    assert torch.equal(held[spec.name], results[0][1][spec.name]), spec.name
        kept.append(_logical_state(results))
    for name, value in kept[0].items():
        torch.testing.assert_close(value, kept[1][name], rtol=1e-14, atol=1e-15, msg=name)


def _logical_state(results) -> dict[str, torch.Tensor]:
    """Assemble the primary boxes; every element must have exactly one primary holder."""
    out: dict[str, torch.Tensor] = {}
    holders: dict[str, torch.Tensor] = {}
    for _, _, boxes in results:
        for name, shape, box, tensor, primary in boxes:
            if primary:
                out.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box.slices()] = tensor
                holders.setdefault(name, torch.zeros(shape))[box.slices()] += 1
    assert set(out) == {f"{kind}/{s.name}" for kind in ("master", "exp_avg", "exp_avg_sq") for s in TABLE}
    for name, count in holders.items():
        assert bool((count == 1).all()), name
    return out


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_changes_no_bit_on_two_ranks(dtype: torch.dtype) -> None:
    """A sum of two terms has one rounding, whoever adds; so sharding may not change anything."""
    whole, sharded = (run_ranks(2, _steps, {}, 2, zero, dtype) for zero in (0, 1))
    for (_, held, _), (_, other, _) in zip(whole, sharded, strict=True):
        for name, value in held.items():
            assert torch.equal(value, other[name]), name


def _restored(rank: int, cache: GroupCache, zero: int) -> bool:
    groups = build_groups(make_folding(world=2, ep=2), rank=rank, cache=cache)
    params, state, _ = make(groups, zero=zero, dtype=torch.bfloat16)
    for box in state.boxes():
        box.tensor.copy_(logical(box.name, box.shape, "restored")[box.box.slices()])
    state.restore(Collectives())
    return all(
        torch.equal(
            params[s.name], local(s, groups, logical(f"master/{s.name}", s.shape, "restored").float().bfloat16())
        )
        for s in TABLE
    )


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_restore_publishes_what_was_loaded(zero: int) -> None:
    assert run_ranks(2, _restored, zero) == [True, True]


def test_parameters_whose_way_broke_off_are_not_published() -> None:
    """Who goes on publishes them before anything reads them."""

    def lost(name: str) -> None:
        raise PeerError("a rank is lost")

    layout = SimpleNamespace(num_shards=2, rule=SimpleNamespace(shard_over="dp_cp"))
    families = {"dense": SimpleNamespace(rounded=None, layout=layout)}
    state: Any = SimpleNamespace(
        families=families, groups=SimpleNamespace(step_axis=lost), is_published=True, sums=None
    )
    with pytest.raises(PeerError):
        ShardedState.publish(state, SimpleNamespace())  # type: ignore[arg-type]
    assert not state.is_published
    state.families = {}
    ShardedState.publish(state, SimpleNamespace())  # type: ignore[arg-type]
    assert state.is_published


def test_runs_of_one_decay_end_with_their_shard_and_at_padding_and_those_of_replicas_with_each() -> None:
    def runs(kept: list[tuple[int, int]], *, starts: tuple[int, ...] = (0, 4, 8), holders: Any = None) -> list[Any]:
        params = [SimpleNamespace(num_elements=4, param=SimpleNamespace(decay=decay)) for decay in (True, True, False)]
        layout: Any = SimpleNamespace(params=params, starts=starts, kept_runs=kept, held_whole=None, holders=holders)
        return [(run.start, run.stop, run.decay) for run in _decay_runs(layout)]

    assert runs([(0, 12)]) == [(0, 8, True), (8, 12, False)]
    assert runs([(0, 12)], starts=(0, 6, 12)) == [(0, 4, True), (6, 10, True)]
    assert runs([(0, 12)], holders="some") == [(0, 4, True), (4, 8, True), (8, 12, False)]
    assert runs([(4, 8), (0, 4)]) == [(0, 4, True), (4, 8, True)]  # the own shard, then the copy of another


def test_restored_state_is_compared_with_nothing_that_was_before_it() -> None:
    said: list[str] = []

    def saying(name: str) -> Any:
        return lambda *_: said.append(name)

    family = SimpleNamespace(round_masters=saying("round"))
    state: Any = SimpleNamespace(
        sums=SimpleNamespace(forget=saying("forget")), families={"dense": family}, look_at_rest=saying("look"), publish=saying("publish")
    )  # fmt: skip
    ShardedState.restore(state, SimpleNamespace())  # type: ignore[arg-type]
    assert said == ["forget", "round", "look", "publish"]


def test_padding_belongs_to_nobody() -> None:
    groups = one_rank()
    params, state, _ = make(groups, zero=1)
    layouts: list[FlatLayout] = [f.layout for f in state.families.values()]
    assert any(sum(p.num_elements for p in layout.params) < layout.length for layout in layouts)
    assert sum(b.tensor.numel() for b in state.boxes()) == 3 * sum(p.numel() for p in params.values())
    for family in state.families.values():
        assert sum(r.stop - r.start for r in family.runs) == sum(p.num_elements for p in family.layout.params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 65536, 200_001])
def test_square_sum(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    fast, plain = square_sums([x]), square_sums([x], impl="reference")
    # Each side is off by at most half an eps for each square and each addition, whatever the order that this processor's library takes.
    rel = (size + 1) * torch.finfo(torch.float64).eps
    assert fast.dtype == torch.float64 and fast.item() == pytest.approx(plain.item(), rel=rel, abs=0)
    if size:
        for bad in (math.nan, math.inf):
            x[size // 2] = bad
            assert not torch.isfinite(square_sums([x]))


def test_learning_rate_schedules() -> None:
    def rates(**kw) -> list[float]:
        config = OptimConfig(**{"lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 10, **kw})
        return [learning_rate(n, config, total_steps=100) for n in range(100)]

    for kw in ({"schedule": "cosine"}, {"schedule": "wsd"}, {"schedule": "constant"}):
        r = rates(**kw)
        assert r[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
        assert max(r) == pytest.approx(1.0)
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(r[9:]))
    assert rates(schedule="cosine")[99] == pytest.approx(0.1)
    assert rates(schedule="cosine")[54] == pytest.approx(0.55)  # half of the way down
    wsd = rates(schedule="wsd")
    assert wsd[10:80] == [1.0] * 70 and wsd[89] == pytest.approx(0.55) and wsd[99] == pytest.approx(0.1)
    assert rates(schedule="wsd", decay_steps=40)[59] == 1.0 and rates(schedule="wsd", decay_steps=40)[60] < 1.0
    late = rates(schedule="wsd", warmup_steps=95)  # fewer steps are left than a fifth: the way down begins at the top
    assert late[94] == 1.0 and late[95:] == pytest.approx([1 - 0.9 * n / 5 for n in range(1, 6)])
    assert rates(schedule="constant")[10:] == [1.0] * 90
    assert rates(schedule="cosine", warmup_steps=0)[0] < 1.0
    assert rates(schedule="cosine", warmup_steps=100)[99] == 1.0  # nothing but warm-up
    assert learning_rate(500, OptimConfig(lr=1.0), total_steps=100) == pytest.approx(0.1)  # past the end


def test_clip_scale() -> None:
    assert clip_scale(2.0, 1.0) == 0.5 and clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(5.0, 0.0) == 1.0 and clip_scale(0.0, 1.0) == 1.0

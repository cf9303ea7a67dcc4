"""AdamW, square sums and checksums on devices: Triton's programs under its interpreter against their plain references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_help import close, normal

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from phalanx.core.config import OptimConfig
from phalanx.kernels.device import adamw, sums
from phalanx.kernels.device.adamw import AdamRule, RunTable, fused_adamw
from phalanx.kernels.device.sums import device_checksums, device_square_sums
from phalanx.kernels.ops import narrow_moments
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.checksum import POSITIVE, checksums, reference_checksum
from phalanx.kernels.ops.narrow_moments import adamw_of_narrow_, rounded
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.kernels.triton.tiles import is_interpreted
from phalanx.plan.layout.parameters import flat_layouts
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import PRESETS, parameters
from phalanx.runtime.state.boxes import Segment
from phalanx.runtime.state.gradients import ReducedGradients
from phalanx.runtime.state.optimizer import ShardedState
from phalanx.train.step import optim
from phalanx.train.step.optim import AdamW
from phalanx.verify.replicas import random_placements

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

RULE = AdamRule(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def fresh(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [normal(size, seed=1).to(dtype), torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, 2500])
def test_three_steps_equal_the_reference(size: int, grad_dtype: torch.dtype) -> None:
    state, want = fresh(size), fresh(size, torch.float64)
    out = torch.full((size,), torch.nan, dtype=torch.bfloat16)
    for step in (1, 2, 3):
        grad = normal(size, seed=10 + step).to(grad_dtype)
        scale: Any = 0.3 if step == 2 else torch.tensor(1.7)
        fused_adamw((state[0], state[1], state[2]), grad, out, replace(RULE, step=step), scale=scale)
        adamw_(want[0], grad, *want[1:], step=step, scale=float(scale), impl="reference", **NUMBERS)
    for got, exact in zip(state, want, strict=True):
        assert close(got, exact, 1e-5)
    assert close(out, want[0], 1e-2)


def test_all_runs_of_a_segment_are_updated_as_each_alone() -> None:
    """Runs that share a block of elements and runs over several, what lies between them, two segments that cut a run, and parameters that lie elsewhere."""
    size = 5000
    runs = [(0, 3, 1, 7), (3, 900, 0, 7), (1000, 1030, 1, 100), (1030, 1031, 0, 100), (1040, 4700, 1, 200)]
    state, alone, out, out_alone = fresh(size), fresh(size), torch.zeros(size + 300), torch.zeros(size + 300)
    grad = normal(size, seed=5).float()
    table = torch.tensor(runs)
    for start, stop in ((0, 2000), (2000, size)):
        part = (state[0], state[1], state[2]), grad[start:stop], out, RULE
        fused_adamw(*part, scale=0.5, table=RunTable(runs_R4=table, start=start))
    for start, stop, decays, shift in runs:
        own = tuple(x[start:stop] for x in alone)
        rule = replace(RULE, weight_decay=RULE.weight_decay * decays)
        fused_adamw(own, grad[start:stop], out_alone[start + shift : stop + shift], rule, scale=0.5)
    for got, want in zip([*state, out], [*alone, out_alone], strict=True):
        assert torch.equal(got, want)


def _kept(way: str, rank: int) -> ShardedState:
    """State of one of four ranks, without the others."""
    spec = PRESETS["tiny"]
    params = parameters(spec)
    options: dict[str, Any] = {"holders": 2} if way == "copies" else {}
    folding = make_folding(world=4, **({} if way in ("shards", "copies") else {"ep": 4}))
    placement: Any = plain_placement(spec.num_experts, folding)
    if way in ("whole", "sharded"):
        placement = random_placements(spec.moe_layers, spec.num_experts, 4, 4, 0)
        options["expert_state"] = way
    layouts = flat_layouts(params, folding, placement, rank, zero=0 if way == "zero 0" else 1, **options)
    tensors = {p.param.name: normal(*p.shape, seed=2).to(torch.bfloat16) for x in layouts.values() for p in x.params}
    return ShardedState(tensors, layouts, groups=None, buffers={}, dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.core
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("way", ["zero 0", "shards", "copies", "whole", "sharded"])
def test_a_commit_by_launches_equals_one_run_by_run(way: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "BLOCK", 1 << 14)
    found = []
    for by_launches in (True, False):
        monkeypatch.setattr(optim, "has_adamw", lambda master, answer=by_launches: answer)
        state = _kept(way, rank)
        segments = {}
        for name, family in state.families.items():
            grad, half = normal(len(family.master), seed=3).float(), len(family.master) // 2 + 1
            segments[name] = (Segment(0, grad[:half]), Segment(half, grad[half:]))
        layouts = {name: family.layout for name, family in state.families.items()}
        rule = AdamW(OptimConfig(lr=0.1), impl="fast")
        rule.commit(state, ReducedGradients(layouts=layouts, segments=segments), step=3, lr=0.1, scale=0.5)
        found.append(state)
    for name, family in found[0].families.items():
        other = found[1].families[name]
        for kind in ShardedState.KINDS:
            assert torch.allclose(getattr(family, kind), getattr(other, kind), rtol=2e-5, atol=1e-7), (name, kind)
        assert close(family.rounded_whole, other.rounded_whole.double(), 1e-2)
        before = _kept(way, rank).families[name].rounded_whole
        assert torch.equal(family.rounded_whole == before, other.rounded_whole == before), "what no run has stays"
        for (start, stop, decays, shift), run in zip(family.run_table.tolist(), family.runs, strict=True):
            assert (start, stop, bool(decays)) == (run.start, run.stop, run.decay)
            place = family.rounded_part(start, stop)
            assert place.data_ptr() == family.rounded_whole[start + shift : stop + shift].data_ptr()


def test_moments_in_bf16_are_rounded_as_their_reference_is() -> None:
    size = 3000
    master, first, second = fresh(size)
    state = master, first.bfloat16(), second.square().bfloat16()
    want, before = [x.float() for x in state], [x.clone() for x in state]
    grad = normal(size, seed=12)
    for moments in (want, state):
        fused_adamw((moments[0], moments[1], moments[2]), grad.float(), None, RULE, scale=0.7)
    assert torch.equal(state[0], want[0])
    for got, exact, old in zip(state[1:], want[1:], before[1:], strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, rounded(exact, want[0], adamw.rounding_seed(RULE.step)))
        assert not torch.equal(got, exact.bfloat16()) and not torch.equal(got, old)


def test_the_update_of_narrow_moments_takes_the_launch_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for by_launch in (True, False):
        monkeypatch.setattr(narrow_moments, "has_adamw", lambda master, answer=by_launch: answer)
        master, first, second = fresh(2000)
        state = master, first.bfloat16(), second.bfloat16()
        grad = normal(2000, seed=13).float()
        adamw_of_narrow_(state[0], grad, state[1], state[2], step=2, scale=0.5, **NUMBERS)
        found.append(state)
    assert torch.allclose(found[0][0], found[1][0], rtol=2e-5, atol=1e-7)
    assert all(close(a, b.double(), 1e-2) for a, b in zip(found[0][1:], found[1][1:], strict=True))


# ---- sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [3, 1024])
def test_square_sums(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "PARTS", parts)
    tensors = [normal(n, seed=n).to(kind) for n, kind in ((1, torch.float32), (0, torch.float32), (9000, torch.bfloat16), (5000, torch.float64))]  # fmt: skip
    got, want = device_square_sums(tensors), square_sums(tensors, impl="reference")
    assert got.dtype == torch.float64 and got.dim() == 0 and got.item() == pytest.approx(want.item(), rel=1e-14)
    assert device_square_sums(tensors[1:2]).item() == 0
    tensors[2][8999] = torch.inf
    assert not device_square_sums(tensors).isfinite()


def test_square_sums_are_wider_than_their_terms() -> None:
    """1e30 squared is no fp32 number, and 1 beside 2^26 squared is lost in one."""
    assert device_square_sums([torch.full((2,), 1e30)]).item() == pytest.approx(2e60, rel=1e-6)
    assert device_square_sums([torch.tensor([2.0**26, 1.0])]).item() == 2.0**52 + 1


@pytest.mark.parametrize("parts", [2, 1024])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.float64])
def test_checksums_equal_their_reference(dtype: torch.dtype, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "PARTS", parts)
    for size in (1, 2, 3, 5000):
        x = (1000 * normal(size + 1, seed=size)).to(torch.float32).to(dtype)
        for part in (x, x[1:], x[:0]):
            assert torch.equal(device_checksums([x, part])[1], reference_checksum(part)), (size, len(part))


def test_a_checksum_sees_each_bit_and_each_place() -> None:
    x = normal(37).to(torch.bfloat16)
    before = checksums([x])
    for at in range(37):
        for bit in range(16):
            y = x.clone()
            y.view(torch.int16)[at] ^= -(2**15) if bit == 15 else 1 << bit
            assert checksums([y]) != before
    for at in range(36):
        y = x.clone()
        y[at], y[at + 1] = x[at + 1], x[at]
        assert (checksums([y]) == before) == bool(x[at] == x[at + 1])
    assert 0 <= before[0] <= POSITIVE and checksums([]) == []
    assert checksums([x.view(1, -1).T]) == before, "rows that are apart"


def test_a_checksum_is_what_is_written_down() -> None:
    """By Python's own whole numbers."""
    words, total = [3, 2**32 - 1, 7], 0
    for place, word in enumerate(words, 1):
        mixed = place * 0x9E3779B97F4A7C15 % 2**64
        total += word * ((mixed ^ (mixed >> 32)) | 1)
    assert checksums([torch.tensor([3, -1, 7], dtype=torch.int32)]) == [total % 2**63]

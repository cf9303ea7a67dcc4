"""Moments in bf16: rounded up or down at random, by bits that any mapping draws alike."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.words import WORDS, reference_word_sum
from phalanx.kernels.device import rounding_seed
from phalanx.kernels.ops.adamw import CHUNK, adamw_
from phalanx.kernels.ops.narrow_moments import adamw_of_narrow_, rounded

RULE = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(num, seed=1), draw(num, seed=2).bfloat16(), draw(num, seed=3).square().bfloat16()


def test_a_number_becomes_one_of_its_neighbours_and_itself_where_it_is_one() -> None:
    x = draw(100_000, seed=1)
    found = rounded(x, draw(100_000, seed=2), 7).float()
    ulp = torch.exp2(torch.floor(torch.log2(x.abs())) - 7)
    assert ((found - x).abs() < ulp).all()
    assert torch.equal(rounded(found, draw(100_000, seed=3), 7).float(), found)
    assert torch.equal(rounded(torch.zeros(4), torch.ones(4), 7), torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_it_is_rounded_up_as_often_as_it_is_near_the_upper_one(part: float) -> None:
    num = 200_000
    x = torch.full((num,), 1 + part / 128)  # between 1 and the next number of bf16
    ups = (rounded(x, draw(num, seed=4), 7) > 1).float().mean().item()
    assert abs(ups - part) < 5 * (part * (1 - part) / num) ** 0.5 + 2**-16


@pytest.mark.parametrize("weight_decay", [0.1, 0.0], ids=["moving", "still"])
def test_a_moment_that_fades_slowly_does_fade(weight_decay: float) -> None:
    """1 - beta2 = 0.001 of it a step is less than half of bf16's last place: rounding to the nearest would keep it for ever. So would the same number drawn at each step, where the master does not move."""
    num, steps = 4096, 700
    master, first, second = draw(num, seed=8), torch.zeros(num).bfloat16(), torch.ones(num).bfloat16()
    assert torch.equal((second.float() * RULE["beta2"]).bfloat16(), second), "the test is about such a moment"
    for step in range(1, steps + 1):
        adamw_of_narrow_(master, torch.zeros(num), first, second, step=step, **{**RULE, "weight_decay": weight_decay})
    assert second.float().mean().item() == pytest.approx(RULE["beta2"] ** steps, rel=0.02)


def test_seeds_of_steps_differ_and_need_one_version_of_a_program() -> None:
    seeds = [rounding_seed(step) for step in range(1, 100_001)]
    assert len(set(seeds)) > 99_990 and min(seeds) >= -(2**31) and max(seeds) < 2**31
    assert all(seed != 1 and seed % 16 for seed in seeds)


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_the_update_is_that_of_the_moments_before_they_are_rounded(impl: str) -> None:
    num = 5000
    master, first, second = state(num)
    want = [x.float().clone() for x in (master, first, second)]
    out, other = torch.empty(num).bfloat16(), torch.empty(num).bfloat16()
    grad = draw(num, seed=5)
    adamw_(*_ordered(want, grad), out=other, step=3, scale=0.5, impl=impl, **RULE)
    adamw_of_narrow_(*_ordered((master, first, second), grad), out=out, step=3, scale=0.5, impl=impl, **RULE)
    assert torch.equal(master, want[0]) and torch.equal(out, other)
    seed = rounding_seed(3)
    assert torch.equal(first, rounded(want[1], want[0], seed)) and torch.equal(second, rounded(want[2], want[0], seed))


def _ordered(kept: object, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    master, first, second = kept  # type: ignore[misc]
    return master, grad, first, second


@pytest.mark.parametrize("cut", [1, 777, CHUNK])
def test_its_bits_do_not_depend_on_how_the_state_is_cut(cut: int) -> None:
    num = CHUNK + 1000
    whole, parts = state(num), state(num)
    grad = draw(num, seed=6)
    adamw_of_narrow_(*_ordered(whole, grad), step=1, impl="reference", lanes=Lanes(2), **RULE)
    for part in (slice(0, cut), slice(cut, num)):
        cut_out = [x[part] for x in parts]
        adamw_of_narrow_(*_ordered(cut_out, grad[part]), step=1, impl="reference", lanes=SERIAL, **RULE)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_word_sums_are_those_of_what_is_kept() -> None:
    kept, sums = state(3000), torch.zeros(7, dtype=torch.int64)
    out = torch.zeros(3000).bfloat16()
    before = [int(reference_word_sum(x)) for x in kept]
    adamw_of_narrow_(*_ordered(kept, draw(3000, seed=7)), out=out, step=1, sums=sums, **RULE)
    after = [int(reference_word_sum(x)) for x in (*kept, out)]
    assert [n % WORDS for n in sums.tolist()] == before + after

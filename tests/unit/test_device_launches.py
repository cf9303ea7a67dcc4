"""Programs of `kernels/device` with the shapes of real models: how often they are launched, and that they compile for Hopper and Blackwell without spilling."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from device_launches import in_a_process

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one block can have on compute capability 9.0 and 10.0 (CUDA C++ Programming Guide, technical specifications)."""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return in_a_process("device_calls")


def test_everything_compiles_without_spilling(said: dict[str, Any]) -> None:
    built = [kernel for call in said.values() for kernel in call["built"]]
    assert {kernel["capability"] for kernel in built} == {90, 100}
    for kernel in built:
        assert kernel["local_bytes"] == 0 and kernel["registers"] <= 255, kernel
        assert kernel["shared"] <= SHARED_LIMIT, kernel


def test_an_axis_of_a_grid_is_no_longer_than_a_gpu_allows(said: dict[str, Any]) -> None:
    for name, call in said.items():
        for first, *further in call["grids"]:
            assert first < 2**31 and all(n < 2**16 for n in further), name


def test_launches(said: dict[str, Any]) -> None:
    got = {name.removesuffix(" bfloat16"): call["launches"] for name, call in said.items() if name.endswith("bfloat16")}
    assert {name: launches for name, launches in got.items() if "loss" not in name} == {
        "adamw": ["adamw", "adamw", "adamw"],
        **{
            f"logits {n}": ["three_parts", "aten::repeat", "aten::mm", "aten::_to_copy", "aten::mm", "sum_parts"]
            for n in (8, 128, 256)
        },
        **{f"norm {n}": 2 * ["norm_forward", "norm_backward", "sum_parts"] for n in (2048, 128, 7168)},
        "permute": ["take_rows", "sum_rows"],
        "rope": ["turned", "turned"],
        "rope of a latent": ["turned", "turned"],
        "rope of normed heads": ["turned", "normed_turned_backward", "sum_parts"],
        "rope of wide normed heads": ["turned", "normed_turned_backward", "sum_parts"],
        **{f"route {n}": ["aten::zeros", "choose", "aten::sum", "choose_backward"] for n in (8, 128, 256)},
        **{f"route {n} with padding": ["aten::zeros", "choose", "aten::sum", "choose_backward"] for n in (8, 128, 256)},
        **{f"sort {n}": ["count_values", "place_values", "ends_of_groups", "zero_empty_groups"] for n in (8, 128, 256)},
        "sums": ["square_parts", "square_parts", "aten::sum", "aten::new_zeros", "add_checksum", "add_checksum"],
        "swiglu 768": ["swiglu_forward", "swiglu_backward", "swiglu_backward"],
        "swiglu 14336": ["swiglu_forward", "swiglu_backward", "swiglu_backward"],
    }


def test_the_loss_has_few_launches_whatever_the_vocabulary(said: dict[str, Any]) -> None:
    """Of 4,096 tokens, forward and backward. At 151,936 rows they are four chunks in bf16, of 25 launches at most by plain operations."""
    count = {name: len(call["launches"]) for name, call in said.items() if "loss" in name}
    for dtype in ("bfloat16", "float32"):
        assert count[f"loss 151936 {dtype}"] <= 40, count
        assert count[f"plain loss 151936 {dtype}"] <= 4 * 25 + 5, count
        assert count[f"loss 32000 {dtype}"] <= 15 and count[f"plain loss 32000 {dtype}"] <= 40, count
        assert count[f"loss of a shard {dtype}"] <= 15 and count[f"plain loss of a shard {dtype}"] <= 50, count

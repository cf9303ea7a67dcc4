"""Attention on a device: which kernel of torch gets which shapes, and the runs of packed documents. The kernels themselves need a GPU (`phalanx gpu-check`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phalanx.kernels.device import attention
from phalanx.kernels.device.attention import CUDNN_FIRST, FLASH_FIRST, device_attention
from phalanx.kernels.ops.attention import causal_attention

SEQUENCES, LENGTH, HEADS, KEYS, DIM = 2, 24, 4, 2, 16
WHOLE, PACKED = ((24,), (24,)), ((10, 14), (1, 20, 3))


def draw(dtype: torch.dtype, *, width: int = DIM, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, DIM), (keys, DIM), (keys, width))
    return tuple(
        torch.randn(SEQUENCES, LENGTH, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    )


def want(inputs: tuple[torch.Tensor, ...], segments: Any) -> torch.Tensor:
    wide = (x.detach().double() for x in inputs)
    return causal_attention(*wide, segments, impl="reference")


@pytest.fixture
def flash() -> Iterator[list[tuple[Any, ...]]]:
    """The kernel that only a GPU has, computed plainly; what it was asked for."""
    asked = []

    def forward(
        q: Any, k: Any, v: Any, starts: Any, key_starts: Any, most: int, most_keys: int, *rest: Any, **_: Any
    ) -> Any:
        dropout, causal, _mask = rest
        assert dropout == 0.0 and causal and starts.dtype == torch.int32 and torch.equal(starts, key_starts)
        asked.append((tuple(starts.tolist()), most, most_keys))
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        for first, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            part = (x[None, first:stop].double() for x in (q, k, v))
            out[first:stop] = causal_attention(*part, ((stop - first,),), impl="reference")[0].to(q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0])
        return out, lse, torch.empty(0, dtype=torch.uint64), torch.empty(0, dtype=torch.uint64), torch.empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    yield asked
    library._destroy()


@pytest.mark.parametrize("segments", [WHOLE, PACKED])
@pytest.mark.parametrize("width", [DIM, 8, 24])
def test_fp32_is_right_whatever_the_documents_and_widths(segments: Any, width: int) -> None:
    inputs = draw(torch.float32, width=width)
    out = device_attention(*inputs, segments)  # type: ignore[call-arg]
    assert out.shape == (SEQUENCES, LENGTH, HEADS, width)
    torch.testing.assert_close(out.double(), want(inputs, segments), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in inputs)


def test_packed_documents_are_one_call(flash: list[tuple[Any, ...]]) -> None:
    inputs = draw(torch.bfloat16)
    with torch.no_grad():
        out = device_attention(*inputs, PACKED)  # type: ignore[call-arg]
    assert flash == [((0, 10, 24, 25, 45, 48), 20, 20)]
    torch.testing.assert_close(out.double(), want(inputs, PACKED), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "dim", "takes"),
    [
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 264, False),
        (torch.bfloat16, 12, False),
        (torch.float32, 128, False),
    ],
)
def test_runs_are_for_heads_that_flash_attention_takes(dtype: torch.dtype, dim: int, takes: bool) -> None:
    assert attention.takes_runs(torch.empty(1, 4, 1, dim, dtype=dtype)) is takes


def test_hopper_and_what_came_after_asks_cudnn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = torch.device("cuda", 0), []
    for capability, first in (((9, 0), True), ((10, 0), True), ((8, 0), False)):
        attention._prefers_cudnn.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert attention._prefers_cudnn(device) is first
    attention._prefers_cudnn.cache_clear()
    kernel = attention.sdpa_kernel
    monkeypatch.setattr(
        attention, "sdpa_kernel", lambda order, **how: seen.append((order, how)) or kernel(order, **how)
    )
    for first, order in ((True, CUDNN_FIRST), (False, FLASH_FIRST)):
        monkeypatch.setattr(attention, "_prefers_cudnn", lambda _, first=first: first)
        device_attention(*draw(torch.float32), WHOLE)  # type: ignore[call-arg]
        assert seen.pop() == (list(order), {"set_priority": True})


@pytest.mark.parametrize("can", [True, False])
def test_values_of_another_width_are_filled_up_only_where_no_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    widths = []
    whole = attention._whole
    monkeypatch.setattr(attention, "_prefers_cudnn", lambda _: True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *tensors: tensors)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params, debug: can)
    monkeypatch.setattr(attention, "_whole", lambda q, k, v: widths.append(v.shape[-1]) or whole(q, k, v))
    inputs = draw(torch.float32, width=8, keys=HEADS)
    out = device_attention(*inputs, WHOLE)  # type: ignore[call-arg]
    assert widths == [8 if can else DIM] and out.shape[-1] == 8
    torch.testing.assert_close(out.double(), want(inputs, WHOLE), rtol=1e-5, atol=1e-5)

"""What `phalanx gpu-check` compares memory and launches of a GPU with: the numbers beside it are those of a trace of today."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from phalanx_lab.bench.trace.shim import why_not
from phalanx_lab.bench.trace.steps import even_estimate
from phalanx_lab.gpu_check.taken_apart import TRACED, memory_cases, trace_all, traced
from phalanx_lab.gpu_check.whole import asked_of, dry_run, layer_launches, tell_sides

WRITE = "PHALANX_WRITE_TRACED"
"""Set it to write the file anew: `PHALANX_WRITE_TRACED=1 pytest tests/lab/test_gpu_check_traced.py`."""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_trace_says_what_is_written_down(tmp_path: Path) -> None:
    found = trace_all(tmp_path)
    if WRITE in os.environ:
        TRACED.write_text(json.dumps(found, indent=1) + "\n")
    assert found == traced(), f"if this is right, write the file anew with {WRITE}=1"


@pytest.mark.parametrize("name", memory_cases())
def test_the_dry_run_is_within_5_percent_of_the_trace(name: str) -> None:
    want = traced()["bytes"][name]
    for what, size in dry_run(even_estimate(memory_cases()[name], world=1)).items():
        assert size == pytest.approx(want[what], rel=0.05), what


def event(name: str, *kernels: str, parent: Any = None, device: bool = False) -> Any:
    """An event of torch's profiler."""
    kind = DeviceType.CUDA if device else DeviceType.CPU
    started = [SimpleNamespace(name=x) for x in kernels]
    return SimpleNamespace(name=name, kernels=started, cpu_parent=parent, device_type=kind, is_user_annotation=False)


def test_an_operation_counts_once_and_a_kernel_of_ours_each_time() -> None:
    sort, linear = event("aten::sort", "radix", "radix"), event("aten::linear")
    inner = event("aten::copy_", "Memcpy DtoD", parent=sort)
    attention = event("aten::_scaled_dot_product_cudnn_attention", "cudnn")
    norm = event("_FusedNorm", "norm_forward", "norm_forward")
    device = [event("norm_forward", device=True)] * 2 + [event("radix", device=True)]
    known = frozenset(("sort", "copy_", "mm", "attention", "triton norm_forward"))
    call = event("cudaDeviceSynchronize", "radix")  # whose number is that of an operation
    asked = asked_of([call, sort, inner, event("aten::mm", "gemm", parent=linear), attention, norm, *device], known)
    assert asked == {"sort": 1, "mm": 1, "attention": 1, "triton norm_forward": 2}


def test_a_layer_is_what_a_layer_more_adds() -> None:
    few = {"forward": {"mm": 3, "sort": 1}, "backward": {}, "optimizer": {"triton adamw": 2}, "loss": {"mm": 4}}
    more = {**few, "forward": {"mm": 5, "sort": 1}}
    found = layer_launches({"few": few, "more": more})
    assert found["a layer's forward"] == {"mm": 2} and found["loss"] == {"mm": 4}
    assert found["a layer's backward"].total() == found["a layer's optimizer"].total() == 0


def beyond(asked: dict[str, int], got: dict[str, int]) -> list[str]:
    """What is told above its bar."""
    found: list[str] = []

    class Told:
        def tell(self, what: str, value: Any, *, most: float | None = None) -> None:
            found.extend([what] if most is not None and value > most else [])

    tell_sides(Told(), "forward", Counter(asked), Counter(got))  # type: ignore[arg-type]
    return found


def test_an_operation_on_one_side_alone_is_found_where_totals_are_equal() -> None:
    asked = {"mm": 20, "add": 4, "copy to host": 1, "triton norm": 3}
    assert beyond(asked, {"mm": 20, "add_": 4, "_to_copy": 1, "triton norm": 3}) == []
    assert beyond(asked, {"mm": 19, "add": 4, "_to_copy": 2, "triton norm": 3}) == []  # one of 28
    both = ["forward: asked for in a trace alone, of all", "forward: on the device alone, of all"]
    assert beyond(asked, {"mm": 20, "add": 4, "_to_copy": 1, "sort": 3}) == both
    assert beyond(asked, {**asked, "sort": 2}) == both[1:]
    assert beyond(asked, {**asked, "add": 2}) == both[:1]

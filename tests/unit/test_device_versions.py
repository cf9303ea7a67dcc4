"""The short way to launch a program: what it tells apart is what Triton compiles versions for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from phalanx.kernels.device import launch as launching


class Program:
    """Stands for a program of Triton: compiles, tells what ran."""

    def __init__(self) -> None:
        self.compiled: list[Program] = []
        self.ran: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "code", "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **named: Any) -> Program:
            self.compiled.append(Program())
            return self.compiled[-1]

        return compile

    def run(self, *args: Any) -> None:
        self.ran.append(args)


class Elsewhere(torch.Tensor):
    """On another device, by its word."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return Program()


def test_a_second_launch_of_a_kind_goes_the_short_way(program: Program) -> None:
    x = torch.ones(64)
    launching.launch(program, (3, 2), x, 5, BLOCK=16, num_warps=2)
    assert len(program.compiled) == 1 and not program.compiled[0].ran
    launching.launch(program, (3, 2), x, 7, BLOCK=16, num_warps=2)
    assert program.compiled[0].ran == [(3, 2, 1, 7, "code", "metadata", None, None, None, x.data_ptr(), 7, 16)]


def test_a_kernel_that_is_kept_compiles_once_and_has_versions_of_its_own(program: Program) -> None:
    kernels, x = [launching.Kernel(program, num_warps=2, BLOCK=16) for _ in range(2)], torch.ones(64)
    for kernel in (kernels[0], *kernels):
        kernel((3,), x, 5)
    assert [len(known.ran) for known in program.compiled] == [1, 0]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(64, dtype=torch.float64)}, {"x": torch.ones(64).as_subclass(Elsewhere)}, {"x": torch.ones(65)[1:]}, {"n": 1}, {"n": 16}, {"n": 2**40},
        {"BLOCK": 32}, {"num_warps": 4},
    ],
    ids=["type", "device", "alignment", "one", "multiple of 16", "wide", "constant", "warps"],
)  # fmt: skip
def test_another_kind_is_compiled(program: Program, other: dict[str, Any]) -> None:
    for given in ({}, other):
        launching.launch(program, (1,), *{"x": torch.ones(64), "n": 5, **{k: v for k, v in given.items() if k in "xn"}}.values(),
                         **{"BLOCK": 16, "num_warps": 2, **{k: v for k, v in given.items() if k not in "xn"}})  # fmt: skip
    assert len(program.compiled) == 2


def test_what_has_one_version_here_has_one_in_triton() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    whole = [0, 1, 2, 3, 16, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31) - 1, 2**62, 2**63, 2**63 + 16]
    tensors = [torch.ones(64, dtype=d)[i:] for d in (torch.float32, torch.bfloat16, torch.int64) for i in (0, 1, 8)]
    for a, b in itertools.combinations([*whole, *tensors, 1.0, 0.5, 1e-20, None, True, False], 2):
        if launching.told_apart([a])[0] == launching.told_apart([b])[0]:
            ours = [native_specialize_impl(type(backend), x, False, True, True) for x in (a, b)]
            assert ours[0] == ours[1], (a, b)

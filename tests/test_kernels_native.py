"""Compiled kernels: built once and only where that is possible; exact where the others are; a NaN or an infinity is never lost.

That they agree with the plain versions is tested with those (`lanes = "compiled"` in tests/test_kernels_*.py).
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_help import normal
from phalanx.kernels.adamw import adamw_
from phalanx.kernels.lanes import Lanes
from phalanx.kernels.native import Rows, build, compiled_rows
from phalanx.kernels.norm import rms_norm

needs_compiler = pytest.mark.skipif(compiled_rows() is None, reason="needs a C++ compiler")


@pytest.fixture
def rows() -> Rows:
    found = compiled_rows()
    assert found is not None
    return found


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; the library of this process is forgotten before and after."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    build.library.cache_clear()
    yield tmp_path / "home" / ".cache" / "phalanx"
    build.library.cache_clear()


def programs(folder: Path, text: str) -> str:
    """A folder of executables that stands for `PATH`: each compiler is the shell script `text`."""
    folder.mkdir()
    for name in build.COMPILERS:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


# ---- building ------------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_compiled_once_and_found_again(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build.library(), ctypes.CDLL)
    (made,) = anew.glob("*.so")
    first = made.stat().st_mtime_ns
    build.library.cache_clear()
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert isinstance(build.library(), ctypes.CDLL) and made.stat().st_mtime_ns == first
    assert not [p for p in anew.iterdir() if p.suffix not in (".so", ".lock")]


@needs_compiler
def test_processes_that_start_together_compile_once(anew: Path) -> None:
    code = "from phalanx.kernels.native import compiled_rows; assert compiled_rows() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ)) for _ in range(2)]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    assert len(list(anew.glob("*.so"))) == 1


def test_a_change_of_anything_it_depends_on_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("")
    before = build._digest(compiler, ("-O3",))
    assert build._digest(compiler, ("-O3",)) == before != build._digest(compiler, ("-O2",))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build._digest(compiler, ("-O3",)) != before


def test_without_a_compiler(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert build.library() is None and not anew.exists()


def test_with_a_compiler_that_fails(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", "exit 1"))
    assert build.library() is None and not list(anew.glob("*.so"))


def test_with_a_compiler_that_makes_nonsense(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", 'while [ "$1" != -o ]; do shift; done; echo no > "$2"'))
    assert build.library() is None


@needs_compiler
def test_a_folder_that_cannot_be_made_is_passed_over(anew: Path, tmp_path: Path) -> None:
    anew.parent.write_text("a file, where a folder is wanted")
    assert isinstance(build.library(), ctypes.CDLL)
    (folder,) = (tmp_path / "temp").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_compiler
def test_somebody_elses_folder_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "getuid", lambda: 54321)
    assert build.library() is None


# ---- results -------------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_exponential_is_exact_to_its_last_places(rows: Rows) -> None:
    """Through the cross-entropy of two logits, whose gradient is e^x / (1 + e^x)."""
    x = torch.linspace(-86, 0, 100_001, dtype=torch.float32)
    logits = torch.stack([x, torch.zeros_like(x)], dim=1).contiguous()
    losses = torch.empty(len(x))
    rows.cross_entropy(logits, torch.ones(len(x), dtype=torch.int64), losses, gradient=True)
    want = torch.sigmoid(x.to(torch.float64))
    assert ((logits[:, 0] - want).abs() / want).max() < 4e-7
    assert torch.allclose(losses.to(torch.float64), -torch.log1p(-want), rtol=1e-5, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(rows: Rows, dtype: torch.dtype, bad: float) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 17] = bad
    assert not math.isfinite(rows.square_sum(x))

    gate_up, h = torch.ones(3, 80, dtype=dtype), torch.empty(3, 40, dtype=dtype)
    gate_up[1, 57] = bad
    rows.swiglu_forward(gate_up, h)
    assert torch.isfinite(h).all(1).tolist() == [True, False, True] and not torch.isfinite(h[1, 17])

    with Lanes(1, rows=rows) as lanes:
        y = rms_norm(x, torch.ones(40, dtype=dtype), 1e-5, lanes=lanes)
    assert torch.isfinite(y).all(1).tolist() == [True, False, True]

    losses = torch.empty(3, dtype=wide)
    rows.cross_entropy(x.clone(), torch.zeros(3, dtype=torch.int64), losses, gradient=True)
    assert torch.isfinite(losses).tolist() == [True, bad == -math.inf, True]  # e^-inf is 0

    master, state = torch.ones(40, dtype=wide), torch.zeros(2, 40, dtype=wide)
    rows.adamw((master, *state), x[1], torch.empty_like(x[1]), numbers=(1.0, 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05))
    assert not torch.isfinite(state[0, 17]) and torch.isfinite(master[:17]).all()


@needs_compiler
@pytest.mark.parametrize(
    ("master", "grad", "out"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_adamw_of_all_types(rows: Rows, master: torch.dtype, grad: torch.dtype, out: torch.dtype) -> None:
    size, options = 5003, {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    results = []
    for native in (rows, None):
        state = [normal(size, seed=i).to(master) for i in range(2)] + [normal(size, seed=2).abs().to(master)]
        rounded = torch.empty(size, dtype=out)
        impl = "fast" if native is not None else "reference"
        with Lanes(2, rows=native) as lanes:
            adamw_(
                state[0],
                normal(size, seed=3).to(grad),
                *state[1:],
                rounded,
                scale=0.3,
                impl=impl,
                lanes=lanes,
                **options,
            )
        assert torch.equal(rounded, state[0].to(out))
        results.append(state)
    limit = 1e-14 if master == torch.float64 else 3e-6
    for mine, plain in zip(*results, strict=True):
        assert torch.allclose(mine, plain, rtol=limit, atol=limit)


@needs_compiler
def test_bf16_is_rounded_to_the_nearest_even(rows: Rows) -> None:
    """Every bf16 number, and the halfway points between neighbours: as torch rounds."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    halves = torch.stack([bits << 16, (bits << 16) + 0x8000, (bits << 16) + 0x8001, (bits << 16) + 0x7FFF])
    values = halves.to(torch.int32).view(torch.float32).flatten()
    values = values[torch.isfinite(values)]
    out, zeros = torch.empty_like(values, dtype=torch.bfloat16), torch.zeros(2, len(values))
    master = values.clone()
    rows.adamw((master, *zeros), torch.zeros_like(values), out, numbers=(1.0, 0.0, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05))
    assert torch.equal(master, values) and torch.equal(out, values.to(torch.bfloat16))

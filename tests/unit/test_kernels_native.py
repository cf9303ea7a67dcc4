"""Compiled kernels: built once and only where that is possible; exact where the others are; a NaN or an infinity is never lost.

That they agree with the plain versions is tested with those (`lanes = "compiled"` in tests/unit/test_kernels_*.py).
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_help import normal

from phalanx.core.config import KernelConfig, Recipe
from phalanx.core.errors import DataError
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import build
from phalanx.kernels.native.rows import CompiledRows, compiled_rows
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.cross_entropy import linear_cross_entropy
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.norm import residual_norm, rms_norm
from phalanx.kernels.ops.permute import combine_rows
from phalanx.kernels.ops.rope import RopeTable, apply_rope
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.kernels.ops.swiglu import swiglu
from phalanx.train.setup.rank import agreed_rows, name_of_rows, tell_uncompiled

needs_compiler = pytest.mark.skipif(compiled_rows() is None, reason="needs a C++ compiler")


@pytest.fixture
def rows() -> CompiledRows:
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
    build.attempt.cache_clear()
    yield tmp_path / "home" / ".cache" / "phalanx"
    build.attempt.cache_clear()


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
    build.attempt.cache_clear()
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert isinstance(build.library(), ctypes.CDLL) and made.stat().st_mtime_ns == first
    assert not [p for p in anew.iterdir() if p.suffix not in (".so", ".lock")]


@needs_compiler
def test_processes_that_start_together_compile_once(anew: Path) -> None:
    code = "from phalanx.kernels.native import compiled_rows; assert compiled_rows() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ)) for _ in range(2)]
    assert [p.wait(timeout=360) for p in both] == [0, 0]
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
    assert build.why_uncompiled() == "" and build.cpp_compilers() == []


def test_with_a_compiler_that_fails(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", "exit 1"))
    assert build.library() is None and not list(anew.glob("*.so"))
    assert build.why_uncompiled() == f"{tmp_path}/bin/c++: ends with 1"


def test_with_a_compiler_that_makes_nonsense(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", 'while [ "$1" != -o ]; do shift; done; echo no > "$2"'))
    assert build.library() is None


@needs_compiler
def test_the_next_compiler_is_tried_where_the_first_fails(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = build.cpp_compilers()[-1]
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "c++").write_text("#!/bin/sh\necho broken here >&2\nexit 3\n")
    (folder / "c++").chmod(0o755)
    (folder / "g++").write_text(f'#!/bin/sh\nexec {working} "$@"\n')
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert isinstance(build.library(), ctypes.CDLL) and build.why_uncompiled() == ""
    assert build.attempt().compiler == "g++" and f"{folder}/c++: ends with 3 (broken here)" in build.attempt().failures


def test_one_compiler_of_several_names_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(programs(tmp_path / "bin", "exit 1"))
    (folder / "g++").unlink()
    (folder / "g++").symlink_to(folder / "c++")
    monkeypatch.setenv("PATH", str(folder))
    assert build.cpp_compilers() == [folder / "c++", folder / "clang++"]


def test_a_run_says_that_its_compiler_makes_nothing(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(recipe: Recipe, path: str, device: str = "cpu") -> list[Any]:
        out: list[Any] = []
        monkeypatch.setenv("PATH", path)
        build.attempt.cache_clear()
        tell_uncompiled(recipe, torch.device(device), emit=out.append)
        return out

    broken, recipe = programs(tmp_path / "bin", "exit 1"), Recipe()
    (note,) = said(recipe, broken)
    assert note.level == "warning" and "not compiled" in note.text and "c++: ends with 1" in note.text
    assert said(recipe, str(tmp_path / "nothing")) == said(recipe, broken, "cuda") == []
    assert said(replace(recipe, kernels=KernelConfig(compiled=False)), broken) == []


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


@needs_compiler
def test_a_user_without_a_home(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "expanduser", nobody)
    assert isinstance(build.library(), ctypes.CDLL) and len(list((tmp_path / "temp").iterdir())) == 1


@needs_compiler
def test_ranks_use_compiled_kernels_only_where_all_have_the_same(rows: CompiledRows) -> None:
    """Ranks that hold the same weights and round differently drift apart."""
    said: list[Any] = []

    def agreed(found: CompiledRows | None, *others: str) -> CompiledRows | None:
        return agreed_rows(found, (name_of_rows(found), *others), emit=said.append)

    assert agreed(rows, rows.name, rows.name) is rows and not said
    assert agreed(None, "", "") is None and not said
    assert agreed(rows, rows.name, "", "") is None and "ranks 2, 3 have none" in said.pop().text
    assert agreed(rows, "rows-another.so") is None and "differ" in said.pop().text
    assert agreed(None, rows.name) is None and "ranks 0 have none" in said.pop().text


# ---- what there is no compiled version for --------------------------------------------------------------------------------------


def kernels_on(x_MH: torch.Tensor, lanes: Lanes) -> list[torch.Tensor]:
    """Every kernel that may be compiled, forward and backward, on 24 rows of 32 numbers."""
    x = x_MH.detach().clone().requires_grad_()
    weight, w13 = x.detach()[:8], x.detach()[:16].view(1, 2, 8, 32)
    angles = torch.promote_types(x.dtype, torch.float32)
    table = RopeTable(torch.ones(3, 8, 4, dtype=angles), torch.full((3, 8, 4), 0.5, dtype=angles))
    both = torch.arange(24)
    index_TK = torch.stack([both, both.flip(0), both], dim=1)
    outputs = [
        *residual_norm(x, x.flip(0), x.detach()[0], 1e-5, lanes=lanes),
        *apply_rope(x.view(3, 8, 4, 8), x.view(3, 8, 4, 8), table=table, lanes=lanes),
        swiglu(x.view(24, 2, 16), lanes=lanes),
        expert_ffn(x, w13, weight.T.reshape(1, 32, 8), [24], lanes=lanes),
        combine_rows(x, index_TK, token_of_row_M=both, lanes=lanes),
        linear_cross_entropy(x, weight, both % 8, lanes=lanes),
    ]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert x.grad is not None
    return [*(y.detach() for y in outputs), x.grad, square_sums([x.detach()], lanes=lanes)]


@needs_compiler
def test_a_type_that_is_not_compiled_is_left_to_torch(rows: CompiledRows) -> None:
    x_MH = normal(24, 32, scale=0.3).to(torch.float16)
    with Lanes(2, rows=rows) as lanes, Lanes(2) as plain:
        for got, want in zip(kernels_on(x_MH, lanes), kernels_on(x_MH, plain), strict=True):
            assert torch.equal(got, want) and torch.isfinite(got).all()


@needs_compiler
@pytest.mark.parametrize("label", [8, 1 << 40])
def test_a_label_outside_the_vocabulary_writes_nowhere(rows: CompiledRows, label: int) -> None:
    hidden, weight, labels = torch.ones(4, 16), torch.ones(8, 16), torch.tensor([1, -100, label, 2])
    with Lanes(1, rows=rows) as lanes, pytest.raises(DataError, match=rf"labels\[2\] = {label}: is outside"):
        linear_cross_entropy(hidden.requires_grad_(), weight, labels, lanes=lanes)


@needs_compiler
def test_labels_that_are_not_dense_or_not_int64(rows: CompiledRows) -> None:
    hidden, weight = normal(4, 16).to(torch.float32), normal(8, 16, seed=1).to(torch.float32)
    labels = torch.tensor([1, 7, -100, 7, 5, 7, 0, 7])[::2]
    want = linear_cross_entropy(hidden, weight, labels, impl="reference")
    with Lanes(1, rows=rows) as lanes:
        for given in (labels, labels.to(torch.int32)):
            assert torch.allclose(linear_cross_entropy(hidden, weight, given, lanes=lanes), want)


@needs_compiler
@pytest.mark.parametrize(
    "kinds", [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.bfloat16), (torch.float32, torch.float16)]
)
def test_adamw_of_a_state_that_is_not_the_wide_type(rows: CompiledRows, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Taken for fp32, it would be read and written beyond its end."""
    master, other = kinds
    state = tuple(torch.ones(64, dtype=master) for _ in range(3))
    grad = torch.ones(64, dtype=other)
    assert not rows.has_adamw(state, grad, None if master == other else grad)


# ---- results -------------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_exponential_is_exact_to_its_last_places(rows: CompiledRows) -> None:
    """Through the cross-entropy of two logits, whose gradient is e^x / (1 + e^x)."""
    x = torch.linspace(-86, 0, 100_001, dtype=torch.float32)
    logits = torch.stack([x, torch.zeros_like(x)], dim=1).contiguous()
    losses = torch.empty(len(x))
    rows.cross_entropy(logits, torch.ones(len(x), dtype=torch.int64), losses, gradient=True)
    want = torch.sigmoid(x.to(torch.float64))
    assert ((logits[:, 0] - want).abs() / want).max() < 4e-7
    assert torch.allclose(losses.to(torch.float64), -torch.log1p(-want), rtol=1e-5, atol=1e-7)


@needs_compiler
def test_exponential_is_as_exact_in_whole_vectors(rows: CompiledRows) -> None:
    """Rows of two logits are the end of a loop, which compilers make otherwise: 68 units in the last place were seen in vectors alone."""
    x = torch.linspace(-70, 0, 65_537).flip(0).contiguous()  # further down quotients are no normal numbers
    logits = x[None].clone()
    rows.cross_entropy(logits, torch.tensor([65_536]), torch.empty(1), gradient=True)
    exponential = (logits[0].double() / logits[0, 0].double())[:-1]
    want = x[:-1].double().exp()
    assert ((exponential - want).abs() / want).max() < 5e-7
    gate = torch.linspace(-20, 20, 65_537)
    silu = torch.empty(1, len(gate))
    rows.swiglu_forward(torch.cat([gate, torch.ones_like(gate)])[None], silu)
    want = torch.nn.functional.silu(gate.double())
    assert ((silu[0] - want).abs() <= 4e-7 * want.abs()).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_squares_are_summed_in_double_precision(rows: CompiledRows, dtype: torch.dtype) -> None:
    x = normal(200_001).to(dtype)
    assert rows.square_sum(x) == pytest.approx(x.double().square().sum().item(), rel=(len(x) + 1) * 2**-52, abs=0)
    if dtype != torch.float64:
        assert rows.square_sum(torch.full((4,), 1e30, dtype=dtype)) == pytest.approx(4e60, rel=0.01)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(rows: CompiledRows, dtype: torch.dtype, bad: float) -> None:
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
def test_adamw_of_all_types(rows: CompiledRows, master: torch.dtype, grad: torch.dtype, out: torch.dtype) -> None:
    size, options = 5003, {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    results = []
    for native in (rows, None):
        state = [normal(size, seed=i).to(master) for i in range(2)] + [normal(size, seed=2).abs().to(master)]
        rounded = torch.empty(size, dtype=out)
        impl = "fast" if native is not None else "reference"
        with Lanes(2, rows=native) as lanes:
            adamw_(  # type: ignore[call-arg]
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
def test_bf16_is_rounded_to_the_nearest_even(rows: CompiledRows) -> None:
    """Every bf16 number, and the halfway points between neighbours: as torch rounds."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    halves = torch.stack([bits << 16, (bits << 16) + 0x8000, (bits << 16) + 0x8001, (bits << 16) + 0x7FFF])
    values = halves.to(torch.int32).view(torch.float32).flatten()
    values = values[torch.isfinite(values)]
    out, zeros = torch.empty_like(values, dtype=torch.bfloat16), torch.zeros(2, len(values))
    master = values.clone()
    rows.adamw((master, *zeros), torch.zeros_like(values), out, numbers=(1.0, 0.0, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05))
    assert torch.equal(master, values) and torch.equal(out, values.to(torch.bfloat16))


def test_no_code_of_somebody_else_is_loaded(tmp_path: Path) -> None:
    """A link, a folder that is a link, or what others may write to: whoever was first in a folder for temporary files could have put it there."""
    compiler = next(iter(build.cpp_compilers()), None)
    if compiler is None:
        pytest.skip("no compiler here")
    folder = tmp_path / "own"
    target = build._built(compiler, folder)
    assert build._opened(target) is not None and target.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link.so").symlink_to(target)
    with pytest.raises(OSError):
        build._opened(tmp_path / "link.so")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="is a link or somebody else's"):
        build._built(compiler, tmp_path / "link")
    target.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        build._opened(target)
    assert build._built(compiler, folder).stat().st_mode & 0o777 == 0o700  # compiled again
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="somebody else's"):
        build._built(compiler, folder)

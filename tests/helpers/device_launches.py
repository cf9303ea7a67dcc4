"""What operations launch on a GPU, and what becomes of each launch ahead of time, without a GPU: host functions run on fake tensors, launches are recorded, and each is compiled.

Must be imported in a process without TRITON_INTERPRET (`in_a_process` starts one).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
LOOKS = (
    "alias as_strided detach empty empty_like empty_strided expand new_empty permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze "
    "_unsafe_view view promote_types"
)
NO_WORK = frozenset(f"aten::{name}" for name in LOOKS.split())
"""What looks at memory in another way or at a type, or has memory allocated."""


@dataclass(frozen=True)
class Launch:
    """One launch: the program (or the operation of torch), how many programs, and its arguments by name."""

    name: str
    grid: tuple[int, ...] = ()
    program: Any = None
    arguments: Any = None


class _Operations(TorchDispatchMode):
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::") and name not in NO_WORK:
            self.launches.append(Launch(name))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """All launches under it, on fake tensors of a GPU."""
    import triton

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = inspect.signature(self.fn).bind_partial(
            *args, **{k: v for k, v in named.items() if k in self.arg_names}
        )
        assert set(bound.arguments) == set(self.arg_names), f"{self.fn.__name__}: an argument is missing"
        fixed = [k for k in named if k in self.arg_names]
        assert fixed == self.arg_names[len(self.arg_names) - len(fixed) :], (
            f"{self.fn.__name__}: `launch` takes constants in their order"
        )
        options = {k: v for k, v in named.items() if k not in self.arg_names}
        launches.append(Launch(self.fn.__name__, tuple(grid), self, (dict(bound.arguments), options)))

    with FakeTensorMode(), torch.no_grad(), patch.object(triton.JITFunction, "run", run), _Operations(launches):
        yield launches


def built(launch: Launch, *, capability: int) -> dict[str, Any]:
    """Compile a recorded launch as Triton would for its arguments."""
    import triton
    from compile_ahead import resources
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments, options = launch.arguments
    fixed = {p.name for p in launch.program.params if p.is_constexpr}
    constants = {k: v for k, v in arguments.items() if k in fixed or (isinstance(v, int) and v == 1)}
    signature = {k: "constexpr" if k in constants else _type(v) for k, v in arguments.items()}
    aligned = [
        i for i, v in enumerate(arguments.values()) if isinstance(v, torch.Tensor) or (type(v) is int and v % 16 == 0)
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned if list(arguments)[i] not in constants}
    source = ASTSource(launch.program, signature, constants, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "name": launch.name,
        "capability": capability,
        "shared": kernel.metadata.shared,
        **resources(kernel.asm["cubin"]),
    }


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a process says of one call: names in order, largest grid, and what was compiled."""

    launches: list[str]
    grids: list[tuple[int, ...]]
    built: list[dict[str, Any]]


def told(calls: dict[str, Callable[[], object]], *, capabilities: tuple[int, ...] = (90, 100)) -> dict[str, Told]:
    """Each call once; programs that were compiled for the same types are not compiled again."""
    out, known = {}, dict[str, list[dict[str, Any]]]()
    for name, call in calls.items():
        with recorded() as launches:
            call()
        programs = [x for x in launches if x.program is not None]
        for launch in programs:
            key = _key(launch)
            if key not in known:
                known[key] = [built(launch, capability=c) for c in capabilities]
        built_here = [b for x in programs for b in known[_key(x)]]
        out[name] = Told(launches=[x.name for x in launches], grids=[x.grid for x in programs], built=built_here)
    return out


def _key(launch: Launch) -> str:
    arguments, options = launch.arguments
    return repr(
        (launch.name, {k: _type(v) if isinstance(v, torch.Tensor) else str(v) for k, v in arguments.items()}, options)
    )


def in_a_process(module: str) -> dict[str, Any]:
    """`told(module.calls())` of a new process that has no interpreter of Triton."""
    code = f"import json; from dataclasses import asdict; from device_launches import told; import {module}\n"
    code += f"print(json.dumps({{k: asdict(v) for k, v in told({module}.calls()).items()}}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found

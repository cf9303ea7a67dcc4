"""Compile the kernels ahead of time, without a GPU: that they compile at all for a processor, and with how many registers and how much spilling.

Must be imported in a process without TRITON_INTERPRET: under the interpreter there is nothing to compile. The assembler (ptxas) and `cuobjdump` come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx.kernels.triton.programs.first import first_kernel
from phalanx.kernels.triton.programs.second import add_ranks_kernel, second_kernel, send_kernel
from phalanx.kernels.triton.tiles import SendShape, TileShape

KERNELS = {
    "first": first_kernel,
    "second": second_kernel,
    "send": send_kernel,
    "add_ranks": add_ranks_kernel,
}
DATA = {"x", "w", "y", "h", "buffer", "out"}
TABLES = {"buffer_table", "flag_table"}
INTS = {
    "entry_of_row", "problems", "num_problems", "flags", "epoch_at", "status", "row_of_copy", "counts", "tiles_done", "sent",
    "next_task", "token_of_entry", "entry_of_token",
}  # fmt: skip
ALIGNED = DATA | {
    "x_stride", "y_stride", "h_stride", "buffer_stride", "out_stride", "w_slot_stride", "w_col_stride",
    "w_depth_stride", "depth", "columns", "block_columns",
}  # fmt: skip
"""Arguments that are multiples of 16 for any model one would train: Triton builds such kernels when it is called with them."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel for one processor."""

    name: str
    registers: int
    """Of each thread."""
    local_bytes: int
    """Of each thread's stack in device memory: registers that spilled."""
    shared_bytes: int
    """Of each program."""
    wgmma: int
    """Matrix instructions of Hopper in the code."""
    narrow: int
    """Loads and stores of two bytes: tensors of bf16 element by element."""
    acquires_sys: int
    """Reads of flags at system scope."""
    releases_sys: int


def compile_ahead(
    name: str,
    *,
    dtype: torch.dtype,
    tile: TileShape,
    send: SendShape | None = None,
    copies: int = 2,
    ranks: int = 8,
    wait: bool = True,
    transposed: bool = False,
    capability: int = 90,
) -> Compiled:
    """Compile kernel `name` of KERNELS for compute capability `capability` (90 is Hopper) and say what came out. `transposed`: weights as the backward pass has them."""
    kernel, send = KERNELS[name], SendShape() if send is None else send
    constants: dict[str, Any] = {
        "ROW_TILES": tile.row_tiles, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth,
        "EVEN_K": True, "BY_DEPTH": not transposed, "WAIT": wait, "WIDEN": False, "COPIES": copies, "RANKS": ranks, "BLOCK_E": send.entries, "BLOCK_C": send.columns,
        "CHUNK": send.chunk, "w_col_stride" if transposed else "w_depth_stride": 1,
    }  # fmt: skip
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else _type(arg, dtype) for arg in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg in ALIGNED - set(constants)
    }
    uses_tile = "BLOCK_K" in constants
    options = {"num_warps": tile.warps if uses_tile else 4, "num_stages": tile.stages if uses_tile else 3}
    built = triton.compile(
        ASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", capability, 32), options=options
    )
    ptx = built.asm["ptx"]
    return Compiled(
        name=name,
        shared_bytes=built.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        narrow=len(re.findall(r"(?:ld|st)\.global\.\S*\bb16", ptx)),
        acquires_sys=len(re.findall(r"sys\.acquire|acquire\.sys", ptx)),
        releases_sys=len(re.findall(r"sys\.release|release\.sys", ptx)),
        **resources(built.asm["cubin"]),
    )


def _type(arg: str, dtype: torch.dtype) -> str:
    if arg in DATA:
        return f"*{NAMES[dtype]}"
    if arg in TABLES:
        return "*i64"
    return "*i32" if arg in INTS else "i32"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of each thread, and bytes of its stack in device memory (what spilled)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump did not say what the kernel uses: {said!r}")
    return {"registers": int(found[1]), "local_bytes": int(found[2])}

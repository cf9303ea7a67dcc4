"""What this machine's processor can do, as the system says it. Whoever must know gets a `Processor` as an argument: the same decision can then be made
for another machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """`name` as its maker calls it, and the extensions of its instruction set; both empty where the system does not say."""

    name: str = ""
    flags: frozenset[str] = frozenset()

    @property
    def has_amx(self) -> bool:
        """It multiplies bf16 matrices in hardware tiles."""
        return "amx_bf16" in self.flags

    @property
    def multiplies_bf16(self) -> bool:
        """It has instructions for products of bf16. oneDNN generates code around them, anew for every shape; elsewhere one product of widened numbers serves all."""
        return self.has_amx or "avx512_bf16" in self.flags

    @property
    def widens_bf16(self) -> bool:
        """It sums up products of bf16 in a room of fp32 first: oneDNN takes them wherever there is AVX-512, and without instructions for bf16 widens them.
        Without AVX-512 torch multiplies them itself and needs no room (seen on an AMD EPYC with AVX2)."""
        return "avx512f" in self.flags and not self.multiplies_bf16

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """The type that it computes fastest in: widened products of bf16 take two to three times as long as those of fp32."""
        return "bfloat16" if self.multiplies_bf16 else "float32"


DATA_SHEET_BF16 = {
    "NVIDIA A100": 3.12e14,
    "NVIDIA A800": 3.12e14,
    "NVIDIA H100 80GB HBM3": 9.894e14,
    "NVIDIA H200": 9.894e14,
    "NVIDIA H800": 9.894e14,
    "NVIDIA B200": 2.25e15,
    "NVIDIA B300": 2.25e15,
    "NVIDIA GB200": 2.5e15,
    "NVIDIA GB300": 2.5e15,
}
"""Beginning of a GPU's name as its driver tells it -> dense bf16 FLOP/s of its data sheet: what `simulate/data/clusters` has, with sources (a test compares)."""


def data_sheet_flops_per_s(name: str) -> float:
    """Of a GPU by its name; 0 where it is not known. PCIe cards, whose rates are others (NVL too), and parts of a GPU (MIG) are not."""
    other = re.search(r"\b(pcie|nvl|mig)\b", name, re.IGNORECASE)
    known = [rate for start, rate in DATA_SHEET_BF16.items() if name.startswith(start) and other is None]
    return known[0] if known else 0.0


MULTIPLIES_BF16 = Processor(flags=frozenset({"avx512_bf16", "amx_bf16"}))
"""A processor of today's servers."""


def this_processor(path: Path = CPUINFO) -> Processor:
    """The one that this program runs on."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return Processor()

    def value(field: str) -> str:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")

    # ARM's list is called otherwise, and the kernel has numbers for its makers and models
    numbers = [value("CPU implementer"), value("CPU part")]
    name = value("model name") or " ".join(["ARM", *numbers] if all(numbers) else [])
    return Processor(name=name, flags=frozenset((value("flags") or value("Features")).split()))

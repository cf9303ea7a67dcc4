"""The cost oracle: seconds of one operation on one device, and how far to trust them.

Decides in this order: a measured table of the very machine (corrected to nearby shapes), else a formula of the hardware's constants, each
with an error bar (standard deviation of the logarithm). Must never change: a cost depends on shapes and hardware, never on the
name of a model.

    product of matrices   t0 + max(2mnk / (efficiency * peak), bytes / (efficiency * bandwidth)); 7 % on 11,305 shapes (aiconfigurator)
    weight gradient       the same, and `EPILOGUE` of the lesser of the two: fp32 sums are read and written when a tile's products are done
    grouped product       the same over all rows and all weights of the group: few rows a group are bound by reading weights
    attention             causal FLOPs over a curve of efficiency by sequence length
    memory-bound kernel   bytes over bandwidth, and the time of a kernel
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from phalanx.simulate.hardware.clusters import Curve, Hardware, at

SIGMA = {
    "gemm": 0.05,
    "experts": 0.08,
    "attention": 0.08,
    "memory": 0.15,
    "launch": 0.40,
    "tp": 0.12,
    "etp": 0.12,
    "cp": 0.15,
    "a2a_inside": 0.15,
    "a2a_between": 0.35,
    "dp": 0.25,
    "pp": 0.30,
    "optimizer": 0.20,
    "bubble": 0.08,
    "imbalance": 0.30,
    "recompute": 0.08,
}
"""Error bar by kind of operation: the spread of the published tables round their fits (section 1.3 and 1.4 of the reference), widest for
all-to-all between hosts, which has no public table."""

EPILOGUE = 0.3
"""Share of the lesser bound (memory or products) that a weight gradient takes besides the greater: its traffic is at the end of each tile. Fitted to
the weight gradients with fp32 accumulation of SimuMax's table of an A100 (configs/system/a100_pcie.json, Apache-2.0): 65 products from
8.3 to 4.4 % of mean error, 4 groups of 616 and 1,232 rows an expert from 20 to 2.6 %. Forward products of that table, and the grouped ones of
aiconfigurator on H100, are best at 0: their loads run ahead of the products."""

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Cost:
    """Seconds, the spread of their logarithm, and where they come from."""

    seconds: float
    sigma: float
    origin: str


@dataclass(frozen=True)
class Oracle:
    """Costs on one kind of hardware. `precision` is that of products: bf16, fp8, or fp32 where the file has a rate of it."""

    hardware: Hardware
    precision: str = "bf16"

    @property
    def eight_bits(self) -> bool:
        """Whether products run in fp8: then their inputs are cast (and transposed for the weight gradient) by kernels of their own."""
        return self.precision == "fp8" and self.hardware.fp8_flops_per_s is not None

    @property
    def _wide(self) -> bool:
        return self.precision == "fp32" and self.hardware.fp32_flops_per_s is not None

    @property
    def _rate(self) -> float:
        h = self.hardware
        if self._wide:
            return h.peak("fp32") * (h.fp32_efficiency or h.gemm_efficiency)
        return h.peak(self.precision) * (h.fp8_efficiency if self.eight_bits else h.gemm_efficiency)

    @property
    def peak_rate(self) -> float:
        """FLOPs per second that products reach."""
        return self._rate

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that a kernel reaches."""
        return self.hardware.memory_bytes_per_s * self.hardware.memory_efficiency

    def memory(self, num_bytes: float, *, kernels: int = 1) -> float:
        """Seconds of memory-bound kernels."""
        return num_bytes / self.bytes_per_s + kernels * self.hardware.kernel_s

    def product(self, m: float, n: float, k: float, *, groups: int = 1, accumulate: bool = False) -> float:
        """(m, k) x (k, n), or `groups` of them that share the m rows; `accumulate` adds into fp32 (a weight gradient).

        In a weight gradient the rows are the inner dim: call it with m and k as they are in the forward pass.
        """
        if m <= 0:
            return 0.0
        weights = groups * n * k
        width = FP32 if self._wide else BF16
        moved = (m * k + m * n) * width + weights * (2 * FP32 if accumulate else width)
        products, memory = 2.0 * m * n * k / self._rate, moved / self.bytes_per_s
        bound = max(products, memory) + (EPILOGUE * min(products, memory) if accumulate else 0.0)
        return self.hardware.kernel_s * 4 / 3 + bound * self._correction(m, n, k, groups)

    def _correction(self, m: float, n: float, k: float, groups: int = 1) -> float:
        """Measured over computed time at the nearest measured shape within a factor of e in each dim; else 1. Tables are of bf16 and fp32."""
        h, width = self.hardware, FP32 if self._wide else BF16
        if groups > 1:
            table = h.measured_experts_fp32 if self._wide else h.measured_experts
            ratio = _nearby_experts(table, m, n * k, groups, self._rate, self.bytes_per_s, h.kernel_s, width)
            if ratio is not None:
                return ratio
        return _nearby(self._measured, m, n, k, self._rate, self.bytes_per_s, width)

    @property
    def _measured(self) -> tuple[tuple[int, int, int, float], ...]:
        return self.hardware.measured_gemm_fp32 if self._wide else self.hardware.measured_gemm

    def gemm(self, m: float, n: float, k: float, *, groups: int = 1, accumulate: bool = False) -> Cost:
        """A product with its error bar and where it is from."""
        seconds = self.product(m, n, k, groups=groups, accumulate=accumulate)
        if groups == 1 and not accumulate and any((a, b, c) == (m, n, k) for a, b, c, _ in self._measured):
            return Cost(seconds, 0.03, "measured")
        if self._correction(m, n, k, groups) != 1.0:
            return Cost(seconds, 0.05, "near a measurement")
        return Cost(seconds, SIGMA["gemm"] if min(m, n, k) >= 512 else 0.15, "formula")

    def attention(self, flops: float, seq: float, *, backward: bool = False) -> float:
        """Fused attention of `flops` (causal half counted), its backward with 2.5 times the work. In bf16, or fp32: as much slower as products are."""
        h = self.hardware
        slower = self._rate / Oracle(h)._rate if self._wide else 1.0
        rate = slower * h.bf16_flops_per_s * at(h.attention_forward, seq) * _short(h.attention_forward, seq)
        return (2.5 / h.attention_backward if backward else 1.0) * flops / rate + (3 if backward else 1) * h.kernel_s


def _short(curve: Curve, seq: float) -> float:
    """Below the first knot efficiency goes on falling as between the first two, as a power of the length."""
    if len(curve) < 2 or seq >= curve[0][0]:
        return 1.0
    (x0, y0), (x1, y1) = curve[:2]
    return float((seq / x0) ** (math.log(y1 / y0) / math.log(x1 / x0)))


@lru_cache(maxsize=65536)
def _nearby(
    table: tuple[tuple[int, int, int, float], ...],
    m: float,
    n: float,
    k: float,
    rate: float,
    bandwidth: float,
    width: int = BF16,
) -> float:
    best, found = 1.0, 1.0
    for a, b, c, seconds in table:
        distance = max(abs(math.log(x / y)) for x, y in ((m, a), (n, b), (k, c)))
        if distance < best:
            computed = max(2.0 * a * b * c / rate, width * (a * c + a * b + b * c) / bandwidth)
            best, found = distance, seconds / computed
    return found


def experts_s(
    rows: float, n: float, k: float, groups: int, *, rate: float, bandwidth: float, kernel_s: float, width: int
) -> float:
    """Two products of all rows of experts, the first twice as wide, and what lies between them, by the formulas: hidden k, width n."""
    weights = groups * n * k
    first = max(4.0 * rows * n * k / rate, width * (rows * (k + 2 * n) + 2 * weights) / bandwidth)
    second = max(2.0 * rows * n * k / rate, width * (rows * (n + k) + weights) / bandwidth)
    return first + second + 3 * width * rows * n / bandwidth + kernel_s * (4 / 3 * 2 + 1)


@lru_cache(maxsize=65536)
def _nearby_experts(
    table: tuple[tuple[int, int, int, int, float], ...],
    rows: float,
    elements: float,
    groups: int,
    rate: float,
    bandwidth: float,
    kernel_s: float,
    width: int,
) -> float | None:
    """The same of experts: nearest in rows of each, in their number, and in elements of a matrix (of a row's two the geometric mean); None where none is near."""
    best, found = 1.0, None
    for m, n, k, experts, seconds in table:
        own = math.sqrt(2.0) * n * k
        pairs = ((rows / groups, m / experts), (groups, experts), (math.sqrt(elements), math.sqrt(own)))
        distance = max(abs(math.log(x / y)) for x, y in pairs)
        if distance < best:
            computed = experts_s(m, n, k, experts, rate=rate, bandwidth=bandwidth, kernel_s=kernel_s, width=width)
            best, found = distance, seconds / computed
    return found

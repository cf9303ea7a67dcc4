"""What a step that was traced would take on a device: counted launches, bytes and FLOPs, each at one rate. `phalanx bench trace` counts; nothing here is measured.

A phase takes what the device needs for it, or what the host needs to launch it where that is more; messages of rows and waits of the host come on top, for nothing hides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.plan.model import ModelSpec, flops_per_token


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """An H100 as estimated before one was there: round figures, the same for every model and version of the code. Attention and exchange are those of FlashAttention-2 (arXiv
    2307.08691, forward and backward together) and of NVLink 4; the others what public benchmarks of bf16 products, of elementwise kernels and of launches come near."""

    peak_flops_per_s: float = 989e12
    """Dense bf16, data sheet."""
    product_flops_per_s: float = 550e12
    flash_flops_per_s: float = 300e12
    """FlashAttention-2, of the causal half of the scores."""
    attention_flops_per_s: float = 1.7 * 300e12
    """cuDNN's kernel, which is 1.7 to 2.3 times as fast on this card (measured by others: transformers PR 48163)."""
    memory_bytes_per_s: float = 2.5e12
    """Read and written by elementwise operations."""
    exchange_bytes_per_s: float = 300e9
    launch_s: float = 4.5e-6
    """Of the host, for an operation."""
    wait_s: float = 0.2e-3
    """For which the device idles when the host waits for it."""


@dataclass(frozen=True, kw_only=True)
class TracedPhase:
    """What a phase of a rank's step asks for, counted."""

    launches: int = 0
    product_flops: int = 0
    attention_flops: int = 0
    """Of the kernel that the card likes best; all scores counted."""
    flash_flops: int = 0
    moved_bytes: int = 0
    sent_bytes: int = 0
    waits: int = 0


@dataclass(frozen=True, kw_only=True)
class TracedTime:
    """Seconds of a rank's step, by what takes them."""

    parts: Mapping[str, float]
    tokens: int
    """Of the whole replica, that is of `ranks` ranks."""
    ranks: int
    mfu: float
    """Over the peak, the causal half of the scores counted."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Of a rank."""
        return self.tokens / self.ranks / self.seconds


def traced_time(
    phases: Mapping[str, TracedPhase],
    spec: ModelSpec,
    *,
    seq_len: int,
    tokens: int,
    ranks: int = 1,
    rates: DeviceRates | None = None,
) -> TracedTime:
    """`tokens` of `ranks` ranks that share them, one rank of which was traced; `seq_len` of the FLOPs of the model."""
    rates = rates or DeviceRates()
    parts = dict.fromkeys(("products", "attention", "elementwise", "exchange", "launches", "waits"), 0.0)
    for phase in phases.values():
        device = {
            "products": phase.product_flops / rates.product_flops_per_s,
            "attention": phase.attention_flops / 2 / rates.attention_flops_per_s
            + phase.flash_flops / 2 / rates.flash_flops_per_s,
            "elementwise": phase.moved_bytes / rates.memory_bytes_per_s,
        }
        for name, seconds in device.items():
            parts[name] += seconds
        parts["launches"] += max(0.0, phase.launches * rates.launch_s - sum(device.values()))
        parts["exchange"] += phase.sent_bytes / rates.exchange_bytes_per_s
        parts["waits"] += phase.waits * rates.wait_s
    flops = flops_per_token(spec, seq_len) * tokens / ranks
    mfu = flops / sum(parts.values()) / rates.peak_flops_per_s
    return TracedTime(parts=parts, tokens=tokens, ranks=ranks, mfu=mfu)

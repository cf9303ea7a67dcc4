"""Which checks there are, in the order of their value per second, and what is known where time ends between two stages.

Imports nothing of torch: `--list` and `--help` answer at once.
"""

from __future__ import annotations

from phalanx_lab.gpu_check.checks import GpuCheck

STAGES = {
    "A": "a program of one rank computes on this GPU what a CPU computes",
    "B": "how fast layers of MoE, their products, the loss and the optimizer are, beside the dense rate",
    "C": "NCCL between ranks computes what one rank computes",
    "D": "how much of its messages a layer of fused kernels hides, and what a CUDA graph saves",
}
"""Stage -> what is known after it."""


def _check(name: str, run: str, seconds: float, title: str, *, limit_s: float | None = None) -> GpuCheck:
    return GpuCheck(name=name, title=title, run=run, seconds=seconds, limit_s=limit_s or 3 * seconds)


CHECKS = (
    _check("A1", "right:check_device", 20, "the device, versions, dense and copy rates"),
    _check("A2.nccl", "together:check_sharing", 20, "two ranks share the card: all-reduce and uneven all-to-all"),
    _check(
        "A2.symmetric", "together:check_symmetric", 15, "two processes write into each other's memory on the card; MPS"
    ),
    _check("A3.experts", "parity:check_experts", 25, "grouped products: empty groups, no rows"),
    _check("A3.attention", "parity:check_attention", 30, "attention: documents, shared heads, a ring by hand"),
    _check("A3.rows", "parity:check_rows", 25, "rows to experts and back, SwiGLU, rotation, norms"),
    _check("A3.router", "parity:check_router", 15, "routers of three models, and how routed pairs are sorted"),
    _check("A3.loss", "parity:check_loss", 25, "projection and cross-entropy"),
    _check("A3.state", "parity:check_state", 15, "AdamW, sums of squares, sums of bits"),
    _check("A3.backends", "parity:check_backends", 20, "torch's attention by each backend"),
    _check("A4.step", "right:check_step", 120, "train_step with every option, fp32, against one rank on the CPU"),
    _check("A4.bf16", "right:check_curve", 40, "losses of 50 steps in bf16 beside those of the CPU"),
    _check("A5.waits", "right:check_waits", 40, "undeclared host synchronisations of a MoE layer and of whole steps"),
    _check(
        "A5.launches", "whole:check_launches", 20, "launches of a layer, the loss and the optimizer beside the trace"
    ),
    _check("A6", "whole:check_memory", 60, "memory of whole steps beside the trace and the dry run"),
    _check("A7", "save:check_save", 30, "state copied to the host for a checkpoint while work goes on"),
    _check("B1.qwen3", "fast:check_qwen3", 40, "a MoE layer of Qwen3-30B-A3B"),
    _check("B1.mixtral", "fast:check_mixtral", 40, "a MoE layer of Mixtral 8x7B"),
    _check("B1.deepseek", "fast:check_deepseek", 40, "a MoE layer of DeepSeek-V3"),
    _check("B2", "fast:check_grouped", 30, "grouped products against dense ones of the same work"),
    _check("B3", "fast:check_rest", 30, "loss, AdamW, sums of bits, the way to the host"),
    _check("B4", "fast:check_whole", 40, "whole steps of four layers of Qwen3-30B-A3B"),
    _check("C1.two", "together:check_two", 180, "mappings of 2 ranks over NCCL against one rank, fp32"),
    _check("C1.four", "together:check_four", 180, "mappings of 4 ranks over NCCL against one rank, fp32"),
    _check("C1.eight", "together:check_eight", 180, "mappings of 8 ranks, where there are 8 GPUs"),
    _check("C2", "order:check_order", 45, "runs of 2 to 4 ranks with unequal shares, over NCCL, against the CPU"),
    _check("C3", "healing:check_healing", 50, "ranks are killed; the others abort, form again, and go on"),
    _check(
        "C4.tiles",
        "streams:check_tiles",
        30,
        "a layer tile by tile on 2 ranks: bits over schedules, and the serial layer",
    ),
    _check("C4.fused", "streams:check_fused", 30, "a layer of fused kernels on 2 ranks through symmetric memory"),
    _check("D2", "kernels:check_graph", 20, "a padded layer in a CUDA graph"),
    _check("D1", "kernels:check_overlap", 480, "benchmarks/gpu/overlap.py", limit_s=560),
)


def plan_text() -> str:
    """The order in which to use a lent half hour."""
    lines = []
    for stage, known in STAGES.items():
        own = [c for c in CHECKS if c.stage == stage]
        seconds = sum(c.seconds for c in own)
        lines.append(f"{stage}  about {seconds:.0f} s: phalanx gpu-check --stage {stage} --json {stage.lower()}.json")
        lines += [f"   {c.name:<13}{c.seconds:5.0f} s  {c.title}" for c in own]
        lines.append(f"   what is known then: {known}")
    return "\n".join(lines)

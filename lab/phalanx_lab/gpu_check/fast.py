"""B: speed of one MoE layer and of its products, against the dense rate of the same run."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from phalanx.kernels.cpu.words import word_sum
from phalanx.kernels.device import WeightSum
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.cross_entropy import linear_cross_entropy
from phalanx.plan.model import flops_per_token
from phalanx_lab.bench.ours import OurRun, Recompute
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.layer import PARTS, LayerPart, LayerRun, LayersOf, forward, make_layer, passes
from phalanx_lab.gpu_check.timing import dense_flops_per_s, seconds_in_a_row, seconds_of

CLASSES = {
    "products": ("gemm", "cutlass", "nvjet", "grouped", "matmul", "aten::mm", "_mm"),
    "copies": ("memcpy", "memset", "copy", "fill"),
    "sorting": ("sort", "scan", "topk", "radix"),
    "rows": ("gather", "combine", "index", "scatter", "rows"),
}
"""Class of a kernel -> words in its name; the first that fits."""
LEAST_GROUPED = 0.8
LEAST_ADDED = 0.9
"""Predictions take a product that adds to its sum for as fast as one that does not."""
LOADED_S = 0.5
"""A layer of 30 ms, again and again, is such a load: an H200's dense rate falls from 800 TFLOP/s to between 650 and 680 in it, which is no fault of the layer."""
POLICIES: tuple[Recompute, ...] = ("full", "selective", "none")
"""The last one is looked at by a profiler, which slows launches of its process from then on."""
SHOWN, NAME = 24, 90
"""Kernels, and characters of their names, that are told."""


def check_qwen3(here: Here) -> None:
    """B1.qwen3."""
    _check_layer(here, PARTS["qwen3-30b-a3b"])


def check_mixtral(here: Here) -> None:
    """B1.mixtral."""
    _check_layer(here, PARTS["mixtral-8x7b"])


def check_deepseek(here: Here) -> None:
    """B1.deepseek."""
    _check_layer(here, PARTS["deepseek-v3"])


def _check_layer(here: Here, part: LayerPart) -> None:
    dense = dense_flops_per_s(here)
    run = make_layer(part, here)
    forward_s = seconds_of(partial(_forward_only, run), here)
    both_s = seconds_of(partial(passes, run), here)
    here.tell("dense TFLOP/s", dense / 1e12)
    here.tell("forward ms", 1e3 * forward_s)
    here.tell("forward and backward ms", 1e3 * both_s)
    here.tell_rate("of the dense rate", run.flops / both_s / dense, least=part.least_mfu)
    row_s = seconds_in_a_row(partial(passes, run), here)
    here.tell("one after the other, ms", 1e3 * row_s)
    here.tell("one after the other, of the dense rate", run.flops / row_s / dense)
    here.tell("dense TFLOP/s under load", dense_flops_per_s(here, loaded_s=LOADED_S) / 1e12)
    here.tell("host ms", 1e3 * statistics.median(_host_s(run, here) for _ in range(here.pick(15, 1))))
    _tell_kernels(here, partial(passes, run))
    _tell_host(here, partial(passes, run))


def _forward_only(run: LayerRun) -> None:
    with torch.no_grad():
        forward(run)


def _host_s(run: LayerRun, here: Here) -> float:
    """Seconds until the host has begun both passes, on an idle device."""
    if here.on_gpu:
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    passes(run)
    return time.perf_counter() - begin_s


def _tell_host(here: Here, work: Callable[[], object]) -> None:
    """Where the host spends its time in `work`, by operation and call of CUDA, with a profiler's own beside it: [ms, calls]."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        work()
    longest = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)[:SHOWN]
    here.tell("host, by operation", {e.key[:NAME]: [e.self_cpu_time_total / 1e3, e.count] for e in longest})


def _tell_kernels(here: Here, work: Callable[[], object]) -> None:
    """Milliseconds of `work` by class of kernel, the number of kernels, and the kernels that take the longest: [ms, launches]."""
    activity = ProfilerActivity.CUDA if here.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as found:
        work()
        if here.on_gpu:
            torch.cuda.synchronize()
    classes: Counter[str] = Counter()
    each: dict[str, list[float]] = {}
    for event in found.key_averages():
        ms = (event.self_device_time_total if here.on_gpu else event.self_cpu_time_total) / 1e3
        classes[_class_of(event.key)] += ms
        classes["kernels"] += event.count
        own = each.setdefault(event.key[:NAME], [0.0, 0])
        own[0], own[1] = own[0] + ms, own[1] + event.count
    here.tell("ms by class", dict(classes))
    longest = sorted(each.items(), key=lambda item: -item[1][0])[:SHOWN]
    here.tell("longest kernels", dict(longest))


def _class_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(w in lower for w in words)), "other")


def check_whole(here: Here) -> None:
    """B4: whole steps of four layers of Qwen3-30B-A3B with the experts of one rank of eight: MFU of a micro-batch of 4,096 tokens, by recomputation."""
    part = PARTS["qwen3-30b-a3b"]
    shape = LayersOf(
        vocab=here.pick(part.spec().vocab, 64), batch=1, seq_len=here.pick(4096, 32), part=part, tiny=not here.on_gpu
    )
    dense = dense_flops_per_s(here)
    flops = flops_per_token(shape.spec(), shape.seq_len) * shape.tokens
    for recompute in POLICIES:
        run = OurRun(shape, threads=1, native=False, device=here.device, recompute=recompute)
        run.run(3)
        if here.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(run.run(here.pick(10, 1))[0])
        here.tell(f"{recompute}: step ms", 1e3 * seconds)
        here.tell(f"{recompute}: of the dense rate", flops / seconds / dense)
        if here.on_gpu:
            here.tell(f"{recompute}: peak GB", torch.cuda.max_memory_allocated() / 1e9)
        if recompute == "none":
            _tell_kernels(here, partial(run.run, 1))
        del run


def check_grouped(here: Here) -> None:
    """B2: `F.grouped_mm` with even and skewed groups against one dense product of the same work, shapes of Mixtral's first product; and a gradient of such a weight that its product adds
    to fp32, against the product alone, and against one that another pass over memory adds."""
    experts, rows, width, hidden = here.pick((8, 16_384, 28_672, 4096), (4, 64, 32, 16))
    x = torch.randn(rows, hidden, device=here.device, dtype=torch.bfloat16)
    weight = torch.randn(experts, width, hidden, device=here.device, dtype=torch.bfloat16)
    dense_s = seconds_of(lambda: x @ weight[0].T, here)
    here.tell("dense ms", 1e3 * dense_s)
    even = [rows // experts] * experts
    half = [rows // 2, 0, *[rows // 2 // (experts - 2)] * (experts - 3)]
    for name, counts in (("even", even), ("skewed", [*half, rows - sum(half)])):
        ends = torch.tensor(counts, device=here.device).cumsum(0).to(torch.int32)
        seconds = seconds_of(partial(F.grouped_mm, x, weight.transpose(1, 2), offs=ends), here)
        here.tell_rate(f"{name}, of dense", dense_s / seconds, least=LEAST_GROUPED)
    for few, least in ((rows // 2, LEAST_ADDED), (rows // 8, None)):  # with few rows memory is more of it
        _tell_added(here, x[:few], width, least=least)


def _tell_added(here: Here, x_MH: torch.Tensor, width: int, *, least: float | None) -> None:
    rows, hidden = x_MH.shape
    dy, total = x_MH.new_empty(rows, width).normal_(), torch.zeros(width, hidden, device=here.device)
    own = WeightSum(lambda: (total, True))
    alone_s = seconds_of(lambda: dy.T @ x_MH, here)
    passes_s = seconds_of(lambda: total.add_(dy.T @ x_MH), here)
    added_s = seconds_of(lambda: own.add(dy, x_MH), here)
    here.tell(f"{rows} rows: gradient alone ms", 1e3 * alone_s)
    bar = least if here.on_gpu else None
    here.tell(f"{rows} rows: added by its product, of the product alone", alone_s / added_s, least=bar)
    here.tell(f"{rows} rows: added by its product, over product and pass", passes_s / added_s)


def check_rest(here: Here) -> None:
    """B3: what a step does outside layers: the loss of 4,096 tokens over 151,936 words, AdamW, sums of bits, and the way of a checkpoint to the host."""
    tokens, hidden, vocab = here.pick((4096, 2048, 151_936), (8, 16, 40))
    hidden_TH = torch.randn(tokens, hidden, device=here.device, dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.randn(vocab, hidden, device=here.device, dtype=torch.bfloat16, requires_grad=True)
    labels_T = torch.randint(0, vocab, (tokens,), device=here.device)
    loss_s = seconds_of(lambda: linear_cross_entropy(hidden_TH, weight_VH, labels_T).sum().backward(), here)
    here.tell("loss, forward and backward ms", 1e3 * loss_s)
    here.tell("loss, of the dense rate", 3 * 2.0 * tokens * hidden * vocab / loss_s / dense_flops_per_s(here))
    length = here.pick(200_000_000, 1000)
    master, grad, avg, square = (torch.rand(length, device=here.device) for _ in range(4))
    out = torch.empty(length, device=here.device, dtype=torch.bfloat16)
    rule: dict[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw_s = seconds_of(lambda: adamw_(master, grad, avg, square, out, step=3, **rule), here)  # type: ignore[arg-type]
    here.tell("AdamW GB/s", (7 * 4 + 2) * length / adamw_s / 1e9)
    here.tell("sums of bits GB/s", master.nbytes / seconds_of(lambda: word_sum(master), here) / 1e9)
    held = torch.empty(length, pin_memory=here.on_gpu)
    here.tell("to the host GB/s", master.nbytes / seconds_of(lambda: held.copy_(master, non_blocking=True), here) / 1e9)

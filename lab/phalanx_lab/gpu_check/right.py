"""A1, A4, A5: the device itself; whole steps on it against the CPU; host waits."""

from __future__ import annotations

import linecache
import statistics
import warnings
from collections import Counter

import torch

from phalanx.kernels.device import runs_programs
from phalanx.verify import ROUNDED_AXES, CaseTask, VerifyJob, default_cases, run_job
from phalanx_lab.bench.ours import OurRun
from phalanx_lab.bench.workload import WorkloadShape
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.layer import PARTS, make_layer, passes
from phalanx_lab.gpu_check.shared_card import run_shared
from phalanx_lab.gpu_check.timing import dense_flops_per_s, seconds_of

STEP_S = 60.0
CURVE = 2e-2
"""Losses of bf16 runs differ by rounding alone."""


def check_device(here: Here) -> None:
    """A1: what this machine is, and the two rates that everything else is compared with."""
    here.tell("torch", torch.__version__)
    if here.on_gpu:
        properties = torch.cuda.get_device_properties(here.device)
        here.tell("device", properties.name)
        here.tell("capability", f"{properties.major}.{properties.minor}")
        here.tell("memory GB", properties.total_memory / 1e9)
        here.tell("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    try:
        import triton

        here.tell("triton", triton.__version__)
    except ImportError:
        here.tell("triton", "is not installed")
    if here.on_gpu:  # else what is checked are the plain versions
        here.tell("programs of ours run", float(runs_programs(torch.empty(1, device=here.device))), least=1)
    here.tell("dense TFLOP/s", dense_flops_per_s(here) / 1e12)
    source = torch.randn(here.pick(1 << 28, 1 << 12), device=here.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), here)
    here.tell("copy GB/s", 2 * source.nbytes / seconds / 1e9)


def check_step(here: Here) -> None:
    """A4.step: one rank on the device with every option that one rank can have, against the plain run on the CPU."""
    compare(here, world=1, most_cases=here.pick(58, 2))


def compare(here: Here, *, world: int, most_cases: int) -> None:
    """The oracle of `phalanx verify` in fp32, mappings on the device and the one-rank run on the CPU. Before any call of CUDA in this process."""
    cases = [c for c in default_cases(world, axes=ROUNDED_AXES) if c.setup.kernels == "fast"]
    stride = max(1, len(cases) // most_cases)
    tasks = [CaseTask(case) for case in cases[::stride][:most_cases]]
    job = VerifyJob(tasks=tasks, world=world, dtype=torch.float32, timeout_s=STEP_S, device=here.device.type)
    reports = run_job(job, run=run_shared)
    bad = [r for r in reports if r.failures]
    here.tell("cases", len(reports), least=len(tasks))
    for name in ("loss_error", "gradient_error", "norm_error", "step_error"):
        here.tell(name.replace("_", " "), max(getattr(r, name) for r in reports))
    here.tell("first failures", [f"{r.task.case.label}: {r.failures[0]}"[:160] for r in bad[:5]])
    here.tell("cases that failed", len(bad), most=0)


def check_curve(here: Here) -> None:
    """A4.bf16: the losses of a small run in bf16, on the device and on the CPU."""
    shape = here.pick(
        WorkloadShape(layers=2, hidden=256, ffn=512, vocab=1024, batch=2, seq_len=128),
        WorkloadShape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, batch=2, seq_len=16),
    )
    steps = here.pick(50, 3)
    want = OurRun(shape, threads=here.pick(8, 1), native=False).run(steps)[1]
    got = OurRun(shape, threads=1, native=False, device=here.device).run(steps)[1]
    here.tell("losses", [got[0], got[-1]])
    here.tell("losses of the CPU", [want[0], want[-1]])
    here.tell("largest difference", max(abs(a - b) / b for a, b in zip(got, want, strict=True)), most=CURVE)
    tail = steps // 5 or 1
    here.tell(
        "loss fell by", statistics.mean(got[:tail]) - statistics.mean(got[-tail:]), least=0.0 if here.on_gpu else None
    )


def check_waits(here: Here) -> None:
    """A5.waits: lines at which a MoE layer waits for the device without saying so (`# SYNC:`)."""
    here.needs_gpu("torch.cuda.set_sync_debug_mode")
    layer = make_layer(PARTS["qwen3-30b-a3b"], here)
    passes(layer)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            passes(layer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in found if "called a synchronizing" in str(w.message)]
    undeclared = [w for w in waits if "SYNC:" not in linecache.getline(w.filename, w.lineno)]
    here.tell("waits", len(waits))
    here.tell("undeclared", Counter(f"{w.filename.split('phalanx', 1)[-1]}:{w.lineno}" for w in undeclared))
    here.tell("undeclared waits", len(undeclared), most=0)

"""A1, A4, A5: the device itself; whole steps on it against the CPU; host waits."""

from __future__ import annotations

import contextlib
import linecache
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from phalanx.kernels.device import WeightSum, WeightSums, runs_programs, weight_sums
from phalanx.models import MoE
from phalanx.runtime.comm import devices
from phalanx.train.step import train_step
from phalanx.verify import ROUNDED_AXES, CaseTask, VerifyJob, default_cases, run_job
from phalanx_lab.bench.ours import OurRun
from phalanx_lab.bench.workload import WorkloadShape
from phalanx_lab.gpu_check.cards import run_on_cards
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.layer import PARTS, make_layer, passes
from phalanx_lab.gpu_check.taken_apart import TINY, open_step, settings_of
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
    reports = run_job(job, run=run_on_cards)
    bad = [r for r in reports if r.failures]
    here.tell("cases", len(reports), least=len(tasks))
    for name in ("loss_error", "gradient_error", "norm_error", "step_error"):
        here.tell(name.replace("_", " "), max(getattr(r, name) for r in reports))
    here.tell("first failures", [f"{r.task.case.label}: {r.failures[0]}"[:160] for r in bad[:5]])
    here.tell("cases that failed", len(bad), most=0)


def check_curve(here: Here) -> None:
    """A4.bf16: the losses of a small run in bf16, on the device and on the CPU. On the device products add the gradients of all weights where they are summed."""
    shape = here.pick(
        WorkloadShape(layers=2, hidden=256, ffn=512, vocab=1024, batch=2, seq_len=128),
        WorkloadShape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, batch=2, seq_len=16),
    )
    steps = here.pick(50, 3)
    make = partial(OurRun, shape, native=False, num_microbatches=2)
    want = make(threads=here.pick(8, 1)).run(steps)[1]
    with _added_by_products() as added:
        run = make(threads=1, device=here.device, weight_sums=WeightSums())
        for layer in run.parts.model.modules():
            if isinstance(layer, MoE):  # as beside other ranks, counts are known
                layer.routed.dispatcher.listen = lambda plan, counts: None
        got = run.run(steps)[1]
    here.tell("losses", [got[0], got[-1]])
    here.tell("losses of the CPU", [want[0], want[-1]])
    here.tell("largest difference", max(abs(a - b) / b for a, b in zip(got, want, strict=True)), most=CURVE)
    for name in ("add", "add_groups"):
        here.tell(f"gradients by WeightSum.{name}", added[name], least=1)
    tail = steps // 5 or 1
    here.tell(
        "loss fell by", statistics.mean(got[:tail]) - statistics.mean(got[-tail:]), least=0.0 if here.on_gpu else None
    )


@contextmanager
def _added_by_products() -> Iterator[Counter[str]]:
    """Has experts of any size add gradients by their products; gives how often products of projections and of experts did."""
    added: Counter[str] = Counter()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(weight_sums, "LARGE_EXPERT", 1))
        for name in ("add", "add_groups"):
            plain = getattr(WeightSum, name)

            def counting(*given: Any, plain: Any = plain, name: str = name) -> None:
                added[name] += 1
                plain(*given)

            patches.enter_context(mock.patch.object(WeightSum, name, counting))
        yield added


STEPS = {
    "step": TINY,
    "selective": f"{TINY} --train.recompute selective",
    "full": f"{TINY} --train.recompute full",
    "padded": f"{TINY} --dispatch.policy drop --dispatch.pad_to_capacity true",
    "moments in bf16": f"{TINY} --optim.state_dtype bfloat16",
    "latent attention": (
        "--model.preset deepseek-v2 --model.num_layers 2 --model.hidden 64 --model.vocab 512 --model.num_experts 16 "
        "--model.expert_ffn 32 --train.seq_len 64 --train.micro_batch 1"
    ),
}
"""Steps in which waits are looked for; sizes make none."""


def check_waits(here: Here) -> None:
    """A5.waits: lines at which a MoE layer, or a whole step, waits for the device without saying so (`# SYNC:`), and how often a dropless layer of one rank waits at all."""
    layer = make_layer(PARTS["qwen3-30b-a3b"], here)
    declared, undeclared = _tell_waits(here, "layer", partial(passes, layer))
    in_a_layer = declared.total()
    for name, settings in STEPS.items():
        parts, batch = open_step(settings_of(settings), here.device)
        undeclared += _tell_waits(here, name, partial(train_step, parts, [batch], step=0, lr=1e-3))[1]
    here.needs_gpu("torch.cuda.set_sync_debug_mode")
    here.tell("waits of a dropless layer", in_a_layer, most=0)
    here.tell("undeclared", undeclared)
    here.tell("undeclared waits", undeclared.total(), most=0)


def _tell_waits(here: Here, name: str, work: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Tell at which lines the host waits in `work`, after it has run once: those that say so, and those that do not."""
    work()
    if not here.on_gpu:
        return Counter(), Counter()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found, waits_for_events() as at_events:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [(w.filename, w.lineno) for w in found if "called a synchronizing" in str(w.message)]
    declared, undeclared = Counter[str](), Counter[str]()
    for file, number in lines + at_events:
        says_so = "SYNC:" in linecache.getline(file, number)
        (declared if says_so else undeclared)[f"{file.split('phalanx', 1)[-1]}:{number}"] += 1
    here.tell(f"{name}: declared waits", declared)
    return declared, undeclared


@contextmanager
def waits_for_events() -> Iterator[list[tuple[str, int]]]:
    """Lines that wait for an event of the device, or for all of it, of which torch's own mode does not warn."""
    found: list[tuple[str, int]] = []

    def telling(plain: Callable[..., None]) -> Callable[..., None]:
        def told(*args: Any, **words: Any) -> None:
            caller: Any = sys._getframe(1)
            while caller.f_code.co_filename == devices.__file__:  # it waits for whoever calls it
                caller = caller.f_back
            found.append((caller.f_code.co_filename, caller.f_lineno))
            plain(*args, **words)

        return told

    with (
        mock.patch.object(torch.cuda.Event, "synchronize", telling(torch.cuda.Event.synchronize)),
        mock.patch.object(torch.cuda, "synchronize", telling(torch.cuda.synchronize)),
    ):
        yield found

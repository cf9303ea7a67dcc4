"""D: `benchmarks/gpu/overlap.py`, the kernels that overlap messages and products, with its own checks and bars; a layer in a CUDA graph."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx_lab.gpu_check.here import Here, Skipped
from phalanx_lab.gpu_check.layer import PARTS, LayerRun, make_layer, passes
from phalanx_lab.gpu_check.timing import seconds_of

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "overlap.py"
PADDED = DispatchSpec(policy="drop", pad_to_capacity=True, capacity_factor=1.25)
WARM = 3
"""Passes before a capture."""


def check_overlap(here: Here) -> None:
    """D1: everything on a GPU; its checks alone, under Triton's interpreter, in the self-test."""
    if not SCRIPT.exists():
        raise Skipped(f"needs a checkout of the project: there is no {SCRIPT}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "overlap.json")
        line = [sys.executable, str(SCRIPT), "--json", str(file), *([] if here.on_gpu else ["--interpret"])]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout[-4000:])
        if file.exists():
            here.tell("found", json.loads(file.read_text()))
        here.tell("exit status", done.returncode, most=0)


def check_graph(here: Here) -> None:
    """D2: a padded layer, forward and backward, captured in a CUDA graph: replayed with tokens that the capture has not seen, bit for bit what it computes without one; and what that saves."""
    run = make_layer(PARTS["qwen3-30b-a3b"], here, dispatch=PADDED)
    tokens = [torch.randn_like(run.x_TH) for _ in range(4)]
    with torch.no_grad():
        want = [_results(run, x_TH) for x_TH in tokens]
        here.needs_gpu("CUDA graphs")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM):
            passes(run)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes(run)
    different = 0
    for x_TH, results in zip(tokens, want, strict=True):
        with torch.no_grad():
            run.x_TH.copy_(x_TH)
        graph.replay()
        different += sum(not torch.equal(a, b) for a, b in zip(_gradients(run), results, strict=True))
    here.tell("gradients that differ", different, most=0)
    here.tell("with a graph ms", 1e3 * seconds_of(graph.replay, here))
    here.tell("without ms", 1e3 * seconds_of(lambda: passes(run), here))


def _results(run: LayerRun, x_TH: torch.Tensor) -> list[torch.Tensor]:
    run.x_TH.copy_(x_TH)
    with torch.enable_grad():
        passes(run)
    return _gradients(run)


def _gradients(run: LayerRun) -> list[torch.Tensor]:
    """Copies: of the input, which has the output's within it, and of all weights."""
    return [x.grad.clone() for x in (run.x_TH, *run.moe.parameters()) if x.grad is not None]

"""A run that never happened, as events: what the tests of `observe` feed to sinks. Deterministic."""

import math
from collections.abc import Iterator

from phalanx.core.events import CheckpointSaved, Event, RunEnded, RunStarted, StepEnded, Validated, WentBack


def started(*, step: int = 0, total_steps: int = 300, **more: object) -> RunStarted:
    fields = {
        "run": "laptop", "rank": 0, "world": 4, "step": step, "total_steps": total_steps, "num_params": 9_200_000,
        "active_params": 4_700_000, "folding": "dp4|ep4", "flops_per_token": 3.1e7, "peak_flops_per_s": 1.1e12,
        "unigram_loss": 6.214,
    }  # fmt: skip
    return RunStarted(**{**fields, **more})  # type: ignore[arg-type]


def ended(step: int, *, layers: int = 4, **more: object) -> StepEnded:
    loads = tuple(1.05 + 0.4 * abs(math.sin(step * 0.37 + layer)) for layer in range(layers))
    fields = {
        "step": step, "loss": 5.0 + 4.0 * math.exp(-step / 60) + 0.05 * math.sin(step), "aux_loss": 0.0101, "z_loss": 0.0,
        "grad_norm": 0.8 + 0.1 * math.cos(step), "lr": 3e-3 * min(1, step / 20), "tokens": 8192, "step_s": 0.73,
        "data_s": 0.001, "tokens_per_s": 11234.0 + step, "mfu": 0.312, "load_max_over_mean": loads, "dead_experts": 0,
        "dropped_tokens": 0, "router_entropy": 1.9, "peak_memory_bytes": 812 << 20,
    }  # fmt: skip
    return StepEnded(**{**fields, **more})  # type: ignore[arg-type]


def went_back(step: int, *, to: int) -> WentBack:
    return WentBack(history=2, step=to, from_step=step, why="host.1 is lost", damaged=(), abandoned=())


def a_run(steps: int = 300, *, every: int = 50, **more: object) -> Iterator[Event]:
    """Start, `steps` steps with validations and checkpoints every `every` steps, end."""
    yield started(total_steps=steps)
    for step in range(1, steps + 1):
        yield ended(step, **more)  # type: ignore[arg-type]
        if step % every == 0:
            yield Validated(step=step, loss=5.1 + 4.0 * math.exp(-step / 60), tokens=65536, seconds=1.9)
            yield CheckpointSaved(
                step=step, path=f"runs/laptop/checkpoints/{step}", bytes=110_000_000, blocked_s=0.052, total_s=0.9
            )
    yield RunEnded(step=steps, reason="finished", seconds=steps * 0.73)

"""A whole step of one rank as a recipe describes it, taken apart into what is compared: memory and launches of its passes, of the loss and of the optimizer.

The same function runs on a GPU and in a trace (`bench/trace`), with another meter. What the trace says of the shapes below is in `traced.json`, for machines on which its stand-in for CUDA
cannot be built; tests/lab/test_gpu_check_traced.py writes it anew and compares.

Legend: B sequences, S sequence length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.core.errors import RunError
from phalanx.models import ForwardInfo, TokenBatch
from phalanx.train.build import make_parts
from phalanx.train.setup import resolve_pipeline
from phalanx.train.step import PassTimes, StepParts, commit_step, reduce_step, train_step
from phalanx_lab.bench.trace.shim import run_traces
from phalanx_lab.bench.trace.steps import CUDA, TracedCase, make_rank, recipe_of, shape_of, world_of
from phalanx_lab.bench.trace.watch import Seen, Witness

TRACED = Path(__file__).with_name("traced.json")
SHAPES: Mapping[str, str] = {
    "qwen3": "--model.preset qwen3-30b-a3b --model.num_layers 3 --model.num_experts 16 --train.seq_len 4096 --train.micro_batch 1",
    "mixtral": "--model.preset mixtral-8x7b --model.num_layers 2 --model.num_experts 4 --train.seq_len 2048 --train.micro_batch 2",
    "deepseek": "--model.preset deepseek-v2 --model.num_layers 3 --model.num_experts 16 --model.vocab 16384 --train.seq_len 2048 --train.micro_batch 1",
}
"""At most 2 billion parameters each."""
RECOMPUTES = ("none", "selective", "full")
LAYERS = {"few": 2, "more": 3}
"""Layers of the first shape, whose difference is one layer's launches."""
TINY = (
    "--model.preset qwen3-30b-a3b --model.num_layers 2 --model.hidden 64 --model.vocab 512 --model.num_experts 8 --model.top_k 2 "
    "--model.expert_ffn 32 --train.seq_len 64 --train.micro_batch 1"
)
"""Of the self-test."""
STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a meter found of a part of a step."""

    peak_bytes: int
    after_bytes: int
    launches: Mapping[str, int]
    """By operation."""


class Meter(Protocol):
    """Counts bytes of tensors that are alive, and launches."""

    parts: dict[str, Part]

    def now_bytes(self) -> int: ...
    def part(self, name: str) -> AbstractContextManager[None]:
        """Count what is done inside."""
        ...


def settings_of(shape: str, *more: str) -> list[str]:
    """Settings of a recipe; the last of two counts."""
    words = [*shape.split(), *more]
    given = dict(zip(words[::2], words[1::2], strict=True))
    return [word for pair in given.items() for word in pair]


def take_apart(settings: list[str], device: torch.device, meter: Meter) -> dict[str, Any]:
    """Bytes by moment, and launches by part and operation, of a step after a first one: libraries have their workspaces then."""
    parts, batch = open_step(settings, device)
    train_step(parts, [batch], step=0, lr=1e-3)
    state_bytes = meter.now_bytes()
    reduced = reduce_step(replace(parts, times=_Passes(meter)), [batch], step=1, lr=1e-3)
    with meter.part("optimizer"):
        commit_step(parts, reduced)
    del reduced
    _loss(parts, batch, meter)
    of = meter.parts
    step = [of[name].peak_bytes for name in ("forward", "backward", "optimizer")]
    figures = {
        "state": state_bytes,
        "peak of the forward pass": of["forward"].peak_bytes,
        "kept": of["forward"].after_bytes,
        "peak of the step": max(step),
    }
    return {"bytes": figures, "launches": {name: dict(part.launches) for name, part in of.items()}}


class _Passes(PassTimes):
    """Hears when a pass begins and ends."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter, self.live_bytes = meter, 1  # known: what is kept is the meter's to say

    @contextmanager
    def timed(self, kind: str, device: torch.device) -> Iterator[None]:
        with self.meter.part({"F": "forward", "B": "backward"}[kind]):
            yield


def _loss(parts: StepParts, batch: TokenBatch, meter: Meter) -> None:
    """Forward and backward pass of the loss alone, which is a part of both passes."""
    spec, device = parts.spec, batch.tokens_BS.device
    hidden_TH = torch.zeros(batch.tokens_BS.numel(), spec.hidden, dtype=parts.model.dtype, device=device)
    hidden_TH.requires_grad_()
    parts.buffers.begin()
    with meter.part("loss"):
        parts.model.cross_entropy_sum(hidden_TH, batch, ForwardInfo()).backward()
    parts.buffers.release()


def open_step(settings: list[str], device: torch.device) -> tuple[StepParts, TokenBatch]:
    """A rank with random weights, which the device draws, and a micro-batch."""
    case = TracedCase(settings=tuple(settings))
    recipe = recipe_of(case)
    spec, folding = shape_of(recipe, world=1)
    rank = make_rank(recipe, case, device)
    parts = make_parts(rank, spec, folding, resolve_pipeline(recipe, spec, folding), warm=False, drawn=False)
    parts.state.make_room()
    for family in parts.state.families.values():
        family.master.normal_(std=STD)
        family.round_masters()
    shape = (recipe.train.micro_batch, recipe.train.seq_len)
    places_BS = torch.arange(shape[1], device=device).expand(shape).contiguous()
    tokens_BS = (places_BS * 7919) % spec.vocab
    return parts, TokenBatch(tokens_BS, tokens_BS.roll(-1, 1), places_BS, ((shape[1],),) * shape[0])


class _OfTrace:
    """What the witness of a trace has seen."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.parts = seen, dict[str, Part]()

    def now_bytes(self) -> int:
        return self.seen.now_bytes

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        seen = self.seen
        before, seen.peak_bytes = self._launches(), seen.now_bytes
        yield
        found = self._launches()
        launches = {op: n - before.get(op, 0) for op, n in sorted(found.items()) if n > before.get(op, 0)}
        self.parts[name] = Part(peak_bytes=seen.peak_bytes, after_bytes=seen.now_bytes, launches=launches)

    def _launches(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (_, name), times in self.seen.launches.items():
            found[name] = found.get(name, 0) + times
        return found


def trace_case(case: dict[str, Any], current: Any) -> dict[str, Any]:
    """`take_apart` on fake tensors, for `bench/trace/child.py`."""
    watch, recipe = Witness(), recipe_of(TracedCase(settings=tuple(case["settings"])))
    current(watch.seen, world_of(recipe, shape_of(recipe, world=1)[1], 0))
    with FakeTensorMode(allow_non_fake_inputs=True), watch, torch.autograd.set_multithreading_enabled(False):
        return take_apart(case["settings"], CUDA, _OfTrace(watch.seen))


def memory_cases() -> dict[str, list[str]]:
    """Settings of what memory is compared of, by name."""
    return {
        f"{shape}, {how}": settings_of(words, "--train.recompute", how)
        for shape, words in SHAPES.items()
        for how in RECOMPUTES
    }


def launch_cases() -> dict[str, list[str]]:
    """Settings of what launches are compared of, by name."""
    return {name: settings_of(SHAPES["qwen3"], "--model.num_layers", str(n)) for name, n in LAYERS.items()}


def trace_all(cache: Path) -> dict[str, Any]:
    """What `traced.json` should have: bytes of the first cases, launches of the second. Builds the stand-in for CUDA in `cache`."""
    memory, launches = memory_cases(), launch_cases()
    by = f"{__name__}:{trace_case.__name__}"
    found = run_traces([{"settings": x, "by": by} for x in (*memory.values(), *launches.values())], cache=cache)
    for told in found:
        if "error" in told:
            raise RunError(told["error"])
    of_memory, of_launches = found[: len(memory)], found[len(memory) :]
    return {
        "bytes": {name: told["bytes"] for name, told in zip(memory, of_memory, strict=True)},
        "launches": {name: told["launches"] for name, told in zip(launches, of_launches, strict=True)},
    }


def traced() -> dict[str, Any]:
    """What the trace said when it was written down."""
    found: dict[str, Any] = json.loads(TRACED.read_text())
    return found

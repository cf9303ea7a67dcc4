"""A6, A5.launches: memory and launches of whole steps on the device, beside what the trace (`taken_apart.py`) and the dry run say of the same shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from phalanx.simulate.memory import MemoryEstimate
from phalanx_lab.bench.trace.steps import even_estimate
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.taken_apart import (
    TINY,
    Part,
    launch_cases,
    memory_cases,
    settings_of,
    take_apart,
    traced,
)

MOST = 0.05
"""Largest difference from what was said, relative to it."""
ABOVE = 0.1
"""Of what stands above the state, where the trace says it."""
LEFT_GB = 0.5
"""Workspaces of libraries, and nothing of a run that is over."""
STATE = "state"
OURS = "triton "
"""With which a trace begins the name of a kernel of ours."""


# ---- memory ---------------------------------------------------------------------------------------------------------------------


class _Memory:
    """What torch's allocator of the device has given out."""

    def __init__(self, here: Here) -> None:
        self.here, self.parts = here, dict[str, Part]()

    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.here.on_gpu else 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.here.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_allocated() if self.here.on_gpu else 0
        self.parts[name] = Part(peak_bytes=peak, after_bytes=self.now_bytes(), launches={})


def check_memory(here: Here) -> None:
    """A6: bytes at four moments of a step, for three models with three recomputations each."""
    cases = here.pick(memory_cases(), {"tiny": settings_of(TINY)})
    written, worst = traced()["bytes"], {"trace": 0.0, "dry run": 0.0}
    for name, settings in cases.items():
        before_bytes = _Memory(here).now_bytes()
        found = take_apart(settings, here.device, _Memory(here))["bytes"]
        said = {"trace": written.get(name, {}), "dry run": dry_run(even_estimate(settings, world=1))}
        if not here.on_gpu:  # where no allocator counts
            continue
        here.tell(f"{name}: GB", {what: size / 1e9 for what, size in found.items()})
        here.tell(f"{name}: GB left of runs before", before_bytes / 1e9, most=LEFT_GB)
        for who, figures in said.items():
            over = {what: found[what] / size - 1 for what, size in figures.items()}
            above = {what: _above(found, what) / _above(figures, what) - 1 for what in figures if what != STATE}
            here.tell(f"{name}: above the {who}", over)
            bar = ABOVE if who == "trace" else None  # of a dry run the total is what must be right
            here.tell(f"{name}: above the {who}, without the state", above)
            here.tell(f"{name}: largest of it, {who}", max(map(abs, above.values()), default=0.0), most=bar)
            worst[who] = max(worst[who], *map(abs, over.values()))
    here.needs_gpu("bytes that torch's allocator has given out")
    for who, difference in worst.items():
        here.tell(f"largest difference from the {who}", difference, most=MOST)


def _above(figures: Mapping[str, int], what: str) -> int:
    return max(1, figures[what] - figures[STATE])


def dry_run(estimate: MemoryEstimate) -> dict[str, int]:
    """What the dry run says of the moments of `take_apart`."""
    when = "first steps: "
    step = {m.name.removeprefix(when): m for m in estimate.moments if m.name.startswith(when)}
    state = next(iter(step.values())).terms
    own = state["parameters"] + state["optimizer state"]
    return {
        STATE: own,
        "peak of the forward pass": max(m.total for name, m in step.items() if name.startswith("forward")),
        "kept": own + step["backward, the head"].terms["activations"],
        "peak of the step": max(m.total for m in step.values()),
    }


# ---- launches -------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Launches:
    """What the profiler sees the device do, as operations that were asked for, and as kernels, memsets and copies."""

    here: Here
    known: frozenset[str]
    """Operations of which a trace tells; what others do is theirs where they call them."""
    parts: dict[str, Part] = field(default_factory=dict)
    kernels: dict[str, Counter[str]] = field(default_factory=dict)

    def now_bytes(self) -> int:
        return 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.here.on_gpu else [])]
        with profile(activities=activities, acc_events=True) as found:
            yield
            if self.here.on_gpu:
                torch.cuda.synchronize()
        events = list(found.events())
        self.kernels[name] = Counter(e.name for e in events if _on_device(e))
        self.parts[name] = Part(peak_bytes=0, after_bytes=0, launches=asked_of(events, self.known))


def _on_device(event: Any) -> bool:
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def _is_call_of_cuda(event: Any) -> bool:
    """Calls have numbers of their own, which may be those of operations."""
    return re.match("cu(da)?[A-Z]", event.name) is not None


def asked_of(events: Iterable[Any], known: frozenset[str]) -> Counter[str]:
    """Operations that had the device do something, each once, whatever number of kernels it started; of ours each kernel. `known`: names as a trace has them."""
    ours = {name.removeprefix(OURS) for name in known if name.startswith(OURS)}
    events = list(events)
    asked = Counter(OURS + e.name for e in events if _on_device(e) and e.name in ours)
    operations: dict[int, str] = {}
    for event in events:
        if (
            not _is_call_of_cuda(event)
            and not _on_device(event)
            and any(kernel.name not in ours for kernel in event.kernels)
        ):
            operation = _asked(event, known)
            operations[id(operation)] = _plain(operation.name)
    return asked + Counter(operations.values())


def _asked(event: Any, known: frozenset[str]) -> Any:
    """The outermost operation that a trace knows, of those in which this one ran; itself where there is none."""
    found, at = event, event
    while at is not None:
        if _plain(at.name) in known:
            found = at
        at = at.cpu_parent
    return found


def _plain(name: str) -> str:
    """Without its space, and attention without its kernel, which another card may choose otherwise."""
    plain = name.removeprefix("aten::")
    if "dot_product" in plain and "attention" in plain:
        return "attention backward" if plain.endswith("backward") else "attention"
    return plain


def check_launches(here: Here) -> None:
    """A5.launches: of a layer of Qwen3-30B-A3B (a step of three layers less one of two), of the loss and of the optimizer."""
    written = {
        name: {part: _by_plain(launches) for part, launches in parts.items()}
        for name, parts in traced()["launches"].items()
    }
    known = frozenset(op for parts in written.values() for launches in parts.values() for op in launches)
    found, kernels = {}, {}
    for name, settings in here.pick(launch_cases(), dict.fromkeys(launch_cases(), settings_of(TINY))).items():
        meter = _Launches(here=here, known=known)
        found[name], kernels[name] = take_apart(settings, here.device, meter)["launches"], meter.kernels
    want, got, started = (layer_launches(x) for x in (written, found, kernels))
    here.needs_gpu("launches that torch's profiler sees")
    for part, asked in want.items():
        here.tell(f"{part}: asked for in a trace", asked.total())
        here.tell(f"{part}: operations that launched", got[part].total())
        here.tell(f"{part}: kernels, memsets and copies", started[part].total())
        here.tell(f"{part}: memsets", sum(n for name, n in started[part].items() if "emset" in name))
        tell_sides(here, part, asked, got[part])


def tell_sides(here: Here, part: str, asked: Counter[str], got: Counter[str]) -> None:
    """Tell what a trace and the device have alone, as names that mean the same to both. Neither may be more than `MOST` of what was asked for: totals are then as near."""
    asked, got = _alike(asked), _alike(got)
    for side, alone in (("asked for in a trace alone", asked - got), ("on the device alone", got - asked)):
        here.tell(f"{part}: {side}", dict(alone))
        here.tell(f"{part}: {side}, of all", alone.total() / asked.total(), most=MOST)


def _alike(launches: Mapping[str, int]) -> Counter[str]:
    """A profiler calls copies to the host as all others, and autograd adds up in place where only it has the tensor, which fake tensors do not tell it."""
    found: Counter[str] = Counter()
    for name, times in launches.items():
        found["_to_copy" if name.startswith("copy to ") else name.removesuffix("_")] += times
    return found


def _by_plain(launches: Mapping[str, int]) -> Counter[str]:
    """A trace's names as `asked_of` has them, but for copies between host and device."""
    found: Counter[str] = Counter()
    for name, times in launches.items():
        found[_plain(name)] += times
    return found


def layer_launches(cases: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, Counter[str]]:
    """By part: what a layer more adds to both passes and to the optimizer, and the loss."""
    few, more = cases["few"], cases["more"]
    layer = {part: Counter(more[part]) for part in ("forward", "backward", "optimizer")}
    for part, launches in layer.items():
        launches.subtract(few[part])
    named = {f"a layer's {part}": +launches for part, launches in layer.items()}
    return named | {"loss": Counter(few["loss"])}

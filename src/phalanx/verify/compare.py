"""How far one rank's part of a step is from the one-rank run.

The error of a tensor is `max|difference| / max(max|reference|, 1e-8 * global gradient norm)`: relative to the tensor's own size, and not blown up where a
gradient is zero but for rounding. Counts, dropped rows, expert biases and initial parameters must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.plan.layout import Box, box_text
from phalanx.runtime.state import BoxTensor, ReducedGradients
from phalanx.train.step import ENTROPY_BITS, LOSS_BITS, StepParts, StepResult
from phalanx.verify.reference import Reference, model_boxes

FLOOR = 1e-8
ROUNDED = 0.5
CANCELS = ("wq.bias", "wk.bias", "q_norm.weight", "k_norm.weight")
"""Of the gradients of these, sums over all rows, the softmax takes most away: terms cancel, their rounding does not. In bfloat16, whose limit is five roundings, each counts as being as large as
`ROUNDED` times the root mean square of all gradients."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(kw_only=True)
class RankReport:
    """What one rank found in one case. Plain values, so that it can be written as JSON."""

    case: int
    rank: int
    gradients: dict[str, float] = field(default_factory=dict)
    """Parameter -> error of its gradient."""
    step: dict[str, float] = field(default_factory=dict)
    """State box (`master/...`, `exp_avg/...`, `param/...`) -> error after the step."""
    scalars: dict[str, float] = field(default_factory=dict)
    """grad_norm, loss, aux_loss, z_loss, mtp_loss, entropy -> relative error."""
    unequal: list[str] = field(default_factory=list)
    """What had to be equal and is not."""
    covered: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """(parameter, offsets, sizes) of the gradient boxes that this rank compared."""
    work: list[float] = field(default_factory=list)
    """Work of experts with replicas for skewed loads: the busiest rank's rows over the mean, with replicas and without."""
    saved: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """The same of the master weights that this rank would write into a checkpoint."""


def compare(
    parts: StepParts,
    result: StepResult,
    gradients: ReducedGradients,
    *,
    initial: Iterable[BoxTensor],
    want: Reference,
    case: int,
) -> RankReport:
    """Hold everything that this rank has against the reference."""
    floor = FLOOR * want.result.grad_norm
    report = RankReport(case=case, rank=parts.groups.rank)
    report.gradients = gradient_errors(gradients.boxes(), want, dtype=parts.model.dtype)
    held = [*parts.state.boxes(), *model_boxes(parts)]
    report.step = errors([b for b in held if not b.name.startswith("buffer/")], want.after, floor=floor)
    report.scalars = _scalars(result, want.result, slack=_rounding(parts, len(want.patches)))
    report.unequal = [
        *_unequal(initial, want.initial, "initial value of"),
        *_unequal([b for b in held if b.name.startswith("buffer/")], want.after, "after the step:"),
        *_unequal_counts(result, want.result),
    ]
    report.covered = _places(gradients.boxes())
    report.saved = _places(b for b in held if b.primary and b.name.startswith("master/"))
    return report


def gradient_errors(boxes: Iterable[BoxTensor], want: Reference, *, dtype: torch.dtype) -> dict[str, float]:
    """Name -> error of a gradient that was computed in `dtype`."""
    boxes, norm = list(boxes), want.result.grad_norm
    found = errors(boxes, want.gradients, floor=FLOOR * norm)
    if dtype == torch.bfloat16:
        mean = norm / sum(x.numel() for x in want.gradients.values()) ** 0.5
        found |= errors([b for b in boxes if b.name.endswith(CANCELS)], want.gradients, floor=ROUNDED * mean)
    return found


def _places(boxes: Iterable[BoxTensor]) -> list[tuple[str, list[int], list[int]]]:
    return [(b.name, list(b.box.offsets), list(b.box.sizes)) for b in boxes]


def errors(boxes: Iterable[BoxTensor], want: Mapping[str, torch.Tensor], *, floor: float) -> dict[str, float]:
    """Name -> error over all boxes of that name. NaN counts as infinite."""
    out: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for box in boxes:
        logical = want[box.name]
        if box.name not in sizes:  # a tensor comes in many boxes
            sizes[box.name] = max(logical.abs().max().item(), floor, torch.finfo(torch.float64).tiny)
        difference = (
            (box.tensor.to("cpu", torch.float64) - logical[box.box.slices()].to(torch.float64)).abs().max().item()
        )
        error = difference / sizes[box.name] if difference == difference else float("inf")
        out[box.name] = max(out.get(box.name, 0.0), error)
    return out


def _rounding(parts: StepParts, num_microbatches: int) -> Mapping[str, float]:
    """What exact mode rounds away of figures that are for people: half a unit of each rank's share of each micro-batch."""
    if parts.exact is None:
        return {}
    shares = num_microbatches * parts.groups.folding.world * parts.pipeline.virtual
    losses = dict.fromkeys(("loss", "aux_loss", "z_loss", "mtp_loss"), shares * 0.5**LOSS_BITS / 2)
    return {**losses, "entropy": 0.5**ENTROPY_BITS / 2}  # a mean over tokens, of which each share has one


def _scalars(got: StepResult, want: StepResult, *, slack: Mapping[str, float]) -> dict[str, float]:
    """`slack`: absolute differences that count as none."""
    out = {}
    for name in ("grad_norm", "loss", "aux_loss", "z_loss", "mtp_loss", "entropy"):
        a, b = getattr(got, name), getattr(want, name)
        same = a == b or abs(a - b) <= slack.get(name, 0.0)
        out[name] = 0.0 if same else abs(a - b) / max(abs(b), 1e-30)
    return out


def _unequal(boxes: Iterable[BoxTensor], want: Mapping[str, torch.Tensor], what: str) -> list[str]:
    return [
        f"{what} {box.name} {box_text(box.box)} is not equal"
        for box in boxes
        if not torch.equal(box.tensor.cpu(), want[box.name][box.box.slices()])
    ]


def _unequal_counts(got: StepResult, want: StepResult) -> list[str]:
    out = []
    for layer, (a, b) in enumerate(zip(got.counts_LE, want.counts_LE, strict=True)):
        if not np.array_equal(a, b):
            out.append(f"tokens per expert of MoE layer {layer} are {a.tolist()}, not {b.tolist()}")
    if got.dropped != want.dropped:
        out.append(f"{got.dropped} rows were dropped, not {want.dropped}")
    if got.tokens != want.tokens:
        out.append(f"the step has {got.tokens} tokens, not {want.tokens}")
    return out


def uncovered(shapes: Mapping[str, tuple[int, ...]], reports: Iterable[RankReport]) -> list[str]:
    """Parameters of whose gradient no rank compared some element: silence there would look like agreement."""
    seen: dict[str, NDArray[np.bool_]] = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for report in reports:
        for name, offsets, sizes in report.covered:
            seen[name][Box(tuple(offsets), tuple(sizes)).slices()] = True
    return [
        f"{name}: {int((~mask).sum())} elements of its gradient were compared on no rank"
        for name, mask in seen.items()
        if not mask.all()
    ]


def not_saved_once(shapes: Mapping[str, tuple[int, ...]], reports: Iterable[RankReport]) -> list[str]:
    """Tensors of which a checkpoint would hold some element never, or from several ranks."""
    writers: dict[str, NDArray[np.int32]] = {name: np.zeros(shape, dtype=np.int32) for name, shape in shapes.items()}
    for report in reports:
        for name, offsets, sizes in report.saved:
            writers[name][Box(tuple(offsets), tuple(sizes)).slices()] += 1
    return [
        f"{name}: elements of it would be saved by {int(count.min())} to {int(count.max())} ranks"
        for name, count in writers.items()
        if not (count == 1).all()
    ]

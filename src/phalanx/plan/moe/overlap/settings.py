"""What a recipe may say about overlap inside a MoE layer, and where it can apply.

serial      dispatch, experts and combine one after the other
coarse:N    the tokens of a rank in N chunks, each dispatched while the one before is computed (as FasterMoE and Tutel do)
fine        tile by tile, by a fixed schedule
auto        tile by tile, by the schedule that the cost model finds fastest for the layer, the links and the loads at hand
fused       kernels that compute while they receive and send, on GPUs that reach each other's memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan.moe.overlap.types import TileSchedule

Kind = Literal["serial", "coarse", "tiles", "fine", "auto", "fused"]
MOST_CHUNKS = 64
WHERE = "dispatch.overlap"
FINE = TileSchedule(parts=4, order="arrival", own_before=0.75)
"""Good where communication takes about as long as computing; `auto` finds the best one."""
CANDIDATES = (
    TileSchedule(order="own_first"),
    *(
        TileSchedule(parts=parts, order="arrival", own_before=share)
        for parts in (1, 2, 4, 8)
        for share in (0.25, 0.5, 0.75, 1.0)
    ),
    FINE,
)
"""What `auto` chooses from, beside serial order."""


@dataclass(frozen=True)
class OverlapSetting:
    kind: Kind
    chunks: int = 1
    """Of `coarse`."""

    def __str__(self) -> str:
        return f"coarse:{self.chunks}" if self.kind == "coarse" else self.kind


def setting_problems(text: str) -> list[Problem]:
    """What is wrong with the words."""
    kind, colon, number = text.partition(":")
    if kind == "coarse":
        if number.isdecimal() and 2 <= int(number) <= MOST_CHUNKS:
            return []
        rule = f"coarse takes a number of chunks from 2 to {MOST_CHUNKS}"
        return [Problem(where=WHERE, value=text, rule=rule, hint="coarse:2")]
    if kind in ("serial", "tiles", "fine", "auto", "fused") and not colon:
        return []
    rule = "must be serial, coarse:N, tiles, fine, auto or fused"
    return [Problem(where=WHERE, value=text, rule=rule, hint="auto")]


def parse_overlap(text: str) -> OverlapSetting:
    """Raises `ConfigError`."""
    raise_if(setting_problems(text), ConfigError, subject="the overlap of a MoE layer")
    kind, _, number = text.partition(":")
    return OverlapSetting(kind, int(number) if number else 1)  # type: ignore[arg-type]


def replica_problems(text: str) -> list[Problem]:
    """Why a legal setting cannot apply where experts have replicas."""
    if text == "serial" or text.startswith("coarse"):
        return []
    way = "runs kernels for" if text == "fused" else "goes tile by tile through"
    rule = f"{way} experts that each have one slot; experts with replicas (resilience.slots_per_rank) run serial or in chunks"
    return [Problem(where=WHERE, value=text, rule=rule, hint='"coarse:2", or "serial"')]


def overlap_problems(
    text: str, *, num_experts: int, group: int, transport: str, pad_to_capacity: bool
) -> list[Problem]:
    """Why a legal setting cannot apply. `group`: ranks of the largest expert-parallel group, ep x etp."""
    if setting_problems(text) or text == "serial":
        return []
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    if not num_experts:
        wrong("needs routed experts, and the model has none", 'use "serial"')
    elif group == 1:
        wrong("needs ranks that send rows to each other, and ep x etp = 1", 'set folding.ep = 2, or "serial"')
    if transport != "all_to_all":
        wrong(
            f'sends rows from rank to rank; dispatch.transport = "{transport}" gathers them everywhere',
            'transport "all_to_all"',
        )
    if pad_to_capacity and not text.startswith("coarse"):
        wrong("sends the rows that there are; dispatch.pad_to_capacity sends a fixed number", "pad_to_capacity = false")
    return problems


FUSED_DTYPES = ("bfloat16", "float32")


def fused_setting_problems(
    text: str, *, device: str, dtype: str, etp: int, kernels: str, bucket_mb: float
) -> list[Problem]:
    """Why the kernels of `fused` cannot carry a run. That the ranks of a group share a host shows when the run begins. `etp`: the largest of any stage.

    Reductions of gradients beside the backward pass would wait for multiprocessors that kernels hold which wait for other ranks: a circle.
    """
    if text != "fused":
        return []
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    if device != "cuda":
        rule = f'stores rows in the memory of other GPUs, and launch.device = "{device}" has none'
        wrong(rule, 'launch.device = "cuda", or "auto"')
    if dtype not in FUSED_DTYPES:
        wrong(f'has no kernels for train.dtype = "{dtype}"', f"one of {', '.join(FUSED_DTYPES)}")
    if etp > 1:
        wrong(f"computes whole experts, and folding.etp = {etp} cuts them", 'folding.etp = 1, or "fine"')
    if kernels != "fast":
        wrong(f'is a choice of kernels, which kernels.implementation = "{kernels}" replaces', 'use "serial"')
    if bucket_mb > 0:
        rule = f"needs all multiprocessors in the backward pass, and optim.bucket_mb = {bucket_mb:g} reduces gradients beside it"
        wrong(rule, "optim.bucket_mb = 0")
    return problems

"""Every way to spread a job over a cluster: legal foldings x micro-batch x schedule x recomputation x overlap of dispatch.

Decides what is tried: foldings are those of `plan.mapping.folding.legal_foldings`, virtual stages divide evenly among ranks as far as there are layers.
Must never change: nothing legal is left out but what the arguments leave out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from phalanx.plan.mapping import Folding, legal_foldings
from phalanx.plan.pipeline.schedule import make_schedule, schedules, why_no_pairs
from phalanx.simulate.hardware import Hardware
from phalanx.simulate.mapping import RECOMPUTES, Job, Mapping, Overlap, Precision, Recompute

EpOverlap = Literal["none", "chunks", "pair", "tiles", "fused"]
"""`tiles`: by the schedule that the chooser takes (`dispatch.overlap = "auto"`); `fused`: by kernels that wait on flags, within a host."""
BF16_OVERLAPS: tuple[EpOverlap, ...] = ("tiles", "fused")
"""Whose products no run computes in fp8 (`dispatch.overlap`)."""
MICRO_BATCHES = (1, 2, 4)
MOST_TILE_RANKS = 128
"""Most ranks of a group on devices whose layers go tile by tile: two messages for each peer in a round of more hang
(`docs/explanation/overlap-gpu.md`, pytorch #174288)."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is tried."""

    micro_batches: tuple[int, ...] = MICRO_BATCHES
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    ep_overlaps: tuple[EpOverlap, ...] | None = None
    """None: `sayable_overlaps`."""
    chunks: tuple[int, ...] = (2, 4)
    """Numbers of chunks, for overlap in chunks."""
    most_virtual: int = 16


def sayable_overlaps(hardware: Hardware) -> tuple[EpOverlap, ...]:
    """Chunks everywhere (dispatch.overlap); tiles on devices; pairs where passes take turns (pipeline.pair_passes), on processors.

    Tiles on processors (gateways have plans of their own, and many ranks long ones) and fused kernels, which no device has run yet, are searched where they are asked for.
    """
    return ("none", "chunks", "tiles") if hardware.sms is not None else ("none", "chunks", "pair")


def overlaps(
    common: Overlap, folding: Folding, space: Space, hardware: Hardware, *, precision: Precision = "bf16"
) -> list[Overlap]:
    """Ways to hide dispatch and combine, of those that compute in this precision; only bare ones where nothing travels."""
    kinds = space.ep_overlaps if space.ep_overlaps is not None else sayable_overlaps(hardware)
    if folding.ep == 1:
        kinds = ("none",)
    if precision == "fp8":
        kinds = tuple(kind for kind in kinds if kind not in BF16_OVERLAPS)
    if hardware.sms is not None and folding.ep * folding.etp > MOST_TILE_RANKS:
        kinds = tuple(kind for kind in kinds if kind != "tiles")
    if not fuses(folding, hardware):
        kinds = tuple(kind for kind in kinds if kind != "fused")
    return [
        replace(common, ep="auto" if kind == "tiles" else kind, chunks=chunks, dp=common.dp and kind != "fused")
        for kind in kinds
        for chunks in (space.chunks if kind == "chunks" else (common.chunks,))
    ]


def fuses(folding: Folding, hardware: Hardware) -> bool:
    """Whether fused kernels take a folding (`fused_run_problems`, `fused_setting_problems`): whole experts, and groups, which are consecutive ranks, on one host of devices each.

    Such a run reduces no gradients beside its backward pass (`optim.bucket_mb = 0`).
    """
    per_host = hardware.ranks_per_host
    return hardware.sms is not None and folding.etp == 1 and (per_host % folding.ep == 0 or folding.world <= per_host)


def pairs_pass(choice: Mapping, way: tuple[str, int], job: Job, hardware: Hardware) -> bool:
    """Whether the passes of a choice can be paired as it says on a pipeline of this (schedule, virtual stages): a run refuses schedules in which pairs cannot pay.

    On devices no run pairs passes, so there every schedule may: the search then says what pairs would give.
    """
    if choice.overlap.ep != "pair" or hardware.sms is not None:
        return True
    return _has_pairs(way[0], choice.folding.pp, way[1], choice.num_microbatches(job))


@lru_cache(maxsize=4096)
def _has_pairs(schedule: str, pp: int, virtual: int, num_microbatches: int) -> bool:
    if pp == 1 and num_microbatches == 1:
        return False
    return not why_no_pairs(make_schedule(schedule, pp=pp, virtual=virtual, num_microbatches=num_microbatches))


def foldings(job: Job, world: int) -> Iterator[Folding]:
    """Every legal folding that the batch can be divided among."""
    for folding in legal_foldings(world, job.spec, seq_len=job.seq_len):
        if job.global_batch >= folding.dp and job.global_batch % folding.dp == 0:
            yield folding


def micro_batches(job: Job, folding: Folding, space: Space) -> list[int]:
    """Micro-batches that divide a rank's samples."""
    each = job.global_batch // folding.dp
    return [b for b in space.micro_batches if each % b == 0]


def pipelines(layers: int, pp: int, space: Space) -> Sequence[tuple[str, int]]:
    """(schedule, virtual stages) for a pipeline of `pp` ranks."""
    if pp == 1:
        return [("1f1b", 1)]
    most = min(space.most_virtual, (layers + 2) // pp)
    out = []
    for name in space.schedules:
        if name == "interleaved_1f1b":
            out += [(name, v) for v in range(2, most + 1) if layers % (pp * v) == 0 or v in (2, 3, 4)]
        else:
            virtual = schedules()[name].virtual or 1
            out += [(name, virtual)] if most >= virtual else []
    return out

"""State of a run from the members that have it to those that lack it, and the proof that all have the same.

Decides nothing: `plan/heal.py` says what moves. Must never change: what a member holds stays as it was until every element of the new state is there and
all members have compared checksums, so a member that is lost meanwhile costs another attempt and nothing else.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.errors import RunError
from phalanx.plan.box_cells import cells
from phalanx.plan.heal import HealPlan
from phalanx.plan.layout import Box
from phalanx.plan.reshard_types import Move
from phalanx.plan.state_layout import STATE_KINDS
from phalanx.runtime.boxes import BoxTensor
from phalanx.runtime.optimizer_state import ShardedState
from phalanx.runtime.peers import Peers
from phalanx.runtime.resharder import Resharder
from phalanx.runtime.shard_views import shard_views
from phalanx.train.step import StepParts

Sums = Mapping[str, int]
"""Name of a piece of state -> checksum."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What the state of one generation took."""

    received_bytes: int
    checked: int
    """Pieces that all holders have alike."""


def take_state(plan: HealPlan, parts: StepParts, *, old: ShardedState | None, peers: Peers) -> Moved:
    """Fill `parts.state` from the members that hold state (`old`: this one's, None where it has none), and publish it. Collective.

    Raises `PeerError` where a member is lost, `RunError` on all members where holders of the same piece differ.
    """
    resharder, received = Resharder(parts.comms, parts.groups.axis("world")), 0
    for kind in STATE_KINDS:
        source: Mapping[str, Any] = shard_views(old, kind) if old is not None else {}
        received += _move(resharder, plan.params, source, shard_views(parts.state, kind), op_id=f"heal/{kind}")
    if plan.buffers:
        source = old.buffers if old is not None else {}
        received += _move(resharder, plan.buffers, source, parts.state.buffers, op_id="heal/buffers")
    parts.state.restore(parts.comms)
    cut = {m.name: cells(h.box for side in (m.src, m.dst) for of in side.held for h in of) for m in plan.params}
    before = checksums(old.boxes(), cut=cut) if old is not None else {}
    told = peers.gather((before, checksums(parts.state.boxes(), cut=cut)))
    return Moved(received_bytes=received, checked=compare([sums for pair in told for sums in pair]))


def _move(
    resharder: Resharder, moves: Sequence[Move], source: Mapping[str, Any], dest: Mapping[str, Any], *, op_id: str
) -> int:
    """Bytes that came to this member. `source` and `dest`: tensors, or views of shards, by name."""
    have = [source.get(move.name) for move in moves]
    want = [dest.get(move.name) for move in moves]
    types = [x.dtype for x in want if x is not None]
    resharder.move(moves, have, dtypes=types, out=want, op_id=op_id)
    return 0 if resharder.report is None else resharder.report.received_bytes


def checksums(boxes: Sequence[BoxTensor], *, cut: Mapping[str, Sequence[Box]]) -> dict[str, int]:
    """CRC-32 of each piece of state: a whole tensor, or, of a parameter in `cut`, each of its cells, whatever else is held beside it."""
    out: dict[str, int] = {}
    for held in boxes:
        for cell in cut.get(held.name.split("/", 1)[1], (held.box,)):
            if held.box.contains(cell):
                inside = cell.shifted([-offset for offset in held.box.offsets])
                out[f"{held.name}{_words(cell, held.shape)}"] = _sum(held.tensor[inside.slices()])
    return out


def _words(box: Box, shape: Sequence[int]) -> str:
    """Empty for a whole tensor."""
    ranges = (f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
    return "" if box.sizes == tuple(shape) else f"[{', '.join(ranges)}]"


def _sum(x: torch.Tensor) -> int:
    return zlib.crc32(x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())


def compare(told: Sequence[Sums]) -> int:
    """How many pieces all agree on. `told`: of each member, what it held and what it holds now. Raises `RunError` naming pieces that differ."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for sums in told:
        for name, value in sums.items():
            found[name].add(value)
    wrong = sorted(name for name, values in found.items() if len(values) > 1)
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RunError(
            f"members hold different values of {shown}, and nobody can say which are right; nothing was changed, and only the newest checkpoint is left"
        )
    return len(found)

"""Experts that come to this rank while it computes a step: double buffers, so that training need not stand still while they travel.

    begin      after step t: masters and moments of what comes leave for staging at their new holders, by a thread and over a group that nothing else uses
    complete   step t+1, computed in the old place, is reduced and no rank has voted: what is left of the state is waited for; then the summed gradients of the same experts
               come from the same holders
    update     with the commit of t+1: the update that their holders make, expert by expert as they do, so with the same bits
    fill       the new place, from what was held here and what came

Decides nothing: `plan/placement/arrivals.py` says what comes, `plan/reshard/plan.py` in which messages. Must never change: what is held is only read, and what is staged is no rank's state before the
new place is filled from it: where a rank is lost or a step is discarded, all of it is dropped (`drop`), and the thread left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.core.events import Emit, Event, ignore
from phalanx.plan.layout import STATE_KINDS
from phalanx.plan.model import parameters
from phalanx.plan.placement import coming_moves, of_all_kinds, takings
from phalanx.plan.recovery import GRADIENT_ID, STATE_ID
from phalanx.plan.reshard import Move
from phalanx.runtime.comm import Axis
from phalanx.runtime.reshard import Resharder
from phalanx.runtime.state import ReducedGradients, ShardedState, shard_views, views_of
from phalanx.train import MoveRecorder
from phalanx.train.placement.state_transfer import move_state
from phalanx.train.step import ReducedStep, StepParts

Staged = dict[str, torch.Tensor]
"""Experts that come, staged by parameter: (experts that come, ...)."""


class IncomingExperts:
    """One rank's part of it. `moves`: of all parameters with experts, from the present place to the new one."""

    def __init__(self, parts: StepParts, moves: Sequence[Move], axis: Axis) -> None:
        """Plans both transfers, of state and of gradients. `axis`: all ranks, with a group that nothing else uses. Collective."""
        self.parts, self.axis = parts, axis
        self.whole, self.moves = tuple(moves), coming_moves(moves)
        self.received_bytes = self.beside_bytes = 0
        self.beside_s = self.waited_s = 0.0
        """Seconds for which the state travelled while the step was computed, and for which training stood still, for plans and at its end."""
        self.is_updated = False
        """Whether it was updated with the step that it overlapped."""
        self._comms = parts.comms.apart()
        self._comms.sums = None  # under way across votes, and compared piece by piece
        self._resharder = Resharder(self._comms, axis)
        self._state_moves = of_all_kinds(self.moves, moment_bytes=parts.state.item_bytes("exp_avg"))
        self._resharder.prepare(
            self._state_moves
        )  # plans are Python, for which a thread would take turns with the step
        self._resharder.prepare(self.moves)
        self._staged = {kind: self._room(kind) for kind in STATE_KINDS}
        self._gradients: Staged = {}
        self._record: MoveRecorder | None = None
        self._told: list[Event] = []
        self._emit: Emit = ignore
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begin_s = self._end_s = 0.0

    def begin(self, record: MoveRecorder | None = None) -> None:
        """Let masters and moments leave. Nothing that is held may change before `complete`."""
        if record is not None:
            self._emit, record.emit = record.emit, self._told.append  # while a step is recorded nothing is written
        self._record, self._begin_s = record, time.perf_counter()
        self._thread = threading.Thread(target=self._bring, name="coming experts", daemon=True)
        self._thread.start()

    def complete(self, gradients: ReducedGradients) -> None:
        """All that comes is here. Collective. Raises `PeerError` where a rank was lost."""
        assert self._thread is not None
        begin_s = time.perf_counter()
        with self._comms.waiting():
            self._thread.join()  # it ends with what it waits for, or when the team is aborted
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.beside_s, self.beside_bytes = min(begin_s, self._end_s) - self._begin_s, self.received_bytes
        self._gradients = self._room()
        have = {
            name: view
            for key, layout in gradients.layouts.items()
            if layout.held_whole is not None
            for name, view in views_of(layout, gradients.segments[key][0].tensor).items()
        }
        self.received_bytes += move_state(
            self._resharder, self.moves, have, self._gradients, op_id=GRADIENT_ID, record=self._record
        )
        self.waited_s += time.perf_counter() - begin_s

    def update(self, parts: StepParts, step: ReducedStep) -> None:
        """Update as the ranks that held them do in `commit_step`. Needs no other rank."""
        scale, decays = step.clip_scale(parts.clip_norm), {p.name: p.decay for p in parameters(parts.spec)}
        with torch.no_grad():
            for name, gradient in self._gradients.items():
                master, first, second = (self._staged[kind][name].flatten(1) for kind in STATE_KINDS)
                for i, own in enumerate(gradient.flatten(1)):
                    state = (master[i], first[i], second[i])
                    parts.optimizer.update(
                        state, own, None, decay=decays[name], step=step.step, lr=step.lr, scale=scale
                    )
        self.is_updated = True

    def fill(self, new: ShardedState, old: ShardedState) -> None:
        """Experts of the new place, which only this rank writes to. Needs no other rank."""
        coming = {move.name: move for move in self.moves}
        for kind in STATE_KINDS:
            have, want, staged = shard_views(old, kind), shard_views(new, kind), self._staged[kind]
            for move in self.whole:
                for taking in takings(move, coming.get(move.name), self._resharder.rank):
                    source: Any = staged[move.name] if taking.came else have[move.name]
                    want[move.name][taking.dest.slices()].copy_(source[taking.source.slices()])

    def tell(self) -> None:
        """Write what was recorded of both transfers, if anything, once `complete` is done."""
        told, self._told[:] = list(self._told), []
        for event in told:
            self._emit(event)

    def drop(self) -> None:
        """Discard it. Its thread ends by itself, at the latest once the team is aborted; what it may still write is never read."""
        self._staged, self._gradients = {kind: {} for kind in STATE_KINDS}, {}

    def _bring(self) -> None:
        """The thread."""
        try:
            have = _by_kind({kind: shard_views(self.parts.state, kind) for kind in STATE_KINDS})
            want = _by_kind(self._staged)
            self.received_bytes = move_state(
                self._resharder, self._state_moves, have, want, op_id=STATE_ID, record=self._record
            )
        except BaseException as err:
            err.__traceback__ = None  # it would keep messages, and with them groups
            self._error = err
        finally:
            self._end_s = time.perf_counter()
            if self._comms.escape is not None:
                self._comms.escape.leave()

    def _room(self, kind: str = "master") -> Staged:
        """Room for what comes to this rank, of one kind (of gradients as of masters)."""
        rank, some = self._resharder.rank, getattr(next(iter(self.parts.state.families.values())), kind)
        return {
            move.name: some.new_empty(shape)
            for move in self.moves
            for at, shape in zip(move.dst.ranks, move.dst.local_shapes, strict=True)
            if at == rank
        }


def _by_kind(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{kind}/{name}": tensor for kind, of_kind in tensors.items() for name, tensor in of_kind.items()}

"""State of a run from the members that have it to those that lack it, and the proof that all have the same.

    examine       every member tells checksums of what it holds; who is outvoted is no source (`train/placement/suspects.py`)
    take_state    wave by wave: what moves, moves; all compare checksums of what they held and what they hold now; what was held goes

Decides nothing: `plan/recovery/generation.py` says what moves in which wave. Must never change: what a member holds of a wave stays as it was until every element of the wave is there on all
members and they have compared checksums, so a member that is lost meanwhile costs another attempt and nothing else.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.errors import PeerError, RunError
from phalanx.kernels.ops.checksum import checksums as device_sums
from phalanx.plan.layout import STATE_KINDS, Box, TensorLayout, cells
from phalanx.plan.recovery import GenerationPlan, StateDescriptor, wave_id
from phalanx.plan.reshard import Hosts, Move
from phalanx.runtime.comm import Axis, Collectives, Peers
from phalanx.runtime.reshard import Resharder
from phalanx.runtime.state import BoxTensor, ShardedState, shard_views
from phalanx.train import MoveRecorder
from phalanx.train.placement.suspects import NONE, StatePiece, Suspects, all_agree, find_suspects, row_of, sums_of
from phalanx.train.step import StepParts


@dataclass(frozen=True, kw_only=True)
class Everyone:
    """All members of a generation, those that are idle too."""

    comms: Collectives
    axis: Axis
    """Axis in the order of their ranks."""
    peers: Peers
    """A group of their own, for control."""
    hosts: Hosts | None = None
    """Who shares one; None: they ask each other."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where their state lives."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What members said of the state that they hold."""

    plan: GenerationPlan
    """Plan without the sources that are not to be trusted."""
    suspects: Suspects
    cut: Mapping[str, Sequence[Box]]
    """Parameter -> the parts that are compared: who holds an element of one holds it whole."""
    pieces: tuple[StatePiece, ...]
    """All of these, of each kind of state, and the buffers."""
    told: NDArray[np.int64]
    """(members, pieces): checksums of what is to be trusted (`suspects.row_of`)."""


class Moved(NamedTuple):
    """What the state of one generation took."""

    received_bytes: int = 0
    checked: int = 0
    """Pieces that all holders have alike."""
    repeated: int = 0
    """How often state was sent again, because a member had received it differently."""


def examine(plan: GenerationPlan, *, held: HeldState, everyone: Everyone) -> Examined:
    """What holders of the same piece say of it. Collective.

    Raises `RunError` on all members where they have made different plans.
    """
    cut = cut_of(plan)
    pieces = pieces_of(plan, cut)
    mine = checksums(held.boxes, cut=cut)
    row, wrong = b"", ""
    try:
        row = row_of(mine, pieces).tobytes()
    except ValueError as err:  # as where members have made different plans: all are to hear of it
        wrong = str(err)
    said = everyone.peers.gather((plan.hash, row, wrong))
    if len({number for number, *_ in said}) > 1:
        raise RunError(
            f"members have made different plans ({', '.join(number for number, *_ in said)}); nothing was changed"
        )
    if any(wrong for *_, wrong in said):
        raise RunError(f"{'; '.join(wrong for *_, wrong in said if wrong)}; nothing was changed")
    told = _rows([row for _, row, _ in said])
    suspects = Suspects() if all_agree(told) else find_suspects([sums_of(row, pieces) for row in told])
    places = {piece: place for place, piece in enumerate(pieces)} if suspects != Suspects() else {}
    for who, piece in (*suspects.outvoted, *suspects.doubted):
        told[who, places[piece]] = NONE
    return Examined(plan=plan.without(suspects.all), suspects=suspects, cut=cut, pieces=pieces, told=told)


def pieces_of(plan: GenerationPlan, cut: Mapping[str, Sequence[Box]]) -> tuple[StatePiece, ...]:
    """Everything that members compare, in one order."""
    params = [
        StatePiece(f"{kind}/{name}", cell) for kind in STATE_KINDS for name, cells in cut.items() for cell in cells
    ]
    buffers = [StatePiece(f"buffer/{m.name}", Box((0,) * len(m.dst.shape), m.dst.shape)) for m in plan.buffers]
    return (*params, *buffers)


def _rows(told: Sequence[bytes]) -> NDArray[np.int64]:
    return np.stack([np.frombuffer(row, dtype=np.int64) for row in told])


def take_state(
    found: Examined,
    parts: StepParts | None,
    *,
    held: HeldState,
    everyone: Everyone,
    record: MoveRecorder | None = None,
) -> Moved:
    """Fill `parts.state` wave by wave from what members hold, and publish it. `parts` None: this member is idle, and only gives. Collective.

    What arrives otherwise than it was sent is sent once more. Raises `PeerError` where a member is lost, or some member still has other bits (which raises `RunError` itself, and so leaves the
    run); what the others hold stays. `RunError` on all members where it cannot be said who is wrong.
    """
    resharder = Resharder(everyone.comms, everyone.axis, hosts=everyone.hosts)
    waves = [
        _take_wave(found, wave, parts, held=held, everyone=everyone, resharder=resharder, record=record)
        for wave in range(len(found.plan.waves))
    ]
    return Moved(*(sum(part) for part in zip(*waves, strict=True)))


def _take_wave(
    found: Examined,
    wave: int,
    parts: StepParts | None,
    *,
    held: HeldState,
    everyone: Everyone,
    resharder: Resharder,
    record: MoveRecorder | None,
) -> Moved:
    """One wave, which takes the place of what was held of it once all members have theirs."""
    plan, names = found.plan, frozenset(found.plan.waves[wave])
    places = [i for i, piece in enumerate(found.pieces) if _name_of(piece.name) in names]
    pieces, told = [found.pieces[i] for i in places], found.told[:, places]
    new, moves, received = {}, plan.moves_of(wave), 0
    if parts is not None:
        parts.state.make_room(names)
        new = _tensors_of(parts.state, names)
    for times in range(MOVES):
        received += move_state(
            resharder,
            moves,
            held.tensors,
            _for_moves(new),
            op_id=wave_id(wave),
            record=None if times else record,
        )
        if parts is not None and wave == len(plan.waves) - 1:
            parts.state.restore(parts.comms)
        everyone.comms.complete(everyone.device)
        mine = checksums([box for of in new.values() for box in of.boxes], cut=found.cut)
        if parts is not None:
            held.offer(plan, everyone.peers.rank, wave, new)
        now = _rows(everyone.peers.gather(row_of(mine, pieces).tobytes()))
        rows = np.concatenate([told, now])
        if all_agree(rows):
            held.accept()
            return Moved(received, int(np.count_nonzero((rows != NONE).any(axis=0))), times)
        held.withdraw()
        wrong = differing(told, now)
        if not wrong:
            compare([sums_of(row, pieces) for row in rows])  # says what differs
    raise _not_sound(wrong, everyone.peers.rank)


def _not_sound(wrong: Sequence[int], rank: int) -> Exception:
    """The error of `rank` where these have received other bits again and again."""
    times = f"received other bits than were sent to {{}}, {MOVES} times in a row"
    if rank in wrong:
        return RunError(f"this member {times.format('it')}: its memory or its network is not sound")
    return PeerError(f"members {', '.join(map(str, wrong))} {times.format('them')}")


MOVES = 2
"""How often state is sent to members of which some receive it differently."""


def differing(told: NDArray[np.int64], now: NDArray[np.int64]) -> list[int]:
    """Members that hold other bits than were sent. `told` and `now`: (members, pieces) checksums before, of what is trusted, and after. Of a piece that nobody held before, whoever is not of the
    majority; empty where that does not say who is wrong."""
    sent, wrong = told.max(axis=0), set[int]()
    for place in np.flatnonzero([not all_agree(column.reshape(-1, 1)) for column in np.concatenate([told, now]).T]):
        held = {member: value for member, value in enumerate(now[:, place]) if value != NONE}
        right = sent[place]
        if right == NONE:
            (right, most), *others = Counter(held.values()).most_common()
            if others and others[0][1] == most:
                return []
        wrong |= {member for member, value in held.items() if value != right}
    return sorted(wrong)


class _Held(NamedTuple):
    """Masters and moments of a parameter by kind, or a buffer under an empty one; `boxes` of the same memory."""

    tensors: dict[str, Any]
    boxes: list[BoxTensor]


def _tensors_of(state: ShardedState, names: Container[str] | None = None) -> dict[str, _Held]:
    """By parameter and buffer. `names`: of these alone."""
    found: dict[str, _Held] = {}
    for box in state.boxes(names):
        found.setdefault(_name_of(box.name), _Held({}, [])).boxes.append(box)
    for kind in STATE_KINDS:
        for name, view in shard_views(state, kind, names).items():
            found.setdefault(name, _Held({}, [])).tensors[kind] = view
    for name, buffer in state.buffers.items():
        found[name].tensors[""] = buffer
    return found if names is None else {name: of for name, of in found.items() if name in names}


def _for_moves(held: Mapping[str, _Held]) -> dict[str, Any]:
    """Tensors as moves call them."""
    return {f"{kind}/{name}" if kind else name: x for name, of in held.items() for kind, x in of.tensors.items()}


def _name_of(tensor: str) -> str:
    """The parameter or buffer of `KIND/NAME`."""
    return tensor.split("/", 1)[1]


class HeldState:
    """What a member holds of the state while a generation forms, tensor by tensor: the memory of a bucket goes with its last tensor.

    A wave that has come is *offered* before the others hear of it, and there beside what was held before, until this member knows that all have theirs. Where it never hears,
    the next generation tells: if any member has passed that wave, all had theirs.
    """

    def __init__(self, state: ShardedState | None, descriptor: StateDescriptor | None, *, passed: str = "") -> None:
        """`passed`: the last wave of which this member knows that all have it."""
        self._held = {} if state is None else _tensors_of(state)
        self.descriptor, self.passed = descriptor, passed
        self._move, self._before = "", descriptor
        self._offered: _Offer | None = None

    @property
    def boxes(self) -> list[BoxTensor]:
        return [box for of in self._held.values() for box in of.boxes]

    @property
    def tensors(self) -> dict[str, Any]:
        return _for_moves(self._held)

    @property
    def doubt(self) -> str:
        """The wave that is offered; empty: there is none."""
        return "" if self._offered is None else self._offered.wave

    @property
    def then(self) -> StateDescriptor | None:
        """Where it stands if that counts."""
        return None if self._offered is None else self._offered.then

    def begin(self, move: str) -> None:
        """Take part in another move of state."""
        self._offered, self._move, self._before = None, move, self.descriptor

    def offer(self, plan: GenerationPlan, rank: int, wave: int, new: Mapping[str, _Held]) -> None:
        """What came of a wave to `rank` is complete."""
        then = plan.descriptor_after(rank, wave + 1, self._before)
        self._offered = _Offer(f"{self._move}/{wave}", then, frozenset(plan.waves[wave]), new)

    def accept(self) -> None:
        """All have what is offered: it takes the place of what was held of the same."""
        if self._offered is not None:
            self.passed, self.descriptor, names, new = self._offered
            self._held = {name: of for name, of in self._held.items() if name not in names} | dict(new)
            self._offered = None

    def withdraw(self) -> None:
        """What is offered is not to be used."""
        self._offered = None


class _Offer(NamedTuple):
    wave: str
    then: StateDescriptor | None
    names: frozenset[str]
    new: Mapping[str, _Held]


TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Of state, by the bytes of an element."""


def move_state(
    resharder: Resharder,
    moves: Sequence[Move],
    source: Mapping[str, Any],
    dest: Mapping[str, Any],
    *,
    op_id: str,
    record: MoveRecorder | None = None,
) -> int:
    """Carry out moves between tensors, or views of shards, by name; the bytes that came to this rank. Collective."""
    have = [source.get(move.name) if resharder.rank in move.src.ranks else None for move in moves]
    want = [dest.get(move.name) for move in moves]
    types = [TYPES[move.itemsize] for move in moves]
    with nullcontext() if record is None else record.recording(resharder, moves, op_id=op_id):
        resharder.move(moves, have, dtypes=types, out=want, op_id=op_id)
    return 0 if resharder.report is None else resharder.report.received_bytes


def cut_of(plan: GenerationPlan) -> dict[str, list[Box]]:
    """Parts of each parameter that all who hold them, before or afterwards, can compare."""
    made: dict[tuple[TensorLayout, TensorLayout], list[Box]] = {}
    for m in plan.params:
        if (m.src, m.dst) not in made:
            made[m.src, m.dst] = cells(h.box for side in (m.src, m.dst) for of in side.held for h in of)
    return {m.name: made[m.src, m.dst] for m in plan.params}


def checksums(boxes: Sequence[BoxTensor], *, cut: Mapping[str, Sequence[Box]]) -> dict[StatePiece, int]:
    """Checksum of each piece of state: a box of a tensor, or, of a parameter in `cut`, each of its parts, whatever else is held with it."""
    found: dict[StatePiece, torch.Tensor] = {}
    for held in boxes:
        for cell in cut.get(_name_of(held.name), (held.box,)):
            if cell == held.box:
                found[StatePiece(held.name, cell)] = held.tensor
            elif held.box.contains(cell):
                inside = cell.shifted([-offset for offset in held.box.offsets])
                found[StatePiece(held.name, cell)] = held.tensor[inside.slices()]
    there = {piece: x for piece, x in found.items() if x.device.type != "cpu"}
    sums = dict(zip(there, device_sums(list(there.values())), strict=True))
    return {piece: sums[piece] if piece in sums else _crc(x) for piece, x in found.items()}


def _crc(x: torch.Tensor) -> int:
    """CRC-32."""
    return zlib.crc32(x.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def compare(told: Sequence[Mapping[Any, int]]) -> int:
    """How many pieces all agree on. `told`: of each member, what it held and what it holds now. Raises `RunError` naming pieces that differ."""
    found: defaultdict[Hashable, set[int]] = defaultdict(set)
    for sums in told:
        for piece, value in sums.items():
            found[piece].add(value)
    wrong = sorted(str(piece) for piece, values in found.items() if len(values) > 1)
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RunError(
            f"members hold different values of {shown}, and it cannot be decided which are right; nothing was changed, and only the newest checkpoint is left"
        )
    return len(found)

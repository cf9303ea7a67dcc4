"""The recorded steps of a run, read back from the event logs of all its ranks: who did what when, on one clock.

Decides which message belongs to which on the other side: the same id between the same ranks, in the order in which they happened. Ranks that
exchange rows in a layer work on micro-batches of their own, so there the micro-batch does not count. Times are those of rank 0's clock. Must never change: what an earlier process recorded beyond the step that training resumed from is void, in whichever log it is.

In an elastic run logs are those of slots, and each recorded step names its generation and the rank therein (rank 0's clock is then that of this generation). What was given up, or
is void because the run went back to a checkpoint, is apart (`Recording.given_up`): it is drawn and not summed. So are moves of state between steps (`Recording.moves`).

A collective is on its way only once the last of those that it needs has posted it:

    own rank      posted ------------- wait ====== end
    another              posted ------------------ end
                         |  under way: from here   |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from phalanx.core.errors import DataError, Problem
from phalanx.core.op_ids import read_op_id
from phalanx.observe import Record, read_events
from phalanx.observe.recorded.recovery import logs_of

SETTING = "observe.trace_steps"


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """An operation of a rank's own."""

    op_id: str
    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class LaneMessage:
    """A collective, or messages between single ranks, as one rank saw it."""

    op_id: str
    op: str
    axis: str
    sent_bytes: int
    begin_s: float
    """Posted."""
    end_s: float
    waited_s: float
    aside: bool
    ranks: tuple[int, ...]
    sends_to: tuple[int, ...]
    receives_from: tuple[int, ...]
    ready_s: float = 0.0
    """When the last of those that it needs had posted it, this rank included; at most `end_s`."""
    last_rank: int = -1
    """Who that was."""

    @property
    def wait_s(self) -> float:
        """When the rank began to wait: nothing of what follows, up to the end, was hidden."""
        return max(self.begin_s, self.end_s - self.waited_s)

    @property
    def late_s(self) -> float:
        """The part of the wait in which some rank had not even posted its part."""
        return max(0.0, min(self.ready_s, self.end_s) - self.wait_s)

    @property
    def is_between_single_ranks(self) -> bool:
        return bool(self.sends_to or self.receives_from)


Meeting = tuple[int, int, str]
"""(generation, step, id of a move or nothing)."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank."""

    step: int
    begin_s: float
    end_s: float
    work: tuple[LaneWork, ...]
    messages: tuple[LaneMessage, ...]
    rank: int
    generation: int = 0
    """0 in a run that is not elastic."""
    committed: bool = True
    voted_s: float = 0.0
    """Moment from which, until `decided_s`, it waited for the decision of a step; 0: it did not."""
    decided_s: float = 0.0
    told_s: float = 0.0
    """When it was written, by its own machine's clock."""
    published_s: float = 0.0
    """How long its parameters took behind its end, to whoever lacked them, in an elastic run; the messages are among `messages`."""

    @property
    def meeting(self) -> Meeting:
        """What is the same for all ranks whose messages belong together."""
        return self.generation, self.step, ""

    @property
    def name(self) -> str:
        """Name for people."""
        return f"step {self.step}" if self.committed else f"step {self.step}, given up"


@dataclass(frozen=True, kw_only=True)
class RankMove(RankStep):
    """One rank's part of a move of state after `step` steps. `committed`: it came to its end there."""

    op_id: str
    """What the ids of its messages begin with."""
    world: int
    """Ranks that took part."""
    plan: str
    hosts: tuple[int, ...]
    order: Mapping[str, Any]
    """The last three as in `core.events.MoveRecorded`."""

    @property
    def meeting(self) -> Meeting:
        return self.generation, self.step, self.op_id

    @property
    def name(self) -> str:
        return f"move {self.op_id}" if self.committed else f"move {self.op_id}, broken off"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorded steps of a run, by log (that of a rank, or of a slot) and step. `hosts` and `clock_error_s` are by log."""

    run: str
    ranks: dict[int, dict[int, RankStep]]
    given_up: dict[int, tuple[RankStep, ...]] = field(default_factory=dict)
    """Steps that were given up, by log, in the order of time."""
    moves: dict[int, tuple[RankMove, ...]] = field(default_factory=dict)
    """Likewise; those right before the steps."""
    hosts: dict[int, str] = field(default_factory=dict)
    clock_error_s: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[int, ...]:
        found = {step for steps in self.ranks.values() for step in steps}
        return tuple(sorted(found | {s.step for steps in self.given_up.values() for s in steps}))

    @property
    def is_elastic(self) -> bool:
        """Whether its logs are those of slots."""
        return any(s.generation for log in self.logs for s in self.drawn(log))

    @property
    def logs(self) -> tuple[int, ...]:
        """Those that have recorded anything."""
        return tuple(sorted({*self.ranks, *self.given_up, *self.moves}))

    def drawn(self, log: int) -> list[RankStep]:
        """All that one log has recorded, in the order of time."""
        own = [*self.ranks.get(log, {}).values(), *self.given_up.get(log, ()), *self.moves.get(log, ())]
        return sorted(own, key=lambda s: s.begin_s)

    @property
    def whole_moves(self) -> dict[Meeting, tuple[RankMove, ...]]:
        """Moves that all ranks which took part reported, each to its end, by rank."""
        found: dict[Meeting, dict[int, RankMove]] = {}
        for own in (move for moves in self.moves.values() for move in moves if move.committed):
            found.setdefault(own.meeting, {})[own.rank] = own
        return {
            at: tuple(of for _, of in sorted(by_rank.items()))
            for at, by_rank in sorted(found.items())
            if len(by_rank) == next(iter(by_rank.values())).world
        }


def read_recording(folder: Path, *, first: int | None = None, last: int | None = None) -> Recording:
    """The steps from `first` to `last` (None: all) of the run in `folder`.

    Raises `DataError` where the run has no event log, or none of these steps was recorded.
    """
    found = find_recording(folder, first=first, last=last)
    if isinstance(found, Problem):
        raise DataError([found], subject="the run")
    return found


def find_recording(folder: Path, *, first: int | None = None, last: int | None = None) -> Recording | Problem:
    """Finds a recording as `read_recording` does, and returns what that would raise."""
    logs = logs_of(folder)
    if not logs:
        hint = "give the folder of a run, such as runs/laptop"
        return Problem(where=str(folder), value=None, rule="has no event log", hint=hint)
    return recording_of(folder, {number: read_events(path) for number, path in logs.items()}, first=first, last=last)


def recording_of(
    folder: Path, logs: Mapping[int, Iterable[Record]], *, first: int | None = None, last: int | None = None
) -> Recording | Problem:
    """The same from events of each log, or from a part of them that has the whole steps."""
    read = {number: _Reader(number).read(records) for number, records in logs.items()}
    _void_starts(list(read.values()))
    _void_others(list(read.values()))
    found = sorted({s.step for reader in read.values() for s in (*reader.steps.values(), *reader.given_up)})
    wanted = [s for s in found if (first is None or s >= first) and (last is None or s <= last)]
    if not wanted:
        return _nothing(folder, found, first, last)
    ranks = {rank: {s: reader.steps[s] for s in wanted if s in reader.steps} for rank, reader in read.items()}
    given_up = {rank: [s for s in reader.given_up if s.step in wanted] for rank, reader in read.items()}
    moves = {rank: [m for m in reader.moves if m.step + 1 in wanted] for rank, reader in read.items()}
    done, undone, moved = matched(ranks, given_up, moves)
    return Recording(
        run=next((r.run for r in read.values() if r.run), folder.name),
        ranks={rank: steps for rank, steps in done.items() if steps},
        given_up={rank: steps for rank, steps in undone.items() if steps},
        moves={rank: own for rank, own in moved.items() if own},
        hosts={rank: reader.clock["host"] for rank, reader in read.items() if reader.clock},
        clock_error_s={rank: reader.clock["error_s"] for rank, reader in read.items() if reader.clock},
    )


def _nothing(folder: Path, found: Sequence[int], first: int | None, last: int | None) -> Problem:
    if not found:
        hint = f"train it with --{SETTING} 10,12 (the first and the last step to record), from a checkpoint before them"
        return Problem(where=str(folder), value=None, rule=f"has no recorded steps: {SETTING} was not set", hint=hint)
    asked = f"{'' if first is None else first}:{'' if last is None else last}"
    hint = f"recorded are steps {found[0]} to {found[-1]}"
    return Problem(where="--steps", value=asked, rule=f"names no step that {folder} has recorded", hint=hint)


class _Team(NamedTuple):
    """That a generation was formed, as a log tells it."""

    told_s: float
    life: str
    generation: int
    step: int


class _Reader:
    """One log."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.run = ""
        self.steps: dict[int, RankStep] = {}
        self.given_up: list[RankStep] = []
        self.moves: list[RankMove] = []
        self.teams: list[_Team] = []
        self.clock: dict[str, Any] = {}
        self._work: list[LaneWork] = []
        self._messages: list[LaneMessage] = []

    def read(self, records: Iterable[Record]) -> _Reader:
        for record in records:
            match record["kind"]:
                case "RunStarted":
                    self.run = record["run"]
                    self._work, self._messages, self.clock = [], [], {}
                    self.void(record["step"])
                    if not any(
                        s.generation for s in self.given_up
                    ):  # an earlier process, from whose checkpoint this one goes on
                        self.given_up = []
                    self.moves = [m for m in self.moves if m.generation or m.step < record["step"]]
                case "TeamFormed":
                    self.teams.append(
                        _Team(record["time_s"], record.get("life", ""), record["generation"], record["step"])
                    )
                case "WentBack":
                    self.void(record["step"])
                case "ClockCompared":
                    self.clock = record
                    self._work, self._messages = [], []  # what a process that was killed had begun to write
                case "Operation":
                    self._work.append(self._operation(record))
                case "Collective":
                    self._messages.append(self._collective(record))
                case "StepRecorded":
                    self._close(record)
                case "StepPublished":
                    self._close_published(record)
                case "MoveRecorded":
                    self._close_move(record)
        return self

    def void(self, after: int, generation: int | None = None) -> None:
        """What was done after a step, or in any generation but one, counts no longer."""
        gone = [
            s
            for s in self.steps.values()
            if (s.step > after if generation is None else s.step == after and s.generation != generation)
        ]
        self.steps = {n: s for n, s in self.steps.items() if s not in gone}
        self.given_up = sorted([*self.given_up, *gone], key=lambda s: s.begin_s)

    def _here(self, time_s: float) -> float:
        """A time of this rank's clock on that of rank 0."""
        return time_s - float(self.clock.get("offset_s", 0.0))

    def _operation(self, r: Record) -> LaneWork:
        return LaneWork(
            op_id=r["op_id"], lane=r["lane"], begin_s=self._here(r["begin_s"]), end_s=self._here(r["end_s"])
        )  # fmt: skip

    def _collective(self, r: Record) -> LaneMessage:
        return LaneMessage(
            op_id=r["op_id"], op=r["op"], axis=r["axis"], sent_bytes=r["sent_bytes"], begin_s=self._here(r["begin_s"]),
            end_s=self._here(r["end_s"]), waited_s=r.get("waited_s", 0.0), aside=r.get("aside", False),
            ranks=tuple(r.get("ranks", ())), sends_to=tuple(r.get("sends_to", ())),
            receives_from=tuple(r.get("receives_from", ())),
        )  # fmt: skip

    def _close(self, r: Record) -> None:
        rank = r.get("rank")
        made = RankStep(
            step=r["step"],
            rank=self.number if rank is None else rank,
            generation=r.get("generation", 0),
            committed=r.get("committed", True),
            voted_s=self._here(r["voted_s"]) if r.get("voted_s") else 0.0,
            decided_s=self._here(r["decided_s"]) if r.get("decided_s") else 0.0,
            told_s=r["time_s"],
            begin_s=self._here(r["begin_s"]),
            end_s=self._here(r["end_s"]),
            work=tuple(self._work),
            messages=tuple(sorted(self._messages, key=lambda m: m.begin_s)),
        )
        if made.committed:
            self.steps[made.step] = made
        else:
            self.given_up.append(made)
        self._work, self._messages = [], []

    def _close_published(self, r: Record) -> None:
        own = self.steps.get(r["step"])
        if own is not None and own.generation == r["generation"]:
            messages = (*own.messages, *sorted(self._messages, key=lambda m: m.begin_s))
            self.steps[own.step] = replace(own, messages=messages, published_s=r["end_s"] - r["begin_s"])
        self._work, self._messages = [], []

    def _close_move(self, r: Record) -> None:
        at = (r["generation"], r["step"])
        before = next((m.order for m in self.moves[-1:] if (m.generation, m.step) == at), {})
        self.moves.append(
            RankMove(
                op_id=r["op_id"],
                step=r["step"],
                rank=self.number if r["rank"] is None else r["rank"],
                generation=r["generation"],
                committed=r["done"],
                world=r["world"],
                plan=r["plan"],
                hosts=tuple(r["hosts"]),
                order=r["order"] or before,
                told_s=r["time_s"],
                begin_s=self._here(r["begin_s"]),
                end_s=self._here(r["end_s"]),
                work=(),
                messages=tuple(sorted(self._messages, key=lambda m: m.begin_s)),
            )
        )
        self._work, self._messages = [], []


def _void_starts(readers: Sequence[_Reader]) -> None:
    """Voids what an elastic run that was started again had given up or moved before, and steps that were done again, in logs of
    slots too that came later or not at all."""
    for told_s, step in _starts(sorted(team for reader in readers for team in reader.teams)):
        for r in readers:
            r.steps = {n: s for n, s in r.steps.items() if s.told_s >= told_s or n <= step}
            r.given_up = [s for s in r.given_up if s.told_s >= told_s]
            r.moves = [m for m in r.moves if m.told_s >= told_s]


def _starts(teams: Sequence[_Team]) -> list[tuple[float, int]]:
    """(when, steps committed) of each start but the first; `teams` in the order of time. Its service counts generations anew: one that has only lost what it knew goes on above
    (`runtime/membership/membership.py`)."""
    lives: dict[str, list[_Team]] = {}
    for team in teams:
        lives.setdefault(team.life, []).append(team)
    found, highest = [], 0
    for life in lives.values():
        if min(team.generation for team in life) <= highest:
            found.append((life[0].told_s, life[0].step))
            highest = 0
        highest = max(highest, *(team.generation for team in life))
    return found


def _void_others(readers: Sequence[_Reader]) -> None:
    """A step of which several generations say that they committed it was done again after a way back: the last time counts, whoever did not hear of it."""
    for step in sorted({step for reader in readers for step in reader.steps}):
        last = max((r.steps[step] for r in readers if step in r.steps), key=lambda s: s.end_s)
        for reader in readers:
            reader.void(step, last.generation)


# ---- whose message is whose ------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]
AnyStep = TypeVar("AnyStep", bound=RankStep)


def posted(steps: dict[int, RankStep]) -> dict[Key, tuple[int, LaneMessage]]:
    """What each rank (the keys) posted in one step, by what the others call it: one end of a message, or one rank's part of a collective."""
    found: dict[Key, tuple[int, LaneMessage]] = {}
    for rank, step in steps.items():
        for message, keys in numbered(rank, step):
            found.update((key, (rank, message)) for key in keys)
    return found


def numbered(rank: int, step: RankStep) -> list[tuple[LaneMessage, tuple[Key, ...]]]:
    """The messages of a rank with the names of its ends of them; what happens again under the same name is counted."""
    times: dict[Key, int] = {}
    out = []
    for message in step.messages:
        keys = []
        for name in _names(rank, message):
            keys.append((*name, times.get(name, 0)))
            times[name] = times.get(name, 0) + 1
        out.append((message, tuple(keys)))
    return out


def _names(rank: int, m: LaneMessage) -> list[Key]:
    place = read_op_id(m.op_id)
    id = m.op_id if place.layer is None else f"L{place.layer}.{place.phase}.{place.name}"
    if not m.is_between_single_ranks:
        return [("all", id, m.op, m.ranks, rank)]
    sends = [("send", id, rank, to) for to in m.sends_to]
    return sends + [("receive", id, source, rank) for source in m.receives_from]


def others(key: Key, message: LaneMessage) -> list[Key]:
    """The ends that this end needs: of a receive the send, of a collective the parts of all other ranks; a send needs the receive."""
    if key[0] == "all":
        return [(*key[:4], rank, key[5]) for rank in message.ranks if rank != key[4]]
    return [("receive" if key[0] == "send" else "send", *key[1:])]


def matched(
    ranks: Mapping[int, Mapping[int, RankStep]],
    given_up: Mapping[int, Sequence[RankStep]],
    moves: Mapping[int, Sequence[RankMove]],
) -> tuple[dict[int, dict[int, RankStep]], dict[int, tuple[RankStep, ...]], dict[int, tuple[RankMove, ...]]]:
    """All with `ready_s` and `last_rank` of every message: ranks of one generation met in a step, whether it was committed or not, or in a move."""
    together: dict[Meeting, dict[int, RankStep]] = {}
    for own in [
        *(s for steps in ranks.values() for s in steps.values()),
        *(s for by_log in (given_up, moves) for steps in by_log.values() for s in steps),
    ]:
        together.setdefault(own.meeting, {})[own.rank] = own
    ends = {key: posted(at) for key, at in together.items()}

    def with_ready(own: AnyStep) -> AnyStep:
        there = ends[own.meeting]
        messages = tuple(_ready(own.rank, message, keys, there) for message, keys in numbered(own.rank, own))
        return replace(own, messages=messages)

    done = {log: {step: with_ready(own) for step, own in steps.items()} for log, steps in ranks.items()}
    undone = {log: tuple(with_ready(own) for own in steps) for log, steps in given_up.items()}
    return done, undone, {log: tuple(with_ready(own) for own in steps) for log, steps in moves.items()}


def _ready(
    rank: int, message: LaneMessage, keys: Sequence[Key], ends: dict[Key, tuple[int, LaneMessage]]
) -> LaneMessage:
    needed = [(ends[o][1].begin_s, ends[o][0]) for key in keys for o in others(key, message) if o in ends]
    begin_s, last = max([(message.begin_s, rank), *needed])
    return replace(message, ready_s=min(begin_s, message.end_s), last_rank=last)

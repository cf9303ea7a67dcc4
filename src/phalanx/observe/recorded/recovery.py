"""An elastic run, read from the logs of all its members: one course of it, and each recovery with what it took and moved.

Every member tells every committed step, so that the step counts as long as one of them lived to tell it. Must never change: what was committed
after the checkpoint that a run went back to is void, whoever told it; steps whose samples were taken twice are named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.reading import lines_of, open_regular
from phalanx.core.trace_file import TraceFile
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe import History, Record, apply, log_path, read_events, read_history

TEAM = b'"kind":"TeamFormed"'
LOOK_BYTES = 65536
"""A member tells of its first team before its first step."""
PHASES = ("told_s", "noticed_s", "formed_s", "built_s", "moved_s")


@dataclass(kw_only=True)
class Recovery:
    """A generation after the first. Seconds are those of its slowest member."""

    generation: int
    step: int
    """Steps committed when it began."""
    why: str
    members: int
    folding: str
    lost_s: float
    """When the supervisor knew of a loss (seconds since the epoch); 0: no member is lost."""
    told_s: float = 0.0
    noticed_s: float = 0.0
    formed_s: float = 0.0
    built_s: float = 0.0
    moved_s: float = 0.0
    moved_bytes: int = 0
    """Bytes that moved to all members together."""
    resumed_s: float | None = None
    """Seconds from when a member saw the last team broken to the first step that this one committed; None: it committed none."""
    since_lost_s: float | None = None
    """The same from when the supervisor knew."""

    def explain(self) -> str:
        """Says it in a line."""
        parts = [f"told in {format_seconds(self.told_s)}"] if self.lost_s else []
        parts += [f"connected in {format_seconds(self.formed_s)}", f"built in {format_seconds(self.built_s)}"]
        parts += [f"{format_bytes(self.moved_bytes)} moved in {format_seconds(self.moved_s)}"]
        if self.resumed_s is not None:
            parts += [f"next step after {format_seconds(self.resumed_s)}"]
        else:
            parts += ["no step"]
        return f"after step {self.step}: {self.why}; {self.members} member{'s' if self.members != 1 else ''} ({self.folding}): {', '.join(parts)}"


@dataclass(kw_only=True)
class Rollback:
    """The run went back to a checkpoint."""

    history: int
    step: int
    """Step of the checkpoint."""
    last: int
    """Last step that any member reported before; the samples of the steps from `step` + 1 to it were taken twice."""
    why: str
    damaged: tuple[int, ...]
    abandoned: tuple[str, ...]

    def explain(self) -> str:
        """Says it in a line."""
        what = f"went back to the checkpoint of step {self.step} ({self.why})"
        if self.last == self.step:
            return f"{what}; no step was done twice"
        steps = f"steps {self.step + 1} to {self.last}" if self.last > self.step + 1 else f"step {self.last}"
        return f"{what}; the samples of {steps} were taken twice, once in an abandoned history"


@dataclass(kw_only=True)
class Course:
    """An elastic run."""

    history: History = field(default_factory=History)
    recoveries: list[Recovery] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)


def logs_of(folder: Path) -> dict[int, Path]:
    """Log of each rank, or slot of an elastic run."""
    names = (re.fullmatch(r"rank-(\d{1,9})\.jsonl", p.name) for p in (folder / "events").glob("rank-*.jsonl"))
    return {int(m[1]): log_path(folder, int(m[1])) for m in sorted(filter(None, names), key=lambda m: int(m[1]))}


def _tells_of_teams(path: Path, *, whole: bool) -> bool:
    with contextlib.suppress(OSError), open_regular(path) as file:  # who reads its events names it
        return any(TEAM in line for line in lines_of(file)) if whole else TEAM in file.read(LOOK_BYTES)
    return False


def is_elastic(folder: Path) -> bool:
    """Whether its members reported teams: at the beginning of a log, or later in the first one, where a run became elastic."""
    return any(_tells_of_teams(path, whole=not at) for at, path in enumerate(logs_of(folder).values()))


def read_run(folder: Path) -> Course:
    """The course of a run from all its logs; of one that cannot recover, whose ranks all tell the same, from that of rank 0. Raises `DataError`."""
    if not is_elastic(folder):
        return Course(history=read_history(folder))
    return merged([list(read_events(path)) for path in logs_of(folder).values()])


def merged(logs: Sequence[Sequence[Record]]) -> Course:
    """One course from what the members told, a list for each slot."""
    course, reader = Course(), _Reader()
    for record in sorted((r for log in logs for r in log), key=lambda r: r["time_s"]):
        reader.take(course, record)
    # of the run: members come and go in each start that forms a team, and the first log tells of the others
    course.history.starts = reader.program + 1 + (_starts_without_team(logs[0]) if logs else 0)
    return course


def _starts_without_team(log: Sequence[Record]) -> int:
    kinds = [r["kind"] for r in log if r["kind"] in ("RunStarted", "TeamFormed")]
    return sum(kind == after == "RunStarted" for kind, after in zip(kinds, [*kinds[1:], "RunStarted"], strict=True))


class _Reader:
    def __init__(self) -> None:
        self.top = 0
        """Newest generation of this start of the run."""
        self.program = 0
        """Starts before this one."""
        self.lives: set[str] = set()
        """Lives of services that counted generations."""
        self.found: dict[tuple[str, int], Recovery] = {}
        self.said: set[tuple[str, Any]] = set()

    def take(self, course: Course, record: Record) -> None:
        match record["kind"]:
            case "TeamFormed":
                self._formed(course, record)
            case "TrainingResumed":
                self._resumed(course.recoveries, record)
            case "WentBack":
                self._went_back(course, record)
            case "StepEnded" if record["step"] in course.history.steps:
                pass  # another member reported it
            case "CheckpointSaved" | "Note" as kind:
                if self._is_new(kind, record.get("text", record["step"] if kind == "CheckpointSaved" else "")):
                    apply(course.history, record)
            case _:
                apply(course.history, record)

    def _is_new(self, kind: str, key: Any) -> bool:
        new = (kind, key) not in self.said
        self.said.add((kind, key))
        return new

    def _formed(self, course: Course, record: Record) -> None:
        number, life = record["generation"], self._life_of(record)
        if number == 1:
            return
        if (found := self.found.get((life, number))) is None:
            kept = {key: record[key] for key in ("generation", "step", "why", "members", "folding")}
            found = self.found[life, number] = Recovery(**kept, lost_s=record.get("lost_s", 0.0))
            course.recoveries.append(found)
        for key in PHASES:
            setattr(found, key, max(getattr(found, key), record.get(key, 0.0)))
        found.moved_bytes += record["moved_bytes"]

    def _life_of(self, record: Record) -> str:
        """Life of the service that this team belongs to. One that counts anew is of another start of the run; one that has only
        lost what it knew goes on above (`runtime/membership/membership.py`)."""
        number: int = record["generation"]
        old = f"start {self.program + (number == 1 and self.top > 1)}"  # as logs were that do not tell it
        life: str = record.get("life") or old
        if life not in self.lives:
            again = bool(self.lives) and number <= self.top
            self.program += again
            self.top = 0 if again else self.top
            self.lives.add(life)
        self.top = max(self.top, number)
        return life

    def _resumed(self, recoveries: Sequence[Recovery], record: Record) -> None:
        found = next((r for r in reversed(recoveries) if r.generation == record["generation"]), None)
        if found is not None:
            found.resumed_s = max(found.resumed_s or 0.0, record["seconds"])
            since = record.get("since_lost_s", 0.0)
            found.since_lost_s = max(found.since_lost_s or 0.0, since) if since else found.since_lost_s

    def _went_back(self, course: Course, record: Record) -> None:
        if not self._is_new("WentBack", (self.program, record["history"])):
            return
        history, step = course.history, record["step"]
        last = max((s for s in history.steps if s > step), default=max(step, record["from_step"] or 0))
        course.rollbacks.append(
            Rollback(
                history=record["history"],
                step=step,
                last=last,
                why=record["why"],
                damaged=tuple(record["damaged"]),
                abandoned=tuple(record["abandoned"]),
            )
        )
        apply(history, record)


def recovery_figures(course: Course) -> dict[str, Any]:
    """Figures of the recoveries for a JSON file."""
    return {
        "recoveries": [asdict(r) for r in course.recoveries],
        "rollbacks": [asdict(r) for r in course.rollbacks],
    }


# ---- as a trace ------------------------------------------------------------------------------------------------------

LANES = ("recovery", "told")


@dataclass(frozen=True)
class SlotSpan:
    """A phase of a recovery, as the member in a slot saw it."""

    slot: int
    tid: int
    """Lane."""
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]


def recovery_spans(folder: Path) -> list[SlotSpan]:
    """Each recovery as its phases one after the other, slot by slot; empty where there was none.

    Times are those at which events were written, on the clock of each member's machine.
    """
    return [SlotSpan(slot, *span) for slot, path in logs_of(folder).items() for span in _spans(path)]


def recovery_trace(name: str, spans: Sequence[SlotSpan]) -> dict[str, Any]:
    """Chrome's JSON object, of a run of which nothing else was recorded: a process for each slot."""
    file = TraceFile(title=f"{name}, recoveries", origin_s=min(span.begin_s for span in spans))
    for slot in sorted({span.slot for span in spans}):
        file.process(slot, f"slot {slot}")
        draw_recoveries(file, [span for span in spans if span.slot == slot])
    return file.to_json_dict()


def draw_recoveries(file: TraceFile, spans: Sequence[SlotSpan]) -> None:
    """The lanes of one slot."""
    for slot, tid in sorted({(span.slot, span.tid) for span in spans}):
        file.lane(slot, tid, LANES[tid])
    for span in spans:
        file.span(
            span.slot, span.tid, span.name, begin_s=span.begin_s, end_s=span.end_s, category=LANES[span.tid], args=span.args
        )  # fmt: skip


_Span = tuple[int, str, float, float, dict[str, Any]]


def _spans(path: Path) -> Iterator[_Span]:
    """Lane, name, begin, end, figures. Spans of the first lane follow one another."""
    free_s, begun_s = 0.0, None
    for record in read_events(path):
        kind, at_s = record["kind"], record["time_s"]
        if kind == "TeamFormed" and record["generation"] > 1:
            for span in _phases(record):
                begin_s = max(free_s, span[2]) if span[0] == 0 else span[2]
                if span[3] > begin_s:
                    yield (*span[:2], begin_s, *span[3:])
            free_s = begun_s = at_s
        elif kind == "TrainingResumed" and begun_s is not None:
            yield 0, "first step", begun_s, at_s, {"step": record["step"], "seconds": record["seconds"]}
            free_s, begun_s = at_s, None


def _phases(record: Record) -> Iterator[_Span]:
    """Phases of one team, backwards from when it was told: the loop tells a team once its state is there."""
    end_s = record["time_s"]
    about = {k: record[k] for k in ("generation", "members", "folding", "why", "step")}
    moved_s = end_s - record["moved_s"]
    built_s = moved_s - record["built_s"]
    formed_s = built_s - record["formed_s"]
    noticed_s = min(formed_s, built_s - record["noticed_s"])
    if record.get("lost_s"):
        yield 1, "told", record["lost_s"], record["lost_s"] + record.get("told_s", 0.0), about
    yield 0, "wait for the generation", noticed_s, formed_s, about
    yield 0, "connect", formed_s, built_s, about
    yield 0, "build", built_s, moved_s, about
    yield 0, "move state", moved_s, end_s, {**about, "bytes": record["moved_bytes"], "checked": record["checked"]}

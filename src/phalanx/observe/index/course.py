"""What is remembered of a run besides its curves: how it began and ended, what was validated and saved, who was lost and how it went on.

Decides which events those are and how many of each are kept (`KEPT`, the newest). Every text is cut to `MOST_TEXT` characters and freed of what steers a terminal or the
direction of writing; every number is finite; whatever a log says, all of it can be written as JSON. Must never change: an event that several members of an elastic run tell
counts once, with the slowest member's seconds and all members' bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from typing import Any

from phalanx.core.errors import printable
from phalanx.core.events import was_refused
from phalanx.observe.index.curves import LARGEST, MOST_STEPS, number

PHASES = ("told_s", "noticed_s", "formed_s", "built_s", "moved_s")
KEPT = {
    "starts": 200, "validations": 8192, "checkpoints": 400, "notes": 200, "samples": 20, "recoveries": 500, "rollbacks": 100,
    "losses": 500, "stragglers": 100, "moves": 200, "recorded": 64, "placed": 100,
}  # fmt: skip
"""List of `Course` -> how many of its entries are kept."""
FIELDS = {
    "starts": ("step", "world", "folding"), "validations": ("step", "loss", "seconds"), "checkpoints": ("step", "bytes", "blocked_s", "total_s"),
    "notes": ("level", "text"), "samples": ("step", "prompt", "text"), "rollbacks": ("history", "step", "from_step", "why", "damaged", "abandoned"),
    "recoveries": ("generation", "members", "step", "folding", "why", "life", "lost_s", "moved_bytes", "resumed_s", "since_lost_s", *PHASES),
    "losses": ("uid", "host", "why", "at_s"), "stragglers": ("step", "host", "members", "slowness", "put_out", "why"),
    "moves": ("step", "why", "experts", "moved_s", "before", "after"), "recorded": ("step", "generation", "committed", "begin_s"),
    "placed": ("step", "why", "folding", "log", "offset"),
}  # fmt: skip
"""What entries of each list have, beside `at`. Values are those of `plain_value`."""
KEYS: dict[str, tuple[str, ...]] = {
    "checkpoints": ("step",), "notes": ("text",), "samples": ("step", "prompt"), "rollbacks": ("history", "step"), "losses": ("uid",),
    "stragglers": ("step", "host"), "moves": ("step",),
}  # fmt: skip
"""Of lists whose entries are fields of one event: two that agree in these say the same."""
SUMS = ("moved_bytes", *PHASES)
MOST_TEXT = 2000
CLOCKS_S = 1.0
"""Clocks of hosts differ by less, and a run does not start again within it."""
START_S = 5.0
"""Members tell of one start so far apart at most."""
Entry = dict[str, Any]


def plain(record: Entry, *names: str) -> Entry:
    """Those fields of a record as text, number, or None."""
    return {name: plain_value(record.get(name)) for name in names}


def plain_value(value: Any) -> Any:
    """A value of a log that can be shown: a text of bounded length, a finite number, True, False or None; of a list its first values."""
    if isinstance(value, str):
        return printable(value[:MOST_TEXT])
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(number(value)) else None
    return [plain_value(each) for each in value[:16]] if isinstance(value, list) else None


@dataclass(kw_only=True)
class RunCourse:
    """The lists hold entries by the time `at` at which each was written, `validations` by step: logs are read one after the other."""

    started: Entry = field(default_factory=dict)
    """The newest start."""
    last: Entry = field(default_factory=dict)
    """Figures of the newest step."""
    ended: Entry | None = None
    heard_s: float = 0.0
    """When the newest event was written."""
    broken: int = 0
    """Lines that were no events."""
    starts: list[Entry] = field(default_factory=list)
    validations: list[Entry] = field(default_factory=list)
    checkpoints: list[Entry] = field(default_factory=list)
    notes: list[Entry] = field(default_factory=list)
    samples: list[Entry] = field(default_factory=list)
    recoveries: list[Entry] = field(default_factory=list)
    rollbacks: list[Entry] = field(default_factory=list)
    losses: list[Entry] = field(default_factory=list)
    stragglers: list[Entry] = field(default_factory=list)
    moves: list[Entry] = field(default_factory=list)
    recorded: list[Entry] = field(default_factory=list)
    """Steps of which every operation was recorded, with the times of their first and last line."""
    placed: list[Entry] = field(default_factory=list)
    """When who holds what was told, by time, and where in which log the line stands: it is read when somebody asks."""

    def take(self, record: Entry, *, at: float) -> None:
        """What an event says, but for the figures of steps."""
        kind = record["kind"]
        if kind in _TAKERS:
            _TAKERS[kind](self, record, at)
        elif (name := LISTS.get(kind, "")) in KEYS:
            self.keep(name, {"at": at, **plain(record, *FIELDS[name])}, key=KEYS[name])

    def keep(self, name: str, entry: Entry, *, key: tuple[str, ...] = (), apart_s: float = math.inf) -> None:
        """Put an entry in its place. Of those with the same `key`, told at most `apart_s` apart, the one told last counts; the oldest goes where there are too many."""
        entries: list[Entry] = getattr(self, name)
        same = _place_of(entries, entry, key=key, apart_s=apart_s)
        if same is not None:
            if entry["at"] <= entries[same]["at"]:
                return
            del entries[same]
        insort(entries, entry, key=itemgetter("at"))
        del entries[: max(0, len(entries) - KEPT[name])]

    def validate(self, entry: Entry) -> None:
        """Put a validation in its place. Of those of the same step the one told last counts."""
        step, entries = entry["step"], self.validations
        if not _is_step(step):
            return
        place = bisect_left(entries, step, key=itemgetter("step"))
        if place == len(entries) or entries[place]["step"] != step:
            entries.insert(place, entry)
        elif entry["at"] > entries[place]["at"]:
            entries[place] = entry
        del entries[: max(0, len(entries) - KEPT["validations"])]

    def void(self, after: int, *, until_s: float) -> None:
        """Forget the validations of steps above `after` that were told until `until_s`."""
        self.validations = [v for v in self.validations if not (v["step"] > after and v["at"] <= until_s)]

    def to_json_dict(self) -> Entry:
        return asdict(self)

    @classmethod
    def from_json_dict(cls, values: Entry) -> RunCourse:
        """Raises `ValueError` where these are not the values of a course. Those of earlier versions had lists in no order, and several validations of a step."""
        found = cls()
        for each in fields(cls):
            value, default = values[each.name], getattr(found, each.name)
            if each.name in KEPT and not (isinstance(value, list) and all(isinstance(e, dict) for e in value)):
                raise ValueError(f"{each.name} is no list of tables")
            if isinstance(default, dict) and not isinstance(value, dict):
                raise ValueError(f"{each.name} is no table")
            if isinstance(default, int | float) and not abs(number(value)) <= LARGEST:
                raise ValueError(f"{each.name} is no number")
            if each.name in KEPT:
                _check_entries(each.name, value)
                value.sort(key=itemgetter("at"))
            if each.name in ("started", "last", "ended") and value:
                _check_plain(each.name, value, numbers=("at",))
            setattr(found, each.name, value)
        if found.ended is not None and "reason" not in found.ended:
            raise ValueError("ended says no reason")
        by_step = {v["step"]: v for v in found.validations if _is_step(v["step"])}
        found.validations = [by_step[step] for step in sorted(by_step)]
        return found


def _place_of(entries: list[Entry], entry: Entry, *, key: tuple[str, ...], apart_s: float) -> int | None:
    """Where the newest entry lies that says the same; None: there is none."""
    if not key:
        return None
    values, at = itemgetter(*key), entry["at"]
    wanted = values(entry)
    for i in range(len(entries) - 1, -1, -1):
        if values(entries[i]) == wanted and abs(entries[i]["at"] - at) <= apart_s:
            return i
    return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_STEPS


def _check_entries(name: str, entries: list[Entry]) -> None:
    """Raises `ValueError` where they are not what `RunCourse.take` makes."""
    numbers = ("at", *{"recoveries": SUMS, "recorded": ("step", "begin_s"), "placed": ("offset",)}.get(name, ()))
    for entry in entries:
        if entry.keys() != {"at", *FIELDS[name]} or any(math.isnan(number(entry[n])) for n in numbers):
            raise ValueError(f"{name} has an entry that cannot be")
        _check_plain(name, entry)


def _check_plain(name: str, entry: Entry, *, numbers: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` where its values cannot be shown, or those are no numbers."""
    if any(plain_value(value) != value for value in entry.values()) or any(
        math.isnan(number(entry[n])) for n in numbers
    ):
        raise ValueError(f"{name} has a value that cannot be")


# ---- what each kind of event says ------------------------------------------------------------------------------------


def _run_started(course: RunCourse, record: Entry, at: float) -> None:
    names = ("run", "rank", "world", "step", "total_steps", "num_params", "active_params", "folding", "flops_per_token",
             "peak_flops_per_s", "unigram_loss")  # fmt: skip
    entry = {"at": at, **plain(record, *names)}
    if at >= course.started.get("at", 0.0):
        course.started, course.ended = entry, None
    told = {k: entry[k] for k in ("at", "step", "world", "folding")}
    course.keep("starts", told, key=("step", "folding"), apart_s=START_S)


def _run_ended(course: RunCourse, record: Entry, at: float) -> None:
    entry = {"at": at, **plain(record, "step", "reason", "seconds")}
    if at >= course.last.get("at", 0.0) and (course.ended is None or not was_refused(str(entry["reason"]))):
        course.ended = entry


def _validated(course: RunCourse, record: Entry, at: float) -> None:
    course.validate({"at": at, **plain(record, *FIELDS["validations"])})


def _team_formed(course: RunCourse, record: Entry, at: float) -> None:
    entry = plain(record, "generation", "members", "step", "folding", "why", "life", "lost_s")
    entry |= {"at": at, "moved_bytes": 0, "resumed_s": None, "since_lost_s": None, **dict.fromkeys(PHASES, 0.0)}
    of = entry["generation"], entry["life"]
    found = next((r for r in reversed(course.recoveries) if (r["generation"], r["life"]) == of), None)
    if found is None:
        found = entry
    else:
        course.recoveries.remove(found)
    for name in PHASES:
        found[name] = max(found[name], _zero(record.get(name)))
    found["moved_bytes"] += _zero(record.get("moved_bytes"))
    found["at"] = max(found["at"], at)
    course.keep("recoveries", found)


def _resumed(course: RunCourse, record: Entry, at: float) -> None:
    number_of = plain_value(record.get("generation"))
    alike = [r for r in course.recoveries if r["generation"] == number_of]  # each start of the run counts from 1
    found = next((r for r in reversed(alike) if r["at"] <= at + CLOCKS_S), alike[0] if alike else None)
    if found is not None:
        found["resumed_s"] = max(found["resumed_s"] or 0.0, _zero(record.get("seconds")))
        since = _zero(record.get("since_lost_s"))
        found["since_lost_s"] = max(found["since_lost_s"] or 0.0, since) if since else found["since_lost_s"]


def _state_placed(course: RunCourse, record: Entry, at: float) -> None:
    entry = {"at": at, **plain(record, "step", "why", "folding", "log"), "offset": int(_zero(record.get("offset")))}
    course.keep("placed", entry)


def _step_recorded(course: RunCourse, record: Entry, at: float) -> None:
    entry = {
        **plain(record, "generation", "committed"),
        "step": _zero(record.get("step")),
        "begin_s": _zero(record.get("begin_s")),
    }
    course.keep("recorded", {"at": at, **entry}, key=("step", "generation"))


def _zero(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


LISTS = {
    "RunStarted": "starts", "Validated": "validations", "CheckpointSaved": "checkpoints", "Note": "notes", "Sampled": "samples", "TeamFormed": "recoveries",
    "TrainingResumed": "recoveries", "WentBack": "rollbacks", "MemberLost": "losses", "Straggling": "stragglers", "ExpertsMoved": "moves", "StepRecorded": "recorded",
    "StatePlaced": "placed",
}  # fmt: skip
"""Kind of event -> the list that it changes."""
_TAKERS = {
    "RunStarted": _run_started, "RunEnded": _run_ended, "Validated": _validated, "TeamFormed": _team_formed,
    "TrainingResumed": _resumed, "StepRecorded": _step_recorded, "StatePlaced": _state_placed,
}  # fmt: skip
"""Of the other kinds in `LISTS` an entry is some of their fields (`KEYS`)."""

"""What shall happen to a job, and when: the scenario file.

    [progress]                                  # needed by at_step
    events = "runs/demo/events/rank-*.jsonl"    # files of JSON lines that the job writes; relative to where the job runs
    kind = "StepEnded"                          # lines that tell a step, and where it stands in them
    key = "step"

    [[action]]
    at_step = 5             # when the first rank has ended step 5; or at_s = 2.5, seconds after the job began
    do = "kill"             # kill terminate freeze thaw start (rank or host) | cut restore rate (host)
    host = 1                # or rank = 3
    silent = true           # kill of a host: its link goes first, so that its peers hear nothing (power loss)

    [[action]]
    at_s = 10
    do = "rate"
    host = 0
    rate = "100mbit"
    for_s = 5               # freeze, cut, rate: undone after so many seconds

Decides nothing while the job runs; `play.py` carries it out. Validation lists all problems of a file at once; an action that cannot have
an effect (a thaw of what is never frozen) is one of them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.core.errors import Problem, TestbedError, nearest, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.units import format_rate, format_seconds, read_rate
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.links import MAX_RATE, MIN_RATE

RANK_OR_HOST = ("kill", "terminate", "freeze", "thaw", "start")
HOST_ONLY = ("cut", "restore", "rate")
UNDONE_BY = {"freeze": "thaw", "cut": "restore", "rate": "rate"}
"""Actions that may have `for_s`."""
_NEEDS_BEFORE = {"thaw": ("freeze",), "restore": ("cut",), "start": ("kill", "terminate")}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the step of a job is read."""

    events: str
    kind: str = "StepEnded"
    key: str = "step"


@dataclass(frozen=True, kw_only=True)
class ScenarioAction:
    """One thing that happens to one rank or one host. Exactly one of `at_s`, `at_step` and one of `rank`, `host` is set."""

    do: str
    at_s: float | None = None
    at_step: int | None = None
    rank: int | None = None
    host: int | None = None
    silent: bool = False
    bit_per_s: float | None = None
    """Bits per second of `rate`; None goes back to the rate of the cluster."""
    for_s: float | None = None

    @property
    def target(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"host {self.host}"

    def explain(self) -> str:
        when = f"step {self.at_step}" if self.at_step is not None else format_seconds(self.at_s or 0.0)
        what = f"{self.do} {self.target}"
        if self.do == "rate":
            what = f"link of {self.target} at " + (
                format_rate(self.bit_per_s, "bit") if self.bit_per_s else "its own rate"
            )
        return f"at {when}: {what}{' silently' if self.silent else ''}{f' for {self.for_s:g} s' if self.for_s else ''}"


@dataclass(frozen=True, kw_only=True)
class Scenario(Hashed):
    """Actions in the order of the file. Make it with `load_scenario` or `parse_scenario`, or by hand and `check` it."""

    actions: tuple[ScenarioAction, ...] = ()
    progress: Progress | None = None

    def check(self, spec: ClusterSpec) -> None:
        """Raise `TestbedError` with all problems that this scenario has on this cluster."""
        raise_if(scenario_problems(self, spec=spec), TestbedError, subject="scenario")

    def explain(self) -> str:
        return "\n".join(a.explain() for a in self.actions) or "nothing happens"


def load_scenario(path: Path, *, spec: ClusterSpec) -> Scenario:
    """Read and check a scenario file. Raises `TestbedError` with all problems."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TestbedError.of("scenario", str(path), f"cannot be read as TOML: {reason}", subject="scenario") from error
    return parse_scenario(data, spec=spec, subject=f"scenario {path}")


def parse_scenario(data: Mapping[str, Any], *, spec: ClusterSpec, subject: str = "scenario") -> Scenario:
    """A checked scenario from parsed TOML. Raises `TestbedError` with all problems."""
    problems = _unknown(data, ("progress", "action"), where="scenario")
    progress = _read_progress(data["progress"], problems) if "progress" in data else None
    actions: list[ScenarioAction] = []
    entries = data.get("action", [])
    if not isinstance(entries, list) or not entries:
        problems.append(
            _problem("action", entries, "a scenario needs at least one [[action]]", 'write [[action]] with do = "kill"')
        )
        entries = []
    for i, entry in enumerate(entries):
        action = _read_action(entry, f"action[{i}]", problems)
        if action is not None:
            actions.append(action)
    scenario = Scenario(actions=tuple(actions), progress=progress)
    if not problems:  # what follows speaks of whole actions
        problems = scenario_problems(scenario, spec=spec)
    raise_if(problems, TestbedError, subject=subject)
    return scenario


def _problem(where: str, value: object, rule: str, hint: str = "") -> Problem:
    return Problem(where=where, value=value, rule=rule, hint=hint)


def _unknown(table: Mapping[str, Any], legal: Sequence[str], *, where: str) -> list[Problem]:
    return [_problem(f"{where}.{k}", table[k], "is not a setting", nearest(k, legal)) for k in table if k not in legal]


def _read_progress(table: object, problems: list[Problem]) -> Progress | None:
    names = [f.name for f in fields(Progress)]
    if not isinstance(table, Mapping):
        problems.append(_problem("progress", table, "must be a table", 'write [progress] with events = "..."'))
        return None
    found = _unknown(table, names, where="progress")
    for name in names:
        if name in table and not (isinstance(table[name], str) and table[name]):
            found.append(_problem(f"progress.{name}", table[name], "must be a text that is not empty"))
    if "events" not in table:
        hint = 'write events = "runs/NAME/events/rank-*.jsonl"'
        found.append(_problem("progress.events", None, "must name the files that tell the step", hint))
    problems += found
    return None if found else Progress(**table)


_TYPES: dict[str, tuple[type, ...]] = {
    "do": (str,), "at_s": (int, float), "at_step": (int,), "rank": (int,), "host": (int,), "silent": (bool,),
    "rate": (str, int, float), "for_s": (int, float),
}  # fmt: skip
_TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _read_action(table: object, where: str, problems: list[Problem]) -> ScenarioAction | None:
    """One [[action]]; what is wrong with its keys and types goes to `problems`, the rest is for `scenario_problems`."""
    if not isinstance(table, Mapping):
        problems.append(_problem(where, table, "must be a table", 'write [[action]] with do = "kill"'))
        return None
    found = _unknown(table, tuple(_TYPES), where=where)
    for key, types in _TYPES.items():
        value = table.get(key)
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            found.append(_problem(f"{where}.{key}", value, f"must be {_TYPE_NAMES[types[-1]]}"))
    if "do" not in table:
        found.append(
            _problem(f"{where}.do", None, "must say what happens", "legal: " + ", ".join(RANK_OR_HOST + HOST_ONLY))
        )
    values = {k: v for k, v in table.items() if k != "rate"}
    if "rate" in table and not any(p.where == f"{where}.rate" for p in found):
        values["bit_per_s"], problem = read_rate(table["rate"], where=f"{where}.rate")
        found += [problem] if problem else []
    problems += found
    return None if found else ScenarioAction(**values)


def scenario_problems(scenario: Scenario, *, spec: ClusterSpec) -> list[Problem]:
    """Everything that is wrong with a scenario on this cluster."""
    problems = []
    for i, action in enumerate(scenario.actions):
        problems += _action_problems(action, f"action[{i}]", spec)
        problems += _effect_problems(action, f"action[{i}]", scenario, spec)
    steps = [a.at_step for a in scenario.actions if a.at_step is not None]
    if steps and scenario.progress is None:
        hint = 'write [progress] with events = "runs/NAME/events/rank-*.jsonl"'
        problems.append(_problem("progress", None, "at_step needs to know where the job tells its step", hint))
    if scenario.progress is not None and not steps:
        problems.append(
            _problem("progress", scenario.progress.events, "has no effect: no action has at_step", "remove it")
        )
    return problems


def _action_problems(a: ScenarioAction, where: str, spec: ClusterSpec) -> list[Problem]:
    """Rules that one action has to keep by itself."""
    out = []
    if a.do not in RANK_OR_HOST + HOST_ONLY:
        out.append(_problem(f"{where}.do", a.do, "is not an action", nearest(a.do, RANK_OR_HOST + HOST_ONLY)))
    if (a.at_s is None) == (a.at_step is None):
        given = {"at_s": a.at_s, "at_step": a.at_step}
        out.append(_problem(where, given, "needs exactly one of at_s and at_step", "write at_s = 2.0"))
    if a.at_s is not None and not 0 <= a.at_s < math.inf:
        out.append(_problem(f"{where}.at_s", a.at_s, "must be finite and not negative", "write at_s = 0"))
    if a.at_step is not None and a.at_step < 0:
        out.append(_problem(f"{where}.at_step", a.at_step, "must not be negative", "write at_step = 0"))
    if (a.rank is None) == (a.host is None):
        given = {"rank": a.rank, "host": a.host}
        out.append(_problem(where, given, "needs exactly one of rank and host", "write host = 0"))
    for name, index, count in (("rank", a.rank, spec.world), ("host", a.host, spec.hosts)):
        if index is not None and not 0 <= index < count:
            hint = f"the nearest is {min(max(index, 0), count - 1)}"
            out.append(_problem(f"{where}.{name}", index, f"the cluster has {name}s 0 to {count - 1}", hint))
    if a.for_s is not None and not 0 < a.for_s < math.inf:
        out.append(_problem(f"{where}.for_s", a.for_s, "must be above 0 and finite", "write for_s = 1.0"))
    return out


def _effect_problems(a: ScenarioAction, where: str, scenario: Scenario, spec: ClusterSpec) -> list[Problem]:
    """Settings that do not fit the action, and actions that undo what is never done."""
    out = []
    if a.do in HOST_ONLY and a.rank is not None:
        out.append(_problem(f"{where}.rank", a.rank, f"{a.do} acts on the link of a host", "write host = ..."))
    if a.silent and (a.do != "kill" or a.rank is not None):
        out.append(_problem(f"{where}.silent", True, "has an effect only on the kill of a host", "remove it"))
    if a.for_s is not None and a.do not in UNDONE_BY:
        out.append(_problem(f"{where}.for_s", a.for_s, f"has an effect only on {', '.join(UNDONE_BY)}", "remove it"))
    if (a.bit_per_s is not None) != (a.do == "rate"):
        rule = "rate needs a rate" if a.do == "rate" else f"has no effect on {a.do}"
        out.append(
            _problem(f"{where}.rate", a.bit_per_s, rule, 'write rate = "100mbit"' if a.do == "rate" else "remove it")
        )
    elif a.bit_per_s is not None and not MIN_RATE <= a.bit_per_s <= MAX_RATE:
        out.append(_problem(f"{where}.rate", a.bit_per_s, "the testbed shapes links from 100 kbit/s to 1 Tbit/s"))
    before = _NEEDS_BEFORE.get(a.do)
    if before and not any(b.do in before and _covers(b, a, spec) for b in scenario.actions):
        out.append(
            _problem(
                where, f"{a.do} {a.target}", f"has no effect: no action does {' or '.join(before)} there", "remove it"
            )
        )
    return out


def _covers(earlier: ScenarioAction, later: ScenarioAction, spec: ClusterSpec) -> bool:
    """Whether what `earlier` did to its target can be undone at the target of `later`."""
    if earlier.for_s is not None:
        return False  # it ends by itself
    if later.host is not None:
        return earlier.host == later.host
    return earlier.rank == later.rank

"""C3: ranks that share the card are killed in the middle of a step, again and again; the others abort their messages, form the next generation, and train on.

Four ranks, each expert on two of them, whose layers run again in the backward pass: what is launched behind an aborted message must index nothing by it. After a kill three go on with another mapping, so that state moves, until the new process in the place of the lost one has come; then they are four again.
What is told is what each survivor saw between the kill and its next step, and where threads stood that were still for long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.clock import now_s
from phalanx.core.config import Recipe
from phalanx.core.events import Event
from phalanx.runtime.comm import devices
from phalanx.runtime.membership import member
from phalanx.train.recovery import train_elastic
from phalanx.train.recovery.watch import MemberWatch, Phase
from phalanx_lab.bench.cluster import write_text
from phalanx_lab.bench.storm.chaos_cluster import EventFile
from phalanx_lab.gpu_check.cards import on_cards
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.whole_runs import (
    PATIENCE_S,
    WATCHDOG_S,
    Ended,
    recipe_of,
    run_bounded,
    steps_of,
    tell_end,
    tell_state,
    train_still,
    where_threads_stand,
    worst_difference,
)

RANKS = 4
Kills = Mapping[Phase, tuple[int, int]]
"""Phase -> the slot that is killed in it, at the first step of all ranks after so many."""
KILLS: Kills = {"backward": (1, 2), "all-to-all": (2, 5), "commit": (3, 8)}
AFTERWARDS = 5
"""Steps after the last of these numbers: the new process comes in one of them."""
SETTINGS: Mapping[str, object] = {
    "train.global_batch": 14,
    "train.recompute": "full",
    "router.bias_rate": 0.01,
    "checkpoint.asynchronous": "false",
}
KILLED_S = 75.0
"""The run with kills ends after so long, and is told as far as it came: it takes about 40 s, and the check is killed in the end without a word."""
NEXT_STEP_S = 10.0
"""From a kill to the next step of the last survivor, at most."""
LOSSES = 1e-5
"""Relative difference of a loss from the undisturbed run, at most: other numbers of ranks round otherwise."""
STILL_S = 6.0
"""A thread that has not come to another phase for so long says where it stands."""
SAID = 300
"""Characters of what made a member leave its generation."""
TOLD = ("Reformed", "Committed", "TeamFormed", "Note", "MemberLost")
Told = Mapping[str, Any]


class TellFile(EventFile):
    """Also takes lines that are no events, and of events those that are `TOLD`."""

    def say(self, kind: str, **more: object) -> None:
        os.write(self._fd, json.dumps({"kind": kind, **more}).encode() + b"\n")

    def tell(self, event: Event, /) -> None:
        if type(event).__name__ in TOLD:
            self(event)


class KillWatch:
    """A `Watch` (`train/recovery/watch.py`) of a host whose members are killed."""

    def __init__(self, folder: Path, kills: Kills) -> None:
        self.folder, self.kills = folder, kills
        self.host = TellFile(folder / "host.jsonl").tell

    def member(self, slot: int) -> MemberWatch:
        """Called in the worker's own process."""
        return KilledMember(self.folder, slot, self.kills)


class NotedBackend:
    """A communicator whose abort is timed; what it complains about is told too."""

    def __init__(self, inner: Any, file: TellFile) -> None:
        self._inner, self._file = inner, file

    def abort(self) -> None:
        begin_s, said = now_s(), ""
        self._file.say("AbortBegun", at_s=begin_s)
        try:
            self._inner.abort()
        except RuntimeError as err:
            said = str(err)[:300]
            raise
        finally:
            self._file.say("Aborted", at_s=begin_s, seconds=now_s() - begin_s, said=said)


class KilledMember:
    """A `MemberWatch`: writes down what the member tells, kills it where that is due, and holds steps of too few members until the new one is there."""

    def __init__(self, folder: Path, slot: int, kills: Kills) -> None:
        self.folder, self.slot, self.kills = folder, slot, kills
        name = f"{slot}-{os.getpid()}"
        self._file, self._still = TellFile(folder / f"member-{name}.jsonl"), (folder / f"still-{name}").open("w")
        self._members = self._generation = self._steps = 0
        abort, failed = devices._abort, member._Loop._failed
        devices._abort = lambda backend: abort(NotedBackend(backend, self._file))

        def told(loop: Any, work: Any) -> bool:
            broken = failed(loop, work)
            if broken:
                self._file.say("Failed", at_s=now_s(), step=loop.failures[-1][0], text=loop.failures[-1][1][:SAID])
            return broken

        member._Loop._failed = told  # type: ignore[assignment,method-assign]

    def phase(self, name: Phase, step: int) -> None:
        """Comes from the member's own thread."""
        self._file.say("Phase", at_s=now_s(), phase=name, step=step)
        if name == "waits":
            (self.folder / f"there-{os.getpid()}").touch()
        if name == "data" and self._steps and 0 < self._members < RANKS:
            self._hold()
        victim, after = self.kills.get(name, (-1, 0))
        dead = self.folder / f"killed-{name}"
        if victim == self.slot and self._members == RANKS and step >= after and not dead.exists():
            dead.touch()
            self._file.say("Killed", at_s=now_s(), phase=name, slot=self.slot, step=step, generation=self._generation)
            os.kill(os.getpid(), signal.SIGKILL)
        faulthandler.dump_traceback_later(STILL_S, file=self._still)

    def _hold(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        end_s = time.monotonic() + WATCHDOG_S - STILL_S
        while len(list(self.folder.glob("there-*"))) < RANKS + len(list(self.folder.glob("killed-*"))):
            if time.monotonic() > end_s:
                return
            time.sleep(0.02)
        time.sleep(0.4)

    def tell(self, event: Event, /) -> None:
        """Comes from the member's own thread."""
        kind = type(event).__name__
        if kind == "Reformed":
            record = event.to_record()
            self._members, self._generation, self._steps = record["members"], record["generation"], 0
        self._steps += kind == "Committed"
        self._file.tell(event)


def check_healing(here: Here) -> None:
    """C3."""
    few: Kills = {"backward": KILLS["backward"]}
    kills = here.pick(KILLS, few)
    steps = max(after for _, after in kills.values()) + AFTERWARDS
    settings = {**SETTINGS, "train.steps": steps, "checkpoint.interval": steps}
    with tempfile.TemporaryDirectory(prefix="phalanx-healing-") as name:
        folder = Path(name)
        write_text(folder / "text")
        calm = recipe_of(folder, "calm", **settings, resilience__heal="false")
        tell_end(here, "undisturbed", train_still(calm, still_s=PATIENCE_S))
        settings |= {"resilience.heal": "true", "launch.ranks": RANKS, "folding.ep": 2}
        hurt = recipe_of(folder, "hurt", **settings, launch__device=here.device.type)
        watched = folder / "watched"
        watched.mkdir()
        still_s, limit_s = here.pick((WATCHDOG_S, KILLED_S), (PATIENCE_S, math.inf))
        try:
            ended = _train_killed(hurt, watched, kills, still_s=still_s, limit_s=limit_s)
        finally:
            if here.keep is not None:
                shutil.copytree(watched, here.keep, dirs_exist_ok=True)
        tell_end(here, "killed", ended)
        here.tell("printed", ended.words if ended.code == 0 else "")
        told = [record for file in sorted(watched.glob("*.jsonl")) for record in _records(file)]
        tell_kills(here, told, kills)
        still = [f"{file.name}\n{where_threads_stand(file.read_text())}" for file in watched.glob("still-*")]
        here.tell("stood still", [text for text in still if "\n  File" in text])
        here.tell("largest difference of a loss", worst_difference(steps_of(hurt), steps_of(calm)), most=LOSSES)
        if ended.code == 0:
            tell_state(here, "killed", hurt, calm)


def _train_killed(recipe: Recipe, watched: Path, kills: Kills, *, still_s: float, limit_s: float) -> Ended:
    def program() -> int:
        with on_cards():
            return train_elastic(recipe, threads=1, watch=KillWatch(watched, kills))

    def marks() -> int:
        return sum(file.stat().st_size for file in watched.iterdir())

    return run_bounded(program, folder=watched, marks=marks, still_s=still_s, limit_s=limit_s)


def _records(file: Path) -> Iterator[Told]:
    """Its lines, each with the worker's number; the last one of a killed process may be cut."""
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield {**json.loads(line), "worker": file.stem.removeprefix("member-")}


def tell_kills(here: Here, told: Sequence[Told], kills: Kills) -> None:
    """What survivors saw after each kill, who else was lost, and what they were warned of."""
    killed = {r["phase"]: r for r in told if r["kind"] == "Killed"}
    here.tell("kills", len(killed), least=len(kills))
    for phase, kill in killed.items():
        for text, value in after_kill(kill, told).items():
            if math.isfinite(value):
                here.tell(f"{phase}: {text}", value)
        next_s = max(_next_steps(kill, told).values(), default=math.inf)
        here.tell(f"{phase}: next step s", next_s, most=NEXT_STEP_S if here.on_gpu else PATIENCE_S)
        here.tell(f"{phase}: survivors that went on", len(_next_steps(kill, told)), least=RANKS - 1)
    last_kill = max((kill["generation"] for kill in killed.values()), default=0)
    formed = [r for r in told if r["kind"] == "Reformed" and r["generation"] > last_kill]
    here.tell("members at the end", max(formed, key=lambda r: r["generation"])["members"] if formed else 0, least=RANKS)
    checked = [r["checked"] for r in told if r["kind"] == "TeamFormed" and r["generation"] > 1]
    here.tell("pieces of state compared between members", min(checked, default=0), least=1)
    aborts = [r for r in told if r["kind"] == "Aborted"]
    here.tell("aborts", len(aborts))
    here.tell("aborts that did not end", sum(r["kind"] == "AbortBegun" for r in told) - len(aborts), most=0)
    here.tell("complaints of aborts", sorted({r["said"] for r in aborts}))
    here.tell("lost", [[r["uid"], r["why"]] for r in told if r["kind"] == "MemberLost"])
    left = sorted((r for r in told if r["kind"] == "Failed"), key=lambda r: r["at_s"])
    here.tell("left because", [f"{r['worker']}, step {r['step'] + 1}: {r['text']}" for r in left])
    last = {r["worker"]: r for r in told if r["kind"] == "Phase"}
    end_s = max((r["at_s"] for r in last.values()), default=0.0)
    lines = [
        f"{w}: {r['phase']} of step {r['step'] + 1}, {end_s - r['at_s']:.2f} s before the end" for w, r in last.items()
    ]
    here.tell("last phases", lines)
    here.tell("warnings", sorted({r["text"] for r in told if r["kind"] == "Note" and r["level"] == "warning"}))


def _next_steps(kill: Told, told: Sequence[Told]) -> dict[str, float]:
    """Survivor -> seconds from the kill to its first step in a generation after it."""
    found: dict[str, float] = {}
    lived = {r["worker"] for r in told if r["kind"] == "Reformed" and r["generation"] == kill["generation"]}
    for r in told:
        if (
            r["kind"] == "Committed"
            and r["generation"] > kill["generation"]
            and not r["doubt"]
            and r["worker"] in lived
        ):
            found[r["worker"]] = min(found.get(r["worker"], math.inf), r["at_s"] - kill["at_s"])
    return found


def after_kill(kill: Told, told: Sequence[Told]) -> dict[str, float]:
    """Seconds of the phases of a recovery, each of the survivor that took longest."""
    begin_s, until = kill["at_s"], _next_steps(kill, told)
    last_s = max(until.values(), default=math.inf)

    def most(kind: str, value: str, *, less: float = 0.0) -> float:
        near = [
            r for r in told if r["kind"] == kind and begin_s <= r.get("at_s", r.get("time_s", 0)) <= begin_s + last_s
        ]
        return max((r[value] - less for r in near if r["worker"] in until), default=math.nan)

    return {
        "supervisor knew s": most("Reformed", "lost_s", less=begin_s),
        "survivors told s": most("Reformed", "told_s"),
        "abort began s": most("AbortBegun", "at_s", less=begin_s),
        "abort took s": most("Aborted", "seconds"),
        "seen broken s": most("Reformed", "broken_s", less=begin_s),
        "dropped, decided, connected s": most("TeamFormed", "noticed_s"),
        "of it connecting s": most("Reformed", "formed_s"),
        "built s": most("TeamFormed", "built_s"),
        "state moved s": most("TeamFormed", "moved_s"),
        "state moved bytes": most("TeamFormed", "moved_bytes"),
        "formed again s": most("Reformed", "at_s", less=begin_s),
    }

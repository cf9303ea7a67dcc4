"""One run as the page sees it: its index kept up to date, and what is sent of it.

Decides how much is sent: `GROUPS` groups of steps of each figure, and of each list the newest. What has changed since a browser asked last is sent alone: the groups from the last it
has, and lists that have grown.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import DataError, printable
from phalanx.core.events import StatePlaced
from phalanx.core.reading import MalformedError
from phalanx.observe import event_of, read_line, recipe_values
from phalanx.observe.index import COLUMNS, KEPT, START_S, ChangedLogError, LogFiles, RunIndex
from phalanx.observe.page.mapping import as_told, in_order, who_holds

GROUPS = 400
"""Most groups of steps of a curve that are sent."""
MOST_VALIDATIONS = 1000
SLICE_S = 0.1
SILENT_S = 30.0
STARTS_S = 600.0
"""Of text that is prepared before the first event nothing is heard for minutes."""
PEEK_BYTES = 1 << 18
MOST_RUNS = 1000
SAME_S = 5.0
"""Ranks tell the same step so far apart at most, or one of them is lost."""


class RunView:
    """`id` is what the page calls it. Threads may share it."""

    def __init__(self, folder: Path, *, id: str) -> None:
        self.folder, self.id = folder, id
        self.name = printable(folder.name or str(folder))
        self.index = RunIndex(folder)
        self.progress: float | None = None
        """Share of the logs that was read, while an index is made; None: it is there."""
        self.problem = ""
        self.asked_s = 0.0
        """When somebody wanted it last (monotonic)."""
        self.tokens: float | None = None
        """An estimate, where most steps were not seen; None: those of the index."""
        self._opened = False
        self._lock = threading.Lock()

    def open(self) -> None:
        """Take up the index on disk, and what the logs have more where that is quick."""
        with self._lock:
            self.asked_s = time.monotonic()
            if not self._opened:
                self._opened = True
                self.index.load()
                self._read_on(SLICE_S)

    def advance(self) -> bool:
        """Read the logs on for a moment; whether anything is new."""
        with self._lock:
            before = self.index.version, self.progress, self.problem
            self._read_on(SLICE_S)
            return (self.index.version, self.progress, self.problem) != before

    def _read_on(self, most_s: float) -> None:
        begin_s, was_making = time.monotonic(), self.progress is not None
        try:
            for done, todo in self.index.read_on():
                if time.monotonic() - begin_s >= most_s:
                    self._making(done, todo)
                    return
            self.problem = ""
        except OSError as error:
            self.problem = f"the event log cannot be read ({error.strerror or 'not a file'})"
        except Exception as error:  # of one run: the others are shown all the same
            self.index.forget()
            self.problem = f"the event log cannot be understood ({type(error).__name__})"
        self.progress = None
        if was_making:
            with contextlib.suppress(OSError):
                self.index.save()

    def _making(self, done: int, todo: int) -> None:
        read = sum(place.offset for place in self.index.places.values())
        whole = read - done + todo
        self.progress = min(0.999, read / whole) if whole else 0.0

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """A line of the list of runs."""
        with self._lock:
            return {"id": self.id, "folder": self.name, "version": self.index.version, **self._head()}

    def snapshot(self, *, known: int = 0, width: int = 0, first: int = 1) -> dict[str, Any]:
        """The run. `known`, `width`, `first`: the version, the steps of a group, and the first step of the last group that the browser has; as they are: all is sent."""
        with self._lock:
            index = self.index
            if known < index.revised:  # of what the browser has, something is another now
                known = width = 0
            same_width = width > 0 and index.curves.group_width(GROUPS) == width
            curves = self._curves(GROUPS, first=first, group=width) if same_width else self._curves(GROUPS, first=1)
            layers = index.layers
            return {
                "id": self.id, "folder": self.name, "version": index.version, "progress": self.progress, "problem": self.problem,
                "head": self._head(), "curves": curves, **self._lists(known),
                "layers": None if layers is None else {"rows": layers.cells, **_heat(layers.width, layers.codes())},
                "experts": {"layers": self._expert_layers(), "experts": index.shape[1]},
            }  # fmt: skip

    def zoom(self, first: int, last: int) -> dict[str, Any]:
        """The steps from `first` to `last`, as fine as the index has them."""
        with self._lock:
            return self._curves(2 * GROUPS, first=first, last=last)

    def experts(self, layer: int) -> dict[str, Any]:
        """Loads of the experts of a layer over time; empty where there is no such layer."""
        with self._lock:
            layers, experts = self.index.shape
            if self.index.experts is None or not 0 <= layer < layers:
                return {}
            codes = self.index.experts.codes(slice(layer * experts, (layer + 1) * experts))
            return {"layer": layer, "rows": experts, **_heat(self.index.experts.width, codes)}

    def holders(self, at: float | None = None) -> dict[str, Any]:
        """Who holds what since `at`; None: now. A log that does not tell has a label, by which experts lie in order, but for those with replicas. Raises `KeyError` where nothing was told
        then, `OSError`."""
        with self._lock:
            label, (layers, experts), placed = self._team().get("folding"), self.index.shape, self.index.course.placed
            found = [e for e in placed if e["at"] == at] if at is not None else placed[-1:]
            if at is None and found and found[0]["folding"] != label:  # what is so now is not told yet
                found = []
            told = read_placed(self.index.files, found[0]) if found else None
        if at is not None and not found:
            raise KeyError(at)
        if found:
            return who_holds(None if told is None else as_told(told))
        ordered = "resilience.slots_per_rank" not in recipe_values(self.folder)
        return who_holds(in_order(label, layers=layers, experts=experts if ordered else 0))

    def _expert_layers(self) -> list[int]:
        """Numbers of the layers with experts, as the model counts; in their order where the log does not tell."""
        many, placed = self.index.shape[0], self.index.course.placed[-1:]
        try:
            told = read_placed(self.index.files, placed[0]) if placed else None
        except OSError:  # the run goes on without it
            told = None
        return list(range(many) if told is None or len(told.expert_layers) != many else told.expert_layers)

    def _team(self) -> dict[str, Any]:
        """The newest start, or the newest team of an elastic run since then; whoever joins it tells of a start, too."""
        started = self.index.course.started
        team = max(self.index.course.recoveries, key=lambda r: float(r["at"]), default=started)
        return team if team.get("at", 0.0) >= started.get("at", 0.0) - START_S else started

    def _curves(self, most: int, *, first: int, last: int | None = None, group: int = 0) -> dict[str, Any]:
        width, begin, low, mean, high, times = self.index.curves.joined(most, first=first, last=last, width=group)
        found: dict[str, Any] = {
            "width": width,
            "first": begin,
            "times": [round(t, 1) for t in times.tolist()],
            "mean": {},
        }
        ranges: dict[str, Any] = {}
        for i, name in enumerate(COLUMNS):
            if np.isfinite(mean[:, i]).any():
                found["mean"][name] = _short(mean[:, i])
                if width > 1:
                    ranges[name] = [_short(low[:, i]), _short(high[:, i])]
        return {**found, "range": ranges}

    def _lists(self, known: int) -> dict[str, Any]:
        """Those that have changed since."""
        found: dict[str, Any] = {
            n: getattr(self.index.course, n) for n in KEPT if not known or self.index.touched.get(n, 0) > known
        }
        if "validations" in found:
            validations = [[v["step"], v["loss"]] for v in found["validations"]]
            stride = -(-len(validations) // MOST_VALIDATIONS) or 1
            found["validations"] = validations[::-1][::stride][::-1]
        return found

    def _head(self) -> dict[str, Any]:
        course, now_s = self.index.course, time.time()
        heard_s = course.heard_s or written_s(self.folder)
        last, started = course.last, course.started
        width, _, _, mean, _, _ = self.index.curves.joined(64, first=max(1, self.index.last_step - 63))
        told = mean[:, COLUMNS.index("step_s")][-64 // min(64, width) :] if len(mean) else mean[:, 0]
        step_s = float(np.nanmean(told)) if np.isfinite(told).any() else None
        total, step = started.get("total_steps"), self.index.last_step
        left_s = max(0, total - step) * step_s if isinstance(total, int) and step_s is not None else None
        validated = course.validations[-1] if course.validations else {}
        team = self._team()
        return {
            **{k: started.get(k) for k in ("run", "world", "total_steps", "num_params", "active_params", "folding", "unigram_loss")},
            **{k: last.get(k) for k in ("loss", "tokens_per_s", "mfu", "peak_memory_bytes", "grad_norm", "lr")},
            "begun_s": min((s["at"] for s in course.starts), default=None),
            "folding_now": team.get("folding"), "members": team.get("members", started.get("world")),
            "step": step, "left_s": left_s, "step_s": step_s, "tokens": self.index.tokens if self.tokens is None else self.tokens, "heard_s": heard_s, "now_s": now_s,
            "validation": validated.get("loss"), "validation_step": validated.get("step"), "broken": course.broken,
            **self._status(now_s - (heard_s or now_s), step_s or 0.0),
        }  # fmt: skip

    def _status(self, unheard_s: float, step_s: float) -> dict[str, Any]:
        course, ended = self.index.course, self.index.course.ended
        if ended is not None:
            reason = ended["reason"] if isinstance(ended["reason"], str) else ""
            words = {"finished": "finished", "interrupted": "stopped"}
            return {"status": words.get(reason, "failed"), "reason": "" if reason in words else reason}
        if not course.started and not course.last:
            status = "starting" if unheard_s <= STARTS_S else "silent"
            return {"status": status, "reason": "no event was logged yet"}
        if unheard_s > max(SILENT_S, 20 * step_s):
            return {"status": "silent", "reason": ""}
        return {"status": "training" if course.last else "starting", "reason": ""}


def peek(folder: Path, *, id: str) -> RunView:
    """A view for a line of a list, in milliseconds: from the index, or from the first and the last lines of its log."""
    view = RunView(folder, id=id)
    if view.index.load():
        view._read_on(SLICE_S)
        view.progress = None
        return view
    files = LogFiles(folder)
    with contextlib.suppress(OSError):
        names = files.names()
        if not names:
            return view
        first, newest = names[0], _newest(files, names)
        with files.open(first) as handle:
            parts = [os.pread(handle, PEEK_BYTES, 0)]
        with files.open(newest) as handle:
            size = os.fstat(handle).st_size
            begin = max(PEEK_BYTES if newest == first else 0, size - PEEK_BYTES)
            tail = os.pread(handle, PEEK_BYTES, begin)
            parts.append(tail.partition(b"\n")[2] if begin else tail)
        for part in parts:
            view.index.take_lines(part[: part.rfind(b"\n") + 1].split(b"\n")[:-1])
        if size > PEEK_BYTES:  # most steps were not seen: as many tokens each as the newest has
            view.tokens = view.index.course.last.get("tokens", 0.0) * view.index.last_step
    return view


def _newest(files: LogFiles, names: list[str]) -> str:
    """The log that tells the newest steps: the first, while its rank lives. Raises `OSError`."""
    times = {name: at for name, at in files.times().items() if name.startswith("rank-")}
    newest = max(times, key=lambda name: times[name], default=names[0])
    return names[0] if times.get(names[0], 0.0) > times.get(newest, 0.0) - SAME_S else newest


def find_runs(folder: Path) -> list[Path]:
    """Run folders below `folder`, by name: folders with `events`, no links; the `MOST_RUNS` that were written last. Raises `OSError`."""
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    found = [folder / name for name in names if os.path.isdir(folder / name / "events")]  # False where we may not look
    found = [p for p in found if not (p / "events").is_symlink()]
    return found if len(found) <= MOST_RUNS else sorted(sorted(found, key=written_s)[-MOST_RUNS:])


def written_s(folder: Path) -> float:
    """When the newest of its logs was written last, or the folder that they are to lie in; 0 where there is none."""
    try:
        return max(LogFiles(folder).times().values(), default=0.0) or os.stat(folder / "events").st_mtime
    except OSError:
        return 0.0


def read_placed(files: LogFiles, entry: dict[str, Any]) -> StatePlaced | None:
    """The event that an entry of `RunCourse.placed` names; None where the log has another one there. Raises `OSError`."""
    if entry["log"] not in files.names():  # it may be an index's word
        return None
    try:
        line = next(files.lines_from(entry["log"], max(0, int(entry["offset"])), most=1), b"")
        found = event_of(read_line(files.folder / "events" / entry["log"], 0, line))
    except (DataError, MalformedError, ChangedLogError):
        return None
    return found if isinstance(found, StatePlaced) else None


def _short(values: Any) -> list[float | None]:
    """Five digits are more than a chart shows."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values.tolist()]


def _heat(width: int, codes: Any) -> dict[str, Any]:
    return {"width": width, "columns": len(codes), "codes": base64.b64encode(codes.tobytes()).decode("ascii")}

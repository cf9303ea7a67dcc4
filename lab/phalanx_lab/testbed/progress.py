"""Reads the step of a running job from the files that it writes: JSON lines, one of which ends each step.

What stood in the files when the job began is an earlier run's and is skipped. A line is read once it is whole; lines that are no JSON
are skipped, because a rank may be killed in the middle of one.
"""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass, field
from pathlib import Path

from phalanx_lab.testbed.scenario import Progress


@dataclass
class StepWatcher:
    """`step` is the highest step that any file has told since the watcher was made; -1 before the first."""

    progress: Progress
    folder: Path
    """Relative patterns start here."""
    step: int = -1
    _offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._offsets = {name: Path(name).stat().st_size for name in self._files()}

    def _files(self) -> list[str]:
        return sorted(glob.glob(str(self.folder / self.progress.events), recursive=True))

    def update(self) -> int:
        """Read what was written since the last call; the highest step so far."""
        for name in self._files():
            self._read(name)
        return self.step

    def _read(self, name: str) -> None:
        try:
            with open(name, "rb") as file:
                start = self._offsets.get(name, 0)
                if file.seek(0, 2) < start:
                    start = 0  # written anew
                file.seek(start)
                text = file.read()
        except OSError:
            return  # removed since it was listed
        whole = text.rfind(b"\n") + 1
        self._offsets[name] = start + whole
        for line in text[:whole].splitlines():
            step = self._step_of(line)
            if step is not None:
                self.step = max(self.step, step)

    def _step_of(self, line: bytes) -> int | None:
        try:
            record = json.loads(line)
        except ValueError:
            return None
        if not isinstance(record, dict) or record.get("kind") != self.progress.kind:
            return None
        step = record.get(self.progress.key)
        return step if isinstance(step, int) and not isinstance(step, bool) else None

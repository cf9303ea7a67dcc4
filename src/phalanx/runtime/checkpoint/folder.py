"""The folder of a run's checkpoints on disk: names, the readable run state, integrity, atomic appearance and disappearance.

    checkpoints/step-00000100/{.metadata, __0_0.distcp, ..., run_state.json}   complete, always
    checkpoints/latest                                                        the name of the newest, replaced last
    checkpoints/.writing-step-00000150/                                       being written; removed at the next start
    checkpoints/.writing-step-00000150-g7-1f3a.../                            the same by a generation of an elastic run
    checkpoints/.deleting-step-00000050/                                      being deleted; removed at the next start
    checkpoints/abandoned/step-00000200/                                      complete, of a history that the run went back behind

Must never change: a folder called `step-N` is complete. It gets that name by one rename after all its files and the folder itself
were flushed to the disk, and loses it by one rename before the first of its files goes. A generation writes into folders of its own, and asks whether
it is still the one that trains before it changes what others see. This file holds no tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError, Problem
from phalanx.core.files import draft_of
from phalanx.core.messages import message
from phalanx.core.reading import MalformedError, open_regular, parse_table, read_text, typed
from phalanx.runtime.checkpoint.failures import refusal_hint

STATE_FILE = "run_state.json"
LATEST_FILE = "latest"
ABANDONED = "abandoned"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,18})")
_WRITING, _DELETING, _REPLACED = ".writing-", ".deleting-", ".replaced-"
_WRITTEN_BY = re.compile(r"-g(\d{1,18})-([0-9a-f]+)$")


@message
@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file must look like."""

    bytes: int
    sha256: str


@message
@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything about a run at the end of a step that is not a tensor; kept as readable JSON next to the tensors."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Sequences consumed."""
    tokens: int
    seed: int
    loader: Mapping[str, Any]
    """What decides which samples form the next steps (`data/loader.py`)."""
    model: Mapping[str, Any]
    """The model's shape, field by field."""
    model_hash: str
    recipe_hash: str
    folding: Mapping[str, Any]
    """Degrees of its mapping: of all stages, or of each."""
    world: int
    versions: Mapping[str, str]
    created: str = ""
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n"


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_state(text: str, *, where: str) -> RunState:
    """The state in a `run_state.json`. Raises `CheckpointError` if it is not what was once written."""
    try:
        body = parse_table(text, where=where)
        found = _checksum({k: v for k, v in body.items() if k != "checksum"})
        told = typed(body.pop("checksum"), str, where="checksum")
        if (version := body.pop("format")) != FORMAT:
            raise ValueError(f"format {version}, this program reads {FORMAT}")
        state: RunState = typed(body, RunState, where=where)
    except (ValueError, KeyError) as err:
        why = err.problems[0] if isinstance(err, MalformedError) else f"{type(err).__name__}: {err}"
        rule = f"must be a whole run state ({why})"
        raise CheckpointError.of(where, text[:40], rule, subject="checkpoint") from err
    if found != told:
        rule = f"was written with checksum {told[:12]}; the file was edited or damaged"
        raise CheckpointError.of(where, f"checksum {found[:12]}", rule, subject="checkpoint")
    return state


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a file (`sha256sum` prints the same)."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def flush_folder(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(path: Path, text: str | bytes) -> None:
    """Replace `path` by `text` in one step, on the disk when this returns."""
    temporary = draft_of(path)
    try:
        with temporary.open("wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A generation that writes checkpoints. One of its ranks may stand still in any line, and go on when other members write."""

    generation: int
    life: str
    """Life of the membership service, whose generations are numbered together."""
    check: Callable[[], None]
    """Raises `PeerError` where the service says that the generation is over."""

    @property
    def mark(self) -> str:
        return f"-g{self.generation}-{hashlib.sha256(self.life.encode()).hexdigest()[:8]}"

    def may_remove(self, name: str) -> bool:
        """Whether what was being written under `name` is of no later generation."""
        match = _WRITTEN_BY.search(name)
        return match is None or match[2] != self.mark.rpartition("-")[2] or int(match[1]) <= self.generation


@dataclass(frozen=True)
class CheckpointFolder:
    """`checkpoints/` of one run. Writing methods are for one rank only; they raise `PeerError` where `writer` has no say any more."""

    path: Path
    writer: Writer | None = None
    """None: there is no other writer."""

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def writing(self, step: int) -> Path:
        return self.path / f"{_WRITING}step-{step:08d}{self.writer.mark if self.writer else ''}"

    def _check(self) -> None:
        if self.writer is not None:
            self.writer.check()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(p.name) for p in self.path.iterdir() if p.is_dir())
        return sorted(int(m[1]) for m in found if m)

    def newest(self) -> int | None:
        """The step that `latest` names; without a usable `latest`, the highest complete one."""
        steps = self.steps()
        try:
            match = _NAME.fullmatch(read_text(self.path / LATEST_FILE, most=1000).strip())
        except (OSError, MalformedError):
            match = None
        if match and int(match[1]) in steps:
            return int(match[1])
        return steps[-1] if steps else None

    def choose(self, step: int | None = None) -> int | None:
        """The step to resume from: the one asked for, or the newest; None where there is none. Raises `CheckpointError` where the one asked for is not there."""
        if step is None:
            return self.newest()
        if step not in self.steps():
            problem = Problem(
                where="checkpoint.step", value=step, rule="there is no such checkpoint", hint=self.list_steps()
            )
            raise CheckpointError([problem], subject="checkpoint")
        return step

    def read_state(self, step: int) -> RunState:
        """The run state of a checkpoint. Raises `CheckpointError` with a way out where there is none that can be read."""
        try:
            return self._read_state(step)
        except CheckpointError as err:
            problems = self.with_way_out(step, err.problems)
            raise CheckpointError(problems, subject=f"the checkpoint {self.of(step)}") from err

    def _read_state(self, step: int) -> RunState:
        path = self.of(step) / STATE_FILE
        try:
            text = read_text(path)
        except (OSError, MalformedError) as err:
            rule, hint = "every checkpoint has a readable run state", refusal_hint(err)
            problem = Problem(where=str(path), value=_reason(err), rule=rule, hint=hint)
            raise CheckpointError([problem], subject="checkpoint") from err
        return parse_state(text, where=str(path))

    def list_steps(self) -> str:
        steps, aside = self.steps(), self.set_aside()
        also = f"; {', '.join(aside)} were set aside in {self.path / ABANDONED}" if aside else ""
        if not steps:
            return f"there is no checkpoint in {self.path}{also}"
        return "there are checkpoints of steps " + ", ".join(map(str, steps)) + also

    def candidates(self) -> list[int]:
        """The newest checkpoint and all before it, from the newest down."""
        newest = self.newest()
        return [s for s in reversed(self.steps()) if newest is not None and s <= newest]

    def set_aside(self) -> list[str]:
        """Names of checkpoints of histories that the run went back behind."""
        home = self.path / ABANDONED
        return sorted(p.name for p in home.iterdir() if p.is_dir()) if home.is_dir() else []

    def go_back(self, step: int) -> list[str]:
        """Training goes on from `step`: later checkpoints belong to an abandoned history, and must never be the newest again.

        They keep their files under `abandoned/`; returns their names there. `latest` is changed first, so that a crash in the middle leaves none of them.
        """
        self._check()
        later = [s for s in reversed(self.steps()) if s > step]
        if not later:
            return []
        write_flushed(self.path / LATEST_FILE, self.of(step).name + "\n")
        home = self.path / ABANDONED
        home.mkdir(exist_ok=True)
        moved = []
        for found in map(self.of, later):
            name = _free_name(home, found.name)
            os.rename(found, home / name)
            moved.append(name)
        flush_folder(home)
        flush_folder(self.path)
        return moved

    def damage(self, step: int, state: RunState, *, index: int = 0, count: int = 1) -> list[Problem]:
        """Files of a checkpoint that are not as they were written; share `index` of `count` of the checking."""
        mine = sorted(state.files.items())[index::count]
        with ThreadPoolExecutor(min(len(mine), os.cpu_count() or 1) or 1) as threads:  # hashes let others run
            found = list(threads.map(lambda own: _file_problem(self.of(step) / own[0], own[1]), mine))
        return [problem for problem in found if problem is not None]

    def is_sound(self, step: int) -> bool:
        """The checkpoint can be read and every byte is as it was written."""
        try:
            return not self.damage(step, self._read_state(step))
        except CheckpointError:
            return False

    def with_way_out(self, step: int, problems: Sequence[Problem]) -> list[Problem]:
        """Problems with a checkpoint, each with what to do about it: the way out, if no other advice is there."""
        way_out = "" if all(p.hint for p in problems) else self.way_out(step)
        return [replace(p, hint=p.hint or way_out) for p in problems]

    def way_out(self, step: int) -> str:
        """What to do about a damaged checkpoint: names the newest earlier one that is sound, and lists all."""
        others = [s for s in self.steps() if s != step]
        for other in sorted(others, key=lambda s: (s > step, abs(s - step))):
            if self.is_sound(other):
                listed = ", ".join(map(str, others))
                return f"--checkpoint.step {other} resumes from a sound one (others here: {listed})"
        return "no other checkpoint here is sound; train anew under another --run.name, or remove that folder"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into."""
        self._check()
        path = self.writing(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, state: RunState) -> Path:
        """Make what was written for `state.step` a checkpoint, and the newest one."""
        written, final = self.writing(state.step), self.of(state.step)
        write_flushed(written / STATE_FILE, state.to_json())
        flush_folder(written)
        self._check()  # as late as can be: what is written is in a folder that no other writer knows
        replaced = self.path / f"{_REPLACED}{final.name}"
        if final.exists():  # the run went back to an earlier step and came by again
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)  # whole, until the new one has its name: `clean` gives it back
        os.rename(written, final)
        flush_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        self._check()  # a newer generation may have saved a later step
        write_flushed(self.path / LATEST_FILE, final.name + "\n")
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written for `step` and give its space back."""
        shutil.rmtree(self.writing(step), ignore_errors=True)

    def prune(self, *, current: int, keep: int) -> list[int]:
        """Delete all but the newest `keep` up to step `current`; later ones belong to a run that went back, and stay."""
        past = [s for s in self.steps() if s <= current]
        gone = past[: max(0, len(past) - keep)]
        if gone:
            self._check()
        self._delete(gone)
        return gone

    def _delete(self, steps: Iterable[int]) -> None:
        for step in steps:
            doomed = self.path / f"{_DELETING}step-{step:08d}"
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(self.of(step), doomed)
            flush_folder(self.path)
            shutil.rmtree(doomed, ignore_errors=True)

    def clean(self) -> list[str]:
        """Remove what an interrupted write or deletion left, but nothing of a later generation; returns the names. A checkpoint that was to be replaced is one again."""
        if not self.path.is_dir():
            return []
        self._check()
        for path in self.path.glob(f"{_REPLACED}*"):
            final = self.path / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, final)
        left = [p for p in self.path.iterdir() if p.name.startswith((_WRITING, _DELETING)) or p.suffix == ".tmp"]
        left = [p for p in left if self.writer is None or self.writer.may_remove(p.name)]
        for path in left:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return sorted(p.name for p in left)


def _free_name(home: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3` ... where a history before has left one of that name."""
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(n for n in names if not (home / n).exists())


def _file_problem(path: Path, expected: FileEntry) -> Problem | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return Problem(where=str(path), value=f"{size} bytes", rule=f"was written with {expected.bytes} bytes")
        found = file_entry(path)
    except OSError as err:
        rule = f"was written with {expected.bytes} bytes"
        return Problem(where=str(path), value=_reason(err), rule=rule, hint=refusal_hint(err))
    if found.sha256 != expected.sha256:
        return Problem(
            where=str(path),
            value=f"sha256 {found.sha256[:16]}...",
            rule=f"was written with sha256 {expected.sha256[:16]}...",
        )
    return None


def _reason(err: Exception) -> str:
    return err.strerror or str(err) if isinstance(err, OSError) else str(err)


def with_files(state: RunState, files: Sequence[Mapping[str, FileEntry]], *, created: str) -> RunState:
    """`state` with the files that the ranks wrote."""
    return replace(state, created=created, files={name: entry for share in files for name, entry in share.items()})

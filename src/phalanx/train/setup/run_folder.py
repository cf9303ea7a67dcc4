"""The folder of a run: what lies where, and how far the run is.

runs/NAME/recipe.toml          the resolved recipe; running it again goes on with this run (recipe-1.toml and so on: those of earlier starts that said something else)
runs/NAME/run_state.json       how far it is (rewritten as it goes; what counts for resuming lies in each checkpoint)
runs/NAME/checkpoints/         see runtime/checkpoint/folder.py
runs/NAME/tokenizer/           what generation needs to read and write text
runs/NAME/events/, tensorboard/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from phalanx.core.config import RECIPE_FILE, STATUS_FILE, Recipe
from phalanx.core.errors import CheckpointError, ConfigError, Problem, RunError, raise_if
from phalanx.core.reading import parse_table
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.data import ChatTemplate, Tokenizer, load_template, load_tokenizer, save_template
from phalanx.plan.model import ModelSpec
from phalanx.runtime.checkpoint import CheckpointFolder, CheckpointManager, write_flushed
from phalanx.train.setup.held_file import hold


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a run is, for people and scripts."""

    status: Literal["running", "finished", "interrupted"]
    step: int
    total_steps: int
    samples: int
    checkpoint_step: int | None
    validation_loss: float | None = None
    unigram_loss: float | None = None


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Of a folder, by name. What they are is mostly known without a question for each, of which a run of many ranks has as many logs."""
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


class RunLock(Protocol):
    """What claims a run."""

    def close(self) -> None:
        """Give it back."""


@dataclass(frozen=True)
class RunFolder:
    """`path` is the run's own folder. Writing methods are for one rank only."""

    path: Path

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    def refuse_mixing(self) -> None:
        """Raises `ConfigError` where a run (`checkpoint.resume` = false) cannot begin anew here."""
        steps = self.checkpoints.steps()
        rule = f"would start over in {self.path}, which holds checkpoints of steps {', '.join(map(str, steps))}"
        hint = "give the run another --run.name, or remove that folder"
        problems = [Problem(where="checkpoint.resume", value=False, rule=rule, hint=hint)] if steps else []
        raise_if(problems, ConfigError, subject="the recipe")

    def trained_text(self, step: int) -> str | None:
        """Fingerprint of what the run was trained on up to the checkpoint of `step`, so that preparation finds it again; None for an import."""
        found = self.checkpoints.read_state(step).loader.get("data")
        return None if found is None else str(found)

    def create(self, *, shared: bool = False) -> None:
        """Make the folder, for this user alone, or (`shared`) readable for its group. One that is there keeps its mode, but for what `shared` adds. Raises `RunError` where that is not possible,
        `ConfigError` where there are links in it."""
        raise_if(self._links(), ConfigError, subject=f"the run folder {self.path}")
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            if shared and (mode := stat.S_IMODE(self.path.stat().st_mode)) | 0o2050 != mode:
                self.path.chmod(mode | 0o2050)
            self.checkpoints.path.mkdir(exist_ok=True)
            (self.path / "tokenizer").mkdir(exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))

    def _links(self) -> list[Problem]:
        """Links among what a run writes. A run folder may have come from a stranger, in an archive, and a link in it may lead to any file of this user."""
        there = _entries(self.path) if self.path.is_dir() else []
        inside = [e for folder in there if folder.is_dir(follow_symlinks=False) for e in _entries(folder.path)]
        rule, hint = "is a link, which a run would write through", "remove it, or put its files there themselves"
        return [
            Problem(where=e.path, value=os.readlink(e.path), rule=rule, hint=hint)
            for e in (*there, *inside)
            if e.is_symlink()
        ]

    def lock(self) -> RunLock:
        """Claim the run for this process until the returned file is closed or the process ends, however it ends.

        Raises `RunError` naming the process that has it. On a file system without locks a file says so that only one process can make; of a process of this machine that was killed it is
        taken over.
        """
        with self._writing():
            file = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise RunError(
                f"{self.path}: another process ({holder or 'unknown'}) trains this run; stop it, or give this one another --run.name"
            ) from None
        except OSError:
            file.close()
            with self._writing():
                return hold(self.path)
        with self._writing():
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        return file

    @property
    def has_recipe(self) -> bool:
        return (self.path / RECIPE_FILE).is_file()

    def write_recipe(self, recipe: Recipe, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """Keep what this run is, so that it can be run and read again from its folder alone. Raises `RunError` where the disk refuses."""
        path, text = self.path / RECIPE_FILE, dump_recipe(recipe)
        with self._writing():
            tokenizer.save(self.path / "tokenizer")  # first: where there is a recipe, there is all that it needs
            save_template(template, self.path / "tokenizer")
            before = path.read_text(encoding="utf-8") if path.is_file() else text
            if before != text:  # what was trained so far stays known
                names = (self.path / f"recipe-{number}.toml" for number in itertools.count(1))
                write_flushed(next(p for p in names if not p.exists()), before)
            write_flushed(path, text)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            where = err.filename or self.path
            rule = f"the run folder cannot be written ({err.strerror})"
            space = "free some space there, or " if err.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise RunError(f"{where}: {rule}; {space}choose another run.folder") from err

    def write_status(self, status: RunStatus) -> None:
        write_flushed(self.path / STATUS_FILE, json.dumps(asdict(status), indent=1) + "\n")

    def read_recipe(self) -> Recipe:
        """Raises `ConfigError` where this is no run folder."""
        path = self.path / RECIPE_FILE
        if not path.is_file():
            runs = (
                sorted(str(p.parent) for p in self.path.parent.glob(f"*/{RECIPE_FILE}"))
                if self.path.parent.is_dir()
                else []
            )
            hint = "runs next to it: " + ", ".join(runs) if runs else "phalanx train makes one"
            problem = Problem(
                where="run", value=str(self.path), rule=f"is not a run folder (it has no {RECIPE_FILE})", hint=hint
            )
            raise ConfigError([problem], subject="the run")
        return load_recipe(path)

    def read_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer")

    def read_template(self, recipe: Recipe) -> ChatTemplate | None:
        """What rendered the conversations of a run; None: ChatML, or there were none."""
        return load_template(recipe.data, self.path / "tokenizer")


def choose_checkpoint(
    run: RunFolder, spec: ModelSpec, step: int | None, *, hint: str = "train it, or import one"
) -> tuple[CheckpointManager, int]:
    """What reads the run's checkpoints from this process alone, and the one of `step` (None: the newest), which is one of `spec`.

    Raises `CheckpointError` where there is none that is sound.
    """
    manager = CheckpointManager(run.checkpoints.path)
    chosen = manager.choose(step)
    if chosen is None:
        problem = Problem(where=str(run.path), value=None, rule="has no checkpoint yet", hint=hint)
        raise CheckpointError([problem], subject="the run")
    manager.read_state(chosen, model=parse_table(spec.to_json(), where="the model"))
    return manager, chosen

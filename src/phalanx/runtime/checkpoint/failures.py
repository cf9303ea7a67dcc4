"""Why tensors of a checkpoint could not be written or read; apart from what writes and reads them, whose import takes a second (`planner.py`)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx.core.errors import CheckpointError, Problem
from phalanx.core.units import format_bytes


class TensorsFailed(Exception):
    """Rank -> what it met."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(failures.items())))
        self.failures = dict(failures)


class WriteFailure(Exception):
    """Why a rank could not write; crosses the process group, so it holds plain values only."""

    def __init__(self, path: str, text: str, hint: str = "") -> None:
        super().__init__(path, text, hint)
        self.path = path
        self.text = text
        self.hint = hint


def write_failure(err: BaseException, path: Path) -> WriteFailure:
    """The operating system's reason behind `err`, which the tensor writer hides under its own error."""
    at: BaseException | None = err
    while at is not None:
        if isinstance(at, OSError) and at.errno is not None:
            return WriteFailure(str(at.filename or path), at.strerror or str(at), refusal_hint(at))
        at = at.__cause__ or at.__context__
    return WriteFailure(str(path), f"{type(err).__name__}: {err}".splitlines()[0])


def refusal_hint(err: BaseException) -> str:
    """What to do where the operating system refuses a file or folder to this user; empty for any other error."""
    return "check its owner and permissions" if isinstance(err, PermissionError) else ""


def failed_save(err: CheckpointError | TensorsFailed, path: Path, *, listed: Callable[[], str]) -> CheckpointError:
    """Failures of ranks to save the checkpoint `path`, as problems that a person can act on. `listed` says which checkpoints are there."""

    def failed(where: str, rule: str, *, value: object, hint: str) -> Problem:
        if not hint:
            hint = "free space there, or lower checkpoint.keep_last"
            with contextlib.suppress(OSError):
                free = format_bytes(shutil.disk_usage(path.parent).free)
                rule += f" ({free} free on the disk of {path.parent})"
        return Problem(
            where=where, value=value, rule=rule, hint=f"nothing saved before was touched ({listed()}); {hint}"
        )

    if isinstance(err, CheckpointError):
        problems = [failed(p.where, p.rule, value=p.value, hint=p.hint) for p in err.problems]
        return CheckpointError(problems, subject="saving a checkpoint")
    problems = []
    alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for rank, cause in sorted(err.failures.items()):
        if isinstance(cause, CheckpointError):
            problems += [p for p in cause.problems if p not in problems]
            continue
        failure = cause if isinstance(cause, WriteFailure) else write_failure(cause, path)
        alike.setdefault((failure.text, failure.hint), []).append((rank, Path(failure.path).name))
    for (text, hint), ((rank, name), *others) in alike.items():  # a disk that is full is so for all ranks
        more = f" and {len(others)} more {'rank' if len(others) == 1 else 'ranks'}" if others else ""
        problems.append(failed(str(path), text, value=f"rank {rank}, {name}{more}", hint=hint))
    return CheckpointError(problems, subject="saving a checkpoint")

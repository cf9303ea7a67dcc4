"""Why tensors of a checkpoint could not be written or read; apart from what writes and reads them, whose import takes a second (`planner.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


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

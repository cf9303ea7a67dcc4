"""What a check is, and what is written of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuCheck:
    """One check: `run` is `module:function` of this room."""

    name: str
    title: str
    run: str
    seconds: float
    """About what it takes on an H100."""
    limit_s: float

    @property
    def stage(self) -> str:
        return self.name[0]


@dataclass(frozen=True, kw_only=True)
class CheckLine:
    """The result of a check, as it stands in the file."""

    check: str
    status: str
    """`pass`, `fail` (a value beyond its bar), `skip` (cannot run here), `error` (ended otherwise, or was killed)."""
    value: dict[str, Any]
    bar: dict[str, str]
    seconds: float
    why: str

    @property
    def is_good(self) -> bool:
        return self.status in ("pass", "skip")

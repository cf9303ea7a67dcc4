"""What installed packages add to Phalanx: model families, pipeline schedules, sinks and data formats, found by their entry points.

Decides which names they may have and what is told of one that cannot be used. An extension is imported when it is first used, not before, and can take no name that Phalanx has itself.
A package adds one by an entry point of its own, `[project.entry-points."phalanx.sinks"]` in its `pyproject.toml` (docs/how-to/extend.md).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal

from phalanx.core.errors import ConfigError, Problem, first_line

Group = Literal["families", "schedules", "sinks", "data_formats"]


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One entry point of an installed package."""

    group: Group
    name: str
    package: str
    """Name and version of the distribution."""
    entry: metadata.EntryPoint

    @property
    def where(self) -> str:
        return f"entry point {self.name} of phalanx.{self.group}, in the package {self.package}"

    def load(self, kind: type | None = None) -> Any:
        """The object itself. Raises `ConfigError` where it cannot be imported, or is not of the class `kind` (None: is not callable)."""
        try:
            found = self.entry.load()
        except Exception as error:  # a stranger's module may raise anything while it is imported
            rule = f"cannot be imported ({type(error).__name__}: {first_line(error)})"
            raise self._error(
                rule, f"repair the package, or uninstall it: pip uninstall {self.package.split()[0]}"
            ) from error
        if kind is not None and not isinstance(found, kind):
            raise self._error(
                f"must be a {kind.__module__}.{kind.__name__}, not a {type(found).__name__}",
                "see docs/how-to/extend.md",
            )
        if kind is None and not callable(found):
            raise self._error(f"must be callable, and is a {type(found).__name__}", "see docs/how-to/extend.md")
        return found

    def _error(self, rule: str, hint: str) -> ConfigError:
        return ConfigError.of(self.where, self.entry.value, rule, hint, subject="an extension")


def extensions(group: Group, *, taken: Collection[str]) -> Mapping[str, Extension]:
    """Name -> extension, by name. Raises `ConfigError` naming all that have a name of Phalanx itself (`taken`), or one that two packages give."""
    found: dict[str, Extension] = {}
    problems = []
    for extension in _installed(group):
        other = found.get(extension.name)
        if extension.name in taken or other is not None:
            whose = "Phalanx itself" if other is None else f"the package {other.package}"
            hint = f"uninstall one of them: pip uninstall {extension.package.split()[0]}"
            rule = f"is a name that {whose} has already"
            problems.append(Problem(where=extension.where, value=extension.name, rule=rule, hint=hint))
        found.setdefault(extension.name, extension)
    if problems:
        raise ConfigError(problems, subject="the extensions")
    return MappingProxyType(found)


@functools.cache
def _installed(group: Group) -> tuple[Extension, ...]:
    """All extensions of a group, by name and package. One distribution may be found twice on a path, as a folder of sources beside what is installed: it counts once."""
    entries = {
        (entry.name, entry.value, _package(entry)): entry for entry in metadata.entry_points(group=f"phalanx.{group}")
    }
    return tuple(
        Extension(group=group, name=name, package=package, entry=entry)
        for (name, _, package), entry in sorted(entries.items(), key=lambda item: item[0])
    )


def _package(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"

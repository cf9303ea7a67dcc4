"""Names of modules, files and functions in docstrings and comments lead somewhere: a reader finds what they name, also after it was moved."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path

import pytest

import phalanx
import phalanx_lab
from phalanx.core.config import Recipe

pytestmark = pytest.mark.unit
ROOMS = [Path(phalanx.__file__).parent, Path(phalanx_lab.__file__).parent]
TOP = ROOMS[0].parent.parent
FILE = re.compile(r"`((?!a/|ProcessGroup)[\w/-]+\.(?:py|cpp|cu))`")
NAME = re.compile(r"`(\w+(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
DOCSTRING = re.compile(r'"""(?:.|\n)*?"""|#[^\n]*')
OTHERS = {*sys.stdlib_module_names, "torch", "dcp", "dist", "np", "F", "nn", "w2", "a"}
SUFFIXES = {"py", "cpp", "cu", "json", "jsonl", "toml"}
OP_IDS = re.compile(r"mb\d+\.|(?:fwd|bwd|attention|combine|dispatch)\.[a-z]+(?:\.[a-z]+)?$|tp\d")
"""Ids of operations, and labels of mappings."""


@cache
def sections() -> dict[str, set[str]]:
    """Settings of each section of a recipe."""
    recipe = Recipe()
    return {f.name: {g.name for g in fields(getattr(recipe, f.name))} for f in fields(Recipe)}


class Sources:
    """All files of the product and the lab."""

    def __init__(self) -> None:
        self.texts = {path: path.read_text() for room in ROOMS for path in sorted(room.rglob("*.py"))}
        self.modules: dict[tuple[str, ...], list[Path]] = defaultdict(list)
        for path in self.texts:
            own = (
                path.relative_to(next(room for room in ROOMS if path.is_relative_to(room)).parent).with_suffix("").parts
            )
            own = own[:-1] if own[-1] == "__init__" else own
            for i in range(len(own)):
                self.modules[own[i:]].append(path)
        self.classes: dict[str, list[Path]] = defaultdict(list)
        for path, text in self.texts.items():
            for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
                self.classes[name].append(path)

    @cached_property
    def files(self) -> set[str]:
        """Ends of the paths of all files that a docstring may name."""
        kept = [p for d in ("src", "lab", "tests", "scripts", "benchmarks", "docs") for p in (TOP / d).rglob("*.*")]
        found = [p.relative_to(TOP).parts for p in kept if p.suffix in (".py", ".cpp", ".cu")]
        return {"/".join(parts[i:]) for parts in found for i in range(len(parts))}

    def leads_nowhere(self) -> Iterator[str]:
        for path, text in self.texts.items():
            where = path.relative_to(TOP)
            if "`" not in text:
                continue
            yield from (f"{where}: {name}" for name in FILE.findall(text) if name not in self.files)
            yield from (f"{where}: {name}" for name in NAME.findall(text) if not self.leads(name, path))

    def leads(self, name: str, path: Path) -> bool:
        """Whether a reader of `path` finds `name`: a module, something in one, a setting, or what the code there calls so."""
        first, *rest = parts = tuple(name.split("."))
        if first in OTHERS or parts[-1] in SUFFIXES or OP_IDS.match(name) or rest[0] in sections().get(first, ()):
            return True
        if first.strip("_")[:1].isupper():
            homes = self.classes.get(first, [])
            return (
                any(re.search(rf"\b{rest[0]}\b", self.texts[home]) for home in homes)
                if homes
                else self._uses(path, first)
            )
        for length in range(len(parts), 0, -1):
            for home in self.modules.get(parts[:length], ()):
                code = DOCSTRING.sub("", self.texts[home])
                if all(re.search(rf"\b{part}\b", code) for part in parts[length:]):
                    return True
        is_room = any((room / first).is_dir() for room in ROOMS)
        return self._uses(path, first) and not (is_room and len(parts) > 2)

    def _uses(self, path: Path, word: str) -> bool:
        return bool(re.search(rf"\b{word}\b", DOCSTRING.sub("", self.texts[path])))


def test_names_in_docstrings_lead_somewhere() -> None:
    assert list(Sources().leads_nowhere()) == [], "name it by where it is now, or as `word` without a dot"


def test_what_was_moved_is_found() -> None:
    sources = Sources()
    here = ROOMS[0] / "train" / "setup" / "rank.py"
    assert sources.leads("machine.own_host", here) and sources.leads("train.micro_batch", here)
    assert (
        sources.leads("Trainer.run", here) and sources.leads("rank.device", here) and sources.leads("torch.topk", here)
    )
    for name in (
        "clocks.own_host",
        "runtime.gradients.borrowable",
        "plan.dispatch.kept_pairs",
        "Team.drop",
        "Trainer.rums",
    ):
        assert not sources.leads(name, here), name
    assert "train/warm.py" in sources.files and "train/cold.py" not in sources.files

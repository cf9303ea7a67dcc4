"""The structure of the source as figures: lines, files, rooms, faces, circles, class names. `make size` prints them; tests/unit/test_imports.py holds them to the rules.

A *room* is a folder of `src/phalanx` with an `__init__`. Its *face* is what that `__init__` imports under `if TYPE_CHECKING:` (`core/faces.py`). An import
of another room's module, instead of its face, goes *past a face*.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import phalanx
from phalanx.core.faces import face_of

SOURCE = Path(phalanx.__file__).parent
ROOT = SOURCE.parents[1]
LAB = ROOT / "lab" / "phalanx_lab"
NO_FACE = {
    "phalanx": "the public Python API, and nothing inside the project goes through it",
    "phalanx.core": "vocabulary: errors, units, config; a module is as good a name as any",
    "phalanx.cli": "one file a command; only commands that share a prediction or a table import each other",
    "phalanx.cli.planning": "parts of a command, imported when they are asked for",
    "phalanx.cli.predicting": "parts of a command, imported when they are asked for",
    "phalanx.kernels": "one word, the choice of a kernel's version",
    "phalanx.kernels.cpu": "a library: what operations are made of on a CPU",
    "phalanx.kernels.ops": "a library of operations: one file each, with its plain reference",
    "phalanx.kernels.device.programs": "imported by its wrappers alone, when they are called",
    "phalanx.kernels.triton.programs": "imported by its wrappers alone, when they are called",
}
"""Rooms that are entered by their modules, each with the reason."""


@dataclass(frozen=True)
class ImportStatement:
    """`module`, or `name` of it, as an import statement of `file` says."""

    file: Path
    line: int
    module: str
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class House:
    """The modules of the product and what they import from each other."""

    modules: Mapping[str, Path]
    imports: Mapping[str, tuple[ImportStatement, ...]]
    faces: Mapping[str, Mapping[str, tuple[str, str]]]

    def room(self, module: str) -> str:
        """The package that a module lies in; a package lies in itself."""
        return ".".join(self.modules[module].parent.relative_to(SOURCE.parent).parts)

    def target(self, found: ImportStatement) -> str:
        """The module that an import loads: behind a face, the module that the name comes from."""
        face = self.faces.get(found.module, {})
        return face[found.name][0] if found.name is not None and found.name in face else found.module

    def arrows(self) -> dict[str, set[str]]:
        """Module -> modules that it imports."""
        return {m: {self.target(i) for i in found} - {m} for m, found in self.imports.items()}

    def room_arrows(self) -> dict[str, set[str]]:
        """Room -> other rooms that it imports from."""
        found: dict[str, set[str]] = {}
        for module, targets in self.arrows().items():
            room = self.room(module)
            found.setdefault(room, set()).update({self.room(t) for t in targets} - {room})
        return found

    def past_faces(self) -> list[ImportStatement]:
        """Imports of modules of other rooms, where those rooms have a face."""
        return [
            found
            for module, all_found in self.imports.items()
            for found in all_found
            if (room := self.room(found.module)) not in (self.room(module), *NO_FACE) and found.module != room
        ]


def dotted(path: Path, root: Path) -> str:
    """`a/b/__init__.py` -> `a.b`, `a/b/c.py` -> `a.b.c`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def product() -> House:
    """The product as it is in the source folder."""
    modules = {dotted(p, SOURCE.parent): p for p in sorted(SOURCE.rglob("*.py"))}
    faces = {m: face_of(p.read_text(encoding="utf-8")) for m, p in modules.items() if p.name == "__init__.py"}
    imports = {m: tuple(_imports(p, modules, is_face=bool(faces.get(m)))) for m, p in modules.items()}
    return House(modules=modules, imports=imports, faces=faces)


def _imports(path: Path, modules: Mapping[str, Path], *, is_face: bool) -> Iterable[ImportStatement]:
    """Wherever an import stands, in functions too. What a face names is loaded later, by whoever asks for it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (ImportStatement(path, node.lineno, a.name) for a in node.names if a.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            if is_face and node.module != "phalanx.core.faces" and path != SOURCE / "__init__.py":
                continue
            for a in node.names:
                full = f"{node.module}.{a.name}"
                yield (
                    ImportStatement(path, node.lineno, full)
                    if full in modules
                    else ImportStatement(path, node.lineno, str(node.module), a.name)
                )


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Some circle of names, empty where there is none."""
    done: set[str] = set()

    def walk(at: str, path: list[str]) -> list[str]:
        if at in path:
            return path[path.index(at) :]
        if at in done:
            return []
        found = next((f for n in sorted(arrows.get(at, ())) if (f := walk(n, [*path, at]))), [])
        done.add(at)
        return found

    return next((found for start in sorted(arrows) if (found := walk(start, []))), [])


def shared_class_names(*roots: Path) -> dict[str, list[str]]:
    """Public class names that more than one module below these folders defines -> those modules."""
    found: dict[str, list[str]] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(dotted(path, root.parent))
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


@dataclass
class Count:
    """Files and lines of some of them."""

    files: int = 0
    lines: int = 0


def count(paths: Iterable[Path]) -> Count:
    """Files and lines."""
    found = [p.read_text(encoding="utf-8").count("\n") for p in paths]
    return Count(len(found), sum(found))


def spine(page: Path) -> list[Path]:
    """The files that a page links or names as `src/phalanx/...py`, each once."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return [ROOT / name for name in dict.fromkeys(re.findall(r"src/phalanx/[\w/]+\.py", text))]


def main() -> int:
    """Print the figures."""
    house = product()
    rows = {
        "product": count(SOURCE.rglob("*.py")),
        "lab": count((ROOT / "lab").rglob("*.py")),
        "tests": count((ROOT / "tests").rglob("*.py")),
        "spine (docs/spine.md)": count(spine(ROOT / "docs" / "spine.md")),
    }
    for name, row in rows.items():
        print(f"{name:24}{row.lines:>8,} lines{row.files:>6} files")
    folders = {room: sum(house.room(m) == room for m in house.modules) for room in map(house.room, house.modules)}
    largest = max(folders, key=lambda room: folders[room])
    print(f"{'largest folder':24}{folders[largest]:>8} files ({largest})")
    print(f"{'circles of rooms':24}{' -> '.join(circle(house.room_arrows())) or 'none':>8}")
    print(f"{'imports past a face':24}{len(house.past_faces()):>8}")
    shared, with_lab = shared_class_names(SOURCE), shared_class_names(SOURCE, LAB)
    print(f"{'class names used twice':24}{len(shared):>8}, with the lab {len(with_lab)}")
    print("names in the face of each room:")
    for room, face in sorted(house.faces.items(), key=lambda item: -len(item[1])):
        if face:
            print(f"  {room:36}{len(face):>4}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

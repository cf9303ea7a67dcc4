"""How a room shows its face: the names under `if TYPE_CHECKING:` in its `__init__`, each imported from its module when it is first asked for.

Decides nothing. A room's `__init__` writes

    if TYPE_CHECKING:
        from phalanx.plan.reshard.best import best_schedule as best_schedule
    else:
        __getattr__ = lazy(__name__)

so type checkers and readers see plain imports, and importing a room costs nothing until one of its names is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def face_of(source: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, name in it), from the imports under the first `if TYPE_CHECKING:` of a room's `__init__`."""
    import ast  # here: `phalanx --help` needs none of it

    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [n for n in node.body if isinstance(n, ast.ImportFrom) and n.module]
            return {a.asname or a.name: (str(n.module), a.name) for n in imports for a in n.names}
    return {}


def lazy(room: str) -> Callable[[str], Any]:
    """The `__getattr__` of a room's package (PEP 562), which knows `__all__` too; gives it a `__dir__`. Raises `AttributeError` for a name that is not in its face."""
    module = sys.modules[room]
    found: dict[str, tuple[str, str]] = {}

    def face() -> dict[str, tuple[str, str]]:
        if not found:
            found.update(face_of(Path(str(module.__file__)).read_text(encoding="utf-8")))
        return found

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(face())
        if name.startswith("__") or name not in face():
            raise AttributeError(f"{room} has no {name!r}; its face is: {', '.join(sorted(found))}")
        source, original = found[name]
        value = getattr(importlib.import_module(source), original)
        setattr(module, name, value)
        return value

    vars(module)["__dir__"] = lambda: sorted({*vars(module), *face()})
    return get

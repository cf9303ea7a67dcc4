"""Imports go one way (docs/architecture.md), and the planning floors never touch torch. Function-level imports count too."""

import ast
from pathlib import Path

import pytest

import phalanx

pytestmark = pytest.mark.unit
ROOT = Path(phalanx.__file__).parent

BELOW = {
    "core": set(),
    "plan": {"core"},
    "simulate": {"core", "plan"},
    "kernels": {"core", "plan"},
    "runtime": {"core", "plan", "kernels"},
    "models": {"core", "plan", "kernels", "runtime"},
    "data": {"core"},
    "observe": {"core", "plan"},
    "train": {"core", "plan", "kernels", "runtime", "models", "data", "observe"},
    "verify": {"core", "plan", "kernels", "runtime", "models", "data", "train", "observe"},
    "cli": {"core", "plan", "simulate", "kernels", "runtime", "models", "data", "train", "observe", "verify"},
}  # fmt: skip
"""Package -> packages that it may import beside itself."""

NO_TORCH = {"core", "plan", "simulate"}
ENVIRONMENT = {"cli"}
"""Packages that may read environment variables; `runtime/comm/groups.py` may too."""


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


FILES = sorted(p for p in ROOT.rglob("*.py") if package_of(p) is not None)


def wrong_arrows(package: str, modules: set[str]) -> set[str]:
    """Imports that `package` must not have."""
    inside = {m.split(".")[1] for m in modules if m.startswith("phalanx.") and m.split(".")[1] in BELOW}
    wrong = {f"phalanx.{p}" for p in inside - BELOW[package] - {package}}
    if package in NO_TORCH and any(m.split(".")[0] == "torch" for m in modules):
        wrong.add("torch")
    return wrong | {m for m in modules if m.split(".")[0] == "phalanx_lab"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = package_of(path)
    assert package in BELOW, (
        f"package {package!r} has no place in the house; add it to BELOW and to docs/architecture.md"
    )
    assert not wrong_arrows(package, imports_of(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_imports_are_not_used(path: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.level > 0]
    assert not nodes, "relative imports hide the arrow from this test"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_environment_is_read_in_two_places_only(path: Path) -> None:
    if package_of(path) in ENVIRONMENT or path == ROOT / "runtime" / "comm" / "groups.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        assert name not in ("getenv",), f"line {node.lineno}: getenv"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            reads = isinstance(owner, ast.Attribute) and owner.attr == "environ" and node.func.attr == "get"
            assert not reads, f"line {node.lineno}: os.environ.get"


def test_the_rule_catches_a_wrong_arrow() -> None:
    assert wrong_arrows("plan", {"torch.nn"}) == {"torch"}
    assert wrong_arrows("plan", {"phalanx.runtime.groups"}) == {"phalanx.runtime"}
    assert wrong_arrows("runtime", {"phalanx.models.moe", "torch"}) == {"phalanx.models"}
    assert not wrong_arrows("cli", {"phalanx.verify.oracle", "torch"})


def test_no_two_packages_import_each_other() -> None:
    pairs = {(a, b) for a, below in BELOW.items() for b in below}
    assert not {(a, b) for a, b in pairs if (b, a) in pairs}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Some circle of modules, empty where there is none."""
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


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {".".join(("phalanx", *p.relative_to(ROOT).with_suffix("").parts)): p for p in FILES}
    assert circle({name: imports_of(path) & names.keys() for name, path in names.items()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]

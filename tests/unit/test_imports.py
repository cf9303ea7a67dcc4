"""Imports go one way between floors and between rooms (docs/architecture.md), and the planning floors never touch torch. Imports inside functions count too."""

import ast
from functools import cache
from pathlib import Path

import pytest

import phalanx
from phalanx.core.faces import face_of
from phalanx.plan import reshard
from phalanx_lab.house import LAB, NO_FACE, House, ImportStatement, circle, product, shared_class_names

pytestmark = [pytest.mark.unit, pytest.mark.core]
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
    "api": {"core", "plan", "simulate", "kernels", "runtime", "models", "data", "train", "observe", "verify", "cli"},
}  # fmt: skip
"""Package -> packages that it may import beside itself."""

NO_TORCH = {"core", "plan", "simulate"}
ENVIRONMENT = {"cli"}
"""Packages that may read environment variables; `runtime/processes/world.py` may too."""


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in nodes_of(path):
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


def test_imports_go_one_way() -> None:
    homeless = {package_of(path) for path in FILES} - {*BELOW}
    assert not homeless, "a package has no place in the house; add it to BELOW and to docs/architecture.md"
    wrong = {str(path): wrong_arrows(str(package_of(path)), imports_of(path)) for path in FILES}
    assert {path: arrows for path, arrows in wrong.items() if arrows} == {}


def test_relative_imports_are_not_used() -> None:
    found = [(path, n) for path in FILES for n in nodes_of(path) if isinstance(n, ast.ImportFrom) and n.level > 0]
    assert [f"{path}:{n.lineno}" for path, n in found] == [], "relative imports hide the arrow from this test"


OF_THE_USER = {
    ROOT / "runtime" / "processes" / "world.py",
    ROOT / "runtime" / "membership" / "credentials.py",
    ROOT / "core" / "files.py",
}
"""Who this process is among all; where secrets are, which no recipe may name; the user's runtime folder."""


def test_environment_is_read_in_few_places_only() -> None:
    others = [p for p in FILES if package_of(p) not in ENVIRONMENT and p not in OF_THE_USER]
    assert [f"{path}:{n.lineno}" for path in others for n in nodes_of(path) if _reads_environment(n)] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["os.environ['X']", "'X' in os.environ", "os.environ.setdefault('X', '')", "from os import environ as e",
     "os.getenv('X')", "from os import getenv", "os.environb.get(b'X')", "os.putenv('X', '')"],
)  # fmt: skip
def test_any_use_of_the_environment_is_seen(text: str) -> None:
    assert any(_reads_environment(node) for node in ast.walk(ast.parse(text)))


def _reads_environment(node: ast.AST) -> bool:
    """Anything of the environment, by whatever way."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in names for alias in node.names)
    return getattr(node, "attr", getattr(node, "id", "")) in names


WAYS_IN = {
    "runtime/checkpoint/table_reader.py": "tables of contents of torch's checkpoints, by a reader that knows a few types and calls nothing else",
    "runtime/checkpoint/planner.py": "files of torch's checkpoints, whose table that reader reads, and whose tensors torch reads as weights only",
    "runtime/checkpoint/helper_process.py": "a pipe to a process that this one started, by modules of this package",
    "verify/store.py": "a folder of mode 0700 that this program made",
    "data/template.py": "a chat template: a stranger's program, in a sandbox, in a process of its own that can open nothing",
    "data/pieces.py": "pipes to processes that this one started, which read numbers and names",
    "core/pipes.py": "functions of this package, in another process of its own",
    "core/faces.py": "modules of this package, by the names in its own faces",
    "cli/main.py": "commands of this package",
    "cli/allocator.py": "this program once more, with another allocator of memory",
    "cli/eval.py": "a module of this package, as a process of its own",
    "cli/evaluating/tasks.py": "tasks of strangers, by a loader that makes plain values only and refuses every tag",
    "cli/evaluating/harness.py": "functions of a user's own tasks, with --allow-functions",
    "cli/predicting/cards.py": "nvidia-smi, and of what it says whole numbers",
    "cli/lab.py": "the laboratory, where it is installed",
    "verify/session.py": "modules that hold planted faults, by name of the lab",
    "kernels/native/build.py": "kernels that this program compiled, and the compiler",
    "kernels/native/rows.py": "the same, as a type",
    "api/programs.py": "this program once more, and the C library",
    "runtime/processes/launch.py": "the C library",
    "runtime/processes/allocator.py": "the C library",
}
"""Files in which data may become code, and whose data it is."""
DANGEROUS = {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "load_yaml", "jinja2", "runpy", "subprocess", "import_module", "spec_from_file_location", "SourceFileLoader", "CDLL",
    "FileSystemReader", "cpp_extension", "load_library", "load_inline", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
"""Modules, and what has such names in any module."""
CALLS = {"eval", "exec", "compile", "__import__"}
ARGUMENTS = {"allow_pickle", "trust_remote_code"}
STARTS_PROGRAMS = ("system", "popen", "exec", "spawn", "posix_spawn", "startfile")
"""Functions of `os`, and what their names begin with."""

HIDDEN = {"torch", "os", "torch.jit", "torch.hub", "torch.export", "torch.ops"}
"""Modules that keep their names, by which their functions are found."""


def _executes(node: ast.AST) -> bool:
    """Whether this may run what is in a file, a message or a text."""
    if isinstance(node, ast.Import):
        names = {part for alias in node.names for part in alias.name.split(".")}
        hides = any(alias.name in HIDDEN and alias.asname for alias in node.names)
        return hides or not names.isdisjoint(DANGEROUS)
    if isinstance(node, ast.ImportFrom):
        return any(_is_way_in(f"{node.module}.{alias.name}") for alias in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        return True
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load") and len(node.args) > 2:
        return True
    if isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
        return not (isinstance(node.value, ast.Constant) and node.value.value is False)
    if isinstance(node, ast.Constant) and node.value in ARGUMENTS:
        return True
    return isinstance(node, ast.Attribute) and _is_way_in(ast.unparse(node))


def _is_way_in(name: str) -> bool:
    """Of a dotted name."""
    first, *_, last = parts = name.split(".")
    if first in ("torch", "dcp") and last in ("load", "package"):
        return True
    if first == "os" and len(parts) == 2 and last.startswith(STARTS_PROGRAMS):
        return True
    return not DANGEROUS.isdisjoint(parts if first.isidentifier() else (last,))


def test_data_become_code_in_known_places_only() -> None:
    """Whoever adds one says here whose data it is; a stranger's only in a sandbox."""
    found = {str(p.relative_to(ROOT)) for p in FILES if any(_executes(node) for node in nodes_of(p))}
    assert found == set(WAYS_IN)


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "eval('1')", "torch.load('x')", "dist.all_gather_object(a, b)", "importlib.import_module('x')", "np.load(f, allow_pickle=True)", "np.load(f, None, True)",
     "np.load(f, allow_pickle=x)", "np.load(f, **{'allow_pickle': True})", "torch.jit.load(f)", "torch.hub.load(f)", "torch.export.load(f)", "read = torch.load", "torch.ops.load_library(f)", "from torch import load",
     "from torch.jit import load", "from torch import load as read", "import torch as t", "import torch.jit as j", "dcp.load(x)", "dcp.FileSystemReader(f)", "import runpy", "runpy.run_path(f)", "os.system(x)", "from os import system", "os.execv(x, y)", "os.posix_spawn(x)",
     "import subprocess", "from subprocess import run", "subprocess.run(x)", "import cloudpickle", "import jinja2.sandbox", "from jinja2 import Template", "import joblib", "from joblib import load", "f(trust_remote_code=True)", "f(**{'trust_remote_code': True})",
     "importlib.util.spec_from_file_location('x', f)", "from importlib.util import spec_from_file_location", "from importlib.machinery import SourceFileLoader", "from ctypes import CDLL", "f(x).CDLL"],
)  # fmt: skip
def test_any_such_place_is_seen(text: str) -> None:
    assert any(_executes(node) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["np.load(f)", "np.load(f, allow_pickle=False)", "torch.ops.aten.silu(x)", "json.load(f)", "re.match('a', b)", "torch.jit.script(f)", "system.run()"]
)  # fmt: skip
def test_what_executes_nothing_is_left_alone(text: str) -> None:
    assert not any(_executes(node) for node in ast.walk(ast.parse(text)))


PARSERS = {
    "core/reading.py": "the reader, with its limits",
    "core/pipes.py": "its own arguments, which the process that started it wrote",
}
"""Files that parse JSON, TOML or CSV themselves, and whose text it is."""


def _parses(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "json.loads(" in node.value
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        return node.module in ("csv", "tomllib") or (
            node.module == "json" and any("oad" in n or "Deco" in n for n in names)
        )
    if isinstance(node, ast.Import):
        return any(alias.name in ("csv", "tomllib") for alias in node.names)
    of_json = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json"
    return of_json and getattr(node, "attr", "") in ("load", "loads", "JSONDecoder")


def test_nobody_parses_past_the_reader() -> None:
    """Whose texts have no limits: deep ones, long numbers and the like would be tracebacks."""
    assert {str(p.relative_to(ROOT)) for p in FILES if any(map(_parses, nodes_of(p)))} == set(PARSERS)


@pytest.mark.parametrize(
    "text", ["json.loads('1')", "json.load(f)", "import tomllib", "from csv import reader", "from json import loads", "json.JSONDecoder()", "x = 'json.loads(1)'"]
)  # fmt: skip
def test_any_such_parser_is_seen(text: str) -> None:
    assert any(map(_parses, ast.walk(ast.parse(text))))


def test_the_rule_catches_a_wrong_arrow() -> None:
    assert wrong_arrows("plan", {"torch.nn"}) == {"torch"}
    assert wrong_arrows("plan", {"phalanx.runtime.groups"}) == {"phalanx.runtime"}
    assert wrong_arrows("runtime", {"phalanx.models.moe", "torch"}) == {"phalanx.models"}
    assert not wrong_arrows("cli", {"phalanx.verify.oracle", "torch"})


def test_no_two_packages_import_each_other() -> None:
    pairs = {(a, b) for a, below in BELOW.items() for b in below}
    assert not {(a, b) for a, b in pairs if (b, a) in pairs}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(product().arrows()) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert circle(product().room_arrows()) == []


def test_rooms_are_entered_through_their_faces() -> None:
    past = [f"{found.file}:{found.line}: {found.module}" for found in product().past_faces()]
    assert not past, "import the name from the room's __init__, which lists it"


def test_every_room_says_what_it_decides() -> None:
    house = product()
    for room in sorted({house.room(m) for m in house.modules}):
        source = house.modules[room].read_text()
        text = ast.get_docstring(ast.parse(source)) or ""
        least = 30 if "lazy(__name__)" in source and room != "phalanx" else 1
        assert len(text.split()) >= least, f"{room}: what does it decide, and which names come first?"


def test_faces_name_what_others_use_and_nothing_else() -> None:
    house = product()
    used = {(i.module, i.name) for found in house.imports.values() for i in found}
    attributes = {(room, n.attr) for room, n in _attributes(house)}
    for room, face in house.faces.items():
        unused = {name for name in face if (room, name) not in used | attributes}
        assert not unused or room == "phalanx", f"{room} lists what no other room uses"


def _attributes(house: House) -> list[tuple[str, ast.Attribute]]:
    """`words.Shard` where `words` is an imported room."""
    found = []
    for path in house.modules.values():
        nodes = nodes_of(path)
        rooms = {
            a.asname or a.name: f"{n.module}.{a.name}"
            for n in nodes
            if isinstance(n, ast.ImportFrom)
            for a in n.names
            if f"{n.module}.{a.name}" in house.faces
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in rooms:
                found.append((rooms[node.value.id], node))
    return found


def test_no_name_of_a_face_is_a_module_of_its_room() -> None:
    """An imported module becomes an attribute of its package and would hide the name."""
    house = product()
    assert not [
        (room, name) for room, face in house.faces.items() for name in face if f"{room}.{name}" in house.modules
    ]


def test_a_class_name_means_one_thing(tmp_path: Path) -> None:
    assert shared_class_names(ROOT, LAB) == {}
    for tree in ("product", "lab"):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / f"{tree}.py").write_text("class Folding: ...\n")
    assert list(shared_class_names(tmp_path / "product", tmp_path / "lab")) == ["Folding"]


def test_an_import_past_a_face_is_found() -> None:
    house = product()
    past = ImportStatement(ROOT / "train" / "step.py", 1, "phalanx.plan.reshard.bound", "Bound")
    wrong = House(modules=house.modules, imports={"phalanx.train.step.transaction": (past,)}, faces=house.faces)
    assert wrong.past_faces() == [past]
    assert "phalanx.plan.reshard" not in NO_FACE


def test_a_name_that_a_face_lacks_is_an_error_that_lists_the_face() -> None:
    assert face_of("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import c as d\n") == {
        "d": ("a.b", "c")
    }
    with pytest.raises(AttributeError, match=r"phalanx\.plan\.reshard has no 'nothing'; its face is: .*ReshardPlan"):
        _ = reshard.nothing  # type: ignore[attr-defined]


def test_a_face_lists_its_names_and_gives_them_all() -> None:
    names = set(product().faces["phalanx"])
    given: dict[str, object] = {}
    exec("from phalanx import *", given)
    assert names <= set(dir(phalanx)) and names == given.keys() - {"__builtins__"}

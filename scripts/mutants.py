"""Plants the same faults in this tree and in another commit, and counts which of them the tests of each side find: scripts/mutants.py REV --json FILE.

A mutant is one small change in a function of plan/ or runtime/ whose body is the same in both trees (names of modules apart): a comparison that is turned or moved by one, a constant one off, two
arguments exchanged, a statement left out, a condition negated, min in place of max. Each side then runs the tests that import the function's module directly (through a room's face,
too), one side at a time, until one fails or five minutes are over. A failure counts where the same test passes without the mutant; tests that fail without it are left out from there on.

Both trees are exports of commits in .against/mutants, so nothing of a work tree is touched. What is in FILE already is not done again. `--only N` does N more; `--list` only shows what would be done.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx_lab.bench.cluster import TrainingCluster

HERE = Path(__file__).resolve().parent.parent
SCRATCH = HERE / ".against" / "mutants"
SIDES = ("before", "after")
FLOORS = ("plan", "runtime")
LIMIT_S = 300.0
"""Seconds for the tests of one mutant on one side."""
ORDER = ("unit", "ranks", "runs", "lab")
"""Folders of tests, the quick ones first."""
MOST_FAILING = 10
"""Tests that fail without the mutant, after which a side counts as one that finds nothing."""

Body = ast.FunctionDef | ast.AsyncFunctionDef


# ---- mutations -------------------------------------------------------------------------------------------------------

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def turn_comparison(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in TURNED:
        return None
    node.ops[0] = TURNED[type(node.ops[0])]()
    return node


def one_more(node: ast.AST) -> ast.AST | None:
    return _off_by(node, 1)


def one_less(node: ast.AST) -> ast.AST | None:
    return _off_by(node, -1)


def _off_by(node: ast.AST, by: int) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return None
    return ast.Constant(node.value + by)  # type: ignore[operator]


def exchange_arguments(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or any(isinstance(a, ast.Starred) for a in node.args[:2]):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "isinstance", "getattr", "print"):
        return None  # no other result, or none that anybody means
    if ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return None
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return node


def leave_out(node: ast.AST) -> ast.AST | None:
    """A call whose result nobody takes, or a sum that grows. (Without an assignment a name would be missing, which every test finds.)"""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ast.Pass() if called or isinstance(node, ast.AugAssign) else None


def negate(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return None
    return ast.UnaryOp(ast.Not(), node.test)


def other_extreme(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in ("min", "max"):
        return None
    node.func = ast.Name("max" if node.func.id == "min" else "min")
    return node


MUTATIONS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "comparison turned": turn_comparison,
    "constant + 1": one_more,
    "constant - 1": one_less,
    "arguments exchanged": exchange_arguments,
    "statement left out": leave_out,
    "condition negated": negate,
    "min for max": other_extreme,
}


@dataclass(frozen=True)
class Mutation:
    """The `place`-th node of a function's body, in the order of `nodes_of`, changed in one way."""

    kind: str
    place: int


def nodes_of(function: Body) -> Iterator[ast.AST]:
    """Nodes of a body in the order of the text, but for its docstring, annotations and what stands inside f-strings."""
    todo: list[ast.AST] = list(reversed(_without_docstring(function.body)))
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.JoinedStr):
            continue
        left_out = {"annotation", "returns"}
        children = [c for name, value in ast.iter_fields(node) if name not in left_out for c in _listed(value)]
        todo += reversed([c for c in children if isinstance(c, ast.AST)])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _without_docstring(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return list(body[1:] if is_text else body)


def mutations_of(function: Body) -> dict[str, list[Mutation]]:
    """Mutations that a function allows, by kind."""
    found: dict[str, list[Mutation]] = defaultdict(list)
    for place, node in enumerate(nodes_of(function)):
        for kind, change in MUTATIONS.items():
            if change(copy.deepcopy(node)) is not None:
                found[kind].append(Mutation(kind, place))
    return found


def mutated(source: str, function: Body, mutation: Mutation) -> tuple[str, str, str]:
    """The whole text with one change, and what stood there before and after."""
    node = list(nodes_of(function))[mutation.place]
    new = MUTATIONS[mutation.kind](copy.deepcopy(node))
    assert new is not None
    where = node.test if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) else node
    text = ast.unparse(ast.fix_missing_locations(new))
    text = text if isinstance(new, ast.stmt | ast.Constant) else f"({text})"
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    begin, end = (_offset(lines, *at) for at in _span(where))
    data = source.encode()
    return (data[:begin] + text.encode() + data[end:]).decode(), data[begin:end].decode(), text


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    assert isinstance(node, ast.stmt | ast.expr) and node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _offset(lines: Sequence[bytes], line: int, column: int) -> int:
    return sum(map(len, lines[: line - 1])) + column


# ---- trees -----------------------------------------------------------------------------------------------------------


class Tree:
    """An exported commit: its modules, its functions, and which tests import what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        roots = [root for root in (folder / "src", folder / "lab") if root.is_dir()]
        files = [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]
        self.modules = {_module(path.relative_to(root)): path for root, path in files}
        self.faces = {m: _reexports(p) for m, p in self.modules.items() if p.name == "__init__.py"}

    def functions(self) -> dict[str, tuple[str, str, Body]]:
        """Normalised arguments and body -> (module, name, function), of those that stand once in `FLOORS`."""
        found: dict[str, list[tuple[str, str, Body]]] = defaultdict(list)
        for module, path in self.modules.items():
            if module.split(".")[:1] == ["phalanx"] and module.split(".")[1:2] and module.split(".")[1] in FLOORS:
                for name, function in _functions(ast.parse(path.read_text())):
                    found[_normal(function)].append((module, name, function))
        return {text: same[0] for text, same in found.items() if len(same) == 1}

    @cached_property
    def importers(self) -> dict[str, list[str]]:
        """Module -> files of tests that import it directly, the quick ones first."""
        found: dict[str, set[str]] = defaultdict(set)
        for path in sorted((self.folder / "tests").rglob("test_*.py")):
            for module in self._imported(ast.parse(path.read_text())):
                found[module].add(str(path.relative_to(self.folder)))
        return {module: sorted(files, key=_cost) for module, files in found.items()}

    def _imported(self, tree: ast.Module) -> set[str]:
        found: set[str] = set()
        rooms: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in self.modules else self._source(node.module, alias.name))
                    if whole in self.faces:
                        rooms[alias.asname or alias.name] = whole
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in rooms:
                found.add(self._source(rooms[node.value.id], node.attr))
        return found

    def _source(self, module: str, name: str) -> str:
        """The module in which a name is defined that `module` may only show."""
        seen = set()
        while name in self.faces.get(module, {}) and (module, name) not in seen:
            seen.add((module, name))
            module, name = self.faces[module][name]
        return f"{module}.{name}" if f"{module}.{name}" in self.modules else module


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _reexports(path: Path) -> dict[str, tuple[str, str]]:
    """Name -> (module, name there) of what an `__init__` imports, lazily or not."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
    return {a.asname or a.name: (str(n.module), a.name) for n in nodes for a in n.names}


def _functions(tree: ast.Module) -> Iterator[tuple[str, Body]]:
    """Functions of a module and methods of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, Body):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", n) for n in node.body if isinstance(n, Body))


def _normal(function: Body) -> str:
    body = _without_docstring(function.body)
    return ast.dump(function.args) + "".join(ast.dump(statement) for statement in body)


def _cost(file: str) -> tuple[int, str]:
    folder = Path(file).parts[1]
    return (ORDER.index(folder) if folder in ORDER else 0), file


def export(rev: str, side: str) -> Tree:
    """A fresh copy of a commit."""
    folder = SCRATCH / side
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(HERE), "archive", rev], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return Tree(folder)


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change to a function that both trees have."""

    modules: dict[str, str]
    names: dict[str, str]
    functions: dict[str, Body]
    mutation: Mutation

    @property
    def label(self) -> str:
        return f"{self.modules['after']}.{self.names['after']}"


def choose(trees: dict[str, Tree], *, count: int, seed: int) -> list[Mutant]:
    """`count` functions that tests of either side import, drawn by the seed, each with one mutation, of a kind that is drawn before its place."""
    functions = {side: tree.functions() for side, tree in trees.items()}
    both = sorted(functions["before"].keys() & functions["after"].keys())
    found = []
    for text in random.Random(seed).sample(both, len(both)):
        own = {side: functions[side][text] for side in SIDES}
        if not any(trees[side].importers.get(own[side][0]) for side in SIDES):
            continue
        kinds = mutations_of(own["before"][2])
        if not kinds:
            continue
        draw = random.Random(f"{seed} {own['before'][0]} {own['before'][1]}")
        mutation = draw.choice(kinds[draw.choice(sorted(kinds))])
        modules, names, bodies = ({side: own[side][i] for side in SIDES} for i in range(3))
        found.append(Mutant(modules, names, bodies, mutation))  # type: ignore[arg-type]
        if len(found) == count:
            break
    return found


@contextlib.contextmanager
def planted(path: Path, function: Body, mutation: Mutation) -> Iterator[tuple[str, str]]:
    """The file with the change, put back whatever happens."""
    source = path.read_text()
    text, before, after = mutated(source, function, mutation)
    try:
        path.write_text(text)
        yield before, after
    finally:
        path.write_text(source)


def run_tests(tree: Tree, words: Sequence[str], *, args: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """pytest's exit code, None where it took longer, and what it printed. Nothing of it is left behind."""
    path = os.pathsep.join(str(tree.folder / name) for name in ("src", "lab") if (tree.folder / name).is_dir())
    variables = [f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1", "PHALANX_SEED=1"]
    command = [
        "env",
        "-C",
        str(tree.folder),
        *variables,
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    out = SCRATCH / "said"
    out.unlink(missing_ok=True)
    with TrainingCluster() as cluster:
        cluster.start("pytest", [*command, *args, *words], out=out)
        cluster.wait_for_end(limit_s)
        code = cluster.codes.get("pytest")
    return code, out.read_text(errors="replace")


def failed_test(said: str) -> str | None:
    """The first test that pytest names as failed or broken."""
    for line in said.splitlines():
        for word in ("FAILED ", "ERROR "):
            if line.startswith(word):
                return line.removeprefix(word).split(" - ")[0].strip()
    return None


def kill(tree: Tree, mutant: Mutant, side: str, failing: list[str], args: Sequence[str]) -> dict[str, Any]:
    """What the tests of one side say of a mutant. `failing` grows by tests that fail without it."""
    module = mutant.modules[side]
    files = tree.importers.get(module, [])
    report: dict[str, Any] = {"module": module, "tests": files, "killed": False, "by": None, "seconds": 0.0}
    path, left_s = tree.modules[module], LIMIT_S
    while files and left_s > 0 and len(failing) < MOST_FAILING:
        begin_s = time.monotonic()
        left_out = [word for test in failing for word in ("--deselect", test)]
        with planted(path, mutant.functions[side], mutant.mutation):
            code, said = run_tests(tree, [*files, *left_out], args=args, limit_s=left_s)
        spent_s = time.monotonic() - begin_s
        report["seconds"], left_s = round(report["seconds"] + spent_s, 1), left_s - spent_s
        if code is None or code in (0, 5):
            report["by"] = "over the limit" if code is None else None
            break
        test = failed_test(said)
        if test is None:  # nothing could be collected: the mutant breaks an import
            report.update(killed=True, by=said.strip().splitlines()[-1:])
            break
        code, _ = run_tests(tree, [test], args=args, limit_s=LIMIT_S)
        if code == 0:
            report.update(killed=True, by=test)
            break
        failing.append(test)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rev", help="the commit that is compared with HEAD, such as 48a5eed")
    parser.add_argument("--json", type=Path, default=SCRATCH.parent / "mutants.json", metavar="FILE")
    parser.add_argument("--count", type=int, default=40, help="how many functions in all")
    parser.add_argument("--only", type=int, metavar="N", help="stop after N more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--after-args", nargs="*", default=[], help="more words for pytest on this side, such as --tier=core"
    )
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    args = parser.parse_args()
    revs = {"before": revision(args.rev), "after": revision("HEAD")}
    report = start_report(args.json, revs, seed=args.seed)
    revs["after"] = report["after"]  # a file that is continued is about the commit with which it began
    trees = {side: export(revs[side], side) for side in SIDES}
    mutants = choose(trees, count=args.count, seed=args.seed)
    print(f"seed {args.seed}: {len(mutants)} mutants, {revs['before']} and {revs['after']}", flush=True)
    if args.list:
        for mutant in mutants:
            print(f"  {mutant.label:<90} {mutant.mutation.kind}")
        return 0
    done = {row["function"] for row in report["mutants"]}
    for mutant in [m for m in mutants if m.label not in done][: args.only]:
        report["mutants"].append(row := measure(mutant, trees, report["failing"], args.after_args))
        report["figures"] = figures(report["mutants"])
        args.json.parent.mkdir(parents=True, exist_ok=True)
        new = args.json.with_suffix(".new")
        new.write_text(json.dumps(report, indent=1) + "\n")
        new.replace(args.json)
        told = ", ".join(f"{s} {'killed' if row[s]['killed'] else 'ALIVE'} in {row[s]['seconds']:.0f} s" for s in SIDES)
        print(
            f"{len(report['mutants'])}: {mutant.label}: {row['change'][0]!r} -> {row['change'][1]!r}: {told}",
            flush=True,
        )
    print(f"{report['figures']}; written to {args.json}")
    return 0


def measure(
    mutant: Mutant, trees: dict[str, Tree], failing: dict[str, list[str]], after: Sequence[str]
) -> dict[str, Any]:
    """One row: both sides, one after the other."""
    tree = trees["after"]
    source = tree.modules[mutant.modules["after"]].read_text()
    _, *change = mutated(source, mutant.functions["after"], mutant.mutation)
    row: dict[str, Any] = {"function": mutant.label, "mutation": mutant.mutation.kind, "change": change}
    for side in SIDES:
        row[side] = kill(trees[side], mutant, side, failing[side], after if side == "after" else ())
    return row


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    killed = {f"killed {side}": sum(row[side]["killed"] for row in rows) for side in SIDES}
    return {"mutants": len(rows), **killed}


def start_report(path: Path, revs: dict[str, str], *, seed: int) -> dict[str, Any]:
    """The report in a file that is continued, or a new one. Exits where the file is about something else."""
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if (report["before"], report["seed"]) != (revs["before"], seed):
            sys.exit(f"{path}: is about {report['before']} with seed {report['seed']}; give another --json")
        return report
    return {
        "id": path.stem,
        "claim": "changes of single functions that the tests of their modules find, before and after",
        "command": f"python scripts/mutants.py {' '.join(sys.argv[1:])}",
        "machine": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "figures": {},
        "note": "",
        **revs,
        "seed": seed,
        "failing": {side: [] for side in SIDES},
        "mutants": [],
    }


def revision(name: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short=12", f"{name}^{{commit}}"], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name}: is no commit of this repository")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

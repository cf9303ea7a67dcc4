"""The prose is true: links lead somewhere, shell blocks run, and no page names a machine.

A fenced block ```` ```sh ```` of docs/*.md and README.md is run in a scratch folder with the repository's programs on the path. `phalanx` is one that starts faster
(`docs_programs.py`), but for the blocks of `INSTALLED`; so does the interpreter of the blocks of Python (`train_help.py`).
A block that cannot run here carries its reason in the info string: ```` ```sh not-in-ci: needs a cluster ````.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_programs import Programs
from train_help import start_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


INSTALLED = ("docs/recipes.md", "docs/testbed.md")
"""Pages whose blocks run the program as it is installed."""


def blocks(language: str) -> list[tuple[str, str, str]]:
    """(page:number, info, code) of every fenced block of a language."""
    found = []
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text())):
            if match.group(1) == language:
                found.append((f"{page.relative_to(ROOT)}:{number}", match.group(2).strip(), match.group(3)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    broken = []
    for match in LINK.finditer(text):
        target = match.group(1) or match.group(2)
        if target.startswith(("http://", "https://", "mailto:", "#")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if not file.exists():
            broken.append(target)
        elif anchor.startswith("L") and anchor[1:].isdigit() and int(anchor[1:]) > len(file.read_text().splitlines()):
            broken.append(target)
    assert not broken


def test_a_step_names_what_it_links_to() -> None:
    """Each hop of a-step.md names a definition that exists in the file it links to."""
    text = (ROOT / "docs" / "a-step.md").read_text()
    hops = re.findall(r"\[`([\w.]+)`\]\((\.\./src/[^)#]+)\)", text)
    assert 3 <= len(hops) <= 16
    for name, target in hops:
        source = (ROOT / "docs" / target).resolve().read_text()
        assert re.search(rf"^\s*(def|class) {name.split('.')[-1]}\b", source, re.MULTILINE), (
            f"{name} is not in {target}"
        )


@pytest.mark.parametrize(("where", "info", "code"), blocks("sh"), ids=[b[0] for b in blocks("sh")])
def test_shell_blocks_run(where: str, info: str, code: str, tmp_path: Path) -> None:
    if info.startswith("not-in-ci:"):
        pytest.skip(f"{where} {info}")
    assert not info, f"{where}: unknown info string {info!r}"
    installed = Path(sys.executable).parent
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "recipes").symlink_to(ROOT / "recipes")
    with Programs(tmp_path / "bin") as programs:
        env = {**os.environ, **programs.env, "COLUMNS": "120"}
        first = "" if where.startswith(INSTALLED) else f"{programs.folder}:"
        env["PATH"] = f"{first}{installed}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-euc", code], cwd=scratch, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(("where", "info", "code"), blocks("python"), ids=[b[0] for b in blocks("python")])
def test_python_blocks_run(where: str, info: str, code: str, tmp_path: Path) -> None:
    assert not info, f"{where}: unknown info string {info!r}"
    program = start_program(code, cwd=tmp_path)
    try:
        out, err = program.communicate(timeout=360)
    finally:
        program.kill()
    assert program.returncode == 0, f"{where}\n{out[-2000:]}\n{err[-2000:]}"

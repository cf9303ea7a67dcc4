"""The prose is true: links and files that it names exist, its blocks run, its recipes are legal, and it stays short enough to be read.

A fenced block ```` ```sh ```` of docs/ and README.md is run in a scratch folder with the repository's programs on the path. `phalanx` is one that starts faster
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

from phalanx.cli.launching import Request, read_recipe
from phalanx_lab.testbed.slurm import free_ports

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "lab/phalanx_lab/testbed/README.md",
]
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


INSTALLED = ("docs/reference/settings.md", "lab/phalanx_lab/testbed/README.md")
"""Pages whose blocks run the program as it is installed."""


def blocks(language: str) -> list[tuple[str, str, str]]:
    """(page:number, info, code) of every fenced block of a language."""
    found = []
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text())):
            if match.group(1) == language:
                found.append((f"{page.relative_to(ROOT)}:{number}", match.group(2).strip(), match.group(3)))
    return found


def headings(page: Path) -> set[str]:
    """Anchors of a page, as the site and GitHub make them."""
    lines = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).lower() for line in lines)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", line).strip()) for line in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    broken = []
    for match in LINK.finditer(text):
        target = match.group(1) or match.group(2)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in headings(file):
            broken.append(target)
        elif anchor.startswith("L") and anchor[1:].isdigit() and int(anchor[1:]) > len(file.read_text().splitlines()):
            broken.append(target)
    assert not broken


NAMED = re.compile(r"`((?:src|lab|tests|docs|scripts|recipes|launch|benchmarks)/[\w./-]*\w/?)`")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [
        name
        for name in NAMED.findall(page.read_text())
        if not any((at / name).exists() for at in (ROOT, ROOT / "src/phalanx"))
    ] == []


def test_pages_are_short_enough_to_be_read() -> None:
    """30,000 words in all and 3,000 on a page, as `wc -w` counts them; tables that a command makes do not count."""
    words = {str(p.relative_to(ROOT)): len(GENERATED.sub("", p.read_text()).split()) for p in PAGES}
    pages = {name: n for name, n in words.items() if name.startswith("docs/")}
    assert [name for name, n in pages.items() if n > 3000] == []
    assert sum(pages.values()) <= 30_000
    assert words["README.md"] <= 900


@pytest.mark.parametrize(
    ("where", "code"),
    [(w, c) for w, info, c in blocks("toml") if not info],
    ids=[w for w, i, _ in blocks("toml") if not i],
)
def test_recipes_of_the_pages_are_legal(where: str, code: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(code)
    read_recipe(Request(recipe_path=str(recipe), overrides=(), dry_run=True), world=None)


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


def test_two_commands_train_on_own_texts(tmp_path: Path) -> None:
    """Those of docs/how-to/train-on-my-data.md, the first one of a clone; of a recipe that is packaged, not of this folder."""
    (code,) = [c for _, info, c in blocks("sh") if "two commands" in info]
    first, command = code.strip().splitlines()
    assert first == "make env" and command.startswith(".venv/bin/phalanx train laptop ")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        page = ROOT / "docs/explanation" / ("overlap.md", "folding.md", "replicas.md")[number]
        (tmp_path / "texts" / f"{number}.txt").write_text(page.read_text())
    program = Path(sys.executable).with_name("phalanx")
    few = "--train.steps 2 --data.tokenizer bpe:400 --launch.ranks 2"
    words = f"{command.replace('.venv/bin/phalanx', str(program))} {few}"
    done = subprocess.run(["sh", "-euc", words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bpe" in (tmp_path / "runs/mine/recipe.toml").read_text()
    kept = sorted(p.name for p in (tmp_path / "runs/mine/checkpoints").glob("step-*"))
    assert len(kept) == 1 and int(kept[0].removeprefix("step-")) == 2


@pytest.mark.core
@pytest.mark.parametrize(("where", "info", "code"), blocks("python"), ids=[b[0] for b in blocks("python")])
def test_python_blocks_run(where: str, info: str, code: str, tmp_path: Path) -> None:
    assert not info, f"{where}: unknown info string {info!r}"
    program = start_program(code, cwd=tmp_path)
    try:
        out, err = program.communicate(timeout=360)
    finally:
        program.kill()
    assert program.returncode == 0, f"{where}\n{out[-2000:]}\n{err[-2000:]}"


def test_tensors_move_under_torchrun(tmp_path: Path) -> None:
    """The block of docs/how-to/move-tensors.md, with what torchrun gives two ranks."""
    (code,) = [code for where, _, code in blocks("python") if where.startswith("docs/how-to/move-tensors.md")]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    seen = code + "print(x.to_local().shape)\n"
    ranks = [start_program(seen, cwd=tmp_path, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in ended] == ["torch.Size([3, 4])\n"] * 2, ended

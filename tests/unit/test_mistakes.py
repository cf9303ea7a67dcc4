"""A hundred mistakes and more that people make: each is answered with the place, the rule and a way out, and with nothing else.

`mistakes.txt` holds them with their answers; `PHALANX_WRITE_MISTAKES=1 pytest tests/unit/test_mistakes.py` writes the answers anew, to be read before they are kept.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from phalanx.cli.main import main

pytestmark = pytest.mark.unit
FILE = Path(__file__).with_name("mistakes.txt")
DIFFERS = re.compile(
    r"\d[\d.]* [KMGT]iB that are available|(?<=ranks = ')\d[\d.]* [KMGT]iB|process \S+ \d+|\[Errno \d+\]|among \d+ choices"
)
"""Parts of an answer that are this machine's."""


def mistakes() -> list[tuple[str, str]]:
    """(words behind `phalanx`, answer)."""
    parts = FILE.read_text().split("$ phalanx ")[1:]
    return [(words, answer.strip("\n")) for words, _, answer in (part.partition("\n") for part in parts)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the mistakes are made with."""
    folder = tmp_path_factory.mktemp("mistakes")
    texts = {
        "text/a.txt": "hello world, this is text. " * 400, "bad.toml": "[train\nsteps = 3\n", "section.toml": "[trian]\nsteps = 3\n",
        "typed.toml": '[train]\nsteps = "many"\n', "twice.toml": "[train]\nsteps = 3\nsteps = 4\n", "preset.toml": '[model]\npreset = "mixtral-8x7bb"\n',
        "rows.jsonl": '{"text": "a"}\n{"text": \n', "fields.jsonl": '{"body": "a"}\n', "number.jsonl": '{"text": 3}\n', "empty.txt": "", "x.csv": "a,b\n1,2\n",
        "broken.parquet": "PAR1xxxx", "notjson/config.json": "{", "llama/config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        "file": "x", "cluster.toml": '[cluster]\nname = "x"\n',
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "latin.txt").write_bytes("café ".encode("latin-1") * 100)
    (folder / "nothing").mkdir()
    return folder


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status, and the lines that say what is wrong."""
    status = main(shlex.split(words))
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    notes = ("note: ", "optim.lr = ", "elastic recovery: ")
    lines = [line for line in said.err.splitlines() if line.strip() and not line.startswith(notes)]
    return status, DIFFERS.sub("...", "\n".join(lines))


@pytest.mark.core
@pytest.mark.parametrize(("words", "right"), mistakes(), ids=[words for words, _ in mistakes()])
def test_a_mistake_is_answered(
    words: str, right: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("phalanx.observe.sinks.is_installed", lambda name: False)
    shutil.rmtree("runs", ignore_errors=True)
    status, found = answer(words, capsys)
    if os.environ.get("PHALANX_WRITE_MISTAKES"):
        text = FILE.read_text().replace(f"$ phalanx {words}\n{right}\n", f"$ phalanx {words}\n{found}\n")
        FILE.write_text(text)
        right = found
    assert (status, found) == (2, right)
    problems = [line for line in found.splitlines() if line.startswith("  - ")] or found.splitlines()
    assert all(re.search(r"; |did you mean", line) for line in problems), "each says a way out"


def test_there_are_a_hundred_and_each_is_another() -> None:
    words = [w for w, _ in mistakes()]
    assert len(words) >= 100 and len({*words}) == len(words)

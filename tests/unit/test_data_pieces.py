"""A large source in pieces: the same bytes as in one go, whatever the number of processes; interruptions cost the pieces under way; and `phalanx prepare`, which does it beforehand."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from test_data_chat import QWEN, vocabulary, write_saved
from test_data_prepare import text_of

from phalanx.cli.main import main
from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError, PeerError, RunError
from phalanx.data import formats, pieces, preparation
from phalanx.data.formats import ReadOptions, Span, lines_before, read_documents
from phalanx.data.preparation import PreparedData, prepare
from phalanx.data.problems import ProblemLog
from phalanx.train.setup import rank as rank_module

pytestmark = pytest.mark.unit
SMALL: dict[str, Any] = {"LARGE_BYTES": 1000, "PIECE_BYTES": (3000, 8000)}


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of kilobytes count as large."""
    monkeypatch.setattr(preparation, "LARGE_BYTES", SMALL["LARGE_BYTES"])
    monkeypatch.setattr(pieces, "PIECE_BYTES", SMALL["PIECE_BYTES"])


def write_lines(path: Path, texts: Sequence[str], *, end: str = "\n") -> Path:
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).removesuffix("\n") + end
    )
    return path


def config(cache: Path, *found: object, **changes: object) -> DataConfig:
    told = {"sources": tuple(map(str, found)), "cache": str(cache), "tokenizer": "byte", **changes}
    return DataConfig(**told)  # type: ignore[arg-type]


def files_of(prepared: PreparedData) -> dict[str, bytes]:
    return {f"{folder.name}/{p.name}": p.read_bytes() for folder in prepared.folders for p in sorted(folder.iterdir())}


def left_of(cache: Path) -> list[str]:
    return [p.name for p in (cache / "pieces").glob("*") if p.name != ".locks"]


class Made:
    """Pieces that this process makes, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._make = pieces._make_piece
        monkeypatch.setattr(pieces, "_make_piece", self)

    def __call__(self, name: str, *others: object) -> None:
        self.names.append(name)
        self._make(name, *others)  # type: ignore[arg-type]


# --- the same bytes


def a_folder_of_everything(folder: Path) -> Path:
    """Files of all kinds of text, some cut into pieces, some several to a piece, some empty."""
    folder.mkdir()
    texts = [text_of(i, length=5 + i % 90) for i in range(400)]
    write_lines(folder / "a.jsonl", ["", *texts[:150], "", "ä" * 5000, "last"], end="")
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + (folder / "a.jsonl").read_bytes().replace(b"\n", b"\r\n\n", 20))
    for i in range(12):
        write_lines(folder / f"b{i:02}.jsonl", texts[150 + i : 151 + i])
    (folder / "c.jsonl").write_text("")
    (folder / "d.txt").write_text("".join(texts[170:240]))
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(write_lines(folder / "e.jsonl", texts[240:300]).read_bytes()))
    (folder / "f.jsonl.zst").write_bytes(pa.Codec("zstd").compress((folder / "e.jsonl").read_bytes(), asbytes=True))
    pq.write_table(pa.table({"text": texts[300:]}), folder / "g.parquet", row_group_size=9)
    write_lines(folder / "h.jsonl", texts)
    return folder


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_pieces_become_the_bytes_of_one_go(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = a_folder_of_everything(tmp_path / "text")
    one_go = prepare(config(tmp_path / "one", text, tokenizer=tokenizer))
    assert not (tmp_path / "one" / "pieces").exists()
    request.getfixturevalue("in_pieces")
    made = Made(monkeypatch)
    found = [prepare(config(tmp_path / f"{n}", text, tokenizer=tokenizer), workers=n) for n in (1, 3)]
    assert len(made.names) == len(set(made.names)) > 10  # those of the first only: the three processes made theirs
    for number, prepared in zip((1, 3), found, strict=True):
        assert files_of(prepared) == files_of(one_go) and prepared.fingerprint == one_go.fingerprint
        assert not prepared.reused and prepared.text_bytes == one_go.text_bytes
        assert left_of(tmp_path / f"{number}") == []
    assert prepare(config(tmp_path / "3", text, tokenizer=tokenizer)).reused


def test_conversations_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"{text_of(i)}"}, {"role": role, "content": text_of(i + 1)}]}
        for i in range(60)
        for role in ("assistant", "user" if i % 7 == 0 else "assistant")
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
    )
    told = {"tokenizer": str(vocabulary(tmp_path / "model", QWEN)), "validation_fraction": 0.2}
    for chat_template in ("chatml", str(template)):
        also = {**told, "chat_template": chat_template}
        one_go = prepare(config(tmp_path / "one", path, write_saved(tmp_path / f"s{len(chat_template)}"), **also))
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "LARGE_BYTES", 1000)
            patch.setattr(pieces, "PIECE_BYTES", (3000, 8000))
            for n in (1, 2):
                here = tmp_path / f"{n}"
                found = prepare(config(here, path, tmp_path / f"s{len(chat_template)}", **also), workers=n)
                assert files_of(found) == files_of(one_go) and left_of(here) == []
    assert "answers.bin" in {name.split("/")[1] for name in files_of(one_go)}


def test_few_documents_are_split_and_counted_as_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Where the rule that no side stays empty moves a document, what pieces counted does not hold."""
    path = write_lines(tmp_path / "a.jsonl", [text_of(i, length=300) for i in range(4)])
    told = {"validation_fraction": 1e-9}
    one_go = prepare(config(tmp_path / "one", path, **told))
    request.getfixturevalue("in_pieces")
    assert files_of(prepare(config(tmp_path / "two", path, **told), workers=1)) == files_of(one_go)


LINES = st.lists(st.sampled_from(["", "{}", " ", '{"text": "a"}', '{"text": "bä"}\r', '{"text": "' + "c" * 40 + '"}', "{broken"]), max_size=12)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(lines=LINES, ends=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=5), mark=st.booleans())
def test_every_line_is_of_one_span(
    lines: list[str], ends: bool, cuts: list[int], mark: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + ("\n".join(lines) + ("\n" if ends else "")).encode())
    size = path.stat().st_size
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    spans = [Span(path, a, None if b == size else b) for a, b in itertools.pairwise(edges)] or [Span(path)]

    def read(*what: Span) -> tuple[list[tuple[str, str]], list[object]]:
        log = ProblemLog()
        documents = [d for span in what for d in read_documents(span, ReadOptions(), log)]
        return [(d.text, d.where) for d in documents], list(log.found)

    assert read(*(Span(s.path, s.begin, s.end, lines_before(s)) for s in spans)) == read(Span(path))


def test_a_line_that_is_too_long_is_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_DOCUMENT", 100)
    path = write_lines(tmp_path / "a.jsonl", ["a", "b" * 500, "c"])
    log = ProblemLog()
    for begin, end in ((0, 15), (15, 200), (200, None)):
        span = Span(path, begin, end)
        list(read_documents(Span(path, begin, end, lines_before(span)), ReadOptions(), log))
    (problem,) = log.found
    assert problem.where == f"{path}:2" and problem.rule == "line 2 has more than 100 bytes"


# --- problems


@pytest.mark.parametrize("count", [4, 30])
@pytest.mark.parametrize("tokenizer", ["byte", "chatml"])
def test_problems_are_told_in_the_order_of_files_whatever_the_number_of_processes(
    count: int, tokenizer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files, told = [], dict[str, object]()
    if tokenizer == "chatml":
        told = {"tokenizer": str(vocabulary(tmp_path / "model", QWEN)), "chat_template": "chatml"}
    for name in "abc":
        rows = [
            json.dumps({"text": text_of(i), "messages": [{"role": "assistant", "content": text_of(i)}]})
            for i in range(60)
        ]
        for i in range(count // 3 + 1):
            rows[(7 * i + 3) % 60] = f"{{broken {name} {i}" if i % 2 else '{"text": 1, "messages": [7]}'
        (tmp_path / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
        files.append(tmp_path / f"{name}.jsonl")
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 2000 + b"bro\xffken\n")
    if not told:
        files.append(tmp_path / "bad.txt")
    said = []
    for number in (None, 1, 3):
        if number == 1:
            request.getfixturevalue("in_pieces")
        with pytest.raises(DataError) as caught:
            prepare(config(tmp_path / f"cache{number}", *files, **told), workers=number)
        said.append(str(caught.value))
    assert said[0] == said[1] == said[2]
    assert ("reading stopped after 20 wrong places" in said[0]) == (count == 30), said[0]


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("workers", [1, 2])
def test_whoever_repairs_a_file_keeps_the_pieces_of_the_others(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abc":
        write_lines(folder / f"{name}.jsonl", [text_of(i + ord(name)) for i in range(60)])
    good = (folder / "b.jsonl").read_text()
    (folder / "b.jsonl").write_text(good + "{broken\n")
    with pytest.raises(DataError, match=r"b\.jsonl:61"):
        prepare(config(tmp_path / "cache", folder), workers=workers)
    (kept,) = (tmp_path / "cache" / "pieces").glob("[!.]*")
    finished = {p.parent.name for p in kept.glob("*/piece.npz")}
    (folder / "b.jsonl").write_text(good)
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("document", "d0cument"))  # as long
    made = Made(monkeypatch)
    repaired = prepare(config(tmp_path / "cache", folder), workers=1)
    assert len(finished) > 6 and made.names and len(set(made.names)) == len(made.names)
    assert len(finished - set(made.names)) >= len(finished) // 3
    assert files_of(repaired) == files_of(prepare(config(tmp_path / "other", folder), workers=1))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_changes_while_its_pieces_are_made_leaves_none(workers: int, tmp_path: Path) -> None:
    kept = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(20)])
    path = write_lines(tmp_path / "b.jsonl", [text_of(i) for i in range(100)])
    as_hashed, stat, done = path.read_bytes(), path.stat(), list[int]()

    def progress(phase: str, read: int, total: int, /) -> None:
        if phase == "tokenise" and not done:
            done.append(read)
            path.write_bytes(as_hashed.replace(b"document", b"DOCUMENT"))

    with pytest.raises(DataError, match=r"b\.jsonl.*was changed while it was prepared"):
        prepare(config(tmp_path / "cache", kept, path), progress=progress, workers=workers)
    path.write_bytes(as_hashed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = prepare(config(tmp_path / "cache", kept, path), workers=workers)
    assert files_of(again) == files_of(prepare(config(tmp_path / "fresh", kept, path)))


@pytest.mark.usefixtures("in_pieces")
def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(60)])
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "_append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DataError, match=r"No space left on device.*free some space"):
            prepare(config(tmp_path / "cache", path), workers=1)
    made = Made(monkeypatch)
    prepare(config(tmp_path / "cache", path), workers=1)
    assert not made.names  # they are there


# --- interruptions


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("at", [0.0, 0.4, 1.0])
def test_interrupted_while_joining(at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(200)])
    undisturbed = prepare(config(tmp_path / "other", path), workers=1)

    def stop(phase: str, done: int, total: int, /) -> None:
        if phase == "join" and done >= at * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path / "cache", path), workers=1, progress=stop)
    here = sum(p.stat().st_size for p in (tmp_path / "cache" / "pieces").glob("*/*/tokens.bin"))
    tokens = sum(p.stat().st_size for folder in undisturbed.folders for p in folder.glob("tokens.bin"))
    assert tokens <= here <= tokens + 2 * SMALL["PIECE_BYTES"][1]  # two bytes a token: never twice on the disk
    made = Made(monkeypatch)
    assert files_of(prepare(config(tmp_path / "cache", path), workers=1)) == files_of(undisturbed)
    assert made.names == [] and left_of(tmp_path / "cache") == []


@pytest.mark.usefixtures("in_pieces")
def test_a_file_with_two_names_is_read_twice_as_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    path = write_lines(folder / "a.jsonl", [text_of(i) for i in range(200)])
    (folder / "b.jsonl").symlink_to(path)
    found = prepare(config(tmp_path / "cache", folder), workers=1)
    assert found.train.num_documents + found.validation.num_documents == 400
    assert left_of(tmp_path / "cache") == []
    monkeypatch.setattr("phalanx.data.preparation.LARGE_BYTES", 1 << 40)
    assert files_of(found) == files_of(prepare(config(tmp_path / "other", folder), workers=1))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("links", [True, False])
def test_the_last_moment_costs_nothing(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is joined, and the store is not yet in its place."""
    path = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(200)])
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(1, "no links")))
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.data.store._write_meta", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path / "cache", path), workers=1)
    made = Made(monkeypatch)
    found = prepare(config(tmp_path / "cache", path), workers=1)
    assert not made.names and left_of(tmp_path / "cache") == []
    assert files_of(found) == files_of(prepare(config(tmp_path / "other", path), workers=1))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("what", ["joined", "cut", "tokens", "details", "header", "gone"])
def test_what_was_altered_is_made_anew(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(200)])

    def stop(phase: str, done: int, total: int, /) -> None:
        if phase == "join" and done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path / "cache", path), workers=1, progress=stop)
    (folder,) = (tmp_path / "cache" / "pieces").glob("[!.]*")
    if what == "gone":
        first = min(folder.glob("[!.j]*/piece.npz"), key=lambda p: p.stat().st_mtime_ns).parent
        assert not (first / "tokens.bin").exists()  # it is joined already
        shutil.rmtree(first)
        found = prepare(config(tmp_path / "cache", path), workers=1)
        assert files_of(found) == files_of(prepare(config(tmp_path / "other", path), workers=1))
        return
    joined, details = "joined-*/tokens.bin", "*/piece.npz"
    names = {"joined": joined, "cut": joined, "tokens": "[!j]*/tokens.bin", "details": details, "header": details}
    file = next(folder.glob(names[what]))
    data = bytearray(file.read_bytes())
    if what == "header":
        data[data.index(b"PK\x01\x02") + 8] ^= 1  # says of the first array that it is encrypted
    else:
        data[len(data) // 2 if what != "joined" else 100] ^= 1
    file.write_bytes(data[:10] if what == "cut" else data)
    sound = {p.parent.name for p in folder.glob("[!j]*/tokens.bin")} - {file.parent.name}
    with pytest.raises(DataError, match="was altered since it was written; start again"):
        prepare(config(tmp_path / "cache", path), workers=1)
    made = Made(monkeypatch)
    found = prepare(config(tmp_path / "cache", path), workers=1)
    again = set(made.names)
    assert len(sound) >= 2 and sound.isdisjoint(again) and (what != "tokens" or again == {file.parent.name})
    assert files_of(found) == files_of(prepare(config(tmp_path / "other", path), workers=1))


PROGRAM = f"""
import sys
from phalanx.data import pieces, preparation
preparation.LARGE_BYTES, pieces.PIECE_BYTES = {SMALL["LARGE_BYTES"]}, {SMALL["PIECE_BYTES"]}
from phalanx.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(status)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`phalanx prepare` in that folder, for which kilobytes are large."""
    command = [sys.executable, "-c", PROGRAM, "prepare", "--data.sources", "text", "--data.tokenizer", "byte", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def much_text(folder: Path, *, count: int = 150) -> Path:
    (folder / "text").mkdir()
    write_lines(folder / "text" / "a.jsonl", [text_of(i, length=900) for i in range(count)])
    return folder / "text"


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found]


def finished(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "cache" / "pieces").glob("[!.]*/*/piece.npz")}


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read in /proc")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_leaves_its_finished_pieces_and_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = much_text(tmp_path)
    process = start(tmp_path, "--workers", "2")
    wait_until(lambda: len(finished(tmp_path)) >= 3, process)
    workers = workers_of(process)
    assert len(workers) == 2
    threads = [[p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/comm")] for pid in workers]
    alone = [[name for name in names if "jemalloc" not in name] for names in threads]  # Arrow's, which sleeps
    assert all(len(names) <= 2 for names in alone), threads  # one listens: libraries have none for computing
    process.send_signal(number)
    told = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -number), told
    wait_until(lambda: all(map(is_gone, workers)))
    kept = finished(tmp_path)
    assert len(kept) >= 3 and not list((tmp_path / "cache" / "tokens").glob("[!.]*"))
    request.getfixturevalue("in_pieces")
    monkeypatch.chdir(tmp_path)
    made = Made(monkeypatch)
    found = prepare(config(tmp_path / "cache", "text"), workers=1)
    assert made.names and kept.isdisjoint(made.names) and left_of(tmp_path / "cache") == []
    assert files_of(found) == files_of(prepare(config(tmp_path / "other", text), workers=1))


@needs_proc
def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    much_text(tmp_path)
    process = start(tmp_path, "--workers", "2")
    wait_until(lambda: len(finished(tmp_path)) >= 2 and workers_of(process), process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and "Traceback" not in said, said
    assert "a process that tokenises ended (killed, probably for lack of memory); finished pieces are kept" in said
    assert finished(tmp_path)


@pytest.mark.usefixtures("in_pieces")
def test_few_pieces_share_the_cores_and_a_process_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("".join(text_of(i) for i in range(40)))
    asked: list[int] = []

    def start(serve: str, *, threads: int) -> None:
        asked.append(threads)
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pieces, "start_program", start)
    with pytest.raises(RunError, match=r"cannot start a process that tokenises \(Resource temporarily unavailable\)"):
        prepare(config(tmp_path / "cache", tmp_path / "text"), workers=8)
    assert asked == [2]  # three files, eight cores


def test_two_commands_at_once_prepare_once(tmp_path: Path) -> None:
    much_text(tmp_path, count=40)
    both = [start(tmp_path, "--workers", "2", "--json", f"{n}.json") for n in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2)]
    assert sorted(each["reused"] for each in found) == [False, True]
    assert found[0]["fingerprint"] == found[1]["fingerprint"] and found[0]["folders"] == found[1]["folders"]
    assert sum("all of it prepared before" in out for out, _ in said) == 1
    assert left_of(tmp_path / "cache") == []


# --- the command


def test_the_command_says_what_training_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    much_text(tmp_path, count=40)
    words = ["--data.sources", "text", "--data.tokenizer", "bpe:300"]
    assert main(["prepare", "tiny", *words, "--workers", "1", "--json", "out/found.json"]) == 0
    said, result = capsys.readouterr().out, json.loads((tmp_path / "out/found.json").read_text())
    assert "train: 39 documents" in said and "validation: 1 documents" in said and "kept in cache" in said
    assert f"fingerprint {result['fingerprint']}" in said and not result["reused"] and result["text_bytes"] > 1e5
    assert [Path(folder).is_dir() for folder in result["folders"]] == [True]
    there = prepare(DataConfig(sources=("text",), tokenizer="bpe:300"))
    assert there.reused and there.fingerprint == result["fingerprint"]
    assert result["train"] == {"documents": there.train.num_documents, "tokens": there.train.num_tokens}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "--workers = '0': must be a whole number, at least 1"),
        (["--json"], "--json: needs a value"),
        (["--data.sources", "nowhere"], "'nowhere': does not exist"),
        (["elsewhere.toml"], "repeat it on the command line (--data.cache"),
    ],
)
def test_what_is_wrong_with_the_command(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere.toml").write_text(f'[data]\ncache = "{tmp_path.parent}/elsewhere"\n')
    assert main(["prepare", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_for_many_gpus_is_prepared_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    much_text(tmp_path, count=20)
    assert main(["prepare", "mixtral-8x7b-64", "--data.sources", "text", "--data.tokenizer", "byte"]) == 0
    assert "train: " in capsys.readouterr().out


def test_ranks_that_wait_in_vain_hear_of_it() -> None:
    class Waits:
        def agree(self, work: object) -> None:
            raise PeerError("rank 3 received nothing from some other rank: timed out")

    class Alone:
        speaks, peers, info = False, Waits(), type("Info", (), {"local_rank": 1})

    with pytest.raises(PeerError, match=r"timed out; ranks wait 24 h for their text; `phalanx prepare RECIPE`"):
        rank_module.prepare_text(Alone(), resume=None, stop=None)  # type: ignore[arg-type]

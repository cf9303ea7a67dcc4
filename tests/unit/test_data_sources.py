"""Which files a source means, its identity, and everything that can be wrong before a file is read."""

import glob
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_help import write_megatron

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError
from phalanx.data import corpus
from phalanx.data.cache import silent
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import documents, identify, resolve

pytestmark = pytest.mark.unit


def config(*sources, **settings):
    return DataConfig(sources=tuple(map(str, sources)), **settings)


def texts(source):
    log = ProblemLog()
    found = [d.text for d in documents(source.spans, source.read_options, log)]
    log.raise_if_any()
    return found


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "b.txt").write_text("b")
    (root / "a.jsonl").write_text('{"text": "a"}\n')
    (root / "deep" / "c.txt").write_text("c")
    (root / ".hidden" / "d.txt").write_text("d")
    (root / "README.md").write_text("no data")
    write_megatron(tmp_path / "tokens", [[1, 2], [3]])
    return root


def test_folders_globs_files_and_pairs(folder):
    above = folder.parent
    found = resolve(config(folder, folder / "**/*.txt", folder / "b.txt", above / "tokens", above / "tokens.idx"))
    names = [[f.relative_to(above).as_posix() for f in s.files] for s in found]
    assert names == [
        ["corpus/a.jsonl", "corpus/b.txt", "corpus/deep/c.txt"],
        ["corpus/b.txt", "corpus/deep/c.txt"],
        ["corpus/b.txt"],
        ["tokens.bin"],
        ["tokens.bin"],
    ]
    assert [s.kind for s in found] == ["text", "text", "text", "tokens", "tokens"]
    assert texts(found[0]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus/a.json", r"does not exist; did you mean 'a\.jsonl'"),
        ("corups/a.jsonl", r"the folder .*corups does not exist either"),
        ("corpus/README.md", r"unknown extension; readable: \.txt, \.jsonl, \.jsonl\.gz"),
        ("corpus/*.csv", r"matches no file"),
        ("corpus/*", r"README\.md': has an unknown extension"),
        ("empty", r"is an empty folder"),
        ("papers", r"without data files \(it holds \.pdf\)"),
        ("mixed", r"mixes text with \.bin/\.idx tokens"),
        ("alone/pipe", r"is neither a file nor a folder; copy it to a file"),
        ("alone/x.bin", r"x\.idx': does not exist; keep \.bin and its index together"),
        ("alone/y.idx", r"y\.bin': does not exist; keep \.bin and its tokens together"),
    ],
)
def test_names_that_are_no_source(folder, name, message):
    above = folder.parent
    for made in ("empty", "papers", "mixed", "alone"):
        (above / made).mkdir()
    (above / "papers" / "p.pdf").write_bytes(b"%PDF")
    os.mkfifo(above / "alone" / "pipe")
    (above / "alone" / "x.bin").write_bytes(b"\0\0")
    (above / "alone" / "y.idx").write_bytes(b"\0\0")
    write_megatron(above / "mixed" / "t", [[1]])
    (above / "mixed" / "t.txt").write_text("t")
    with pytest.raises(DataError, match=message) as caught:
        resolve(config(above / name))
    assert caught.value.problems[0].where == "data.sources[0]"


# --- links


def names_of(source, root):
    return [f.relative_to(root).as_posix() for f in source.files]


@pytest.fixture
def linked(folder):
    """`folder` with links: to a folder elsewhere, to one inside, to itself, and to a file."""
    (folder.parent / "elsewhere" / "in").mkdir(parents=True)
    (folder.parent / "elsewhere" / "e.txt").write_text("e")
    (folder.parent / "elsewhere" / "in" / "f.txt").write_text("f")
    (folder / "a-link").symlink_to(folder.parent / "elsewhere")
    (folder / "again").symlink_to(folder.parent / "elsewhere" / "in")
    (folder / "a-deep").symlink_to(folder / "deep")
    (folder / "deep" / "round").symlink_to(folder)
    (folder / "also-b.txt").symlink_to(folder / "b.txt")
    return folder


def test_linked_folders_are_read_once_whatever_leads_to_them(linked):
    (found,) = resolve(config(linked))
    own = ["a.jsonl", "also-b.txt", "b.txt", "deep/c.txt"]
    assert names_of(found, linked) == sorted(["a-link/e.txt", "a-link/in/f.txt", *own])
    for pattern in ("**/*.txt", "**/**/*.txt", "*/../**/*.txt"):
        (globbed,) = resolve(config(linked / pattern))
        assert sorted(texts(globbed)) == ["b", "b", "c", "e", "f"]
    assert names_of(resolve(config(linked / "**/round/*.txt"))[0], linked) == [
        "deep/round/also-b.txt",
        "deep/round/b.txt",
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        "**/*.txt",
        "**/deep/*.txt",
        "*/**/c.*",
        "**/**",
        "d**/*.txt",
        "**/.hidden/*",
        "./**/deep/**/*.txt",
        "**/[bc].txt",
    ],
)
def test_without_links_a_glob_finds_what_python_finds(folder, pattern, monkeypatch):
    (folder / "README.md").unlink()
    (folder / "deep" / "[x]" / "deep").mkdir(parents=True)
    (folder / "deep" / "[x]" / "deep" / "c.txt").write_text("again")
    for spec in (pattern, f"{folder}/{pattern}"):
        monkeypatch.chdir(folder)
        expected = sorted({Path(p) for p in glob.glob(spec, recursive=True) if Path(p).is_file()})
        assert list(resolve(config(spec))[0].files) == expected and expected


def test_two_stars_give_no_file_twice(folder):
    for pattern in ("**/**/*.txt", "**/**/**", "**/*"):
        (folder / "README.md").unlink(missing_ok=True)
        (found,) = resolve(config(folder / pattern))
        assert len(set(found.files)) == len(found.files) >= 2
    assert names_of(resolve(config(folder / "**/**/*.txt"))[0], folder) == ["b.txt", "deep/c.txt"]


def test_links_that_lead_nowhere_are_named(folder):
    (folder / "notes.md").symlink_to(folder / "gone.md")  # no data by its name
    before = resolve(config(folder))[0].files
    (folder / "deep" / "gone.txt").symlink_to(folder / "nowhere.txt")
    (folder / "round.jsonl").symlink_to(folder / "round.jsonl")
    for source in (folder, folder / "**/*.txt", folder / "*.jsonl"):
        with pytest.raises(
            DataError, match=r"(gone\.txt|round\.jsonl)': is a link that leads to no file; repair or remove"
        ):
            resolve(config(source))
    (folder / "deep" / "gone.txt").unlink()
    (folder / "round.jsonl").unlink()
    assert resolve(config(folder))[0].files == before


def test_folders_that_cannot_be_listed_are_told(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # who runs this may be root
    (found,) = resolve(config(folder))
    assert names_of(found, folder) == ["a.jsonl", "b.txt"]
    assert "files that are not read (1: .md) and folders that cannot be listed (1: " in found.unread


def test_many_files_are_found_in_the_order_of_their_paths_and_fast(tmp_path):
    for number in range(40):
        (tmp_path / "many" / f"{number % 7}.d" / f"{number}").mkdir(parents=True)
        for file in range(50):
            (tmp_path / "many" / f"{number % 7}.d" / f"{number}" / f"{file}.txt").touch()
    (found,) = resolve(config(tmp_path / "many"))
    assert list(found.files) == sorted((tmp_path / "many").rglob("*.txt")) and len(found.files) == 2000
    assert found.files == resolve(config(tmp_path / "many" / "**" / "*.txt"))[0].files


def test_unknown_builtin():
    with pytest.raises(DataError, match="did you mean 'builtin:python'"):
        resolve(config("builtin:pyhton"))


def test_a_field_that_no_file_has(folder):
    with pytest.raises(DataError, match=r"data\.text_field = 'body': has no effect"):
        resolve(config(folder / "b.txt", folder.parent / "tokens", text_field="body"))


def test_everything_at_once(folder):
    wrong = config("gone.txt", "builtin:perl")
    with pytest.raises(DataError) as caught:
        resolve(wrong)
    assert [p.where for p in caught.value.problems] == ["data.sources[0]", "data.sources[1]"]


# --- a field for each source


@pytest.fixture
def fields(tmp_path):
    """Records whose text has another name in each file."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "a.jsonl").write_text('{"text": "a", "content": "A"}\n')
    pq.write_table(pa.table({"body": ["p"], "content": ["P"]}), tmp_path / "my" / "part.parquet")
    (tmp_path / "my" / "t.txt").write_text("t")
    return tmp_path / "my"


def test_each_source_may_name_its_field(fields):
    found = resolve(config(f"{fields}/*.jsonl#content", f"{fields}/part.parquet#body", f"{fields}/a.jsonl"))
    assert [texts(s) for s in found] == [["A"], ["p"], ["a"]]
    assert texts(resolve(config(f"{fields}#content"))[0]) == ["A", "P", "t"]
    assert texts(resolve(config(f"{fields}/#content"))[0]) == ["A", "P", "t"]
    mixed = resolve(config(f"{fields}/a.jsonl#content", f"{fields}/part.parquet", text_field="body"))
    assert [texts(s) for s in mixed] == [["A"], ["p"]]


def test_a_file_whose_name_has_the_mark_is_that_file(fields):
    (fields / "a.jsonl#content").mkdir()
    (fields / "a.jsonl#content" / "b.jsonl").write_text('{"text": "file"}')
    (fields / "n#1.jsonl").write_text('{"text": "one", "x": "X"}')
    named = (fields / "a.jsonl#content", fields / "n#1.jsonl", f"{fields}/n#*.jsonl", f"{fields}/n#1.jsonl#x")
    assert [texts(s) for s in resolve(config(*named))] == [["file"], ["one"], ["one"], ["X"]]
    with pytest.raises(DataError, match=r"data\.sources\[0\] = '.*my/c#/a\.jsonl': does not exist"):
        resolve(config(f"{fields}/c#/a.jsonl"))
    (fields / "read#me.md").write_text("no data")
    with pytest.raises(DataError, match=r"read#me\.md': has an unknown extension"):
        resolve(config(f"{fields}/read#me.md"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{my}/t.txt#body", r"names a field \('body'\), and holds no records with fields .*; write .*t\.txt alone"),
        ("{my}/../tokens#body", r"names a field \('body'\)"),
        ("builtin:python#body", r"names a field \('body'\).*; write builtin:python alone"),
        ("builtin:pyhton#body", r"did you mean 'builtin:python'"),
        ("#content", r"'#content'"),
        ("{my}/a.jsonl#", r"names no field behind its #; write .*a\.jsonl#FIELD, or .*a\.jsonl alone"),
        ("{my}/b.jsonl#body", r"b\.jsonl': does not exist; did you mean 'a\.jsonl'"),
    ],
)
def test_fields_that_do_not_fit(fields, entry, message):
    write_megatron(fields.parent / "tokens", [[1, 2], [3]])
    with pytest.raises(DataError, match=message) as caught:
        resolve(config(entry.format(my=fields)))
    assert [p.where for p in caught.value.problems] == ["data.sources[0]"]


def test_a_field_for_all_is_inert_where_each_source_names_its_own(fields):
    with pytest.raises(DataError, match=r"data\.text_field = 'body': has no effect: each source names its own field"):
        resolve(config(f"{fields}/a.jsonl#content", fields / "t.txt", text_field="body"))


def test_a_missing_field_names_the_source_and_the_fields_there_are(fields):
    for entry, hint in (
        (f"{fields}/a.jsonl#txt", "change the field of"),
        (f"{fields}/part.parquet", "or add #FIELD to"),
    ):
        with pytest.raises(DataError) as caught:
            texts(resolve(config(entry))[0])
        assert f"{hint} {entry!r} in data.sources" in str(caught.value) and "content" in str(caught.value)


def test_the_field_belongs_to_the_identity(fields, tmp_path):
    names = (f"{fields}/a.jsonl", f"{fields}/a.jsonl#content", f"{fields}/a.jsonl#text")
    plain, other, same = identity(tmp_path / "cache", *names)
    assert plain == same != other


# --- identity


def identity(cache, *sources, **settings):
    return [identify(s, cache, silent).identity for s in resolve(config(*sources, **settings))]


def test_identity_is_content_not_place(folder, tmp_path):
    cache = tmp_path / "cache"
    (before,) = identity(cache, folder)
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert identity(cache, moved) == [before]
    (moved / "README.md").write_text("changed, but no data")
    assert identity(cache, moved) == [before]
    (moved / "b.txt").write_text("B")
    assert identity(cache, moved) != [before]
    assert identity(cache, folder, text_field="body") != [before]


def test_identity_is_remembered_without_reading_again(folder, tmp_path):
    phases = []
    (source,) = resolve(config(folder))
    first = identify(source, tmp_path / "cache", lambda phase, *_: phases.append(phase))
    assert phases
    phases.clear()
    assert identify(source, tmp_path / "cache", lambda phase, *_: phases.append(phase)) == first
    assert not phases


def test_identity_of_tokens_counts_the_index(tmp_path):
    write_megatron(tmp_path / "a", [[1, 2], [3]])
    before = identity(tmp_path / "cache", tmp_path / "a")
    write_megatron(tmp_path / "a", [[1], [2, 3]])
    assert identity(tmp_path / "cache", tmp_path / "a") != before


def test_a_file_that_cannot_be_read(folder, tmp_path):
    sources = resolve(config(folder))
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt .*cannot be read \(No such file"):
        identify(sources[0], tmp_path / "cache", silent)


def test_a_cache_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"data\.cache = .*must be a folder that can be written"):
        identity(tmp_path / "cache", folder)


# --- the built-in corpus


def make_package(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def body(word):
    return f"# {word}\n".encode() * 200


FILES = {
    "a/one.py": body("one"),
    "a/two.py": body("two"),
    "b/copy_of_one.py": body("one"),
    "b/_vendor/c/three.py": body("three"),
    "b/tests/four.py": body("four"),
    "b/test_five.py": body("five"),
    "b/short.py": b"x = 1\n",
    "b/table.py": b"TABLE = [1, 2]\n" * 100_000,
    "b/latin.py": "# größe\n".encode("latin-1") * 200,
    "b/data.txt": body("six"),
    "phalanx/seven.py": body("seven"),
    "site-packages/eight.py": body("eight"),
}


def test_builtin_chooses_by_content_alone(tmp_path):
    here = make_package(tmp_path / "here", FILES)
    there = make_package(tmp_path / "there", {f"x/{k}": v for k, v in reversed(FILES.items())})
    chosen = {}
    for root in (here, there):
        files, found = corpus.select(corpus.candidates((root,)), 10**9, silent)
        chosen[root] = ([f.read_bytes() for f in files], found)
    assert sorted(chosen[here][0]) == sorted([body("one"), body("two")])
    assert chosen[here] == chosen[there]


def test_builtin_cap_takes_a_prefix(tmp_path):
    root = make_package(tmp_path, {f"p/m{i}.py": body(f"word{i}") for i in range(40)})
    everything, _ = corpus.select(corpus.candidates((root,)), 10**9, silent)
    some, identity_of_some = corpus.select(corpus.candidates((root,)), 20_000, silent)
    assert len(everything) == 40 and some == everything[: len(some)]
    assert 20_000 <= sum(f.stat().st_size for f in some) < 22_000
    (root / "p" / f"{some[0].name}").unlink()
    assert corpus.select(corpus.candidates((root,)), 20_000, silent)[1] != identity_of_some


def test_builtin_without_a_library(tmp_path):
    with pytest.raises(DataError, match="no Python sources"):
        corpus.select(corpus.candidates((tmp_path,)), 100, silent)


def test_builtin_of_this_interpreter(tmp_path):
    (source,) = resolve(config("builtin:python", builtin_bytes=300_000))
    found = identify(source, tmp_path, silent)
    again = identify(replace(source, identity=""), tmp_path, silent)
    assert found == again and found.identity
    assert 300_000 <= found.num_bytes < 300_000 + corpus.LARGEST_BYTES
    assert all(f.suffix == ".py" for f in found.files) and len(texts(found)) == len(found.files)
    assert not any("phalanx" in f.parts for f in found.files)
    assert identify(replace(source, builtin_bytes=100_000), tmp_path, silent).identity != found.identity

"""Every text format comes back as it was written, and every kind of damage is named by file and line."""

import gzip
import json
import random
import string

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.errors import DataError
from phalanx.data import parquet_pages
from phalanx.data.formats import ReadOptions, read_documents
from phalanx.data.parquet_pages import column_chunks, page_sizes
from phalanx.data.problems import MOST, ProblemLog

pytestmark = pytest.mark.unit

TEXTS = [
    "plain",
    "zwölf Boxkämpfer",
    "日本語のテキスト 🎉",
    "",
    "two\nlines\r\n",
    "<|endoftext|> spelled out",
    "\x00\t",
]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def jsonl(texts, field="text"):
    return "".join(
        json.dumps({field: t, "id": i}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)
    ).encode()


def write(path, data):
    path.write_bytes(data)
    return path


def write_parquet(path, columns):
    pq.write_table(pa.table(columns), path)
    return path


def read(path, **options):
    """Texts and problems."""
    log = ProblemLog()
    documents = list(read_documents(path, ReadOptions(**options), log))
    return [d.text for d in documents], log.found


def only_problem(path, **options):
    _, problems = read(path, **options)
    assert len(problems) == 1, problems
    return problems[0]


# --- round trips


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("A.JSONL.ZST", zstd)])
def test_jsonl(tmp_path, name, pack):
    path = write(tmp_path / name, pack(jsonl(TEXTS) + b"\n  \n"))
    assert read(path) == (TEXTS, [])


def test_jsonl_of_concatenated_streams(tmp_path):
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        path = write(tmp_path / name, pack(jsonl(["a", "b"])) + pack(jsonl(["c"])))
        assert read(path) == (["a", "b", "c"], [])


def test_last_line_without_an_end(tmp_path):
    assert read(write(tmp_path / "a.jsonl", jsonl(["a", "b"]).rstrip())) == (["a", "b"], [])


def test_a_byte_order_mark_is_skipped(tmp_path):
    """Windows editors write one."""
    marked = b"\xef\xbb\xbf" + jsonl(["a", "b"]).replace(b"\n", b"\r\n")
    assert read(write(tmp_path / "a.jsonl", marked)) == (["a", "b"], [])
    assert read(write(tmp_path / "a.jsonl.gz", gzip.compress(marked))) == (["a", "b"], [])
    assert read(write(tmp_path / "empty.jsonl", b"\xef\xbb\xbf")) == ([], [])


def test_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"n": list(range(len(TEXTS))), "text": TEXTS})
    assert read(path) == (TEXTS, [])
    large = pa.array(TEXTS * 200, pa.large_string())
    assert read(write_parquet(tmp_path / "b.parquet", {"body": large}), text_field="body") == (TEXTS * 200, [])


def test_other_field(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl(["x"], field="content"))
    assert read(path, text_field="content") == (["x"], [])


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.integers(1, 40))
@settings(max_examples=times(150, 50), deadline=None)
def test_txt_pieces_join_to_the_file(tmp_path_factory, text, limit):
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    pieces, problems = read(write(path, text.encode()), txt_document_chars=limit)
    assert "".join(pieces) == text.removeprefix("\ufeff") and not problems
    assert all(0 < len(p) <= limit for p in pieces)


def test_txt_is_cut_after_line_ends_and_places_are_lines(tmp_path):
    path = write(tmp_path / "a.txt", b"one\ntwo\nthree\nfour\n")
    documents = list(read_documents(path, ReadOptions(txt_document_chars=9), ProblemLog()))
    assert [(d.text, d.where) for d in documents] == [
        ("one\ntwo\n", f"{path}:1"),
        ("three\n", f"{path}:3"),
        ("four\n", f"{path}:4"),
    ]


def test_txt_larger_than_a_block_keeps_characters_whole(tmp_path):
    text = "".join(random.Random(1).choices("aé日🎉\n", k=900_000))
    pieces, problems = read(write(tmp_path / "a.txt", text.encode()))
    assert "".join(pieces) == text and not problems and len(pieces) > 10


def test_empty_files_have_no_documents(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.py"):
        assert read(write(tmp_path / name, b"")) == ([], [])


# --- damage


@pytest.mark.parametrize("lines", [0, 3, 40_000])
def test_txt_with_broken_utf8_names_line_and_byte(tmp_path, lines):
    """40,000 lines put the bad byte beyond the first block that is read."""
    before = ("ü" + string.ascii_lowercase + "\n").encode() * lines
    path = write(tmp_path / "a.txt", before + b"ok \xc3\x28 bad\nmore\n")
    problem = only_problem(path)
    assert problem.where == f"{path}:{lines + 1}"
    assert f"not at byte {len(before) + 3}" in problem.rule and "iconv" in problem.hint
    assert problem.value == b"\xc3\x28 b"


def test_txt_that_ends_inside_a_character(tmp_path):
    problem = only_problem(write(tmp_path / "a.txt", b"a\nb\xe6\x97"))
    assert problem.where.endswith("a.txt:2") and "byte 3" in problem.rule


def test_utf16_is_recognised(tmp_path):
    problem = only_problem(write(tmp_path / "a.txt", "hello".encode("utf-16")))
    assert "utf-16" in problem.hint and "byte 0" in problem.rule


def test_bad_json_lines_are_all_named_and_the_good_ones_kept(tmp_path):
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut off',
        b'["a list"]',
        b'{"txt": "other field"}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "good too"}',
    ]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    texts, problems = read(path)
    assert texts == ["good", "good too"]
    assert [p.where for p in problems] == [f"{path}:{n}" for n in range(2, 8)]
    rules = [p.rule for p in problems]
    for rule, part in zip(
        rules, ["one JSON object", "not a list", "no field", "must be text", "UTF-8", "surrogate"], strict=True
    ):
        assert part in rule
    assert "'text'" in rules[2] and "'txt'" in problems[2].hint


def test_a_file_of_the_wrong_kind_stops_after_some_problems(tmp_path):
    path = write(tmp_path / "a.jsonl", b"not json\n" * 1000)
    with pytest.raises(DataError) as caught:
        read(path)
    assert [p.where for p in caught.value.problems] == [
        f"{path}:1",
        f"{path}:2",
        f"{path}:3",
        f"{MOST - 3} more, the last of them {path}:{MOST}",
    ]
    assert "one JSON object" in caught.value.problems[-1].rule and "reading stopped" in str(caught.value)


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)])
def test_damaged_compression_is_named(tmp_path, name, pack):
    random_text = "".join(random.Random(0).choices(string.printable, k=300_000))
    whole = pack(jsonl([random_text] * 3))
    truncated = only_problem(write(tmp_path / name, whole[:-2000]))
    assert "cannot be decompressed" in truncated.rule and str(tmp_path / name) in truncated.where
    spoiled = bytearray(whole)
    spoiled[1000:1200] = bytes(200)
    assert read(write(tmp_path / name, bytes(spoiled)))[1]
    assert "cannot be decompressed" in only_problem(write(tmp_path / name, b"plain text, not compressed\n" * 9)).rule
    nothing = only_problem(write(tmp_path / name, b""))  # gzip -t and zstd -t refuse it as well
    assert "cannot be decompressed (it has no bytes at all" in nothing.rule and nothing.hint == "copy the file again"
    assert read(write(tmp_path / name, pack(b""))) == ([], [])


def test_a_parquet_footer_without_the_length_of_a_column_is_refused(tmp_path, monkeypatch):
    about = {3: [b"text"], 9: 4, 7: None}  # as a changed byte leaves it
    monkeypatch.setattr(parquet_pages, "_read", lambda *_: ({4: [{1: [{3: about}]}]}, 0))
    problem = only_problem(write_parquet(tmp_path / "a.parquet", {"text": ["x"]}))
    assert "is not a readable parquet file (row group 0 names -1 bytes" in problem.rule


def test_parquet_problems(tmp_path):
    missing = only_problem(write_parquet(tmp_path / "a.parquet", {"content": ["x"], "texts": ["y"]}))
    assert "no column 'text'" in missing.rule and "'texts'" in missing.hint
    kind = only_problem(write_parquet(tmp_path / "b.parquet", {"text": [1, 2], "body": ["a", "b"]}))
    assert "must hold strings" in kind.rule and "body" in kind.hint and kind.value == "int64"
    null = only_problem(write_parquet(tmp_path / "c.parquet", {"text": ["a", None, "c"]}))
    assert null.where.endswith("c.parquet:row 2") and "must be text" in null.rule
    whole = write_parquet(tmp_path / "d.parquet", {"text": ["a" * 1000] * 100}).read_bytes()
    assert "not a readable parquet" in only_problem(write(tmp_path / "d.parquet", whole[:-50])).rule
    assert "not a readable parquet" in only_problem(write(tmp_path / "e.parquet", b"hello")).rule


def test_parquet_with_broken_utf8(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")]
    )
    problem = only_problem(write_parquet(tmp_path / "a.parquet", {"text": bad}))
    assert problem.where.endswith(":row 2") and "UTF-8" in problem.rule


def test_a_file_that_is_gone(tmp_path):
    assert "cannot be read" in only_problem(tmp_path / "gone.txt").rule
    assert "cannot be read" in only_problem(tmp_path / "gone.jsonl.gz").rule
    assert "cannot be read" in only_problem(tmp_path / "gone.parquet").rule


def documents_and_problems(path):
    log = ProblemLog()
    count = sum(1 for _ in read_documents(path, ReadOptions(), log))
    return count, [str(p) for p in log.found]


@pytest.mark.core
@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("byte", [b"0", b"\n"])
def test_a_bomb_meets_a_bound_that_names_the_file(tmp_path, kind, byte):
    """1 GB of the same byte in some 100 kB: one line without end, or only line ends."""
    part = byte * (16 << 20)
    packed = gzip.compress(part, mtime=0) if kind == "gz" else zstd(part)
    path = tmp_path / f"bomb.jsonl.{kind}"
    path.write_bytes(packed * 64)
    count, (problem,) = documents_and_problems(path)
    words = "has more than 33554432 bytes" if byte == b"0" else "becomes more than 500 times as large as it is"
    assert count == 0 and str(path) in problem and words in problem


def test_bombs_of_parquet(tmp_path):
    same = pa.DictionaryArray.from_arrays(np.zeros(100_000, np.int32), pa.array(["0" * (1 << 20)]))
    for name, column, words in (
        (
            "page",
            pa.array(["0" * (80 << 20)]),
            "row group 0 = 'page.parquet': has a page that becomes more than ",
        ),
        ("value", pa.array(["0" * (40 << 20)]), "row 1 has more than 33554432 bytes"),
        ("same", same, "becomes more than 500 times as large as it is"),
        ("empty", pa.array([""] * 1_000_000), "becomes more than 500 times as large as it is"),
    ):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": column}), path, compression="zstd", write_statistics=False, store_schema=False)
        assert path.stat().st_size < 20_000
        problem = documents_and_problems(path)[1][-1]
        assert str(path) in problem and words in problem


@pytest.mark.parametrize(("bytes_each", "rows"), [(10, 1024), (1 << 20, 511), (30 << 20, 17), (40 << 20, 16)])
def test_as_many_rows_at_once_as_would_fit_were_each_as_large_as_the_largest_page(
    tmp_path, monkeypatch, bytes_each, rows
):
    asked, inner = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, **words: asked.append(words["batch_size"]) or inner(self, **words)
    )
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "0" * bytes_each]})
    documents_and_problems(path)
    assert asked == [rows]


def test_long_documents_are_no_bombs(tmp_path):
    """A writer looks at a page's size once in 1,024 rows: 460 documents of 150 kB are one page of 69 MB."""
    path, words = (
        tmp_path / "books.parquet",
        np.random.default_rng(0).integers(0, 256, 75_000, dtype=np.uint8).tobytes().hex(),
    )
    pq.write_table(pa.table({"text": [f"{i} {words[i:]}" for i in range(461)]}), path, row_group_size=460)
    assert documents_and_problems(path) == (461, [])


def test_pages_are_found_in_every_file_of_the_library(tmp_path):
    """Codecs, encodings and versions of pages; several columns and row groups."""
    texts = [f"{i} " + "text " * 50 for i in range(3000)]
    table = pa.table({"n": range(3000), "text": texts, "nested": [[{"text": t[:4]}] for t in texts]})
    for options in (
        {},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"use_dictionary": False, "compression": "gzip"},
        {"compression": "none", "data_page_size": 1000, "write_page_index": True},
    ):
        path = tmp_path / "a.parquet"
        pq.write_table(table, path, row_group_size=1000, **options)
        with path.open("rb") as file:
            chunks = column_chunks(file, path.stat().st_size, "text")
            sizes = [list(page_sizes(file, chunk)) for chunk in chunks]
        told = [pq.ParquetFile(path).metadata.row_group(i).column(1).total_uncompressed_size for i in range(3)]
        assert len(chunks) == 3 and all(
            sum(of) <= whole <= sum(of) + 2000 * len(of) for of, whole in zip(sizes, told, strict=True)
        )
        assert documents_and_problems(path) == (3000, [])

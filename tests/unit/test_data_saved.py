"""Datasets that `save_to_disk` of Hugging Face `datasets` wrote: which files are read, in which order, and everything that may be wrong with them."""

import json
import os
import random
import struct

import pyarrow as pa
import pytest
from tiers import times

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError
from phalanx.data.cache import silent
from phalanx.data.formats import ReadOptions, read_documents
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import documents, identify, resolve

pytestmark = pytest.mark.unit

TEXTS = [f"{i} zwölf 日本 " + "x" * (i % 7) for i in range(50)]


def stream(columns, rows=10, **options):
    """Bytes of an Arrow stream with batches of some rows, as `datasets` writes it (which writes 1,000)."""
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def save(folder, texts=TEXTS, *, parts=2, names=None, column="text", kind=None, **state):
    """A folder as `Dataset.save_to_disk` leaves it."""
    folder.mkdir(parents=True)
    names = names or [f"data-{i:05d}-of-{parts:05d}.arrow" for i in range(parts)]
    size = -(-len(texts) // len(names))
    for i, name in enumerate(names):
        part = texts[i * size : (i + 1) * size]
        columns = {"id": range(len(part)), column: pa.array(part, kind or pa.string()), "list": [[1, 2]] * len(part)}
        (folder / name).write_bytes(stream(columns))
    told = {"_data_files": [{"filename": n} for n in names], "_fingerprint": "0123", "_format_columns": None}
    told |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(told, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {column: {"dtype": "string", "_type": "Value"}}}))
    return folder


def source_of(*entries, **settings):
    return resolve(DataConfig(sources=tuple(map(str, entries)), **settings))[0]


def texts(*entries, **settings):
    log, source = ProblemLog(), source_of(*entries, **settings)
    found = [d.text for d in documents(source.spans, source.read_options, log)]
    log.raise_if_any()
    return found


def refusal(*entries, **settings):
    """The one problem."""
    with pytest.raises(DataError) as caught:
        texts(*entries, **settings)
    (problem,) = caught.value.problems
    return str(problem)


# --- what is read


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path, kind):
    assert texts(save(tmp_path / "ds", kind=kind)) == TEXTS
    assert texts(save(tmp_path / "turned", names=["b.arrow", "a.arrow"], kind=kind)) == TEXTS
    assert texts(f"{save(tmp_path / 'other', column='content', kind=kind)}#content") == TEXTS
    (tmp_path / "ds" / "cache-12ab.arrow").write_bytes(stream({"text": ["what map() left"]}))
    assert texts(tmp_path / "ds") == TEXTS


def test_the_train_split_of_a_dict(tmp_path):
    for split in ("train", "test"):
        save(tmp_path / "ds" / split, [f"{split} {i}" for i in range(5)])
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert texts(tmp_path / "ds") == [f"train {i}" for i in range(5)]
    assert texts(tmp_path / "ds" / "test") == [f"test {i}" for i in range(5)]
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    assert "without a split 'train' (it has: test, validation); name a split's folder: " in refusal(tmp_path / "ds")


def test_one_file_and_a_folder_of_files_without_a_state(tmp_path):
    ds = save(tmp_path / "ds")
    assert texts(ds / "data-00000-of-00002.arrow") == TEXTS[:25]
    assert texts(f"{ds}/*.arrow") == TEXTS
    (ds / "state.json").unlink()
    assert texts(ds) == TEXTS


def test_a_state_that_is_none_of_a_dataset(tmp_path):
    (tmp_path / "state.json").write_text("[]")
    (tmp_path / "a.txt").write_text("text")
    assert texts(tmp_path) == ["text"]


def test_identity_is_the_content_in_its_order(tmp_path):
    def identity(folder):
        return identify(source_of(folder), tmp_path / "cache", silent).identity

    first = identity(save(tmp_path / "a"))
    assert first == identity(save(tmp_path / "b", names=["b.arrow", "a.arrow"]))
    listed = {"_data_files": [{"filename": f"data-0000{i}-of-00002.arrow"} for i in (1, 0)]}
    assert first != identity(save(tmp_path / "c", **listed))


def test_empty_batches_and_no_rows(tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes(stream({"text": pa.array([], pa.string())}))
    assert texts(path) == []
    path.write_bytes(stream({"text": ["", "a", ""]}, rows=1))
    assert texts(path) == ["", "a", ""]


# --- what a folder may say


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": []}, "lists no data files in its state.json"),
        ({"_data_files": None}, "_data_files = 'None': must be a list of {"),
        ({"_data_files": [{"filename": 3}]}, "must be a list of {"),
        ({"_data_files": ["data-00000-of-00002.arrow"]}, "must be a list of {"),
        ({"_data_files": [{}]}, "must be a list of {"),
        ({"_data_files": [{"filename": "../out.arrow"}]}, "'../out.arrow': must be the name of a file .arrow in the folder"),
        ({"_data_files": [{"filename": "{tmp}/out.arrow"}]}, "must be the name of a file .arrow in the folder"),
        ({"_data_files": [{"filename": ".."}]}, "must be the name of a file .arrow in the folder"),
        ({"_data_files": [{"filename": "out.txt"}]}, "must be the name of a file .arrow in the folder"),
        ({"_data_files": [{"filename": "a\0.arrow"}]}, "must be the name of a file .arrow in the folder"),
        ({"_data_files": [{"filename": "link.arrow"}]}, "is a link to another place; copy the folder with its files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "'gone.arrow': does not exist"),
        ({"_data_files": [{"filename": "data-00000-of-00002.arrow"}] * 2}, "is listed twice"),
        ({"_indices_name": "indices.arrow"}, "has a mapping of indices.*flatten_indices"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "has a mapping of indices"),
    ],
)  # fmt: skip
def test_only_files_of_the_folder_are_followed(tmp_path, state, message):
    (tmp_path / "out.arrow").write_bytes(stream({"text": ["not of this dataset"]}))
    text = json.dumps(state).replace("{tmp}", str(tmp_path))
    ds = save(tmp_path / "ds", **json.loads(text))
    os.symlink(tmp_path / "out.arrow", ds / "link.arrow")
    first, *rest = message.split(".*")
    assert first in (found := refusal(ds)) and all(each in found for each in rest)


@pytest.mark.parametrize("said", ["", "{", "[]", '{"a": 1}', "\xff", "[" * 1000])
def test_a_damaged_state_or_dict(tmp_path, said):
    ds = save(tmp_path / "ds")
    (ds / "state.json").write_bytes(said.encode("latin-1"))
    assert "state.json" in refusal(ds)
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_bytes(said.encode("latin-1"))
    assert "dataset_dict.json" in refusal(tmp_path / "dict")


def test_a_split_that_is_missing_or_elsewhere(tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "'train': does not exist" in refusal(tmp_path / "ds")
    os.symlink(save(tmp_path / "other"), tmp_path / "ds" / "train")
    assert "is a link to another place" in refusal(tmp_path / "ds")


def test_a_saved_dataset_below_a_folder_of_files(tmp_path):
    save(tmp_path / "my" / "ds")
    (tmp_path / "my" / "a.txt").write_text("text")
    assert "with a saved dataset in it (ds); list " in refusal(tmp_path / "my")


# --- what a file may be


def test_columns_that_are_not_there_or_hold_no_text(tmp_path):
    ds = save(tmp_path / "ds", column="content", parts=1)
    assert "has no column 'text'" in (found := refusal(ds)) and "'content'" in found and "#FIELD" in found
    assert "column 'id' must hold strings" in (found := refusal(f"{ds}#id")) and "columns of text: content" in found
    (tmp_path / "a.arrow").write_bytes(stream({"text": ["a", None]}))
    assert "a.arrow:row 2" in (found := refusal(tmp_path / "a.arrow")) and "must be text" in found
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    (tmp_path / "b.arrow").write_bytes(stream(twice))
    assert "is the name of several columns" in refusal(tmp_path / "b.arrow")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    """Also where a batch ends: the library would take the rest for the whole."""
    whole, path = stream({"text": TEXTS[:8]}, rows=3), tmp_path / "a.arrow"
    for length in [*range(0, len(whole), 8), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "is not a readable stream of Arrow" in refusal(path), length
    path.write_bytes(whole + b"more")
    assert f"it ends at byte {len(whole)} of {len(whole) + 4}" in refusal(path)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_batches_are_refused_before_they_are_read(tmp_path, codec):
    """A buffer of 8 bytes may claim to become 2^60."""
    (tmp_path / "a.arrow").write_bytes(stream({"text": ["0" * (1 << 20)]}, compression=codec))
    assert "is compressed" in refusal(tmp_path / "a.arrow")


def test_other_kinds_of_arrow_are_named(tmp_path):
    path, table = tmp_path / "a.arrow", pa.table({"text": ["a"]})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert "it is an Arrow file, and must be an Arrow stream" in refusal(path)
    path.write_bytes(stream({"text": pa.array(["a", "a"]).dictionary_encode()}))
    assert "column 'text' must hold strings" in refusal(path)
    path.write_bytes(stream({"text": ["a", "a"], "kind": pa.array(["b", "b"]).dictionary_encode()}))
    assert "is no record batch" in refusal(path)
    path.write_bytes(b"no arrow at all, but text")
    assert "no message begins at byte 0" in refusal(path)


def test_offsets_beyond_the_bytes_are_refused(tmp_path):
    """Followed, they would read what lies behind the file in memory."""
    path, whole = tmp_path / "a.arrow", stream({"text": ["abc", "def"]})
    offsets = struct.pack("<3i", 0, 3, 6)
    assert whole.count(offsets) == 1
    for wrong in ((0, 3, 1 << 30), (0, 1 << 30, 6), (0, -3, 6), (4, 3, 6)):
        path.write_bytes(whole.replace(offsets, struct.pack("<3i", *wrong)))
        assert "is not a readable stream of Arrow" in refusal(path), wrong


def test_text_that_is_not_utf8_is_named_by_its_row(tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes(stream({"text": ["good", "<bad>", "good too"]}).replace(b"<bad>", b"<b\xffd>"))
    log = ProblemLog()
    assert [d.text for d in read_documents(path, ReadOptions(), log)] == ["good", "good too"]
    (problem,) = log.found
    assert problem.where.endswith("a.arrow:row 2") and "UTF-8" in problem.rule


def test_lengths_that_a_message_claims_are_compared_with_the_file(tmp_path):
    """Every aligned word of the file replaced by numbers near a limit: a problem or other text, and never more memory than the file."""
    path, whole = tmp_path / "a.arrow", stream({"n": [1, 2, 3], "text": ["abc", "defg", ""]}, rows=2)
    before, rng = pa.default_memory_pool().max_memory(), random.Random(0)
    cases = [(at, w) for at in range(0, len(whole) - 7, 4) for w in (2**62, 2**63 - 8, 2**31, 2**40 + 8, 2**64 - 8, 0)]
    for at, word in rng.sample(cases, min(len(cases), times(1500, 400))):
        path.write_bytes(whole[:at] + word.to_bytes(8, "little") + whole[at + 8 :])
        log = ProblemLog()
        for document in read_documents(path, ReadOptions(), log):
            document.text.encode()
    assert pa.default_memory_pool().max_memory() < before + (64 << 20)

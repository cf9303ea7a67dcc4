"""A checkpoint of a stranger: its table of contents is a pickle, which can do no more than be refused."""

from __future__ import annotations

import builtins
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from phalanx.core.errors import CheckpointError
from phalanx.runtime.checkpoint import planner
from phalanx.runtime.checkpoint.folder import file_entry
from phalanx.runtime.checkpoint.planner import SavedBox, SavedShare, TrustlessReader, write_table
from phalanx.runtime.checkpoint.table_reader import TABLE_FILE, read_table

pytestmark = pytest.mark.unit
BOX = SavedBox(name="a", offsets=(0,), sizes=(4,), shape=(4,), dtype="float32", file="__0_0.distcp", at=0, length=10)


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, call: Any, *words: Any) -> None:
        self.call, self.words = call, words

    def __reduce__(self) -> Any:
        return self.call, self.words


def table(folder: Path, **changed: Any) -> Metadata:
    write_table(folder, [SavedShare(boxes=(BOX,), files={})])
    found: Metadata = pickle.loads((folder / TABLE_FILE).read_bytes())
    for name, value in changed.items():
        setattr(found, name, value)
    (folder / TABLE_FILE).write_bytes(pickle.dumps(found))
    return found


def test_what_we_write_is_read(tmp_path: Path) -> None:
    table(tmp_path)
    found = read_table(tmp_path)
    assert list(found.state_dict_metadata) == ["a"] and len(found.storage_data) == 1
    assert TrustlessReader(tmp_path).read_metadata().storage_meta is not None


def test_a_table_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of too many ranks: the run would not go on from its checkpoint."""
    monkeypatch.setattr(planner, "TABLE_BYTES", 100)
    with pytest.raises(CheckpointError, match="there are too many boxes"):
        table(tmp_path)


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, "touch executed"), Evil(builtins.eval, "open('executed', 'w')"), Evil(builtins.exec, "open('executed', 'w')"), Evil(Path.touch, Path("executed")),
        Evil(torch.load, "executed"), Evil(torch.hub.load, "a/b", "c"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_data", "storage_meta"])
def test_nothing_is_executed(evil: Evil, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "whole":
        (tmp_path / TABLE_FILE).write_bytes(pickle.dumps(evil))
    else:
        table(tmp_path, **{place: evil})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"\.metadata: is no table of contents of a checkpoint: it names "):
        read_table(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "a/b", "..", "", "link"])
def test_no_file_outside_of_its_folder_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    found = table(tmp_path)
    (index,) = found.storage_data
    table(tmp_path, storage_data={index: _StorageInfo(name, 0, 10)})
    with pytest.raises(CheckpointError, match="which is not one of its folder"):
        read_table(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x05.", pickle.dumps(3), pickle.dumps({"a": 1}), b"(" * 100_000])
def test_what_is_no_table_is_a_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / TABLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
        read_table(tmp_path)
    (tmp_path / TABLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_table(tmp_path)


def bomb(name: str, first: bytes, double: bytes) -> bytes:
    """A pickle whose value doubles at each of 60 steps."""
    module, word = name.rsplit(".", 1)
    start = b"\x80\x02c" + f"{module}\n{word}\n".encode() + b"q\x00" + first + b"q\x01"
    return start + double * 60 + b"."


@pytest.mark.parametrize(
    "data",
    [
        bomb("pathlib.PurePosixPath", b"h\x00X\x01\x00\x00\x00a\x85R", b"h\x00h\x01h\x01\x86Rq\x01"),
        bomb("torch.Size", b"K\x01\x85", b"h\x01h\x01\x86q\x01") [:-1] + b"}h\x01Ns.",  # a key that takes 2^60 steps to hash
        bomb("torch.Size", b"(" + b"K\x01" * 65 + b"t", b"")[:-1] + b"h\x00h\x01\x85R.",  # the same numbers again and again
        bomb("torch.Size", b"}", b"")[:-1] + b"h\x00h\x01b.",  # a class of torch is changed
        bomb("torch.distributed.checkpoint.metadata.Metadata", b"}X\x04\x00\x00\x00evilNs", b"")[:-1] + b"h\x00h\x01b.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of 1 TB
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a place in memory far away
        b"\x80\x02]q\x00h\x00a.",  # a list of itself
    ],
    ids=["path", "key", "size", "function", "class", "bytearray", "far", "itself"],
)  # fmt: skip
def test_a_short_table_takes_little_time_and_memory(data: bytes, tmp_path: Path) -> None:
    (tmp_path / TABLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
        read_table(tmp_path)
    assert not hasattr(Metadata, "evil")


def test_names_and_sizes_of_another_type_are_refused(tmp_path: Path) -> None:
    """A nested tuple in the place of a size would make a message of any length."""
    for change in ({"size": ((4,), (4,))}, {"chunks": None}, {"properties": 3}):
        entry = table(tmp_path).state_dict_metadata["a"]
        vars(entry).update(change)
        table(tmp_path, state_dict_metadata={"a": entry})
        with pytest.raises(CheckpointError, match="is no table of contents of a checkpoint"):
            read_table(tmp_path)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TABLE_FILE)
    with pytest.raises(CheckpointError, match="cannot be read: not a regular file"):
        read_table(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        file_entry(tmp_path / TABLE_FILE)

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
from phalanx.runtime.checkpoint.planner import (
    TABLE_FILE,
    SavedBox,
    SavedShare,
    TrustlessReader,
    read_table,
    write_table,
)

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

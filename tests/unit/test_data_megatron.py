"""Megatron token files: all forms of the index, and every way a pair can be wrong."""

import struct

import numpy as np
import pytest
from data_help import write_megatron

from phalanx.data.megatron import DTYPES, open_megatron
from phalanx.data.problems import ProblemLog

pytestmark = pytest.mark.unit
DOCUMENTS = [[1, 2, 3, 9], [4, 9], [5, 6, 7, 8, 9]]


def opened(prefix):
    log = ProblemLog()
    file = open_megatron(prefix.with_suffix(".bin"), log)
    return file, [f"{p}" for p in log.found]


def documents_of(file):
    return [file.tokens[b : b + n].tolist() for b, n in zip(file.begin, file.length, strict=True)]


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_dtypes(tmp_path, code):
    write_megatron(tmp_path / "a", DOCUMENTS, dtype=np.dtype(DTYPES[code]).newbyteorder("<"), code=code)
    file, problems = opened(tmp_path / "a")
    assert not problems and documents_of(file) == DOCUMENTS


@pytest.mark.parametrize(
    "form",
    [
        {"document_index": True, "sentences": 2},
        {"document_index": True, "sentences": 1, "modes": True},
        {"document_index": True, "sentences": 3, "modes": True},
        {"document_index": False},
    ],
)
def test_forms_of_the_index(tmp_path, form):
    write_megatron(tmp_path / "a", DOCUMENTS, **form)
    file, problems = opened(tmp_path / "a")
    assert not problems and documents_of(file) == DOCUMENTS


def test_many_documents_in_both_forms(tmp_path):
    documents = [[i % 7 + 1] * (i % 5 + 1) for i in range(500)]
    for form in (True, False):
        write_megatron(tmp_path / "a", documents, document_index=form)
        assert documents_of(opened(tmp_path / "a")[0]) == documents


def test_empty_set(tmp_path):
    write_megatron(tmp_path / "a", [])
    file, problems = opened(tmp_path / "a")
    assert not problems and len(file.begin) == 0


def change_index(prefix, at, data):
    path = prefix.with_suffix(".idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


LENGTHS, POINTERS, STARTS = 34, 34 + 4 * 3, 34 + 12 * 3


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"XXXXXXX", "no MMIDIDX magic"),
        (9, struct.pack("<Q", 7), "must be index version 1"),
        (17, b"\x06", "not the dtype code of an integer type; legal: 1 (uint8)"),
        (17, b"\x63", "not the dtype code of an integer type"),
        (18, struct.pack("<Q", 10**9), "does not fit its 1000000000 sequences"),
        (LENGTHS, struct.pack("<i", -1), "negative sequence lengths"),
        (POINTERS + 8, struct.pack("<q", 7), "sequences between tokens"),
        (POINTERS + 8, struct.pack("<q", 10), "do not follow each other"),
        (STARTS + 8, struct.pack("<q", 3), "documents out of order"),
        (POINTERS, struct.pack("<q", 2**63 - 6), "places sequences outside of the"),
        (POINTERS, struct.pack("<q", -2), "places sequences outside of the"),
        (STARTS + 8, struct.pack("<qq", 2**62, -(2**62) - 2), "documents out of order"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, at, data, message):
    write_megatron(tmp_path / "a", DOCUMENTS)
    change_index(tmp_path / "a", at, data)
    file, problems = opened(tmp_path / "a")
    assert file is None
    assert any(message in p and str(tmp_path / "a.idx") in p for p in problems), problems


def test_truncated_files(tmp_path):
    write_megatron(tmp_path / "a", DOCUMENTS)
    index, tokens = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(tokens[:-4])
    assert "holds 18 bytes, and its index names tokens up to byte 22" in opened(tmp_path / "a")[1][0]
    for size in (0, 5, 30, len(index) - 3):
        (tmp_path / "a.idx").write_bytes(index[:size])
        assert opened(tmp_path / "a")[0] is None
    (tmp_path / "a.idx").unlink()
    assert "keep .bin and .idx together" in opened(tmp_path / "a")[1][0]

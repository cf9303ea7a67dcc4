"""Prepared tokens of one source on disk: a folder that is written once and then only memory-mapped.

    meta.json            dtype, sizes of all files (a folder that does not match them is prepared anew)
    tokens.bin           all documents, each closed by EOS (text sources; a Megatron source keeps its own .bin)
    P.SIDE.begin.npy     for part P (one per .bin) and side train or validation: where each document begins in the token file
    P.SIDE.offset.npy    ... and in the stream of that side
    P.SIDE.bare.npy      documents whose EOS is not in the token file (Megatron sources without it only)
    counts.npy           (2, vocabulary) how often each token is a target, train and validation

Which side a document is on depends on its content and the fraction alone: the same text is never in both, and a document added to the
source moves no other.

Legend: n documents, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, Problem
from phalanx.data.cache import CacheProgress
from phalanx.data.formats import Document
from phalanx.data.megatron import MegatronFile, open_megatron
from phalanx.data.packing import TokenStream
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import Source, documents
from phalanx.data.tokenizer import Tokenizer

Ints = NDArray[np.int64]

SIDES = ("train", "validation")
STORE_VERSION = 1
"""Raise it whenever the same input would give other files."""

_META = "meta.json"
_BATCH_CHARS = 2_000_000
_CHUNK_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """One opened folder: for each side the streams that have documents, and its target counts (2, V)."""

    streams: dict[str, tuple[TokenStream, ...]]
    counts: Ints
    documents: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Documents of one token file."""

    tokens: NDArray[Any]
    begin: Ints
    length: Ints
    hashes: NDArray[np.uint64]
    bare: NDArray[np.bool_]


def is_validation(text: str, fraction: float) -> bool:
    """The side that a document's hash puts it on (before the rule that no side stays empty)."""
    return _hash(text.encode("utf-8")) < fraction * 2.0**64


def is_complete(folder: Path) -> bool:
    """Has `folder` all its files in full length?"""
    try:
        meta = json.loads((folder / _META).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError):
        return False


def write_store(
    folder: Path, source: Source, tokenizer: Tokenizer, *, fraction: float, log: ProblemLog, progress: CacheProgress
) -> None:
    """Tokenises (or, for Megatron, indexes) `source` into `folder`. Raises DataError with what is wrong in its files."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    if source.kind == "tokens":
        parts, text_bytes = _megatron_parts(source, tokenizer, log, progress), 0
    else:
        part, text_bytes = _tokenise(folder, documents(source, log, progress), tokenizer, dtype)
        parts = [part]
    log.raise_if_any()
    hashes = np.concatenate([p.hashes for p in parts])
    if not len(hashes):
        hint = "name files with text" if source.kind != "tokens" else "name files with tokens"
        raise DataError(
            [Problem(where="data.sources", value=source.spec, rule="holds no text", hint=hint)], subject="the data"
        )
    held_out = split(hashes, fraction)
    counts, first = np.zeros((len(SIDES), tokenizer.vocab_size), np.int64), 0
    for number, part in enumerate(parts):
        mask = held_out[first : first + len(part.begin)]
        first += len(part.begin)
        _write_index(folder, str(number), part, mask)
        counts += _count_targets(part, mask, tokenizer)
    np.save(folder / "counts.npy", counts)
    _write_meta(folder, dtype=dtype.str, parts=len(parts), documents=len(hashes), text_bytes=text_bytes)


def _write_meta(folder: Path, **entries: object) -> None:
    sizes = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    meta = {"version": STORE_VERSION, **entries, "sizes": sizes}
    (folder / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


def open_store(folder: Path, source: Source, tokenizer: Tokenizer) -> Store:
    """Memory-maps what `write_store` wrote."""
    meta = json.loads((folder / _META).read_bytes())
    if source.kind == "tokens":
        log = ProblemLog()
        token_files = [f.tokens for f in (open_megatron(p, log) for p in source.files) if f is not None]
        log.raise_if_any()
    else:
        token_files = [np.memmap(folder / "tokens.bin", np.dtype(meta["dtype"]), "r")]
    streams = {
        side: tuple(
            s for p, t in enumerate(token_files) if (s := _open_stream(folder, f"{p}.{side}", t, tokenizer.eos_id))
        )
        for side in SIDES
    }
    counts = np.load(folder / "counts.npy")
    return Store(streams=streams, counts=counts, documents=meta["documents"], text_bytes=meta["text_bytes"])


def _open_stream(folder: Path, name: str, tokens: NDArray[Any], eos_id: int) -> TokenStream | None:
    begin = np.load(folder / f"{name}.begin.npy", mmap_mode="r")
    if not len(begin):
        return None
    offset = np.load(folder / f"{name}.offset.npy", mmap_mode="r")
    bare_file = folder / f"{name}.bare.npy"
    bare = np.load(bare_file, mmap_mode="r") if bare_file.exists() else None
    return TokenStream(tokens=tokens, begin=begin, offset=offset, bare=bare, eos_id=eos_id)


# --- the split


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def split(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which documents are for validation: those with a hash in the lowest `fraction` of all hashes.

    Where that leaves a side empty and there are two different documents, the lowest hash goes to validation, the highest to train.
    """
    mask = hashes < np.uint64(math.floor(fraction * 2.0**64))
    lowest, highest = hashes.min(), hashes.max()
    if lowest == highest:
        return np.zeros_like(mask)
    return (mask | (hashes == lowest)) & (hashes != highest)


# --- text


def _tokenise(folder: Path, texts: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype[Any]) -> tuple[_Part, int]:
    """Writes tokens.bin; the bytes of text that went into it come second."""
    lengths, hashes, text_bytes = array("q"), array("Q"), 0
    path = folder / "tokens.bin"
    with open(path, "wb") as file:
        for batch in _batches(texts):
            encoded = [text.encode("utf-8") for text in batch]
            text_bytes += sum(map(len, encoded))
            _write_batch(file, batch, tokenizer, dtype, lengths)
            hashes.extend(map(_hash, encoded))
    kept = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
    begin = np.cumsum(kept) - kept
    tokens = np.memmap(path, dtype, "r") if len(kept) else np.zeros(0, dtype)
    bare = np.zeros(len(kept), np.bool_)
    return _Part(tokens=tokens, begin=begin, length=kept, hashes=np.array(hashes, np.uint64), bare=bare), text_bytes


def _write_batch(
    file: BinaryIO, batch: list[str], tokenizer: Tokenizer, dtype: np.dtype[Any], lengths: array[int]
) -> None:
    eos = np.array([tokenizer.eos_id], np.int64)
    pieces: list[Ints] = []
    for ids in tokenizer.encode_batch(batch):
        pieces += [ids, eos]
        lengths.append(len(ids) + 1)
    file.write(np.concatenate(pieces).astype(dtype).tobytes())


def _batches(texts: Iterable[Document]) -> Iterator[list[str]]:
    """Documents in groups large enough for the tokenizer's threads. Empty documents have nothing to predict and are left out."""
    batch: list[str] = []
    chars = 0
    for document in texts:
        if document.text:
            batch.append(document.text)
            chars += len(document.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


# --- Megatron


def _megatron_parts(source: Source, tokenizer: Tokenizer, log: ProblemLog, progress: CacheProgress) -> list[_Part]:
    opened = [open_megatron(path, log) for path in source.files]
    total, done, parts = source.num_bytes, 0, []
    for file in opened:
        if file is not None and _ids_are_legal(file, tokenizer, log):
            parts.append(_megatron_part(file, tokenizer.eos_id))
            done += file.path.stat().st_size
            progress("index", done, total)
    return parts


def _megatron_part(file: MegatronFile, eos_id: int) -> _Part:
    kept = file.length > 0
    begin, length = file.begin[kept], file.length[kept]
    hashes = array(
        "Q", (_hash(file.tokens[b : b + n].tobytes()) for b, n in zip(begin.tolist(), length.tolist(), strict=True))
    )
    bare = np.asarray(file.tokens[begin + length - 1] != eos_id)
    return _Part(tokens=file.tokens, begin=begin, length=length, hashes=np.array(hashes, np.uint64), bare=bare)


def _ids_are_legal(file: MegatronFile, tokenizer: Tokenizer, log: ProblemLog) -> bool:
    """Reports the first token that the tokenizer does not have."""
    for start in range(0, len(file.tokens), _CHUNK_TOKENS):
        chunk = file.tokens[start : start + _CHUNK_TOKENS]
        bad = np.flatnonzero((chunk >= tokenizer.vocab_size) | (chunk < 0))
        if len(bad):
            at = start + int(bad[0])
            document = int(np.searchsorted(file.begin, at, side="right")) - 1
            rule = f"is not an id of the tokenizer {tokenizer.name!r}, whose ids are below {tokenizer.vocab_size}"
            hint = "set data.tokenizer to the tokenizer.json that made these tokens"
            log.add(Problem(where=f"{file.path}:document {document}", value=int(chunk[bad[0]]), rule=rule, hint=hint))
            return False
    return True


# --- index and counts


def _write_index(folder: Path, name: str, part: _Part, held_out: NDArray[np.bool_]) -> None:
    for side, mask in zip(SIDES, (~held_out, held_out), strict=True):
        lengths = part.length[mask] + part.bare[mask]
        np.save(folder / f"{name}.{side}.begin.npy", part.begin[mask])
        np.save(folder / f"{name}.{side}.offset.npy", np.append(0, np.cumsum(lengths)))
        if part.bare[mask].any():
            np.save(folder / f"{name}.{side}.bare.npy", part.bare[mask])


def _count_targets(part: _Part, held_out: NDArray[np.bool_], tokenizer: Tokenizer) -> Ints:
    """How often each token is predicted from the one before it, (2, V): all tokens of a document but its first."""
    size = tokenizer.vocab_size
    counts = np.zeros((len(SIDES), size), np.int64)
    chunk_of = np.cumsum(part.length) // _CHUNK_TOKENS
    for chunk in np.unique(chunk_of):
        mine = slice(*np.searchsorted(chunk_of, [chunk, chunk + 1]).tolist())
        begin, length = part.begin[mine], part.length[mine] - 1
        stream = np.repeat(begin + 1 - (np.cumsum(length) - length), length) + np.arange(length.sum())
        sides = np.repeat(held_out[mine].astype(np.int64), length)
        ids = part.tokens[stream].astype(np.int64) + sides * size
        counts += np.bincount(ids, minlength=2 * size).reshape(2, size)
    for side, mask in enumerate((~held_out, held_out)):
        counts[side, tokenizer.eos_id] += int(part.bare[mask].sum())
    return counts


def unigram_loss(counts: Ints) -> float:
    """Cross-entropy (nats per token) of the validation targets under the add-one-smoothed frequencies of the train targets; counts (2, V).

    What a model that knows word frequencies and nothing else would reach: the figure that a trained model must beat clearly.
    """
    train, validation = counts.astype(np.float64)
    log_p = np.log(train + 1.0) - math.log(float(train.sum()) + len(train))
    return float(-(validation * log_p).sum() / max(float(validation.sum()), 1.0))

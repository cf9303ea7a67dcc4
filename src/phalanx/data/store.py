"""Prepared tokens of one source on disk: a folder that is written once and then only memory-mapped.

    meta.json            dtype, sizes and checksums of all files (a folder that does not match them is prepared anew)
    tokens.bin           all documents, each closed by EOS, or conversations as they were rendered (a Megatron source keeps its own .bin)
    P.SIDE.begin.npy     for part P (one per .bin) and side train or validation: where each document begins in the token file
    P.SIDE.offset.npy    ... and in the stream of that side
    P.SIDE.bare.npy      documents whose EOS is not in the token file (Megatron sources without it only)
    answers.bin          of conversations: a byte for each token, 1 where it is predicted, and answers.sums.npy
    P.SIDE.first.npy     ... the place of the first such token in each conversation
    P.sums.npy           checksums of the blocks of the token file, compared when tokens are read (`token_file.py`)
    counts.npy           (2, vocabulary) how often each token is a target, train and validation

Which side a document is on depends on its content and the fraction alone: the same text is never in both, and a document added to the
source moves no other.

Legend: n documents, V vocabulary.
"""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, first_line
from phalanx.core.reading import load_json, malformed, typed
from phalanx.data.cache import CacheProgress, digest
from phalanx.data.megatron import MegatronFile, open_megatron
from phalanx.data.packing import TokenStream
from phalanx.data.pieces import SourcePieces
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import Source, documents
from phalanx.data.template import ChatTemplate
from phalanx.data.token_file import TokenFile, block_sums, file_sum, forget
from phalanx.data.tokenising import (
    ANSWERS,
    SIDES,
    TOKENS,
    Ints,
    TokenPart,
    count_targets,
    dtype_of,
    hash_bytes,
    sides,
    tokenise,
)
from phalanx.data.tokenizer import Tokenizer

STORE_VERSION = 1
"""Raise it whenever the same input would give other files."""

_META = "meta.json"
_CHUNK_TOKENS = 4_000_000
_CHUNK_DOCUMENTS = 1 << 15


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """One opened folder: for each side the streams that have documents, and its target counts (2, V)."""

    streams: dict[str, tuple[TokenStream, ...]]
    counts: Ints
    text_bytes: int
    left_out: int
    """Conversations without any answer."""


def is_complete(folder: Path) -> bool:
    """Has `folder` all its files, in full length and as they were written? Tokens themselves are compared when they are read.

    What is not so is read from the disk once more: a folder that is not complete is made anew.
    """
    for again in (False, True):
        try:
            for path in folder.iterdir() if again else ():
                forget(path)
            meta = _read_meta(folder)
            whole = all((folder / name).stat().st_size == size for name, size in meta.sizes.items())
            if whole and all(file_sum(folder / name) == told for name, told in meta.sums.items()):
                return True
        except (OSError, DataError):
            pass
    return False


def write_store(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    fraction: float,
    log: ProblemLog,
    progress: CacheProgress,
    template: ChatTemplate | None = None,
    pieces: SourcePieces | None = None,
) -> None:
    """Tokenises (or, for Megatron, indexes) `source` into `folder`. Raises DataError with what is wrong in its files. `template`: of conversations, None for ChatML. `pieces`: how a large
    source is tokenised, else in one go."""
    if source.kind == "tokens":
        parts = _megatron_parts(source, tokenizer, log, progress)
    elif pieces is not None:
        parts = [pieces.tokenise(folder, log, progress)]
    else:
        texts = documents(source.spans, source.read_options, log, progress)
        talks = source.kind == "chat"
        parts = [tokenise(folder, texts, tokenizer, conversations=talks, template=template, log=log)]
    log.raise_if_any()
    hashes = np.concatenate([p.hashes for p in parts])
    if not len(hashes):
        hint = "name files with text" if source.kind != "tokens" else "name files with tokens"
        rule = "holds no text"
        if parts and parts[0].left_out:
            rule, hint = "holds no conversation with an answer", "answers are messages of the role assistant"
        raise DataError.of("data.sources", source.spec, rule, hint, subject="the data")
    held_out = split(hashes, fraction)
    as_hashed = np.array_equal(held_out, sides(hashes, fraction))
    counts, first = np.zeros((len(SIDES), tokenizer.vocab_size), np.int64), 0
    for number, part in enumerate(parts):
        mask = held_out[first : first + len(part.begin)]
        first += len(part.begin)
        _write_index(folder, str(number), part, mask)
        counts += part.counts if as_hashed and part.counts is not None else count_targets(part, mask, tokenizer)
        np.save(folder / f"{number}.sums.npy", block_sums(folder / TOKENS if part.path is None else part.path))
    np.save(folder / "counts.npy", counts)
    if parts[0].answers is not None:
        np.save(folder / "answers.sums.npy", block_sums(folder / ANSWERS))
    left_out, text_bytes = sum(part.left_out for part in parts), sum(part.text_bytes for part in parts)
    more = {"left_out": left_out} if left_out else {}
    dtype = dtype_of(tokenizer).str
    _write_meta(folder, dtype=dtype, parts=len(parts), documents=len(hashes), text_bytes=text_bytes, **more)


def _write_meta(folder: Path, **entries: object) -> None:
    files = sorted(folder.iterdir())
    sizes = {p.name: p.stat().st_size for p in files}
    sums = {p.name: file_sum(p) for p in files if p.name not in (TOKENS, ANSWERS)}
    meta = {"version": STORE_VERSION, **entries, "sizes": sizes, "sums": sums}
    (folder / _META).write_text(json.dumps({**meta, "checksum": digest(meta)}, indent=1), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """What meta.json says."""

    version: int
    dtype: Literal["<u2", "<u4"]
    parts: int
    documents: int
    text_bytes: int
    left_out: int = 0
    sizes: dict[str, int]
    sums: dict[str, int] = field(default_factory=dict)
    """Of all files but the tokens; empty in folders of earlier versions."""
    checksum: str = ""
    """Of all this."""


def _read_meta(folder: Path) -> StoreMeta:
    """Raises `OSError`, and `DataError` where it is not what was written."""
    where = folder / _META
    table = load_json(where)
    meta: StoreMeta = typed(table, StoreMeta, where=str(where))
    strange = [name for name in (*meta.sizes, *meta.sums) if Path(name).name != name or "\0" in name]
    if strange or (meta.checksum and meta.checksum != digest({k: v for k, v in table.items() if k != "checksum"})):
        raise malformed(str(where), meta.checksum, "was altered since it was written", "delete the folder")
    return meta


def open_store(folder: Path, source: Source, tokenizer: Tokenizer) -> Store:
    """Memory-maps what `write_store` wrote. Raises `DataError` where it is not that."""
    try:
        meta = _read_meta(folder)
        if source.kind == "tokens":
            log = ProblemLog()
            token_files = [(f.path, f.tokens) for f in (open_megatron(p, log) for p in source.files) if f is not None]
            log.raise_if_any()
        else:
            path = folder / TOKENS
            token_files = [(path, np.memmap(path, np.dtype(meta.dtype), "r"))]
        parts = [_open_tokens(folder, p, *file, tokenizer) for p, file in enumerate(token_files)]
        answers = _open_answers(folder, len(parts[0])) if source.kind == "chat" else None
        streams = {
            side: tuple(
                s
                for p, t in enumerate(parts)
                if (s := _open_stream(folder, f"{p}.{side}", t, tokenizer.eos_id, answers))
            )
            for side in SIDES
        }
        counts = _array(folder / "counts.npy", np.int64, (len(SIDES), tokenizer.vocab_size))
        if (counts < 0).any():
            raise malformed(str(folder / "counts.npy"), None, "counts less than no tokens", "delete the folder")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise malformed(str(folder), None, f"is no folder of prepared tokens ({error})", "delete it") from error
    return Store(streams=streams, counts=counts, text_bytes=meta.text_bytes, left_out=meta.left_out)


def _open_tokens(folder: Path, part: int, path: Path, tokens: NDArray[Any], tokenizer: Tokenizer) -> TokenFile:
    file = folder / f"{part}.sums.npy"
    sums = _array(file, np.uint32, (-1,)) if file.exists() else None
    made_in = folder if path.parent == folder else None
    return TokenFile(tokens, path=path, sums=sums, vocab_size=tokenizer.vocab_size, made_in=made_in)


def _open_answers(folder: Path, num_tokens: int) -> TokenFile:
    """A file of tokens whose vocabulary is no and yes."""
    path = folder / ANSWERS
    found = np.memmap(path, np.uint8, "r")
    if len(found) != num_tokens:
        raise malformed(
            str(path), len(found), f"must have {num_tokens} bytes", "delete the folder: it is prepared anew"
        )
    sums = _array(folder / "answers.sums.npy", np.uint32, (-1,))
    return TokenFile(found, path=path, sums=sums, vocab_size=2, made_in=folder)


def _open_stream(
    folder: Path, name: str, tokens: TokenFile, eos_id: int, answers: TokenFile | None
) -> TokenStream | None:
    begin = _array(folder / f"{name}.begin.npy", np.int64, (-1,))
    if not len(begin):
        return None
    offset = _array(folder / f"{name}.offset.npy", np.int64, (len(begin) + 1,))
    bare_file = folder / f"{name}.bare.npy"
    bare = _array(bare_file, np.bool_, begin.shape) if bare_file.exists() else None
    if not _are_inside(begin, offset, bare, len(tokens)):
        rule = f"names documents outside of the {len(tokens)} tokens"
        raise malformed(str(folder / f"{name}.begin.npy"), None, rule, "delete the folder: it is prepared anew")
    first = None
    if answers is not None:
        first = _array(folder / f"{name}.first.npy", np.int64, begin.shape)
        if (first < 1).any() or (first >= np.diff(offset)).any():
            rule = "names answers outside of their conversations"
            raise malformed(str(folder / f"{name}.first.npy"), None, rule, "delete the folder: it is prepared anew")
    return TokenStream(
        tokens=tokens, begin=begin, offset=offset, bare=bare, eos_id=eos_id, answers=answers, first=first
    )


def _are_inside(begin: Ints, offset: Ints, bare: NDArray[np.bool_] | None, num_tokens: int) -> bool:
    """Whether all documents lie within the tokens. In parts that a cache holds: a table may have gigabytes."""
    for at in range(0, len(begin), _CHUNK_DOCUMENTS):
        mine = slice(at, at + _CHUNK_DOCUMENTS)
        first, stops = begin[mine], offset[at : at + _CHUNK_DOCUMENTS + 1]
        length = np.diff(stops) if bare is None else np.diff(stops) - bare[mine]
        falls = (stops[1:] < stops[:-1]).any() or (length < 0).any()
        if falls or (first < 0).any() or (first > num_tokens - length).any():
            return False
    return bool(offset[0] == 0)


def _array(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    """A .npy file of this type and shape (-1: any length), memory-mapped. Raises `DataError`."""
    try:
        found: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the header is a literal of Python's, with whatever its parser raises
        raise malformed(str(path), None, f"is no array ({first_line(error)})", "delete the folder") from error
    fits = found.ndim == len(shape) and all(n in (m, -1) for n, m in zip(shape, found.shape, strict=True))
    if found.dtype != dtype or not fits:
        rule = f"must be an array of {np.dtype(dtype)} with the shape {shape}"
        raise malformed(str(path), f"{found.dtype} {found.shape}", rule, "delete the folder: it is prepared anew")
    return found


# --- the split


def split(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which documents are for validation: those with a hash in the lowest `fraction` of all hashes.

    Where that leaves a side empty and there are two different documents, the lowest hash goes to validation, the highest to train.
    """
    mask = sides(hashes, fraction)
    lowest, highest = hashes.min(), hashes.max()
    if lowest == highest:
        return np.zeros_like(mask)
    return (mask | (hashes == lowest)) & (hashes != highest)


# --- Megatron


def _megatron_parts(source: Source, tokenizer: Tokenizer, log: ProblemLog, progress: CacheProgress) -> list[TokenPart]:
    opened = [open_megatron(path, log) for path in source.files]
    total, done, parts = source.num_bytes, 0, []
    for file in opened:
        if file is not None and _ids_are_legal(file, tokenizer, log):
            parts.append(_megatron_part(file, tokenizer.eos_id))
            done += file.path.stat().st_size
            progress("index", done, total)
    return parts


def _megatron_part(file: MegatronFile, eos_id: int) -> TokenPart:
    kept = file.length > 0
    begin, length = file.begin[kept], file.length[kept]
    hashes = array(
        "Q",
        (hash_bytes(file.tokens[b : b + n].tobytes()) for b, n in zip(begin.tolist(), length.tolist(), strict=True)),
    )
    bare = np.asarray(file.tokens[begin + length - 1] != eos_id)
    found = np.array(hashes, np.uint64)
    return TokenPart(tokens=file.tokens, begin=begin, length=length, hashes=found, bare=bare, path=file.path)


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
            log.report(f"{file.path}:document {document}", int(chunk[bad[0]]), rule, hint)
            return False
    return True


# --- index and counts


def _write_index(folder: Path, name: str, part: TokenPart, held_out: NDArray[np.bool_]) -> None:
    for side, mask in zip(SIDES, (~held_out, held_out), strict=True):
        lengths = part.length[mask] + part.bare[mask]
        np.save(folder / f"{name}.{side}.begin.npy", part.begin[mask])
        np.save(folder / f"{name}.{side}.offset.npy", np.append(0, np.cumsum(lengths)))
        if part.bare[mask].any():
            np.save(folder / f"{name}.{side}.bare.npy", part.bare[mask])
        if part.first is not None:
            np.save(folder / f"{name}.{side}.first.npy", part.first[mask])


def unigram_loss(counts: Ints) -> float:
    """Cross-entropy (nats per token) of the validation targets under the add-one-smoothed frequencies of the train targets; counts (2, V).

    What a model that knows word frequencies and nothing else would reach: the figure that a trained model must beat clearly.
    """
    train, validation = counts.astype(np.float64)
    log_p = np.log(train + 1.0) - math.log(float(train.sum()) + len(train))
    return float(-(validation * log_p).sum() / max(float(validation.sum()), 1.0))

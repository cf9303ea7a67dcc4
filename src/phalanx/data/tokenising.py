"""Text to tokens: the documents of files, or of parts of files, become a token file and what a store keeps of each document.

Must never change: what a document becomes depends on it, the tokenizer and the template alone, whatever stands beside it. So parts of a source may be tokenised by different processes
(`pieces.py`).

Legend: n documents, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.data.chat import ChatEncoder
from phalanx.data.formats import Document
from phalanx.data.problems import ProblemLog
from phalanx.data.template import ChatTemplate
from phalanx.data.tokenizer import Tokenizer

Ints = NDArray[np.int64]

SIDES = ("train", "validation")
TOKENS, ANSWERS = "tokens.bin", "answers.bin"
_BATCH_CHARS = 2_000_000
_CHUNK_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPart:
    """Documents of one token file."""

    tokens: NDArray[Any]
    begin: Ints
    length: Ints
    hashes: NDArray[np.uint64]
    bare: NDArray[np.bool_]
    path: Path | None = None
    """The user's file that has the tokens; None: tokens.bin of the folder."""
    answers: NDArray[np.uint8] | None = None
    first: Ints | None = None
    left_out: int = 0
    text_bytes: int = 0
    """Of the text that became tokens."""
    counts: Ints | None = None
    """What `count_targets` gives where each document is on the side of its own hash (`sides`); None: not counted yet."""


def is_validation(document: Document, fraction: float) -> bool:
    """The side that a document's hash puts it on (before the rule that no side stays empty)."""
    return hash_of(document) < fraction * 2.0**64


def sides(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """The same for (n,) hashes."""
    return hashes < np.uint64(math.floor(fraction * 2.0**64))


def hash_of(document: Document) -> int:
    text = repr(document.messages) if document.messages else document.text
    return hash_bytes(text.encode("utf-8"))


def hash_bytes(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Of its ids on disk."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def tokenise(
    folder: Path,
    texts: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    conversations: bool,
    template: ChatTemplate | None,
    log: ProblemLog,
) -> TokenPart:
    """Writes tokens.bin, and answers.bin of `conversations`, whose `template` None is ChatML."""
    if not conversations:
        return _tokenise_text(folder, texts, tokenizer)
    with ChatEncoder(tokenizer, template) as encoder:
        return _tokenise_chat(folder, texts, encoder, log)


def _tokenise_text(folder: Path, texts: Iterable[Document], tokenizer: Tokenizer) -> TokenPart:
    dtype = dtype_of(tokenizer)
    lengths, hashes, text_bytes = array("q"), array("Q"), 0
    with open(folder / TOKENS, "wb") as file:
        for batch in _batches(texts):
            text_bytes += sum(len(document.text.encode("utf-8")) for document in batch)
            _write_batch(file, [document.text for document in batch], tokenizer, dtype, lengths)
            hashes.extend(map(hash_of, batch))
    kept = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
    return part_of(folder, dtype, length=kept, hashes=np.array(hashes, np.uint64), text_bytes=text_bytes)


def part_of(
    folder: Path,
    dtype: np.dtype[Any],
    *,
    length: Ints,
    hashes: NDArray[np.uint64],
    first: Ints | None = None,
    **more: Any,
) -> TokenPart:
    """Documents that lie one behind the other in tokens.bin of a folder; with `first` they are conversations. `more`: other fields."""
    answers = None
    if first is not None:
        answers = np.memmap(folder / ANSWERS, np.uint8, "r") if len(length) else np.zeros(0, np.uint8)
    return TokenPart(
        tokens=np.memmap(folder / TOKENS, dtype, "r") if len(length) else np.zeros(0, dtype),
        begin=np.cumsum(length) - length,
        length=length,
        hashes=hashes,
        bare=np.zeros(len(length), np.bool_),
        answers=answers,
        first=first,
        **more,
    )


def _tokenise_chat(folder: Path, texts: Iterable[Document], encoder: ChatEncoder, log: ProblemLog) -> TokenPart:
    dtype = dtype_of(encoder.tokenizer)
    lengths, firsts, hashes, text_bytes, left_out = array("q"), array("q"), array("Q"), 0, 0
    with open(folder / TOKENS, "wb") as tokens_file, open(folder / ANSWERS, "wb") as answers_file:
        for batch in _batches(texts):
            for document, (ids, answers) in zip(batch, encoder.encode_batch(batch, log), strict=True):
                predicted = np.flatnonzero(answers[1:])
                if not len(predicted):
                    left_out += 1
                    continue
                text_bytes += len(document.text.encode("utf-8"))
                hashes.append(hash_of(document))
                lengths.append(len(ids))
                firsts.append(1 + int(predicted[0]))
                tokens_file.write(ids.astype(dtype).tobytes())
                answers_file.write(answers.astype(np.uint8).tobytes())
    return part_of(
        folder, dtype, length=np.array(lengths, np.int64), hashes=np.array(hashes, np.uint64),
        first=np.array(firsts, np.int64), left_out=left_out, text_bytes=text_bytes,
    )  # fmt: skip


def _write_batch(
    file: BinaryIO, batch: list[str], tokenizer: Tokenizer, dtype: np.dtype[Any], lengths: array[int]
) -> None:
    eos = np.array([tokenizer.eos_id], np.int64)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.int64)
    pieces: list[Ints] = []
    for ids in tokenizer.encode_batch(batch):
        pieces += [bos, ids, eos]
        lengths.append(len(bos) + len(ids) + 1)
    file.write(np.concatenate(pieces).astype(dtype).tobytes())


def _batches(texts: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups large enough for the tokenizer's threads. Empty documents have nothing to predict and are left out."""
    batch: list[Document] = []
    chars = 0
    for document in texts:
        if document.text:
            batch.append(document)
            chars += len(document.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def count_targets(part: TokenPart, held_out: NDArray[np.bool_], tokenizer: Tokenizer) -> Ints:
    """How often each token is predicted from the one before it, (2, V): all tokens of a document but its first, of a conversation those of answers."""
    size = tokenizer.vocab_size
    counts = np.zeros((len(SIDES), size), np.int64)
    chunk_of = np.cumsum(part.length) // _CHUNK_TOKENS
    for chunk in np.unique(chunk_of):
        mine = slice(*np.searchsorted(chunk_of, [chunk, chunk + 1]).tolist())
        begin, length = part.begin[mine], part.length[mine] - 1
        stream = np.repeat(begin + 1 - (np.cumsum(length) - length), length) + np.arange(length.sum())
        of_side = np.repeat(held_out[mine].astype(np.int64), length)
        if part.answers is not None:
            predicted = part.answers[stream] == 1
            stream, of_side = stream[predicted], of_side[predicted]
        ids = part.tokens[stream].astype(np.int64) + of_side * size
        counts += np.bincount(ids, minlength=2 * size).reshape(2, size)
    for side, mask in enumerate((~held_out, held_out)):
        counts[side, tokenizer.eos_id] += int(part.bare[mask].sum())
    return counts

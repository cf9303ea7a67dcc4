"""Turns the data section of a recipe into data sets: found, checked, tokenised once, split, memory-mapped.

Decides what is prepared anew and what is reused: the tokens of a source are keyed by its content, the tokenizer and the split, a
trained
tokenizer by the text it learns from. Several processes may call `prepare` at once (all ranks do): one works, the others wait. An
interrupted preparation leaves nothing that a later one could mistake for finished.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError, Problem
from phalanx.core.process import usable_cores
from phalanx.core.reading import MalformedError, load_json, typed
from phalanx.data import store
from phalanx.data.cache import CacheProgress, digest, ensure_folder, silent, write_atomically, writing
from phalanx.data.chat import CHATML, chat_identity, template_of
from phalanx.data.contents import remember
from phalanx.data.dataset import Dataset
from phalanx.data.formats import Document, read_documents
from phalanx.data.pieces import LARGE_BYTES, SourcePieces
from phalanx.data.problems import ProblemLog
from phalanx.data.sampling import permute
from phalanx.data.sources import Source, documents, identify, resolve, unchanged
from phalanx.data.template import ChatTemplate
from phalanx.data.tokenising import SIDES, is_validation
from phalanx.data.tokenizer import (
    CHATML_TOKENS,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_choice,
    read_tokenizer_file,
    train_bpe,
)

SAMPLE_BYTES = 8_000_000
"""Text that a BPE learns from. 16 MB shortens the default corpus's tokens by 1 %, and takes twice as long."""

_BPE_VERSION = 1
_SMALLEST_SHARE = 1 << 16
_TOLD_TIMES = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedData:
    """What training needs of the data."""

    train: Dataset
    validation: Dataset
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Of conversations; None: ChatML, or there are none."""
    unigram_loss: float
    """Validation loss (nats per token) of a model that only knows how frequent each token is in the train text."""
    fingerprint: str
    """Fingerprint of data, tokenizer and mixture together; ranks on different hosts must agree on it."""
    text_bytes: int
    """Text that was tokenised, both sides; 0 for sources that came as tokens."""
    seconds: float
    folders: tuple[Path, ...]
    """Where the tokens of each source are kept."""
    reused: bool
    """Nothing had to be tokenised by this call."""
    notes: tuple[str, ...] = ()
    """What a person should be told of it, in sentences."""

    def all_notes(self, seq_len: int) -> tuple[str, ...]:
        """`notes`, and what conversations lose in sequences of this length."""
        sides = (self.train.cut(seq_len), self.validation.cut(seq_len))
        cut, left_out = (sum(each) for each in zip(*sides, strict=True))
        if not cut + left_out:
            return self.notes
        text = f"{cut + left_out} of {self.train.num_documents + self.validation.num_documents} documents are conversations longer than train.seq_len = {seq_len}"
        return (*self.notes, f"{text}: {cut} lose their end, {left_out} have no answer before it and are left out")


def prepare(
    config: DataConfig, *, progress: CacheProgress = silent, resume: str | None = None, workers: int | None = None
) -> PreparedData:
    """The data sets of a recipe. `resume` is the train fingerprint of a run that is to go on; `workers`: processes that tokenise a large source (None: one for each core).

    A resumed run keeps its built-in corpus as long as the cache has it, whatever was installed since; other sources must not have
    changed, which the loader checks (`Loader.check_state`).

    Raises DataError with every problem that was found: file names first, then (all together, up to 20) the content of files.
    """
    began, sources, template = time.monotonic(), _resolve_all(config), template_of(config)
    job = _Job(config=config, cache=Path(config.cache), sources=sources, template=template, progress=progress)
    job = _identified(job, resume)
    sources, tokenizer = job.sources, job.tokenizer()
    folders = job.folders(tokenizer)
    built = job.write(folders, tokenizer, workers=workers or usable_cores())
    stores = [store.open_store(f, s, tokenizer) for f, s in zip(folders, sources, strict=True)]
    keys = [folder.name for folder in folders]
    train, validation = (job.dataset(side, stores, keys, tokenizer) for side in SIDES)
    job.pin(train.fingerprint)
    remember(job.cache, train.fingerprint, config, sources, tokenizer)
    return PreparedData(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        template=template,
        unigram_loss=store.unigram_loss(_mixed_counts([s.counts for s in stores], config.weights)),
        fingerprint=digest([train.fingerprint, validation.fingerprint]),
        text_bytes=sum(s.text_bytes for s in stores),
        seconds=time.monotonic() - began,
        folders=tuple(folders),
        reused=not built,
        notes=tuple(_notes(config, sources, tokenizer, left_out=sum(s.left_out for s in stores))),
    )


def _notes(config: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer, *, left_out: int) -> Iterator[str]:
    yield from (s.unread for s in sources if s.unread)
    asked, found = parse_choice(config), tokenizer.vocab_size
    if isinstance(asked, int) and found < asked:
        yield f"data.tokenizer = {config.tokenizer!r} came out with {found} tokens: the text has no more to learn"
    if left_out:
        yield f"{left_out} conversations have no answer to learn and are left out"


def _resolve_all(config: DataConfig) -> tuple[Source, ...]:
    """Sources and tokenizer checked together, so that one run shows what is wrong with either."""
    problems: list[Problem] = []
    sources: tuple[Source, ...] = ()
    choice: int | Path | None = None
    try:
        sources = resolve(config)
    except DataError as error:
        problems += error.problems
    try:
        choice = parse_choice(config)
    except DataError as error:
        problems += error.problems
    if not problems:
        try:
            template_of(config)
        except DataError as error:
            problems += error.problems
    if isinstance(choice, int) and sources and all(s.kind == "tokens" for s in sources):
        rule = "cannot be trained: all sources are .bin/.idx files, which hold tokens and no text"
        hint = "name the tokenizer.json that made these tokens (or byte)"
        problems.append(Problem(where="data.tokenizer", value=config.tokenizer, rule=rule, hint=hint))
    if problems:
        raise DataError(problems, subject="the data section")
    return sources


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The sources of a recipe, and what is made of them in the cache."""

    config: DataConfig
    cache: Path
    sources: tuple[Source, ...]
    template: ChatTemplate | None
    progress: CacheProgress

    # --- tokenizer

    def tokenizer(self) -> Tokenizer:
        config, choice = self.config, parse_choice(self.config)
        if choice is None:
            return ByteTokenizer()
        if isinstance(choice, Path):
            return read_tokenizer_file(choice, eos_token=config.eos_token, bos_token=config.bos_token)
        return self._trained(choice)

    @property
    def _with_text(self) -> list[Source]:
        return [s for s in self.sources if s.kind != "tokens"]

    @property
    def _control_tokens(self) -> tuple[str, ...]:
        """Those of a vocabulary that is trained here."""
        return CHATML_TOKENS if self.config.chat_template == CHATML else ()

    def _bpe_folder(self, vocab_size: int) -> Path:
        identities = [s.identity for s in self._with_text]
        key = ["bpe", _BPE_VERSION, vocab_size, self.config.validation_fraction, SAMPLE_BYTES, identities]
        return self.cache / "tokenizers" / digest([*key, *self._control_tokens])

    def _trained(self, vocab_size: int) -> Tokenizer:
        """A byte-level BPE over a sample of the train documents, learned once and kept in the cache."""
        folder, sources = self._bpe_folder(vocab_size), self._with_text

        def build(target: Path) -> None:
            log = ProblemLog()
            with unchanged({path: seen for source in sources for path, seen in source.seen.items()}):
                texts = _sample(sources, self.config.validation_fraction, log, self.progress)
                content = train_bpe(texts, vocab_size=vocab_size, control_tokens=self._control_tokens)
                if log.found:
                    _report_everything(sources)
            (target / "tokenizer.json").write_text(content, encoding="utf-8")
            read_tokenizer_file(target / "tokenizer.json", eos_token=None).save(target)

        ensure_folder(folder, complete=_has_tokenizer, build=build, progress=self.progress)
        return load_tokenizer(folder)

    # --- tokens

    def folders(self, tokenizer: Tokenizer) -> list[Path]:
        """Folder of each source, named by all that decides its content."""
        common = [tokenizer.fingerprint, self.config.validation_fraction]
        chat = [chat_identity(self.template, tokenizer)]
        keys = [[store.STORE_VERSION, s.identity, *common, *(chat if s.kind == "chat" else [])] for s in self.sources]
        return [self.cache / "tokens" / digest(key) for key in keys]

    def is_prepared(self) -> bool:
        """Whether all that was made of built-in corpora is still there."""
        choice = parse_choice(self.config)
        if isinstance(choice, int) and not _has_tokenizer(self._bpe_folder(choice)):
            return False
        folders = self.folders(replace(self, progress=silent).tokenizer())
        return all(store.is_complete(f) for f, s in zip(folders, self.sources, strict=True) if s.kind == "builtin")

    def _pieces(self, source: Source, tokenizer: Tokenizer, workers: int) -> SourcePieces | None:
        """How a large source is tokenised; None: in one go."""
        if source.kind == "tokens" or source.num_bytes < LARGE_BYTES:
            return None
        fraction = self.config.validation_fraction
        return SourcePieces(self.cache, source, tokenizer, fraction=fraction, template=self.template, workers=workers)

    def write(self, folders: Sequence[Path], tokenizer: Tokenizer, *, workers: int) -> bool:
        """Makes the stores that are missing; True if there were any. Problems of all sources are raised together."""
        pieces = [self._pieces(source, tokenizer, workers) for source in self.sources]
        found, built = ProblemLog(), False
        for source, folder, cut in zip(self.sources, folders, pieces, strict=True):

            def build(target: Path, source: Source = source, cut: SourcePieces | None = cut) -> None:
                with unchanged(source.seen):
                    store.write_store(
                        target, source, tokenizer, fraction=self.config.validation_fraction, log=ProblemLog(whole=True),
                        progress=self.progress, template=self.template, pieces=cut,
                    )  # fmt: skip

            try:
                built |= ensure_folder(folder, complete=store.is_complete, build=build, progress=self.progress)
                if cut is not None:
                    cut.forget()
            except DataError as error:
                found.extend(error)
        found.raise_if_any()
        return built

    def dataset(self, side: str, stores: Sequence[store.Store], keys: Sequence[str], tokenizer: Tokenizer) -> Dataset:
        given, by_source = self.config.weights, [s.streams[side] for s in stores]
        empty = [i for i, streams in enumerate(by_source) if not any(s.num_tokens > 1 for s in streams)]
        if len(empty) == len(by_source) or (empty and given is not None):
            rule = f"has too few different documents to have {side} text, at least 2 are needed"
            hint = "add text, or cut it into more documents"
            specs = [self.sources[i].spec for i in empty]
            raise DataError(
                [Problem(where="data.sources", value=spec, rule=rule, hint=hint) for spec in specs], subject="the data"
            )
        weighted = given is not None and len(by_source) > 1
        pools = tuple(by_source) if weighted else (tuple(s for streams in by_source for s in streams),)
        weights = given if given is not None and weighted else (1.0,)
        return Dataset(
            name=side,
            pools=pools,
            weights=weights,
            fingerprint=digest([side, list(keys), list(weights)]),
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
        )

    def pin(self, fingerprint: str) -> None:
        """Remembers which built-in corpus belongs to a train fingerprint."""
        pins = {_pin_name(s): s.identity for s in self.sources if s.kind == "builtin"}
        path = self.cache / "pins" / f"{fingerprint}.json"
        if pins and not path.exists():
            with writing(self.cache):
                write_atomically(path, json.dumps(pins).encode())


# --- identity, and what a run pins


def _identified(job: _Job, resume: str | None) -> _Job:
    """Sources with identity: built-in corpora as the run `resume` knew them if all that was made of them is still there."""
    path = job.cache / "pins" / f"{resume}.json"
    if resume is not None and path.exists():
        pins = _pins(path)
        known = (pins.get(_pin_name(s)) or pins.get(s.spec) for s in job.sources)
        pinned = tuple(
            replace(s, identity=found) if found else identify(s, job.cache, job.progress)
            for s, found in zip(job.sources, known, strict=True)
        )
        if (as_known := replace(job, sources=pinned)).is_prepared():
            return as_known
    return replace(job, sources=tuple(identify(s, job.cache, job.progress) for s in job.sources))


def _pin_name(source: Source) -> str:
    """Of a built-in corpus: another size is another one. (Files of earlier versions name the specification alone.)"""
    return f"{source.spec}, {source.builtin_bytes} bytes"


def _pins(path: Path) -> dict[str, str]:
    """Built-in corpus -> identity; empty where the file was damaged."""
    try:
        found: dict[str, str] = typed(load_json(path), dict[str, str], where=str(path))
    except (OSError, MalformedError):
        return {}
    return found


# --- what is made of the text


def _has_tokenizer(folder: Path) -> bool:
    try:
        load_tokenizer(folder)
    except DataError:
        return False
    return True


def _sample(sources: Sequence[Source], fraction: float, log: ProblemLog, progress: CacheProgress) -> Iterator[str]:
    """About SAMPLE_BYTES of train documents, by size from all sources, from the beginnings of files in a fixed random order."""
    total, done, told = sum(s.num_bytes for s in sources) or 1, 0, 0
    wanted = min(total, SAMPLE_BYTES)
    for source in sources:
        share, taken, count = SAMPLE_BYTES * source.num_bytes // total, 0, len(source.files)
        per_file = max(_SMALLEST_SHARE, 2 * share // max(count, 1))
        for index in permute(np.arange(count), size=count, key=_BPE_VERSION).tolist():
            if taken > share:
                break
            for document in _beginning(source, source.files[index], per_file, log):
                taken += len(document.text)
                if done + taken >= told + wanted // _TOLD_TIMES:
                    told = done + taken
                    progress("tokenizer", min(told, wanted), wanted)
                if not is_validation(document, fraction):
                    yield document.text
        done += taken


def _beginning(source: Source, path: Path, size: int, log: ProblemLog) -> Iterator[Document]:
    taken = 0
    for document in read_documents(path, source.read_options, log):
        yield document
        taken += len(document.text)
        if taken >= size:
            return


def _report_everything(sources: Sequence[Source]) -> None:
    """Reads all text for the sake of its problems: the sample has shown that there are some."""
    log = ProblemLog()
    for source in sources:
        for _ in documents(source.spans, source.read_options, log):
            pass
    log.raise_if_any()


def _mixed_counts(counts: Sequence[NDArray[np.int64]], weights: Sequence[float] | None) -> NDArray[np.int64]:
    """Target counts (2, V) of the mixture: sums where sources are drawn by size, else each source scaled to its share."""
    if weights is None or len(counts) == 1:
        return np.sum(counts, axis=0, dtype=np.int64)
    tokens = np.sum(counts, axis=(0, 2))
    mixed = np.zeros(counts[0].shape)
    for weight, each in zip(weights, counts, strict=True):
        share = weight / math.fsum(weights) * tokens / np.maximum(each.sum(axis=1), 1)
        mixed += each * share[:, None]
    return np.rint(mixed).astype(np.int64)

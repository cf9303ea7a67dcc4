"""What `data.sources` names: files, folders, globs, Megatron pairs, `builtin:python`, each with a field's name behind a `#`; and the identity of what lies there.

Decides which files belong to a source and in which order (sorted by name). A source's identity is a hash of its content, never of
where it lies: moving a corpus keeps the prepared data and the runs made from it. Hashing reads everything once; afterwards the
identity is remembered by (path, size, modification time) of the files.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Literal

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError, Problem, nearest
from phalanx.core.process import usable_cores
from phalanx.core.reading import MalformedError, load_json, open_regular, typed
from phalanx.data import corpus
from phalanx.data.cache import CacheProgress, digest, locked, silent, write_atomically, writing
from phalanx.data.corpus import Seen
from phalanx.data.formats import (
    TOKEN_SUFFIXES,
    Document,
    ReadOptions,
    Span,
    added_formats,
    read_documents,
    suffix_of,
    text_suffixes,
)
from phalanx.data.problems import ProblemLog
from phalanx.data.saved_datasets import MARKS, is_saved, saved_files

BUILTIN = "builtin:python"
READER_VERSION = 1
"""Raise it whenever the same files would give other documents."""

_HASH_BLOCK_BYTES = 1 << 22
_POLL_S = 0.1
_TOLD_TIMES = 500
_TXT_DOCUMENTS = 64
_TXT_CHARS = (1 << 12, 1 << 16)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of `data.sources`, resolved to files. `identity` is empty until `identify` has read them."""

    spec: str
    kind: Literal["text", "chat", "tokens", "builtin"]
    files: tuple[Path, ...] = ()
    text_field: str = "text"
    own_field: bool = False
    """Whether the entry itself names `text_field`."""
    builtin_bytes: int = corpus.DEFAULT_BYTES
    identity: str = ""
    seen: Mapping[str, Seen] = field(default_factory=dict, compare=False, repr=False)
    """What told each file, by path, just before it was hashed (`unchanged`). Empty until then, and for built-in text that a run pins."""
    unread: str = ""
    """A sentence about files of its folder that are not read, for their names say no format that is, or for it cannot be listed."""

    @property
    def num_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.files)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(map(Span, self.files))

    @property
    def read_options(self) -> ReadOptions:
        """A source of .txt files gives at least some 64 documents, so that small ones can be split into train and validation too."""
        low, high = _TXT_CHARS
        chars = min(max(self.num_bytes // _TXT_DOCUMENTS, low), high)
        entry = f"{self.spec!r} in data.sources"
        hint = f"change the field of {entry}" if self.own_field else f"set data.text_field, or add #FIELD to {entry}"
        talks = self.kind == "chat"
        return ReadOptions(text_field=self.text_field, field_hint=hint, conversations=talks, txt_document_chars=chars)

    @property
    def has_fields(self) -> bool:
        """Whether a file of it holds records with named fields."""
        return any(_has_fields(f) for f in self.files)


def _has_fields(file: Path) -> bool:
    return suffix_of(file) not in (".txt", *TOKEN_SUFFIXES, *added_formats())


def documents(
    spans: Sequence[Span], options: ReadOptions, log: ProblemLog, progress: CacheProgress = silent
) -> Iterator[Document]:
    """All documents of files of text, or of parts of them, telling `progress` how many of their bytes are read."""
    total, before, told = sum(s.num_bytes for s in spans), 0, 0
    for span in spans:
        size = span.num_bytes if span.path.exists() else 0
        for document in read_documents(span, options, log):
            yield document
            done = before + min(max(document.position - span.begin, 0), size)
            if (done - told) * _TOLD_TIMES >= total:  # a corpus may have millions of documents
                told = done
                progress("tokenise", done, total)
        before += size
    progress("tokenise", total, total)


# --- from specs to files


def resolve(config: DataConfig) -> tuple[Source, ...]:
    """The sources of a recipe, whose values were checked as it was read. Raises DataError with everything that is wrong with the files' names."""
    problems, sources = list[Problem](), list[Source]()
    for i, spec in enumerate(config.sources):
        found = _resolve(spec, f"data.sources[{i}]")
        if isinstance(found, Problem):
            problems.append(found)
        else:
            cap = config.builtin_bytes or corpus.DEFAULT_BYTES
            field = found.text_field if found.own_field else config.text_field
            sources.append(replace(found, text_field=field, builtin_bytes=cap))
    if config.chat_template is not None:
        problems += [p for i, s in enumerate(sources) if (p := _mixed(s, f"data.sources[{i}]")) is not None]
        sources = [_talking(s) for s in sources]
    if not problems:
        problems += _effect_problems(config, sources)
    if problems:
        raise DataError(problems, subject="the data section")
    return tuple(sources)


CHAT_FIELD = "messages"
"""Field of the conversations where nothing names another."""


def _talking(source: Source) -> Source:
    """With a `data.chat_template` what a source of records holds are conversations."""
    if source.kind != "text" or not source.has_fields:
        return source
    field = CHAT_FIELD if source.text_field == DataConfig.text_field and not source.own_field else source.text_field
    return replace(source, kind="chat", text_field=field)


def _mixed(source: Source, where: str) -> Problem | None:
    plain = next((f for f in source.files if not _has_fields(f)), None)
    if plain is None or source.kind != "text" or not source.has_fields:
        return None
    rule = f"holds conversations and, in {plain}, plain text"
    return Problem(where=where, value=source.spec, rule=rule, hint="list them as two sources")


def _effect_problems(config: DataConfig, sources: list[Source]) -> Iterator[Problem]:
    """Settings that would change nothing with these files."""
    fielded = [s for s in sources if s.has_fields]
    if config.chat_template is not None and not fielded:
        rule = "has no effect: no source is a .jsonl or .parquet file, which could hold conversations"
        yield Problem(where="data.chat_template", value=config.chat_template, rule=rule, hint="leave it out")
    if config.text_field != "text" and all(s.own_field for s in fielded):
        why = "each source names its own field" if fielded else "no source is a .jsonl or .parquet file"
        rule = f"has no effect: {why}"
        yield Problem(where="data.text_field", value=config.text_field, rule=rule, hint="leave it out")


def _resolve(spec: str, where: str) -> Source | Problem:
    """An entry of `data.sources`. What it says is a name first: where a file has that one, `#` is part of it."""
    name, _, own = spec.rpartition("#")
    found = _named(spec, where)
    if isinstance(found, Source) or not name or "/" in own or os.path.lexists(spec):
        return found
    inner = _named(name, where)
    if isinstance(inner, Problem):
        return inner
    if not own:
        hint = f"write {name}#FIELD, or {name} alone"
        return Problem(where=where, value=spec, rule="names no field behind its #", hint=hint)
    source = replace(inner, spec=spec, text_field=own, own_field=True)
    if not source.has_fields:
        rule = f"names a field ({own!r}), and holds no records with fields (.jsonl, .parquet)"
        return Problem(where=where, value=spec, rule=rule, hint=f"write {name} alone")
    return source


def _named(spec: str, where: str) -> Source | Problem:
    """The files that a name without a field means."""
    if spec == BUILTIN:
        return Source(spec=spec, kind="builtin")
    if spec.startswith("builtin:"):
        return Problem(where=where, value=spec, rule="is not a built-in corpus", hint=nearest(spec, [BUILTIN]))
    path, unread = Path(spec), ""
    if path.is_dir() and is_saved(path):
        files: list[Path] | Problem = saved_files(path, where)
    elif path.is_dir():
        files, unread = _in_folder(path, spec, where)
    elif glob.has_magic(spec) and not path.exists():
        files = _matching(spec, where)
    elif path.is_file():
        files = [path]
    elif Path(f"{spec}.bin").is_file() and Path(f"{spec}.idx").is_file():
        files = [Path(f"{spec}.bin")]
    elif path.exists():
        return Problem(where=where, value=spec, rule="is neither a file nor a folder", hint="copy it to a file")
    else:
        return Problem(where=where, value=spec, rule="does not exist", hint=_nearest_file(path))
    found = files if isinstance(files, Problem) else _typed(spec, where, files)
    return replace(found, unread=unread) if isinstance(found, Source) else found


def _matching(spec: str, where: str) -> list[Path] | Problem:
    """The files that a glob finds, each once, although links and a second `**` may lead to it in several ways: by the shortest, else by the first."""
    hits = sorted({Path(p) for p in _globbed(spec)})
    broken = next((p for p in hits if p.is_symlink() and not p.exists()), None)
    if broken is not None:
        return _leads_nowhere(broken, where)
    files = [p for p in hits if p.is_file()]
    if not files:
        return Problem(where=where, value=spec, rule="matches no file", hint="write ** to look into folders")
    real = {folder: os.path.realpath(folder) for folder in {p.parent for p in files}}
    once = dict[tuple[str, str], Path]()
    for path in sorted(files, key=lambda p: len(p.parts)):
        once.setdefault((real[path.parent], path.name), path)
    return sorted(once.values())


def _globbed(spec: str) -> Iterator[str]:
    """What `glob.glob` finds, but that a `**` lists each folder once: where links lead round there are more ways than anybody can go."""
    parts = spec.split("/")
    if "**" not in parts:
        yield from glob.iglob(spec)
        return
    at = parts.index("**")
    above, rest = "/".join(parts[:at]) or ("/" if at else "."), list(dropwhile(lambda part: part == "**", parts[at:]))
    for base in filter(os.path.isdir, glob.iglob(above)):
        for folder in _below(Path(base)).folders:
            yield from _globbed(os.path.join(glob.escape(folder), *(rest or ["*"])))


def _leads_nowhere(link: Path, where: str) -> Problem:
    return Problem(
        where=where, value=str(link), rule="is a link that leads to no file", hint="repair or remove the link"
    )


@dataclass(frozen=True)
class _Below:
    """What lies below a folder, hidden names left out."""

    files: list[Path] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Itself first."""
    broken: list[Path] = field(default_factory=list)
    """Links that lead nowhere."""
    closed: list[Path] = field(default_factory=list)
    """Folders that cannot be listed."""


def _below(folder: Path) -> _Below:
    """Links to folders are followed once all that lies here is found, so that they move no other file; a folder is listed once, whatever leads to it."""
    found, listed, tops = _Below(), set[str](), [str(folder)]
    while tops:
        links = list[str]()
        for top in sorted(tops):
            waiting = [(top, os.path.realpath(top))]
            while waiting:
                here, real = waiting.pop()
                if real not in listed:
                    listed.add(real)
                    found.folders.append(here)
                    waiting += [(e.path, os.path.join(real, e.name)) for e in _sorted_out(here, found, links)]
        tops = links
    return found


def _sorted_out(here: str, found: _Below, links: list[str]) -> list[os.DirEntry[str]]:
    """Tells `found` the files of a folder and `links` its links to folders; its own folders."""
    try:
        with os.scandir(here) as listing:
            entries = [e for e in listing if not e.name.startswith(".")]
    except OSError:
        found.closed.append(Path(here))
        return []
    for entry in entries:
        if entry.is_symlink() and os.path.isdir(entry.path):
            links.append(entry.path)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            found.broken.append(Path(entry.path))
        elif os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file():
            found.files.append(Path(entry.path))
    return [e for e in entries if e.is_dir(follow_symlinks=False)]


def _in_folder(path: Path, spec: str, where: str) -> tuple[list[Path] | Problem, str]:
    """All data files below a folder that is no saved dataset, and a sentence about the others."""
    below = _below(path)
    inside = sorted(below.files)
    broken = sorted(p for p in below.broken if suffix_of(p) in _suffixes())
    if broken:
        return _leads_nowhere(broken[0], where), ""
    saved = next((p.parent for p in inside if p.name in MARKS and is_saved(p.parent)), None)
    if saved is not None:
        rule = f"is a folder with a saved dataset in it ({saved.relative_to(path)})"
        return Problem(where=where, value=spec, rule=rule, hint=f"list {saved} as a source of its own"), ""
    files = [p for p in inside if suffix_of(p) in _suffixes()]
    if not files:
        seen = ", ".join(sorted({p.suffix or p.name for p in inside})[:8])
        rule = f"is a folder without data files (it holds {seen})" if seen else "is an empty folder"
        return Problem(where=where, value=spec, rule=rule, hint=f"readable: {', '.join(_suffixes())}"), ""
    other = Counter(p.suffix or p.name for p in inside if suffix_of(p) not in _suffixes())
    kinds = ", ".join(name for name, _ in other.most_common(8))
    told = [f"files that are not read ({other.total()}: {kinds})"] if other else []
    if below.closed:
        told.append(
            f"folders that cannot be listed ({len(below.closed)}: {', '.join(map(str, sorted(below.closed)[:8]))})"
        )
    return files, f"{spec!r} in data.sources holds {' and '.join(told)}" if told else ""


def _typed(spec: str, where: str, files: list[Path]) -> Source | Problem:
    """A source of files that are all text or all tokens."""
    unknown = [f for f in files if suffix_of(f) not in _suffixes()]
    if unknown:
        return Problem(
            where=where,
            value=str(unknown[0]),
            rule="has an unknown extension",
            hint=f"readable: {', '.join(_suffixes())}",
        )
    pairs = sorted({f.with_suffix(".bin") for f in files if suffix_of(f) in TOKEN_SUFFIXES})
    if not pairs:
        return Source(spec=spec, kind="text", files=tuple(files))
    if any(suffix_of(f) in text_suffixes() for f in files):
        return Problem(
            where=where,
            value=spec,
            rule="mixes text with .bin/.idx tokens in one source",
            hint="list them as two sources",
        )
    for suffix in TOKEN_SUFFIXES:
        for missing in (p.with_suffix(suffix) for p in pairs if not p.with_suffix(suffix).is_file()):
            other = "its index" if suffix == ".idx" else "its tokens"
            return Problem(
                where=where, value=str(missing), rule="does not exist", hint=f"keep .bin and {other} together"
            )
    return Source(spec=spec, kind="tokens", files=tuple(pairs))


def _suffixes() -> tuple[str, ...]:
    return (*text_suffixes(), *TOKEN_SUFFIXES)


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    names = [p.name for p in folder.iterdir() if p.is_dir() or suffix_of(p) in _suffixes()]
    return nearest(path.name, names) if names else f"{folder} holds no data files"


# --- identity


def identify(source: Source, cache: Path, progress: CacheProgress) -> Source:
    """The source with its identity and, for the built-in corpus, its files. Remembers both in the cache; safe in many processes at once."""
    if source.kind == "builtin":
        seen = corpus.candidates(corpus.python_folders())
        told: list[object] = [[path, *of] for path, of in seen.items()]
        extra: list[object] = [corpus.RULES_VERSION, source.builtin_bytes]
    else:
        seen = {str(f): _seen(f) for f in _all_files(source)}
        told = [[str(f.resolve()), *seen[str(f)]] for f in _all_files(source)]
        extra = [READER_VERSION, source.kind, source.text_field, *added_readers(source)]
    with writing(cache):
        memo = cache / "identities" / f"{digest([told, extra])}.json"
        if not memo.exists():
            with locked(memo.parent / ".locks" / memo.stem, progress):
                if not memo.exists():
                    write_atomically(memo, json.dumps(_identity(source, seen, progress)).encode())
        try:
            known: _Known = typed(load_json(memo), _Known, where=str(memo))
        except MalformedError:  # a damaged disk
            known = typed(_identity(source, seen, progress), _Known, where=str(memo))
            write_atomically(memo, json.dumps(asdict(known)).encode())
    if source.kind != "builtin":
        return replace(source, identity=known.identity, seen=seen)
    files = tuple(Path(f) for f in known.files)
    return replace(source, identity=known.identity, files=files, seen={f: seen[f] for f in known.files if f in seen})


@dataclass(frozen=True)
class _Known:
    """What the cache remembers of a source."""

    identity: str
    files: list[str] = field(default_factory=list)


def _identity(source: Source, seen: Mapping[str, Seen], progress: CacheProgress) -> dict[str, object]:
    if source.kind == "builtin":
        files, identity = corpus.select(seen, source.builtin_bytes, progress)
        _check_unchanged({str(f): seen[str(f)] for f in files})  # which were hashed as they were chosen
        return {"identity": digest(identity), "files": [str(f) for f in files]}
    files = _all_files(source)
    with unchanged(seen):
        contents = [[suffix_of(path), of] for path, of in zip(files, _hashes(files, progress), strict=True)]
    return {"identity": digest([READER_VERSION, source.kind, source.text_field, contents, *added_readers(source)])}


@contextlib.contextmanager
def unchanged(seen: Mapping[str, Seen]) -> Iterator[None]:
    """What is made inside is made of the files as they were `seen`: else it would be kept under the identity of another text. Raises `DataError` with
    those that have changed, in the place of what they were found to be wrong with."""
    try:
        yield
    except (DataError, OSError):
        _check_unchanged(seen)
        raise
    _check_unchanged(seen)


def _check_unchanged(seen: Mapping[str, Seen]) -> None:
    log = ProblemLog()
    for path, then in seen.items():
        if _seen(Path(path)) != then:
            rule, hint = (
                "was changed while it was prepared",
                "the same command again will do, once nothing writes to it",
            )
            log.report(path, Path(path).name, rule, hint)
    log.raise_if_any()


def _seen(path: Path) -> Seen:
    found = _stat(path)
    return found.st_size, found.st_mtime_ns


def added_readers(source: Source) -> list[str]:
    """Packages, with versions, that read files of the source: another version may find other documents."""
    added = added_formats()
    return sorted({added[suffix].package for suffix in map(suffix_of, source.files) if suffix in added})


def _hashes(files: Sequence[Path], progress: CacheProgress) -> list[str]:
    """Of the content of each file, by a thread for each core: a processor reads faster than it hashes."""
    total, done, found = sum(_stat(f).st_size for f in files), [0] * len(files), list[str]()
    stopped = threading.Event()

    def hash_one(number: int) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for block in _blocks(files[number]):
            hasher.update(block)
            done[number] += len(block)
            if stopped.is_set():
                break
        return hasher.hexdigest()

    with ThreadPoolExecutor(usable_cores()) as threads:
        try:
            told_s = 0.0
            for of in [threads.submit(hash_one, number) for number in range(len(files))]:
                while wait([of], timeout=_POLL_S).not_done or time.monotonic() - told_s > _POLL_S:
                    progress("scan", sum(done), total)
                    told_s = time.monotonic()
                found.append(of.result())
            progress("scan", sum(done), total)
        except BaseException:
            stopped.set()
            threads.shutdown(cancel_futures=True)
            raise
    return found


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while block := file.read(_HASH_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise _unreadable(path, error) from error


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    rule = f"cannot be read ({error.strerror or error})"
    hint = "check that it exists, its owner and permissions"
    return DataError.of(str(path), path.name, rule, hint, subject="the data")


def _all_files(source: Source) -> tuple[Path, ...]:
    """Megatron indices included."""
    if source.kind != "tokens":
        return source.files
    return tuple(f.with_suffix(s) for f in source.files for s in TOKEN_SUFFIXES)

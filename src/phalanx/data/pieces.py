"""A large source is tokenised in pieces, by as many processes as there are cores for it; a preparation that was interrupted goes on with the pieces that are finished.

A piece is a part of a .jsonl file, another file, or several small ones. Where the pieces are cut depends on the files alone, never on the number of processes, and the joined pieces are byte for byte what
one process would have written in one go (`tokenising.py`). They lie in a folder of the cache that belongs to the names of the files, each known by the sizes and times of its own: whoever repairs
one file keeps the pieces of the others.

    pieces/SOURCE/PIECE/piece.npz      lengths, hashes and more of the documents of a finished piece
    pieces/SOURCE/PIECE/tokens.bin     (and answers.bin) gone once it is part of the joined file, so that no disk holds all tokens twice
    pieces/SOURCE/joined-PLAN/         what has been joined; the store links to it, and then the folder of the source is removed

The processes are programs of their own, not forks: ranks have threads. They end with this one, however that ends. What is wrong with a piece is not told by its process: the piece is made here once more, in the order of
the files, and meets its problems again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from subprocess import Popen
from typing import Any, BinaryIO

import numpy as np

from phalanx.core.errors import DataError, RunError
from phalanx.core.pipes import end_program, read_message, start_program, write_message
from phalanx.core.reading import malformed, parse_json, typed
from phalanx.data.cache import CacheProgress, digest, ensure_folder, locked, silent
from phalanx.data.chat import chat_identity
from phalanx.data.corpus import Seen
from phalanx.data.formats import CUT_SUFFIX, ReadOptions, Span, lines_before, suffix_of
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import READER_VERSION, Source, added_readers, documents, unchanged
from phalanx.data.template import ChatTemplate
from phalanx.data.token_file import file_sum, sum_of
from phalanx.data.tokenising import ANSWERS, TOKENS, TokenPart, count_targets, dtype_of, part_of, sides, tokenise
from phalanx.data.tokenizer import Tokenizer, load_tokenizer

LARGE_BYTES = 64 << 20
"""A smaller source is tokenised in one go: to start processes takes half a second, and the tokenizer has threads of its own."""
PIECE_BYTES = (16 << 20, 512 << 20)
"""Of text in a piece, at least and about at most: what an interruption costs each process."""
NUM_PIECES = 1024
_VERSION = 1
"""Raise it whenever the same text would give other pieces."""
_PIECE = "piece.npz"
_COPY_BYTES = 1 << 23
_TOLD_S, _POLL_S = 0.2, 0.1


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What the pieces of a source share."""

    folder: str
    options: ReadOptions
    template: ChatTemplate | None
    fraction: float
    seen: Mapping[str, Seen]
    """The files as they were hashed (`sources.unchanged`)."""

    @property
    def files(self) -> tuple[str, ...]:
        """What a piece, and the whole, is written to."""
        return (TOKENS, ANSWERS) if self.options.conversations else (TOKENS,)


@dataclass(frozen=True)
class _Told:
    """What a process answers: how many bytes of its piece are read; at the end whether it is finished."""

    read: int
    ended: bool = False
    finished: bool = False


@dataclass(frozen=True)
class _Piece:
    name: str
    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans)


def plan_pieces(source: Source) -> list[tuple[Span, ...]]:
    """What each piece reads, in the order of the files."""
    least, most = PIECE_BYTES
    size = min(max(source.num_bytes // NUM_PIECES, least), most)
    pieces, piece, taken = [], list[Span](), 0
    for path in source.files:
        for span in _cut(path, size):
            piece.append(span)
            taken += span.num_bytes
            if taken >= size:
                pieces.append(tuple(piece))
                piece, taken = [], 0
    return [*pieces, tuple(piece)] if piece else pieces


def _cut(path: Path, size: int) -> Iterator[Span]:
    total = path.stat().st_size
    if suffix_of(path) != CUT_SUFFIX or total <= size:
        yield Span(path)
        return
    count = -(-total // size)
    for i in range(count):
        yield Span(path, total * i // count, total * (i + 1) // count if i + 1 < count else None)


class SourcePieces:
    """The pieces of a source of text."""

    def __init__(
        self,
        cache: Path,
        source: Source,
        tokenizer: Tokenizer,
        *,
        fraction: float,
        template: ChatTemplate | None,
        workers: int,
    ) -> None:
        """`workers`: processes at most; where there are fewer pieces each has several threads."""
        self.tokenizer, self.workers = tokenizer, workers
        paths = [str(path.resolve()) for path in source.files]
        chat = chat_identity(template, tokenizer)
        about = [source.text_field, source.kind, tokenizer.fingerprint, chat, fraction]
        self.folder = cache / "pieces" / digest([paths, about])
        readers = [_VERSION, READER_VERSION, source.read_options.txt_document_chars, added_readers(source)]
        self.pieces, times = list[_Piece](), Counter[str]()
        for spans in plan_pieces(source):
            name = digest([readers, _seen(spans)])
            times[name] += 1  # a file may have two names
            self.pieces.append(_Piece(name if times[name] == 1 else digest([name, times[name]]), spans))
        self._joined = self.folder / f"joined-{digest([piece.name for piece in self.pieces])}"
        options, seen = source.read_options, source.seen
        self._work = _Work(folder=str(self.folder), options=options, template=template, fraction=fraction, seen=seen)

    def tokenise(self, folder: Path, log: ProblemLog, progress: CacheProgress) -> TokenPart:
        """Writes tokens.bin (and answers.bin) of the whole source into `folder`. Raises `DataError`, and `RunError` where a process fails."""
        with self._locked(progress):
            self._make_all(log, progress)
            log.raise_if_any()
            details, counts = list[dict[str, Any]](), 0
            for piece in self.pieces:
                details.append(self._details(piece))
                counts += details[-1].pop("counts")  # of a large vocabulary megabytes
            for number, name in enumerate(self._work.files):
                self._join(name, number, details, progress)
                _link(self._joined / name, folder / name)
            return self._part(folder, details, counts)

    def forget(self) -> None:
        """Removes what is left of the pieces, once the source is in its store."""
        if self.folder.exists():
            with contextlib.suppress(OSError), self._locked(silent):  # who may only read the cache trains on it
                shutil.rmtree(self.folder, ignore_errors=True)

    def _locked(self, progress: CacheProgress) -> contextlib.AbstractContextManager[None]:
        return locked(self.folder.parent / ".locks" / self.folder.name, progress)

    # --- making

    def _make_all(self, log: ProblemLog, progress: CacheProgress) -> None:
        self._clear()
        left = [piece for piece in self.pieces[self._num_joined() :] if not _is_whole(self.folder / piece.name)]
        total = sum(piece.num_bytes for piece in self.pieces)
        done = total - sum(piece.num_bytes for piece in left)
        workers = min(self.workers, len(left))
        if workers > 1:
            self._make_by_workers(left, workers, log, lambda read: progress("tokenise", done + read, total))
            return
        for piece in left:
            tell = _shifted(progress, done, total)
            try:
                self._make(piece, ProblemLog(), tell)
            except DataError:
                self._report(piece, log, tell)
            done += piece.num_bytes

    def _clear(self) -> None:
        """Away with what is no part of this plan: pieces of files that have changed, and what was joined before they had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {self._joined.name, *(piece.name for piece in self.pieces)}
        for path in self.folder.iterdir():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def _num_joined(self) -> int:
        """The first pieces, whose tokens are in the joined file and nowhere else."""
        folders = (self.folder / piece.name for piece in self.pieces if self._joined.exists())
        return sum(1 for _ in takewhile(lambda f: (f / _PIECE).exists() and not (f / TOKENS).exists(), folders))

    def _make(self, piece: _Piece, log: ProblemLog, progress: CacheProgress) -> None:
        _make_piece(piece.name, piece.spans, self._work, self.tokenizer, log, progress)

    def _report(self, piece: _Piece, log: ProblemLog, progress: CacheProgress) -> None:
        """Makes a piece of which something is wrong once more, now that all before it are made, and tells `log` what it is."""
        own, spans = ProblemLog(whole=True), []
        for span in piece.spans:
            with contextlib.suppress(OSError):  # its reader will say so
                span = replace(span, line=lines_before(span))
            spans.append(span)
        try:
            self._make(replace(piece, spans=tuple(spans)), own, progress)
        except DataError as error:
            for problem in own.found:
                log.add(problem)
            if error.problems != tuple(own.found):
                raise

    def _make_by_workers(
        self, left: Sequence[_Piece], count: int, log: ProblemLog, tell: Callable[[int], None]
    ) -> None:
        (self.folder / "tokenizer").mkdir()
        self.tokenizer.save(self.folder / "tokenizer")
        heard, waiting = queue.SimpleQueue[tuple[int, _Told | None]](), deque(enumerate(left))
        processes, threads = list[Popen[bytes]](), list[threading.Thread]()
        try:
            for _ in range(count):
                processes.append(_started(threads=self.workers // count))
                threads.append(threading.Thread(target=self._drive, args=(processes[-1], waiting, heard), daemon=True))
                threads[-1].start()
            self._hear(left, processes, heard, log, tell)
        finally:
            for process in processes:
                process.kill()
            for process, thread in zip(processes, threads, strict=False):
                end_program(process)
                thread.join(1.0)  # ranks may be forked next

    def _hear(
        self,
        left: Sequence[_Piece],
        processes: Sequence[Popen[bytes]],
        heard: queue.SimpleQueue[tuple[int, _Told | None]],
        log: ProblemLog,
        tell: Callable[[int], None],
    ) -> None:
        """Until all pieces are finished. What is wrong with one is told once all before it are."""
        read, ended = [0] * len(left), dict[int, bool]()
        first = 0
        while first < len(left):
            with contextlib.suppress(queue.Empty):
                number, told = heard.get(timeout=_POLL_S)
                if told is None:
                    raise _ended_early(processes)
                read[number] = told.read
                if told.ended:
                    ended[number] = told.finished
            tell(sum(read))
            while first in ended:
                if not ended[first]:
                    self._report(left[first], log, lambda *_: tell(sum(read)))
                first += 1

    def _drive(
        self,
        process: Popen[bytes],
        waiting: deque[tuple[int, _Piece]],
        heard: queue.SimpleQueue[tuple[int, _Told | None]],
    ) -> None:
        """Gives a process one piece after the other; `heard` gets what it answers, None where it is gone."""
        number = -1
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was ended here
            write_message(process.stdin, json.dumps(asdict(self._work)).encode())
            while (next_one := _taken(waiting)) is not None:
                number, piece = next_one
                spans = [(str(span.path), span.begin, span.end) for span in piece.spans]
                write_message(process.stdin, json.dumps([piece.name, spans]).encode())
                while not (told := _answer(process)).ended:
                    heard.put((number, told))
                heard.put((number, told))
            return
        heard.put((number, None))

    # --- joining

    def _details(self, piece: _Piece) -> dict[str, Any]:
        try:
            with np.load(self.folder / piece.name / _PIECE) as found:
                names = ("length", "hashes", "counts", "sums", "left_out", "text_bytes")
                return {
                    name: found[name] for name in (*names, *(("first",) if self._work.options.conversations else ()))
                }
        except Exception as error:  # a strange header leads to whatever its parsers raise
            raise self._altered(self.folder / piece.name / _PIECE) from error

    def _join(self, name: str, number: int, details: Sequence[dict[str, Any]], progress: CacheProgress) -> None:
        """Appends the file of each piece to that of all, and removes it. `number`: of the file in `_Work.files`."""
        self._joined.mkdir(exist_ok=True)
        whole, each = self._joined / name, dtype_of(self.tokenizer).itemsize if name == TOKENS else 1
        paths = [self.folder / p.name / name for p in self.pieces]
        sizes = [int(d["length"].sum()) * each for d in details]
        first = next((i for i, path in enumerate(paths) if path.exists()), len(paths))
        done, total = sum(sizes[:first]), sum(sizes)
        if done > (whole.stat().st_size if whole.exists() else 0) or not all(map(Path.exists, paths[first:])):
            raise self._altered(whole)
        with whole.open("r+b" if first else "wb") as file:
            for size, of in zip(sizes[:first], details[:first], strict=True):
                if sum_of(file, size) != of["sums"][number]:
                    raise self._altered(whole)
            file.truncate(done)  # the last piece may be there in part
            for path, size, of in zip(paths[first:], sizes[first:], details[first:], strict=True):
                if _append(path, file, _shifted(progress, done, total)) != (size, of["sums"][number]):
                    raise self._altered(path)
                file.flush()
                os.fsync(file.fileno())
                path.unlink()
                done += size

    def _altered(self, path: Path) -> DataError:
        shutil.rmtree(path.parent, ignore_errors=True)
        return malformed(str(path), None, "was altered since it was written", "start again: it is made anew")

    def _part(self, folder: Path, details: Sequence[dict[str, Any]], counts: Any) -> TokenPart:
        def all_of(name: str) -> Any:
            return np.concatenate([each[name] for each in details])

        return part_of(
            folder, dtype_of(self.tokenizer), length=all_of("length"), hashes=all_of("hashes"),
            first=all_of("first") if self._work.options.conversations else None,
            left_out=sum(int(each["left_out"]) for each in details), text_bytes=sum(int(each["text_bytes"]) for each in details),
            counts=counts,
        )  # fmt: skip


def _seen(spans: Sequence[Span]) -> list[object]:
    stats = [(span, span.path.stat()) for span in spans]
    return [[str(s.path.resolve()), s.begin, s.end, stat.st_size, stat.st_mtime_ns] for s, stat in stats]


def _is_whole(folder: Path) -> bool:
    """Whether a piece is finished, and not joined yet."""
    return (folder / _PIECE).exists() and (folder / TOKENS).exists()


def _make_piece(
    name: str, spans: Sequence[Span], work: _Work, tokenizer: Tokenizer, log: ProblemLog, progress: CacheProgress
) -> None:
    """Makes a piece in the folder of its source. Raises `DataError` with what is wrong in its text."""

    def build(target: Path) -> None:
        texts = documents(spans, work.options, log, progress)
        with unchanged({path: work.seen[path] for path in {str(s.path) for s in spans} if path in work.seen}):
            part = tokenise(
                target, texts, tokenizer, conversations=work.options.conversations, template=work.template, log=log
            )
            log.raise_if_any()
        counts = count_targets(part, sides(part.hashes, work.fraction), tokenizer)
        sums = [file_sum(target / file) for file in work.files]
        first: dict[str, Any] = {} if part.first is None else {"first": part.first}
        np.savez(
            target / _PIECE, length=part.length, hashes=part.hashes, counts=counts, sums=np.array(sums, np.uint32),
            left_out=part.left_out, text_bytes=part.text_bytes, **first,
        )  # fmt: skip

    ensure_folder(Path(work.folder) / name, complete=_is_whole, build=build, progress=silent)


def _append(path: Path, whole: BinaryIO, progress: CacheProgress) -> tuple[int, int]:
    """Copies a file to the end of another; its size and CRC-32."""
    size, found = 0, 0
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            whole.write(block)
            size, found = size + len(block), zlib.crc32(block, found)
            progress("join", size, 0)
    return size, found


def _link(path: Path, target: Path) -> None:
    """A second name, so that what was joined outlives an interruption; where the file system has none, a copy."""
    try:
        target.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, target)


def _shifted(progress: CacheProgress, done: int, total: int) -> CacheProgress:
    return lambda phase, read, _: progress(phase, done + read, total)


def _started(*, threads: int) -> Popen[bytes]:
    try:
        return start_program("phalanx.data.pieces:serve", threads=threads)
    except OSError as error:
        text = f"cannot start a process that tokenises ({error.strerror}): phalanx prepare RECIPE --workers N has fewer"
        raise RunError(text) from error


def _taken(waiting: deque[tuple[int, _Piece]]) -> tuple[int, _Piece] | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _answer(process: Popen[bytes]) -> _Told:
    """Raises `OSError` where the process is gone."""
    message = read_message(process.stdout)
    if message is None:
        raise BrokenPipeError
    told: _Told = typed(parse_json(message, where="a process"), _Told, where="a process")
    return told


def _ended_early(processes: Sequence[Popen[bytes]]) -> RunError:
    time.sleep(_POLL_S)
    codes = [code for process in processes if (code := process.poll()) is not None]
    why = "killed, probably for lack of memory" if -9 in codes else f"status {codes[0] if codes else 'unknown'}"
    hint = "start again, with fewer of them: phalanx prepare RECIPE --workers N"
    return RunError(f"a process that tokenises ended ({why}); finished pieces are kept: {hint}")


# ---- the other process -----------------------------------------------------------------------------------------------


def serve(_: Sequence[str]) -> None:
    """Make one piece after the other until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reader of another package prints is no answer
    asked = queue.SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    work: _Work = typed(parse_json(asked.get(), where="stdin", plain=False), _Work, where="stdin")
    tokenizer = load_tokenizer(Path(work.folder) / "tokenizer")
    while True:
        name, spans = parse_json(asked.get(), where="stdin", plain=False)
        last = [0.0, 0]

        def progress(phase: str, done: int, total: int, /, last: list[float] = last) -> None:
            last[1] = done
            if time.monotonic() - last[0] >= _TOLD_S:
                last[0] = time.monotonic()
                write_message(answers, json.dumps({"read": done}).encode())

        finished = True
        try:
            paths = [Span(Path(path), begin, end) for path, begin, end in spans]
            _make_piece(name, paths, work, tokenizer, ProblemLog(), progress)
        except Exception:  # the piece is made once more by whoever asked for it, and meets it there
            finished = False
        write_message(answers, json.dumps({"read": int(last[1]), "ended": True, "finished": finished}).encode())


def _listen(asked: queue.SimpleQueue[bytes]) -> None:
    """Ends this process with the one that asks, however that ends, and whatever is under way here."""
    while (message := read_message(sys.stdin.buffer)) is not None:
        asked.put(message)
    os._exit(0)

"""Text files as streams of documents: .txt, .jsonl (plain, gzip, zstd), .parquet, .arrow (streams), .py, and what installed packages read.

Never holds more than a block and a document in memory. What is wrong goes to a ProblemLog with file and line, and reading goes on where
that makes sense; a reader never yields text that it had to repair.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.core.errors import ConfigError, Problem, first_line, nearest
from phalanx.core.extensions import Extension, extensions
from phalanx.core.reading import MOST_LINE, MalformedError, lines_of, open_regular, parse_json
from phalanx.data.arrow_stream import StreamError, batch_ends
from phalanx.data.parquet_pages import PageError, column_chunks, page_sizes
from phalanx.data.problems import ProblemLog
from phalanx.data.template import Message

TEXT_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
TOKEN_SUFFIXES = (".bin", ".idx")

_BLOCK_BYTES = 1 << 20
_SHOWN = 40
MOST_DOCUMENT = MOST_LINE
"""Bytes of a document: more take gigabytes to tokenise."""
MOST_PAGE = 1 << 30
"""Bytes of a page of Parquet, of which a reader keeps two. Writers look at a page's size once in 1,024 rows, so long documents make large ones."""
MOST_EXPANSION, SPARE_BYTES = 500, 64 << 20
"""Text is at most so many times as large as its file, and `SPARE_BYTES` more. Compressed text is 3 to 20 times as large."""
_LEAST_SPENT = 256
MOST_MESSAGES = 1000
"""Of a conversation: a template writes it once for each of its answers."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_NOT_READ = {
    **dict.fromkeys(("tool_calls", "function_call"), "calls tools"),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "has its reasoning in a field of its own"),
    "weight": "has a weight",
    "train": "is left out of the training",
}
"""Fields of a message."""
_HARMLESS = {"weight": (None, 1), "train": (None, True)}
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""Harmless in all other fields."""
_NOT_READ_BESIDE = {
    "system": 'write it as a first message {"role": "system", "content": "..."}, or remove the record',
    "tools": "remove the record, or the field if the model need not know its tools",
}
"""Fields of a record beside its messages, and what to do about them."""
_KEYS = (("role", "from"), ("content", "value"))
"""Names of role and text in a message: OpenAI's, and ShareGPT's."""
_ROWS, _MOST_ROWS = 16, 1024
"""Rows of Parquet that are decoded at once, at least and at most. Each may be as large as the largest page (a dictionary of one long text), so more than
the least are as many as take no more than the least of the longest documents."""


@dataclass(frozen=True)
class Document:
    """One text with its place (`file:line`), and how far into its file reading was when it came."""

    text: str
    where: str
    position: int
    messages: tuple[Message, ...] = ()
    """Of a conversation, whose text is that of all of them."""


@dataclass(frozen=True)
class Span:
    """A file, or the lines of one that begin at the bytes from `begin` to `end`."""

    path: Path
    begin: int = 0
    end: int | None = None
    """None: the end of the file."""
    line: int = 0
    """Lines before it."""

    @property
    def num_bytes(self) -> int:
        return (self.path.stat().st_size if self.end is None else self.end) - self.begin


CHAT_FIELDS = frozenset({"messages", "conversations"})
"""Where files of conversations usually have them."""
CHAT_HINT = "records are conversations? Set data.chat_template (chatml, or the model's own)"
CUT_SUFFIX = ".jsonl"
"""Of files that can be read from any line on."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    text_field: str = "text"
    field_hint: str = "set data.text_field"
    """What to do where a file has no field of that name."""
    conversations: bool = False
    """The field holds lists of messages."""
    txt_document_chars: int = 1 << 16
    """A .txt file is cut into documents of at most this many characters, after a line end where there is one."""


def added_formats() -> Mapping[str, Extension]:
    """Suffix -> extension of an installed package (`phalanx.data_formats`): a function of a path that yields the texts of its documents, in order."""
    return extensions("data_formats", taken=(*TEXT_SUFFIXES, *TOKEN_SUFFIXES, ".py"))


def text_suffixes() -> tuple[str, ...]:
    """Suffixes of all files of text that can be read."""
    return (*TEXT_SUFFIXES, *added_formats())


def suffix_of(path: Path) -> str:
    """The known suffix of a file name, or its last one."""
    name = path.name.lower()
    known = [s for s in (*text_suffixes(), *TOKEN_SUFFIXES, ".py") if name.endswith(s)]
    return max(known, key=len) if known else path.suffix


def read_documents(what: Path | Span, options: ReadOptions, log: ProblemLog) -> Iterator[Document]:
    """The documents of one file, or of a part of one (`CUT_SUFFIX`), in order."""
    span = what if isinstance(what, Span) else Span(what)
    path, suffix = span.path, suffix_of(span.path)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, options, log)
        elif suffix == ".arrow":
            yield from _read_arrow(path, options, log)
        elif suffix in (".txt", ".py"):
            yield from _read_text(path, options.txt_document_chars if suffix == ".txt" else None, log)
        elif suffix in added_formats():
            yield from _read_added(path, added_formats()[suffix], log)
        else:
            yield from _read_jsonl(span, options, log)
    except OSError as error:
        log.add(_unreadable(path, error))


def _unreadable(path: Path, error: OSError) -> Problem:
    rule = f"cannot be read ({error.strerror or error})"
    return Problem(
        where=str(path), value=path.name, rule=rule, hint="check that the file exists, is complete and readable"
    )


# --- formats of installed packages


def _read_added(path: Path, extension: Extension, log: ProblemLog) -> Iterator[Document]:
    """What the extension yields, each held against what our own readers promise. An error of its own is a problem of the file."""
    size, number = path.stat().st_size, 0
    try:
        for number, text in enumerate(extension.load()(path), start=1):
            where = f"{path}:document {number}"
            if isinstance(text, str) and len(text) > MOST_DOCUMENT:
                raise OSError(errno.EFBIG, f"document {number} has more than {MOST_DOCUMENT} characters")
            if _checked(text, where, ReadOptions(), ["text"], log) is not None:
                yield Document(text, where, size)
    except ConfigError as error:
        for problem in error.problems:
            log.add(problem)
    except OSError:
        raise
    except Exception as error:  # of a stranger's reader
        rule = f"cannot be read by {extension.package} ({type(error).__name__}: {first_line(error)})"
        hint = "repair the file, or the package that reads it"
        log.report(f"{path}:document {number + 1}", path.name, rule, hint)


# --- .txt


def _read_text(path: Path, limit: int | None, log: ProblemLog) -> Iterator[Document]:
    """Documents of at most `limit` characters (None: the file is one document), cut after a line end where there is one."""
    buffer, line = "", 1
    with open_regular(path) as file:
        for text in _decode(file, path, log):
            buffer += text
            if limit is None and len(buffer) > MOST_DOCUMENT:
                raise OSError(errno.EFBIG, f"has more than {MOST_DOCUMENT} characters")
            while limit is not None and len(buffer) > limit:
                cut = buffer.rfind("\n", 0, limit) + 1 or limit
                yield Document(buffer[:cut], f"{path}:{line}", file.tell())
                line += buffer.count("\n", 0, cut)
                buffer = buffer[cut:]
        if buffer:
            yield Document(buffer, f"{path}:{line}", file.tell())


def _decode(file: BinaryIO, path: Path, log: ProblemLog) -> Iterator[str]:
    """Text blocks of a UTF-8 file; a byte-order mark is skipped. Stops at the first broken byte, which is reported with its line."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    done, lines, more = 0, 1, True
    while more:
        block = file.read(_BLOCK_BYTES)
        more = bool(block)
        held = len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
        try:
            text = decoder.decode(block, final=not more)
        except UnicodeDecodeError as error:
            line = lines + error.object.count(b"\n", 0, error.start)
            log.add(_broken_text(path, error.object, at=error.start, base=done - held, line=line))
            return
        yield text.removeprefix("\ufeff") if done == 0 else text
        done += len(block)
        lines += block.count(b"\n")


def _broken_text(path: Path, data: bytes, *, at: int, base: int, line: int) -> Problem:
    utf16 = base + at == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff")
    encoding = "utf-16" if utf16 else "latin-1"
    return Problem(
        where=f"{path}:{line}",
        value=data[at : at + 4],
        rule=f"must be UTF-8, and is not at byte {base + at}",
        hint=f"convert it, for example: iconv -f {encoding} -t utf-8",
    )


# --- .jsonl


def _read_jsonl(span: Span, options: ReadOptions, log: ProblemLog) -> Iterator[Document]:
    path, number, budget = span.path, span.line, _Budget(span.path)
    with open_regular(path) as raw, _decompressed(raw, suffix_of(path)) as lines:
        try:
            if suffix_of(path) != CUT_SUFFIX and not path.stat().st_size:  # which the libraries take for no text
                raise EOFError("it has no bytes at all, as where writing it broke off")
            for at, line in _lines_that_begin(lines, span):
                number += 1
                budget.spend(len(line))
                line = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
                if not line.strip():
                    continue
                document = _field_of(line, f"{path}:{number}", raw.tell(), options, log)
                if document is not None:
                    yield document
        except (OSError, EOFError, zlib.error) as error:
            log.add(_broken_off(path, f"{path}:{number + 1}", error))


def _lines_that_begin(file: BinaryIO, span: Span) -> Iterator[tuple[int, bytes]]:
    """The lines of a span, each with the byte where it begins."""
    at = 0
    if span.begin:
        file.seek(span.begin - 1)
        while (part := file.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
            pass
        at = file.tell()
    lines = lines_of(file, most=MOST_DOCUMENT, before=span.line)
    while (span.end is None or at < span.end) and (line := next(lines, b"")):
        yield at, line
        at += len(line)


def lines_before(span: Span) -> int:
    """Lines of its file that begin before it. Raises `OSError`."""
    count, left = 0, max(span.begin - 1, 0)
    with open_regular(span.path) as file:
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count + (span.begin > 0)


def _broken_off(path: Path, where: str, error: Exception) -> Problem:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        rule, hint = str(error.strerror), "cut the document into several, or remove the file if you do not know it"
    else:
        rule, hint = f"cannot be decompressed ({error})", "copy the file again"
    return Problem(where=where, value=path.name, rule=rule, hint=hint)


class _Budget:
    """What a file may become: text of some hundred times its size is none, but a bomb that takes all memory, or reading without end."""

    def __init__(self, path: Path) -> None:
        self._left = SPARE_BYTES + MOST_EXPANSION * path.stat().st_size

    def spend(self, size: int) -> None:
        """Raises `OSError` where it is used up. An empty line takes time too."""
        self._left -= max(size, _LEAST_SPENT)
        if self._left < 0:
            raise OSError(errno.EFBIG, f"becomes more than {MOST_EXPANSION} times as large as it is")


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".jsonl.gz":
        return gzip.open(raw, "rb")  # type: ignore[return-value]  # a BinaryIO in all but name
    if suffix == ".jsonl.zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    return raw


def _field_of(line: bytes, where: str, position: int, options: ReadOptions, log: ProblemLog) -> Document | None:
    field = options.text_field
    try:
        record = parse_json(line.decode("utf-8"), where=where, plain=False)
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8, and is not at byte {error.start} of the line"
        log.report(where, line[error.start : error.start + 4], rule, "repair or remove the line")
        return None
    except MalformedError as error:
        shown = line.strip()[:_SHOWN].decode("utf-8", "replace")
        rule = f"must be one JSON object a line, and {error.problems[0].rule}"
        log.report(where, shown, rule, "repair or remove the line")
        return None
    if not isinstance(record, dict):
        rule = f"must be a JSON object with a field {field!r}, not a {type(record).__name__}"
        log.report(where, str(record)[:_SHOWN], rule, 'for example {"' + field + '": "..."}')
        return None
    beside = [n for n in _beside(record, options) if record[n] not in _NOTHING]
    return _document(record.get(field), where, position, options, sorted(record), log, beside=beside)


def _beside(names: Iterable[str], options: ReadOptions) -> list[str]:
    """Fields beside the messages that belong to a conversation, and are not read."""
    found = set(names) - {options.text_field} if options.conversations else set[str]()
    return [name for name in _NOT_READ_BESIDE if name in found]


def _document(
    value: object,
    where: str,
    position: int,
    options: ReadOptions,
    names: list[str],
    log: ProblemLog,
    *,
    beside: Sequence[str] = (),
) -> Document | None:
    """The text, or the conversation, that a field holds. `beside`: fields of the record that are not empty, and are not read."""
    for name in beside:
        rule = f"has a field {name!r} beside its messages, which is not read"
        log.report(where, name, rule, _NOT_READ_BESIDE[name])
    if beside:
        return None
    if options.conversations and options.text_field in names:
        messages = _conversation(value, where, options.text_field, log)
        return (
            None if messages is None else Document("\n".join(text for _, text in messages), where, position, messages)
        )
    text = _checked(value, where, options, names, log)
    return None if text is None else Document(text, where, position)


def _conversation(value: object, where: str, field: str, log: ProblemLog) -> tuple[Message, ...] | None:
    """The messages that a list of tables is."""
    messages: list[Message] = []
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        shown = f"{len(value)} messages" if isinstance(value, list) else str(value)[:_SHOWN]
        rule = f"field {field!r} must be a list of 1 to {MOST_MESSAGES} messages"
        hint = 'for example [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        log.report(where, shown, rule, hint)
        return None
    for number, message in enumerate(value, start=1):
        found = _message(message)
        if isinstance(found, str):
            problem = Problem(where=where, value=str(message)[:_SHOWN], rule=f"message {number} {found}", hint="repair or remove the record")  # fmt: skip
            log.add(problem)
            return None
        messages.append(found)
    return tuple(messages)


def _message(message: object) -> Message | str:
    """Role and text, or what is wrong."""
    if not isinstance(message, dict):
        return "must be a table with role and content"
    role, text = (next((message[name] for name in names if name in message), None) for names in _KEYS)
    role = _SHARE_GPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        return f"must have one of the roles {', '.join(ROLES)}"
    for name, what in _NOT_READ.items():
        is_left_out = name == "train" and role != "assistant"  # as all that is no answer
        if not is_left_out and message.get(name) not in _HARMLESS.get(name, _NOTHING):
            return f"{what} ({name}), which is not read"
    if not isinstance(text, str):
        return (
            f"must have text as its content, not {'a list of parts' if isinstance(text, list) else type(text).__name__}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "must be Unicode text, and holds half a surrogate pair"
    return str(role), text


def _field_hint(options: ReadOptions, names: Sequence[str]) -> str:
    """What to do where a record, or a file, has other fields than the one that is to be read."""
    if not options.conversations and not CHAT_FIELDS.isdisjoint(names):
        return CHAT_HINT
    return f"{options.field_hint}; {nearest(options.text_field, names)}"


def _checked(text: object, where: str, options: ReadOptions, names: list[str], log: ProblemLog) -> str | None:
    """`text` if it is one that can be encoded."""
    field = options.text_field
    if field not in names:
        log.report(where, names[:8], f"has no field {field!r}", _field_hint(options, names))
        return None
    if not isinstance(text, str):
        shown = text if text is None or isinstance(text, (bool, int, float)) else str(text)[:_SHOWN]
        hint = CHAT_HINT if isinstance(text, list) and field in CHAT_FIELDS else "repair or remove the record"
        log.report(where, shown, f"field {field!r} must be text", hint)
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        rule = f"field {field!r} must be Unicode text, and holds half a surrogate pair at character {error.start}"
        log.report(where, text[error.start], rule, "repair or remove the record")
        return None
    return text


# --- .parquet


def _read_parquet(path: Path, options: ReadOptions, log: ProblemLog) -> Iterator[Document]:
    largest = 0
    for field in (options.text_field, *_beside(_NOT_READ_BESIDE, options)):
        page = _largest_page(path, field, log)
        if page is None:
            return
        largest = max(largest, page)
    rows = min(_MOST_ROWS, max(_ROWS, _ROWS * MOST_DOCUMENT // max(largest, 1)))
    try:
        with pq.ParquetFile(path) as file:
            if _has_text_column(file.schema_arrow, path, options, log):
                yield from _rows(_columns(file, path, options, batch=rows), path, options, log)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        log.add(_no_parquet(path, error))


def _largest_page(path: Path, field: str, log: ProblemLog) -> int | None:
    """Bytes of the column's largest page once it is decompressed; None, and a problem, where one is larger than it may be: the library would take as much memory as a page says."""
    largest = 0
    try:
        with open_regular(path) as file:
            for group, chunk in enumerate(column_chunks(file, path.stat().st_size, field)):
                most = min(MOST_PAGE, SPARE_BYTES + MOST_EXPANSION * chunk.length)
                found = max(page_sizes(file, chunk), default=0)
                largest = max(largest, found)
                if found > most:
                    rule = f"has a page that becomes more than {most} bytes"
                    hint = "write it with smaller row groups or batches (row_group_size = 256, write_batch_size = 64)"
                    log.report(f"{path}:row group {group}", path.name, rule, hint)
                    return None
    except PageError as error:
        log.add(_no_parquet(path, error))
        return None
    return largest


def _no_parquet(path: Path, error: Exception) -> Problem:
    rule = f"is not a readable parquet file ({first_line(error)})"
    return Problem(where=str(path), value=path.name, rule=rule, hint="copy the file again")


def _has_text_column(schema: pa.Schema, path: Path, options: ReadOptions, log: ProblemLog) -> bool:
    field = options.text_field
    if field not in schema.names:
        hint = _field_hint(options, schema.names) if schema.names else "write the text into a column"
        log.report(str(path), schema.names[:8], f"has no column {field!r}", hint)
        return False
    if schema.names.count(field) > 1:
        log.report(str(path), field, "is the name of several columns", "rename all but one")
        return False
    kind = schema.field(field).type
    if options.conversations:
        return _has_messages(kind, path, field, log)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        text = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        hint = f"columns of text: {', '.join(text)}" if text else "write the text as strings"
        log.report(str(path), str(kind), f"column {field!r} must hold strings", hint)
        return False
    return True


def _has_messages(kind: pa.DataType, path: Path, field: str, log: ProblemLog) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    table = kind.value_type if listed and pa.types.is_struct(kind.value_type) else pa.struct([])
    texts = {f.name for f in table if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)}
    if not all(texts.intersection(names) for names in _KEYS):
        rule = f"column {field!r} must hold lists of messages with the texts role and content"
        hint = "leave data.chat_template out for texts" if not listed else "write each message as a table of both"
        log.report(str(path), str(kind)[:_SHOWN], rule, hint)
        return False
    return True


_Columns = tuple[pa.RecordBatch, int]
"""Some rows of a table, of the columns that are read, and how far into the file they reach."""


def _columns(file: pq.ParquetFile, path: Path, options: ReadOptions, *, batch: int) -> Iterator[_Columns]:
    """The columns in pieces of `batch` rows, which are decoded at once."""
    size, total, number = path.stat().st_size, max(file.metadata.num_rows, 1), 0
    beside = _beside(file.schema_arrow.names, options)
    for rows in file.iter_batches(batch_size=batch, columns=[options.text_field, *beside]):
        number += rows.num_rows
        yield rows, size * number // total


def _rows(columns: Iterable[_Columns], path: Path, options: ReadOptions, log: ProblemLog) -> Iterator[Document]:
    number, budget = 0, _Budget(path)
    for rows, position in columns:
        known = _beside(rows.schema.names, options)
        others = [(name, rows.column(i)) for i, name in enumerate(rows.schema.names) if name in known]
        for row, cell in enumerate(rows.column(options.text_field)):
            number += 1
            where = f"{path}:row {number}"
            size = _cell_bytes(cell)
            budget.spend(size)
            if size > MOST_DOCUMENT:
                raise OSError(errno.EFBIG, f"row {number} has more than {MOST_DOCUMENT} bytes")
            try:
                value = _messages_of(cell) if options.conversations else cell.as_py()
            except UnicodeDecodeError as error:
                rule = f"must be UTF-8, and is not at byte {error.start} of the value"
                log.report(where, error.object[error.start :][:4], rule, "repair or remove the row")
                continue
            beside = [name for name, each in others if not _is_empty(each[row])]
            document = _document(value, where, position, options, [options.text_field], log, beside=beside)
            if document is not None:
                yield document


def _cell_bytes(cell: pa.Scalar) -> int:
    """Of a text, or of a list of messages."""
    if isinstance(cell, pa.ListScalar):
        return 0 if cell.values is None else int(cell.values.nbytes)
    data = cell.as_buffer()
    return 0 if data is None else int(data.size)


def _is_empty(cell: pa.Scalar) -> bool:
    """Of any type, without decoding what it holds."""
    if not cell.is_valid or pa.types.is_nested(cell.type):
        return not cell.is_valid or (isinstance(cell, pa.ListScalar) and not len(cell.values))
    if isinstance(cell, pa.DictionaryScalar):
        return _is_empty(cell.value)
    return _cell_bytes(cell) == 0 if isinstance(cell, pa.BinaryScalar) else cell.equals(pa.scalar(False))


def _messages_of(row: pa.ListScalar) -> list[dict[str, object]] | None:
    """The tables of a cell with the columns that are read: others may be of any type."""
    table = row.values
    if table is None or len(table) > MOST_MESSAGES:
        return None if table is None else [{}] * len(table)
    names = [f.name for f in table.type]
    read = {name: table.field(names.index(name)).to_pylist() for pair in _KEYS for name in pair if name in names}
    others = {name: table.field(names.index(name)) for name in _NOT_READ if name in names}
    found: list[dict[str, object]] = [{name: texts[i] for name, texts in read.items()} for i in range(len(table))]
    for name, column in others.items():
        nested = pa.types.is_nested(column.type)
        for message, cell in zip(found, column, strict=True):
            message[name] = not _is_empty(cell) if nested else cell.as_py()
    return found


# --- .arrow


def _read_arrow(path: Path, options: ReadOptions, log: ProblemLog) -> Iterator[Document]:
    """A stream of record batches, mapped: what is read of it are views, so a batch takes no memory of its own."""
    try:
        with open_regular(path) as file:
            if path.stat().st_size == 0:
                raise StreamError("it is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = batch_ends(memoryview(data))
        next(ends)
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        if _has_text_column(schema, path, options, log):
            read = {options.text_field, *_beside(schema.names, options)}
            numbers = [number for number, name in enumerate(schema.names) if name in read]
            yield from _rows(_batches(data, ends, numbers), path, options, log)
    except (pa.ArrowException, StreamError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the library
            raise
        rule = f"is not a readable stream of Arrow ({first_line(error)})"
        log.report(str(path), path.name, rule, "copy the file, or save the dataset, again")


def _batches(data: mmap.mmap, ends: Iterator[int], columns: list[int]) -> Iterator[_Columns]:
    """These columns of each batch, with the byte where the batch ends. Offsets are compared with the bytes that are there before any is followed."""
    only = pa.ipc.IpcReadOptions(included_fields=columns)
    with pa.ipc.open_stream(pa.py_buffer(data), options=only) as reader:
        for end in ends:
            rows = reader.read_next_batch()
            for column in rows.columns:
                raw = column.view(_BYTES_OF[column.type]) if column.type in _BYTES_OF else column
                raw.validate(full=True)  # as text, one broken row would end it
            yield rows, end


_BYTES_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}

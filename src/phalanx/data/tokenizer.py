"""Text to token ids and back: bytes, a byte-level BPE trained here, or any Hugging Face tokenizer.json.

Decides ids, the end-of-document token (EOS) and the one that begins texts, where there is one (BOS). What must never change: the same text gives the same ids in every process and on every
machine that has the same tokenizer (compare `fingerprint`); text is never read as a control token, even where it spells one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError, PhalanxError, Problem, first_line, nearest
from phalanx.core.reading import is_count, load_json, malformed, parse_json, read_text, typed

Ints = NDArray[np.int64]

EOS = "<|endoftext|>"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Begin and end of a message in ChatML."""
SMALLEST_BPE = 257
"""256 bytes and EOS."""
MOST_TOKENS = 10_000_000
"""Of a vocabulary. The largest published one has a million; a table of counts takes 16 bytes a token."""
_META = "tokenizer_meta.json"
_WRITTEN_SO = re.compile("<([|｜]).+\\1>", re.DOTALL)
_NEAR = 64
_LONG_RUN = re.compile(r"\S{128}")
"""Learning from text without spaces (genomes, encoded data) is cut here: it takes merges x word length (100 kB, 1,000 tokens: 4.4 s, cut 0.1 s)."""
_KNOWN_EOS = (
    EOS, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<|end▁of▁sentence|>", "[EOS]", "[SEP]",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer. `encode` adds no special tokens; `decode` leaves out ids that are no text."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def eos_id(self) -> int: ...
    @property
    def eos_token(self) -> str:
        """What spells it in texts that were written here; empty: nothing does."""
        ...

    @property
    def bos_token(self) -> str:
        """What spells `bos_id`; empty: there is none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Stands before every text, of documents and of prompts; None: nothing does."""
        ...

    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> Ints: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ints]: ...
    def encode_rendered(self, texts: Sequence[str], behind: Sequence[str]) -> list[Ints]:
        """Ids of texts that were written here (`data/chat.py`): what spells a control token is one. `behind`: what each continues, empty at the beginning; no token lies across that border."""
        ...

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that say where messages begin and end."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...
    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` reads."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is EOS."""

    name = "byte"
    vocab_size = 257
    eos_id = 256
    eos_token = ""
    bos_token = ""
    bos_id: int | None = None
    fingerprint = "byte/1"
    control_tokens: tuple[str, ...] = ()

    def encode(self, text: str) -> Ints:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ints]:
        return [self.encode(text) for text in texts]

    def encode_rendered(self, texts: Sequence[str], behind: Sequence[str]) -> list[Ints]:
        return self.encode_batch(texts)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        (folder / _META).write_text(json.dumps({"kind": "byte"}), encoding="utf-8")


class FileTokenizer:
    """A Hugging Face tokenizer.json, without its padding, truncation and template of special tokens."""

    def __init__(self, content: str, *, eos_token: str, name: str, bos_token: str = "") -> None:
        self._content = content
        self._tokenizer, vocabulary = parse_tokenizer(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token is text
        self.eos_token, self.bos_token = eos_token, bos_token
        self.name = name
        self.vocab_size = 1 + max(vocabulary.values())
        self.eos_id = vocabulary[eos_token]
        self.bos_id = vocabulary[bos_token] if bos_token else None
        said = f"{bos_token}\n" * bool(bos_token) + f"{eos_token}\n{content}"
        self.fingerprint = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> Ints:
        with _in_rust(self.name):
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ints]:
        with _in_rust(self.name):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int64) for e in encodings]

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Those that are marked as special, and those that are written as such: DeepSeek's `<｜User｜>` is not marked."""
        return tuple(token["content"] for token in self._for_rendered[1] if token["special"])

    @cached_property
    def _for_rendered(self) -> tuple[tokenizers.Tokenizer, list[dict[str, Any]]]:
        """What reads texts that were written here, and its added tokens. Control tokens are found as they are spelled, not where a normalizer (lower case, NFKC) makes them of a message's text."""
        with _in_rust(self.name):
            content = parse_json(self._tokenizer.to_str(), where=self.name, plain=False)
            for token in content["added_tokens"]:
                token["special"] |= _WRITTEN_SO.fullmatch(token["content"]) is not None
                token["normalized"] &= not token["special"]
            return tokenizers.Tokenizer.from_str(json.dumps(content)), content["added_tokens"]

    def encode_rendered(self, texts: Sequence[str], behind: Sequence[str]) -> list[Ints]:
        """A text is encoded behind the end of what it continues, whose ids are then taken off: some tokenizers put a blank before all that begins, or behind some control tokens take none.
        Where both share a token, it is encoded behind others."""
        found: list[Ints | None] = [None] * len(texts)
        anchors = [self._anchors(each) for each in behind]
        for attempt in range(max(map(len, anchors), default=0)):
            left = [i for i, ids in enumerate(found) if ids is None]
            before = [anchors[i][attempt] for i in left]
            told = [head + texts[i] for head, i in zip(before, left, strict=True)]
            for i, head, ids in zip(left, self._ids(before), self._ids(told), strict=True):
                if attempt == len(anchors[i]) - 1 or ids[: len(head)] == head:
                    found[i] = np.asarray(ids[len(head) :], np.int64)
        return [ids for ids in found if ids is not None]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        with _in_rust(self.name):
            return [e.ids for e in self._for_rendered[0].encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _plain(self) -> str:
        """A control token that takes no blanks; empty where there is none."""
        plain = (
            t["content"]
            for t in self._for_rendered[1]
            if t["special"] and not (t["lstrip"] or t["rstrip"] or t["single_word"])
        )
        return next(plain, "")

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")

    def _anchors(self, behind: str) -> tuple[str, ...]:
        """What a text is encoded behind: the first that shares no token with it. From the last control token on where that is near, else the last character."""
        if not behind:
            return ("",)
        end = behind[-_NEAR:]
        near = [found.start() for found in self._control.finditer(end)]
        return (end[near[-1] :] if near else self._plain + end[-1], self._plain + "\n", self._plain)

    def decode(self, ids: Iterable[int]) -> str:
        legal = [i for i in ids if 0 <= i < self.vocab_size]
        with _in_rust(self.name):
            return str(self._tokenizer.decode(legal, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self._content, encoding="utf-8")
        meta = {"kind": "file", "eos_token": self.eos_token, "name": self.name, "sum": _sum(self._content)}
        if self.bos_token:
            meta["bos_token"] = self.bos_token
        (folder / _META).write_text(json.dumps(meta), encoding="utf-8")


@dataclass(frozen=True)
class _Meta:
    """What tokenizer_meta.json says."""

    kind: Literal["byte", "file"]
    eos_token: str = ""
    bos_token: str = ""
    name: str = ""
    sum: str = ""


def continued(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> tuple[str, str]:
    """Text of `prompt` and how `new` goes on; one behind the other they are the text of all ids. Decoded alone `new` would lose what stands between words (some tokenizers leave out
    the blank that begins a text). A character that begins in the prompt belongs to what completes it."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    differing = (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b)
    shared = next(differing, min(len(before), len(whole)))
    return whole[:shared], whole[shared:]


def _sum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _in_rust(name: str) -> Iterator[None]:
    """Whatever the library says is a `DataError`: it raises bare `Exception`, and where it panics something that is none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, PhalanxError):
        raise
    except BaseException as error:
        rule = f"the library of tokenizers failed: {first_line(error)[:200]}"
        raise DataError.of(name, None, rule, subject="the tokenizer") from None


def parse_tokenizer(content: str) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """A tokenizer.json, and its vocabulary with what was added. A BPE's dropout, which draws other tokens for the same text each time, is taken off.
    Raises `DataError`."""
    with _in_rust("tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(content)
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary or max(vocabulary.values()) >= MOST_TOKENS:
        found = max(vocabulary.values()) if vocabulary else 0
        raise malformed("tokenizer.json", found, f"must have tokens, with ids below {MOST_TOKENS}")
    return tokenizer, vocabulary


def load_tokenizer(folder: Path) -> Tokenizer:
    """What `save` wrote into `folder` (a run folder, for `phalanx generate`). Raises `DataError` where it was altered since; one of an earlier version has no checksum."""
    try:
        meta: _Meta = typed(load_json(folder / _META), _Meta, where=str(folder / _META))
        if meta.kind == "byte":
            return ByteTokenizer()
        content = read_text(folder / "tokenizer.json")
        if meta.sum not in ("", _sum(content)):
            raise malformed(str(folder / "tokenizer.json"), _sum(content), f"was written with checksum {meta.sum}")
        return FileTokenizer(content, eos_token=meta.eos_token, name=meta.name, bos_token=meta.bos_token)
    except (DataError, OSError, KeyError) as error:
        rule = f"holds no readable tokenizer ({error})"
        raise DataError.of(str(folder), _META, rule, "is it a run folder?", subject="the tokenizer") from error


def parse_choice(config: DataConfig) -> int | Path | None:
    """What `data.tokenizer` means: None for bytes, a vocabulary to train, or the tokenizer.json to read.

    Raises DataError with everything wrong about it.
    """
    choice, problems = config.tokenizer, []
    path = Path(choice) / "tokenizer.json" if Path(choice).is_dir() else Path(choice)
    if choice == "byte" or choice.startswith("bpe:"):
        for name in ("eos_token", "bos_token"):
            if (token := getattr(config, name)) is not None:
                rule = f"has no effect with data.tokenizer = {choice!r}, which has its own"
                problems.append(Problem(where=f"data.{name}", value=token, rule=rule, hint="leave it out"))
        size = choice.removeprefix("bpe:")
        if choice != "byte" and not (is_count(size) and SMALLEST_BPE <= int(size) < MOST_TOKENS):
            rule = f"must name a vocabulary of at least {SMALLEST_BPE} tokens (256 bytes and EOS)"
            problems.append(Problem(where="data.tokenizer", value=choice, rule=rule, hint="for example bpe:8192"))
    elif not path.is_file():
        legal = "byte, bpe:8192, or the path of a tokenizer.json"
        rule = "is neither a known tokenizer nor a tokenizer.json that exists"
        close = nearest(choice, ["byte", "bpe:8192"])
        problems.append(
            Problem(
                where="data.tokenizer",
                value=choice,
                rule=rule,
                hint=close if close.startswith("did") else f"legal: {legal}",
            )
        )
    if problems:
        raise DataError(problems, subject="the tokenizer")
    if choice == "byte":
        return None
    return int(choice.removeprefix("bpe:")) if choice.startswith("bpe:") else path


def read_tokenizer_file(path: Path, *, eos_token: str | None, bos_token: str | None = None) -> FileTokenizer:
    """A Hugging Face tokenizer. EOS is `eos_token`, or what the files next to it name, or a name commonly used for it. BOS is `bos_token`, or none."""
    try:
        content = read_text(path)
        vocabulary = parse_tokenizer(content)[1]
    except (OSError, DataError) as error:
        why = error.problems[0].rule if isinstance(error, DataError) else error.strerror
        rule = f"is not a Hugging Face tokenizer.json ({why})"
        raise DataError.of("data.tokenizer", str(path), rule, subject="the tokenizer") from error
    named = eos_token if eos_token is not None else _named_eos(path.parent, vocabulary)
    chosen = named or next((name for name in _KNOWN_EOS if name in vocabulary), None)
    if chosen is None or chosen not in vocabulary:
        special = [t for t in vocabulary if t.startswith("<") and t.endswith(">")]
        rule = (
            "has no end-of-document token that we can find"
            if chosen is None
            else f"has no token {chosen!r} to end documents with"
        )
        hint = (
            f"name one with data.eos_token; {nearest(chosen or EOS, special[:20])}"
            if special
            else "name one with data.eos_token"
        )
        raise DataError.of("data.tokenizer", str(path), rule, hint, subject="the tokenizer")
    if bos_token and bos_token not in vocabulary:
        rule, special = (
            f"has no token {bos_token!r} to begin documents with",
            [t for t in vocabulary if t.startswith("<")],
        )
        hint = f"name another with data.bos_token; {nearest(bos_token, special[:20])}"
        raise DataError.of("data.tokenizer", str(path), rule, hint, subject="the tokenizer")
    return FileTokenizer(content, eos_token=chosen, name=path.parent.name or path.name, bos_token=bos_token or "")


@dataclass(frozen=True, kw_only=True)
class Beginnings:
    """The token before every text, by each of a tokenizer's own files; empty: none, or several."""

    flag: str | None
    """By add_bos_token of tokenizer_config.json; None: it does not say."""
    template: str
    """By tokenizer.json itself."""

    @property
    def taken(self) -> str:
        """The flag counts more: it is what the author of a model meant, and what transformers did for Llama's classes (DeepSeek, Mixtral) up to version 4, with which the models that have it were made.
        Version 5 follows tokenizer.json alone. Where the two disagree an import says so, and an export has what the run had."""
        return self.template if self.flag is None else self.flag


def beginnings(path: Path) -> Beginnings:
    """What a tokenizer.json and the tokenizer_config.json next to it put before every text. Nothing where the file is no tokenizer."""
    config = _json_object(path.parent / "tokenizer_config.json")
    with contextlib.suppress(OSError, DataError), _in_rust(str(path)):
        tokenizer, vocabulary = parse_tokenizer(read_text(path))
        bare, told = with_ends(tokenizer)
        begun = told[1 : 1 + len(bare)] == bare and told[: len(bare)] != bare
        return Beginnings(flag=begun_by_flag(config, vocabulary), template=told[0] if begun else "")
    return Beginnings(flag=None, template="")


def begun_by_flag(config: Mapping[str, Any], vocabulary: Collection[str]) -> str | None:
    """The token before every text by add_bos_token of a tokenizer_config.json; None: it does not say."""
    named = config.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    says = config.get("add_bos_token")
    if not isinstance(says, bool):
        return None
    return named if says and isinstance(named, str) and named in vocabulary else ""


def with_ends(tokenizer: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens of a text, without and with what a tokenizer.json puts around it."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with _in_rust("tokenizer.json"):
        bare, told = (tokenizer.encode("a", add_special_tokens=special).tokens for special in (False, True))
    return bare, told


def _named_eos(folder: Path, vocabulary: dict[str, int]) -> str | None:
    """The EOS that tokenizer_config.json, special_tokens_map.json or config.json next to a tokenizer name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        entries = _json_object(folder / name)
        token = entries.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
        number = entries.get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        by_id = next((t for t, i in vocabulary.items() if i == number), None)
        if by_id is not None:
            return by_id
    return None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def train_bpe(texts: Iterable[str], *, vocab_size: int, control_tokens: Sequence[str] = ()) -> str:
    """The tokenizer.json of a byte-level BPE over `texts`, with `control_tokens` beside EOS; fewer tokens than asked where the text has too few pairs."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, *control_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_LONG_RUN.sub("\\g<0>\n", text) for text in texts), trainer)
    return str(tokenizer.to_str())

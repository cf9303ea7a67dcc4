"""Conversations: how a list of messages becomes tokens, and which of these are answers, the only ones that are predicted.

A conversation is rendered as ChatML, which is written here, or by a template (`template.py`), into sections that are answers and sections that are not. Sections are tokenised one by one, so a prompt has the
ids that it has when somebody asks, and no token lies across a border. An answer is what an assistant says with the token that ends its turn; blanks behind that token are none of it.

Must never happen: text of a message becomes a control token. Where a message spells one it is cut behind the first character, and each part is tokenised by itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError
from phalanx.core.reading import load_json, malformed, typed
from phalanx.data.cache import digest
from phalanx.data.formats import Document
from phalanx.data.problems import ProblemLog
from phalanx.data.template import ChatTemplate, Message, NotRenderedError, Section, TemplateProcess, read_template
from phalanx.data.tokenizer import CHATML_TOKENS, Tokenizer, parse_choice

CHATML = "chatml"
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML for other programs, which read such templates."""
_KEPT = "chat_template.json"
_VERSION = 2
"""Raise it whenever the same conversation would give other tokens."""

Encoded = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Ids, and which of them are of answers; of equal length."""


class _Renderer(Protocol):
    def render(self, messages: Sequence[Message], *, ask: bool = False) -> list[Section]: ...
    def close(self) -> None: ...


class ChatML:
    """`<|im_start|>ROLE\\nTEXT<|im_end|>\\n` for each message."""

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> list[Section]:
        """Sections of a conversation; `ask`: with the beginning of an answer behind it."""
        start, end = CHATML_TOKENS
        sections: list[Section] = []
        for role, text in messages:
            sections += [(f"{start}{role}\n", False), (f"{text}{end}", role == "assistant"), ("\n", False)]
        return [*sections, (f"{start}assistant\n", False)] if ask else sections

    def close(self) -> None:
        """Nothing is open."""


def template_of(config: DataConfig) -> ChatTemplate | None:
    """What renders the conversations of a recipe; None: ChatML, or there are none. Raises `DataError`."""
    if config.chat_template in (None, CHATML):
        return None
    choice = parse_choice(config)
    return read_template(config.chat_template, choice if isinstance(choice, Path) else None)


def save_template(template: ChatTemplate | None, folder: Path) -> None:
    """Writes what `load_template` reads: the file it came from may change, or be gone."""
    if template is not None:
        (folder / _KEPT).write_text(json.dumps(vars(template)), encoding="utf-8")


def load_template(config: DataConfig, folder: Path) -> ChatTemplate | None:
    """As `template_of`, for a run that keeps its tokenizer in `folder`. Raises `DataError`."""
    path = folder / _KEPT
    if config.chat_template in (None, CHATML) or not path.is_file():
        return template_of(config)
    try:
        found: ChatTemplate = typed(load_json(path), ChatTemplate, where=str(path))
    except OSError as error:
        raise malformed(str(path), None, f"cannot be read ({error.strerror})") from error
    return found


def chat_identity(template: ChatTemplate | None, tokenizer: Tokenizer) -> str:
    """Of all that decides the tokens of a conversation beside messages and what identifies the tokenizer."""
    if template is None:
        return digest(["chat", _VERSION, CHATML])
    begin = {"bos_token": tokenizer.bos_token} if tokenizer.bos_token and "bos_token" in template.source else {}
    return digest(["chat", _VERSION, [template.source, begin | template.variables]])


def variables_of(template: ChatTemplate, tokenizer: Tokenizer) -> dict[str, str]:
    """Special tokens as `template` gets them. Where its files do not name the tokens that begin and end texts they are those of `tokenizer`:
    without, a conversation would have no beginning, and an answer no end."""
    own = {"eos_token": tokenizer.eos_token} | ({"bos_token": tokenizer.bos_token} if tokenizer.bos_token else {})
    return own | template.variables


class ChatEncoder:
    """Conversations to tokens. A context manager: a template's process ends with it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """`template` None: ChatML. Raises `DataError` where the tokenizer lacks its control tokens, for messages could then spell them."""
        self.tokenizer = tokenizer
        controls = tokenizer.control_tokens
        missing = [token for token in CHATML_TOKENS if token not in controls] if template is None else []
        if missing:
            rule = f"needs the control token {missing[0]}, which the tokenizer {tokenizer.name!r} does not have"
            hint = "use data.chat_template = model, or the path of a template"
            raise DataError.of("data.chat_template", CHATML, rule, hint, subject="the data section")
        self._uncut = [token for token in controls if len(token) == 1]
        self._spelled = _any_of("(?={})(.)", [token for token in controls if len(token) > 1])
        with_blank = tokenizer.encode_rendered([f"{token}\n" for token in controls], [""] * len(controls))
        self._control_ids = {int(ids[0]) for ids in with_blank}
        leaving = [token for token, ids in zip(controls, with_blank, strict=True) if len(ids) > 1]
        self._blanks = _any_of("(?:{})(\\s+)\\Z", leaving)
        """Only behind tokens that do not take them in themselves (`rstrip`)."""
        self._mark = "".join(secrets.choice("0123456789") for _ in range(32))
        """Where a message is cut. None has it, for it is drawn after they were written."""
        self._renderer: _Renderer = ChatML()
        if template is not None:
            self._renderer = TemplateProcess(replace(template, variables=variables_of(template, tokenizer)))

    def __enter__(self) -> ChatEncoder:
        """Raises `DataError` where the template writes no answer."""
        said = self._mark
        with contextlib.suppress(NotRenderedError):  # it may want other roles
            sections = self._renderer.render((("user", "a"), ("assistant", said)))
            if not any(said in text for text, answer in sections if answer):
                self._renderer.close()
                rule = (
                    "does not write what an assistant says"
                    if not any(said in text for text, _ in sections)
                    else "has no {% generation %} around what an assistant says"
                )
                raise malformed("data.chat_template", None, rule, "it gets messages, each with role and content")
        return self

    def __exit__(self, *_: object) -> None:
        self._renderer.close()

    def encode_batch(self, conversations: Sequence[Document], log: ProblemLog) -> list[Encoded]:
        """Tokens of each conversation. One that its template refuses has none, and is told to `log`. Raises `DataError` where the template exceeds a bound."""
        rendered = []
        for each in conversations:
            try:
                rendered.append(self._sections(each.messages))
            except NotRenderedError as error:
                found = error.problems[0]
                log.report(each.where, found.where, f"is refused: the template {found.rule}", found.hint)  # fmt: skip
                rendered.append([])
        return self._encode(rendered)

    def encode_prompt(self, text: str) -> NDArray[np.int64]:
        """Tokens of a conversation that a user begins, up to where its answer does. Raises `DataError`."""
        return self._encode([self._sections((("user", text),), ask=True)])[0][0]

    def stops(self) -> frozenset[int]:
        """Ids that end an answer: that of the document's end, and the control token that ends a turn. Raises `DataError`."""
        ids, answers = self._encode([self._sections((("user", "a"), ("assistant", "b")))])[0]
        return frozenset((self.tokenizer.eos_id, *(int(i) for i in ids[answers][-1:] if i in self._control_ids)))

    def _encode(self, conversations: Sequence[Sequence[Section]]) -> list[Encoded]:
        flat = [text for sections in conversations for text, _ in sections]
        behind = [
            text for sections in conversations for text in ("", *(text for text, _ in sections[:-1]))[: len(sections)]
        ]
        ids = iter(self.tokenizer.encode_rendered(flat, behind))
        return [_joined([(next(ids), answer) for _, answer in sections]) for sections in conversations]

    def _sections(self, messages: Sequence[Message], *, ask: bool = False) -> list[Section]:
        """What is tokenised piece by piece."""
        guarded = [(role, self._guarded(text)) for role, text in messages]
        merged: list[Section] = []
        for text, answer in self._without_blanks(self._renderer.render(guarded, ask=ask)):
            if merged and merged[-1][1] == answer:
                text = merged.pop()[0] + text
            merged.append((text, answer))
        return [(part, answer) for text, answer in merged for part in text.split(self._mark) if part]

    def _guarded(self, text: str) -> str:
        for token in self._uncut:
            if token in text:
                rule, hint = (
                    "cannot hold a message with this control token of one character",
                    "repair or remove the record",
                )
                raise NotRenderedError.of(token, None, rule, hint, subject="the message")
        return text if self._spelled is None else self._spelled.sub(rf"\g<1>{self._mark}", text)

    def _without_blanks(self, sections: Sequence[Section]) -> Iterator[Section]:
        """Blanks behind the control token that ends an answer are none of it."""
        for text, answer in sections:
            found = self._blanks.search(text) if answer and self._blanks is not None else None
            cut = found.start(1) if found else len(text)
            yield text[:cut], answer
            yield text[cut:], False


def _any_of(pattern: str, tokens: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile(pattern.format("|".join(map(re.escape, tokens))), re.DOTALL) if tokens else None


def _joined(parts: Sequence[tuple[NDArray[np.int64], bool]]) -> Encoded:
    ids = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in parts)])
    return ids, np.repeat([answer for _, answer in parts], [len(each) for each, _ in parts]).astype(np.bool_)

"""Chat templates: a model's own program (Jinja) that writes a conversation as its model was trained on it. It is a stranger's: it runs in a sandbox, in a process of its own, within bounds.

The process renders one conversation after the other and can open nothing: no file, no socket, no process (its limits of the system say so, should the sandbox leak). More time, memory or
output than `Bounds` has ends it, and the preparation with it. What a template gets is what transformers gives it (messages, add_generation_prompt, the names of special tokens, raise_exception), but
no clock: equal conversations have equal tokens.

Answers are found without looking for their text: in `{% generation %}` blocks where a template has them. Else what it writes up to a message, with the beginning of an answer, and up to the end of that message must both be
beginnings of the whole; what lies between is the answer.
"""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, first_line, nearest
from phalanx.core.pipes import answer_of, ask, end_program, read_message, start_program, write_message
from phalanx.core.reading import load_json, malformed, parse_json, read_text, typed

Message = tuple[str, str]
"""Role and text."""
Section = tuple[str, bool]
"""Text, and whether it is of an answer."""

FILE, CONFIG, MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_MOST_TEMPLATE = 1 << 20
_SHOWN = 400
_ALWAYS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Names that identify prepared text whether a template uses them or not."""
_NAME = "<template>"


class NotRenderedError(DataError):
    """A template refuses one conversation, or fails on it."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a template may take for one conversation."""

    cpu_s: int = 10
    wall_s: float = 120.0
    memory: int = 1 << 30
    output: int = 32 << 20


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    name: str
    """Where it stands."""
    source: str
    variables: dict[str, str] = field(default_factory=dict)
    """Names of special tokens."""


def read_template(choice: str, tokenizer: Path | None) -> ChatTemplate:
    """What `data.chat_template` names: `model`, the one beside the tokenizer.json, or a file. Raises `DataError`."""
    folder = tokenizer.parent if tokenizer is not None else None
    try:
        config, more = (_table(folder, name) for name in (CONFIG, MAP))
        path = Path(choice) if choice != "model" else (folder or Path()) / FILE
        if choice == "model" and not path.is_file():
            source, name = _in_config(config, folder), f"chat_template of {folder}/{CONFIG}"
        else:
            source, name = read_text(path, most=_MOST_TEMPLATE), str(path)
    except OSError as error:
        rule = f"is neither chatml nor model nor a template that can be read ({error.strerror})"
        close = nearest(choice, ["chatml", "model"])
        hint = close if close.startswith("did") else "name a file of at most 1 MiB"
        raise malformed("data.chat_template", choice, rule, hint) from error
    if len(source) > _MOST_TEMPLATE:
        raise malformed("data.chat_template", choice, f"has more than {_MOST_TEMPLATE} characters")
    return ChatTemplate(name=name, source=source, variables=_variables(source, config, more))


def _in_config(config: dict[str, Any], folder: Path | None) -> str:
    """The template of a tokenizer_config.json: a text, or the one called default of several."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str):
        rule = f"is not there: {folder} has neither {FILE} nor a chat_template in {CONFIG}"
        raise malformed("data.chat_template", "model", rule, "use chatml, or name a file")
    return found


def _table(folder: Path | None, name: str) -> dict[str, Any]:
    found = load_json(folder / name) if folder is not None and (folder / name).is_file() else {}
    return found if isinstance(found, dict) else {}


def _variables(source: str, config: dict[str, Any], more: dict[str, Any]) -> dict[str, str]:
    """Those of both files that the template names; tokenizer_config.json counts more."""
    own = special_tokens(config)
    found = special_tokens(more) | own
    return {n: token for n, token in found.items() if n in source or (n in own and n in _ALWAYS)}


def special_tokens(table: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a tokenizer_config.json or special_tokens_map.json by their names, such as `bos_token`."""
    named = {name: token for name, token in table.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


@dataclass(frozen=True)
class _Told:
    """What the process answers."""

    sections: list[Section] = field(default_factory=list)
    error: str = ""
    line: int | None = None
    hint: str = ""


@dataclass(frozen=True)
class _Begin:
    """What it is told first."""

    template: str
    variables: dict[str, str]
    bounds: Bounds


# ---- this side -------------------------------------------------------------------------------------------------------


class TemplateProcess:
    """The process that renders."""

    def __init__(self, template: ChatTemplate, bounds: Bounds | None = None) -> None:
        self.template, self.bounds = template, bounds or Bounds()
        self._process = start_program("phalanx.data.template:serve", isolated=True)
        self._end = weakref.finalize(self, end_program, self._process)
        try:
            question = {"template": template.source, "variables": template.variables, "bounds": vars(self.bounds)}
            told = self._ask(question)
            if told.error:
                raise DataError([self._problem(told)], subject="the template")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._end()

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> list[Section]:
        """Sections of a conversation; `ask`: one, with the beginning of an answer behind it. Raises `NotRenderedError`, and `DataError` where a bound is exceeded."""
        told = self._ask({"messages": messages, "ask": ask})
        if told.error:
            raise NotRenderedError([self._problem(told)], subject="the template")
        return told.sections

    def _problem(self, told: _Told) -> Problem:
        where = self.template.name if told.line is None else f"{self.template.name}:{told.line}"
        hint = told.hint or "repair the conversation or the template, or use data.chat_template = chatml"
        return Problem(where=where, value=None, rule=told.error[:_SHOWN], hint=hint)

    def _ask(self, question: object) -> _Told:
        ask(self._process, json.dumps(question).encode())
        answer, late = None, False
        try:
            answer = answer_of(self._process, seconds=self.bounds.wall_s, most=8 * self.bounds.output)
        except TimeoutError:
            late = True
        if answer is None:
            rule = self._death(late)
            hint = "use another template: data.chat_template = chatml"
            raise DataError.of(self.template.name, None, rule, hint, subject="the template")
        told: _Told = typed(parse_json(answer, where=self.template.name), _Told, where=self.template.name)
        return told

    def _death(self, late: bool) -> str:
        self._process.kill()
        code = self._process.wait()
        if late:
            return f"takes more than {self.bounds.wall_s:g} s for one conversation"
        if code == -signal.SIGXCPU:
            return f"takes more than {self.bounds.cpu_s} s of processor time for one conversation"
        return f"ended its process, or wrote more than {self.bounds.output} characters (status {code})"


# ---- the other process -----------------------------------------------------------------------------------------------


def serve(_: Sequence[str]) -> None:
    """Answer until the pipe is closed."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    first: _Begin = typed(parse_json(read_message(questions) or b"", where="stdin"), _Begin, where="stdin")
    renderer: _Renderer | None = None
    told, bounds = _Told(), first.bounds
    imported = _import_all()
    _limit(bounds)
    if imported is not None:
        told = _Told(
            error=f"needs the package jinja2, which cannot be imported ({imported})", hint="pip install jinja2"
        )
    else:
        try:
            _more_time(bounds)
            renderer = _Renderer(first.template, first.variables, bounds)
        except Exception as error:  # of a stranger's program, whatever it is
            told = _reason(error)
    write_message(answers, json.dumps(vars(told)).encode())
    while renderer is not None and (question := read_message(questions)) is not None:
        _more_time(bounds)
        try:
            told = _answer(renderer, parse_json(question, where="stdin"))
        except Exception as error:  # of a stranger's program, whatever it is
            told = _reason(error)
        write_message(answers, json.dumps(vars(told)).encode())


def _import_all() -> str | None:
    """All that jinja2 imports late: once the limits are set nothing can be opened. What is missing, if something is."""
    try:
        import jinja2.debug
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401

        _Renderer("{{ 'a\\n' }}", {}, Bounds()).text([], False)  # what it looks up when it is first used
    except ImportError as error:
        return first_line(error)
    return None


def _limit(bounds: Bounds) -> None:
    """What the system lets this process have from now on: the three pipes that are open and no other descriptor, no file, no process, so much memory."""
    for name, most in (("AS", bounds.memory), ("NOFILE", 3), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # a system without that limit
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _more_time(bounds: Bounds) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + 1 + bounds.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(renderer: _Renderer, question: dict[str, Any]) -> _Told:
    messages = [{"role": role, "content": text} for role, text in question["messages"]]
    return _Told([(renderer.text(messages, True), False)] if question["ask"] else renderer.sections(messages))


def _reason(error: BaseException) -> _Told:
    """What a person is told, with the last line of the template that ran."""
    line = None if isinstance(error, SyntaxError) else getattr(error, "lineno", None)  # of what Jinja made of it
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == _NAME:
            line = at.tb_lineno
        at = at.tb_next
    if isinstance(error, _BrokenPromiseError):
        hint = "use a copy of it with {% generation %} around the answers: data.chat_template = copy.jinja"
        return _Told(error=str(error), hint=hint)
    bounds = {"MemoryError": "takes more memory than it may", "RecursionError": "calls itself without end"}
    text = bounds.get(type(error).__name__)
    return _Told(error=text or f"fails: {type(error).__name__}: {first_line(error)}"[:_SHOWN], line=line)


class _BrokenPromiseError(ValueError):
    """What a template writes up to a message is no beginning of the whole."""


class _Renderer:
    """A compiled template."""

    def __init__(self, source: str, variables: dict[str, str], bounds: Bounds) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._marks = secrets.token_hex(16), secrets.token_hex(16)
        blocks = _generation(*self._marks)
        extensions = ["jinja2.ext.loopcontrols", blocks]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        environment.filters["tojson"] = _to_json
        del environment.globals["lipsum"], environment.filters["random"]  # equal conversations have equal tokens
        code = environment.compile(source, name=_NAME, filename=_NAME)
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        self._variables, self._most = {**variables, "tools": None, "documents": None}, bounds.output
        self._has_blocks = blocks.seen

    def text(self, messages: list[dict[str, str]], ask: bool) -> str:
        marked = self._marked(messages, ask)
        return marked.replace(self._marks[0], "").replace(self._marks[1], "")

    def _marked(self, messages: list[dict[str, str]], ask: bool) -> str:
        parts, length = [], 0
        for part in self._template.generate(messages=messages, add_generation_prompt=ask, **self._variables):
            length += len(part)
            if length > self._most:
                raise ValueError(f"it writes more than {self._most} characters")
            parts.append(part)
        return "".join(parts)

    def sections(self, messages: list[dict[str, str]]) -> list[Section]:
        if not self._has_blocks:
            return self._between(messages)
        begin, end = self._marks
        sections: list[Section] = []
        for number, part in enumerate(self._marked(messages, False).split(begin)):
            answer, mark, rest = part.partition(end) if number else ("", end, part)
            if not mark:
                raise ValueError("a generation block has another in it")
            sections += [(answer, True), (rest.replace(end, ""), False)]
        return sections

    def _between(self, messages: list[dict[str, str]]) -> list[Section]:
        whole, at = self.text(messages, False), 0
        sections: list[Section] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self.text(messages[: i + 1], False) if i + 1 < len(messages) else whole
            before = self.text(messages[:i], True)
            if i == 0 and not after.startswith(before):
                before = self._begun(after, message["content"])
            if not (whole.startswith(after) and after.startswith(before) and at <= len(before)):
                raise _BrokenPromiseError(f"writes message {i + 1} otherwise where others follow it, so that where the answer lies cannot be told")  # fmt: skip
            sections += [(whole[at : len(before)], False), (after[len(before) :], True)]
            at = len(after)
        return [*sections, (whole[at:], False)]

    def _begun(self, after: str, content: str) -> str:
        """What a conversation that an assistant begins has before its words: the template writes more before a first message than before nothing."""
        user = [{"role": "user", "content": "a"}]
        prompt = self.text(user, True).removeprefix(self.text(user, False))
        before = after[: after.find(prompt) + len(prompt)]
        if prompt not in after or not after[len(before) :].lstrip().startswith(content.strip()):
            raise _BrokenPromiseError("does not write the beginning of an answer where the assistant begins the conversation, so that where the answer lies cannot be told")  # fmt: skip
        return before


def _to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    """As transformers has it: jinja2's own escapes what HTML would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation(begin: str, end: str) -> Any:
    """The extension of Jinja that knows `{% generation %} ... {% endgeneration %}`, and writes marks around its content that nobody could foresee."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class AnswerBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012  # as its base has it
        seen = False
        """Whether the template has such a block."""

        def parse(self, parser: Any) -> Any:
            AnswerBlocks.seen = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{begin}{caller()}{end}"

    return AnswerBlocks

"""Continue a prompt with the model of a run, in one process, whatever mapping trained it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, printable, raise_if
from phalanx.data import ChatEncoder, Tokenizer, continued


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a prompt with the model of a run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, such as runs/laptop."""
    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = ""
    """Text to go on from. Default: the beginning of a document."""
    chat: bool = False
    """The prompt is what a user says, in the run's own data.chat_template; only the answer is printed."""
    tokens: int = 200
    """Tokens to write; less where the model ends the document."""
    temperature: float = 0.8
    """Above 1 bolder, below 1 safer, 0 always the likeliest token."""
    top_k: int = 50
    """Draw from this many likeliest tokens, 0 from all."""
    seed: int = 0
    """The same seed writes the same text."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Checkpoint to read. Default: the newest."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Compute threads. Default: all cores."""


def main(args: list[str]) -> int:
    """Run `phalanx generate ARGS...`; returns the exit status."""
    options = read_words(GenerateArgs, args, prog="phalanx generate", description=__doc__)
    shown = None
    for text in continuation(options):
        said = options.prompt if shown is None and not options.chat else ""
        print(said + printable(text[len(shown or "") :]), end="", flush=True)
        shown = text
    print()
    return 0


def continuation(options: GenerateArgs) -> Iterator[str]:
    """The text after the prompt so far, after each token. Raises `ConfigError` or `CheckpointError`."""
    raise_if(problems(options), ConfigError, subject="the command")
    import torch

    from phalanx.runtime.processes import threads_per_rank
    from phalanx.train import Sampling, generate, load_model

    torch.set_num_threads(threads_per_rank(1, options.threads))
    loaded = load_model(options.run, step=options.step)
    tokenizer = loaded.tokenizer
    if options.chat and loaded.recipe.data.chat_template is None:
        rule = "asks for a conversation, and the run was trained on none: it has no data.chat_template"
        raise ConfigError.of("--chat", True, rule, "leave it out", subject="the command")
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt, stops = begin + tokenizer.encode(options.prompt).tolist(), frozenset((tokenizer.eos_id,))
    behind = prompt
    if options.chat:
        behind = []  # an answer is a text by itself
        with ChatEncoder(tokenizer, loaded.template) as encoder:
            prompt, stops = encoder.encode_prompt(options.prompt).tolist(), encoder.stops()
    new = generate(
        loaded.runner,
        prompt or [tokenizer.eos_id],
        num_tokens=options.tokens,
        window=loaded.recipe.train.seq_len,
        vocab=tokenizer.vocab_size,
        sampling=Sampling(temperature=options.temperature, top_k=options.top_k, seed=options.seed),
    )
    yield from decoded(new, tokenizer, stops, prompt=behind)


def problems(options: GenerateArgs) -> list[Problem]:
    """What is wrong with the numbers."""
    rules = (
        ("--tokens", options.tokens, options.tokens >= 1, "must be at least 1", "use 200"),
        ("--temperature", options.temperature, options.temperature >= 0, "must not be negative", "use 0.8"),
        ("--top-k", options.top_k, options.top_k >= 0, "must not be negative", "use 50"),
        ("--seed", options.seed, 0 <= options.seed < 2**63, "must lie between 0 and 2**63 - 1", "use 0"),
        ("PROMPT", options.prompt, bool(options.prompt) or not options.chat, "must say something with --chat", "ask"),
        ("PROMPT", options.prompt, _is_utf8(options.prompt), "must be UTF-8 text", "see the locale of this terminal"),
    )
    found = [Problem(where=w, value=v, rule=r, hint=h) for w, v, ok, r, h in rules if not ok]
    found += too_small(options, "leave it out", threads=1)
    if options.temperature == 0 and options.top_k != GenerateArgs.top_k:
        rule = "has no effect with --temperature 0"
        found.append(Problem(where="--top-k", value=options.top_k, rule=rule, hint="leave it out"))
    return found


def _is_utf8(text: str) -> bool:
    """Bytes of the command line that are not UTF-8 come as lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8") == text


def decoded(
    tokens: Iterable[int], tokenizer: Tokenizer, stops: Collection[int], *, prompt: Sequence[int]
) -> Iterator[str]:
    """The text behind `prompt` so far after each token, up to one of `stops`. Bytes of a character that is not complete are held back."""
    kept: list[int] = []
    text = ""
    for token in tokens:
        if token in stops:
            break
        kept.append(token)
        before, text = continued(tokenizer, prompt, kept)
        if not (before + text).endswith("\ufffd"):
            yield text
    yield text

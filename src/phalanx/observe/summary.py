"""What a run leaves on the screen when it ends: how good it got, what it writes, where it lies, what to try next."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from phalanx.core.config import RECIPE_FILE
from phalanx.core.units import format_count, format_seconds
from phalanx.observe.console import PLAIN_WIDTH
from phalanx.observe.table import loss_text

PROMPT_CHARS = 24


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """None: not known (no validation ran, no text was sampled)."""

    folder: Path
    step: int
    total_steps: int
    seconds: float
    """Seconds of this process."""
    tokens: int
    """Trained by this process."""
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    """Step after which it was measured; None: the last."""
    unigram_loss: float | None = None
    program: str = "phalanx"
    """How the next commands call it (`program_name`)."""
    prompt: str = ""
    text: str | None = None
    """What the model made of the prompt."""
    talks: bool = False
    """Whether it was trained on conversations."""
    needs_trust: bool = False
    """Whether its recipe file alone may not go on with it."""

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps


def next_commands(summary: RunSummary) -> tuple[tuple[str, str], ...]:
    """(command, what it does) that make sense after this run."""
    run, recipe = shlex.quote(str(summary.folder)), shlex.quote(str(summary.folder / RECIPE_FILE))
    name = summary.program
    train = f"{name} train {recipe}{' --trust' if summary.needs_trust else ''}"
    go_on = (train, f"go on from step {summary.step}")
    said = ("Hello --chat", "let it answer") if summary.talks else (_beginning(summary.prompt), "let it write")
    longer = (f"{train} --train.steps {2 * summary.total_steps}", "train twice as long")
    return (
        longer if summary.finished else go_on,
        (f"{name} watch {run}", "its charts"),
        (f"{name} generate {run} {said[0]}", said[1]),
        (f"{name} metrics {run}", "its numbers"),
        (f"{name} verify {recipe}", "prove its mapping"),
    )


def _beginning(prompt: str) -> str:
    """The first words of a prompt that was seen in the data, as a shell takes them."""
    line = next((line.strip() for line in prompt.splitlines() if line.strip()), "")
    words = "".join(c for c in line if c.isprintable())[:PROMPT_CHARS]
    return shlex.quote(words.rpartition(" ")[0] or words) if words else '"The "'


def program_name(typed: str) -> str:
    """What calls this program again where `typed` (`sys.argv[0]`) did: a `.venv/bin` is often not on the PATH."""
    if Path(typed).name != "phalanx":  # python -m, or a launcher
        return "phalanx" if shutil.which("phalanx") else "python -m phalanx"
    found = shutil.which("phalanx")
    return "phalanx" if found and Path(found).resolve() == Path(typed).resolve() else shlex.quote(typed)


def print_summary(summary: RunSummary, *, console: Console | None = None) -> None:
    """Draw the summary: a panel on a terminal, the same words as plain lines elsewhere."""
    console = console if console is not None else Console()
    title = "finished" if summary.finished else f"stopped after step {summary.step} of {summary.total_steps}"
    parts: list[RenderableType] = [_figures(summary)]
    if summary.text is not None:
        bold = " (the prompt is bold)" if console.color_system else ""
        parts += [Text(f"\nIt writes{bold}:"), _sample(summary)]
    if console.is_terminal:
        console.print(
            Panel(
                Group(*parts), title=f"{summary.folder.name}: {title}", title_align="left", padding=(0, 1), expand=False
            )
        )
    else:
        console.print(Text(f"{summary.folder.name}: {title}"))
        for part in parts:
            console.print(part, soft_wrap=True)
    # outside the frame, so that a long command can be copied whole
    width = console.width if console.is_terminal else PLAIN_WIDTH
    for line in _commands(next_commands(summary), width=width):
        console.print(line, soft_wrap=True)


def _figures(summary: RunSummary) -> Text:
    text = Text()
    text.append(
        f"{summary.step} step{'' if summary.step == 1 else 's'} done; this time {format_count(summary.tokens)} tokens in {format_seconds(summary.seconds)}\n"
    )
    if summary.loss is not None:
        text.append(f"train loss       {loss_text(summary.loss)}\n")
    if summary.validation_loss is not None:
        text.append(f"validation loss  {loss_text(summary.validation_loss)}", style="bold")
        if summary.unigram_loss is not None:
            gain = summary.unigram_loss - summary.validation_loss
            words = f"{abs(gain):.3f} {'below' if gain > 0 else 'ABOVE'} guessing ({loss_text(summary.unigram_loss)})"
            text.append(f"  {words}", style="green" if gain > 0 else "bold red")
        if summary.validation_step not in (None, summary.step):
            text.append(f" (step {summary.validation_step})", style="dim")
        text.append("\n")
    text.append(f"run folder       {summary.folder}")
    return text


def _sample(summary: RunSummary) -> Text:
    text = Text(overflow="fold")
    text.append(_printable(summary.prompt), style="bold")
    text.append(_printable(summary.text or ""))
    text.rstrip()
    return Text("\n").join(Text("  ").append_text(line) for line in text.split("\n", allow_blank=True))


def _printable(text: str) -> str:
    """Control characters of a young model's text must not reach the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))


def _commands(commands: Sequence[tuple[str, str]], *, width: int) -> list[Text]:
    """A command a line, its meaning next to it; below it where all would not fit."""
    longest = max((len(c) for c, _ in commands), default=0)
    beside = all(len(meaning) + longest + 6 <= width for _, meaning in commands)
    lines = [Text("Next:")]
    for command, meaning in commands:
        line = Text("  ").append(command, style="bold")
        line.append(f"{'':<{longest - len(command) + 2}}{meaning}" if beside else f"\n      {meaning}", style="dim")
        lines.append(line)
    return lines

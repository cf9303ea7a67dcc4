"""What a person sees while a run trains: rows that stay, and on a terminal a few lines below them that follow every step.

Decides when a row is printed (first and last step, every `log_interval` steps or about every 5 seconds, every validation). Must never
change: without a terminal the output is plain lines, no row is there twice, and no thread draws behind the training step's back.

      50  5.1023          11.2k  31.2 %   0.91  3.0e-3  1.21    0     0    2:05      rows, printed once
    step    loss     val  tok/s     MFU   grad      lr  load dead  drop    left      titles, where those above the rows have scrolled away
      57  5.0711          11.3k  31.4 %   0.88  3.0e-3  1.19    0     0    1:58      this step
    load by layer  0 ▂ 1.12  1 ▃ 1.31  2 ▂ 1.19  3 ▂ 1.10
    loss ▇▆▅▄▃▂▂▁ 9.02 to 5.07    checkpoint at step 50 (96.2 MiB, stood still 52 ms)
    ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━  57/300 steps   19 %   1:58 left

Colours mean: yellow, something was lost or needs a look; red, an error. All else has none.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.core.config import ObserveConfig
from phalanx.core.errors import printable
from phalanx.core.events import (
    CheckpointSaved,
    Event,
    ExpertsMoved,
    Note,
    RunEnded,
    RunStarted,
    StepEnded,
    Straggling,
    TeamFormed,
    TrainingResumed,
    Validated,
)
from phalanx.core.units import format_bytes, format_count, format_rate, format_seconds
from phalanx.observe import table
from phalanx.observe.metrics import exposed_of, hidden_of

ROW_SECONDS = 5.0
REFRESH_S = 0.1
PLAIN_WIDTH = 120
"""Lines of a log file are as wide as they need to be, whatever the terminal of the reader."""
HEADER_EVERY = 30
LIVE_LINES = 7
"""Lines of the part that moves, at most, and one more."""


def wants_live(config: ObserveConfig, console: Console) -> bool:
    """Live display, or plain lines?"""
    return config.console == "live" or (
        config.console == "auto" and console.is_terminal and not console.is_dumb_terminal
    )


class ConsoleSink:
    """Draws the run on `console`. `clock` gives seconds (a test passes its own)."""

    def __init__(
        self,
        console: Console,
        *,
        live: bool,
        log_interval: int | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "console"
        self._console = console
        self._log_interval = log_interval
        self._folder = folder
        self._clock = clock
        self._pace = _Pace(clock)
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._run: RunStarted | None = None
        self._step: StepEnded | None = None
        self._checkpoint = ""
        self._losses: deque[float] = deque(maxlen=2048)
        self._tokens = 0
        self._rows = 0
        self._printed = -1
        """Step of the last row."""
        self._lines_below_titles = 0
        """Lines printed since the titles of the columns were."""
        self._held: table.TableRow | None = None
        """The newest row, on a terminal not printed yet: a validation of its step may complete it."""
        self._row_at = 0.0
        self._drawn_at = 0.0

    def write(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case StepEnded():
                self._end_step(event)
            case Validated():
                self._validated(event)
            case CheckpointSaved():
                self._saved(event)
            case Note():
                self._say(event)
            case TeamFormed():
                self._formed(event)
            case Straggling():
                self._straggling(event)
            case ExpertsMoved():
                self._print(Text(f"{event.step:>6} {_moved_experts(event)}"))
            case TrainingResumed():
                self._resumed(event)
            case RunEnded():
                self.close()

    def close(self) -> None:
        self._print_held()
        if self._live is not None and self._live.is_started:
            self._live.stop()

    @property
    def _width(self) -> int:
        return self._console.width if self._live is not None else PLAIN_WIDTH

    def _print(self, line: Text) -> None:
        """A line that stays. Plain lines are never wrapped or cut."""
        self._print_held()
        self._put(line)

    def _put(self, line: Text) -> None:
        self._lines_below_titles += 1 + max(0, line.cell_len - 1) // self._width
        self._console.print(line, highlight=False, soft_wrap=self._live is None)

    def _print_held(self) -> None:
        row, self._held = self._held, None
        if row is not None:
            self._print_row(row)

    def _start(self, run: RunStarted) -> None:
        self._run = run
        self._print(Text(f"{run.run}: {format_count(run.num_params)} parameters, {format_count(run.active_params)} active for "
                         f"each token, on {run.world} rank{'s' if run.world != 1 else ''} ({run.folding})", style="bold"))  # fmt: skip
        if self._folder is not None:
            board = self._folder / "tensorboard"
            more = f", or tensorboard --logdir {shlex.quote(str(board))}" if board.is_dir() else ""
            self._print(Text(printable(f"charts: phalanx watch {shlex.quote(str(self._folder))}{more}")))
        known = [f"resumed after step {run.step}"] if run.step else []
        if run.peak_flops_per_s or run.rated_flops_per_s:
            known.append(f"matmul rate {_rate_words(run)}")
        if run.unigram_loss is not None:
            known.append(f"loss of guessing by token frequency {run.unigram_loss:.3f}")
        if known:
            self._print(Text(", ".join(known)))
        if self._live is not None and not self._live.is_started:
            for line in textwrap.wrap(table.legend(self._width), self._width):
                self._print(Text(line, style="dim"))
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not bring it back
            self._draw(force=True)

    def _end_step(self, event: StepEnded) -> None:
        self._pace.tick(event)
        self._step = event
        self._tokens = self._tokens + event.tokens if self._tokens else event.step * event.tokens
        self._losses.append(event.loss)
        self._print_held()
        if self._row_is_due(event.step):
            row = self._row(event)
            if self._live is None:
                self._print_row(row)
            else:
                self._held, self._row_at = row, self._clock()
        self._draw(force=self._run is not None and event.step == self._run.total_steps)

    def _row_is_due(self, step: int) -> bool:
        if self._rows == 0 or (self._run is not None and step == self._run.total_steps):
            return True
        if self._log_interval is not None:
            return step % self._log_interval == 0
        return self._clock() - self._row_at >= ROW_SECONDS

    def _row(self, event: StepEnded, *, validation: float | None = None) -> table.TableRow:
        exposed = exposed_of(event)
        return table.TableRow(
            step=event.step, loss=event.loss, validation=validation, tokens_per_s=event.tokens_per_s, mfu=event.mfu or None,
            grad_norm=event.grad_norm, lr=event.lr, load=max(event.load_max_over_mean, default=None),
            dead=event.dead_experts, dropped=event.dropped_tokens, left_s=self._left_s(event.step),
            tokens=self._tokens, memory_bytes=event.peak_memory_bytes, step_s=event.step_s, entropy=event.router_entropy,
            aux_loss=event.aux_loss, waits_s=sum(exposed) if exposed else None,
        )  # fmt: skip

    def _left_s(self, step: int) -> float | None:
        return None if self._run is None else self._pace.step_s * (self._run.total_steps - step)

    def _print_row(self, row: table.TableRow) -> None:
        if self._rows == 0 or (self._live is None and self._rows % HEADER_EVERY == 0):
            self._put(table.header(self._width))
            self._lines_below_titles = 0
        self._rows += 1
        self._printed = row.step
        self._row_at = self._clock()
        self._put(table.row_line(row, self._width))

    def _validated(self, event: Validated) -> None:
        step = self._step
        if self._live is not None and step is not None and step.step == event.step:
            self._held = self._row(step, validation=event.loss)
            self._print_held()
        else:
            line = table.row_line(table.TableRow(step=event.step, validation=event.loss), self._width)
            line.append(f"  validation in {format_seconds(event.seconds)}{self._gain(event.loss)}")
            self._print(line)
        self._draw(force=True)

    def _gain(self, loss: float) -> str:
        """What a validation loss is beside guessing."""
        if self._run is None or self._run.unigram_loss is None:
            return ""
        gain = self._run.unigram_loss - loss
        return f", {abs(gain):.3f} {'below' if gain > 0 else 'above'} guessing by frequency"

    def _saved(self, event: CheckpointSaved) -> None:
        what = f"{format_bytes(event.bytes)}, stood still {format_seconds(event.blocked_s)}"
        self._checkpoint = f"checkpoint at step {event.step} ({what})"
        self._draw(force=True)
        if self._live is None:
            self._print(Text(printable(f"{event.step:>6} checkpoint {event.path} ({what})")))

    def _say(self, note: Note) -> None:
        style = {"warning": "yellow", "error": "bold red"}.get(note.level, "")
        text = note.text if note.level == "info" else f"{note.level}: {note.text}"
        self._print(Text(printable(text), style=style))

    def _straggling(self, event: Straggling) -> None:
        done = "it hands over and leaves" if event.put_out else "training waits for it in every step"
        self._print(Text(printable(f"{event.step:>6} {event.host} is slow: {event.why}; {done}"), style="yellow"))

    def _formed(self, event: TeamFormed) -> None:
        """Who left or came, and with how many ranks it goes on. How a run begins is told by its first lines."""
        if event.generation == 1:
            return
        ranks = f"{event.members} rank{'s' if event.members != 1 else ''}"
        moved = f", {format_bytes(event.moved_bytes)} moved" if event.moved_bytes else ""
        text = f"{event.step:>6} {event.why}; going on with {ranks} ({event.folding}){moved}"
        self._print(Text(printable(text), style="yellow" if event.lost_s else ""))

    def _resumed(self, event: TrainingResumed) -> None:
        since = (
            f"{format_seconds(event.since_lost_s)} after the failure"
            if event.since_lost_s
            else f"after a pause of {format_seconds(event.seconds)}"
        )
        self._print(Text(f"{event.step:>6} the next step is done, {since}"))

    # --- the part that moves

    def _draw(self, *, force: bool) -> None:
        """Redraw the live lines, at most ten times a second unless `force`."""
        if self._live is None or not self._live.is_started or self._run is None:
            return
        now = self._clock()
        if force or now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            self._live.update(Group(*self._moving(self._run)), refresh=True)

    def _moving(self, run: RunStarted) -> Iterator[RenderableType]:
        event, width = self._step, self._width
        step = run.step
        if event is not None:
            step = event.step
            if self._rows == 0 or self._lines_below_titles > self._console.height - LIVE_LINES:
                yield table.header(width)
            if self._rows == 0 or self._held is not None or event.step != self._printed:
                yield table.row_line(self._row(event), width, style="bold")
            if event.load_max_over_mean:
                yield _loads(event.load_max_over_mean, width)
            if any((*exposed_of(event), *hidden_of(event))):
                yield _exchange(event, width)
            yield self._course(width)
        yield _progress(step, run.total_steps, left_s=self._left_s(step) if event is not None else None, width=width)

    def _course(self, width: int) -> Text:
        ends = f"{table.loss_text(self._losses[0])} to {table.loss_text(self._losses[-1])}"
        room = width - len(f"loss  {ends}")
        tail = f"    {self._checkpoint}" if self._checkpoint and room - len(self._checkpoint) >= 14 else ""
        line = Text("loss ", no_wrap=True, overflow="crop")
        line.append(table.sparkline(list(self._losses), room - len(tail)))
        line.append(f" {ends}")
        line.append(tail, style="dim")
        return line


def _rate_words(run: RunStarted) -> str:
    """What MFU is measured against."""
    measured = format_rate(run.peak_flops_per_s, "FLOP")
    if not run.rated_flops_per_s:
        return f"{measured} (measured)"
    return f"{format_rate(run.rated_flops_per_s, 'FLOP')} (data sheet; {measured} measured)"


class _Pace:
    """Seconds per step including what happens between steps (validation, checkpoints), as time left needs it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=200)
        self.step_s = 0.0

    def tick(self, event: StepEnded) -> None:
        self._ends.append(self._clock())
        # the first step warms caches up; two ends and more give an average that includes what lies between
        steps = len(self._ends) - 1
        self.step_s = (self._ends[-1] - self._ends[0]) / steps if steps else event.step_s


def _loads(loads: tuple[float, ...], width: int) -> Text:
    """Max/mean load of each MoE layer; of too many, the worst."""
    line = Text("load by layer ", no_wrap=True, overflow="crop")
    shown = [(layer, f" {layer} {table.load_bar(load)} {load:.2f}", load) for layer, load in enumerate(loads)]
    if sum(len(text) + 1 for _, text, _ in shown) + len(line) > width:
        line.append(f"(worst of {len(loads)}) ", style="dim")
        shown.sort(key=lambda item: (-item[2], item[0]))
    for _, text, _ in shown:
        if len(line) + len(text) + 1 > width:
            break
        line.append(text + " ")
    return line


def _exchange(event: StepEnded, width: int) -> Text:
    """What dispatch and combine cost the step, and what of them it did not feel; of too many layers, those that cost most."""
    exposed, hidden = exposed_of(event), hidden_of(event)
    line = Text("exchange: ranks waited ", no_wrap=True, overflow="crop")
    line.append(table.exchange_words(sum(exposed), sum(hidden)) + "; by layer")
    layers = sorted(range(len(exposed)), key=lambda i: -exposed[i]) if len(exposed) > 8 else range(len(exposed))
    for layer in layers:
        text = f" {layer} {format_seconds(exposed[layer])} "
        if len(line) + len(text) > width:
            break
        line.append(text)
    line.truncate(width)
    return line


def _progress(step: int, total: int, *, left_s: float | None, width: int) -> RenderableType:
    words = f" {step}/{total} steps {100 * step // max(total, 1):>3} %"
    if left_s is not None:
        words += f"  {table.clock(left_s)} left"
    room = width - len(words) - 2
    if room < 10:
        return Text(words.strip()[:width], no_wrap=True)
    grid: Any = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=total, completed=step, width=room, style="dim", complete_style="bold", finished_style="bold"),
        Text(words),
    )
    return grid


def _moved_experts(event: ExpertsMoved) -> str:
    why = "for even loads" if event.why == "balance" else "some were on too few hosts"
    took = f"built in {format_seconds(event.built_s)}, {format_bytes(event.moved_bytes - event.beside_bytes)} moved here in {format_seconds(event.moved_s)}"
    if event.beside_bytes:
        took += f" and {format_bytes(event.beside_bytes)} in {format_seconds(event.beside_s)} during the step"
    return f"{event.experts} experts move, {why}: {took}; busiest rank / mean {event.before:.2f} -> {event.after:.2f} predicted"

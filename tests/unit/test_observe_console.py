"""What is drawn: rows that align, a live part that fits any width, plain lines where there is no terminal."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_events import a_run, ended, started
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len
from rich.console import Console

from phalanx.core.config import ObserveConfig
from phalanx.core.events import CheckpointSaved, Note, TeamFormed, TrainingResumed, Validated
from phalanx.observe import table
from phalanx.observe.charts import chart
from phalanx.observe.console import HEADER_EVERY, ROW_SECONDS, ConsoleSink, wants_live
from phalanx.observe.preparation import PreparationProgress
from phalanx.observe.summary import RunSummary, next_commands, print_summary, program_name

pytestmark = pytest.mark.unit
WIDTHS = (40, 80, 100, 160)


def terminal(width: int = 80) -> Console:
    """A console that believes it draws on a terminal; what it drew is `console.file.getvalue()`."""
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None, legacy_windows=False
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def drawn(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, step_s: float) -> None:
        self.now = 1000.0
        self.step_s = step_s

    def __call__(self) -> float:
        return self.now


def play(sink: ConsoleSink, events: Iterator[object], clock: Clock) -> None:
    for event in events:
        if type(event).__name__ == "StepEnded":
            clock.now += clock.step_s
        sink.write(event)  # type: ignore[arg-type]


def plain_run(*, steps: int = 30, step_s: float = 1.0, log_interval: int | None = None, **more: object) -> list[str]:
    console, clock = pipe(), Clock(step_s)
    sink = ConsoleSink(console, live=False, log_interval=log_interval, clock=clock)
    play(sink, a_run(steps, **more), clock)  # type: ignore[arg-type]
    sink.close()
    return drawn(console)


def test_the_command_for_charts_can_be_pasted(tmp_path: Path) -> None:
    console, folder = pipe(), tmp_path / "my run"
    (folder / "tensorboard").mkdir(parents=True)
    ConsoleSink(console, live=False, folder=folder).write(started())
    told = "\n".join(drawn(console))
    assert f"watch '{folder}'" in told and f"--logdir '{folder / 'tensorboard'}'" in told


def steps_of(lines: list[str]) -> list[int]:
    """Steps of the rows (lines that start with a number and have a loss)."""
    return [
        int(line.split()[0])
        for line in lines
        if line[:6].strip().isdigit() and "validation" not in line and "checkpoint" not in line
    ]


def test_plain_rows_by_interval() -> None:
    assert steps_of(plain_run(log_interval=10)) == [1, 10, 20, 30]
    assert steps_of(plain_run(steps=7, log_interval=3)) == [1, 3, 6, 7]


def test_plain_rows_by_time_first_and_last() -> None:
    assert steps_of(plain_run(steps=13, step_s=ROW_SECONDS / 4)) == [1, 5, 9, 13]
    assert steps_of(plain_run(steps=4, step_s=60.0)) == [1, 2, 3, 4]
    assert steps_of(plain_run(steps=100, step_s=1e-4)) == [1, 100]


def test_plain_lines_are_what_a_log_should_hold() -> None:
    lines = plain_run(steps=100, log_interval=50)
    assert lines[0] == "laptop: 9.20M parameters, 4.70M active for each token, on 4 ranks (dp4|ep4)"
    assert lines[1] == "matmul rate 1.10 TFLOP/s (measured), loss of guessing by token frequency 6.214"
    assert lines[2].split() == [c.title for c in table.columns(120)]
    first = [
        "1",
        "8.9760",
        "8.19k",
        "11.2k",
        "0.73",
        "31.2",
        "%",
        "0.854",
        "1.5e-4",
        "1.44",
        "0",
        "0",
        "812MiB",
        "1:12",
    ]
    assert lines[3].split() == first
    assert any(re.fullmatch(r" +50 +6.8384  validation in 1.90 s, 0.624 above guessing by frequency", x) for x in lines)
    assert any(
        re.fullmatch(r" +100 +5.8555  validation in 1.90 s, 0.358 below guessing by frequency", x) for x in lines
    )
    assert "    50 checkpoint runs/laptop/checkpoints/50 (105 MiB, stood still 52.0 ms)" in lines
    assert not any("\x1b" in line or "━" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_the_header_comes_back() -> None:
    lines = plain_run(steps=2 * HEADER_EVERY + 1, log_interval=1)
    assert sum(line.split()[:1] == ["step"] for line in lines) == 3


def test_a_resumed_run_says_so_and_unknown_figures_stay_empty() -> None:
    console = pipe()
    sink = ConsoleSink(console, live=False)
    sink.write(started(step=40, world=1, peak_flops_per_s=0.0, unigram_loss=None))
    sink.write(ended(41, mfu=0.0, load_max_over_mean=()))
    sink.write(Validated(step=41, loss=3.0, tokens=1, seconds=0.5))
    lines = drawn(console)
    assert lines[0].endswith("on 1 rank (dp4|ep4)") and lines[1] == "resumed after step 40"
    assert "%" not in lines[3] and lines[4].endswith("validation in 500 ms")


def test_notes_keep_their_level_and_are_never_markup() -> None:
    console = pipe()
    sink = ConsoleSink(console, live=False)
    for level in ("info", "warning", "error"):
        sink.write(Note(level=level, text="a [bold]b[/] " + "long " * 30))
    lines = drawn(console)
    assert [line[:16] for line in lines] == ["a [bold]b[/] lon", "warning: a [bold", "error: a [bold]b"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layers", [0, 1, 4, 94])
def test_the_live_part_fits_every_width(width: int, layers: int) -> None:
    console, clock = terminal(width), Clock(0.5)
    sink = ConsoleSink(console, live=True, clock=clock)
    sink.write(started())
    sink.write(CheckpointSaved(step=1, path="p", bytes=1 << 30, blocked_s=0.01, total_s=1.0))
    for step in range(1, 120):
        clock.now += 0.5
        sink.write(ended(step, layers=layers, dead_experts=3, dropped_tokens=123456789))
    paper = terminal(width)
    for part in sink._moving(started()):
        paper.print(part)
    sink.close()
    lines = drawn(paper)
    assert len(lines) == (4 if layers else 3), lines
    assert all(cell_len(line) <= width for line in lines), lines
    assert "119/300 steps  39 %" in lines[-1] and lines[-1].rstrip().endswith("1:30 left")
    if layers == 94 and width >= 80:
        assert "(worst of 94)" in lines[1]


def test_live_rows_stay_and_the_live_part_is_gone_at_the_end() -> None:
    console, clock = terminal(), Clock(6.0)
    sink = ConsoleSink(console, live=True, clock=clock)
    play(sink, a_run(5), clock)
    sink.close()
    text = "\n".join(drawn(console))
    assert "load by layer" in text and "5/5 steps 100 %" in text
    assert text.rindex("\x1b[?25l") < text.index("\x1b[?25h"), (
        "the cursor is not hidden while it draws: a kill would lose it"
    )
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[1A" in text.rsplit("5/5", 1)[1], "the live lines are erased"


def seen(console: Console) -> list[str]:
    """Lines that a terminal would have at the end: the live part is drawn over."""
    assert isinstance(console.file, io.StringIO)
    screen, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", console.file.getvalue()):
        if part == "\n":
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            screen[row] = ""
        elif part and not part.startswith("\x1b") and part != "\r":
            screen[row] += part
    return [line.rstrip() for line in screen if line.strip()]


@pytest.mark.parametrize("step_s", [0.5, 6.0])
def test_on_a_terminal_no_step_has_two_rows(step_s: float) -> None:
    console, clock = terminal(), Clock(step_s)
    sink = ConsoleSink(console, live=True, clock=clock)
    for event in a_run(60, every=20):
        play(sink, iter([event]), clock)
        on_screen = steps_of([line for line in seen(console) if "steps" not in line])
        assert len(set(on_screen)) == len(on_screen), (event, seen(console))
    sink.close()
    rows = {int(line.split()[0]): line.split() for line in seen(console) if line[:6].strip().isdigit()}
    assert {1, 20, 40, 60} <= set(rows) and rows[20][2] == "7.9661", "a validated step has both losses in its row"


def test_titles_stay_in_sight_where_rows_have_scrolled_away() -> None:
    console, clock = terminal(), Clock(6.0)
    sink = ConsoleSink(console, live=True, clock=clock)
    sink.write(started())
    for step in range(1, 60):
        clock.now += 6.0
        sink.write(ended(step))
        titles = [line for line in seen(console)[-console.height :] if line.split()[:2] == ["step", "loss"]]
        assert len(titles) == 1, (step, seen(console)[-console.height :])
    sink.close()


WIDE = {"tokens", "memory", "s/step"}


@pytest.mark.parametrize(("width", "more"), [(80, set()), (120, WIDE), (180, {*WIDE, "waits", "aux", "entropy"})])
def test_a_wide_terminal_shows_more(width: int, more: set[str]) -> None:
    always = {c.title for c in table.COLUMNS if c.rank == 0}
    assert {c.title for c in table.columns(width)} == always | more
    assert 0 <= width - len(table.header(width).plain) < len(always | more), "and is used"


def test_what_mfu_is_measured_against_is_told() -> None:
    console = pipe()
    ConsoleSink(console, live=False).write(started(peak_flops_per_s=7.1e14, rated_flops_per_s=9.894e14))
    assert drawn(console)[1].startswith("matmul rate 989 TFLOP/s (data sheet; 710 TFLOP/s measured)")


def test_how_members_come_and_go() -> None:
    def told(generation: int, why: str, members: int, lost_s: float) -> TeamFormed:
        return TeamFormed(
            generation=generation, members=members, step=29, folding="dp3|edp3", why=why, noticed_s=0.0, formed_s=0.0,
            built_s=0.0, moved_s=0.1, moved_bytes=358_656, checked=1, lost_s=lost_s,
        )  # fmt: skip

    console = pipe()
    sink = ConsoleSink(console, live=False)
    sink.write(told(1, "the run begins", 4, 0.0))
    sink.write(told(2, "local.3.64d160: killed by SIGKILL", 3, 1.0))
    sink.write(TrainingResumed(generation=2, step=30, seconds=0.3, since_lost_s=0.268))
    sink.write(told(3, "local.3.6b3edb: ready to join", 4, 0.0))
    sink.write(TrainingResumed(generation=3, step=39, seconds=0.194, since_lost_s=0.0))
    assert drawn(console) == [
        "    29 local.3.64d160: killed by SIGKILL; going on with 3 ranks (dp3|edp3), 350 KiB moved",
        "    30 the next step is done, 268 ms after the failure",
        "    29 local.3.6b3edb: ready to join; going on with 4 ranks (dp3|edp3), 350 KiB moved",
        "    39 the next step is done, after a pause of 194 ms",
    ]


def test_the_live_part_is_drawn_ten_times_a_second_at_most() -> None:
    console, clock = terminal(), Clock(0.001)
    sink = ConsoleSink(console, live=True, clock=clock)
    play(sink, a_run(1000, every=10**9), clock)
    assert 10 <= "\n".join(drawn(console)).count("/1000 steps") <= 16


def test_who_gets_the_live_display() -> None:
    for console, live in ((terminal(), True), (pipe(), False)):
        assert wants_live(ObserveConfig(), console) is live
        assert wants_live(ObserveConfig(console="live"), console)
        assert not wants_live(ObserveConfig(console="plain"), console)


def test_time_left_counts_what_happens_between_steps() -> None:
    clock = Clock(1.0)
    console = pipe()
    sink = ConsoleSink(console, live=False, log_interval=10, clock=clock)
    sink.write(started(total_steps=30))
    for step in range(1, 11):
        clock.now += 1.0
        sink.write(ended(step, step_s=0.1))
        clock.now += 1.0  # a validation after every step
    assert drawn(console)[-1].split()[-1] == "0:40"


@settings(deadline=None)
@given(
    loss=st.none() | st.floats(),
    rate=st.none() | st.floats(0, 1e15),
    norm=st.none() | st.floats(0, 1e9),
    left=st.none() | st.floats(0, 1e8),
    step=st.integers(0, 999_999),
    counts=st.integers(0, 10**12),
)
def test_columns_stay_aligned(
    loss: float | None, rate: float | None, norm: float | None, left: float | None, step: int, counts: int
) -> None:
    row = table.TableRow(
        step=step,
        loss=loss,
        tokens_per_s=rate,
        grad_norm=norm,
        left_s=left,
        dropped=counts,
        mfu=0.5,
        lr=1e-3,
        load=1.5,
        dead=0,
    )
    line = table.row_line(row, 80).plain
    titles = table.header(80).plain
    # "lr" ends in the same column as its title, whatever stands before it
    assert line[: titles.index("lr") + 2].endswith("1.0e-3"), (titles, line)


def test_numbers_as_people_read_them() -> None:
    assert [table.short(v) for v in (0, 7, 999, 1000, 11234, 999_600, 1.5e6, 2e12)] == [
        "0", "7", "999", "1k", "11.2k", "1M", "1.5M", "2T",
    ]  # fmt: skip
    assert [table.clock(s) for s in (0, 59.6, 125, 3725, 200_000, float("inf"))] == [
        "0:00", "1:00", "2:05", "1:02:05", "2d 07h", "?",
    ]  # fmt: skip
    assert table.sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert table.sparkline([5.0, float("nan"), 5.0], 8) == "▁▁" and table.sparkline([], 8) == ""
    assert len(table.sparkline(list(range(1000)), 30)) == 30


def test_chart() -> None:
    lines = chart([(1, 8.0), (2, 4.0), (3, 2.0), (4, 1.0)], width=20, height=4)
    assert lines == ["8.0000 ┤█", "       ┤█", "       ┤█▆", "1.0000 ┤██▅▁", "        1  4"]
    assert chart([], width=20) == [] and chart([(1, float("nan"))], width=20) == []
    flat = chart([(1, 2.0), (100, 2.0)], width=40, height=2)
    assert [cell_len(line) <= 40 for line in flat] == [True] * 3


# --- preparation and summary


def test_preparation_on_a_terminal_draws_a_bar_and_leaves_lines() -> None:
    console, clock = terminal(), Clock(0)
    with PreparationProgress(console, live=True, clock=clock) as progress:
        for done in range(0, 40_000_001, 4_000_000):
            clock.now += 0.2
            progress("tokenise", done, 40_000_000)
        progress("index", 0, 0)
        progress("something new", 3, 5)
    text = "\n".join(drawn(console))
    assert "38.1/38.1 MiB" in text and "data: tokenising, 38.1 MiB in 2.00 s" in text
    assert "reading the token files" in text and "data: reading the token files" not in text
    assert "something new" in text


def test_preparation_without_a_terminal_prints_what_took_time() -> None:
    console, clock = pipe(), Clock(0)
    progress = PreparationProgress(console, live=False, clock=clock)
    progress("scan", 0, 10)
    progress("tokenizer", 0, 10)
    clock.now += 2.0
    progress("tokenizer", 1024, 2048)
    progress("wait", 0, 0)
    clock.now += 5.0
    progress("tokenise", 0, 40 << 20)
    for _ in range(70):
        clock.now += 1.0
        progress("tokenise", 13 << 20, 40 << 20)
    progress.close(finished=False)
    assert drawn(console) == [
        "data: training the tokenizer, 1.00 KiB in 2.00 s",
        "data: waiting for another process that prepares the same data",
        "data: tokenising, 13.0 MiB of 40.0 MiB",
        "data: tokenising, 13.0 MiB of 40.0 MiB",
    ]


def test_preparation_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(0)
    with PreparationProgress(None, live=True, clock=clock) as progress:
        progress("tokenise", 0, 10)
        clock.now += 100.0
        progress("tokenise", 10, 10)
    assert capsys.readouterr() == ("", "")


def summary(**more: object) -> RunSummary:
    fields = {"folder": Path("runs/laptop"), "step": 300, "total_steps": 300, "seconds": 211.0, "tokens": 2_457_600}
    return RunSummary(**{**fields, **more})  # type: ignore[arg-type]


def test_summary_without_a_terminal() -> None:
    console = pipe()
    known = {
        "loss": 3.9912,
        "validation_loss": 4.1,
        "unigram_loss": 6.214,
        "prompt": "def ",
        "text": "a\x1b[31m():\n\tpass\n\n",
    }
    print_summary(summary(**known), console=console)
    assert drawn(console) == [
        "laptop: finished",
        "300 steps done; this time 2.46M tokens in 3 min 31 s",
        "train loss       3.9912",
        "validation loss  4.1000  2.114 below guessing (6.2140)",
        "run folder       runs/laptop",
        "",
        "It writes:",
        "  def a\N{REPLACEMENT CHARACTER}[31m():",
        "      pass",
        "Next:",
        "  phalanx train runs/laptop/recipe.toml --train.steps 600  train twice as long",
        "  phalanx watch runs/laptop                                its charts",
        "  phalanx generate runs/laptop def                         let it write",
        "  phalanx metrics runs/laptop                              its numbers",
        "  phalanx verify runs/laptop/recipe.toml                   prove its mapping",
    ]


def test_summary_of_a_run_that_talks() -> None:
    assert ("phalanx generate runs/laptop Hello --chat", "let it answer") in next_commands(summary(talks=True))


def test_a_run_whose_recipe_needs_trust_is_gone_on_with_by_what_is_shown() -> None:
    for done, word in ((300, " --train.steps 600"), (8, "")):
        assert (
            next_commands(summary(needs_trust=True, step=done))[0][0]
            == f"phalanx train runs/laptop/recipe.toml --trust{word}"
        )


def test_summary_of_a_validation_that_is_older() -> None:
    console = pipe()
    print_summary(summary(step=92, validation_loss=4.1, validation_step=50, unigram_loss=6.0), console=console)
    assert "validation loss  4.1000  1.900 below guessing (6.0000) (step 50)" in drawn(console)


def test_next_commands_can_be_called_where_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "a b" / "phalanx", tmp_path / "bin" / "phalanx"
    for path in (here, elsewhere):
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    assert program_name(str(elsewhere)) == program_name("/x/phalanx/__main__.py") == "phalanx"
    assert program_name(str(here)) == f"'{here}'"
    monkeypatch.setenv("PATH", "")
    assert program_name(".venv/bin/phalanx") == ".venv/bin/phalanx"
    assert program_name("/x/phalanx/__main__.py") == "python -m phalanx"
    console = pipe()
    print_summary(summary(program=".venv/bin/phalanx"), console=console)
    assert any(line.startswith("  .venv/bin/phalanx metrics runs/laptop ") for line in drawn(console))


def test_summary_on_a_terminal_keeps_commands_whole() -> None:
    for width in WIDTHS:
        console = terminal(width)
        print_summary(summary(validation_loss=7.0, unigram_loss=6.0, text="x"), console=console)
        text = "\n".join(drawn(console))
        assert "1.000 ABOVE guessing (6.0000)" in " ".join(text.replace("│", " ").split())
        assert "\n  phalanx train runs/laptop/recipe.toml --train.steps 600" in text
        assert all(cell_len(line) <= width for line in drawn(console) if not line.startswith("  "))


def test_summary_of_a_stopped_run_goes_on() -> None:
    console = pipe()
    print_summary(summary(step=120), console=console)
    lines = drawn(console)
    assert lines[0] == "laptop: stopped after step 120 of 300"
    assert any(
        line.split()
        == [
            "phalanx",
            "train",
            "runs/laptop/recipe.toml",
            "go",
            "on",
            "from",
            "step",
            "120",
        ]
        for line in lines
    )
    assert not any("validation" in line for line in lines)

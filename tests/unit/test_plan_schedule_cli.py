"""`phalanx plan schedule`: text, SVG, JSON, errors; and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cli.main import main
from phalanx.cli.planning.schedule import show_timeline
from phalanx.core.errors import PlanError
from phalanx.observe.pictures.schedule import chunk_colour, text_rows, timeline_svg
from phalanx.plan.pipeline.schedule.clock import Timeline, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.make import SCHEDULES, make_schedule

pytestmark = pytest.mark.unit
KEYS = {"legal", "problems", "nearest", "bubble", "makespan", "idle", "peak_live", "schedule", "timeline", "hash"}


def timeline(name: str, pp: int, m: int, virtual: int = 1) -> Timeline:
    return simulate(make_schedule(name, pp=pp, virtual=SCHEDULES[name].virtual or virtual, num_microbatches=m))


def test_a_timeline_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file, svg = tmp_path / "new" / "s.json", tmp_path / "s.svg"
    args = f"plan schedule --name 1f1b --pp 2 --microbatches 3 --json {file} --svg {svg}"
    assert main(args.split()) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "rank 0  F0  F1  ........B0      F2  B1      ....B2      "
    assert shown[1] == "rank 1  ....F0  B0      F1  B1      F2  B2      ........"
    assert any("bubble 25.00%" in line for line in shown) and any("by rank: 2 1" in line for line in shown)
    result = json.loads(file.read_text())
    assert result.keys() >= KEYS and result["legal"] is True and result["peak_live"] == [2, 1]
    assert result["bubble"] == pytest.approx(0.25) and result["timeline"][1][0] == ["F1.0", 1.0, 2.0]
    assert "bubble 25.0%" in svg.read_text()


def test_v_shapes_know_their_stages_and_costs_are_used(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    args = f"plan schedule --name zbv --pp 2 --microbatches 4 --costs 2 9 2 2 --p2p 0.5 --json {file}"
    assert main(args.split()) == 0
    result = json.loads(file.read_text())
    assert result["schedule"]["virtual"] == 2 and result["hand_overs"] == 8 and result["p2p"] == 0.5
    assert result["timeline"][1][0] == ["F1.0", 2.5, 4.5]


def test_illegal_input_exits_2_with_all_problems_and_still_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, svg = tmp_path / "s.json", tmp_path / "s.svg"
    args = f"plan schedule --name dualpipe --pp 0 --virtual 3 --microbatches -2 --costs 1 2 0 1 --p2p -1 --json {file} --svg {svg}"
    assert main(args.split()) == 2
    result = json.loads(file.read_text())
    assert result["legal"] is False and len(result["problems"]) == 5 and not svg.exists()
    shown = capsys.readouterr().err
    assert all(problem in shown for problem in result["problems"]) and "did you mean 'dualpipev'" in shown
    assert "nearest legal schedule: --name interleaved_1f1b --pp 1 --virtual 3 --microbatches 1" in shown


def test_too_large_to_draw(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    assert main(f"plan schedule --name gpipe --pp 512 --microbatches 4096 --json {file}".split()) == 2
    assert "draws at most" in json.loads(file.read_text())["problems"][0]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [40, 79, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_fit_and_agree_in_width(name: str, width: int, colour: bool) -> None:
    for m in (1, 4, 30):
        rows = text_rows(timeline(name, 4, m, virtual=2), width=width, colour=colour)
        widths = {sum(len(cell.text) for cell in row) for row in rows}
        assert len(rows) == 4 and len(widths) == 1 and widths.pop() <= width


def test_what_does_not_fit_shows_both_ends() -> None:
    rows = ["".join(cell.text for cell in row) for row in text_rows(timeline("1f1b", 3, 50), width=60, colour=False)]
    assert rows[0].startswith("F0 F1 F2 ") and " // " in rows[0] and rows[0].endswith("B49   ")


def test_times_of_any_size_are_drawn_alike() -> None:
    made = make_schedule("1f1b", pp=2, virtual=1, num_microbatches=3)
    one, tiny = (simulate(made, uniform_costs(2, forward=f, backward=2 * f)) for f in (1, 0.25))
    assert text_rows(one, width=80, colour=False) == text_rows(tiny, width=80, colour=False)


def test_colours_where_there_are_some() -> None:
    console = Console(width=70, force_terminal=True, color_system="truecolor", record=True)
    with console.capture() as capture:
        show_timeline(timeline("zbv", 2, 3), console)
    text = capture.get()
    assert "\x1b[" in text and "light to dark" in text
    assert chunk_colour("F", 0, virtual=2) != chunk_colour("F", 1, virtual=2)
    plain = Console(width=70, color_system=None)
    with plain.capture() as capture:
        show_timeline(timeline("interleaved_1f1b", 40, 2, virtual=3), plain)
    assert "and 8 more ranks" in capture.get() and "a to c" in capture.get()


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_well_formed_and_shows_every_pass(name: str) -> None:
    line = timeline(name, 3, 5, virtual=2)
    root = ET.fromstring(timeline_svg(line))
    tips = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == sum(map(len, line.spans)) and "forward, stage 1, microbatch 0, 1 to 2" in tips
    width = float(root.attrib["width"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width + 0.01


def test_svg_of_fractions_and_of_too_much() -> None:
    made = make_schedule("1f1b", pp=2, virtual=1, num_microbatches=2)
    ET.fromstring(timeline_svg(simulate(made, uniform_costs(2, forward=1e-4, backward=3e-4, p2p=1e-5))))
    with pytest.raises(PlanError, match="at most 40000 passes"):
        timeline_svg(timeline("gpipe", 2, 10_001))


def test_no_torch() -> None:
    code = (
        "import sys; from phalanx.cli.main import main;"
        "assert main('plan schedule --name zbv --pp 2 --microbatches 2'.split()) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_forwards_ahead_are_asked_for_and_refused_with_the_nearest(tmp_path: Path, capfd) -> None:
    target = tmp_path / "s.json"
    args = ["--name", "eager_1f1b", "--pp", "4", "--microbatches", "9", "--json", str(target)]
    assert main(["plan", "schedule", *args, "--extra-warmup", "2", "1", "1", "0"]) == 0
    assert json.loads(target.read_text())["peak_live"] == [6, 4, 3, 1]
    assert "forwards ahead of 1F1B, by rank: 2 1 1 0" in capfd.readouterr().out
    assert main(["plan", "schedule", *args, "--extra-warmup", "0", "2", "1", "0"]) == 2
    assert json.loads(target.read_text())["nearest"]["extra_warmup"] == [0, 1, 1, 0]
    assert "--extra-warmup 0 1 1 0" in capfd.readouterr().err

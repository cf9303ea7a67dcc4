"""The page before a real browser: it draws, follows a log, answers to the keyboard, fits a telephone, and nothing that a log says is executed."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from long_run import BEGIN_S, STEP_S, line, step_line, team, write_run
from page_help import CHROMIUM, browser, seconds_until_shown, serving, visit
from tiers import times

from phalanx.observe.index import RunIndex
from phalanx.observe.page import PageServer, view as views

pytest.importorskip("playwright", reason="needs the package playwright (make env)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@contextlib.contextmanager
def opened(chromium: Any, server: PageServer, *, width: int = 1200, scheme: str = "light") -> Iterator[Any]:
    """A page of the server, and that it ended without an error, a dialog, or a request to anybody else."""
    wrong: list[str] = []
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    origin = f"http://127.0.0.1:{server.server_address[1]}/"
    page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda r: None if r.url.startswith(origin) else wrong.append(f"request: {r.url}"))
    page.on("websocket", lambda w: wrong.append(f"websocket: {w.url}"))
    try:
        page.measured = visit(page, server)
        yield page
        assert not wrong, wrong
    finally:
        context.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its index, so that a page has all of it at once, however slow the machine is."""
    return indexed(write_run(tmp_path_factory.mktemp("runs") / "long", steps=1200, ranks=4, elastic=True))


def indexed(folder: Path) -> Path:
    index = RunIndex(folder)
    index.update()
    index.save()
    return folder


def next_step(folder: Path, step: int) -> bytes:
    return step_line(step, BEGIN_S + 3 + step * STEP_S, random.Random(step))


@pytest.mark.core
def test_it_tells_where_a_run_is_and_follows_it(chromium: Any, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(run, folder)
    with serving(folder) as server, opened(chromium, server) as page:
        assert "token" not in page.url
        assert page.locator("#charts svg path.curve").count() >= 8
        assert "1,200 of 1,200" in page.locator("#story").inner_text()
        page.wait_for_selector(".holders .card")
        assert page.locator(".holders .card").count() == 4
        assert "h3.1.ab is lost" in page.locator("#happened").inner_text()
        page.locator("#happened [tabindex]").first.focus()
        delay_s = seconds_until_shown(
            page, folder / "events" / "rank-0.jsonl", next_step(folder, 1201), "step 1,201 of"
        )
        assert delay_s < 20  # 0.3 s on a quiet machine; 20 s would be the next full question
        assert page.evaluate("() => document.getElementById('happened').contains(document.activeElement)"), (
            "the focus stays"
        )
        chart = page.locator(".chart", has_text="Loss, nats")
        chart.locator("summary").click()
        page.wait_for_function("() => document.querySelector('.chart table')")
        assert "1,201" in chart.locator("table").inner_text()  # what came is in the curve, not in the head alone


@pytest.mark.core
def test_it_is_used_from_the_keyboard(chromium: Any, run: Path) -> None:
    with serving(run) as server, opened(chromium, server) as page:
        reached = []
        for _ in range(8):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("() => document.activeElement.tagName.toLowerCase()"))
        assert reached[:2] == ["a", "summary"] and "svg" in reached
        page.locator("#charts svg").first.focus()
        value = page.locator(".chart output").first
        page.keyboard.press("Home")
        first = value.inner_text()
        page.keyboard.press("ArrowRight")
        assert first.startswith("steps 1 to 4:") and value.inner_text() not in ("", first)
        page.keyboard.press("+")
        assert page.locator("#whole").is_visible() and page.locator("#range").inner_text().startswith("steps 1 to ")
        page.keyboard.press("Escape")
        assert not page.locator("#whole").is_visible()
        heat = page.locator("#heat canvas[tabindex]").last
        heat.focus()
        page.keyboard.press("ArrowDown")
        assert "expert 1" in page.locator("#heat output").last.inner_text()
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "focus must be seen"


def placed_run(folder: Path, *events: bytes, world: int, folding: str) -> Path:
    """A run of which nothing but who holds what matters."""
    (folder / "events").mkdir(parents=True)
    first = line("RunStarted", BEGIN_S, run="held", rank=0, world=world, step=0, total_steps=9, num_params=10**6, active_params=10**6,
                 folding=folding, flops_per_token=6e9, peak_flops_per_s=0.0)  # fmt: skip
    (folder / "events" / "rank-0.jsonl").write_bytes(b"".join((first, *events)))
    return folder


SLOTS = [[[2], [[0, 1], [2, 3], [0, 1], [2, 2]]], [[3], [[0, 1], [0, 2], [2, 3], [3, 1]]]]
"""Of layers 2 and 3. Expert 3 of layer 2 is on rank 1 alone."""


def replicas(at: float, *, step: int, why: str, slots: list[Any]) -> bytes:
    return line(
        "StatePlaced", at, step=step, why=why, folding="dp4|ep4", layers=[[0, 1, 2, 3]], experts=4, expert_layers=[2, 3], slots_per_rank=2, slots=slots,
        members=["h0.0.a", "h0.1.a", "h1.0.a", "h1.1.a"], hosts=[0, 0, 1, 1], minimum=3, holders=2,
    )  # fmt: skip


@pytest.mark.core
def test_it_says_who_holds_an_expert_and_what_is_lost_with_a_rank(chromium: Any, tmp_path: Path) -> None:
    """By the keyboard alone, and again after experts have moved while the page is open."""
    formed = team(BEGIN_S + 1, generation=1, members=4, step=0, folding="dp4|ep4", why="the run begins")
    told = replicas(BEGIN_S + 2, step=0, why="members", slots=SLOTS)
    saved = line("CheckpointSaved", BEGIN_S + 3, step=5, path="x", bytes=1, blocked_s=0.1, total_s=1.0)
    folder = placed_run(tmp_path / "run", formed, told, saved, world=4, folding="dp4|ep4")
    with serving(folder) as server, opened(chromium, server) as page:
        answer, cards = page.locator(".answer"), page.locator(".holders .card")
        page.wait_for_selector(".holders .card")
        page.locator(".holders input").focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("3")
        assert "Expert 3 of layer 2: 1 copy, on rank 1 (h0.1.a)." in answer.inner_text()
        assert "3 of the 8 experts of all layers are on one host only." in answer.inner_text()
        for _ in range(2):
            page.keyboard.press("Tab")  # past the choice of what is lost, to the ranks: there is one time only
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        assert "If rank 1 (h0.1.a) dies: 1 expert has no other copy (3 of layer 2)." in answer.inner_text()
        assert "The run goes back to the checkpoint of step 5." in answer.inner_text()
        assert page.evaluate("() => document.activeElement.dataset.rank") == "1", "the focus stays"
        assert "✕ lost" in cards.nth(1).inner_text() and "3!" in cards.nth(1).inner_text()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        assert "If rank 3 (h1.1.a) dies: no expert loses its last copy; 3 experts in all layers have a copy fewer." in answer.inner_text()  # fmt: skip
        assert "The 3 others go on from the last step." in answer.inner_text()
        page.locator(".holders select").nth(1).select_option("h1")
        assert "If the host of ranks 2–3 is lost:" in answer.inner_text()
        assert "The run waits until it has 3 members again." in answer.inner_text()
        moved = [[[2], [[0, 1], [2, 3], [0, 3], [2, 2]]], SLOTS[1]]
        with (folder / "events" / "rank-0.jsonl").open("ab") as file:
            file.write(replicas(BEGIN_S + 9, step=7, why="balance", slots=moved))
        page.wait_for_function("() => document.querySelector('.answer').textContent.includes('Expert 3 of layer 2: 2 copies')")  # fmt: skip
        times = page.locator(".holders select").nth(2)
        assert times.locator("option").all_inner_texts() == ["now", "step 0: members connected anew"]
        times.select_option(label="step 0: members connected anew")
        page.wait_for_function("() => document.querySelector('.answer').textContent.includes('Expert 3 of layer 2: 1 copy')")  # fmt: skip
        page.keyboard.press("Escape")
        page.locator(".holders summary").click()
        assert "h1.1.a" in page.locator(".holders table").inner_text()


def test_stages_are_drawn_with_layers_and_foldings_of_their_own(chromium: Any, tmp_path: Path) -> None:
    label = "tp1/tp2.dp2.ep4"
    told = line(
        "StatePlaced",
        BEGIN_S + 1,
        step=0,
        why="start",
        folding=label,
        layers=[[0, 1], [2, 3]],
        experts=8,
        expert_layers=[1, 2, 3],
    )
    folder = placed_run(tmp_path / "run", told, world=5, folding=label)
    with serving(folder) as server, opened(chromium, server, width=390) as page:
        page.wait_for_selector(".holders .card")
        titles = page.locator(".holders h4").all_inner_texts()
        assert titles == ["Stage 0, layers 0–1: rank 0; attention one part, experts one part", "Stage 1, layers 2–3: ranks 1–4; attention tp 2 × dp 2, experts ep 4"]  # fmt: skip
        assert page.locator(".holders .cards").nth(1).locator(".card").count() == 4
        page.locator(".holders select").first.select_option("layer 3")
        page.locator(".holders input").fill("5")
        assert "Expert 5 of layer 3: 1 copy, on rank 3." in page.locator(".answer").inner_text()
        page.locator(".card[data-rank='0']").click()
        said = page.locator(".answer").inner_text()
        assert (
            "8 experts have no other copy (0 of layer 1" in said
            and "No other rank has its part of the weights beside the experts." in said
        )
        assert (
            "The run ends, as its ranks are fixed; it resumes from the beginning, for there is no checkpoint." in said
        )
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1200, "dark")])
def test_it_fits_a_telephone_and_the_dark(chromium: Any, run: Path, width: int, scheme: str) -> None:
    with serving(run) as server, opened(chromium, server, width=width, scheme=scheme) as page:
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        paper, ink = page.evaluate(
            "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map((c) => c.match(/\\d+/g).map(Number)); }"
        )
        assert (sum(paper) > sum(ink)) == (scheme == "light")


def test_a_figure_is_looked_at_closer(chromium: Any, run: Path) -> None:
    with serving(run) as server, opened(chromium, server) as page:
        box = page.locator("#charts svg").first.bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 260, box["y"] + 60, steps=4)
        with page.expect_response(lambda r: "/zoom?" in r.url) as answer:
            page.mouse.up()
        found = answer.value.json()
        assert found["width"] == 1, "as fine as the index has them"
        assert (
            page.locator("#range").inner_text()
            == f"steps {found['first']:,} to {found['first'] + len(found['times']) - 1:,}"
        )


def test_runs_stand_beside_one_another(chromium: Any, run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=300, ranks=1, name="other")
    with serving(run, other) as server, opened(chromium, server) as page:
        assert page.locator("#story article").count() == 2
        page.wait_for_function("() => document.getElementById('settings').textContent.includes('train.steps')")
        rows = page.locator("#settings tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [["train.steps", "1200", "300"]]
        page.locator("#picker summary").click()
        page.wait_for_selector("#list input")
        page.locator("#list input:checked").first.uncheck()
        page.wait_for_function("() => document.querySelectorAll('#story article').length === 1")


def test_an_index_that_is_made_shows_how_far_it_is(
    chromium: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "long"
    shutil.copytree(run, folder)
    (folder / "events" / "index").unlink(missing_ok=True)
    monkeypatch.setattr(views, "SLICE_S", 1e-6)  # a piece at a time
    monkeypatch.setattr(
        views.RunView, "advance", lambda self, made=views.RunView.advance: False if self.held else made(self)
    )
    monkeypatch.setattr(views.RunView, "held", True, raising=False)
    with serving(folder) as server, opened(chromium, server) as page:
        assert (
            page.locator("#story progress").count() == 2 and "reading the logs" in page.locator("#story").inner_text()
        )
        monkeypatch.setattr(views.RunView, "held", False)
        page.wait_for_function(
            "() => !document.getElementById('story').textContent.includes('reading the logs')", timeout=60_000
        )
        assert "1,200 of 1,200" in page.locator("#story").inner_text()
    assert (folder / "events" / "index").is_file(), "the next one need not be made"


ATTACK = '</textarea></script><script>window.hacked=1</script><img src=x onerror="window.hacked=1;alert(1)"><svg onload=alert(1)>\u202e\x1b[31m{{7*7}}javascript:alert(1)'


def hostile_run(folder: Path) -> Path:
    """A run of whose fields each is an attack, whatever its type should be."""
    (folder / "events").mkdir(parents=True)
    text = json.dumps(ATTACK)
    (folder / "recipe.toml").write_text(
        f'[run]\nname = {text}\n[train]\nsteps = {text}\n["<script>alert(1)</script>"]\n"<b>" = {text}\n'.replace(
            "\\u202e", "\\u202E"
        )
    )
    huge = 10**60
    lines = [
        line("RunStarted", BEGIN_S, run=ATTACK, rank=0, world=ATTACK, step=0, total_steps=huge, num_params=-huge, active_params=[ATTACK],
             folding=f"dp2|{ATTACK}", flops_per_token=1e300, peak_flops_per_s=None, unigram_loss={"a": ATTACK}),
        line("TeamFormed", BEGIN_S, generation=ATTACK, members=ATTACK, step=ATTACK, folding="dp2|ep2", why=ATTACK, noticed_s=ATTACK, moved_bytes=huge, life=ATTACK, lost_s=-1e300),
        line("TrainingResumed", BEGIN_S, generation=ATTACK, step=[], seconds=ATTACK),
        line("WentBack", BEGIN_S, history=ATTACK, step=ATTACK, from_step=ATTACK, why=ATTACK, damaged=[ATTACK] * 99, abandoned=[ATTACK]),
        line("Straggling", BEGIN_S, step=ATTACK, host=ATTACK, members=[ATTACK], slowness=ATTACK, put_out=ATTACK, why=ATTACK),
        line("ExpertLoads", BEGIN_S, step=3, counts=[[1, 2], [ATTACK, 3]]),
        line("ExpertLoads", BEGIN_S, step=3, counts=[[huge, -5], [0, 3]]),
        line("StatePlaced", BEGIN_S, step=ATTACK, why=ATTACK, folding=ATTACK, layers=[ATTACK], experts=huge, expert_layers=ATTACK, slots=[[[ATTACK]]], members=[ATTACK]),
        line("StatePlaced", BEGIN_S + 9, step=1, why=ATTACK, folding="dp2|ep2", layers=[[0]], experts=2, expert_layers=[0], slots_per_rank=1, slots=[[[0], [[0], [1]]]],
             members=[ATTACK, ATTACK], hosts=[7, 7], minimum=9, holders=1),
        line("StepRecorded", BEGIN_S, step=2, begin_s=ATTACK, end_s=ATTACK),
        line("Operation", BEGIN_S, op_id=ATTACK, lane=ATTACK, begin_s=-1e200, end_s=1e200),
        line(ATTACK, BEGIN_S, step=ATTACK),
        b'{"kind":"Note","time_s":NaN,"level":"info","text":"x"}\n',
        b'{"kind":"Note","time_s":Infinity,"level":"info","text":"x"}\n',
        b"[" * 5000 + b"\n", b"\xff\xfe\n", b"null\n", b'{"kind":"Note","time_s":1,"level":"' + b"x" * 10_000_000 + b'"}\n',
    ]  # fmt: skip
    for step in (1, 2, 3, -5, 10**18, huge, ATTACK, None, 1.5):
        lines.append(line("StepEnded", BEGIN_S + 1, step=step, loss=ATTACK if step == 2 else 1e308 if step == 3 else 5.0, lr=huge, load_max_over_mean=[ATTACK, 1.0], tokens=ATTACK, mfu=1e-300, step_s=-1.0))  # fmt: skip
        lines.append(line("Validated", BEGIN_S + 1, step=step, loss=ATTACK, tokens=1, seconds=ATTACK))
        lines.append(line("Sampled", BEGIN_S + 1, step=step, prompt=ATTACK, text=ATTACK * 1000))
        lines.append(line("Note", BEGIN_S + 1, level=ATTACK, text=f"{step} {ATTACK}"))
        lines.append(
            line("CheckpointSaved", BEGIN_S + 1, step=step, path=ATTACK, bytes=ATTACK, blocked_s=huge, total_s=ATTACK)
        )
    lines += [line("RunEnded", BEGIN_S + 2, step=ATTACK, reason=ATTACK, seconds=huge), b'{"kind":"Note","time_s":1,"le']
    (folder / "events" / "rank-0.jsonl").write_bytes(b"".join(lines))
    (folder / "events" / "rank-1.jsonl").symlink_to("/etc/passwd")
    (folder / "events" / "host-<img src=x onerror=alert(1)>.jsonl").write_bytes(
        line("MemberLost", BEGIN_S, uid=ATTACK, host=ATTACK, why=ATTACK, at_s=ATTACK)
    )
    return folder


@pytest.mark.core
def test_nothing_that_a_log_says_is_executed(chromium: Any, tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "<img src=x onerror=alert(2)>")
    with serving(folder, below=tmp_path) as server, opened(chromium, server) as page:
        page.wait_for_function("() => document.getElementById('settings').textContent.includes('settings')")
        page.wait_for_function(
            "() => document.getElementById('story').textContent.includes('could not be read') && !document.getElementById('story').textContent.includes('reading the logs')"
        )
        page.locator("#picker summary").click()
        page.wait_for_selector("#list input")
        page.locator("#picker summary").click()
        page.evaluate("() => document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        page.wait_for_timeout(1000)
        shown = page.locator("main").inner_text()
        assert "<script>window.hacked=1</script>" in shown and "\u202e" not in shown and "\x1b" not in shown
        assert page.evaluate("() => window.hacked") is None
        assert page.locator("main script, main img, main textarea, main iframe, main a, main b").count() == 0
        assert page.evaluate(
            "() => [...document.querySelectorAll('*')].every((e) => ![...e.attributes].some((a) => a.name.startsWith('on') || a.name === 'style' && e.namespaceURI.includes('xhtml') && a.value.includes('url')))"
        )
        assert "lines of the logs could not be read" in shown


INJECTED = """async () => {
  const refused = [];
  document.addEventListener('securitypolicyviolation', (e) => refused.push(e.effectiveDirective));
  const script = document.createElement('script');
  script.textContent = 'window.hacked = 1';
  const image = document.createElement('img');
  image.src = 'http://127.0.0.2:9/a.png';
  document.body.append(script, image);
  document.body.insertAdjacentHTML('beforeend', '<img src="/none" onerror="window.hacked = 1"><form action="/"></form>');
  const sent = await fetch('http://127.0.0.2:9/').then(() => true, () => false);
  await new Promise((done) => setTimeout(done, 300));
  return {refused, sent, hacked: window.hacked ?? null};
}"""


@pytest.mark.core
def test_a_policy_stands_behind_the_escaping(chromium: Any, run: Path) -> None:
    """Were an element of a log's making in the page, the browser would run and fetch nothing for it."""
    with serving(run) as server, contextlib.closing(chromium.new_context()) as context:
        page = context.new_page()
        visit(page, server)
        found = page.evaluate(INJECTED)
        assert not found["sent"] and found["hacked"] is None
        assert {"script-src-elem", "script-src-attr", "img-src", "connect-src"} <= set(found["refused"])


@pytest.mark.core
def test_a_large_run_is_there_at_once(chromium: Any, tmp_path: Path) -> None:
    """Bounds for any machine; benchmarks/results/page.json has what was measured."""
    folder = write_run(tmp_path / "long", steps=times(20_000, 3000), ranks=times(16, 3), elastic=True)
    indexed(folder)
    with serving(folder) as server, opened(chromium, server) as page:
        assert page.measured["bytes"] <= 1_000_000
        assert page.measured["first_paint_s"] < 10 and page.measured["drawn_s"] < 20

"""Exposed and hidden communication, in sums and in traces: what is told is what happened, and the trace is one that Perfetto can draw."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_events import ended, started
from program_help import TINY, Run, one_step
from rich.console import Console
from train_help import phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.core.clock import now_s
from phalanx.core.events import ClockCompared, Collective, Event, Operation, StepRecorded
from phalanx.core.op_ids import expert_exchange, read_op_id
from phalanx.core.recipe import load_recipe
from phalanx.core.trace_file import TraceFile
from phalanx.observe.console import ConsoleSink
from phalanx.observe.event_log import JsonlSink, log_path, read_events, read_history
from phalanx.observe.metrics import samples
from phalanx.observe.recorded.exposure import by_axis, by_layer
from phalanx.observe.recorded.intervals import in_rows, innermost, subtract, total_s, union
from phalanx.observe.recorded.lanes import read_recording
from phalanx.observe.recorded.trace import perfetto_trace
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.program.ops import op_id
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Message
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.comm.peers import Peers, own_group
from phalanx.runtime.comm.waiting import LayerTimes
from phalanx.train.setup import machine
from ranks import run_ranks

AT = 1_800_000_000.0
"""When the hand-made steps happen."""


# ---- words and numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_ids_are_read_back() -> None:
    for mb, layer, phase in itertools.product(
        (None, 0, 12), (None, 0, 31), (None, "fwd", "bwd", "re", "count", "eval")
    ):
        for name in ("dispatch.rows", "boundary1", "gradient/expert/edp", "Loss", "mb", "receive"):
            id = op_id(name, microbatch=mb, layer=layer, phase=phase)  # type: ignore[arg-type]
            assert read_op_id(id) == (mb, layer, phase, name)
    assert expert_exchange("mb3.L2.fwd.dispatch.rows.part1") == (2, "forward")
    assert expert_exchange("mb3.L2.re.combine.rows") == (2, "backward")
    for other in ("mb3.L2.eval.dispatch.rows", "mb3.L2.fwd.attention.gather", "mb3.fwd.loss", "vote", "", "a\nb"):
        assert expert_exchange(other) is None


def grid(intervals: Sequence[tuple[float, float]]) -> set[int]:
    return {t for begin, end in intervals for t in range(int(begin), int(end))}


@pytest.mark.unit
def test_sets_of_moments_against_a_grid() -> None:
    rng = random.Random(3)
    for _ in range(300):
        a, b = ([(x, x + rng.randrange(0, 9)) for x in (rng.randrange(40) for _ in range(n))] for n in (6, 5))
        assert grid(union(a)) == grid(a) and total_s(union(a)) == len(grid(a))
        assert grid(subtract(union(a), union(b))) == grid(a) - grid(b)
        shown = innermost([(at, i) for i, at in enumerate(a)])
        assert all(x[0][1] <= y[0][0] for x, y in itertools.pairwise(shown)) and grid([s[0] for s in shown]) == grid(a)
        for (begin, end), i in shown:  # nobody that runs began later
            assert a[i][0] <= begin and end <= a[i][1]
            assert all(not (x <= begin < y) or x <= a[i][0] for x, y in a)
        rows = in_rows([(at, at) for at in a])
        assert sorted(at for row in rows for at, _ in row) == sorted(a)
        assert all(x[0][1] <= y[0][0] for row in rows for x, y in itertools.pairwise(row))


@pytest.mark.unit
def test_sums_of_a_layer_by_hand() -> None:
    """Two messages that overlap count once; what blocked is exposed, the rest of the time hidden."""
    times, there, back = LayerTimes(), "mb0.L3.fwd.dispatch.rows", "mb0.L3.bwd.combine.rows"
    times.posted(there, 0.0)
    times.posted("mb0.L3.fwd.dispatch.weights", 1.0)
    times.ended(there, 4.0, 1.5)
    times.ended("mb0.L3.fwd.dispatch.weights", 6.0, 0.5)
    times.posted(there, 10.0)
    times.ended(there, 11.0, 1.0)
    times.posted("mb0.L3.eval.dispatch.rows", 11.0)
    times.ended("mb0.L3.eval.dispatch.rows", 20.0, 9.0)
    times.posted("vote", 11.0)
    times.ended("vote", 20.0, 9.0)
    times.posted(back, 20.0)
    aside = LayerTimes()
    aside.posted(back, 20.0)
    aside.ended(back, 25.0, 0.0)
    times.absorb(aside)
    times.blocked(back, 2.0)
    found = times.take()
    assert set(found) == {(3, "forward"), (3, "backward")}
    forward = found[3, "forward"]
    assert (forward.under_way_s, forward.exposed_s, forward.hidden_s) == (7.0, 3.0, 4.0)
    assert (found[3, "backward"].under_way_s, found[3, "backward"].exposed_s) == (5.0, 2.0)
    times.ended(back, 30.0, 4.0)  # posted before the sums were taken: of no step
    assert times.take() == {} and aside.take() == {}


@pytest.mark.unit
def test_the_file_refuses_arrows_back_in_time_and_spans_of_a_lane_touch() -> None:
    file = TraceFile(title="t", origin_s=AT)
    a = file.span(0, 0, "a", begin_s=AT, end_s=AT + 1 / 3, category="x", args={})
    b = file.span(0, 0, "b", begin_s=AT + 1 / 3, end_s=AT + 1, category="x", args={})
    assert file.arrow("there", a, b, from_s=a.inside_end_s, to_s=b.begin_s)
    assert not file.arrow("back", b, a, from_s=b.begin_s, to_s=a.begin_s)
    first, second, *arrow = file.to_json_dict()["traceEvents"]
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=2e-3) and len(arrow) == 2
    assert first["ts"] <= arrow[0]["ts"] < first["ts"] + first["dur"]


# ---- steps made by hand ----------------------------------------------------------------------------------------------------


def message(id: str, begin: float, end: float, waited: float, *, axis: str = "ep", **more: Any) -> Collective:
    fields = {"op": "all_to_all_rows", "size": 2, "sent_bytes": 100, "ranks": (0, 1), **more}
    return Collective(op_id=id, axis=axis, begin_s=AT + begin, end_s=AT + end, waited_s=waited, **fields)


def work(id: str, begin: float, end: float, lane: Any = "compute") -> Operation:
    return Operation(op_id=id, lane=lane, begin_s=AT + begin, end_s=AT + end)


def write(folder: Path, rank: int, *events: Event, step: int | None = 5, end: float = 20.0) -> None:
    log = JsonlSink(folder, rank=rank)
    closing = [] if step is None else [StepRecorded(step=step, begin_s=AT, end_s=AT + end)]
    for event in (*events, *closing):
        log.write(event)
    log.close()


def by_hand(folder: Path) -> None:
    """Rank 1's clock is 100 s ahead. Micro-batches of the ranks have numbers of their own."""
    write(
        folder, 0, started(world=2),
        work("mb0.L0.fwd.dispatch.permute", 0, 1),
        message("mb0.L0.fwd.dispatch.rows", 1, 8, 3),           # waits from 5 on; rank 1 posts at 6: late 1, under way 6-8
        work("mb0.L0.fwd.router", 1, 5),
        work("mb0.L0.fwd.experts", 8, 12),
        message("mb0.L0.fwd.combine.rows", 12, 16, 1),          # rank 1 posts at 11: under way 12-16, hidden 3
        work("mb0.L0.fwd.combine.sum", 16, 17),
        message("mb0.fwd.boundary0", 3, 18, 0.5, axis="pp", op="exchange", sends_to=(1,)),
    )  # fmt: skip
    later = [dataclasses.replace(e, begin_s=e.begin_s + 100, end_s=e.end_s + 100) for e in (
        message("mb1.L0.fwd.dispatch.rows", 6, 8, 1),           # under way 6-8, hidden 1
        work("mb1.L0.fwd.experts", 8, 11),
        message("mb1.L0.fwd.combine.rows", 11, 16, 5),          # rank 0 posts at 12: late 1
        message("mb0.fwd.boundary0", 17, 19, 1, axis="pp", op="exchange", receives_from=(0,)),
    )]  # fmt: skip
    compared = ClockCompared(rank=1, host="b", offset_s=100.0, error_s=0.25)
    log = [started(rank=1, world=2), compared, *later]
    write(folder, 1, *log, StepRecorded(step=5, begin_s=AT + 100, end_s=AT + 120), step=None)


@pytest.mark.unit
def test_exposed_and_hidden_by_hand(tmp_path: Path) -> None:
    by_hand(tmp_path)
    recording = read_recording(tmp_path)
    found = by_layer(recording)
    assert set(found) == {(0, "forward")}
    layer = found[0, "forward"]
    # rank 0: waits 5-8 and 15-16, under way 6-8 and 12-16; rank 1: waits 7-8 and 11-16, under way 6-8 and 12-16
    assert layer.sent_bytes == 200
    assert layer.exposed_s == pytest.approx((4 + 6) / 2) and layer.late_s == pytest.approx((1 + 1) / 2)
    assert layer.hidden_s == pytest.approx((3 + 1) / 2)
    assert layer.hidden_share == pytest.approx(2 / 6)
    assert by_axis(recording)["pp"].exposed_s == pytest.approx((0.5 + 1) / 2)
    assert recording.clock_error_s == {1: 0.25}
    wanted = next(m for m in recording.ranks[0][5].messages if m.op_id.endswith("dispatch.rows"))
    assert wanted.last_rank == 1 and wanted.late_s == pytest.approx(1)


def spans(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {lane: sorted(events, key=lambda e: e["ts"]) for lane, events in found.items()}


def problems_of(trace: dict[str, Any]) -> list[str]:
    """What Perfetto could not draw, or would draw wrong."""
    found, lanes, arrows = [], spans(trace), {}
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for lane, events in lanes.items():
        found += [f"lane {lane} has no name"] if lane not in named else []
        found += [f"{e} ends before it begins" for e in events if e["dur"] < 0]
        for a, b in itertools.pairwise(events):
            if a["ts"] + a["dur"] > b["ts"] + 2e-3:
                found.append(f"{a} overlaps {b}")
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
            inside = [e for e in lanes[event["pid"], event["tid"]] if e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]
            found += [] if inside else [f"{event} is bound to nothing"]
        elif event["ph"] not in "XM":
            found.append(f"{event} is no event of ours")
    for ends in arrows.values():
        if [e["ph"] for e in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"]:
            found.append(f"{ends} is no arrow forward")
    return found


def arrows_of(trace: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(meaning, from, to), with the ranks."""
    lanes, ends = spans(trace), {}

    def at(event: dict[str, Any]) -> str:
        lane = lanes[event["pid"], event["tid"]]
        (name,) = {e["name"] for e in lane if e["ts"] <= event["ts"] < e["ts"] + e["dur"]}
        return f"{event['pid']} {name}"

    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], [event["name"]]).append(at(event))
    return {(name, source, target) for name, source, target in ends.values()}


@pytest.mark.unit
def test_arrows_by_hand(tmp_path: Path) -> None:
    by_hand(tmp_path)
    trace = perfetto_trace(read_recording(tmp_path))
    assert problems_of(trace) == []
    json.dumps(trace)
    assert arrows_of(trace) == {
        ("sent", "1 mb1.L0.fwd.dispatch.rows", "0 mb0.L0.fwd.dispatch.rows"),
        ("sent", "0 mb0.L0.fwd.combine.rows", "1 mb1.L0.fwd.combine.rows"),
        ("sent", "0 mb0.fwd.boundary0", "1 mb0.fwd.boundary0"),
        ("carried away", "0 mb0.L0.fwd.dispatch.permute", "0 mb0.L0.fwd.dispatch.rows"),
        ("brought", "0 mb0.L0.fwd.dispatch.rows", "0 mb0.L0.fwd.experts"),
        ("carried away", "0 mb0.L0.fwd.experts", "0 mb0.L0.fwd.combine.rows"),
        ("brought", "0 mb0.L0.fwd.combine.rows", "0 mb0.L0.fwd.combine.sum"),
        ("brought", "1 mb1.L0.fwd.dispatch.rows", "1 mb1.L0.fwd.experts"),
        ("carried away", "1 mb1.L0.fwd.experts", "1 mb1.L0.fwd.combine.rows"),
    }
    figures = next(
        e["args"]
        for e in trace["traceEvents"]
        if e["name"] == "mb0.L0.fwd.dispatch.rows" and e["cat"] == "communication"
    )
    assert (figures["exposed_ms"], figures["late_ms"], figures["sent_bytes"], figures["axis"]) == (
        3000,
        1000,
        100,
        "ep",
    )


@pytest.mark.unit
def test_a_clock_that_is_known_badly_costs_arrows_and_not_the_picture(tmp_path: Path) -> None:
    sent = message("mb0.fwd.boundary0", 3, 4, 0, axis="pp", op="exchange", sends_to=(1,))
    got = message("mb0.fwd.boundary0", 1, 2, 0, axis="pp", op="exchange", receives_from=(0,))
    write(tmp_path, 0, started(), sent)
    write(tmp_path, 1, started(rank=1), got)
    trace = perfetto_trace(read_recording(tmp_path))
    assert problems_of(trace) == [] and trace["otherData"]["arrows_left_out"] == 1


@pytest.mark.unit
def test_what_training_went_back_behind_is_void(tmp_path: Path) -> None:
    write(tmp_path, 0, started(), message("mb0.L0.fwd.dispatch.rows", 1, 2, 1), step=5)
    write(tmp_path, 0, message("mb0.L0.fwd.dispatch.rows", 1, 2, 1), step=6)
    write(tmp_path, 0, message("of a step that was killed", 1, 2, 1), step=None)
    write(tmp_path, 0, started(step=5), message("mb0.L0.fwd.combine.rows", 1, 2, 1), step=6)
    recording = read_recording(tmp_path)
    assert recording.steps == (5, 6)
    assert [m.op_id for m in recording.ranks[0][6].messages] == ["mb0.L0.fwd.combine.rows"]
    assert read_recording(tmp_path, first=6).steps == (6,)


@pytest.mark.unit
def test_logs_of_older_programs_are_read(tmp_path: Path) -> None:
    write(tmp_path, 0, started(), message("mb0.L0.fwd.dispatch.rows", 1, 2, 1))
    path = log_path(tmp_path, 0)
    new = ("waited_s", "aside", "ranks", "sends_to", "receives_from")
    path.write_text(re.sub(rf',"(?:{"|".join(new)})":(?:\[[^]]*\]|[^,}}]*)', "", path.read_text()))
    assert not any(name in record for record in read_events(path) for name in new)
    assert by_layer(read_recording(tmp_path))[0, "forward"].exposed_s == 0


# ---- what is wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_a_run_without_recorded_steps_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", 0, started(), step=None)
    assert main(["trace", str(tmp_path / "run")]) == 2
    assert "observe.trace_steps was not set; train it with --observe.trace_steps 10,12" in capsys.readouterr().err
    assert not (tmp_path / "run" / "trace.json").exists()
    assert main(["trace", str(tmp_path / "nothing")]) == 2
    assert "has no event log" in capsys.readouterr().err and not (tmp_path / "nothing").exists()
    write(tmp_path / "run", 0, message("vote", 1, 2, 1), step=7)
    assert main(["trace", str(tmp_path / "run"), "--steps", "8:"]) == 2
    assert "--steps = '8:': names no step" in (said := capsys.readouterr().err) and "recorded are steps 7 to 7" in said
    for steps in ("a", "3:2", ":", "1:2:3", "-1"):
        assert main(["trace", str(tmp_path / "run"), f"--steps={steps}"]) == 2
        assert "must be the first and the last step" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "run"), "--steps", "7", "--out", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("12,10", "must be the first and the last step to record, in this order"),
        ("1,2,3", "must be the first and the last step"),
        ("0,3", "each must be at least 1"),
        ("299,301", "must not go past train.steps = 300"),
    ],
)
def test_settings_that_record_nothing_are_errors(steps: str, words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        load_recipe(None, ["--observe.trace_steps", steps])
    assert load_recipe(None, ["--observe.trace_steps", "10,12"]).observe.trace_steps == (10, 12)


# ---- real ranks -----------------------------------------------------------------------------------------------------------------


GATED = dataclasses.replace(TINY, dense_layers=1, dense_ffn=32, shared_ffn=32, shared_gate=True)
RUNS = [
    Run(folding=Folding(world=2, ep=2), num_microbatches=2),
    Run(folding=Folding(world=2, ep=2), recompute="full", spec=GATED),
    Run(folding=Folding(world=2, tp=2, etp=2), recompute="selective", spec=dataclasses.replace(TINY, mtp_layers=1)),
    Run(folding=make_folding(world=2, cp=2, ep=2), recompute="selective"),
    Run(folding=make_folding(world=2, pp=2), num_microbatches=2),
]


def with_and_without(rank: int, cache: GroupCache) -> list[tuple[list[str], bool]]:
    """Of each run: what it told of, and whether a step that tells nothing ends with the same bits."""
    found = []
    for run in RUNS:
        told: list[Event] = []
        quiet, loud = (
            one_step(rank, cache, run, comms)
            for comms in (Collectives(timeout_s=240), Collectives(trace=True, emit=told.append, timeout_s=60))
        )
        same = (quiet[0].loss, quiet[0].grad_norm) == (loud[0].loss, loud[0].grad_norm)
        parameters = (step[1].model.parameters() for step in (quiet, loud))
        same &= all(torch.equal(x, y) for x, y in zip(*parameters, strict=True))
        found.append(([e.op_id for e in told if isinstance(e, Operation) and e.lane == "compute"], same))
    return found


@pytest.mark.ranks
def test_a_step_tells_of_what_its_program_computes_and_changes_no_bit() -> None:
    """Forward, backward and run again, each once and no others; one rank of experts has nothing to sort."""
    for rank, found in enumerate(run_ranks(2, with_and_without)):
        for run, (computed, same) in zip(RUNS, found, strict=True):
            planned = [op.id for op in run.program(rank).ops if op.kind == "compute"]
            if run.folding.ep * run.folding.etp == 1:
                planned = [id for id in planned if not id.endswith(".sort")]
            assert same and sorted(computed) == sorted(planned), (run, rank)


def under_way_while_busy(rank: int, cache: GroupCache) -> tuple[float, float, float, list[Event]]:
    """A message that travels while the rank sleeps, and whose receiver then waits for a sender that is late."""
    told: list[Event] = []
    comms, axis = Collectives(trace=True, emit=told.append, timeout_s=20), Axis("ep", (0, 1), rank, cache.get((0, 1)))
    for pause, late in ((0.05, 0.0), (0.0, 0.3)):
        comms.barrier(axis)
        time.sleep(late * rank)
        there, here = torch.ones(8), torch.zeros(8)
        exchange = comms.start_exchange(
            [Message(there, 1 - rank)], [Message(here, 1 - rank)], axis, op_id=f"mb{rank}.L2.fwd.dispatch.rows"
        )
        time.sleep(pause)
        exchange.wait()
    found = comms.layers.take()[2, "forward"]
    return found.exposed_s, found.hidden_s, comms.counters["exchange", "ep"].waited_s, told


@pytest.mark.ranks
def test_waits_of_real_messages() -> None:
    (exposed_0, hidden_0, counted_0, told_0), (_, hidden_1, _, told_1) = run_ranks(2, under_way_while_busy)
    assert hidden_0 >= 0.05 and hidden_1 >= 0.05 and exposed_0 >= 0.05
    assert counted_0 == pytest.approx(exposed_0, abs=1e-9)
    first, second = (e for e in told_0 if isinstance(e, Collective) and e.op == "exchange")
    assert first.end_s - first.begin_s - first.waited_s >= 0.05 and second.waited_s >= 0.05
    assert (first.sends_to, first.receives_from, first.ranks) == ((1,), (1,), (0, 1))
    assert len(told_1) == len(told_0) == 4


@pytest.mark.unit
def test_metrics_and_screen() -> None:
    parts = {f"{what}_{way}_s" for what in ("exposed", "hidden") for way in ("forward", "backward")}
    event = ended(5, layers=2, **dict.fromkeys(sorted(parts), (0.01, 0.03)))
    told = {s.tag: s.value for s in samples(event) if s.tag.startswith("exchange/")}
    assert told["exchange/exposed_s"] == pytest.approx(0.08) and told["exchange/hidden_backward_of/layer-1"] == 0.03
    assert len(told) == 2 + 4 * 2
    assert not [
        s for s in samples(ended(5)) if s.tag.startswith("exchange/")
    ]  # a device: not known, which is not nothing
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    sink = ConsoleSink(console, live=True, clock=itertools.count().__next__)
    for what in (started(), event):
        sink.write(what)
    sink.close()
    assert isinstance(console.file, io.StringIO)
    assert "exchange: ranks waited 80.0 ms a step, 50 % hidden; by layer 0 20.0 ms" in console.file.getvalue()


def shifted(rank: int, cache: GroupCache) -> tuple[ClockCompared, ClockCompared]:
    """Clocks of ranks of one machine, and of two whose clocks are 7 s apart."""
    peers = Peers(own_group(2, timeout_s=20))
    same = machine.compare_clocks(peers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "machine", lambda: f"machine {rank}")
        patch.setattr(machine, "now_s", lambda: now_s() + 7 * rank)
        return same, machine.compare_clocks(peers)


@pytest.mark.ranks
def test_clocks_of_two_machines() -> None:
    (same_0, first), (same_1, second) = run_ranks(2, shifted)
    assert (same_0.offset_s, same_0.error_s, first.offset_s) == (0, 0, 0)
    assert same_1.error_s == 0 and abs(same_1.offset_s) < 1e-3
    assert abs(second.offset_s - 7 - same_1.offset_s) <= second.error_s + 1e-4 and 0 < second.error_s < 5


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two ranks, of which the second and third are recorded."""
    base = tmp_path_factory.mktemp("trace")
    write_text(base / "text", files=3)
    done = phalanx("train", *train_args(
        base, launch__ranks=2, launch__threads=1, folding__ep=2, train__steps=4, train__global_batch=8, train__micro_batch=2,
        checkpoint__interval=0, observe__trace_steps="[2, 3]",
    ))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return base / "runs" / "run"


@pytest.mark.core
@pytest.mark.ranks
def test_a_recorded_run(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(traced)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    trace = json.loads((traced / "trace.json").read_text())
    assert problems_of(trace) == []
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names >= {
        (rank, lane) for rank in (0, 1) for lane in ("step", "passes", "compute", "waiting", "ep", "ep_etp")
    }
    assert {e["name"] for events in spans(trace).values() for e in events} >= {"step 2", "step 3"}
    found = arrows_of(trace)
    assert trace["otherData"]["arrows_left_out"] == 0
    for rank, phase in itertools.product((0, 1), ("fwd", "bwd")):
        mb = f"{rank} mb{2 * rank}.L1.{phase}."
        ahead, after = ("dispatch.sort", "dispatch.rows") if phase == "fwd" else ("combine.sort", "combine.rows")
        assert ("brought", mb + after, mb + ahead) in found
    assert any(name == "sent" and source[0] != target[0] for name, source, target in found)
    assert main(["trace", str(traced), "--steps", "3", "--out", str(tmp_path / "t.json"), "--summary"]) == 0
    said = capsys.readouterr().out
    assert "steps 3 to 3 on 2 ranks" in said and "layer 1 backward" in said and "dp_cp" in said


@pytest.mark.ranks
def test_sums_and_trace_tell_the_same(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = read_history(traced).steps
    for step in (2, 3):
        assert main(["trace", str(traced), "--steps", str(step), "--summary", "--json", str(tmp_path / "f.json")]) == 0
        layers = json.loads((tmp_path / "f.json").read_text())["layers"]
        assert sorted(layers) == ["0", "1"]
        for layer, direction in itertools.product((0, 1), ("forward", "backward")):
            exposed_s = steps[step][f"exposed_{direction}_s"][layer]
            assert exposed_s == pytest.approx(layers[str(layer)][direction]["exposed_s"], abs=1e-4) and exposed_s > 0
            hidden_s = steps[step][f"hidden_{direction}_s"][layer]
            assert hidden_s < max(
                1e-4, 0.25 * exposed_s
            )  # nothing overlaps in the plain order, but a rank may be halted
    other = read_history(traced, rank=1).steps
    assert all(steps[s]["exposed_forward_s"] == other[s]["exposed_forward_s"] for s in steps)
    capsys.readouterr()
    assert main(["metrics", str(traced)]) == 0
    assert re.search(r"MoE layer 1: forward .* a step, 1?\d % hidden; backward", capsys.readouterr().out)

"""What a counted step would take on GPUs: each count at one rate, what lies beside what, a pipeline on its clock, and what a file may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.predicting.traced import read_step, step_of, traced
from phalanx.core.errors import ConfigError, DataError
from phalanx.plan.model import flops_per_token
from phalanx.simulate.hardware import GroupSpan, Network
from phalanx.simulate.step import TracedExchange, TracedPhase, TracedRank, TracedStep, TracedTime
from phalanx.simulate.step.bubble import bubble_share
from phalanx.simulate.step.traced import FUSED_PRODUCTS, MOST_HIDDEN, DeviceRates

RATES = DeviceRates()
PHASE = {
    "launches": 10,
    "product_flops": 10**12,
    "fused_flops": 0,
    "attention_flops": 0,
    "flash_flops": 0,
    "moved_bytes": 0,
    "waits": 0,
}
RANK: dict[str, Any] = {"places": [0], "phases": {"forward": PHASE}, "exchanges": []}
QWEN = "--model.preset qwen3-30b-a3b --train.seq_len 4096 --train.micro_batch 1 --folding.ep 8"
STEP: dict[str, Any] = {"settings": QWEN.split(), "world": 8, "rounds": 1, "ranks": [RANK]}
HOST = tuple(range(8))


def step(words: str = "", *, world: int = 8, rounds: int = 1, places: int = 1) -> TracedStep:
    """A step without any count."""
    ranks = [{**RANK, "places": list(range(places))}]
    told = {"settings": [*QWEN.split(), *words.split()], "world": world, "rounds": rounds, "ranks": ranks}
    return step_of(told, "here")


def time_of(
    phases: dict[str, TracedPhase], *exchanges: TracedExchange, words: str = "", world: int = 8, rounds: int = 1
) -> TracedTime:
    rank = TracedRank(phases=phases, exchanges=exchanges)
    return replace(step(words, world=world, rounds=rounds), places=(rank,)).time()


def sent(content: str, num_bytes: int, phase: str = "forward", *, op: str = "alltoall_base", ranks: Any = HOST) -> Any:
    return TracedExchange(phase=phase, content=content, op=op, ranks=tuple(ranks), sent_bytes=num_bytes)


@pytest.mark.parametrize(
    ("phase", "part", "seconds"),
    [
        ({"product_flops": 550 * 10**12}, "products", 1.0),
        ({"fused_flops": 550 * 10**12}, "products", 1 / FUSED_PRODUCTS),
        ({"attention_flops": 1020 * 10**12}, "attention", 1.0),
        ({"flash_flops": 600 * 10**12}, "attention", 1.0),
        ({"moved_bytes": 25 * 10**11}, "elementwise", 1.0),
        ({"waits": 5000}, "waits", 1.0),
        ({"launches": 10**6}, "launches", 4.5),
        ({"launches": 10**6, "product_flops": 550 * 10**12}, "launches", 3.5),
        ({"launches": 10**5, "product_flops": 550 * 10**12}, "launches", 0.0),
    ],
)
def test_each_count_has_its_rate(phase: dict[str, int], part: str, seconds: float) -> None:
    assert time_of({"forward": TracedPhase(**phase)}).parts[part] == pytest.approx(seconds)


def test_launches_of_one_phase_are_not_hidden_by_the_work_of_another() -> None:
    phases = {"loss": TracedPhase(launches=10**6), "forward": TracedPhase(product_flops=550 * 10**13)}
    assert time_of(phases).parts["launches"] == pytest.approx(4.5)


def test_mfu_is_the_model_over_the_peak_whatever_else_is_computed() -> None:
    found = time_of(
        {"forward": TracedPhase(waits=5000)}, words="--folding.tp 2 --folding.etp 2 --folding.ep 4", rounds=4
    )
    assert found.seconds == pytest.approx(1.0) and found.tokens_per_s == pytest.approx(8192)
    assert found.mfu == pytest.approx(flops_per_token(step().job.spec, 4096) * 8192 / RATES.peak_flops_per_s)


# ---- exchanges ---------------------------------------------------------------------------------------------------------------

WAIT = {"forward": TracedPhase(waits=1)}


def test_serial_rows_hide_behind_nothing() -> None:
    found = time_of(WAIT, sent("rows", 3 * 10**11), sent("layers", 3 * 10**11))
    assert found.parts["exchange"] == pytest.approx(2.0) and found.hidden == 0.0


@pytest.mark.parametrize(
    ("overlap", "least", "most"),
    [("coarse:2", 0.3, 0.5), ("coarse:64", MOST_HIDDEN, MOST_HIDDEN), ("fused", 0.1, MOST_HIDDEN)],
)
def test_an_overlap_hides_rows_as_the_simulator_says_and_never_more_than_was_measured(
    overlap: str, least: float, most: float
) -> None:
    found = time_of(WAIT, sent("rows", 3 * 10**11), sent("layers", 3 * 10**11), words=f"--dispatch.overlap {overlap}")
    assert least <= found.hidden <= most
    assert found.parts["exchange"] == pytest.approx(2.0 - found.hidden)


def test_between_hosts_rows_take_what_the_simulators_links_take() -> None:
    far = range(16)
    found = time_of(WAIT, sent("rows", 15 * 10**10, ranks=far), words="--folding.ep 16", world=16)
    network = Network(step().cluster.hardware)
    assert found.parts["exchange"] == pytest.approx(network.all_to_all(16 * 10**10, GroupSpan(8, 2)))
    assert found.parts["exchange"] > 1.5  # 8 of 15 parts at less than 50 GB/s


def test_gradients_lie_beside_the_backward_pass_that_they_leave_in_and_parameters_beside_nothing() -> None:
    room = {"backward": TracedPhase(product_flops=550 * 10**12)}
    of = {"op": "_reduce_scatter_base"}
    beside = time_of(room, sent("gradients", 15 * 10**10, "backward", **of)).parts["dp"]
    assert 0.5 / 48 < beside < 0.1  # the last layer's, and multiprocessors that they take
    assert time_of(room, sent("gradients", 15 * 10**10, "reduce", **of)).parts["dp"] == pytest.approx(0.5)
    assert time_of(room, sent("parameters", 15 * 10**10, "publish", **of)).parts["dp"] == pytest.approx(0.5)


def test_gradients_in_shards_have_each_micro_batch_to_hide_in_and_others_the_last_one() -> None:
    room = {"backward": TracedPhase(product_flops=4 * 55 * 10**12)}
    gradients = sent("gradients", 4 * 3 * 10**10, "backward", op="_reduce_scatter_base")
    last = time_of(room, gradients, rounds=4).parts["dp"]
    each = time_of(room, gradients, rounds=4, words="--optim.zero 2").parts["dp"]
    assert last > 0.3 > 0.1 > each


# ---- pipelines ---------------------------------------------------------------------------------------------------------------


def of_places(*products: int, rounds: int, words: str = "") -> TracedStep:
    pp = len(products)
    empty = step(f"--folding.pp {pp} {words}", world=8 * pp, rounds=rounds, places=pp)
    phases = [
        {"forward": TracedPhase(product_flops=n * 10**13), "backward": TracedPhase(product_flops=2 * n * 10**13)}
        for n in products
    ]
    return replace(empty, places=tuple(TracedRank(phases=phase) for phase in phases))


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_equal_places_wait_for_the_bubble_that_has_a_closed_form(schedule: str, virtual: int) -> None:
    words = f"--pipeline.schedule {schedule}" + (f" --pipeline.virtual {virtual}" if virtual > 1 else "")
    found = of_places(100, 100, 100, 100, rounds=8, words=words).time()
    each = 3 * 10**15 / 550e12 / 8
    assert found.parts["products"] == pytest.approx(8 * each)
    assert found.parts["bubble"] == pytest.approx(each * bubble_share(schedule, 4, virtual, 8, 0.5), rel=0.02)


def test_the_step_is_that_of_the_place_that_is_longest_busy() -> None:
    slow, even = of_places(100, 300, 100, rounds=8).time(), of_places(100, 100, 100, rounds=8).time()
    assert slow.parts["products"] == pytest.approx(3 * even.parts["products"])
    assert slow.parts["bubble"] == pytest.approx(3 * 10**15 / 550e12 / 8, rel=0.02)  # both passes of the first, once


# ---- files -------------------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "before.json", tmp_path / "out.json"
    path.write_text(json.dumps({"step": STEP}))
    assert traced([str(path), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "before.json" in text and "predicted, not measured" in text and "MFU" in text
    assert json.loads(out.read_text())[str(path)]["seconds"] == pytest.approx(10**12 / RATES.product_flops_per_s)


def changed(**rank: Any) -> dict[str, Any]:
    return {"step": STEP | {"ranks": [RANK | rank]}}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "it is no trace"),
        ({"step": 3}, "it is no trace"),
        ({"step": STEP | {"settings": ["--model.preset", "nobody"]}}, "nobody"),
        ({"step": STEP | {"settings": [3]}}, "must be the words of a recipe"),
        ({"step": STEP | {"rounds": 0}}, "rounds"),
        ({"step": STEP | {"world": True}}, "world"),
        ({"step": STEP | {"ranks": []}}, "must be a list of the ranks traced"),
        (changed(places=[1]), "all places of a pipeline of 1"),
        (changed(places=[]), "places of a pipeline"),
        (changed(exchanges=[["forward", "rows", "alltoall_base", [0], 1]]), "must be a list of"),
        (changed(phases=[]), "must be a table of phases"),
        (changed(phases={"forward": PHASE | {"launches": -1}}), "phases.forward.launches"),
        (changed(phases={"forward": {"launches": 1.5}}), "phases.forward.moved_bytes"),
        (changed(phases={}), "launch nothing"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_place(tmp_path: Path, said: Any, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=words):
        read_step(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_step(tmp_path / "none.json")

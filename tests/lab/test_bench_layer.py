"""`phalanx bench layer` and `phalanx bench step`: loads are exact, figures follow their definitions, options are checked, and small runs on emulated hosts."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.core.errors import ConfigError, DataError, TestbedError
from phalanx.plan.moe.overlap.prediction.choose import SERIAL
from phalanx.plan.moe.overlap.settings import CANDIDATES, parse_overlap, setting_problems
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.moe.overlap_tuner import schedule_candidates
from phalanx_lab.bench import step
from phalanx_lab.bench.layer import command as layer
from phalanx_lab.bench.layer.cells import (
    LINKS,
    LOADS,
    MODELS,
    TOKENS,
    TYPES,
    _result as cells_result,
    cells,
    joined,
    part_of,
    table as cells_table,
)
from phalanx_lab.bench.layer.loads import exact_routing, load_vector, pair_counts
from phalanx_lab.bench.layer.methods import COARSE, METHODS, OURS, Inside, overlap_of
from phalanx_lab.bench.layer.rank import BenchLayerShape
from phalanx_lab.bench.layer.scores import figures, regret
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.testbed import Testbed


def emulated_hosts() -> None:
    try:
        Testbed(ClusterSpec(hosts=1)).close()
    except TestbedError as error:
        pytest.skip(f"no emulated hosts on this machine: {error}")


# ---- loads -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("model", MODELS)
def test_routing_has_exactly_the_load_that_was_asked_for(model: str, load: str) -> None:
    num_experts, top_k, num_tokens = MODELS[model]["experts"], MODELS[model]["top_k"], 1024
    shares = load_vector(load, num_experts=num_experts, top_k=top_k, seed=3)
    assert shares.sum() == pytest.approx(1) and shares.max() * top_k <= 1 + 1e-9
    if load == "dead":
        assert sorted(shares)[:2] == [0, pytest.approx(1 / (num_experts - 1))]
    else:
        assert shares.std() == pytest.approx(float(load), abs=1e-6)
    counts = pair_counts(shares, num_tokens=num_tokens, top_k=top_k)
    assert counts.sum() == num_tokens * top_k and abs(counts - shares * counts.sum()).max() < 1
    routed = exact_routing(counts, num_tokens=num_tokens, top_k=top_k, rng=np.random.default_rng(0))
    assert np.array_equal(np.bincount(routed.ravel(), minlength=num_experts), counts)
    assert all(len(set(row)) == top_k for row in routed.tolist())
    assert not np.array_equal(routed, exact_routing(counts, num_tokens=num_tokens, top_k=top_k, rng=np.random.default_rng(1)))  # fmt: skip


def test_otherwise_routing_is_random() -> None:
    """Of tokens with two of 8 experts, one in 28 has any given pair: dealt out in turn, experts would always meet the same ones."""
    counts = pair_counts(load_vector("0", num_experts=8, top_k=2), num_tokens=4096, top_k=2)
    routed = np.sort(exact_routing(counts, num_tokens=4096, top_k=2, rng=np.random.default_rng(0)), axis=1)
    met = np.bincount(routed[:, 0] * 8 + routed[:, 1], minlength=64)
    met = met[met > 0]
    assert len(met) == 28 and abs(met / 4096 * 28 - 1).max() < 0.35
    far = (routed >= 4).any(1).mean()  # a host with half of the experts is needed by all but 6 of 28
    assert far == pytest.approx(1 - 6 / 28, abs=0.02)


def test_small_and_extreme_loads() -> None:
    shares = load_vector("0", num_experts=8, top_k=8)
    assert pair_counts(shares, num_tokens=3, top_k=8).tolist() == [3] * 8
    rng = np.random.default_rng(0)
    assert sorted(exact_routing(np.array([1, 1, 1, 0]), num_tokens=1, top_k=3, rng=rng)[0].tolist()) == [0, 1, 2]
    for load, words in (("0.6", "use a smaller"), ("much", "must be a standard deviation"), ("-1", "must be a standard")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            load_vector(load, num_experts=8, top_k=2)
    with pytest.raises(ConfigError, match="none can have more"):
        load_vector("dead", num_experts=2, top_k=2)


# ---- figures -----------------------------------------------------------------------------------------------------------------------


def test_figures_follow_their_definitions() -> None:
    def of(t: float) -> dict[str, float | None]:
        return figures(t, compute_s=1.0, messages_s=0.8, least_s=0.6, serial_s=1.8, coarse_s=1.5)

    perfect, none = of(1.0), of(1.8)
    assert perfect["hidden"] == pytest.approx(1) and perfect["hidden_of_comm"] == pytest.approx(1)
    assert perfect["time_over_bound"] == pytest.approx(1) and perfect["speedup_vs_serial"] == pytest.approx(1.8)
    assert none["hidden"] == pytest.approx(0) and none["hidden_of_comm"] == pytest.approx(0)
    assert none["comm_share"] == pytest.approx(0.8 / 1.8) and none["speedup_vs_best_coarse"] == pytest.approx(1.5 / 1.8)
    long = figures(2.0, compute_s=1.0, messages_s=2.0, least_s=1.6, serial_s=3.0, coarse_s=None)
    assert long["hidden"] == pytest.approx(1) and long["hidden_of_comm"] == pytest.approx(0.5)
    assert long["time_over_bound"] == pytest.approx(2 / 1.6) and long["speedup_vs_best_coarse"] is None


def test_the_best_is_found_on_one_half_and_scored_on_the_other() -> None:
    seconds = {"serial": [2.0, 2.0] * 4, "all 2": [1.0, 3.0] * 4, "blocks": [1.5, 1.5] * 4, "auto": [1.2, 3.3] * 4}
    found = regret(seconds)
    assert found.best == "all 2" and found.ratio == pytest.approx(1.1)
    assert found.to_least == pytest.approx((1.2 + 3.3) / 2 / 1.5)
    assert regret({"serial": [1.0] * 8, "auto": [0.9] * 8}).ratio == pytest.approx(
        0.9
    )  # what it chose is not in the list


def test_the_grid_has_every_model_size_link_load_and_type() -> None:
    grid = cells()
    assert len(grid) >= 24
    met = {(c.shape.dtype, c.model, c.shape.tokens) for c in grid}
    assert len(met) == len(TYPES) * len(MODELS) * len(TOKENS)
    for of in (lambda c: c.model, lambda c: c.shape.tokens, lambda c: c.shape.load, lambda c: c.shape.dtype):
        assert len({(c.link_bit_per_s, of(c)) for c in grid}) == len(LINKS) * len({of(c) for c in grid})
    links = [c.link_bit_per_s for c in grid]
    assert [links[i] for i in range(1, len(links)) if links[i] != links[i - 1]] == list(LINKS[1:])  # each set once


def test_cells_are_put_together() -> None:
    rows = [
        {"model": "mixtral", "shape": vars(BenchLayerShape()), "link_bit_per_s": link, "auto": auto, "seconds": {"serial": [2.0] * 8, "all 2": all_2, "auto": [2.0] * 8}}
        for link, auto, all_2 in ((2e8, "tiles:parts=2", [1.0] * 8), (None, "tiles", [2.0, 1.5] * 4))
    ]  # fmt: skip
    result = cells_result(rows, [])
    assert [row["best"] for row in result["cells"]] == ["all 2", "serial"]
    assert result["worst_ratio"] == 2 and result["median_ratio"] == 1.5
    assert result["worst_to_least"] == 2 and result["serial_where_unshaped"] == result["unshaped"] == 1
    assert cells_table(result).row_count == 2


def test_the_grid_is_measured_in_parts(tmp_path: Path) -> None:
    assert sorted(n for i in (1, 2, 3) for n in part_of(f"{i}/3")) == list(range(len(cells())))
    for bad in ("0/3", "4/3", "x", "1", "1/0"):
        with pytest.raises(ValueError):
            part_of(bad)

    def result(numbers: list[int], serial_s: float) -> dict[str, Any]:
        rows = [
            {"model": c.model, "shape": asdict(c.shape), "link_bit_per_s": c.link_bit_per_s, "auto": "tiles", "seconds": {"serial": [serial_s] * 8, "all 2": [1.0] * 8, "auto": [1.0] * 8}}
            for c in (cells()[n] for n in numbers)
        ]  # fmt: skip
        return json.loads(json.dumps(cells_result(rows, [f"wrong {serial_s}"])))  # as it comes from a file

    both = joined(result([5, 0], 2.0), result([0, 3], 0.5))
    assert [row["shape"] for row in both["cells"]] == [asdict(cells()[n].shape) for n in (0, 3, 5)]
    assert [row["best"] for row in both["cells"]] == ["serial", "serial", "all 2"]  # measured twice: the later counts
    assert both["wrong"] == ["wrong 2.0", "wrong 0.5"] and cells_table(both).row_count == 3

    file = tmp_path / "cells.json"
    for text, error in (('{"cells": [{"model": "x"}]}', DataError), ("[]", DataError), ("{", DataError)):
        file.write_text(text)
        with pytest.raises(error, match="--json"):
            layer.main(["--cells", "--part", "2/3", "--json", str(file)])
        assert file.read_text() == text
    with pytest.raises(ConfigError, match="needs --cells"):
        layer.main(["--part", "1/3"])
    with pytest.raises(ConfigError, match="must be i/n"):
        layer.main(["--cells", "--part", "4/3", "--json", str(file)])


def test_the_result_of_a_layer() -> None:
    passes = {"forward": [1.0] * 4, "forward_backward": [3.0] * 4}
    times = {
        name: {key: [s * value for s in each] for key, each in passes.items()}
        for name, value in {"serial": 2.0, "coarse:2": 1.8, "coarse:4": 1.6, "auto": 1.25, layer.COMPUTE: 1.0, "communication": 1.0, "distinct": 0.8, **dict.fromkeys(layer.OURS_ALONE, 1.1)}.items()
    }  # fmt: skip
    found = {"link_bit_per_s": 1e9, "auto": "tiles:parts=2", "sent_bytes": {}, "wrong": [], "seconds": times}
    options = layer.LayerArgs(methods=("serial", "coarse:2", "coarse:4", "auto"), iterations=4)
    result = layer._result(options, found)
    forward = result["forward"]
    assert (
        forward["auto"] == "tiles:parts=2"
        and forward["speedup_vs_serial"] == forward["methods"]["auto"]["speedup_vs_serial"] == 1.6
    )
    assert (
        forward["hidden"] == pytest.approx(0.75)
        and forward["regret"]["best"] == "coarse:4"
        and forward["bound_s"] == 1.0
        and forward["comm_share"] == 0.5
    )
    assert forward["methods"]["coarse:2"]["speedup_vs_best_coarse"] == pytest.approx(1.6 / 1.8)
    assert result["forward_backward"]["compute_s"] == 3.0
    assert layer._table(result, "forward").row_count == 4


def test_methods_have_names() -> None:
    assert METHODS[: 1 + len(COARSE)] == ("serial", *COARSE) and METHODS[-1] == "auto"
    assert set(METHODS) == {"serial", *COARSE, *OURS, "auto"} and len(set(OURS.values())) == len(OURS)


def test_a_recipe_can_say_every_method_and_auto_has_every_schedule() -> None:
    assert not any(setting_problems(overlap_of(method)) for method in METHODS)
    schedules = {parse_overlap(overlap).schedule for overlap in OURS.values()}
    assert schedules <= {SERIAL, *CANDIDATES} == {SERIAL, *schedule_candidates(BenchLayerShape().hidden)}
    assert sum(schedule.blocks > 1 for schedule in schedules) == 3


def test_inside_nothing_is_sent_and_sizes_are_right() -> None:
    axis = Axis("ep", (0, 1), 0, SimpleNamespace())  # type: ignore[arg-type]
    comms = Inside(Collectives())
    x = torch.arange(6.0).view(3, 2)
    out = comms.all_to_all_rows(x, in_splits=(1, 2), out_splits=(4, 1), axis=axis)
    assert torch.equal(out, x[[0, 1, 2, 0, 1]])
    assert comms.start_all_to_all_rows(x, in_splits=(3, 0), out_splits=(0, 0), axis=axis).wait().shape == (0, 2)
    assert comms.all_to_all_rows(x[:0], in_splits=(0, 0), out_splits=(2, 0), axis=axis).shape == (2, 2)


def test_the_result_of_steps() -> None:
    options = step.StepArgs(overlap="coarse:2", same="tiles", steps=3)
    seconds = {"serial": [2.0, 2.2, 2.1], "coarse:2": [1.5, 1.4, 1.6], "tiles": [2.0] * 3}
    losses = {"serial": [3.0, 2.0, 1.0], "coarse:2": [3.0, 2.0, 1.0001], "tiles": [3.0, 2.0, 1.0001]}
    found = {"link_bit_per_s": 1e9, "alone_s": 1.05, "sent_bytes": 7, "seconds": seconds, "losses": losses}
    result = step.result_of(options, found)
    assert result["speedup_vs_serial"] == pytest.approx(1.4) and result["communication_share"] == pytest.approx(0.5)
    assert result["losses_equal"] and result["losses_close"]
    paired = dataclasses.replace(options, pairs=True, micro_batches=2)
    seconds[step.PAIRED], losses[step.PAIRED] = [1.0, 1.1, 0.9], list(losses["tiles"])
    with_pairs = step.result_of(paired, found)
    assert with_pairs["paired_speedup"] == pytest.approx(2.1) and with_pairs["losses_equal"]
    losses[step.PAIRED][0] = math.nextafter(3.0, 4)
    assert not step.result_of(paired, found)["losses_equal"] and step.result_of(options, found)["losses_equal"]
    losses["coarse:2"][1] = math.nextafter(2.0, 3)
    assert not step.result_of(options, found)["losses_equal"]
    losses["coarse:2"][2] = 1.1
    assert not step.result_of(options, found)["losses_close"]


# ---- options -----------------------------------------------------------------------------------------------------------------------


def test_options_that_make_no_sense_are_all_named() -> None:
    words = ["--shape.tokens", "0", "--shape.experts", "7", "--shape.top-k", "9", "--shape.dtype", "int8", "--share", "0", "--iterations", "1",
             "--methods", "best"]  # fmt: skip
    with pytest.raises(ConfigError) as info:
        layer.main(words)
    for part in ("--shape.tokens = 0", "--shape.experts = 7: must be even", "--shape.top-k = 9", "--shape.dtype = 'int8'", "--share = 0",
                 "--iterations = 1", "--methods = ['best']"):  # fmt: skip
        assert part in str(info.value)
    with pytest.raises(ConfigError, match="standard deviation"):
        layer.main(["--shape.load", "uneven"])
    with pytest.raises(ConfigError) as info:
        step.main(["--steps", "1", "--share", "1.5", "--batch", "0", "--layers", "0"])
    for part in ("--steps = 1", "--share = 1.5", "--batch = 0", "--layers = 0"):
        assert part in str(info.value)
    with pytest.raises(ConfigError) as info:
        step.main(["--pairs"])
    assert "--micro-batches = 1" in str(info.value)
    with pytest.raises(ConfigError) as info:
        step.main(["--micro-batches", "3"])
    assert "--batch = 8: must be a multiple of the 3 micro-batches; use 6" in str(info.value)


# ---- small runs on emulated hosts; their figures mean nothing ------------------------------------------------------------------------


@pytest.mark.testbed
def test_a_small_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulated_hosts()
    file = tmp_path / "result.json"
    methods = [
        name for name in METHODS if name in ("serial", "coarse:2", "coarse:8", "tiles", "dedup", "all 2", "auto")
    ]
    words = [
        "--shape.tokens",
        "64",
        "--shape.hidden",
        "64",
        "--shape.ffn",
        "64",
        "--iterations",
        "2",
        "--methods",
        *methods,
    ]
    assert layer.main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["wrong"] == [] and result["link_bit_per_s"] > 1e5
    for direction in ("forward", "forward_backward"):
        of = result[direction]
        assert set(of["methods"]) == set(methods)
        assert of["bound_s"] > 0 and parse_overlap(of["auto"]).kind == "tiles" and of["regret"]["best"] in methods
        for key in ("hidden", "hidden_of_comm", "comm_share", "speedup_vs_serial", "speedup_vs_best_coarse", "time_over_bound"):  # fmt: skip
            assert math.isfinite(of[key])
    sent = result["sent_bytes"]
    more = {d: sent["coarse:8"][d] - sent["coarse:2"][d] for d in ("forward", "forward_backward")}
    assert more == dict.fromkeys(more, 6 * 8 * 8)  # no row twice: int64 counts of eight experts, of six more chunks
    assert 2 * 64 * 64 * 4 < sent["serial"]["forward"] < 1.05 * 2 * 64 * 64 * 4 + 1024
    assert "coarse:8" in capsys.readouterr().out


@pytest.mark.testbed
def test_a_few_small_steps(tmp_path: Path) -> None:
    emulated_hosts()
    file = tmp_path / "result.json"
    words = ["--overlap", "serial", "--same", "serial", "--steps", "2", "--layers", "1", "--batch", "1"]
    assert step.main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["losses_equal"] and len(result["losses"]["serial"]) == 2 and result["speedup_vs_serial"] == 1

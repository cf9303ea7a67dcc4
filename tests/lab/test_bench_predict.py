"""`phalanx bench predict`: plans, pacing, links of a testbed, and the report; then two plans on real ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.calibration import _groups, _spans
from phalanx.cli.main import main
from phalanx.core.errors import ConfigError
from phalanx.plan.mapping.stage_foldings import StagedFolding
from phalanx.runtime.comm.pacing import Pace
from phalanx.simulate.calibration.fit import TimedCollective, with_links
from phalanx.simulate.hardware.clusters import Hardware, load_hardware, parse_hardware
from phalanx.simulate.hardware.collectives import GroupSpan, Network
from phalanx.simulate.program.cost import ProgramOracle, kind_of
from phalanx_lab.bench.predict import fitted_costs as predict_laws, real as predict_real
from phalanx_lab.bench.predict.command import PredictArgs, kendall_tau, plans_of, report_of, tie_of
from phalanx_lab.bench.predict.plans import FLOOR_S, NOT_TOLD, PLANS, WORLD, Glue, StepPlan, glued, paced_s, predicted_s
from phalanx_lab.bench.predict.spans import recorded_step


def machine(**changes: float) -> Hardware:
    return dataclasses.replace(load_hardware("h100"), ranks_per_host=WORLD, **changes)  # type: ignore[arg-type]


# ---- plans ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_plans_of_the_benchmark() -> None:
    assert len(PLANS) >= 20 and len({plan.name for plan in PLANS}) == len(PLANS)
    made = [plan.programs() for plan in PLANS]
    assert len({programs[0].hash for programs in made}) >= len(PLANS) - 2  # fine is tiles
    assert sum(isinstance(plan.folding, StagedFolding) for plan in PLANS) >= 3
    assert sum(plan.dispatch.overlap in ("tiles", "fine") for plan in PLANS) >= 3
    for program in itertools.chain(*made):
        work = [op for op in program.ops if op.kind == "compute"]
        assert all((paced_s(op) > 0) == (kind_of(op.id) not in NOT_TOLD) for op in work)


@pytest.mark.unit
def test_parts_hold_every_plan_once() -> None:
    parts = [plans_of(PredictArgs(part=f"{i}/3")) for i in (1, 2, 3)]
    assert sorted(plan.name for part in parts for plan in part) == sorted(plan.name for plan in PLANS)
    assert [plan.name for plan in plans_of(PredictArgs(only=("ep4", "dp4")))] == ["dp4", "ep4"]


@pytest.mark.unit
def test_slower_links_and_messages_that_nothing_hides_cost_more() -> None:
    plans = {plan.name: plan for plan in PLANS}
    fast, slow = machine(), machine(inside_latency_s=5e-3)
    for name in ("ep4", "cp4 ep2 ring", "pp4 1f1b", "ep4 coarse:2", "ep4 tiles", "stages tp2/dp2.ep2"):
        assert predicted_s(plans[name], slow) > predicted_s(plans[name], fast), name


@pytest.mark.unit
def test_glue_counts_where_ranks_meet() -> None:
    plan = next(plan for plan in PLANS if plan.name == "ep4")
    program = plan.programs()[0]
    found = glued(program, Glue(1.0, 10.0))
    assert found["mb0.L0.fwd.dispatch.rows"] == 1.0 and found["mb0.L0.fwd.dispatch.weights"] == 10.0
    assert not any(op.id in found for op in program.ops if op.kind != "collective")
    hardware = machine()
    assert predicted_s(plan, hardware, glue=Glue(1e-3, 0.0)) > predicted_s(plan, hardware) + 0.02


# ---- pacing -----------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to; sleeping takes a bit longer than it should."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 1e-4

    def pace(self) -> Pace:
        return Pace(lambda op_id: 0.01, now=lambda: self.now_s, sleep=self.sleep)


@pytest.mark.unit
def test_being_woken_late_does_not_add_up() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.hold("a", clock.now_s)
    for _ in range(9):
        clock.now_s += 0.002  # work that nobody tells of is part of the operation behind it
        pace.hold("a", clock.now_s)
    assert pace.free_s == pytest.approx(100.1) and (pace.recorded, pace.late) == (10, 0)
    clock.now_s = 100.15
    pace.hold("a", clock.now_s)
    assert pace.late == 1 and pace.late_s == pytest.approx(0.04) and pace.free_s == pytest.approx(100.15)


@pytest.mark.unit
def test_an_operation_begins_behind_the_last_wait_and_its_parts_add_up() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.waited(100.0, since_s=99.0)
    pace.hold_part("a", 0.5)
    assert pace.free_s == pytest.approx(100.005)
    pace.waited(100.0055, since_s=100.0054)  # it was there already
    assert pace.free_s == pytest.approx(100.005)
    pace.waited(100.012, since_s=100.006)  # the rest of it waited for a message
    pace.hold("a", 100.0)
    assert pace.free_s == pytest.approx(100.017) and (pace.recorded, pace.late) == (1, 0)
    pace.waited(100.0171, since_s=100.01705, held=True)
    assert pace.free_s == pytest.approx(100.0171)


# ---- links ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_groups_whose_links_are_timed() -> None:
    assert _spans(4, 4) == [(2, 1), (4, 1)] and _groups(4, 4, 2, 1) == [(0, 1), (2, 3)]
    assert _spans(4, 1) == [(1, 2), (1, 4)] and _groups(4, 1, 1, 2) == [(0, 1), (2, 3)]
    assert (1, 2) in _spans(4, 2) and _groups(4, 2, 1, 2) == [(0, 2), (1, 3)] and _groups(4, 2, 2, 2) == [(0, 1, 2, 3)]


@pytest.mark.unit
def test_a_table_between_hosts_comes_before_the_formula() -> None:
    rows = [
        TimedCollective(what="all_to_all", ranks=4, hosts=4, num_bytes=size, seconds=seconds)
        for size, seconds in ((1e3, 2e-3), (1e6, 0.2))
    ]
    network = Network(with_links(machine(), rows, ranks_per_host=1))
    assert network.all_to_all(1e3, GroupSpan(1, 4)) == pytest.approx(2e-3)
    assert 2e-3 < network.all_to_all(1e5, GroupSpan(1, 4)) < 0.2 < network.all_to_all(1e7, GroupSpan(1, 4))
    assert network.all_to_all(2e7, GroupSpan(1, 4)) > 1.5 * network.all_to_all(1e7, GroupSpan(1, 4))
    with pytest.raises(ConfigError, match="rows of two ranks"):
        with_links(machine(), [], ranks_per_host=1)


@pytest.mark.unit
@pytest.mark.parametrize(("what", "moved"), [("send", 1e6), ("all_to_all", 5e5), ("all_reduce", 1e6)])
def test_the_rate_where_tables_end_counts_the_bytes_that_leave_a_rank(what: str, moved: float) -> None:
    link = TimedCollective(what=what, ranks=2, hosts=2, num_bytes=1e6, seconds=0.5)
    assert with_links(machine(), [link], ranks_per_host=1).between_bytes_per_s == pytest.approx(moved / 0.5)


@pytest.mark.unit
def test_tables_of_a_cluster_file() -> None:
    names = ("ranks_per_host", "bf16_flops_per_s", "memory_bytes", "memory_bytes_per_s", "sms", "gemm_efficiency",
             "memory_efficiency", "kernel_s", "launch_s")  # fmt: skip
    table: dict[str, object] = {name: {"value": 1, "source": "here"} for name in names}
    table["attention"] = {"forward": {"value": [[1, 1]], "source": "x"}, "backward": {"value": 1, "source": "x"}}
    one = {"value": 1, "source": "x"}
    table["inside"] = {"bytes_per_s": {"value": [[2, 1]], "source": "x"}, "latency_s": one, "half_bytes": one}
    table["between"] = {"bytes_per_s": one, "efficiency": one, "latency_s": one}
    table["measured"] = {"between": [["send", 2, 2, 100, 0.5]]}
    found = parse_hardware(json.dumps(table), name="x", where="x.json")
    assert found.measured_between == (("send", 2, 2, 100.0, 0.5),)
    assert Network(found).send(100.0, between=True) == pytest.approx(0.5)
    table["measured"] = {"between": [["send", 2, 100, 0.5]]}
    with pytest.raises(ConfigError, match=r"measured\.between"):
        parse_hardware(json.dumps(table), name="x", where="x.json")


# ---- report -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_order_of_plans() -> None:
    assert kendall_tau([1, 2, 3], [2, 3, 5]) == 1.0 and kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall_tau([1.0], [1.0]) == 1.0


@pytest.mark.unit
def test_another_plan_than_was_predicted_misses_the_bars() -> None:
    row = {"plan": "a", "predicted_s": 1.0, "measured_s": 1.0, "error": 0.0}
    same, other = ({"predicted": "x", "measured": hash} for hash in ("x", "y"))
    assert report_of([{**row, "plan_hash": same}])["met"] and not report_of([{**row, "plan_hash": other}])["met"]
    far = report_of([{**row, "plan_hash": same, "error": -0.2}])
    assert not far["met"] and far["worst"] == 0.2


@pytest.mark.unit
def test_a_collective_lasts_from_when_the_last_has_posted_it() -> None:
    message = {"op_id": "vote", "op": "all_reduce", "axis": "world", "sent_bytes": 8, "waited_s": 0.0, "aside": False,
               "ranks": (0, 1), "sends_to": (), "receives_from": ()}  # fmt: skip
    told = [
        {"begin_s": begin, "end_s": 5.0, "work": [("norm", begin, begin + 1)],
         "messages": [{**message, "begin_s": begin + 1, "end_s": 4.0}]}
        for begin in (0.0, 1.0)
    ]  # fmt: skip
    found = recorded_step(told)
    assert found[0, "vote"].seconds == found[1, "vote"].seconds == 2.0 and found[1, "norm"].begin_s == 0.0


@pytest.mark.unit
def test_options_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "predict", "--steps", "0", "--part", "3/2", "--only", "ep5", "--rate", "9"]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("--steps", "--part", "--only", "--rate", "add --testbed"))
    assert main(["bench", "predict", "--only", "ep4", "--part", "1/2"]) == 2
    assert main(["bench", "predict", "--real", "--part", "30/35"]) == 2
    assert capsys.readouterr().err.count("has none of the plans") == 2


# ---- real computing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_a_law_says_as_much_in_all_as_was_recorded() -> None:
    law = predict_laws.law_through([((1.0, 4.0, 1.0), 6.0), ((2.0, 4.0, 1.0), 8.0), ((2.0, 8.0, 1.0), 12.0)])
    assert law.per_unit_s == pytest.approx((2.0, 1.0, 0.0), abs=1e-6)
    points = [((float(x), 0.0, 1.0), s) for x, s in ((1, 1.0), (1, 9.0), (2, 2.0), (4, 30.0))]
    noisy = predict_laws.law_through(points)
    assert sum(noisy.seconds(amounts) for amounts, _ in points) == pytest.approx(42.0)
    assert min(noisy.per_unit_s) >= 0.0
    assert predict_laws.law_through([((1.0, 1.0, 1.0), 0.0)]).seconds((9.0, 9.0, 1.0)) == 0.0


@pytest.mark.unit
def test_a_step_is_divided_without_a_rest() -> None:
    message = {"op_id": "vote", "begin_s": 6.0, "end_s": 8.0, "waited_s": 2.0}
    told = {"begin_s": 0.0, "end_s": 11.0, "work": [("a", 1.0, 3.0), ("b", 3.5, 5.0), ("c", 8.5, 9.0)],
            "messages": [message]}  # fmt: skip
    found = predict_laws.spent(told)
    assert found == {"begin": 1.0, "a": 2.0, "b": 2.0, "vote": 1.0, "c": 1.0, "end": 2.0}
    assert sum(found.values()) + message["waited_s"] == 11.0


@pytest.mark.unit
def test_collectives_of_a_step_lie_between_those_that_were_recorded() -> None:
    links = predict_laws.Links(((1e-3, 4.0), (1e-1, 2.0)))
    assert links.seconds(1e-4) == pytest.approx(4e-4) and links.seconds(1.0) == pytest.approx(2.0)
    assert links.seconds(1e-2) == pytest.approx(3e-2)


@pytest.mark.unit
def test_what_was_learned_from_recorded_steps_predicts_the_others() -> None:
    """Steps that took exactly so long for each unit of work are learned as that: those that were recorded come out as they were, and no other plan has work of an unknown kind."""
    plans = predict_real.LEARNED
    told = [_step_of(plan) for plan in plans]
    hardware = dataclasses.replace(load_hardware("h100"), ranks_per_host=2)
    oracle = ProgramOracle(hardware=hardware, precision="fp32", seq_len=128)
    learned = predict_laws.learn(plans, told, oracle)
    assert learned.work["bwd.attention.out"].per_unit_s == pytest.approx((1e-9, 1e-9, 1e-3))
    for plan, found in zip(plans, told, strict=True):
        seconds = predict_real.RealPrediction(plan=plan, oracle=oracle, learned=learned).timeline().seconds
        assert seconds == pytest.approx(found["steps"][0][0]["end_s"], rel=0.05), plan.name
    for plan in predict_real.PLANS[::3]:
        timeline = predict_real.RealPrediction(plan=plan, oracle=oracle, learned=learned).timeline()
        ids = {s.op.id for s in timeline.spans[0] if s.cost.origin == "formula" and s.op.kind == "compute"}
        assert not ids, plan.name
    assert not {p.name for p in predict_real.PLANS} & {p.name for p in plans}
    assert len(predict_real.PLANS) >= 20


def _step_of(plan: StepPlan, *, slower: float = 1.0) -> dict[str, Any]:
    """One step of all ranks, in which work takes 1 ms and 1 ns for each unit, a collective 0.3 ms, what comes before and behind all of it 1 and 2 ms."""
    step = []
    for program in plan.programs():
        at, work, messages = 1e-3 * slower, [], list[dict[str, Any]]()
        for op in program.ops:
            if paced_s(op):
                seconds = slower * (1e-3 + sum(predict_laws.amounts_of(op)[:2]) * 1e-9)
                work.append((op.id, at, at := at + seconds))
            elif op.kind == "collective":
                messages.append(
                    {"op_id": op.id, "op": op.collective, "axis": op.axis, "sent_bytes": op.sent_bytes, "begin_s": at,
                     "end_s": at + 3e-4 * slower, "waited_s": 3e-4 * slower, "aside": False, "sends_to": (), "receives_from": (),
                     "ranks": plan.folding.group_of(program.rank, op.axis)}
                )  # fmt: skip
                at += 3e-4 * slower
        step.append({"begin_s": 0.0, "end_s": at + 2e-3 * slower, "work": work, "messages": messages})
    return {"steps": [step], "probes": [0.02 * slower] * 2}


@pytest.mark.unit
def test_a_slow_minute_of_the_machine_is_no_part_of_what_is_learned() -> None:
    """The same steps, some of them while the processors are half as fast: the costs are the same."""
    plan = predict_real.LEARNED[2]
    oracle = ProgramOracle(hardware=dataclasses.replace(load_hardware("h100"), ranks_per_host=2), seq_len=128)
    usual, mixed = (
        predict_laws.learn([plan] * 3, [_step_of(plan, slower=s) for s in each], oracle)
        for each in ((1.0, 1.0, 1.0), (1.0, 1.0, 2.0))
    )
    for kind, law in usual.work.items():
        assert mixed.work[kind].per_unit_s == pytest.approx(law.per_unit_s, rel=1e-6), kind


@pytest.mark.unit
def test_plans_that_differ_by_less_than_from_themselves_are_ties() -> None:
    assert tie_of([(1.0, 1.0), (2.0, 2.1), (3.0, 3.6)]) == pytest.approx(2 * 1.4826 * math.log(1.05) / math.sqrt(2))
    assert tie_of([(1.0,), (2.0,)]) == 0.0
    assert kendall_tau([1.0, 2.0, 1.9], [1.0, 2.0, 2.05]) == pytest.approx(1 / 3)
    assert kendall_tau([1.0, 2.0, 1.9], [1.0, 2.0, 2.05], tie=0.1) == 1.0


# ---- real ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks
def test_two_plans_beside_their_predictions(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert main(["bench", "predict", "--steps", "1", "--only", "dp4", "ep4 tiles", "--json", str(file)]) in (0, 1)
    found = json.loads(file.read_text())
    assert [row["plan"] for row in found["rows"]] == ["dp4", "ep4 tiles"]
    for row in found["rows"]:
        assert row["plan_hash"]["predicted"] == row["plan_hash"]["measured"] and row["begin_correlation"] > 0.9
        assert row["measured_s"] > 100 * FLOOR_S
